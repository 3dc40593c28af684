"""Documents from files of every kind: each format gives the same ones, and what is wrong is one line."""

import gzip
import importlib.util
import json
import os
import sys

import pytest
from conftest import TEXT

from dataset import Dataset

FORMATS = ['txt', 'txt.gz', 'txt.zst', 'md', 'md.gz', 'all.jsonl', 'all.jsonl.gz', 'all.jsonl.zst',
           'all.parquet']


def prepare(script, where, name, *args):
    return script('prepare.py', name, '--tokenizer=byte', *args, f"--data_dir={where / 'data'}")


def write(path, texts):
    """`texts` as one file of the kind that its name tells, or a file each in a folder of that name."""
    kind = path.name.removeprefix('all.')
    if path.name == kind:
        path.mkdir()
        for i, text in enumerate(texts):
            pack(path / f'{i:04d}.{kind}', text)
    elif kind == 'parquet':
        pyarrow = pytest.importorskip('pyarrow')
        import pyarrow.parquet
        table = pyarrow.table({'n': range(len(texts)), 'text': texts})
        pyarrow.parquet.write_table(table, path, row_group_size=7)
    else:
        pack(path, ''.join(json.dumps({'text': text, 'other': 1}) + '\n' for text in texts))
    return path


def pack(path, text):
    if path.suffix == '.zst':
        zstandard = pytest.importorskip('zstandard')
        half = len(text) // 2  # two frames in a file, as `cat a.zst b.zst` gives them
        frames = [zstandard.ZstdCompressor().compress(part.encode()) for part in (text[:half], text[half:])]
        path.write_bytes(b''.join(frames))
    elif path.suffix == '.gz':
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding='utf-8', newline='\n')


def files_of(where, name):
    """{file: content} of the token ids."""
    return {path.name: path.read_bytes() for path in (where / 'data' / name).glob('*.bin')}


def documents_in(where, name):
    """The texts in train and val; of few, the last one may be divided between them."""
    data = Dataset(name, where / 'data')
    ids = [tokens.windows([0], tokens.n)[0].tolist() for tokens in data.splits.values()]
    return data.tokenizer().decode(sum(ids, [])).split('<|endoftext|>')[1:]


def test_every_format_holds_the_same_documents(script, tmp_path):
    texts = [f'document {i}: café 漢字 ' + TEXT[i * 50:i * 50 + 300] for i in range(100)]
    found = {}
    for kind in FORMATS:
        package = {'zst': 'zstandard', 'parquet': 'pyarrow'}.get(kind.split('.')[-1])
        if package and not importlib.util.find_spec(package):
            continue
        source = write(tmp_path / kind, texts)
        assert prepare(script, tmp_path, kind, f'--input={source}', '--shard_tokens=15000').status == 0
        found[kind] = files_of(tmp_path, kind)
        assert found[kind] == found['txt'] and len(found[kind]) > 2, kind
    assert sorted(documents_in(tmp_path, 'txt')) == sorted(texts), 'documents stay whole'
    pattern = f"--input={tmp_path / 'txt'}/*.txt"
    assert prepare(script, tmp_path, 'pattern', pattern, '--shard_tokens=15000').status == 0
    assert files_of(tmp_path, 'pattern') == found['txt']


def test_the_key_of_the_text_can_be_named(script, tmp_path):
    lines = [json.dumps({'content': f'line {i} ' * 20}) + '\n' for i in range(50)]
    (tmp_path / 'a.jsonl').write_text(''.join(lines))
    result = prepare(script, tmp_path, 'mine', f"--input={tmp_path / 'a.jsonl'}", '--text_key=content')
    assert result.status == 0 and len(documents_in(tmp_path, 'mine')) == 50


def test_marks_and_halves_of_characters_do_no_harm(script, tmp_path, gpt2):
    lines = ''.join('{"text": "%d caf\\u00e9 \\ud83d half"}\n' % i for i in range(40))
    (tmp_path / 'a.jsonl').write_text('\ufeff' + lines, encoding='utf-8')
    for tokenizer in ('byte', 'char', 'gpt2'):
        args = f"--input={tmp_path / 'a.jsonl'}", f'--tokenizer={tokenizer}'
        assert prepare(script, tmp_path, tokenizer, *args).status == 0
        data = Dataset(tokenizer, tmp_path / 'data')
        ids = data.train.windows([0], data.train.n)[0].tolist()
        assert 'café \ufffd half' in data.tokenizer().decode(ids)
    (tmp_path / 'b.txt').write_bytes(b'\xef\xbb\xbf' + TEXT.encode())
    assert prepare(script, tmp_path, 'mark', f"--input={tmp_path / 'b.txt'}", '--tokenizer=char').status == 0
    assert '\ufeff' not in Dataset('mark', tmp_path / 'data').tokenizer().chars


def test_encoding_errors_can_be_replaced(script, tmp_path):
    lines = (json.dumps({'text': TEXT[:300]}) + '\n').encode() * 50 + b'{"text": "caf\xe9 au lait"}\n'
    (tmp_path / 'a.jsonl').write_bytes(lines)
    source = f"--input={tmp_path / 'a.jsonl'}"
    result = prepare(script, tmp_path, 'mine', source, '--encoding_errors=replace')
    assert result.status == 0 and 'caf\ufffd au lait' in documents_in(tmp_path, 'mine')


# -----------------------------------------------------------------------------
# what is wrong with files


def flip(content, begin, end):
    return content[:begin] + bytes(255 - b for b in content[begin:end]) + content[end:]


