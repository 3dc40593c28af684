"""bench.py times the step that train.py makes, and finds the same greedy text in every contestant; what it says is complete."""

import csv
import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import REPO, make_dataset

import configurator
from measure import grows_by, process_memory
from measure_prepare import data
from measure_sample import bytes_per_step, per_token
from measure_step import made_up, ours, settings
from model import GPT, GPTConfig

NET = ['--n_layer=1', '--n_head=1', '--n_embd=16', '--block_size=8']
QUICK = ['--device=cpu', '--dtype=float32', '--compile=False', '--iters=2', '--warm_up=1', '--rounds=2']
CPU = torch.device('cpu')


def like_train(**more):
    knobs, _ = configurator.knobs_of(REPO / 'train.py')
    return settings({**knobs, 'n_layer': 2, 'n_head': 2, 'n_embd': 32, 'block_size': 16, 'batch_size': 4, 'gradient_accumulation_steps': 1, **more}, CPU, more.get('dtype', 'float32'), False, more.pop('vocab_size', 65))


@pytest.mark.parametrize('more', [{}, dict(arch='modern', matrix_optimizer='muon', gradient_accumulation_steps=2, grad_clip=0.5), dict(dropout=0.2, dtype='bfloat16', total_batch_size=128)])
def test_the_step_is_that_of_train(script, tmp_path, more):
    make_dataset(tmp_path / 'data')
    knobs = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=4, gradient_accumulation_steps=1, learning_rate=1e-2, warmup_iters=2, lr_schedule='constant', seed=7, dtype='float32') | more
    result = script('train.py', '--device=cpu', '--compile=False', '--max_iters=4', '--eval_interval=0', '--eval_iters=1', '--write_report=False', f"--data_dir={tmp_path / 'data'}", '--dataset=tiny',
                    f"--out_dir={tmp_path / 'out'}", *(f'--{name}={value}' for name, value in knobs.items()))
    assert result.status == 0, result.err
    with open(tmp_path / 'out' / 'log.csv', newline='') as f:
        want = [float(row['loss']) for row in csv.DictReader(f) if row['loss']]
    tiny = result.globals['data']
    contestant = ours(like_train(**knobs, vocab_size=tiny.vocab_size), tiny)
    assert [contestant.step().item() for _ in range(4)] == want and len(set(want)) == 4
    assert all(torch.equal(a, b) for a, b in zip(contestant.model.parameters(), result.globals['model'].parameters())), 'and the updates are the same to the bit'


def test_training_is_timed_part_by_part(script, tmp_path):
    result = script('bench.py', *QUICK, '--sizes=toy', *NET, '--batch_sizes=2,4', '--loss_steps=30', f"--json_file={tmp_path / 'x.json'}", f"--profile={tmp_path / 'traces'}")
    assert result.status == 0, result.err
    record = json.loads((tmp_path / 'x.json').read_text())
    rows = record['train']['rows']
    assert [(row['contestant'], row['batch_size']) for row in rows] == [('ours, gpt2', 2), ('ours, modern', 2), ('ours, gpt2', 4), ('ours, modern', 4)]
    for row in rows:
        assert len(row['seconds_per_step']) == len(row['ratio']) == 2 and set(row['parts']) == {'data', 'forward', 'backward', 'optimizer'} and min(row['parts'].values()) > 0
        assert row['of_matrix_peak'] > 0 and row['of_data_sheet'] is None and len(row['losses']) == 30 and row['losses'][0] == pytest.approx(4.17, abs=0.1)
    assert rows[0]['ratio'] == [1, 1] and 'TFLOP/s in float32' in result.out and 'made-up tokens of 65' in result.out and 'toy, each at its best micro-batch: ours, gpt2' in result.out
    assert result.out.count('| toy |') == 4 and '| loss of 30 steps |' in result.out
    traces = sorted((tmp_path / 'traces').iterdir())
    assert [path.name for path in traces] == [f'ours-{arch}-1x16-batch{B}.json' for arch in ('gpt2', 'modern') for B in (2, 4)] and all('aten::mm' in path.read_text() for path in traces)
    assert result.out.count('| aten::mm |') == 4


def test_a_config_file_is_what_is_timed_and_a_dataset_that_is_there_is_read(script, tmp_path):
    make_dataset(tmp_path / 'data')
    (tmp_path / 'mine.py').write_text("dataset = 'tiny'\nn_layer, n_head, n_embd, block_size, batch_size = 1, 2, 16, 8, 3\ngradient_accumulation_steps = 2\narch = 'llama'\nwandb_log = False\n")
    result = script('bench.py', tmp_path / 'mine.py', *QUICK, '--rounds=1', '--batch_size=2', f"--data_dir={tmp_path / 'data'}")
    assert result.status == 0, result.err
    row, = result.globals['result']['train']['rows']
    assert (row['contestant'], row['batch_size'], row['accumulation'], row['block_size']) == ('ours, llama', 2, 2, 8) and 'tiny, ' in row['data'] and '2 x 8 x 2' in result.out


def test_too_large_a_batch_is_a_row(script, monkeypatch):
    forward = GPT.forward

    def scarce(self, idx, *args, **kwargs):
        if idx.size(0) > 2:
            raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 3 TiB')
        return forward(self, idx, *args, **kwargs)
    monkeypatch.setattr(GPT, 'forward', scarce)
    result = script('bench.py', *QUICK, '--sizes=toy', *NET, '--batch_sizes=2,4', '--archs=gpt2')
    assert result.status == 0 and '| toy | 4 x 8 | ours, gpt2 | out of memory |' in result.out and 'tokens/s at 2 (1.00 times the first)' in result.out, result.err


