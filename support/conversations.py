"""
Conversations as a kind of dataset: how prepare.py --chat writes it, and how it is read. Beside the ids of a
split, train.bin, lie
    train.mask      one bit per id (numpy's packbits, little-endian): 1 if the assistant says it, so that it
                    counts as a target; all other targets are -1
    train.starts    where each conversation starts in train.bin, uint64, little-endian

They are packed into windows best fit: the longest first, each into the window with the least room that is
enough. None is cut, unless it alone is longer than a window.
"""

import bisect
import collections
import hashlib
import os
import pathlib
import re

import numpy as np

from configurator import fail
from dataset import ORDER, Dataset, Tokens, hash64, permute
from support.chat import chat_format
from support.files import write_whole

ROLES = {'system': 'system', 'human': 'user', 'user': 'user', 'gpt': 'assistant', 'assistant': 'assistant'}


# -----------------------------------------------------------------------------
# from rows to files


def messages_of(row):
    """The messages of a row, which is in one of the three forms that people have; an exception of some kind
    says what is wrong with it.
        {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
        {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
        {"instruction": "...", "input": "...", "output": "..."}
    Each may have a "system" as well.
    """
    if 'instruction' in row:
        question = '\n\n'.join(filter(None, [row['instruction'], row.get('input')]))
        said = [('user', question), ('assistant', row['output'])]
    else:
        said = [(ROLES[message.get('role') or message['from']], message.get('content', message.get('value')))
                for message in row.get('messages') or row['conversations']]
    if row.get('system'):
        said.insert(0, ('system', row['system']))
    turns = ' '.join(role for role, _ in said)
    assert re.fullmatch('(system )?user assistant( user assistant)*', turns), f"its roles are {turns}"
    assert not row.get('history'), 'history is not read'
    assert all(content.encode().strip() for _, content in said), 'a content is empty'
    return [{'role': role, 'content': content} for role, content in said]


def read_conversations(rows, on_bad):
    """The messages of each of the rows, pairs (where it is, value). on_bad: 'stop' ends the script at the
    first row that is no conversation, 'skip' leaves those out and tells how many."""
    skipped = 0
    for where, row in rows:
        try:
            yield messages_of(row)
        except Exception as e:  # a row may be anything
            if on_bad == 'stop':
                fail(f"{where} is no conversation ({type(e).__name__}: {e}). one is a row of .jsonl or "
                     ".parquet with messages: after one of the system or none user, assistant, user, "
                     "assistant, ... correct it, or leave out all such rows with --bad_rows=skip")
            skipped += 1
    if skipped:
        print(f"note: {skipped:,} rows are no conversations and were left out")


def write_splits(folder, conversations, tokenizer, dtype):
    """Write conversations, pairs (split, messages), into `folder`. Returns the splits' entries for
    meta.json."""
    form, n_bytes, found = chat_format(tokenizer), tokenizer.token_bytes(), collections.defaultdict(list)
    for split, messages in conversations:
        try:
            ids, mask = form.render(messages)
        except ValueError as e:
            fail(f"a conversation cannot be encoded: {e}. use another --tokenizer")
        found[split].append((ids.astype(dtype), mask))
    entries = {}
    for split in sorted(found):
        parts, masks = zip(*found[split])
        ids, mask = np.concatenate(parts), np.concatenate(masks)
        bits = np.packbits(mask, bitorder='little').tobytes()
        starts = np.cumsum([0, *map(len, parts[:-1])]).astype('<u8').tobytes()
        for ending, content in (('_000000.bin', ids.tobytes()), ('.mask', bits), ('.starts', starts)):
            write_whole(os.path.join(folder, split + ending), content)
        entries[split] = {'tokens': len(ids), 'bytes': int(n_bytes[ids].sum()), 'documents': len(parts),
                          'targets': int(mask.sum()), 'sha256': hashlib.sha256(ids).hexdigest(),
                          'mask_sha256': hashlib.sha256(bits + starts).hexdigest()}
    return entries


# -----------------------------------------------------------------------------
# from files to windows


def open_dataset(name, data_dir, seed=0, document_mask=False, vocab_size=None):
    """The Dataset data_dir/name, of texts or of conversations. seed: of how those are packed."""
    data = Dataset(name, data_dir, document_mask, vocab_size)
    if 'chat' in data.meta:  # their roles may be new to the network: it grows by them
        data.splits = {split: Conversations(data.folder, split, data.meta, seed) for split in data.splits}
    return data


