"""What a script writes to a terminal: as wide as that is, and told how far a long job has come."""

import shutil
import signal
import sys
import textwrap


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


def exit_on_broken_pipe():
    """From now on `| head` ends this process without a message."""
    if hasattr(signal, 'SIGPIPE'):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
