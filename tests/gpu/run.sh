#!/usr/bin/env bash
# On one NVIDIA GPU, within 8 minutes: whole models compiled with backend="sits" against eager, then the generated
# kernels, right against torch and timed against Inductor, SDPA and cuBLAS as interleaved pairs.
# Results: $OUT/models.json and $OUT/kernels.json (OUT is ./gpu-results unless set).
# The interpreter of the environment must have torch 2.11 or later with CUDA; nothing is installed.
set -euo pipefail
cd "$(dirname "$0")/../.."

export OUT=${OUT:-$PWD/gpu-results}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1
export SITSOPT_CACHE=${SITSOPT_CACHE:-$OUT/cache}
mkdir -p "$OUT"
python=${PYTHON:-python3}
status=0
timeout 230 "$python" -m tests.gpu.models "$OUT/models.json" 130 || status=$?
timeout 240 "$python" -m tests.gpu.run "$OUT/kernels.json" 200 || status=$?
exit $status
