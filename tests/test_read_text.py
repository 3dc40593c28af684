"""Documents from files of every kind: each format gives the same ones, and what is wrong is one line."""

import gzip
import json
import os
import sys

import pytest
from conftest import TEXT, is_refused

from dataset import Dataset

pyarrow = pytest.importorskip('pyarrow')
import pyarrow.parquet

FORMATS = 'txt txt.gz txt.zst md all.jsonl all.jsonl.gz all.jsonl.zst all.parquet'.split()


def write(path, texts):
    """`texts` as one file of the kind that its name tells, or a file each in a folder of that name."""
    kind = path.name.removeprefix('all.')
    if path.name == kind:
        path.mkdir()
        for i, text in enumerate(texts):
            pack(path / f'{i:04d}.{kind}', text)
    elif kind == 'parquet':
        pyarrow.parquet.write_table(pyarrow.table({'n': range(len(texts)), 'text': texts}), path, row_group_size=7)
    else:
        pack(path, ''.join(json.dumps({'text': text, 'other': 1}) + '\n' for text in texts))
    return path


def zst(content):
    half = len(content) // 2  # two frames in a file, as `cat a.zst b.zst` gives them
    return b''.join(pyarrow.compress(part, 'zstd', asbytes=True) for part in (content[:half], content[half:]))


def pack(path, text):
    path.write_bytes({'.zst': zst, '.gz': gzip.compress}.get(path.suffix, bytes)(text.encode()))


def files_of(where, name, data='data'):
    """{file: content} of the token ids."""
    return {path.name: path.read_bytes() for path in (where / data / name).glob('*.bin')}


def ids_of(where, name):
    """All ids of a dataset, train before val."""
    return sum((tokens.windows([0], tokens.n)[0].tolist()
                for tokens in Dataset(name, where / 'data').splits.values()), [])


def documents_in(where, name):
    """The texts in train and val; of few, the last one may be divided between them."""
    return Dataset(name, where / 'data').tokenizer().decode(ids_of(where, name)).split('<|endoftext|>')[1:]


def test_every_format_holds_the_same_documents(prepare, tmp_path):
    texts = [f'document {i}: café 漢字 ' + TEXT[i * 50:i * 50 + 300] for i in range(100)]
    for kind in FORMATS:
        assert prepare(kind, write(tmp_path / kind, texts), '--shard_tokens=15000').status == 0
        assert files_of(tmp_path, kind) == files_of(tmp_path, 'txt'), kind
    assert sorted(documents_in(tmp_path, 'txt')) == sorted(texts), 'documents stay whole'
    assert prepare('pattern', f"--input={tmp_path / 'txt'}/*.txt", '--shard_tokens=15000').status == 0
    assert files_of(tmp_path, 'pattern') == files_of(tmp_path, 'txt') and len(files_of(tmp_path, 'txt')) > 2


def test_keys_marks_and_halves_of_characters(prepare, tmp_path, gpt2):
    lines = ''.join('{"story": "%d caf\\u00e9 \\ud83d half"}\n' % i for i in range(40))
    (tmp_path / 'a.jsonl').write_text('\ufeff' + lines, encoding='utf-8')
    for tokenizer in ('byte', 'char', 'gpt2'):
        assert prepare(tokenizer, tmp_path / 'a.jsonl', f'--tokenizer={tokenizer}', '--text_key=story').status == 0
        assert 'café \ufffd half' in Dataset(tokenizer, tmp_path / 'data').tokenizer().decode(ids_of(tmp_path, tokenizer))
    (tmp_path / 'b.txt').write_bytes(b'\xef\xbb\xbf' + TEXT.encode())
    assert prepare('mark', tmp_path / 'b.txt', '--tokenizer=char').status == 0
    assert '\ufeff' not in Dataset('mark', tmp_path / 'data').tokenizer().chars
    (tmp_path / 'c.txt').write_bytes(TEXT.encode() + b'caf\xe9 au lait')
    assert prepare('replaced', tmp_path / 'c.txt', '--encoding=utf-8', '--encoding_errors=replace').status == 0
    assert documents_in(tmp_path, 'replaced') == [TEXT + 'caf\ufffd au lait']


# -----------------------------------------------------------------------------
# what is wrong with files


LINE = json.dumps({'text': TEXT[:100]}).encode() + b'\n'
NOISE = os.urandom(150_000).hex().encode()
BAD = {  # file: its content, words of the message
    'far.txt': (b'fine text\n' * 200_000 + 'caf\u00e9s, '.encode() * 5 + b'caf\xe9\n', 'far.txt', 'utf-8', 'caf',
                '--encoding_errors=replace'),
    'empty.txt': (b'', 'too little text'),
    'nul.txt': (b'abc\0def' * 100, 'nul.txt', 'NUL'),
    'cut.txt.gz': (gzip.compress(NOISE)[:-2000], 'cut.txt.gz', 'again'),
    'plain.txt.gz': (TEXT.encode(), 'plain.txt.gz', 'rename'),
    'cut.txt.zst': (zst(NOISE)[:-1000], 'cut.txt.zst', 'again'),
    'gz.txt': (gzip.compress(TEXT.encode()), 'gz.txt', 'if it is text'),
    'broken.jsonl': (b'{"text": "fine"}\n{"text": \n', 'broken.jsonl:2', 'JSON'),
    'deep.jsonl': (LINE * 5 + b'[' * 100_000 + b'\n', 'deep.jsonl:6'),
    'key.jsonl': (b'{"content": "x"}\n', 'key.jsonl:1', 'content', '--text_key'),
    'x.parquet': (b'PAR1', 'x.parquet', 'again'),
    'book.pdf': (b'%PDF-1.4', 'book.pdf', '.pdf there'),
    'a.csv': (b'a,b\n1,2\n', '--input'),
}


@pytest.mark.parametrize('file', [*BAD, 'absent.txt', 'column.parquet', 'number.parquet', '.'])
def test_a_bad_file_is_one_line_and_leaves_nothing(prepare, tmp_path, file):
    content, *words = BAD.get(file, (None, file.strip('.')))
    if content is not None:
        (tmp_path / file).write_bytes(content)
    if file.endswith('.parquet') and content is None:
        columns = {'column': {'content': ['a']}, 'number': {'text': [1, 2]}}[file[:6]]
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / file)
        words = ["'text'", '--text_key']
    is_refused(prepare('mine', tmp_path / file), *words)
    assert not os.path.exists(f'{tmp_path}/data/mine')


@pytest.mark.parametrize('package, source, tokenizer', [
    ('pyarrow', 'a.txt.zst', 'byte'), ('pyarrow.parquet', 'a.parquet', 'byte'),
    ('huggingface_hub', 'hf:a/b', 'byte'), ('tokenizers', 'a.txt', 'bpe:300'), ('tiktoken', 'a.txt', 'gpt2')])
def test_a_package_that_is_not_installed_is_named(prepare, tmp_path, monkeypatch, package, source, tokenizer):
    (tmp_path / source.replace(':', '')).parent.mkdir(exist_ok=True)
    (tmp_path / source.replace(':', '')).write_text(TEXT)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    is_refused(prepare('mine', f'--input={source}', f'--tokenizer={tokenizer}'), package, 'pip install')
    assert not os.path.exists(f'{tmp_path}/data/mine')
