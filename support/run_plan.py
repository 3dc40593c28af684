"""The run plan: what train.py prints before it starts."""

import math
from types import SimpleNamespace

MANY_EPOCHS = 20  # from 16 times over the same text on little is gained (arXiv 2305.16264)


def overview(run):
    """Lines about dataset, model, batch, budget, schedule, system."""
    k = SimpleNamespace(**run.knobs)
    return [dataset_line(run, k),
            model_line(run, k),
            batch_line(run, k),
            budget_line(run, k),
            schedule_line(run, k),
            system_line(run, k),
            expect_line(run, k)]


def dataset_line(run, k):
    if run.data.packed:
        return run.data.train.overview(k.dataset, run.data.val)
    line = f"dataset   {k.dataset}: {len(run.data.train):,} tokens"
    if run.data.val:
        return line + f", {len(run.data.val):,} for validation"
    return line + " and no val.bin: no validation loss, no best checkpoint"


def model_line(run, k):
    layers = f"{k.n_layer} layer{'s' if k.n_layer > 1 else ''}"
    if run.config.near_layers:
        layers += f' and {run.config.near_layers} near'  # without attention: near_layers in model.py
    return (f"model     {k.arch}, {layers}, {k.n_head} heads, {k.n_embd} channels, "
            f"{k.block_size} positions, vocabulary {run.config.vocab_size:,}: {run.n_params:,} parameters")


def batch_line(run, k):
    n = run.dist.world_size
    return (f"batch     {run.tokens_per_iter:,} tokens per iteration = {k.batch_size} sequences x "
            f"{k.block_size} tokens x {run.grad_accum_steps} micro-batches x {n} "
            f"process{'es' if n > 1 else ''}")


def budget_line(run, k):
    tokens = k.max_iters * run.tokens_per_iter
    line = f"budget    {k.max_iters:,} iterations = {tokens:,} tokens"
    if run.samples_per_epoch:
        line += f" = {epochs(run):.2f} epochs"
    line += f" = {tokens / run.n_params:.1f} tokens per parameter"
    return line + (f" ({k.budget})" if k.budget else '')


def schedule_line(run, k):
    lrs = ', '.join(f'{name} {value:g}' for name, value in run.lrs.items())
    line = f"schedule  {k.lr_schedule}, {k.learning_rate:g}" + (f" ({lrs})" if lrs else '')
    share = 'longer than the run'
    if k.warmup_iters <= k.max_iters:
        share = f'{k.warmup_iters / max(1, k.max_iters):.1%}'
    line += f" after {k.warmup_iters:,} iterations of warm-up ({share})"
    if k.lr_schedule == 'constant':
        return line
    if k.lr_schedule == 'wsd':
        line += f" until {run.decay_start:,}"
    line += f", {k.min_lr:g} at iteration {k.lr_decay_iters:,}"
    return line if k.lr_decay_iters <= k.max_iters else line + ', which is after the end'


def system_line(run, k):
    threads = f", {run.why['threads']}" if 'threads' in run.why else ''
    return (f"system    {run.dist.device} ({run.why['device']}){threads}, {k.dtype} ({run.why['dtype']}), "
            f"compile {'on' if k.compile else 'off'} ({run.why['compile']})")


def expect_line(run, k):
    size = run.checkpoint_bytes
    size = f"{size / 1e9:.2f} GB" if size > 1e8 else f"{size / 1e6:.1f} MB"
    line = f"checkpoints of {size} in {k.out_dir}"
    if run.ckpt:
        return f"expect    {line}"
    vocab_size = run.data.meta['vocab_size']
    return f"expect    a first loss of about ln({vocab_size}) = {math.log(vocab_size):.2f}; {line}"


def epochs(run):
    samples = run.knobs['max_iters'] * run.tokens_per_iter // run.knobs['block_size']
    return samples / run.samples_per_epoch


def notes(run):
    """Lines about what is allowed but probably not meant."""
    k = SimpleNamespace(**run.knobs)
    if k.eval_only:
        return []
    done = run.resuming and run.start_iter >= k.max_iters
    goes_on = run.resuming and not done
    odd = {'many_epochs': epochs(run) > MANY_EPOCHS and not k.overfit_batch,
           'rate_is_fixed': not k.decay_lr and ('lr_schedule' in run.given or run.given.get('warmup_iters')),
           'only_warmup': 0 < k.max_iters <= k.warmup_iters and not done,
           'rate_rises': k.lr_schedule != 'constant' and k.min_lr > k.learning_rate,
           'rate_leaps': goes_on and k.lr_schedule != 'constant' and run.start_iter < k.lr_decay_iters,
           'late_branch': (run.branching and k.lr_schedule == 'wsd'
                           and run.decay_start < run.start_iter < k.lr_decay_iters),
           'is_done': done}
    if not any(odd.values()):
        return []
    from support import plan_notes
    found = [getattr(plan_notes, name)(run, k) for name, is_so in odd.items() if is_so]
    return [note for note in found if note]
