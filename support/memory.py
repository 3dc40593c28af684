"""
The memory that an iteration takes, estimated without making one: model.py, optim.py and FSDP themselves run,
with tensors that have a shape but no memory (FakeTensorMode), and a Meter counts their bytes.

Networks of two and of three layers are run; the difference is what each further layer adds. torch's own
MemTracker and FSDPMemTracker count the same (dev/records/plan.md), but know no stages to which layers could
be added; a step of 80 layers takes them a minute, and every setting that is tried another one.
"""

import collections
import contextlib
import dataclasses
import functools
import weakref
from types import SimpleNamespace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import GPT, GPTConfig
from optim import create_optimizer
from support import devices
from support.chunked_loss import use_chunked_loss
from support.parallel import Distributed
from support.gpu_on_cpu import GPUFunctions
from support.guard import Guard

CPU = torch.device('cpu')
MARGIN = 2e9, 0.05  # bytes for CUDA, NCCL and libraries, and the share lost to fragmentation: assumed
PARTS = ('weights', 'gradients', 'optimizer', 'gathered', 'activations')
WHEN = {'start': 'in the forward pass of the first layer', 'loss': 'at the loss',
        'last': 'in the backward pass of the last layer',
        'first': 'in the backward pass of the first layer', 'update': 'in the update'}


@dataclasses.dataclass
class Setup:
    """What decides how much memory a process takes, by the names of the knobs."""
    config: GPTConfig
    dtype: str
    batch_size: int
    grad_accum_steps: int = 1  # micro-batches of one process
    world_size: int = 1
    memory: float = 80e9  # bytes that the device has
    shard: int = 1
    activation_checkpointing: bool = False
    matrix_optimizer: str = 'adamw'
    device: torch.device = torch.device('cuda')
    documents: bool = False  # attention stays inside them: a mask
    keeps_whole_gradients: bool = None  # FSDP, between micro-batches. None: if there is room

    @functools.cached_property
    def n_shards(self):
        """How many processes share one copy of the model."""
        return self.shard or self.world_size

    @functools.cached_property
    def shapes(self):
        """Those of the parameters in all blocks, and of all others."""
        with torch.device('meta'):
            model = GPT(dataclasses.replace(self.config, n_layer=1))
        own = {id(p) for p in model.transformer.h.parameters()}
        in_blocks = [p.shape for p in model.transformer.h[:-1].parameters()]
        in_blocks += self.config.n_layer * [p.shape for p in model.transformer.h[-1].parameters()]
        return in_blocks, [p.shape for p in model.parameters() if id(p) not in own]

    @functools.cached_property
    def n_params(self):
        """(in all blocks, elsewhere: embeddings, head, last norm)"""
        return tuple(sum(shape.numel() for shape in shapes) for shapes in self.shapes)

    def __post_init__(self):
        if self.keeps_whole_gradients is None:
            self.keeps_whole_gradients = 4 * sum(self.n_params) <= self.memory / 8

    @property
    def loss_chunk_size(self):
        tokens, vocab_size = self.batch_size * self.config.block_size, self.config.vocab_size
        return devices.choose_loss_chunk_size(self.device, tokens, vocab_size, self.memory)

    @functools.cached_property
    def two_and_three(self):
        """The stages of networks of two layers and of three."""
        return [run_iteration(self.with_layers(n)) for n in (2, 3)]

    def with_layers(self, n):
        return dataclasses.replace(self, config=dataclasses.replace(self.config, n_layer=n))

    @functools.cached_property
    def stages(self):
        """{(stage, micro_step): {part: bytes}} of one process; the largest is the peak."""
        if self.config.n_layer <= 3:
            return run_iteration(self)
        two, three = self.two_and_three
        more = self.config.n_layer - 3
        found = {}
        for stage in three:
            found[stage] = {part: three[stage][part] + more * (three[stage][part] - two[stage][part])
                            for part in PARTS}
        if self.matrix_optimizer == 'muon' and not self.one_matrix_each():
            found['update', 0] = run_iteration(self, only_update=True)['update', 0]
        return found

    def one_matrix_each(self):
        """Whether Muon hands no process more than one matrix of a shape. Otherwise its memory does not grow
        evenly with the layers."""
        alike = collections.Counter(shape for shape in self.shapes[0] if len(shape) > 1)
        return max(alike.values()) <= self.n_shards

    @property
    def peak(self):
        """(stage, {part: bytes})"""
        (stage, _), parts = max(self.stages.items(), key=lambda found: sum(found[1].values()))
        return stage, parts

    def total(self):
        """Bytes, with a margin."""
        used = sum(self.peak[1].values())
        return used if self.device.type == 'cpu' else MARGIN[0] + (1 + MARGIN[1]) * used

    def fits(self):
        at_least = 12 * sum(self.n_params) / self.n_shards  # quickly found: weights, gradients, a moment
        return at_least <= self.memory and self.total() <= self.memory


