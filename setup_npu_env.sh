# shellcheck shell=bash
# The name that older guides use for setup_ascend.sh: source setup_npu_env.sh
. "$(dirname -- "${BASH_SOURCE:-$0}")/setup_ascend.sh"
