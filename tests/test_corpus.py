"""Every format, tokenizer, number of workers and machines: the same documents give the same bytes."""

import gzip
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
from conftest import REPO, TEXT, own_process

import corpus
import dataset
from dataset import Dataset


def prepare(script, where, name, *args):
    return script('prepare.py', name, *args, f"--data_dir={where / 'data'}")


def made(where, name):
    """{file: checksum} of a dataset's token ids."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (where / 'data' / name).iterdir() if path.suffix == '.bin'}


def write(path, texts):
    """`texts` as one file of the kind that its name tells, or a file each in a folder with the kind's name."""
    kind = path.name.removeprefix('all.')
    if path.name == kind:  # a folder of documents
        path.mkdir()
        for i, text in enumerate(texts):
            pack(path / f'{i:04d}.{kind}', text)
    elif kind == 'parquet':
        pyarrow = pytest.importorskip('pyarrow')
        import pyarrow.parquet
        pyarrow.parquet.write_table(pyarrow.table({'n': range(len(texts)), 'text': texts}), path, row_group_size=7)
    else:
        pack(path, ''.join(json.dumps({'text': text, 'other': 1}) + '\n' for text in texts))
    return path


def pack(path, text):
    if path.suffix == '.zst':
        zstandard = pytest.importorskip('zstandard')
        half = len(text) // 2  # two frames in a file, as `cat a.zst b.zst` gives them
        path.write_bytes(b''.join(zstandard.ZstdCompressor().compress(part.encode()) for part in (text[:half], text[half:])))
    elif path.suffix == '.gz':
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding='utf-8', newline='\n')


@pytest.fixture
def books(test_data):
    """The shortest of Gutenberg's books, cut short."""
    with gzip.open(test_data / 'gutenberg_val.jsonl.gz', 'rt', encoding='utf-8') as f:
        return [json.loads(line)['text'][:25_000] for line in f]


KINDS = ['txt', 'txt.gz', 'txt.zst', 'md', 'md.gz', 'all.jsonl', 'all.jsonl.gz', 'all.jsonl.zst', 'all.parquet']


@pytest.mark.parametrize('kind', KINDS)
def test_every_format_holds_the_same_documents(script, tmp_path, kind):
    texts = [f'document {i}: café 漢字 ' + TEXT[i * 50:i * 50 + 300] for i in range(100)]
    for name in ('all.jsonl', kind):
        source = write(tmp_path / name, texts) if not (tmp_path / name).exists() else tmp_path / name
        assert prepare(script, tmp_path, name, f'--input={source}', '--tokenizer=byte', '--shard_tokens=15000').status == 0
    assert made(tmp_path, kind) == made(tmp_path, 'all.jsonl') and len(made(tmp_path, kind)) > 2
    data = Dataset(kind, tmp_path / 'data')
    found = sum((data.tokenizer().decode(tokens.windows([0], tokens.n)[0].tolist()).split('<|endoftext|>')[1:] for tokens in (data.train, data.val)), [])
    assert sorted(found) == sorted(texts)


def test_gutenberg_through_every_tokenizer_format_and_number_of_workers(script, tmp_path, books, gpt2):
    zst = 'all.jsonl.zst' if dataset.importlib.util.find_spec('zstandard') else 'all.jsonl.gz'
    parquet = 'all.parquet' if dataset.importlib.util.find_spec('pyarrow') else 'all.jsonl'
    sources = [write(tmp_path / kind, books) for kind in ('txt', zst, parquet)]
    tokenizers = ['char', 'byte', 'gpt2', 'bpe:1000']
    if dataset.importlib.util.find_spec('tokenizers'):
        tokenizers.append(f"{llama_like(tmp_path / 'llama', books)}/tokenizer.json")
    try:
        import tiktoken
        tiktoken.get_encoding('o200k_base')
        tokenizers.append('o200k_base')
    except OSError:
        pass
    for tokenizer in tokenizers:
        results = {}
        for i, (source, workers) in enumerate(zip(sources, (1, 2, 8))):
            name = f"set{i}"
            result = prepare(script, tmp_path, name, f'--input={source}', f'--tokenizer={tokenizer}', f'--workers={workers}', '--shard_tokens=50000')
            assert result.status == 0, result.err
            results[i] = made(tmp_path, name)
        assert results[0] == results[1] == results[2], tokenizer
        data = Dataset('set0', tmp_path / 'data')
        assert data.meta['dtype'] == ('uint32' if tokenizer == 'o200k_base' else 'uint16')
        tok = data.tokenizer()
        ids = data.train.windows([0], data.train.n)[0]
        text = tok.decode([i for i in ids.tolist() if i != tok.end_of_text])
        training = [text for text in books if corpus.side_of(text, 0.1) == 'train']
        assert 'llama' in tokenizer or ''.join(training).startswith(text), tokenizer
        if tokenizer == 'gpt2':
            want = sum(([gpt2.eot_token] + gpt2.encode_ordinary(text) for text in training), [])
            assert want[:len(ids)] == ids.tolist() and len(want) - len(ids) in (0, int(0.1 * len(want)))


