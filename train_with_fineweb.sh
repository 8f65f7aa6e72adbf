#!/usr/bin/env bash
# The name that older guides use for runs/train_with_fineweb.sh.
exec bash "$(dirname "$0")/runs/train_with_fineweb.sh" "$@"
