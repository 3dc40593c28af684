"""
Turn text into a dataset: token ids in the folder data/<name>/, for train.py.

    $ python prepare.py                        # the source code of Python's standard library, no download
    $ python prepare.py shakespeare_char       # a built-in dataset, from the table below
    $ python prepare.py mystories.txt          # your own text becomes data/mystories
    $ python prepare.py chats.json --chat      # conversations become data/chats
    $ python prepare.py mine --input='texts/*.jsonl' --tokenizer=bpe:8192 --val_fraction=0.01
    $ python prepare.py mine --input='hf:OWNER/NAME/data/train-*.parquet'    # files of the Hugging Face Hub

docs/data.md describes which files are read, and what a document is. The documents of all files are read in
order, in chunks of about 100 MB. Threads encode the documents of a chunk, which becomes a shard. If the
script is interrupted, the same command resumes after the last complete shard.
"""

from configurator import InputError, configure, print0

# -----------------------------------------------------------------------------
name = 'pystdlib'  # a built-in dataset, the name of a new one with --input, or a file or folder with text
input: list = None  # files, folders, patterns or hf:OWNER/NAME/PATTERN, as in --input a.txt b.txt
# 'char', 'byte', 'gpt2' or another encoding of tiktoken, 'bpe:8192' (learned from the text), the path of a
# tokenizer.json, 'hf:FOLDER_OR_NAME' of a model, the folder of a dataset, a ckpt.pt. None: the built-in
# dataset's, else gpt2 for conversations and for more than 1 MB of text, char for less
tokenizer: str = None
text_key = 'text'  # key of the text in a row of .jsonl or .json, or its column in .parquet
chat = False  # the input is conversations, see docs/chat.md
# share of the documents that go to val.bin, chosen by a hash; if there are few documents, the end of each one
# goes there. None: the built-in dataset's, else 0.1
val_fraction: float = None
max_tokens: int = None  # stop after the shard in which train reaches this many tokens
shard_mb = 100.0  # megabytes of text per shard
threads: int = None  # number of threads that encode. None: one per core that this process may use
overwrite = False  # replace an existing dataset
data_dir: str = None  # folder that contains the datasets. None: data/ next to this file
# -----------------------------------------------------------------------------
if __name__ == '__main__':  # not if the functions are imported
    config, given = configure(globals(), positional='name', takes_configs=False)

import collections
import dataclasses
import fnmatch
import glob
import gzip
import hashlib
import io
import itertools
import json
import math
import multiprocessing.pool
import os
import pickle
import re
import shlex
import sys
import sysconfig
import typing
import zlib

import numpy as np

from flatgpt.dataset import DATA_DIR, Tokens, bin_files, folder_of, read_meta
from flatgpt.files import check_not_lfs_pointer, first_line, lock_folder, read_json, script_path, write_whole
from flatgpt.tokenizer import (
    END_OF_TEXT, import_package, learn_bpe, make_tokenizer, read_tokenizer_files, without_surrogates,
    write_tokenizer_files)


# -----------------------------------------------------------------------------
# built-in datasets


@dataclasses.dataclass
class BuiltIn:
    source: str  # a URL, or hf:OWNER/NAME/PATTERN; '': the source code of Python's standard library
    tokenizer: str = 'gpt2'
    val_fraction: float = 0.1
    separated: bool = True  # whether each document begins with <|endoftext|>
    config: str = 'config/small_text.py'  # to train on it


TINYSHAKESPEARE = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'
BUILT_IN = {
    'pystdlib': BuiltIn('', 'bpe:2048', config='config/quickstart.py'),
    # the next two are equal to nanoGPT's, byte for byte
    'shakespeare_char': BuiltIn(TINYSHAKESPEARE, 'char', separated=False,
                                config='config/train_shakespeare_char.py'),
    'shakespeare': BuiltIn(TINYSHAKESPEARE, separated=False, config='config/finetune_shakespeare.py'),
    'openwebtext': BuiltIn('hf:Skylion007/openwebtext/plain_text/*.parquet', val_fraction=0.0005,
                           config='config/train_gpt2.py'),
    'fineweb': BuiltIn('hf:HuggingFaceFW/fineweb/sample/10BT/*.parquet', val_fraction=0.0005,
                       config='config/train_fineweb_124m.py'),
    'fineweb_edu': BuiltIn('hf:HuggingFaceFW/fineweb-edu/sample/10BT/*.parquet', val_fraction=0.0005,
                           config='config/train_edu_124m.py'),
    'tinystories': BuiltIn('hf:roneneldan/TinyStories/data/train-*.parquet', val_fraction=0.0005),
}
# for eval.py --tasks
BENCHMARKS = {
    'hellaswag': 'https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl',
    'core': 'https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip',
}


