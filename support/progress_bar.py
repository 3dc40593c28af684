"""How far prepare.py is: a bar on a terminal, elsewhere a line every ten seconds."""

import contextlib
import itertools
import sys
import time


class ProgressBar:
    def __init__(self, draft, max_tokens):
        """For a Draft, from where it stands. The total is max_tokens, or if that is None the bytes of the
        files."""
        self.draft, self.max_tokens = draft, max_tokens
        self.bytes_before = [0, *itertools.accumulate(file.size for file in draft.files)]  # each file
        self.first_done, self.first_bytes = self.done(0), None
        self.begun = self.printed = time.time()
        self.bar = None
        if sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                from tqdm import tqdm
                self.bar = tqdm(total=100, initial=round(100 * self.first_done, 2), dynamic_ncols=True,
                                bar_format='{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}')

    def done(self, bytes_read):
        """The fraction that is done, when the draft's current file was read that far."""
        if self.max_tokens:
            return self.draft.splits['train'].tokens / self.max_tokens
        total = max(1, self.bytes_before[-1])
        return min(1.0, (self.bytes_before[self.draft.place[0]] + bytes_read) / total)

    def show(self, bytes_read):
        now, done = time.time(), self.done(bytes_read)
        tokens = sum(split.tokens for split in self.draft.splits.values())
        text = sum(split.bytes for split in self.draft.splits.values())
        if self.first_bytes is None:  # those of an earlier run and of the first portion are not counted
            self.first_bytes = text
        seconds = max(now - self.begun, 1e-9)
        line = f"{tokens:,} tokens, {(text - self.first_bytes) / seconds / 1e6:.1f} MB/s"
        if self.bar is not None:
            self.bar.set_postfix_str(line, refresh=False)
            self.bar.update(max(0, round(100 * done, 2) - self.bar.n))
        elif now > self.printed + 10:
            self.printed = now
            left = max(0, seconds * (1 - done) / max(1e-9, done - self.first_done))
            print(f"{line}, {done:.0%}, {left:,.0f} s left", flush=True)

    def close(self):
        if self.bar is not None:
            self.bar.close()
