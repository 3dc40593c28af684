"""Imports run one way, so that each file can be read, and some can be copied, without those above it."""

import ast

import pytest
from conftest import REPO

# each may import those before it; what a function imports when it is called is not looked at
ORDER = [
    'configurator', 'model', 'optim', 'flatgpt.files', 'flatgpt.processes', 'flatgpt.tokenizer',
    'flatgpt.dataset', 'flatgpt.conversations', 'flatgpt.sampling', 'flatgpt.checkpoint',
    'flatgpt.evaluation', 'flatgpt.benchmarks', 'flatgpt.huggingface', 'flatgpt.compare', 'plot', 'prepare',
    'train', 'sample', 'eval', 'export']
ALONE = ['configurator', 'model', 'optim']  # they work when they are copied alone
# reading and making data needs no torch and nothing of training
OF_DATA = ['configurator', 'flatgpt.files', 'flatgpt.tokenizer', 'flatgpt.dataset', 'flatgpt.conversations']


def modules():
    names = {path.stem for path in REPO.glob('*.py')}
    return names | {f'flatgpt.{path.stem}' for path in REPO.glob('flatgpt/*.py') if path.stem != '__init__'}


def imported_by(name):
    """Return the modules that a file imports when it is imported itself."""
    tree = ast.parse((REPO / (name.replace('.', '/') + '.py')).read_text())
    found = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            found.update(f'{node.module}.{alias.name}' for alias in node.names)
            found.add(node.module)
    return found


@pytest.mark.parametrize('name', sorted(modules()))
def test_a_file_imports_only_files_below_it(name):
    ours = imported_by(name) & modules()
    assert ours <= set(ORDER[:ORDER.index(name)])
    if name in ALONE:
        assert not ours
    if name in ['prepare', *OF_DATA]:
        assert ours <= set(OF_DATA) and 'torch' not in imported_by(name)
