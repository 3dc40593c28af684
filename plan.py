"""
What a run will take, before it is started (train.py --dry_run): measured here, by three iterations on random tokens, or reckoned for GPUs that are
elsewhere (--world_size); and what its first and its last loss say about whether it works at all.
"""

import bisect
import dataclasses
import functools
import itertools
import math
import os
import time
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model as network
import optim
import report
from model import GPT, GPTConfig
from optim import own
from parallel import choose_loss_rows, memory_of, no_room


def measure(model, wrapped, optimizer, scaler, autocast, procs, batch_size, block_size, accumulation):
    """(bytes of weights, gradients, optimizer and activations, seconds per iteration), by iterations with the real model and
    optimizer. The weights are worth nothing afterwards."""
    device, size = procs.device, lambda tensors: sum(t.numel() * t.element_size() for t in map(own, tensors))
    tokens = torch.randint(model.config.vocab_size, (batch_size, block_size + 1), generator=torch.Generator().manual_seed(1)).to(device)
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    params = list(model.parameters())

    def micro(last):
        procs.average_gradients(wrapped, last)
        with autocast:
            loss = wrapped(x, y)[1] / accumulation
        scaler.scale(loss).backward()

    def timed(step, *args):
        procs.synchronize()
        t0 = time.perf_counter()
        step(*args)
        procs.synchronize()
        return time.perf_counter() - t0

    def update():
        scaler.unscale_(optimizer)
        procs.clip(model, 1.0)
        scaler.step(optimizer)
        scaler.update()

    def iteration():
        first = timed(micro, False) if accumulation > 1 else 0.0  # those between are like it: nothing is sent
        seconds = first * (accumulation - 1) + timed(micro, True) + timed(update)
        gradients = size(p.grad for p in params if p.grad is not None)
        optimizer.zero_grad(set_to_none=True)
        return seconds, gradients

    _, gradients = iteration()  # the first one is slower, and makes the optimizer's state
    moments = size(t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t))
    if device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    seconds = min(iteration()[0] for _ in range(2))  # the faster one: what else the machine does is not ours
    activations = torch.cuda.max_memory_allocated(device) - before - gradients if device.type == 'cuda' else kept_for_backward(model, x, y, autocast)
    return size(params), gradients, moments, activations, seconds


