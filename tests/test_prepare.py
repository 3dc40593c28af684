"""Text becomes a dataset: the right ids on the right side, in one run or in parts, checked by --show."""

import hashlib
import io
import urllib.request

import numpy as np
import pytest
from conftest import TEXT, own_process
from test_read_text import files_of, write

from dataset import Dataset
from support.tokenizer import same_tokenizer


def prepare(script, where, *args):
    return script('prepare.py', *args, f"--data_dir={where / 'data'}")


def ids_of(where, name, split='train'):
    return np.fromfile(where / 'data' / name / f'{split}.bin', dtype='<u2')


@pytest.fixture
def book(tmp_path):
    """The argument that names a text of one document."""
    (tmp_path / 'book.txt').write_text(TEXT)
    return f"--input={tmp_path / 'book.txt'}"


# -----------------------------------------------------------------------------
# the named sets


def test_the_default_set_is_this_pythons_library(script, tmp_path):
    result = prepare(script, tmp_path)
    assert result.status == 0 and 'train on it: python train.py config/quickstart.py --data_dir=' in result.out
    data = Dataset('pystdlib', tmp_path / 'data')
    train, val = data.meta['splits']['train'], data.meta['splits']['val']
    assert 6e6 < train['bytes'] + val['bytes'] < 30e6 and 0.03 < val['documents'] / train['documents'] < 0.3
    ids = ids_of(tmp_path, 'pystdlib')
    text = data.tokenizer().decode(ids[:200_000].tolist())
    assert 'import ' in text and text.startswith('<|endoftext|>') and (ids == 256).sum() == train['documents']
    assert prepare(script, tmp_path, '--show').status == 0


# checksums of the files that nanoGPT's own two scripts wrote from this text
NANOGPT = {
    ('shakespeare_char', 'train'): '6ec305602a99ac2802745a134e1f5e33e2231b4855525b00b9aebb730ac2626f',
    ('shakespeare_char', 'val'): 'd37d30cc0c8327c270d493299c3dca54135f6d5f1c9ef60cda78076e311204b1',
    ('shakespeare', 'train'): '502a2bdc8210d1ac5d5674867cb74467dd31db575d25cf6dbb08c8bdbea8680f',
    ('shakespeare', 'val'): '68a53422394c26a655ebe641f5c6f49888e8f4e45fe5d6f02abda63ba3ebd65b',
}


def test_shakespeare_comes_out_as_nanogpt_makes_it(script, tmp_path, test_data, gpt2):
    for name in ('shakespeare_char', 'shakespeare'):
        assert prepare(script, tmp_path, name, f"--input={test_data / 'tinyshakespeare.txt'}").status == 0
        for split in ('train', 'val'):
            content = (tmp_path / 'data' / name / f'{split}.bin').read_bytes()
            assert hashlib.sha256(content).hexdigest() == NANOGPT[name, split]


def test_an_input_txt_in_the_folder_is_used_instead_of_the_download(script, tmp_path):
    folder = tmp_path / 'data' / 'shakespeare_char'
    folder.mkdir(parents=True)
    (folder / 'input.txt').write_text(TEXT)
    result = prepare(script, tmp_path, 'shakespeare_char')
    assert result.status == 0, result.err
    assert Dataset('shakespeare_char', tmp_path / 'data').train.n == int(len(TEXT) * 0.9)


def test_an_error_page_is_never_kept(script, tmp_path, monkeypatch):
    page = io.BytesIO(b'<html>429 Too Many Requests</html>')
    monkeypatch.setattr(urllib.request, 'urlopen', lambda url, timeout: page)
    result = prepare(script, tmp_path, 'shakespeare_char')
    assert result.status == 2 and 'checksum' in result.err and 'input.txt' in result.err
    assert not (tmp_path / 'data' / 'shakespeare_char').exists()


# -----------------------------------------------------------------------------
# train and val


def test_a_document_stays_on_its_side_when_others_are_added(script, tmp_path):
    texts = [f'document {i}: ' + TEXT[i:i + 100] for i in range(150)]
    sides = []
    for n in (100, 150):
        place = tmp_path / str(n)
        place.mkdir()
        source = write(place / 'all.jsonl', texts[:n])
        prepare(script, place, 'mine', f'--input={source}', '--tokenizer=byte')
        text = Dataset('mine', place / 'data').tokenizer().decode(ids_of(place, 'mine', 'val').tolist())
        sides.append(set(text.split('<|endoftext|>')[1:]))
    assert sides[0] == {text for text in sides[1] if text in texts[:100]}
    assert 3 < len(sides[0]) < 25


