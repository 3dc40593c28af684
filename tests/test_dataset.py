"""A dataset's folder is read as it is, nanoGPT's too; the order of its samples follows from the seed."""

import collections
import contextlib
import hashlib
import json
import os
import pickle
import time

import numpy as np
import pytest
import torch
from conftest import TEXT, char_dataset

from dataset import (
    Dataset, Loader, best_fit, hash64, hash_seed, padded_vocab_size, permute, read_meta, sample_starts,
    windows)


def refused(capsys, *args):
    """Dataset(*args) ends with one line and status 2; that line."""
    with pytest.raises(SystemExit) as e:
        Dataset(*args)
    line = capsys.readouterr().err
    assert e.value.code == 2 and line.startswith('error: ') and line.count('\n') == 1
    return line


def write_shards(folder, sizes):
    """train_000000.bin, ... of such sizes; returns all ids."""
    folder.mkdir()
    ids = (np.arange(sum(sizes)) * 7 % 251).astype('<u2')
    begin = 0
    for i, size in enumerate(sizes):
        ids[begin:begin + size].tofile(folder / f'train_{i:06d}.bin')
        begin += size
    return ids


def byte_meta(splits):
    return {'tokenizer': {'kind': 'byte'}, 'vocab_size': 257, 'end_of_text': 256, 'dtype': 'uint16',
            'splits': splits}


# -----------------------------------------------------------------------------
# which sample comes when


def permuted(n, key):
    numbers = np.arange(n, dtype=np.uint64)
    return permute(numbers, n, np.full(n, key, dtype=np.uint64))


def test_permute_is_a_bijection_for_every_size():
    for n in [*range(1, 200), 4095, 4096, 4097, 65537]:
        assert np.array_equal(np.sort(permuted(n, hash64(7, n))), np.arange(n)), n


def test_permute_depends_on_its_key_and_looks_shuffled():
    n = 10_000
    a = permuted(n, hash64(1)).astype(float)
    b = permuted(n, hash64(2)).astype(float)
    for one, other in [(a, np.arange(n)), (a, b), (a[1:], a[:-1])]:
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.05


def test_the_order_is_that_of_earlier_versions():
    assert hash_seed(1337, 3, 0) == 3047383043045797853
    assert hash_seed(5, 4, 100, 2) == 4652151948215680096
    assert permuted(10, 7).tolist() == [8, 6, 3, 4, 2, 5, 9, 1, 7, 0]
    assert sample_starts(1337, range(6), 1000, 16) == [491, 107, 827, 907, 139, 843]
    assert sample_starts(1337, [187, 5000], 1000, 16) == [891, 300]
    assert sample_starts(5, [10**9], 9 * 10**9, 1024) == [2476770559]


def test_numbers_hash_alike_alone_and_in_an_array():
    numbers = np.array([0, 1, 12345, 2**64 - 1], dtype=np.uint64)
    assert hash64(3, numbers).tolist() == [hash64(3, int(number)) for number in numbers]


@pytest.mark.parametrize('n, block_size', [(1000, 16), (1007, 16), (33, 16), (17, 16), (64, 63)])
def test_an_epoch_makes_each_token_a_target_at_most_once(n, block_size):
    n_blocks = n // block_size
    orders = set()
    for epoch in range(3):
        starts = sample_starts(5, range(epoch * n_blocks, (epoch + 1) * n_blocks), n, block_size)
        targets = {(start + 1 + t) % n for start in starts for t in range(block_size)}
        assert len(targets) == n_blocks * block_size
        orders.add(tuple(starts))
    assert len(orders) == 3 or n_blocks == 1, 'each epoch has an order of its own'


def test_the_shares_of_processes_are_the_batch_of_one(data_dir):
    train = Dataset('toy', data_dir).train
    x, y, doc_ids = train.batch(5, range(40, 52), 16)
    parts = [train.batch(5, range(40 + 3 * rank, 43 + 3 * rank), 16) for rank in range(4)]
    assert np.array_equal(x, np.concatenate([part[0] for part in parts]))
    assert np.array_equal(y, np.concatenate([part[1] for part in parts]))
    assert doc_ids is None and x.dtype == y.dtype == np.int64
    assert np.array_equal(x[:, 1:], y[:, :-1])
    assert not np.array_equal(x, train.batch(6, range(40, 52), 16)[0]), 'another seed, another order'


