"""Text becomes a dataset: the right ids on the right side, in one go or several; nothing where it fails."""

import gzip
import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import types
import urllib.request

import numpy as np
import pytest
from conftest import REPO, TEXT, data_file, run_script

import prepare as script
from configurator import configure
from dataset import Dataset
from tokenizer import learn_bpe, make_tokenizer

KNOBS = ['name', 'input', 'tokenizer', 'text_key', 'chat', 'bad_rows', 'val_fraction', 'max_tokens',
         'shard_mb', 'processes', 'overwrite', 'data_dir']
DEFAULTS = {knob: getattr(script, knob) for knob in KNOBS}


@pytest.fixture
def prepare(tmp_path, monkeypatch, capsys):
    """prepare('mine', path, '--flag') -> status, out, err: prepare.py in this process, into tmp_path/data; of
    bytes, unless something else is said. A path is an --input."""
    def run(*args):
        line = [f'--input={arg}' if isinstance(arg, os.PathLike) else arg for arg in args]
        if not any(arg.startswith('--tokenizer') for arg in line):
            line.append('--tokenizer=byte')
        line += [f"--data_dir={tmp_path / 'data'}", '--processes=1']
        monkeypatch.setattr(sys, 'argv', ['prepare.py', *line])
        vars(script).update(DEFAULTS)
        script.tokenizer_in.cache_clear()
        capsys.readouterr()
        status = 0
        try:
            configure(vars(script), positional='name')
            script.main()
        except SystemExit as e:
            status = e.code
        out, err = capsys.readouterr()
        return types.SimpleNamespace(status=status, out=out, err=err)
    return run


@pytest.fixture
def works(prepare):
    def run(*args):
        result = prepare(*args)
        assert result.status == 0, result.err
        return result
    return run


@pytest.fixture
def opened(tmp_path):
    """opened('mine') -> the Dataset tmp_path/data/mine"""
    return lambda name: Dataset(name, tmp_path / 'data')


@pytest.fixture
def gpt2(monkeypatch):
    """GPT-2's tokenizer, from tiktoken's cache in the test data or on this machine."""
    tiktoken = pytest.importorskip('tiktoken')
    if 'TIKTOKEN_CACHE_DIR' not in os.environ:
        monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(data_file('tiktoken_cache')))
    return tiktoken.get_encoding('gpt2')


def is_refused(result, *words):
    """One line on standard error, with these words, and status 2."""
    assert result.status == 2 and result.err.startswith('error: ') and result.err.count('\n') == 1, result.err
    for word in words:
        assert word in result.err


def ids_of(data):
    """All ids of a Dataset, train before val."""
    return np.concatenate([split.read([0], split.n)[0] for split in data.splits.values()]).tolist()


def documents_in(data):
    return data.tokenizer.decode(ids_of(data)).split('<|endoftext|>')[1:]


def bins(folder):
    """{split: its bytes}, of one file or several."""
    found = {}
    for split in ('train', 'val'):
        paths = sorted(folder.glob(f'{split}.bin')) or sorted(folder.glob(f'{split}_*.bin'))
        found[split] = b''.join(path.read_bytes() for path in paths)
    return found


def write_jsonl(path, texts):
    path.write_text(''.join(json.dumps({'text': text}) + '\n' for text in texts))
    return path


def some_texts(seed, n=60):
    rng = random.Random(seed)
    texts = []
    for i in range(n):
        start = rng.randrange(50_000)
        texts.append(f'{seed} {i}: café 漢字 ' + TEXT[start:start + rng.randrange(3000)])
    return texts


# -----------------------------------------------------------------------------
# the named sets

# checksums of the files that nanoGPT's own two scripts wrote from this text
NANOGPT = {
    ('shakespeare_char', 'train'): '6ec305602a99ac2802745a134e1f5e33e2231b4855525b00b9aebb730ac2626f',
    ('shakespeare_char', 'val'): 'd37d30cc0c8327c270d493299c3dca54135f6d5f1c9ef60cda78076e311204b1',
    ('shakespeare', 'train'): '502a2bdc8210d1ac5d5674867cb74467dd31db575d25cf6dbb08c8bdbea8680f',
    ('shakespeare', 'val'): '68a53422394c26a655ebe641f5c6f49888e8f4e45fe5d6f02abda63ba3ebd65b',
}


