# For the other scripts here, which source it: makes and activates .venv, of a Python that is new enough.
new_enough='import sys; sys.exit(sys.version_info < (3, 11))'
if ! .venv/bin/python -c "$new_enough" 2>/dev/null; then
  for python in "${PYTHON:-python3}" python3.14 python3.13 python3.12 python3.11 ''; do
    if [ -n "$python" ] && "$python" -c "$new_enough" 2>/dev/null; then break; fi
  done
  if [ -z "$python" ]; then
    found=$("${PYTHON:-python3}" --version 2>&1 || true)
    echo "error: no Python that is new enough ($found). install 3.11 or newer, or name it:" \
      "PYTHON=/path/to/python3.12 bash $0" >&2
    exit 2
  fi
  if [ -d .venv ]; then echo "note: .venv has another Python and is made anew"; fi
  "$python" -m venv --clear .venv
fi
source .venv/bin/activate
