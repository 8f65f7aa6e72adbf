#!/usr/bin/env bash
# Makes .venv and installs the packages that pyproject.toml and the lock files name. Does nothing if none has changed.
#
#   source setup_env.sh && setup_env    in a script: afterwards `python` is the Python of .venv
#   bash setup_env.sh                   by hand
# --dev also installs the test tools. On an Ascend host this script does not choose torch: setup_ascend.sh picks a pair
# of torch and torch_npu and passes --npu VERSION, --python-max MINOR (the newest Python 3 with a wheel) and --numpy 1|2.
#
# .venv/setup.stamp records the inputs for which the environment is complete. .venv/setup.busy exists while packages
# are being changed: an environment that a killed set-up left behind is deleted and rebuilt from uv's cache. So is one in
# which setup_ascend.sh --fix makes that mark.

# 创建 .venv，安装 pyproject.toml 和锁文件里列出的软件包。没有变化时什么也不做。
#   source setup_env.sh && setup_env    在脚本里用：之后的 python 就是 .venv 里的 Python
#   bash setup_env.sh                   手动运行
# --dev 还会安装测试工具。在昇腾主机上，这个脚本不选择 torch：setup_ascend.sh 选好成对的 torch 和 torch_npu，再传入
# --npu 版本、--python-max 次版本号（有对应安装包的最新 Python 3）和 --numpy 1|2。

SETUP_ROOT=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
SETUP_VENV=$SETUP_ROOT/.venv

setup_env() { # activates .venv in the caller's shell; a separate process makes .venv
    bash "$SETUP_ROOT/setup_env.sh" "$@" || return
    export VIRTUAL_ENV=$SETUP_VENV PATH=$SETUP_VENV/bin:$PATH
    unset PYTHONHOME
    hash -r
}

# --- messages ------------------------------------------------------------------------------------

# shellcheck source=runs/words.sh
source "$SETUP_ROOT/runs/words.sh"

say() { tell "setup: $1" "setup：$2"; } # ENGLISH CHINESE

in_words() { # NAME of a step: print it in the user's language
    case $1 in
    packages) tell "$1" "软件包" ;;
    "torch (2 GB of downloads, unless cached)") tell "$1" "torch（有缓存时不必下载，否则约 2 GB）" ;;
    "torch "*" for CPUs") tell "$1" "${1% for CPUs}（CPU 版）" ;;
    "the packages that CANN imports") tell "$1" "CANN 用到的软件包" ;;
    "rustbpe, built from source") tell "$1" "从源码编译 rustbpe" ;;
    "rustbpe, the published wheel") tell "$1" "rustbpe 的已发布安装包" ;;
    "a first import") tell "$1" "第一次导入" ;;
    "numpy 1, for this CANN") tell "$1" "numpy 1，供这个 CANN 使用" ;;
    "test tools") tell "$1" "测试工具" ;;
    "client libraries") tell "$1" "客户端库的环境" ;;
    "packages of client libraries") tell "$1" "客户端库的软件包" ;;
    *) echo "$1" ;;
    esac
}

fail() { # ENGLISH CHINESE: in the user's language, or in both where nothing says which one that is
    if ! in_chinese; then printf 'error: %s\n' "$1" >&2; fi
    if in_chinese || no_language; then printf '错误：%s\n' "$2" >&2; fi
    if [ "${SETUP_KEEP:-0}" = 1 ]; then rm -f "$SETUP_VENV/setup.busy"; fi # not killed: every package is complete
    exit 1
}

fail_with_log() { # ENGLISH CHINESE: show the end of the log, and name the file
    tail -n 6 "$SETUP_LOG" | cut -c 1-150 | sed 's/^/  | /' >&2
    fail "$1 Details: $SETUP_LOG" "$2 详情见：$SETUP_LOG"
}

