"""The cells of docs/colab.ipynb, with tiny sizes, train, draw a picture and sample."""

import json
import os
import re
import shlex
import shutil

import pytest
from conftest import REPO, TINY, char_dataset, copy_code, forget_modules

NOTEBOOK = json.loads((REPO / 'docs' / 'colab.ipynb').read_text())
CELLS = [''.join(cell['source']) for cell in NOTEBOOK['cells'] if cell['cell_type'] == 'code']
EXTRA = shlex.join([*TINY, '--sample_interval=0', '--log_interval=5'])


def run_cells(folder, works, monkeypatch, has_gpu):
    """Run the cells as a notebook does, in this process and without network: the clone is a copy of this
    checkout. Return what the scripts print."""
    names = {}
    printed = []

    def shell(command):
        command = re.sub(r'\{(\w+)\}', lambda match: str(names[match[1]]), command)
        words = shlex.split(command)
        if words[:2] == ['git', 'clone']:  # with changes that are not committed
            copy = folder / words[-1]
            shutil.copytree(REPO / 'config', copy / 'config')
            copy_code(copy)
            forget_modules(monkeypatch)
            monkeypatch.syspath_prepend(copy)
        elif words[0] == 'python' and words[1:] == ['prepare.py', 'shakespeare_char']:
            char_dataset('data', 'shakespeare_char')
        elif words[0] == 'python':
            printed.append(works(os.path.abspath(words[1]), *words[2:]).out)
        else:
            assert words[:2] == ['pip', 'install']

    names['shell'] = shell
    names['chdir'] = os.chdir
    for source in CELLS:
        source = re.sub(r'^!(.*)$', lambda match: f'shell({match[1]!r})', source, flags=re.M)
        source = re.sub(r'^%cd (.*)$', lambda match: f'chdir({match[1]!r})', source, flags=re.M)
        source = source.replace('torch.cuda.is_available()', str(has_gpu))  # the scripts use the CPU
        source = source.replace('from IPython.display import Image', 'Image = open')  # fails without a file
        source = source.replace("EXTRA = ''", f'EXTRA = {EXTRA!r}').replace('MINUTES = 5', 'MINUTES = 0.02')
        exec(source, names)
    return ''.join(printed)


@pytest.mark.slow
@pytest.mark.parametrize('has_gpu', [False, True])
def test_the_cells_train_draw_and_sample(tmp_path, works, monkeypatch, has_gpu):
    pytest.importorskip('matplotlib')
    monkeypatch.chdir(tmp_path)
    out = run_cells(tmp_path, works, monkeypatch, has_gpu)
    out_dir = tmp_path / 'flatgpt' / 'out-colab'
    assert (out_dir / 'loss.png').stat().st_size > 1000
    sample = out.partition('to sample from it: ')[2].partition('\n')[2]
    assert sample.count('\n---------------\n') == 3
