"""What is told before a run starts is what it takes, and what its losses say about it is true."""

import contextlib
import math
import re
import time

import pytest
import torch
from conftest import torchrun

import checkpoint
import plan
from model import GPT, GPTConfig
from optim import create_optimizer
from parallel import Processes


def net(**more):
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**dict(block_size=32, vocab_size=64, n_layer=2, n_head=2, n_embd=32), **more}))


def test_the_memory_of_each_part_is_counted():
    model = net(arch='llama')
    optimizer = create_optimizer(model, 1e-3, 0.1, (0.9, 0.95), 1e-8)
    procs = Processes('cpu')
    weights, gradients, moments, activations, seconds = plan.measure(model, model, optimizer, torch.amp.GradScaler('cpu', enabled=False), contextlib.nullcontext(), procs, 4, 32, 3)
    n = sum(p.numel() for p in model.parameters())
    assert weights == gradients == 4 * n and 8 * n <= moments <= 8 * n + 100 and activations > 0 and 0 < seconds < 60
    assert all(p.grad is None for p in model.parameters())


def test_activations_are_what_the_backward_pass_needs():
    x = torch.randint(64, (4, 32), generator=torch.Generator().manual_seed(1))
    kept = {(batch, layers): plan.kept_for_backward(net(n_layer=layers), x[:batch], x[:batch], contextlib.nullcontext()) for batch in (2, 4) for layers in (1, 2, 3)}
    assert kept[4, 2] == pytest.approx(2 * kept[2, 2], rel=0.05), 'as many as tokens'
    assert kept[4, 3] - kept[4, 2] == pytest.approx(kept[4, 2] - kept[4, 1], rel=0.05), 'each layer the same'
    # a linear layer keeps its input; a block of GPT-2 keeps at least those of its four, and the GELU's
    per_layer = 4 * 4 * 32 * (32 + 32 + 32 + 4 * 32 + 4 * 32)
    assert per_layer < kept[4, 2] - kept[4, 1] < 4 * per_layer
    assert kept[4, 1] > 4 * 4 * 32 * 64, 'and the logits are there'


def test_a_dry_run_prints_the_plan_and_leaves_nothing(script, tiny, tmp_path):
    result = script('train.py', *tiny, '--dry_run', '--max_iters=36000', '--gradient_accumulation_steps=3', '--keep_checkpoints=4')
    assert result.status == 0 and not (tmp_path / 'out').exists() and 'iter 0' not in result.out, result.err
    n = int(re.search(r'([\d,]+) parameters', result.out)[1].replace(',', ''))
    for part, size in (('weights', 4), ('gradients', 4), ('optimizer', 8)):
        assert re.search(rf'{part} +{size * n / 1e9:.3f} GB', result.out), part
    ms = float(re.search(r'speed +([\d.]+) ms', result.out)[1])
    hours = float(re.search(r'= ([\d.]+) hours of a device', result.out)[1])
    assert hours == pytest.approx(36000 * ms / 3.6e6, abs=0.02) and 'checkpoint, 0.00' in result.out and 'the 4 newest' in result.out
    # a folder that holds a run is as it was
    assert script('train.py', *tiny).status == 0
    before = {p.name: p.read_bytes() for p in (tmp_path / 'out').iterdir()}
    assert script('train.py', *tiny, '--dry_run').status == 0 and script('train.py', *tiny, '--dry_run', '--init_from=resume').status == 0
    assert {p.name: p.read_bytes() for p in (tmp_path / 'out').iterdir()} == before


def test_several_processes_are_told_what_they_send(tiny):
    result = torchrun(2, 'train.py', *tiny, '--gradient_accumulation_steps=4', '--dry_run')
    assert result.status == 0 and re.search(r'network +0\.000 GB sent by each of 2 processes', result.out) and result.out.count('speed ') == 1, result.err
    assert re.search(r'^bandwidth \S+ GB/s at 0.25 MB, \S+ GB/s at 4 MB, \S+ GB/s at 25 MB, all-reduced between 2 processes$', result.out, re.M), result.out