step() { # NAME COMMAND...: run with the output in the log; print a line when done, and a clock on a terminal
    local name start=$SECONDS ticker='' code=0
    name=$(in_words "$1")
    shift
    printf '\n== %s: %s\n' "$name" "$*" >>"$SETUP_LOG"
    if [ -t 1 ]; then
        while kill -0 $$ 2>/dev/null && sleep 1; do
            printf '\rsetup: %s ... %d s ' "$name" $((SECONDS - start))
        done 9>&- &
        ticker=$!
    fi
    "$@" >>"$SETUP_LOG" 2>&1 || code=$?
    if [ -n "$ticker" ]; then
        kill "$ticker" 2>/dev/null
        wait "$ticker" 2>/dev/null || true
        printf '\r\033[K'
    fi
    if [ $code -ge 128 ]; then exit $code; fi # killed: a package may be half written
    if [ $code -eq 0 ]; then say "$name ($((SECONDS - start)) s)" "$name（$((SECONDS - start)) 秒）"; fi
    return $code
}

# --- the machine ---------------------------------------------------------------------------------

probe_python() { # prints MAJOR MINOR WHOLE; WHOLE is 1 if this Python can make a virtual environment
    "$1" -c 'import sys
try:
    import ensurepip, venv
    whole = 1
except ImportError:
    whole = 0
print("%d %d %d" % (sys.version_info[0], sys.version_info[1], whole))' 2>/dev/null
}

pick_python() { # sets PYTHON to the newest of 3.10 to 3.13 that can make an environment, or else to a newer one
    local name path major minor whole rank commands best=0 best_whole=0 newest=0 limit=${PYTHON_MAX:-0}
    for name in python3.13 python3.12 python3.11 python3.10 python3 python; do
        path=$(command -v "$name") || continue
        read -r major minor whole < <(probe_python "$path") || continue
        rank=$((major * 100 + minor))
        if [ $rank -gt $newest ]; then newest=$rank; fi
        if [ $rank -lt 310 ] || { [ "$limit" -gt 0 ] && [ $rank -gt $((300 + limit)) ]; }; then continue; fi
        if [ $rank -le 313 ]; then rank=$((rank + 1000)); fi # every package is known to have wheels for these
        if [ "$whole" -eq 1 ]; then rank=$((rank + 10000)); fi
        if [ $rank -gt $best ]; then best=$rank best_whole=$whole PYTHON=$path PYTHON_VERSION=$major.$minor; fi
    done
    if [ $best -eq 0 ] && [ $newest -ge 310 ]; then
        commands="  apt-get install -y python3.$limit python3.$limit-venv python3.$limit-dev    (Debian, Ubuntu)
  dnf install -y python3.$limit python3.$limit-devel                          (openEuler, Fedora)"
        fail "torch_npu $NPU has wheels for Python 3.10 to 3.$limit, and PATH has only $((newest / 100)).$((newest % 100)). Install one of them, for example with
$commands
or upgrade CANN, then type the same command again." \
            "torch_npu $NPU 只支持 Python 3.10 到 3.$limit，而 PATH 里只有 $((newest / 100)).$((newest % 100))。请安装其中一个，例如
$commands
或升级 CANN，然后再次输入同一条命令。"
    fi
    if [ $best -eq 0 ]; then
        local found='none was found' found_zh='没有找到 Python' there=$((newest / 100)).$((newest % 100))
        if [ $newest -gt 0 ]; then found="the newest on PATH is $there" found_zh="PATH 里最新的是 $there"; fi
        commands="  apt-get install -y python3.11 python3.11-venv python3.11-dev    (Debian, Ubuntu)
  dnf install -y python3.11 python3.11-devel                      (openEuler, Fedora)
  brew install python@3.12                                        (macOS)"
        fail "Python 3.10 or later is needed; $found. Install one, for example with
$commands
then type the same command again." \
            "需要 Python 3.10 或更高版本；$found_zh。请安装，例如
$commands
然后再次输入同一条命令。"
    fi
    if [ "$best_whole" -ne 1 ]; then
        commands="  apt-get install -y python$PYTHON_VERSION-venv    (Debian, Ubuntu)
  dnf install -y python3-pip               (openEuler, Fedora)"
        fail "$PYTHON (Python $PYTHON_VERSION) cannot make a virtual environment, because its venv or ensurepip module is missing. Install the module with
$commands
then type the same command again." \
            "$PYTHON（Python $PYTHON_VERSION）缺少 venv 或 ensurepip 模块，无法创建虚拟环境。请安装这个模块：
$commands
然后再次输入同一条命令。"
    fi
}

