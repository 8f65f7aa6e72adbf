#!/usr/bin/env bash
# The name that older guides use for setup_ascend.sh --fix.
exec bash "$(dirname "$0")/setup_ascend.sh" --fix "$@"