def test_a_first_loss_that_cannot_be_is_named(script, tiny, monkeypatch):
    assert 'the first loss is' not in script('train.py', *tiny, '--max_iters=3').out
    real = GPT.init_weights

    def too_large(self):
        real(self)
        with torch.no_grad():
            for p in self.parameters():
                p *= 20
    monkeypatch.setattr(GPT, 'init_weights', too_large)
    result = script('train.py', *tiny, '--max_iters=3', '--overwrite')
    assert re.search(r'note: the first loss is \S+, far above ln\(18\) = 2.89: .*initial weights', result.out)
    result = script('train.py', *tiny, '--init_from=resume', '--max_iters=4')
    assert 'the first loss is' not in result.out, 'these weights are not random'
    assert 'causal' in plan.first_loss(1.0, 257, 128) and plan.first_loss(math.nan, 257, 128) is None
    monkeypatch.undo()
    for arch in ('gpt2', 'llama', 'modern'):  # wide ones are still within what is expected
        model, idx = net(arch=arch, n_embd=1024, n_head=8, n_layer=1, vocab_size=1000), torch.randint(1000, (4, 32), generator=torch.Generator().manual_seed(1))
        assert plan.first_loss(model(idx, idx.roll(1))[1].item(), 1000, 1024) is None


def test_one_batch_is_learned_by_heart_or_the_run_says_that_it_was_not(script, tiny, tmp_path):
    result = script('train.py', *tiny, '--overfit_batch', '--max_iters=200', '--eval_interval=0', '--log_interval=10')
    assert re.search(r'overfit_batch: the loss of one batch went from [23]\.\d+ to 0\.\d+. model and loop learn', result.out), result.out[-600:]
    losses = result.losses()
    assert losses[190] < 0.3
    # the same batch each time: without learning, the same loss
    result = script('train.py', *tiny, '--overfit_batch', '--overwrite', '--learning_rate=0', '--min_lr=0', '--max_iters=4')
    assert len(set(result.losses().values())) == 1 and 'not to nearly 0' in result.out
    assert len(set(script('train.py', *tiny, '--overwrite', '--learning_rate=0', '--min_lr=0', '--max_iters=4').losses().values())) == 4


def test_a_run_ends_when_it_is_good_enough(script, tiny, tmp_path):
    flags = ['--max_iters=400', '--eval_interval=10', '--log_interval=0', '--save_interval=1000']
    result = script('train.py', *tiny, *flags, '--stop_val_loss=2')
    steps = re.findall(r'step (\d+): .* val loss ([\d.]+)', result.out)
    assert result.status == 0 and float(steps[-1][1]) <= 2 < float(steps[-2][1]) and int(steps[-1][0]) < 400, result.out
    assert 'as low as stop_val_loss=2' in result.out and 'done: ' in result.out
    assert checkpoint.read(str(tmp_path / 'out' / 'ckpt.pt'))['iter_num'] == int(steps[-1][0]), 'saved, whatever save_interval says'
    result = script('train.py', *tiny, *flags, '--init_from=resume', '--max_iters=60')  # without it the run goes on
    assert result.status == 0 and 'stop_val_loss' not in result.out and 'step 60:' in result.out


