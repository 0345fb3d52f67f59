#!/usr/bin/env bash
# Lint, types and tests. Arguments go to pytest: bash launch/test.sh tests/cache_ops -k gradient
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

ruff check .
ruff format --check .
mypy
python -m pytest "$@"