free_gb() { df -Pk "$1" | awk 'NR == 2 { printf "%d", $4 / 1048576 }'; }
mount_of() { df -Pk "$1" | awk 'NR == 2 { print $6 }'; }

check_disk() { # PACKAGE GB: GB are needed, or 1 if the largest package is there already
    local need=$2 free cache
    if compgen -G "$SETUP_VENV/lib/python3*/site-packages/$1" >/dev/null; then need=1; fi
    free=$(free_gb "$SETUP_ROOT")
    if [ "$free" -lt "$need" ]; then
        fail "the disk of $SETUP_ROOT has $free GB free; the environment needs $need GB. Free some space, or clone the repository onto a larger disk, then type the same command again." \
            "$SETUP_ROOT 所在的磁盘剩余 $free GB，安装环境需要 $need GB。请清理磁盘，或把仓库克隆到更大的磁盘上，然后再次输入同一条命令。"
    fi
    cache=${UV_CACHE_DIR:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/uv}
    while [ ! -d "$cache" ]; do cache=$(dirname "$cache"); done
    # uv keeps its downloads, which would fill a home folder that lies on a small disk.
    if [ "$(mount_of "$cache")" != "$(mount_of "$SETUP_ROOT")" ] && [ "$(free_gb "$cache")" -lt "$need" ]; then
        export UV_CACHE_DIR=$SETUP_VENV/uv-cache
    fi
}

# --- the package index ---------------------------------------------------------------------------

pip_setting() { # NAME: prints pip's value of a setting on one line; the environment wins over pip's files
    local scope value
    for scope in ':env:' install global; do
        value=$(sed -n "s/^$scope\.$1=['\"]\(.*\)['\"]\$/\1/p" <<<"$PIP_CONFIG" | head -n 1)
        if [ -n "$value" ]; then
            value=${value//\\n/ }
            # shellcheck disable=SC2086  # word splitting is wanted here: it removes line breaks and double spaces
            echo $value
            return
        fi
    done
}

hand_on_index() { # passes pip's settings (a mirror, a folder of wheels) to uv; uv's own settings win
    local value
    PIP_CONFIG=$("$SETUP_VENV/bin/python" -m pip config list 2>/dev/null || true)
    value=$(pip_setting index-url)
    if [ -n "$value" ]; then export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$value}; fi
    value=$(pip_setting extra-index-url)
    if [ -n "$value" ]; then
        # pip searches all indexes at once. uv may do the same, because every file is checked against its hash.
        export UV_INDEX=${UV_INDEX:-$value} UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match}
    fi
    value=$(pip_setting find-links)
    if [ -n "$value" ]; then export UV_FIND_LINKS=${UV_FIND_LINKS:-${value// /,}}; fi
    value=$(pip_setting trusted-host)
    if [ -n "$value" ]; then export UV_INSECURE_HOST=${UV_INSECURE_HOST:-$value}; fi
    value=$(pip_setting cert)
    if [ -n "$value" ]; then export SSL_CERT_FILE=${SSL_CERT_FILE:-$value}; fi
    value=$(pip_setting no-index)
    case $value in 1 | [Tt]rue | [Yy]es | on) export UV_NO_INDEX=1 ;; esac
    export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180} UV_PYTHON_DOWNLOADS=never
    export PIP_USER=0 # in an environment, pip refuses to install for the user, which some hosts set as the default
}

pin_of() { # START FILE: prints the pin of a lock file that begins with START, and its hashes
    awk -v start="$1" 'index($0, start) == 1 { on = 1 } on { print } on && !/\\$/ { exit }' "$SETUP_ROOT/$2"
}

get_uv() { # sets INSTALLER to uv or pip
    local lock=$SETUP_VENV/uv.lock
    pin_of 'uv==' locks/requirements.lock >"$lock"
    if step uv "$SETUP_VENV/bin/python" -m pip install --disable-pip-version-check --require-hashes -r "$lock"; then
        INSTALLER=uv
    else
        say "uv could not be installed; falling back to pip, which is slower" "无法安装 uv，改用较慢的 pip"
        INSTALLER=pip
    fi
}

