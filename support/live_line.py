"""
The last line of a terminal, which tells how far a long job is; everything that is printed goes above it.

Not tqdm: this works where only torch and numpy are installed, an evaluation's line takes the place of the
training's, and print() needs no other name. What tqdm would need for the last is the same class as here.
"""

import sys
import time

from support.console import format_duration, width

CLEAR = '\r\033[K'  # makes a terminal forget its last line
# parts of the line about an iteration, from the one to leave out first where the terminal is narrow. The
# live line tells the time left
LEAST = ('eta', 'data', 'epoch', 'mfu', 'grad_norm', 'lr', 'speed')


class LiveLine:
    def __init__(self, terminal):
        self.terminal, self.shown = terminal, False
        self.at_begin = True  # else the line is somebody's print(..., end='')

    def show(self, text):
        if not self.at_begin:
            return
        try:
            self.terminal.write(CLEAR + text[:width() - 1])
            self.terminal.flush()
            self.shown = True
        except OSError:  # the next line printed will tell
            pass

    def hide(self):
        if self.shown:
            self.shown = False
            self.terminal.write(CLEAR)
            self.terminal.flush()


class Above:
    """Takes the place of sys.stdout or sys.stderr: what is written hides the live line first."""

    def __init__(self, stream, live):
        self.stream, self.live = stream, live

    def write(self, text):
        self.live.hide()
        if text:
            self.live.at_begin = text.endswith('\n')
        return self.stream.write(text)

    def __getattr__(self, name):
        return getattr(self.stream, name)


def install():
    """The live line of this process. From now on what is printed goes above it."""
    if not isinstance(sys.stdout, Above):
        live = LiveLine(sys.stdout)
        sys.stdout = Above(sys.stdout, live)
        if sys.stderr.isatty():
            sys.stderr = Above(sys.stderr, live)
    return sys.stdout.live


def progress(what, start=0):
    """Returns tick(done, n, note=''), to be called as a job advances from `start` to n: shows a bar, the
    note and the time left, five times a second at most."""
    live, begin = install(), time.monotonic()
    shown = begin

    def tick(done, n, note=''):
        nonlocal shown
        now = time.monotonic()
        if now <= shown + 0.2:
            return
        shown = now
        left = (now - begin) * (n - done) / (done - start)
        numbers = f" {done:,} of {n:,}{note}, {format_duration(left)} left"
        live.show(with_bar(f"{what} {done / n:4.0%} ", done / n, numbers))
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
    """The line of `parts` ({name: text}) about an iteration, without those for which it is too narrow."""
    parts, most = dict(parts), width()
    for name in LEAST:
        line = ', '.join(parts.values())
        if name != 'eta' and len(line) <= most:
            break
        parts.pop(name, None)
    return ', '.join(parts.values())


def note(loss, tokens, tokens_before):
    """What the live line tells of the training: the smoothed loss, the tokens, with those before this run."""
    in_all = f" ({amount(tokens_before + tokens)} in all)" if tokens_before else ''
    return ('' if loss is None else f", loss {loss:.4f}") + f", {amount(tokens)} tokens{in_all}"


def amount(n):
    """'950', '6.1M', '1.5B'"""
    for size, letter in ((1e12, 'T'), (1e9, 'B'), (1e6, 'M'), (1e3, 'k')):
        if n >= size:
            return f"{n / size:.3g}{letter}"
    return str(n)
