#!/usr/bin/env bash
# Runs the linters and the tests, with all set-up: bash scripts/test.sh [arguments of pytest]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh" "[test]"
bin="$(dirname "$PYTHON")"

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the tensors of tests are small, and their ranks are many

status=0
"$bin/ruff" check . || status=1
"$bin/lint-imports" --no-logo || status=1
# Three workers on two cores: each waits now and then for processes that it has started.
"$PYTHON" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@" || status=$? # last, for its closing line says how it went
exit $status
