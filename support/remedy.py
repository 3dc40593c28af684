"""Which flags would make a run fit into its GPUs."""

import bisect
import dataclasses
import functools
import itertools
import os

PER_MACHINE = int(os.environ.get('LOCAL_WORLD_SIZE', 8))  # processes
MOST_MACHINES = 1024


def remedy(setup):
    """The fewest flags that make it fit, in words; where there is a choice, all of it."""
    changes = possible_changes(setup)
    for n in range(1, len(changes) + 1):
        fitting = []
        for flags in itertools.combinations(changes, n):
            changed = apply(setup, [changes[flag] for flag in flags])
            if changed.fits():
                flags = ' '.join(flags).replace('--batch_size', batch_flags(changed))
                fitting.append(f"{flags} ({changed.total() / 1e9:,.2f} GB)")
        if fitting:
            return ', or '.join(fitting)
    return more_gpus(apply(setup, changes.values()))


def possible_changes(setup):
    """{flag: function that changes a Setup}. The batch size is the last one, as it counts on the others."""
    changes = {}
    if not setup.activation_checkpointing:
        changes['--activation_checkpointing'] = lambda setup: dataclasses.replace(
            setup, activation_checkpointing=True)
    if setup.n_shards < setup.world_size:
        changes['--shard=0'] = lambda setup: dataclasses.replace(setup, shard=0)
    if setup.batch_size > 1:
        changes['--batch_size'] = largest_batch
    return changes


def apply(setup, changes):
    return functools.reduce(lambda setup, change: change(setup), changes, setup)


def largest_batch(setup):
    """The largest micro-batch below today's that fits, or the smallest; an iteration has as many tokens."""
    samples = setup.batch_size * setup.grad_accum_steps
    sizes = [size for size in range(1, setup.batch_size) if samples % size == 0]

    def with_size(size):
        return dataclasses.replace(setup, batch_size=size, grad_accum_steps=samples // size)

    too_large = bisect.bisect_left(sizes, True, key=lambda size: not with_size(size).fits())
    return with_size(sizes[max(0, too_large - 1)])


def batch_flags(setup):
    tokens = setup.batch_size * setup.grad_accum_steps * setup.config.block_size * setup.world_size
    return f"--batch_size={setup.batch_size} --total_batch_size={tokens}"


def more_gpus(setup):
    """The flags for a run that does not fit into its GPUs in any way: `setup` has all that saves memory."""
    flags = f"--shard=0 --activation_checkpointing --batch_size={setup.batch_size}"

    def on(machines):
        return dataclasses.replace(setup, world_size=machines * PER_MACHINE, shard=0)

    machines = [2 ** i for i in range(MOST_MACHINES.bit_length())]
    enough = bisect.bisect_left(machines, True, key=lambda n: on(n).fits())
    found = on(machines[min(enough, len(machines) - 1)])
    if found.fits():
        return f"--world_size={found.world_size} {flags} ({found.total() / 1e9:,.2f} GB)"
    return (f"not more GPUs: with {flags} each takes {found.total() / 1e9:,.2f} GB at least. use a smaller "
            "--block_size, a smaller network or larger GPUs")