def test_shakespeare_comes_out_as_nanogpt_makes_it(works, tmp_path, gpt2):
    text = data_file('tinyshakespeare.txt')
    downloaded = tmp_path / 'data' / 'shakespeare_char' / 'input.txt'
    downloaded.parent.mkdir(parents=True)
    shutil.copy(text, downloaded)
    works('shakespeare_char', '--tokenizer=None')
    works('shakespeare', text, '--tokenizer=None')
    for (name, split), checksum in NANOGPT.items():
        content = (tmp_path / 'data' / name / f'{split}.bin').read_bytes()
        assert hashlib.sha256(content).hexdigest() == checksum
    meta = pickle.loads((tmp_path / 'data' / 'shakespeare_char' / 'meta.pkl').read_bytes())
    chars = sorted(set(text.read_text()))
    stoi = {char: id for id, char in enumerate(chars)}
    assert meta == {'vocab_size': 65, 'itos': dict(enumerate(chars)), 'stoi': stoi}


def test_nanogpts_commands_make_its_datasets(tmp_path):
    (tmp_path / 'a.txt').write_text(TEXT)
    flags = [f"--input={tmp_path / 'a.txt'}", f'--data_dir={tmp_path}']
    result = run_script('data/shakespeare_char/prepare.py', *flags)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / 'shakespeare_char' / 'meta.pkl').exists()


def test_a_download_that_fails_is_one_line(prepare, tmp_path, monkeypatch):
    def fail(url, timeout):
        raise urllib.error.URLError('no network')
    monkeypatch.setattr(urllib.request, 'urlopen', fail)
    is_refused(prepare('shakespeare_char'), 'input.txt')
    is_refused(prepare('hellaswag'), 'hellaswag_val.jsonl')
    assert not (tmp_path / 'data').exists()


# -----------------------------------------------------------------------------
# documents


def test_a_text_with_markers_gives_its_documents_in_one_line(works, tmp_path, opened, gpt2, monkeypatch):
    names = ['Ben', 'Mia', 'Sam', 'Tom', 'Lily', 'Zoe']
    things = ['his kite', 'a red ball', 'her soup', 'a small dog', 'the big tree']
    stories = []
    for i in range(400):
        stories.append(f'Once upon a time {names[i % 6]} saw {things[i % 5]}. {names[i * i % 6]} said '
                       f'hello.\nThey played until dark number {i}.\n')
    (tmp_path / 'mystories.txt').write_text(''.join(story + '<|endoftext|>\n' for story in stories))
    monkeypatch.chdir(tmp_path)
    works('mystories.txt', '--tokenizer=gpt2')
    works('rows', write_jsonl(tmp_path / 'rows.jsonl', stories), '--tokenizer=gpt2')
    assert bins(tmp_path / 'data' / 'mystories') == bins(tmp_path / 'data' / 'rows')
    data = opened('mystories')
    n_documents = [entry['documents'] for entry in data.meta['splits'].values()]
    assert sum(n_documents) == 400 and 20 < n_documents[1] < 60
    assert sorted(documents_in(data)) == sorted(stories)
    assert len(ids_of(data)) == 400 + sum(len(gpt2.encode(story)) for story in stories)


def test_in_a_row_the_marker_is_text_and_that_is_said(works, tmp_path, opened):
    texts = [f'document {i}<|endoftext|>' for i in range(50)]
    result = works('mine', write_jsonl(tmp_path / 'a.jsonl', texts))
    assert '50 texts' in result.out
    assert sum(entry['documents'] for entry in opened('mine').meta['splits'].values()) == 50


