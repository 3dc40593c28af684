"""The ids of a text do not depend on where it is cut, who encodes it, or how it was read."""

import gzip
import json
import os
import sys

import pytest
from conftest import REPO, TEXT, bytes_in, captured
from test_huggingface import sentencepiece_like
from test_read_text import files_of, ids_of, write

from dataset import Dataset
from support import encode_text, read_text

STRANGE = ("don't  stop\n\n\n   x\t\ty 12345678 ... ---\r\n  'll naïve 漢字漢字 🙂🙂 <|endoftext|> end "
           "\x1cz \u2003w")


def test_a_run_can_continue_after_each_portion(monkeypatch):
    monkeypatch.setattr(encode_text, 'PORTION', 100)
    monkeypatch.setattr(read_text, 'PIECE', 100)
    texts = ['short', TEXT[:950], '', TEXT[500:530], 'x' * 350, TEXT[:99]]

    def portions(cut, start=(0, 0, 0)):
        documents = ((0, i, read_text.slices(text)) for i, text in enumerate(texts) if i >= start[1] and text)
        return list(encode_text.portions(documents, cut, lambda _, text: encode_text.split_by_hash(text, 0.3), start))
    for cut in encode_text.CUTS:
        whole = portions(cut)
        assert len(whole) > 5
        for k, (_, place) in enumerate(whole):
            assert portions(cut, place) == whole[k + 1:], (cut, k)


@pytest.mark.parametrize('tokenizer', ['gpt2', 'llama'])
def test_formats_and_numbers_of_workers_agree(prepare, tmp_path, test_data, gpt2, monkeypatch, tokenizer):
    pytest.importorskip('tokenizers')
    monkeypatch.setattr(encode_text, 'PORTION', 20_000)  # work for all of them
    with gzip.open(test_data / 'gutenberg_val.jsonl.gz', 'rt', encoding='utf-8') as f:
        books = [json.loads(line)['text'][:15_000] for line in f]
    name = tokenizer
    if name == 'llama':  # its tokenizer.json alone
        (tmp_path / 'llama').mkdir()
        sentencepiece_like(tmp_path / 'llama')
        name = (tmp_path / 'llama' / 'tokenizer.json').rename(tmp_path / 'mine.json')
    for kind, workers in (('txt', 1), ('all.jsonl', 3)):
        args = f'--tokenizer={name}', f'--workers={workers}', '--shard_tokens=30000'
        result = prepare(kind, write(tmp_path / kind, books), *args)
        assert result.status == 0, result.err
    assert files_of(tmp_path, 'txt') == files_of(tmp_path, 'all.jsonl')
    assert ("taken from its names: {'bos_token': '<s>', 'eos_token': '</s>'}" in result.out) == (tokenizer == 'llama')


def test_a_large_txt_is_encoded_as_a_whole(prepare, tmp_path, test_data, gpt2, monkeypatch):
    # several portions, with everything that patterns treat specially at some place or other
    monkeypatch.setattr(encode_text, 'PORTION', 100_000)
    text = open(test_data / 'tinyshakespeare.txt').read()[:700_000]
    text = STRANGE.join(text[i:i + 9973] for i in range(0, len(text), 9973))
    (tmp_path / 'book.txt').write_text(text, newline='', encoding='utf-8')
    text = (tmp_path / 'book.txt').read_text(encoding='utf-8')
    import tiktoken
    for name, dtype in (('gpt2', 'uint16'), ('o200k_base', 'uint32')):
        try:
            encoding = tiktoken.get_encoding(name)
        except OSError:
            continue
        assert prepare(name, tmp_path / 'book.txt', f'--tokenizer={name}', '--workers=2').status == 0
        # <|endoftext|> in the text is text
        assert ids_of(tmp_path, name) == [encoding.eot_token, *encoding.encode_ordinary(text)]
        data = Dataset(name, tmp_path / 'data')
        assert data.meta['dtype'] == dtype and data.vocab_size % 64 == 0
        assert bytes_in(data) == len(text.encode())


# -----------------------------------------------------------------------------
# memory

PEAK = '''
import runpy, sys
sys.path.insert(0, {repo!r})
for tokenizer in ('byte', 'char'):
    sys.argv = ['prepare.py', tokenizer, '--tokenizer=' + tokenizer, *{args!r}]
    runpy.run_path({repo!r} + '/prepare.py', run_name='__main__')
# ru_maxrss would count whoever started this process
print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))
'''


@pytest.mark.skipif(not os.path.exists('/proc/self/status'), reason='the peak of memory is read from /proc')
def test_memory_stays_small_for_large_input(tmp_path):
    (tmp_path / 'big.txt').write_text(TEXT * (60_000_000 // len(TEXT)))
    args = f"--input={tmp_path / 'big.txt'}", f"--data_dir={tmp_path / 'data'}"
    done = captured([sys.executable, '-c', PEAK.format(repo=str(REPO), args=args)])
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 120_000, 'a text of 1 MB takes half of it, this text alone would take the rest'
