"""The races run from end to end; what they measure is for dev/records/."""

import gzip
import json

import pytest
from conftest import TEXT, own_process


def test_the_gpu_races_work_on_a_cpu_with_tiny_networks(tmp_path):
    pytest.importorskip('matplotlib')
    (tmp_path / 'input.txt').write_text(TEXT)
    with gzip.open(tmp_path / 'gutenberg_train.jsonl.gz', 'wt') as f:
        f.writelines(json.dumps({'text': TEXT[i:i + 500]}) + '\n' for i in range(0, 20000, 500))
    done = own_process('dev/race_gpu.py', '--smoke', '--seeds=1', f"--text={tmp_path / 'input.txt'}", f'--gutenberg={tmp_path}', f"--out={tmp_path / 'records'}")
    assert done.status == 0, done.err
    table = (tmp_path / 'records' / 'race_gpu.md').read_text()
    assert 'A smoke test' in table and table.count('| faithful |') == table.count('| modern |') == 2
    assert {p.name for p in (tmp_path / 'records').iterdir()} == {'race_gpu.md', 'race_gpu.json', 'race_gpu_shakespeare.png', 'race_gpu_124m.png', 'race_gpu_124m_tokens.png'}
    curves = json.loads((tmp_path / 'records' / 'race_gpu.json').read_text())
    assert [point[0] for point in curves['gutenberg']['modern'][0]] == [0, 1, 2, 3]
