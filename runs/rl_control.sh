#!/usr/bin/env bash
# Whether reinforcement learning teaches sums in the head, and whether it is the rewards that do: three seeds and three
# controls with shuffled rewards, from the newest SFT checkpoint. Ends with 0 if the mean gain is at least 5 points and
# 3 standard errors and the controls stay within 2 points of zero. Stopped and typed again, it goes on.
#   bash runs/rl_control.sh
#   bash runs/rl_control.sh --jobs 3  three runs at a time, of one thread each; default half the cores
#   bash runs/rl_control.sh --quick   one short run of each, to see that it works
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source setup_env.sh
# shellcheck disable=SC2119  # its flags are not ours
setup_env
export OMP_WAIT_POLICY=PASSIVE
exec python -m bench.rl_control "$@"
