"""prepare.py turns text into a dataset: the right ids in the right split, also after a kill."""

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
from pathlib import Path

import numpy as np
import pytest
from conftest import REPO, TEXT, data_file

from configurator import InputError
from flatgpt.dataset import Dataset
from flatgpt.tokenizer import learn_bpe
from prepare import gather_chunks, read_documents


@pytest.fixture
def prepare(script, tmp_path, monkeypatch):
    """prepare('mine', '--input=a.txt') runs prepare.py in tmp_path, into data/, with bytes by default."""
    monkeypatch.chdir(tmp_path)

    def run(*args):
        return script('prepare.py', '--tokenizer=byte', *args, '--data_dir=data', '--threads=1')
    return run


@pytest.fixture
def made(prepare):
    """Like prepare, but must succeed. Returns the Dataset, with what was printed in .out."""
    def run(name, *args):
        result = prepare(name, *args)
        assert result.status == 0, result.err
        data = Dataset(name.partition('.')[0], 'data')
        data.out = result.out
        return data
    return run


def is_refused(result, word=''):
    """Assert status 2 and one line on standard error with this word."""
    assert result.status == 2 and result.err.startswith('error: ') and result.err.count('\n') == 1, result.err
    assert word in result.err


def documents_in(*splits):
    """Return the documents of splits of bytes, sorted."""
    found = []
    for split in splits:
        ids = split.read([0], split.n)[0]
        for document in np.split(ids, np.flatnonzero(ids == 256))[1:]:
            found.append(bytes(document[1:].tolist()).decode())
    return sorted(found)


def total(data, key):
    return sum(entry[key] for entry in data.meta['splits'].values())


def bins(name):
    """Return {split: the content of its files}."""
    found = {}
    for split in ('train', 'val'):
        paths = sorted(Path('data', name).glob(f'{split}*.bin'))
        found[split] = b''.join(path.read_bytes() for path in paths)
    return found


def write_jsonl(path, texts):
    Path(path).write_text(''.join(json.dumps({'text': text}) + '\n' for text in texts))


def some_texts(seed, n=60):
    rng = random.Random(seed)
    return [f'{seed} {i}: café 漢字 ' + TEXT[:rng.randrange(3000)] for i in range(n)]


# -----------------------------------------------------------------------------
# built-in datasets

# checksums of the files that nanoGPT's own two scripts wrote from this text
NANOGPT = {
    ('shakespeare_char', 'train'): '6ec305602a99ac2802745a134e1f5e33e2231b4855525b00b9aebb730ac2626f',
    ('shakespeare_char', 'val'): 'd37d30cc0c8327c270d493299c3dca54135f6d5f1c9ef60cda78076e311204b1',
    ('shakespeare', 'train'): '502a2bdc8210d1ac5d5674867cb74467dd31db575d25cf6dbb08c8bdbea8680f',
    ('shakespeare', 'val'): '68a53422394c26a655ebe641f5c6f49888e8f4e45fe5d6f02abda63ba3ebd65b',
}


def test_shakespeare_comes_out_as_nanogpt_makes_it(made, monkeypatch):
    pytest.importorskip('tiktoken')
    if 'TIKTOKEN_CACHE_DIR' not in os.environ:
        monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(data_file('tiktoken_cache')))
    text = data_file('tinyshakespeare.txt')
    os.makedirs('data/shakespeare_char')
    shutil.copy(text, 'data/shakespeare_char/input.txt')  # as if it were downloaded
    made('shakespeare_char', '--tokenizer=None')
    made('shakespeare', f'--input={text}', '--tokenizer=None')
    for (name, split), checksum in NANOGPT.items():
        assert hashlib.sha256(bins(name)[split]).hexdigest() == checksum
    chars = sorted(set(text.read_text()))
    stoi = {char: id for id, char in enumerate(chars)}
    meta = pickle.loads(Path('data/shakespeare_char/meta.pkl').read_bytes())
    assert meta == {'vocab_size': 65, 'itos': dict(enumerate(chars)), 'stoi': stoi}


# -----------------------------------------------------------------------------
# documents


