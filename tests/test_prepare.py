"""Text of every kind becomes the right ids, whole or not at all."""

import gzip
import hashlib
import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from conftest import REPO, TEXT, own_process

from dataset import Dataset


def prepare(script, tmp_path, *args):
    return script('prepare.py', *args, f"--data_dir={tmp_path / 'data'}")


def ids(tmp_path, name, split='train', dtype='<u2'):
    return np.fromfile(tmp_path / 'data' / name / f'{split}.bin', dtype=dtype)


def test_the_default_set_is_this_pythons_library(script, tmp_path):
    result = prepare(script, tmp_path)
    assert result.status == 0
    data = Dataset('pystdlib', tmp_path / 'data')
    train, val = data.meta['splits']['train'], data.meta['splits']['val']
    assert 6e6 < train['bytes'] + val['bytes'] < 30e6 and 0.03 < val['documents'] / train['documents'] < 0.3
    text = data.tokenizer().decode(ids(tmp_path, 'pystdlib')[:200_000].tolist())
    assert 'import ' in text and text.startswith('<|endoftext|>')
    assert (ids(tmp_path, 'pystdlib') == 256).sum() == train['documents']
    for split in ('train', 'val'):
        path = tmp_path / 'data' / 'pystdlib' / f'{split}.bin'
        assert hashlib.sha256(path.read_bytes()).hexdigest() == data.meta['splits'][split]['sha256']


def test_shakespeare_comes_out_as_nanogpt_makes_it(script, tmp_path, test_data, gpt2):
    # checksums of the files that nanoGPT's own two scripts wrote from this text
    want = {('shakespeare_char', 'train'): '6ec305602a99ac2802745a134e1f5e33e2231b4855525b00b9aebb730ac2626f',
            ('shakespeare_char', 'val'): 'd37d30cc0c8327c270d493299c3dca54135f6d5f1c9ef60cda78076e311204b1',
            ('shakespeare', 'train'): '502a2bdc8210d1ac5d5674867cb74467dd31db575d25cf6dbb08c8bdbea8680f',
            ('shakespeare', 'val'): '68a53422394c26a655ebe641f5c6f49888e8f4e45fe5d6f02abda63ba3ebd65b'}
    for name in ('shakespeare_char', 'shakespeare'):
        assert prepare(script, tmp_path, name, f"--input={test_data / 'tinyshakespeare.txt'}").status == 0
        for split in ('train', 'val'):
            content = (tmp_path / 'data' / name / f'{split}.bin').read_bytes()
            assert hashlib.sha256(content).hexdigest() == want[name, split]


def test_an_input_txt_in_the_folder_stands_in_for_the_download(script, tmp_path):
    folder = tmp_path / 'data' / 'shakespeare_char'
    folder.mkdir(parents=True)
    (folder / 'input.txt').write_text(TEXT)
    result = prepare(script, tmp_path, 'shakespeare_char')
    assert result.status == 0 and 'checksum differs' in result.out
    assert Dataset('shakespeare_char', tmp_path / 'data').train.n == int(len(TEXT) * 0.9)


def test_an_error_page_is_never_kept(script, tmp_path, monkeypatch):
    import io
    import urllib.request
    monkeypatch.setattr(urllib.request, 'urlopen', lambda url, timeout: io.BytesIO(b'<html>429 Too Many Requests</html>'))
    result = prepare(script, tmp_path, 'shakespeare_char')
    assert result.status == 2 and 'checksum' in result.err and 'input.txt' in result.err
    assert not (tmp_path / 'data' / 'shakespeare_char').exists()


def documents(tmp_path, texts, kind):
    folder = tmp_path / 'in'
    folder.mkdir(exist_ok=True)
    if kind.startswith('txt'):
        for i, text in enumerate(texts):
            write(folder / f'{i:04d}.{kind}', text)
    else:
        write(folder / f'all.{kind}', ''.join(json.dumps({'text': text, 'other': 1}) + '\n' for text in texts))
    return folder


