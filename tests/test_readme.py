"""
What the pages promise is run: every command of README.md and docs/ that a laptop can run, page by page, with
few iterations and short texts. The scripts run in this process, as importing torch takes seconds.
"""

import contextlib
import gzip
import json
import os
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
from conftest import REPO, TEXT, captured

import packages

PAGES = {path.name: path.read_text(encoding='utf-8') for path in
         [REPO / 'README.md', *sorted((REPO / 'docs').glob('*.md'))]}

# a piece of the command: why it is not run here
NOT_RUN = {
    'pip install': 'installs; requirements.txt is compared with it below',
    'runs/quickstart.sh': 'installs; the commands in it are compared with the page below',
    'runs/mybook.sh': 'installs: tests/test_own_text.py',
    'runs/test.sh': 'these tests',
    'runs/multinode.sh': 'several machines: tests/faults',
    'sbatch': 'Slurm: dev/records/faults.md',
    '--nnodes=2': 'several machines: tests/faults',
    '--nproc_per_node=8': 'eight GPUs',
    'config/train_gpt2': 'its network is large: tests/test_model.py builds it, tests/test_plan.py plans it',
    'config/plan_llama_70b.py': 'tests/test_plan.py',
    'plan.py': 'tests/test_plan.py',
    'prepare.py openwebtext': 'a download of 24 GB',
    'config/train_fineweb': 'a download of its data: tests/test_plan.py plans it',
    'prepare.py tinystories': 'a download', 'prepare.py fineweb': 'a download', '=hf:': 'a download',
    'gpt2-xl': 'a download', '--init_from=gpt2': 'a download', 'config/eval_gpt2': 'a download',
    'config/finetune_shakespeare.py': 'a download', 'SmolLM2': 'a download',
    '--tasks=': 'needs the files of the benchmarks: tests/test_tasks.py',
    'dev/bench.py': 'needs a checkout of nanoGPT: tests/test_dev.py',
    'tests/faults/run.py': 'tests/test_faults.py',
    '--shard=0': 'tests/test_shard.py',
    'out-a out-b': 'runs of your own',
    '--to=llama.gguf': 'tests/test_gguf.py',
}
NOT_READ = ('hacking.md',)  # its changes are applied by tests/test_hacking.py


def commands(page):
    """The lines of a page's sh blocks, with those that end in a backslash joined."""
    text = '\n'.join(re.findall(r'^```sh\n(.*?)^```', PAGES[page], re.M | re.S)).replace('\\\n', ' ')
    return [line for line in text.splitlines() if line.strip() and not line.startswith('#')]


def reason(command):
    return next((why for piece, why in NOT_RUN.items() if piece in command), None)


@pytest.fixture
def folder(tmp_path, script, monkeypatch):
    """The working directory: with the texts that the commands speak of, and a run of the quick start on a
    small text."""
    folder = tmp_path
    monkeypatch.chdir(folder)
    for name in ('pystdlib', 'shakespeare_char'):
        (folder / 'data' / name).mkdir(parents=True)
    # in place of the download
    (folder / 'data' / 'shakespeare_char' / 'input.txt').write_text(TEXT)
    for split in ('train', 'val'):
        np.frombuffer(TEXT.encode(), np.uint8).astype('<u2').tofile(folder / 'data' / 'pystdlib' / f'{split}.bin')
    meta = dict(tokenizer={'kind': 'byte'}, vocab_size=257, end_of_text=256, dtype='uint16', splits={})
    (folder / 'data' / 'pystdlib' / 'meta.json').write_text(json.dumps(meta))
    (folder / 'book.txt').write_text(TEXT)
    (folder / 'prompts.txt').write_text('def \nclass \n')
    (folder / 'questions.txt').write_text('One?\n')
    talk = [{'role': 'user', 'content': 'One?'}, {'role': 'assistant', 'content': 'Two.'}]
    (folder / 'conversations.jsonl').write_text(40 * (json.dumps({'messages': talk}) + '\n'))
    (folder / 'texts').mkdir()
    with gzip.open(folder / 'texts' / 'a.jsonl.gz', 'wt') as f:
        for i in range(300):
            f.write(json.dumps({'text': f'paper {i} ' + TEXT[i:i + 200]}) + '\n')
    done = script(*shorter('python train.py config/quickstart.py')[1:])
    assert done.status == 0, done.err
    return folder