class Conversations(Tokens):
    """A split of conversations, which answers what Tokens answers."""

    sample_flag = ' --chat'

    def __init__(self, folder, split, meta, seed):
        super().__init__(folder, split, meta)
        entry, base = meta['splits'][split], os.path.join(folder, split)
        try:
            bits, starts = (pathlib.Path(f'{base}.{kind}').read_bytes() for kind in ('mask', 'starts'))
        except OSError:
            bits, starts = b'', b''
        if hashlib.sha256(bits + starts).hexdigest() != entry['mask_sha256']:
            fail(f"{base}.mask or {split}.starts is damaged or lost. run prepare.py for this dataset again")
        bits = np.frombuffer(bits, np.uint8)
        self.mask = np.unpackbits(bits, count=self.n, bitorder='little').view(bool)
        self.starts = np.frombuffer(starts, '<u8').astype(np.int64)
        self.lengths = np.diff(self.starts, append=self.n) - 1  # of inputs: the last id has no target
        self.fingerprint += f", mask {entry['mask_sha256'][:16]}"
        self.size, self.seed, self.block_size = len(self.starts), seed, None

    def pack(self, block_size):
        """Divide the conversations among windows of block_size inputs: a function of the data and the
        seed."""
        if self.block_size == block_size:
            return
        self.block_size = block_size
        lengths = np.minimum(self.lengths, block_size)
        counted = np.append(0, np.cumsum(self.mask))
        # targets that count: those after the first token
        n_targets = counted[self.starts + 1 + lengths] - counted[self.starts + 1]
        usable = np.flatnonzero(n_targets > 0)
        # equally long ones in a random order
        by_length = usable[np.lexsort((hash64(self.seed, ORDER, usable), -lengths[usable]))]
        self.windows_of = best_fit(by_length, lengths, block_size)
        self.targets_of = np.array([n_targets[window].sum() for window in self.windows_of], np.int64)

    def batch(self, seed, numbers, block_size):
        return self.packed(self.windows_at(seed, numbers, block_size))

    def eval_batch(self, starts, block_size):
        self.pack(block_size)
        return self.packed(starts // block_size)

    def windows_at(self, seed, numbers, block_size):
        """The windows of the training samples `numbers`: each epoch takes all of them, in a fresh order."""
        n = np.uint64(self.n_windows(block_size))
        numbers = np.asarray(numbers, dtype=np.uint64)
        return permute(numbers % n, n, hash64(seed, ORDER, numbers // n)).astype(np.int64)

    def packed(self, numbers):
        """The windows `numbers` as x, y (-1: not counted) and which conversation of its window an id belongs
        to (-1: none)."""
        shape = len(numbers), self.block_size
        x, y, doc_ids = np.zeros(shape, np.int64), np.full(shape, -1), np.full(shape, -1)
        for row, number in enumerate(numbers):
            at = 0
            for i, conversation in enumerate(self.windows_of[number]):
                start, n = self.starts[conversation], min(self.lengths[conversation], self.block_size)
                ids = self.windows([start], n + 1)[0]
                x[row, at:at + n], doc_ids[row, at:at + n] = ids[:-1], i
                y[row, at:at + n] = np.where(self.mask[start + 1:start + 1 + n], ids[1:], -1)
                at += n
        return x, y, doc_ids

    def count_targets(self, seed, numbers, block_size):
        return int(self.targets_of[self.windows_at(seed, numbers, block_size)].sum())

    def n_windows(self, block_size):
        """How many windows the conversations are packed into."""
        self.pack(block_size)
        return len(self.windows_of)

    def n_targets(self, block_size):
        return self.n_windows(block_size) * block_size

    def summary(self, block_size):
        line = (f"{self.size:,} conversations in {self.n_windows(block_size):,} windows, "
                f"{self.targets_of.sum():,} of {self.n:,} tokens are learned")
        if n_cut := (self.lengths > block_size).sum():
            line += f"; {n_cut:,} are longer than a window and are cut there, or left out (--block_size)"
        return line

    def problem(self, block_size):
        if self.n_windows(block_size) < 1:
            return (f"{self.path} has no target that counts in the first {block_size} tokens of any "
                    "conversation. use a larger --block_size, or run prepare.py --chat on other data")


def best_fit(by_length, lengths, block_size):
    """[the conversations of each window]"""
    windows = []
    rooms = []  # of the windows that are not full, sorted: (room, -its last conversation's place, window)
    for i, conversation in enumerate(by_length.tolist()):
        length = int(lengths[conversation])
        at = bisect.bisect_left(rooms, (length,))  # the least that is enough
        if at < len(rooms):
            room, _, window = rooms.pop(at)
        else:
            room, window = block_size, []
            windows.append(window)
        window.append(conversation)
        if room > length:
            bisect.insort(rooms, (room - length, -i, window))
    return windows
