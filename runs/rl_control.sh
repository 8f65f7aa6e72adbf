#!/usr/bin/env bash
# Checks that reinforcement learning teaches mental arithmetic, and that the rewards do it: trains three seeds, and three
# controls with shuffled rewards, from the newest SFT checkpoint. The exit code is 0 if the mean gain is at least 5 points
# and 3 standard errors, and the controls stay within 2 points of zero. The same command resumes a stopped check.
#   bash runs/rl_control.sh
#   bash runs/rl_control.sh --jobs 3  three runs at the same time, with one thread each; default: half the cores
#   bash runs/rl_control.sh --quick   one short run of each, only to show that it works
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source setup_env.sh
# shellcheck disable=SC2119  # setup_env takes no flags here
setup_env
export OMP_WAIT_POLICY=PASSIVE
exec python -m bench.rl_control "$@"
