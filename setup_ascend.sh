#!/usr/bin/env bash
# Makes .venv on an Ascend host with the torch and torch_npu that fit its CANN, and sets the variables that jobs need.
#   source setup_ascend.sh             make .venv and set the variables in this shell (bash, zsh, dash)
#   bash setup_ascend.sh               make .venv only; speedrun_npu.sh sources this file itself
#   bash setup_ascend.sh --dry-run     print what would be done and change nothing
#   bash setup_ascend.sh --fix         also repair the user's group and the packages of .venv
#   source setup_ascend.sh --fix       repair harmful variables of this shell as well
#   bash setup_ascend.sh --torch-npu VERSION    install this torch_npu instead of the one that the table pairs with CANN
# Exit codes: 0 ready, 1 refused or failed, 2 unknown flag, 3 this host has no NPU.
#
# The user's own shell may source this file. It is therefore plain sh, uses neither `set` nor `exit` when it is sourced,
# and leaves no names behind. tools_npu/setup.py does the work and passes the variables back in a file.

# shellcheck disable=SC2296,SC3028,SC3054  # bash and zsh name the sourced file in different ways
if [ -n "${BASH_VERSION:-}" ]; then
    nanochat_file=${BASH_SOURCE[0]}
elif [ -n "${ZSH_VERSION:-}" ]; then
    eval 'nanochat_file=${(%):-%x}'
elif [ -f "$0" ] && [ "${0##*/}" = setup_ascend.sh ]; then
    nanochat_file=$0
else
    nanochat_file=./setup_ascend.sh # other shells do not name the sourced file
fi
nanochat_root=$(CDPATH='' cd -- "$(dirname -- "$nanochat_file")" && pwd -P)

nanochat_start='import sys; sys.path[0] = sys.argv.pop(1); from tools_npu.setup import main; sys.exit(main())'

nanochat_fail() { # ENGLISH CHINESE: print an error in the user's language, or in both where nothing says which one that is
    case ${NANOCHAT_LANG:-${LC_ALL:-${LC_MESSAGES:-${LANG:-}}}} in
    [zZ][hH]*) echo "错误：$2" >&2 ;;
    '' | C | C.* | POSIX) printf '%s\n' "error: $1" "错误：$2" >&2 ;;
    *) echo "error: $1" >&2 ;;
    esac
}

nanochat_setup_ascend() { # FLAGS...: run tools_npu/setup.py with the first Python that is new enough
    for nanochat_python in "$nanochat_root/.venv/bin/python" python3 python3.13 python3.12 python3.11 python3.10 python; do
        if "$nanochat_python" -c 'import sys; sys.exit(sys.version_info < (3, 8))' >/dev/null 2>&1; then
            "$nanochat_python" -c "$nanochat_start" "$nanochat_root" "$@"
            return
        fi
    done
    nanochat_fail "Python 3.10 or later is needed, and PATH has none. Install it with apt-get install -y python3.11 python3.11-venv python3.11-dev, or with dnf install -y python3.11 python3.11-devel." \
        "需要 Python 3.10 或更高版本，但 PATH 里没有。请用 apt-get install -y python3.11 python3.11-venv python3.11-dev 或 dnf install -y python3.11 python3.11-devel 安装。"
    return 1
}

if [ ! -f "$nanochat_root/tools_npu/setup.py" ]; then
    nanochat_fail "setup_ascend.sh must be sourced in the folder of the repository. Change into it, then type . ./setup_ascend.sh" \
        "setup_ascend.sh 要在仓库目录下执行。请先进入该目录，再输入 . ./setup_ascend.sh"
    nanochat_code=1
elif [ "$0" = "$nanochat_file" ] && [ -z "${ZSH_EVAL_CONTEXT:-}" ] || [ "${ZSH_EVAL_CONTEXT:-}" = toplevel ]; then
    nanochat_setup_ascend "$@"
    exit
else
    nanochat_lines=$(mktemp)
    if nanochat_setup_ascend --env-file "$nanochat_lines" "$@"; then nanochat_code=0; else nanochat_code=$?; fi
    # shellcheck disable=SC1090
    if [ "$nanochat_code" -eq 0 ]; then . "$nanochat_lines"; fi
    rm -f "$nanochat_lines"
fi

unset -f nanochat_setup_ascend nanochat_fail
unset nanochat_file nanochat_root nanochat_python nanochat_lines nanochat_start
# Each branch unsets the name first and returns a literal, because no name may stay behind.
case $nanochat_code in
0) unset nanochat_code && return 0 ;;
2) unset nanochat_code && return 2 ;;
3) unset nanochat_code && return 3 ;;
*) unset nanochat_code && return 1 ;;
esac
