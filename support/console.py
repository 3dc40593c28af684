"""What a script writes to a terminal: as wide as that is, its last line tells how far a long job is."""

import os
import shutil
import signal
import sys
import time

from configurator import warn

CLEAR = '\r\033[K'  # makes a terminal forget its last line


def format_duration(seconds):
    """'2m05s', or '3h07m' from an hour on."""
    minutes, seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{seconds:02}s"
    return f"{minutes // 60}h{minutes % 60:02}m"


# -----------------------------------------------------------------------------
# output whose reader may leave


def exit_on_broken_pipe():
    """From now on `| head` ends this process without a message."""
    if hasattr(signal, 'SIGPIPE'):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


class Output:
    """Takes the place of sys.stdout or sys.stderr. What is written goes above the live line, of which there
    is one; that nobody can read it any more ends nothing. tqdm would need the same for the prints of others,
    and an evaluation's line takes the place of the training's."""
    shown = False  # whether there is a live line

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        try:
            self.stream.write(CLEAR + text if Output.shown else text)
            self.stream.flush()
        except OSError as e:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
            warn(f"standard output is gone ({e.strerror}), the work continues without it")
        Output.shown = False

    def show(self, text):
        self.write(text[:shutil.get_terminal_size().columns - 1])
        Output.shown = True


def make_output_last():
    """For scripts whose work is not what they print: `| true`, `| head` and a full disk do not end them."""
    sys.stdout = Output(sys.stdout)


def progress(what, start=0):
    """Returns tick(done, n, note=''), to be called as a job advances from `start` to n: shows the note
    and the time left on the last line of the terminal, five times a second at most."""
    if not isinstance(sys.stdout, Output):
        make_output_last()
        if sys.stderr.isatty():
            sys.stderr = Output(sys.stderr)
    begin = shown = time.monotonic()

    def tick(done, n, note=''):
        nonlocal shown
        now = time.monotonic()
        if now <= shown + 0.2:
            return
        shown = now
        left = format_duration((now - begin) * (n - done) / (done - start))
        sys.stdout.show(f"{what} {done / n:4.0%} {done:,} of {n:,}{note}, {left} left")
    return tick


def fit(parts):
    """The line of `parts` about an iteration; on a terminal, without the last ones, for which it is too
    narrow. In a pipe or a file people's scripts find the numbers."""
    parts = list(filter(None, parts))
    width = shutil.get_terminal_size().columns
    while sys.stdout.isatty() and len(', '.join(parts)) > width and len(parts) > 1:
        parts.pop()
    return ', '.join(parts)