# -----------------------------------------------------------------------------
# a step with tensors that have no memory


def run_iteration(setup, only_update=False):
    """{(stage, micro_step): {part: bytes}} at the most in each stage of an iteration with all layers of
    setup.config."""
    meter = Meter()
    with fake_model(setup, meter) as (model, dist):
        optimizer = create_optimizer(model, 1e-3, 0.1, (0.9, 0.95), 1e-8, setup.matrix_optimizer)
        guard = Guard(optimizer, torch.amp.GradScaler('cpu', enabled=False), None, dist,
                      SimpleNamespace(resuming=False))
        for p in model.parameters():
            p.grad = torch.empty_like(p)
        optimizer.step()  # makes its state
        if not only_update:
            if setup.world_size == 1 or dist.sharded:  # else they are the buckets of DDP, which stay
                optimizer.zero_grad(set_to_none=True)
        meter.label([*model.parameters(), *model.buffers()], 'weights')
        meter.label_state(model, optimizer)
        with meter:
            loss = norm = torch.zeros(())
            if not only_update:
                loss = run_micro_batches(setup, model, dist, meter)
                norm = dist.clip_grad_norm_(model, 1.0)
            meter.stage, meter.micro_step = 'update', 0
            if optimizer.defaults.get('fused'):
                guard.step(0, loss, norm)
            else:  # the guard would read a number, and there is none
                optimizer.step()
            meter.label_state(model, optimizer)
    return meter.found()


def run_micro_batches(setup, model, dist, meter):
    """Two at the most: all that follow are like the second."""
    x = torch.zeros(setup.batch_size, setup.config.block_size, dtype=torch.int64)
    doc_ids = [torch.zeros_like(x)] if setup.documents else []
    n = min(2, setup.grad_accum_steps)
    with contextlib.nullcontext() if setup.device.type == 'cpu' else GPUFunctions():
        for micro_step in range(n):
            meter.stage, meter.micro_step = 'start', micro_step
            dist.set_grad_sync(model, micro_step == n - 1)
            with devices.autocast(CPU, setup.dtype):
                loss = model(x, x, *doc_ids, return_logits=False)[1] / n
            loss.backward()
    return loss.detach()


@contextlib.contextmanager
def fake_model(setup, meter):
    """(the model of one process, what stands for its process group)"""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    kernels = contextlib.nullcontext()
    if setup.shard == 1:
        with fake, kernels:
            yield make_model(setup, meter), Distributed(CPU)
        return
    import torch.distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from support import parallel
    from support.parallel import ProcessGroup
    n = setup.n_shards
    if n < setup.world_size:
        n *= 2  # more copies than two make no difference
    torch.distributed.init_process_group('fake', rank=0, world_size=n, store=FakeStore())
    try:
        dist = ProcessGroup(0, 0, n, CPU, '')
        dist.sharded, dist.keeps_whole_gradients = True, setup.keeps_whole_gradients
        with torch.device('meta'):  # FSDP divides it faster than a fake one
            model = make_model(setup, meter)
        mesh = parallel.make_mesh(CPU, setup.n_shards, n)
        parallel.fully_shard_model(model, mesh, setup.dtype, setup.device)
        with fake, kernels:
            yield model.to_empty(device='cpu'), dist
    finally:
        torch.distributed.destroy_process_group()


