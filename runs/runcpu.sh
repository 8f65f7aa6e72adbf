#!/usr/bin/env bash
# Trains a small model on the CPU of a laptop, on pages of FineWeb-Edu and on TinyWorld, which teaches the form of a chat.
#   bash runs/runcpu.sh                                          4 layers of 256 channels, 12 million tokens
#   bash runs/runcpu.sh --data fineweb-zh:0.5,tinyworld:0.5      Chinese pages instead
#   bash runs/runcpu.sh --steps 4000                             longer: 8,192 tokens a step
#   bash runs/runcpu.sh --plan                                   only says what the run needs
#   bash runs/runcpu.sh --preset tiny                            every stage in minutes, on TinyWorld, to see that it works
# Typed again after a stop, it resumes. For TinyWorld alone, type bash speedrun.sh.

# 在笔记本电脑的 CPU 上训练一个小模型，语料是 FineWeb-Edu 的网页和 TinyWorld；后者教它聊天的格式。
#   bash runs/runcpu.sh                                          4 层、256 通道，1,200 万个词元
#   bash runs/runcpu.sh --data fineweb-zh:0.5,tinyworld:0.5      改用中文网页
#   bash runs/runcpu.sh --steps 4000                             训练得更久：每步 8,192 个词元
#   bash runs/runcpu.sh --plan                                   只说明这次训练要用多少资源
#   bash runs/runcpu.sh --preset tiny                            在 TinyWorld 上几分钟跑遍每个阶段，看看是否一切正常
# 停止之后再次输入，会继续。只用 TinyWorld 时，请输入 bash speedrun.sh。

set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source runs/common.sh

preset=full data='' steps='' shards='' from=hub plan=''
while [ $# -gt 0 ]; do
    case $1 in
    --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    --preset | --data | --steps | --shards | --from) flag "${1#--}" "${2-}" && shift 2 ;;
    --plan) plan=yes && shift ;;
    -h | --help) show_help runs/runcpu.sh ;;
    *)
        tell "error: runs/runcpu.sh takes --preset full|tiny, --data, --steps, --shards, --from and --plan, got $1" "错误：runs/runcpu.sh 的选项有 --preset full|tiny、--data、--steps、--shards、--from 和 --plan，得到的是 $1" >&2
        exit 2
        ;;
    esac
done
tag=cpu vocabulary=8192 batch=8192 few=()
size=(--depth=4 --model_dim=256 --head_dim=64 --max_seq_len=512)
sft=(--target_examples_per_step=16 --device_batch_size=16 --init_lr_frac=0.5 --num_iterations=320)
case $preset in
full) : "${data:=fineweb:0.5,tinyworld:0.5}" "${steps:=1500}" "${shards:=1}" ;;
tiny)
    refuse_flags tiny data steps shards
    data=tinyworld shards=0 tag=cpu-tiny vocabulary=1024 batch=2048 steps=20
    size=(--depth=2 --model_dim=64 --head_dim=32 --max_seq_len=256)
    few=(--no_compile)
    sft=(--target_examples_per_step=8 --num_iterations=10)
    ;;
*)
    tell "error: --preset must be full or tiny, got $preset" "错误：--preset 必须是 full 或 tiny，得到的是 $preset" >&2
    exit 2
    ;;
esac
if ! [[ $steps =~ ^[1-9][0-9]*$ ]]; then
    tell "error: --steps must be a number above 0, got $steps" "错误：--steps 必须大于 0，得到的是 $steps" >&2
    exit 2
fi

export NANOCHAT_DEVICE=cpu
prepare
choose_matmul
devices=1 # so small a model gains nothing from more processes
cores=$(python -c 'from nanochat.data.limits import cores; print(cores())')
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 4 ? 4 : cores))}
echo
tell "== what the run needs: $data, files in $base" "== 这次训练需要的资源：$data，文件放在 $base"
python -m scripts.preflight --data "$data" --shards "$shards" --from "$from" "${size[@]}" --vocab_size "$vocabulary" \
    --tokens $((steps * batch)) --conversations tinyworld
if [ -n "$plan" ]; then exit 0; fi
python -m nanochat.report begin --key "cpu:$tag:$data" # drops the costs of earlier runs

fetch "$data" "$shards" "$from"
stage tok_train python -m scripts.tok_train --data "$data" --vocab_size "$vocabulary"
train base_train scripts.base_train --data "$data" --model_tag $tag "${size[@]}" --window_pattern=L \
    --total_batch_size=$batch --num_iterations="$steps" "${few[@]}" "${matmul_flags[@]}"
train base_loss scripts.base_loss --model_tag $tag --once
train chat_sft scripts.chat_sft --source base --model_tag $tag --data tinyworld "${sft[@]}" "${few[@]}" "${matmul_flags[@]}"
python -m nanochat.report generate
python -m nanochat.report show
tell "Chat with it:  $(activation) && python -m scripts.chat_cli" "和它聊天：  $(activation) && python -m scripts.chat_cli"