def test_eval_windows_cover_a_split_side_by_side(data_dir):
    val = Dataset('toy', data_dir).val
    starts = windows(val.n_targets(16), 16)
    x, y, _ = val.eval_batch(starts, 16)
    ids = val.read([0], val.n)[0]
    assert np.array_equal(x.ravel()[:val.n], ids)
    assert np.array_equal(y[y >= 0], ids[1:]), 'each id is a target once; behind the end none is'
    assert len(starts) == Dataset('toy', data_dir).n_eval_windows(16)
    few = windows(val.n_targets(16), 16, 5)
    assert len(few) == 5 and set(few) <= set(starts) and few[-1] > val.n / 2


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
    assert data.n_eval_windows(16) == 32, 'those of train'


def test_vocabularies_of_bpe_are_padded_to_64():
    assert padded_vocab_size(50257, {'kind': 'tiktoken'}) == 50304
    assert padded_vocab_size(128, {'kind': 'hf'}) == 128
    assert padded_vocab_size(65, {'kind': 'char'}) == 65


def test_shards_are_one_long_array(tmp_path):
    ids = write_shards(tmp_path / 'many', [100, 1, 37, 250, 2, 2, 90])
    train = Dataset('many', tmp_path).train
    assert train.n == len(ids)
    for length in (1, 5, 140, 1200):  # the last is more than twice around
        places = np.arange(len(ids))[:, None] + np.arange(length)
        assert np.array_equal(train.read(range(len(ids)), length), ids[places % len(ids)]), length


def test_more_shards_than_a_process_may_open_are_read(tmp_path):
    import resource
    ids = write_shards(tmp_path / 'many', [20] * 400)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[0], 360), limits[1]))
    try:
        train = Dataset('many', tmp_path).train
        assert np.array_equal(train.read([0], len(ids))[0], ids)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_two_hundred_shards_open_in_less_than_a_second(tmp_path):
    write_shards(tmp_path / 'many', [1000] * 200)
    t0 = time.time()
    Dataset('many', tmp_path, 64)
    assert time.time() - t0 < 1


def test_npy_shards_of_others_are_read(tmp_path):
    ids = np.arange(1000)
    (tmp_path / 'edu').mkdir()
    np.save(tmp_path / 'edu' / 'edu_train_000001.npy', ids[:600].astype(np.uint16))
    np.save(tmp_path / 'edu' / 'edu_train_000002.npy', ids[600:].astype(np.int64))
    np.save(tmp_path / 'edu' / 'edu_val_000000.npy', ids[:100].astype(np.uint16))
    data = Dataset('edu', tmp_path, 16)
    assert np.array_equal(data.train.read([0], 1000)[0], ids) and data.val.n == 100


@pytest.mark.parametrize('bad', [
    np.zeros((2, 50), np.uint16), np.zeros(100), np.full(100, 60_000), np.arange(-50, 50)])
def test_npy_files_that_hold_something_else_are_refused(tmp_path, capsys, bad):
    (tmp_path / 'edu').mkdir()
    np.save(tmp_path / 'edu' / 'train.npy', bad)
    assert 'train.npy' in refused(capsys, 'edu', tmp_path)


def test_documents_are_numbered_where_attention_stays_inside_one(tmp_path, capsys):
    folder = tmp_path / 'docs'
    folder.mkdir()
    np.array([256, 1, 2, 256, 3, 256, 4, 5] * 10, '<u2').tofile(folder / 'train.bin')
    (folder / 'meta.json').write_text(json.dumps(byte_meta({})))
    train = Dataset('docs', tmp_path, 8, 0, True).train
    x, _, doc_ids = train.eval_batch(np.array([0]), 8)
    assert x[0].tolist() == [256, 1, 2, 256, 3, 256, 4, 5]
    assert doc_ids[0].tolist() == [1, 1, 1, 2, 2, 3, 3, 3]
    (folder / 'meta.json').write_text(json.dumps({'vocab_size': 257}))
    refused(capsys, 'docs', tmp_path, 8, 0, True)


def test_a_vocab_size_alone_is_enough(tmp_path):
    write_shards(tmp_path / 'notes', [500])
    (tmp_path / 'notes' / 'meta.json').write_text('{"vocab_size": 251}')
    data = Dataset('notes', tmp_path, 16)
    assert data.vocab_size == 251 and not data.train.token_bytes.any()
    assert data.tokenizer.decode(data.train.read([1], 3)[0].tolist()) == '7 14 21'
    (tmp_path / 'notes' / 'meta.json').write_text('{"vocab_size": 100000}')
    (99_990 - np.arange(200, dtype='<u4')).tofile(tmp_path / 'notes' / 'train_000000.bin')
    assert Dataset('notes', tmp_path).train.n == 200, 'ids that need uint32 are'


