"""What a run leaves: complete, exact after an interruption, and pictures that show what they should."""

import csv
import math
import re
import sys

import pytest
from conftest import TEXT, make_dataset, rows

from support import log, report
from support.files import read_json, write_json


def test_a_run_tells_what_it_was_and_how_it_ended(works, tiny, out):
    works('train.py', *tiny, '--max_iters=3', '--lr_decay_iters=6')
    result = works('train.py', *tiny, '--init_from=resume', pictures=True)
    run, text = read_json(out / 'run.json'), (out / 'report.md').read_text()
    assert run['changed'] == {'max_iters': 3} and len(run['code']) == 4
    assert run['outcome'] == 'done' and run['knobs']['lr_decay_iters'] == 6 and 'lr_decay_iters' in run['given']
    assert [session['from_iter'] for session in run['sessions']] == [0, 3]
    assert re.fullmatch('[0-9a-f]{40}(-dirty)?', run['sessions'][0]['commit'] or '0' * 40)
    assert text.startswith('# out\n\n**Done**: 6 of 6 iterations, ') and '![The loss](loss.png)' in text
    assert 'gpt2, 2 layers, 2 heads, 32 channels' in text and (out / 'loss.png').read_bytes().startswith(b'\x89PNG')
    # its table, the console and log.csv agree to the last digit
    assert f"report: {out / 'report.md'} and {out / 'loss.png'}" in result.out
    step = re.search(r'(?m)^step 6: train loss (\S+), val loss (\S+)$', result.out)
    took = re.search(r'(?m)^done: 6 iterations in (\S+),', result.out)[1]
    assert re.search(rf'(?m)^\| 6 \| 384 \| {step[1]} \| {step[2]} \| .* \| {took} \|$', text)
    assert text.count(f'{took} of training.') == 1
    assert rows(out)[-1]['tokens'] == '384' and float(rows(out)[-1]['seconds']) == run['seconds']
    commands = text.split('```sh\n')[1].split('\n```')[0].splitlines()[1::2]
    assert len(commands) == 2 and '--n_embd=32' in commands[0] and '--init_from=resume' in commands[1]

    # a new run in the folder starts with a clean one
    works('train.py', *tiny, '--overwrite')
    assert len(read_json(out / 'run.json')['sessions']) == 1


def test_the_columns_of_the_log_mean_what_they_say(works, tiny, tmp_path, out):
    works('train.py', *tiny)
    losses = []
    for row in rows(out):
        if row['val_loss']:
            loss = float(row['val_loss'])
            assert float(row['perplexity']) == pytest.approx(math.exp(loss))
            assert float(row['bpb']) == pytest.approx(loss / math.log(2)), 'a character is a byte in this text'
            assert float(row['eval_seconds']) > 0
            assert row['tokens'] == str(64 * int(row['iter'])), 'before its update, as the loss'
        if row['loss']:
            assert float(row['progress']) == pytest.approx((int(row['iter']) + 1) / 6)
            losses = [float(row['loss']), *losses]
            weights = [0.98 ** n for n in range(len(losses))]
            assert float(row['loss_smooth']) == pytest.approx(sum(a * b for a, b in zip(losses, weights)) / sum(weights))
            assert 0 <= float(row['data']) <= 100 and 0.01 < float(row['memory_gb']) < 100
    assert float(rows(out)[0]['seconds']) < float(rows(out)[0]['ms']) / 1000
    # weights that a new run starts from have seen tokens before
    works('train.py', *tiny, f"--init_from={out}", f"--out_dir={tmp_path / 'next'}")
    assert {int(row['tokens_total']) - int(row['tokens']) for row in rows(tmp_path / 'next')} == {6 * 64}
    works('train.py', *tiny, '--init_from=resume', '--eval_iters=9')
    assert rows(out)[0]['val_loss_before'] and not rows(out)[0]['val_loss'], 'other windows'
    with open(f'{tmp_path}/data/tiny/val.bin', 'r+b') as f:
        f.write(b'\5\0')  # in place
    assert 'another text' in works('eval.py', tiny[-3], tiny[-1]).out
    make_dataset(tmp_path / 'data', text=TEXT * 2)
    said = works('eval.py', tiny[-3], tiny[-1]).out
    assert 'tiny/val (another text): loss' in said and 'is not the text that this run had' in said and 'for comparison' not in said


def falling(i):
    return 1 + 3 / (1 + i / 10)


def make_run(folder, knobs={}, n=200, loss=falling, val=lambda i: 0.1 + falling(i), outcome=None, text=None, changed={}, code={'code of model.py': 'a'}, **columns):
    """A run's folder without a run; `columns` are further ones: (iterations between, function of the iteration)."""
    folder.mkdir()
    log = []
    for i in range(n + 1):
        row = {'iter': i, 'tokens': 1000 * i, 'seconds': 0.1 * i}
        if i < n:
            row.update(loss=loss(i), lr=1e-3, data=1)
        if i % 20 == 0:
            row.update(train_loss=loss(i), val_loss=val(i))
        row.update({name: f(i) for name, (every, f) in columns.items() if i % every == 0})
        log.append(row)
    with open(folder / 'log.csv', 'w', newline='') as f:
        writer = csv.DictWriter(f, log[0])
        writer.writeheader()
        writer.writerows(log)
    knobs = {'n_layer': 2, 'seed': 1, 'out_dir': str(folder), **knobs}
    write_json(f'{folder}/run.json', {'knobs': knobs, 'given': list(knobs), 'outcome': outcome, 'max_iters': n, 'changed': changed, 'code': code,
                                      'tokens_per_iter': 1000, 'dataset': {'splits': text}})
    return folder