def kept_for_backward(model, x, y, autocast):
    """Bytes that a forward pass keeps for the backward pass, the weights aside: what autograd saves, each piece of memory once."""
    weights = {own(p).untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes(), tensor  # held, so that no other one comes to the same address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), autocast:
        model(x, y) if hasattr(model, 'set_requires_gradient_sync') else model.forward(x, y)
    return sum(size for size, _ in kept.values())


def table(measured, procs, batch_size, block_size, accumulation, max_iters, checkpoint_bytes, keep_checkpoints, mfu, gpu_memory=None):
    """The lines that --dry_run prints."""
    weights, gradients, moments, activations, seconds = measured
    gb = lambda n: f"{n / 1e9:.3f} GB"
    n = procs.world_size
    total = 1e9 * gpu_memory if gpu_memory else torch.cuda.get_device_properties(procs.device).total_memory if procs.device.type == 'cuda' else None
    tokens = batch_size * block_size * accumulation * n
    yield (f"memory    {gb(weights + gradients + moments + activations)} in each process" +
           (f" of the {gb(total)} that {'was given' if gpu_memory else 'this GPU has'}" if total else ' and what torch itself takes'))
    yield f"            weights      {gb(weights)}"
    yield f"            gradients    {gb(gradients)}"
    yield f"            optimizer    {gb(moments)}"
    yield f"            activations  {gb(activations)}, of {batch_size} x {block_size} tokens at a time"
    yield f"disk      {gb(checkpoint_bytes)} a checkpoint, {gb(checkpoint_bytes * (keep_checkpoints + 2))} for the {keep_checkpoints} newest, the best and one being written"
    if n > 1 and not procs.sharded:  # a ring: https://arxiv.org/abs/1802.05799
        yield f"network   {gb(2 * (n - 1) / n * gradients)} sent by each of {n} processes per iteration"
    yield f"speed     {1000 * seconds:.2f} ms per iteration, {tokens / seconds:,.0f} tokens/s" + (f", mfu {100 * mfu:.1f}%" if mfu else '')
    yield f"time      {report.duration(max_iters * seconds)} for {max_iters:,} iterations = {max_iters * seconds * n / 3600:.2f} hours of a device, without evaluating and saving"


def bandwidth(procs):
    """The line that --dry_run prints of the network: how fast the processes add up float32 numbers, as nccl-tests counts it (bus bandwidth:
    2 (n - 1) / n of the bytes pass each process). To be called by all of them."""
    found, n = [], procs.world_size
    for mb in (0.25, 4, 25) if n > 1 else ():  # 25 is what DDP sends at a time
        numbers = torch.zeros(int(mb * 2**18), device=procs.device)
        for again in (False, True):  # the first time connections are made
            procs.synchronize()
            t0 = time.perf_counter()
            procs.sum(numbers)
            procs.synchronize()
            seconds = time.perf_counter() - t0
        found.append(f"{2 * (n - 1) / n * 4 * numbers.numel() / seconds / 1e9:.3g} GB/s at {mb:g} MB")
    return f"bandwidth {', '.join(found)}, all-reduced between {n} processes" if found else None


def first_loss(loss, vocab_size, n_embd):
    """A note if the first loss of random weights is not what all tokens equally likely would give; else None."""
    want = math.log(vocab_size)
    if not math.isfinite(loss) or abs(loss - want) <= 0.5 + 2e-4 * n_embd:  # weights of 0.02 spread tied logits by 0.02 sqrt(C), which adds half of its square
        return None
    if loss < want:
        return (f"note: the first loss is {loss:.2f}, far below ln({vocab_size}) = {want:.2f}: random weights cannot know that much. does a position see the one it "
                "is to predict (the causal mask, the shift of the targets), or are the weights not random?")
    return (f"note: the first loss is {loss:.2f}, far above ln({vocab_size}) = {want:.2f}: the network is sure of what it cannot know. are the initial weights too "
            "large (init, a changed layer), is a norm missing, or is vocab_size far above the ids that occur?")


def learned_by_heart(losses):
    """What overfit_batch has shown, by the losses of its iterations."""
    if not losses:
        return "overfit_batch: no finite loss was logged. model or loop is broken"
    first, last = losses[0], min(losses[-5:])
    if last < 0.1 * first:
        return f"overfit_batch: the loss of one batch went from {first:.3f} to {last:.4f}. model and loop learn"
    return (f"overfit_batch: the loss of one batch went from {first:.3f} to {last:.3f} in {len(losses):,} logged iterations, not to nearly 0. "
            "give it more of them or a larger rate, and no dropout; if that does not help, model or loop is broken")


# -----------------------------------------------------------------------------
# GPUs that are elsewhere. What the code can tell is put into no formula: model.py and optim.py themselves make the step, with tensors that have a
# shape but no memory, of two layers and of three; the difference is what each further layer adds. What FSDP does besides is from its
# source, torch/distributed/fsdp/_fully_shard in torch 2.13. dev/records/plan.md holds all of it against real steps

MARGIN = 2e9, 0.05  # bytes for CUDA, NCCL and other libraries, and a share of all else that is lost to pieces of the wrong size: assumed
MFU = 0.4  # assumed
PER_MACHINE = int(os.environ.get('LOCAL_WORLD_SIZE', 8))  # processes
NO_DATA = SimpleNamespace(vocab_size=50304, meta={'vocab_size': 50304}, tokenizer_state=None, folder=None, val=None,  # GPT-2's vocabulary, padded
                          train=SimpleNamespace(n=2**62, too_short=lambda block_size: None, fingerprint=None))
WHEN = {'forward': 'at the loss', 'last': 'in the backward pass of the last layer', 'first': 'in the backward pass of the first layer',
        'sent': 'as the gradients of embeddings and head are sent', 'update': 'in the update'}


@dataclasses.dataclass
class Setup:
    """What decides how much memory a process takes, by the names of the knobs."""
    config: GPTConfig
    dtype: str
    batch_size: int
    accumulation: int  # micro-batches of one process
    world_size: int = 1
    gpu_memory: float = 80.0
    shard: str = 'none'
    shard_size: int = None
    activation_checkpointing: bool = False
    chunked_loss: bool | str = 'auto'
    matrix_optimizer: str = 'adamw'
    device: str = 'cuda'  # 'cpu': as a CPU computes it, to be held against a real step

    def __post_init__(self):
        with FakeTensorMode():
            weights = {name: p.shape for name, p in GPT(dataclasses.replace(self.config, n_layer=1)).named_parameters()}
        self.block = [shape for name, shape in weights.items() if name.startswith('transformer.h.')]
        self.root = [shape for name, shape in weights.items() if not name.startswith('transformer.h.')]  # embeddings, last norm, head
        self.matrices = tuple(shape for shape in self.block if len(shape) > 1) if self.matrix_optimizer == 'muon' else ()
        self.n_block, self.n_root = self.config.n_layer * count(self.block), count(self.root)  # numbers in all blocks, and in the rest
        self.sharded = self.shard == 'full'
        self.n = (self.shard_size or self.world_size) if self.sharded else 1  # processes that share one copy
        self.kept = self.accumulation > 1 or (self.world_size > 1 and not self.sharded)  # gradients are there before backward: other micro-batches', or DDP's buckets
        self.whole = self.sharded and self.accumulation > 1 and not no_room(4 * (self.n_block + self.n_root), 1e9 * self.gpu_memory)  # between micro-batches
        self.rows = choose_loss_rows(self.chunked_loss, torch.device(self.device), self.batch_size * self.config.block_size, self.config.vocab_size, 1e9 * self.gpu_memory)

    def lasting(self):
        """Bytes of (weights, gradients, optimizer) in one process."""
        share = lambda shapes: sum(-(-shape[0] // self.n) * shape[1:].numel() for shape in shapes)  # FSDP divides the first dimension, rounded up
        weights = 4 * (self.config.n_layer * share(self.block) + share(self.root))
        return weights, weights, 2 * weights - 4 * self.config.n_layer * share(self.matrices)  # AdamW has two moments, Muon one

    def gathered(self):
        """Bytes of whole weights where they are shared: those of a block in use, of the next one on its way, and of embeddings and head, which stay."""
        return 2 * bytes_of(self.dtype) * count(self.block) + 4 * self.n_root if self.sharded else 0

    def few(self, layers):
        shape = tuple(dataclasses.asdict(dataclasses.replace(self.config, n_layer=layers)).items())
        return step(shape, self.dtype, self.batch_size, self.kept, self.sharded, self.activation_checkpointing, self.rows, self.device)

    def stages(self):
        """{when: bytes of (weights, gradients, optimizer, gathered weights, activations)}, one of which is the peak."""
        L, (weights, gradients, optimizer) = self.config.n_layer, self.lasting()
        busy = min(self.n, L * len(self.matrices))  # of more processes some have no matrix to make orthogonal
        found = {'update': (weights, gradients, optimizer, 0, muon(self.matrices, L, busy, self.device))}
        two, three = (self.few(2), self.few(3)) if L > 3 else (self.few(L),) * 2
        for stage in three:
            alive, whole, reduced = (b + (L - 3) * (b - a) for a, b in zip(two[stage], three[stage]))
            before = 4 * (self.n_root + self.n_block * (stage in ('forward', 'last'))) if self.whole else gradients if self.kept else reduced // self.n
            found[stage] = weights, whole + before, optimizer, self.gathered() * (stage != 'sent'), alive - whole
        return found

    def peak(self):
        return max(self.stages().items(), key=lambda stage: sum(stage[1]))

    def total(self):
        return MARGIN[0] + (1 + MARGIN[1]) * sum(self.peak()[1])

    def fits(self):
        return sum(self.lasting()) < 1e9 * self.gpu_memory and self.total() <= 1e9 * self.gpu_memory  # the first is quickly answered


def count(shapes):
    return sum(shape.numel() for shape in shapes)


def bytes_of(dtype):
    return 4 if dtype == 'float32' else 2


class Meter(TorchDispatchMode):
    """Bytes of the tensors that are made in it and alive, those `apart` aside, and the most of them in each stage."""

    def __init__(self, apart=()):
        super().__init__()
        self.known = {t.untyped_storage()._cdata: None for t in apart}
        self.alive = self.whole = self.reduced = 0  # whole: gradients among those alive. reduced: gradients that are shares now
        self.stage, self.most = 'forward', {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor) and (storage := tensor.untyped_storage())._cdata not in self.known:
                self.known[storage._cdata] = weakref.ref(storage, functools.partial(self.freed, storage._cdata, storage.nbytes()))
                self.alive += storage.nbytes()
        self.most[self.stage] = max(self.most.get(self.stage, (0, 0, 0)), (self.alive, self.whole, self.reduced))
        return result

    def freed(self, key, size, _):
        self.alive -= size
        del self.known[key]


@functools.cache
def step(shape, dtype, batch_size, kept, sharded, activation_checkpointing, rows, device):
    """{stage: (bytes alive, whole gradients among them, gradients that became shares)}, where it is the most, in the forward and backward pass of a
    micro-batch: until it is back in the last layer, in that one, and from the first one on."""
    config = GPTConfig(**dict(shape))
    with FakeTensorMode(), as_on_a_gpu() if device == 'cuda' else nullcontext():
        model = GPT(config)
        model.loss_rows = rows
        for module in model.transformer.h.modules() if sharded else ():
            for name, p in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(p.to(getattr(torch, dtype))))  # as it is gathered
        for p in model.parameters():
            p.grad = torch.empty_like(p) if kept and not sharded else None
        meter, sent = Meter([*model.buffers(), *model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]), []

        def send(params):
            """As FSDP does when a block has its gradients: out of one buffer in float32, which stays until the next one is made."""
            meter.whole -= sum(sent.pop().nbytes for _ in sent[:])
            size = 4 * count(p.shape for p in params)
            meter.whole += size
            sent.append(torch.empty(size // 4))
            for p in params:
                meter.whole, p.grad = meter.whole - p.grad.nbytes, None
            meter.reduced += size

        def arrived(p, block):
            if sharded or not kept:
                meter.whole += p.grad.nbytes
            if sharded and block and all(p.grad is not None for p in block.parameters()):
                send(list(block.parameters()))

        def mark(stage):
            meter.stage = stage

        for i, block in enumerate(model.transformer.h):
            block.activation_checkpointing = activation_checkpointing
            stage = 'last' if i == config.n_layer - 1 else 'between' if i else 'first'
            block.register_forward_hook(lambda block, args, x, stage=stage: x.register_hook(lambda grad, stage=stage: mark(stage)) and None)
        owner = {p: block for block in model.transformer.h for p in block.parameters()}
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(functools.partial(arrived, block=owner.get(p)))
        with meter:
            x = torch.zeros(batch_size, config.block_size, dtype=torch.int64)
            with torch.autocast('cpu', getattr(torch, dtype)) if dtype != 'float32' else nullcontext():
                loss = model(x, x)[1]
            loss.backward()
            if sharded:
                mark('sent')
                send([p for p in model.parameters() if p.grad is not None])
    meter.most.pop('between', None)
    return meter.most


@contextmanager
def as_on_a_gpu():
    """model.py as it runs on a GPU, with tensors that say they are on a CPU, as torch without CUDA differentiates no others. The fused attention keeps the
    same; its dropout keeps a seed, another dropout a mask of bools; a norm keeps its input; under autocast norms and powers are in float32."""
    layer_norm, wide = F.layer_norm, lambda x: None if x is None else x.float()

    def attend(q, k, v, dropout=0.0, mask=None):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.size(1) < q.size(1))

    def norm(x, shape, weight=None, bias=None, eps=1e-5):
        return layer_norm(wide(x), shape, wide(weight), wide(bias), eps)

    def dropout(x, p, training=True, inplace=False):
        return torch.native_dropout(x, p, training)[0] if p > 0 else x

    with mock.patch.object(network, 'attend', attend), mock.patch.object(F, 'layer_norm', norm), mock.patch.object(F, 'dropout', dropout), \
            mock.patch.object(network.RMSNorm, 'forward', lambda self, x: norm(x, x.shape[-1:], self.weight)), \
            mock.patch.object(network, 'relu2', lambda x: wide(F.relu(x)).square()):
        yield


@functools.cache
def muon(matrices, layers, n, device):
    """Bytes that Muon's update takes besides, for these shapes in each of so many layers, shared by n processes."""
    group = SimpleNamespace(size=lambda: n, rank=lambda: 0)
    mesh = SimpleNamespace(ndim=1, size=lambda dim: n, get_group=lambda dim: group)
    working = torch.bfloat16 if device == 'cuda' else optim.working_dtype(torch.device(device))

    class Share:  # as much of a parameter as muon_step() looks at
        def __init__(self, shape):
            self.shape, self.local, self.grad, self.momentum = shape, *(torch.empty(-(-shape[0] // n), *shape[1:], device='meta') for _ in range(3))
            self.device, self.device_mesh, self.to_local = torch.device(device), mesh, lambda: self.local

    with mock.patch.object(optim, 'working_dtype', lambda device: working), mock.patch('torch.distributed.all_to_all_single', lambda *args, **kwargs: None):
        params = [Share(shape) for shape in matrices * layers]
        optimizer = optim.MuonAdamW([torch.nn.Parameter(torch.empty(0))])
        for p in params:
            optimizer.state[p] = {'momentum_buffer': p.momentum}
        with Meter([t for p in params for t in (p.local, p.grad, p.momentum)]) as meter:
            optimizer.muon_step(params, 0.02, 0.0, 0.95, torch.zeros(()))
    return max(alive for alive, _, _ in meter.most.values()) if params else 0


def forecast(setup, max_iters, checkpoint_bytes, keep_checkpoints, peak_flops):
    """The lines that --dry_run prints for GPUs that are elsewhere."""
    gb = lambda n: f"{n / 1e9:,.2f} GB"
    config, N, low = setup.config, setup.world_size, setup.dtype
    when, (weights, gradients, optimizer, gathered, activations) = setup.peak()
    layer = setup.few(3)['forward'][0] - setup.few(2)['forward'][0]
    held = 'in float32' + (f", 1/{setup.n} of them" if setup.n > 1 else '')
    how = f", and whole {'between micro-batches' if setup.whole else 'where they have just been made'}" if setup.sharded and gradients and when != 'update' else ''
    yield f"memory    {gb(setup.total())} of the {setup.gpu_memory:g} GB of each GPU, so it {'fits' if setup.fits() else 'does not fit'}. it takes the most {WHEN[when]}:"
    yield f"            weights      {gb(weights)}, {held}"
    yield f"            gradients    {gb(gradients)}, {held if gradients else 'none then'}{how}"
    yield f"            optimizer    {gb(optimizer)}, {'one moment of the matrices inside the blocks, two of the rest' if setup.matrices else 'two moments'} {held}"
    if setup.sharded:
        yield f"            gathered     {gb(gathered)}, the weights of a layer in use and of the next one in {low}, of embeddings and head in float32"
    yield (f"            activations  {gb(activations)}, of {setup.batch_size} x {config.block_size:,} tokens at a time; kept in each layer: {gb(layer)}" +
           (', its input' if setup.activation_checkpointing else '') + (f", its weights in {low} among them" if low != 'float32' and not setup.sharded else '') +
           (f"; logits of {setup.rows:,} tokens at a time" if setup.rows else ''))
    yield f"            margin       {gb(setup.total() - sum(setup.peak()[1]))}, assumed: {gb(MARGIN[0])} for CUDA, NCCL and libraries, {MARGIN[1]:.0%} for fragmentation"
    if not setup.fits():
        yield f"remedy    {remedy(setup)}"
    local, here = min(N, PER_MACHINE), memory_of(torch.device('cpu'))
    host = local * 4 * (setup.n_block + setup.n_root)
    yield (f"host      {gb(host)} of main memory in each machine, as at the start {local} process{'es build' if local > 1 else ' builds'} all of the network in float32; "
           f"{gb(checkpoint_bytes)} in the first one to save it. this machine has {gb(here)}" + ', too little' * (here < max(host, checkpoint_bytes)))
    yield f"disk      {gb(checkpoint_bytes)} a checkpoint, {gb(checkpoint_bytes * (keep_checkpoints + 2))} for the {keep_checkpoints} newest, the best and one being written"
    if N > 1:
        yield f"network   {', '.join(f'{gb(size)} {what}' for what, size in traffic(setup).items())}, sent by each of {N} processes per iteration"
    if peak_flops:
        with torch.device('meta'):
            flops = GPT(config).flops_per_token() * config.block_size * setup.batch_size * setup.accumulation
        seconds = max_iters * flops * (4 / 3 if setup.activation_checkpointing else 1) / (MFU * peak_flops)  # the forward pass once more
        yield f"time      {seconds / 86400:,.1f} days for {max_iters:,} iterations = {seconds * N / 3600:,.0f} hours of a GPU, at {MFU:.0%} of its peak, which is assumed"
    else:
        yield f"time      cannot be told without such a GPU. for a guess by {MFU:.0%} of its peak: --peak_flops=989e12 (an H100's)"


def traffic(setup):
    """{what: bytes that a process sends per iteration}, in rings: https://arxiv.org/abs/1802.05799"""
    N, n, times, sends = setup.world_size, setup.n, setup.accumulation, 1 if setup.whole else setup.accumulation
    gradients, others = 4 * (setup.n_block + setup.n_root), (setup.n - 1) / setup.n
    if not setup.sharded:
        return {'of gradients': 2 * (N - 1) / N * gradients}
    found = {'of weights': times * others * (2 * bytes_of(setup.dtype) * setup.n_block + 4 * setup.n_root),  # blocks once more for the backward pass
             'of gradients': sends * (others * gradients + 2 * (1 - n / N) * gradients / n)}  # within a copy, then between the copies
    if setup.matrices:  # to the process that makes them orthogonal, and back
        found['for Muon'] = 2 * others * 2 * setup.config.n_layer * count(setup.matrices) / n
    return found


def remedy(setup):
    """The fewest changes that make it fit; where there is a choice, all of it."""
    tokens, samples = setup.config.block_size, setup.batch_size * setup.accumulation
    sizes = [size for size in range(1, setup.batch_size) if samples % size == 0]
    change = lambda **knobs: lambda setup: dataclasses.replace(setup, **knobs)

    def smaller(setup):  # the largest batch that fits
        of = lambda size: dataclasses.replace(setup, batch_size=size, accumulation=samples // size)
        return of(sizes[max(0, bisect.bisect_left(sizes, True, key=lambda size: not of(size).fits()) - 1)])

    changes = {'--activation_checkpointing': change(activation_checkpointing=True)} if not setup.activation_checkpointing else {}
    if setup.chunked_loss is False:
        changes['--chunked_loss=auto'] = change(chunked_loss='auto')
    if setup.n < setup.world_size:
        changes['--shard=full' + ' --shard_size=None' * bool(setup.shard_size)] = change(shard='full', shard_size=None)
    if sizes:
        changes['--batch_size'] = smaller  # the last one, as it counts on the others
    for k in range(1, len(changes) + 1):
        fitting = []
        for names in itertools.combinations(changes, k):
            changed = functools.reduce(lambda setup, name: changes[name](setup), names, setup)
            if changed.fits():
                flags = ' '.join(names).replace('--batch_size', f'--batch_size={changed.batch_size} --total_batch_size={samples * tokens * setup.world_size}')
                fitting.append(f"{flags} ({changed.total() / 1e9:,.2f} GB)")
        if fitting:
            return ', or '.join(fitting)
    least = functools.reduce(lambda setup, name: changes[name](setup), changes, setup)
    more = lambda machines: change(world_size=machines * PER_MACHINE, shard='full', shard_size=None)(least)
    machines = range(1, 2**14)
    enough = more(machines[min(bisect.bisect_left(machines, True, key=lambda n: more(n).fits()), len(machines) - 1)])
    flags = f"--shard=full --activation_checkpointing --batch_size={least.batch_size}"
    if enough.fits():
        return f"--world_size={enough.world_size} {flags} ({enough.total() / 1e9:,.2f} GB)"
    return f"none by more GPUs: with {flags} each takes {enough.total() / 1e9:,.2f} GB at least. use a smaller --block_size, a smaller network or larger GPUs"
