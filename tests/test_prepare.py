"""Text becomes a dataset: the right ids on the right side, in one go or several; nothing where it fails."""

import gzip
import hashlib
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest
from conftest import REPO, TEXT, data_file

import prepare as script
from configurator import configure
from dataset import Dataset

KNOBS = ['name', 'input', 'tokenizer', 'text_key', 'chat', 'val_fraction', 'max_tokens', 'shard_mb',
         'processes', 'overwrite', 'data_dir']
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
def works(prepare, tmp_path):
    """The same of what has to succeed, without the flags of the test -> the Dataset"""
    def run(name, *args):
        result = prepare(name, *args)
        assert result.status == 0, result.err
        data = Dataset(os.path.basename(name).partition('.')[0], tmp_path / 'data')
        data.out = result.out
        return data
    return run


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


def total(data, key):
    return sum(entry[key] for entry in data.meta['splits'].values())


def bins(folder):
    """{split: its bytes}, of one file or several."""
    found = {}
    for split in ('train', 'val'):
        found[split] = b''.join(path.read_bytes() for path in sorted(folder.glob(f'{split}*.bin')))
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


# -----------------------------------------------------------------------------
# documents


def test_in_plain_text_markers_separate_documents_in_rows_they_are_text(works, tmp_path):
    stories = [f'Story {i} of a red ball.\nThey played until dark.\n' for i in range(400)]
    (tmp_path / 'stories.txt').write_text(''.join(story + '<|endoftext|>\n' for story in stories))
    data = works('stories', tmp_path / 'stories.txt')
    works('rows', write_jsonl(tmp_path / 'rows.jsonl', stories))
    assert bins(tmp_path / 'data' / 'stories') == bins(tmp_path / 'data' / 'rows')
    assert total(data, 'documents') == 400 and 20 < data.meta['splits']['val']['documents'] < 60
    assert sorted(documents_in(data)) == sorted(stories)
    data = works('ended', write_jsonl(tmp_path / 'ended.jsonl', [f'{i}<|endoftext|>' for i in range(50)]))
    assert '50 texts' in data.out and total(data, 'documents') == 50


def test_a_marker_is_found_wherever_a_read_ends(tmp_path):
    path = tmp_path / 'a.txt'
    for n in range((1 << 20) - 16, (1 << 20) + 2):
        path.write_text('x' * n + '<|endoftext|>\nsecond<|endoftext|>')
        documents = list(script.read_documents([str(path)], script.collections.Counter()))
        assert documents[-1][:2] == (True, 'second')
        assert ''.join(text for _, text, _ in documents) == 'x' * n + 'second'