@pytest.mark.skipif(not os.environ.get('FLATGPT_PEER'), reason='a checkout of nanoGPT: FLATGPT_PEER names none')
def test_nanogpt_and_ours_have_the_same_losses(script):
    result = script('bench.py', *QUICK, '--rounds=1', '--sizes=toy', '--loss_steps=30', '--archs=gpt2', f"--peer={os.environ['FLATGPT_PEER']}")
    assert result.status == 0, result.err
    theirs, mine = result.globals['result']['train']['rows']
    assert theirs['contestant'] == 'nanoGPT' and theirs['losses'] == pytest.approx(mine['losses'], abs=1e-3) and mine['final_loss'] < mine['losses'][0] - 0.5


def test_a_thousand_steps_take_no_more_memory_than_the_first(tmp_path):
    contestant = ours(like_train(n_layer=1), made_up(str(tmp_path), 65, 2**16))
    if process_memory() is None:
        pytest.skip('nobody tells how much memory a process has')
    marks = []
    for it in range(1200):
        contestant.step()
        if it >= 199 and (it + 1) % 500 == 200:
            marks.append(process_memory(trim=True))
    assert marks[-1] - marks[0] < 4e6, marks


def test_a_mistake_is_answered_without_torch(tmp_path):
    for name in ('train.py', 'sample.py', 'bench.py'):
        done = subprocess.run([sys.executable, '-X', 'importtime', str(REPO / name), '--no_such_knob=1'], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 2 and 'unknown knob (--no_such_knob=1)' in done.stderr and ' torch' not in done.stderr and ' numpy' not in done.stderr


def test_the_first_step_is_not_far_from_the_command(script):
    result = script('bench.py', '--what=start', *QUICK, '--rounds=1')
    assert result.status == 0, result.err
    seconds = {row['until']: row['seconds'][0] for row in result.globals['result']['start']}
    assert list(seconds) == ['import torch', 'train.py --help', 'the first step of train.py']
    # about three times what was measured; importing torch is most of it, and a busy machine slows both
    assert seconds['train.py --help'] < 2 and seconds['the first step of train.py'] < 10 + 3 * seconds['import torch'], seconds


def test_batches_are_timed(capsys):
    rows = data(batch_size=2, block_size=16, batches=5, sets=((10_000, 1), (10_000, 10)))
    assert [(row['tokens'], row['files'], len(row['milliseconds'])) for row in rows] == [(10_000, 1, 5), (10_000, 10, 5)] and '| batches/s |' in capsys.readouterr().out


def test_sampling_is_timed_and_the_texts_agree(script, tmp_path):
    result = script('bench.py', '--what=sample', '--sizes=baby,llama', '--tokens=5', '--rounds=2', '--device=cpu', '--dtype=bfloat16', f"--json_file={tmp_path / 'x.json'}")
    assert result.status == 0, result.err
    assert 'ANOTHER' not in result.out and result.out.count('the same') == 4 and 'on a GPU: not measured' in result.out
    record = json.loads((tmp_path / 'x.json').read_text())
    timed = [row for row in record['sample'] if 'contestant' in row]
    assert [(row['size'], row['contestant']) for row in timed] == [(size, way) for size in ('baby', 'llama') for way in ('ours, no cache', 'ours, float32', 'ours, bfloat16')]
    assert all(len(row['seconds_per_step']) == 2 and min(row['seconds_per_step']) > 0 for row in timed) and 'commit' in record['machine']
    caches = {row['size']: row for row in record['sample'] if 'cache_bytes' in row}
    assert caches['baby']['cache_bytes'] == 2 * 6 * 6 * 64 * 256 * 4 == 3 * caches['llama']['cache_bytes']  # llama: 2 of 6 heads are kept


def test_without_a_cache_long_texts_are_timed_in_slices_that_cover_them():
    calls = []
    per_token(lambda idx, number: calls.append((tuple(idx.shape), number)), 3, 800, 4)
    assert calls == [((3, 100), 2), ((3, 300), 2), ((3, 500), 2), ((3, 700), 2)]
    net = GPT(GPTConfig(block_size=16, vocab_size=8, n_layer=1, n_head=1, n_embd=4, mlp_width=4, bias=False))
    weights = sum(p.numel() for name, p in net.named_parameters() if p.dim() > 1 and 'wpe' not in name)
    assert bytes_per_step(net, 1, 10, 4) == 4 * (weights + 2 * 4 * 10 / 2)


def test_memory_is_what_was_taken_at_most():
    if process_memory() is None or grows_by(lambda: None, CPU) is None:
        pytest.skip('nobody tells how much memory a process has')
    assert 150e6 < grows_by(lambda: torch.ones(50_000_000).sum(), CPU) < 260e6


@pytest.mark.parametrize('flags, words', [
    (['--what=speed'], ['speed', 'sample', 'train']), (['--sizes=huge'], ['huge', '124M']), (['--what=sample', '--sizes=toy'], ['toy', 'baby8']), (['--peer=/nowhere'], ['/nowhere', '--peer']),
    (['--rounds=0'], ['rounds']), (['--tokens=-1'], ['tokens']), (['--dtype=int8'], ['int8', 'bfloat16']), (['--batch_sizes=8,x'], ['micro-batch (x)', '8,16']), (['--archs=gpt2,gpt5'], ['gpt5', 'modern']),
    (['--what=prepare'], ['--text']), (['--n_embd=30'], ['n_embd=30', '--n_embd=28']), (['--iters=0'], ['iters']), (['--n_layers=3'], ['--n_layer']), (['--total_batch_size=100'], ['100', '768']),
])
def test_bad_requests_are_one_line(script, flags, words):
    result = script('bench.py', '--device=cpu', *flags)
    assert result.status == 2 and result.err.startswith('error: ') and result.err.count('\n') == 1 and all(word in result.err for word in words), result.err
