"""A dataset folder is read as it is, nanoGPT's too; the order of its samples follows from seed and number."""

import pickle

import numpy as np
import pytest
from conftest import is_refused, nanogpt_meta

import dataset
from dataset import Dataset, Prefetch, hash64, permute, sample_starts
from support.files import write_json
from support.samples import begin
from support.tokenizer import TiktokenTokenizer, make_tokenizer, same_tokenizer


def permuted(n, key):
    return permute(np.arange(n, dtype=np.uint64), np.uint64(n), np.broadcast_to(key, (n,)))


def test_permute_is_a_permutation_for_every_size():
    for n in [*range(1, 300), 4095, 4096, 4097, 65537, 250_000]:
        assert np.array_equal(np.sort(permuted(n, hash64(7, n))), np.arange(n)), n


def test_permute_depends_on_its_key_and_looks_shuffled():
    n = 10_000
    a, b = (permuted(n, hash64(key)).astype(float) for key in (1, 2))
    for x, y in [(a, np.arange(n)), (a, b), (a[1:], a[:-1])]:
        assert abs(np.corrcoef(x, y)[0, 1]) < 0.05


@pytest.mark.parametrize('n, T', [(1000, 16), (1007, 16), (33, 16), (17, 16), (64, 64 - 1)])
def test_an_epoch_makes_each_token_a_target_at_most_once(n, T):
    blocks = n // T
    offsets = set()
    for epoch in range(3):
        starts = sample_starts(5, range(epoch * blocks, (epoch + 1) * blocks), n, T)
        targets = [(s + 1 + t) % n for s in starts for t in range(T)]
        assert len(targets) == len(set(targets)) == blocks * T
        offsets.add(tuple(starts))
    assert len(offsets) == 3 or blocks == 1, 'each epoch has an order of its own'


def sharded(folder, sizes):
    folder.mkdir()
    ids = (np.arange(sum(sizes)) * 7 % 251).astype('<u2')
    for i, part in enumerate(np.split(ids, np.cumsum(sizes)[:-1])):
        part.tofile(folder / f'train_{i:06d}.bin')
    return ids


def test_shards_are_one_long_array(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset.Tokens, 'open_files', 3)
    ids = sharded(tmp_path / 'many', [100, 1, 37, 250, 2, 2, 90])
    train = Dataset('many', tmp_path).train
    assert train.n == len(ids) and train.windows([0], 3).dtype == np.int64
    for length in (1, 5, 140, 1200):  # that is more than twice around
        starts = range(len(ids))
        want = np.stack([np.take(ids, np.arange(start, start + length), mode='wrap') for start in starts])
        assert np.array_equal(train.windows(starts, length), want), length


def test_a_missing_or_changed_shard_is_told(tmp_path, capsys):
    sharded(tmp_path / 'many', [100, 100, 100])
    shards = [{'file': f'train_{i:06d}.bin', 'tokens': 100} for i in range(3)]
    meta = {'tokenizer': {'kind': 'byte'}, 'vocab_size': 257, 'end_of_text': 256, 'dtype': 'uint16',
            'splits': {'train': {'tokens': 300, 'shards': shards}}}
    write_json(f'{tmp_path}/many/meta.json', meta)
    assert Dataset('many', tmp_path).train.n == 300
    (tmp_path / 'many' / 'train_000001.bin').write_bytes(b'\0' * 198)
    for word in ('train_000001.bin has 198 bytes', 'train_000001.bin is missing'):
        with pytest.raises(SystemExit):
            Dataset('many', tmp_path)
        assert word in capsys.readouterr().err
        (tmp_path / 'many' / 'train_000001.bin').unlink(missing_ok=True)
    shards[1]['file'] = '../../etc/passwd'  # a path leads nowhere else
    write_json(f'{tmp_path}/many/meta.json', meta)
    with pytest.raises(SystemExit):
        Dataset('many', tmp_path)
    assert f'{tmp_path}/many/passwd' in capsys.readouterr().err


def test_prefetch_keeps_the_order_and_brings_what_went_wrong_to_the_loop():
    def make(n):
        if n == 20:
            raise SystemExit(2)
        return n
    ahead = Prefetch(map(make, range(99)))
    assert [next(ahead) for _ in range(20)] == [*range(20)]
    with pytest.raises(SystemExit):
        next(ahead)


