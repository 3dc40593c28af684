"""The commands in README and docs/ have flags that the scripts know, and name files that are there."""

import re
import shlex
import sys

import pytest
from conftest import REPO, knobs_of

PAGES = [REPO / 'README.md', REPO / 'AGENTS.md', REPO / 'data' / 'README.md', *sorted((REPO / 'docs').glob('*.md'))]


def commands():
    for page in PAGES:
        for block in re.findall(r'```sh\n(.*?)```', page.read_text(), re.S):
            for line in block.replace('\\\n', ' ').splitlines():
                found = re.search(r'(?:^|\| )(?:torchrun .*?|python )([a-z]+\.py.*)', line)
                if found:
                    yield pytest.param(shlex.split(found[1], comments=True), id=f'{page.name}: {found[1][:60]}')


@pytest.mark.parametrize('words', list(commands()))
def test_the_flags_of_a_command_are_knobs(words, monkeypatch):
    monkeypatch.setattr(sys, 'argv', words)
    monkeypatch.chdir(REPO)
    if '--help' not in words:
        knobs_of(words[0])


@pytest.mark.parametrize('path', sorted((REPO / 'config').glob('train_*.py')), ids=lambda path: path.name)
def test_a_launch_line_has_a_number_of_processes_that_divides_its_batch(path, monkeypatch):
    for n in re.findall(r'nproc_per_node=(\d+) train\.py config', path.read_text()):
        monkeypatch.setattr(sys, 'argv', ['train.py', str(path)])
        knobs = knobs_of('train.py')
        micro_batches = knobs['gradient_accumulation_steps']
        if knobs['total_batch_size']:
            micro_batches = knobs['total_batch_size'] / (knobs['batch_size'] * knobs['block_size'])
        assert micro_batches % int(n) == 0


@pytest.mark.parametrize('command, name, value', [
    ('config/train_gpt2.py config/arch_modern.py --n_embd=1024', 'n_head', 8),
    ('config/train_fineweb_124m.py --batch_size=8', 'eval_iters', 10485760 // (8 * 1024)),
])
def test_what_a_config_derives_agrees_with_a_flag(command, name, value, monkeypatch):
    monkeypatch.setattr(sys, 'argv', ['train.py', *command.split()])
    monkeypatch.chdir(REPO)
    assert knobs_of('train.py')[name] == value
