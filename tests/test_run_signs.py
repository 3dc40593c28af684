"""What a run says about itself: its first loss, one batch, a goal that is reached, the live line."""

import math
import os
import re
import subprocess
import sys

import pytest
import torch
from conftest import NO_PICTURES, REPO

from model import GPT, GPTConfig
from support import load
from support.log import Logger
from support.sanity import first_loss_note


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
    assert 'causal' in first_loss_note(1.0, math.log(257), 257)


@pytest.mark.parametrize('arch', ['gpt2', 'llama', 'modern'])
def test_the_first_loss_of_a_wide_network_is_within_what_is_expected(arch):
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=32, arch=arch, n_embd=1024, n_head=8, n_layer=1, vocab_size=1000))
    idx = torch.randint(1000, (4, 32), generator=torch.Generator().manual_seed(1))
    said = []

    class Stub:
        def __getattr__(self, name):
            return self
    logger = Logger.__new__(Logger)
    logger.knobs, logger.run, logger.dist = {'n_embd': 1024}, Stub(), Stub()
    logger.run.data = Stub()
    logger.run.data.meta = {'vocab_size': 1000}
    logger.dist.print = said.append
    logger.check_first_loss(model(idx, idx.roll(1))[1].item())
    assert not said
    logger.check_first_loss(math.nan)
    assert not said
    logger.check_first_loss(30.0)
    assert len(said) == 1


def test_one_batch_is_learned_by_heart_or_the_run_says_that_it_was_not(script, tiny):
    result = script('train.py', *tiny, '--overfit_batch', '--max_iters=200', '--eval_interval=0', '--log_interval=10')
    assert re.search(r'overfit_batch: the loss of one batch fell from [23]\.\d+ to 0\.\d+. model and loop learn',
                     result.out), result.out[-600:]
    assert result.losses()[190] < 0.3
    # the same batch each time: without learning, the same loss
    still = ['--learning_rate=0', '--min_lr=0', '--max_iters=4', '--overwrite']
    result = script('train.py', *tiny, '--overfit_batch', *still)
    assert len(set(result.losses().values())) == 1 and 'not to nearly 0' in result.out
    assert len(set(script('train.py', *tiny, *still).losses().values())) == 4


def test_a_run_ends_when_it_is_good_enough(script, tiny, tmp_path):
    flags = ['--max_iters=400', '--eval_interval=10', '--log_interval=0', '--save_interval=1000']
    result = script('train.py', *tiny, *flags, '--stop_val_loss=2')
    steps = re.findall(r'step (\d+): .* val loss ([\d.]+)', result.out)
    assert result.status == 0 and float(steps[-1][1]) <= 2 < float(steps[-2][1]) and int(steps[-1][0]) < 400
    assert 'as low as stop_val_loss=2' in result.out and 'done: ' in result.out
    ckpt = load.read(str(tmp_path / 'out' / 'ckpt.pt'))
    assert ckpt['iter_num'] == int(steps[-1][0]), 'saved, whatever save_interval says'
    # without it the run continues
    result = script('train.py', *tiny, *flags, '--init_from=resume', '--max_iters=60')
    assert result.status == 0 and 'stop_val_loss' not in result.out and 'step 60:' in result.out


def test_a_terminal_has_a_live_line_and_a_pipe_has_none(tiny):
    pty = pytest.importorskip('pty')
    args = [sys.executable, str(REPO / 'train.py'), *tiny, '--max_iters=150', '--eval_interval=0',
            '--log_interval=50']
    env = {**os.environ, 'PYTHONPATH': NO_PICTURES}
    ours, theirs = pty.openpty()
    child = subprocess.Popen(args, stdout=theirs, stderr=theirs, env=env)
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
    form = r'(training|evaluating \w+): [\d,]+ of [\d,]+ (iterations|batches), \d+%, \d+m\d\ds left$'
    assert [line for line in lines if re.match(form, line)] and '\ndone: 150 iterations' in lines[-1], lines[-3:]
    assert re.search(r'(?m)^iter 100: loss ', shown.decode().replace('\r\033[K', '\n'))
    piped = subprocess.run([*args, '--overwrite'], capture_output=True, env=env)
    assert piped.returncode == 0 and b'\r' not in piped.stdout and b'left' not in piped.stdout
