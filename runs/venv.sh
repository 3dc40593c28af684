# Sourced by the other scripts here: creates .venv with Python 3.11 or newer, and activates it.
bin=.venv/bin
if [ "${OS:-}" = Windows_NT ]; then bin=.venv/Scripts; fi
new_enough='import sys; sys.exit(sys.version_info < (3, 11))'
if ! $bin/python -c "$new_enough" &>/dev/null; then
  found=''
  for python in "${PYTHON:-python3}" python3.14 python3.13 python3.12 python3.11 python; do
    if [ -z "$found" ] && "$python" -c "$new_enough" &>/dev/null; then found=$python; fi
  done
  if [ -z "$found" ]; then
    echo "error: no Python 3.11 or newer found. Install one, or name it: PYTHON=/path/to/python3.12" >&2
    exit 2
  fi
  if [ -d .venv ]; then echo "note: .venv has no usable Python, recreating it"; fi
  "$found" -m venv --clear .venv
fi
source $bin/activate