def test_every_kind_of_file_holds_the_same_documents(works, tmp_path, opened):
    texts = some_texts(1, 100)
    text = '<|endoftext|>\n'.join(texts).encode()
    lines = write_jsonl(tmp_path / 'lines.jsonl', texts).read_bytes()
    files = {
        'a.md': text, 'crlf.txt': text.replace(b'\n', b'\r\n'), 'a.txt.gz': gzip.compress(text),
        'mark.txt': b'\xef\xbb\xbf' + text, 'wide.txt': text.decode().encode('utf-16'),
        'lines.json': lines, 'mark.jsonl': b'\xef\xbb\xbf' + lines, 'lines.jsonl.gz': gzip.compress(lines),
        'wide.jsonl': lines.decode().encode('utf-16'),
        'array.json': json.dumps([{'text': text} for text in texts], indent=1).encode(),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    parquet = pytest.importorskip('pyarrow.parquet')
    pyarrow = pytest.importorskip('pyarrow')
    parquet.write_table(pyarrow.table({'n': range(100), 'text': texts}), tmp_path / 'table.parquet')
    works('want', tmp_path / 'lines.jsonl')
    want = bins(tmp_path / 'data' / 'want')
    assert sorted(documents_in(opened('want'))) == sorted(texts)
    for name in [*files, 'table.parquet']:
        works(f'of_{name}', tmp_path / name)
        assert bins(tmp_path / 'data' / f'of_{name}') == want, name


def test_a_file_that_is_found_twice_is_read_once(works, tmp_path, opened, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'dup').mkdir()
    for i in range(3):
        (tmp_path / 'dup' / f'{i}.txt').write_text(f'{i}' + TEXT[:3000])
    os.symlink('0.txt', tmp_path / 'dup' / 'link.txt')
    works('d', '--input=dup', '--input=./dup/*.txt', f"--input={tmp_path / 'dup' / '1.txt'}")
    assert len(documents_in(opened('d'))) == 3


def test_half_a_surrogate_pair_becomes_a_character(works, tmp_path, opened):
    lines = ['{"story": "%d caf\\u00e9 \\ud83d half"}\n' % i for i in range(40)]
    (tmp_path / 'a.jsonl').write_text(''.join(lines))
    for tokenizer in ('byte', 'char'):
        works(tokenizer, tmp_path / 'a.jsonl', f'--tokenizer={tokenizer}', '--text_key=story')
        assert '7 café \ufffd half' in documents_in(opened(tokenizer))


# -----------------------------------------------------------------------------
# train and val


def test_a_document_stays_on_its_side_when_others_are_added(works, tmp_path, opened):
    texts = [f'document {i}: ' + TEXT[i:i + 100] for i in range(150)]
    sides = []
    for n in (100, 150):
        works(f'{n}', write_jsonl(tmp_path / 'all.jsonl', texts[:n]))
        data = opened(f'{n}')
        val = data.tokenizer.decode(data.val.read([0], data.val.n)[0].tolist())
        sides.append(set(val.split('<|endoftext|>')[1:]))
    assert sides[0] == {text for text in sides[1] if text in texts[:100]}
    assert 3 < len(sides[0]) < 25


def test_of_few_documents_val_is_the_end(works, tmp_path, opened):
    (tmp_path / 'book.txt').write_text(TEXT)
    for name, flag, share in (('book', '--tokenizer=char', 0.1), ('byte', '--val_fraction=0.2', 0.2)):
        works(name, tmp_path / 'book.txt', flag)
        data = opened(name)
        assert data.tokenizer.decode(ids_of(data)).removeprefix('<|endoftext|>') == TEXT
        assert share * len(TEXT) <= data.val.n < share * len(TEXT) + 100
        assert sum(entry['bytes'] for entry in data.meta['splits'].values()) == len(TEXT)
    works('noval', tmp_path / 'book.txt', '--val_fraction=0')
    assert opened('noval').val is None


def test_max_tokens_ends_with_a_shard(works, tmp_path, opened):
    path = write_jsonl(tmp_path / 'a.jsonl', some_texts(2, 300))
    works('mine', path, '--max_tokens=100000', '--shard_mb=0.03')
    assert 100_000 <= opened('mine').train.n < 140_000
    assert len(opened('mine').train.paths) == len(list((tmp_path / 'data' / 'mine').glob('train_*.bin')))


# -----------------------------------------------------------------------------
# shards, cuts, tokenizers


def strange_text(n):
    """n characters of what is hard to cut."""
    rng = random.Random(n)
    pieces = [' ', '\n', '\n\n', '   \n', "isn't", 'Straße', '漢字。', '漢字', '1234567', '½', '😀', 'e\u0301', ' \t', '?!',
              '\u3000', '\u2028', 'a' * 40, ' ' * 60, 'WE\u2019LL']
    return ''.join(rng.choices(pieces, k=n))


@pytest.mark.parametrize('kind', ['gpt2', 'learned', 'byte'])
def test_a_long_document_has_the_ids_of_encoding_it_at_once(tmp_path, request, kind):
    text = strange_text(200_000)
    if kind == 'gpt2':
        request.getfixturevalue('gpt2')
        tok = make_tokenizer({'kind': 'tiktoken', 'name': 'gpt2'})
    elif kind == 'learned':  # with the pattern of GPT-4's
        pytest.importorskip('tokenizers')
        tok = learn_bpe(400, [text[:20_000]])
    else:
        tok = make_tokenizer({'kind': 'byte'})
    path = tmp_path / 'a.txt'
    path.write_text(text, encoding='utf-8', newline='')
    pieces = script.plan_pieces([str(path)], 2e5, tok.split_at)
    assert len(pieces) > 3
    script.write_tokenizer(str(tmp_path), tok)
    job = script.Job(str(tmp_path), 'text', 0.0, False)
    for pieces in (pieces, script.plan_pieces([str(path)], 1e9, tok.split_at)):
        found = []
        for number, parts in enumerate(pieces):
            script.encode_shard(number, parts, job)
            found.append(np.fromfile(script.shard_path(str(tmp_path), 'train', number), script.dtype_of(tok)))
        assert np.array_equal(np.concatenate(found), np.append(tok.end_of_text, tok.encode(text)))


def test_two_processes_that_are_killed_and_one_that_goes_on_make_the_bytes_of_one(works, tmp_path):
    path = write_jsonl(tmp_path / 'a.jsonl', [f'{i}' + TEXT for i in range(120)])
    works('one', path, '--shard_mb=0.5')
    flags = [f'--input={path}', '--tokenizer=byte', '--shard_mb=0.5', f"--data_dir={tmp_path / 'data'}",
             '--processes=2']
    command = [sys.executable, str(REPO / 'prepare.py'), 'two', *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for _ in range(3):
        process.stdout.readline()  # a shard is there
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    there = list((tmp_path / 'data' / 'two' / 'unfinished').glob('shard_*.json'))
    assert len(there) >= 3 and not (tmp_path / 'data' / 'two' / 'meta.json').exists()
    result = works('two', path, '--shard_mb=0.5')
    assert 'going on' in result.out
    assert bins(tmp_path / 'data' / 'two') == bins(tmp_path / 'data' / 'one')


class Interrupted(Exception):
    pass


def test_killed_at_any_file_the_same_command_goes_on(prepare, works, tmp_path, opened, monkeypatch):
    path = write_jsonl(tmp_path / 'a.jsonl', some_texts(6, 12))
    flags = ['mine', path, '--shard_mb=0.01', '--overwrite', '--tokenizer=char']
    works(*flags)
    want = bins(tmp_path / 'data' / 'mine')
    other = write_jsonl(tmp_path / 'b.jsonl', some_texts(7, 12))
    real = os.replace
    for k in range(1, 60):
        shutil.rmtree(tmp_path / 'data' / 'mine')
        works('mine', other, '--tokenizer=char', '--shard_mb=0.005')
        before = bins(tmp_path / 'data' / 'mine')
        calls = []

        def replace(source, target):
            calls.append(target)
            if len(calls) == k:
                raise Interrupted
            real(source, target)
        with monkeypatch.context() as patch:
            patch.setattr(os, 'replace', replace)
            try:
                prepare(*flags)
                break
            except Interrupted:
                pass
        if not any(os.path.dirname(target) == str(tmp_path / 'data' / 'mine') for target in calls[:-1]):
            assert bins(tmp_path / 'data' / 'mine') == before  # not touched yet
            opened('mine')
        elif k < 59:
            with pytest.raises(SystemExit):  # it says that it is not finished
                opened('mine')
        works(*flags)
        assert bins(tmp_path / 'data' / 'mine') == want
        assert not (tmp_path / 'data' / 'mine' / 'unfinished').exists()
    assert k > 15


def tokenizer_file(path, unknown=None):
    """A tokenizer.json that knows the letters a to d alone."""
    tokenizers = pytest.importorskip('tokenizers')
    letters = ['a', 'b', 'c', 'd', ' ', '\n', unknown or '?']
    vocab = {letter: id for id, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], unk_token=unknown))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize('unknown', [None, '[UNK]'])
