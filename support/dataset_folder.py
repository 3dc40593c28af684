"""The folder that prepare.py writes: one writer at a time, and files that take their places together."""

import contextlib
import glob
import json
import os
import re
import shutil

from configurator import fail
from support.files import lock, read_json, write_whole
from support.tokenizer_files import TOKENIZER_FILES


@contextlib.contextmanager
def only_writer(folder, unfinished, dataset_folder):
    """Only this process writes into `folder` meanwhile. At the end what cannot be continued is removed,
    and so are the folder, and the dataset's folder that it may be a part of, if there is nothing in
    them."""
    os.makedirs(folder, exist_ok=True)
    lock_file = lock(folder, 'prepare.py')
    try:
        yield
    finally:
        if not os.path.exists(os.path.join(unfinished, 'progress.json')):
            remove_unfinished(unfinished)
        for path in (folder, dataset_folder):
            if os.path.isdir(path) and set(os.listdir(path)) <= {'.lock'}:
                shutil.rmtree(path)
        if lock_file:
            lock_file.close()


def remove_unfinished(unfinished):
    """Remove what cannot be continued; downloads can."""
    for entry in os.listdir(unfinished) if os.path.isdir(unfinished) else ():
        path = os.path.join(unfinished, entry)
        if os.path.isdir(path) and entry != 'download':
            shutil.rmtree(path)
        elif entry != 'download':
            os.remove(path)
    with contextlib.suppress(OSError):  # not empty
        os.rmdir(unfinished)


def check_room(folder, draft, max_tokens):
    """Exit before hours of work if what will be written cannot fit on the disk."""
    itemsize = draft.encoder.dtype.itemsize
    kind = draft.encoder.tokenizer.state()['kind']
    per_byte = {'byte': 2, 'char': 0.5}.get(kind, itemsize / 8)  # of text, at least
    needed = 0
    for file in draft.files:
        packed = 2 if re.search(r'\.(gz|zst|parquet)$', file.path) else 1
        needed += file.size * packed * per_byte
    if max_tokens:
        needed = min(needed, max_tokens * itemsize)
    needed -= draft.tokens() * itemsize
    downloads = [file.size for file in draft.files if file.repo]
    needed += sum(sorted(downloads)[-3:])  # one is read, two are downloaded meanwhile
    free = shutil.disk_usage(folder).free
    if needed > free:
        fail(f"too little room in {folder} (at least {needed / 1e9:.1f} GB will be written, "
             f"{free / 1e9:.1f} GB are free). make room, or use --data_dir=ANOTHER, or --max_tokens")


def read_before(folder):
    """What meta.json says of an earlier dataset in the folder; {} if it says what cannot be."""
    meta = read_json(os.path.join(folder, 'meta.json'))
    then = meta.get('then', {})
    splits = then.get('splits', {}) if isinstance(then, dict) else None
    whole = isinstance(splits, dict) and all(isinstance(entry, dict) for entry in splits.values())
    return meta if whole else {}


def part_folders(folder):
    return glob.glob(os.path.join(glob.escape(folder), 'part_*_of_*'))


def interrupted_meta(folder, before, settings, join):
    """The final meta.json of a run that was killed while its files took their places, if the same is asked
    for again; else None. `before` is what meta.json says now."""
    if join and 'parts' in before and not part_folders(folder):
        return before  # nothing is left to do
    meta = before.get('then', {})
    if join:
        same = 'parts' in meta
    else:
        same = before.get('made_with') == settings
    return meta if meta and same else None


def move_into_place(folder, unfinished, meta, settings):
    """Move the files of `unfinished` to their places in `folder`. meta.json says that a folder is
    complete, so meanwhile it says the opposite, and what is to be done: after a kill at any point the
    next run does the rest."""
    path = os.path.join(folder, 'meta.json')
    waiting = {'unfinished': True, 'command': meta['command'], 'made_with': settings, 'then': meta}
    write_whole(path, json.dumps(waiting).encode())
    # name in unfinished/: name here
    places = {file: file for file in [*TOKENIZER_FILES.values(), 'meta.pkl']}
    for name, entry in meta['splits'].items():
        if 'chat' in meta:
            places.update({f'{name}{ending}': f'{name}{ending}' for ending in ('.mask', '.starts')})
        if 'shards' in entry:
            places.update({shard['file']: shard['file'] for shard in entry['shards']})
        else:
            places[f'{name}_000000.bin'] = f'{name}.bin'
    for source, target in places.items():
        if os.path.exists(os.path.join(unfinished, source)):
            os.replace(os.path.join(unfinished, source), os.path.join(folder, target))
    for file in os.listdir(folder):  # of the dataset that was here before
        ours = re.fullmatch(r'(train|val)((_\d{6})?\.bin|\.mask|\.starts)', file)
        if ours and file not in places.values():
            os.remove(os.path.join(folder, file))
    leftovers = [unfinished]
    if 'parts' in meta:
        leftovers += part_folders(folder)
    for leftover in leftovers:
        shutil.rmtree(leftover, ignore_errors=True)
    write_whole(path, json.dumps(meta, indent=1).encode())
