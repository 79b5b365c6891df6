#!/usr/bin/env bash
# On one NVIDIA GPU, within 8 minutes: whole models compiled with backend="sits" against eager, then the generated
# kernels, right against torch and timed against Inductor, SDPA and cuBLAS as interleaved pairs; between them decode
# steps captured as CUDA graphs ($OUT/regions.json).
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
timeout 180 "$python" -m tests.gpu.models "$OUT/models.json" 110 || status=$?
timeout 110 "$python" -m tests.gpu.regions "$OUT/regions.json" || status=$?
timeout 185 "$python" -m tests.gpu.run "$OUT/kernels.json" 160 || status=$?
exit $status
