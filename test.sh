#!/usr/bin/env bash
# Runs every test and linter, in .venv, which it makes if needed. What is not named here goes to pytest.
#   bash test.sh            all of it
#   bash test.sh --quick    without ranks, browser, whole stages and the emulated NPU
#   bash test.sh --lint     the linters only: what pre-commit runs
#   bash test.sh --quick tests/test_common.py -k atomic
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source setup_env.sh

mode=full
pytest_args=()
for word in "$@"; do
    case $word in
    --quick) mode=quick ;;
    --lint) mode=lint ;;
    *) pytest_args+=("$word") ;;
    esac
done

setup_env --dev
output=$(mktemp)
trap 'rm -f "$output"' EXIT
passed=0
failed=()

note() { # NAME CODE START: counts a result and prints its line
    if [ "$2" -eq 0 ]; then
        passed=$((passed + 1))
        echo "ok: $1 ($((SECONDS - $3)) s)"
    else
        failed+=("$1")
        echo "FAILED: $1 ($((SECONDS - $3)) s)"
    fi
}

check() { # NAME COMMAND...: its output is shown if it fails; the others run in any case
    local name=$1 start=$SECONDS code=0
    shift
    "$@" >"$output" 2>&1 || code=$?
    if [ $code -ne 0 ]; then cat "$output"; fi
    note "$name" $code $start
}

has() { # COMMAND NAME REASON: without the command the check is left out; in CI that is a failure
    if command -v "$1" >/dev/null; then return; fi
    echo "skipped: $2: $3"
    if [ "${CI:-}" = true ]; then note "$2" 1 $SECONDS; fi
    return 1
}

cargo_check() { # NAME SUBCOMMAND ARGUMENTS...
    check "cargo $1" cargo "$1" --manifest-path rustbpe/Cargo.toml "${@:2}"
}

lint() {
    shopt -s nullglob # a folder may hold none yet
    local scripts=(./*.sh .ci/run dev/*.sh runs/*.sh)
    check "ruff format" ruff format --check .
    check "ruff check" ruff check .
    check "pyright" env PYRIGHT_PYTHON_IGNORE_WARNINGS=1 pyright # else it asks a registry for its newest version
    if has shellcheck shellcheck "no wheel for this machine"; then
        check "shellcheck" shellcheck --external-sources "${scripts[@]}"
    fi
    if has cargo "cargo fmt, clippy and test" "no Rust toolchain"; then
        cargo_check fmt --check
        cargo_check clippy --all-targets --all-features --quiet -- -D warnings
    fi
}

tests() {
    # Several processes share the cores: one thread each, and waiting threads that do not spin.
    export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
    local workers select=() start code=0
    workers=$(python -c 'import os
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
print(max(2, min(8, cores)))')
    if [ $mode = quick ]; then
        select=(-m "not (slow or ranks or smoke or browser or contract or npu)")
    fi
    if command -v cargo >/dev/null; then cargo_check test --quiet; fi
    start=$SECONDS
    python -m pytest -n "$workers" --dist worksteal "${select[@]}" "${pytest_args[@]}" || code=$?
    note pytest $code "$start"
}

lint
if [ $mode != lint ]; then tests; fi
if [ ${#failed[@]} -gt 0 ]; then
    names=$(printf ', %s' "${failed[@]}")
    echo "test.sh: $passed checks passed, ${#failed[@]} FAILED (${names:2}) in $SECONDS s"
    exit 1
fi
echo "test.sh: all $passed checks passed in $SECONDS s"
