#!/usr/bin/env bash
# Writes the lock files from pyproject.toml. Run `bash dev/lock.sh`; add --upgrade to get newer versions.
#
# One resolution over all dependencies fixes the versions, so that the three lock files agree with each other. Then each
# file gets its packages with their hashes. The files hold for Python 3.10 and later on every platform, and name no index.
#   requirements.lock        the packages that run and build the project, without torch
#   requirements-torch.lock  torch and its dependencies; an Ascend host gets a pair of torch and torch_npu instead
#   requirements-dev.lock    the test tools
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
    # Keep the locked versions as long as they fit.
    sed '/--hash/d; s/ *\\$//' requirements.lock requirements-torch.lock requirements-dev.lock | sort -u >"$all"
fi
compile pyproject.toml --group build --group torch --group dev --output-file "$all"
echo torch >"$scratch/torch"
with_hashes=(--generate-hashes --constraints "$all" --output-file)
compile pyproject.toml --group build --excludes "$scratch/torch" "${with_hashes[@]}" requirements.lock
compile --group torch "${with_hashes[@]}" requirements-torch.lock
compile --group dev "${with_hashes[@]}" requirements-dev.lock
grep -c '==' requirements*.lock