def test_a_marker_is_found_wherever_a_block_ends(tmp_path):
    path = tmp_path / 'a.txt'
    for n in range((1 << 20) - 16, (1 << 20) + 2):
        path.write_text('x' * n + '<|endoftext|>\nsecond<|endoftext|>')
        assert [passage.text for passage in read_documents([str(path)])] == ['x' * n, 'second']


def test_every_kind_of_file_gives_the_same_documents(made):
    texts = some_texts(1, 100)
    write_jsonl('rows.jsonl', texts)
    lines = Path('rows.jsonl').read_text()
    text = '<|endoftext|>\n'.join(texts)
    files = {
        'plain.md': text.encode(), 'crlf.txt': text.replace('\n', '\r\n').encode(),
        'mark.txt': text.encode('utf-8-sig'),
        'zipped.txt.gz': gzip.compress(text.encode()),
        'zippedlines.jsonl.gz': gzip.compress(lines.encode('utf-8-sig')),
        'objects.json': lines.encode(), 'zippedobjects.json.gz': gzip.compress(lines.encode('utf-8-sig')),
        'array.json': json.dumps([{'text': text} for text in texts], indent=1).encode(),
    }
    for name, content in files.items():
        Path(name).write_bytes(content)
    pyarrow = pytest.importorskip('pyarrow')
    table = pyarrow.table({'n': range(100), 'text': texts})
    pytest.importorskip('pyarrow.parquet').write_table(table, 'table.parquet')
    data = made('rows.jsonl')
    assert documents_in(data.train, data.val) == sorted(texts)
    for name in [*files, 'table.parquet']:
        made(name)
        assert bins(name.partition('.')[0]) == bins('rows'), name


def test_each_file_is_read_once_also_through_links_and_several_inputs(made):
    os.makedirs('set/a')
    os.mkdir('elsewhere')
    Path('set/a/1.txt').write_text('1' + TEXT)
    Path('elsewhere/2.txt').write_text('2' + TEXT)
    os.symlink('../elsewhere', 'set/link')
    os.symlink('..', 'set/a/above')
    os.symlink('1.txt', 'set/a/same.txt')
    data = made('s', '--input', 'set', './set/*/*.txt', Path('set/a/1.txt').absolute())
    assert total(data, 'documents') == 2


def test_skipped_files_and_folders_are_named(made, monkeypatch):
    os.makedirs('set/closed')
    write_jsonl('set/rows.jsonl', ['a text', 'another'])
    Path('set/README.md').write_text('the description of this dataset')
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith('closed'):
            raise PermissionError(13, 'Permission denied', path)
        return scandir(path)
    monkeypatch.setattr(os, 'scandir', refuse)
    data = made('s', '--input=set')
    assert total(data, 'documents') == 2
    assert 'set/README.md' in data.out and 'set/closed' in data.out
    assert total(made('t', '--input=set/README.md'), 'documents') == 1, 'it is named'


def test_a_text_in_a_row_is_kept_except_for_half_a_surrogate_pair(made):
    Path('a.jsonl').write_text('{"story": "caf\\u00e9 \\ud83d half<|endoftext|>"}\n')
    data = made('a.jsonl', '--text_key=story', '--val_fraction=0')
    assert documents_in(data.train) == ['café \ufffd half<|endoftext|>']


@pytest.mark.parametrize('kind', ['byte', 'hf'])
def test_a_special_token_in_a_text_is_text_and_is_reported(made, kind):
    write_jsonl('a.jsonl', ['move [WHITE] <|endoftext|>' + TEXT, TEXT])
    flags = {'byte': '--tokenizer=byte', 'hf': '--tokenizer=t.json'}
    if kind == 'hf':
        tokenizers = pytest.importorskip('tokenizers')
        tokenizer = tokenizers.ByteLevelBPETokenizer()
        tokenizer.train_from_iterator([TEXT], vocab_size=300, special_tokens=['<|endoftext|>'])
        tokenizer.add_tokens(['[WHITE]'])
        tokenizer.save('t.json')
    data = made('a.jsonl', flags[kind], '--val_fraction=0')
    assert "'<|endoftext|>' (1)" in data.out and '[WHITE]' not in data.out
    ids = data.train.read([0], data.train.n)[0]
    assert (ids == data.meta['end_of_text']).sum() == 2, 'one before each document'
    assert 'move [WHITE] <|endoftext|>0 times 0' in data.tokenizer.decode(ids[1:50].tolist())
    if kind == 'hf':
        assert data.tokenizer.tokenizer.token_to_id('[WHITE]') in ids, 'an ordinary token that was added'


