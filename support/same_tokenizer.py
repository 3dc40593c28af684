"""Whether two tokenizers are the same."""

import json

import numpy as np

from support.tokenizer import make_tokenizer

# a text with a bit of everything, to see whether two tokenizers agree
PROBE = ("Don't panic: 1234567 items, 3.14 and 50%!\n\n\tdef f(x_1):\n        return  x**2  # caf\u00e9 "
         "na\u00efve \u00dcber\n\u6771\u4eac \u043f\u0440\u0438\u0432\u0435\u0442 \U0001f600 'tis WE'LL "
         "they've   spaces \r\n end. ")


def same_tokenizer(a, b):
    """Whether two states give the same ids. One that is unknown (None) or only named is taken at its word."""
    if a is None or b is None or a == b:
        return True
    if a['kind'] == b['kind'] == 'char':  # nanoGPT's meta.pkl has a list, ours may have a string
        return list(a['chars']) == list(b['chars'])
    if a['kind'] == b['kind'] == 'tiktoken' and not ('ranks' in a and 'ranks' in b):
        return a.get('name') == b.get('name')
    if a['kind'] == b['kind'] != 'hf' or 'ids' in (a['kind'], b['kind']):
        return False
    # GPT-2's vocabulary, say, once from tiktoken and once as tokenizer.json: compare what they make of a text
    chars = next((state['chars'] for state in (a, b) if state['kind'] == 'char'), None)
    try:
        if a['kind'] == b['kind'] and json.loads(a['json']) == json.loads(b['json']):
            return True
        a, b = make_tokenizer(a), make_tokenizer(b)
        texts = [PROBE] if chars is None else chars
        return all(np.array_equal(a.encode(text), b.encode(text)) for text in texts)
    except ValueError:  # a character that one of them lacks
        return False
