"""Text becomes a dataset: the right ids on the right side, in one run or in parts, checked by --show."""

import hashlib
import io
import urllib.request
import zipfile

import numpy as np
import pytest
from conftest import TEXT, bytes_in, is_refused
from test_read_text import files_of, ids_of, write

from dataset import Dataset
from support.encode_text import split_by_hash
from support.tokenizer import same_tokenizer


@pytest.fixture
def book(tmp_path):
    """A text of one document."""
    (tmp_path / 'book.txt').write_text(TEXT)
    return tmp_path / 'book.txt'


# -----------------------------------------------------------------------------
# the named sets


def test_the_default_set_is_this_pythons_library(prepare, tmp_path):
    result = prepare('pystdlib')
    assert result.status == 0
    assert 'train on it: python train.py config/quickstart.py --data_dir=' in result.out
    data = Dataset('pystdlib', tmp_path / 'data')
    train, val = data.meta['splits']['train'], data.meta['splits']['val']
    assert 6e6 < train['bytes'] + val['bytes'] < 30e6 and 0.03 < val['documents'] / train['documents'] < 0.3
    ids = ids_of(tmp_path, 'pystdlib')
    text = data.tokenizer().decode(ids[:200_000])
    assert 'import ' in text and text.startswith('<|endoftext|>')
    assert ids.count(256) == train['documents'] + val['documents']
    assert prepare('pystdlib', '--show').status == 0


# checksums of the files that nanoGPT's own two scripts wrote from this text
NANOGPT = {
    ('shakespeare_char', 'train'): '6ec305602a99ac2802745a134e1f5e33e2231b4855525b00b9aebb730ac2626f',
    ('shakespeare_char', 'val'): 'd37d30cc0c8327c270d493299c3dca54135f6d5f1c9ef60cda78076e311204b1',
    ('shakespeare', 'train'): '502a2bdc8210d1ac5d5674867cb74467dd31db575d25cf6dbb08c8bdbea8680f',
    ('shakespeare', 'val'): '68a53422394c26a655ebe641f5c6f49888e8f4e45fe5d6f02abda63ba3ebd65b',
}


def test_shakespeare_comes_out_as_nanogpt_makes_it(script, tmp_path, test_data, gpt2):
    for (name, split), checksum in NANOGPT.items():
        args = f"--input={test_data / 'tinyshakespeare.txt'}", f"--data_dir={tmp_path / 'data'}"
        assert script('prepare.py', name, *args).status == 0
        assert hashlib.sha256(files_of(tmp_path, name)[f'{split}.bin']).hexdigest() == checksum


def test_an_error_page_is_never_kept(prepare, tmp_path, monkeypatch):
    page = io.BytesIO(b'<html>429 Too Many Requests</html>')
    monkeypatch.setattr(urllib.request, 'urlopen', lambda url, timeout: page)
    is_refused(prepare('shakespeare_char'), 'checksum', 'input.txt')
    assert not (tmp_path / 'data' / 'shakespeare_char').exists()


def test_the_files_of_the_benchmarks_are_fetched(prepare, tmp_path, monkeypatch):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, 'w') as f:
        f.writestr('eval_bundle/core.yaml', 'icl_tasks: []')
    pages = {'hellaswag_val.jsonl': b'{}\n', 'eval_bundle.zip': packed.getvalue()}
    monkeypatch.setattr(urllib.request, 'urlopen',
                        lambda url, timeout: io.BytesIO(pages[url.rpartition('/')[2]]))
    for name, file in (('hellaswag', 'hellaswag_val.jsonl'), ('core', 'eval_bundle/core.yaml')):
        result = prepare(name)
        assert result.status == 0 and f'--tasks={name}' in result.out and (tmp_path / 'data' / file).exists()


# -----------------------------------------------------------------------------
# train and val


def test_a_document_stays_on_its_side_when_others_are_added(prepare, tmp_path):
    texts = [f'document {i}: ' + TEXT[i:i + 100] for i in range(150)]
    sides = []
    for n in (100, 150):
        prepare(f'{n}', write(tmp_path / f'all.{n}.jsonl', texts[:n]))
        val = np.frombuffer(files_of(tmp_path, f'{n}')['val.bin'], '<u2').tolist()
        sides.append({*Dataset(f'{n}', tmp_path / 'data').tokenizer().decode(val).split('<|endoftext|>')[1:]})
    assert sides[0] == {text for text in sides[1] if text in texts[:100]}
    assert 3 < len(sides[0]) < 25


def test_the_hash_of_a_long_document_does_not_give_most_of_the_text_to_val(prepare, tmp_path):
    long = next(text for i in range(99) if split_by_hash(text := f'{i}{TEXT}', 0.1) == 'val')
    prepare('mine', write(tmp_path / 'all.jsonl', [long, 'short']))
    data = Dataset('mine', tmp_path / 'data')
    assert 0.05 < data.val.n / data.train.n < 0.2


def test_a_single_document_gives_its_end(prepare, tmp_path, book):
    for tokenizer, begin in (('char', 0), ('byte', 1)):
        assert prepare(tokenizer, book, f'--tokenizer={tokenizer}', '--val_fraction=0.2').status == 0
        data = Dataset(tokenizer, tmp_path / 'data')
        assert data.tokenizer().decode(ids_of(tmp_path, tokenizer)[begin:]) == TEXT
        assert data.val.n == int(0.2 * (len(TEXT) + begin))
        assert bytes_in(data) == len(TEXT.encode())
    assert prepare('noval', book, '--val_fraction=0').status == 0
    assert not (tmp_path / 'data' / 'noval' / 'val.bin').exists()
    assert Dataset('noval', tmp_path / 'data').val is None


