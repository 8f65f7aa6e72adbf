#!/usr/bin/env bash
# Tests whether reinforcement learning teaches mental arithmetic, and whether the rewards cause the gain: three seeds and
# three controls with shuffled rewards start from the newest SFT checkpoint. The exit code is 0 if the mean gain is at
# least 5 points and at least 3 standard errors, and the controls stay within 2 points of zero. Typed again after a stop,
# it resumes.
#   bash runs/rl_control.sh
#   bash runs/rl_control.sh --jobs 3  three runs at a time with one thread each (default: half the cores)
#   bash runs/rl_control.sh --quick   one short run of each kind, to see that it works

# 检验强化学习能否教会心算，以及提升是否来自奖励：从最新的监督微调检查点开始，运行三个随机种子，以及三个打乱奖励的对照。
# 平均提升不少于 5 个百分点且不少于 3 个标准误，并且对照的变化在 2 个百分点以内时，退出码是 0。停止之后再次输入，会继续。
#   bash runs/rl_control.sh
#   bash runs/rl_control.sh --jobs 3  同时运行三个，各用一个线程（默认：核数的一半）
#   bash runs/rl_control.sh --quick   每种只短短运行一次，看看是否一切正常

set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source runs/words.sh
case ${1:-} in -h | --help) show_help runs/rl_control.sh ;; esac
source ./setup_env.sh
# shellcheck disable=SC2119  # setup_env must not get the flags of this script
setup_env
export OMP_WAIT_POLICY=PASSIVE
exec python -m bench.rl.control "$@"