def test_a_tokenizer_that_drops_characters_counts_the_bytes_of_the_text(tmp_path):
    write_shards(tmp_path / 'lossy', [500])
    entry = {'tokens': 500, 'bytes': 1500, 'token_bytes': 500}
    (tmp_path / 'lossy' / 'meta.json').write_text(json.dumps(byte_meta({'train': entry})))
    sizes = Dataset('lossy', tmp_path).train.token_bytes
    assert sizes[:256].tolist() == [3.0] * 256 and sizes[256] == 0


def test_a_byte_order_mark_in_meta_json_is_no_part_of_it(tmp_path):
    write_shards(tmp_path / 'marked', [500])
    (tmp_path / 'marked' / 'meta.json').write_text(json.dumps(byte_meta({})), encoding='utf-8-sig')
    assert Dataset('marked', tmp_path).vocab_size == 257


# -----------------------------------------------------------------------------
# meta.pkl, of which nothing is executed


def test_a_meta_pkl_may_hold_numpys_numbers_and_a_defaultdict(tmp_path):
    chars = 'aé\n'
    itos = collections.defaultdict(str)
    for i, char in enumerate(chars):
        itos[np.int64(i)] = np.str_(char)
    path = tmp_path / 'meta.pkl'
    old = {'vocab_size': np.int64(3), 'itos': itos, 'rate': np.float32(1.5)}
    for protocol in (3, 4, 5):
        path.write_bytes(pickle.dumps(old, protocol))
        assert read_meta(tmp_path)['tokenizer'] == {'kind': 'char', 'chars': chars}
    # numpy 1 has another name for the module
    path.write_bytes(pickle.dumps(old, 3).replace(b'numpy._core.', b'numpy.core.'))
    assert read_meta(tmp_path)['vocab_size'] == 3


class Evil:
    def __init__(self, call):
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize('call', [
    (os.system, ('touch CANARY',)), (exec, ('open("CANARY", "w")',)), (np.save, ('CANARY', 1)),
    (getattr, ('x', 'upper')), (collections.Counter, ('ab',))])
def test_a_meta_pkl_that_wants_to_run_something_is_refused(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'meta.pkl').write_bytes(pickle.dumps({'vocab_size': 3, 'itos': Evil(call)}))
    with pytest.raises(ValueError):
        read_meta(tmp_path)
    assert not (tmp_path / 'CANARY').exists()


# -----------------------------------------------------------------------------
# what can be wrong


def test_a_missing_dataset_names_the_command_and_those_that_are_there(data_dir, capsys):
    line = refused(capsys, 'nothing', data_dir)
    assert 'python prepare.py nothing' in line and 'toy' in line
    refused(capsys, '../toy', data_dir)


def test_too_few_tokens_for_a_window_are_told(tmp_path, capsys):
    char_dataset(tmp_path, 'short', TEXT[:100])
    assert Dataset('short', tmp_path, 9).val.n == 10
    assert '--block_size=9' in refused(capsys, 'short', tmp_path, 10)


def test_an_id_that_the_vocabulary_lacks_is_told_when_it_is_read(tmp_path, capsys):
    ids = np.ones(100_000, '<u2')
    ids[71_001] = 251  # not among the ones that are looked at first
    (tmp_path / 'wrong').mkdir()
    ids.tofile(tmp_path / 'wrong' / 'train.bin')
    (tmp_path / 'wrong' / 'meta.json').write_text('{"vocab_size": 251}')
    train = Dataset('wrong', tmp_path, 16).train
    train.read([0], 71_001)
    with pytest.raises(ValueError, match='251'):
        train.read([71_000], 2)
    (ids + 250).tofile(tmp_path / 'wrong' / 'train.bin')
    refused(capsys, 'wrong', tmp_path)


@pytest.mark.parametrize('dtype, meta', [('<i8', {}), ('<i4', {}), ('<i8', {'dtype': 'uint32'})])
def test_ids_of_another_width_are_named(tmp_path, capsys, dtype, meta):
    (tmp_path / 'wide').mkdir()
    ids = np.arange(20_000) % 28
    ids.astype(dtype).tofile(tmp_path / 'wide' / 'train.bin')
    (tmp_path / 'wide' / 'meta.json').write_text(json.dumps({'vocab_size': 28, **meta}))
    width = 8 * np.dtype(dtype).itemsize
    assert f'int{width}' in refused(capsys, 'wide', tmp_path)


