#!/usr/bin/env bash
# Trains models of growing depth and plots their bits per byte against their training FLOPs: d2 to d8 on TinyWorld on a
# CPU, d10 to d20 on FineWeb-Edu on other devices. Typed again after a stop, it resumes.
#   bash runs/miniseries.sh
#   bash runs/miniseries.sh --quick            three tiny models in less than two minutes
#   bash runs/miniseries.sh --data NAME        another corpus that is already prepared and has a tokenizer

# 训练一系列深度递增的模型，画出每字节比特数随训练 FLOPs 变化的曲线：CPU 上在 TinyWorld 上训练 d2 到 d8，
# 其他设备上在 FineWeb-Edu 上训练 d10 到 d20。停止之后再次输入，会继续。
#   bash runs/miniseries.sh
#   bash runs/miniseries.sh --quick            不到两分钟训练三个很小的模型
#   bash runs/miniseries.sh --data NAME        换用另一份已经准备好、并有分词器的语料

set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source runs/words.sh
case ${1:-} in -h | --help) show_help runs/miniseries.sh ;; esac
source ./setup_env.sh
# shellcheck disable=SC2119  # setup_env must not get the flags of this script
setup_env
export OMP_WAIT_POLICY=PASSIVE
base=$(python -m nanochat.common)
export NANOCHAT_BASE_DIR=$base

data=
quick=
for flag in "$@"; do
    case $flag in
    --data | --data=*) data=given ;;
    --quick) quick=yes ;;
    esac
done
if [ -z "$data" ]; then # choose a corpus, and make the corpus and its tokenizer if they are missing
    read -r device _ < <(python -m nanochat.device)
    if [ "$device" = cpu ] || [ -n "$quick" ]; then
        data=tinyworld
        python -m nanochat.dataset --data tinyworld
        [ -d "$base/tokenizer/$data" ] || python -m scripts.tok_train --data $data --vocab_size 4096
    else
        data=fineweb
        python -m nanochat.dataset -n 40
        [ -d "$base/tokenizer/$data" ] || python -m scripts.tok_train --data $data
    fi
    set -- --data $data "$@"
fi
exec python -m runs.miniseries "$@"
