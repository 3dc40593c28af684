"""nanoGPT's meta.pkl, read without running anything in it."""

import pickle

from configurator import fail
from support.files import write_whole


class PlainUnpickler(pickle.Unpickler):
    """Dicts, lists, strings and numbers need no class; a pickle that asks for one wants to run code."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it wants to run {module}.{name}")


def read_meta_pkl(path):
    try:
        with open(path, 'rb') as f:
            old = PlainUnpickler(f).load()
        size, itos = int(old['vocab_size']), old.get('itos')
        assert 0 < size < 2**31, f"vocab_size is {size}"
        tokenizer = {'kind': 'ids', 'n_vocab': size}  # all that nanoGPT's train.py asks for
        if itos is not None:
            chars = [itos[i] for i in range(size)]
            assert all(isinstance(c, str) for c in chars)
            all_single = all(len(c) == 1 for c in chars)  # as CharTokenizer says it
            tokenizer = {'kind': 'char', 'chars': ''.join(chars) if all_single else chars}
    except Exception as e:  # whatever a strange pickle may raise
        fail(f"{path} is not nanoGPT's plain vocabulary ({type(e).__name__}: {e}). run prepare.py for this "
             "dataset again")
    return {'tokenizer': tokenizer, 'vocab_size': size, 'end_of_text': None, 'dtype': 'uint16', 'splits': {}}


def write_meta_pkl(path, chars):
    """The same file, for programs that read nanoGPT's folders."""
    stoi = {c: i for i, c in enumerate(chars)}
    itos = dict(enumerate(chars))
    write_whole(path, pickle.dumps({'vocab_size': len(chars), 'itos': itos, 'stoi': stoi}))
