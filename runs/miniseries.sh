#!/usr/bin/env bash
# Trains models of growing depth and plots their bits per byte against their training FLOPs: d2 to d8 on TinyWorld on a
# CPU, d10 to d20 on FineWeb-Edu on other devices. Typed again after a stop, it resumes.
#   bash runs/miniseries.sh
#   bash runs/miniseries.sh --quick            three tiny models in less than two minutes
#   bash runs/miniseries.sh --data NAME        another corpus that is already prepared and has a tokenizer
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source setup_env.sh
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
