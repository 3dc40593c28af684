"""log.csv, and what report.md and the pictures say of a run."""

import sys

import pytest

import common
import plot


def make_run(folder, val_losses, outcome='done'):
    """A run's log.csv and run.json: an evaluation each 20 iterations."""
    folder.mkdir()
    for i, val_loss in enumerate(val_losses):
        counts = {'iter': 20 * i, 'tokens': 20000 * i}
        common.append_row(str(folder / 'log.csv'), {**counts, 'val_loss': val_loss, 'val_bpb': val_loss / 2})
        common.append_row(str(folder / 'log.csv'), {**counts, 'loss': 3.0, 'mfu': 0.412, 'memory_gb': 1.5})
    common.append_row(str(folder / 'log.csv'), {'iter': 20 * i, 'hellaswag': 0.2955})
    common.write_json(str(folder / 'run.json'), {
        'outcome': outcome, 'iterations': 100, 'tokens_per_iter': 1000, 'train_seconds': 70.0,
        'tokens_per_second': 9876.0, 'n_params': 123456, 'tokenizer': 'byte', 'device': 'a GPU',
        'processes': 2, 'command': 'train.py config/x.py', 'best_val_loss': float('inf'),
        'config': {'arch': 'llama', 'n_layer': 3, 'n_head': 2, 'n_embd': 8, 'block_size': 16,
                   'tasks': 'core, hellaswag'},
        'dataset': {'name': 'toy', 'train': {'tokens': 9000}},
    })
    return folder


def report_of(folder, samples=''):
    plot.write_report(str(folder), samples)
    return (folder / 'report.md').read_text()


def test_the_report_says_what_was_trained_how_fast_how_well_and_how_it_goes_on(tmp_path):
    folder = make_run(tmp_path / 'run', [4.0, 2.5])
    text = report_of(folder, 'samples after 100 iterations\n```\nTo be\n')
    for words in ('done', '100 iterations', '100.0K tokens', '1m10s', 'toy', 'byte', '123,456', '9,876',
                  '41.2%', '1.50 GB', 'a GPU', '0.2955', '2.5000, 1.2500 bits per byte', '    ```\n    To be',
                  f"python train.py --init_from=resume --out_dir={tmp_path / 'run'}"):
        assert words in text, words
    assert 'overfits' not in text
    assert common.read_json(folder / 'run.json')['best_val_loss'] is None, 'JSON has no infinity'


def test_a_validation_loss_that_rose_is_told(tmp_path):
    text = report_of(make_run(tmp_path / 'run', [2.0, 2.4], outcome='stopped'))
    assert 'best validation loss: 2.0' in text and 'last validation loss: 2.4' in text and 'overfits' in text


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    plot.write_report(str(tmp_path / 'gone'))
    assert 'warning: no report' in capsys.readouterr().out


def test_without_matplotlib_there_is_a_report_but_no_picture(tmp_path, monkeypatch):
    folder = make_run(tmp_path / 'run', [2.0])
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    assert 'loss.png' not in report_of(folder) and not (folder / 'loss.png').exists()


def test_a_picture_has_a_curve_of_each_run(tmp_path, works, script, monkeypatch):
    figure = pytest.importorskip('matplotlib.figure')
    folders = [make_run(tmp_path / 'a', [4.0, 3.0]), make_run(tmp_path / 'b', [4.0, 2.0])]
    assert '![The loss](loss.png)' in report_of(folders[0])
    drawn = []
    savefig = figure.Figure.savefig

    def see(self, f, **kwargs):
        drawn.extend((line.get_label(), list(line.get_ydata())) for line in self.axes[0].lines)
        savefig(self, f, **kwargs)
    monkeypatch.setattr(figure.Figure, 'savefig', see)
    works('plot.py', *folders, '--x=iter', '--y=val_bpb', f"--to={tmp_path / 'curves.png'}")
    assert drawn == [(str(folders[0]), [2.0, 1.5]), (str(folders[1]), [2.0, 1.0])]
    assert (tmp_path / 'curves.png').read_bytes().startswith(b'\x89PNG')
    for flags in ([], ['none'], [folders[0], '--y=core'], [folders[0], f"--to={tmp_path / 'no' / 'a.png'}"]):
        assert script('plot.py', *flags).status == 2, flags


def test_a_row_may_bring_columns_and_half_a_row_is_left_out(tmp_path):
    path = str(tmp_path / 'log.csv')
    common.append_row(path, {'iter': 0, 'loss': 3.5})
    common.append_row(path, {'iter': 1, 'weight_norm': 2.0, 'loss': None})
    with open(path, 'a') as f:
        f.write('2,1')
    common.append_row(path, {'iter': 3, 'val_loss': 1.0})
    assert plot.read_log(str(tmp_path)) == [
        {'iter': 0, 'loss': 3.5}, {'iter': 1, 'weight_norm': 2.0}, {'iter': 3, 'val_loss': 1.0}]