# -----------------------------------------------------------------------------
# train and val


def test_a_document_stays_on_its_side_when_others_are_added(made):
    texts = [f'document {i}: ' + TEXT[i:i + 100] for i in range(150)]
    write_jsonl('a.jsonl', texts[:100])
    write_jsonl('b.jsonl', texts)
    few = documents_in(made('a.jsonl').val)
    more = documents_in(made('b.jsonl').val)
    assert few == [text for text in more if text in texts[:100]]
    assert 3 < len(few) < 25


def test_of_few_documents_val_is_the_end_of_their_text(made):
    texts = [f'{i:02} ' + TEXT[:100] for i in range(20)]
    write_jsonl('book.jsonl', texts)
    data = made('book.jsonl')
    assert documents_in(data.train) == texts[:18] and documents_in(data.val) == texts[18:]
    assert made('book.jsonl', '--val_fraction=0', '--overwrite').val is None
    write_jsonl('two.jsonl', [TEXT, TEXT[::-1]])
    data = made('two.jsonl', '--val_fraction=0.7')
    n = int(0.3 * 2 * len(TEXT))
    assert documents_in(data.train) == [TEXT[:n]]
    assert bins('two')['val'] == np.array([*TEXT[n:].encode(), 256, *TEXT[::-1].encode()], '<u2').tobytes()


def test_of_many_documents_none_is_divided_between_train_and_val(monkeypatch, tmp_path):
    monkeypatch.setattr('prepare.LONGEST_TEXT', 300)
    texts = [f'{i} ' + TEXT[i:i + 1000] for i in range(60)]
    write_jsonl(tmp_path / 'a.jsonl', texts)
    chunks = list(gather_chunks([str(tmp_path / 'a.jsonl')], 700, 0.1))
    assert len(chunks) > 60
    train = ''.join(passage.text for chunk in chunks for passage in chunk.train)
    val = ''.join(passage.text for chunk in chunks for passage in chunk.val)
    for text in texts:
        assert (text in train) != (text in val)
    assert len(train + val) == len(''.join(texts))


def test_max_tokens_ends_with_a_shard(made):
    write_jsonl('a.jsonl', some_texts(2, 300))
    data = made('a.jsonl', '--max_tokens=100000', '--shard_mb=0.03')
    assert 100_000 <= data.train.n < 140_000
    assert len(data.train.paths) == len(list(Path('data/a').glob('train_*.bin'))) > 1


# -----------------------------------------------------------------------------
# shards, tokenizers


def test_a_long_document_has_the_ids_of_encoding_it_at_once(tmp_path, monkeypatch):
    pytest.importorskip('tokenizers')  # learns one with GPT-4's pattern
    monkeypatch.setattr('prepare.LONGEST_TEXT', 1 << 10)
    pieces = [' ', '\n', '\n\n', '   \n', "isn't", 'Straße', '漢字。', '漢字', '1234567', '½', '😀', ' \t',
              '?!', 'e\u0301', '\u3000', '\u2028', 'a' * 40, ' ' * 60, 'WE\u2019LL']
    text = ''.join(random.Random(1).choices(pieces, k=20_000))  # what is hard to cut
    path = tmp_path / 'a.txt'
    path.write_text(text, encoding='utf-8')
    passages = list(read_documents([str(path)]))
    assert len(passages) > 50 and [passage.begins for passage in passages].count(True) == 1
    tokenizer = learn_bpe(400, [text])
    ids = [tokenizer.encode(passage.text) for passage in passages]
    assert np.array_equal(np.concatenate(ids), tokenizer.encode(text))


