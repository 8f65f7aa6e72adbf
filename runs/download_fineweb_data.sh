#!/usr/bin/env bash
# Fetches FineWeb-Edu: 200 shards (20 GB), or as many as are asked for, three at a time. What has come is kept, and
# the same command goes on with the rest; too small a disk is refused before the first byte.
#   bash runs/download_fineweb_data.sh
#   bash runs/download_fineweb_data.sh 8
#   HF_ENDPOINT=https://hf-mirror.com bash runs/download_fineweb_data.sh 8
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source runs/common.sh

shards=${1:-200}
set -- # setup_ascend.sh must not take it for its own
prepare
python -m nanochat.dataset -n "$shards"
