"""
What a run takes, before it is started: memory, disk, time. What --measure writes it removes again.

    $ python plan.py config/train_gpt2.py                                       # for the device here
    $ python plan.py config/plan_llama_70b.py --world_size=512 --gpu_memory=80  # for GPUs elsewhere
    $ python plan.py config/quickstart.py --measure                             # by a trial
    $ torchrun --standalone --nproc_per_node=2 plan.py config/train_gpt2.py --measure

It takes the config files and knobs of train.py. An estimate needs no dataset, and a moment for a network of
any size; --measure adds a few iterations of train.py.
"""

import os

from configurator import configure, fail, out_of_range

# -----------------------------------------------------------------------------
world_size: int = None  # estimate for so many GPUs, which need not be here. None: for the device here
gpu_memory: float = None  # GB of each of them. None: 80
measure = False  # run four iterations of train.py as well, in the processes that torchrun started
# -----------------------------------------------------------------------------
_train_py = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'train.py')
knobs, given = configure(globals(), like=_train_py)

import torch

from support import devices, plan_memory, setup
from support.console import exit_on_broken_pipe
from support.dataset_meta import bin_files, folder_of
from support.parallel import Distributed

elsewhere = world_size is not None or gpu_memory is not None
n_processes = world_size or int(os.environ.get('WORLD_SIZE', 1))
has_data = bool(bin_files(folder_of(knobs['dataset'], knobs['data_dir']), 'train'))

# -----------------------------------------------------------------------------
# what cannot be planned

problems = out_of_range(knobs, above_zero='world_size gpu_memory')
if measure and elsewhere:
    problems.append("measure is for the devices here. leave out --measure, or world_size and gpu_memory")
if problems:
    fail(*problems)

# -----------------------------------------------------------------------------
# the run, settled as train.py settles it, for processes, GPUs and a dataset that need not be here


class NoData:
    """In place of a dataset: GPT-2's vocabulary, padded."""
    vocab_size = 50304
    splits = tokenizer_state = {}

    class train:
        n_targets = staticmethod(lambda block_size: 0)


def show(lines):
    if os.environ.get('RANK', '0') == '0':
        print('\n'.join(lines), flush=True)


exit_on_broken_pipe()
device, memory, peak = torch.device('meta'), 1e9 * (gpu_memory or 80), knobs['peak_flops']
why = f'{memory / 1e9:g} GB each, elsewhere'
if not elsewhere:
    device, why = devices.choose_device(knobs['device'], int(os.environ.get('LOCAL_RANK', 0)),
                                        'RANK' in os.environ)
    memory, peak = devices.memory_of(device), peak or devices.peak_flops_of(device)
dist = Distributed(device, why, world_size=n_processes)
dist.is_main = False  # it writes nothing
run = setup.Run({**knobs, 'wandb_log': False}, dict(given), dist)  # wandb need not be here
if knobs['init_from'] != 'scratch':
    setup.find_start(run)
if not has_data and not run.ckpt:
    run.data = NoData
setup.settle(run, knobs.kinds)
setup.settle_system(run)
data = f"dataset   {knobs['dataset']} is not here: a vocabulary of {NoData.vocab_size:,}, GPT-2's, is assumed"
if run.data is not NoData:
    data = setup.dataset_line(run)
found, fits = plan_memory.lines(run, memory, peak)
show([data, *setup.shape_lines(run),
      f"system    {'cuda' if elsewhere else device} ({why}), {run.knobs['dtype']}", *found])
if measure:
    if run.ckpt:
        fail("measure: a trial starts from scratch, and this from a checkpoint. leave out --measure")
    if not fits:  # a trial could take the machine down
        fail("measure: it would not fit, so it was not tried")
    del given['measure']
    show(plan_memory.trial(_train_py, given, run))
