#!/usr/bin/env bash
# Downloads FineWeb-Edu, three shards at a time. Finished shards are kept: after a stop, the same command downloads the
# rest. A disk that is too small is refused before the download starts. Flags of nanochat.dataset may follow.
#   bash runs/download_fineweb_data.sh       200 shards (20 GB)
#   bash runs/download_fineweb_data.sh 8     8 shards
#   HF_ENDPOINT=https://hf-mirror.com bash runs/download_fineweb_data.sh 8

# 下载 FineWeb-Edu，同时下载三个分片。已经下载完的分片会保留：停止之后，同一条命令只下载其余的部分。
# 磁盘太小时，在开始下载之前就会拒绝。后面可以写 nanochat.dataset 的选项。
#   bash runs/download_fineweb_data.sh       200 个分片（20 GB）
#   bash runs/download_fineweb_data.sh 8     8 个分片
#   HF_ENDPOINT=https://hf-mirror.com bash runs/download_fineweb_data.sh 8

set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source runs/common.sh
case ${1:-} in -h | --help) show_help runs/download_fineweb_data.sh ;; esac

shards=${1:-200} flags=("${@:2}")
set -- # setup_ascend.sh must not see these arguments
prepare
python -m nanochat.dataset -n "$shards" "${flags[@]}"
