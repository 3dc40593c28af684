#!/usr/bin/env bash
# Everything that a GPU has to show, in steps of less than nine minutes that continue where they stopped: see
# dev/gpu_records.py. About two hours on one GPU like an H100 (not measured).
#   bash runs/gpu_records.sh [--out=FOLDER] [--peer=PATH_TO_NANOGPT] [--text=input.txt] [--gutenberg=FOLDER]
#     [--only=STEP,STEP] [--list] [--minutes=9] [--table] [--smoke]
set -euo pipefail
cd "$(dirname "$0")/.."
if ! python -c "import torch, numpy" 2> /dev/null; then
  [ -d .venv ] || python3 -m venv .venv
  PATH="$PWD/.venv/bin:$PATH"
  python -c "import torch, numpy" 2> /dev/null ||
    python -m pip install --quiet --disable-pip-version-check torch numpy tiktoken matplotlib
fi
python dev/gpu_records.py "$@"
