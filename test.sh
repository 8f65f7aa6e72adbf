#!/usr/bin/env bash
# Runs every test and linter, in .venv, which it makes if needed. Everything else is handed on to pytest.
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

check() { # NAME COMMAND...: one line if it passes, its output if it fails; the others run in any case
    local name=$1 start=$SECONDS
    shift
    if "$@" >"$output" 2>&1; then
        passed=$((passed + 1))
        echo "ok: $name ($((SECONDS - start)) s)"
    else
        failed+=("$name")
        cat "$output"
        echo "FAILED: $name ($((SECONDS - start)) s)"
    fi
}

lint() {
    shopt -s nullglob # a folder may hold none yet
    local scripts=(./*.sh .ci/run dev/*.sh runs/*.sh)
    check "ruff format" ruff format --check .
    check "ruff check" ruff check .
    check "pyright" env PYRIGHT_PYTHON_IGNORE_WARNINGS=1 pyright # else it asks a registry for its newest version
    check "shellcheck" shellcheck --external-sources "${scripts[@]}"
    if [ -f rustbpe/Cargo.toml ] && command -v cargo >/dev/null; then
        check "cargo fmt" cargo fmt --manifest-path rustbpe/Cargo.toml --check
        check "cargo clippy" cargo clippy --manifest-path rustbpe/Cargo.toml --all-targets --quiet -- -D warnings
    fi
}

tests() {
    # Several processes share the cores: one thread each, and waiting threads that do not spin.
    export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
    local workers select=()
    workers=$(python -c 'import os; print(max(2, min(8, len(os.sched_getaffinity(0)))))')
    if [ $mode = quick ]; then
        select=(-m "not (slow or ranks or smoke or browser or contract or npu)")
    fi
    if [ -f rustbpe/Cargo.toml ] && command -v cargo >/dev/null; then
        check "cargo test" cargo test --manifest-path rustbpe/Cargo.toml --quiet
    fi
    local start=$SECONDS code=0
    python -m pytest -n "$workers" "${select[@]}" "${pytest_args[@]}" || code=$?
    if [ $code -eq 0 ]; then
        passed=$((passed + 1))
        echo "ok: pytest ($((SECONDS - start)) s)"
    else
        failed+=(pytest)
        echo "FAILED: pytest ($((SECONDS - start)) s)"
    fi
}

lint
if [ $mode != lint ]; then tests; fi
if [ ${#failed[@]} -eq 0 ]; then
    echo "test.sh: all $passed checks passed in $SECONDS s"
else
    echo "test.sh: $passed checks passed, ${#failed[@]} FAILED ($(printf '%s, ' "${failed[@]}" | sed 's/, $//')) in $SECONDS s"
    exit 1
fi
