#!/usr/bin/env bash
# The name that older guides use for runs/quick_fineweb_test.sh.
exec bash "$(dirname "$0")/runs/quick_fineweb_test.sh" "$@"
