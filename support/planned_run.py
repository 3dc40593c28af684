"""A run that is planned, not started: settled as train.py settles it, for processes, GPUs and a dataset that
need not be here."""

from types import SimpleNamespace

import torch

from support import devices, setup
from support.parallel import Distributed
from support.memory import Setup


class Planned(Distributed):
    """One process of `world_size`, which sends nothing and writes nothing."""
    is_main = False

    def __init__(self, device, why_device='', rank=0, world_size=1):
        super().__init__(device, why_device)
        self.rank, self.world_size = rank, world_size


class NoData:
    """In place of a dataset."""
    vocab_size = 50304  # GPT-2's, padded
    meta = {'vocab_size': vocab_size}
    tokenizer_state = val = None
    splits = {}

    class train:
        def samples_per_epoch(block_size):
            return 2**62 // block_size


def settle(knobs, given, dist, needs_data, elsewhere):
    """The Run that `knobs` ask for in the processes of `dist`. Ends with status 2 if there is a problem."""
    run = setup.Run(knobs=dict(knobs), kinds=knobs.kinds, asked=dict(knobs), given=given, dist=dist)
    k = run.knobs
    k['wandb_log'] = False  # it need not be installed
    if k['init_from'] != 'scratch':
        run.ckpt, run.resuming, run.branching = setup.find_start(k, Distributed(dist.device))
    elif not needs_data:
        run.data = NoData
    setup.settle(run)
    if elsewhere:  # GPUs have bfloat16 since Ampere; of 'meta' devices nothing is checked
        dtype = 'bfloat16' if k['dtype'] == 'auto' else k['dtype']
        k['dtype'], _ = devices.choose_dtype(dtype, torch.device('meta'))
    else:
        setup.choose_system(run)
    return run


def overview(run, system=None):
    """The lines of the run plan. system: what stands for the device, if it is not here."""
    k = SimpleNamespace(**run.knobs)
    notes = setup.notes(run)
    if run.data is NoData:
        size = 2 * k.max_iters * run.tokens_per_iter  # bytes, as uint16
        data = (f"dataset   {k.dataset} is not here: a vocabulary of {NoData.vocab_size:,}, GPT-2's, is "
                f"assumed. one epoch of all these tokens takes {size / 1e9:,.2f} GB")
        run.samples_per_epoch = 0
    else:
        data = setup.dataset_line(run, k)
    system = f"system    {system}, {k.dtype}" if system else setup.system_line(run, k)
    return [data, setup.model_line(run, k), setup.batch_line(run, k), setup.budget_line(run, k),
            setup.schedule_line(run, k), system, *notes]


def memory_setup(run, memory):
    """What support/memory.py wants to know. memory: bytes of the device."""
    k, dist = SimpleNamespace(**run.knobs), run.dist
    return Setup(run.config, k.dtype, k.batch_size, run.grad_accum_steps, dist.world_size, memory, k.shard,
                 k.activation_checkpointing, k.matrix_optimizer, dist.device,
                 k.document_mask or 'chat' in run.data.meta)
