#!/usr/bin/env bash
# Check results and speed on a GPU, in at most eight minutes (dev/gpu_check.py). It needs torch and numpy, and
# installs nothing. --tiny=True tests the script itself on a CPU.
#   bash runs/gpu_check.sh [--peer=NANOGPT] [--data_dir=FOLDER] [--only=CHECKS] [--minutes=8] [--tiny=True]
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
if [ -n "${VIRTUAL_ENV:-}" ]; then python=python; fi
exec "$python" dev/gpu_check.py "$@"