def test_every_kind_of_file_holds_the_same_documents(works, tmp_path):
    texts = some_texts(1, 100)
    text = '<|endoftext|>\n'.join(texts).encode()
    lines = write_jsonl(tmp_path / 'lines.jsonl', texts).read_bytes()
    files = {
        'plain.md': text, 'crlf.txt': text.replace(b'\n', b'\r\n'), 'zipped.txt.gz': gzip.compress(text),
        'mark.txt': b'\xef\xbb\xbf' + text, 'wide.txt': text.decode().encode('utf-16'),
        'marked.jsonl': b'\xef\xbb\xbf' + lines, 'zippedlines.jsonl.gz': gzip.compress(lines),
        'widelines.jsonl': lines.decode().encode('utf-16'),
        'array.json': json.dumps([{'text': text} for text in texts], indent=1).encode(),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    parquet = pytest.importorskip('pyarrow.parquet')
    pyarrow = pytest.importorskip('pyarrow')
    parquet.write_table(pyarrow.table({'n': range(100), 'text': texts}), tmp_path / 'table.parquet')
    assert sorted(documents_in(works('want', tmp_path / 'lines.jsonl'))) == sorted(texts)
    for name in [*files, 'table.parquet']:
        works(str(tmp_path / name))
        assert bins(tmp_path / 'data' / name.partition('.')[0]) == bins(tmp_path / 'data' / 'want'), name


def test_a_file_that_is_found_twice_is_read_once(works, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'dup').mkdir()
    for i in range(3):
        (tmp_path / 'dup' / f'{i}.txt').write_text(f'{i}' + TEXT[:3000])
    os.symlink('0.txt', tmp_path / 'dup' / 'link.txt')
    data = works('d', '--input=dup', '--input=./dup/*.txt', f"--input={tmp_path / 'dup' / '1.txt'}")
    assert total(data, 'documents') == 3


def test_half_a_surrogate_pair_becomes_a_character(works, tmp_path):
    (tmp_path / 'a.jsonl').write_text('{"story": "caf\\u00e9 \\ud83d half"}\n')
    data = works('mine', tmp_path / 'a.jsonl', '--tokenizer=char', '--text_key=story')
    assert data.tokenizer.decode(ids_of(data)) == 'café \ufffd half'


# -----------------------------------------------------------------------------
# train and val


def test_a_document_stays_on_its_side_when_others_are_added(works, tmp_path):
    texts = [f'document {i}: ' + TEXT[i:i + 100] for i in range(150)]
    sides = []
    for n in (100, 150):
        data = works(f'{n}', write_jsonl(tmp_path / 'all.jsonl', texts[:n]))
        val = data.tokenizer.decode(data.val.read([0], data.val.n)[0].tolist())
        sides.append(set(val.split('<|endoftext|>')[1:]))
    assert sides[0] == {text for text in sides[1] if text in texts[:100]}
    assert 3 < len(sides[0]) < 25


def test_of_few_documents_val_is_the_end(works, tmp_path):
    path = write_jsonl(tmp_path / 'book.jsonl', [TEXT, TEXT[::-1]])
    for percent in (10, 70):
        data = works(f'of{percent}', path, f'--val_fraction={percent / 100}')
        assert documents_in(data) == [TEXT, TEXT[::-1]]
        assert data.meta['splits']['train']['bytes'] == int((1 - percent / 100) * 2 * len(TEXT))
        assert total(data, 'bytes') == 2 * len(TEXT) and total(data, 'documents') == 2
    assert works('noval', path, '--val_fraction=0').val is None


def test_max_tokens_ends_with_a_shard(works, tmp_path):
    path = write_jsonl(tmp_path / 'a.jsonl', some_texts(2, 300))
    data = works('mine', path, '--max_tokens=100000', '--shard_mb=0.03')
    assert 100_000 <= data.train.n < 140_000
    assert len(data.train.paths) == len(list((tmp_path / 'data' / 'mine').glob('train_*.bin'))) > 1


# -----------------------------------------------------------------------------
# shards, cuts, tokenizers


@pytest.mark.parametrize('kind', ['gpt2', 'bpe:400'])
def test_a_long_document_has_the_ids_of_encoding_it_at_once(works, tmp_path, gpt2, kind):
    pytest.importorskip('tokenizers')  # learns one with GPT-4's pattern
    pieces = [' ', '\n', '\n\n', '   \n', "isn't", 'Straße', '漢字。', '漢字', '1234567', '½', '😀', ' \t', '?!',
              'e\u0301', '\u3000', '\u2028', 'a' * 40, ' ' * 60, 'WE\u2019LL']
    text = ''.join(random.Random(1).choices(pieces, k=350_000))  # what is hard to cut
    (tmp_path / 'a.txt').write_text(text, encoding='utf-8', newline='')
    data = works('a', tmp_path / 'a.txt', f'--tokenizer={kind}', '--val_fraction=0', '--shard_mb=1')
    assert len(data.train.paths) > 2
    assert ids_of(data) == [data.tokenizer.end_of_text, *data.tokenizer.encode(text).tolist()]


def test_two_processes_that_are_killed_and_one_that_goes_on_make_the_bytes_of_one(works, tmp_path):
    path = write_jsonl(tmp_path / 'a.jsonl', [f'{i}' + TEXT for i in range(120)])
    works('one', path, '--shard_mb=0.5')
    flags = [f'--input={path}', '--tokenizer=byte', '--shard_mb=0.5', f"--data_dir={tmp_path / 'data'}"]
    command = [sys.executable, str(REPO / 'prepare.py'), 'two', *flags, '--processes=2']
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for _ in range(3):
        process.stdout.readline()  # a shard is there
    process.kill()
    process.wait()
    process.stdout.close()
    folder = tmp_path / 'data' / 'two'
    made = (folder / 'unfinished' / 'train_000002.bin').stat().st_mtime_ns
    assert not (folder / 'meta.json').exists()
    works('two', path, '--shard_mb=0.5')
    assert (folder / 'train_000002.bin').stat().st_mtime_ns == made  # not again
    assert bins(folder) == bins(tmp_path / 'data' / 'one')


def test_killed_at_any_file_the_same_command_goes_on(prepare, works, tmp_path, monkeypatch):
    class Interrupted(Exception):
        pass

    folder = tmp_path / 'data' / 'mine'
    path = write_jsonl(tmp_path / 'a.jsonl', some_texts(6, 12))
    other = write_jsonl(tmp_path / 'b.jsonl', some_texts(7, 12))
    flags = ['mine', path, '--shard_mb=0.01', '--overwrite', '--tokenizer=char']
    works(*flags)
    want = bins(folder)
    real = os.replace
    for k in range(1, 60):
        shutil.rmtree(folder)
        works('mine', other, '--tokenizer=char', '--shard_mb=0.005')
        before = bins(folder)
        n_calls = 0

        def replace(source, target):
            nonlocal n_calls
            n_calls += 1
            if n_calls == k:
                raise Interrupted
            real(source, target)
        with monkeypatch.context() as patch:
            patch.setattr(os, 'replace', replace)
            try:
                prepare(*flags)
                break
            except Interrupted:
                pass
        if (folder / 'unfinished' / 'meta.json').exists():
            with pytest.raises(SystemExit):  # it says that it is not finished
                Dataset('mine', tmp_path / 'data')
            if k % 2:  # another command only finishes it
                assert prepare('mine', other).status == 2
        else:
            Dataset('mine', tmp_path / 'data')
            assert bins(folder) == before  # not touched yet
        works(*flags)
        assert bins(folder) == want
        assert not (folder / 'unfinished').exists()
    assert k > 15


@pytest.mark.parametrize('unknown', [None, '[UNK]'])
def test_bytes_are_those_of_the_text_where_a_tokenizer_loses_some_of_it(works, tmp_path, unknown):
    tokenizers = pytest.importorskip('tokenizers')
    letters = ['a', 'b', 'c', 'd', ' ', '\n', unknown or '?']
    vocab = {letter: id for id, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], unk_token=unknown))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(tmp_path / 't.json'))
    text = 'abcd abcd\n' * 9000 + 'abcd xyä\n' * 500
    (tmp_path / 'late.txt').write_text(text, encoding='utf-8')
    data = works('mine', tmp_path / 'late.txt', f"--tokenizer={tmp_path / 't.json'}")
    assert total(data, 'lost_characters') == 3 * 500 and '1,500 characters' in data.out
    assert total(data, 'bytes') == len(text.encode()) != total(data, 'token_bytes')


