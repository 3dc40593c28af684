"""What a run leaves: complete, exact after an interruption, and pictures that show what they should."""

import csv
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys

import pytest

from support import report
from support.files import read_json, write_json


def rows(folder):
    with open(folder / 'log.csv', newline='') as f:
        return list(csv.DictReader(f))


@pytest.fixture
def stop_after(monkeypatch):
    """stop_after(n): the run gets SIGTERM when it polls for the n-th time."""
    from support import signals

    def arm(n):
        poll, calls = signals.Stop.poll, itertools.count(1)

        def counted(self):
            if next(calls) == n:
                os.kill(os.getpid(), signal.SIGTERM)
            return poll(self)
        monkeypatch.setattr(signals.Stop, 'poll', counted)
    yield arm


def test_a_run_tells_what_it_was_and_how_it_ended(script, tiny, tmp_path, stop_after, monkeypatch):
    out = tmp_path / 'out'
    stop_after(8)
    result = script('train.py', *tiny, pictures=True)
    assert result.status == 128 + signal.SIGTERM and f"report: {out / 'report.md'}" in result.out
    first = json.loads((out / 'run.json').read_text())
    stopped_at, session = first['iterations'], first['sessions'][0]
    assert first['outcome'] == 'stopped by SIGTERM' and 0 < stopped_at < 6
    assert first['knobs']['n_embd'] == 32 and first['knobs']['lr_decay_iters'] == 6
    assert first['dataset']['name'] == 'tiny' and session['torch']
    assert re.fullmatch('[0-9a-f]{40}', session['commit'] or '0' * 40)
    begin = f'# out\n\n**Stopped by SIGTERM** after {stopped_at} of 6 iterations, '
    assert (out / 'report.md').read_text().startswith(begin)

    monkeypatch.undo()
    result = script('train.py', '--init_from=resume', f'--out_dir={out}', f"--data_dir={tmp_path / 'data'}",
                    '--device=cpu', '--dtype=float32', '--compile=False', pictures=True)
    assert result.status == 0, result.err
    run, text = json.loads((out / 'run.json').read_text()), (out / 'report.md').read_text()
    assert run['outcome'] == 'done' and run['sessions'][1]['from_iter'] == stopped_at
    assert [s['outcome'] for s in run['sessions']] == ['stopped by SIGTERM', 'done']
    assert '**Done** after 6 of 6' in text and '![The loss](loss.png)' in text
    assert f"{float(rows(out)[-1]['val_loss']):.4f}" in text and '--init_from=resume' in text
    assert 'gpt2, 2 layers, 2 heads, 32 channels' in text and text.count('| stopped by SIGTERM |') == 1
    assert (out / 'loss.png').read_bytes().startswith(b'\x89PNG')
    # its table, the console and log.csv agree to the last digit
    assert f"report: {out / 'report.md'} and {out / 'loss.png'}" in result.out
    step = re.search(r'(?m)^step 6: train loss (\S+), val loss (\S+)$', result.out)
    took = re.search(r'(?m)^done: 6 iterations in (\S+),', result.out)[1]
    assert re.search(rf'(?m)^\| 6 \| 384 \| {step[1]} \| {step[2]} \| .* \| {took} \|$', text)
    assert text.count(f'{took} of training.') == text.count(f'| time | {took} training,') == 1
    final = rows(out)[-1]
    assert final['tokens'] == '384' and float(final['seconds']) == run['seconds']
    commands = text.split('```sh\n')[1].split('\n```')[0].splitlines()
    assert len(commands) == 2 and '--n_embd=32' in commands[0] and '--init_from=resume' in commands[1]

    # a new run in the folder starts with a clean one
    assert script('train.py', *tiny, '--overwrite').status == 0
    assert len(json.loads((out / 'run.json').read_text())['sessions']) == 1


