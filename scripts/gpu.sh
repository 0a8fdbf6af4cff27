#!/usr/bin/env bash
# Shows on a machine with one GPU what one GPU can show, and prints one table: bash scripts/gpu.sh [options of gpu.py]
# Without a GPU, `bash scripts/gpu.sh --device cpu` runs all parts that a CPU can run, and says what the others would.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh" "[test]"
exec "$PYTHON" benchmarks/gpu.py "$@"
