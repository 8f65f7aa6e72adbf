#!/usr/bin/env bash
# Starts a training command again whenever it fails, with a fresh rendezvous each time; it goes on from its newest save.
#   bash runs/supervise.sh scripts.base_train --depth=20            one process on each device of this host
#   bash runs/supervise.sh bash runs/multinode_npu.sh scripts.base_train --depth=20    on every host
# It ends when the command is done, when it was stopped by a signal (which is handed on), when the command line was wrong
# (code 2), or when SUPERVISE_TRIES (3) starts in a row have saved nothing new. SUPERVISE_PAUSE (5) seconds lie between.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ $# -eq 0 ]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
words=("$@")
set -- # setup_ascend.sh must not take them for its own
case ${words[0]} in
scripts.*)
    # shellcheck source=runs/common.sh
    source runs/common.sh
    prepare
    start=(launch "${words[@]}")
    ;;
*) start=("${words[@]}") ;;
esac
# A launcher gives its ranks this long to save after a signal, by itself only 30 seconds.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

saved() { # what has been saved so far, in a word
    local base=${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat}
    find "$base" -maxdepth 3 -path '*_checkpoints/*/step_*' -printf '%p %T@\n' 2>/dev/null | sort | cksum
}

alive() { # whether anything of the command still runs
    kill -0 -- "-$child" 2>/dev/null
}

end_it() { # ask the command and all that it started to save and stop
    stopped=$1
    if [ -n "$child" ]; then kill -TERM -- "-$child" 2>/dev/null || true; fi
}

stopped=
child=
trap 'end_it SIGTERM' TERM
trap 'end_it SIGINT' INT
trap 'end_it SIGUSR1' USR1 # for which a launcher would end without its ranks
set -m                     # the command gets a process group of its own

fruitless=0
number=1
while true; do
    before=$(saved)
    "${start[@]}" &
    child=$!
    code=0
    wait "$child" || code=$?
    while [ -n "$stopped" ] && alive; do # a signal ends `wait` before the command has ended
        code=0
        wait "$child" 2>/dev/null || code=$?
        sleep 0.2
    done
    if [ -n "$stopped" ]; then
        echo "supervise: stopped by $stopped; the same command goes on" >&2
        exit "$code"
    fi
    if [ "$code" -eq 0 ] || [ "$code" -eq 2 ]; then exit "$code"; fi
    if alive; then # what a launcher that was killed has left behind
        kill -KILL -- "-$child" 2>/dev/null || true
    fi
    child=
    fruitless=$((fruitless + 1))
    if [ "$(saved)" != "$before" ]; then fruitless=0; fi
    if [ "$fruitless" -ge "${SUPERVISE_TRIES:-3}" ]; then
        echo "error: supervise: $fruitless starts in a row ended with code $code and saved nothing new; see above why" >&2
        exit "$code"
    fi
    echo "supervise: start $number ended with code $code; starting again in ${SUPERVISE_PAUSE:-5} s" >&2
    number=$((number + 1))
    sleep "${SUPERVISE_PAUSE:-5}" || true
    if [ -n "$stopped" ]; then exit 130; fi
done
