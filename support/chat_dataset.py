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
from support import dataset_folder, encode_text
from support.chat_format import chat_format, dump
from support.files import sync_folder, write_whole
from support.read_conversations import read_conversations
from support.tokenizer_files import write_tokenizer

PORTION = 64  # conversations that a worker takes at a time


class ChatEncoder(encode_text.Encoder):
    """Encodes portions of conversations, in a worker process or here."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.format = chat_format(tokenizer)

    def encode(self, portion):
        """[(split, ids, mask, bytes of text)] of [(split, messages)]. read_text.Problem if one cannot be
        encoded."""
        found = []
        for split, messages in portion:
            try:
                ids, mask = self.format.render(messages)
            except ValueError as e:
                raise encode_text.Problem(f"a conversation cannot be encoded: {e}. use another --tokenizer")
            found.append((split, ids.astype(self.dtype), mask, self.count_bytes(ids)))
        return found, 0


class ChatSplit:
    """The three files of one split, written conversation by conversation."""

    def __init__(self, folder, name):
        self.folder, self.name = folder, name
        self.bin = open(os.path.join(folder, f'{name}_000000.bin'), 'wb')
        self.digest, self.tokens, self.bytes, self.masks, self.starts = hashlib.sha256(), 0, 0, [], []

    def add(self, ids, mask, n_bytes):
        self.bin.write(ids.tobytes())
        self.digest.update(ids.tobytes())
        self.starts.append(self.tokens)
        self.masks.append(mask)
        self.tokens += len(ids)
        self.bytes += n_bytes

    def finish(self):
        """Write the mask and the starts. Returns the split's entry for meta.json."""
        self.bin.flush()
        os.fsync(self.bin.fileno())
        self.bin.close()
        mask = np.concatenate(self.masks)
        packed = np.packbits(mask, bitorder='little').tobytes()
        starts = np.array(self.starts, dtype='<u8').tobytes()
        write_whole(os.path.join(self.folder, f'{self.name}.mask'), packed)
        write_whole(os.path.join(self.folder, f'{self.name}.starts'), starts)
        return {'tokens': self.tokens, 'bytes': self.bytes, 'documents': len(self.starts),
                'targets': int(mask.sum()), 'sha256': self.digest.hexdigest(),
                'mask_sha256': hashlib.sha256(packed + starts).hexdigest()}


def portions(source, on_bad, val_fraction, skipped):
    """[(split, messages)] of PORTION conversations at a time, with what encode_in_order() wants beside."""
    def read():
        skipped.append((yield from read_conversations(source, on_bad)))

    portion = []
    for messages in read():
        portion.append((encode_text.split_of(dump(messages), val_fraction), messages))
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
        splits = {name: ChatSplit(unfinished, name) for name in ('train', 'val')}
        conversations = portions(source, on_bad, val_fraction, skipped)
        for encoded, _, _ in encode_text.encode_in_order(conversations, workers, encoder):
            for split, ids, mask, n_bytes in encoded:
                splits[split].add(ids, mask, n_bytes)
        if not splits['train'].starts:
            fail(f"no conversation in {', '.join(source)} to train on. give it more of them, or a smaller "
                 "--val_fraction")
        if skipped[0]:
            print(f"note: {skipped[0]:,} rows are no conversations and were left out")
        meta, checksums = write_tokenizer(unfinished, tokenizer, encoder.dtype)
        meta['splits'] = {name: split.finish() for name, split in splits.items() if split.starts}
        meta.update(checksums, chat=encoder.format.template(), source=', '.join(source), command=command)
        sync_folder(unfinished)
        dataset_folder.move_into_place(folder, unfinished, meta, {'chat': command})
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return meta
