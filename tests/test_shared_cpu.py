"""Threads beside other programs: they sleep instead of spinning, with the same bits, and the run says so."""

import json
import subprocess
import sys
import threading

import pytest
from conftest import REPO

from support import cpu

# prints the threads, the CPU time of waits and the bits: alone, in company, alone again
TWO_THREADS = """
import glob, hashlib, json, sys, time
sys.path.insert(0, sys.argv[1])
import torch
from support import cpu
torch.set_num_threads(2)
w = torch.linspace(-1, 1, 2**16).reshape(256, 256).requires_grad_()

def measure():
    hash_, cpu = hashlib.sha256(), time.process_time()
    for _ in range(4):
        w.grad = None
        (w @ w).softmax(-1).square().sum().backward()
        hash_.update(w.grad.numpy().tobytes())
        time.sleep(0.02)
    return len(glob.glob('/proc/self/task/*')), time.process_time() - cpu, hash_.hexdigest()

measure()
found = [measure()]
until = cpu.sleep_instead_of_spinning(2)
time.sleep(0.2)
found.append(measure())
until.set()
time.sleep(0.2)
print(json.dumps([*found, measure()]))
"""


@pytest.mark.skipif(sys.platform != 'linux', reason="the threads are not GNU's")
def test_threads_sleep_in_company_with_the_same_bits_and_spin_again_when_it_has_left():
    alone, company, again = json.loads(subprocess.check_output([sys.executable, '-c', TWO_THREADS, str(REPO)], text=True))
    assert alone[2] == company[2] == again[2]
    assert company[0] > alone[0] == again[0], 'threads'
    assert company[1] < 0.7 * min(alone[1], again[1]), 'seconds of CPU time, most of which is spinning'


def test_company_is_noticed_at_once_and_its_end_after_a_while(monkeypatch):
    shares, states, left = [0.01, 0.08, 0.3, 0.01, 0.01, 0.01, 0.2, 0.01, 0.01, 0.01, 0.01, 0.08], [], []

    def shares_of_waiting():
        for share in shares:
            states.append(bool(left) and not left[-1].is_set())
            yield share

    monkeypatch.setattr(cpu, 'shares_of_waiting', shares_of_waiting)
    monkeypatch.setattr(cpu, 'sleep_instead_of_spinning', lambda n: left.append(threading.Event()) or left[-1])
    with pytest.raises(StopIteration):
        cpu.look(2)
    assert states == [False] * 3 + [True] * 8 + [False]


def test_waiting_for_a_core_is_seen():
    assert 0 <= next(cpu.shares_of_waiting()) < 1


def test_the_plan_tells_how_many_threads_compute(script, tiny):
    assert '(as asked), 1 thread, float32' in script('train.py', *tiny).out
