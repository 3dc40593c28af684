#!/usr/bin/env bash
# The races on a CPU, their tables and pictures into dev/records/: see dev/race.py. A seed of the first takes
# about seven minutes; the second, with its sweep and its ten minutes once, two hours.
#   bash runs/race_cpu.sh [--peer=PATH_TO_NANOGPT] [--text=input.txt] [--gutenberg=FOLDER] [--seeds=3]
#     [--minutes=3] [--long_minutes=10] [--smoke]
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${VIRTUAL_ENV:-}" ]; then source runs/venv.sh; fi
python -m pip install --quiet --disable-pip-version-check -r requirements.txt matplotlib
python dev/race.py "$@"
