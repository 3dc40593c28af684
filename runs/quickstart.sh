#!/usr/bin/env bash
# From a fresh clone to a model that writes Python, on any machine: installs into .venv, makes the default
# dataset, trains for two to three minutes on two CPU cores, and prints samples. Run again, it continues.
#   bash runs/quickstart.sh [train.py's flags]
set -euo pipefail
cd "$(dirname "$0")/.."
[ -d .venv ] || python3 -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
[ -f data/pystdlib/meta.json ] || .venv/bin/python prepare.py
.venv/bin/python train.py config/quickstart.py --init_from=auto "$@"
.venv/bin/python sample.py --out_dir=out-quickstart --start='class ' --num_samples=3 --max_new_tokens=400 \
  --temperature=0.6
