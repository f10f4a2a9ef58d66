#!/usr/bin/env bash
# Starts a run on all workers of a TPU pod slice; after a preemption the same line continues it.
#   TPU=my-slice ZONE=us-east5-b RUN=/mnt/shared/runs/mine scripts/tpu_pod.sh --config mine.yaml
# RUN must be on storage that all workers share (Filestore, or a bucket mounted with gcsfuse).
set -euo pipefail
: "${TPU:?the name of the slice}" "${ZONE:?its zone}" "${RUN:?the run directory}"
SOURCE=${SOURCE:-$(git config --get remote.origin.url)} # where the workers clone the package from
REVISION=${REVISION:-$(git rev-parse HEAD)}

ssh_all() { gcloud compute tpus tpu-vm ssh "$TPU" --zone "$ZONE" --worker all --command "$1"; }

ssh_all "
  set -e
  test -d marft_jax || git clone $(printf %q "$SOURCE") marft_jax
  cd marft_jax && git fetch -q && git checkout -q $(printf %q "$REVISION")
  test -d .venv || python3 -m venv .venv
  .venv/bin/python -m pip install -q -e '.[tpu,hub]'"
ssh_all "cd marft_jax && .venv/bin/python -m marft_jax.train --run.dir $(printf %q "$RUN") \
  --mesh.coordinator auto --model.dtype bfloat16 $(printf '%q ' "$@")"
