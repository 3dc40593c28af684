"""What is said of a checkpoint that could not be written, or not all of what goes with it."""

from configurator import warn
from support.checkpoint import Damaged, NotSaved


def not_saved(path, e):
    """The NotSaved for an error of torch.save or the system; any other error goes on."""
    # torch hides the system's error behind its own
    error = e.__context__ if isinstance(e, RuntimeError) else e
    if not isinstance(error, (OSError, Damaged)):
        raise e
    return NotSaved(f"{path} could not be written ({getattr(error, 'strerror', None) or error})")


def tell(failed, told):
    """Warn of each {what: error}; of what came after the checkpoint once, as it will be the same next
    time."""
    for what, error in failed.items():
        if isinstance(error, NotSaved):
            warn(f"{error}. the run continues, and tries again in a minute; the older checkpoints are as "
                 "they were")
        elif (what, error.errno) not in told:
            told.add((what, error.errno))
            warn(f"the checkpoint is saved, but it was not possible to {what} ({error.strerror}). the run "
                 "continues")
