# Sourced by demo.sh and test.sh: leaves in $PYTHON an interpreter that has spmd installed, editable, with $1 (its
# extras, such as "[test]"). Uses the active virtual environment, else makes and keeps one in .venv.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    echo "error: $*" >&2
    exit 1
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

make_venv() {
    local python
    for python in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do
        if new_enough "$python"; then
            echo "making a virtual environment in .venv" >&2
            "$python" -m venv --clear .venv >&2 && return
            fail "$python cannot make a virtual environment; on Debian and Ubuntu, install its python3-venv package"
        fi
    done
    fail "spmd needs Python 3.10 or newer, and there is none on PATH ($(python3 --version 2>&1 || true))"
}

if [[ -n "${VIRTUAL_ENV:-}" ]]; then
    PYTHON="$VIRTUAL_ENV/bin/python"
    new_enough "$PYTHON" || fail "spmd needs Python 3.10 or newer, and the active virtual environment $VIRTUAL_ENV has none"
else
    PYTHON="$PWD/.venv/bin/python"
    "$PYTHON" -m pip --version >/dev/null 2>&1 || make_venv
fi

# What is installed is known by the place and the content of what says so.
stamp="$("$PYTHON" -c 'import sys; print(sys.prefix)')/.spmd${1:-}"
content="$(printf '%s\n' "$PWD" && cat setup.py pyproject.toml)"
if [[ "$(cat "$stamp" 2>/dev/null)" != "$content" ]]; then
    echo "installing spmd${1:-} and what it needs (the first time takes minutes: torch is large)" >&2
    "$PYTHON" -m pip install -qq --disable-pip-version-check --editable ".${1:-}" >&2 ||
        fail "pip could not install spmd${1:-}: see above"
    printf '%s\n' "$content" >"$stamp"
fi
