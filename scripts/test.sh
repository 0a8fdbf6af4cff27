#!/usr/bin/env bash
# Runs the linters and the tests, with all set-up: bash scripts/test.sh [arguments of pytest]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh" "[test]"
bin="$(dirname "$PYTHON")"

status=0
"$bin/ruff" check . || status=1
"$bin/lint-imports" || status=1
"$PYTHON" -m pytest "$@" || status=$? # last, for its closing line says how it went
exit $status
