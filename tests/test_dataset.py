"""A dataset's folder is read as it is, nanoGPT's too; the order of its samples follows from the seed."""

import collections
import hashlib
import json
import os
import pickle

import numpy as np
import pytest
import torch
from conftest import TEXT, char_dataset

from dataset import Dataset, Loader, hash64, hash_seed, permute, read_meta, sample_starts, windows


def refused(capsys, *args):
    """Dataset(*args) ends with one line and status 2; that line."""
    with pytest.raises(SystemExit) as e:
        Dataset(*args)
    assert e.value.code == 2
    return capsys.readouterr().err


def write_ids(folder, ids, name='train.bin', dtype='<u2'):
    folder.mkdir(exist_ok=True)
    np.asarray(ids).astype(dtype).tofile(folder / name)


def write_shards(folder, sizes):
    """train_000000.bin, ... of such sizes; returns all ids."""
    ids = np.arange(sum(sizes)) * 7 % 251
    for i, shard in enumerate(np.split(ids, np.cumsum(sizes)[:-1])):
        write_ids(folder, shard, f'train_{i:06d}.bin')
    return ids


def write_meta(folder, **values):
    """A meta.json for bytes. It begins with a byte order mark, as some editors write it."""
    meta = {'tokenizer': {'kind': 'byte'}, 'vocab_size': 257, 'end_of_text': 256, 'dtype': 'uint16', **values}
    (folder / 'meta.json').write_text(json.dumps(meta), encoding='utf-8-sig')


# -----------------------------------------------------------------------------
# which sample comes when


def permuted(n, key):
    numbers = np.arange(n, dtype=np.uint64)
    return permute(numbers, n, np.full(n, key, dtype=np.uint64))


def test_permute_is_a_bijection_for_every_size():
    for n in [*range(1, 200), 4095, 4096, 4097, 65537]:
        assert np.array_equal(np.sort(permuted(n, hash64(7, n))), np.arange(n)), n


def test_the_order_is_that_of_earlier_versions():
    assert hash_seed(1337, 3, 0) == 3047383043045797853
    assert hash_seed(5, 4, 100, 2) == 4652151948215680096
    assert permuted(10, 7).tolist() == [8, 6, 3, 4, 2, 5, 9, 1, 7, 0]
    assert sample_starts(1337, range(6), 1000, 16) == [491, 107, 827, 907, 139, 843]
    assert sample_starts(1337, [187, 5000], 1000, 16) == [891, 300]
    assert sample_starts(5, [10**9], 9 * 10**9, 1024) == [2476770559]


@pytest.mark.parametrize('n, block_size', [(1000, 16), (1007, 16), (17, 16)])
def test_an_epoch_makes_each_token_a_target_at_most_once(n, block_size):
    n_blocks = n // block_size
    for epoch in range(3):
        starts = sample_starts(5, range(epoch * n_blocks, (epoch + 1) * n_blocks), n, block_size)
        targets = {(start + 1 + t) % n for start in starts for t in range(block_size)}
        assert len(targets) == n_blocks * block_size


def test_the_target_is_the_next_token_and_a_sample_does_not_depend_on_its_batch(data_dir):
    train = Dataset('toy', data_dir).train
    x, y, _ = train.batch(5, range(40, 52), 16)
    assert np.array_equal(x[:, 1:], y[:, :-1])
    assert np.array_equal(x[6:9], train.batch(5, range(46, 49), 16)[0])


def test_eval_windows_cover_a_split_side_by_side(data_dir):
    val = Dataset('toy', data_dir).val
    starts = windows(val.n_targets(16), 16)
    _, y, _ = val.eval_batch(starts, 16)
    assert np.array_equal(y[y >= 0], val.read([1], val.n - 1)[0])  # each a target once; behind the end none
    few = windows(val.n_targets(16), 16, 5)
    assert len(few) == 5 and set(few) <= set(starts)


# -----------------------------------------------------------------------------
# folders


