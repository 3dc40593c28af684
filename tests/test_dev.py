"""The measurements in dev/ run from end to end on tiny networks; what they measure is for dev/records/."""

import re
import shutil
import statistics
import tarfile

import pytest
from conftest import REPO, TEXT, own_process

import size
from support.files import read_json

# some of its iterations took longer than its turn
PEER = '''import sys, time
assert '--n_layer=1' in sys.argv and '--dataset=made_up_65' in sys.argv
assert not any('arch' in arg for arg in sys.argv)
for i in range(10**6):
    time.sleep(0.005)
    print(f'iter {i}: loss 4.0000, time {1000 + i % 3 if i % 7 == 0 else 5:.2f}ms, mfu -100.00%')
'''


def test_training_steps_are_timed_beside_a_peer_that_prints_as_nanogpt_does(works, tmp_path):
    for name, source in {'peer': PEER, 'other': "raise SystemExit('error: CUDA out of memory')"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / 'train.py').write_text(source)
    flags = ('--device=cpu --dtype=float32 --sizes=toy --n_layer=1 --n_embd=16 --block_size=8 --archs=gpt2 '
             '--warm_up=1 --rounds=3 --turn=0.2 --iters=2').split()
    result = works('dev/bench.py', *flags, f'--peer={tmp_path}/peer', f'--ours={tmp_path}/other',
                    f'--json_file={tmp_path}/x.json')
    theirs, _, ours = read_json(tmp_path / 'x.json')['train']
    assert '| other, gpt2 | out of memory |' in result.out
    # what was going on while the process was stopped is left out
    assert {t for times in theirs['seconds'] for t in times} == {0.005}
    seconds = statistics.median(map(statistics.median, ours['seconds']))
    assert len(ours['seconds']) == 3 and ours['tokens_per_second'] == pytest.approx(12 * 8 / seconds)
    assert ours['ratio'][0] == pytest.approx(seconds / 0.005)
    assert '| toy | 12 x 8 | nanoGPT | 19,200 | 5.00 (5.00 to 5.00) |' in result.out


@pytest.fixture
def copied(tmp_path):
    """A folder with the files of the project."""
    for name in size.tracked():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, tmp_path / name)
    return tmp_path


def test_what_a_gpu_has_to_show_needs_no_git_and_finds_what_was_carried(copied):
    (copied / 'out-carried').mkdir()
    (copied / 'out-carried' / 'text.txt').write_text(TEXT)
    (copied / 'out-carried' / 'commit').write_text('abc123')
    done = own_process(copied / 'dev/gpu_records.py', '--smoke=True', '--results=out-results.tar.gz',
                       '--only=machine,guard,shakespeare', cwd=copied, env={'PATH': '/nowhere'})
    assert done.status == 0 and 'failed' not in done.out, done.out + done.err
    assert '| machine | commit abc123; torch' in done.out
    assert re.search(r'\| shakespeare \| time of .*, best validation loss \| .*, \d\.\d{4} \|', done.out)
    assert re.search(r'\| guard \| .* \| yes \|', done.out)
    assert '| growth |  | not measured |  |' in done.out
    with tarfile.open(copied / 'out-results.tar.gz') as f:
        log = f.extractfile('gpu/guard.log').read().decode()
    assert log.startswith('$ train.py --n_layer=2') and 'error: 10 updates in a row were skipped' in log


def test_bits_that_changed_are_told(copied):
    flags = ['dev/same_bits.py', '--only=gpt2', f'--old={REPO}', f'--new={copied}']
    done = own_process(*flags)
    assert done.status == 0 and re.search(r'^gpt2 +(\w{12}) +\1 +same$', done.out, re.M), done.out + done.err
    source = (copied / 'train.py').read_text()
    (copied / 'train.py').write_text(source.replace('return learning_rate', 'return 1.001 * learning_rate'))
    done = own_process(*flags)
    assert done.status == 1 and 'DIFFERS\n    old: iter ' in done.out and done.out.endswith('NOT the same.\n')