def test_bytes_are_those_of_the_text_where_a_tokenizer_loses_some_of_it(works, tmp_path, opened, unknown):
    text = 'abcd abcd\n' * 9000 + 'abcd xyä\n' * 500
    (tmp_path / 'late.txt').write_text(text, encoding='utf-8')
    path = tokenizer_file(tmp_path / 'mine.json', unknown)
    result = works('mine', tmp_path / 'late.txt', f'--tokenizer={path}')
    assert f'{3 * 500:,} of' in result.out and f'{len(text):,}' in result.out
    entries = opened('mine').meta['splits'].values()
    assert sum(entry['bytes'] for entry in entries) == len(text.encode())
    assert sum(entry['token_bytes'] for entry in entries) != len(text.encode())


def test_a_tokenizer_that_cannot_encode_is_one_line(prepare, tmp_path):
    pytest.importorskip('tokenizers')
    model = {'type': 'WordLevel', 'vocab': {'a': 0}, 'unk_token': '[UNK]'}
    (tmp_path / 't.json').write_text(json.dumps({
        'version': '1.0', 'truncation': None, 'padding': None, 'added_tokens': [], 'normalizer': None,
        'pre_tokenizer': None, 'post_processor': None, 'decoder': None, 'model': model}))
    (tmp_path / 'a.txt').write_text(TEXT)
    result = prepare('q', tmp_path / 'a.txt', f"--tokenizer={tmp_path / 't.json'}")
    is_refused(result, 't.json', 'a.txt', 'byte')
    assert not (tmp_path / 'data' / 'q').exists()


