"""log.csv, and what report.md and the pictures say of a run."""

import csv

import pytest
from conftest import REPO, TINY, read_log

from flatgpt import files
import plot


def test_the_report_says_what_was_trained_how_fast_how_well_and_how_to_resume(
        works, data_dir, tmp_path, capsys):
    out = tmp_path / 'out'
    result = works('train.py', *TINY, '--dataset=toy', f'--data_dir={data_dir}', f'--out_dir={out}')
    flags = f'--out_dir={out} --data_dir={data_dir}'
    assert f'sample.py {flags}' in result.out
    run = files.read_json(out / 'run.json')
    row = plot.read_log(str(out))[-1]
    report = out / 'report.md'
    text = report.read_text()
    for words in ('done', '6 iterations', 'toy', 'char', f"{run['n_params']:,} parameters", run['device'],
                  f"{run['tokens_per_second']:,.0f} tokens/s", 'GB',
                  f"{row['val_loss']:.4f}, {row['val_bpb']:.4f} bits per byte",
                  f'train.py --init_from=resume {flags}'):
        assert words in text, words
    # settings that an edit of train.py has removed are left out
    assert 'bits per byte' in plot.report_text(str(out), {**run, 'config': {}}, [row], '')
    # a report that cannot be written is a warning
    report.unlink()
    report.mkdir()
    plot.write_report(str(out))
    assert 'warning' in capsys.readouterr().out


def test_an_edited_copy_of_train_py_logs_tensors_and_is_named_in_the_report(train, tmp_path, out):
    path = tmp_path / 'my train.py'
    line = "               'memory_gb': peak_memory(used_device),"
    edited = line + "\n               'weight_norm': torch.nn.utils.get_total_norm(model.parameters()),"
    source = (REPO / 'train.py').read_text()
    assert line in source
    path.write_text(source.replace(line, edited))
    result = train(path=path)
    assert f"python '{path}' --init_from=resume" in (out / 'report.md').read_text()
    assert f"python {tmp_path / 'sample.py'} --out_dir" in result.out
    assert plot.curve(plot.read_log(str(out)), 'iter', 'weight_norm')[0] == list(range(6))


def test_a_log_that_another_program_has_saved_is_read_by_value(train, out):
    train()
    first, *columns = read_log(out)[0]
    rows = read_log(out)
    # as pandas and spreadsheets write it
    with open(out / 'log.csv', 'w', newline='', encoding='utf-8-sig') as f:
        writer = csv.writer(f, quoting=csv.QUOTE_ALL)
        writer.writerow(['', *columns, first])
        for i, row in enumerate(rows):
            numbers = [float(row[column]) if row[column] else '' for column in [*columns, first]]
            writer.writerow([i, *numbers])
    train('--init_from=resume', '--max_iters=9')
    log = plot.read_log(str(out))
    assert [row['iter'] for row in log if 'loss' in row] == list(range(9))
    assert [row['iter'] for row in log if 'val_loss' in row] == [0, 3, 6, 9]
    assert log[0][''] == 0


def test_a_damaged_log_does_not_stop_a_resume(train, out):
    train()
    for content in ['', 'iter;loss\n1;2\n']:
        (out / 'log.csv').write_text(content)
        train('--init_from=resume', '--resume_step=3')
        assert plot.read_log(str(out))[-1]['iter'] == 6


def test_the_training_loss_is_smoothed_without_a_bias_to_its_start():
    log = [{'iter': i, 'loss': 3.0 + (-1) ** i} for i in range(100)]
    assert plot.curve(log, 'iter', 'loss') == (list(range(100)), [4.0, 2.0] * 50)
    values = plot.curve(log, 'iter', 'loss', smooth=0.9)[1]
    assert values[0] == pytest.approx(4) and values[-1] == pytest.approx(3, abs=0.06)


def test_a_picture_has_a_curve_of_each_run(tmp_path, works, script, monkeypatch):
    figure = pytest.importorskip('matplotlib.figure')
    values = {str(tmp_path / 'a'): [4.0, 3.0], str(tmp_path / 'b'): [4.0, 2.0]}
    for folder, (first, last) in values.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / 'log.csv').write_text(f'iter,val_bpb\n0,{first}\n20,{last}\n')
    drawn = {}
    savefig = figure.Figure.savefig

    def see(self, path, **kwargs):
        for line in self.axes[0].lines:
            drawn[line.get_label()] = list(line.get_ydata())
        savefig(self, path, **kwargs)
    monkeypatch.setattr(figure.Figure, 'savefig', see)
    works('plot.py', *values, '--x=iter', '--y=val_bpb', f"--to={tmp_path / 'curves.png'}")
    assert drawn == values
    assert (tmp_path / 'curves.png').read_bytes().startswith(b'\x89PNG')
    assert script('plot.py', *values, '--y=core').status == 2


def test_a_row_may_bring_columns_and_half_a_row_is_skipped(tmp_path):
    path = str(tmp_path / 'log.csv')
    files.append_row(path, {'iter': 0, 'loss': 3.5})
    files.append_row(path, {'iter': 1, 'weight_norm': 2.0, 'loss': None})
    with open(path, 'a') as f:
        f.write('2,1')
    files.append_row(path, {'iter': 3, 'val_loss': 1.0})
    assert plot.read_log(str(tmp_path)) == [
        {'iter': 0, 'loss': 3.5}, {'iter': 1, 'weight_norm': 2.0}, {'iter': 3, 'val_loss': 1.0}]
