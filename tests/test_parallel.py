"""Many processes do what one does (gloo on CPU), and each problem of launching has one clear line."""

import csv
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import REPO, torchrun

sys.path.insert(0, str(Path(__file__).parent / 'faults'))
from harness import Child, free_port, newest_state, train

from support import checkpoint


def losses(folder):
    with open(folder / 'log.csv', newline='') as f:
        return [(int(r['iter']), float(r['loss'])) for r in csv.DictReader(f) if r['loss']]


def errors(text):
    return [line for line in text.splitlines() if line.startswith('error: ')]


def without(flags, *names):
    return [flag for flag in flags if not flag.startswith(names)]


def test_two_processes_have_the_losses_of_one(tiny, tmp_path):
    flags = [*without(tiny, '--out_dir', '--batch_size', '--gradient_acc'), '--gradient_accumulation_steps=4']
    one = train(*flags, '--batch_size=4', base=())
    two = torchrun(2, 'train.py', *flags, '--batch_size=4', f"--out_dir={tmp_path / 'two'}")
    assert two.status == 0, two.err
    a, b = losses(one.out), losses(tmp_path / 'two')
    assert [i for i, _ in a] == [i for i, _ in b] and len(a) == 6
    for (_, x), (_, y) in zip(a, b):
        assert x == pytest.approx(y, abs=1e-5)
    # the processes share the evaluation, which gives the same number; rank 0 alone prints
    steps = [re.findall(r'^step .*', text, re.M) for text in (one.text(), two.out)]
    assert steps[0] == steps[1] and len(steps[0]) == 3
    weights = newest_state(tmp_path / 'two')['model']
    for k, p in newest_state(one.out)['model'].items():
        torch.testing.assert_close(p, weights[k], atol=1e-4, rtol=1e-3)


def test_muon_makes_the_same_update_on_every_process(tiny):
    flags = [*without(tiny, '--out_dir', '--gradient_acc'), '--arch=modern', '--matrix_optimizer=muon',
             '--gradient_accumulation_steps=4']
    one, two = (train(*flags, base=(), ranks=ranks).out for ranks in (1, 2))
    for (i, x), (_, y) in zip(losses(one), losses(two), strict=True):
        assert x == pytest.approx(y, abs=2e-6), i
    weights = newest_state(two)['model']
    for name, p in newest_state(one)['model'].items():
        torch.testing.assert_close(p, weights[name], atol=1e-5, rtol=1e-4)


def test_a_run_continues_with_another_number_of_processes(tiny):
    flags = [*without(tiny, '--out_dir', '--gradient_acc'), '--gradient_accumulation_steps=2',
             '--lr_decay_iters=6']
    two = train(*flags, '--max_iters=3', base=(), ranks=2)
    one = train(*flags, '--init_from=resume', base=(), out=two.out)
    assert re.findall(r'^iter (\d+)', one.text(), re.M) == ['3', '4', '5']
    through = train(*flags, base=())
    for (i, x), (j, y) in zip(losses(one.out), losses(through.out), strict=True):
        assert i == j and x == pytest.approx(y, abs=1e-5)


def test_launching_mistakes_are_one_line(tiny, tmp_path):
    child = Child(*tiny, '--gradient_accumulation_steps=3', out=tmp_path / 'out', ranks=2)
    child.wait()
    line, = errors(child.text())
    assert child.statuses == [2, 2] and 'gradient_accumulation_steps=3' in line and '2 or 4' in line
    child = Child(*tiny, out=tmp_path / 'out', sabotage=lambda: os.environ.update(RANK='0'))
    assert child.wait() == 2 and len(errors(child.text())) == 1 and 'torchrun' in errors(child.text())[0]
    assert not (tmp_path / 'out').exists()


ALONE = """
import sys, threading, time
import torch.distributed
from configurator import fail
from support import parallel
from support.errors import explain
parallel.init('cpu', 'gloo', 60)
explain('out of memory', 'out of memory', 'use less', 2)
torch.distributed.destroy_process_group = lambda: time.sleep(600)  # as NCCL's does while others wait for us
print('joined', flush=True)
{}
"""


@pytest.mark.parametrize('line, status, says', [
    ("fail('it has failed (x). use y', everywhere=True)", 2, 'error: it has failed (x). use y'),
    ("1 / 0", 1, 'ZeroDivisionError: division by zero'),
    # beside a thread that does not end, as torch.compile leaves one
    ("threading.Thread(target=time.sleep, args=(600,)).start(); raise RuntimeError('CUDA out of memory')", 2,
     'error: out of memory (CUDA out of memory)')])
def test_a_process_that_fails_alone_ends_at_once(line, status, says):
    env = dict(os.environ, RANK='0', LOCAL_RANK='0', WORLD_SIZE='1', LOCAL_WORLD_SIZE='1',
               MASTER_ADDR='127.0.0.1', MASTER_PORT=str(free_port()))
    done = subprocess.run([sys.executable, '-c', ALONE.format(line)], env=env, cwd=REPO, capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == status and says in done.stderr and done.stdout == 'joined\n', done.stderr


def test_who_is_not_found_is_one_line_in_bounded_time(tiny, tmp_path):
    """Without torchrun's own meeting before it, as under mpirun: a port where nobody listens, a process that
    never comes."""
    port = free_port()
    for rank, words in (('1', f'127.0.0.1, {port}'), ('0', '1/2 clients joined')):
        env = dict(RANK=rank, LOCAL_RANK='0', WORLD_SIZE='2', LOCAL_WORLD_SIZE='1', MASTER_ADDR='127.0.0.1',
                   MASTER_PORT=str(port))
        begin = time.time()
        child = Child(*tiny, '--ddp_timeout=2', out=tmp_path / 'out', sabotage=lambda: os.environ.update(env))
        assert child.wait() == 2 and time.time() < begin + 40, child.text()
        line, = errors(child.text())
        assert words in line and 'Traceback' not in child.text(), child.text()
    assert not (tmp_path / 'out').exists()


def test_nobody_waits_for_a_long_write_for_more_than_a_second(monkeypatch):
    """The others wait in all_reduce_max, which gives up after ddp_timeout."""
    monkeypatch.setattr(checkpoint, 'save', lambda: time.sleep(1.5) or {})
    asked = []
    dist = SimpleNamespace(all_reduce_max=lambda number: asked.append(number) or number)
    saver = SimpleNamespace(dist=dist, writer=checkpoint.Writer(SimpleNamespace(save_seconds=0), in_thread=True), best_val_loss=2.0)
    saver.writer.start()
    checkpoint.Saver.finish(saver)
    assert asked == [True, False, False] and saver.whole  # asked while it writes, and twice at the end
