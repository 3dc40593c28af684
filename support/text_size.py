"""How much text a dataset has: for config files that depend on it."""

import os

from configurator import fail
from dataset import DATA_DIR
from support.dataset_meta import bin_files, read_meta


def text_size(name, data_dir=None):
    """(tokens, bytes of text) to train on; a megabyte if the name is None, as where a config file is looked
    at by itself. Ends with status 2 if there is no such dataset yet."""
    if name is None:
        return 10**6, 10**6
    folder = os.path.join(os.path.expanduser(data_dir or DATA_DIR), name)
    paths = bin_files(folder, 'train')
    if not paths:
        fail(f"no dataset {name} in {os.path.dirname(folder)}. name yours (and its --data_dir) before the "
             "config file: --dataset=NAME config/mybook.py")
    meta = read_meta(folder)
    tokens = sum(map(os.path.getsize, paths)) // (4 if meta['dtype'] == 'uint32' else 2)
    # nanoGPT's folders do not say: a token of GPT-2 has about four bytes
    guess = tokens * (4 if meta['vocab_size'] > 10_000 else 1)
    return tokens, meta['splits'].get('train', {}).get('bytes') or guess
