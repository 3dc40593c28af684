"""The measurements in dev/ run from end to end on tiny networks; what they measure is for dev/records/."""

import json
import re
import subprocess
import sys
import tarfile
import time

import pytest
from conftest import REPO, TEXT, own_process

# some of its iterations took longer than its turn
PEER = '''import sys, time
assert '--n_layer=1' in sys.argv and '--dataset=made_up_65' in sys.argv
assert not any('arch' in arg for arg in sys.argv)
for i in range(10**6):
    time.sleep(0.005)
    print(f'iter {i}: loss 4.0000, time {1000 + i % 3 if i % 7 == 0 else 5:.2f}ms, mfu -100.00%')
'''


def test_training_steps_are_timed_beside_a_peer_that_prints_as_nanogpt_does(script, tmp_path):
    for name, source in {'peer': PEER, 'other': "raise SystemExit('error: CUDA out of memory')"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / 'train.py').write_text(source)
    flags = ('--device=cpu --dtype=float32 --sizes=toy --n_layer=1 --n_embd=16 --block_size=8 --archs=gpt2 '
             '--warm_up=1 --rounds=3 --turn=0.2 --iters=2').split()
    result = script('dev/bench.py', *flags, f"--peer={tmp_path / 'peer'}", f"--ours={tmp_path / 'other'}",
                    f"--json_file={tmp_path / 'x.json'}")
    assert result.status == 0, result.err
    record = json.loads((tmp_path / 'x.json').read_text())
    theirs, other, ours = record['train']
    assert other['seconds'] is None and '| other, gpt2 | out of memory |' in result.out
    assert theirs['contestant'] == 'nanoGPT' and ours['contestant'] == 'ours, gpt2'
    assert len(theirs['seconds']) == len(ours['seconds']) == 3 and min(map(len, ours['seconds'])) >= 2
    # what was going on while the process was stopped is left out
    assert {t for times in theirs['seconds'] for t in times} == {0.005}
    assert ours['tokens_per_second'] == pytest.approx(12 * 8 / ours['seconds_per_iteration'])
    low, high = ours['ratio_interval']
    assert low <= ours['ratio'] <= high
    assert ours['ratio'] == pytest.approx(ours['seconds_per_iteration'] / 0.005)
    assert '| toy | 12 x 8 | nanoGPT | 19,200 | 5.00 (5.00 to 5.00) |' in result.out
    ratio_of_medians = result.globals['ratio_of_medians']
    a = [1.0, 1.1, 0.9, 1.3, 0.8, 1.0, 1.2]
    ratio, interval = ratio_of_medians(a, [1.5 * x for x in a])
    assert [ratio, *interval] == pytest.approx([1.5] * 3)  # what slowed both is not there
    ratio, (low, high) = ratio_of_medians(a, a[::-1])
    assert ratio == 1 and low < 0.95 and high > 1.05


@pytest.mark.parametrize('name', ['train.py', 'sample.py', 'dev/bench.py'])
def test_a_mistake_is_answered_without_waiting_for_torch(name, tmp_path):
    command = [sys.executable, '-X', 'importtime', str(REPO / name), '--no_such_knob=1']
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and 'unknown knob (--no_such_knob=1)' in done.stderr
    assert ' torch' not in done.stderr and ' numpy' not in done.stderr


@pytest.mark.parametrize('flags, words', [
    (['--what=speed'], ['speed', 'sample', 'train']), (['--sizes=huge'], ['huge', '124M']),
    (['--what=sample', '--sizes=toy'], ['toy', 'baby8']), (['--peer=/nowhere'], ['/nowhere', '--peer']),
    (['--ours=/nowhere'], ['/nowhere', '--ours']), (['--rounds=0'], ['rounds']), (['--iters=0'], ['iters']),
    (['--tokens=-1'], ['tokens']), (['--batch_sizes=8,x'], ['micro-batch (x)', '8,16']),
    (['--what=prepare'], ['--text']), (['--n_layers=3'], ['--n_layer']),
    (['--total_batch_size=100'], ['100', '768']),
])
def test_bad_requests_are_one_line(script, flags, words):
    result = script('dev/bench.py', '--device=cpu', *flags)
    assert result.status == 2 and result.err.startswith('error: ') and result.err.count('\n') == 1, result.err
    assert all(word in result.err for word in words), result.err


def test_sampling_is_timed(script, tmp_path):
    flags = '--what=sample --sizes=llama --tokens=3 --rounds=2 --device=cpu --dtype=float32'.split()
    result = script('dev/bench.py', *flags, f"--json_file={tmp_path / 'x.json'}")
    assert result.status == 0, result.err
    rows = json.loads((tmp_path / 'x.json').read_text())['sample']
    assert [row['contestant'] for row in rows] == ['ours, no cache', 'ours, float32']
    assert all(len(row['seconds_per_step']) == 2 and min(row['seconds_per_step']) > 0 for row in rows)


def test_batches_are_timed(capsys):
    from bench_data import data
    rows = data(batch_size=2, block_size=16, batches=5, sets=((10_000, 1), (10_000, 10)))
    assert [(row['files'], len(row['milliseconds'])) for row in rows] == [(1, 5), (10, 5)]
    assert '| 10,000 | 10 |' in capsys.readouterr().out