def test_two_threads_and_a_resume_after_a_kill_make_the_bytes_of_one_thread(made):
    write_jsonl('one.jsonl', [f'{i}' + TEXT for i in range(120)])
    flags = ['--input=one.jsonl', '--tokenizer=byte', '--shard_mb=0.5']
    made('one', *flags)
    command = [sys.executable, REPO / 'prepare.py', 'two', *flags, '--data_dir=data', '--threads=2']
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(3):
            process.stdout.readline()  # a shard is complete
        process.kill()
    third = Path('data/two/train_000002.bin')
    before = third.stat().st_mtime_ns
    with pytest.raises(InputError):
        Dataset('two', 'data')  # not finished
    made('two', *flags)
    assert third.stat().st_mtime_ns == before, 'it is not made again'
    assert bins('two') == bins('one') and not Path('data/two/plan.json').exists()


def test_a_character_that_the_tokenizer_of_another_dataset_lacks_is_one_line(prepare, made):
    Path('a.txt').write_text(TEXT)
    Path('b.txt').write_text('7 times 6')
    write_jsonl('c.jsonl', [TEXT, TEXT, TEXT + 'q', TEXT])
    a = made('a.txt', '--tokenizer=char')
    assert made('b.txt', '--tokenizer=data/a').tokenizer_state == a.tokenizer_state
    result = prepare('c', '--input=c.jsonl', '--tokenizer=data/a', '--shard_mb=0.05', '--threads=2')
    assert result.status == 2 and result.err.count('\n') == 1 and 'c.jsonl' in result.err


def test_killed_at_any_file_the_same_command_resumes(prepare, made, monkeypatch):
    write_jsonl('a.jsonl', some_texts(6, 12))
    write_jsonl('b.jsonl', some_texts(7, 12))
    new = ['mine', '--input=a.jsonl', '--shard_mb=0.01', '--overwrite', '--tokenizer=char']
    made(*new)
    want = bins('mine')
    made('mine', '--input=b.jsonl', '--shard_mb=0.01', '--overwrite', '--tokenizer=char')
    before = bins('mine')
    old = shutil.copytree('data', 'old')
    calls = []

    def killed(real):
        def change(*args):
            calls.append(args)
            if len(calls) == k:
                raise KeyboardInterrupt
            real(*args)
        return change

    for k in range(1, 99):
        shutil.copytree(old, 'data', dirs_exist_ok=True)
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(os, 'replace', killed(os.replace))
            patch.setattr(os, 'remove', killed(os.remove))
            if prepare(*new).status == 0:
                break
        try:
            Dataset('mine', 'data')
        except InputError:  # not finished
            if bins('mine')['train']:  # shards are not thrown away by another command
                is_refused(prepare('mine', '--input=b.jsonl'), '--overwrite')
        else:
            assert bins('mine') in (before, want)
        made(*new)
        assert bins('mine') == want
    assert k > 12 and not Path('data/mine/plan.json').exists()


def test_bytes_are_those_of_the_text_also_if_a_tokenizer_drops_some_of_it(made):
    tokenizers = pytest.importorskip('tokenizers')
    vocab = {letter: id for id, letter in enumerate('abcd \n')}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save('t.json')
    text = 'abcd abcd\n' * 9000 + 'abcd xyä\n' * 500
    Path('late.txt').write_text(text, encoding='utf-8')
    data = made('late.txt', '--tokenizer=t.json')
    assert total(data, 'bytes') == len(text.encode()) == total(data, 'token_bytes') + 4 * 500
    assert '2,000 bytes' in data.out


# -----------------------------------------------------------------------------
# conversations


