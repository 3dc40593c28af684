"""Every command of the README that a laptop can run is run, in a fresh copy of the project, with few iterations."""

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import REPO, TEXT

README = (REPO / 'README.md').read_text(encoding='utf-8')
SHORT = ' --max_iters=3 --warmup_iters=1 --eval_iters=1 --overwrite --device=cpu'
ELSEWHERE = ('pip install', '--tasks=', '--nproc_per_node=8', 'config/train_gpt2.py', 'bash runs/test.sh',
             'gpt2-xl', 'eval_gpt2', 'finetune_shakespeare', 'SmolLM2', 'tinystories', 'fineweb_edu', 'prepare.py openwebtext', 'hf:')  # other machines, downloads, or this very suite


def commands():
    blocks = re.findall(r'^```sh\n(.*?)^```', README, re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines() if line and not any(w in line for w in ELSEWHERE)]
    return list(dict.fromkeys(lines))  # some stand there twice


@pytest.fixture(scope='module')
def clone(tmp_path_factory):
    """The project as a stranger has it, and the texts that the README's commands speak of."""
    folder = tmp_path_factory.mktemp('clone') / 'flatgpt'
    shutil.copytree(REPO, folder, ignore=shutil.ignore_patterns('.git', '.venv*', 'data', 'out*', 'wandb', '__pycache__', '.pytest_cache'))
    (folder / 'data' / 'shakespeare_char').mkdir(parents=True)
    (folder / 'data' / 'shakespeare_char' / 'input.txt').write_text(TEXT)  # instead of the download
    (folder / 'book.txt').write_text(TEXT)
    (folder / 'texts').mkdir()
    with gzip.open(folder / 'texts' / 'a.jsonl.gz', 'wt') as f:
        f.writelines(json.dumps({'text': f'paper {i} ' + TEXT[i:i + 200]}) + '\n' for i in range(300))
    os.symlink(sys.prefix, folder / '.venv')  # what runs/quickstart.sh would make and fill
    return folder


def run(command, folder, **env):
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, timeout=300, env={**os.environ, **env})
    assert done.returncode == 0, f'{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}'
    return done.stdout


def test_the_commands_are_there():
    text = '\n'.join(commands())
    for word in ('runs/quickstart.sh', 'prepare.py mybook', 'config/quickstart.py', 'sample.py', '--nproc_per_node=2', '--max_iters=2000'):
        assert word in text
    pinned = dict(line.split('==') for line in (REPO / 'requirements.txt').read_text().splitlines() if '==' in line)
    install = next(line for line in README.splitlines() if line.startswith('pip install')).split()[2:]
    assert {word.split('==')[0] for word in install} == set(pinned) and f"torch=={pinned['torch']}" in install


def test_every_command_runs_in_the_order_of_the_page(clone, gpt2):
    python, torchrun = shlex.quote(sys.executable), f'{shlex.quote(sys.executable)} -m torch.distributed.run'
    for command in commands():
        short = re.sub('^python ', python + ' ', re.sub('^torchrun ', torchrun + ' ', command))
        if 'train.py' in command:
            short += SHORT + (' --batch_size=2' if command.endswith('train_shakespeare_char.py') else '')
        elif 'quickstart.sh' in command:
            short += SHORT + ' --overwrite=False'
        elif 'sample.py' in command:
            short += ' --num_samples=1 --max_new_tokens=5 --device=cpu'
        elif 'eval.py' in command:
            short += ' --eval_tokens=2000 --device=cpu'
        out = run(short, clone)
        assert 'train.py' not in command or 'step 3: train loss' in out
    code = re.search(r'^```python\n(.*?)^```', README, re.M | re.S)[1]
    assert 'def ' in run(f'{python} -c {shlex.quote(code)}', clone)


def test_the_minimal_loop_is_short_and_learns(clone):
    source = (clone / 'docs' / 'minimal_loop.py').read_text()
    assert len(source.splitlines()) < 40
    (clone / 'docs' / 'shorter.py').write_text(source.replace('range(401)', 'range(51)').replace('prompt, 300', 'prompt, 10'))
    out = run(f'{shlex.quote(sys.executable)} docs/shorter.py', clone)
    losses = [float(x) for x in re.findall(r'loss ([\d.]+)', out)]
    assert abs(losses[0] - 5.55) < 0.5 and losses[-1] < 3.5


def test_every_file_that_the_pages_link_to_is_there():
    for page in [REPO / 'README.md', *(REPO / 'docs').glob('*.md')]:
        for target in re.findall(r'\]\((?!https?:)([^)#]+)\)', page.read_text(encoding='utf-8')):
            assert (page.parent / target).exists(), f'{page.name}: {target}'


def test_every_knob_has_a_comment_or_a_group_that_explains_it():
    for name in ('train.py', 'sample.py', 'prepare.py', 'export.py', 'eval.py'):
        block = (REPO / name).read_text().split('# ' + '-' * 77)[1]
        bare = [line for line in block.strip().splitlines() if line and '#' not in line]
        assert set(line.split()[0] for line in bare) <= {'n_layer', 'n_head', 'n_embd', 'beta1', 'beta2', 'wandb_project', 'wandb_run_name', 'num_samples', 'seed'}, bare


@pytest.mark.parametrize('path', sorted(set((REPO / 'config').glob('*.py')) - set((REPO / 'config').glob('arch_*.py'))), ids=lambda p: p.name)
def test_every_config_tells_what_it_is_for_and_its_sum_comes_out(path):
    text = path.read_text()
    head = text.split('\n\n')[0] + text.split('\n\n')[1] if text.startswith('#') else ''
    for word in ('data ', 'launch ', 'batch ', 'cost ', 'loss '):
        assert f'#   {word}' in head, word
    scope = {}
    exec(text, scope)
    tokens = scope['batch_size'] * scope['block_size'] * scope['gradient_accumulation_steps']
    assert f'{tokens:,}' in head and not scope.get('wandb_log')