def test_the_columns_of_the_log_mean_what_they_say(script, tiny, tmp_path):
    script('train.py', *tiny)
    log, losses = rows(tmp_path / 'out'), []
    for row in log:
        if row['val_loss']:
            loss = float(row['val_loss'])
            assert float(row['perplexity']) == pytest.approx(math.exp(loss))
            bits = pytest.approx(loss / math.log(2))
            assert float(row['bpb']) == bits, 'a character is a byte in this text'
            assert float(row['eval_seconds']) > 0
        if row['loss']:
            assert float(row['progress']) == pytest.approx((int(row['iter']) + 1) / 6)
            assert row['tokens_total'] == row['tokens']
            losses = [float(row['loss']), *losses]
            weights = [0.9 ** n for n in range(len(losses))]
            mean = sum(a * b for a, b in zip(losses, weights)) / sum(weights)
            assert float(row['loss_smooth']) == pytest.approx(mean)
            assert 0 <= float(row['data']) <= 100 and 0.01 < float(row['memory_gb']) < 100
    evaluations = [float(row['eval_seconds']) for row in log if row['eval_seconds']]
    assert evaluations == sorted(evaluations) and len(evaluations) == 3
    # weights that a new run starts from have seen tokens before
    script('train.py', *tiny, f"--init_from={tmp_path / 'out'}", f"--out_dir={tmp_path / 'next'}")
    log = [row for row in rows(tmp_path / 'next') if row['loss']]
    assert [int(row['tokens_total']) - int(row['tokens']) for row in log] == [6 * 64] * 6


def test_a_log_of_before_these_columns_is_taken_up(script, tiny, tmp_path):
    script('train.py', *tiny, '--max_iters=3', '--lr_decay_iters=6')
    log = rows(tmp_path / 'out')
    old = ('iter', 'loss', 'train_loss', 'val_loss', 'lr', 'grad_norm', 'tokens', 'epoch', 'ms',
           'tokens_per_second', 'mfu', 'seconds')
    with open(tmp_path / 'out' / 'log.csv', 'w', newline='') as f:
        writer = csv.DictWriter(f, old, extrasaction='ignore')
        writer.writeheader()
        writer.writerows(log)
    assert script('train.py', *tiny, '--init_from=resume').status == 0
    new = rows(tmp_path / 'out')
    assert [row['iter'] for row in new] == [str(i) for i in range(7)]
    assert new[1]['loss'] == log[1]['loss'] and not new[1]['progress'] and new[4]['progress']


def falling(i):
    return 1 + 3 / (1 + i / 10)


def make_run(folder, knobs={}, n=200, loss=falling, val=lambda i: 0.1 + falling(i), outcome='done',
             of_iterations={}, of_evaluations={}):
    """A run's folder without a run; the last two are further columns, {name: function of the iteration}."""
    folder.mkdir()
    log = []
    for i in range(n + 1):
        row = {'iter': i}
        if i < n:
            row.update(loss=loss(i), lr=1e-3, grad_norm=0.5, tokens=1000 * (i + 1), seconds=0.1 * (i + 1),
                       tokens_per_second=1e4, ms=100, data=1)
            row.update({name: f(i) for name, f in of_iterations.items()})
        if i % 20 == 0:
            row.update(train_loss=loss(i), val_loss=val(i))
            row.update({name: f(i) for name, f in of_evaluations.items()})
        log.append(row)
    with open(folder / 'log.csv', 'w', newline='') as f:
        writer = csv.DictWriter(f, log[0])
        writer.writeheader()
        writer.writerows(log)
    knobs = {'n_layer': 2, 'seed': 1, 'out_dir': str(folder), **knobs}
    write_json(str(folder / 'run.json'), {'knobs': knobs, 'outcome': outcome, 'max_iters': n})
    return folder


def remarks(folder):
    return report.remarks(report.read_log(folder))


