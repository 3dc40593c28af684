"""Dataset folders, including nanoGPT's, are read; the order of samples is a function of the seed."""

import hashlib
import json
import os
import pickle

import numpy as np
import pytest
from conftest import TEXT

from configurator import InputError
from flatgpt.dataset import Dataset, bin_files, hash64, hash_seed, permute, read_meta, sample_starts


def write_ids(folder, ids, name='train.bin', dtype='<u2'):
    folder.mkdir(exist_ok=True)
    np.asarray(ids).astype(dtype).tofile(folder / name)


def write_shards(folder, sizes):
    """Write train_000000.bin, ... of these sizes; return all ids."""
    ids = np.arange(sum(sizes)) * 7 % 251
    for i, shard in enumerate(np.split(ids, np.cumsum(sizes)[:-1])):
        write_ids(folder, shard, f'train_{i:06d}.bin')
    return ids


def write_meta(folder, **values):
    """Write a meta.json for bytes. It begins with a byte order mark, as some editors write it."""
    meta = {'tokenizer': {'kind': 'byte'}, 'vocab_size': 257, 'end_of_text': 256, 'dtype': 'uint16', **values}
    (folder / 'meta.json').write_text(json.dumps(meta), encoding='utf-8-sig')


# -----------------------------------------------------------------------------
# which sample comes when


def permuted(n, key):
    return permute(np.arange(n, dtype=np.uint64), n, np.full(n, key, dtype=np.uint64))


def test_permute_is_a_bijection_for_every_size():
    for n in [*range(1, 200), 4095, 4096, 4097, 65537]:
        assert np.array_equal(np.sort(permuted(n, hash64(7, n))), np.arange(n)), n


def test_the_order_is_that_of_earlier_versions():
    assert hash_seed(5, 4, 100, 2) == 4652151948215680096
    assert permuted(10, 7).tolist() == [8, 6, 3, 4, 2, 5, 9, 1, 7, 0]
    assert sample_starts(1337, [0, 1, 2, 187, 5000], 1000, 16) == [491, 107, 827, 891, 300]
    assert sample_starts(5, [10**9], 9 * 10**9, 1024) == [2476770559]


@pytest.mark.parametrize('n', [1000, 1007, 17])
def test_each_token_is_a_target_at_most_once_per_epoch(n):
    n_blocks = n // 16
    for epoch in range(3):
        starts = sample_starts(5, range(epoch * n_blocks, (epoch + 1) * n_blocks), n, 16)
        targets = (np.array(starts)[:, None] + np.arange(16)) % n
        assert len(np.unique(targets)) == n_blocks * 16


def test_the_target_is_the_next_token_and_a_sample_does_not_depend_on_its_batch(data_dir):
    train = Dataset('toy', data_dir).train
    x, y, _ = train.batch(5, range(40, 52), 16)
    assert np.array_equal(x[:, 1:], y[:, :-1])
    assert np.array_equal(x[6:9], train.batch(5, range(46, 49), 16)[0])


def test_the_sequences_of_an_evaluation_cover_the_split(data_dir):
    data = Dataset('toy', data_dir)
    starts = data.val.eval_starts(16)
    assert len(starts) == data.n_eval_sequences(16)
    _, y, _ = data.val.eval_batch(starts, 16)
    targets = data.val.read([1], data.val.n - 1)[0]
    assert np.array_equal(y[y >= 0], targets), 'each token once, none after the end'
    few = data.val.eval_starts(16, 5)
    assert len(few) == 5 and set(few) <= set(starts)


# -----------------------------------------------------------------------------
# folders


def test_a_nanogpt_folder_is_read_as_it_is(data_dir):
    data = Dataset('toy', data_dir)
    assert data.vocab_size == len(set(TEXT)) and data.train.n + data.val.n == len(TEXT)
    assert data.tokenizer.decode(data.train.read([0], 300)[0].tolist()) == TEXT[:300]
    assert data.fingerprint['train'].items() >= {'tokens': data.train.n, 'sha256': 'unknown'}.items()


def test_a_folder_without_a_meta_file_has_gpt2s_tokens(tmp_path, monkeypatch):
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(tmp_path / 'nothing'))  # training does not need tiktoken
    write_shards(tmp_path / 'owt', [500])
    data = Dataset('owt', tmp_path, 499)
    assert data.vocab_size == 50304 and data.tokenizer_state['name'] == 'gpt2' and data.val is None
    assert not data.train.token_bytes.any()
    with pytest.raises(InputError, match='--block_size'):  # 500 tokens have 499 targets
        Dataset('owt', tmp_path, 500)


