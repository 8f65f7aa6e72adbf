#!/usr/bin/env bash
# The whole pipeline, from nothing to a model to chat with.
#   bash speedrun.sh                    on whatever device there is; on a CPU with the embedded corpus
#   bash speedrun.sh --preset smoke     every stage, in two minutes, to see that it works
# Stopped at any moment and typed again, it goes on where it was; typed again when done, it says so.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source setup_env.sh

usage() {
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
}

# shellcheck disable=SC2034  # the stages take them
preset=auto
# shellcheck disable=SC2034
data=auto
while [ $# -gt 0 ]; do
    case $1 in
    --preset=* | --data=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" && continue ;;
    --preset | --data)
        if [ $# -lt 2 ]; then
            echo "error: $1 needs a value; bash speedrun.sh --help shows the flags" >&2
            exit 2
        fi
        printf -v "${1#--}" %s "$2"
        shift 2
        ;;
    -h | --help)
        usage
        exit 0
        ;;
    *)
        echo "error: speedrun.sh takes --preset NAME and --data NAME|DIR, got $1" >&2
        exit 2
        ;;
    esac
done

# shellcheck disable=SC2119  # its flags are not ours
setup_env

run_stage() { # NAME COMMAND...: each stage knows itself whether it is done, and goes on where it was
    local name=$1
    shift
    echo "== $name"
    "$@" || {
        local code=$?
        echo "error: the stage $name ended with code $code; type the same command again to go on from there" >&2
        exit $code
    }
}
