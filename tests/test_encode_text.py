"""The ids of a text do not depend on where it is cut, who encodes it, or how it was read."""

import gzip
import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import REPO, TEXT, own_process
from test_read_text import files_of, write

from dataset import Dataset
from support import encode_text, read_text
from support.tokenizer import TiktokenTokenizer, make_tokenizer

STRANGE = ("don't  stop\n\n\n   x\t\ty 12345678 ... ---\r\n  'll naïve 漢字漢字 🙂🙂 <|endoftext|> end "
           "\x1cz \u2003w")


def prepare(script, where, name, *args):
    return script('prepare.py', name, *args, f"--data_dir={where / 'data'}")


def test_ids_do_not_depend_on_where_a_text_is_cut(monkeypatch, gpt2):
    text = (STRANGE + ' and more ') * 50
    tokenizer = TiktokenTokenizer(gpt2)
    want = gpt2.encode_ordinary(text)
    for portion in (7, 64, 1000):
        monkeypatch.setattr(encode_text, 'PORTION', portion)
        first = None
        for step in (3, 50, 10_000):  # however it was read
            pieces = [text[i:i + step] for i in range(0, len(text), step)]
            parts = list(encode_text.cut_up(iter(pieces), encode_text.CUTS['words']))
            assert ''.join(parts) == text
            assert np.concatenate([tokenizer.encode(part) for part in parts]).tolist() == want
            first = first or parts
            assert parts == first, 'the places depend on the text alone'


def test_a_run_can_continue_after_each_portion(monkeypatch):
    monkeypatch.setattr(encode_text, 'PORTION', 100)
    monkeypatch.setattr(read_text, 'PIECE', 100)
    texts = ['short', TEXT[:950], '', TEXT[500:530], 'x' * 350, TEXT[:99]]

    def split_of(number, text):
        return encode_text.split_by_hash(text, 0.3)

    def portions(cut, start=(0, 0, 0)):
        documents = ((0, i, read_text.slices(text))
                     for i, text in enumerate(texts) if i >= start[1] and text)
        return list(encode_text.portions(documents, cut, split_of, start))
    for cut in encode_text.CUTS:
        whole = portions(cut)
        assert len(whole) > 5
        for k, (_, place) in enumerate(whole):
            assert portions(cut, place) == whole[k + 1:], (cut, k)


@pytest.fixture
def books(test_data):
    """The shortest of Gutenberg's books, cut short."""
    with gzip.open(test_data / 'gutenberg_val.jsonl.gz', 'rt', encoding='utf-8') as f:
        return [json.loads(line)['text'][:15_000] for line in f]