def test_conversations_have_a_mask_of_what_the_assistant_says(prepare, made):
    rows = [{'instruction': 'it has no answer'}, {'messages': 5}, {}]
    for i in range(40):
        answer = {'role': 'assistant', 'content': f'Answer {i}.', 'reasoning_content': 'So.'}
        rows.append({'messages': [{'role': 'user', 'content': f'Question {i}?'}, answer]})
    Path('chats.json').write_text(json.dumps(rows))
    data = made('chats.json', '--chat')
    # the rows that are skipped are counted by reason
    assert '1 rows' in data.out and '2 rows' in data.out and 'chats.json, row 2)' in data.out
    assert "{'reasoning_content': 40}" in data.out
    assert len(data.train.starts) == 36 and len(data.val.starts) == 4
    rows[3]['messages'][0]['content'] = 'What is <|assistant_end|>?'
    Path('few.json').write_text(json.dumps(rows[3:8]))
    few = made('few.json', '--chat')
    assert len(few.val.starts) == 1 and "'<|assistant_end|>' (1)" in few.out
    ids = data.train.read([0], data.train.n)[0]
    said = data.tokenizer.decode(ids[data.train.mask].tolist())
    assert said.count('Answer') == 36 and 'Question' not in said
    for kind in ['char', 'bpe:300']:  # no vocabulary is learned from conversations
        is_refused(prepare('mine', '--input=chats.json', '--chat', f'--tokenizer={kind}'), 'hf:FOLDER')


# -----------------------------------------------------------------------------
# the command line


def test_a_file_that_is_named_like_a_built_in_dataset_has_the_usual_settings(made):
    Path('shakespeare.txt').write_text(TEXT)
    data = made('shakespeare.txt')
    assert data.train.read([0], 1)[0] == data.tokenizer.end_of_text
    Path('tinystories.txt').write_text(TEXT)
    assert made('tinystories.txt').meta['plan']['val_fraction'] == 0.1


def test_a_text_that_is_a_program_is_read_and_not_run(made):
    text = 'print("GAME " + "RUNS")\ntokenizer = "char"\n' + TEXT
    Path('game.py').write_text(text)
    data = made('game.py')
    assert 'GAME RUNS' not in data.out
    assert data.tokenizer_state == {'kind': 'byte'} and total(data, 'bytes') == len(text)


# -----------------------------------------------------------------------------
# what goes wrong

LINE = json.dumps({'text': TEXT[:100]}).encode() + b'\n'
POINTER = b'version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 548105171\n'
BAD = {  # file: its content, a word of the message
    'far.txt': (b'fine text\n' * 200_000 + 'café '.encode() + b'caf\xe9\n', 'offset 2000009'),
    'rows.jsonl': (LINE * 999 + b'{"text": "caf\xe9"}\n', f'offset {999 * len(LINE) + 13}'),
    'zipped.txt.gz': (gzip.compress(b'fine text\n' * 50_000 + b'\xff'), 'offset 500000'),
    'wide.txt': (TEXT.encode('utf-16-le'), 'wide.txt'),
    'pointer.jsonl.gz': (POINTER, 'git lfs pull'),
    'pointer.parquet': (POINTER, 'git lfs pull'),
    'cut.txt.gz': (gzip.compress(os.urandom(9000).hex().encode())[:-2000], 'cut.txt.gz'),
    'line.jsonl': (b'{"text": "a"}\n{"text": \n', 'line 2'),
    'key.jsonl': (b'{"content": "x"}\n', 'content'),
    'empty.txt': (b'', ''),
}


@pytest.mark.parametrize('file', BAD)
def test_a_bad_file_is_one_line_and_nothing_is_written(prepare, file):
    content, word = BAD[file]
    Path(file).write_bytes(content)
    is_refused(prepare(file), word)
    assert not list(Path('data').glob('*/[!.]*'))


@pytest.mark.parametrize('flags', [
    'mine', '--chat', 'book.txt --val_fraction=1', 'book.txt --tokenizer=gpt9', 'book.txt --chat',
    'book.txt --tokenizer=out/ckpt.pt', 'book.txt --tokenizer=bpe:', 'book.txt --tokenizer=bpe:abc',
    'book.txt --tokenizer=bpe:99999999999', 'book.txt --tokenizer=pointer.json', 'book.txt --shard_mb=0',
    '--input=book.txt', 'book.txt --input=book.txt', 'book.txt pointer.json', '/dev/null'])
def test_a_bad_setting_is_one_line_and_nothing_is_written(prepare, flags):
    Path('book.txt').write_text(TEXT)
    Path('pointer.json').write_bytes(POINTER)
    is_refused(prepare(*flags.split()))
    assert not list(Path('data').glob('*/[!.]*'))