def test_the_race_on_a_cpu_leaves_a_table_curves_and_a_picture(tmp_path):
    pytest.importorskip('matplotlib')
    (tmp_path / 'input.txt').write_text(TEXT)
    done = own_process('dev/race.py', 'cpu', '--smoke', '--seeds=1', f"--text={tmp_path / 'input.txt'}",
                       f"--out={tmp_path / 'records'}", env={'PYTHONPATH': ''})
    assert done.status == 0, done.err
    table = (tmp_path / 'records' / 'race_shakespeare.md').read_text()
    assert 'A smoke test' in table and table.count('| ours in a hurry |') == 1
    assert {p.suffix for p in (tmp_path / 'records').iterdir()} == {'.md', '.json', '.png'}
    curves = json.loads((tmp_path / 'records' / 'race_shakespeare.json').read_text())
    assert len(curves) == 5 and curves['ours in a hurry'][0][-1][0] == 3


def test_a_recipe_leaves_a_table_and_a_picture(tmp_path):
    pytest.importorskip('matplotlib')
    (tmp_path / 'input.txt').write_text(TEXT)
    tiny = '--max_iters=2 --n_layer=1 --n_head=1 --n_embd=32 --block_size=16 --batch_size=2'
    done = own_process('dev/recipe.py', 'laptop', f"--text={tmp_path / 'input.txt'}", '--seeds=1', '--before=False',
                       f'--flags={tiny}', f"--out={tmp_path / 'records'}", env={'PYTHONPATH': ''})
    assert done.status == 0, done.err
    loss = re.search(r"today's recipe \| 1 \| 2 \| [\d.]+ \| (\d\.\d{4})", (tmp_path / 'records' / 'recipe_laptop.md').read_text())
    assert 2 < float(loss[1]) < 4 and (tmp_path / 'records' / 'recipe_laptop.png').exists()


def test_pictures_can_be_drawn_again(script, tmp_path):
    pytest.importorskip('matplotlib')
    curves = {'ours': [[(0, 0.0, 4.2), (10, 1.0, 2.5), (20, 2.0, 1.9)]]}
    (tmp_path / 'race_shakespeare.json').write_text(json.dumps(curves))
    assert script('dev/race.py', 'cpu', '--draw_only', f'--out={tmp_path}').status == 0
    assert (tmp_path / 'race_shakespeare.png').stat().st_size > 1000



@pytest.fixture
def packed(script, tmp_path, monkeypatch):
    """The folder of an unpacked archive of dev/gpu_records.py, for a machine without git."""
    (tmp_path / 'input.txt').write_text(TEXT)
    (tmp_path / 'cache').mkdir()
    (tmp_path / 'cache' / 'abc').write_text('ranks')
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(tmp_path / 'cache'))
    archive = tmp_path / 'flatgpt.tar.gz'
    done = script('dev/gpu_records.py', f'--pack={archive}', f"--text={tmp_path / 'input.txt'}")
    assert done.status == 0 and 'MiB, with text.txt, tiktoken/abc' in done.out, done.err
    with tarfile.open(archive) as f:
        f.extractall(tmp_path, filter='data')
    monkeypatch.delenv('TIKTOKEN_CACHE_DIR')
    return tmp_path / 'flatgpt'


def test_what_a_gpu_has_to_show_comes_from_one_archive_without_git(packed):
    def records(*flags):
        command = [sys.executable, 'dev/gpu_records.py', '--smoke=True', '--results=out-results.tar.gz', *flags]
        env = {'PATH': '/nowhere', 'OMP_NUM_THREADS': '1'}
        done = subprocess.run(command, cwd=packed, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout
    assert (packed / 'out-carried' / 'text.txt').read_text() == TEXT
    assert (packed / 'out-carried' / 'tiktoken' / 'abc').read_text() == 'ranks'
    commit = (packed / 'out-carried' / 'commit').read_text()
    table = records('--only=machine,guard,shakespeare')
    assert f'| machine | commit {commit}; torch' in table and 'failed' not in table, table
    assert re.search(r'\| shakespeare \| time of training, best validation loss \| .*, \d\.\d{4} \|', table)
    assert re.search(r'\| guard \| .* \| yes \|', table) and '| growth |  | not measured |  |' in table
    with tarfile.open(packed / 'out-results.tar.gz') as f:
        log = f.extractfile('gpu/guard.log').read().decode()
    assert log.startswith('$ train.py --n_layer=2') and 'error: 10 updates in a row were skipped' in log


def test_rows_that_are_done_are_skipped_and_interrupted_ones_are_made_anew(script, tmp_path, monkeypatch):
    asked = script('dev/gpu_records.py', '--smoke=True', '--show=True', f"--results={tmp_path / 'x.tar.gz'}")
    records, folder = asked.globals, str(tmp_path / 'gpu')
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    (tmp_path / 'gpu').mkdir()
    first = records['names_asked'](folder)
    assert first == list(records['ROWS'])
    said = records['make']('machine', folder, time.monotonic() + 0.3)  # less than importing torch takes
    assert said.startswith('interrupted') and records['names_asked'](folder) == first
    assert (tmp_path / 'gpu' / 'machine.log').read_text().startswith('$ dev/gpu_watch.py machine')
    for name, what in {'attention': 'done', 'guard': 'failed: why', 'learn_gpt2': 'not measured: why'}.items():
        (tmp_path / 'gpu' / f'{name}.json').write_text(json.dumps({'said': what, 'rows': []}))
    left = [name for name in first if name not in ('attention', 'guard', 'learn_gpt2')]
    assert records['names_asked'](folder) == [*left, 'guard']


def test_every_row_of_a_gpu_has_a_part_and_a_limit(script, tmp_path):
    rows = script('dev/gpu_records.py', '--show=True', f"--results={tmp_path / 'x.tar.gz'}").globals['ROWS']
    parts = [part for part, *_ in rows.values()]
    assert parts == sorted(parts, key=['first', 'second', 'third'].index)
    assert all(seconds <= 400 and callable(make) for _, seconds, make, *_ in rows.values())
