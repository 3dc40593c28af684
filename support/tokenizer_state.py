"""What a dataset or a checkpoint says of its tokenizer: a dict of plain types, see support/tokenizer.py."""

import importlib.util

import numpy as np

# what the state of each kind has at least
KINDS = {'byte': {}, 'char': {'chars': (str, list)}, 'tiktoken': {'name': str}, 'hf': {'name': str},
         'ids': {'n_vocab': int}}


def check_tokenizer_state(state):
    """Raise AssertionError if `state`, which a file brought, is not one that make_tokenizer() knows."""
    assert isinstance(state, dict) and isinstance(state.get('kind'), str), 'no kind of tokenizer'
    assert state['kind'] in KINDS, f"unknown kind of tokenizer, {state['kind']!r}"
    for name, kind in KINDS[state['kind']].items():
        assert isinstance(state.get(name), kind), f"{name} of the tokenizer is {type(state.get(name))}"
    added = state.get('added', [])
    assert isinstance(added, list) and len(added) < 1000, f'added of the tokenizer is {type(added)}'
    assert all(isinstance(token, str) and token for token in added), 'an added token is no text'


def token_bytes(state, vocab_size):
    """Bytes of text per token id, (vocab_size,), 0 for special tokens; None if the ids are no text, or the
    tokenizer's package is not installed or its files are not at hand."""
    if state['kind'] == 'ids':
        return None
    package = {'tiktoken': 'tiktoken', 'hf': 'tokenizers'}.get(state['kind'])
    if package is None:
        found = bytes_per_token(state)
    elif importlib.util.find_spec(package) and ('ranks' in state or 'json' in state):
        from support.tokenizer import make_tokenizer
        found = make_tokenizer(state).token_bytes()
    else:
        return None
    found = found[:vocab_size]
    return np.pad(found, (0, vocab_size - len(found)))


def bytes_per_token(state):
    """The same for bytes and characters, (n_vocab,)."""
    added = [0] * len(state.get('added', []))
    if state['kind'] == 'byte':
        return np.array([1] * 256 + [0] + added)
    return np.array([len(c.encode('utf-8', 'surrogatepass')) for c in state['chars']] + added)
