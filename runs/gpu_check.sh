#!/usr/bin/env bash
# What a GPU has to show, in at most eight minutes: is it right, and how fast? See dev/gpu_check.py. Nothing
# is installed: torch and numpy have to be there. With --tiny=True it runs on a CPU, to see that it does.
#   bash runs/gpu_check.sh [--peer=NANOGPT] [--data_dir=FOLDER] [--only=PARTS] [--minutes=8] [--tiny=True]
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
if [ -n "${VIRTUAL_ENV:-}" ]; then python=python; fi
exec "$python" dev/gpu_check.py "$@"
