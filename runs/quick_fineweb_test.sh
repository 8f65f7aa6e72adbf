#!/usr/bin/env bash
# Tests whether data and cards work: trains 8 layers for 100 steps on FineWeb-Edu, on all cards or on NPROC_PER_NODE.
# Other flags go to base_train.
#   bash runs/quick_fineweb_test.sh
#   bash runs/quick_fineweb_test.sh --shards 1 --num_iterations=20    # a mirror that has few shards
#   NPROC_PER_NODE=4 bash runs/quick_fineweb_test.sh

# 检查数据和卡能否正常工作：在 FineWeb-Edu 上用 8 层训练 100 步，用全部的卡，或 NPROC_PER_NODE 张卡。
# 其他选项交给 base_train。
#   bash runs/quick_fineweb_test.sh
#   bash runs/quick_fineweb_test.sh --shards 1 --num_iterations=20    # 镜像站只有几个分片时
#   NPROC_PER_NODE=4 bash runs/quick_fineweb_test.sh

set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source runs/common.sh

shards=4 flags=()
while [ $# -gt 0 ]; do
    case $1 in
    --shards) flag shards "${2-}" && shift 2 ;;
    --shards=*) flag shards "${1#*=}" && shift ;;
    -h | --help) show_help runs/quick_fineweb_test.sh ;;
    *) flags+=("$1") && shift ;;
    esac
done
prepare
python -m nanochat.dataset -n "$shards"
python -m scripts.tok_train --data=fineweb --max_chars=2000000000 --vocab_size=65536 # the tokenizer of speedrun.sh
launch scripts.base_train --data=fineweb --model_tag=fineweb_quick_d8 --depth=8 "$(fit total_batch_size 262144 2048)" \
    --num_iterations=100 --eval_every=50 "${flags[@]}"
