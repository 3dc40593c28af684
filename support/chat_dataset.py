"""
`prepare.py NAME --chat`: a dataset of conversations. Beside the token ids of a split, train.bin, lie
    train.mask      one bit per token (numpy's packbits, little-endian): 1 if the assistant says it, so that
                    it counts as a target
    train.starts    where each conversation starts in train.bin, uint64, little-endian
Small enough to be made again from the beginning if it is interrupted.
"""

import hashlib
import os
import shutil

import numpy as np

from configurator import fail
from support import encode_text
from support.chat_format import chat_format, dump
from support.files import sync_folder, write_whole
from support.read_conversations import read_conversations
from support.tokenizer import write_tokenizer
from support.write_dataset import Split, move_into_place

PORTION = 64  # conversations that a worker takes at a time


class ChatEncoder(encode_text.Encoder):
    """Encodes portions of conversations, in a worker process or here."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.format = chat_format(tokenizer)

    def encode(self, portion):
        """[(split, ids, mask)] of [(split, messages)]."""
        found = []
        for split, messages in portion:
            try:
                ids, mask = self.format.render(messages)
            except ValueError as e:
                fail(f"a conversation cannot be encoded: {e}. use another --tokenizer")
            found.append((split, ids.astype(self.dtype), mask))
        return found, 0


def portions(source, on_bad, val_fraction, skipped):
    """[(split, messages)] of PORTION conversations at a time, with what encode_in_order() wants beside."""
    def read():
        skipped.append((yield from read_conversations(source, on_bad)))

    portion = []
    for messages in read():
        portion.append((encode_text.split_by_hash(dump(messages), val_fraction), messages))
        if len(portion) == PORTION:
            yield portion, None
            portion = []
    if portion:
        yield portion, None


def make_chat_dataset(folder, unfinished, source, tokenizer, val_fraction, on_bad, workers, command):
    """Write the dataset of the conversations in `source`. tokenizer: one that has chat tokens. Returns what
    meta.json says."""
    encoder, skipped = ChatEncoder(tokenizer), []
    shutil.rmtree(unfinished, ignore_errors=True)
    os.makedirs(unfinished)
    try:
        splits = {name: Split(unfinished, name, encoder, 1 << 62) for name in ('train', 'val')}
        starts, masks = {'train': [], 'val': []}, {'train': [], 'val': []}
        conversations = portions(source, on_bad, val_fraction, skipped)
        for encoded, _, _ in encode_text.encode_in_order(conversations, workers, encoder):
            for name, ids, mask in encoded:
                starts[name].append(splits[name].tokens)
                masks[name].append(mask)
                splits[name].write(ids, 1)
        if not starts['train']:
            fail(f"no conversation in {', '.join(source)} to train on. give it more of them, or a smaller "
                 "--val_fraction")
        if skipped[0]:
            print(f"note: {skipped[0]:,} rows are no conversations and were left out")
        meta = write_tokenizer(unfinished, tokenizer, encoder.dtype)
        meta['splits'] = {name: {**split.finish(), **write_mask(unfinished, name, masks[name], starts[name])}
                          for name, split in splits.items() if starts[name]}
        meta.update(chat=encoder.format.template(), source=', '.join(source), command=command)
        sync_folder(unfinished)
        move_into_place(folder, unfinished, meta, {'chat': command})
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return meta


def write_mask(folder, name, masks, starts):
    """Write the mask and the starts of a split. Returns what they add to its entry in meta.json."""
    mask = np.concatenate(masks)
    packed = np.packbits(mask, bitorder='little').tobytes()
    starts = np.array(starts, dtype='<u8').tobytes()
    write_whole(os.path.join(folder, f'{name}.mask'), packed)
    write_whole(os.path.join(folder, f'{name}.starts'), starts)
    return {'targets': int(mask.sum()), 'mask_sha256': hashlib.sha256(packed + starts).hexdigest()}
