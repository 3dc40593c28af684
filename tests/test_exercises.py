"""Each solution in docs/exercises.md applies, and changes the losses of a run, or not, as the page says."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO, TINY, losses_of, run_here

PAGE = (REPO / 'docs' / 'exercises.md').read_text()
SOLUTIONS = []
for number, section in re.findall(r'^## (\d+)\. (.*?)(?=^## |\Z)', PAGE, re.M | re.S):
    for diff in re.findall(r'```diff\n(.*?)^```', section, re.M | re.S):
        SOLUTIONS.append(pytest.param(section, diff, id=f'{number}: {section.splitlines()[0]}'))


def modules_of(folder):
    """Return the imported modules whose files are in a checkout of this project, {name: module}."""
    found = {}
    for name, module in sys.modules.items():
        path = Path(getattr(module, '__file__', None) or '/')
        if path.parent in (folder, folder / 'flatgpt'):
            found[name] = module
    return found


def train(folder, out_dir, data_dir):
    """Train with the code in `folder`, for a few iterations in this process. Return the losses."""
    ours = modules_of(REPO)
    for name in ours:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    try:
        result = run_here(folder / 'train.py', REPO / 'config/quickstart.py', REPO / 'config/exercises.py',
                          *TINY, '--log_interval=1', '--sample_interval=6', '--sample_tokens=30',
                          '--dataset=toy', f'--data_dir={data_dir}', f'--out_dir={out_dir}')
    finally:
        sys.path.remove(str(folder))
        for name in modules_of(folder):
            del sys.modules[name]
        sys.modules.update(ours)
    assert result.status == 0, result.err
    assert 'samples after 6 iterations' in result.out
    return [float(loss) for _, loss, _, _ in losses_of(out_dir)]


@pytest.fixture(scope='module')
def plain_losses(data_dir, tmp_path_factory):
    return train(REPO, tmp_path_factory.mktemp('plain') / 'out', data_dir)


@pytest.mark.parametrize('section, diff', SOLUTIONS)
def test_a_solution_applies_and_changes_the_losses_as_stated(data_dir, plain_losses, tmp_path, section, diff):
    code = tmp_path / 'code'
    (code / 'flatgpt').mkdir(parents=True)
    for path in [*REPO.glob('*.py'), *REPO.glob('flatgpt/*.py')]:
        shutil.copy(path, code / path.relative_to(REPO))
    subprocess.run(['git', 'init', '-q', code], check=True)
    applied = subprocess.run(['git', 'apply', '--recount', '-'], cwd=code, input=diff, text=True,
                             capture_output=True)
    assert applied.returncode == 0, applied.stderr
    losses = train(code, tmp_path / 'out', data_dir)
    if 'the same losses' in section:
        assert losses == pytest.approx(plain_losses, abs=1e-4)
    else:
        assert losses != pytest.approx(plain_losses, abs=1e-4)
