#!/usr/bin/env bash
# Writes the lock files from pyproject.toml: `bash dev/lock.sh`, or with --upgrade for newer versions.
#
# One resolution over everything fixes the versions, so that the three locks agree with each other; then each
# file gets its share with hashes. They hold for Python 3.10 and later on every platform, and name no index.
#   requirements.lock        what runs the project, and what builds it; no torch
#   requirements-torch.lock  torch and its dependencies; an Ascend host takes another pair instead
#   requirements-dev.lock    test tools
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source setup_env.sh
setup_env --dev

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
echo torch >"$scratch/no-torch"

compile() { # on the whole project
    uv pip compile pyproject.toml --universal --python-version 3.10 --no-header --quiet "$@" >/dev/null
}

upgrade=()
if [ "${1:-}" = --upgrade ]; then upgrade=(--upgrade); fi
cat requirements*.lock 2>/dev/null | sed '/--hash/d; s/ *\\$//; /^ *#/d' >"$scratch/all" || true
sort -u "$scratch/all" -o "$scratch/all"
compile --group build --group torch --group dev "${upgrade[@]}" --output-file "$scratch/all"
compile -c "$scratch/all" --generate-hashes --group build --excludes "$scratch/no-torch" --output-file "$scratch/base"
# The groups alone: a file `pyproject.toml` named as the source would bring the project's own dependencies in.
uv pip compile --group torch --universal --python-version 3.10 --no-header --quiet --generate-hashes \
    -c "$scratch/all" --output-file "$scratch/torch" >/dev/null
uv pip compile --group dev --universal --python-version 3.10 --no-header --quiet --generate-hashes \
    -c "$scratch/all" --output-file "$scratch/dev" >/dev/null
for share in base torch dev; do
    name=requirements-$share.lock
    if [ "$share" = base ]; then name=requirements.lock; fi
    # The comments say where a package comes from in terms of this run's scratch folder: not worth keeping.
    grep -v '^ *#' "$scratch/$share" >"$name"
    echo "$name: $(grep -c '==' "$name") packages"
done
