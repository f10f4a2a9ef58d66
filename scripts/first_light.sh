#!/usr/bin/env bash
# What works on this machine's accelerator, and how fast: one table, and first_light.json to send.
#   bash scripts/first_light.sh [--out FILE] [--patience 2]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python}" "$here/first_light.py" "$@"