def test_a_header_of_llm_c_is_named(tmp_path, capsys):
    (tmp_path / 'llmc').mkdir()
    header = np.zeros(256, '<i4')
    header[:3] = 20240520, 1, 1000
    content = header.tobytes() + np.arange(1000).astype('<u2').tobytes()
    (tmp_path / 'llmc' / 'train.bin').write_bytes(content)
    assert 'llm.c' in refused(capsys, 'llmc', tmp_path)


def test_a_missing_or_changed_shard_is_named(tmp_path, capsys):
    write_shards(tmp_path / 'many', [100, 100, 100])
    shards = [{'file': f'train_{i:06d}.bin', 'tokens': 100} for i in range(3)]
    meta = byte_meta({'train': {'tokens': 300, 'shards': shards}})
    path = tmp_path / 'many' / 'meta.json'
    path.write_text(json.dumps(meta))
    assert Dataset('many', tmp_path).train.n == 300
    shard = tmp_path / 'many' / 'train_000001.bin'
    for content in (b'\0' * 198, b'\0' * 199, b''):
        shard.write_bytes(content)
        assert 'train_000001.bin' in refused(capsys, 'many', tmp_path)
    shard.unlink()
    assert 'train_000001.bin' in refused(capsys, 'many', tmp_path)
    shards[1]['file'] = '../../etc/passwd'  # a path leads nowhere else
    path.write_text(json.dumps(meta))
    assert f'{tmp_path}/many/passwd' in refused(capsys, 'many', tmp_path)
    path.write_text(json.dumps({**meta, 'unfinished': True}))
    refused(capsys, 'many', tmp_path)


WRONG = [None, -1, 0, 1.5, '', 'x', [], {}, True, 2**70]


@pytest.mark.parametrize('key', [
    'vocab_size', 'dtype', 'tokenizer', 'end_of_text', 'splits', 'checksums', 'tokenizer.kind',
    'tokenizer.chars', 'tokenizer.added', 'splits.train', 'splits.train.tokens', 'splits.train.shards',
    'splits.train.bytes', 'splits.train.token_bytes', 'splits.train.sha256', 'chat'])
def test_any_value_in_meta_json_is_read_or_refused(tmp_path, capsys, key):
    write_shards(tmp_path / 'any', [500])
    chars = ''.join(map(chr, range(40, 291)))
    meta = {'tokenizer': {'kind': 'char', 'chars': chars}, 'vocab_size': 251, 'end_of_text': None,
            'dtype': 'uint16', 'splits': {'train': {'tokens': 500, 'bytes': 500, 'sha256': 'a'}}}
    for value in WRONG:
        changed = json.loads(json.dumps(meta))
        *path, last = key.split('.')
        place = changed
        for name in path:
            place = place[name]
        place[last] = value
        (tmp_path / 'any' / 'meta.json').write_text(json.dumps(changed))
        with contextlib.suppress(SystemExit):
            data = Dataset('any', tmp_path, 16)
            data.train.batch(1, range(4), 16)
            assert len(data.train.token_bytes) == 251 and data.tokenizer.n_vocab
            continue
        assert capsys.readouterr().err.startswith('error: ')


@pytest.mark.parametrize('content', [
    b'', b'{', b'[]', b'\xff\xfe{}', b'{"vocab_size": 3', b'[' * 100_000, b'null'])
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
    bits = np.packbits(mask, bitorder='little').tobytes()
    starts = np.cumsum([0, *LENGTHS[:-1]]).astype('<u8').tobytes()
    ids.tofile(folder / 'train.bin')
    (folder / 'train.mask').write_bytes(bits)
    (folder / 'train.starts').write_bytes(starts)
    entry = {'tokens': len(ids), 'mask_sha256': hashlib.sha256(bits + starts).hexdigest()}
    (folder / 'meta.json').write_text(json.dumps({**byte_meta({'train': entry}), 'chat': ''}))
    return tmp_path


def test_conversations_are_packed_as_in_earlier_versions(talks):
    train = Dataset('talks', talks, 16, 3).train
    packed, targets = train.packing(16)
    assert packed == [[7], [3, 9], [1, 5, 2], [4, 0, 6]] and targets.tolist() == [2, 9, 11, 8]
    assert train.window_numbers(3, range(8), 16).tolist() == [0, 2, 3, 1, 0, 3, 2, 1]
    assert train.count_targets(3, range(4), 16) == 30


