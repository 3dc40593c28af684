"""
Turn text into a dataset: the folder data/<name>/ with train.bin, val.bin and meta.json that train.py reads.

    $ python prepare.py                                        # pystdlib: the source code of this Python's library, no download
    $ python prepare.py shakespeare_char                       # tinyshakespeare by characters, as in nanoGPT (a download of 1.1 MB)
    $ python prepare.py mybook --input=book.txt --tokenizer=char
    $ python prepare.py mine --input='texts/*.jsonl.zst' --tokenizer=bpe:8192 --val_fraction=0.01
    $ python prepare.py openwebtext                            # 24 GB from the Hub become 9 billion tokens
    $ python prepare.py mine --show                            # what is in it, checked

--input is a file, a folder or a pattern: .txt and .md (one document each), .jsonl (one per line) and .parquet (one per row), the
first three also as .gz or .zst; or hf:OWNER/NAME[:CONFIG][:SPLIT], a data set of the Hugging Face Hub. <|endoftext|> stands before
each document, except with --tokenizer=char, which has no such id, and in the sets made as nanoGPT makes them.

Interrupt it, kill it, let the disk fill up: what is half-made lies in data/<name>/unfinished, and the same command goes on from there.
"""

from configurator import configure, fail, out_of_range

# -----------------------------------------------------------------------------
name = 'pystdlib'  # the dataset: pystdlib, shakespeare_char, shakespeare, openwebtext, fineweb, fineweb_edu, tinystories, or your own with --input
input: str = None  # file, folder, pattern or hf:OWNER/NAME with the text; for the named sets it stands in for the download
tokenizer: str = None  # 'char', 'byte', 'gpt2' or another of tiktoken's, 'bpe:8192' (learnt from the text), 'hf:FOLDER_OR_NAME' of a Hugging Face model, or the path of a tokenizer.json or of another dataset. None: what the named set has, else gpt2
text_key = 'text'  # where the text is in a line of .jsonl, or the column of .parquet
encoding_errors = 'strict'  # 'replace': what is not UTF-8 becomes U+FFFD, instead of an end
val_fraction: float = None  # share of the documents (chosen by a hash) for val.bin, or of a single document's end. None: 0.1, of the Hub's sets 0.0005
max_tokens: int = None  # end train.bin there, and read no further
shard_tokens = 500_000_000  # a longer split comes in files of this many tokens (1 GB)
workers: int = None  # processes that tokenise. None: one per core
part: str = None  # '3/8': the third eighth of the files, as one of eight machines or jobs; then, once all are done, --join
join = False  # put the parts together
show = False  # print what is in the dataset, and check it
data_dir: str = None  # where the datasets lie. None: data/ beside this file
# -----------------------------------------------------------------------------
knobs, given = configure(globals(), positional='name')

import contextlib
import glob
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
import urllib.request

import numpy as np

import corpus
from dataset import DATA_DIR, END_OF_TEXT, KNOWN, TOKENIZER_FILES, CharTokenizer, lock, make_tokenizer, read_meta, read_tokenizer_state, sync_folder, write_whole

SHAKESPEARE_URL = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'
SHAKESPEARE_SHA256 = '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'
AS_NANOGPT = {'shakespeare_char': 'char', 'shakespeare': 'gpt2'}  # byte for byte nanoGPT's files
HUB = {'openwebtext': 'hf:Skylion007/openwebtext', 'tinystories': 'hf:roneneldan/TinyStories',
       'fineweb': 'hf:HuggingFaceFW/fineweb:sample-10BT', 'fineweb_edu': 'hf:HuggingFaceFW/fineweb-edu:sample-10BT'}
SAVE_EVERY = 30  # seconds, and after each shard: how much is made again after a kill

problems = out_of_range(knobs, below_one='val_fraction', above_zero='max_tokens shard_tokens workers', words={'encoding_errors': 'strict replace'})
if name != os.path.basename(name) or name in ('', '.', '..'):
    problems.append(f"the name of a dataset is a folder's name ({name}). use a plain word, and --data_dir=PATH for another place")
if name not in KNOWN and input is None and not show and not join:
    problems.append(f"no text for the dataset {name}. say where it is: python prepare.py {name} --input=FILE_OR_FOLDER "
                    f"(made without it: {', '.join(KNOWN)})")
if name == 'pystdlib' and input is not None:
    problems.append("pystdlib is this Python's library, not --input. give your dataset a name: python prepare.py NAME --input=...")
