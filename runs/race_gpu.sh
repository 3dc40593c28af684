#!/usr/bin/env bash
# The races on a GPU, their table and pictures into dev/records/: see dev/race.py. About an hour on one GPU
# like an H100 (not measured).
#   bash runs/race_gpu.sh [--text=input.txt] [--gutenberg=FOLDER] [--seeds=3] [--minutes=8] [--smoke]
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${VIRTUAL_ENV:-}" ]; then
  [ -d .venv ] || python3 -m venv .venv
  PATH="$PWD/.venv/bin:$PATH"
fi
python -c "import torch" 2> /dev/null || python -m pip install --quiet --disable-pip-version-check torch
python -m pip install --quiet --disable-pip-version-check numpy tiktoken matplotlib
python dev/race.py gpu "$@"
