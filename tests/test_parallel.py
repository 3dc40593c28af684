"""Many processes do what one does (gloo on CPU), and each problem of launching has one clear line."""

import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from conftest import REPO, TINY, captured, torchrun
from harness import PLACE, close, free_port, log_without_times, train

import dataset
from support import checkpoint


def test_two_processes_have_the_losses_and_weights_of_one(tmp_path):
    """With Muon, whose update the processes share, and AdamW, which the embeddings have."""
    flags = [*TINY, *PLACE, '--dataset=tiny', '--gradient_accumulation_steps=4', '--arch=modern',
             '--matrix_optimizer=muon']
    one = train(*flags, base=())
    named = tmp_path / 'named.py'  # as config/finetune_shakespeare.py of nanoGPT
    named.write_text('import time; wandb_run_name = str(time.time_ns())')
    two = torchrun(2, 'train.py', *flags, str(named), f'--out_dir={tmp_path}')
    assert two.status == 0, two.err
    a, b = ([float(row['loss'] or 0) for row in log_without_times(out)] for out in (one.out, tmp_path))
    assert len(a) == 7 and a == pytest.approx(b, abs=2e-6)
    # the processes share the evaluation, which gives the same number; rank 0 alone prints
    steps, theirs = [re.findall(r'^step .*', text, re.M) for text in (one.text(), two.out)]
    assert steps == theirs and len(steps) == 3
    close(tmp_path, one.out)


def test_what_is_asked_to_stop_is_not_started_again_by_torchrun(tmp_path):
    done = torchrun(2, 'train.py', *TINY, *PLACE, '--dataset=tiny', '--max_iters=100000', '--max_minutes=0.1',
                    '--gradient_accumulation_steps=2', '--init_from=auto', f'--out_dir={tmp_path}', restarts=2)
    assert done.out.count('stopped by max_minutes') == 1 and 'resuming' not in done.out


def test_processes_that_train_on_the_same_batch_are_stopped():
    def same_for_all():  # as with nanoGPT's get_batch, whose numbers all processes draw alike
        real = dataset.Tokens.batch
        dataset.Tokens.batch = lambda self, seed, numbers, *args: real(self, seed, range(len(numbers)), *args)
    text = train(*TINY, *PLACE, '--dataset=tiny', '--gradient_accumulation_steps=2', '--token_noise=0.1', base=(),
                 ranks=2, sabotage=same_for_all, expect=2).text()
    assert text.count('error: ') == 1 and 'have the same batch' in text and 'iter 0' not in text


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
    done = captured([sys.executable, '-c', ALONE.format(line)], env=env, cwd=REPO, timeout=300)
    assert done.returncode == status and says in done.stderr, done.stderr
    assert done.stdout.endswith('joined\n'), 'before it torch 2.9 tells who is connected'


def test_who_is_not_found_is_one_line_in_bounded_time(tmp_path):
    """Without torchrun's own meeting before it, as under mpirun: a port where nobody listens, a process that
    never comes."""
    port = free_port()
    for rank, words in (('1', f'127.0.0.1, {port}'), ('0', '1/2 clients joined')):
        env = dict(RANK=rank, LOCAL_RANK='0', WORLD_SIZE='2', LOCAL_WORLD_SIZE='1', MASTER_ADDR='127.0.0.1',
                   MASTER_PORT=str(port))
        child = train(*TINY, *PLACE, '--dataset=tiny', '--ddp_timeout=2', base=(), out=tmp_path / 'out',
                      sabotage=lambda: os.environ.update(env), expect=2)
        line, = re.findall('^error: .*', child.text(), re.M)
        assert words in line and not child.out.exists(), child.text()


def test_nobody_waits_for_a_long_write_for_more_than_a_second():
    """The others wait in all_reduce_max, which gives up after ddp_timeout."""
    asked = []
    dist = SimpleNamespace(all_reduce_max=lambda number: asked.append(number) or number)
    job = ThreadPoolExecutor().submit(lambda: time.sleep(1.5) or True)
    saver = SimpleNamespace(dist=dist, job=job, best_val_loss=2.0)
    checkpoint.Saver.finish(saver)
    assert asked == [1, 0, 0] and saver.whole  # asked while it is written, and twice at the end