def make_model(setup, meter):
    model = GPT(setup.config)
    use_chunked_loss(model, setup.loss_chunk_size)
    model.set_activation_checkpointing(setup.activation_checkpointing)
    meter.watch(model.transformer.h, setup.config.near_layers)
    return model


class Meter(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, at the most in each stage."""

    # FSDP's tensors are known by the functions that touch them, all others are labelled or activations
    touched_by = {'fsdp::all_gather_copy_in': 'gathered', 'fsdp::split_with_sizes_copy': 'gathered',
                  'c10d::_allgather_base_': 'gathered', 'fsdp::chunk_cat': 'gradients',
                  'c10d::_reduce_scatter_base_': 'gradients'}

    def __init__(self):
        super().__init__()
        self.storages = {}  # {address: [number, bytes, weak reference]} of those that are alive
        self.labels = []  # of each number
        self.events = []  # (number, bytes more)
        self.alive = 0
        self.stage, self.micro_step = 'start', 0
        self.most = {}  # {(stage, micro_step): (bytes, how many events before)}

    def watch(self, blocks, near_layers):
        """Begin a stage where the forward or backward pass comes to the first or last of the blocks. Near
        layers belong to the first: there is one more of the others for each further layer."""
        for i, block in enumerate(blocks):
            stage = 'first' if i <= near_layers else 'between'
            if block is blocks[-1]:
                stage = 'last'
            block.register_forward_pre_hook(functools.partial(self.before_block, stage))
            block.register_forward_hook(functools.partial(self.after_block, stage))

    def before_block(self, stage, block, args):
        self.stage = {'first': 'start', 'last': 'loss'}.get(stage, stage)

    def after_block(self, stage, block, args, output):
        def begin(grad):
            self.stage = stage
        output.register_hook(begin)

    def add(self, tensor):
        """[number, bytes, weak reference] of its storage"""
        storage = getattr(tensor, '_local_tensor', tensor).untyped_storage()
        address = storage._cdata
        if address not in self.storages:
            freed = functools.partial(self.freed, address)
            self.storages[address] = [len(self.labels), 0, weakref.ref(storage, freed)]
            self.labels.append('activations')
            self.resize(self.storages[address], storage.nbytes())
        return self.storages[address]

    def freed(self, address, _):
        self.resize(self.storages.pop(address), 0)

    def resize(self, entry, size):
        more = size - entry[1]
        if more:
            self.events.append((entry[0], more))
            self.alive += more
            entry[1] = size

    def label(self, tensors, label):
        for tensor in filter(torch.is_tensor, tensors):
            number = self.add(tensor)[0]
            if self.labels[number] == 'activations':
                self.labels[number] = label

    def label_state(self, model, optimizer):
        self.label([value for state in optimizer.state.values() for value in state.values()], 'optimizer')
        self.label([p.grad for p in model.parameters()], 'gradients')

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        before = len(self.events)
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            self.add(tensor)
        label = self.touched_by.get(func._schema.name)
        if label:
            self.label(tree_leaves([args, kwargs, result]), label)
        if len(self.events) > before or label:
            self.measure()
        return result

    def measure(self):
        for entry in self.storages.values():  # FSDP frees by resizing
            if self.labels[entry[0]] == 'gathered':
                self.resize(entry, entry[2]().nbytes())
        now = self.stage, self.micro_step
        if self.alive > self.most.get(now, (0, 0))[0]:
            self.most[now] = self.alive, len(self.events)

    def found(self):
        """{(stage, micro_step): {part: bytes}}"""
        found = {}
        for stage, (_, n_events) in self.most.items():
            found[stage] = dict.fromkeys(PARTS, 0)
            for number, more in self.events[:n_events]:
                found[stage][self.labels[number]] += more
        return {stage: parts for stage, parts in found.items() if stage[0] != 'between'}
