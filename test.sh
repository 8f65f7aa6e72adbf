#!/usr/bin/env bash
# Runs every test and linter in .venv, and makes .venv first if needed. Other flags and paths go to pytest.
#   bash test.sh            everything
#   bash test.sh --quick    without the tests of ranks, browser, whole stages and the emulated NPU
#   bash test.sh --lint     only the linters, as pre-commit does
#   bash test.sh --quick tests/test_common.py -k atomic

# 在 .venv 里运行全部测试和代码检查，需要时先创建 .venv。其他选项和路径交给 pytest。
#   bash test.sh            全部
#   bash test.sh --quick    不含多进程、浏览器、完整阶段和模拟 NPU 的测试
#   bash test.sh --lint     只做代码检查，与 pre-commit 相同
#   bash test.sh --quick tests/test_common.py -k atomic

set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
source ./setup_env.sh
source runs/words.sh

mode=full
pytest_args=()
for word in "$@"; do
    case $word in
    -h | --help) show_help test.sh ;;
    --quick) mode=quick ;;
    --lint) mode=lint ;;
    *) pytest_args+=("$word") ;;
    esac
done

setup_env --dev
output=$(mktemp) cache=$(mktemp -d)
trap 'rm -rf "$output" "$cache"' EXIT
passed=0
failed=()

note() { # NAME CODE START: count a result and print its line
    if [ "$2" -eq 0 ]; then
        passed=$((passed + 1))
        echo "ok: $1 ($((SECONDS - $3)) s)"
    else
        failed+=("$1")
        echo "FAILED: $1 ($((SECONDS - $3)) s)"
    fi
}

check() { # NAME COMMAND...: run a check and show its output if it fails; later checks run in any case
    local name=$1 start=$SECONDS code=0
    shift
    "$@" >"$output" 2>&1 || code=$?
    if [ $code -ne 0 ]; then cat "$output"; fi
    note "$name" $code $start
}

has() { # COMMAND NAME REASON: whether a command exists; without it the check is skipped, which fails in CI
    if command -v "$1" >/dev/null; then return; fi
    echo "skipped: $2: $3"
    if [ "${CI:-}" = true ]; then note "$2" 1 $SECONDS; fi
    return 1
}

cargo_check() { # NAME SUBCOMMAND ARGUMENTS...
    check "cargo $1" cargo "$1" --manifest-path rustbpe/Cargo.toml "${@:2}"
}

lint() {
    shopt -s nullglob # a folder may have no scripts
    local scripts=(./*.sh .ci/run dev/*.sh runs/*.sh)
    check "ruff format" ruff format --check .
    check "ruff check" ruff check .
    check "pyright" env PYRIGHT_PYTHON_IGNORE_WARNINGS=1 pyright # otherwise pyright asks a registry for its newest version
    if has shellcheck shellcheck "no wheel for this machine"; then
        check "shellcheck" shellcheck --external-sources "${scripts[@]}"
    fi
    if has cargo "cargo fmt, clippy and test" "no Rust toolchain"; then
        cargo_check fmt --check
        cargo_check clippy --all-targets --all-features --quiet -- -D warnings
    fi
}

tests() {
    # Several processes share the cores, so each gets one thread, and waiting threads do not spin. There is one process
    # more than cores, since many tests wait for a server or for a file.
    export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
    unset PYTHONDONTWRITEBYTECODE # hundreds of processes are started, and each would compile what it imports again
    local workers select=() start code=0
    workers=$(python -c 'import os
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
print(min(8, cores + 1))')
    if [ $mode = quick ]; then
        select=(-m "not (slow or ranks or smoke or browser or contract or npu)")
    fi
    if command -v cargo >/dev/null; then cargo_check test --quiet; fi
    start=$SECONDS
    python -m pytest -n "$workers" --dist worksteal -o cache_dir="$cache" "${select[@]}" "${pytest_args[@]}" || code=$?
    if [ $code -eq 1 ]; then again "${select[@]}" "${pytest_args[@]}" && code=0; fi
    note pytest $code "$start"
}

again() { # ARGUMENTS...: whether up to 3 failed tests pass alone, as one does whose deadline a busy machine missed
    local names
    names=$(sed -n 's/^ *"\(.*\)": true,\{0,1\}$/\1/p' "$cache/v/cache/lastfailed" 2>/dev/null)
    if [ -z "$names" ] || [ "$(wc -l <<<"$names")" -gt 3 ]; then return 1; fi
    echo "test.sh: runs what failed once more, alone"
    python -m pytest --last-failed -o cache_dir="$cache" "$@" || return 1
    echo "unsteady, failed beside other tests and passed alone, so look for a race or a short deadline:"
    echo "$names"
}

lint
if [ $mode != lint ]; then tests; fi
if [ ${#failed[@]} -gt 0 ]; then
    names=$(printf ', %s' "${failed[@]}")
    echo "test.sh: $passed checks passed, ${#failed[@]} FAILED (${names:2}) in $SECONDS s"
    exit 1
fi
echo "test.sh: all $passed checks passed in $SECONDS s"
