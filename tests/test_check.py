"""python -m support.check says what a naive edit of train.py or model.py breaks."""

import shutil
import subprocess
import sys

import pytest
from conftest import REPO

NUMPY_BATCH = '    first = number * batch_size', '    first = np.random.randint(1000) * batch_size'
DIVISOR = ('batch_loss / loss_divisor(it, micro_step)', 'batch_loss / gradient_accumulation_steps')
# attention near by, written for training alone: with a cache T is 1
NEAR = ("        causal = True if mask is None",
        "        if mask is None and T > 1:\n"
        "            i = torch.arange(T)\n"
        "            mask = (i[:, None] >= i) & (i[:, None] - i < 8)\n"
        "        causal = True if mask is None")
RESUME, TWO, CACHE = ('a resume gives', 'two processes', 'a sample with the cache')


@pytest.mark.parametrize('edits, broken', [
    ([], []), ([('train.py', NUMPY_BATCH), ('train.py', DIVISOR), ('model.py', NEAR)],
               [RESUME, TWO, CACHE])], ids=['as it is', 'three edits'])
def test_naive_edits_are_caught(edits, broken, tmp_path):
    for name in REPO.glob('*.py'):
        shutil.copy(name, tmp_path)
    shutil.copytree(REPO / 'support', tmp_path / 'support')
    for name, (before, after) in edits:
        source = (tmp_path / name).read_text()
        assert source.count(before) == 1, before
        (tmp_path / name).write_text(source.replace(before, after))
    done = subprocess.run([sys.executable, '-m', 'support.check'], cwd=tmp_path, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and done.returncode == bool(broken), done.stdout + done.stderr
    found = [promise for promise in (RESUME, TWO, CACHE) if any(
        line.startswith(f'BROKEN {promise}') for line in lines)]
    assert found == broken, done.stdout
