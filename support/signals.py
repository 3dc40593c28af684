"""
What is asked of a run while it trains. SIGTERM, SIGINT (Ctrl-C), SIGUSR1, SIGHUP (a terminal that is closed),
SIGQUIT, the end of max_minutes, the death of torchrun: save and stop. SIGUSR2: save and continue. A handler
only takes a note, as it may interrupt anything; the loop asks poll().
"""

import os
import signal
import time

SAVE, NO_TORCHRUN, OUT_OF_TIME = 1, 254, 255  # beside 128 + a signal's number
TO_STOP = 'SIGINT SIGTERM SIGUSR1 SIGHUP SIGQUIT'.split()
PATIENCE = 2  # seconds in which a second signal is the same request once more
started, parent = time.monotonic(), os.getppid()  # near enough to the start of the process, for max_minutes


class Stop:

    def __init__(self, dist, max_minutes=None):
        self.dist = dist
        self.deadline = float('inf') if max_minutes is None else started + 60 * max_minutes
        # noted here: 128 + the signal's number, as an exit status
        self.wants_stop, self.wants_save = 0, False
        self.agreed = 0  # the same in all processes
        self.gave_up = None  # why the run must end with status 3, without saving
        self.first_signal = None  # when it came
        self.save_again_at = float('inf')
        self.last_poll, self.longest_iteration, self.save_seconds = None, 0.0, 0.0
        for name in (*TO_STOP, 'SIGUSR2'):
            number = getattr(signal, name, None)  # Windows lacks most of them
            # SIGHUP is ignored under nohup, SIGQUIT in the background of a script
            if not number or name in ('SIGHUP', 'SIGQUIT') and signal.getsignal(number) == signal.SIG_IGN:
                continue
            signal.signal(number, self.on_save if name == 'SIGUSR2' else self.on_stop)

    def on_save(self, number, frame):
        self.wants_save = True

    def on_stop(self, number, frame):
        # a second one ends at once. But shell and terminal may both send theirs when a terminal is closed,
        # and a cluster may signal torchrun and us together, and torchrun passes its own on
        if self.first_signal and time.monotonic() > self.first_signal + PATIENCE:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.wants_stop = self.wants_stop or 128 + number
        self.first_signal = self.first_signal or time.monotonic()

    def poll(self):
        """None, 'save' or 'stop', the same in all processes; to be called by all of them."""
        if self.is_stopping():
            return 'stop'
        now = time.monotonic()
        if self.last_poll is not None:
            self.longest_iteration = max(self.longest_iteration, now - self.last_poll)
        self.last_poll = now
        # an iteration and the saving still have to end in time
        if not self.wants_stop and now + 2 * (self.longest_iteration + self.save_seconds) > self.deadline:
            self.wants_stop = OUT_OF_TIME
        if not self.wants_stop and self.dist.is_distributed and os.getppid() != parent:
            self.wants_stop = NO_TORCHRUN
        number = self.dist.all_reduce_max(
            self.wants_stop or SAVE * (self.wants_save or now > self.save_again_at))
        if number > SAVE:
            self.agreed = number
            return 'stop'
        return 'save' if number == SAVE else None

    def is_stopping(self):
        """Whether the run ends here, as poll() found or the guard said; asks nobody."""
        return self.agreed > 0 or self.gave_up is not None

    def saved(self, again_in=float('inf')):
        """A checkpoint was written, or should be tried again in some seconds."""
        self.wants_save, self.save_again_at = False, time.monotonic() + again_in

    def exit_status(self):
        """0, 3 (gave up), 254 (torchrun was killed, here or on another machine), or 128 + the signal's number
        (SIGTERM for max_minutes), but 0 where torchrun would start it again and should not."""
        if self.gave_up:
            return 3
        if self.agreed != NO_TORCHRUN and os.environ.get('TORCHELASTIC_MAX_RESTARTS', '0') != '0':
            return 0
        return 128 + signal.SIGTERM if self.agreed == OUT_OF_TIME else self.agreed

    def reason(self):
        if self.agreed == NO_TORCHRUN:
            return "the death of torchrun"
        return 'max_minutes' if self.agreed == OUT_OF_TIME else signal.Signals(self.agreed - 128).name
