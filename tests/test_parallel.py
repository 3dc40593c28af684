"""Many processes do what one does (gloo on CPU), and each problem of launching has one clear line."""

import csv
import re
import socket
import time

import pytest
import torch
from conftest import own_process, torchrun

import checkpoint


def losses(folder):
    with open(folder / 'log.csv', newline='') as f:
        return [(int(r['iter']), float(r['loss'])) for r in csv.DictReader(f) if r['loss']]


def test_two_processes_have_the_losses_of_one(script, tiny, tmp_path):
    flags = [f for f in tiny if not f.startswith(('--out_dir', '--batch_size', '--gradient_acc'))]
    one = script('train.py', *flags, '--batch_size=4', '--gradient_accumulation_steps=4', f"--out_dir={tmp_path / 'one'}")
    two = torchrun(2, 'train.py', *flags, '--batch_size=4', '--gradient_accumulation_steps=4', f"--out_dir={tmp_path / 'two'}")
    assert one.status == 0 and two.status == 0, two.err
    a, b = losses(tmp_path / 'one'), losses(tmp_path / 'two')
    assert [i for i, _ in a] == [i for i, _ in b] and len(a) == 6
    for (_, x), (_, y) in zip(a, b):
        assert x == pytest.approx(y, abs=1e-5)
    # evaluation is shared out and gives the same number; rank 0 alone prints
    steps = [re.findall(r'^step .*', r.out, re.M) for r in (one, two)]
    assert steps[0] == steps[1] and len(steps[0]) == 3
    for k, p in checkpoint.read(str(tmp_path / 'one' / 'ckpt.pt'))['model'].items():
        torch.testing.assert_close(p, checkpoint.read(str(tmp_path / 'two' / 'ckpt.pt'))['model'][k], atol=1e-4, rtol=1e-3)


def test_muon_makes_the_same_update_on_every_process(script, tiny, tmp_path):
    flags = [f for f in tiny if not f.startswith(('--out_dir', '--gradient_acc'))] + ['--arch=modern', '--matrix_optimizer=muon', '--gradient_accumulation_steps=4']
    one = script('train.py', *flags, f"--out_dir={tmp_path / 'one'}")
    two = torchrun(2, 'train.py', *flags, f"--out_dir={tmp_path / 'two'}")
    assert one.status == 0 and two.status == 0, two.err
    for (i, x), (_, y) in zip(losses(tmp_path / 'one'), losses(tmp_path / 'two'), strict=True):
        assert x == pytest.approx(y, abs=1e-3), i  # sums in another order, rounded to bfloat16 inside the update


def test_a_run_goes_on_with_another_number_of_processes(script, tiny, tmp_path):
    flags = [*tiny, '--gradient_accumulation_steps=2', '--lr_decay_iters=6']
    two = torchrun(2, 'train.py', *flags, '--max_iters=3')
    assert two.status == 0, two.err
    one = script('train.py', *flags, '--init_from=resume')
    assert one.status == 0 and list(one.losses()) == [3, 4, 5], one.err
    through = script('train.py', *flags, f"--out_dir={tmp_path / 'through'}")
    assert through.status == 0
    for (i, x), (j, y) in zip(losses(tmp_path / 'out'), losses(tmp_path / 'through')):
        assert i == j and x == pytest.approx(y, abs=1e-5)


def test_launching_mistakes_are_one_line(tiny, tmp_path):
    result = torchrun(2, 'train.py', *tiny, '--gradient_accumulation_steps=3')
    lines = [line for line in result.err.splitlines() if line.startswith('error: ')]
    assert result.status != 0 and len(lines) == 1 and 'gradient_accumulation_steps=3' in lines[0] and '2 or 4' in lines[0]
    result = own_process('train.py', *tiny, env={'RANK': '0'})
    assert result.status == 2 and result.err.startswith('error: ') and 'torchrun' in result.err
    assert not (tmp_path / 'out').exists()


def test_who_is_not_found_is_one_line_in_bounded_time(tiny, tmp_path):
    """Without torchrun's own meeting before it, as under mpirun: a port where nobody listens, a process that never comes."""
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    for rank, words in (('1', f'127.0.0.1, {port}'), ('0', '1/2 clients joined')):
        env = dict(RANK=rank, LOCAL_RANK='0', WORLD_SIZE='2', LOCAL_WORLD_SIZE='1', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
        begin = time.time()
        result = own_process('train.py', *tiny, '--ddp_timeout=2', env=env)
        lines = [line for line in result.err.splitlines() if line.startswith('error: ')]
        assert result.status == 2 and len(lines) == 1 and words in lines[0] and 'Traceback' not in result.err and time.time() < begin + 40, result.err
    assert not (tmp_path / 'out').exists()
