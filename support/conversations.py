"""
A split of conversations, as prepare.py --chat makes it (support/chat_dataset.py): packed into windows when
a run starts. Which targets count is the mask's to say; all others are -1.

Best fit: the longest conversation first, each into the window with the least room that is enough. None is
cut, unless it alone is longer than a window. The packing is a function of the data, the seed and block_size.
"""

import functools
import os

import numpy as np
import torch

from configurator import fail
from dataset import ORDER, Tokens, hash64, permute


class Conversations(Tokens):
    """Tokens with a mask. pack() has to be called before anything is asked about windows."""

    def __init__(self, folder, split, meta):
        super().__init__(folder, split, meta)
        entry = meta['splits'].get(split, {})
        packed = self.read_whole(folder, f'{split}.mask', -(-self.n // 8), np.uint8)
        self.mask = np.unpackbits(packed, count=self.n, bitorder='little').view(bool)
        starts = self.read_whole(folder, f'{split}.starts', 8 * entry.get('documents', 0), '<u8')
        starts = starts.astype(np.int64)
        if starts[0] != 0 or (np.diff(starts) <= 0).any() or starts[-1] >= self.n:
            fail(f"{os.path.join(folder, split)}.starts does not fit its .bin. run prepare.py for this "
                 "dataset again")
        self.lengths = np.diff(np.append(starts, self.n)) - 1  # of the inputs: the last token has no target
        self.starts = starts
        self.fingerprint += f", mask {str(entry.get('mask_sha256', 'unknown'))[:16]}"
        self.block_size = None

    def read_whole(self, folder, name, size, dtype):
        path = os.path.join(folder, name)
        found = os.path.getsize(path) if os.path.exists(path) else -1
        if found != size or size == 0:
            fail(f"{path} {'is missing' if found < 0 else 'does not fit its .bin'}. run prepare.py for this "
                 "dataset again")
        return np.fromfile(path, dtype)

    def pack(self, block_size, seed):
        """Divide the conversations among windows of block_size inputs. Returns self."""
        if self.block_size == block_size and self.seed == seed:
            return self
        self.block_size, self.seed = block_size, seed
        lengths = np.minimum(self.lengths, block_size)
        counted = np.concatenate(([0], np.cumsum(self.mask)))
        # targets that count: those after the first token
        n_targets = counted[self.starts + 1 + lengths] - counted[self.starts + 1]
        usable = np.flatnonzero(n_targets > 0)
        if not len(usable):
            fail(f"{self.path} has no target that counts in its first {block_size} tokens of any "
                 "conversation. use a larger --block_size, or run prepare.py --chat on other data")
        self.n_cut = int((self.lengths[usable] > block_size).sum())
        self.n_left_out = len(lengths) - len(usable)
        order = hash64(seed, ORDER, usable)  # equally long ones in a random order
        by_length = usable[np.lexsort((order, -lengths[usable]))]
        self.window_of, self.windows_of = best_fit(by_length, lengths, block_size)
        self.targets_of = np.bincount(self.window_of, n_targets[by_length], len(self.windows_of))
        self.targets_of = self.targets_of.astype(np.int64)
        # an iteration's micro-batches all ask for its number
        self.count_targets = functools.lru_cache(4)(self.count_samples_targets)
        return self

    def overview(self, name, val):
        """The line of the run plan about this dataset."""
        line = (f"dataset   {name}: {len(self.lengths):,} conversations in {len(self.windows_of):,} windows, "
                f"{self.targets_of.sum():,} of {self.n:,} tokens are learned")
        if val:
            line += f"; {len(val.lengths):,} for validation"
        if self.n_cut:
            line += f"; {self.n_cut:,} are longer than a window and are cut there (--block_size)"
        if self.n_left_out:
            line += f"; {self.n_left_out:,} have no answer within a window: left out"
        return line

    def n_windows(self, block_size):
        return len(self.windows_of)

    def too_short(self, block_size):
        return None

    def packed(self, numbers):
        """The windows `numbers` as x, y, doc_ids, each (len(numbers), block_size) int64: token ids, targets
        (-1: not counted) and which conversation of its window a position belongs to (-1: none)."""
        T = self.block_size
        x, y = np.zeros((len(numbers), T), np.int64), np.full((len(numbers), T), -1)
        doc_ids = np.full((len(numbers), T), -1)
        for row, number in enumerate(numbers):
            at = 0
            for i, conversation in enumerate(self.windows_of[int(number)]):
                start, n = self.starts[conversation], min(self.lengths[conversation], T)
                ids = self.windows([start], n + 1)[0]
                x[row, at:at + n], doc_ids[row, at:at + n] = ids[:-1], i
                y[row, at:at + n] = np.where(self.mask[start + 1:start + 1 + n], ids[1:], -1)
                at += n
        return x, y, doc_ids

    def samples(self, seed, numbers):
        """The training samples `numbers` as packed() gives them, tensors."""
        return [torch.from_numpy(part) for part in self.packed(self.sample_windows(seed, numbers))]

    def count_samples_targets(self, seed, numbers):
        """How many targets of the training samples `numbers` count."""
        return int(self.targets_of[self.sample_windows(seed, numbers)].sum())

    def sample_windows(self, seed, numbers):
        """The windows of the training samples `numbers`: each epoch takes all of them, in a fresh order."""
        n = len(self.windows_of)
        numbers = np.asarray(numbers, dtype=np.uint64)
        epochs, places = numbers // np.uint64(n), numbers % np.uint64(n)
        return permute(places, np.uint64(n), hash64(seed, ORDER, epochs)).astype(np.int64)


def best_fit(by_length, lengths, block_size):
    """(the window of each of by_length, [the conversations of each window])"""
    window_of, windows = np.empty(len(by_length), np.int64), []
    with_room = [[] for _ in range(block_size + 1)]  # windows by the room they have left
    rooms = 0  # a bit for each room that some window has
    for n, conversation in enumerate(by_length):
        length = int(lengths[conversation])
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1  # the least that is enough
            window = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, window = block_size, len(windows)
            windows.append([])
        windows[window].append(int(conversation))
        window_of[n] = window
        room -= length
        if room:
            with_room[room].append(window)
            rooms |= 1 << room
    return window_of, windows
