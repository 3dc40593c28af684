"""What a run leaves: complete, exact after an interruption, and pictures that show what they should."""

import csv
import json
import math
import re
import shutil
import signal

import pytest

import report


def rows(folder):
    with open(folder / 'log.csv', newline='') as f:
        return list(csv.DictReader(f))


@pytest.fixture
def stop_after(monkeypatch):
    """stop_after(n): the run is asked to stop when it has asked n times."""
    import parallel

    def arm(n):
        asked = iter([0] * n)
        monkeypatch.setattr(parallel.Requests, 'asked', lambda self: next(asked, 128 + signal.SIGTERM))
    yield arm


def test_a_run_tells_what_it_was_and_how_it_ended(script, tiny, tmp_path, stop_after, monkeypatch):
    out = tmp_path / 'out'
    stop_after(12)
    result = script('train.py', *tiny, '--write_report=True')
    assert result.status == 128 + signal.SIGTERM and f"report: {out / 'report.md'}" in result.out
    first = json.loads((out / 'run.json').read_text())
    stopped_at = first['iterations']
    assert first['outcome'] == 'stopped by SIGTERM' and first['knobs']['n_embd'] == 32 and first['knobs']['lr_decay_iters'] == 6 and 0 < stopped_at < 6
    assert first['dataset']['name'] == 'tiny' and first['sessions'][0]['torch'] and re.fullmatch('[0-9a-f]{40}', first['sessions'][0]['commit'] or '0' * 40)
    assert (out / 'report.md').read_text().startswith(f'# out\n\n**Stopped by SIGTERM** after {stopped_at} of 6 iterations, ')
    monkeypatch.undo()
    result = script('train.py', '--init_from=resume', f'--out_dir={out}', f"--data_dir={tmp_path / 'data'}", '--device=cpu', '--dtype=float32', '--compile=False')
    assert result.status == 0, result.err
    run, text = json.loads((out / 'run.json').read_text()), (out / 'report.md').read_text()
    assert run['outcome'] == 'done' and [s['outcome'] for s in run['sessions']] == ['stopped by SIGTERM', 'done'] and run['sessions'][1]['from_iter'] == stopped_at
    last = rows(out)[-1]
    assert '**Done** after 6 of 6' in text and f"{float(last['val_loss']):.4f}" in text and '--init_from=resume' in text and '![The loss](loss.png)' in text
    assert 'gpt2, 2 layers, 2 heads, 32 channels' in text and text.count('| stopped by SIGTERM |') == 1
    assert (out / 'loss.png').read_bytes().startswith(b'\x89PNG')
    # a new run in the folder starts with a clean one
    assert script('train.py', *tiny, '--overwrite').status == 0
    assert not (out / 'report.md').exists() and len(json.loads((out / 'run.json').read_text())['sessions']) == 1


def test_the_columns_of_the_log_mean_what_they_say(script, tiny, tmp_path):
    script('train.py', *tiny)
    log = rows(tmp_path / 'out')
    for row in log:
        if row['val_loss']:
            assert float(row['perplexity']) == pytest.approx(math.exp(float(row['val_loss'])))
            assert float(row['bpb']) == pytest.approx(float(row['val_loss']) / math.log(2)), 'every character of this text is a byte'
            assert float(row['eval_seconds']) > 0
        if row['loss']:
            assert float(row['progress']) == pytest.approx((int(row['iter']) + 1) / 6) and row['tokens_total'] == row['tokens']
            assert 0 <= float(row['data']) <= 100 and 0.01 < float(row['memory_gb']) < 100
    evaluations = [float(row['eval_seconds']) for row in log if row['eval_seconds']]
    assert evaluations == sorted(evaluations) and len(evaluations) == 3
    # weights that go on in a new run have seen tokens before
    script('train.py', *tiny, f"--init_from={tmp_path / 'out'}", f"--out_dir={tmp_path / 'next'}")
    assert [int(row['tokens_total']) - int(row['tokens']) for row in rows(tmp_path / 'next') if row['loss']] == [6 * 64] * 6


def test_a_log_of_before_these_columns_is_taken_up(script, tiny, tmp_path):
    script('train.py', *tiny, '--max_iters=3', '--lr_decay_iters=6')
    log = rows(tmp_path / 'out')
    old = ('iter', 'loss', 'train_loss', 'val_loss', 'lr', 'grad_norm', 'tokens', 'epoch', 'ms', 'tokens_per_second', 'mfu', 'seconds')
    with open(tmp_path / 'out' / 'log.csv', 'w', newline='') as f:
        writer = csv.DictWriter(f, old, extrasaction='ignore')
        writer.writeheader()
        writer.writerows(log)
    assert script('train.py', *tiny, '--init_from=resume').status == 0
    new = rows(tmp_path / 'out')
    assert [row['iter'] for row in new] == [str(i) for i in range(7)] and new[1]['loss'] == log[1]['loss'] and not new[1]['progress'] and new[4]['progress']


def make_run(folder, knobs={}, n=200, loss=lambda i: 1 + 3 / (1 + i / 10), val=lambda i: 1.1 + 3 / (1 + i / 10), outcome='done'):
    folder.mkdir()
    with open(folder / 'log.csv', 'w', newline='') as f:
        writer = csv.DictWriter(f, ('iter', 'loss', 'train_loss', 'val_loss', 'lr', 'grad_norm', 'tokens', 'seconds', 'tokens_per_second', 'ms', 'data'))
        writer.writeheader()
        for i in range(n + 1):
            row = {'iter': i}
            if i < n:
                row.update(loss=loss(i), lr=1e-3, grad_norm=0.5, tokens=1000 * (i + 1), seconds=0.1 * (i + 1), tokens_per_second=1e4, ms=100, data=1)
            if i % 20 == 0:
                row.update(train_loss=loss(i), val_loss=val(i))
            writer.writerow(row)
    report.write_json(str(folder / 'run.json'), {'knobs': {'n_layer': 2, 'seed': 1, 'out_dir': str(folder), **knobs}, 'outcome': outcome, 'max_iters': n})
    return folder


