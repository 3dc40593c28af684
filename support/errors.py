"""Errors that come from below and mean something to the user: one line instead of a traceback."""

import os
import re
import sys

from configurator import say


def explain(pattern, what, remedy, status):
    """From now on an uncaught error whose text matches `pattern` ends this process with one line and
    `status`. remedy: what to do, a text or a function of nothing."""
    before = sys.excepthook

    def hook(kind, error, traceback):
        if not re.search(pattern, str(error)):
            return before(kind, error, traceback)
        from support.error_line import end, shorten
        advice = remedy() if callable(remedy) else remedy
        say(f"error: {what} ({shorten(str(error))}). {advice}")
        end(status)  # from here Python would make it 1

    sys.excepthook = hook


class DataLost(Exception):
    """A dataset that was fine can no longer be read. Its text is the line to print."""


def explain_lost_data(rescue=lambda: ''):
    """From now on an uncaught DataLost ends this process with its line and status 2. rescue(): saves what
    there is, returns what it did."""
    before = sys.excepthook

    def hook(kind, error, traceback):
        if not issubclass(kind, DataLost):
            return before(kind, error, traceback)
        from support.error_line import end
        say(f"error: {error}{rescue()}")
        end(2)

    sys.excepthook = hook


def explain_missing_package(folder):
    """In place of a traceback by an import of torch or numpy. folder: the scripts', perhaps with a .venv."""
    activate, needed = (os.path.join(folder, path) for path in ('.venv/bin/activate', 'requirements.txt'))
    remedy = f"source {activate}" if os.path.exists(activate) else f"pip install -r {needed}"
    explain("^No module named '(torch|numpy)'$", f"a package is missing in {sys.executable}", remedy, 2)


def explain_out_of_memory(run):
    """Name the knobs that give the same batch in less memory."""
    def remedy():
        from support.out_of_memory import remedy
        return remedy(run)

    explain("can't allocate memory|not enough memory|out of memory", 'out of memory', remedy, 2)