def test_a_single_document_gives_its_end(script, tmp_path, book):
    for tokenizer, begin in (('char', 0), ('byte', 1)):
        args = book, f'--tokenizer={tokenizer}'
        assert prepare(script, tmp_path, tokenizer, *args, '--val_fraction=0.2').status == 0
        data = Dataset(tokenizer, tmp_path / 'data')
        train, val = (ids_of(tmp_path, tokenizer, split).tolist() for split in ('train', 'val'))
        assert data.tokenizer().decode(train[begin:] + val) == TEXT
        assert len(val) == int(0.2 * (len(TEXT) + begin))
        assert sum(split['bytes'] for split in data.meta['splits'].values()) == len(TEXT.encode())
    assert prepare(script, tmp_path, 'noval', book, '--tokenizer=char', '--val_fraction=0').status == 0
    assert not (tmp_path / 'data' / 'noval' / 'val.bin').exists()
    assert Dataset('noval', tmp_path / 'data').val is None


def test_max_tokens_ends_train_bin_there_and_reads_no_further(script, tmp_path):
    (tmp_path / 'in').mkdir()
    for i in range(30):
        write(tmp_path / 'in' / f'all.{i:02d}.jsonl', [f'{i}' + TEXT] * 3)
    (tmp_path / 'in' / 'z.jsonl').write_text('broken')  # is not reached
    args = f"--input={tmp_path / 'in'}", '--tokenizer=byte', '--max_tokens=1234567', '--shard_tokens=500000'
    for workers in (1, 2):
        result = prepare(script, tmp_path, f'mine{workers}', *args, f'--workers={workers}')
        assert result.status == 0, result.err
    data = Dataset('mine1', tmp_path / 'data')
    assert data.train.n == 1234567 and len(data.train.paths) == 3
    assert files_of(tmp_path, 'mine1') == files_of(tmp_path, 'mine2')
    assert prepare(script, tmp_path, 'mine1', '--show').status == 0


# -----------------------------------------------------------------------------
# a tokenizer of one's own


def test_a_tokenizer_of_ones_own_decodes_from_the_folder_and_serves_another_set(script, tmp_path):
    pytest.importorskip('tokenizers'), pytest.importorskip('tiktoken')
    text = TEXT + "It's 12345, isn't it? naïve 漢字\n"
    (tmp_path / 'a.txt').write_text(text, encoding='utf-8')
    (tmp_path / 'b.txt').write_text(text[::-1], encoding='utf-8')
    for name, tokenizer in (('a', 'bpe:320'), ('b', tmp_path / 'data' / 'a')):
        args = f"--input={tmp_path / name}.txt", f'--tokenizer={tokenizer}'
        assert prepare(script, tmp_path, name, *args).status == 0
    a, b = (Dataset(name, tmp_path / 'data') for name in 'ab')
    assert same_tokenizer(a.tokenizer_state, b.tokenizer_state) and a.meta['vocab_size'] <= 320
    for data, want in ((a, text), (b, text[::-1])):
        tok = data.tokenizer()
        ids = np.concatenate([tokens.windows([0], tokens.n)[0] for tokens in (data.train, data.val)]).tolist()
        assert ids[0] == tok.end_of_text == tok.n_vocab - 1 and tok.decode(ids[1:]) == want
    assert a.train.n < 0.6 * len(text), 'it has learned something'


def test_without_network_and_cache_the_error_names_the_files(tmp_path, book):
    pytest.importorskip('tiktoken')
    # an address that refuses at once stands for "no network"
    nowhere = 'http://127.0.0.1:9'
    env = {'TIKTOKEN_CACHE_DIR': str(tmp_path / 'cache'), 'HTTPS_PROXY': nowhere, 'https_proxy': nowhere}
    data_dir = f"--data_dir={tmp_path / 'data'}"
    result = own_process('prepare.py', 'mine', book, '--tokenizer=gpt2', data_dir, env=env)
    assert result.status == 2 and result.err.count('\n') == 1, result.err
    words = ['TIKTOKEN_CACHE_DIR', 'gpt2', 'byte']
    assert all(word in result.err for word in words), result.err
    assert not (tmp_path / 'data' / 'mine').exists()


