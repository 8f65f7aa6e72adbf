#!/usr/bin/env bash
# Builds what a release consists of. Run `bash dev/build_wheels.sh [FOLDER]`; the folder is dist by default.
#
#   nanochat_ascend-*.whl     the packages nanochat, scripts and tasks, for every platform
#   rustbpe-*-abi3-*.whl      rustbpe for x86-64 and for aarch64, which many Ascend servers are, and every Python from 3.10 on
#   rustbpe-*.tar.gz          rustbpe's source, from which pip builds a wheel for other architectures
#
# It needs cargo, and the packages of the group `build` in the Python that `python` names. With zig as its linker, a
# wheel of rustbpe needs glibc 2.28, as torch does; without, it needs the glibc of this host. A wheel for the other
# architecture needs zig, and Rust's standard library for that architecture. nanochat is built in a copy of the tree
# without files that git ignores, so that nothing left over from earlier builds gets into its wheel.
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
mkdir -p "${1:-dist}"
folder=$(cd "${1:-dist}" && pwd)

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files -z --cached --others --exclude-standard -- pyproject.toml LICENSE README.md nanochat scripts tasks |
    tar --null --ignore-failed-read -cf - -T - | tar -xf - -C "$copy"

python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$folder" "$copy"

rust=(--manifest-path rustbpe/Cargo.toml --out "$folder")
linker=()
if python -m ziglang version >/dev/null 2>&1; then
    linker=(--zig --compatibility manylinux_2_28)
else
    echo "without zig the wheel of rustbpe needs the glibc of this host; for glibc 2.28 first run: python -m pip install ziglang"
fi
for machine in x86_64 aarch64; do
    target=$machine-unknown-linux-gnu
    if [ "$machine" != "$(uname -m)" ] && { [ ${#linker[@]} -eq 0 ] || ! rustup target list --installed | grep -qx "$target"; }; then
        echo "left out: the wheel for $machine; first run: rustup target add $target && python -m pip install ziglang"
        continue
    fi
    python -m maturin build --release --locked --features abi3 --target "$target" ${linker[@]+"${linker[@]}"} "${rust[@]}"
done
python -m maturin sdist "${rust[@]}"
ls -l "$folder"
