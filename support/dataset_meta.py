"""What a dataset folder says of itself: meta.json, or nanoGPT's meta.pkl, or nothing."""

import glob
import hashlib
import json
import os

from configurator import fail
from support.tokenizer_state import check_tokenizer_state


def bin_files(folder, split):
    """The files with a split's token ids, in order: one, or shards (train_000000.bin, ...), or none."""
    whole = os.path.join(folder, split + '.bin')
    if os.path.exists(whole):
        return [whole]
    return sorted(glob.glob(os.path.join(glob.escape(folder), f"{split}_{'[0-9]' * 6}.bin")))


def read_meta(folder):
    """The dict in meta.json. Without it the same from nanoGPT's meta.pkl, or, as nanoGPT assumes, GPT-2
    tokens."""
    path = os.path.join(folder, 'meta.json')
    if os.path.exists(path):
        try:
            with open(path, encoding='utf-8') as f:
                meta = json.load(f)
            unfinished = meta.get('unfinished')
            if not unfinished:
                meta = complete(meta)
                check_meta(meta)
        except Exception as e:  # a file may say anything
            fail(f"{path} is damaged ({type(e).__name__}: {e}). run prepare.py for it again")
        if unfinished:
            fail(f"{folder} is not finished. run its command again: "
                 f"{meta.get('command', 'python prepare.py ...')}")
        return meta
    if os.path.exists(os.path.join(folder, 'meta.pkl')):
        from support.meta_pkl import read_meta_pkl
        return read_meta_pkl(os.path.join(folder, 'meta.pkl'))
    return {'tokenizer': {'kind': 'tiktoken', 'name': 'gpt2'}, 'vocab_size': 50257, 'end_of_text': 50256,
            'dtype': 'uint16', 'splits': {}}


def complete(meta):
    """One that a person wrote may say as little as {"vocab_size": 1000, "dtype": "uint32"}; then the ids are
    no text."""
    if 'tokenizer' not in meta:
        meta['tokenizer'] = {'kind': 'ids', 'n_vocab': meta['vocab_size']}
    return {'end_of_text': None, 'dtype': 'uint16', 'splits': {}, **meta}


def check_meta(meta):
    """Raise an exception of some kind if meta.json says what cannot be."""
    check_tokenizer_state(meta['tokenizer'])
    size, chars = meta['vocab_size'], meta['tokenizer'].get('chars')
    assert type(size) is int and 0 < size <= 2**32, f'vocab_size is {size!r:.60}'
    n_chars = None if chars is None else len(chars) + len(meta['tokenizer'].get('added', []))
    assert n_chars in (None, size), f'vocab_size is {size}, and there are {n_chars} characters'
    assert meta['dtype'] in ('uint16', 'uint32'), f"dtype is {meta['dtype']!r:.60}"
    for split in meta['splits'].values():
        assert type(split['tokens']) is int and split['tokens'] > 0, 'the number of tokens'
        for shard in split.get('shards', []):
            assert type(shard['tokens']) is int and shard['tokens'] > 0, 'the tokens of a shard'
            assert isinstance(shard['file'], str), 'the file of a shard'


def read_tokenizer_state(folder, meta):
    """meta's tokenizer together with its files: all that a checkpoint has to know to be sampled without the
    dataset."""
    state = dict(meta['tokenizer'])
    if state == {'kind': 'tiktoken', 'name': 'gpt2'}:  # nanoGPT's folders only assume it
        from support.tiktoken_tokenizer import full_state_if_cached
        return full_state_if_cached(state)
    if any(name.endswith('_file') for name in state):
        from support.tokenizer_files import read_files
        read_files(folder, state, meta.get('checksums', {}))
    return state


def checksum(entry):
    """16 digits of the sha256 in a split's entry of meta.json; of several shards, of their checksums."""
    sums = [str(part.get('sha256', 'unknown')) for part in entry.get('shards', [entry])]
    if len(sums) == 1:
        return sums[0][:16]
    return hashlib.sha256(' '.join(sums).encode()).hexdigest()[:16] + ' of all'