def bad_files(folder):
    """{file: words of the message}"""
    line = json.dumps({'text': TEXT[:100]}) + '\n'
    contents = {
        'latin.txt': (b'abc\n' * 10 + b'caf\xe9\n', ['latin.txt', 'utf-8', 'caf']),
        'empty.txt': (b'', ['too little text']),
        'nul.txt': (b'abc\0def' * 100, ['nul.txt', 'NUL']),
        'cut.txt.gz': (gzip.compress(os.urandom(5000).hex().encode())[:-2000], ['cut.txt.gz', 'again']),
        'plain.txt.gz': (TEXT.encode(), ['plain.txt.gz', 'rename']),
        'flipped.txt.gz': (flip(gzip.compress(os.urandom(500).hex().encode()), 60, 90),
                           ['flipped.txt.gz', 'again']),
        'gz.txt': (gzip.compress(TEXT.encode()), ['gz.txt', 'if it is text']),
        'zst.jsonl.gz': (b'\x28\xb5\x2f\xfd' + b'x' * 50, ['zst.jsonl.gz', 'rename']),
        'broken.jsonl': (b'{"text": "fine"}\n{"text": \n', ['broken.jsonl:2', 'JSON']),
        'deep.jsonl': (line.encode() * 5 + b'[' * 100_000 + b'\n', ['deep.jsonl:6']),
        'list.jsonl': (line.encode() * 5 + b'[1, 2]\n', ['list.jsonl:6', '--text_key']),
        'key.jsonl': (b'{"content": "x"}\n', ['key.jsonl:1', '--text_key']),
        'number.jsonl': (b'{"text": 5}\n', ['number.jsonl:1', '5']),
        'far.txt': (b'fine text\n' * 200_000 + b'caf\xe9\n', ['caf', '--encoding_errors=replace']),
        'far.jsonl': (line.encode() * 5000 + b'{"text": "caf\xe9"}\n', ['caf']),
        'book.pdf': (b'%PDF-1.4', ['book.pdf', 'pdftotext']),
        'x.parquet': (b'PAR1', ['x.parquet', 'again']),
    }
    for name, (content, _) in contents.items():
        (folder / name).write_bytes(content)
    (folder / 'nothing').mkdir()
    found = {name: words for name, (_, words) in contents.items()}
    return found | {'nothing': ['nothing', '.txt'], 'absent.txt': ['absent.txt']}


def bad_zst(folder):
    import zstandard
    packed = zstandard.ZstdCompressor(write_checksum=True).compress(os.urandom(300_000).hex().encode())
    (folder / 'cut.txt.zst').write_bytes(packed[:-1000])
    (folder / 'flipped.txt.zst').write_bytes(flip(packed, 1000, 1100))
    return {'cut.txt.zst': ['cut.txt.zst', 'again'], 'flipped.txt.zst': ['flipped.txt.zst', 'again']}


def bad_parquet(folder):
    import pyarrow
    import pyarrow.parquet
    table = pyarrow.table({'content': ['a'] * 9, 'n': [1] * 9})
    pyarrow.parquet.write_table(table, folder / 'column.parquet')
    pyarrow.parquet.write_table(pyarrow.table({'text': [1, 2]}), folder / 'number.parquet')
    (folder / 'cut.parquet').write_bytes((folder / 'column.parquet').read_bytes()[:-30])
    (folder / 'text.parquet').write_text('not a table')
    return {'column.parquet': ["'text'", "'content': 'a', 'n': 1", '--text_key'],
            'number.parquet': ["'text': 1", '--text_key'], 'cut.parquet': ['cut.parquet', 'again'],
            'text.parquet': ['text.parquet', 'rename']}


def test_bad_files_are_one_line_and_leave_nothing(script, tmp_path):
    files = bad_files(tmp_path)
    if importlib.util.find_spec('zstandard'):
        files |= bad_zst(tmp_path)
    if importlib.util.find_spec('pyarrow'):
        files |= bad_parquet(tmp_path)
    for file, words in files.items():
        result = prepare(script, tmp_path, 'mine', f'--input={tmp_path / file}')
        assert result.status == 2 and result.err.count('\n') == 1, (file, result.err)
        assert result.err.startswith('error: ') and all(word in result.err for word in words), result.err
        assert not (tmp_path / 'data' / 'mine').exists(), file


def test_a_bad_file_while_workers_encode_is_one_line_too(script, tmp_path, gpt2):
    (tmp_path / 'far.txt').write_bytes(b'fine text\n' * 200_000 + b'caf\xe9\n')
    args = f"--input={tmp_path / 'far.txt'}", '--tokenizer=gpt2', '--workers=2'
    result = prepare(script, tmp_path, 'mine', *args)
    assert result.status == 2 and result.err.count('\n') == 1 and 'caf' in result.err, result.err
    assert not (tmp_path / 'data' / 'mine').exists()


def test_a_package_that_is_not_installed_is_named(script, tmp_path, monkeypatch):
    (tmp_path / 'a.txt').write_text(TEXT)
    (tmp_path / 'a.txt.zst').write_bytes(b'\x28\xb5\x2f\xfd')
    (tmp_path / 'a.parquet').write_bytes(b'PAR1')
    plain = f"--input={tmp_path / 'a.txt'}"
    cases = {'pyarrow': [f"--input={tmp_path / 'a.txt.zst'}"], 'pyarrow.parquet': [f"--input={tmp_path / 'a.parquet'}"],
             'huggingface_hub': ['--input=hf:a/b'],
             'tokenizers': [plain, '--tokenizer=bpe:300'], 'tiktoken': [plain, '--tokenizer=gpt2']}
    for package, args in cases.items():
        with monkeypatch.context() as m:
            m.setitem(sys.modules, package, None)
            result = prepare(script, tmp_path, 'mine', *args)
        assert result.status == 2 and result.err.count('\n') == 1, result.err
        assert package in result.err and 'pip install' in result.err
        assert not (tmp_path / 'data' / 'mine').exists()
