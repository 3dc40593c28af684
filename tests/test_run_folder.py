"""What a run's folder holds while and after things go wrong: nothing lost, nothing half-written, nothing garbled believed."""

import csv
import errno
import io
import json
import os
import shutil
import stat
import zipfile

import pytest
import torch

from configurator import say
from support import checkpoint, files, load, samples
from support.log import COLUMNS, CsvLog


def some_state(it=1, fill=1.0):
    return {'iter_num': it, 'model': {'a': torch.full((1000,), fill), 'b': torch.full((1000,), fill)}}


def saved(folder, it, fill, links=('ckpt.pt',)):
    folder.mkdir(exist_ok=True)
    assert checkpoint.save(str(folder), some_state(it, fill), links, 2) == {}
    return str(folder / 'ckpt.pt')


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# -----------------------------------------------------------------------------
# reading


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_one_file(tmp_path, monkeypatch):
    saved(tmp_path, 1, 1.0)
    real = torch.UntypedStorage.from_file

    def replaced_meanwhile(*args):  # torch has read the table of contents, and maps the numbers now
        state = {**some_state(2, 2.0), 'longer': torch.zeros(300)}
        checkpoint.save(str(tmp_path), dict(reversed(state.items())), ['ckpt.pt'], 2)
        return real(*args)
    monkeypatch.setattr(torch.UntypedStorage, 'from_file', replaced_meanwhile)
    found = load.unpack(os.path.join(tmp_path, 'ckpt.pt'))
    assert found['iter_num'] == 1 and found['model']['a'].eq(1.0).all() and found['model']['b'].eq(1.0).all()


def test_a_compressed_checkpoint_is_refused_before_it_is_unpacked(tmp_path):
    path = saved(tmp_path, 1, 1.0)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / 'packed.pt', 'w', zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    for verify in (True, False):
        with pytest.raises(checkpoint.Damaged, match='data.pkl is compressed'):
            load.unpack(str(tmp_path / 'packed.pt'), verify)


# -----------------------------------------------------------------------------
# writing


@pytest.mark.parametrize('number', [errno.EINVAL, errno.EBADF])
def test_a_folder_that_cannot_be_flushed_is_no_failed_save(tmp_path, monkeypatch, number):
    real = os.fsync

    def fsync(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(number, os.strerror(number))
        real(fd)
    monkeypatch.setattr(os, 'fsync', fsync)
    for it in range(1, 6):
        saved(tmp_path, it, 1.0)
    assert names(tmp_path) == ['ckpt.pt', 'ckpt_00000004.pt', 'ckpt_00000005.pt']


def test_what_fails_after_a_checkpoint_is_in_place_is_told_once_and_ends_no_run(script, tiny, tmp_path, monkeypatch):
    real = os.remove

    def remove(path):
        if checkpoint.NUMBERED.fullmatch(os.path.basename(path)):
            raise PermissionError(errno.EACCES, 'Permission denied')
        real(path)
    monkeypatch.setattr(os, 'remove', remove)
    result = script('train.py', *tiny, '--save_interval=1')
    assert result.status == 0 and 'done: 6 iterations' in result.out, result.err
    assert result.err.count('not possible to remove an older one (Permission denied)') == 1, result.err
    assert load.unpack(str(tmp_path / 'out' / 'ckpt.pt'))['iter_num'] == 6


def test_without_hard_links_and_with_little_room_older_ones_go_first_and_nothing_half_copied_stays(tmp_path, monkeypatch, capsys):
    def no_links(*args):
        raise PermissionError(errno.EPERM, 'Operation not permitted')
    monkeypatch.setattr(os, 'link', no_links)
    saved(tmp_path, 1, 1.0)
    seen = []

    def no_room(source, to):
        seen.append(names(tmp_path))
        to.write(b'half')
        raise OSError(errno.ENOSPC, 'No space left on device')
    with monkeypatch.context() as patch:
        patch.setattr(shutil, 'copyfileobj', no_room)
        writer = checkpoint.Writer(lambda: pytest.fail('it was saved'), in_thread=False)
        for it in (2, 3):
            writer.start(str(tmp_path), some_state(it), ['ckpt.pt', 'ckpt_best.pt'], 1)
            assert writer.finish() == checkpoint.NOT_BEST
    assert seen[0] == ['ckpt.pt', 'ckpt.pt.tmp', 'ckpt_00000002.pt'] and names(tmp_path) == ['ckpt.pt', 'ckpt_00000003.pt']
    err = capsys.readouterr().err
    assert err.count('the checkpoint is saved, but it was not possible to renew ckpt.pt (No space') == 1, err
    saved(tmp_path, 4, 4.0)  # room again
    assert load.unpack(str(tmp_path / 'ckpt.pt'))['iter_num'] == 4


def test_a_link_in_the_way_of_a_temporary_file_is_not_followed(tmp_path):
    (tmp_path / 'precious').write_text('precious')
    out = tmp_path / 'out'
    out.mkdir()
    for name in ('log.csv.tmp', 'ckpt_00000001.pt.tmp', 'ckpt.pt.tmp'):
        (out / name).symlink_to(tmp_path / 'precious')
    CsvLog(str(out / 'log.csv'), 0)
    saved(out, 1, 1.0)
    assert (tmp_path / 'precious').read_text() == 'precious' and 'ckpt.pt' in names(out)


def test_nanogpts_checkpoint_is_kept_when_its_run_is_continued_in_place(script, tiny, tmp_path):
    out = tmp_path / 'out'
    assert script('train.py', *tiny).status == 0
    state = load.unpack(str(out / 'ckpt.pt'))
    plain = {key: state[key] for key in ('model', 'optimizer', 'model_args', 'iter_num', 'best_val_loss', 'config')}
    shutil.rmtree(out)
    out.mkdir()
    torch.save(plain, out / 'ckpt.pt')
    before = (out / 'ckpt.pt').read_bytes()
    for n in (8, 14):  # twice, so that the older ones are removed
        result = script('train.py', *tiny, '--init_from=resume', f'--max_iters={n}', '--save_interval=1')
        assert result.status == 0, result.err
        assert ('is kept as' in result.out) == (n == 8)
    assert (out / 'ckpt_original_00000006.pt').read_bytes() == before
    assert load.unpack(str(out / 'ckpt.pt'))['iter_num'] == 14


# -----------------------------------------------------------------------------
# log.csv


class FullDisk(io.RawIOBase):
    """A file that takes `room` bytes."""

    def __init__(self, file):
        self.file, self.room = file, 100

    def writable(self):
        return True

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, 'No space left on device')
        taken = self.file.write(data[:self.room])
        self.room -= taken
        return taken


