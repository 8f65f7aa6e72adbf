# shellcheck shell=bash
# Functions that print help and messages in the user's language, for speedrun.sh and the scripts of this folder.

# To bash before 4.4, such as macOS's 3.2, an empty array is an unset variable, and `set -u` would end the script.
if [ "${BASH_VERSINFO[0]}${BASH_VERSINFO[1]}" -lt 44 ]; then set +u; fi

in_chinese() { # whether NANOCHAT_LANG or else the locale chooses Chinese, as nanochat.common.language does
    case ${NANOCHAT_LANG:-${LC_ALL:-${LC_MESSAGES:-${LANG:-}}}} in
    [zZ][hH]*) return 0 ;;
    *) return 1 ;;
    esac
}

no_language() { # whether neither NANOCHAT_LANG nor the locale says a language: the locales C and POSIX say none
    case ${NANOCHAT_LANG:-${LC_ALL:-${LC_MESSAGES:-${LANG:-}}}} in
    '' | C | C.* | POSIX) return 0 ;;
    *) return 1 ;;
    esac
}

tell() { # ENGLISH CHINESE: print a line in the user's language
    if in_chinese; then echo "$2"; else echo "$1"; fi
}

has_npu() { # whether this host has cards, their driver or CANN, in working order or not
    compgen -G "${ASCEND_ROOT_PREFIX:-}/dev/davinci[0-9]*" >/dev/null ||
        [ -d "${ASCEND_ROOT_PREFIX:-}/usr/local/Ascend" ] || [ -n "${ASCEND_HOME_PATH:-}" ] ||
        command -v npu-smi >/dev/null
}

activation() { # print the command that makes a new terminal ready: on an Ascend host it needs CANN's variables too
    if [ "${NANOCHAT_DEVICE:-npu}" = npu ] && compgen -G "${ASCEND_ROOT_PREFIX:-}/dev/davinci[0-9]*" >/dev/null; then
        echo "source setup_ascend.sh"
    else
        echo "source .venv/bin/activate"
    fi
}

show_help() { # FILE: print the comment at the top of a script, or the Chinese one below it, and end
    local paragraph=1
    if in_chinese; then paragraph=2; fi
    awk -v paragraph="$paragraph" 'BEGIN { RS = "" } NR == paragraph' "$1" | sed -n '/^#!/d; s/^# \{0,1\}//p'
    exit 0
}