def test_the_report_points_at_leaps_and_at_a_validation_loss_that_rises(tmp_path, script):
    calm = make_run(tmp_path / 'calm')
    assert remarks(calm) == []
    wild = make_run(tmp_path / 'wild', val=lambda i: 2 + abs(i - 80) / 100,
                    loss=lambda i: 7.0 if i in (120, 121) else falling(i) + 0.05 * math.sin(i))
    leap, advice, rise = remarks(wild)
    assert 'to 7.000 at iteration 120 (gradient norm 0.50)' in leap and 'smaller learning rate' in advice
    assert 'rose from 2.0000 at iteration 80 to 3.2000' in rise and 'overfits' in rise
    slow = make_run(tmp_path / 'slow')
    log = (slow / 'log.csv').read_text()
    (slow / 'log.csv').write_text(re.sub(r',100,1(?=\D)', ',100,40', log))
    assert '40% of the time was spent waiting for data' in remarks(slow)[0]
    # a run that was killed: no word about its end, the report is made from what is there
    write_json(str(wild / 'run.json'), {**read_json(wild / 'run.json'), 'outcome': None})
    result = script('plot.py', wild, calm, '--report=True')
    assert result.status == 0 and (calm / 'loss.png').exists(), result.err
    text = (wild / 'report.md').read_text()
    assert '**Killed, or still running** after 200 of 200 iterations, 200,000 tokens' in text
    assert '- The loss leapt from' in text and '## Remarks' not in (calm / 'report.md').read_text()


def test_the_report_says_that_a_run_diverged(tmp_path):
    def loss(i):
        return falling(i) + 0.02 * max(0, i - 120)
    remark, = remarks(make_run(tmp_path / 'both', loss=loss, val=loss))
    assert 'The validation loss rose from 1.2308 at iteration 120 to 2.7429' in remark
    assert 'diverged' in remark
    told = report.write(str(tmp_path / 'both'))  # and so does the console
    assert told[1:] == [f'note: {remark}'] and f'- {remark}' in (tmp_path / 'both' / 'report.md').read_text()
    remark, = remarks(make_run(tmp_path / 'train', loss=loss, val=lambda i: None))
    assert 'The training loss rose' in remark and 'diverged' in remark
    # the last evaluation alone is far above the others
    def at_the_end(i):
        return falling(i) * (1.5 if i == 200 else 1)
    remark, = remarks(make_run(tmp_path / 'late', loss=at_the_end, val=at_the_end))
    assert 'diverged' in remark


def test_an_evaluation_stands_for_the_iterations_before_it(tmp_path):
    log = report.read_log(make_run(tmp_path / 'run', n=300))

    def xs(x, y):
        return [a for a, _ in report.points(log, x, y)]
    assert report.points(log, 'tokens', 'val_loss')[:2] == [(0, 4.1), (20_000, pytest.approx(2.1))]
    assert xs('tokens', 'train_loss') == [20_000 * k for k in range(16)]
    assert xs('seconds', 'val_loss') == pytest.approx([2 * k for k in range(16)])
    assert xs('tokens', 'loss') == [1000 * (i + 1) for i in range(300)]
    # and in the table, of which it is said that it is not whole
    lines = list(report.page(tmp_path / 'run', report.read_log(tmp_path / 'run'), picture=False))
    table = lines[lines.index('## Evaluations'):lines.index('## Settings')]
    assert table[2] == '12 of 16; all of them are in log.csv.' and len(table) == 6 + 12 + 1
    assert table[7].startswith('| 20 | 20,000 | 2.0000 | 2.1000 | ')
    assert table[-2].startswith('| 300 | 300,000 | ')


def test_own_columns_are_drawn_and_in_the_table(tmp_path):
    pytest.importorskip('matplotlib')
    run = make_run(tmp_path / 'run', of_iterations={'weight_norm': lambda i: 20 + i},
                   of_evaluations={'rhymes': lambda i: i / 1000})
    log = report.read_log(run)
    assert report.is_evaluation(log, 'rhymes') and not report.is_evaluation(log, 'weight_norm')
    assert report.points(log, 'tokens', 'rhymes')[3] == (60_000, 0.06)
    assert report.points(log, 'tokens', 'weight_norm')[3] == (4000, 23)
    text = '\n'.join(report.page(run, report.read_log(run), picture=False))
    assert '| training loss | validation loss | rhymes | training time |' in text
    assert 'weight_norm' not in text
    for name in ('rhymes', 'weight_norm'):
        report.draw([run], str(tmp_path / f'{name}.png'), y=name)
        assert count_color(tmp_path / f'{name}.png', report.COLORS[0]) > 300