pip_install() {
    if [ "$INSTALLER" = uv ]; then
        "$SETUP_VENV/bin/uv" pip install --python "$SETUP_VENV/bin/python" "$@"
    else
        "$SETUP_VENV/bin/python" -m pip install --disable-pip-version-check "$@"
    fi
}

install() { # NAME ARGUMENTS of pip install...: install with uv; if uv fails, fall back to pip
    local name=$1
    shift
    if step "$name" pip_install "$@"; then return; fi
    if [ "$INSTALLER" = pip ]; then return 1; fi
    say "uv failed at: $name; falling back to pip, which is slower" "uv 在这一步失败：$(in_words "$name")；改用较慢的 pip"
    INSTALLER=pip
    step "$name" pip_install "$@"
}

install_lock() { # NAME FILE; the file names everything but torch, which test tools require and which is there by then
    if ! install "$1" --no-deps --require-hashes -r "$SETUP_ROOT/$2"; then
        fail_with_log "the packages of $2 could not be installed. If the package index does not answer, set a mirror with: pip config set global.index-url URL; then type the same command again." \
            "无法安装 $2 中的软件包。如果软件包索引连接不上，请设置镜像：pip config set global.index-url 镜像地址；然后再次输入同一条命令。"
    fi
}

brings_cuda() { # VERSION: whether the index's plain torch for this machine requires CUDA, without which it does not load
    [ "$(uname -m)" = x86_64 ] || [ "$(uname -m)-$(printf '%s\n' 2.11 "$1" | sort -V | head -n 1)" = aarch64-2.11 ]
}

install_clients() { # the client libraries that tests run, in an environment of their own
    local clients=$SETUP_VENV/clients
    if [ "$INSTALLER" = uv ]; then
        step "client libraries" "$SETUP_VENV/bin/uv" venv --quiet --allow-existing --python "$SETUP_VENV/bin/python" "$clients" &&
            step "packages of client libraries" "$SETUP_VENV/bin/uv" pip install --python "$clients/bin/python" --no-deps \
                --require-hashes -r "$SETUP_ROOT/locks/requirements-clients.lock"
    else
        step "client libraries" "$SETUP_VENV/bin/python" -m venv "$clients" &&
            step "packages of client libraries" "$clients/bin/python" -m pip install --disable-pip-version-check --no-deps \
                --require-hashes -r "$SETUP_ROOT/locks/requirements-clients.lock"
    fi || fail_with_log "the packages of locks/requirements-clients.lock could not be installed." \
        "无法安装 locks/requirements-clients.lock 中的软件包。"
}

install_npu() { # installs the pair that setup_ascend.sh picked; torch_npu itself requires a torch that indexes lack
    local torch=${NPU%%.post*} lock=$SETUP_VENV/pair.lock own=''
    # CANN's own operators import these packages at run time, and torch needs some of them.
    install_lock "the packages that CANN imports" locks/requirements-npu.lock
    if brings_cuda "$torch"; then
        if step "torch $torch for CPUs" pip_install "torch==$torch+cpu"; then own=yes; else
            check_disk nvidia 8
            say "the package index has no torch $torch+cpu: the plain torch brings 2 GB of CUDA, which nothing here uses" \
                "软件包索引里没有 torch $torch+cpu：普通版 torch 会带上 2 GB 用不到的 CUDA 软件包"
        fi
    fi
    pin_of "torch-npu==$NPU " locks/requirements-pairs.lock >"$lock"
    if [ -z "$own" ]; then pin_of "torch==$torch " locks/requirements-pairs.lock >>"$lock"; fi
    local checked=(--require-hashes -r "$lock")
    if ! grep -q '^torch-npu' "$lock"; then
        checked=("torch_npu==$NPU")
        say "torch_npu $NPU is unknown to this repository: its files cannot be checked against hashes" \
            "本仓库没有 torch_npu $NPU 的哈希值，无法校验它的文件"
    fi
    if ! install "torch_npu $NPU" --no-deps "${checked[@]}"; then
        fail_with_log "torch_npu $NPU could not be installed; it is published for Linux on x86_64 and aarch64 only. If the package index lacks this version, choose another one: bash setup_ascend.sh --torch-npu VERSION." \
            "无法安装 torch_npu $NPU；它只支持 x86_64 和 aarch64 的 Linux。如果软件包索引里没有这个版本，请换一个：bash setup_ascend.sh --torch-npu 版本号。"
    fi
    if [ -z "$own" ] && ! install "torch $torch" "torch==$torch"; then # what this torch requires besides
        fail_with_log "torch $torch could not be installed. If the package index does not answer, set a mirror with: pip config set global.index-url URL; then type the same command again." \
            "无法安装 torch $torch。如果软件包索引连接不上，请设置镜像：pip config set global.index-url 镜像地址；然后再次输入同一条命令。"
    fi
}