def fetch(url, path):
    """Download `url` to `path`, unless that file exists."""
    if os.path.exists(path):
        return
    import urllib.request
    print0(f"downloading {url}")
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            content = response.read()
    except Exception as e:  # network errors have no common class
        raise InputError(f"{url} cannot be downloaded: {first_line(e)}. Save it as {path} and run this "
                         "command again.") from e
    os.makedirs(os.path.dirname(path), exist_ok=True)
    write_whole(path, content)


# -----------------------------------------------------------------------------
# which files

ROW_KINDS = ['jsonl', 'json', 'parquet']
TEXT_KINDS = ['txt', 'md', *ROW_KINDS]  # in a folder, others are skipped


def kind_of(path):
    """Return the extension of a file, such as 'txt' or 'jsonl', without a final .gz."""
    return os.path.splitext(path.lower().removesuffix('.gz'))[1][1:]


def find_files(sources):
    """Return the paths of the text files in `sources`: paths, folders, patterns, hf:OWNER/NAME/PATTERN.

    A file is returned once, even if it is found under several names.
    """
    found = {}  # {real path: path}
    for source in sources:
        expanded = os.path.expanduser(source)
        if source.startswith('hf:'):
            matches = find_hub_files(source)
        elif os.path.exists(expanded):
            matches = [expanded]
        else:
            matches = sorted(glob.glob(expanded, recursive=True))
        chosen = []
        skipped = []
        for match in matches:
            in_folder = os.path.isdir(match)
            for path in files_below(match) if in_folder else [match]:
                # a README.md usually describes the dataset; it is only read if it is named
                is_readme = os.path.basename(path).lower() == 'readme.md' and path != expanded
                if is_readme or (in_folder and kind_of(path) not in TEXT_KINDS):
                    skipped.append(path)
                else:
                    chosen.append(path)
        if not chosen:
            raise InputError(f"no text found: {source}. Name a text file, a .jsonl, .json or .parquet file, "
                             "or a folder of them; docs/data.md shows how to convert others.")
        if skipped:
            print0(f"skipping {len(skipped):,} files in {source}, such as {skipped[0]}")
        for path in chosen:
            if not path.startswith('hf:') and not os.path.isfile(path):  # a pipe, or a broken link
                raise InputError(f"not a regular file: {path}. Save its text to a file, as it is read more "
                                 "than once.")
            found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def files_below(root, skip=()):
    """Yield the files in a folder and its subfolders, sorted, without hidden ones.

    skip: names of folders to skip. Links are followed, and each folder is read once.
    """
    def report(e):
        print0(f"skipping a folder that cannot be read: {first_line(e)}")

    seen = set()
    for path, folders, files in os.walk(root, followlinks=True, onerror=report):
        real = os.path.realpath(path)
        if real in seen:  # a link may lead to a folder above
            folders[:] = []
            continue
        seen.add(real)
        folders[:] = sorted(folder for folder in folders if folder[0] != '.' and folder not in skip)
        for file in sorted(files):
            if file[0] != '.':
                yield os.path.join(path, file)


def find_pystdlib():
    """Return the .py files of this Python's standard library, without its tests and installed packages."""
    skip = ['test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__']
    folder = sysconfig.get_paths()['stdlib']
    return [path for path in files_below(folder, skip) if path.endswith('.py')]


def find_hub_files(source):
    """Return hf:OWNER/NAME/FILE for each file of the Hub that matches `source`, hf:OWNER/NAME/PATTERN."""
    huggingface_hub = import_package('huggingface_hub')
    try:
        owner, repo_name, pattern = source.removeprefix('hf:').split('/', 2)
        repo = f'{owner}/{repo_name}'
        names = huggingface_hub.HfApi().list_repo_files(repo, repo_type='dataset')
    except Exception as e:
        raise InputError(f"{source} cannot be listed: {type(e).__name__}, {first_line(e)}. Write "
                         "hf:OWNER/NAME/PATTERN. Some datasets require that you accept their terms on the "
                         "Hub and log in: hf auth login") from e
    # as on the Hub, * matches / as well; as elsewhere, it does not match hidden files
    found = [name for name in names if fnmatch.fnmatch(name, pattern) and os.path.basename(name)[0] != '.']
    if not found:
        raise InputError(f"no file of {repo} matches {pattern}. It has: {', '.join(names[:5])}, ... Correct "
                         "the pattern.")
    return [f'hf:{repo}/{name}' for name in sorted(found)]


