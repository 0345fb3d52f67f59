#!/usr/bin/env bash
# Invariants, training speed and memory, and TTFT at the shape of Qwen2-7B on one GPU, without
# network, model files or data: bash launch/gpu_check.sh [--out FILE] [--parts NAME ...] [--rehearse]
# What it measures: tests/benchmarks/gpu_check.py. PYTHON names an interpreter that has torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then
    python=.venv/bin/python
fi
export HF_HUB_OFFLINE=1
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "$python" tests/benchmarks/gpu_check.py "$@"
