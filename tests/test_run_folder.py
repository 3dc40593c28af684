"""What a run's folder holds while and after things go wrong: nothing lost, nothing half-written, nothing
garbled believed."""

import csv
import errno
import os
import resource
import shutil
import stat
from types import SimpleNamespace

import pytest
import torch

from configurator import say
from support import checkpoint, files, load, samples
from support.log import CsvLog
from support.parallel import Distributed


def some_state(it, fill=1.0):
    return {'iter_num': it, 'model': {name: torch.full((1000,), fill) for name in 'ab'}}


def saved(folder, it):
    checkpoint.write_checkpoint(str(folder), some_state(it), ['ckpt.pt'], 2)
    return f'{folder}/ckpt.pt'


def names(folder):
    return sorted(os.listdir(folder))


def no_room(*args):
    raise OSError(errno.ENOSPC, 'No space left on device')


# -----------------------------------------------------------------------------
# checkpoints


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_one_file(tmp_path, monkeypatch):
    path, real = saved(tmp_path, 1), torch.UntypedStorage.from_file

    def replaced_meanwhile(*args):  # torch has read the table of contents, and maps the numbers now
        state = {**some_state(2, 2.0), 'longer': torch.zeros(300)}
        checkpoint.write_checkpoint(str(tmp_path), dict(reversed(state.items())), ['ckpt.pt'], 2)
        return real(*args)
    monkeypatch.setattr(torch.UntypedStorage, 'from_file', replaced_meanwhile)
    found = load.unpack(path)
    assert found['iter_num'] == 1 and all(found['model'][name].eq(1.0).all() for name in 'ab')


def test_a_folder_that_cannot_be_flushed_is_no_failed_save(tmp_path, monkeypatch):
    real = os.fsync

    def fsync(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, 'Invalid argument')
        real(fd)
    monkeypatch.setattr(os, 'fsync', fsync)
    for it in range(1, 6):
        saved(tmp_path, it)
    assert names(tmp_path) == ['ckpt.pt', 'ckpt_00000004.pt', 'ckpt_00000005.pt']


def test_without_hard_links_and_with_little_room_older_ones_go_first(tmp_path, monkeypatch, capsys):
    def no_links(*args):
        raise PermissionError(errno.EPERM, 'Operation not permitted')
    monkeypatch.setattr(os, 'link', no_links)
    saved(tmp_path, 1)
    seen = []

    def half_copied(source, to):
        seen.append(names(tmp_path))
        to.write(b'half')
        no_room()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, 'copyfileobj', half_copied)
        saver = SimpleNamespace(out_dir=str(tmp_path), is_async=False)
        for it in (2, 3):
            assert checkpoint.Saver.try_to_write(saver, some_state(it), ['ckpt.pt', 'ckpt_best.pt'], 1)
    assert seen[0] == ['ckpt.pt', 'ckpt.pt.tmp', 'ckpt_00000002.pt']
    assert names(tmp_path) == ['ckpt.pt', 'ckpt_00000003.pt']
    assert 'ckpt.pt or ckpt_best.pt is still an older one (No space' in capsys.readouterr().err
    assert load.unpack(saved(tmp_path, 4))['iter_num'] == 4  # room again


def test_a_link_in_the_way_of_a_temporary_file_is_not_followed(tmp_path):
    precious, out = tmp_path / 'precious', tmp_path / 'out'
    precious.write_text('precious')
    out.mkdir()
    for name in ('log.csv.tmp', 'ckpt_00000001.pt.tmp', 'ckpt.pt.tmp'):
        (out / name).symlink_to(precious)
    CsvLog(f'{out}/log.csv', 0, True)
    saved(out, 1)
    assert precious.read_text() == 'precious' and names(out) == ['ckpt.pt', 'ckpt_00000001.pt', 'log.csv']


# -----------------------------------------------------------------------------
# log.csv


def test_a_full_disk_loses_no_row_of_the_log(tmp_path, monkeypatch, capsys):
    path = tmp_path / 'log.csv'
    log = CsvLog(f'{path}', 0, True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, limits[1]))  # within a row
    try:
        for it in range(900):
            log.log({'iter': it, 'loss': it / 7})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().err.count('log.csv could not be written') == 1
    with monkeypatch.context() as patch:  # a new column writes a new file
        patch.setattr(os, 'replace', no_room)
        log.log({'iter': 900, 'mine': 1.0})
    log.log({'iter': 901, 'loss': 1.0, 'mine': 2.0})
    log.end()
    rows = list(csv.DictReader(path.open(newline='')))
    assert [int(row['iter']) for row in rows] == list(range(902))
    assert [row['mine'] for row in rows[899:]] == ['', '1.0', '2.0']
    assert all(float(row['loss']) == it / 7 for it, row in enumerate(rows[:900]))
    assert capsys.readouterr().err == ''


# -----------------------------------------------------------------------------
# garbled files beside the checkpoints


def test_samples_that_somebody_wrote_into_stay(tmp_path):
    path = tmp_path / 'samples.md'
    mine = (b'## after 10 iterations\n\ncaf\xe9\n\n## after ,,, iterations\n\n'
            b'## after 999999999999999999999999999999 iterations\n\n')
    path.write_bytes(b'# Samples\n\n' + mine + b'## after 30 iterations\n\nlater\n\n')
    samples.append(str(tmp_path), 20, [('', 'a text')])
    assert path.read_bytes() == b'# Samples\n\n' + mine + b'## after 20 iterations\n\n```text\na text\n```\n\n'


# -----------------------------------------------------------------------------
# names and values from strangers


def test_commands_to_a_terminal_are_shown_not_obeyed(capsys):
    say('error: no parameter \x1b]0;title\x07 in x')
    assert capsys.readouterr().err == 'error: no parameter \\x1b]0;title\\x07 in x\n'
    Distributed('cpu').print('  dataset: \x1b[2J -> tiny\nnext line')
    assert capsys.readouterr().out == '  dataset: \\x1b[2J -> tiny\nnext line\n'


def test_a_dataset_of_two_dots_opens_nothing(tmp_path, capsys):
    (tmp_path / 'data' / 'bare').mkdir(parents=True)
    (tmp_path / 'meta.json').write_text('{')  # it would be told as damaged
    (tmp_path / 'data' / 'bare' / 'prepare.py').touch()  # as nanoGPT's folders have, where nothing was prepared
    for name, words in ('..', "dataset is a folder's name ('..')"), ('bare', 'there is no dataset bare. make it'):
        ckpt = {'model_args': {'vocab_size': 65}, 'config': {'dataset': name}}
        with pytest.raises(SystemExit):
            load.tokenizer_state(ckpt, None, f'{tmp_path}/data')
        assert words in capsys.readouterr().err


def test_half_a_character_is_written_and_read_as_json(tmp_path):
    path = f'{tmp_path}/y.json'
    files.write_json(path, {'out_dir': 'out\udcff'})
    assert files.read_json(path) == {'out_dir': 'out\udcff'}
