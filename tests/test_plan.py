"""What is told before a run starts is what it takes, and what its losses say about it is true."""

import contextlib
import math
import re

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
