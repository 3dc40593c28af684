"""The rules of the house. All that can be counted is in dev/size.py, with its ceilings; python dev/size.py prints it."""

import ast
import os
import re
import shutil
import sys

import pytest
from conftest import REPO, captured

import size

FOUND = size.measure()
# words that bring a file of ours in behind an import's back
BACK_DOORS = re.compile(r'\b(__import__|import_module|runpy|spec_from_file_location|exec_module)\b|\bsys\.modules\[|\bsys\.path\b')
# where that is no import of our own: config files and the knobs of another script
BACK_DOORS_OF = {'configurator.py', 'support/setup.py'}


@pytest.mark.parametrize('what', size.LIMITS)
def test_no_ceiling_is_passed(what):
    if what not in FOUND:
        pytest.skip('tokens are counted with Python 3.11: later tokenizers cut f-strings into more')
    assert FOUND[what] <= size.LIMITS[what][0], 'python dev/size.py --list shows what was counted'


@pytest.mark.skipif('size.not_alone()', reason='they import others of ours at module level')
def test_the_network_the_optimizer_and_the_knobs_work_in_an_empty_folder(tmp_path):
    for name in size.ALONE:
        shutil.copy(REPO / name, tmp_path)
    (tmp_path / 'own.py').write_text('''from configurator import configure
n_layer = 1  # and --n_layer=2 is given
knobs, given = configure(globals())
import torch
from model import GPT, GPTConfig
from optim import create_optimizer
torch.manual_seed(1)
idx = torch.arange(16).view(2, 8)
for arch in 'gpt2', 'llama', 'modern', 'local':
    model = GPT(GPTConfig(n_layer=n_layer, n_head=2, n_embd=32, block_size=16, vocab_size=20, arch=arch))
    # what is frozen is not in them, also if it has a gradient of before
    model.transformer.h.requires_grad_(False)
    for made in (model.configure_optimizers(0.0, 1e-2, (0.9, 0.95), 'cpu'),
                 create_optimizer(model, 1e-2, 0.0, (0.9, 0.95), 1e-8)):
        taken = {p for group in made.param_groups for p in group['params']}
        assert taken == {p for p in model.parameters() if p.requires_grad}
    model.requires_grad_()
    muon = 'adamw' if arch == 'gpt2' else 'muon'
    optimizer, losses = create_optimizer(model, 1e-2, 0.0, (0.9, 0.95), 1e-8, muon), []
    for _ in range(5):
        losses.append(model(idx, idx)[1])
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] and model.config.n_layer == 2
    print(arch, tuple(model.generate(idx, 3).shape))
''')
    env = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    done = captured([sys.executable, 'own.py', '--n_layer=2'], cwd=tmp_path, env=env)
    assert done.stdout.split('\n')[:4] == [f'{arch} (2, 11)' for arch in 'gpt2 llama modern local'.split()], done.stderr


def test_whoever_is_below_does_not_know_who_is_above():
    """support/ knows no script; what loads checkpoints is handed the network; the product knows no test and no measurement."""
    scripts = [(importer, target) for importer, _, target, _ in size.imports()
               if target in size.SCRIPTS and importer not in size.SCRIPTS]
    assert not scripts
    if not size.not_alone():
        assert 'model.py' not in size.reach('support/load.py')
    beside = {name.split('/')[1].removesuffix('.py') for name in size.python_files('tests', 'dev')} | {'tests', 'dev'}
    beside -= {name[:-3].split('/')[-1] for name in size.product()}
    known = [(name, target) for name in size.product() for node in ast.walk(size.tree_of(name))
             for target in size.names_imported(node, name) if target.split('.')[0] in beside]
    assert not known


@pytest.mark.parametrize('name', size.product())
def test_a_file_imports_openly_and_holds_no_code_in_strings(name):
    tree, free = size.tree_of(name), {id(node) for node in size.docstrings(size.tree_of(name))}
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert '__getattr__' not in functions and '__dir__' not in functions
    if name not in BACK_DOORS_OF:
        code = '\n'.join(ast.unparse(node) for node in tree.body)
        assert not BACK_DOORS.search(code), BACK_DOORS.search(code)
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    if name.startswith('support/'):
        assert 'globals' not in called
    if name not in ('configurator.py', 'support/help.py'):  # config files, and the knobs of a script, are code
        assert not called & {'exec', 'eval', 'compile'} - {'compile' if name in size.SCRIPTS else ''}
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    long = [node.lineno for node in strings if node.value.count('\n') > (24 if id(node) in free else 8)
            or len(node.value) > (2000 if id(node) in free else 700)]
    assert not long, f'long strings at lines {long}'
    assert name == 'support/help.py' or '__doc__' not in size.text_of(name)  # the script's, for --help


def test_the_product_is_eleven_scripts_and_one_flat_folder():
    assert {name for name in size.product() if '/' not in name} == {*size.SCRIPTS, *size.ALONE, 'dataset.py'}
    assert all(re.fullmatch(r'(support/)?\w+\.py', name) for name in size.product())
    # no code and no table in files of another kind
    beside = [name for name in size.tracked() if name.split('/')[0] not in size.NO_PRODUCT and name not in size.product()]
    allowed = re.compile(r'\..*|LICENSE|[\w-]+\.(md|txt|toml)|runs/[\w.]+\.(sh|sbatch)')
    assert not [name for name in beside if not allowed.fullmatch(name)]


# their names say it
PLAIN = set('n_layer n_head n_embd beta1 beta2 seed num_samples log_interval wandb_log wandb_project '
            'wandb_run_name'.split())


@pytest.mark.parametrize('name', size.SCRIPTS)
def test_every_knob_has_a_comment(name):
    block = size.text_of(name).partition('\nknobs, given = configure(')[0].split('# ' + '-' * 77)[1]
    bare, above = set(), ''
    for line in block.splitlines():
        # a comment may stand above; one of a few words is the heading of a group
        told = '#' in line or (above.startswith('#') and len(above.split()) > 4)
        if re.match(r'\w+(: [^=]+)? = ', line) and not told:
            bare.add(line.split()[0].rstrip(':'))
        above = line
    assert bare <= PLAIN
