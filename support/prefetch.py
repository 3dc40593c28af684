"""Items that a thread makes ahead of time."""

import queue
import threading


class Prefetch:
    """Iterates over the items of an iterator, of which a thread makes the next few."""

    def __init__(self, items, ahead=2):
        self.items, self.queue, self.closed = items, queue.Queue(ahead), False
        threading.Thread(target=self.work, daemon=True).start()

    def work(self):
        problem = None
        while not self.closed and problem is None:
            item = None
            try:
                item = next(self.items)
            except BaseException as e:  # an exit, too, belongs to whoever waits for the item
                problem = e
            self.queue.put((item, problem))

    def __iter__(self):
        return self

    def __next__(self):
        item, problem = self.queue.get()
        if problem is not None:
            raise problem
        return item

    def close(self):
        """Let the thread end; what it has made is dropped."""
        self.closed = True
        while not self.queue.empty():
            self.queue.get()
