"""Errors that come from below and mean something to the user: one line instead of a traceback."""

import contextlib
import os
import re
import sys
import textwrap
import threading

from configurator import say

CHECKPOINT_WRITER = 'checkpoint writer'  # a thread's name
# {(its type, a pattern of its text): (exit status, its line as a function of it; None: the traceback)}
EXPLAINED = {}


class DataLost(Exception):
    """A dataset that was fine can no longer be read. Its text is the line to print."""


def explain(pattern, what, remedy, status):
    """From now on an uncaught error whose text matches `pattern` ends this process with one line and
    `status`."""
    add(Exception, pattern, status, lambda error: f"{what} ({first_line(error)}). {remedy}")


def explain_lost_data():
    """From now on an uncaught DataLost ends this process with its line and status 2."""
    add(DataLost, '', 2, str)


def add(kind, pattern, status, line):
    """From now on an uncaught error of a kind ends this process with `status` and line(error)."""
    EXPLAINED[kind, pattern] = status, line
    sys.excepthook = hook


def hook(kind, error, traceback):
    for (expected, pattern), (status, line) in reversed(EXPLAINED.items()):
        if issubclass(kind, expected) and re.search(pattern, str(error)):
            if line:
                say(f"error: {line(error)}")
            else:
                sys.__excepthook__(kind, error, traceback)
            end(status)  # from here Python would make it 1
    sys.__excepthook__(kind, error, traceback)


def first_line(error):
    """The first line of an error's text, without what only a developer of torch can use."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    # without the line of the source that gloo's messages begin with
    return textwrap.shorten(re.sub(r'^\[\S+\] ', '', text), 300)


def end(status):
    """End this process now; only a checkpoint that is being written is waited for. On Python's own way out
    other threads, NCCL's and torch.compile's among them, may wait for ever."""
    for thread in threading.enumerate():
        if thread.name.startswith(CHECKPOINT_WRITER):
            thread.join()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed pipe is no reason to stay
            stream.flush()
    os._exit(status)