# --- our own code --------------------------------------------------------------------------------

build_rustbpe() {
    # A crate registry that does not answer must not hold up set-up, because the published wheel works too.
    export CARGO_NET_RETRY=${CARGO_NET_RETRY:-1} CARGO_HTTP_TIMEOUT=${CARGO_HTTP_TIMEOUT:-20}
    # 9>&- closes the lock: a compiler cache that starts here would otherwise hold the lock as long as it lives.
    step "rustbpe, built from source" pip_install --no-deps --no-build-isolation "$SETUP_ROOT/rustbpe" 9>&- &&
        "$SETUP_VENV/bin/python" -c 'import rustbpe; rustbpe.Tokenizer()' >>"$SETUP_LOG" 2>&1
}

install_rustbpe() { # replaces the wheel of locks/requirements.lock by the build of rustbpe/, which is faster
    if [ ! -f "$SETUP_ROOT/rustbpe/Cargo.toml" ]; then return; fi
    if ! command -v cargo >/dev/null; then
        say "no Rust toolchain (cargo): using the published rustbpe wheel, which is slower" \
            "没有 Rust 工具链（cargo）：使用已发布的 rustbpe 安装包，速度较慢"
    elif ! build_rustbpe; then
        say "rustbpe could not be built (details: $SETUP_LOG): using the published wheel, which is slower" \
            "rustbpe 编译失败（详情见 $SETUP_LOG）：使用已发布的安装包，速度较慢"
        install_lock "rustbpe, the published wheel" locks/requirements.lock
    fi
}

check_compiler() { # torch.compile needs a C++ compiler and the headers of Python
    local need=''
    if ! command -v c++ >/dev/null && ! command -v g++ >/dev/null && ! command -v clang++ >/dev/null; then
        need='g++'
    fi
    if ! "$SETUP_VENV/bin/python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))'; then
        need="${need:+$need }python3-dev"
    fi
    if [ -n "$need" ]; then
        say "no C++ compiler or no Python headers: models run uncompiled, which is slower. To fix this: apt-get install -y $need" \
            "缺少 C++ 编译器或 Python 头文件：模型不编译也能运行，但速度较慢。安装 $need 即可解决"
    fi
}

check_imports() {
    local modules=nanochat,numpy,pyarrow,rustbpe,tiktoken # nanochat comes first: it stops torch from loading torch_npu
    if [ "$TORCH" = 1 ] || [ -n "$NPU" ]; then
        modules=$modules,torch,torch._inductor.compile_fx,torch.distributed.fsdp,torch.distributed.run # what training imports later
    elif ! "$SETUP_VENV/bin/python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch_npu"))'; then
        fail "this is an Ascend host: torch and torch_npu must be of one release that fits its CANN. Install that pair with
  bash setup_ascend.sh
