#!/usr/bin/env bash
# The name that older guides use for check_npu.py --processes, which ends nothing by itself.
exec python3 "$(dirname "$0")/check_npu.py" --processes "$@"
