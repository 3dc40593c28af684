"""python -m support.check says what a naive edit of train.py or model.py breaks."""

import shutil
import subprocess
import sys

import pytest
from conftest import REPO

NUMPY_BATCH = ("    first = batch_number(0 if overfit_batch else it, micro_step) * batch_size\n"
               "    batch = data.train",
               "    import numpy as np\n    first = np.random.randint(1000) * batch_size\n    batch = data.train")
DIVISOR = ('batch_loss / loss_divisor(it, micro_step)', 'batch_loss / gradient_accumulation_steps')
RATE = ('return learning_rate * (it + 1) / (warmup_iters + 1)', 'return learning_rate * it / warmup_iters')
NANOGPT_BATCH = ("    batch = data.train.batch(seed, range(first, first + batch_size), block_size)\n"
                 "    return [torch.from_numpy(part) for part in batch]",
                 "    tokens = torch.arange(10_000) % 60\n"
                 "    generator = torch.Generator().manual_seed(1337 + it)\n"
                 "    ix = torch.randint(9_000, (batch_size,), generator=generator)\n"
                 "    return [torch.stack([tokens[i + n:i + n + block_size] for i in ix]) for n in (0, 1)]")
# attention near by, written for training alone: with a cache T is 1
NEAR = ("        causal = True if mask is None",
        "        if mask is None and T > 1:\n"
        "            i = torch.arange(T)\n"
        "            mask = (i[:, None] >= i) & (i[:, None] - i < 8)\n"
        "        causal = True if mask is None")
RESUME, TWO, FALLS, CACHE = ('a resume gives', 'two processes', 'the learning rate', 'a sample with the cache')


@pytest.mark.parametrize('edits, broken', [
    ([], []), ([('train.py', NUMPY_BATCH), ('train.py', DIVISOR), ('train.py', RATE), ('model.py', NEAR)],
               [RESUME, TWO, FALLS, CACHE]),
    ([('train.py', NANOGPT_BATCH)], [TWO])], ids=['as it is', 'four edits', "nanoGPT's get_batch"])
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
    assert len(lines) == 4 and done.returncode == bool(broken), done.stdout + done.stderr
    found = [promise for promise in (RESUME, TWO, FALLS, CACHE) if any(
        line.startswith(f'BROKEN {promise}') for line in lines)]
    assert found == broken, done.stdout