then type the same command again." \
            "这是昇腾主机：torch 和 torch_npu 的版本必须一致，并与本机的 CANN 配套。请先运行 bash setup_ascend.sh，然后再次输入同一条命令。"
    fi
    # Some hosts set PYTHONDONTWRITEBYTECODE. The bytecode that is written here saves every later process a second, and five seconds where it compiles a model.
    if ! step "a first import" env -u PYTHONDONTWRITEBYTECODE "$SETUP_VENV/bin/python" -c "import $modules"; then
        fail_with_log "the installed packages do not load. The wheels need a 64-bit Linux with glibc 2.28 or later, or macOS 14 on Apple silicon. On such a system, delete the environment (rm -rf .venv), then type the same command again." \
            "已安装的软件包无法加载。这些安装包需要 glibc 2.28 或更高的 64 位 Linux，或 Apple 芯片上的 macOS 14。如果系统符合要求，请删掉环境（rm -rf .venv），然后再次输入同一条命令。"
    fi
}

# --- set-up --------------------------------------------------------------------------------------

fingerprint() { # prints the inputs that determine the environment
    local files
    echo "root $SETUP_ROOT"
    echo "parts dev=$DEV torch=$TORCH${NPU:+ npu=$NPU python_max=$PYTHON_MAX numpy=${NUMPY:-2}}"
    "$SETUP_VENV/bin/python" -c 'import sys; print("python", sys.version.split()[0])' 2>/dev/null || echo "python broken"
    if command -v cargo >/dev/null; then echo "cargo yes"; else echo "cargo no"; fi
    cd "$SETUP_ROOT" || return
    files=$(find pyproject.toml setup_env.sh locks/*.lock rustbpe -name target -prune -o -type f \
        -not -name '*.so' -not -name '*.pyc' -print 2>/dev/null | LC_ALL=C sort)
    # shellcheck disable=SC2086  # the files of this repository have no spaces in their names
    cksum $files
}

is_whole() {
    local now stamp
    [ -f "$SETUP_VENV/setup.stamp" ] && [ ! -e "$SETUP_VENV/setup.busy" ] || return
    now=$(fingerprint) stamp=$(cat "$SETUP_VENV/setup.stamp")
    # What was built with cargo is complete for a user without cargo too.
    [ "$now" = "$stamp" ] || [ "${now/cargo no/cargo yes}" = "$stamp" ]
}

torch_is_of_npu() { # whether torch comes from setup_ascend.sh, in a pair with torch_npu
    case ${NANOCHAT_DEVICE:-} in
    npu) return 0 ;;
    '') compgen -G "${ASCEND_ROOT_PREFIX:-}/dev/davinci[0-9]*" >/dev/null ;;
    *) compgen -G "$SETUP_VENV/lib/python3*/site-packages/torch_npu" >/dev/null ;; # the torch beside it serves a CPU too
    esac
}

keep_parts() { # keeps the installed parts, so that a speedrun after the tests does not remove the test tools
    local parts
    parts=$(grep -s '^parts' "$SETUP_VENV/setup.stamp") || return 0
    case $parts in *dev=1*) DEV=1 ;; esac
    if [ -z "$NPU" ] && [[ $parts =~ npu=([^ ]+)\ python_max=([0-9]+) ]]; then
        NPU=${BASH_REMATCH[1]} PYTHON_MAX=${BASH_REMATCH[2]} TORCH=0
    fi
    if [ -z "$NUMPY" ] && [[ $parts =~ numpy=([12]) ]]; then NUMPY=${BASH_REMATCH[1]}; fi
}

clear_environment() { # deletes .venv but for setup.busy: after a kill in the middle, the next call goes on deleting
    if [ -L "$SETUP_VENV" ]; then rm "$SETUP_VENV"; fi # what a link names is not this script's
    mkdir -p "$SETUP_VENV"
    touch "$SETUP_VENV/setup.busy"
    find "$SETUP_VENV" -mindepth 1 -maxdepth 1 ! -name setup.busy -exec rm -rf {} +
}

