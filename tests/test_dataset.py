"""A dataset folder is read as it is, nanoGPT's too, and the order of its samples is a function of seed and number."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from conftest import make_dataset

import dataset
from dataset import Dataset, hash64, make_tokenizer, permute, train_starts


def test_permute_is_a_permutation_for_every_size():
    for n in [*range(1, 700), 1023, 1024, 1025, 4097, 65537, 250_000]:
        seen = permute(np.arange(n, dtype=np.uint64), np.uint64(n), np.broadcast_to(hash64(7, n), (n,)))
        assert np.array_equal(np.sort(seen), np.arange(n)), n


def test_permute_depends_on_its_key_and_looks_shuffled():
    n = 10_000
    a, b = (permute(np.arange(n, dtype=np.uint64), np.uint64(n), np.broadcast_to(hash64(key), (n,))).astype(float) for key in (1, 2))
    for x, y in [(a, np.arange(n)), (b, np.arange(n)), (a, b), (a[1:], a[:-1])]:
        assert abs(np.corrcoef(x, y)[0, 1]) < 0.05


def test_ten_trillion_tokens_cost_no_more_than_a_thousand_blocks():
    for n_tokens in (10**6, 10**13):
        starts = train_starts(1, range(10**9, 10**9 + 20), n_tokens, 1024)
        assert len(set(starts)) == 20 and 0 <= min(starts) and max(starts) < n_tokens


@pytest.mark.parametrize('n, T', [(1000, 16), (1007, 16), (33, 16), (17, 16), (64, 64 - 1)])
def test_an_epoch_makes_each_token_a_target_at_most_once(n, T):
    blocks = n // T
    offsets = set()
    for epoch in range(3):
        starts = train_starts(5, range(epoch * blocks, (epoch + 1) * blocks), n, T)
        targets = [(s + 1 + t) % n for s in starts for t in range(T)]
        assert len(targets) == len(set(targets)) == blocks * T
        offsets.add(tuple(starts))
    assert len(offsets) == 3 or blocks == 1, 'each epoch has an order of its own'


def test_windows_are_the_file_and_wrap_around(tmp_path):
    folder = make_dataset(tmp_path)
    data = Dataset('tiny', tmp_path)
    ids = np.fromfile(folder / 'train.bin', dtype='<u2')
    n = len(ids)
    assert np.array_equal(data.train.windows([0, 5], 9), np.stack([ids[:9], ids[5:14]]))
    assert np.array_equal(data.train.windows([n - 3], 6)[0], np.concatenate([ids[-3:], ids[:3]]))
    assert data.train.windows([0], 3).dtype == np.int64


def test_nanogpt_folders_are_read_as_they_are(tmp_path):
    ids = (np.arange(500) % 3).astype('<u2')
    folder = tmp_path / 'old'
    folder.mkdir()
    ids.tofile(folder / 'train.bin'), ids.tofile(folder / 'val.bin')
    bare = Dataset('old', tmp_path)  # as nanoGPT's openwebtext: no meta means GPT-2
    assert bare.vocab_size == 50304 and bare.tokenizer_state == {'kind': 'tiktoken', 'name': 'gpt2'} and bare.train.n == 500
    with open(folder / 'meta.pkl', 'wb') as f:
        pickle.dump({'vocab_size': 3, 'itos': {0: 'a', 1: 'é', 2: '\n'}, 'stoi': {'a': 0, 'é': 1, '\n': 2}}, f)
    old = Dataset('old', tmp_path)
    assert old.vocab_size == 3 and old.tokenizer().decode([1, 0, 2]) == 'éa\n' and old.tokenizer().encode_prompt('aé') == [0, 1]


def test_a_pickle_that_would_run_code_does_not(tmp_path, capsys):
    folder = make_dataset(tmp_path)
    (folder / 'meta.json').unlink()
    canary = tmp_path / 'canary'

    class Evil:
        def __reduce__(self):
            return (Path.touch, (canary,))
    (folder / 'meta.pkl').write_bytes(pickle.dumps(Evil()))
    with pytest.raises(SystemExit) as e:
        Dataset('tiny', tmp_path)
    assert e.value.code == 2 and not canary.exists() and 'meta.pkl' in capsys.readouterr().err


def test_a_byte_tokenizer_knows_all_text_and_where_documents_begin():
    tok = make_tokenizer({'kind': 'byte'})
    text = 'naïve 漢字 🙂\n'
    assert tok.decode(tok.encode(text).tolist()) == text and tok.n_vocab == 257
    assert tok.encode_prompt('a<|endoftext|>b') == [97, 256, 98] and tok.decode([97, 256, 98]) == 'a<|endoftext|>b'
    assert tok.encode('<|endoftext|>').max() < 256, 'in a corpus it is only text'
    assert tok.byte_lengths()[tok.encode(text)].sum() == len(text.encode())


def test_a_char_tokenizer_survives_its_own_state_and_names_strangers():
    tok = make_tokenizer(make_tokenizer({'kind': 'char', 'chars': 'aé漢🙂'}).state())
    assert tok.decode(tok.encode_prompt('🙂é漢a')) == '🙂é漢a' and tok.byte_lengths().tolist() == [1, 2, 3, 4]
    with pytest.raises(ValueError, match='z'):
        tok.encode('az')


def test_a_bpe_tokenizer_decodes_from_its_state_alone(gpt2):
    tok = dataset.TiktokenTokenizer(gpt2)
    state = tok.state()
    alone = make_tokenizer(json.loads(json.dumps({k: v for k, v in state.items() if k != 'ranks'})) | {'ranks': state['ranks']})
    text = "It's 1984, isn't it?\n\n   naïve 漢字<|endoftext|>"
    assert alone.encode(text).tolist() == gpt2.encode_ordinary(text) and alone.decode(alone.encode_prompt(text)) == text
    assert alone.encode_prompt(text)[-1] == alone.end_of_text == 50256
    assert alone.byte_lengths()[alone.encode(text)].sum() == len(text.encode())


def test_gpt2_is_gpt2_whether_named_or_spelled_out(gpt2):
    full, bare, other = dataset.TiktokenTokenizer(gpt2).state(), {'kind': 'tiktoken', 'name': 'gpt2'}, {'kind': 'tiktoken', 'name': 'r50k_base'}
    assert dataset.same_tokenizer(full, bare) and dataset.same_tokenizer(bare, full) and dataset.same_tokenizer(full, dict(full))
    assert not dataset.same_tokenizer(full, other) and not dataset.same_tokenizer(full, {**full, 'pat_str': 'x'}) and dataset.same_tokenizer(None, full)
    assert not dataset.same_tokenizer({'kind': 'byte'}, full) and not dataset.same_tokenizer({'kind': 'char', 'chars': 'ab'}, {'kind': 'char', 'chars': 'ac'})


def test_ids_that_a_vocabulary_skips_decode_to_nothing(gpt2):
    import tiktoken
    try:
        tok = dataset.TiktokenTokenizer(tiktoken.get_encoding('o200k_base'))
    except OSError:
        pytest.skip("o200k_base: neither in TIKTOKEN_CACHE_DIR nor to be fetched")
    assert tok.decode([*tok.encode_prompt('gap'), 200005, *tok.encode_prompt(' here')]) == 'gap here'