def shorter(command):
    """The words of a command, with flags behind them that make it short."""
    words = shlex.split(command)
    script = next((word for word in words if word.endswith('.py')), '')
    more = {'train.py': ('--max_iters=2 --warmup_iters=1 --eval_iters=1 --batch_size=2 --n_layer=1 '
                         '--gradient_accumulation_steps=2 --overwrite --device=cpu').split(),
            'sample.py': ['--num_samples=1', '--max_new_tokens=5', '--device=cpu'],
            'eval.py': ['--eval_tokens=2000', '--device=cpu']}.get(script, [])
    if script in 'train.py sample.py eval.py prepare.py'.split():
        words.insert(words.index(script) + 1, '--data_dir=data')  # config/mybook.py reads it
    if script == 'prepare.py' and '--show' not in words:
        more = ['--overwrite']  # one that the fixture made
    return words + more


@pytest.mark.parametrize('page', [page for page in PAGES if page not in NOT_READ])
def test_every_command_of_a_page_runs(page, folder, script, monkeypatch):
    """Those for two processes in one: what torchrun does is in tests/test_parallel.py."""
    for command in dict.fromkeys(commands(page)):
        if reason(command):
            continue
        words = shorter(command)
        if words[0] not in ('python', 'torchrun'):
            subprocess.run(command, shell=True, check=True)
            continue
        words = words[next(i for i, word in enumerate(words) if word.endswith('.py')):]
        if words[0] == 'plot.py':
            monkeypatch.delitem(sys.modules, 'matplotlib', raising=False)
        with standard_input(words):
            done = script(*words)
        assert done.status == 0, f'{command}\n{done.out[-2000:]}\n{done.err[-2000:]}'
        assert 'train.py' not in words or 'step 2: train loss' in done.out


@contextlib.contextmanager
def standard_input(words):
    """Takes `< FILE` out of the words."""
    if '<' not in words:
        yield
        return
    at = words.index('<')
    before = os.dup(0)
    with open(words[at + 1]) as f:
        os.dup2(f.fileno(), 0)
    del words[at:at + 2]
    try:
        yield
    finally:
        os.dup2(before, 0)
        os.close(before)


def test_the_python_of_a_page_runs(folder, capsys):
    for page, text in PAGES.items():
        for code in re.findall(r'^```python\n(.*?)^```', text, re.M | re.S):
            if page not in NOT_READ:
                exec(code.replace('(idx, 100)', '(idx, 5)'), {})
                assert 'def ' in capsys.readouterr().out


def test_uv_and_pip_install_the_same():
    assert (REPO / 'requirements.txt').read_text() == packages.requirements(), 'python dev/packages.py --write'
    tested = dict(package.split('==') for package in packages.packages('plot'))
    words = re.search('^pip install (.*)', PAGES['README.md'], re.M)[1].split()
    assert {word.split('==')[0] for word in words} == set(tested) and f"torch=={tested['torch']}" in words
    extras = packages.read()['project']['optional-dependencies']
    assert extras['cpu'] == extras['cu128'] == [f"torch=={tested['torch']}"]