def write(path, text):
    with (gzip.open if path.suffix == '.gz' else open)(path, 'wt', encoding='utf-8') as f:
        f.write(text)


def test_txt_and_jsonl_plain_and_gzipped_give_the_same_documents(script, tmp_path):
    texts = [f'document {i}: ' + TEXT[i:i + 300] for i in range(200)]
    found = {}
    for kind in ('txt', 'txt.gz', 'jsonl', 'jsonl.gz'):
        place = tmp_path / kind
        place.mkdir()
        folder = documents(place, texts, kind)
        assert prepare(script, place, 'mine', f'--input={folder}', '--tokenizer=byte').status == 0
        found[kind] = {split: ids(place, 'mine', split).tolist() for split in ('train', 'val')}
    assert found['txt'] == found['txt.gz'] == found['jsonl'] == found['jsonl.gz']
    tok = Dataset('mine', tmp_path / 'txt' / 'data').tokenizer()
    parts = {split: tok.decode(found['txt'][split]).split('<|endoftext|>')[1:] for split in ('train', 'val')}
    assert sorted(parts['train'] + parts['val']) == sorted(texts), 'documents stay whole'
    assert 5 < len(parts['val']) < 40
    pattern = f"--input={tmp_path / 'txt' / 'in'}/*.txt"
    assert prepare(script, tmp_path, 'glob', pattern, '--tokenizer=byte').status == 0
    assert ids(tmp_path, 'glob').tolist() == found['txt']['train']


def test_a_document_stays_on_its_side_when_others_are_added(script, tmp_path):
    texts = [f'document {i}: ' + TEXT[i:i + 100] for i in range(150)]
    sides = []
    for n in (100, 150):
        place = tmp_path / str(n)
        place.mkdir()
        folder = documents(place, texts[:n], 'jsonl')
        prepare(script, place, 'mine', f'--input={folder}', '--tokenizer=byte')
        tok = Dataset('mine', place / 'data').tokenizer()
        sides.append(set(tok.decode(ids(place, 'mine', 'val').tolist()).split('<|endoftext|>')[1:]))
    assert sides[0] == {t for t in sides[1] if t in texts[:100]} and sides[0]


def test_a_single_document_gives_its_end(script, tmp_path):
    write(tmp_path / 'book.txt', TEXT)
    for tokenizer, begin in (('char', 0), ('byte', 1)):
        assert prepare(script, tmp_path, tokenizer, f"--input={tmp_path / 'book.txt'}", f'--tokenizer={tokenizer}', '--val_fraction=0.2').status == 0
        data = Dataset(tokenizer, tmp_path / 'data')
        tok = data.tokenizer()
        train, val = (ids(tmp_path, tokenizer, split).tolist() for split in ('train', 'val'))
        assert tok.decode(train[begin:] + val) == TEXT and len(val) == int(0.2 * (len(TEXT) + begin))
        assert sum(split['bytes'] for split in data.meta['splits'].values()) == len(TEXT.encode())
    assert prepare(script, tmp_path, 'noval', f"--input={tmp_path / 'book.txt'}", '--tokenizer=char', '--val_fraction=0').status == 0
    assert not (tmp_path / 'data' / 'noval' / 'val.bin').exists() and Dataset('noval', tmp_path / 'data').val is None


