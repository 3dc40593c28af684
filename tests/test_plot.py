"""What report.md and the pictures say of a run, made from the files that it leaves."""

import json
import sys

import pytest
from conftest import run_script

import plot
from common import append_row, write_json


def falling(it):
    return 1 + 3 / (1 + it / 10)


def make_run(folder, val=falling, n=100, outcome='done', run=None, **columns):
    """A run's log.csv and run.json, with rows as train.py writes them."""
    folder.mkdir()
    for it in range(0, n + 1, 4):
        counts = {'iter': it, 'tokens': 1000 * it, 'seconds': it / 10}
        if it % 20 == 0:
            row = {'train_loss': falling(it), 'val_loss': val(it), 'train_bpb': None, 'val_bpb': val(it) / 2}
            append_row(str(folder / 'log.csv'), {**counts, **row})
        if it < n:
            row = {'loss': falling(it), 'loss_smooth': falling(it), 'tokens_per_second': 1e4, 'mfu': 0.412,
                   'memory_gb': 1.5}
            append_row(str(folder / 'log.csv'), {**counts, **row})
    for name, value in columns.items():
        append_row(str(folder / 'log.csv'), {'iter': n, name: value})
    record = {
        'outcome': outcome, 'iterations': n, 'tokens_per_iter': 1000, 'train_seconds': n / 10,
        'n_params': 123456, 'tokenizer': 'byte', 'device': 'a GPU', 'command': 'train.py config/x.py',
        'config': {'arch': 'llama', 'n_layer': 3, 'n_head': 2, 'n_embd': 8, 'block_size': 16},
        'dataset': {'name': 'toy', 'train': {'tokens': 9000}, 'val': {'tokens': 1000}},
    }
    write_json(str(folder / 'run.json'), {**record, **(run or {})})
    return folder


def report_of(folder, samples=''):
    plot.write_report(str(folder), samples)
    return (folder / 'report.md').read_text()


def test_the_report_says_what_was_trained_how_fast_how_well_and_how_it_goes_on(tmp_path):
    folder = make_run(tmp_path / 'run', hellaswag=0.2955, core=0.12)
    text = report_of(folder, 'samples after 100 iterations\n---\nTo be')
    for words in ('toy', '9,000', '1,000', 'byte', '123,456', 'n_layer 3', 'block_size 16', '1.2727',
                  '0.6364', 'after 100 iterations', '10,000 tokens/s', '41.2%', '1.50 GB', 'a GPU', '0.2955',
                  '0.1200', '100 iterations', '100.0K tokens', '10s', 'To be',
                  f"python train.py --init_from=resume --out_dir={tmp_path / 'run'} --max_iters=200"):
        assert words in text, words
    assert 'overfits' not in text and text.startswith('# run\n\n**Done**')


def test_a_validation_loss_that_rose_is_told(tmp_path):
    text = report_of(make_run(tmp_path / 'run', val=lambda it: 2 + abs(it - 40) / 100, outcome='stopped'))
    assert 'rose from 2.0000 to 2.6000' in text and 'overfits' in text
    assert '2.0000, 1.0000 bits per byte, after 40 iterations' in text
    assert '**Stopped**' in text and '--max_iters' not in text


def test_samples_stand_whole_behind_a_fence_that_none_of_them_closes(tmp_path):
    samples = 'a\n```\n````text\n<b>\n'
    assert f'`````text\n{samples}`````\n' in report_of(make_run(tmp_path / 'run'), samples)


def test_a_report_is_made_of_what_is_there(tmp_path):
    (tmp_path / 'empty').mkdir()
    assert '0 iterations' in report_of(tmp_path / 'empty')
    folder = make_run(tmp_path / 'run')
    (folder / 'run.json').unlink()
    assert '97 iterations' in report_of(folder), 'of a run that was killed'
    with open(folder / 'log.csv', 'a') as f:
        f.write('101,1')  # a row that was cut short
    assert '97 iterations' in report_of(folder)


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    folder = make_run(tmp_path / 'run')
    (folder / 'report.md').mkdir()
    plot.write_report(str(folder))
    plot.write_report(str(tmp_path / 'gone'))
    (folder / 'run.json').write_text(json.dumps({'config': 5, 'dataset': 'x'}))
    plot.write_report(str(folder))
    assert capsys.readouterr().out.count('warning: no report') == 3


def test_without_matplotlib_there_is_a_report_but_no_picture(tmp_path, monkeypatch, script):
    folder = make_run(tmp_path / 'run')
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    assert 'loss.png' not in report_of(folder) and not (folder / 'loss.png').exists()
    result = script('plot.py', folder, f"--to={tmp_path / 'curves.png'}")
    assert result.status == 2 and result.err.startswith('error: ')


def test_curves_of_several_runs_are_named_by_their_folders(tmp_path, works, monkeypatch):
    figure = pytest.importorskip('matplotlib.figure')
    image = pytest.importorskip('matplotlib.image')
    from matplotlib.colors import to_rgb
    folders = [make_run(tmp_path / 'a'), make_run(tmp_path / 'b', val=lambda it: 2)]
    assert '![The loss](loss.png)' in report_of(folders[0])
    assert (folders[0] / 'loss.png').read_bytes().startswith(b'\x89PNG')
    out = works('plot.py', *folders, f"--to={tmp_path / 'curves.png'}").out
    assert [line.split(':')[0] for line in out.splitlines()[:2]] == [str(folder) for folder in folders]
    assert '100,000 tokens in 10s, best validation loss 1.2727 at iteration 100' in out
    pixels = image.imread(tmp_path / 'curves.png')[:, :, :3]
    drawn = [(abs(pixels - to_rgb(color)) < 1e-3).all(-1).sum() for color in ('C0', 'C1', 'C2')]
    assert min(drawn[:2]) > 200 and drawn[2] == 0, 'a color each'
    for flags in (['--x=seconds', '--y=val_bpb'], ['--x=iter', '--y=tokens_per_second']):
        works('plot.py', *folders, f"--to={tmp_path / 'curves.png'}", *flags)
    labels = []
    savefig = figure.Figure.savefig

    def see(self, f, **kwargs):
        labels.extend(text.get_text() for text in self.axes[0].get_legend().get_texts())
        savefig(self, f, **kwargs)
    monkeypatch.setattr(figure.Figure, 'savefig', see)
    plot.draw({'a': plot.read_log(folders[0]), 'b': plot.read_log(folders[1])}, str(tmp_path / 'c.png'))
    assert labels == ['a', 'b']


@pytest.mark.parametrize('flags', [[], ['none'], ['run', '--y=hellaswag'], ['run', '--to=no/such.png']])
def test_mistakes_are_one_line(flags, script, tmp_path, monkeypatch):
    pytest.importorskip('matplotlib')
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / 'run')
    result = script('plot.py', *flags)
    assert result.status == 2 and result.err.startswith('error: ') and result.err.count('\n') == 1, result.err


def test_the_script_runs_from_anywhere(tmp_path):
    pytest.importorskip('matplotlib')
    make_run(tmp_path / 'run')
    result = run_script('plot.py', 'run', cwd=tmp_path)
    assert result.returncode == 0 and (tmp_path / 'curves.png').exists(), result.stderr
