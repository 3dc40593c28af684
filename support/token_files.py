"""Token ids in .npy files, as build-nanogpt and others write them: they are copied, not encoded."""

import os

import numpy as np

from configurator import fail
from support.read_text import kind_of

BLOCK = 1 << 22  # ids at a time


def are_ids(files):
    """Whether the files hold ids; an error if only some do."""
    n = sum(kind_of(file.path) == 'npy' for file in files)
    if 0 < n < len(files):
        fail(f"text and token ids in one dataset ({n} of {len(files)} files are .npy). name one kind with "
             "--input")
    return n > 0


def read_ids(draft):
    """What encode_in_order() yields, from the files of ids: those with val in their name are the validation
    split."""
    start, n_vocab = draft.place, draft.encoder.tokenizer.n_vocab
    for i, file in enumerate(draft.files):
        if i < start[0]:
            continue
        try:
            ids = np.load(file.path, mmap_mode='r', allow_pickle=False)
        except (ValueError, OSError, EOFError) as e:
            fail(f"{file.path} cannot be read ({' '.join(str(e).split())[:100]}). download or save it again")
        if ids.ndim != 1 or ids.dtype.kind not in 'ui':
            fail(f"{file.path} holds {ids.dtype} of the shape {ids.shape}, not a row of token ids. save it "
                 "with numpy.save, as uint16 or uint32")
        split = 'val' if 'val' in os.path.basename(file.path).lower() else 'train'
        for at in range(start[2] if i == start[0] else 0, len(ids), BLOCK):
            block = ids[at:at + BLOCK]
            if block.min() < 0 or block.max() >= n_vocab:
                odd = block.min() if block.min() < 0 else block.max()
                fail(f"{file.path} holds the id {odd}, and the tokenizer has {n_vocab}. name the right one "
                     "with --tokenizer")
            block = block.astype(draft.encoder.dtype)
            found = {split: (block, draft.encoder.count_documents(block))}
            yield found, 0, (i, 0, at + len(block)), (at + len(block)) * ids.dtype.itemsize
