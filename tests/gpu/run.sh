#!/usr/bin/env bash
# The generated kernels on one NVIDIA GPU, within 8 minutes: right against torch, timed against Inductor, SDPA and
# cuBLAS as interleaved pairs. Results: $OUT/kernels.json (OUT is ./gpu-results unless set).
# The interpreter of the environment must have torch 2.11 or later with CUDA; nothing is installed.
set -euo pipefail
cd "$(dirname "$0")/../.."

export OUT=${OUT:-$PWD/gpu-results}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1
mkdir -p "$OUT"
python=${PYTHON:-python3}
exec timeout 480 "$python" -m tests.gpu.run "$OUT/kernels.json" "${@:-420}"
