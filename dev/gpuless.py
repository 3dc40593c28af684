"""
What can be known about a GPU run without a GPU: see dev/records/gpuless.md.

    $ python dev/gpuless.py [paths] [triton] [traffic] > FILE

It wants torch's CUDA build (no driver, no GPU) in a virtual environment of its own; FLATGPT_PEER names a
checkout of nanoGPT to put beside.

paths: the parts of the training loop run with tensors that say they are on a GPU but have no memory. So
CUDA's rules of autocast hold, and whatever makes the host wait for the device raises. Backward passes need a
driver.
traffic: the graphs of a training step are traced and handed to torch.compile's backend, which plans its
kernels for an H100; their bytes, read and written, are added up. Two and three layers are planned, the others
are like the third. Products and attention are counted by their inputs and outputs. An estimate of memory
traffic, not of time.
triton: the kernels of a step of two layers are compiled to machine code for an A100 and an H100.
"""

import contextlib
import importlib.util
import math
import os
import re
import sys
import types
from pathlib import Path
from unittest import mock

os.environ['TORCHINDUCTOR_COMPILE_THREADS'] = '1'
REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

import torch
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.nn import functional as F

import model as network
import optim
from model import GPT, GPTConfig
from support import cpu_kernels, devices, rms_norm
from support.distributed import Distributed
from support.guard import Guard
from support.peak_flops import peak_flops_of

BF16 = torch.bfloat16
H100 = types.SimpleNamespace(
    name='NVIDIA H100 80GB HBM3', major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132,
    warp_size=32, max_threads_per_multi_processor=2048, max_threads_per_block=1024, gcnArchName='',
    regs_per_multiprocessor=65536, shared_memory_per_multiprocessor=233472,
    shared_memory_per_block_optin=232448, shared_memory_per_block=49152, L2_cache_size=50 * 2**20)


@contextlib.contextmanager
def pretended_gpu():
    """torch.cuda answers as if there were an H100; tensors have shapes and devices but no memory."""
    answers = dict(
        is_available=lambda: True, device_count=lambda: 1, current_device=lambda: 0,
        set_device=lambda *a: None, get_device_capability=lambda *a: (H100.major, 0),
        get_device_properties=lambda *a: H100, get_device_name=lambda *a: H100.name,
        synchronize=lambda *a: None, is_bf16_supported=lambda *a, **k: True, manual_seed_all=lambda *a: None,
        max_memory_allocated=lambda *a: 0, _lazy_init=lambda *a: None,
        get_rng_state=lambda *a: torch.zeros(16, dtype=torch.uint8, device='cpu'),
        set_rng_state=lambda *a: None, _DeviceGuard=lambda *a: contextlib.nullcontext(),
        device=lambda *a: contextlib.nullcontext(), _exchange_device=lambda *a: 0,
        _maybe_exchange_device=lambda *a: 0)
    with contextlib.ExitStack() as stack:
        mode = stack.enter_context(FakeTensorMode())
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.object(torch.Tensor, 'pin_memory', lambda self, *a: self))
        stack.enter_context(mock.patch.object(type(mode), 'avoid_device_init', True))
        yield mode


# -----------------------------------------------------------------------------
# paths


def try_path(arch, dtype, saves_memory, matrix_optimizer):
    """The parts of an iteration, an evaluation and a text, in a row of the table."""
    stage, device = 'model', torch.device('cuda', 0)
    try:
        with pretended_gpu():
            with torch.device(device):
                config = GPTConfig(block_size=256, vocab_size=1024, n_layer=2, n_head=4, n_embd=256,
                                   arch=arch, dropout=0.1)
                net = GPT(config)
            net.rope = net.rope if net.rope is None else net.rope.to(device)
            net.set_memory_saving(saves_memory == 'checkpointing', 100 * (saves_memory == 'chunked loss'))
            autocast = devices.autocast(device, dtype)
            scaler = torch.amp.GradScaler('cuda', enabled=dtype == 'float16')
            optimizer = optim.create_optimizer(net, 1e-3, 0.1, (0.9, 0.95), 1e-8, matrix_optimizer,
                                               dtype=dtype)
            guard = Guard(optimizer, scaler, None, Distributed(device), types.SimpleNamespace(resuming=False))
            x = torch.zeros(8, 256, dtype=torch.int64, device=device)
            stage = 'forward'
            with autocast:
                loss = net(x, x, return_logits=False)[1]
            scaler.scale(loss)
            assert loss.dtype == torch.float32 and loss.device == device
            for p in net.parameters():
                p.grad = torch.empty_like(p)
            stage = 'update'
            scaler.unscale_(optimizer)
            guard.step(0, loss.detach(), torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0))
            net.eval()
            stage = 'evaluation'
            with torch.no_grad(), autocast:
                net(x, x, reduction='none', return_logits=False)
                stage = 'text'
                net.generate(x[:2, :3], 4, top_k=20)
        return 'runs, nothing waits'
    except Exception as e:
        return f"{stage}: {type(e).__name__}: {(str(e).strip().splitlines() or [''])[0][:120]}"


