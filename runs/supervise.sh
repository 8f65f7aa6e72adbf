#!/usr/bin/env bash
# Restarts a training command whenever it fails. Each start has a new rendezvous and resumes from the newest checkpoint.
#   bash runs/supervise.sh scripts.base_train --depth=20            one process on each device of this host
#   bash runs/supervise.sh bash runs/multinode_npu.sh scripts.base_train --depth=20    type this on every host
# Once a start has saved something, --resume is left out: naming a step or none again would throw that away.
# It ends when the command succeeds, when a signal stops it (the command gets the signal too), when the command line is
# wrong (code 2), or when SUPERVISE_TRIES starts in a row (default 3) have saved nothing new. It waits SUPERVISE_PAUSE
# seconds (default 5) before each restart.

# 训练命令失败时重新启动它。每次启动都重新集合各个进程，并从最新的检查点续训。
#   bash runs/supervise.sh scripts.base_train --depth=20            本机每个设备上一个进程
#   bash runs/supervise.sh bash runs/multinode_npu.sh scripts.base_train --depth=20    在每台主机上都输入
# 一旦保存过检查点，就会去掉 --resume：再次指定某一步或 none 会丢掉已有的进度。
# 命令成功时、被信号停止时（命令也会收到这个信号）、命令行写错时（退出码 2），或者连续 SUPERVISE_TRIES 次启动（默认 3）
# 都没有存下新的检查点时，它就结束。每次重新启动之前等待 SUPERVISE_PAUSE 秒（默认 5）。

set -euo pipefail
typed_in=$PWD
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
# shellcheck source=runs/common.sh
source runs/common.sh

case ${1:-} in
-h | --help) show_help runs/supervise.sh ;;
'')
    (show_help runs/supervise.sh) >&2
    exit 2
    ;;
esac
words=()
for word in "$@"; do words+=("$(from_here "$typed_in" "$word")"); done
set -- # setup_ascend.sh must not see these arguments
case ${words[0]} in
scripts.*)
    prepare
    start=(launch "${words[@]}")
    ;;
*) start=("${words[@]}") ;;
esac
# The seconds that a launcher gives its ranks to save after a signal; its own default is 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

NANOCHAT_REASON_FILE=$(mktemp) # in which a start leaves the reason of its failure, which it does not print then
export NANOCHAT_REASON_FILE
trap 'rm -f "$NANOCHAT_REASON_FILE"' EXIT

saved() { # print a checksum of the checkpoints, which changes with every save
    local home=${HOME:-~} base
    base=${NANOCHAT_BASE_DIR:-$home/.cache/nanochat}
    case $base in '~'/*) base=$home/${base#*/} ;; esac
    { find -L "$base" -maxdepth 3 -path '*_checkpoints/*/step_*' -exec ls -ld {} + 2>/dev/null || true; } | sort | cksum
}

without_resume() { # take --resume and its value out of the command's words
    local word skip=
    start=()
    for word in "$@"; do
        if [ -n "$skip" ]; then
            skip=
            continue
        fi
        case $word in
        --resume | -resume) skip=1 ;;
        --resume=* | -resume=*) ;;
        *) start+=("$word") ;;
        esac
    done
}

alive() { # whether any process of the command still runs
    kill -0 -- "-$child" 2>/dev/null
}

end_it() { # ask the command and all its processes to save and stop
    stopped=$1
    if [ -n "$child" ]; then kill -TERM -- "-$child" 2>/dev/null || true; fi
}

stopped=
child=
trap 'end_it SIGTERM' TERM
trap 'end_it SIGINT' INT
trap 'end_it SIGUSR1' USR1 # a launcher would end on SIGUSR1 without its ranks, so the ranks get SIGTERM
set -m                     # gives the command a process group of its own

fruitless=0
number=1
while true; do
    before=$(saved)
    : >"$NANOCHAT_REASON_FILE"
    "${start[@]}" &
    child=$!
    code=0
    wait "$child" || code=$?
    while [ -n "$stopped" ] && alive; do # a signal ends `wait` before the command ends
        code=0
        wait "$child" 2>/dev/null || code=$?
        sleep 0.2
    done
    if [ -n "$stopped" ]; then
        tell "supervise: stopped by $stopped; type the same command again to resume" "supervise：被 $stopped 停止；再次输入同一条命令即可继续" >&2
        exit "$code"
    fi
    if [ "$code" -eq 0 ]; then exit 0; fi
    reason=$(cat "$NANOCHAT_REASON_FILE")
    if [ "$code" -eq 2 ]; then
        if [ -n "$reason" ]; then echo "$reason" >&2; fi
        exit 2
    fi
    if alive; then # a launcher that was killed leaves its ranks behind
        kill -KILL -- "-$child" 2>/dev/null || true
    fi
    child=
    fruitless=$((fruitless + 1))
    if [ "$(saved)" != "$before" ]; then
        fruitless=0
        without_resume "${start[@]}"
    fi
    if [ "$fruitless" -ge "${SUPERVISE_TRIES:-3}" ]; then
        tell "supervise: $fruitless starts in a row ended with code $code and saved nothing new; fix the cause, then type the same command again" "supervise：连续 $fruitless 次启动都以退出码 $code 结束，没有存下新的检查点；排除原因后，请再次输入同一条命令" >&2
        tell "${reason:-error: the lines above say why}" "${reason:-错误：原因见上文}" >&2
        exit "$code"
    fi
    if [ -n "$reason" ]; then echo "$reason" >&2; fi
    tell "supervise: start $number ended with code $code; restarting in ${SUPERVISE_PAUSE:-5} s" "supervise：第 $number 次启动以退出码 $code 结束；${SUPERVISE_PAUSE:-5} 秒后重新启动" >&2
    number=$((number + 1))
    sleep "${SUPERVISE_PAUSE:-5}" || true
    if [ -n "$stopped" ]; then exit 130; fi
done
