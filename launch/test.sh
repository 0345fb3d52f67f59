#!/usr/bin/env bash
# Lint, types and tests. Arguments go to pytest: bash launch/test.sh tests/cache_ops -k gradient
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

ruff check .
ruff format --check .
mypy
# Two processes of one thread each: most tests are too small for two threads. A file stays together,
# for what its tests share is made once.
OMP_NUM_THREADS=1 python -m pytest --numprocesses 2 --dist loadfile "$@"
