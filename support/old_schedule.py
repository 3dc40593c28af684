"""The schedule of the learning rate that a checkpoint was trained with."""

from support import setup
from support.budget import iterations
from support.old_knobs import translate


def old_schedule(run):
    """(the iteration at which the decay began, the one at which it ended or None if that is unknown, the
    learning rate of the last update) of the checkpoint that `run` resumes."""
    saved = {**run.knobs, **translate(run.ckpt['config'])}
    group = run.ckpt['optimizer']['param_groups'][0]
    try:
        if saved.get('lr_decay_iters') is None:
            saved['lr_decay_iters'] = saved['max_iters']
            if saved.get('budget'):
                saved['lr_decay_iters'] = iterations(run, saved['budget'])
        same = saved['lr_schedule'] == run.knobs['lr_schedule'] and saved['decay_lr']
        start, end = setup.decay_start(saved), int(saved['lr_decay_iters'])
        return start, end if same else None, float(group['lr']) / float(group.get('lr_scale', 1))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):  # a file may say anything
        return 0, None, None