def paths():
    print("## Paths\n\n| arch | optimizer | dtype | saves memory by | |\n|---|---|---|---|---|")
    for arch, optimizer in (('gpt2', 'adamw'), ('llama', 'muon'), ('modern', 'muon')):
        for dtype in ('float32', 'bfloat16', 'float16'):
            for saves in ('nothing', 'checkpointing', 'chunked loss'):
                found = try_path(arch, dtype, saves, optimizer)
                print(f"| {arch} | {optimizer} | {dtype} | {saves} | {found} |", flush=True)
    with pretended_gpu():
        assert peak_flops_of(torch.device('cuda', 0)) == 989e12


# -----------------------------------------------------------------------------
# traffic


def heads(t):
    """Laid out as flash attention gives its results."""
    return t.new_empty(t.size(0), t.size(2), t.size(1), t.size(3)).transpose(1, 2)


@torch.library.custom_op('flatgpt::attention', mutates_args=())
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(q)


@torch.library.custom_op('flatgpt::attention_backward', mutates_args=())
def attention_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                       out: torch.Tensor) -> list[torch.Tensor]:
    return [q.clone(), k.clone(), v.clone()]


attention.register_fake(lambda q, k, v: heads(q))
attention_backward.register_fake(lambda grad, q, k, v, out: [heads(q), heads(k), heads(v)])
attention.register_autograd(
    lambda ctx, grad: tuple(attention_backward(grad, *ctx.saved_tensors)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output))


def cuda_attention(q, k, v, *args, **kwargs):
    return attention(*(t.to(BF16) for t in (q, k, v)))  # as CUDA's autocast does


def cuda_layer_norm(x, shape, weight=None, bias=None, eps=1e-5):
    return torch.layer_norm(x.float(), shape, weight, bias, eps)


def cuda_rms_norm(self, x):
    return torch.rms_norm(x.float(), (x.size(-1),), self.weight, self.eps)


def graphs_of(make, B, T, step):
    """{'forward' and 'backward': graph} of step(model, x) under autocast, with CUDA's rules."""
    found = {}
    patches = [mock.patch.object(network, 'scaled_dot_product_attention', cuda_attention),
               mock.patch.object(F, 'scaled_dot_product_attention', cuda_attention),
               mock.patch.object(F, 'layer_norm', cuda_layer_norm),
               mock.patch.object(torch.compiler, 'is_compiling', lambda: True),
               mock.patch.object(rms_norm.RMSNorm, 'forward', cuda_rms_norm)]
    with FakeTensorMode(), cpu_kernels.disabled(), contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        net = make()
        x = torch.zeros(B, T, dtype=torch.int64)
        tensors = dict(net.named_parameters()) | dict(net.named_buffers())

        def function(*args):
            with torch.autocast('cpu', BF16):
                named = dict(zip(tensors, args))
                return torch.func.functional_call(net, named, (args[-1], args[-1]), step)

        def keep(kind):
            def compiler(graph, example):
                found[kind] = graph
                return make_boxed(graph)
            return compiler

        from functorch.compile import make_boxed_func

        def make_boxed(graph):
            return make_boxed_func(graph.forward)

        traced = aot_function(function, fw_compiler=keep('forward'), bw_compiler=keep('backward'),
                              partition_fn=min_cut_rematerialization_partition,
                              decompositions=select_decomp_table())
        traced(*tensors.values(), x)[-1].backward()
    return found


