"""The checkpoint of a run that cannot go on, as its data is lost."""

from support import commands
from support.checkpoint import NotSaved, save


def rescue(saver):
    """Save the state after the last update, if this process can do so without the others. Returns what was
    done, for a line."""
    run, dist = saver.run, saver.dist
    it = max(saver.guard.it + 1, run.start_iter)
    alone = dist.is_main and not dist.sharded  # shards are gathered by all processes
    if not (saver.writes and alone):
        return ''
    again = f"to continue: {commands.resume(run, 'auto')}"
    if it == run.start_iter:
        return f". {again}"
    try:
        saver.writer.finish()  # one that a thread is writing
        save(saver.out_dir, saver.state(it, saver.best_val_loss), ['ckpt.pt'], None)
    except NotSaved as e:
        return f". {e}. {again}"
    return f". saved in {saver.out_dir} after {it:,} iterations. {again}"