# -----------------------------------------------------------------------------
# --show, --help and mistakes


def test_show_tells_and_checks(script, tmp_path, gpt2):
    source = write(tmp_path / 'all.jsonl', [f'document {i}: ' + TEXT[:500] for i in range(100)])
    prepare(script, tmp_path, 'mine', f'--input={source}', '--tokenizer=byte', '--shard_tokens=20000')
    result = prepare(script, tmp_path, 'mine', '--show')
    assert result.status == 0 and 'WRONG' not in result.out
    assert 'document 0' in result.out and '1.00 bytes per token' in result.out
    path = tmp_path / 'data' / 'mine' / 'train_000001.bin'
    content = path.read_bytes()
    damages = [('checksums', content[:-2]), ('checksums', content[:50] + b'\x09\x00' + content[52:]),
               ('largest id', content[:50] + b'\x99\x99' + content[52:])]
    for what, damaged in damages:
        path.write_bytes(damaged)
        result = prepare(script, tmp_path, 'mine', '--show')
        wrong = [line for line in result.out.splitlines() if 'WRONG' in line]
        assert result.status == 1 and any(what in line for line in wrong), what
    result = prepare(script, tmp_path, 'absent', '--show')
    assert result.status == 2 and 'absent' in result.err
    # nanoGPT's folder, of which nothing is known
    folder = tmp_path / 'data' / 'old'
    folder.mkdir()
    (np.arange(500) % 300).astype('<u2').tofile(folder / 'train.bin')
    result = prepare(script, tmp_path, 'old', '--show')
    assert result.status == 0 and 'no checksums' in result.out, result.err


def test_a_failed_second_run_leaves_the_first_ones_files(script, tmp_path, book):
    (tmp_path / 'latin.txt').write_bytes(b'caf\xe9\n')
    assert prepare(script, tmp_path, 'mine', book, '--tokenizer=byte').status == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / 'data' / 'mine').iterdir()}
    args = f"--input={tmp_path / 'latin.txt'}", '--tokenizer=byte'
    assert prepare(script, tmp_path, 'mine', *args).status == 2
    assert {path.name: path.read_bytes() for path in (tmp_path / 'data' / 'mine').iterdir()} == before


def test_too_little_text_is_told(script, tmp_path):
    cases = [('', '--tokenizer=byte'), ('\n', '--tokenizer=char'), ('ab', '--tokenizer=byte')]
    cases += [('a', '--tokenizer=char', '--val_fraction=0')]
    for content, *args in cases:
        (tmp_path / 'a.txt').write_text(content)
        result = prepare(script, tmp_path, 'mine', f"--input={tmp_path / 'a.txt'}", *args)
        assert result.status == 2 and 'too little text' in result.err and result.err.count('\n') == 1
        assert not (tmp_path / 'data' / 'mine').exists()


def test_bad_knobs_are_one_line_each(script, tmp_path, book):
    cases = [
        (['mine'], '--input'), (['pystdlib', book], 'name'), (['../x', book], 'name'),
        (['mine', book, '--val_fraction=1'], 'val_fraction'), (['mine', book, '--tokenizer=gpt9'], 'gpt2'),
        (['mine', book, '--tokenizer=bpe:100'], '257'), (['mine', book, '--tokenizer=bpe:x'], 'bpe'),
        (['mine', book, '--tokenizer=bpe8192'], 'gpt2'), (['mine', book, '--workers=0'], 'workers'),
        (['mine', book, '--tokenizer=/no/such/tokenizer.json'], '/no/such'),
        (['mine', book, '--shard_tokens=0'], 'shard_tokens'),
        (['mine', book, '--encoding_errors=no'], 'replace'),
    ]
    for args, word in cases:
        result = prepare(script, tmp_path, *args)
        assert result.status == 2 and word in result.err and result.err.count('\n') == 1, (args, result.err)
        assert not (tmp_path / 'data' / 'mine').exists()
    result = script('prepare.py', 'mine', book, f"--data_dir={tmp_path / 'book.txt'}")
    assert result.status == 2 and result.err.count('\n') == 1 and '--data_dir' in result.err
