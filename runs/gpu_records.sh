#!/usr/bin/env bash
# Everything that a GPU has to show, the most telling first, in less than ten minutes a time: see
# dev/gpu_records.py. Nothing is installed: torch and numpy have to be there, and python3.
#   bash runs/gpu_records.sh [first|second|third] [--results=out-gpu.tar.gz] [--minutes=9.5] [--show=True]
#     [--text=FILE] [--corpus=FILE] [--peer=PATH_TO_NANOGPT]
#   bash runs/gpu_records.sh --smoke=True
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
if [ -n "${VIRTUAL_ENV:-}" ]; then python=python; fi
exec "$python" dev/gpu_records.py "$@"
