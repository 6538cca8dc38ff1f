#!/bin/sh
# Everything that can be judged without running the engine. All of it runs, whatever failed before.
set -u
cd "$(dirname "$0")/.."
failed=

judge() {
    name=$1
    shift
    printf '== %s\n' "$name"
    "$@" || failed="$failed $name"
}

judge ruff .venv/bin/python -m ruff check .
judge format .venv/bin/python -m ruff format --check .
judge mypy .venv/bin/python -m mypy
judge imports .venv/bin/python -c 'import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())'

if [ -n "$failed" ]; then
    printf 'make check: failed:%s\n' "$failed" >&2
    exit 1
fi
echo 'make check: all hold'
