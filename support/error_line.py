"""A process that ends with an error: the error in a few words, and the end."""

import contextlib
import os
import re
import sys
import threading

CHECKPOINT_WRITER = 'checkpoint writer'  # a thread's name


def shorten(text):
    """The first line of an error's text, without what only a developer of torch can use, and with its
    parentheses closed."""
    text = text.strip().splitlines()[0]
    if found := re.search(r'[Tt]ried to allocate ([\d.]+ \w+)', text):
        return f"tried to allocate {found[1]}"
    text = re.sub(r'^\[\S+\] ', '', text)  # the line of the source that gloo's messages begin with
    if len(text) > 160:
        text = text[:160].rsplit(' ', 1)[0] + ' ...'
    return text + ')' * (text.count('(') - text.count(')'))


def end(status):
    """End this process now; only a checkpoint that is being written is waited for. On Python's own way out
    other threads, NCCL's and torch.compile's among them, may wait for ever."""
    for thread in threading.enumerate():
        if thread.name == CHECKPOINT_WRITER:
            thread.join()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed pipe is no reason to stay
            stream.flush()
    os._exit(status)