def test_a_window_has_conversations_with_their_masks(talks):
    train = Dataset('talks', talks, 16, 3).train
    assert train.masked
    x, y, doc_ids = train.eval_batch(np.array([3 * 16]), 16)  # conversations 4, 0 and 6
    assert x[0].tolist() == [40, 41, 42, 43, 44, 45, 0, 1, 2, 3, 60, 0, 0, 0, 0, 0]
    assert y[0].tolist() == [-1, -1, 43, 44, 45, 46, -1, 2, 3, 4, 61, -1, -1, -1, -1, -1]
    assert doc_ids[0].tolist() == [0] * 6 + [1] * 4 + [2] + [-1] * 5


def test_an_epoch_has_each_conversation_once_and_counts_its_targets(talks):
    train = Dataset('talks', talks, 32, 3).train
    n = train.n_targets(32) // 32
    numbers = train.window_numbers(5, range(n), 32)
    assert sorted(numbers.tolist()) == list(range(n))
    x, y, doc_ids = train.batch(5, range(n), 32)
    # but the last id of each, and the one without targets
    assert (doc_ids >= 0).sum() == sum(LENGTHS) - 4 - 9
    assert (y >= 0).sum() == train.mask.sum() == train.count_targets(5, range(n), 32)
    assert train.count_targets(5, range(n), 32) == train.count_targets(5, list(range(n)), 32)


def test_best_fit_fills_windows_and_cuts_none():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 65, 500)
    order = np.argsort(-lengths)
    packed = best_fit(order.tolist(), lengths.tolist(), 64)
    assert sorted(sum(packed, [])) == list(range(500))
    sizes = [lengths[window].sum() for window in packed]
    assert max(sizes) <= 64 and np.mean(sizes) > 0.9 * 64


@pytest.mark.parametrize('name', ['train.mask', 'train.starts'])
def test_a_mask_that_was_altered_or_is_gone_is_told(talks, capsys, name):
    path = talks / 'talks' / name
    path.write_bytes(b'x' + path.read_bytes()[1:])
    refused(capsys, 'talks', talks)
    meta = json.loads((talks / 'talks' / 'meta.json').read_text())
    del meta['splits']['train']['mask_sha256']  # of one's own making: lengths and order are checked
    (talks / 'talks' / 'meta.json').write_text(json.dumps(meta))
    path.write_bytes(path.read_bytes()[:-1])
    refused(capsys, 'talks', talks)
    path.unlink()
    assert name in refused(capsys, 'talks', talks)


def test_conversations_without_a_target_in_the_window_are_told(talks, capsys):
    assert Dataset('talks', talks, 2).train.n_targets(2)
    (talks / 'talks' / 'train.mask').write_bytes(bytes(11))
    meta = json.loads((talks / 'talks' / 'meta.json').read_text())
    del meta['splits']['train']['mask_sha256']
    (talks / 'talks' / 'meta.json').write_text(json.dumps(meta))
    refused(capsys, 'talks', talks, 16)


# -----------------------------------------------------------------------------
# the way to the device


def numbered(it, micro_step):
    if it == 7:
        raise ValueError('the eighth')
    x = np.full((2, 3), 10 * it + micro_step)
    return x, x[:, ::-1], None, 0.5


@pytest.fixture
def no_cuda(monkeypatch):
    """Device 'cuda' without one: copies stay where they are."""
    monkeypatch.setattr(torch.Tensor, 'pin_memory', lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, 'to', lambda tensor, device, non_blocking=False: tensor)


@pytest.mark.parametrize('device', ['cpu', 'cuda:0'])
def test_the_loader_brings_micro_batches_in_order_from_any_iteration(device, request):
    if device != 'cpu':
        request.getfixturevalue('no_cuda')
    batches = Loader(numbered, 2, 3, device)
    for it in range(2, 6):
        for micro_step in range(3):
            x, y, doc_ids, divisor = next(batches)
            assert x.unique().tolist() == y.unique().tolist() == [10 * it + micro_step]
            assert x.is_contiguous() and y.is_contiguous() and doc_ids is None and divisor == 0.5
    with pytest.raises(ValueError, match='the eighth'):
        for _ in range(9):
            next(batches)
    batches.close()


def test_a_thread_may_read_beside_the_evaluation(tmp_path, no_cuda):
    ids = write_shards(tmp_path / 'many', [1000] * 20)
    train = Dataset('many', tmp_path).train
    batches = Loader(lambda it, micro_step: (train.read([it], 900),), 0, 1, 'cuda:0')
    for n in range(300):
        assert np.array_equal(train.read([n * 37], 900)[0], ids[n * 37:][:900])
        assert np.array_equal(next(batches)[0][0], ids[n:][:900])
    batches.close()