class Planned(Exception):
    """Ends the compiler before it makes code."""


@contextlib.contextmanager
def on_gpu(graph):
    """Inside, `graph`, traced on the CPU, is one for the pretended GPU; yields its inputs."""
    def to_gpu(arg):
        return torch.device('cuda', 0) if isinstance(arg, torch.device) else arg

    for node in graph.graph.nodes:
        node.args = tuple(map(to_gpu, node.args))
        node.kwargs = {name: to_gpu(arg) for name, arg in node.kwargs.items()}
    graph.recompile()
    with pretended_gpu() as mode:
        inputs = [n.meta['val'] for n in graph.graph.nodes if n.op == 'placeholder']
        inputs = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device='cuda') if torch.is_tensor(v)
                  else v for v in inputs]
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*inputs)
        with tracing(TracingContext(mode)):
            yield inputs


def plan(graph):
    """[(kind of kernel, bytes read and written)] of a graph that was traced on the CPU."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.graph import GraphLowering
    found = []

    def stop(self):
        self.codegen()
        for node in self.scheduler.nodes:
            found.append((type(node).__name__, node.get_read_write_buffers_sizes()))
        raise Planned

    with on_gpu(graph) as inputs, mock.patch.object(GraphLowering, 'compile_to_module', stop):
        try:
            compile_fx_inner(graph, inputs)
        except Exception:
            if not found:
                raise
    return found


def step_traffic(make, B, T, step, n_layer):
    """(bytes, kernels) of a forward and a backward pass with n_layer layers, from those of two and three."""
    def with_layers(n):
        kernels = []
        for graph in graphs_of(lambda: make(n), B, T, step).values():
            kernels += plan(graph)
        return sum(n_bytes for _, n_bytes in kernels), len(kernels)

    two, three = with_layers(2), with_layers(3)
    return [b + (n_layer - 3) * (b - a) for a, b in zip(two, three)]


def pretend_driver():
    """Triton asks for the GPU that it compiles for."""
    import triton.runtime.driver
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config
    from torch._inductor.runtime import hints, triton_helpers
    from triton.backends.compiler import GPUTarget

    class Utils:
        def get_device_properties(self, device):
            return dict(max_shared_mem=232448, multiprocessor_count=132, warpSize=32, max_num_regs=65536)

    class Driver:
        utils, binary_ext, launcher_cls = Utils(), 'cubin', None
        get_current_target = staticmethod(lambda: GPUTarget('cuda', 10 * H100.major, 32))
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda *device: 0)
        get_device_interface = staticmethod(lambda: torch.cuda)
        get_active_torch_device = staticmethod(lambda: torch.device('cuda', 0))
        map_python_to_cpp_type = staticmethod(lambda kind: kind)
        is_active = staticmethod(lambda: True)

    triton.runtime.driver.set_active(Driver())
    config.compile_threads, config.fx_graph_cache, config.use_static_triton_launcher = 1, False, False
    hints.DeviceProperties.create = classmethod(lambda cls, device: hints.DeviceProperties(
        device.type, device.index, 132, 10 * H100.major, H100.major, 65536, 2048, 1024, 32))
    for owner in (CudaInterface, CudaInterface.Worker):
        owner.get_device_properties = staticmethod(lambda *a: H100)
    CudaInterface.get_compute_capability = staticmethod(lambda *a: 10 * H100.major)
    CudaInterface.is_available = staticmethod(lambda *a: True)
    triton_helpers.set_driver_to_gpu = lambda: None


def nanogpt():
    """nanoGPT's model.py as a module, if FLATGPT_PEER names a checkout."""
    if not os.environ.get('FLATGPT_PEER'):
        return None
    spec = importlib.util.spec_from_file_location('nanogpt', Path(os.environ['FLATGPT_PEER']) / 'model.py')
    module = importlib.util.module_from_spec(spec)
    sys.modules['nanogpt'] = module
    spec.loader.exec_module(module)
    return module


SIZES = {'124M': (12, 12, 768), '1.5B': (48, 25, 1600)}  # layers, heads, channels


