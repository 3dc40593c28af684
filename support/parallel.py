"""
This process, alone or among those that torchrun started. Scripts ask here, and read the same in both cases:
the loop does not know how it was launched.
"""

import atexit
import functools
import gc
import hashlib
import math
import os
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._pytree import tree_map_only

from configurator import fail, say
from support.console import progress
from support.devices import choose_device
from support.errors import add, end, explain, first_line


def init(device='auto', backend='auto', timeout=600):
    """Choose the device and, under torchrun, meet the other processes. timeout: seconds to wait for them."""
    if backend not in ('auto', 'nccl', 'gloo'):
        fail(f"no such backend ({backend}). use --backend=auto, nccl (GPUs) or gloo (CPUs)")
    if 'RANK' not in os.environ:  # one process under torchrun counts as several: it is how people try it
        return Distributed(*choose_device(device))
    rank, local_rank, world_size = (int(os.environ[k]) for k in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE'))
    device, why_device = choose_device(device, local_rank, is_distributed=True)
    # nccl is nanoGPT's default, which its users spell out: taken on CPUs, too
    if backend in ('auto', 'nccl'):
        # gloo beside nccl: numbers of the hosts (all_reduce_max) travel over CPU memory and wait for no GPU
        on_gpus = device.type == 'cuda' and torch.distributed.is_nccl_available()  # Windows has no nccl
        backend = 'cpu:gloo,cuda:nccl' if on_gpus else 'gloo'
    meet(backend, timedelta(seconds=timeout))
    return Distributed(device, why_device, rank, world_size, is_distributed=True)


def meet(backend, timeout):
    """Join the other processes, and from now on end as they can understand it."""
    try:
        store, rank, world_size = next(torch.distributed.rendezvous('env://', timeout=timeout))
        # torchrun's store outlives a restart: without a name of its own, a new process may read the address
        # of a dead one. Several machines count their restarts apart; TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
        # helps there
        if os.environ.get('LOCAL_WORLD_SIZE') == os.environ['WORLD_SIZE']:
            store = torch.distributed.PrefixStore(
                'attempt' + os.environ.get('TORCHELASTIC_RESTART_COUNT', '0'), store)
        torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size,
                                             timeout=timeout)
    except (ValueError, RuntimeError) as e:
        fail(f"the processes do not find each other ({first_line(e)}). launch with torchrun, see "
             "docs/cluster.md, each with node 0's address and the number of nodes, within "
             f"ddp_timeout={timeout.total_seconds():g} s; or unset RANK", everywhere=True)
    warnings.filterwarnings('ignore', category=FutureWarning, module='torch.distributed')  # to its authors
    # a process that fails ends at once. To leave the group first would take the others, who wait for it
    # elsewhere: NCCL would wait for them, and torchrun would not learn of the failure
    add(BaseException, '', 1, None)
    # a run that ends as it should has left the group by now. fail(), which no hook sees, has not
    atexit.register(lambda: torch.distributed.is_initialized() and end(2))
    # all that gloo says of a lost peer names its transport. NCCL's words count where they raise; its own
    # thread ends the process otherwise (not tried)
    explain('gloo/transport|Connection (closed|reset) by peer|Timed out waiting|ncclRemoteError|'
            'NCCL.*(remote process|[Tt]imeout|timed out|aborted)', 'lost contact with the other processes',
            "the process that ended first says why; if none did, one was busy for ddp_timeout seconds. to go "
            "on: the same command with --init_from=resume; torchrun's --max-restarts does it by itself", 5)