def test_the_report_and_the_console_say_what_nobody_should_overlook(tmp_path):
    for name, val in dict(falls=falling, rises=lambda i: 2 + abs(i - 80) / 100).items():
        folder = make_run(tmp_path / name, val=val)
        _, *notes = report.write(str(folder))
        text = (folder / 'report.md').read_text()  # no word about its end: the report is made from what is there
        assert '**Running, or killed**: 200 of 200 iterations, 200,000 tokens' in text
        assert all(note.removeprefix('note: ') in text for note in notes)
    assert len(notes) == 1 and 'rose from 2.0000 to 3.2000' in notes[0]
    assert 'overfits' not in (tmp_path / 'falls' / 'report.md').read_text()


def test_the_table_of_evaluations_has_all_of_them(tmp_path):
    run = make_run(tmp_path / 'run', n=300, rhymes=(20, lambda i: i / 1000))
    report.write(run)
    table = (run / 'report.md').read_text().split('## Evaluations\n')[1].splitlines()
    assert table[3] == '| iteration | tokens | training loss | validation loss | rhymes | training time |' and len(table) == 5 + 16
    assert table[6] == '| 20 | 20,000 | 2.0000 | 2.1000 | 0.0200 | 0m02s |'
    assert table[-1].startswith('| 300 | 300,000 | ')


def test_the_report_lives_while_the_run_does_with_samples_side_by_side(script, tiny, tmp_path,
                                                                       monkeypatch):
    monkeypatch.setattr(log, 'REPORT_EVERY', 0)
    pages, write = [], report.write

    def kept(out_dir):
        lines = write(out_dir)
        pages.append((tmp_path / 'out' / 'report.md').read_text())
        return lines
    monkeypatch.setattr(report, 'write', kept)
    assert script('train.py', *tiny, '--sample_interval=2', '--sample_tokens=30').status == 0
    made = [re.search(r'\*\*(.*)\*\*: (\d) of 6', page).groups() for page in pages]
    assert made == [('Running, or killed', '1'), ('Running, or killed', '4'), ('Running, or killed', '6'), ('Done', '6')]
    assert re.search(r'(?m)^after 2 iterations +after 4 iterations +after 6 iterations$', pages[-1])


def test_runs_are_named_by_what_was_set_and_differs_and_seeds_are_one_group(script, tmp_path):
    matplotlib = pytest.importorskip('matplotlib.image')
    from matplotlib.colors import to_rgb
    a, b = make_run(tmp_path / 'a'), make_run(tmp_path / 'b', {'seed': 2, 'always_save_checkpoint': False})
    c = make_run(tmp_path / 'c', {'seed': 2, 'n_layer': 4}, val=lambda i: 2)
    assert report.groups([a, b]) == {a: [a, b]}
    assert report.groups([a, b, c]) == {'n_layer 2': [a, b], 'n_layer 4': [c]}
    assert report.groups([a]) == {a: [a]}
    e = make_run(tmp_path / 'e', dict(seed=3, n_layer=4, n_head=8, n_embd=16, dropout=0.3))
    assert report.groups([a, b, e]) == {a: [a, b], e: [e]}, 'four knobs are no name'
    d = make_run(tmp_path / 'd', {'seed': 2, 'n_layer': 4})
    assert report.groups([c, d]) == {c: [c], d: [d]}
    assert report.groups([a, b, c, d]) == {a: [a, b], c: [c], d: [d]}, 'one run twice is no two seeds'
    for name, value in dict(outcome='x', text='x', changed='x', code={'code of model.py': 'b'}).items():
        another = make_run(tmp_path / name, {'seed': 3}, **{name: value})
        assert [*report.groups([a, b, another]).values()] == [[a, b], [another]]
    assert [*report.groups([a, another])] == ['code of model.py a', 'code of model.py b']
    finetuned = make_run(tmp_path / 'f', {'seed': 3, 'init_from': 'x.pt'}, n=100)
    assert len(report.groups([a, b, finetuned])) == 2, 'not another seed alone'
    _, line = report.comparison({'x': list(map(report.read_log, (a, finetuned)))}, 'loss')
    assert line.split()[-2:] == ['150,000', '0m15s']
    out = script('plot.py', a, b, c, f"--to={tmp_path / 'curves.png'}").out.splitlines()
    assert out[0].split()[:3] == ['runs', 'best', 'val_loss']
    assert out[1].split() == 'n_layer 2 2 1.2429 ± 0.0000 1.2429 ± 0.0000 200,000 0m20s'.split()
    assert out[2].split() == 'n_layer 4 1 2.0000 2.0000 200,000 0m20s'.split()
    pixels = matplotlib.imread(tmp_path / 'curves.png')[:, :, :3]
    found = [(abs(pixels - to_rgb(color)) < 1e-3).all(-1).sum() for color in ('C0', 'C1', 'C2')]
    assert min(found[:2]) > 300 and found[2] == 0, 'each group has its color'


def test_mistakes_are_one_line(script, tmp_path, monkeypatch):
    run = make_run(tmp_path / 'run')
    for args, words in (([], 'no runs'),
                        ([tmp_path / 'none'], 'no log.csv'),
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
