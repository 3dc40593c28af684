"""Notes of the run plan about what is allowed but probably not meant, by the names in run_plan.notes. k: the
settled knobs."""

from support import run_plan


def many_epochs(run, k):
    tokens = run_plan.MANY_EPOCHS * run.samples_per_epoch * k.block_size
    remedy = f"--max_iters={max(1, tokens // run.tokens_per_iter)}"
    if not k.dropout:
        remedy += ' --dropout=0.2'
    return (f"note: that is {run_plan.epochs(run):,.0f} times over the same text, and the validation loss "
            f"may rise long before the end. use {remedy}, a smaller network (config/mybook.py), or more text")


def rate_is_fixed(run, k):
    """nanoGPT's decay_lr=False leaves out the warmup as well."""
    names = [name for name in ('lr_schedule', 'warmup_iters') if name in run.given]
    given = ' and '.join(f"{name}={run.given[name]}" for name in names)
    return (f"note: decay_lr=False is a fixed learning rate without warmup and makes no use of {given}. for "
            "that: --decay_lr=True, with --lr_schedule=constant if the rate shall not fall")


def only_warmup(run, k):
    highest = k.learning_rate * k.max_iters / (k.warmup_iters + 1)
    flags = f"--warmup_iters={k.max_iters // 20}"
    if k.lr_schedule != 'constant':
        flags += f" --lr_decay_iters={k.max_iters}"
    return (f"note: all of the {k.max_iters:,} iterations are warmup (warmup_iters={k.warmup_iters}), in "
            f"which the learning rate only comes to {highest:.2g}, not {k.learning_rate:g}. for a run of "
            f"this length: {flags}")


def rate_rises(run, k):
    return (f"note: min_lr={k.min_lr:g} is above learning_rate={k.learning_rate:g}, so it rises to the end. "
            f"usual is --min_lr={k.learning_rate / 10:g}")


def rate_leaps(run, k):
    """None, unless the learning rate had begun to fall, and a later end of its schedule lifts it again."""
    from support.old_schedule import old_schedule
    decay_start, end, rate = old_schedule(run)
    if end is None or not decay_start < run.start_iter or end >= k.lr_decay_iters:
        return None
    note = (f"note: the learning rate had fallen to {rate:.3g}, as its schedule ended at iteration {end:,}. "
            f"it ends at {k.lr_decay_iters:,} now, so the rate leaps up")
    if k.lr_schedule == 'wsd':
        return (f"{note} to {k.learning_rate:g}. usual is to go on from a checkpoint of before iteration "
                f"{decay_start:,}: --init_from=resume:PATH --out_dir=ANOTHER")
    return f"{note}. to stay at the lowest rate: --lr_decay_iters={end}"


def late_branch(run, k):
    return (f"note: the decay would have begun at iteration {run.decay_start:,}, so the learning rate falls "
            "at once. for the whole decay from here on: "
            f"--decay_fraction={1 - run.start_iter / k.lr_decay_iters:.4g}")


def is_done(run, k):
    return (f"this run is done: {run.start_iter:,} of {k.max_iters:,} iterations. to train on: "
            f"--max_iters={2 * max(1, run.start_iter)}")