class Distributed:
    """This process among the others. Alone, nothing needs sending: each method then does what is left."""

    def __init__(self, device, why_device='', rank=0, world_size=1, is_distributed=False):
        self.device, self.why_device = torch.device(device), why_device
        self.rank, self.world_size, self.is_distributed = rank, world_size, is_distributed
        self.is_main = rank == 0  # the process that prints and writes
        self.sharded = False

    def print(self, *words):
        """On the main process. A full disk or a closed pipe does not end the run: log.csv has the numbers."""
        if self.is_main:
            say(' '.join(map(str, words)), 'stdout')

    def progress(self, what, start=0):
        """tick(done, n, note=''), to be called as work advances: shows how far it is on a terminal's last
        line."""
        if self.is_main and sys.stdout.isatty():
            return progress(what, start)
        return lambda done, n, note='': None

    def all_reduce_sum(self, tensor):
        """`tensor`, summed over the processes, in place."""
        if self.is_distributed:
            torch.distributed.all_reduce(tensor)
        return tensor

    def all_reduce_max(self, number):
        """The largest `number` (an int) of all processes."""
        if not self.is_distributed:
            return int(number)
        number = torch.tensor(int(number))
        torch.distributed.all_reduce(number, op=torch.distributed.ReduceOp.MAX)
        return number.item()

    def all_gather_object(self, value):
        """The `value` of each process, in a list. They are of plain types."""
        values = [value] * self.world_size
        if self.is_distributed:
            torch.distributed.all_gather_object(values, value)
        return values

    def assert_same_on_all_ranks(self, facts):
        """End all processes with a line if `facts`, a dict of plain values, differs between them."""
        everybody = self.all_gather_object(facts)
        for rank, theirs in enumerate(everybody):
            for name in facts:
                if theirs.get(name) != everybody[0].get(name):
                    fail(f"process {rank} has another {name} than process 0 ({theirs.get(name)}, there "
                         f"{everybody[0].get(name)}). start all of them with the same code, command, "
                         "config files and data; as a flag where a config takes it from the clock")

    def place(self, model, shard, dtype):
        """Move `model` to the device: whole, or with shard != 1 only this process's share of it (FSDP)."""
        self.sharded = shard != 1 and self.world_size > 1
        if self.sharded:
            model = fully_shard_model(model, shard or self.world_size, self.world_size, dtype, self.device)
        return model.to(self.device)

    def wrap(self, model):
        """`model` in DDP, which averages gradients over the processes; itself if something else does that."""
        if self.sharded or not self.is_distributed:
            return model
        for p in model.parameters():
            p.n_replicas = self.world_size  # for Muon, whose work they divide
        # do not broadcast the only buffer, a table that is the same everywhere, before every forward pass
        DDP._set_params_and_buffers_to_ignore_for_model(model, ['rope'])
        ddp_model = DDP(model, gradient_as_bucket_view=True)  # no copy of the gradients
        # behind its first backward pass DDP sorts its buckets anew, and so adds up more than two processes in
        # another order. That pass is here, so that a resume goes on as the run did
        ddp_model.reducer.prepare_for_backward([])
        sum(p.sum() for p in model.parameters()).backward()
        ddp_model.zero_grad()
        return ddp_model

    def check_batches(self, ddp_model):
        """At the first training step: end all processes if two of them have the same batch."""
        def check(module, args):
            handle.remove()
            batches = self.all_gather_object(hashlib.sha256(args[1].cpu().numpy().tobytes()).hexdigest())
            if len(set(batches)) < self.world_size:
                fail("several processes have the same batch, so more of them may learn nothing more. let "
                     "get_batch depend on dist.rank, as batch_number in train.py does")
        if self.world_size > 1:
            handle = ddp_model.register_forward_pre_hook(check)

    def clip_grad_norm_(self, model, max_norm):
        """The norm of the whole gradient, which is then scaled down to max_norm (0: it is not)."""
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm if max_norm > 0 else math.inf)
        return norm.full_tensor() if self.sharded else norm

    def mean(self, value):
        """The mean of a tensor over the processes, a new one."""
        return self.all_reduce_sum(value.clone()) / self.world_size

    def full_state_dict(self, state, copy):
        """`state` (dicts and lists of tensors and plain values) as the main process can save it: whole
        tensors on the CPU, with `copy` in memory of their own. Call it on all ranks."""
        @functools.cache  # once for a tied one
        def whole(tensor):
            if hasattr(tensor, 'full_tensor'):
                tensor = tensor.full_tensor()
            return tensor.detach().to('cpu', copy=copy) if self.is_main else None

        return tree_map_only(torch.Tensor, whole, state)

    def synchronize(self):
        """Wait until the device has done its work, so that a clock read next tells the truth."""
        if self.device.type != 'cpu':
            torch.accelerator.synchronize()

    def close(self):
        """Leave the other processes, once all have come here."""
        if not self.is_distributed:
            return
        # DDP, which is a cycle, has to go before the process group: otherwise some processes abort
        gc.unfreeze()  # see compile_for_training
        gc.collect()
        torch.distributed.barrier()  # nobody leaves while another still talks
        torch.distributed.destroy_process_group()


# -----------------------------------------------------------------------------
# FSDP: weights, gradients and optimizer state sharded over processes. https://arxiv.org/abs/2304.11277


def shard_problems(shard, world_size, dtype='auto'):
    """Problems with the knob `shard`, a number of processes that share one copy of the model (0: all)."""
    problems = []
    if shard and world_size % shard:
        problems.append(f"shard={shard} does not divide {world_size} processes into equal groups. use "
                        f"--shard=0 (all of them) or a divisor of {world_size}, or launch more by torchrun")
    if dtype == 'float16' and shard != 1 != world_size:
        problems.append("dtype=float16 with shard: the gradient scaler is not known to work there. use "
                        "--dtype=bfloat16 or float32")
    return problems


def fully_shard_model(model, shard, world_size, dtype, device):
    """`model`, whole on the CPU, in place: before it computes, each block is gathered in `dtype`, and freed
    afterwards. With fewer sharers than processes, neighbours in rank share, as the GPUs of one machine
    (hybrid)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
    mesh = init_device_mesh(device.type, (world_size // shard, shard), mesh_dim_names=('replicate', 'shard'))
    if shard == world_size:
        mesh = mesh['shard']
    # on a CPU LayerNorm wants its gains in float32
    exact = dtype == 'float32' or (device.type == 'cpu' and model.config.norm == 'layernorm')
    policy = MixedPrecisionPolicy(None if exact else getattr(torch, dtype), torch.float32,
                                  cast_forward_inputs=False)
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # embeddings and head stay in float32: what goes from block to block is as exact as in one process
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    register_fsdp_forward_method(model, 'generate')
    return model