if part is not None and not ((found := re.fullmatch(r'(\d+)/(\d+)', part)) and 1 <= int(found[1]) <= int(found[2])):
    problems.append(f"part is which one of how many ({part}). write --part=1/8 to --part=8/8")
elif part and (name in AS_NANOGPT or join):
    problems.append(f"{name} is not made in parts. leave out --part" if name in AS_NANOGPT else "--join puts all parts together. leave out --part")
if tokenizer and tokenizer.startswith('bpe:') and not (re.fullmatch(r'bpe:\d{1,7}', tokenizer) and 257 <= int(tokenizer[4:])):
    problems.append(f"no such size of a vocabulary ({tokenizer}). write bpe:N with 257 or more, say --tokenizer=bpe:8192")
if problems:
    fail(*problems)
dataset_folder = folder = os.path.join(data_dir or DATA_DIR, name)
if part:
    folder = os.path.join(folder, f"part_{part.replace('/', '_of_')}")
unfinished = os.path.join(folder, 'unfinished')
# what is not given
input, tokenizer = input or HUB.get(name), tokenizer or AS_NANOGPT.get(name) or ('byte' if name == 'pystdlib' else 'gpt2')
cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
workers, val_fraction = workers or cores, (0.0005 if name in HUB else 0.1) if val_fraction is None else val_fraction

# -----------------------------------------------------------------------------
# text and tokenizer


def tinyshakespeare():
    """The text of tinyshakespeare, from --input, an input.txt that lies in the folder, or the network."""
    path = input or os.path.join(folder, 'input.txt')
    if not os.path.exists(path):
        if input:
            fail(f"no such file ({input}). name tinyshakespeare's text, or leave --input out to download it")
        print(f"downloading {SHAKESPEARE_URL}")
        try:
            with urllib.request.urlopen(SHAKESPEARE_URL, timeout=60) as response:
                content = response.read()
        except OSError as e:
            fail(f"cannot download {SHAKESPEARE_URL} ({getattr(e, 'reason', e)}). put that file at {path}, or name it with --input=FILE")
        if hashlib.sha256(content).hexdigest() != SHAKESPEARE_SHA256:
            fail(f"what came from {SHAKESPEARE_URL} is not tinyshakespeare ({len(content):,} bytes, wrong checksum); it was not kept. "
                 f"try again, or put the right file at {path}")
        write_whole(path, content)
    with open(path, 'rb') as f:
        content = f.read()
    if hashlib.sha256(content).hexdigest() != SHAKESPEARE_SHA256:
        print(f"note: {path} is not the tinyshakespeare of nanoGPT (its checksum differs); it is used all the same")
    try:
        return content.decode('utf-8', encoding_errors)
    except UnicodeDecodeError as e:
        fail(f"{path} is not UTF-8 (byte {e.start}). name a text file with --input")


def input_files():
    if name == 'pystdlib':
        return corpus.pystdlib_files()
    return corpus.hub_files(input[3:]) if input.startswith('hf:') else corpus.local_files(input)


def documents(files, start=(0, 0)):
    return corpus.documents(files, text_key, encoding_errors, os.path.join(unfinished, 'download'), start)


def choose_tokenizer(files):
    """The tokenizer that --tokenizer means, for the text in `files`; all parts of a set make the same one."""
    if tokenizer == 'char':  # a first pass, to see which characters there are
        chars = set()
        for pieces in [shakespeare] if shakespeare else (pieces for _, _, pieces, _ in documents(files)):
            for piece in pieces:
                chars.update(piece)
        return CharTokenizer(sorted(chars))
    if tokenizer.startswith('bpe:'):
        print(f"learning {tokenizer[4:]} tokens", flush=True)
        return corpus.train_bpe(int(tokenizer[4:]), corpus.sample(documents, files))
    source = tokenizer.removeprefix('hf:')
    if tokenizer.startswith('hf:') or '/' in tokenizer or os.sep in tokenizer:
        if os.path.exists(os.path.join(source, 'meta.json')):  # of another dataset
            return make_tokenizer(read_tokenizer_state(source, read_meta(source)))
        import huggingface
        return make_tokenizer(huggingface.read_tokenizer(os.path.dirname(source) if os.path.basename(source) == 'tokenizer.json' else source))
    return make_tokenizer({'kind': 'byte'} if tokenizer == 'byte' else {'kind': 'tiktoken', 'name': tokenizer})


