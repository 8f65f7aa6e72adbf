#!/usr/bin/env bash
# The name that older guides use for runs/train_distributed_npu.sh.
exec bash "$(dirname "$0")/runs/train_distributed_npu.sh" "$@"
