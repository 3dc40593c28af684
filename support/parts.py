"""A dataset made in parts, by several machines or jobs, and then joined."""

import hashlib
import os
import re

import numpy as np

from configurator import fail
from support.files import read_json
from support.read_text import Problem
from support.write_dataset import read_ids


def files_of_part(files, number, n_parts):
    """The files that part `number` (from 1 on) reads: neighbours, of about as many bytes as the other
    parts'."""
    total = sum(file.size for file in files) or 1
    before, mine = 0, []
    for file in files:
        part = (2 * before + file.size) * n_parts // (2 * total)  # where its middle is
        if min(n_parts - 1, part) == number - 1:
            mine.append(file)
        before += file.size
    return mine


def finished_parts(folder, name):
    """The folders of all parts, in order, and what their meta.json say. Exits if one is missing or
    different."""
    found = [re.fullmatch(r'part_\d+_of_(\d+)', entry) for entry in os.listdir(folder)]
    n = max((int(match[1]) for match in found if match), default=0)
    if not n:
        fail(f"no parts in {folder}. make them: python prepare.py {name} --input=... --part=1/8 and so on")
    folders = [os.path.join(folder, f'part_{i}_of_{n}') for i in range(1, n + 1)]
    metas = [read_json(os.path.join(path, 'meta.json')) for path in folders]
    missing = [f'{i}/{n}' for i, meta in enumerate(metas, 1) if 'part' not in meta]
    if missing:
        fail(f"parts of {folder} are not finished ({', '.join(missing[:20])}). run prepare.py for them, then "
             "--join")
    made_with = [{**meta['made_with'], 'part': None, 'tokenizer': meta['tokenizer'],
                  'vocab_size': meta['vocab_size']} for meta in metas]
    different = [f'{i}/{n}' for i, settings in enumerate(made_with, 1) if settings != made_with[0]]
    if different:
        fail(f"parts of {folder} were made with other settings or text than the first one "
             f"({', '.join(different[:20])}). make them again")
    return folders, metas


def ids_of_parts(folders, metas, start):
    """What encode_in_order() yields, from finished parts. A place is (part, 0 for train or 1 for val,
    ids)."""
    for i, (folder, meta) in enumerate(zip(folders, metas)):
        for j, split in enumerate(('train', 'val')):
            if (i, j) < tuple(start[:2]) or split not in meta['splits']:
                continue
            done = start[2] if (i, j) == tuple(start[:2]) else 0  # in an earlier run
            documents, n = meta['splits'][split]['documents'], 0
            for ids in checked_ids(folder, split, meta):
                # they all count with the first ids
                new_documents = documents if n == 0 else 0
                new = ids[max(0, done - n):]
                n += len(ids)
                if len(new):
                    yield {split: (new, new_documents)}, 0, (i, j, n), 0


def checked_ids(folder, split, meta):
    """Yield the ids of a part's split; Problem if a file is not the one that was made."""
    entry, dtype = meta['splits'][split], np.dtype(meta['dtype']).newbyteorder('<')
    for shard in entry.get('shards') or [{'file': f'{split}.bin', **entry}]:
        path, digest = os.path.join(folder, shard['file']), hashlib.sha256()
        for ids in read_ids([path], dtype):
            digest.update(ids)
            yield ids
        if digest.hexdigest() != shard['sha256']:
            raise Problem(f"{path} does not have the checksum that it was made with. make that part again: "
                          f"{meta['command']}")
