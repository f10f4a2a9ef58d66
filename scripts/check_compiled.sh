#!/usr/bin/env bash
# Compiles the programs for GPUs and TPUs that are not there, and tests what they move, copy and
# exchange. No device and no driver is needed; the compilers take 6 GB in an environment of their own.
#   bash scripts/check_compiled.sh [ENVIRONMENT]     # by default ~/.cache/marft_jax/compilers
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
environment=${1:-$HOME/.cache/marft_jax/compilers}
if [[ ! -x $environment/bin/pytest ]]; then
  "${PYTHON:-python3}" -m venv "$environment"
  "$environment/bin/pip" install --quiet "${here}[gpu-plans,tpu]"
fi
cd "$here"
export JAX_PLATFORMS=cpu MARFT_OPTIMISED=1 PYTHONPATH=$here
export MARFT_FINDINGS=${MARFT_FINDINGS:-compiled.json}
"$environment/bin/python" -m pytest -o addopts= -q tests/extras/planning/test_compiled.py
cat "$MARFT_FINDINGS"
