"""This process, alone or among those that torchrun started. Scripts ask here, and read the same in both
cases."""

import math
import os
import sys

import torch

from configurator import fail, say
from support.console import progress
from support.devices import choose_device


def init(device='auto', backend='auto', timeout=600):
    """Choose the device and, under torchrun, meet the other processes. timeout: seconds to wait for them."""
    if backend not in ('auto', 'nccl', 'gloo', 'mpi', 'ucc', 'xccl'):
        fail(f"no such backend ({backend}). use --backend=auto, nccl (GPUs) or gloo (CPUs)")
    if not 0 < timeout < 2**30:  # it is needed before the other knobs are checked
        fail(f"ddp_timeout is out of range ({timeout}). use a number of seconds above 0 and below {2**30:,}")
    if 'RANK' in os.environ:  # one process under torchrun counts as several: it is how people try it
        from support.process_group import join
        return join(device, backend, timeout)
    return Distributed(*choose_device(device))


class Distributed:
    """One process alone: nothing needs sending. With others, see support/process_group.py."""
    rank, local_rank, world_size = 0, 0, 1  # local_rank: on this machine
    is_main = True  # the process that prints and writes
    is_distributed = sharded = False

    def __init__(self, device, why_device=''):
        self.device, self.why_device = torch.device(device), why_device

    @property
    def on_terminal(self):
        """Whether a person sees what is printed: it may be shortened then, and wrapped."""
        return self.is_main and sys.stdout.isatty()

    def print(self, *words):
        """On the main process. A full disk or a closed pipe does not end the run: log.csv has the numbers."""
        if self.is_main:
            say(' '.join(map(str, words)), 'stdout')

    def progress(self, what, start=0):
        """tick(done, n, note=''), to be called as work advances: shows how far it is on a terminal's last
        line."""
        if not self.on_terminal:
            return lambda done, n, note='': None
        return progress(what, start)

    def all_reduce_sum(self, tensor):
        """`tensor`, summed over the processes, in place."""
        return tensor

    def all_reduce_max(self, number):
        """The largest `number` (an int) of all processes."""
        return int(number)

    def broadcast_object(self, value):
        """The main process's `value`, of plain types."""
        return value

    def assert_same_on_all_ranks(self, facts):
        """End all processes with a line if `facts`, a dict of plain values, differs between them."""

    def place(self, model, shard=1, dtype='float32'):
        """Move `model` to the device: whole, or with shard != 1 only this process's share of it (FSDP)."""
        return model.to(self.device)

    def wrap(self, model, deterministic=False):
        """`model` in DDP, which averages gradients over the processes; itself if something else does that."""
        return model

    def set_grad_sync(self, ddp_model, sync):
        """Whether the next forward and backward pass average gradients over the processes. Call it before
        both."""

    def clip_grad_norm_(self, model, max_norm):
        """The norm of the whole gradient, which is then scaled down to max_norm (0: it is not)."""
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm if max_norm > 0 else math.inf)

    def loss_total(self, model, deterministic=False):
        """What adds up the loss over micro-batches and processes: see LossTotal."""
        if deterministic:
            from support.tree_sum import TreeSum
            return TreeSum(self, model)
        return LossTotal(self)

    def full_state_dict(self, state, copy=False):
        """`state` (dicts and lists of tensors and plain values) as the main process can save it: whole
        tensors on the CPU for shards; with `copy` all of it on the CPU, in memory of its own. Call it on all
        ranks."""
        return map_tensors(state, lambda tensor: tensor.to('cpu', copy=True) if copy else tensor, {})

    def synchronize(self):
        """Wait until the device has done its work, so that a clock read next tells the truth."""
        if self.device.type in ('cuda', 'mps'):
            getattr(torch, self.device.type).synchronize()

    def close(self):
        """Leave the other processes, once all have come here."""


def map_tensors(state, function, known):
    """`state` with function(tensor) for each tensor, once for a tied one."""
    if isinstance(state, dict):
        return {name: map_tensors(value, function, known) for name, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map_tensors(value, function, known) for value in state)
    if not torch.is_tensor(state):
        return state
    if id(state) not in known:
        known[id(state)] = function(state.detach())
    return known[id(state)]


class LossTotal:
    """The loss of an iteration: add() each micro-batch's share, then mean() over the processes."""

    def __init__(self, dist):
        self.dist, self.sum = dist, None

    def add(self, loss):
        self.sum = loss.detach().clone() if self.sum is None else self.sum + loss.detach()

    def mean(self):
        total, self.sum = self.sum, None
        return self.dist.all_reduce_sum(total) / self.dist.world_size