def test_max_tokens_ends_train_bin_there_and_reads_no_further(prepare, tmp_path):
    (tmp_path / 'in').mkdir()
    for i in range(30):
        write(tmp_path / 'in' / f'all.{i:02d}.jsonl', [f'{i}' + TEXT] * 3)
    (tmp_path / 'in' / 'z.jsonl').write_text('broken')  # is not reached
    for workers in (1, 2):
        assert prepare(f'mine{workers}', tmp_path / 'in', '--max_tokens=1700000', '--shard_tokens=500000',
                       f'--workers={workers}', '--val_fraction=0.4').status == 0
    data = Dataset('mine1', tmp_path / 'data')
    assert data.train.n == 1700000 and len(data.train.paths) == 4
    # by their hashes three times three stand before the end of train.bin, and three soon behind it
    assert data.meta['splits']['val']['documents'] == 9
    assert files_of(tmp_path, 'mine1') == files_of(tmp_path, 'mine2')
    assert prepare('mine1', '--show').status == 0


# -----------------------------------------------------------------------------
# a tokenizer of one's own


def test_a_tokenizer_of_ones_own_decodes_from_the_folder_and_serves_another_set(prepare, tmp_path):
    pytest.importorskip('tokenizers'), pytest.importorskip('tiktoken')
    text = TEXT + "It's 12345, isn't it? naïve 漢字\n"
    for name, tokenizer, content in (('a', 'bpe:320', text), ('b', tmp_path / 'data' / 'a', text[::-1])):
        (tmp_path / f'{name}.txt').write_text(content, encoding='utf-8')
        assert prepare(name, tmp_path / f'{name}.txt', f'--tokenizer={tokenizer}').status == 0
        ids, tok = ids_of(tmp_path, name), Dataset(name, tmp_path / 'data').tokenizer()
        assert ids[0] == tok.end_of_text == tok.n_vocab - 1 and tok.decode(ids[1:]) == content
    a, b = (Dataset(name, tmp_path / 'data') for name in 'ab')
    assert same_tokenizer(a.tokenizer_state, b.tokenizer_state) and a.meta['vocab_size'] <= 320
    assert a.train.n < 0.6 * len(text), 'it has learned something'
    assert tok.encode_prompt('<|endoftext|>') == [tok.end_of_text], 'but in a text it is text'
    path = tmp_path / 'data' / 'a' / 'tokenizer.tiktoken'
    path.write_bytes(path.read_bytes().replace(b' 300\n', b' 301\n', 1))
    is_refused(prepare('a', '--show'), 'tokenizer.tiktoken', 'checksum')


def test_without_network_and_cache_the_error_says_how_to_bring_it(prepare, tmp_path, book, monkeypatch):
    tiktoken = pytest.importorskip('tiktoken')

    def get_encoding(name):
        raise ConnectionError('no network')
    monkeypatch.setattr(tiktoken, 'get_encoding', get_encoding)
    is_refused(prepare('mine', book, '--tokenizer=gpt2'), 'TIKTOKEN_CACHE_DIR', "get_encoding('gpt2')", '--tokenizer=byte')
    assert not (tmp_path / 'data' / 'mine').exists()


# -----------------------------------------------------------------------------
# --show and mistakes


def test_show_tells_and_checks(prepare, tmp_path):
    prepare('mine', write(tmp_path / 'all.jsonl', [f'document {i}: ' + TEXT[:500] for i in range(100)]), '--shard_tokens=20000')
    result = prepare('mine', '--show')
    assert result.status == 0 and 'checksums right' in result.out and 'document 0' in result.out, result.err
    path = tmp_path / 'data' / 'mine' / 'train_000001.bin'
    content = path.read_bytes()
    path.write_bytes(content[:50] + b'\x09\x00' + content[52:])
    result = prepare('mine', '--show')
    assert result.status == 1 and 'checksums WRONG' in result.out
    path.write_bytes(content[:-2])
    is_refused(prepare('mine', '--show'), 'train_000001.bin')
    is_refused(prepare('absent', '--show'), 'absent')
    (path.parent / 'meta.json').write_text('{"vocab_size": 257}')  # all that is known of somebody's own
    result = prepare('mine', '--show')
    assert result.status == 0 and 'checksums unknown' in result.out


@pytest.mark.parametrize('name, flags, word', [
    ('mine', '', '--input'), ('../nofile.txt', '', 'no such file'), ('../x', '--input=book.txt', 'name'),
    ('mine', '--input=book.txt --val_fraction=1', 'val_fraction'),
    ('mine', '--input=book.txt --tokenizer=gpt9', 'gpt2'),
    ('mine', '--input=book.txt --tokenizer=bpe:100', '257'),
    ('mine', '--input=book.txt --workers=0', 'workers'),
    ('mine', '--input=book.txt --encoding=ascii', 'ascii'),
    ('mine', '--input=book.txt --input=hf:a/b', 'one --input'),
    ('mine', '--input=book.txt --data_dir=data', '--data_dir')])
def test_a_bad_knob_is_one_line(prepare, tmp_path, monkeypatch, name, flags, word):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'book.txt').write_text(TEXT + 'é')
    if '--data_dir' in flags:
        (tmp_path / 'data').write_text('a file')
    is_refused(prepare(name, *flags.split()), word)
    assert not (tmp_path / 'data' / 'mine').exists()