def local_path(path):
    """Return the path of a file on this machine; download hf:OWNER/NAME/FILE into the Hub's cache."""
    if not path.startswith('hf:'):
        return path
    import huggingface_hub
    owner, repo_name, file = path.removeprefix('hf:').split('/', 2)
    return huggingface_hub.hf_hub_download(f'{owner}/{repo_name}', file, repo_type='dataset')


# -----------------------------------------------------------------------------
# what is in a file


def read_text(path, by_line=False):
    """Yield the text of a UTF-8 file, a million characters or a line at a time. Each line ends in \\n."""
    opened = gzip.open if path.lower().endswith('.gz') else open
    remedy = "Decompress or convert it; docs/data.md shows how."
    try:
        check_not_lfs_pointer(path)
        with opened(path, 'rb') as file:
            f = io.TextIOWrapper(file, 'utf-8-sig')
            blocks = f if by_line else iter(lambda: f.read(1 << 20), '')
            try:
                for text in blocks:
                    if '\0' in text:
                        raise InputError(f"{path} is not text in UTF-8: it contains NUL bytes. {remedy}")
                    yield text
            except UnicodeDecodeError as e:
                byte = e.object[e.start]
                offset = file.tell() - len(e.object) + e.start  # e.object is the last block
                raise InputError(f"{path} is not text in UTF-8: byte 0x{byte:02x} at offset {offset}. "
                                 f"{remedy}") from e
    except (OSError, EOFError, zlib.error) as e:  # the last two: a truncated or damaged .gz
        raise InputError(f"{path} cannot be read to its end: {first_line(e)}. Save or download it "
                         "again.") from e


def read_rows(path, column=None):
    """Yield (position, row) for each row of a .jsonl, .json or .parquet file.

    A .json file whose first line is a JSON object is read as .jsonl.
    column: if a .parquet file has it, other columns are not read.
    """
    if kind_of(path) == 'parquet':
        for number, row in enumerate(read_parquet(path, column), start=1):
            yield f'{path}, row {number}', row
        return
    lines = read_text(path, by_line=True)
    if kind_of(path) == 'json':
        first = next(lines, '')
        if not is_json_object(first):
            rows = parse_json(first + ''.join(lines), path)
            if not isinstance(rows, list):
                rows = [rows]
            for number, row in enumerate(rows, start=1):
                yield f'{path}, row {number}', row
            return
        lines = itertools.chain([first], lines)
    for number, line in enumerate(lines, start=1):
        if line.strip():
            position = f'{path}, line {number}'
            yield position, parse_json(line, position)


def is_json_object(line):
    """Return whether a line is a complete JSON object, as in .jsonl, and not the beginning of one."""
    try:
        return line.startswith('{') and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def parse_json(text, position):
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise InputError(f"{position} is not JSON: {first_line(e)}. Correct or remove it. A file has a row "
                         "per line, or one array of rows (.json).") from e


def read_parquet(path, column):
    """Yield the rows of a .parquet file, dicts."""
    import pyarrow.parquet
    check_not_lfs_pointer(path)
    try:
        with pyarrow.parquet.ParquetFile(path) as f:
            columns = [column] if column in f.schema_arrow.names else None
            for batch in f.iter_batches(256, columns=columns):
                yield from batch.to_pylist()
    except Exception as e:
        raise InputError(f"{path} cannot be read to its end: {first_line(e)}. Save or download it "
                         "again.") from e


# -----------------------------------------------------------------------------
# documents

# maximum number of characters to encode at once: more than most books have. Hugging Face's tokenizers take
# 150 bytes of memory per character
LONGEST_TEXT = 1 << 22


class Passage(typing.NamedTuple):
    """A document, or a part of a very long one."""
    text: str
    begins: bool  # whether a document begins here
    path: str  # of the file