def test_runs_are_named_by_what_differs(tmp_path):
    a, b = make_run(tmp_path / 'a'), make_run(tmp_path / 'b', {'seed': 2})
    c = make_run(tmp_path / 'c', {'seed': 2, 'n_layer': 4})
    assert report.difference([a, b]) == ['seed 1', 'seed 2']
    three = ['n_layer 2, seed 1', 'n_layer 2, seed 2', 'n_layer 4, seed 2']
    assert report.difference([a, b, c]) == three
    assert report.difference([a]) == ['a']
    assert report.difference([a, make_run(tmp_path / 'own', {'alpha': 3})]) == ['alpha None', 'alpha 3']
    (b / 'run.json').unlink()
    assert report.difference([a, b]) == ['a', 'b'], 'a run from before there was a run.json'
    assert report.difference([a, make_run(tmp_path / 'd')]) == ['a', 'd'], 'the same knobs'


def count_color(path, color):
    """How many points of the picture have this color, such as '#ff0000'."""
    import matplotlib.colors
    import matplotlib.image
    pixels = matplotlib.image.imread(path)[:, :, :3]
    return int((abs(pixels - matplotlib.colors.to_rgb(color)) < 1e-3).all(-1).sum())


@pytest.mark.parametrize('x, y', [('tokens', 'loss'), ('time', 'val_loss'), ('iter', 'grad_norm')])
def test_each_run_has_its_curve_in_its_color(script, tmp_path, x, y):
    pytest.importorskip('matplotlib')
    runs = []
    for k in range(3):
        def loss(i):
            return k - 1 + falling(i)
        runs.append(make_run(tmp_path / f'run{k}', {'seed': k}, loss=loss, val=loss))
        if y == 'grad_norm':
            log = runs[k] / 'log.csv'
            log.write_text(log.read_text().replace(',0.5,', f',{k + 0.5},'))
    result = script('plot.py', *runs, f'--x={x}', f'--y={y}', f"--to={tmp_path / 'curves.png'}")
    assert result.status == 0, result.err
    found = [count_color(tmp_path / 'curves.png', color) for color in report.COLORS]
    assert min(found[:3]) > 300 and found[3] == 0
    assert not list(tmp_path.glob('*.tmp'))


def test_smoothing_keeps_what_is_there():
    assert report.smooth([2.0] * 50) == pytest.approx([2.0] * 50)
    assert report.smooth([1.0]) == [1.0] and report.smooth([]) == []
    line = [float(i) for i in range(300)]
    assert report.smooth(line)[0] == 0 and report.smooth(line)[20:280] == pytest.approx(line[20:280])
    noisy = [math.sin(i * i) for i in range(300)]
    assert max(map(abs, report.smooth(noisy)[20:])) < 0.5


def test_mistakes_are_one_line(script, tmp_path, monkeypatch):
    run = make_run(tmp_path / 'run')
    for args, words in (([], 'no runs'),
                        ([tmp_path / 'none'], 'no log.csv'),
                        ([run, '--x=epochs'], 'tokens, iter, time'),
                        ([run, '--y=hellaswag'], 'nothing to draw'),
                        ([run, f"--to={tmp_path / 'no' / 'such.png'}"], 'cannot be written')):
        result = script('plot.py', *args)
        assert result.status == 2 and words in result.err, (args, result.err)
        assert result.err.startswith('error: ') and result.err.count('\n') == 1, (args, result.err)
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    result = script('plot.py', run)
    assert result.status == 2 and 'pip install matplotlib' in result.err
    assert 'no loss.png' in script('plot.py', run, '--report=True').out
    assert '![' not in (run / 'report.md').read_text()
    shutil.rmtree(run)