def test_a_disk_that_is_full_for_900_rows_loses_none_of_them(tmp_path, capsys):
    log = CsvLog(str(tmp_path / 'log.csv'), 0)
    full = FullDisk(log.file.detach())
    log.file = io.BufferedWriter(full)
    for it in range(900):
        log.log({'iter': it, 'loss': it / 7})
    assert capsys.readouterr().err.count('log.csv could not be written') == 1
    full.room = 10**9
    log.log({'iter': 900, 'loss': 1.0})
    log.log({'iter': 901, 'loss': 1.0, 'mine': 2.0})
    log.end()
    rows = list(csv.DictReader(open(tmp_path / 'log.csv', newline='')))
    assert [int(row['iter']) for row in rows] == list(range(902)) and rows[-1]['mine'] == '2.0'
    assert all(float(row['loss']) == it / 7 for it, row in enumerate(rows[:900]))
    assert capsys.readouterr().err == ''


def test_a_new_column_on_a_full_disk_waits_as_well(tmp_path, monkeypatch):
    log = CsvLog(str(tmp_path / 'log.csv'), 0)

    def no_room(*args):
        raise OSError(errno.ENOSPC, 'No space left on device')
    with monkeypatch.context() as patch:
        patch.setattr(os, 'replace', no_room)
        log.log({'iter': 0, 'mine': 1.0})
        log.log({'iter': 1, 'mine': 2.0})
    log.log({'iter': 2, 'mine': 3.0})
    rows = list(csv.DictReader(open(tmp_path / 'log.csv', newline='')))
    assert [(row['iter'], row['mine']) for row in rows] == [('0', '1.0'), ('1', '2.0'), ('2', '3.0')]


def test_a_log_whose_header_was_shuffled_is_refused_and_kept(tmp_path, capsys):
    path = tmp_path / 'log.csv'
    header = ['loss', 'iter', *[name for name in COLUMNS if name not in ('loss', 'iter')]]
    path.write_text(','.join(header) + '\n' + '0,2.5' + ',' * (len(header) - 2) + '\n')
    before = path.read_bytes()
    with pytest.raises(SystemExit):
        CsvLog(str(path), 10)
    assert 'is not the log of a run' in capsys.readouterr().err and path.read_bytes() == before


# -----------------------------------------------------------------------------
# garbled files beside the checkpoints


def test_samples_that_somebody_wrote_into_end_no_run_and_stay(tmp_path):
    path = tmp_path / 'samples.md'
    path.write_bytes(b'# Samples\n\n## after 10 iterations\n\ncaf\xe9\n\n## after ,,, iterations\n\n## after '
                     + b'9' * 5000 + b' iterations\n\n## after 30 iterations\n\nlater\n\n')
    samples.append(str(tmp_path), 20, [('', 'a text')])
    found = path.read_bytes()
    assert b'caf\xe9' in found and b'## after 20 iterations' in found and b'later' not in found
    assert b'## after ,,, iterations' in found, 'part of what somebody wrote'


