#!/usr/bin/env bash
# Installs what the tests need into .venv (or into the virtual environment that is active) and runs them.
# Some tests want real texts: FLATGPT_TEST_DATA names their folder, and without it they are skipped.
#   bash runs/test.sh [pytest's flags]
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${VIRTUAL_ENV:-}" ]; then
  [ -d .venv ] || python3 -m venv .venv
  PATH="$PWD/.venv/bin:$PATH"
fi
python -m pip install --quiet --disable-pip-version-check -r requirements.txt pytest==9.2.0 pytest-xdist==3.8.0 \
  transformers==5.23.0 safetensors==0.8.0 huggingface_hub==2.4.0 tokenizers==0.23.3 pyarrow==26.0.1 zstandard==0.25.0 tqdm==4.70.1 isal==1.9.1 matplotlib==3.11.2 pyyaml==6.0.3
python -m pytest -q -n 2 tests "$@"