@pytest.mark.parametrize('flags, package', [
    ('tinystories', 'huggingface_hub'), ('folder', 'pyarrow'), ('book.txt --tokenizer=bpe:300', 'tokenizers'),
    ('book.txt --tokenizer=gpt2', 'tiktoken')])
def test_a_missing_package_is_named_before_anything_is_written(prepare, monkeypatch, flags, package):
    os.mkdir('folder')
    Path('folder/a.parquet').write_bytes(b'PAR1')
    Path('book.txt').write_text(TEXT)
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    is_refused(prepare(*flags.split()), f'pip install {package}\n')
    assert not list(Path('data').glob('*/[!.]*'))


def test_a_dataset_is_replaced_only_with_overwrite_and_by_input_that_can_be_read(prepare, made):
    Path('a.txt').write_text(TEXT)
    Path('b.txt').write_text(TEXT[::-1])
    Path('bad.txt').write_bytes(TEXT.encode() + b'\xff')
    folder = Path('data/mine')
    made('mine', '--input=a.txt', '--tokenizer=char')
    (folder / 'prepare.py').write_text('# not a file of the dataset')
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert 'already' in made('mine', '--input=a.txt', '--tokenizer=char').out
    is_refused(prepare('mine', '--input=b.txt'), '--overwrite')
    is_refused(prepare('mine', '--input=bad.txt', '--overwrite'), 'bad.txt')
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert made('mine', '--input=b.txt', '--overwrite').tokenizer_state == {'kind': 'byte'}
    assert {path.name for path in folder.iterdir()} == set(before) - {'meta.pkl'}


def test_the_same_content_is_the_same_dataset_wherever_its_files_are(prepare, made, monkeypatch):
    os.makedirs('project/texts')
    Path('project/texts/a.txt').write_text('1' + TEXT)
    Path('project/texts/b.txt').write_text('2' + TEXT)
    made('project', '--input=project/texts')
    assert 'already' not in made('project', '--input=project/texts', '--overwrite').out
    shutil.copytree('project', 'moved', copy_function=shutil.copyfile)  # without its times
    shutil.rmtree('project')
    os.mkdir('deeper')
    shutil.move('data', 'deeper/data')
    monkeypatch.chdir('deeper')
    assert 'already' in made('project', '--input=../moved/texts').out
    Path('../moved/texts/b.txt').write_text('3' + TEXT)  # as many characters
    is_refused(prepare('project', '--input=../moved/texts'), '--overwrite')


def test_a_dataset_is_read_in_two_lines_of_numpy_and_checked_at_each_start(made):
    Path('a.txt').write_text(TEXT)
    data = made('a.txt')
    meta = json.loads(Path('data/a/meta.json').read_text())
    ids = np.memmap('data/a/train.bin', dtype=meta['dtype'], mode='r')
    assert np.array_equal(ids, data.train.read([0], data.train.n)[0])
    ids[::-1].copy().tofile('data/a/train.bin')  # another program writes other data
    os.utime('data/a/train.bin', (0, 0))
    with pytest.raises(InputError, match='meta.json'):
        Dataset('a', 'data')


def test_files_of_the_hub(prepare, made, tmp_path, monkeypatch):
    class HfApi:
        def list_repo_files(self, repo, repo_type):
            return ['.gitattributes', 'README.md', 'data/train-0.jsonl', 'data/train-1.jsonl']

    def hf_hub_download(repo, file, repo_type):
        return str(tmp_path / repo / file)
    module = types.SimpleNamespace(HfApi=HfApi, hf_hub_download=hf_hub_download)
    monkeypatch.setitem(sys.modules, 'huggingface_hub', module)
    os.makedirs('some/one/data')
    for i in range(2):
        write_jsonl(f'some/one/data/train-{i}.jsonl', some_texts(i))
    for pattern in ['data/train-*.jsonl', '*']:
        data = made('mine', f'--input=hf:some/one/{pattern}', '--overwrite')
        assert documents_in(data.train, data.val) == sorted(some_texts(0) + some_texts(1))
    is_refused(prepare('none', '--input=hf:some/one/*.parquet'), 'train-0')
