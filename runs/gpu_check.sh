#!/usr/bin/env bash
# Check results, then speed, on a GPU (dev/gpu_check.py). It needs torch and numpy, and installs nothing.
# --tiny=True tests the script itself on a CPU.
#   bash runs/gpu_check.sh --only=right [--data_dir=FOLDER] [--tiny=True]                 five minutes
#   bash runs/gpu_check.sh --only=fast [--peer=NANOGPT] [--data_dir=FOLDER] [--minutes=N]  thirteen
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
if [ -n "${VIRTUAL_ENV:-}" ]; then python=python; fi
exec "$python" dev/gpu_check.py "$@"