GARBLED = {
    'run.json': [b'{', b'[1]', b'\xff\xfe', b'[' * 100_000, b'{"sessions": 5, "plan": 5, "outcome": 5, "seconds": "x"}',
                 b'{"sessions": [5, null, {"from_iter": "x", "command": 5}], "dataset": {"splits": {"train": 5}}}',
                 b'{"knobs": 5, "max_iters": "x", "iterations": "x", "tokens_per_iter": [], "seconds": 1e999}'],
    'eval.json': [b'{', b'{"texts": 5}', b'{"texts": {"x": 5}, "tasks": [1]}', b'{"iter": "x", "tasks": {"a": {}}}'],
    'log.csv': [b'\xff\xfe', b'', b'x,y\n1,2\n', b'iter,loss\n' + b'9' * 400 + b',1\n5,1e999\n',
                b'iter,tokens,seconds,val_loss\n1,inf,nan,2\n2,1e999,x,3\n', b'iter,loss\0\n1,2\n'],
    'samples.md': [b'\xff\xfe', b'## after 99999999999999999999999 iterations\n'],
}


@pytest.mark.parametrize('name', GARBLED)
def test_garbled_files_of_a_run_are_no_tracebacks(script, tiny, tmp_path, name):
    place = [*tiny[:3], f"--data_dir={tmp_path / 'data'}", f"--out_dir={tmp_path / 'out'}"]
    flags = ['--sample_interval=2', '--sample_tokens=2', '--max_iters=2', '--warmup_iters=0']
    assert script('train.py', *tiny, *flags).status == 0
    shutil.copytree(tmp_path / 'out', tmp_path / 'before')
    for content in GARBLED[name]:
        shutil.rmtree(tmp_path / 'out')
        shutil.copytree(tmp_path / 'before', tmp_path / 'out')
        path = tmp_path / 'out' / name
        path.write_bytes(content)
        if name == 'log.csv':
            result = script('plot.py', tmp_path / 'out', f"--to={tmp_path / 'curves.png'}")
            assert result.status in (0, 2) and 'Traceback' not in result.err, result.err
        result = script('train.py', *place, '--init_from=resume', '--max_iters=3', '--device=cpu')
        refused = name == 'log.csv' and 'move it away' in result.err
        assert (result.status == 0 or refused) and 'Traceback' not in result.err, (content[:60], result.err)
        if name == 'eval.json':
            path.write_bytes(content)
            result = script('eval.py', f"--out_dir={tmp_path / 'out'}", place[3], '--device=cpu', '--eval_tokens=64')
            assert result.status == 0 and 'tiny/val' in json.loads(path.read_text())['texts'], result.err


# -----------------------------------------------------------------------------
# names and values from strangers


def test_a_name_that_is_not_utf8_is_refused_at_once(script, tiny, tmp_path):
    result = script('train.py', *tiny, b'--out_dir=out\xff'.decode('utf-8', 'surrogateescape'))
    assert result.status == 2 and 'not UTF-8 (--out_dir=out\\udcff)' in result.err, result.err
    result = script('plot.py', b'out\xff'.decode('utf-8', 'surrogateescape'))
    assert result.status == 2 and result.err.startswith('error: ') and 'Traceback' not in result.err


def test_commands_to_a_terminal_are_shown_not_obeyed(capsys):
    say('error: no parameter \x1b]0;title\x07 in x')
    assert capsys.readouterr().err == 'error: no parameter \\x1b]0;title\\x07 in x\n'
    from support.parallel import Distributed
    Distributed('cpu').print('  dataset: \x1b[2J -> tiny\nnext line')
    assert capsys.readouterr().out == '  dataset: \\x1b[2J -> tiny\nnext line\n'


def test_a_dataset_of_two_dots_opens_nothing(tmp_path, capsys):
    (tmp_path / 'data').mkdir()
    (tmp_path / 'meta.json').write_text('{')  # it would be told as damaged
    ckpt = {'model_args': {'vocab_size': 50257}, 'config': {'dataset': '..'}}
    assert load.tokenizer_state(ckpt, data_dir=str(tmp_path / 'data')) == {'kind': 'tiktoken', 'name': 'gpt2'}


def test_json_with_a_deep_nest_or_half_a_character_is_read_and_written(tmp_path):
    (tmp_path / 'x.json').write_text('[' * 100_000)
    assert files.read_json(str(tmp_path / 'x.json')) == {}
    files.write_json(str(tmp_path / 'y.json'), {'out_dir': 'out\udcff'})
    assert files.read_json(str(tmp_path / 'y.json')) == {'out_dir': 'out\udcff'}
