#!/usr/bin/env bash
# A series of models of growing depth, and a picture of their bits per byte against the FLOPs of their training: d2 to d8
# of TinyWorld on a CPU, d10 to d20 of FineWeb-Edu elsewhere. Stopped and typed again, it goes on.
#   bash runs/miniseries.sh
#   bash runs/miniseries.sh --quick            three tiny models, within two minutes
#   bash runs/miniseries.sh --data NAME        another corpus that is prepared, with its tokenizer
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source setup_env.sh
# shellcheck disable=SC2119  # its flags are not ours
setup_env
export OMP_WAIT_POLICY=PASSIVE
base=${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat}

data=
quick=
for flag in "$@"; do
    case $flag in
    --data | --data=*) data=given ;;
    --quick) quick=yes ;;
    esac
done
if [ -z "$data" ]; then # choose a corpus, and make what is missing
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
exec python -m bench.miniseries "$@"
