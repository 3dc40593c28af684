"""Checkpoints that a thread writes beside the training, on GPUs."""

import threading
import time

from support.checkpoint import Writer
from support.errors import CHECKPOINT_WRITER


class AsyncWriter(Writer):
    """The states it is given have to be copies."""
    is_async = True

    def __init__(self, on_failure):
        super().__init__(on_failure)
        self.thread, self.error = None, None
        self.longest = 0.0  # seconds that it took at most

    def start(self, *args):
        # no daemon: an ending process waits for it
        self.thread = threading.Thread(target=self.work, args=args, name=CHECKPOINT_WRITER)
        self.thread.start()

    def work(self, *args):
        t0 = time.monotonic()
        try:
            super().start(*args)
        except BaseException as e:  # for whoever waits
            self.error = e
        self.longest = max(self.longest, time.monotonic() - t0)

    def is_busy(self):
        if self.thread is not None:
            self.thread.join(timeout=1)
        return self.thread is not None and self.thread.is_alive()

    def finish(self):
        if self.thread is not None:
            self.thread.join()
        error, self.thread, self.error = self.error, None, None
        if error is not None:
            raise error
        return super().finish()
