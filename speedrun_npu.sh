#!/usr/bin/env bash
# Runs the whole pipeline on Ascend NPUs: sets up the host, then trains the published d12, 262,144 tokens per step.
#   bash speedrun_npu.sh                                    FineWeb-Edu, 12 layers, on 1, 2, 4, 8 or 16 cards
#   bash speedrun_npu.sh --preset gpt2 --plan               hours, memory and disk of 24 layers on ClimbMix, for 8 to 16 cards
#   bash speedrun_npu.sh --data tinyworld                   the embedded corpus; needs no network
#   bash speedrun_npu.sh --data tinyworld --preset smoke    every stage in minutes, to see that everything works
# Choose cards with ASCEND_RT_VISIBLE_DEVICES=0,1 or NPROC_PER_NODE=2, and a mirror for data with HF_ENDPOINT. The flags
# are those of speedrun.sh. You can stop the command at any moment: typed again, it resumes. On a host without an NPU it
# runs speedrun.sh.

# 在昇腾 NPU 上跑完整个流程：先准备好主机，再训练公布的 d12 配置，每步 262,144 个词元。
#   bash speedrun_npu.sh                                    FineWeb-Edu，12 层，用 1、2、4、8 或 16 张卡
#   bash speedrun_npu.sh --preset gpt2 --plan               在 ClimbMix 上训练 24 层要用的小时、内存和磁盘，8 到 16 张卡
#   bash speedrun_npu.sh --data tinyworld                   内置语料，不需要网络
#   bash speedrun_npu.sh --data tinyworld --preset smoke    几分钟跑遍每个阶段，看看是否一切正常
# 用 ASCEND_RT_VISIBLE_DEVICES=0,1 或 NPROC_PER_NODE=2 选择用哪些卡，用 HF_ENDPOINT 指定数据的镜像站。选项与
# speedrun.sh 相同。随时可以停止：再次输入同一条命令就会继续。没有 NPU 的主机上改为运行 speedrun.sh。

set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
source runs/words.sh

flags=("$@")
preset='' data=''
while [ $# -gt 0 ]; do
    case $1 in
    --preset=* | --data=*) printf -v "$(cut -c 3- <<<"${1%%=*}")" %s "${1#*=}" ;;
    --preset | --data) printf -v "${1#--}" %s "${2:-}" ;;
    -h | --help) show_help speedrun_npu.sh ;;
    esac
    shift
done

run_speedrun() { # REASON, 中文: run speedrun.sh on another device
    if ! in_chinese; then echo "speedrun_npu: $1; running speedrun.sh instead"; fi
    if in_chinese || no_language; then echo "speedrun_npu：$2；改为运行 speedrun.sh"; fi
    export speedrun_npu=1 # so that speedrun.sh does not come back
    exec bash speedrun.sh "${flags[@]}"
}

if [ -n "${NANOCHAT_DEVICE:-}" ] && [ "$NANOCHAT_DEVICE" != npu ]; then
    run_speedrun "NANOCHAT_DEVICE=$NANOCHAT_DEVICE" "NANOCHAT_DEVICE=$NANOCHAT_DEVICE"
fi
code=0
# shellcheck source=setup_ascend.sh
source ./setup_ascend.sh || code=$?
if [ $code -eq 3 ]; then run_speedrun "no Ascend NPU was found, so a GPU or this CPU trains" "没有找到昇腾 NPU，将使用 GPU 或 CPU"; fi
if [ $code -ne 0 ]; then
    # A server with NPUs must not train on its CPU for weeks because of a fault that one command fixes.
    tell "error: the NPUs of this host cannot be used yet; the lines above say why. Next: python check_npu.py" "错误：本机的 NPU 还不能用，原因见上文。下一步：python check_npu.py" >&2
    tell "error: to train without NPUs: NANOCHAT_DEVICE=cpu bash speedrun_npu.sh" "错误：不用 NPU 训练：NANOCHAT_DEVICE=cpu bash speedrun_npu.sh" >&2
    exit 1
fi
if ! compgen -G "${ASCEND_ROOT_PREFIX:-}/dev/davinci[0-9]*" >/dev/null; then
    run_speedrun "CANN is installed, but no card is visible" "装了 CANN，但看不到 NPU 卡"
fi
export NANOCHAT_DEVICE=npu
if [ -z "$preset" ] && [ "$data" != tinyworld ]; then flags+=(--preset d12); fi
exec bash speedrun.sh "${flags[@]}"