def contestants():
    """[(name, make(size, n_layer), arguments of the step)]"""
    def ours(arch, chunk=0):
        def make(size, n):
            _, n_head, C = SIZES[size]
            net = GPT(GPTConfig(n_layer=n, n_head=n_head, n_embd=C, arch=arch, bias=False))
            net.set_memory_saving(False, chunk)
            return net
        return make

    def theirs(size, n):
        _, n_head, C = SIZES[size]
        return peer.GPT(peer.GPTConfig(n_layer=n, n_head=n_head, n_embd=C, bias=False))

    peer = nanogpt()
    if peer:
        peer.print = lambda *words: None
        yield 'nanoGPT', theirs, {}
    for arch in ('gpt2', 'modern'):
        yield f'{arch}, logits returned', ours(arch), {}
        yield arch, ours(arch), {'return_logits': False}
        yield f'{arch}, chunked loss', ours(arch, 2**28 // 50304), {'return_logits': False}


def recorded():
    """{(size, batch, name): GB} of dev/records/gpuless.md."""
    record = REPO / 'dev' / 'records' / 'gpuless.md'
    rows = re.findall(r'(?m)^\| (\S+) \| (\d+) \| (.+?) \| ([\d.,]+) \|', record.read_text())
    return {(size, int(B), name): float(gb.replace(',', '')) for size, B, name, gb in rows}


def traffic():
    """Ends with status 1 if a step moves 2% more bytes than the record says."""
    pretend_driver()
    before, more = recorded(), []
    print("\n## Memory traffic and kernels of a forward and backward pass, bfloat16, contexts of 1024\n")
    print("| size | batch | | GB | kernels |\n|---|---|---|---|---|")
    for size, batches in {'124M': (32, 64), '1.5B': (32,)}.items():
        for B in batches:
            for name, make, step in contestants():
                try:
                    n_bytes, kernels = step_traffic(lambda n: make(size, n), B, 1024, step,
                                                    SIZES[size][0])
                    row = f"{n_bytes / 1e9:,.1f} | {kernels:,}"
                    if n_bytes / 1e9 > 1.02 * before.get((size, B, name), math.inf):
                        more.append(f'{name}, {size}, {B}')
                except Exception as e:
                    row = f"{type(e).__name__}: {(str(e).strip().splitlines() or [''])[0][:100]} | "
                print(f"| {size} | {B} | {name} | {row} |", flush=True)
    if more:
        sys.exit(f"more bytes than in the record: {more}")


# -----------------------------------------------------------------------------
# triton


def compile_kernels(graph):
    """Bytes of machine code of each Triton kernel of a graph that was traced on the CPU."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from triton.compiler.compiler import CompiledKernel
    made = []

    def keep(self):
        made.append(len(self.asm['cubin']))

    def no_launchers(self):
        for result in self.compile_results:
            keep(result.kernel)
        self.launchers = [lambda *a, **k: None]

    with on_gpu(graph) as inputs, mock.patch.object(CompiledKernel, '_init_handles', lambda self: None), \
            mock.patch.object(CachingAutotuner, '_make_launchers', no_launchers):
        compile_fx_inner(graph, inputs)
    return made


def triton():
    pretend_driver()
    print("\n## Triton kernels, compiled\n")
    print("| | arch | pass | kernels | machine code |\n|---|---|---|---|---|")
    for H100.major in (8, 9):
        for arch in ('gpt2', 'llama', 'modern'):
            def make():
                return GPT(GPTConfig(block_size=128, vocab_size=1024, n_layer=2, n_head=4, n_embd=256,
                                     arch=arch))
            for kind, graph in graphs_of(make, 4, 128, {'return_logits': False}).items():
                try:
                    sizes = compile_kernels(graph)
                    found = f"{len(sizes)} | {sum(sizes) / 1000:,.0f} KB"
                except Exception as e:
                    found = f"{type(e).__name__}: {(str(e).strip().splitlines() or [''])[0][:150]} | "
                print(f"| sm_{H100.major}0 | {arch} | {kind} | {found} |", flush=True)


if __name__ == '__main__':
    torch.set_num_threads(1)
    wanted = sys.argv[1:] or ['paths', 'triton', 'traffic']
    print("# GPU code without a GPU: estimates\n")
    print(f"Made by dev/gpuless.py with torch {torch.__version__}; for a pretended {H100.name}. Nothing here "
          "was measured on a GPU.\n")
    for name in wanted:
        globals()[name]()