def test_the_report_points_at_leaps_and_at_a_validation_loss_that_rises(tmp_path, script):
    calm = make_run(tmp_path / 'calm')
    assert report.remarks(report.read_log(calm)) == []
    wild = make_run(tmp_path / 'wild', loss=lambda i: 7.0 if i in (120, 121) else 1 + 3 / (1 + i / 10) + 0.05 * math.sin(i),
                    val=lambda i: 2 + abs(i - 80) / 100)
    leap, advice, rise = report.remarks(report.read_log(wild))
    assert 'to 7.000 at iteration 120 (gradient norm 0.50)' in leap and 'smaller rates' in advice
    assert 'rose from 2.0000 at iteration 80 to 3.2000' in rise and 'by heart' in rise
    slow = make_run(tmp_path / 'slow')
    (slow / 'log.csv').write_text((slow / 'log.csv').read_text().replace(',100,1\n', ',100,40\n').replace(',100,1\r\n', ',100,40\n'))
    assert '40% of the time went into waiting for data' in report.remarks(report.read_log(slow))[0]
    # a run that was killed: no word about its end, the report is made from what is there
    (wild / 'run.json').write_text(json.dumps({**json.loads((wild / 'run.json').read_text()), 'outcome': None}))
    result = script('plot.py', wild, calm, '--report=True')
    assert result.status == 0 and (calm / 'loss.png').exists(), result.err
    text = (wild / 'report.md').read_text()
    assert '**Killed, or still running** after 200 of 200 iterations, 200,000 tokens' in text and '- The loss leapt from' in text and '## To look at' not in (calm / 'report.md').read_text()


def test_runs_are_named_by_what_differs(tmp_path):
    a, b, c = (make_run(tmp_path / name, knobs) for name, knobs in (('a', {}), ('b', {'seed': 2}), ('c', {'seed': 2, 'n_layer': 4})))
    assert report.difference([a, b]) == ['seed 1', 'seed 2'] and report.difference([a, b, c]) == ['n_layer 2, seed 1', 'n_layer 2, seed 2', 'n_layer 4, seed 2']
    assert report.difference([a]) == ['a']
    (b / 'run.json').unlink()
    assert report.difference([a, b]) == ['a', 'b'], 'a run from before there was a run.json'
    assert report.difference([a, make_run(tmp_path / 'd')]) == ['a', 'd'], 'the same knobs'


def colors(path):
    """How many points of the picture have each colour."""
    import matplotlib.image
    from collections import Counter
    pixels = (matplotlib.image.imread(path)[:, :, :3] * 255).round().astype(int).reshape(-1, 3)
    return Counter('#%02x%02x%02x' % tuple(p) for p in pixels)


@pytest.mark.parametrize('x, y', [('tokens', 'loss'), ('time', 'val_loss'), ('iter', 'grad_norm')])
def test_each_run_has_its_curve_in_its_colour(script, tmp_path, x, y):
    pytest.importorskip('matplotlib')
    runs = [make_run(tmp_path / f'run{k}', {'seed': k}, loss=lambda i, k=k: k + 3 / (1 + i / 10), val=lambda i, k=k: k + 3 / (1 + i / 10)) for k in range(3)]
    if y == 'grad_norm':
        for k, run in enumerate(runs):
            (run / 'log.csv').write_text((run / 'log.csv').read_text().replace(',0.5,', f',{k + 0.5},'))
    result = script('plot.py', *runs, f'--x={x}', f'--y={y}', f"--to={tmp_path / 'curves.png'}")
    assert result.status == 0, result.err
    found = colors(tmp_path / 'curves.png')
    assert all(found[color] > 300 for color in report.COLORS[:3]) and found[report.COLORS[3]] == 0
    assert not list(tmp_path.glob('*.tmp'))


def test_smoothing_keeps_what_is_there():
    assert report.smooth([2.0] * 50) == pytest.approx([2.0] * 50) and report.smooth([1.0]) == [1.0] and report.smooth([]) == []
    line = [float(i) for i in range(300)]
    assert report.smooth(line)[0] == 0 and report.smooth(line)[20:280] == pytest.approx(line[20:280])
    noisy = [math.sin(i * i) for i in range(300)]
    assert max(map(abs, report.smooth(noisy)[20:])) < 0.5


def test_mistakes_are_one_line(script, tmp_path, monkeypatch):
    run = make_run(tmp_path / 'run')
    for args, words in (([], 'no runs'), ([tmp_path / 'none'], 'no log.csv'), ([run, '--x=epochs'], 'tokens, iter, time'), ([run, '--y=hellaswag'], 'nothing to draw'),
                        ([run, f"--to={tmp_path / 'no' / 'such.png'}"], 'cannot be written')):
        result = script('plot.py', *args)
        assert result.status == 2 and result.err.startswith('error: ') and result.err.count('\n') == 1 and words in result.err, (args, result.err)
    monkeypatch.setitem(__import__('sys').modules, 'matplotlib', None)
    result = script('plot.py', run)
    assert result.status == 2 and 'pip install matplotlib' in result.err
    assert 'no loss.png' in script('plot.py', run, '--report=True').out and '![' not in (run / 'report.md').read_text()
    shutil.rmtree(run)
