#!/bin/sh
# Writes ci/constraints.txt anew from pyproject.toml; see ci/lock.py for what is kept and what moves.
set -eu
cd "$(dirname "$0")/.."
exec .venv/bin/python ci/lock.py "$@"