def test_a_tokenizer_that_cannot_encode_is_one_line(prepare, tmp_path):
    tokenizers = pytest.importorskip('tokenizers')
    model = tokenizers.models.WordLevel({'a': 0}, unk_token='[UNK]')
    tokenizers.Tokenizer(model).save(str(tmp_path / 't.json'))
    (tmp_path / 'a.txt').write_text(TEXT)
    is_refused(prepare('q', tmp_path / 'a.txt', f"--tokenizer={tmp_path / 't.json'}"), 't.json', 'a.txt')
    assert not (tmp_path / 'data' / 'q').exists()


def test_the_tokenizer_of_another_dataset(works, tmp_path):
    (tmp_path / 'a.txt').write_text(TEXT)
    (tmp_path / 'b.txt').write_text('7 times 6')
    a = works('a', tmp_path / 'a.txt', '--tokenizer=char')
    b = works('b', tmp_path / 'b.txt', f"--tokenizer={tmp_path / 'data' / 'a'}")
    assert a.tokenizer_state == b.tokenizer_state


# -----------------------------------------------------------------------------
# conversations


def test_conversations_are_read_in_every_form_and_other_rows_left_out(prepare, works, tmp_path):
    forms = {'alpaca': [], 'sharegpt': [], 'openai': []}
    for i in range(40):
        question = f'Question {i}?'
        answer = f'Answer {i}.'
        messages = [{'role': 'user', 'content': question}, {'role': 'assistant', 'content': answer}]
        theirs = [{'from': 'human', 'value': question}, {'from': 'gpt', 'value': answer}]
        forms['alpaca'].append({'instruction': question, 'output': answer})
        forms['sharegpt'].append({'conversations': theirs})
        forms['openai'].append({'messages': messages})
    found = []
    for form, rows in forms.items():
        (tmp_path / f'{form}.json').write_text(json.dumps([{'instruction': 'a'}, *rows]))
        data = works(str(tmp_path / f'{form}.json'), '--chat')
        assert '1 rows' in data.out and 'row 1' in data.out
        found.append(bins(tmp_path / 'data' / form))
    assert found[0] == found[1] == found[2]
    assert len(data.train.starts) + len(data.val.starts) == 40
    said = data.tokenizer.decode(data.train.read([0], data.train.n)[0][data.train.mask].tolist())
    assert 'Answer' in said and 'Question' not in said
    is_refused(prepare('none', write_jsonl(tmp_path / 'rows.jsonl', ['a']), '--chat'))


