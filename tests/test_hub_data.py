"""Data sets come from the Hub file by file: the right ones, complete, checked, never by running a script."""

import hashlib
import json
import os
import random
import shutil
from types import SimpleNamespace

import pytest
from conftest import TEXT, is_refused
from test_read_text import documents_in

from dataset import Dataset
from support import hub_datasets

huggingface_hub = pytest.importorskip('huggingface_hub')
pyarrow = pytest.importorskip('pyarrow')
import pyarrow.parquet
from huggingface_hub import constants, errors

CONVERTED = 'refs/convert/parquet'


class Hub:
    """Answers as the package huggingface_hub does: OWNER/NAME/main and /convert in `folder` hold the files. A
    download takes the next of `faults`: 'cut' breaks off, 'wrong' brings other bytes, None is none."""

    def __init__(self, folder):
        self.folder, self.downloads, self.faults = folder, [], []
        self.errors, self.constants, self.HfApi = errors, constants, lambda: self

    def place(self, repo, revision):
        return self.folder / repo / ('convert' if revision in (CONVERTED, 'd' * 40) else 'main')

    def dataset_info(self, repo, revision, files_metadata):
        place, card = self.place(repo, revision), self.place(repo, revision) / 'card.json'
        if not place.is_dir():
            kind = errors.RevisionNotFoundError if revision else errors.RepositoryNotFoundError
            raise kind.__new__(kind)
        files = []
        for file in place.rglob('*'):
            if file.is_file():
                content = file.read_bytes()
                lfs = SimpleNamespace(sha256=hashlib.sha256(content).hexdigest())
                files.append(SimpleNamespace(
                    rfilename=str(file.relative_to(place)), size=len(content), blob_id='c' * 40,
                    lfs=lfs if file.suffix == '.parquet' else None))
        return SimpleNamespace(sha='d' * 40 if revision == CONVERTED else 'c' * 40, siblings=files,
                                     card_data=json.loads(card.read_text()) if card.exists() else None)

    def hf_hub_download(self, repo, path, repo_type, revision, cache_dir):
        self.downloads.append(path)
        target = os.path.join(cache_dir, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if not os.path.exists(target):
            fault = self.faults.pop(0) if self.faults else None
            if fault == 'cut':
                raise ConnectionError('the line broke')
            shutil.copy(self.place(repo, revision) / path, target)
            if fault == 'wrong':
                open(target, 'ab').write(b'more')
        return target


@pytest.fixture
def hub(tmp_path, monkeypatch):
    fake = Hub(tmp_path / 'hub')
    monkeypatch.setattr(hub_datasets, 'hub', lambda: fake)
    return fake


def texts(seed, n=60):
    rng = random.Random(seed)
    starts = [rng.randrange(50_000) for _ in range(n)]
    return [f'{seed} {i}: ' + TEXT[start:start + rng.randrange(3000)] for i, start in enumerate(starts)]


def table(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({'text': rows}), path)


def test_a_named_set_is_read_in_order_and_nothing_of_it_stays(hub, prepare, tmp_path):
    repo = hub.folder / 'roneneldan' / 'TinyStories' / 'main'
    for i in range(4):
        table(repo / 'data' / f'train-0000{i}-of-00004-abc.parquet', texts(i))
    table(repo / 'data' / 'validation-00000-of-00001-abc.parquet', ['never'])
    (repo / 'TinyStories.py').write_text('raise SystemExit("this ran")')
    result = prepare('tinystories', '--shard_tokens=100000')
    assert result.status == 0 and '4 files' in result.out, result.err
    left = {path.name for path in (tmp_path / 'data' / 'tinystories').iterdir() if path.suffix != '.bin'}
    assert left == {'.lock', 'meta.json'} and all(path.endswith('.parquet') for path in hub.downloads)
    # the same files on this machine give the same bytes
    args = f'--input={repo}/data/train*.parquet', '--val_fraction=0.0005', '--shard_tokens=100000'
    assert prepare('here', *args).status == 0
    here, there = (Dataset(name, tmp_path / 'data').meta['splits'] for name in ('here', 'tinystories'))
    assert here == there


def test_configurations_and_splits_are_found(hub, prepare, tmp_path):
    repo = hub.folder / 'HuggingFaceFW' / 'fineweb-edu' / 'main'
    table(repo / 'data' / 'CC-MAIN-2024-10' / '000_00000.parquet', texts(1))
    table(repo / 'sample' / '10BT' / '000_00000.parquet', texts(2))
    table(repo / 'sample' / '10BT' / '001_00000.parquet', texts(3))
    configs = [{'config_name': 'default', 'data_files': [{'split': 'train', 'path': 'data/*/*'}]},
               {'config_name': 'sample-10BT', 'data_files': [{'split': 'train', 'path': 'sample/10BT/*'}]}]
    (repo / 'card.json').write_text(json.dumps({'configs': configs}))
    plain = hub.folder / 'some' / 'one' / 'main'  # no card: folders and names tell
    table(plain / 'small' / 'train-0.parquet', texts(4))
    table(plain / 'small' / 'test-0.parquet', texts(5))
    table(plain / 'default' / 'train-0.parquet', texts(6))
    lines = hub.folder / 'some' / 'lines' / 'main'
    lines.mkdir(parents=True)
    (lines / 'train.jsonl').write_text(''.join(json.dumps({'text': text}) + '\n' for text in texts(7)))
    (lines / 'README.md').write_text('not a document')
    made_by_script = hub.folder / 'Skylion007' / 'openwebtext'  # the Hub's own conversion is read
    (made_by_script / 'main').mkdir(parents=True)
    (made_by_script / 'main' / 'openwebtext.py').write_text('raise SystemExit("this ran")')
    table(made_by_script / 'convert' / 'plain_text' / 'train' / '0000.parquet', texts(8))
    for name, source, want in (
            ('fineweb_edu', None, texts(2) + texts(3)), ('openwebtext', None, texts(8)),
            ('all', 'hf:HuggingFaceFW/fineweb-edu', texts(1)), ('small', 'hf:some/one:small', texts(4)),
            ('test', 'hf:some/one:small:test', texts(5)), ('default', 'hf:some/one', texts(6)),
            ('lines', 'hf:some/lines', texts(7))):
        result = prepare(name, *([f'--input={source}'] if source else []))
        assert result.status == 0, (name, result.err)
        assert sorted(documents_in(tmp_path, name)) == sorted(want), name


def test_a_run_that_failed_downloads_only_the_rest(hub, prepare, tmp_path, monkeypatch):
    monkeypatch.setattr('support.write_dataset.SAVE_EVERY', 0)
    repo = hub.folder / 'some' / 'one' / 'main'
    for i in range(4):
        table(repo / f'train-{i}.parquet', [text * 15 for text in texts(i)])
    table(repo / 'train-9.parquet', [1, 2, 3])  # not text: an error at the end
    is_refused(prepare('mine', '--input=hf:some/one'), 'train-9')
    table(repo / 'train-9.parquet', ['now', 'it', 'is'])
    shutil.rmtree(tmp_path / 'data' / 'mine' / 'unfinished' / 'download')
    hub.downloads.clear()
    for fault, word in (('cut', 'the line broke'), ('wrong', 'wrong checksum')):
        hub.faults.append(fault)
        is_refused(prepare('mine', '--input=hf:some/one'), word, 'run it again')
    result = prepare('mine', '--input=hf:some/one')
    assert result.status == 0 and 'continuing' in result.out, result.err
    assert 'train-0.parquet' not in hub.downloads, 'its ids are there already'
    assert len(documents_in(tmp_path, 'mine')) == 4 * 60 + 3


def test_what_the_hub_refuses_is_one_line(hub, prepare, tmp_path, monkeypatch):
    (hub.folder / 'some' / 'pictures' / 'main').mkdir(parents=True)
    cases = {'hf:no/such': ['no/such', 'RepositoryNotFoundError', 'hf auth login'],
             'hf:some/pictures': ['no parquet'], 'hf:some/one': ['127.0.0.1:9', 'go online']}
    for source, words in cases.items():
        if source == 'hf:some/one':  # the real package, without a network
            monkeypatch.undo()
            monkeypatch.setattr(constants, 'ENDPOINT', 'http://127.0.0.1:9')
        is_refused(prepare('mine', f'--input={source}'), *words)
        assert not os.path.exists(f'{tmp_path}/data/mine')