def read_documents(paths):
    """Yield the passages of all files, in order: no empty one, and none longer than LONGEST_TEXT."""
    for path in paths:
        path = local_path(path)
        if kind_of(path) in ROW_KINDS:
            passages = read_row_texts(path)
        else:
            passages = read_plain_text(path)
        held = ''  # the end of the current document, which is not yielded yet
        begins = True  # whether it is also the beginning
        end = Passage('', True, path)  # yields what is held at the end of the file
        for passage in itertools.chain(passages, [end]):
            if passage.begins:
                if held:
                    yield Passage(held, begins, path)
                held = ''
                begins = True
            held += passage.text
            while len(held) > LONGEST_TEXT:
                # cut between a letter and a space, where the patterns of tokenizers cut as well
                match = re.match(r'.*[^\W\d_](?=[ \n\r\t])', held[:LONGEST_TEXT], re.DOTALL)
                cut = match.end() if match else LONGEST_TEXT
                yield Passage(held[:cut], begins, path)
                held = held[cut:]
                begins = False


def read_plain_text(path):
    """Yield the passages of plain text, in which <|endoftext|> separates documents, as in TinyStories."""
    begins = True
    held = ''  # the end of the last block, in which a marker may begin
    for block in read_text(path):
        # (?!\Z): a marker at the very end is held, as the \n that belongs to it may be in the next block
        *complete, rest = re.split(r'<\|endoftext\|>(?!\Z)\n?', held + block)
        for text in complete:
            yield Passage(text, begins, path)
            begins = True
        yield Passage(rest[:-len(END_OF_TEXT)], begins, path)
        begins = False
        held = rest[-len(END_OF_TEXT):]
    yield Passage(held.removesuffix(END_OF_TEXT), begins, path)


def read_row_texts(path):
    """Yield the texts under text_key. One that is null is skipped."""
    for position, row in read_rows(path, text_key):
        text = row.get(text_key, 0) if isinstance(row, dict) else 0
        if text is None:
            continue
        if not isinstance(text, str):
            raise InputError(f"{position} has no text under {text_key!r}: {repr(row)[:60]}. Name another key "
                             "with --text_key, or add --chat for conversations.")
        yield Passage(without_surrogates(text), True, path)


# -----------------------------------------------------------------------------
# chunks, which become shards


@dataclasses.dataclass
class Chunk:
    file_suffix: str  # of its shard, '_000000'; '' if there is only one
    train: list  # of passages
    val: list


def gather_chunks(paths, n_bytes, val_fraction):
    """Yield chunks with at least `n_bytes` of text each, except for the last one.

    A hash of a document's beginning decides whether it goes to train or val, so it stays in its split when
    documents are added. If there are so few documents that val might get none, val is the end of the text of
    each chunk, as in nanoGPT.
    """
    are_few = val_fraction > 0 and not has_documents(paths, 5 / val_fraction)
    number = 0
    chunk = Chunk('_000000', [], [])
    n_filled = 0
    in_val = False
    for passage in read_documents(paths):
        if n_filled >= n_bytes:
            yield with_end_as_val(chunk, val_fraction) if are_few else chunk
            number += 1
            chunk = Chunk(f'_{number:06d}', [], [])
            n_filled = 0
        n_filled += len(passage.text.encode())
        if passage.begins and not are_few:
            in_val = hash_fraction(passage.text) < val_fraction
        if in_val:
            chunk.val.append(passage)
        else:
            chunk.train.append(passage)
    if number == 0:
        chunk.file_suffix = ''
    if n_filled:
        yield with_end_as_val(chunk, val_fraction) if are_few else chunk


def with_end_as_val(chunk, val_fraction):
    """Return a chunk in which val is the end of the text of train."""
    n_characters = sum(len(passage.text) for passage in chunk.train)
    n_left = int((1 - val_fraction) * n_characters)  # for train
    train = []
    val = []
    for passage in chunk.train:
        n = min(n_left, len(passage.text))
        n_left -= n
        if n > 0:
            train.append(passage._replace(text=passage.text[:n]))
        if n < len(passage.text):
            val.append(passage._replace(text=passage.text[n:], begins=passage.begins and n == 0))
    return Chunk(chunk.file_suffix, train, val)


def has_documents(paths, n):
    """Return whether the files have at least n documents."""
    n_documents = 0
    for passage in read_documents(paths):
        n_documents += passage.begins
        if n_documents >= n:
            return True
    return False