def llama_like(folder, texts):
    """A tokenizer.json as Llama 2's: sentencepiece's habits, <s> and </s>."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers
    tok = Tokenizer(models.BPE(byte_fallback=True, unk_token='<unk>'))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
    tok.decoder = decoders.Sequence([decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(),
                                     decoders.Strip(' ', 1, 0)])
    words = sorted({word for text in texts for word in text[:5000].split()})
    special = ['<unk>', '<s>', '</s>', *[f'<0x{b:02X}>' for b in range(256)]]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    tok.train_from_iterator(words, trainer)
    folder.mkdir()
    tok.save(str(folder / 'mine.json'))
    return folder / 'mine.json'


def test_every_tokenizer_format_and_number_of_workers_agree(script, tmp_path, books, gpt2, monkeypatch):
    monkeypatch.setattr(encode_text, 'PORTION', 20_000)  # work for all of them
    zst = 'all.jsonl.zst' if importlib.util.find_spec('zstandard') else 'all.jsonl.gz'
    parquet = 'all.parquet' if importlib.util.find_spec('pyarrow') else 'all.jsonl'
    sources = [write(tmp_path / kind, books) for kind in ('txt', zst, parquet)]
    tokenizers = ['char', 'byte', 'gpt2']
    if importlib.util.find_spec('tokenizers'):
        tokenizers += ['bpe:1000', str(llama_like(tmp_path / 'llama', books))]
    for tokenizer in tokenizers:
        results = []
        for i, (source, workers) in enumerate(zip(sources, (1, 2, 8))):
            args = f'--input={source}', f'--tokenizer={tokenizer}', f'--workers={workers}'
            result = prepare(script, tmp_path, f'set{i}', *args, '--shard_tokens=30000', '--overwrite')
            assert result.status == 0, result.err
            assert 'llama' not in tokenizer or 'taken from its names: bos_token <s>, eos_token </s>' in result.out
            results.append(files_of(tmp_path, f'set{i}'))
        assert results[0] == results[1] == results[2], tokenizer
        data = Dataset('set0', tmp_path / 'data')
        assert data.meta['dtype'] == 'uint16'
        tok = data.tokenizer()
        ids = data.train.windows([0], data.train.n)[0].tolist()
        text = tok.decode([i for i in ids if i != tok.end_of_text])
        training = [text for text in books if encode_text.split_by_hash(text, 0.1) == 'train']
        assert 'llama' in tokenizer or ''.join(training).startswith(text), tokenizer


def test_a_large_txt_is_encoded_as_a_whole(script, tmp_path, test_data, gpt2, monkeypatch):
    # several portions, with everything that patterns treat specially at some place or other
    monkeypatch.setattr(encode_text, 'PORTION', 100_000)
    text = open(test_data / 'tinyshakespeare.txt').read()[:700_000]
    text = STRANGE.join(text[i:i + 9973] for i in range(0, len(text), 9973))
    path = tmp_path / 'book.txt'
    path.write_text(text, newline='', encoding='utf-8')
    text = path.read_text(encoding='utf-8')
    import tiktoken
    for name, dtype in (('gpt2', 'uint16'), ('o200k_base', 'uint32')):
        try:
            encoding = tiktoken.get_encoding(name)
        except OSError:
            continue
        args = f'--input={path}', f'--tokenizer={name}', '--workers=2'
        assert prepare(script, tmp_path, name, *args).status == 0
        files = files_of(tmp_path, name)
        got = np.frombuffer(files['train.bin'] + files['val.bin'], dtype=np.dtype(dtype).newbyteorder('<'))
        assert got[0] == encoding.eot_token and got[1:].tolist() == encoding.encode_ordinary(text)
        data = Dataset(name, tmp_path / 'data')
        assert data.meta['dtype'] == dtype and data.vocab_size % 64 == 0
        assert sum(split['bytes'] for split in data.meta['splits'].values()) == len(text.encode())


def test_workers_that_are_started_afresh_do_the_same(script, tmp_path):
    """As on macOS and Windows, where a process is not forked."""
    pytest.importorskip('tokenizers')
    (tmp_path / 'a.txt').write_text(TEXT)
    args = f"--input={tmp_path / 'a.txt'}", '--tokenizer=bpe:400'
    assert prepare(script, tmp_path, 'bpe', *args).status == 0
    source = write(tmp_path / 'all.jsonl', [TEXT[i:] for i in range(0, 40_000, 1000)])  # two portions
    args = [f'--input={source}', f"--tokenizer={tmp_path / 'data' / 'bpe'}", '--workers=2']
    assert prepare(script, tmp_path, 'forked', *args).status == 0
    (tmp_path / 'sitecustomize.py').write_text(
        'import multiprocessing as m\n'
        'real = m.get_context\n'
        'm.get_context = lambda kind=None: real("spawn")\n')
    done = own_process('prepare.py', 'fresh', *args, f"--data_dir={tmp_path / 'data'}",
                       env={'PYTHONPATH': str(tmp_path)})
    assert done.status == 0, done.err
    assert files_of(tmp_path, 'forked') == files_of(tmp_path, 'fresh')


def test_text_that_looks_like_the_special_token_is_text(script, tmp_path, gpt2):
    texts = ['a <|endoftext|> b <|endoftext|> ' + TEXT[:200 + i] for i in range(30)]
    source = write(tmp_path / 'all.jsonl', texts)
    for tokenizer in ('byte', 'gpt2'):
        args = f'--input={source}', f'--tokenizer={tokenizer}', '--workers=2'
        result = prepare(script, tmp_path, tokenizer, *args)
        assert result.status == 0
        data = Dataset(tokenizer, tmp_path / 'data')
        ids = np.concatenate([tokens.windows([0], tokens.n)[0] for tokens in (data.train, data.val)])
        assert (ids == data.meta['end_of_text']).sum() == 30


# -----------------------------------------------------------------------------
# memory

PEAK = '''
import resource, runpy, sys
sys.path.insert(0, {repo!r})
for tokenizer in {tokenizers!r}:
    sys.argv = ['prepare.py', tokenizer, '--tokenizer=' + tokenizer, *{args!r}]
    runpy.run_path({repo!r} + '/prepare.py', run_name='__main__')
# ru_maxrss of this process would count whoever started it
own = next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM'))
print(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
'''


def peak_memory(tokenizers, *args):
    """The peak of a process that runs prepare.py with each tokenizer, and of its largest worker, in kB."""
    code = PEAK.format(repo=str(REPO), tokenizers=tokenizers, args=args)
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    own, worker = done.stdout.split()[-2:]
    return int(own), int(worker)


@pytest.mark.skipif(not os.path.exists('/proc/self/status'), reason='the peak of memory is read from /proc')
def test_memory_stays_small_for_large_input(tmp_path):
    with open(tmp_path / 'big.txt', 'w') as f:
        for _ in range(60_000_000 // len(TEXT)):
            f.write(TEXT)
    args = f"--input={tmp_path / 'big.txt'}", f"--data_dir={tmp_path / 'data'}"
    own, _ = peak_memory(['byte', 'char'], *args)
    assert own < 110_000, 'a text of 1 MB takes half of it, this text alone would take more than the rest'


def test_only_a_few_portions_wait_for_the_workers():
    taken = []

    def portions():
        for i in range(50):
            taken.append(i)
            yield [('train', True, f'text {i}')], (0, i, 0)
    encoder = encode_text.Encoder(make_tokenizer({'kind': 'byte'}))
    for n, (encoded, place) in enumerate(encode_text.encode_in_order(portions(), 2, encoder)):
        ids, documents = encoded['train']
        assert place == (0, n, 0) and documents == 1 and bytes(ids[1:].tolist()) == f'text {n}'.encode()
        assert len(taken) <= n + 2 * 2 + 1
    assert n == 49


@pytest.mark.skipif(not os.path.exists('/proc/self/status'), reason='the peak of memory is read from /proc')
def test_memory_of_all_processes_stays_small(tmp_path, gpt2):
    for i in range(6):
        (tmp_path / f'{i}.txt').write_text(TEXT * 35)
    args = f'--input={tmp_path}/*.txt', '--workers=2', f"--data_dir={tmp_path / 'data'}"
    own, worker = peak_memory(['gpt2'], *args)
    assert own + 2 * worker < 300_000, 'much of it is shared and counted three times'
