#!/usr/bin/env bash
# Installs what the tests need into .venv (or into the virtual environment that is active) and runs them.
# Some tests want real texts: FLATGPT_TEST_DATA names their folder; without it they are skipped.
#   bash runs/test.sh [pytest's flags]
#   bash runs/test.sh --quick [pytest's flags]     about a minute: for a person who edits
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${VIRTUAL_ENV:-}" ]; then source runs/venv.sh; fi
export OMP_NUM_THREADS=1  # tiny networks: a second thread only waits. Two tests run at a time instead

groups=(plot test hf)
if [ "${1:-}" = --quick ]; then
  shift
  # the rules of the house, knobs, data, network, optimizer, a run and its resume, samples; of those not the
  # ones that start processes, compile, or try every size
  tests=(tests/test_{house,configurator,dataset,model,optim,train,sample}.py)
  slow="every_size or any_length or kill or ctrl_c or terminal or pipe or any_folder or compile or wandb"
  tests+=(-k "not ($slow or out_of_memory)")
else
  groups+=(data gguf eval notebook)
  tests=(tests)
fi
python -m pip install --quiet --disable-pip-version-check $(python dev/packages.py "${groups[@]}")
python -m pytest -q -n 2 "${tests[@]}" "$@"