def test_a_learned_tokenizer_and_that_of_another_dataset(works, tmp_path, opened):
    pytest.importorskip('tokenizers'), pytest.importorskip('tiktoken')
    text = TEXT[:20_000] + "It's 12345, isn't it? naïve 漢字\n"
    for name, tokenizer, content in (('a', 'bpe:320', text), ('b', tmp_path / 'data' / 'a', text[::-1])):
        (tmp_path / f'{name}.txt').write_text(content, encoding='utf-8')
        works(name, tmp_path / f'{name}.txt', f'--tokenizer={tokenizer}')
        assert documents_in(opened(name)) == [content]
    assert opened('a').tokenizer_state == opened('b').tokenizer_state
    assert opened('a').train.n < 0.6 * len(text)


# -----------------------------------------------------------------------------
# conversations


def test_conversations_are_read_in_every_form(works, tmp_path, opened):
    pairs = [(f'Question {i}?', f'Answer {i}.') for i in range(40)]
    forms = {'alpaca': [], 'sharegpt': [], 'openai': []}
    for question, answer in pairs:
        forms['alpaca'].append({'instruction': question, 'input': '', 'output': answer})
        forms['sharegpt'].append({'conversations': [{'from': 'human', 'value': question},
                                                    {'from': 'gpt', 'value': answer}]})
        forms['openai'].append({'messages': [{'role': 'user', 'content': question},
                                             {'role': 'assistant', 'content': answer}]})
    forms['lists'] = [row['messages'] for row in forms['openai']]
    found = []
    for form, rows in forms.items():
        (tmp_path / f'{form}.json').write_text(json.dumps(rows))
        (tmp_path / f'{form}_lines.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
        for file in (f'{form}.json', f'{form}_lines.jsonl'):
            works(str(tmp_path / file), '--chat')
            found.append(bins(tmp_path / 'data' / file.partition('.')[0]))
    assert all(content == found[0] for content in found)
    data = opened('alpaca')
    assert len(data.train.starts) + len(data.val.starts) == 40
    said = data.tokenizer.decode(data.train.read([0], data.train.n)[0][data.train.mask].tolist())
    assert 'Answer' in said and 'Question' not in said


def test_a_row_that_is_no_conversation_stops_or_is_left_out(prepare, works, tmp_path, opened):
    lines = [json.dumps({'instruction': 'Say', 'output': f'{i}'}) for i in range(30)]
    (tmp_path / 'chats.jsonl').write_text('\n'.join([*lines[:5], '{"instruction": "a"}', *lines[5:]]))
    is_refused(prepare('c', tmp_path / 'chats.jsonl', '--chat'), 'chats.jsonl, line 6')
    is_refused(prepare('c', tmp_path / 'chats.jsonl'), '--chat')
    assert not os.listdir(tmp_path / 'data')
    works('c', tmp_path / 'chats.jsonl', '--chat', '--bad_rows=skip')
    assert sum(entry['documents'] for entry in opened('c').meta['splits'].values()) == 30


# -----------------------------------------------------------------------------
# what goes wrong

LINE = json.dumps({'text': TEXT[:100]}).encode() + b'\n'
BAD = {  # file: its content, words of the message
    'gbk.txt': ('天地玄黄，宇宙洪荒。\n'.encode('gbk') * 50, 'offset 0', 'iconv', '-t utf-8'),
    'far.txt': (b'fine text\n' * 200_000 + 'café '.encode() + b'caf\xe9\n', 'offset 2000009', 'iconv'),
    'rows.jsonl': (LINE + b'{"text": "caf\xe9"}\n', f'offset {len(LINE) + 13}', 'iconv'),
    'nul.txt': (b'abc\0def' * 100, 'utf-16le'),
    'cut.txt.gz': (gzip.compress(os.urandom(9000).hex().encode())[:-2000], 'again'),
    'plain.txt.gz': (TEXT.encode(), 'again'),
    'broken.jsonl': (LINE + b'{"text": \n', 'broken.jsonl, line 2'),
    'deep.jsonl': (LINE * 5 + b'[' * 100_000 + b'\n', 'deep.jsonl, line 6'),
    'key.jsonl': (b'{"content": "x"}\n', 'key.jsonl, line 1', 'content', '--text_key'),
    'number.jsonl': (b'{"text": 5}\n', '--text_key'),
    'array.jsonl': (b'[{"text": "a"}, {"text": "b"}]\n', '.json'),
    'array.json': (b'[{"text": "a"},\n', 'array.json'),
    'x.parquet': (b'PAR1', 'x.parquet'),
    'page.html': (b'<p>a', 'pandoc -t plain'),
    'book.epub': (b'PK', 'pandoc -t plain'),
    'ids.bin': (b'\0\0', 'train.bin'),
    'absent.txt': (None, 'absent.txt'),
}


@pytest.mark.parametrize('file', BAD)
def test_a_bad_file_is_one_line_and_leaves_nothing(prepare, tmp_path, file):
    content, *words = BAD[file]
    if content is not None:
        (tmp_path / file).write_bytes(content)
    is_refused(prepare('mine', tmp_path / file), file, *words)
    assert not (tmp_path / 'data' / 'mine').exists()


def test_an_empty_text_is_one_line_and_leaves_nothing(prepare, tmp_path):
    (tmp_path / 'empty.txt').touch()
    is_refused(prepare('mine', tmp_path / 'empty.txt'))
    is_refused(prepare('mine', tmp_path / 'empty.txt', '--tokenizer=char'))
    assert not (tmp_path / 'data' / 'mine').exists()


@pytest.mark.parametrize('flags', [
    'mine', '../nofile.txt', '../x --input=book.txt', 'mine --input=book.txt --val_fraction=1', 'mine --chat',
    'mine --input=book.txt --tokenizer=gpt9', 'mine --input=book.txt --tokenizer=bpe:100',
    'mine --input=book.txt --tokenizer=bpe:x', 'mine --input=book.txt --shard_mb=0',
    'mine --input=book.txt --max_tokens=-1', 'mine --input=book.txt --tokenizer=./none.json',
    'mine --input=book.txt --bad_rows=x', 'mine --input=book.txt --chat --tokenizer=bpe:300',
    'mine --input=book.txt --tokenizer=out/ckpt.pt', 'mine --input=book.txt --chat'])
def test_a_bad_knob_is_one_line(prepare, tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'book.txt').write_text(TEXT + 'é')
    is_refused(prepare(*flags.split()))
    assert not (tmp_path / 'data' / 'mine').exists()


def test_what_is_there_stays_until_the_new_dataset_is_whole(prepare, works, tmp_path, opened):
    (tmp_path / 'a.txt').write_text(TEXT)
    (tmp_path / 'b.txt').write_text(TEXT[::-1])
    (tmp_path / 'bad.txt').write_bytes(TEXT.encode() + b'\xff')
    folder = tmp_path / 'data' / 'mine'
    works('mine', tmp_path / 'a.txt', '--tokenizer=char')
    (folder / 'prepare.py').write_text('# of somebody')
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    works('mine', tmp_path / 'a.txt', '--tokenizer=char')  # it is there already
    is_refused(prepare('mine', tmp_path / 'b.txt'), '--overwrite')
    is_refused(prepare('mine', tmp_path / 'bad.txt', '--overwrite'), 'bad.txt')
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    works('mine', tmp_path / 'b.txt', '--overwrite')
    assert documents_in(opened('mine')) == [TEXT[::-1]]
    assert {path.name for path in folder.iterdir()} == {'train.bin', 'val.bin', 'meta.json', 'prepare.py'}
    (tmp_path / 'b.txt').write_text(TEXT * 2)
    is_refused(prepare('mine', tmp_path / 'b.txt'), '--overwrite')


# -----------------------------------------------------------------------------
# the Hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A module huggingface_hub, whose data sets are the folders OWNER/NAME in tmp_path/hub."""
    root = tmp_path / 'hub'

    class HfApi:
        def list_repo_files(self, repo, repo_type):
            return [str(path.relative_to(root / repo)) for path in (root / repo).rglob('*') if path.is_file()]

    def hf_hub_download(repo, file, repo_type):
        assert repo_type == 'dataset'
        if (root / 'broken').exists():
            raise ConnectionError('the line broke')
        return str(root / repo / file)
    module = types.SimpleNamespace(HfApi=HfApi, hf_hub_download=hf_hub_download)
    monkeypatch.setitem(sys.modules, 'huggingface_hub', module)
    return root


def test_files_of_the_hub_are_a_shard_each(hub, prepare, works, tmp_path, opened):
    folder = hub / 'some' / 'one' / 'data'
    folder.mkdir(parents=True)
    for i in range(3):
        write_jsonl(folder / f'train-{i}.jsonl', some_texts(i))
    write_jsonl(folder / 'test.jsonl', ['never'])
    works('mine', '--input=hf:some/one/data/train-*.jsonl')
    assert sorted(documents_in(opened('mine'))) == sorted(some_texts(0) + some_texts(1) + some_texts(2))
    assert len(opened('mine').train.paths) == 3
    is_refused(prepare('none', '--input=hf:some/one/*.parquet'), 'test.jsonl')
    (hub / 'broken').touch()
    is_refused(prepare('none', '--input=hf:some/one/data/test.jsonl'), 'the line broke')
    assert not (tmp_path / 'data' / 'none').exists()
