#!/usr/bin/env bash
#SBATCH --job-name=marft
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
# One process per node, all its GPUs:
#   sbatch --nodes 4 scripts/slurm.sh --config mine.yaml --run.dir /shared/runs/mine
# Two minutes before its time is over the job is told; it saves, leaves with 75, and is queued again.
set -euo pipefail
PYTHON=${PYTHON:-.venv/bin/python}
# Left alone, JAX takes one GPU for each SLURM task.
export JAX_LOCAL_DEVICE_IDS=${JAX_LOCAL_DEVICE_IDS:-$(seq -s, 0 $((SLURM_GPUS_ON_NODE - 1)))}

trap 'true' TERM # srun passes the signal on; this shell only has to live long enough to requeue
status=0
srun --kill-on-bad-exit=1 "$PYTHON" -m marft_jax.train \
  --mesh.coordinator auto --model.dtype bfloat16 "$@" || status=$?
if [[ $status -eq 75 ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
