"""This process among those that torchrun started."""

import atexit
import gc
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from configurator import fail
from support.devices import choose_device
from support.distributed import Distributed, map_tensors
from support.errors import end, end_alone, explain, first_line


def join(device, backend, timeout):
    """Meet the other processes, within `timeout` seconds."""
    try:
        rank, local_rank, world_size = (int(os.environ[k]) for k in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE'))
    except (KeyError, ValueError):
        fail("RANK is set, but not LOCAL_RANK and WORLD_SIZE. launch with torchrun, or unset RANK")
    device, why_device = choose_device(device, local_rank, is_distributed=True)
    # nccl is nanoGPT's default, which its users spell out: taken on CPUs, too
    if backend in ('auto', 'nccl'):
        # gloo beside nccl: numbers of the hosts (all_reduce_max) travel over CPU memory and wait for no GPU
        on_gpus = device.type == 'cuda' and dist.is_nccl_available()  # Windows has no nccl
        backend = 'cpu:gloo,cuda:nccl' if on_gpus else 'gloo'
    elif backend != 'gloo' and not dist.is_backend_available(backend):
        fail(f"backend={backend}, but this torch was built without it. use --backend=auto, nccl (GPUs) or "
             "gloo (CPUs)")
    init_process_group(backend, timedelta(seconds=timeout))
    end_alone()
    # a run that ends as it should has left the group by now. fail(), which no hook sees, has not
    atexit.register(lambda: dist.is_initialized() and end(2))
    explain_lost_contact()
    return ProcessGroup(rank, local_rank, world_size, device, why_device)


def init_process_group(backend, timeout):
    try:
        store, rank, world_size = next(dist.rendezvous('env://', timeout=timeout))
        # torchrun's store outlives a restart: without a name of its own, a new process may read the address
        # of a dead one. Several machines count their restarts apart; TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
        # helps there
        if os.environ.get('LOCAL_WORLD_SIZE') == os.environ['WORLD_SIZE']:
            attempt = os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')
            store = dist.PrefixStore('attempt' + attempt, store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except (ValueError, RuntimeError) as e:
        fail(f"the processes do not find each other ({first_line(e)}). launch with torchrun, see "
             "docs/cluster.md, each with node 0's address and the number of nodes, within "
             f"ddp_timeout={timeout.total_seconds():g} s; or unset RANK", everywhere=True)


def explain_lost_contact():
    # all that gloo says of a lost peer names its transport. NCCL's words count where they raise; its own
    # thread ends the process otherwise (not tried)
    explain('gloo/transport|Connection (closed|reset) by peer|Timed out '
            'waiting|ncclRemoteError|NCCL.*(remote process|[Tt]imeout|timed '
            'out|aborted)', 'lost contact with the other processes',
            "the process that ended first says why. to continue: the same command with --init_from=resume; "
            "torchrun's --max-restarts does it by itself, with --init_from=auto", 5)


class ProcessGroup(Distributed):
    is_distributed = True

    def __init__(self, rank, local_rank, world_size, device, why_device):
        super().__init__(device, why_device)
        self.rank, self.local_rank, self.world_size = rank, local_rank, world_size
        self.is_main = rank == 0

    def all_reduce_sum(self, tensor):
        dist.all_reduce(tensor)
        return tensor

    def all_reduce_max(self, number):
        number = torch.tensor(int(number))
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return number.item()

    def broadcast_object(self, value):
        values = [value]
        dist.broadcast_object_list(values, src=0, device=torch.device('cpu'))
        return values[0]

    def assert_same_on_all_ranks(self, facts):
        everybody = [None] * self.world_size
        dist.all_gather_object(everybody, facts)
        for rank, theirs in enumerate(everybody):
            for name in facts:
                if theirs.get(name) != everybody[0].get(name):
                    fail(f"process {rank} has another {name} than process 0 ({theirs.get(name)}, there "
                         f"{everybody[0].get(name)}). start all of them with the same command, the same "
                         "config files and the same data")

    def place(self, model, shard=1, dtype='float32'):
        self.sharded = shard != 1
        if self.sharded:
            from support import sharding
            self.keeps_whole_gradients = sharding.has_room_for_gradients(model, self)
            mesh = sharding.make_mesh(self.device, shard or self.world_size, self.world_size)
            model = sharding.fully_shard_model(model, mesh, dtype, self.device)
        return model.to(self.device)

    def wrap(self, model, deterministic=False):
        if self.sharded or deterministic:
            return model
        from torch.nn.parallel import DistributedDataParallel as DDP
        for p in model.parameters():
            p.n_replicas = self.world_size  # for Muon, whose work they divide
        # do not broadcast the only buffer, a table that is the same everywhere, before every forward pass
        DDP._set_params_and_buffers_to_ignore_for_model(model, ['rope'])
        device_ids = [self.device.index] if self.device.type == 'cuda' else None
        return DDP(model, device_ids=device_ids, gradient_as_bucket_view=True)  # no copy of the gradients

    def set_grad_sync(self, ddp_model, sync):
        # gradients that are not reduced are kept whole; without room for that, always reduce
        if self.sharded:
            ddp_model.set_requires_gradient_sync(sync or not self.keeps_whole_gradients)
        # nanoGPT's way: no_sync() would need a second copy of the loop's body
        ddp_model.require_backward_grad_sync = sync

    def clip_grad_norm_(self, model, max_norm):
        norm = super().clip_grad_norm_(model, max_norm)
        return norm.full_tensor() if self.sharded else norm

    def full_state_dict(self, state, copy=False):
        def whole(tensor):
            is_shard = hasattr(tensor, 'full_tensor')
            tensor = tensor.full_tensor() if is_shard else tensor
            if not self.is_main:
                return None
            if is_shard:
                return tensor.to('cpu')
            return tensor.to('cpu', copy=True) if copy else tensor

        return map_tensors(state, whole, {})

    def close(self):
        # DDP, which is a cycle, has to go before the process group: otherwise some processes abort
        gc.unfreeze()  # see compile_for_training
        gc.collect()
        dist.barrier()  # nobody leaves while another still talks
        dist.destroy_process_group()
