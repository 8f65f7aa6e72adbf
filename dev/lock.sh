#!/usr/bin/env bash
# Writes the lock files from pyproject.toml: `bash dev/lock.sh`, or with --upgrade for newer versions.
#
# One resolution over everything fixes the versions, so that the three locks agree with each other; then each
# file gets its share, with hashes. They hold for Python 3.10 and later on every platform, and name no index.
#   requirements.lock        what runs the project and what builds it, without torch
#   requirements-torch.lock  torch and its dependencies; an Ascend host takes another pair instead
#   requirements-dev.lock    test tools
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source setup_env.sh
setup_env --dev

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
all=$scratch/all

compile() {
    uv pip compile --universal --python-version 3.10 --no-header --no-annotate --quiet "$@" >/dev/null
}

if [ "${1:-}" != --upgrade ]; then
    # What is locked now is preferred, as long as it fits.
    sed '/--hash/d; s/ *\\$//' requirements.lock requirements-torch.lock requirements-dev.lock | sort -u >"$all"
fi
compile pyproject.toml --group build --group torch --group dev --output-file "$all"
echo torch >"$scratch/torch"
with_hashes=(--generate-hashes --constraints "$all" --output-file)
compile pyproject.toml --group build --excludes "$scratch/torch" "${with_hashes[@]}" requirements.lock
compile --group torch "${with_hashes[@]}" requirements-torch.lock
compile --group dev "${with_hashes[@]}" requirements-dev.lock
grep -c '==' requirements*.lock