def llama_like(folder, texts):
    """A tokenizer.json as Llama 2's: sentencepiece's habits, <s> and </s>."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers
    tok = Tokenizer(models.BPE(byte_fallback=True, unk_token='<unk>'))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
    tok.decoder = decoders.Sequence([decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)])
    words = sorted({word for text in texts for word in text[:5000].split()})
    tok.train_from_iterator(words, trainers.BpeTrainer(vocab_size=700, special_tokens=['<unk>', '<s>', '</s>', *[f'<0x{b:02X}>' for b in range(256)]], show_progress=False))
    folder.mkdir()
    tok.save(str(folder / 'tokenizer.json'))
    (folder / 'tokenizer_config.json').write_text(json.dumps({'bos_token': '<s>', 'eos_token': '</s>'}))
    return folder


def test_ids_do_not_depend_on_where_a_text_is_cut(monkeypatch, gpt2):
    text = ("don't  stop\n\n\n   x\t\ty 12345678 ... naïve 漢字漢字 🙂🙂 <|endoftext|> end \x1cz \u2003w and more " * 50)
    tok = dataset.TiktokenTokenizer(gpt2)
    want = gpt2.encode_ordinary(text)
    for chunk in (7, 64, 1000):
        monkeypatch.setattr(corpus, 'CHUNK', chunk)
        for step in (3, 50, 10_000):  # however it was read
            pieces = [text[i:i + step] for i in range(0, len(text), step)]
            parts = list(corpus.cut_up(iter(pieces), corpus.CUTS['words']))
            assert ''.join(parts) == text and np.concatenate([tok.encode(part) for part in parts]).tolist() == want
            if step == 3:
                first = parts
            assert parts == first, 'the places depend on the text alone'


def test_a_portion_can_be_gone_on_from(monkeypatch):
    monkeypatch.setattr(corpus, 'CHUNK', 100)
    texts = ['short', TEXT[:950], '', TEXT[500:530], 'x' * 350, TEXT[:99]]

    def documents(start=(0, 0)):
        return ((0, i, corpus.sliced(text), lambda: 0) for i, text in enumerate(texts) if i >= start[1] and text)
    for cut in corpus.CUTS:
        whole = list(corpus.portions(documents(), cut, 0.3))
        for k, (_, place, _) in enumerate(whole):
            rest = list(corpus.portions(documents(place), cut, 0.3, place))
            assert [(portion, where) for portion, where, _ in rest] == [(portion, where) for portion, where, _ in whole[k + 1:]], (cut, k)


def test_workers_that_are_started_afresh_do_the_same(tmp_path):
    """As on macOS and Windows, where a process is not forked."""
    source = write(tmp_path / 'all.jsonl', [TEXT[i:] for i in range(0, 40_000, 1000)])
    (tmp_path / 'sitecustomize.py').write_text('import multiprocessing as m\nreal = m.get_context\nm.get_context = lambda kind=None: real("spawn")\n')
    for name, env in (('forked', {}), ('fresh', {'PYTHONPATH': str(tmp_path)})):
        done = own_process('prepare.py', name, f'--input={source}', '--tokenizer=bpe:400', '--workers=2', f"--data_dir={tmp_path / 'data'}", env=env)
        assert done.status == 0, done.err
    assert made(tmp_path, 'forked') == made(tmp_path, 'fresh')


# -----------------------------------------------------------------------------
# several machines


@pytest.mark.parametrize('tokenizer', ['byte', 'char', 'bpe:300'])
def test_parts_joined_are_the_bytes_of_one_run(script, tmp_path, tokenizer):
    (tmp_path / 'in').mkdir()
    rng = random.Random(3)
    for i in range(9):
        write(tmp_path / 'in' / f'all.{i}.jsonl', [f'{i} {n}' + TEXT[n * 10:n * 10 + rng.randrange(2000)] for n in range(20)])
    args = [f"--input={tmp_path / 'in'}", f'--tokenizer={tokenizer}', '--shard_tokens=20000', '--val_fraction=0.2']
    assert prepare(script, tmp_path, 'whole', *args).status == 0
    for i in (3, 1, 4, 2):
        if i == 2:
            with pytest.raises(SystemExit):
                Dataset('mine', tmp_path / 'data')
            result = prepare(script, tmp_path, 'mine', '--join')
            assert result.status == 2 and '2/4' in result.err
        result = prepare(script, tmp_path, 'mine', *args, f'--part={i}/4')
        assert result.status == 0 and '--join' in result.out
    result = prepare(script, tmp_path, 'mine', '--join')
    assert result.status == 0, result.err
    assert made(tmp_path, 'mine') == made(tmp_path, 'whole') and len(made(tmp_path, 'mine')) > 4
    left = {path.name for path in (tmp_path / 'data' / 'mine').iterdir()}
    assert not any(name.startswith(('part', 'unfinished')) for name in left)
    whole, joined = (Dataset(name, tmp_path / 'data').meta for name in ('whole', 'mine'))
    assert whole['splits'] == joined['splits'] and whole['tokenizer'] == joined['tokenizer']


def test_more_parts_than_files_and_a_single_document(script, tmp_path):
    (tmp_path / 'book.txt').write_text(TEXT)
    args = [f"--input={tmp_path / 'book.txt'}", '--tokenizer=byte']
    assert prepare(script, tmp_path, 'whole', *args).status == 0
    for i in (1, 2, 3):
        assert prepare(script, tmp_path, 'mine', *args, f'--part={i}/3').status == 0
    assert prepare(script, tmp_path, 'mine', '--join').status == 0
    assert made(tmp_path, 'mine') == made(tmp_path, 'whole') and set(made(tmp_path, 'mine')) == {'train.bin', 'val.bin'}


def test_damaged_or_different_parts_are_not_joined(script, tmp_path):
    (tmp_path / 'in').mkdir()
    for i in range(2):
        (tmp_path / 'in' / f'{i}.txt').write_text(TEXT)
    args = [f"--input={tmp_path / 'in'}", '--tokenizer=byte']
    prepare(script, tmp_path, 'mine', *args, '--part=1/2'), prepare(script, tmp_path, 'mine', *args, '--part=2/2', '--val_fraction=0')
    result = prepare(script, tmp_path, 'mine', '--join')
    assert result.status == 2 and '2/2' in result.err and 'other settings' in result.err
    prepare(script, tmp_path, 'mine', *args, '--part=2/2')
    part = next(path for path in (tmp_path / 'data' / 'mine' / 'part_2_of_2').iterdir() if path.suffix == '.bin')
    content = bytearray(part.read_bytes())
    content[100] ^= 1
    part.write_bytes(content)
    result = prepare(script, tmp_path, 'mine', '--join')
    assert result.status == 2 and 'checksum' in result.err and '--part=2/2' in result.err
    prepare(script, tmp_path, 'mine', *args, '--part=2/2')
    assert prepare(script, tmp_path, 'mine', '--join').status == 0


# -----------------------------------------------------------------------------
# limits, --show


def test_max_tokens_ends_train_bin_there_and_reads_no_further(script, tmp_path):
    (tmp_path / 'in').mkdir()
    for i in range(30):
        write(tmp_path / 'in' / f'all.{i:02d}.jsonl', [f'{i}' + TEXT] * 3)
    (tmp_path / 'in' / 'z.jsonl').write_text('broken')  # is not reached
    for workers in (1, 2):
        result = prepare(script, tmp_path, f'mine{workers}', f"--input={tmp_path / 'in'}", '--tokenizer=byte', f'--workers={workers}',
                         '--max_tokens=1234567', '--shard_tokens=500000')
        assert result.status == 0, result.err
    data = Dataset('mine1', tmp_path / 'data')
    assert data.train.n == 1234567 and len(data.train.paths) == 3 and made(tmp_path, 'mine1') == made(tmp_path, 'mine2')
    assert script('prepare.py', 'mine1', '--show', f"--data_dir={tmp_path / 'data'}").status == 0


def test_a_tokenizer_of_ones_own_decodes_from_the_folder_and_serves_another_set(script, tmp_path, gpt2):
    pytest.importorskip('tokenizers')
    text = TEXT + "It's 12345, isn't it? naïve 漢字\n"
    (tmp_path / 'a.txt').write_text(text, encoding='utf-8')
    (tmp_path / 'b.txt').write_text(text[::-1], encoding='utf-8')
    assert prepare(script, tmp_path, 'a', f"--input={tmp_path / 'a.txt'}", '--tokenizer=bpe:320').status == 0
    assert prepare(script, tmp_path, 'b', f"--input={tmp_path / 'b.txt'}", f"--tokenizer={tmp_path / 'data' / 'a'}").status == 0
    a, b = (Dataset(name, tmp_path / 'data') for name in 'ab')
    assert dataset.same_tokenizer(a.tokenizer_state, b.tokenizer_state) and a.meta['vocab_size'] <= 320
    for data, want in ((a, text), (b, text[::-1])):
        tok = data.tokenizer()
        ids = np.concatenate([tokens.windows([0], tokens.n)[0] for tokens in (data.train, data.val)]).tolist()
        assert ids[0] == tok.end_of_text == tok.n_vocab - 1 and tok.decode(ids[1:]) == want
    assert a.train.n < 0.6 * len(text), 'it has learnt something'
    # what `tokenizers` makes of the exported one is the same
    from tokenizers import Tokenizer
    huggingface = pytest.importorskip('huggingface')
    theirs = Tokenizer.from_str(huggingface.to_tokenizer_json(a.tokenizer(), 64)[0])
    assert theirs.encode(text).ids == a.tokenizer().encode(text).tolist()


def test_show_tells_and_checks(script, tmp_path, gpt2):
    texts = [f'document {i}: ' + TEXT[:500] for i in range(100)]
    source = write(tmp_path / 'all.jsonl', texts)
    prepare(script, tmp_path, 'mine', f'--input={source}', '--tokenizer=byte', '--shard_tokens=20000')
    result = prepare(script, tmp_path, 'mine', '--show')
    assert result.status == 0 and 'WRONG' not in result.out and 'document 0' in result.out and '1.00 bytes per token' in result.out
    path = tmp_path / 'data' / 'mine' / 'train_000001.bin'
    content = path.read_bytes()
    for damage, what in ((content[:-2], 'lengths'), (content[:50] + b'\x09\x00' + content[52:], 'checksums'), (content[:50] + b'\x99\x99' + content[52:], 'largest id')):
        path.write_bytes(damage)
        result = prepare(script, tmp_path, 'mine', '--show')
        assert result.status == 1 and any('WRONG' in line and what in line for line in result.out.splitlines()), what
    result = prepare(script, tmp_path, 'absent', '--show')
    assert result.status == 2 and 'absent' in result.err
    # nanoGPT's folder, of which nothing is known
    folder = tmp_path / 'data' / 'old'
    folder.mkdir()
    (np.arange(500) % 300).astype('<u2').tofile(folder / 'train.bin')
    result = prepare(script, tmp_path, 'old', '--show')
    assert result.status == 0 and 'no checksums' in result.out, result.err


# -----------------------------------------------------------------------------
# one writer, full disks, what is wrong with files


@pytest.mark.skipif(sys.platform == 'win32', reason='no file locks')
def test_a_second_prepare_into_the_same_dataset_is_refused(script, tmp_path):
    (tmp_path / 'a.txt').write_text(TEXT)
    args = ['mine', f"--input={tmp_path / 'a.txt'}", '--tokenizer=byte', f"--data_dir={tmp_path / 'data'}"]
    assert own_process('prepare.py', *args).status == 0
    before = made(tmp_path, 'mine')
    code = f"import sys, time; sys.path.insert(0, {str(REPO)!r}); import dataset; f = dataset.lock({str(tmp_path / 'data' / 'mine')!r}, 'x'); print('have it', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == 'have it\n'
    (tmp_path / 'data' / 'mine' / 'unfinished').mkdir()  # as the other one would have
    result = own_process('prepare.py', *args)
    assert result.status == 2 and result.err.count('\n') == 1 and 'another prepare.py' in result.err, result.err
    assert (tmp_path / 'data' / 'mine' / 'unfinished').exists(), 'the work of the other one is left alone'
    holder.kill(), holder.wait()
    assert own_process('prepare.py', *args).status == 0 and made(tmp_path, 'mine') == before


@pytest.mark.skipif(sys.platform != 'linux', reason='limits the size of files')
def test_a_disk_that_fills_up_is_one_line_and_the_next_run_goes_on(tmp_path):
    (tmp_path / 'a.txt').write_text(TEXT * 60)
    args = ['mine', f"--input={tmp_path / 'a.txt'}", '--tokenizer=byte', f"--data_dir={tmp_path / 'data'}", '--shard_tokens=1500000']
    code = f"import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2); sys.path.insert(0, {str(REPO)!r}); runpy.run_path(sys.argv[0], run_name='__main__')"

    def limited(size):
        return subprocess.run([sys.executable, '-c', f"import sys; sys.argv[0] = {str(REPO / 'prepare.py')!r}; " + code, str(size), *args], capture_output=True, text=True)
    done = limited(2_000_000)  # not even one shard
    assert done.returncode == 2 and done.stderr.count('\n') == 1 and 'make room' in done.stderr, done.stderr
    assert not (tmp_path / 'data' / 'mine').exists()
    done = limited(3_000_000)  # shards fit, what comes last does not
    if done.returncode:
        assert done.stderr.count('\n') == 1 and 'make room' in done.stderr
    done = own_process('prepare.py', *args)
    assert done.status == 0 and Dataset('mine', tmp_path / 'data').train.n + Dataset('mine', tmp_path / 'data').val.n == len(TEXT) * 60 + 1


def test_too_little_room_is_told_before_anything_starts(script, tmp_path, monkeypatch):
    import shutil
    (tmp_path / 'a.txt').write_text(TEXT)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: type('usage', (), {'free': 1000}))
    result = prepare(script, tmp_path, 'mine', f"--input={tmp_path / 'a.txt'}", '--tokenizer=byte')
    assert result.status == 2 and 'too little room' in result.err and not (tmp_path / 'data' / 'mine').exists()


def bad_files(folder):
    """{file: words of the message}"""
    fine = '\n'.join(json.dumps({'text': TEXT[:100]}) for _ in range(5)) + '\n'
    (folder / 'a.txt.gz').write_text(TEXT)
    (folder / 'gz.txt').write_bytes(gzip.compress(TEXT.encode()))
    (folder / 'zst.jsonl.gz').write_bytes(b'\x28\xb5\x2f\xfd' + b'x' * 50)
    (folder / 'deep.jsonl').write_text(fine + '[' * 100_000 + '\n')
    (folder / 'list.jsonl').write_text(fine + '[1, 2]\n')
    (folder / 'far.txt').write_bytes(b'fine text\n' * 200_000 + b'caf\xe9\n')
    (folder / 'far.jsonl').write_bytes(fine.encode() * 1000 + b'{"text": "caf\xe9"}\n')
    (folder / 'book.pdf').write_bytes(b'%PDF-1.4')
    (folder / 'pdf.txt').write_bytes(b'%PDF-1.4 and so on')
    (folder / 'null.jsonl').write_text('{"text": null}\n')
    found = {'a.txt.gz': ['a.txt.gz', 'no .gz', 'rename'], 'gz.txt': ['gz.txt', 'is .gz', 'rename'], 'zst.jsonl.gz': ['is .zst, not .gz'],
             'deep.jsonl': ['deep.jsonl:6'], 'list.jsonl': ['list.jsonl:6', '--text_key'], 'far.txt': ['byte 2000003', '--encoding_errors=replace'],
             'far.jsonl': [f'byte {len(fine) * 1000 + 13}'], 'book.pdf': ['book.pdf', '.txt'], 'pdf.txt': ['pdf.txt', 'unpack'], 'null.jsonl': ['null.jsonl:1', 'NoneType']}
    if dataset.importlib.util.find_spec('zstandard'):
        import zstandard
        packed = zstandard.ZstdCompressor(write_checksum=True).compress(os.urandom(300_000).hex().encode())
        (folder / 'cut.txt.zst').write_bytes(packed[:-1000])
        (folder / 'flipped.txt.zst').write_bytes(packed[:1000] + bytes(255 - b for b in packed[1000:1100]) + packed[1100:])
        found |= {'cut.txt.zst': ['cut.txt.zst', 'again'], 'flipped.txt.zst': ['flipped.txt.zst', 'again']}
    if dataset.importlib.util.find_spec('pyarrow'):
        import pyarrow
        import pyarrow.parquet
        pyarrow.parquet.write_table(pyarrow.table({'content': ['a'] * 9, 'n': [1] * 9}), folder / 'column.parquet')
        pyarrow.parquet.write_table(pyarrow.table({'text': [1, 2]}), folder / 'number.parquet')
        content = (folder / 'column.parquet').read_bytes()
        (folder / 'cut.parquet').write_bytes(content[:-30])
        (folder / 'text.parquet').write_text('not a table')
        found |= {'column.parquet': ["'text'", 'content, n', '--text_key'], 'number.parquet': ['int64', '--text_key'], 'cut.parquet': ['cut.parquet', 'again'],
                  'text.parquet': ['no .parquet']}
    return found


def test_bad_files_are_one_line_and_leave_nothing(script, tmp_path):
    for file, words in bad_files(tmp_path).items():
        for workers in (1, 2) if 'far' in file else (1,):
            result = prepare(script, tmp_path, 'mine', f'--input={tmp_path / file}', '--tokenizer=byte', f'--workers={workers}')
            assert result.status == 2 and result.err.count('\n') == 1 and result.err.startswith('error: '), (file, result.err)
            assert all(word in result.err for word in words), (file, words, result.err)
            assert not (tmp_path / 'data' / 'mine').exists(), file


def test_a_package_that_is_not_installed_is_named(script, tmp_path, monkeypatch):
    (tmp_path / 'a.txt').write_text(TEXT)
    (tmp_path / 'a.txt.zst').write_bytes(b'\x28\xb5\x2f\xfd')
    (tmp_path / 'a.parquet').write_bytes(b'PAR1')
    for package, args in [('zstandard', [f"--input={tmp_path / 'a.txt.zst'}"]), ('pyarrow', [f"--input={tmp_path / 'a.parquet'}"]), ('huggingface_hub', ['--input=hf:a/b']),
                          ('tokenizers', [f"--input={tmp_path / 'a.txt'}", '--tokenizer=bpe:300']), ('tiktoken', [f"--input={tmp_path / 'a.txt'}", '--tokenizer=gpt2'])]:
        with monkeypatch.context() as m:
            m.setitem(sys.modules, package, None)
            result = prepare(script, tmp_path, 'mine', '--tokenizer=byte', *args)
        assert result.status == 2 and result.err.count('\n') == 1 and package in result.err and 'pip install' in result.err, result.err
        assert not (tmp_path / 'data' / 'mine').exists()


def test_encoding_errors_can_be_replaced(script, tmp_path):
    (tmp_path / 'a.jsonl').write_bytes((json.dumps({'text': TEXT[:300]}) + '\n').encode() * 50 + b'{"text": "caf\xe9 au lait"}\n')
    result = prepare(script, tmp_path, 'mine', f"--input={tmp_path / 'a.jsonl'}", '--tokenizer=byte', '--encoding_errors=replace', '--val_fraction=0')
    assert result.status == 0
    data = Dataset('mine', tmp_path / 'data')
    assert 'caf\ufffd au lait' in data.tokenizer().decode(data.train.windows([0], data.train.n)[0].tolist())


def test_text_that_looks_like_the_special_token_is_text_and_counted(script, tmp_path, gpt2):
    source = write(tmp_path / 'all.jsonl', ['a <|endoftext|> b <|endoftext|> ' + TEXT[:200 + i] for i in range(30)])
    for tokenizer in ('byte', 'gpt2'):
        result = prepare(script, tmp_path, tokenizer, f'--input={source}', f'--tokenizer={tokenizer}', '--workers=2')
        assert result.status == 0 and '(60 times)' in result.out
        data = Dataset(tokenizer, tmp_path / 'data')
        assert sum((tokens.windows([0], tokens.n) == data.meta['end_of_text']).sum() for tokens in (data.train, data.val)) == 30


def test_too_little_text_is_told(script, tmp_path):
    for content, args in (('', []), ('\n', ['--tokenizer=char']), ('ab', []), ('a', ['--tokenizer=char', '--val_fraction=0'])):
        (tmp_path / 'a.txt').write_text(content)
        result = prepare(script, tmp_path, 'mine', f"--input={tmp_path / 'a.txt'}", '--tokenizer=byte', *args)
        assert result.status == 2 and 'too little text' in result.err and result.err.count('\n') == 1 and not (tmp_path / 'data' / 'mine').exists()


def test_help_is_the_block_of_knobs(script):
    result = script('prepare.py', '--help')
    assert result.out.strip().splitlines()[-1].startswith('data_dir') and '--show' in result.out


def test_bad_knobs_are_one_line_each(script, tmp_path):
    (tmp_path / 'a.txt').write_text(TEXT)
    for args, word in [(['--part=0/4'], '--part=1/8'), (['--part=5/4'], 'part'), (['--part=half'], 'part'), (['--tokenizer=bpe:100'], '257'), (['--tokenizer=bpe:x'], 'bpe'),
                       (['--workers=0'], 'workers'), (['--shard_tokens=0'], 'shard_tokens'), (['--encoding_errors=ignore'], 'replace'), (['--part=1/2', '--join'], '--part'),
                       (['--tokenizer=/no/such/tokenizer.json'], '/no/such'), (['--tokenizer=bpe8192'], 'gpt2')]:
        result = prepare(script, tmp_path, 'mine', f"--input={tmp_path / 'a.txt'}", *args)
        assert result.status == 2 and word in result.err and result.err.count('\n') == 1, (args, result.err)
        assert not (tmp_path / 'data' / 'mine').exists()
    result = prepare(script, tmp_path, 'mine', '--join')
    assert result.status == 2 and '--part=1/8' in result.err
    result = script('prepare.py', 'mine', f"--input={tmp_path / 'a.txt'}", f"--data_dir={tmp_path / 'a.txt'}")
    assert result.status == 2 and result.err.count('\n') == 1 and '--data_dir' in result.err


@pytest.mark.skipif(sys.platform != 'linux', reason='sends signals')
def test_stopped_by_a_signal_it_ends_at_once_and_goes_on_later(tmp_path, gpt2):
    (tmp_path / 'in').mkdir()
    for i in range(14):
        (tmp_path / 'in' / f'{i}.txt').write_text(f'{i}' + TEXT * 15)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        args = [f'mine{number:d}', f"--input={tmp_path / 'in'}", '--tokenizer=gpt2', '--workers=2', f"--data_dir={tmp_path / 'data'}", '--shard_tokens=300000']
        process = subprocess.Popen([sys.executable, str(REPO / 'prepare.py'), *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
                                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # tests that run in the background inherit that it is ignored
        progress, begun = tmp_path / 'data' / f'mine{number:d}' / 'unfinished' / 'progress.json', time.time()
        while not progress.exists():
            assert process.poll() is None and time.time() < begun + 60
            time.sleep(0.01)
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
        assert process.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[number] and 'Traceback' not in err, err
        for _ in range(100):  # no worker stays behind
            if not os.popen(f'pgrep -g {process.pid}').read():
                break
            time.sleep(0.05)
        else:
            assert False, 'a worker lives on'
    done = own_process('prepare.py', *args)
    assert done.status == 0 and 'going on' in done.out, done.err


@pytest.mark.skipif(sys.platform != 'linux', reason='kills a process')
def test_a_worker_that_is_killed_is_one_line(tmp_path, gpt2):
    (tmp_path / 'a.txt').write_text(TEXT * 300)
    args = ['mine', f"--input={tmp_path / 'a.txt'}", '--tokenizer=gpt2', '--workers=2', f"--data_dir={tmp_path / 'data'}"]
    process = subprocess.Popen([sys.executable, str(REPO / 'prepare.py'), *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (workers := os.popen(f'pgrep -P {process.pid}').read().split()):
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(int(workers[0]), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and err.count('\n') == 1 and '--workers' in err, err


@pytest.mark.skipif(not os.path.exists('/proc/self/status'), reason='the peak of memory is read from /proc')
def test_memory_of_all_processes_stays_small(tmp_path, gpt2):
    for i in range(6):
        (tmp_path / f'{i}.txt').write_text(TEXT * 70)
    code = textwrap.dedent(f"""
        import resource, runpy, sys
        sys.argv = ['prepare.py', 'big', '--input={tmp_path}/*.txt', '--tokenizer=gpt2', '--workers=2', '--data_dir={tmp_path / 'data'}']
        sys.path.insert(0, {str(REPO)!r})
        runpy.run_path({str(REPO / 'prepare.py')!r}, run_name='__main__')
        own = next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM'))  # ru_maxrss would count who started us
        print(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
    """)
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    own, largest_child = map(int, done.stdout.split()[-2:])
    assert own + 2 * largest_child < 500_000, 'kB: much of it is shared and counted three times'
