#!/usr/bin/env bash
# Fine-tunes Qwen on N cards (default: all) with the settings of runs/npu_train_config.toml. Flags of scripts.finetune
# may follow and override the file. Typed again after a stop, it resumes.
#   bash runs/train_distributed_npu.sh 8
#   bash runs/train_distributed_npu.sh 4 --model ./Qwen3-0.6B --data chats.jsonl --lora_rank=8 --shard=none

# 按 runs/npu_train_config.toml 里的设置，用 N 张卡（默认：全部）微调 Qwen。后面可以写 scripts.finetune 的选项，
# 它们优先于文件里的设置。停止之后再次输入，会继续。
#   bash runs/train_distributed_npu.sh 8
#   bash runs/train_distributed_npu.sh 4 --model ./Qwen3-0.6B --data chats.jsonl --lora_rank=8 --shard=none

set -euo pipefail
# Names of files on the command line are meant from where it was typed, not from the root of the repository.
typed_in=$PWD
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source runs/common.sh
case ${1:-} in -h | --help) show_help runs/train_distributed_npu.sh ;; esac

if [[ ${1:-} =~ ^[0-9]+$ ]]; then
    export NPROC_PER_NODE=$1
    shift
fi
flags=("$@")
set -- # setup_ascend.sh must not see these flags
prepare
launcher=$PWD/runs/launch_npu_training.py
cd "$typed_in"
exec python "$launcher" --npus="$devices" "${flags[@]}"
