#!/usr/bin/env bash
# The name that older guides use for runs/download_fineweb_data.sh.
exec bash "$(dirname "$0")/runs/download_fineweb_data.sh" "$@"