def test_quickstart_sh_is_the_commands_of_the_page(tmp_path):
    """With a python that only writes down what it is asked to run."""
    (tmp_path / 'runs').mkdir()
    for name in ('quickstart.sh', 'venv.sh'):
        (tmp_path / 'runs' / name).write_bytes((REPO / 'runs' / name).read_bytes())
    (tmp_path / '.venv' / 'bin').mkdir(parents=True)
    fake = tmp_path / '.venv' / 'bin' / 'python'
    fake.write_text('#!/bin/sh\n[ "$1" = -c ] && exit\n'
                    'for word; do printf "%s|" "$word"; done >> asked; echo >> asked\n')
    os.chmod(fake, 0o755)
    (tmp_path / '.venv' / 'bin' / 'activate').write_text('PATH="$PWD/.venv/bin:$PATH"\n')
    done = captured(['bash', 'runs/quickstart.sh', '--n_layer=6'], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    asked = [line.split('|')[:-1] for line in (tmp_path / 'asked').read_text().splitlines()]
    by_hand = [shlex.split(command)[1:] for command in commands('README.md')[2:6]]
    by_hand[1] += ['--init_from=auto', '--n_layer=6']
    assert asked[0][:3] == ['-m', 'pip', 'install'] and asked[0][-2:] == ['-r', 'requirements.txt']
    assert asked[1:] == by_hand
    assert done.stdout.splitlines()[-3:] == ['its curve:  out-quickstart/loss.png',
                                             'its report: out-quickstart/report.md',
                                             'to go on:   source .venv/bin/activate']


def test_a_venv_of_an_old_python_is_made_anew(tmp_path):
    """With pythons that only say how old they are."""
    for name, status in (('old/python3', 1), ('new/python3.12', 0), ('.venv/bin/python', 1)):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(f'#!/bin/bash\n[ "$1" = -c ] && exit {status}\n[ "$1" = --version ] && echo Python 3.9.1 && exit\n'
                        'echo "$0 $@" >> asked\n/bin/mkdir -p .venv/bin; echo echo activated > .venv/bin/activate\n')
        os.chmod(path, 0o755)

    def source(path):
        return captured(['/bin/bash', REPO / 'runs' / 'venv.sh'], cwd=tmp_path, env={'PATH': path})
    done = source(f'{tmp_path}/old')
    assert done.returncode == 2 and done.stderr.startswith('error: no Python that is new enough (Python 3.9.1). ')
    assert source(f'{tmp_path}/old:{tmp_path}/new').stdout.endswith('activated\n')
    assert (tmp_path / 'asked').read_text() == f"{tmp_path / 'new/python3.12'} -m venv --clear .venv\n"


def test_the_minimal_loop_is_short_and_learns(capsys, monkeypatch):
    path = REPO / 'docs' / 'minimal_loop.py'
    source = path.read_text(encoding='utf-8')
    assert len(source.splitlines()) < 40
    for long, short in (('range(401)', 'range(31)'), ('% 50', '% 10'), ('prompt, 300', 'prompt, 10')):
        source = source.replace(long, short)
    monkeypatch.setattr(sys, 'path', list(sys.path))
    exec(compile(source, path, 'exec'), {'__file__': str(path)})
    losses = [float(x) for x in re.findall(r'loss ([\d.]+)', capsys.readouterr().out)]
    assert abs(losses[0] - 5.55) < 0.5 and losses[-1] < 3.6


def test_every_file_that_the_pages_link_to_is_there():
    for page in [REPO / 'README.md', *(REPO / 'docs').glob('*.md'), *(REPO / 'data').glob('README.md')]:
        for target in re.findall(r'\]\((?!https?:)([^)#]+)\)', page.read_text(encoding='utf-8')):
            assert (page.parent / target).exists(), f'{page.name}: {target}'


@pytest.mark.parametrize('path', [path for path in sorted((REPO / 'config').glob('*.py'))
                                  if not path.name.startswith('arch_')], ids=lambda path: path.name)
def test_every_config_tells_what_it_is_for_and_its_sum_comes_out(path):
    text = path.read_text()
    head = text.split('\n\n')[0]
    for word in ('data ', 'launch ', 'batch ', 'cost ', 'loss '):
        assert f'#   {word}' in head, word
    scope = {}
    exec(text, scope)
    tokens = scope['batch_size'] * scope.get('block_size', 1024) * scope['gradient_accumulation_steps']
    assert f'{tokens:,}' in head and not scope.get('wandb_log')
