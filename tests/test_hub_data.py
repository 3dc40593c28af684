"""Data sets come from the Hub, or whoever speaks like it, file by file: complete, checked, and never by running a script."""

import hashlib
import json
import random
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from conftest import TEXT, own_process

import corpus
from dataset import Dataset

pytest.importorskip('huggingface_hub')
pyarrow = pytest.importorskip('pyarrow')
import pyarrow.parquet

COMMIT = 'c' * 40


@pytest.fixture
def hub(tmp_path):
    """A server on this machine that answers as the Hub does. hub.folder holds OWNER/NAME/REVISION/files; hub.faults are taken one by
    one by the files that are asked for: 'cut' breaks off in the middle, 'wrong' sends other bytes, 503 answers so."""
    folder = tmp_path / 'hub'

    class Handler(BaseHTTPRequestHandler):
        protocol_version = 'HTTP/1.1'

        def answer(self, status, content=b'', **headers):
            self.send_response(status)
            for name, value in {'Content-Length': str(len(content)), 'X-Request-Id': '1', **{name.replace('_', '-'): value for name, value in headers.items()}}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != 'HEAD':
                self.wfile.write(content)

        def do_GET(self):
            path = urllib.parse.unquote(self.path.partition('?')[0])
            requests.append((self.command, path, self.headers.get('Range')))
            if match := re.fullmatch(r'/api/datasets/([^/]+/[^/]+)(?:/revision/(.+))?', path):
                place = folder / match[1] / revision_of(match[2] or 'main')
                if not (folder / match[1]).is_dir():
                    return self.answer(401, b'{"error": "Invalid username or password."}', X_Error_Code='RepoNotFound')
                if not place.is_dir():
                    return self.answer(404, b'{}', X_Error_Code='RevisionNotFound')
                card = json.loads((place / 'card.json').read_text()) if (place / 'card.json').exists() else None
                names = [str(file.relative_to(place)) for file in sorted(place.rglob('*')) if file.is_file() and file.name != 'card.json']
                return self.answer(200, json.dumps({'id': match[1], 'sha': sha_of(place), 'cardData': card, 'siblings': [{'rfilename': name} for name in names], 'tags': []}).encode())
            if match := re.fullmatch(r'/api/datasets/([^/]+/[^/]+)/paths-info/(.+)', path):
                place = folder / match[1] / revision_of(match[2])
                wanted = urllib.parse.parse_qs(self.rfile.read(int(self.headers['Content-Length'])).decode())['paths'] if self.command == 'POST' else []
                return self.answer(200, json.dumps([entry(place, name) for name in wanted]).encode())
            if match := re.fullmatch(r'/datasets/([^/]+/[^/]+)/resolve/(.+?)/((?:data|sample|plain_text|small|default|train|test|sub|[^/]+\.parquet|[^/]+\.jsonl).*)', path):
                file = folder / match[1] / revision_of(match[2]) / match[3]
                if not file.is_file():
                    return self.answer(404, X_Error_Code='EntryNotFound')
                content, digest = file.read_bytes(), hashlib.sha256(file.read_bytes()).hexdigest()
                headers = dict(ETag=f'"{digest}"', X_Repo_Commit=sha_of(file), X_Linked_Size=str(len(content)), X_Linked_Etag=f'"{digest}"', Accept_Ranges='bytes')
                if self.command == 'HEAD':
                    return self.answer(200, content, **headers)
                fault = faults.pop(0) if faults else None
                if fault == 503:
                    return self.answer(503, b'busy')
                begin = int(re.match(r'bytes=(\d+)-', self.headers['Range'])[1]) if self.headers.get('Range') else 0
                if begin:
                    headers['Content_Range'] = f'bytes {begin}-{len(content) - 1}/{len(content)}'
                body = content[begin:] if fault != 'wrong' else bytes(255 - b for b in content[begin:])
                if fault == 'cut':
                    self.send_response(206 if begin else 200)
                    for name, value in {'Content-Length': str(len(body)), **{name.replace('_', '-'): value for name, value in headers.items()}}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(body[:len(body) // 2])
                    self.wfile.flush()
                    self.connection.shutdown(2)
                    self.close_connection = True
                    return
                return self.answer(206 if begin else 200, body, **headers)
            self.answer(404, b'{}', X_Error_Code='EntryNotFound')

        do_HEAD = do_POST = do_GET

        def log_message(self, *args):
            pass

    def revision_of(name):
        return 'convert' if name in ('refs/convert/parquet', 'd' * 40) else 'main'

    def sha_of(path):
        return 'd' * 40 if 'convert' in str(path.relative_to(folder)) else COMMIT

    def entry(place, name):
        content = (place / name).read_bytes()
        if name.endswith('.parquet'):
            return {'type': 'file', 'path': name, 'size': len(content), 'oid': 'x', 'lfs': {'oid': hashlib.sha256(content).hexdigest(), 'size': len(content), 'pointerSize': 9}}
        return {'type': 'file', 'path': name, 'size': len(content), 'oid': hashlib.sha1(b'blob %d\0' % len(content) + content).hexdigest()}

    requests, faults = [], []
    server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.folder, server.requests, server.faults = folder, requests, faults
    server.env = {'HF_ENDPOINT': f'http://127.0.0.1:{server.server_port}', 'HF_HOME': str(tmp_path / 'cache'), 'HF_HUB_OFFLINE': '0', 'HF_HUB_DISABLE_XET': '1'}
    yield server
    server.shutdown()


def texts(seed, n=60):
    rng = random.Random(seed)
    return [f'{seed} {i}: ' + TEXT[(a := rng.randrange(50_000)):a + rng.randrange(3000)] for i in range(n)]


def table(path, rows, column='text'):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({column: rows}), path)


def prepare(hub, tmp_path, name, *args):
    return own_process('prepare.py', name, '--tokenizer=byte', f"--data_dir={tmp_path / 'data'}", *args, env=hub.env)


def text_in(tmp_path, name):
    data = Dataset(name, tmp_path / 'data')
    ids = [tokens.windows([0], tokens.n)[0].tolist() for tokens in (data.train, data.val) if tokens]
    return data.tokenizer().decode(sum(ids, [])).split('<|endoftext|>')[1:]


def test_a_named_set_is_read_in_order_and_nothing_of_it_stays(hub, tmp_path):
    """tinystories, with a script and test files that are left alone."""
    repo = hub.folder / 'roneneldan' / 'TinyStories' / 'main'
    for i in range(4):
        table(repo / 'data' / f'train-0000{i}-of-00004-abc.parquet', texts(i))
    table(repo / 'data' / 'validation-00000-of-00001-abc.parquet', ['never'])
    (repo / 'TinyStories.py').write_text('raise SystemExit("this ran")')
    result = prepare(hub, tmp_path, 'tinystories', '--shard_tokens=100000')
    assert result.status == 0 and '4 files' in result.out, result.err
    assert sorted(text_in(tmp_path, 'tinystories')) == sorted(sum(map(texts, range(4)), []))
    assert {path.name for path in (tmp_path / 'data' / 'tinystories').iterdir() if not path.name.endswith('.bin')} == {'.lock', 'meta.json'}
    assert not any('.py' in path for _, path, _ in hub.requests)
    # the same files here give the same bytes
    here = own_process('prepare.py', 'here', f"--input={repo}/data/train*.parquet", '--tokenizer=byte', '--val_fraction=0.0005', '--shard_tokens=100000', f"--data_dir={tmp_path / 'data'}")
    assert here.status == 0
    assert Dataset('here', tmp_path / 'data').meta['splits'] == Dataset('tinystories', tmp_path / 'data').meta['splits']


def test_configurations_and_splits_are_found(hub, tmp_path):
    repo = hub.folder / 'HuggingFaceFW' / 'fineweb-edu' / 'main'
    table(repo / 'data' / 'CC-MAIN-2024-10' / '000_00000.parquet', texts(1))
    table(repo / 'sample' / '10BT' / '000_00000.parquet', texts(2)), table(repo / 'sample' / '10BT' / '001_00000.parquet', texts(3))
    (repo / 'card.json').write_text(json.dumps({'configs': [{'config_name': 'default', 'data_files': [{'split': 'train', 'path': 'data/*/*'}]},
                                                            {'config_name': 'sample-10BT', 'data_files': [{'split': 'train', 'path': 'sample/10BT/*'}]}]}))
    plain = hub.folder / 'some' / 'one' / 'main'  # no card: folders and names tell
    table(plain / 'small' / 'train-0.parquet', texts(4)), table(plain / 'small' / 'test-0.parquet', texts(5)), table(plain / 'default' / 'train-0.parquet', texts(6))
    lines = hub.folder / 'some' / 'lines' / 'main'
    lines.mkdir(parents=True)
    (lines / 'train.jsonl').write_text(''.join(json.dumps({'text': text}) + '\n' for text in texts(7)))
    (lines / 'README.md').write_text('not a document')
    script = hub.folder / 'Skylion007' / 'openwebtext'  # made by a script: the Hub's own conversion is taken
    (script / 'main').mkdir(parents=True)
    (script / 'main' / 'openwebtext.py').write_text('raise SystemExit("this ran")')
    table(script / 'convert' / 'plain_text' / 'train' / '0000.parquet', texts(8))
    for name, args, want in [('fineweb_edu', [], texts(2) + texts(3)), ('all', ['--input=hf:HuggingFaceFW/fineweb-edu'], texts(1)),
                             ('small', ['--input=hf:some/one:small'], texts(4)), ('test', ['--input=hf:some/one:small:test'], texts(5)),
                             ('default', ['--input=hf:some/one'], texts(6)), ('lines', ['--input=hf:some/lines'], texts(7)), ('openwebtext', [], texts(8))]:
        result = prepare(hub, tmp_path, name, *args)
        assert result.status == 0, (name, result.err)
        assert ''.join(sorted(text_in(tmp_path, name))) == ''.join(sorted(want)), name


def test_broken_downloads_are_resumed_checked_and_tried_again(hub, tmp_path):
    repo = hub.folder / 'some' / 'one' / 'main'
    for i in range(3):
        table(repo / f'train-{i}.parquet', texts(i, 300))
    hub.faults += ['cut', None, 'wrong', None, 503]
    result = prepare(hub, tmp_path, 'mine', '--input=hf:some/one')
    assert result.status == 0, result.err
    assert sorted(text_in(tmp_path, 'mine')) == sorted(sum((texts(i, 300) for i in range(3)), []))
    assert 'wrong checksum' in result.out and '503' in result.out


def test_a_download_goes_on_where_it_broke_off(hub, tmp_path, monkeypatch):
    import huggingface_hub.constants
    import huggingface_hub.file_download
    monkeypatch.setattr(huggingface_hub.constants, 'ENDPOINT', hub.env['HF_ENDPOINT'])
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', False)
    monkeypatch.setattr(huggingface_hub.constants, 'DOWNLOAD_CHUNK_SIZE', 1000)  # what is written at a time
    monkeypatch.setattr(huggingface_hub, 'hf_hub_url', lambda repo, path, repo_type, revision: f"{hub.env['HF_ENDPOINT']}/datasets/{repo}/resolve/{revision}/{path}")
    monkeypatch.setattr(corpus, 'WAITS', (0, 0))
    file = hub.folder / 'some' / 'one' / 'main' / 'train-0.parquet'
    table(file, texts(0, 300))
    content = file.read_bytes()
    wanted = corpus.File('train-0.parquet', len(content), hashlib.sha256(content).hexdigest(), 'some/one', COMMIT)
    place = tmp_path / 'download'
    hub.faults += ['cut', 'cut']
    path = corpus.fetch(wanted, str(place))
    assert open(path, 'rb').read() == content
    begins = [int(begin[6:-1]) for method, _, begin in hub.requests if method == 'GET' and begin]
    assert len(begins) == 2 and 1000 <= begins[0] < begins[1], 'after both cuts it went on'
    # what a killed run has left is gone on with, unless it is wrong
    for left, first in ((content[:5000], 5000), (b'x' * 5000, 5000)):
        open(path, 'wb').write(left)
        hub.requests.clear()
        assert corpus.fetch(wanted, str(place)) == path and open(path, 'rb').read() == content
        assert hub.requests[0][2] == f'bytes={first}-'
    # and what stays wrong is an error that leaves nothing
    hub.faults += ['wrong'] * 3
    open(path, 'wb').close()
    with pytest.raises(corpus.Problem, match='wrong checksum.*run it again'):
        corpus.fetch(wanted, str(place))
    assert not list(place.glob('*.parquet'))


def test_killed_between_files_it_fetches_only_the_rest(hub, tmp_path):
    repo = hub.folder / 'some' / 'one' / 'main'
    for i in range(4):
        table(repo / f'train-{i}.parquet', [text * 30 for text in texts(i, 60)])
    table(repo / 'train-9.parquet', [1, 2, 3])  # is no text: an error at the end
    args = ['--input=hf:some/one', '--shard_tokens=1000000']
    result = prepare(hub, tmp_path, 'mine', *args)
    assert result.status == 2 and 'train-9' in result.err and 'int64' in result.err, result.err
    table(repo / 'train-9.parquet', ['now', 'it', 'is'])
    hub.requests.clear()
    result = prepare(hub, tmp_path, 'mine', *args)
    assert result.status == 0 and 'going on' in result.out, result.err
    assert not any('train-0' in path for method, path, _ in hub.requests if method == 'GET'), 'its ids are there already'
    assert len(text_in(tmp_path, 'mine')) == 4 * 60 + 3


def test_what_the_hub_refuses_is_one_line(hub, tmp_path):
    (hub.folder / 'some' / 'pictures' / 'main').mkdir(parents=True)
    (hub.folder / 'some' / 'pictures' / 'main' / 'a.png').write_bytes(b'x')
    dead = {**hub.env, 'HF_ENDPOINT': 'http://127.0.0.1:9'}
    offline = {**hub.env, 'HF_HUB_OFFLINE': '1'}
    for source, env, words in [('hf:no/such', hub.env, ['no such data set', 'no/such', 'hf auth login']), ('hf:some/pictures', hub.env, ['no parquet']),
                               ('hf:some/one/two', hub.env, ['hf:some/one/two']), ('hf:some/one', dead, ['127.0.0.1:9', 'go online']), ('hf:some/one', offline, ['go online'])]:
        done = own_process('prepare.py', 'mine', f'--input={source}', '--tokenizer=byte', f"--data_dir={tmp_path / 'data'}", env=env)
        assert done.status == 2 and done.err.count('\n') == 1 and all(word in done.err for word in words), done.err
        assert not (tmp_path / 'data' / 'mine').exists()