def test_a_terminal_has_a_live_line_and_a_pipe_has_none(tiny, tmp_path):
    pty = pytest.importorskip('pty')
    import os
    import subprocess
    import sys
    from conftest import REPO
    args = [sys.executable, str(REPO / 'train.py'), *tiny, '--max_iters=400', '--eval_interval=0', '--log_interval=100']
    ours, theirs = pty.openpty()
    child = subprocess.Popen(args, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b''
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # as Linux says that the other end is closed
            part = b''
        if not part:
            break
        shown += part
    os.close(ours)
    assert child.wait() == 0
    lines = shown.decode().split('\r\033[K')
    live = [line for line in lines if re.match(r'(training|evaluating \w+): [\d,]+ of [\d,]+ (iterations|batches), \d+%, \d+m\d\ds left$', line)]
    assert live and '\ndone: 400 iterations' in lines[-1], lines[-3:]
    assert re.search(r'(?m)^iter 300: loss ', shown.decode().replace('\r\033[K', '\n'))
    piped = subprocess.run([*args, '--overwrite'], capture_output=True)
    assert piped.returncode == 0 and b'\r' not in piped.stdout and b'left' not in piped.stdout


# ---- GPUs that are elsewhere

LLAMA_70B = ['config/plan_llama_70b.py', '--dry_run', '--data_dir=nowhere']


def elsewhere(dtype='bfloat16', batch_size=2, accumulation=1, device='cuda', more={}, **config):
    config = GPTConfig(**{**dict(block_size=256, vocab_size=500, n_layer=6, n_head=4, n_embd=256, bias=False), **config})
    return plan.Setup(config, dtype, batch_size, accumulation, device=device, **more)


@pytest.mark.parametrize('arch, dtype, optimizer, checkpointing, rows, more', [
    ('gpt2', 'float32', 'adamw', False, 0, {}), ('gpt2, dropout', 'bfloat16', 'adamw', True, 0, {}), ('llama', 'bfloat16', 'muon', False, 0, {}),
    ('llama', 'float32', 'adamw', True, 0, dict(accumulation=3)), ('modern', 'bfloat16', 'adamw', True, 0, {}),
    ('gpt2', 'bfloat16', 'adamw', False, 0, dict(config=dict(vocab_size=20000))),
    ('modern', 'float32', 'muon', False, 50, dict(batch_size=1, config=dict(block_size=128)))])
def test_the_plan_is_what_the_step_takes(arch, dtype, optimizer, checkpointing, rows, more):
    import planned
    setup = planned.setup(arch, dtype, optimizer, checkpointing, rows, **{'batch_size': 2, **more})
    taken, (when, parts) = planned.tracked(setup, Processes('cpu')), setup.peak()
    assert sum(parts) == pytest.approx(taken, rel=0.02), when  # 10% is promised; up to 0.1% was seen


def test_the_plan_is_what_processes_take_that_share():
    done = torchrun(2, 'dev/planned.py', '--quick')
    assert done.status == 0 and done.out.count('2 processes') == 1, done.out + done.err[-2000:]


def test_two_and_three_layers_tell_what_any_number_takes():
    for more in (dict(), dict(shard='full', world_size=4), dict(activation_checkpointing=True, world_size=2)):
        setup = elsewhere(arch='llama', n_layer=7, more=more)
        seven = setup.few(7)
        for stage, (alive, whole, reduced) in seven.items():
            _, gradients, _, _, activations = setup.stages()[stage]
            assert activations == alive - whole and gradients == whole + (setup.lasting()[1] if setup.kept else reduced // setup.n), (more, stage)
        assert {'forward', 'last', 'first'} <= set(seven)


def layer(**kwargs):
    """Bytes that a layer keeps per token and channel."""
    setup = elsewhere(more=dict(chunked_loss=False), **kwargs)
    return (setup.few(3)['forward'][0] - setup.few(2)['forward'][0]) / (setup.batch_size * setup.config.block_size * setup.config.n_embd)


def test_a_layer_on_a_gpu_keeps_what_a_count_by_hand_finds():
    # in bfloat16: the inputs of two norms (4 each, float32) and of four matrices (2, 2, 2, 8), query, key and value (6), the GELU's (8). Korthikanti et al.
    # have 34, 16 bit throughout, with dropout (https://arxiv.org/abs/2205.05198). Besides, the weights in bfloat16; a number per token and head, four per token
    weights, little = 2 * 12 * 256**2 / (2 * 256 * 256), (4 * 4 + 4 * 4) / 256
    assert layer() == pytest.approx(36 + weights + little, abs=0.05)
    assert layer(dtype='float32') == pytest.approx(8 + (4 + 4 + 4 + 16) + 12 + 16 + little, abs=0.05)
    # each matrix has a copy of its own of the norm in bfloat16, each layer two of the angles, and rotated heads lie one after the other: side by side they are another copy
    llama = 4 + 3 * 2 + 3 * 2 + 2 + 2 + 4 + 2 * 2 + 4 * 2 * 704 / 256
    assert layer(arch='llama') == pytest.approx(llama + 2 * (4 * 256 + 3 * 704) / 512 + 0.5 + little, abs=0.05)
    modern = 4 + 3 * 2 + 2 * (4 + 2) + 2 + 2 + 2 + 4 + 2 + 4 * (2 + 4 + 2)  # queries, keys and the square of the ReLU in float32, too
    assert layer(arch='modern') == pytest.approx(modern + weights + 0.5 + little + 2 * 4 * 8 / 256, abs=0.05)
    assert layer(dropout=0.1) - layer() == pytest.approx(2, abs=0.01), 'two masks of a byte; none in the attention'
    assert layer(block_size=512) - layer() == pytest.approx(-weights / 2, abs=0.05), 'no T x T'
    assert layer(block_size=512, device='cpu') - layer(device='cpu') == pytest.approx(8 - weights / 2, abs=0.05), 'which a CPU keeps of short texts, for each of 4 heads'


def test_processes_hold_their_share_as_fsdp_divides():
    setup = elsewhere(arch='llama', n_embd=256, n_layer=2, vocab_size=300, more=dict(shard='full', world_size=7, matrix_optimizer='muon'))
    shapes = [p.shape for p in GPT(setup.config).parameters()]
    first = sum(torch.empty(shape, device='meta').chunk(7)[0].numel() for shape in shapes)  # the largest share
    matrices = sum(torch.empty(shape, device='meta').chunk(7)[0].numel() for shape in [p.shape for p in GPT(setup.config).transformer.h.parameters()] if len(shape) > 1)
    assert setup.lasting() == (4 * first, 4 * first, 8 * first - 4 * matrices)
    assert elsewhere(more=dict(shard='full', world_size=64, shard_size=8)).lasting() == elsewhere(more=dict(shard='full', world_size=8)).lasting()


def test_what_is_sent_is_counted():
    ours = dict(arch='llama', n_layer=2)
    n = sum(p.numel() for p in GPT(elsewhere(**ours).config).parameters())
    blocks = sum(p.numel() for p in GPT(elsewhere(**ours).config).transformer.h.parameters())
    assert plan.traffic(elsewhere(**ours, more=dict(world_size=4))) == {'of gradients': 1.5 * 4 * n}
    sent = plan.traffic(elsewhere(**ours, more=dict(world_size=4, shard='full')))
    assert sent == {'of weights': 0.75 * (2 * 2 * blocks + 4 * (n - blocks)), 'of gradients': 0.75 * 4 * n}
    hybrid = plan.traffic(elsewhere(**ours, more=dict(world_size=4, shard='full', shard_size=2)))
    assert hybrid['of gradients'] == 0.5 * 4 * n + 4 * n / 2, 'between the two copies the shares'
    times = [plan.traffic(elsewhere(**ours, accumulation=3, more=dict(world_size=4, shard='full', gpu_memory=gb)))['of gradients'] / sent['of gradients'] for gb in (80, 1e-3)]
    assert times == [1, 3], 'each time where whole gradients are too large to be kept'


def test_a_remedy_is_one():
    def setup(batch_size=4, **more):
        return elsewhere(arch='llama', n_layer=12, n_embd=512, n_head=8, block_size=2048, batch_size=batch_size, accumulation=4 // batch_size,
                         more=dict(world_size=8, **more))

    needs = setup().total() / 1e9
    one = plan.remedy(setup(gpu_memory=needs - 0.01))
    sizes = [size for size in (1, 2) if setup(size, gpu_memory=needs - 0.01).fits()]
    assert re.fullmatch(rf'--activation_checkpointing \(\S+ GB\), or --shard=full \(\S+ GB\), or --batch_size={sizes[-1]} --total_batch_size=65536 \(\S+ GB\)', one), one
    least = setup(1, shard='full', activation_checkpointing=True).total() / 1e9
    three = plan.remedy(setup(gpu_memory=least + 0.001))
    assert re.fullmatch(r'--activation_checkpointing --shard=full --batch_size=1 --total_batch_size=65536 \(\S+ GB\)', three), three
    more = plan.remedy(setup(gpu_memory=least - 0.001))
    n = int(re.search(r'--world_size=(\d+) --shard=full --activation_checkpointing --batch_size=1', more)[1])
    assert n == 16, more
    assert plan.remedy(setup(gpu_memory=2.01)).startswith('none by more GPUs')


def test_70b_is_planned_within_seconds_where_it_could_never_run(script, tmp_path, monkeypatch):
    began = time.process_time()
    result = script('train.py', *LLAMA_70B, '--world_size=512', '--peak_flops=989e12', f"--out_dir={tmp_path / 'out'}")
    assert result.status == 0 and time.process_time() - began < 10 and not (tmp_path / 'out').exists(), result.err
    assert '69,276,540,928 parameters' in result.out and 'is not here: a vocabulary of 50,304' in result.out and 'epochs' not in result.out
    used, parts = float(re.search(r'memory +([\d.]+) GB of the 80 GB of each GPU, so it fits', result.out)[1]), re.findall(r'\n {12}\w+ +([\d.]+) GB', result.out)
    assert sum(map(float, parts)) == pytest.approx(used, abs=0.05) and len(parts) == 6
    n = 69_276_540_928
    assert f'{4 * n * 8 / 1e9:,.2f} GB of main memory in each machine' in result.out and f'{12 * n / 1e9:,.2f} GB a checkpoint' in result.out
    flops = 6 * (n - 50304 * 8192 - 161 * 8192) + 12 * 80 * 8192 * 4096  # per token; embedding and norms are no matrix products
    days = 476838 * 4194304 * flops * 4 / 3 / (0.4 * 989e12 * 512 * 86400)
    assert f'{days:.1f} days for 476,838 iterations' in result.out
    result = script('train.py', *LLAMA_70B, '--world_size=512', '--shard=none')
    assert 'so it does not fit' in result.out and re.search(r'remedy +--shard=full \(', result.out)


def test_a_plan_knows_the_dataset_that_is_there(script, tiny):
    result = script('train.py', *tiny, '--dry_run', '--world_size=4', '--total_batch_size=256', '--gpu_memory=16')
    assert result.status == 0 and 'vocabulary 18:' in result.out and '4 GPUs of 16 GB elsewhere, float32' in result.out and '0.01 epochs' not in result.out
    assert 'network ' in result.out and 'epochs' in result.out and 'time ' in result.out


@pytest.mark.parametrize('flags, said', [
    ('--world_size=8', 'world_size=8 is for plans. add --dry_run'), ('--gpu_memory=24', 'gpu_memory=24 is for plans. add --dry_run'),
    ('--dry_run --world_size=0', 'world_size is out of range (0)'), ('--dry_run --world_size=8', 'not a multiple of their number 8. nearest: 8 or 16'),
    ('--dry_run --world_size=8 --total_batch_size=100', 'total_batch_size=100 is not a multiple'),
    ('--dry_run --world_size=8 --total_batch_size=512 --shard=full --shard_size=3', 'shard_size=3 does not divide 8 processes'),
    ('--dry_run --world_size=8 --total_batch_size=512 --max_epochs=2 --dataset=nothing', 'max_epochs=2 of a dataset that is not here (nothing)')])
def test_what_cannot_be_planned_is_said_in_a_line(script, tiny, flags, said):
    result = script('train.py', *tiny, *flags.split())
    assert result.status == 2 and said in result.err and result.err.count('error:') == 1, result.err
