"""
Data sets come from the Hub, or a server that speaks like it, file by file: complete, checked, and never by
running a script.
"""

import hashlib
import json
import os
import random
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from conftest import TEXT, own_process
from test_read_text import documents_in

from dataset import Dataset
from support import hub_datasets
from support.hub_datasets import File

pytest.importorskip('huggingface_hub')
pyarrow = pytest.importorskip('pyarrow')
import pyarrow.parquet

COMMIT, CONVERTED = 'c' * 40, 'd' * 40


class Hub(ThreadingHTTPServer):
    """`folder` holds OWNER/NAME/main and /convert with files. Requests for files take the next of `faults`:
    'cut' breaks off in the middle, 'wrong' sends other bytes, 503 answers so, None is none."""

    daemon_threads = True

    def __init__(self, folder):
        super().__init__(('127.0.0.1', 0), Handler)
        self.folder, self.requests, self.faults = folder, [], []
        self.endpoint = f'http://127.0.0.1:{self.server_port}'

    def place(self, repo, revision):
        converted = revision in ('refs/convert/parquet', CONVERTED)
        return self.folder / repo / ('convert' if converted else 'main')

    def commit_of(self, path):
        return CONVERTED if 'convert' in path.relative_to(self.folder).parts else COMMIT


class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def do_GET(self):
        path = urllib.parse.unquote(self.path.partition('?')[0])
        self.server.requests.append((self.command, path, self.headers.get('Range')))
        repo = r'datasets/([^/]+/[^/]+)'
        if match := re.fullmatch(rf'/api/{repo}(?:/revision/(.+))?', path):
            self.answer_info(match[1], match[2] or 'main')
        elif match := re.fullmatch(rf'/api/{repo}/paths-info/(.+)', path):
            self.answer_sizes(self.server.place(match[1], match[2]))
        elif match := re.fullmatch(rf'/{repo}/resolve/({COMMIT}|{CONVERTED}|main)/(.+)', path):
            self.answer_file(self.server.place(match[1], match[2]) / match[3])
        else:
            self.answer(404, b'{}', X_Error_Code='EntryNotFound')

    do_HEAD = do_POST = do_GET

    def answer_info(self, repo, revision):
        place = self.server.place(repo, revision)
        if not (self.server.folder / repo).is_dir():
            error = b'{"error": "Invalid username or password."}'
            return self.answer(401, error, X_Error_Code='RepoNotFound')
        if not place.is_dir():
            return self.answer(404, b'{}', X_Error_Code='RevisionNotFound')
        card = place / 'card.json'
        names = [str(file.relative_to(place)) for file in sorted(place.rglob('*')) if file.is_file()]
        info = {'id': repo, 'sha': self.server.commit_of(place), 'tags': [],
                'cardData': json.loads(card.read_text()) if card.exists() else None,
                'siblings': [{'rfilename': name} for name in names if name != 'card.json']}
        self.answer(200, json.dumps(info).encode())

    def answer_sizes(self, place):
        form = self.rfile.read(int(self.headers['Content-Length'])).decode()
        entries = []
        for name in urllib.parse.parse_qs(form)['paths']:
            content = (place / name).read_bytes()
            size = len(content)
            entry = {'type': 'file', 'path': name, 'size': size}
            if name.endswith('.parquet'):
                sha256 = hashlib.sha256(content).hexdigest()
                entry.update(oid='x', lfs={'oid': sha256, 'size': size, 'pointerSize': 9})
            else:
                entry.update(oid=hashlib.sha1(b'blob %d\0' % size + content).hexdigest())
            entries.append(entry)
        self.answer(200, json.dumps(entries).encode())

    def answer_file(self, file):
        if not file.is_file():
            return self.answer(404, X_Error_Code='EntryNotFound')
        content = file.read_bytes()
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        headers = dict(ETag=etag, X_Linked_Etag=etag, X_Linked_Size=str(len(content)), Accept_Ranges='bytes',
                       X_Repo_Commit=self.server.commit_of(file))
        if self.command == 'HEAD':
            return self.answer(200, content, **headers)
        fault = self.server.faults.pop(0) if self.server.faults else None
        if fault == 503:
            return self.answer(503, b'busy')
        begin = int((self.headers.get('Range') or 'bytes=0-')[6:-1])
        if begin:
            headers['Content_Range'] = f'bytes {begin}-{len(content) - 1}/{len(content)}'
        body = content[begin:]
        if fault == 'wrong':
            body = bytes(255 - b for b in body)
        self.answer(206 if begin else 200, body, cut=fault == 'cut', **headers)

    def answer(self, status, content=b'', cut=False, **headers):
        self.send_response(status)
        for name, value in {'Content-Length': str(len(content)), 'X-Request-Id': '1', **headers}.items():
            self.send_header(name.replace('_', '-'), value)
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(content[:len(content) // 2] if cut else content)
        if cut:
            self.wfile.flush()
            self.connection.shutdown(2)
            self.close_connection = True

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub on this machine, which huggingface_hub in this process asks."""
    server = Hub(tmp_path / 'hub')
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    use_endpoint(monkeypatch, server.endpoint)
    monkeypatch.setattr(hub_datasets, 'WAITS', (0, 0, 0))
    yield server
    server.shutdown()


def use_endpoint(monkeypatch, endpoint, offline=False):
    from huggingface_hub import constants
    monkeypatch.setattr(constants, 'ENDPOINT', endpoint)
    template = endpoint + '/{repo_id}/resolve/{revision}/{filename}'
    monkeypatch.setattr(constants, 'HUGGINGFACE_CO_URL_TEMPLATE', template)
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', offline)


def texts(seed, n=60):
    rng = random.Random(seed)
    starts = [rng.randrange(50_000) for _ in range(n)]
    return [f'{seed} {i}: ' + TEXT[start:start + rng.randrange(3000)] for i, start in enumerate(starts)]


def table(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({'text': rows}), path)


def prepare(script, tmp_path, name, *args):
    return script('prepare.py', name, '--tokenizer=byte', f"--data_dir={tmp_path / 'data'}", *args)


def test_a_named_set_is_read_in_order_and_nothing_of_it_stays(hub, script, tmp_path):
    """tinystories, with a script and test files that are left alone; in a process of its own."""
    repo = hub.folder / 'roneneldan' / 'TinyStories' / 'main'
    for i in range(4):
        table(repo / 'data' / f'train-0000{i}-of-00004-abc.parquet', texts(i))
    table(repo / 'data' / 'validation-00000-of-00001-abc.parquet', ['never'])
    (repo / 'TinyStories.py').write_text('raise SystemExit("this ran")')
    env = {'HF_ENDPOINT': hub.endpoint, 'HF_HOME': str(tmp_path / 'cache'), 'HF_HUB_OFFLINE': '0'}
    args = '--tokenizer=byte', '--shard_tokens=100000'
    result = own_process('prepare.py', 'tinystories', *args, f"--data_dir={tmp_path / 'data'}", env=env)
    assert result.status == 0 and '4 files' in result.out, result.err
    assert sorted(documents_in(tmp_path, 'tinystories')) == sorted(sum(map(texts, range(4)), []))
    left = {path.name for path in (tmp_path / 'data' / 'tinystories').iterdir() if path.suffix != '.bin'}
    assert left == {'.lock', 'meta.json'}
    assert not any('.py' in path for _, path, _ in hub.requests)
    # the same files on this machine give the same bytes
    args = f'--input={repo}/data/train*.parquet', '--val_fraction=0.0005', '--shard_tokens=100000'
    assert prepare(script, tmp_path, 'here', *args).status == 0
    here, there = (Dataset(name, tmp_path / 'data').meta['splits'] for name in ('here', 'tinystories'))
    assert here == there


def test_configurations_and_splits_are_found(hub, script, tmp_path):
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
    cases = [('fineweb_edu', None, texts(2) + texts(3)), ('openwebtext', None, texts(8)),
             ('all', 'hf:HuggingFaceFW/fineweb-edu', texts(1)), ('small', 'hf:some/one:small', texts(4)),
             ('test', 'hf:some/one:small:test', texts(5)), ('default', 'hf:some/one', texts(6)),
             ('lines', 'hf:some/lines', texts(7))]
    for name, source, want in cases:
        result = prepare(script, tmp_path, name, *([f'--input={source}'] if source else []))
        assert result.status == 0, (name, result.err)
        assert sorted(documents_in(tmp_path, name)) == sorted(want), name


def test_broken_downloads_are_continued_checked_and_tried_again(hub, script, tmp_path):
    repo = hub.folder / 'some' / 'one' / 'main'
    for i in range(3):
        table(repo / f'train-{i}.parquet', texts(i, 300))
    hub.faults += ['cut', None, 'wrong', None, 503]
    result = prepare(script, tmp_path, 'mine', '--input=hf:some/one')
    assert result.status == 0, result.err
    assert sorted(documents_in(tmp_path, 'mine')) == sorted(sum((texts(i, 300) for i in range(3)), []))
    assert 'wrong checksum' in result.out and '503' in result.out


def test_a_download_continues_where_it_broke_off(hub, tmp_path, monkeypatch):
    import huggingface_hub.constants
    monkeypatch.setattr(huggingface_hub.constants, 'DOWNLOAD_CHUNK_SIZE', 1000)  # what is written at a time
    file = hub.folder / 'some' / 'one' / 'main' / 'train-0.parquet'
    table(file, texts(0, 300))
    content = file.read_bytes()
    wanted = File('train-0.parquet', len(content), hashlib.sha256(content).hexdigest(), 'some/one', COMMIT)
    place = tmp_path / 'download'
    hub.faults += ['cut', 'cut']
    path = hub_datasets.download(wanted, str(place))
    assert open(path, 'rb').read() == content
    begins = [int(begin[6:-1]) for method, _, begin in hub.requests if method == 'GET' and begin]
    assert len(begins) == 2 and 1000 <= begins[0] < begins[1], 'it continued after both cuts'
    # what was damaged on the disk is downloaded again
    open(path, 'wb').write(content[:5000])
    assert hub_datasets.download(wanted, str(place)) == path and open(path, 'rb').read() == content
    # what stays wrong is an error that leaves nothing
    hub.faults += ['wrong'] * 4
    os.remove(os.path.realpath(path))
    with pytest.raises(SystemExit):
        hub_datasets.download(wanted, str(place))
    assert not [path for path in place.rglob('*.parquet') if path.exists()]


def test_a_run_that_failed_downloads_only_the_rest(hub, script, tmp_path, monkeypatch):
    monkeypatch.setattr('support.write_dataset.SAVE_EVERY', 0)
    repo = hub.folder / 'some' / 'one' / 'main'
    for i in range(4):
        table(repo / f'train-{i}.parquet', [text * 15 for text in texts(i, 60)])
    table(repo / 'train-9.parquet', [1, 2, 3])  # not text: an error at the end
    args = ['--input=hf:some/one']
    result = prepare(script, tmp_path, 'mine', *args)
    assert result.status == 2 and 'train-9' in result.err and 'int' in result.err, result.err
    table(repo / 'train-9.parquet', ['now', 'it', 'is'])
    hub.requests.clear()
    result = prepare(script, tmp_path, 'mine', *args)
    assert result.status == 0 and 'continuing' in result.out, result.err
    downloaded = [path for method, path, _ in hub.requests if method == 'GET']
    assert not any('train-0' in path for path in downloaded), 'its ids are there already'
    assert len(documents_in(tmp_path, 'mine')) == 4 * 60 + 3


def test_what_the_hub_refuses_is_one_line(hub, script, tmp_path, monkeypatch):
    (hub.folder / 'some' / 'pictures' / 'main').mkdir(parents=True)
    (hub.folder / 'some' / 'pictures' / 'main' / 'a.png').write_bytes(b'x')
    nowhere = 'http://127.0.0.1:9'
    cases = [('hf:no/such', hub.endpoint, False, ['no such data set', 'no/such', 'hf auth login']),
             ('hf:some/pictures', hub.endpoint, False, ['no parquet']),
             ('hf:some/one/two', hub.endpoint, False, ['hf:some/one/two']),
             ('hf:some/one', nowhere, False, ['127.0.0.1:9', 'go online']),
             ('hf:some/one', hub.endpoint, True, ['go online'])]
    for source, endpoint, offline, words in cases:
        use_endpoint(monkeypatch, endpoint, offline)
        result = prepare(script, tmp_path, 'mine', f'--input={source}')
        assert result.status == 2 and result.err.count('\n') == 1, result.err
        assert all(word in result.err for word in words), result.err
        assert not (tmp_path / 'data' / 'mine').exists()