def test_a_nanogpt_folder_is_read_as_it_is(data_dir):
    data = Dataset('toy', data_dir)
    assert data.vocab_size == len(set(TEXT)) and data.train.n + data.val.n == len(TEXT)
    assert data.tokenizer.decode(data.train.read([0], 300)[0].tolist()) == TEXT[:300]
    assert data.fingerprint['train'] == {'tokens': data.train.n, 'sha256': 'unknown'}
    assert data.train.token_bytes.tolist() == [1] * data.vocab_size


def test_a_folder_without_a_meta_file_has_gpt2s_tokens(tmp_path, monkeypatch):
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(tmp_path / 'nothing'))  # to train, tiktoken is not needed
    write_shards(tmp_path / 'owt', [500])
    data = Dataset('owt', tmp_path, 16)
    assert data.vocab_size == 50304 and data.tokenizer_state['name'] == 'gpt2' and data.val is None
    assert not data.train.token_bytes.any()


@pytest.fixture
def few_open_files():
    resource = pytest.importorskip('resource', reason='not on Windows')
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (360, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_shards_are_one_long_array(tmp_path, few_open_files):
    ids = write_shards(tmp_path / 'many', [2, 1, 3, 2] * 100)  # more than may be open
    train = Dataset('many', tmp_path).train
    for length in (1, 5, 140, 1700):  # the last is more than twice around
        places = np.arange(0, len(ids), 7)
        expected = ids[(places[:, None] + np.arange(length)) % len(ids)]
        assert np.array_equal(train.read(places, length), expected), length


def test_npy_shards_of_others_are_read(tmp_path, capsys):
    ids = np.arange(1000)
    np.save(tmp_path / 'edu_train_000001.npy', ids[:600].astype(np.uint16))
    np.save(tmp_path / 'edu_train_000002.npy', ids[600:])
    np.save(tmp_path / 'edu_val_000000.npy', ids[:100])
    data = Dataset(tmp_path.name, tmp_path.parent, 16)
    assert np.array_equal(data.train.read([0], 1000)[0], ids) and data.val.n == 100
    np.save(tmp_path / 'edu_train_000003.npy', ids / 2)
    assert '000003' in refused(capsys, tmp_path.name, tmp_path.parent)


def test_documents_are_numbered_where_attention_stays_inside_one(tmp_path):
    write_ids(tmp_path / 'docs', [256, 1, 2, 256, 3, 256, 4, 5] * 10)
    write_meta(tmp_path / 'docs')
    train = Dataset('docs', tmp_path, document_mask=True).train
    _, _, doc_ids = train.eval_batch(np.array([0]), 8)
    assert doc_ids[0].tolist() == [1, 1, 1, 2, 2, 3, 3, 3]


def test_a_vocab_size_alone_is_enough(tmp_path):
    write_ids(tmp_path / 'notes', 99_999 - np.arange(200), dtype='<u4')
    (tmp_path / 'notes' / 'meta.json').write_text('{"vocab_size": 100000}')
    data = Dataset('notes', tmp_path, 16)
    assert data.vocab_size == 100_000
    assert data.tokenizer.decode(data.train.read([1], 2)[0].tolist()) == '99998 99997'


def test_a_tokenizer_that_drops_characters_counts_the_bytes_of_the_text(tmp_path):
    write_shards(tmp_path / 'lossy', [500])
    write_meta(tmp_path / 'lossy', splits={'train': {'tokens': 500, 'bytes': 1500, 'token_bytes': 500}})
    sizes = Dataset('lossy', tmp_path).train.token_bytes
    assert sizes[:256].tolist() == [3.0] * 256 and sizes[256] == 0


# -----------------------------------------------------------------------------
# meta.pkl, of which nothing is executed


def test_a_meta_pkl_may_hold_a_defaultdict(tmp_path):
    itos = collections.defaultdict(str, {0: 'a', 1: '\u00e9'})
    (tmp_path / 'meta.pkl').write_bytes(pickle.dumps({'vocab_size': 2, 'itos': itos}))
    assert read_meta(tmp_path)['tokenizer'] == {'kind': 'char', 'chars': 'a\u00e9'}


class Evil:
    def __reduce__(self):
        return os.system, ('touch CANARY',)


class ObjectDtype:
    """A numpy.dtype whose state says that its 8 bytes are the address of an object."""

    def __reduce__(self):
        fields = {'a': (np.dtype('O'), 0)}
        return np.dtype, ('V8', False, True), (3, '|', None, ('a',), fields, 8, 1, 0)


class Address:
    def __reduce__(self):
        scalar, _ = np.int64(0).__reduce__()  # numpy's function that makes a number of a dtype and bytes
        return scalar, (ObjectDtype(), b'A' * 8)


@pytest.mark.parametrize('value', [Evil(), np.int64(3), np.str_('3'), Address()])
def test_a_meta_pkl_with_anything_but_plain_values_is_refused(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'meta.pkl').write_bytes(pickle.dumps({'vocab_size': value, 'itos': {}}))
    with pytest.raises(ValueError, match='int'):
        read_meta(tmp_path)
    assert not (tmp_path / 'CANARY').exists()


# -----------------------------------------------------------------------------
# what can be wrong


def test_a_dataset_that_is_missing_or_not_finished_is_told(data_dir, tmp_path, capsys):
    assert 'prepare.py' in refused(capsys, 'nothing', data_dir)
    refused(capsys, '../toy', data_dir)
    work = char_dataset(tmp_path) / 'toy' / 'unfinished'
    work.mkdir()
    Dataset('toy', tmp_path)  # another one is being made, and this one is still there
    (work / 'meta.json').write_text('{}')  # its files are being moved
    refused(capsys, 'toy', tmp_path)


def test_too_few_tokens_for_a_window_are_told(tmp_path, capsys):
    char_dataset(tmp_path, 'short', TEXT[:100])
    assert Dataset('short', tmp_path, 9).val.n == 10
    assert '--block_size' in refused(capsys, 'short', tmp_path, 10)


def test_an_id_that_the_vocabulary_lacks_is_told_when_it_is_read(tmp_path, capsys):
    ids = np.ones(100_000)
    ids[71_001] = 257  # not among the ones that are looked at first
    write_ids(tmp_path / 'wrong', ids)
    write_meta(tmp_path / 'wrong')
    train = Dataset('wrong', tmp_path, 16).train
    with pytest.raises(ValueError, match='257'):
        train.read([71_000], 2)
    write_ids(tmp_path / 'wrong', ids + 256)
    refused(capsys, 'wrong', tmp_path)


@pytest.mark.parametrize('word, ids, dtype', [
    ('int32', np.arange(20_000) % 28, '<i4'), ('int64', np.arange(20_000) % 28, '<i8'),
    ('llm.c', [20240520, 1, 1000] + [0] * 253, '<i4')])
def test_ids_of_another_width_and_a_header_of_llm_c_are_named(tmp_path, capsys, word, ids, dtype):
    write_ids(tmp_path / 'other', ids, dtype=dtype)
    write_meta(tmp_path / 'other')
    assert word in refused(capsys, 'other', tmp_path)


def test_a_missing_or_changed_shard_is_told(tmp_path, capsys):
    shards = [{'sha256': '0'}, {'sha256': '1'}]
    for name in ('whole', 'changed', 'missing'):
        write_shards(tmp_path / name, [100, 100])
        write_meta(tmp_path / name, splits={'train': {'tokens': 200, 'shards': shards}})
    expected = hashlib.sha256(b'0 1').hexdigest()[:16] + ' of all'
    assert Dataset('whole', tmp_path).fingerprint['train'] == {'tokens': 200, 'sha256': expected}
    shard = tmp_path / 'changed' / 'train_000001.bin'
    shard.write_bytes(shard.read_bytes()[:-2])
    refused(capsys, 'changed', tmp_path)
    (tmp_path / 'missing' / 'train_000001.bin').unlink()
    refused(capsys, 'missing', tmp_path)


@pytest.mark.parametrize('content', [
    b'{', b'null', b'{}', b'\xff\xfe{}', b'{"vocab_size": 0}', b'{"vocab_size": 9, "dtype": "int16"}',
    b'{"vocab_size": 9, "tokenizer": {}}', b'{"vocab_size": 9, "splits": [3]}'])
def test_a_damaged_meta_json_is_refused(tmp_path, content):
    (tmp_path / 'meta.json').write_bytes(content)
    with pytest.raises(ValueError):
        read_meta(tmp_path)


# -----------------------------------------------------------------------------
# conversations


LENGTHS = [5, 9, 3, 12, 7, 7, 2, 30, 4, 6]


@pytest.fixture
def talks(tmp_path):
    """A folder of datasets with `talks`: ten conversations of bytes, the second half of each counts."""
    folder = tmp_path / 'talks'
    folder.mkdir()
    ids = np.concatenate([np.arange(n) + 10 * i for i, n in enumerate(LENGTHS)]).astype('<u2')
    mask = np.concatenate([np.arange(n) >= n // 2 for n in LENGTHS])
    mask[sum(LENGTHS[:8]):sum(LENGTHS[:9])] = False  # in the ninth nothing does
    ids.tofile(folder / 'train.bin')
    bits = np.packbits(mask, bitorder='little').tobytes()
    starts = np.cumsum([0, *LENGTHS[:-1]]).astype('<u8').tobytes()
    (folder / 'train.mask').write_bytes(bits)
    (folder / 'train.starts').write_bytes(starts)
    entry = {'tokens': len(ids), 'mask_sha256': hashlib.sha256(bits + starts).hexdigest()}
    write_meta(folder, chat='', splits={'train': entry})
    return tmp_path


def test_conversations_are_packed_as_in_earlier_versions(talks):
    train = Dataset('talks', talks, 16, 3).train
    packed, targets = train.packing(16)
    assert packed == [[7], [3, 9], [1, 5, 2], [4, 0, 6]] and targets.tolist() == [2, 9, 11, 8]
    assert train.window_numbers(3, range(8), 16).tolist() == [0, 2, 3, 1, 0, 3, 2, 1]


def test_an_epoch_has_each_conversation_once_and_counts_its_targets(talks):
    train = Dataset('talks', talks, 32, 3).train
    n = train.n_targets(32) // 32
    x, y, doc_ids = train.batch(5, range(n), 32)
    # but the last id of each, and the one without targets
    assert (doc_ids >= 0).sum() == sum(LENGTHS) - 4 - 9
    assert (y >= 0).sum() == train.mask.sum() == train.count_targets(5, range(n), 32)
    assert np.array_equal(y[y >= 0], x[y >= 0] + 1)  # of the same conversation, whose ids count upwards


@pytest.mark.parametrize('name', ['train.mask', 'train.starts'])
def test_a_mask_of_other_conversations_is_told(talks, capsys, name):
    path = talks / 'talks' / name
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert name in refused(capsys, 'talks', talks)


# -----------------------------------------------------------------------------
# the way to the device


@pytest.mark.parametrize('device', ['cpu', 'cuda:0'])
def test_the_loader_brings_micro_batches_in_order_from_any_iteration(device, monkeypatch):
    if device != 'cpu':  # without one: copies stay where they are
        monkeypatch.setattr(torch.Tensor, 'pin_memory', lambda tensor: tensor)
        monkeypatch.setattr(torch.Tensor, 'to', lambda tensor, device, non_blocking: tensor)
    batches = Loader(lambda it, micro_step: (np.full(3, 10 * it + micro_step), None, 0.5), 2, 3, device)
    for expected in [20, 21, 22, 30, 31, 32, 40]:
        x, doc_ids, divisor = next(batches)
        assert x.tolist() == [expected] * 3 and doc_ids is None and divisor == 0.5
    batches.close()
