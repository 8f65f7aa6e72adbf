#!/usr/bin/env bash
# Trains models of growing depth and plots their bits per byte against training FLOPs: d2 to d8 on TinyWorld with a CPU,
# d10 to d20 on FineWeb-Edu elsewhere. The same command resumes a stopped series.
#   bash runs/miniseries.sh
#   bash runs/miniseries.sh --quick            three tiny models, within two minutes
#   bash runs/miniseries.sh --data NAME        another prepared corpus that has a tokenizer
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source setup_env.sh
# shellcheck disable=SC2119  # setup_env takes no flags here
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
