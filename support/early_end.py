"""The last line of a run that ends before it is done."""

from configurator import say
from support import checkpoint, commands


def last_line(run, it, saver, stop):
    """Prints why the run ended at pass `it`, and how to continue; returns it in a few words."""
    out_dir = run.knobs['out_dir']
    if stop.gave_up:  # the guard has said why
        return f"gave up: {stop.gave_up}"
    if not saver.whole:
        if run.dist.is_main:
            say(f"error: the last checkpoint could not be written ({checkpoint.newest(out_dir) or 'none'} "
                f"is the newest). make room, then: {commands.resume(run, 'auto')}")
        return 'ended without its last checkpoint'
    saved = f"saved in {out_dir}. to continue: {commands.resume(run)}"
    if it == run.start_iter and not run.resuming:
        saved = "with nothing to save yet"
    run.dist.print(f"stopped by {stop.reason()} after {it:,} iterations, {saved}")
    return f'stopped by {stop.reason()}'
