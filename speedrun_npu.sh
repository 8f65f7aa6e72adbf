#!/usr/bin/env bash
# The whole pipeline on Ascend NPUs: sets the host up, then trains d12 as published, 262,144 tokens a step.
#   bash speedrun_npu.sh                                    FineWeb-Edu, 12 layers, on 1, 2, 4, 8 or 16 cards
#   bash speedrun_npu.sh --data tinyworld                   the embedded corpus, also where there is no network
#   bash speedrun_npu.sh --data tinyworld --preset smoke    every stage in minutes, to see that it works
# Cards: ASCEND_RT_VISIBLE_DEVICES=0,1 or NPROC_PER_NODE=2. A mirror for data: HF_ENDPOINT. All flags are speedrun.sh's.
# Stopped at any moment and typed again, it goes on where it was. On a host without NPU it goes on as speedrun.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

flags=("$@")
preset='' data=''
while [ $# -gt 0 ]; do
    case $1 in
    --preset=* | --data=*) printf -v "$(cut -c 3- <<<"${1%%=*}")" %s "${1#*=}" ;;
    --preset | --data) printf -v "${1#--}" %s "${2:-}" ;;
    -h | --help)
        sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    esac
    shift
done

go_on() { # WORDS, 中文: as speedrun.sh on what else there is
    echo "speedrun_npu: $1; going on as speedrun.sh"
    echo "speedrun_npu：$2；改为运行 speedrun.sh"
    exec bash speedrun.sh "${flags[@]}"
}

if [ -n "${NANOCHAT_DEVICE:-}" ] && [ "$NANOCHAT_DEVICE" != npu ]; then
    go_on "NANOCHAT_DEVICE=$NANOCHAT_DEVICE" "NANOCHAT_DEVICE=$NANOCHAT_DEVICE"
fi
code=0
# shellcheck source=setup_ascend.sh
source ./setup_ascend.sh || code=$?
if [ $code -eq 3 ]; then go_on "no Ascend NPU was found, so a GPU or this CPU trains" "没有找到昇腾 NPU，将使用 GPU 或 CPU"; fi
if [ $code -ne 0 ]; then
    # A server with NPUs must not train on its CPU for weeks because of something that one command repairs.
    echo "error: the NPUs of this host cannot be used yet; the lines above say why. Next: python check_npu.py" >&2
    echo "error: to train without them all the same: NANOCHAT_DEVICE=cpu bash speedrun_npu.sh" >&2
    echo "错误：本机的 NPU 还不能使用，原因见上文。下一步：python check_npu.py；不用 NPU 训练：NANOCHAT_DEVICE=cpu" >&2
    exit 1
fi
if ! compgen -G "${ASCEND_ROOT_PREFIX:-}/dev/davinci[0-9]*" >/dev/null; then
    go_on "CANN is there, but no card is visible" "已安装 CANN，但看不到 NPU 卡"
fi
export NANOCHAT_DEVICE=npu
if [ -z "$preset" ] && [ "$data" != tinyworld ]; then flags+=(--preset d12); fi
exec bash speedrun.sh "${flags[@]}"