@pytest.fixture
def few_open_files():
    resource = pytest.importorskip('resource', reason='not on Windows')
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (360, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_shards_are_one_long_array(tmp_path, few_open_files):
    ids = write_shards(tmp_path / 'many', [2, 1, 3, 2] * 100)  # more files than may be open
    train = Dataset('many', tmp_path).train
    for length in (1, 5, 140, 1700):  # the last wraps around twice
        starts = np.arange(0, len(ids), 7)
        expected = ids[(starts[:, None] + np.arange(length)) % len(ids)]
        assert np.array_equal(train.read(starts, length), expected), length


def test_npy_shards_are_read(tmp_path):
    ids = np.arange(1000)
    np.save(tmp_path / 'edu_train_000001.npy', ids[:600].astype(np.uint16))
    np.save(tmp_path / 'edu_train_000002.npy', ids[600:])
    np.save(tmp_path / 'edu_val_000000.npy', ids[:100])
    data = Dataset(tmp_path.name, tmp_path.parent, 16)
    assert np.array_equal(data.train.read([0], 1000)[0], ids) and data.val.n == 100
    for wrong in [ids / 2, ids[:0]]:
        np.save(tmp_path / 'edu_train_000003.npy', wrong)
        with pytest.raises(InputError, match='000003'):
            Dataset(tmp_path.name, tmp_path.parent)


@pytest.mark.parametrize('name, split', [
    ('medieval_train_000001', 'train'), ('carnival_songs_001', 'train'), ('valley', 'train'),
    ('medieval_val_000000', 'val'), ('VAL', 'val'), ('val0', 'val'), ('edu-validation', 'val')])
def test_val_is_a_word_of_a_npy_files_name(tmp_path, name, split):
    np.save(tmp_path / f'{name}.npy', np.arange(10))
    found = [split for split in ('train', 'val') if bin_files(tmp_path, split)]
    assert found == [split]


def test_documents_are_numbered_with_a_document_mask(tmp_path):
    write_ids(tmp_path / 'docs', [256, 1, 2, 256, 3, 256, 4, 5] * 10)
    write_meta(tmp_path / 'docs')
    train = Dataset('docs', tmp_path, 8, document_mask=True).train
    _, _, doc_ids = train.eval_batch(np.array([0]), 8)
    assert doc_ids[0].tolist() == [1, 1, 1, 2, 2, 3, 3, 3]
    write_meta(tmp_path / 'docs', end_of_text=None)
    with pytest.raises(InputError, match='document_mask'):
        Dataset('docs', tmp_path, 8, document_mask=True)


def test_a_vocab_size_alone_is_enough(tmp_path):
    write_ids(tmp_path / 'notes', 99_999 - np.arange(200), dtype='<u4')
    (tmp_path / 'notes' / 'meta.json').write_text('{"vocab_size": 100000}')
    data = Dataset('notes', tmp_path, 16)
    assert data.vocab_size == 100_000
    assert data.tokenizer.decode(data.train.read([1], 2)[0].tolist()) == '99998 99997'


# -----------------------------------------------------------------------------
# what describes data is checked against the data


def fingerprint(folder):
    return Dataset(folder.name, folder.parent).fingerprint['train']


def test_the_fingerprint_is_that_of_the_ids_wherever_they_are_stored(tmp_path):
    ids = write_shards(tmp_path / 'a', [5000, 3000, 10_000])
    write_ids(tmp_path / 'b', ids, dtype='<u4')
    write_ids(tmp_path / 'c', ids[::-1])
    write_meta(tmp_path / 'b', dtype='uint32')
    assert fingerprint(tmp_path / 'a') == fingerprint(tmp_path / 'b')
    assert fingerprint(tmp_path / 'a') != fingerprint(tmp_path / 'c'), 'as many tokens in another order'
    for n in (1, 2, 66, 513):
        write_ids(tmp_path / 'c', ids[:n])
        assert fingerprint(tmp_path / 'c')['tokens'] == n


@pytest.mark.parametrize('changed', [range(299, -1, -1), range(299), [256] * 300, [5000] * 300])
@pytest.mark.parametrize('is_older', [False, True])
def test_data_that_another_program_wrote_is_not_read_with_an_older_meta_json(tmp_path, changed, is_older):
    folder = tmp_path / 'toy'
    ids = np.arange(300) % 250
    write_ids(folder, ids)
    entry = {'tokens': 300, 'sample': fingerprint(folder)['sample']}
    if is_older:  # without a sample
        sha256 = hashlib.sha256((folder / 'train.bin').read_bytes()).hexdigest()
        entry = {'tokens': 300, 'shards': [{'sha256': sha256}]}
    write_meta(folder, splits={'train': entry})
    for time in (0, 2**31):  # a copy may be older or newer than meta.json
        os.utime(folder / 'train.bin', (time, time))
        Dataset('toy', tmp_path)
    write_ids(folder, list(changed))
    os.utime(folder / 'train.bin', (2**31, 2**31))
    with pytest.raises(InputError, match='train.bin.*meta.json'):
        Dataset('toy', tmp_path)


# -----------------------------------------------------------------------------
# mistakes


class Evil:
    def __reduce__(self):
        return os.system, ('touch CANARY',)


@pytest.mark.parametrize('value', [Evil(), np.dtype('V8')])
def test_a_meta_pkl_with_anything_but_plain_types_is_refused(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'meta.pkl').write_bytes(pickle.dumps({'vocab_size': value, 'itos': {}}))
    with pytest.raises(InputError, match='plain type'):
        read_meta(tmp_path)
    assert not (tmp_path / 'CANARY').exists()


def nested_tuples():
    """Return a pickle of a dict whose key is a tuple in a tuple in a tuple."""
    return b'\x80\x02}X\x01\x00\x00\x00a' + b'\x85' * 1_000_000 + b'K\x01s.'


# the last one stores an object at the place 2**31 of the unpickler's table
@pytest.mark.parametrize('content', [nested_tuples(), b'\x80\x02}r\x00\x00\x00\x80.'])
def test_a_meta_pkl_that_would_crash_python_or_take_gigabytes_is_refused(tmp_path, content):
    (tmp_path / 'meta.pkl').write_bytes(content)
    with pytest.raises(InputError, match='UnpicklingError'):
        read_meta(tmp_path)


@pytest.mark.parametrize('content', [
    b'{"vocab_size": 4294967296}', b'{"vocab_size": 9, "dtype": "\\u001b[2J"}', b'{', b'null',
    b'\xff\xfe{}', b'{"vocab_size": 0}', b'{"vocab_size": 9, "dtype": "int16"}',
    b'{"vocab_size": 9, "tokenizer": {}}'])
def test_a_damaged_meta_json_is_refused(tmp_path, content):
    (tmp_path / 'meta.json').write_bytes(content)
    with pytest.raises(InputError) as e:
        read_meta(tmp_path)
    assert str(e.value).isprintable()


def test_a_dataset_that_is_missing_or_not_finished_is_an_error(data_dir, tmp_path):
    for name in ('nothing', '../toy'):
        with pytest.raises(InputError):
            Dataset(name, data_dir)
    (tmp_path / 'plan.json').write_text('{}')
    with pytest.raises(InputError, match='not finished'):
        read_meta(tmp_path)
    write_meta(tmp_path)
    read_meta(tmp_path)


def test_an_id_that_is_not_in_the_vocabulary_is_an_error_when_it_is_read(tmp_path):
    ids = np.ones(100_000)
    ids[71_001] = 257  # not among those that are checked at the start
    write_ids(tmp_path / 'wrong', ids)
    write_meta(tmp_path / 'wrong')
    train = Dataset('wrong', tmp_path, 16).train
    with pytest.raises(InputError, match='257'):
        train.read([71_000], 2)
    write_ids(tmp_path / 'wrong', ids + 256)
    with pytest.raises(InputError):
        Dataset('wrong', tmp_path)


@pytest.mark.parametrize('dtype', ['<i4', '<i8'])
def test_ids_of_a_wider_type_are_an_error(tmp_path, dtype):
    write_ids(tmp_path / 'wide', np.arange(20_000) % 28, dtype=dtype)
    write_meta(tmp_path / 'wide')
    with pytest.raises(InputError, match='int32'):
        Dataset('wide', tmp_path)


def test_shards_have_the_counts_of_meta_json(tmp_path):
    folder = tmp_path / 'toy'
    write_shards(folder, [100, 100])
    entry = {'tokens': 200, 'bytes': 600, 'token_bytes': 200, 'shards': [{'sha256': '0'}, {'sha256': '1'}]}
    write_meta(folder, splits={'train': entry})
    train = Dataset('toy', tmp_path).train
    # the checksum of both, as earlier checkpoints have it
    assert train.fingerprint.items() >= {'tokens': 200, 'sha256': '5cc3a6551605a0b4 of all'}.items()
    # the tokenizer dropped two thirds of the text, whose bytes are counted
    assert train.token_bytes[:256].tolist() == [3.0] * 256 and train.token_bytes[256] == 0
    write_ids(folder, np.ones(99), 'train_000001.bin')  # it became shorter
    with pytest.raises(InputError):
        Dataset('toy', tmp_path)