def check_room():
    """Before hours of work: what will be written surely does not fit?"""
    per_byte = {'byte': 2, 'char': 0.5}.get(tok.state()['kind'], dtype.itemsize / 8)  # at least
    needed = sum(file.size * (2 if re.search(r'\.(gz|zst|parquet)$', file.path) else 1) * per_byte for file in files)
    needed = min(needed, (max_tokens or 1 << 60) * dtype.itemsize) - sum(split.tokens for split in splits.values()) * dtype.itemsize
    needed += sum(sorted(file.size for file in files if file.repo)[-3:])  # one is read, two are fetched meanwhile
    free = shutil.disk_usage(folder).free
    if needed > free:
        fail(f"too little room in {folder} (at least {needed / 1e9:.1f} GB will be written, {free / 1e9:.1f} GB are free). "
             "make room, or use --data_dir=ANOTHER, or --max_tokens")


# -----------------------------------------------------------------------------
# ids to files, whole or not at all


class Split:
    """The shards of a split as they grow in unfinished/. What was saved of an interrupted run can be had again: `tokens` of them."""

    def __init__(self, name, tokens=0, documents=0, bytes=0, shards=()):
        self.name, self.tokens, self.documents, self.bytes = name, tokens, documents, bytes
        self.shards = list(shards)[:tokens // shard_tokens]  # the full ones
        self.file, self.digest, self.room = None, hashlib.sha256(), shard_tokens
        rest = tokens - len(self.shards) * shard_tokens
        for i, size in enumerate([shard_tokens] * len(self.shards) + [rest] * (rest > 0)):
            if not os.path.exists(self.path(i)) or os.path.getsize(self.path(i)) < size * dtype.itemsize:
                raise EOFError
        if rest:
            self.file = open(self.path(), 'r+b')
            self.file.truncate(rest * dtype.itemsize)
            for ids in corpus.blocks([self.path()], dtype):
                self.digest.update(ids)
            self.file.seek(0, os.SEEK_END)
            self.room -= rest

    def path(self, i=None):
        return os.path.join(unfinished, f'{self.name}_{len(self.shards) if i is None else i:06d}.bin')

    def write(self, ids, documents):
        self.tokens, self.documents, self.bytes = self.tokens + len(ids), self.documents + documents, self.bytes + int(byte_lengths[ids].sum())
        while len(ids):
            self.file = self.file or open(self.path(), 'wb')
            part, ids = ids[:self.room], ids[self.room:]
            self.file.write(part.tobytes())
            self.digest.update(part)
            self.room -= len(part)
            if self.room == 0:
                self.close_shard()

    def close_shard(self):
        self.sync()
        self.file.close()
        self.shards.append({'tokens': shard_tokens - self.room, 'sha256': self.digest.hexdigest()})
        self.file, self.digest, self.room = None, hashlib.sha256(), shard_tokens

    def sync(self):
        if self.file:
            self.file.flush()
            os.fsync(self.file.fileno())

    def close(self):
        if self.file:
            self.file.close()

    def state(self):
        return {'tokens': self.tokens, 'documents': self.documents, 'bytes': self.bytes, 'shards': self.shards}

    def give_end(self, other, n):
        """Let the last n ids be the other's. First they are written there and that is saved; only then is this one shortened."""
        self.sync()
        for ids in corpus.blocks([self.path(i) for i in range(-(-self.tokens // shard_tokens))], dtype, self.tokens - n):
            moved = int((ids == begin).sum()) if begin is not None else 0
            other.write(ids, moved)
            self.documents, self.bytes = self.documents - moved, self.bytes - int(byte_lengths[ids].sum())
        self.tokens -= n
        if self.tokens == 0:
            other.documents, self.documents = other.documents + self.documents, 0
        save_progress()
        self.close()
        self.__init__(self.name, **self.state())  # as an interrupted run would find it

    def finish(self):
        """The entry for meta.json."""
        if self.file:
            self.close_shard()
        entry = {'tokens': self.tokens, 'bytes': self.bytes, 'documents': self.documents}
        if len(self.shards) == 1:
            return {**entry, 'sha256': self.shards[0]['sha256']}
        return {**entry, 'shards': [{'file': os.path.basename(self.path(i)), **shard} for i, shard in enumerate(self.shards)]}


def save_progress():
    for split in splits.values():
        split.sync()
    sync_folder(unfinished)
    content = {'made_with': made_with, 'read': read_so_far(place), 'place': place, 'whole': whole, 'look_alikes': look_alikes,
               'splits': {split.name: split.state() for split in splits.values()}}
    write_whole(os.path.join(unfinished, 'progress.json'), json.dumps(content).encode())


def read_so_far(place):
    """A checksum of names, sizes and dates of the files up to the one where a run stands: with others it cannot go on."""
    return hashlib.sha256(repr([(file.path, file.size, file.stamp) for file in files[:place[0] + 1]]).encode()).hexdigest()


def load_progress():
    """What save_progress() saved, the splits as Split, if it was for the same; else None."""
    try:
        with open(os.path.join(unfinished, 'progress.json')) as f:
            saved = json.load(f)
        if saved['made_with'] != made_with or saved['read'] != read_so_far(saved['place']):
            print(f"note: an earlier run with other settings or files left {unfinished}; starting anew")
            return None
        with open(os.path.join(unfinished, 'state.json')) as f:
            use(make_tokenizer(json.load(f)))
        return {**saved, 'splits': {side: Split(side, **state) for side, state in saved['splits'].items()}}
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None  # there was none, or not all of it reached the disk


def use(tokenizer):
    global tok, dtype, byte_lengths, begin
    tok, byte_lengths = tokenizer, tokenizer.byte_lengths()
    dtype = np.dtype('<u2' if tok.n_vocab <= 1 << 16 else '<u4')
    begin = None if name in AS_NANOGPT else tok.end_of_text


def tokenizer_as_json():
    return json.dumps({key: value.decode() if isinstance(value, bytes) else value for key, value in tok.state().items()}).encode()


def bring_home(meta):
    """Let the files in unfinished/ take their places. meta.json says that a folder is whole, so it says the contrary meanwhile, and what
    is to be done: after a kill at any point the next run does the rest."""
    path = os.path.join(folder, 'meta.json')
    write_whole(path, json.dumps({'unfinished': True, 'command': meta['command'], 'made_with': made_with, 'then': meta}).encode())
    homes = {}  # name here: name there
    for side, entry in meta['splits'].items():
        homes.update({shard['file']: shard['file'] for shard in entry['shards']} if 'shards' in entry else {f'{side}_000000.bin': side + '.bin'})
    homes.update({file: file for file in TOKENIZER_FILES.values()})
    for here, there in homes.items():
        if os.path.exists(os.path.join(unfinished, here)):
            os.replace(os.path.join(unfinished, here), os.path.join(folder, there))
    for file in os.listdir(folder):  # of the set that was here before
        if re.fullmatch(r'(train|val)(_\d{6})?\.bin', file) and file not in homes.values():
            os.remove(os.path.join(folder, file))
    for done in [unfinished, *(glob.glob(os.path.join(glob.escape(folder), 'part_*_of_*')) if 'parts' in meta else ())]:
        shutil.rmtree(done, ignore_errors=True)
    write_whole(path, json.dumps(meta, indent=1).encode())


def wipe():
    """Remove what cannot be gone on from; downloads can."""
    for entry in os.listdir(unfinished) if os.path.isdir(unfinished) else ():
        if entry != 'download':
            os.remove(os.path.join(unfinished, entry))
    with contextlib.suppress(OSError):
        os.rmdir(unfinished)


def meta_of(folder):
    """What meta.json says, finished or not; {} if there is none that can be read."""
    try:
        with open(os.path.join(folder, 'meta.json'), encoding='utf-8') as f:
            return json.load(f)
    except (OSError, ValueError):
        return {}


def parts_of():
    """The folders of all parts, in order, each finished, and their meta.json."""
    found = [re.fullmatch(r'part_(\d+)_of_(\d+)', entry) for entry in os.listdir(folder)]
    n = max((int(match[2]) for match in found if match), default=0)
    folders = [os.path.join(folder, f'part_{i}_of_{n}') for i in range(1, n + 1)]
    metas = [meta_of(path) for path in folders]
    if not n:
        fail(f"no parts in {folder}. make them: python prepare.py {name} --input=... --part=1/8 and so on")
    lacking = [f'{i}/{n}' for i, meta in enumerate(metas, 1) if 'part' not in meta]
    if lacking:
        fail(f"parts of {folder} are not finished ({', '.join(lacking[:20])}). run prepare.py for them, then --join")
    same = [{**meta['made_with'], 'part': None, 'tokenizer': meta['tokenizer'], 'vocab_size': meta['vocab_size']} for meta in metas]
    if different := [f'{i}/{n}' for i in range(1, n + 1) if same[i - 1] != same[0]]:
        fail(f"parts of {folder} were made with other settings or text than the first one ({', '.join(different[:20])}). make them again")
    return folders, metas


# -----------------------------------------------------------------------------
# the work

if __name__ == '__main__':  # where processes cannot be forked (macOS, Windows), each worker imports this file
    if show:
        if not os.path.isdir(folder):
            fail(f"no dataset {name} in {os.path.dirname(folder)}. make it: python prepare.py {name} --input=FILE_OR_FOLDER")
        sys.exit(0 if corpus.show(folder) else 1)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # tidies up, unlike the default
    splits, place, whole, look_alikes, shakespeare, ours, t0 = {}, (0, 0, 0), False, 0, None, False, time.time()
    try:
        os.makedirs(folder, exist_ok=True)
        lock_file = lock(folder, 'prepare.py')
        ours, before = True, meta_of(folder)
        if 'splits' in before and before.get('command') != shlex.join(['python', 'prepare.py'] + sys.argv[1:]):
            print(f"note: {folder} holds a dataset ({before.get('command', 'made elsewhere')}); this one takes its place when it is whole")
        made_with = {'name': name, 'input': input, 'tokenizer': tokenizer, 'text_key': text_key, 'encoding_errors': encoding_errors, 'val_fraction': val_fraction,
                     'max_tokens': max_tokens, 'shard_tokens': shard_tokens, 'part': part}
        meta = before.get('then', {})
        if join and 'parts' in before and not glob.glob(os.path.join(glob.escape(folder), 'part_*_of_*')):
            meta = before  # it was done
        if meta and ('parts' in meta if join else before.get('made_with') == made_with):  # killed while the files took their places
            made_with = before.get('made_with')
        else:
            os.makedirs(unfinished, exist_ok=True)

            # what to read, and how far an interrupted run has come
            if join:
                parts, metas = parts_of()
                made_with = {**metas[0]['made_with'], 'part': None}
                tokenizer, val_fraction, shard_tokens = (made_with[key] for key in ('tokenizer', 'val_fraction', 'shard_tokens'))
                source = metas[0]['source']
                all_files = files = [corpus.stat(os.path.join(path, 'meta.json')) for path in parts]
            elif name in AS_NANOGPT:  # nanoGPT's split: the first nine tenths of the characters, and the rest
                text, source = tinyshakespeare(), input or SHAKESPEARE_URL
                cut = int(len(text) * (1 - val_fraction))
                shakespeare = [text[:cut], text[cut:]]
                all_files = files = [corpus.stat(input or os.path.join(folder, 'input.txt'))]
            else:
                source = f"standard library of Python {sys.version.split()[0]}" if name == 'pystdlib' else input
                all_files = files = input_files()
            if part:
                number, n_parts = map(int, part.split('/'))
                files = corpus.share(all_files, number, n_parts)
                max_tokens = max_tokens and -(-max_tokens // n_parts)
            if saved := load_progress():
                splits, place, whole, look_alikes = (saved[key] for key in ('splits', 'place', 'whole', 'look_alikes'))
                print(f"going on behind {sum(split.tokens for split in splits.values()):,} tokens of an earlier run")
            else:
                wipe()
                os.makedirs(unfinished, exist_ok=True)
                use(make_tokenizer(read_tokenizer_state(parts[0], metas[0])) if join else choose_tokenizer(all_files))
                write_whole(os.path.join(unfinished, 'state.json'), tokenizer_as_json())
                splits = {side: Split(side) for side in ('train', 'val')}
            train, val = splits['train'], splits['val']
            check_room()
            if any(file.repo for file in files):
                source += f" at commit {files[0].revision}"
                print(f"{input}: {len(files)} files of {sum(file.size for file in files) / 1e9:.2f} GB, fetched one after the other", flush=True)

            # text becomes ids
            if join:
                results = corpus.ids_of_parts(parts, metas, place)
            else:
                portions = [([(side, True, text) for side, text in zip(('train', 'val'), shakespeare)], (0, 0, 0), 0)] if shakespeare else \
                    corpus.portions(documents(files, place[:2]), tok.cut, val_fraction, place)
                # bytes and characters are faster looked up than sent to another process
                results = corpus.encode_in_order(portions, 1 if tok.cut == 'anywhere' else workers, tok, dtype, begin)
            progress = corpus.Progress(files, place[0], max_tokens, train)
            full_shards = lambda: len(train.shards) + len(val.shards)
            saved_at, shards = time.time(), full_shards()
            for (ids_of, n), where, bytes_read in results if not whole else ():
                for side, (ids, n_documents) in ids_of.items():
                    if side == 'train' and max_tokens and train.tokens + len(ids) >= max_tokens:
                        ids, whole = ids[:max_tokens - train.tokens], True
                        n_documents = int((ids == begin).sum()) if begin is not None else n_documents
                    splits[side].write(ids, n_documents)
                place, look_alikes = where, look_alikes + n
                if time.time() > saved_at + SAVE_EVERY or full_shards() > shards:
                    save_progress()
                    saved_at, shards = time.time(), full_shards()
                progress.show(where[0], bytes_read, train, val)
                if whole:
                    results.close()
                    break
            progress.close()

            # the whole is known: one document gives its end, a set without a validation split gets one
            whole = True
            if not part:
                if train.tokens == 0:  # one document, or few and chance put all of them on that side
                    val.give_end(train, val.tokens)
                if val.tokens == 0 and val_fraction > 0:
                    train.give_end(val, int(train.tokens * val_fraction))
                    if train.documents > 1:
                        print("note: of so few documents the hash chose none for validation; the end of the last one serves instead")
                if train.tokens < 2 or (val_fraction > 0 and val.tokens < 2):
                    shutil.rmtree(unfinished)
                    fail(f"too little text ({train.tokens} tokens to train on, {val.tokens} to validate). bring more, or use --val_fraction=0")
            state = tok.state()
            for key, file in TOKENIZER_FILES.items():  # too long for meta.json
                if state.get(key) is not None:
                    content = state.pop(key)
                    write_whole(os.path.join(unfinished, file), content if isinstance(content, bytes) else content.encode())
                    state[f'{key}_file'] = file
            meta = {'tokenizer': state, 'vocab_size': tok.n_vocab, 'end_of_text': tok.end_of_text, 'dtype': 'uint16' if dtype.itemsize == 2 else 'uint32',
                    'splits': {split.name: split.finish() for split in splits.values() if split.tokens > 0}, 'source': source,
                    'command': shlex.join(['python', 'prepare.py'] + sys.argv[1:]),
                    **({'part': part, 'made_with': made_with} if part else {'parts': len(parts)} if join else {})}
        bring_home(meta)
    except KeyboardInterrupt:
        print("interrupted; run it again, it goes on from what was saved", file=sys.stderr)
        sys.exit(130)
    except corpus.Problem as e:
        fail(str(e))
    except OSError as e:
        fail(f"cannot read or write ({e.filename or folder}: {e.strerror or e}). make room and run it again, or use --data_dir=ANOTHER")
    finally:
        for split in splits.values():
            split.close()  # Windows removes no open file
        if ours and not os.path.exists(os.path.join(unfinished, 'progress.json')):
            wipe()
        for path in (folder, dataset_folder) if ours else ():
            if os.path.isdir(path) and set(os.listdir(path)) <= {'.lock'}:
                shutil.rmtree(path)

    if look_alikes:
        print(f"note: the text itself contains {END_OF_TEXT} ({look_alikes:,} times); there it is text, not the special token")
    for side, entry in meta['splits'].items():
        files = os.path.join(folder, f"{side}.bin" if 'shards' not in entry else f"{side}_*.bin ({len(entry['shards'])} files)")
        print(f"{files}: {entry['tokens']:,} tokens, {entry['documents']:,} documents, {entry['bytes']:,} bytes of text")
    small = sum(entry['tokens'] for entry in meta['splits'].values()) < 1e8  # train.py alone means GPT-2 for four days
    print(f"vocabulary of {meta['vocab_size']:,} ids ({tokenizer}), {time.time() - t0:.1f} s. " +
          (f"when all parts are there: python prepare.py {name} --join" if part else "train on it: python train.py " + ('config/quickstart.py ' if small else '') + f"--dataset={shlex.quote(name)}" +
          (f" --out_dir=out-{shlex.quote(name)}" if small else '')))
