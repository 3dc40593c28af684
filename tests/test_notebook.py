"""docs/flatgpt.ipynb runs from top to bottom in a fresh clone, and shows what a real run printed."""

import re
import shutil

import pytest
from conftest import REPO

from support.files import read_json

NOTEBOOK = REPO / 'docs' / 'flatgpt.ipynb'


def printed(cells):
    """What the cells show as text."""
    outputs = [output for cell in cells if cell['cell_type'] == 'code' for output in cell['outputs']]
    texts = [output.get('text') or output.get('data', {}).get('text/plain', '') for output in outputs]
    return ''.join(''.join(text) for text in texts)


def test_the_notebook_shows_a_whole_run_and_no_path_of_a_machine():
    cells = read_json(NOTEBOOK)['cells']
    text = printed(cells)
    assert 'step 1000: train loss' in text and 'done: 1,000 iterations' in text and 'class ' in text
    assert 'image/png' in str(cells)
    assert all(cell['outputs'] for cell in cells[3:] if cell['cell_type'] == 'code')
    assert not re.search(r'/(?:home|root|work|tmp|usr|opt|Users|content)/|error|Traceback', text)


def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch):
    nbclient, nbformat, *_ = map(pytest.importorskip, 'nbclient nbformat ipykernel matplotlib'.split())
    for name in ('config', 'support'):
        shutil.copytree(REPO / name, tmp_path / name, ignore=shutil.ignore_patterns('__pycache__'))
    for path in REPO.glob('*.py'):
        shutil.copy(path, tmp_path)
    (tmp_path / 'docs').mkdir()
    monkeypatch.setenv('FLATGPT_ITERATIONS', '10')
    notebook = nbformat.read(NOTEBOOK, 4)
    nbclient.NotebookClient(notebook, timeout=300, resources={'metadata': {'path': f'{tmp_path}/docs'}}).execute()
    text = printed(notebook.cells)
    assert 'step 10: train loss' in text and 'def main(' in text and str(tmp_path) not in text
    assert (tmp_path / 'out-notebook' / 'loss.png').exists()
