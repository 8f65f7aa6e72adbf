#!/usr/bin/env bash
# Pretrains 12 layers on FineWeb-Edu: 5,000 steps of 262,144 tokens (1.3 billion), on all cards or on NPROC_PER_NODE.
# Typed again after a stop, it resumes. Next come mid_train, chat_sft and chat_rl with --model_tag=fineweb_base_d12.
#   bash runs/train_with_fineweb.sh
#   bash runs/train_with_fineweb.sh --num_iterations=10000

# 在 FineWeb-Edu 上预训练 12 层：5,000 步，每步 262,144 个词元（共 13 亿），用全部的卡，或 NPROC_PER_NODE 张卡。
# 停止之后再次输入，会继续。接下来是 mid_train、chat_sft 和 chat_rl，都加上 --model_tag=fineweb_base_d12。
#   bash runs/train_with_fineweb.sh
#   bash runs/train_with_fineweb.sh --num_iterations=10000

set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source runs/common.sh
case ${1:-} in -h | --help) show_help runs/train_with_fineweb.sh ;; esac

flags=("$@")
set -- # setup_ascend.sh must not see these flags
prepare
# 5,000 steps need 27 shards of about 50 million tokens. More steps repeat the shards.
python -m nanochat.dataset -n 32
python -m scripts.tok_train --data=fineweb --max_chars=2000000000 --vocab_size=65536 # the tokenizer of speedrun.sh
step=$(fit total_batch_size 262144 2048)
size=()
if [ "$device" = npu ]; then
    plan=$(ask nanochat.planner --depth=12 "$step" --vocab_size=65536 --ranks="$devices")
    size=(--device_batch_size="${plan##*--device_batch_size=}")
fi
launch scripts.base_train --data=fineweb --model_tag=fineweb_base_d12 --depth=12 "$step" \
    --num_iterations=5000 "${size[@]}" "${flags[@]}"