def test_a_large_txt_is_tokenised_as_a_whole(script, tmp_path, test_data, gpt2, monkeypatch):
    # several times the size of a piece, with everything that patterns treat specially at some place or other
    text = open(test_data / 'tinyshakespeare.txt').read() * 2
    strange = "don't  stop\n\n\n   x\t\ty 12345678 ... ---\r\n  'll naïve 漢字漢字 🙂🙂 <|endoftext|> end \x1cz \u2003w"
    text = strange.join(text[i:i + 9973] for i in range(0, len(text), 9973))
    with open(tmp_path / 'book.txt', 'w', newline='', encoding='utf-8') as f:
        f.write(text)
    text = open(tmp_path / 'book.txt', encoding='utf-8').read()
    import tiktoken
    for name, dtype in (('gpt2', '<u2'), ('o200k_base', '<u4')):
        try:
            encoding = tiktoken.get_encoding(name)
        except OSError:
            continue
        assert prepare(script, tmp_path, name, f"--input={tmp_path / 'book.txt'}", f'--tokenizer={name}').status == 0
        got = np.concatenate([ids(tmp_path, name, split, dtype) for split in ('train', 'val')])
        assert got[0] == encoding.eot_token and got[1:].tolist() == encoding.encode_ordinary(text)
        data = Dataset(name, tmp_path / 'data')
        assert data.meta['dtype'] == {'<u2': 'uint16', '<u4': 'uint32'}[dtype] and data.vocab_size % 64 == 0
        assert data.tokenizer().decode(got[1:].tolist()) == text
        assert sum(split['bytes'] for split in data.meta['splits'].values()) == len(text.encode())


def test_text_keys_and_what_is_wrong_with_lines(script, tmp_path):
    write(tmp_path / 'a.jsonl', ''.join(json.dumps({'content': f'line {i} ' * 20}) + '\n' for i in range(50)))
    args = ['mine', f"--input={tmp_path / 'a.jsonl'}", '--tokenizer=byte']
    assert prepare(script, tmp_path, *args, '--text_key=content').status == 0
    result = prepare(script, tmp_path, *args)
    assert result.status == 2 and 'a.jsonl:1' in result.err and '--text_key' in result.err


def test_marks_and_halves_of_characters_do_no_harm(script, tmp_path, gpt2):
    (tmp_path / 'a.jsonl').write_text('\ufeff' + ''.join('{"text": "%d caf\\u00e9 \\ud83d half"}\n' % i for i in range(40)), encoding='utf-8')
    for tokenizer in ('byte', 'char', 'gpt2'):
        assert prepare(script, tmp_path, tokenizer, f"--input={tmp_path / 'a.jsonl'}", f'--tokenizer={tokenizer}').status == 0
        data = Dataset(tokenizer, tmp_path / 'data')
        assert 'café \ufffd half' in data.tokenizer().decode(ids(tmp_path, tokenizer).tolist())
    (tmp_path / 'b.txt').write_bytes(b'\xef\xbb\xbf' + TEXT.encode())
    assert prepare(script, tmp_path, 'mark', f"--input={tmp_path / 'b.txt'}", '--tokenizer=char').status == 0
    assert '\ufeff' not in Dataset('mark', tmp_path / 'data').tokenizer().chars


def bad(tmp_path):
    write(tmp_path / 'good.txt', TEXT)
    (tmp_path / 'latin.txt').write_bytes(b'abc\n' * 10 + b'caf\xe9\n')
    (tmp_path / 'empty.txt').write_bytes(b'')
    (tmp_path / 'nul.txt').write_bytes(b'abc\0def' * 100)
    (tmp_path / 'cut.txt.gz').write_bytes(gzip.compress(os.urandom(5000).hex().encode())[:-2000])
    (tmp_path / 'not.txt.gz').write_bytes(b'plain')
    (tmp_path / 'wrong.txt.gz').write_bytes((lambda b: b[:60] + bytes(255 - x for x in b[60:90]) + b[90:])(gzip.compress(os.urandom(500).hex().encode())))
    (tmp_path / 'broken.jsonl').write_text('{"text": "fine"}\n{"text": \n')
    (tmp_path / 'number.jsonl').write_text('{"text": 5}\n')
    (tmp_path / 'x.parquet').write_bytes(b'PAR1')
    (tmp_path / 'nothing').mkdir()
    return {
        'latin.txt': ['latin.txt', 'UTF-8', 'byte 43'], 'empty.txt': ['too little text'], 'nul.txt': ['nul.txt', 'NUL'],
        'cut.txt.gz': ['cut.txt.gz', 'again'], 'not.txt.gz': ['not.txt.gz'], 'wrong.txt.gz': ['wrong.txt.gz', 'again'], 'broken.jsonl': ['broken.jsonl:2', 'JSON'],
        'number.jsonl': ['number.jsonl:1', 'int'], 'x.parquet': ['x.parquet', 'again'], 'nothing': ['nothing', '.txt'], 'absent.txt': ['absent.txt'],
    }


