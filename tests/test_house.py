"""The rules of the house, and what a reader pays: python dev/size.py prints the figures."""

import ast
import re

import pytest
from conftest import REPO

import size

SCRIPTS = {'train', 'prepare', 'sample', 'eval', 'export', 'plan', 'plot'}
TRACKED = size.tracked() if (REPO / '.git').exists() else [*REPO.glob('*.py'), *REPO.glob('runs/*')]
PRODUCT = [path for path in TRACKED if path.suffix == '.py' and 'tests' not in path.relative_to(REPO).parts]
SHELL = [path for path in TRACKED if path.parent.name == 'runs']
SUPPORT = sorted((REPO / 'support').glob('*.py'))
TREES = {path: ast.parse(path.read_text(encoding='utf-8')) for path in [*PRODUCT, *SUPPORT]}


def name_of(path):
    return str(path.relative_to(REPO))


def test_no_product_line_is_over_110_characters():
    wide = [f'{name_of(path)}:{n}' for path in {*PRODUCT, *SHELL, *SUPPORT}
            for n, line in enumerate(path.read_text(encoding='utf-8').splitlines(), 1) if len(line) > 110]
    assert not wide, sorted(wide)


def test_no_function_of_the_product_is_longer_than_a_screen():
    long = [f'{name_of(path)}: {node.name} has {size.length(node)} lines' for path, tree in TREES.items()
            for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and size.length(node) > 60]
    assert not long, long


@pytest.mark.parametrize('path', SUPPORT, ids=lambda path: path.name)
def test_a_support_file_imports_no_script_and_takes_nobodys_globals(path):
    imported, used = set(), set()
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            imported.update(alias.name.split('.')[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or '').split('.')[0])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            used.add(node.func.id)
    assert not imported & SCRIPTS and 'globals' not in used


def test_train_py_stays_a_story():
    lines, n_bytes = size.size([REPO / 'train.py'])
    assert lines <= 310 and n_bytes <= 15_500
    loop = next(node for node in TREES[REPO / 'train.py'].body if isinstance(node, ast.For))
    assert size.length(loop) <= 60 and size.decisions(loop) <= 15
    assert len(size.knobs()) <= 75


def test_the_readme_is_read_in_minutes():
    assert len((REPO / 'README.md').read_text(encoding='utf-8').split()) <= 1800


# their names say it
PLAIN = {'n_layer', 'n_head', 'n_embd', 'beta1', 'beta2', 'seed', 'num_samples', 'log_interval', 'wandb_log',
         'wandb_project', 'wandb_run_name'}


@pytest.mark.parametrize('name', ['train', 'prepare', 'sample', 'eval', 'export', 'plan', 'plot'])
def test_every_knob_has_a_comment(name):
    source = (REPO / f'{name}.py').read_text(encoding='utf-8')
    block = source.partition('\nknobs, given = configure(')[0].split('# ' + '-' * 77)[1]
    bare, above = set(), ''
    for line in block.splitlines():
        # a comment may stand above; one of a few words is the heading of a group
        told = '#' in line or (above.startswith('#') and len(above.split()) > 4)
        if re.match(r'\w+(: [^=]+)? = ', line) and not told:
            bare.add(line.split()[0].rstrip(':'))
        above = line
    assert bare <= PLAIN
