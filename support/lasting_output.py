"""Standard output that may go away while the work goes on: a pipe whose reader has ended, a full disk."""

import io
import sys

from configurator import warn


class Lasting(io.RawIOBase):
    """Writes to `raw`; once that fails, to nowhere, with one warning unless a reader has simply ended."""

    def __init__(self, raw, owner):
        self.raw, self.gone = raw, False
        self.owner = owner  # of raw, which it would close

    def writable(self):
        return True

    def fileno(self):
        return self.raw.fileno()

    def isatty(self):
        return self.raw.isatty()

    def write(self, data):
        try:
            if not self.gone:
                return self.raw.write(data)
        except BrokenPipeError:
            self.gone = True
        except OSError as e:
            self.gone = True
            warn(f"standard output is gone ({e.strerror}), the work continues without it")
        return len(data)


def make_output_last():
    """For scripts whose work is not what they print: `| true` and `| head` do not end them."""
    out = sys.stdout
    buffer = getattr(out, 'buffer', None)
    raw = getattr(buffer, 'raw', buffer)  # with python -u there is no buffer in between
    if isinstance(raw, io.RawIOBase) and not isinstance(raw, Lasting):
        out.flush()
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(Lasting(raw, out)), encoding=out.encoding,
                                      errors=out.errors, line_buffering=True)
