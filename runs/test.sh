#!/usr/bin/env bash
# Installs what the tests need into .venv (or into the virtual environment that is active) and runs them.
# Some tests want real texts: FLATGPT_TEST_DATA names their folder; without it they are skipped.
#   bash runs/test.sh [pytest's flags]
#   bash runs/test.sh --quick [pytest's flags]     about a minute: after an edit
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${VIRTUAL_ENV:-}" ]; then source runs/venv.sh; fi
export OMP_NUM_THREADS=1  # tiny networks: a second thread only waits. Two tests run at a time instead

tests=(tests)
if [ "${1:-}" = --quick ]; then
  shift
  tests=(tests/test_{configurator,dataset,model,optim,sample,sampling,train}.py -m 'not slow')
fi
python -m pip install --quiet --disable-pip-version-check -r tests/requirements.txt
python -m pytest -q -n 2 "${tests[@]}" "$@"
