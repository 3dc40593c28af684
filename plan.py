"""
What a run takes, before it is started: memory, disk, network, time. Nothing is written.

    $ python plan.py config/train_gpt2.py                                       # for the device here
    $ python plan.py config/plan_llama_70b.py --world_size=512 --gpu_memory=80  # for GPUs elsewhere
    $ python plan.py config/quickstart.py --measure                             # by a trial
    $ torchrun --standalone --nproc_per_node=2 plan.py config/train_gpt2.py --measure

It takes the config files and knobs of train.py. Without --measure it estimates: that needs no dataset, and a
few seconds for a network of any size.
"""

import os

from configurator import configure, fail

# -----------------------------------------------------------------------------
world_size: int = None  # estimate for so many GPUs, which need not be here. None: for the device here
gpu_memory: float = None  # GB of each of them. None: 80
measure = False  # run three iterations of train.py instead, in the processes that torchrun started
# -----------------------------------------------------------------------------
_train_py = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'train.py')
knobs, given = configure(globals(), like=_train_py)

import torch

from dataset import DATA_DIR
from model import GPT
from support import devices, planned_run
from support.console import exit_on_broken_pipe, wrap
from support.dataset_meta import bin_files
from support.errors import end
from support.devices import peak_flops_of

elsewhere = world_size is not None or gpu_memory is not None
is_distributed = 'RANK' in os.environ
rank, local_rank = int(os.environ.get('RANK', 0)), int(os.environ.get('LOCAL_RANK', 0))
n_processes = int(os.environ.get('WORLD_SIZE', 1)) if world_size is None else world_size
has_data = bool(bin_files(os.path.join(data_dir or DATA_DIR, dataset), 'train'))
no_data = not has_data and init_from == 'scratch'

# -----------------------------------------------------------------------------
# what cannot be planned

problems = [f"{name} is out of range ({knobs[name]}). use a number above 0"
            for name in ('world_size', 'gpu_memory') if knobs[name] is not None and knobs[name] <= 0]
if measure and elsewhere:
    problems.append("measure is for the devices here. leave out --measure, or world_size and gpu_memory")
if measure and no_data:
    problems.append(f"measure reads the dataset, which is not here ({dataset}). make it, or plan without it: "
                    "leave out --measure")
if is_distributed and not measure:
    problems.append("an estimate is made by one process. use python in place of torchrun, with "
                    f"--world_size={n_processes}; or add --measure")
if shard != 1 and n_processes == 1:
    problems.append(f"shard={shard} with one process: there is nobody to share with. add --world_size=8")
if budget and 'epochs' in budget and not has_data:
    problems.append(f"budget={budget!r} of a dataset that is not here ({dataset}). give it in tokens: "
                    "--budget='1e9 tokens'")
if problems:
    fail(*problems)

# -----------------------------------------------------------------------------


def show(lines):
    for line in wrap(lines, indent=10):
        if rank == 0:
            print(line, flush=True)


exit_on_broken_pipe()
if elsewhere:
    gpu_memory = gpu_memory or 80.0
    system = f"{n_processes:,} GPUs of {gpu_memory:g} GB elsewhere"
    device, why = 'cuda', ''
    memory, peak = 1e9 * gpu_memory, peak_flops
else:
    system = None
    device, why = devices.choose_device(device, local_rank, is_distributed)
    memory, peak = devices.memory_of(device), peak_flops or peak_flops_of(device)
dist = planned_run.Planned(device, why, rank, n_processes)
run = planned_run.settle(knobs, given, dist, has_data or measure, elsewhere)
show(planned_run.overview(run, system))
if measure:
    from support import estimate, trial
    setup = planned_run.memory_setup(run, memory)
    if not setup.fits():  # a trial could take the machine down
        show(estimate.memory_lines(setup))
        fail("measure: it would not fit, so it was not tried. use the flags of the line above")
    with torch.device('meta'):
        model = GPT(run.config)
    found = trial.run_trial(_train_py, run.asked, dist)
    show(trial.lines(found, run, model, peak))
    if is_distributed:
        show([trial.bandwidth_line(dist)])
        torch.distributed.barrier()  # nobody leaves while another still talks
        end(0)  # without Python's own way out, on which gloo's threads sometimes abort
else:
    from support import estimate
    setup = planned_run.memory_setup(run, memory)
    show(estimate.lines(setup, run, peak, elsewhere))
