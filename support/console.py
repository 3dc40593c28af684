"""The last line of a terminal, which tells how far a long job is."""

import shutil
import signal
import sys
import time

CLEAR = '\r\033[K'  # makes a terminal forget its last line
_live = False  # whether the last line is a live one


def show_live(text):
    """Show `text` as the last line of a terminal until the next line; a pipe or a file gets nothing."""
    global _live
    if not sys.stdout.isatty():
        return
    try:
        width = shutil.get_terminal_size().columns
        print(CLEAR + text[:width - 1], end='', flush=True)
        _live = True
    except OSError:  # the next line printed will tell
        pass


def clear_live():
    """Remove the live line."""
    global _live
    if _live:
        _live = False
        print(CLEAR, end='', flush=True)


def progress(what, start=0, unit='batches'):
    """Returns tick(done, n), to be called as a job of n units advances from `start`: shows a live line with
    the time left, five times a second at most."""
    begin = shown = time.monotonic()

    def tick(done, n):
        nonlocal shown
        now = time.monotonic()
        if now <= shown + 0.2:
            return
        shown = now
        left = (now - begin) * (n - done) / (done - start)
        show_live(f"{what}: {done:,} of {n:,} {unit}, {done / n:.0%}, {format_duration(left)} left")
    return tick


def format_duration(seconds):
    """'2m05s', or '3h07m' from an hour on."""
    minutes, seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{seconds:02}s"
    return f"{minutes // 60}h{minutes % 60:02}m"


def exit_on_broken_pipe():
    """From now on `| head` ends this process without a message."""
    if hasattr(signal, 'SIGPIPE'):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
