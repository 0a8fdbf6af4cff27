#!/usr/bin/env bash
# Runs the main job, with all set-up: bash scripts/demo.sh [options of python -m spmd demo]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh" ""
exec "$PYTHON" -m spmd demo "$@"
