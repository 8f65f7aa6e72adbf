#!/usr/bin/env bash
# Tests whether reinforcement learning teaches mental arithmetic, and whether the rewards cause the gain: three seeds and
# three controls with shuffled rewards start from the newest SFT checkpoint. The exit code is 0 if the mean gain is at
# least 5 points and at least 3 standard errors, and the controls stay within 2 points of zero. Typed again after a stop,
# it resumes.
#   bash runs/rl_control.sh
#   bash runs/rl_control.sh --jobs 3  three runs at a time with one thread each (default: half the cores)
#   bash runs/rl_control.sh --quick   one short run of each kind, to see that it works
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source setup_env.sh
# shellcheck disable=SC2119  # setup_env must not get the flags of this script
setup_env
export OMP_WAIT_POLICY=PASSIVE
exec python -m bench.rl.control "$@"
