"""What a script writes to a terminal: as wide as that is, its last line tells how far a long job is."""

import contextlib
import io
import shutil
import signal
import sys
import textwrap
import time

from configurator import warn

CLEAR = '\r\033[K'  # makes a terminal forget its last line


def width():
    """Columns to write to: the terminal's, or 80 where there is none."""
    return shutil.get_terminal_size().columns


def wrap(lines, indent=0):
    """Lines no wider than the terminal, what follows in each indented; those for a pipe or a file stay."""
    if not sys.stdout.isatty():
        return lines
    options = dict(width=max(40, width()), break_long_words=False, break_on_hyphens=False)
    return [textwrap.fill(line, subsequent_indent=' ' * indent, **options) for line in lines]


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


class Lasting(io.FileIO):
    """Standard output; once it is gone, nowhere, with one warning unless a reader has simply ended."""
    gone = False

    def write(self, data):
        try:
            if not self.gone:
                return super().write(data)
        except OSError as e:
            self.gone = True
            if not isinstance(e, BrokenPipeError):
                warn(f"standard output is gone ({e.strerror}), the work continues without it")
        return len(data)


def make_output_last():
    """For scripts whose work is not what they print: `| true`, `| head` and a full disk do not end them."""
    out = sys.stdout
    try:
        raw = Lasting(out.fileno(), 'w', closefd=False)
    except OSError:  # no file
        return
    raw.owner = out  # which would close it
    out.flush()
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), out.encoding, out.errors, line_buffering=True)


# -----------------------------------------------------------------------------
# the last line of a terminal; everything that is printed goes above it. tqdm would need the same class for
# the prints of others, and an evaluation's line takes the place of the training's


class AboveLiveLine:
    """Takes the place of sys.stdout and sys.stderr: what is written to either hides the live line, of which
    there is one."""
    shown = False
    at_begin = True  # else the line is somebody's print(..., end='')

    def __init__(self, terminal):
        self.terminal = terminal

    def __getattr__(self, name):
        return getattr(self.terminal, name)

    def write(self, text):
        if self.shown:
            AboveLiveLine.shown = False
            self.terminal.write(CLEAR)
            self.terminal.flush()
        if text:
            AboveLiveLine.at_begin = text.endswith('\n')
        return self.terminal.write(text)

    def show(self, text):
        if self.at_begin:
            with contextlib.suppress(OSError):  # the next line printed will tell
                self.terminal.write(CLEAR + text[:width() - 1])
                self.terminal.flush()
                AboveLiveLine.shown = True


def progress(what, start=0):
    """Returns tick(done, n, note=''), to be called as a job advances from `start` to n: shows a bar, the note
    and the time left on the last line of the terminal, five times a second at most."""
    if not isinstance(sys.stdout, AboveLiveLine):
        sys.stdout = AboveLiveLine(sys.stdout)
        if sys.stderr.isatty():
            sys.stderr = AboveLiveLine(sys.stderr)
    begin = shown = time.monotonic()

    def tick(done, n, note=''):
        nonlocal shown
        now = time.monotonic()
        if now <= shown + 0.2:
            return
        shown = now
        left = format_duration((now - begin) * (n - done) / (done - start))
        after = f" {done:,} of {n:,}{note}, {left} left"
        sys.stdout.show(with_bar(f"{what} {done / n:4.0%} ", done / n, after))
    return tick


def with_bar(before, fraction, after):
    """Both texts, and between them a bar in what the terminal has left for it."""
    length = min(40, width() - 1 - len(before) - len(after))
    if length < 5:
        return before + after.lstrip()
    full, empty = '█░' if (sys.stdout.encoding or '').lower().startswith('utf') else '#.'
    n = round(fraction * length)
    return before + full * n + empty * (length - n) + after


def fit(parts):
    """The line of `parts` about an iteration; on a terminal, without the last ones, for which it is too
    narrow. In a pipe or a file people's scripts find the numbers."""
    parts = list(filter(None, parts))
    while sys.stdout.isatty() and len(', '.join(parts)) > width() and len(parts) > 1:
        parts.pop()
    return ', '.join(parts)
