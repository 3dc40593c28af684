"""The mean loss of an iteration whose micro-batches have more or fewer targets."""


def loss_divisor(run, it, micro_step):
    """Their number, corrected by the share of the iteration's targets that this one has."""
    k, n = run.knobs, run.knobs['batch_size']
    per_rank, world_size = run.grad_accum_steps * n, run.dist.world_size
    begin = 0 if k['overfit_batch'] else it * per_rank * world_size
    first = begin + run.dist.rank * per_rank + micro_step * n
    count = run.data.train.count_targets
    every = count(k['seed'], range(begin, begin + per_rank * world_size))
    return every / (count(k['seed'], range(first, first + n)) * world_size)