# -----------------------------------------------------------------------------
# what goes wrong

LINE = json.dumps({'text': TEXT[:100]}).encode() + b'\n'
BAD = {  # file: its content, a word of the message
    'gbk.txt': ('天地玄黄，宇宙洪荒。\n'.encode('gbk') * 50, 'offset 0'),
    'far.txt': (b'fine text\n' * 200_000 + 'café '.encode() + b'caf\xe9\n', 'offset 2000009'),
    'rows.jsonl': (LINE * 999 + b'{"text": "caf\xe9"}\n', f'offset {999 * len(LINE) + 13}'),
    'zipped.txt.gz': (gzip.compress(b'fine text\n' * 50_000 + b'\xff'), 'offset 500000'),
    'wide.txt': ('fine text'.encode('utf-16') + b'a', 'offset 20'),
    'nul.txt': (b'abc\0def' * 100, 'utf-16le'),
    'cut.txt.gz': (gzip.compress(os.urandom(9000).hex().encode())[:-2000], 'again'),
    'key.jsonl': (b'{"content": "x"}\n', 'content'),
    'lines.json': (LINE * 2, '.jsonl'),
    'book.epub': (b'PK', 'pandoc'),
    'empty.txt': (b'', ''),
}


@pytest.mark.parametrize('file', BAD)
def test_a_bad_file_is_one_line_and_leaves_nothing(prepare, tmp_path, file):
    content, word = BAD[file]
    (tmp_path / file).write_bytes(content)
    is_refused(prepare('mine', tmp_path / file), word)
    assert not (tmp_path / 'data' / 'mine').exists()


@pytest.mark.parametrize('flags', [
    'mine', '../x --input=book.txt', '--input=book.txt --val_fraction=1', '--chat',
    '--input=book.txt --tokenizer=gpt9', '--input=book.txt --tokenizer=bpe:x',
    '--input=book.txt --chat --tokenizer=bpe:300', '--input=book.txt --tokenizer=out/ckpt.pt'])
def test_a_bad_knob_is_one_line(prepare, tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'book.txt').write_text(TEXT)
    is_refused(prepare(*flags.split()))
    assert not (tmp_path / 'data' / 'pystdlib').exists()


def test_what_is_there_stays_until_the_new_dataset_is_whole(prepare, works, tmp_path):
    (tmp_path / 'a.txt').write_text(TEXT)
    (tmp_path / 'b.txt').write_text(TEXT[::-1])
    (tmp_path / 'bad.txt').write_bytes(TEXT.encode() + b'\xff')
    folder = tmp_path / 'data' / 'mine'
    works('mine', tmp_path / 'a.txt', '--tokenizer=char')
    (folder / 'prepare.py').write_text('# of somebody')
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert 'already' in works('mine', tmp_path / 'a.txt', '--tokenizer=char').out
    is_refused(prepare('mine', tmp_path / 'b.txt'), '--overwrite')
    is_refused(prepare('mine', tmp_path / 'bad.txt', '--overwrite'), 'bad.txt')
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert documents_in(works('mine', tmp_path / 'b.txt', '--overwrite')) == [TEXT[::-1]]
    assert {path.name for path in folder.iterdir()} == {'train.bin', 'val.bin', 'meta.json', 'prepare.py'}


def test_files_of_the_hub(prepare, works, tmp_path, monkeypatch):
    class HfApi:
        def list_repo_files(self, repo, repo_type):
            return ['data/train-0.jsonl', 'data/train-1.jsonl', 'data/test.jsonl']

    def hf_hub_download(repo, file, repo_type):
        return str(tmp_path / repo / file)
    module = types.SimpleNamespace(HfApi=HfApi, hf_hub_download=hf_hub_download)
    monkeypatch.setitem(sys.modules, 'huggingface_hub', module)
    folder = tmp_path / 'some' / 'one' / 'data'
    folder.mkdir(parents=True)
    for i in range(2):
        write_jsonl(folder / f'train-{i}.jsonl', some_texts(i))
    data = works('mine', '--input=hf:some/one/data/train-*.jsonl')
    assert sorted(documents_in(data)) == sorted(some_texts(0) + some_texts(1))
    is_refused(prepare('none', '--input=hf:some/one/*.parquet'), 'test.jsonl')
