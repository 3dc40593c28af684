"""Output whose reader may leave, as in `python prepare.py ... | head`: the work goes on."""

import contextlib
import os
import sys


class Unread:
    """A stream whose reader may leave: what is written then is dropped."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        with self.without_reader():
            self.stream.write(text)

    def flush(self):
        with self.without_reader():
            self.stream.flush()

    @contextlib.contextmanager
    def without_reader(self):
        try:
            yield
        except BrokenPipeError:  # also for the flush at the end of the process
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


@contextlib.contextmanager
def output_may_end():
    """The work inside goes on when what it prints is cut off by `| head`."""
    if sys.stdout is None:
        yield
        return
    with contextlib.redirect_stdout(Unread(sys.stdout)):
        yield
        sys.stdout.flush()
