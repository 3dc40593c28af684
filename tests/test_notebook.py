"""The cells of docs/colab.ipynb, run one after the other with tiny sizes, leave a picture and a sample."""

import json
import shlex
import subprocess
import sys
import types

import pytest
from conftest import REPO, TINY

CODE = [cell for cell in json.loads((REPO / 'docs' / 'colab.ipynb').read_text())['cells']
        if cell['cell_type'] == 'code']


@pytest.mark.slow
def test_the_cells_train_draw_and_sample(tmp_path, monkeypatch, capfd):
    pytest.importorskip('matplotlib')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('FLATGPT_REPOSITORY', str(REPO))
    monkeypatch.setenv('FLATGPT_FLAGS', shlex.join([*TINY, '--sample_interval=0']))
    monkeypatch.setitem(sys.modules, 'IPython', types.ModuleType('IPython'))
    display = types.ModuleType('IPython.display')
    display.Image = open  # which needs the file, too
    monkeypatch.setitem(sys.modules, 'IPython.display', display)
    names = {}
    for cell in CODE:
        for line in cell['source']:
            if not line.startswith('!'):
                exec(line, names)
                continue
            command = line[1:].strip()
            for name in ['REPOSITORY', 'FLAGS']:
                command = command.replace('{' + name + '}', names[name])
            if command.startswith('pip'):
                continue  # what the tests run in is installed
            if 'clone' in command:  # this checkout, also what is not committed
                command = f'git clone --quiet {REPO} flatgpt && cp {REPO}/*.py flatgpt/'
            subprocess.run(command.replace('python ', f'{sys.executable} ', 1), shell=True, check=True)
    assert (tmp_path / 'flatgpt' / 'out-quickstart' / 'curves.png').stat().st_size > 1000
    assert 'class ' in capfd.readouterr().out