def hash_fraction(text):
    """Return a hash of the beginning of a text, from 0 to 1."""
    digest = hashlib.blake2b(text[:1 << 16].encode(), digest_size=8).digest()
    return int.from_bytes(digest, 'big') / 2**64


# -----------------------------------------------------------------------------
# encoding


def dtype_of(tok):
    return np.dtype('<u2' if tok.n_vocab <= 1 << 16 else '<u4')


def encode_chunk(chunk, tok, end_of_text, found):
    """
    Return {split: (its entry in meta.json, the content of its file)}. An empty split is omitted.

    found: a Counter, to which the special tokens that are written in the text are added
    """
    dtype = dtype_of(tok)
    token_bytes = tok.token_bytes()
    separator = b'' if end_of_text is None else np.array(end_of_text, dtype).tobytes()

    def encode(passage):
        try:
            return tok.encode(passage.text), tok.find_special(passage.text)
        except InputError as e:
            raise InputError(f"{passage.path}: {e} Or use another tokenizer, such as byte.") from e

    shard = {}
    # threads are enough: tiktoken and tokenizers release Python's global lock
    with multiprocessing.pool.ThreadPool(choose_threads()) as pool:
        for split, passages in (('train', chunk.train), ('val', chunk.val)):
            content = bytearray()
            counts = collections.Counter()
            for passage, (ids, special) in zip(passages, pool.imap(encode, passages, chunksize=16)):
                found.update(special)
                if passage.begins:
                    content += separator
                content += ids.astype(dtype).tobytes()
                counts['documents'] += passage.begins
                counts['bytes'] += len(passage.text.encode())
                # fewer than the bytes of the text if the tokenizer drops characters or spaces
                counts['token_bytes'] += int(token_bytes[ids].sum())
            if content:
                file = f'{split}{chunk.file_suffix}.bin'
                entry = {'file': file, 'sha256': hashlib.sha256(content).hexdigest(),
                         'tokens': len(content) // dtype.itemsize, **counts}
                shard[split] = entry, content
    return shard


def report_special(found):
    """Print a note about the special tokens in `found`, a Counter."""
    if found:
        some = [f'{token!r} ({n:,})' for token, n in found.most_common(5)]
        print0(f"note: special tokens of the tokenizer are written in the text: {', '.join(some)}. They are "
               "encoded as text, unlike those in a prompt; docs/data.md has more.")


def choose_threads():
    """Return the number of threads: --threads, or one per core that this process may use."""
    if threads:
        return threads
    if hasattr(os, 'sched_getaffinity'):
        return len(os.sched_getaffinity(0))  # a job on a cluster may not use all cores of the machine
    return os.cpu_count()


# -----------------------------------------------------------------------------
# the tokenizer


def choose_tokenizer(chosen, paths):
    """Return the tokenizer that --tokenizer names. char and bpe:N learn their vocabulary from the files."""
    if not chosen:
        # files of the Hub have no size here, and count as large
        sizes = [os.path.getsize(path) for path in paths if os.path.isfile(path)]
        is_small = len(sizes) == len(paths) and sum(sizes) < 1e6
        chosen = 'char' if is_small and not chat else 'gpt2'
        print0(f"--tokenizer={chosen} by default")
    bpe = re.fullmatch('bpe:([0-9]+)', chosen)
    if chat and (chosen == 'char' or bpe):
        raise InputError(f"--tokenizer={chosen} learns a vocabulary from plain text, not from conversations. "
                         "Use the model's tokenizer (data/NAME, a checkpoint, hf:FOLDER), byte or gpt2.")
    if chosen == 'char':
        chars = set()
        for passage in read_documents(paths):
            chars.update(passage.text)
        added = [END_OF_TEXT] if has_documents(paths, 2) else []
        state = {'kind': 'char', 'chars': ''.join(sorted(chars)), 'added': added}
    elif bpe:
        print0(f"learning {bpe[1]} tokens")
        state = learn_bpe(int(bpe[1]), texts_to_learn_from(paths)).state()
    elif chosen == 'byte':
        state = {'kind': 'byte'}
    elif chosen.startswith('hf:'):
        from flatgpt import huggingface
        state = huggingface.read_tokenizer(chosen.removeprefix('hf:'))
    elif os.path.isdir(chosen) and bin_files(chosen, 'train'):
        state = read_tokenizer_files(chosen, read_meta(chosen))
    elif os.path.isdir(chosen) or chosen.endswith('.pt'):
        from flatgpt import checkpoint
        state = checkpoint.tokenizer_state_of(checkpoint.read(checkpoint.find(chosen)))
    elif os.path.exists(chosen) or chosen.endswith('.json'):
        from flatgpt import huggingface
        state = huggingface.tokenizer_state(chosen)
    else:
        state = {'kind': 'tiktoken', 'name': chosen}
    if chat:
        from flatgpt.conversations import with_chat_tokens
        state = with_chat_tokens(state)
    return make_tokenizer(state)


def texts_to_learn_from(paths):
    """Yield the beginnings of at most 64 of the files, 67 million characters in total."""
    chosen = paths[::len(paths) // 64 + 1]
    for path in chosen:
        n_left = (1 << 26) // len(chosen)
        for passage in read_documents([path]):
            text = passage.text[:n_left]
            for start in range(0, len(text), 1 << 16):  # learning from longer texts takes more memory
                yield text[start:start + (1 << 16)]
            n_left -= len(text)
            if n_left == 0:
                break


# -----------------------------------------------------------------------------
# the folder of the dataset. While it is not finished, plan.json contains the plan, the tokenizer and the
# complete shards; meta.json is written last

DATASET_FILES = re.compile(r'((train|val)(_\d{6})?\.(bin|mask|starts)|meta\.(json|pkl)|'
                           r'tokenizer(_config)?\.(json|tiktoken))(\.tmp)?')


def write_json(path, value):
    write_whole(path, json.dumps(value, indent=1).encode())


def begin(folder, plan, tok, end_of_text):
    """Remove an older dataset from the folder, and write the tokenizer. Return the content of plan.json."""
    # a folder with plan.json and without meta.json is not read as a dataset, so meta.json is removed first
    write_json(os.path.join(folder, 'plan.json'), {})
    for file in ['meta.json', *os.listdir(folder)]:
        path = os.path.join(folder, file)
        if DATASET_FILES.fullmatch(file) and os.path.exists(path):
            os.remove(path)
    meta = write_tokenizer_files(folder, tok, dtype_of(tok))
    meta['end_of_text'] = end_of_text
    if tok.state()['kind'] == 'char':  # the vocabulary as nanoGPT writes it
        stoi = {char: id for id, char in enumerate(tok.state()['chars'])} | tok.special
        itos = {id: char for char, id in stoi.items()}
        vocabulary = {'vocab_size': tok.n_vocab, 'itos': itos, 'stoi': stoi}
        write_whole(os.path.join(folder, 'meta.pkl'), pickle.dumps(vocabulary))
    meta['command'] = shlex.join(['python', *sys.argv])
    meta['plan'] = plan
    meta['shards'] = []  # of {split: entry of meta.json}
    write_json(os.path.join(folder, 'plan.json'), meta)
    return meta


def finish(folder, meta):
    del meta['shards']
    for split, entry in meta['splits'].items():
        entry['sample'] = Tokens(folder, split, meta).fingerprint['sample']
    write_json(os.path.join(folder, 'meta.json'), meta)
    os.remove(os.path.join(folder, 'plan.json'))
    return meta


def make_text(folder, plan, meta, tok, paths, separated):
    """Write the shards, then meta.json. Return its content.

    meta: the content of plan.json, whose shards are not made again, or None.
    """
    shards = meta['shards'] if meta else []
    end_of_text = tok.end_of_text if separated else None
    chunks = gather_chunks(paths, shard_mb * 1e6, plan['val_fraction'])
    found = collections.Counter()  # special tokens in the text

    def count(split, key):
        return sum(shard[split][key] for shard in shards if split in shard)

    for chunk in itertools.islice(chunks, len(shards), None):  # without those whose shards are complete
        if max_tokens and count('train', 'tokens') >= max_tokens:
            break
        shard = encode_chunk(chunk, tok, end_of_text, found)
        if meta is None:  # only now: if the input cannot be read or encoded, the older dataset is kept
            meta = begin(folder, plan, tok, end_of_text)
            shards = meta['shards']
        for entry, content in shard.values():
            write_whole(os.path.join(folder, entry['file']), content)
        shards.append({split: entry for split, (entry, content) in shard.items()})
        write_json(os.path.join(folder, 'plan.json'), meta)
        print0(f"{count('train', 'tokens'):,} tokens to train on")
    report_special(found)
    if count('train', 'tokens') < 2:
        raise InputError("too little text to train on. Use more, or a smaller --val_fraction.")

    meta['splits'] = {}
    for split in ('train', 'val'):
        entries = [shard[split] for shard in shards if split in shard]
        if entries:
            meta['splits'][split] = {'shards': entries}
            for key in ('tokens', 'bytes', 'token_bytes', 'documents'):
                meta['splits'][split][key] = count(split, key)
            n_lost = count(split, 'bytes') - count(split, 'token_bytes')
            if n_lost > 0:
                print0(f"note: {n_lost:,} bytes of the text for {split} are not in its tokens: the tokenizer "
                       "lacks characters, drops spaces, or has words as special tokens. byte, gpt2 and "
                       "bpe:8192 keep all.")
    return finish(folder, meta)


def make_conversations(folder, plan, tok, paths):
    """Write the splits of conversations, which are held in memory, then meta.json. Return its content.

    conversations.Conversations describes the files.
    """
    from flatgpt.conversations import chat_format
    form = chat_format(tok)
    conversations = read_conversations(paths)
    hashes = [hash_fraction(json.dumps(messages)) for messages in conversations]
    limit = plan['val_fraction']
    if 0 < limit * len(hashes) < 5:  # so few that val might get none: the lowest hashes go there
        n_val = min(math.ceil(limit * len(hashes)), len(hashes) - 1)
        limit = sorted(hashes)[n_val]
    rendered = {'train': [], 'val': []}
    found = collections.Counter()  # special tokens in the text
    for hash, messages in zip(hashes, conversations):
        for message in messages:
            found.update(tok.find_special(message['content']))
        split = 'val' if hash < limit else 'train'
        rendered[split].append(form.render(messages))
    report_special(found)
    if not rendered['train']:
        raise InputError("no conversation to train on. Use more of them, in a form of docs/chat.md.")

    meta = begin(folder, plan, tok, tok.end_of_text)
    meta['chat'] = form.template
    meta['splits'] = {}
    for split, pairs in rendered.items():
        if not pairs:
            continue
        ids = np.concatenate([ids for ids, mask in pairs])
        mask = np.concatenate([mask for ids, mask in pairs])
        lengths = np.array([len(ids) for ids, mask in pairs])
        content = ids.astype(dtype_of(tok)).tobytes()
        mask_bits = np.packbits(mask, bitorder='little').tobytes()
        starts = (np.cumsum(lengths) - lengths).astype('<u8').tobytes()
        write_whole(os.path.join(folder, f'{split}.bin'), content)
        write_whole(os.path.join(folder, f'{split}.mask'), mask_bits)
        write_whole(os.path.join(folder, f'{split}.starts'), starts)
        meta['splits'][split] = {
            'tokens': len(ids),
            'bytes': int(tok.token_bytes()[ids].sum()),
            'documents': len(pairs),
            'sha256': hashlib.sha256(content).hexdigest(),
            'mask_sha256': hashlib.sha256(mask_bits + starts).hexdigest(),
        }
    return finish(folder, meta)


def read_conversations(paths):
    """Return the conversations, lists of messages. Rows that cannot be used are skipped and counted."""
    from flatgpt.conversations import messages_of
    conversations = []
    skipped = collections.defaultdict(list)  # {reason: positions of rows}
    unread = collections.Counter()  # {key: number of rows}
    for path in paths:
        for position, row in read_rows(local_path(path)):
            try:
                messages, unread_keys = messages_of(row)
                conversations.append(messages)
                unread.update(unread_keys)
            except InputError as e:
                skipped[str(e)].append(position)
    for reason, positions in skipped.items():
        print0(f"note: skipping {len(positions):,} rows: {reason} (first: {positions[0]})")
    if unread:
        print0(f"note: keys that are not read, with the number of rows: {dict(unread)}")
    return conversations


# -----------------------------------------------------------------------------
# the script


def identity(path):
    """Return what identifies an input, so that a copy in another folder is the same input.

    For a file: its name, its size, and a checksum of its beginning and of 64 other places.
    """
    if os.path.isfile(path):
        size = os.path.getsize(path)
        checksum = hashlib.sha256()
        try:
            with open(path, 'rb') as f:
                checksum.update(f.read(1 << 16))
                for i in range(64):
                    f.seek(i * size // 64)
                    checksum.update(f.read(1024))
        except OSError as e:
            raise InputError(f"{path} cannot be read: {e.strerror}. Check its permissions.") from e
        return f'{os.path.basename(path)} {size} {checksum.hexdigest()}'
    if os.path.isdir(path):
        return os.path.basename(os.path.abspath(path))
    return path


def main():
    if name in BENCHMARKS:
        url = BENCHMARKS[name]
        path = os.path.join(data_dir or DATA_DIR, os.path.basename(url))
        fetch(url, path)
        if path.endswith('.zip'):
            import zipfile
            with zipfile.ZipFile(path) as f:
                f.extractall(data_dir or DATA_DIR)
        print0(f"{path} is complete. To use it: python eval.py --tasks={name}")
        return

    dataset = name
    if input is not None:
        if 'name' not in given or os.path.isfile(name):
            raise InputError("--input needs a name for the dataset: "
                             f"python {script_path()} NAME --input FILE.")
        paths = find_files(input)
    elif name in BUILT_IN:
        source = BUILT_IN[name].source
        if source.startswith('hf:'):
            paths = find_hub_files(source)
        elif source:
            paths = [os.path.join(folder_of(name, data_dir), 'input.txt')]
            fetch(source, paths[0])
        else:
            paths = find_pystdlib()
    elif os.path.exists(name):
        file = os.path.basename(os.path.abspath(name))
        dataset = os.path.splitext(file.removesuffix('.gz'))[0]
        paths = find_files([name])
    else:
        raise InputError(f"neither a file or folder nor a built-in dataset: {name}. Name a file, or one of "
                         f"{', '.join([*BUILT_IN, *BENCHMARKS])}.")
    folder = folder_of(dataset, data_dir)
    # a file that only has the name of a built-in dataset, such as tinystories.txt, gets the defaults
    built_in = BUILT_IN.get(name, BuiltIn('', tokenizer=''))  # '': choose_tokenizer() chooses
    chosen = tokenizer or built_in.tokenizer
    if any(kind_of(path) == 'parquet' for path in paths):
        import_package('pyarrow')  # before anything is downloaded

    # everything that determines the result. A dataset with the same plan is resumed, or is complete
    inputs = [identity(path) for path in [*paths, chosen]]
    plan = {
        'tokenizer': os.path.basename(chosen),  # its identity is part of 'files'
        'text_key': text_key,
        'val_fraction': built_in.val_fraction if val_fraction is None else val_fraction,
        'max_tokens': max_tokens,
        'shard_mb': shard_mb,
        'chat': chat,
        'files': hashlib.sha256('\n'.join(inputs).encode('utf-8', 'surrogateescape')).hexdigest(),
    }

    with lock_folder(folder):
        meta = read_json(os.path.join(folder, 'meta.json'))
        unfinished = read_json(os.path.join(folder, 'plan.json'))
        resuming = not meta and unfinished.get('plan') == plan
        if meta.get('plan') == plan and not overwrite:
            print0(f"{folder} is complete already. To make it again, add --overwrite.")
        elif bin_files(folder, 'train') and not resuming and not overwrite:
            command = meta.get('command') or unfinished.get('command') or 'another program'
            raise InputError(f"{folder} contains another dataset ({command!r}), or its input has changed. "
                             "Choose another name, or replace it with --overwrite.")
        else:
            if resuming:
                print0(f"resuming after {len(unfinished['shards'])} shards")
                tok = make_tokenizer(read_tokenizer_files(folder, unfinished))
            else:
                unfinished = None
                tok = choose_tokenizer(chosen, paths)
            if chat:
                meta = make_conversations(folder, plan, tok, paths)
            else:
                meta = make_text(folder, plan, unfinished, tok, paths, built_in.separated)

    for split, entry in meta['splits'].items():
        print0(f"{folder}, {split}: {entry['tokens']:,} tokens, {entry['documents']:,} documents, "
               f"{entry['bytes']:,} bytes of text")
    state = meta['tokenizer']
    print0(f"tokenizer {state.get('name', state['kind'])!r}, {meta['vocab_size']:,} ids")
    config_file = 'config/finetune_chat.py' if chat else built_in.config
    flags = [config_file, f'--dataset={dataset}']
    if data_dir:
        flags.append(f'--data_dir={data_dir}')
    print0(f"to train on it: python {script_path('train.py')} {shlex.join(flags)}")


if __name__ == '__main__':
    try:
        main()
    except KeyboardInterrupt:
        print0("stopped. The same command resumes after the last complete shard.")
        sys.exit(130)
