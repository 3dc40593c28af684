#!/usr/bin/env bash
# From a fresh clone to a model that writes Python, on any machine: installs into .venv, makes the default
# dataset, trains within four minutes on two CPU cores, samples and evaluates. Run it again to resume.
#   bash runs/quickstart.sh [train.py's flags but --out_dir]
set -euo pipefail
cd "$(dirname "$0")/.."
source runs/venv.sh
python -m pip install --quiet --disable-pip-version-check -r requirements.txt
if [ ! -f data/pystdlib/meta.json ]; then python prepare.py; fi
python train.py config/quickstart.py --auto_resume=True "$@"
python sample.py --out_dir=out-quickstart --start='class ' --num_samples=3 --max_new_tokens=400 \
  --temperature=0.6
python eval.py --out_dir=out-quickstart
echo "its curve:  out-quickstart/loss.png"
echo "its report: out-quickstart/report.md"
echo "to go on:   source $bin/activate"