def test_the_prefetching_thread_may_read_beside_the_evaluation(tmp_path):
    ids = sharded(tmp_path / 'many', [1000] * 20)
    train = Dataset('many', tmp_path).train
    ahead = Prefetch(train.windows([n % 19_000] * 8, 900) for n in range(999))
    for n in range(300):
        assert np.array_equal(train.windows([n * 37], 900)[0], ids[n * 37:][:900])
        assert np.array_equal(next(ahead)[3], ids[n:][:900])
    ahead.close()


def test_nanogpt_folders_are_read_as_they_are(tmp_path):
    ids = (np.arange(500) % 3).astype('<u2')
    folder = tmp_path / 'old'
    folder.mkdir()
    ids.tofile(folder / 'train.bin'), ids.tofile(folder / 'val.bin')
    bare = Dataset('old', tmp_path)  # as nanoGPT's openwebtext: no meta means GPT-2
    assert bare.vocab_size == 50304 and bare.tokenizer_state['name'] == 'gpt2' and bare.train.n == 500
    meta = folder / 'meta.pkl'
    meta.write_bytes(pickle.dumps({**nanogpt_meta('aé\n'), 'vocab_size': 4}))
    old = Dataset('old', tmp_path)
    tok = old.tokenizer()
    assert old.vocab_size == 4 and tok.decode([1, 0, 2]) == 'éa\n' and tok.encode_prompt('aé') == [0, 1]
    meta.write_bytes(pickle.dumps({'vocab_size': 2**20}))
    assert Dataset('old', tmp_path).train.n == 250, 'ids that need uint32 are'


def test_a_vocab_size_alone_is_enough_to_train_and_to_sample_numbers(tiny, tmp_path, script, works):
    folder = tmp_path / 'data' / 'tiny'
    (folder / 'meta.json').unlink()
    (folder / 'meta.pkl').write_bytes(pickle.dumps({'vocab_size': 40}))
    done = works('train.py', *tiny, '--sample_interval=6', '--sample_tokens=5')
    assert 'vocabulary 40' in done.out and 'bpb' not in done.out
    out = f"--out_dir={tmp_path / 'out'}"
    sample = [out, '--device=cpu', '--num_samples=1', '--max_new_tokens=9', '--start']
    ids = script('sample.py', *sample, '7 3').out.split('---')[0].split()
    assert ids[:2] == ['7', '3'] and len(ids) == 11 and all(int(i) < 40 for i in ids)
    assert make_tokenizer({'kind': 'ids', 'n_vocab': 9}).decode([1, 2]) == '1 2', 'which a text may go on from'
    is_refused(script('sample.py', *sample, 'To be'))
    is_refused(script('export.py', out, f"--to={tmp_path / 'hf'}"), 'no text')
    assert not (tmp_path / 'hf').exists()


def test_a_byte_tokenizer_knows_all_text_and_where_documents_begin():
    tok = make_tokenizer({'kind': 'byte'})
    text = 'naïve 漢字 🙂\n'
    assert tok.decode(tok.encode(text).tolist()) == text and tok.n_vocab == 257
    assert tok.encode_prompt('a<|endoftext|>b') == [97, 256, 98]
    assert tok.decode([97, 256, 98]) == 'a<|endoftext|>b'
    assert tok.encode('<|endoftext|>').max() < 256, 'in a corpus it is only text'
    assert tok.token_bytes()[tok.encode(text)].sum() == len(text.encode())
    assert begin('', tok).ids == [256] and not begin('', tok).new_text()


def test_a_char_tokenizer_survives_its_own_state_and_names_strangers():
    tok = make_tokenizer(make_tokenizer({'kind': 'char', 'chars': 'aé漢🙂'}).state())
    assert tok.decode(tok.encode_prompt('🙂é漢a')) == '🙂é漢a' and tok.token_bytes().tolist() == [1, 2, 3, 4]
    with pytest.raises(ValueError, match='z'):
        tok.encode('az')


def test_gpt2_is_gpt2_whether_named_or_spelled_out(gpt2):
    full, bare = TiktokenTokenizer(gpt2).state(), {'kind': 'tiktoken', 'name': 'gpt2'}
    chars = {'kind': 'char', 'chars': 'ab'}
    for a, b in (full, bare), (bare, full), (None, full):
        assert same_tokenizer(a, b)
    for a, b in ((full, {**bare, 'name': 'r50k_base'}), (full, {**full, 'pat_str': 'x'}), (chars, full),
                 (chars, {**chars, 'chars': 'ac'})):
        assert not same_tokenizer(a, b)
