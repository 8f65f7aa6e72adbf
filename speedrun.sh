#!/usr/bin/env bash
# The whole pipeline, from nothing to a model to chat with: bash speedrun.sh [--preset smoke] [--data NAME|DIR]
# Stopped at any moment and typed again, it goes on where it was.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source setup_env.sh
# shellcheck disable=SC2119  # its flags are not ours
setup_env
