"""
What only GPUs run, as far as a CPU can tell: one graph and one more for evaluations, no recompiles, no wait
for the device. dev/gpuless.py of commit bcd6dc1 looked at what needs torch's CUDA build.
"""

import functools
import gc
import time
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import model
import optim
from model import GPT, GPTConfig
from support import compiling
from support import guard as guarding
from support.devices import choose_loss_chunk_size, chunked_loss
from support.evaluate import eval_mode
from support.log import Clock
from support.parallel import Distributed

AUTOCAST = torch.autocast('cpu', torch.bfloat16)


def network(arch, n_layer=2, **args):
    torch.manual_seed(0)
    return GPT(GPTConfig(block_size=32, vocab_size=96, n_layer=n_layer, n_head=2, n_embd=32, arch=arch, **args))


def tokens(T=32):
    ids = torch.randint(96, (2, T + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def train_step(net, x, y):
    with AUTOCAST:
        logits, loss = net(x, y, return_logits=False)
    assert logits is None  # the compiler would compute a gradient for them, of zeros
    loss.backward()
    net.zero_grad()


def evaluate(net, x, y):
    net.eval()
    with torch.no_grad(), AUTOCAST:
        net(x, y, reduction='none', return_logits=False)
    net.train()


@pytest.mark.parametrize('arch, saves_memory', [('gpt2', False), ('llama', True), ('modern', True), ('local', False)])
def test_training_is_one_graph_and_evaluating_another(arch, saves_memory):
    torch._dynamo.reset()
    net, counter = network(arch, dropout=0.1), CompileCounterWithBackend('aot_eager')
    net.set_activation_checkpointing(saves_memory)
    if saves_memory:
        net.loss = functools.partial(chunked_loss, net, 7)
    net.compile(backend=counter, fullgraph=True)
    graphs = []
    for pass_ in (train_step, train_step, evaluate, train_step, evaluate):
        pass_(net, *tokens())
        graphs.append(counter.frame_count)
    assert graphs == [1, 1, 2, 2, 2]


class NobodyWaits(TorchDispatchMode):
    """Reading a number makes the host wait for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
def test_a_scaled_update_waits_for_nobody_and_skips_what_is_not_finite(optimizer):
    net = network('llama')
    optimizer = optim.create_optimizer(net, 1e-2, 0.1, (0.9, 0.95), 1e-8, optimizer)
    scaler = torch.amp.GradScaler('cpu', init_scale=4.0, growth_interval=2)
    guard = guarding.Guard(optimizer, scaler, None, Distributed('cpu'), SimpleNamespace(resuming=False))
    moved, scales, skipped = [], [], []
    for it, bad in enumerate([False, True, True, True, False]):
        scaler.scale(net(*tokens())[1]).backward()
        if bad:
            net.lm_head.weight.grad[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        before = net.lm_head.weight.clone()
        with NobodyWaits():
            guard.step(it, torch.tensor(1.0), norm)
        optimizer.zero_grad()
        moved.append(not torch.equal(before, net.lm_head.weight))
        scales.append(scaler.get_scale())
        skipped.append(guard.skipped()[0])
    assert moved == [True, False, False, False, True]
    # float16's scale is searched for in silence, as long as it is above one
    assert skipped == [0, 0, 0, 1, 0] and scales == [4.0, 2.0, 1.0, 0.5, 0.5]


# -----------------------------------------------------------------------------
# torch.compile in a run


class Gpu(str):  # a CPU that says it is one
    type = 'cuda'


def compile_it(monkeypatch, backend, wish='auto', eval_only=False, device=Gpu):
    torch._dynamo.reset()
    net, notes, dist = network('gpt2'), [], Distributed('cpu')
    dist.print, dist.device = notes.append, device('cpu')
    monkeypatch.setattr(compiling, 'compile_parts', lambda model, **kw: model.compile(backend=backend))
    try:
        compiling.compile_for_training(net, net, tokens(), AUTOCAST, dist, SimpleNamespace(
            asked={'compile': wish}, knobs={'eval_only': eval_only}))
    finally:
        frozen = gc.get_freeze_count()
        gc.unfreeze()
    assert frozen > 10_000  # what the compiler leaves is not gone through again
    return net, notes


def test_compile_is_proved_for_evaluations_as_well(monkeypatch):
    def no_evaluation(graph, example):
        assert torch.is_grad_enabled(), 'no evaluation here'
        return graph.forward
    net, notes = compile_it(monkeypatch, no_evaluation)
    assert notes[0].startswith('note: compile is off after all, torch.compile failed'), notes
    evaluate(net, *tokens())  # as it is written
    with pytest.raises(SystemExit):
        compile_it(monkeypatch, no_evaluation, wish=True)


@pytest.mark.parametrize('eval_only, graphs', [(False, 2), (True, 1)])
def test_only_what_will_run_is_compiled(monkeypatch, eval_only, graphs):
    counter = CompileCounterWithBackend('aot_eager')
    net, notes = compile_it(monkeypatch, counter, eval_only=eval_only)
    assert counter.frame_count == graphs and notes[0].startswith('compiled in ')
    evaluate(net, *tokens())
    with compiling.varying_shapes():
        net(tokens(9)[0])
    assert counter.frame_count == graphs


def test_a_cpu_compiles_no_evaluation(monkeypatch):
    counter = CompileCounterWithBackend('aot_eager')
    net, notes = compile_it(monkeypatch, counter, device=torch.device)
    with eval_mode(net), AUTOCAST:
        net(*tokens())
    assert counter.frame_count == 1


def test_the_time_of_a_line_is_the_devices(monkeypatch):
    monkeypatch.setattr(Distributed, 'synchronize', lambda dist: time.sleep(0.1))
    clock = Clock(SimpleNamespace(resuming=False, knobs={'max_iters': 1}, start_iter=0), Distributed('cpu'))
    clock.start()
    clock.tick(0)
    assert clock.lap(SimpleNamespace(waited=0)) > 100


def test_logits_are_held_whole_where_memory_is_ample():
    assert not choose_loss_chunk_size(Gpu(), 32 * 1024, 50304, 80e9) and choose_loss_chunk_size(Gpu(), 64 * 1024, 50304, 80e9)


def test_a_text_is_drawn_by_the_step_that_was_compiled(works, tiny, out, monkeypatch):
    works('train.py', *tiny, '--block_size=200')
    torch._dynamo.reset()
    counter = CompileCounterWithBackend('eager')
    monkeypatch.setattr(compiling, 'compile_parts', lambda model, **kw: model.compile(backend=counter, dynamic=False))
    works('sample.py', f'--out_dir={out}', '--compile=True', '--max_new_tokens=150')
    assert counter.frame_count == 1


def test_texts_of_any_length_leave_cudnn_alone():
    seen = []
    network('gpt2').eval().generate(tokens(3)[0], 2, on_token=lambda ids: seen.append(
        torch.backends.cuda.cudnn_sdp_enabled()))
    assert seen == [False, False] and torch.backends.cuda.cudnn_sdp_enabled()


# -----------------------------------------------------------------------------
# FSDP, with a process group that pretends


@pytest.fixture
def of_two():
    """Rank 0 of two processes."""
    torch.distributed.init_process_group('fake', rank=0, world_size=2, store=FakeStore())
    yield Distributed('cpu', '', 0, 2, is_distributed=True)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize('arch', ['modern', 'local'])
def test_sharded_blocks_share_a_graph_and_the_loss_has_one(of_two, arch):
    torch._dynamo.reset()
    net = of_two.place(network(arch, n_layer=12), shard=0, dtype='bfloat16')
    counter = CompileCounterWithBackend('aot_eager')
    compiling.compile_parts(net, backend=counter, fullgraph=True)
    graphs = []
    for pass_ in (train_step, train_step, evaluate, train_step):
        pass_(net, *tokens())
        graphs.append(counter.frame_count)
    # 12 layers are one graph: it is compiled for the first, and the others find it; so are near layers
    n = 3 if arch == 'local' else 2
    assert graphs[0] == graphs[1] == n and graphs[2] == graphs[3] == 2 * n
    with compiling.varying_shapes(), torch.no_grad(), AUTOCAST:
        net.eval().generate(tokens(3)[0], 4)
        net(tokens(9)[0], full_logits=True)
    assert counter.frame_count == 2 * n
    assert compiling.uncompile(net, 'why').endswith('off after all, why')
    evaluate(net, *tokens())
    assert counter.frame_count == 2 * n


def test_what_goes_from_block_to_block_is_bfloat16_on_gpus_only(monkeypatch):
    net, seen = network('modern'), []
    net.transformer.h[1].register_forward_pre_hook(lambda block, args: seen.append(args[0].dtype))
    for stands_for_a_gpu, dtype in ((False, torch.bfloat16), (True, torch.bfloat16), (True, torch.float16)):
        monkeypatch.setattr(model, 'FLOAT32_BETWEEN_BLOCKS', () if stands_for_a_gpu else ('cpu',))
        with torch.autocast('cpu', dtype):
            net(*tokens())
    assert seen == [torch.float32, torch.bfloat16, torch.float32]