make_environment() { # leaves a working .venv with pip, a stamp that says "stale", and the mark setup.busy
    local stamp=$SETUP_VENV/setup.stamp
    if [ -e "$SETUP_VENV/setup.busy" ] || [ ! -e "$SETUP_VENV" ]; then
        clear_environment
    elif [ ! -e "$stamp" ]; then
        fail "$SETUP_VENV was not made by this script, so this script does not change it. Move it away (mv .venv .venv.old), then type the same command again." \
            "$SETUP_VENV 不是由本脚本创建的，所以没有改动它。请先把它移走（mv .venv .venv.old），然后再次输入同一条命令。"
    elif ! grep -qxF "root $SETUP_ROOT" "$stamp" || ! "$SETUP_VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        clear_environment # the folder was moved, or its Python is gone
    elif [ "$PYTHON_MAX" -gt 0 ] && ! "$SETUP_VENV/bin/python" -c "import sys; sys.exit(sys.version_info[1] > $PYTHON_MAX)"; then
        clear_environment # its Python is too new for the requested torch_npu
    fi
    touch "$SETUP_VENV/setup.busy"
    : >"$SETUP_LOG"
    if [ ! -e "$stamp" ]; then
        step "Python $PYTHON_VERSION" "$PYTHON" -m venv "$SETUP_VENV" ||
            fail_with_log "$PYTHON -m venv failed. Fix what the lines above say, then type the same command again." \
                "$PYTHON -m venv 执行失败。请按上面的信息处理，然后再次输入同一条命令。"
        echo "root $SETUP_ROOT" >"$stamp"
    fi
    echo stale >>"$stamp"
    SETUP_KEEP=1
}

setup_main() {
    set -euo pipefail
    DEV=0 TORCH=1 NPU='' PYTHON_MAX=0 NUMPY=''
    SETUP_LOG=$SETUP_VENV/setup.log
    local stamp
    while [ $# -gt 0 ]; do
        case $1 in
        --dev) DEV=1 ;;
        -h | --help)
            show_help "$SETUP_ROOT/setup_env.sh"
            ;;
        --npu) NPU=$2 TORCH=0 && shift ;;
        --python-max) PYTHON_MAX=$2 && shift ;;
        --numpy) NUMPY=$2 && shift ;;
        *) fail "setup_env.sh takes --dev, got $1. Leave $1 out, and type the command again." "setup_env.sh 只认识 --dev，不认识 $1。请去掉它，然后再次输入同一条命令。" ;;
        esac
        shift
    done
    if torch_is_of_npu; then TORCH=0; fi
    keep_parts
    if is_whole; then return; fi
    if command -v flock >/dev/null; then
        exec 9>"$SETUP_ROOT/.venv.lock"
        if flock -n 9 2>/dev/null; then
            : # this set-up is alone
        elif [ $? -eq 1 ]; then # another code: the file system has no locks
            say "waiting for another set-up in this folder to end" "等待本目录的另一次安装结束"
            flock 9
        fi
        keep_parts # another set-up may have changed the installed parts
        if is_whole; then return; fi
    fi
    pick_python
    check_disk torch $((TORCH == 1 ? 8 : 2))
    make_environment
    stamp=$(fingerprint)
    hand_on_index
    get_uv
    install_lock "packages" locks/requirements.lock
    if [ "$TORCH" = 1 ]; then install_lock "torch (2 GB of downloads, unless cached)" locks/requirements-torch.lock; fi
    if [ -n "$NPU" ]; then install_npu; fi
    if [ "$DEV" = 1 ]; then
        install_lock "test tools" locks/requirements-dev.lock
        install_clients
    fi
    if ! install "nanochat" --no-deps --no-build-isolation --editable "$SETUP_ROOT"; then
        fail_with_log "nanochat itself could not be installed. Fix what the lines above say, then type the same command again." \
            "无法安装 nanochat 本身。请按上面的信息处理，然后再次输入同一条命令。"
    fi
    install_rustbpe
    # Last, because the other locks hold numpy 2.
    if [ -n "$NPU" ] && [ "$NUMPY" = 1 ]; then install_lock "numpy 1, for this CANN" locks/requirements-numpy1.lock; fi
    check_imports
    check_compiler
    rm -rf "$SETUP_VENV/uv-cache"
    rm "$SETUP_VENV/setup.busy"
    printf '%s\n' "$stamp" >"$SETUP_VENV/setup.stamp"
    say "ready in $SECONDS s" "完成，用时 $SECONDS 秒"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then setup_main "$@"; fi
