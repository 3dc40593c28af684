"""The commands in README, docs/ and config/ have flags that the scripts know and files that exist."""

import re
import shlex

import pytest
from conftest import REPO, knobs_of

NAMES = ['README.md', 'AGENTS.md', 'data/README.md']
PAGES = [*[REPO / name for name in NAMES], *sorted((REPO / 'docs').glob('*.md'))]


def commands():
    for page in PAGES:
        for block in re.findall(r'```sh\n(.*?)```', page.read_text(), re.S):
            for line in block.replace('\\\n', ' ').splitlines():
                found = re.search(r'(?:^|\| )(?:torchrun .*?|python )([a-z]+\.py.*)', line)
                if found:
                    words = shlex.split(found[1], comments=True)
                    yield pytest.param(words, id=f'{page.name}: {found[1][:60]}')


@pytest.fixture(autouse=True)
def in_repo(monkeypatch):
    monkeypatch.chdir(REPO)


@pytest.mark.parametrize('words', list(commands()))
def test_the_flags_of_a_command_are_settings(words):
    if '--help' not in words:
        knobs_of(*words)


@pytest.mark.parametrize('path', sorted((REPO / 'config').glob('train_*.py')), ids=lambda path: path.name)
def test_the_batch_of_a_config_can_be_divided_among_the_processes_of_its_command(path):
    for n in re.findall(r'nproc_per_node=(\d+) train\.py config', path.read_text()):
        knobs = knobs_of('train.py', path)
        micro_batches = knobs['gradient_accumulation_steps']
        if knobs['total_batch_size']:
            micro_batches = knobs['total_batch_size'] / (knobs['batch_size'] * knobs['block_size'])
        assert micro_batches % int(n) == 0
