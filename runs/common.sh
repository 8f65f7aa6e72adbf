# shellcheck shell=bash
# Functions for the scripts of this folder, which source this file in the root of the repository.
source runs/sizes.sh
source runs/words.sh

prepare() { # make the environment of this host; sets `base`, `device`, `matmul`, and `devices`, which NPROC_PER_NODE may lower
    local code=3
    if [ "${NANOCHAT_DEVICE:-}" = npu ] || { [ -z "${NANOCHAT_DEVICE:-}" ] && has_npu; }; then
        code=0
        # shellcheck source=setup_ascend.sh
        source ./setup_ascend.sh || code=$?
    fi
    if [ $code -eq 3 ] && [ "${NANOCHAT_DEVICE:-}" != npu ]; then # no NPU: a GPU or the CPU
        # shellcheck source=setup_env.sh
        source ./setup_env.sh
        # shellcheck disable=SC2119  # setup_env must not get the flags of this script
        setup_env
    elif [ $code -ne 0 ]; then
        tell "error: the NPUs of this host cannot be used yet; the lines above say why. Next: python check_npu.py" "错误：本机的 NPU 还不能用，原因见上文。下一步：python check_npu.py" >&2
        exit 1
    fi
    export OMP_WAIT_POLICY=PASSIVE
    base=$(python -m nanochat.common)
    export NANOCHAT_BASE_DIR=$base # one folder for these scripts and for Python, also if it was given with a ~
    read -r device _ devices _ matmul _ < <(ask nanochat.device)
    take_processes
}

# shellcheck disable=SC2034  # the scripts read `matmul_flags`
choose_matmul() { # set `matmul_flags`, for training stages: int8 on CPUs that multiply it faster than bf16
    matmul_flags=()
    if [ "$matmul" = int8 ]; then
        matmul_flags=(--matmul=int8)
        tell "this CPU multiplies int8 faster than bf16, so the stages train with --matmul=int8" "这个 CPU 计算 int8 比 bf16 快，因此各阶段用 --matmul=int8 训练"
    fi
}

from_here() { # FOLDER WORD: print WORD, as an absolute path if it is a file of the folder that the command was typed in
    local before='' path=$2 after=''
    case $path in --*=*) before=${path%%=*}= path=${path#*=} ;; esac
    if [[ $path =~ ^(.+)(:[0-9.]+)$ ]]; then path=${BASH_REMATCH[1]} after=${BASH_REMATCH[2]}; fi # FILE:TIMES
    case $path in
    /*) ;;
    *[./]*) # a word without either may be the name of a corpus or a tag
        if ! [ "$1" -ef . ] && [ -e "$1/$path" ]; then path=$1/$path; fi
        ;;
    esac
    printf %s "$before$path$after"
}

launch() { # MODULE FLAGS...: run a module with one process on each device of this host
    if [ "$devices" -gt 1 ]; then
        python -m nanochat.runtime.launch --nproc_per_node="$devices" -m "$1" -- "${@:2}"
    else
        python -m "$1" "${@:2}"
    fi
}

stage() { # NAME COMMAND...: run a stage, count its costs, and stop the script if the stage was stopped or failed
    local name=$1 code=0
    shift
    echo
    echo "== $name"
    interrupted=
    trap 'interrupted=1' INT # on Ctrl-C a stage saves by itself and ends with code 0
    python -m nanochat.runtime.cost "$name" -- "$@" || code=$?
    trap - INT
    if [ -n "$interrupted" ]; then
        tell "stopped in the stage $name; type the same command again to resume" "在阶段 $name 中停止；再次输入同一条命令即可继续" >&2
        exit 130
    elif [ $code -ne 0 ]; then
        tell "the stage $name ended with code $code; when the cause is gone, type the same command again to resume" "阶段 $name 以退出码 $code 结束；排除原因后，再次输入同一条命令即可继续" >&2
        exit $code
    fi
}

train() { # NAME MODULE FLAGS...: run a stage with one process on each device of this host
    if [ "$devices" -gt 1 ]; then
        stage "$1" python -m nanochat.runtime.launch --nproc_per_node="$devices" -m "$2" -- "${@:3}"
    else
        stage "$1" python -m "$2" "${@:3}"
    fi
}

fetch() { # DATA SHARDS HOST: fetch every published corpus of a mixture, and make TinyWorld if it is part of it
    local name
    for name in ${1//,/ }; do
        name=${name%%:*}
        case $name in
        tinyworld) stage "dataset $name" python -m nanochat.dataset --data tinyworld ;;
        fineweb* | climbmix) stage "dataset $name" python -m nanochat.dataset --data "$name" -n "$2" --from "$3" ;;
        esac
    done
}

flag() { # NAME VALUE, as "$1" "${2-}": set the variable of a flag; 2 words are used up
    if [ $# -lt 2 ] || [ -z "$2" ]; then
        tell "error: --$1 needs a value; --help lists the flags" "错误：--$1 需要一个值；--help 列出全部选项" >&2
        exit 2
    fi
    printf -v "$1" %s "$2"
}

refuse_flags() { # PRESET NAME...: end the script if a flag is given whose value the preset sets
    local name
    for name in "${@:2}"; do
        if [ -n "${!name}" ]; then
            tell "error: --preset $1 sets --$name itself; leave --$name out" "错误：--preset $1 已固定 --$name 的值；请去掉 --$name" >&2
            exit 2
        fi
    done
}