def test_bad_text_is_one_line_and_leaves_nothing(script, tmp_path):
    for file, words in bad(tmp_path).items():
        result = prepare(script, tmp_path, 'mine', f'--input={tmp_path / file}', '--tokenizer=byte')
        assert result.status == 2 and result.err.count('\n') == 1 and result.err.startswith('error: '), (file, result.err)
        assert all(word in result.err for word in words), (file, result.err)
        assert not (tmp_path / 'data' / 'mine').exists(), file
    for args, word in [(['mine'], '--input'), (['../x', f"--input={tmp_path / 'good.txt'}"], 'name'), (['mine', f"--input={tmp_path / 'good.txt'}", '--val_fraction=1'], 'val_fraction'),
                       (['mine', f"--input={tmp_path / 'good.txt'}", '--tokenizer=gpt9'], 'gpt2'), (['pystdlib', '--input=x'], 'name')]:
        result = prepare(script, tmp_path, *args)
        assert result.status == 2 and word in result.err and result.err.count('\n') == 1, result.err
        assert not (tmp_path / 'data' / 'mine').exists()


def test_a_failed_second_run_leaves_the_first_ones_files(script, tmp_path):
    bad(tmp_path)
    assert prepare(script, tmp_path, 'mine', f"--input={tmp_path / 'good.txt'}", '--tokenizer=byte').status == 0
    before = {p.name: p.read_bytes() for p in (tmp_path / 'data' / 'mine').iterdir()}
    assert prepare(script, tmp_path, 'mine', f"--input={tmp_path / 'latin.txt'}", '--tokenizer=byte').status == 2
    assert {p.name: p.read_bytes() for p in (tmp_path / 'data' / 'mine').iterdir()} == before


def test_without_network_and_cache_the_error_names_the_files(tmp_path):
    write(tmp_path / 'good.txt', TEXT)
    # an address that refuses at once stands for "no network"
    result = own_process('prepare.py', 'mine', f"--input={tmp_path / 'good.txt'}", '--tokenizer=gpt2', f"--data_dir={tmp_path / 'data'}",
                         env={'TIKTOKEN_CACHE_DIR': str(tmp_path / 'cache'), 'HTTPS_PROXY': 'http://127.0.0.1:9', 'https_proxy': 'http://127.0.0.1:9'})
    assert result.status == 2 and result.err.count('\n') == 1, result.err
    assert 'vocab.bpe' in result.err and '6d1cbeee0f20b3d9449abfede4726ed8212e3aee' in result.err and str(tmp_path / 'cache') in result.err
    assert '6c7ea1a7e38e3a7f062df639a5b80947f075ffe6' in result.err and not (tmp_path / 'data' / 'mine').exists()


@pytest.mark.skipif(not os.path.exists('/proc/self/status'), reason='the peak of memory is read from /proc')
def test_memory_stays_small_for_large_input(tmp_path):
    with open(tmp_path / 'big.txt', 'w') as f:
        for _ in range(150_000_000 // len(TEXT)):
            f.write(TEXT)
    code = textwrap.dedent(f"""
        import runpy, sys
        sys.argv = ['prepare.py', 'big', '--input={tmp_path / 'big.txt'}', '--tokenizer=' + sys.argv[1], '--data_dir={tmp_path / 'data'}']
        sys.path.insert(0, {str(REPO)!r})
        runpy.run_path({str(REPO / 'prepare.py')!r}, run_name='__main__')
        print([line for line in open('/proc/self/status') if line.startswith('VmHWM')][0])  # the peak of this process, in kB
    """)
    for tokenizer in ('byte', 'char'):
        done = subprocess.run([sys.executable, '-c', code, tokenizer], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout.split()[-2]) < 200_000, 'kB: Python and numpy take a third of it, the text alone would take more than the rest'
