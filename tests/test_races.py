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


def test_what_a_gpu_has_to_show_works_on_a_cpu_with_tiny_networks(tmp_path):
    (tmp_path / 'input.txt').write_text(TEXT)
    flags = ['--smoke', f"--out={tmp_path / 'out'}", f"--record={tmp_path / 'gpu.md'}", f"--text={tmp_path / 'input.txt'}"]
    done = own_process('dev/gpu_records.py', *flags, env={'OMP_NUM_THREADS': '1'}, timeout=900)
    table = (tmp_path / 'gpu.md').read_text()
    assert done.status == 0 and 'failed' not in done.out and 'race_124M_1: not measured: no --gutenberg' in done.out, done.err + done.out
    assert 'A smoke test' in table and '**NO**' not in table and table.count('| yes |') > 15
    left = {line.split(':')[0].strip() for line in own_process('dev/gpu_records.py', *flags, '--list').out.splitlines() if not line.startswith('done ')}
    assert left == {name for name in left if 'not measured' in done.out.split(f'{name}: ')[2].splitlines()[0]}  # the others are not made again


def test_a_step_that_fails_is_made_again_and_one_that_takes_too_long_goes_on_later(tmp_path):
    flags = ['--smoke', f"--out={tmp_path / 'out'}", f"--record={tmp_path / 'gpu.md'}"]
    (tmp_path / 'model.py').write_text('a peer that cannot be imported')
    done = own_process('dev/gpu_records.py', *flags, '--only=train_124M_gpt2', f'--peer={tmp_path}')
    assert done.status == 0 and 'train_124M_gpt2: failed: AssertionError' in done.out and 'failed: AssertionError' in (tmp_path / 'gpu.md').read_text()
    done = own_process('dev/gpu_records.py', *flags, '--only=losses', '--minutes=0.005')
    assert done.status == 0 and 'losses: time was up' in done.out and not (tmp_path / 'out' / 'losses.json').exists()
