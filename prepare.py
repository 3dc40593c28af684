"""
Turn text into a dataset: the folder data/<name>/ with train.bin, val.bin and meta.json, which train.py reads.

    $ python prepare.py                        # the source code of this Python's library: no download
    $ python prepare.py shakespeare_char       # a built-in dataset, from the table below
    $ python prepare.py mystories.txt          # your own text becomes data/mystories
    $ python prepare.py chats.json --chat      # conversations become data/chats
    $ python prepare.py mine --input='texts/*.jsonl' --tokenizer=bpe:8192 --val_fraction=0.01
    $ python prepare.py mine --input='hf:OWNER/NAME/data/train-*.parquet'    # files of the Hugging Face Hub

docs/data.md describes which files are read, and what a document is. This process reads the documents of all
files, in order, in chunks of about 100 MB, and writes the shards. Worker processes encode: chunk k becomes
shard k. After a kill, the same command resumes behind the last shard.
"""

from configurator import InputError, check_range, configure, print0

# -----------------------------------------------------------------------------
name = 'pystdlib'  # of the dataset: a built-in one, another one with --input, or a file with text
input: list = None  # files, folders or patterns, or hf:OWNER/NAME/PATTERN: --input a.txt b.txt
# 'char', 'byte', 'gpt2' or another of tiktoken's, 'bpe:8192' (learned from the text), a tokenizer.json,
# 'hf:FOLDER_OR_NAME' of a model, the folder of a dataset, a ckpt.pt. None: that of the built-in dataset, else
# gpt2 for conversations and for more than 1 MB of text, char for less
tokenizer: str = None
text_key = 'text'  # the key of the text in a row of .jsonl or .json; the column of .parquet
chat = False  # the input is conversations, see docs/chat.md
# share of the documents for val.bin, chosen by a hash; of few documents it is the end of their text. None:
# that of the built-in dataset, else 0.1
val_fraction: float = None
max_tokens: int = None  # stop after the shard with which train has at least this many tokens
shard_mb = 100.0  # megabytes of text per shard
processes: int = None  # number of worker processes. None: one per core that this process may use
overwrite = False  # replace an existing dataset
data_dir: str = None  # folder of the datasets. None: data/ next to this file
# -----------------------------------------------------------------------------
if __name__ == '__main__':  # the worker processes import this file as well
    config, given = configure(globals(), positional='name', takes_configs=False)

import collections
import contextlib
import dataclasses
import fnmatch
import glob
import gzip
import hashlib
import io
import itertools
import json
import math
import multiprocessing
import os
import pickle
import re
import shlex
import signal
import sys
import sysconfig
import typing
import zlib

import numpy as np

from dataset import DATA_DIR, bin_files, folder_of, read_meta
from files import check_not_lfs_pointer, first_line, lock_folder, read_json, write_whole
from tokenizer import (
    END_OF_TEXT, hugging_face_state, import_package, learn_bpe, make_tokenizer, read_tokenizer_files,
    without_surrogates, write_tokenizer_files)


# -----------------------------------------------------------------------------
# built-in datasets


@dataclasses.dataclass
class BuiltIn:
    source: str  # a URL, or hf:OWNER/NAME/PATTERN; '': the source code of this Python's library
    tokenizer: str = 'gpt2'
    val_fraction: float = 0.1
    separated: bool = True  # whether <|endoftext|> stands before each document
    config: str = 'config/small_text.py'  # that trains on it


TINYSHAKESPEARE = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'
BUILT_IN = {
    'pystdlib': BuiltIn('', 'byte', config='config/quickstart.py'),
    # these two are nanoGPT's, byte for byte
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
    except Exception as e:  # the ways in which a network fails have no common class
        raise InputError(f"{url} cannot be downloaded: {first_line(e)}. Put that file at {path} and run this "
                         "command again.") from e
    os.makedirs(os.path.dirname(path), exist_ok=True)
    write_whole(path, content)


def fetch_benchmark(url, folder):
    path = os.path.join(folder, os.path.basename(url))
    fetch(url, path)
    if path.endswith('.zip'):
        import zipfile
        with zipfile.ZipFile(path) as f:
            f.extractall(folder)
    print0(f"{path} is complete. To use it: python eval.py --tasks={name}")


# -----------------------------------------------------------------------------
# which files

ROW_KINDS = ['jsonl', 'json', 'parquet']
TEXT_KINDS = ['txt', 'md', *ROW_KINDS]  # read from a folder
MARKUP_KINDS = ['html', 'htm', 'rtf', 'csv', 'epub', 'docx', 'odt', 'pdf']  # no plain text


def kind_of(path):
    """Return 'txt', 'jsonl', ...: a file's ending; of a compressed file the one before .gz."""
    return os.path.splitext(path.lower().removesuffix('.gz'))[1][1:]


def find_files(sources):
    """Return the paths of the text files in `sources`: paths, folders, patterns, hf:OWNER/NAME/PATTERN.

    A file is returned once, even if it is found under several names.
    """
    found = {}  # {real path: path}
    for source in sources:
        pattern = os.path.expanduser(source)
        if source.startswith('hf:'):
            matches = find_hub_files(source)
        elif os.path.exists(pattern):
            matches = [pattern]
        else:
            matches = sorted(glob.glob(pattern, recursive=True))
        chosen = []
        skipped = []
        for path in matches:
            in_folder = os.path.isdir(path)
            for file in files_below(path) if in_folder else [path]:
                if in_folder:
                    is_text = kind_of(file) in TEXT_KINDS
                else:  # any other kind is plain text as well, such as a program
                    is_text = kind_of(file) not in MARKUP_KINDS
                # the description of a dataset, unless it is what was asked for
                is_card = os.path.basename(file).lower() == 'readme.md' and file != pattern
                if is_text and not is_card:
                    chosen.append(file)
                else:
                    skipped.append(file)
        if not chosen:
            raise InputError(f"no text found: {skipped[0] if skipped else source}. Name a .txt, .md, .jsonl, "
                             ".json or .parquet file, or a folder of them; docs/data.md shows how to convert "
                             "others.")
        if skipped:
            print0(f"skipping {len(skipped):,} files in {source}, such as {skipped[0]}")
        for path in chosen:
            if not path.startswith('hf:') and not os.path.isfile(path):  # a pipe, or a broken link
                raise InputError(f"not a regular file: {path}. Save its text to a file, as it is read more "
                                 "than once.")
            found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def files_below(root, skip=()):
    """Yield the files in a folder and the folders below, sorted, except for hidden ones.

    skip: names of folders that are not read. Links are followed, and each folder is read once.
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
    # as on the Hub, a pattern matches in folders below as well; as elsewhere, it matches no hidden file
    found = [name for name in names if fnmatch.fnmatch(name, pattern) and os.path.basename(name)[0] != '.']
    if not found:
        raise InputError(f"{source} matches none of its files ({', '.join(names[:5])}, ...). Correct the "
                         "pattern.")
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
                offset = file.tell() - len(e.object) + e.start  # e.object is what was read last
                raise InputError(f"{path} is not text in UTF-8: byte 0x{byte:02x} at offset {offset}. "
                                 f"{remedy}") from e
    except (OSError, EOFError, zlib.error) as e:  # the last two: a .gz that is cut off or damaged
        raise InputError(f"{path} cannot be read to its end: {first_line(e)}. Save or download it "
                         "again.") from e


def read_rows(path, column=None):
    """Yield (position, row) for each row of a .jsonl, .json or .parquet file.

    column: if a .parquet has it, no other column is read.
    """
    if kind_of(path) == 'parquet':
        yield from read_parquet(path, column)
        return
    is_json = kind_of(path) == 'json'  # an array of rows or a single row, held in memory
    texts = [''.join(read_text(path))] if is_json else read_text(path, by_line=True)
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        position = f'{path}, line {number}'
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as e:
            raise InputError(f"{position} is not JSON: {first_line(e)}. Correct or remove it. A file with a "
                             "row in each line is named .jsonl, one with an array of rows .json.") from e
        if is_json and isinstance(row, list):
            for number, element in enumerate(row, start=1):
                yield f'{path}, row {number}', element
        else:
            yield position, row


def read_parquet(path, column):
    import pyarrow.parquet
    check_not_lfs_pointer(path)
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as f:
            columns = [column] if column in f.schema_arrow.names else None
            for batch in f.iter_batches(256, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f'{path}, row {number}', row
    except Exception as e:
        raise InputError(f"{path} cannot be read to its end: {first_line(e)}. Save or download it "
                         "again.") from e


# -----------------------------------------------------------------------------
# documents

# characters that are encoded at once: more than most books. Hugging Face's take 150 bytes of memory for each
LONGEST_TEXT = 1 << 22
HASHED = 1 << 16  # characters at a document's beginning that decide whether it goes to train or val


class Passage(typing.NamedTuple):
    """A document, or a part of a very long one."""
    text: str
    begins: bool  # whether it is the beginning of a document
    path: str  # of its file


def read_documents(paths, text_key='text'):
    """Yield the passages of all files, in order."""
    for path in paths:
        path = local_path(path)
        if kind_of(path) in ROW_KINDS:
            passages = read_row_texts(path, text_key)
        else:
            passages = read_plain_text(path)
        # join and cut them, so that none is empty, and none longer than LONGEST_TEXT
        held = ''
        begins = True
        for passage in itertools.chain(passages, [Passage('', True, path)]):
            if passage.begins:
                if held:
                    yield Passage(held, begins, path)
                held = ''
                begins = True
            held += passage.text
            while len(held) > LONGEST_TEXT:
                # cut between a letter and a space: no pattern of a tokenizer joins the two, or looks back
                match = re.match(r'.*[^\W\d_](?=[ \n\r\t])', held[:LONGEST_TEXT], re.DOTALL)
                cut = match.end() if match else LONGEST_TEXT
                yield Passage(held[:cut], begins, path)
                held = held[cut:]
                begins = False


def read_plain_text(path):
    """Yield the passages of plain text, in which <|endoftext|> separates documents.

    TinyStories has it so, each on a line of its own.
    """
    begins = True
    held = ''  # the end of what was read, where a marker and its \n may begin
    for block in read_text(path):
        *complete, rest = re.split(r'<\|endoftext\|>(?!\Z)\n?', held + block)
        for text in complete:
            yield Passage(text, begins, path)
            begins = True
        yield Passage(rest[:-len(END_OF_TEXT)], begins, path)
        begins = False
        held = rest[-len(END_OF_TEXT):]
    yield Passage(held.removesuffix(END_OF_TEXT), begins, path)


def read_row_texts(path, text_key):
    """Yield the texts of rows."""
    for position, row in read_rows(path, text_key):
        text = row.get(text_key, 0) if isinstance(row, dict) else 0
        if text is None:  # as an empty one
            continue
        if not isinstance(text, str):
            raise InputError(f"{position} has no text under {text_key!r}: {str(row)[:60]}. Name another key "
                             "with --text_key, or add --chat for conversations. An array of rows is named "
                             ".json.")
        yield Passage(without_surrogates(text), True, path)


# -----------------------------------------------------------------------------
# chunks, which become shards


@dataclasses.dataclass
class Chunk:
    file_suffix: str  # of its shard, '_000000'; '' for the only one
    train: list  # of passages
    val: list


def gather_chunks(passages, n_bytes, val_fraction):
    """Yield chunks with at least `n_bytes` of text each, except for the last one.

    A hash of a document's beginning decides whether it goes to train or val, so it stays there when others
    are added.
    """
    number = 0
    chunk = Chunk('', [], [])
    n_filled = 0
    in_val = False
    for passage in passages:
        if n_filled >= n_bytes:
            chunk.file_suffix = f'_{number:06d}'
            yield chunk
            number += 1
            chunk = Chunk('', [], [])
            n_filled = 0
        if passage.begins:
            in_val = is_hashed_below(passage.text, val_fraction)
        if in_val:
            chunk.val.append(passage)
        else:
            chunk.train.append(passage)
        n_filled += len(passage.text.encode())
    if number:
        chunk.file_suffix = f'_{number:06d}'
    yield chunk


def is_hashed_below(text, fraction):
    digest = hashlib.blake2b(text[:HASHED].encode(), digest_size=8).digest()
    return int.from_bytes(digest, 'big') < fraction * 2**64


def has_few_documents(paths, text_key, val_fraction):
    """Return whether all files together have so few documents that a hash might choose none for val."""
    n_documents = 0
    if val_fraction > 0:
        for passage in read_documents(paths, text_key):
            n_documents += passage.begins
            if n_documents * val_fraction >= 5:
                return False
    return True


def with_end_as_val(chunk, val_fraction):
    """Return a chunk in which val is the end of the text, as in nanoGPT."""
    n_left = int((1 - val_fraction) * sum(len(passage.text) for passage in chunk.train))  # for train
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


# -----------------------------------------------------------------------------
# encoding


def dtype_of(tok):
    return np.dtype('<u2' if tok.n_vocab <= 1 << 16 else '<u4')


def encode_chunk(chunk, tok, end_of_text):
    """Return {split: (its entry in meta.json, the content of its file)}, without empty splits."""
    dtype = dtype_of(tok)
    token_bytes = tok.token_bytes()
    separator = b'' if end_of_text is None else np.array(end_of_text, dtype).tobytes()
    shard = {}
    for split, passages in (('train', chunk.train), ('val', chunk.val)):
        content = bytearray()
        counts = collections.Counter()
        for passage in passages:
            try:
                ids = tok.encode(passage.text)
            except InputError as e:
                raise InputError(f"{passage.path}: {e} Or use another tokenizer, such as byte.") from e
            if passage.begins:
                content += separator
            content += ids.astype(dtype).tobytes()
            counts['documents'] += passage.begins
            counts['bytes'] += len(passage.text.encode())
            # fewer than the bytes of the text if the tokenizer drops some of it
            counts['token_bytes'] += int(token_bytes[ids].sum())
        if content:
            entry = {'file': f'{split}{chunk.file_suffix}.bin', 'sha256': hashlib.sha256(content).hexdigest(),
                     'tokens': len(content) // dtype.itemsize, **counts}
            shard[split] = entry, bytes(content)
    return shard


def encode_chunks(chunks, tok, end_of_text, n_processes):
    """Yield the chunks as encode_chunk() returns them, in order. Several of them are encoded by workers."""
    waiting = collections.deque()  # connections to the workers, in the order of their chunks
    for chunk in chunks:
        if n_processes == 1 or not chunk.file_suffix:
            yield encode_chunk(chunk, tok, end_of_text)
            continue
        if len(waiting) < n_processes:
            connection = start_worker(tok, end_of_text)
            connection.send(chunk)
        else:
            connection = waiting.popleft()
            shard = receive(connection)
            connection.send(chunk)
            yield shard
        waiting.append(connection)
    for connection in waiting:
        yield receive(connection)


def start_worker(tok, end_of_text):
    """Start a process that encodes chunks. Return the connection to it, with which it ends."""
    context = multiprocessing.get_context('spawn')  # on all platforms; threads do not survive a fork
    ours, theirs = context.Pipe()
    context.Process(target=encode_in_worker, args=(theirs, tok.state(), end_of_text), daemon=True).start()
    theirs.close()
    return ours


def encode_in_worker(connection, tokenizer_state, end_of_text):
    """Encode the chunks that arrive, until the other end of the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the first process, and that ends this one
    tok = make_tokenizer(tokenizer_state)
    with contextlib.suppress(EOFError, ConnectionError):  # the first process has ended
        while True:
            chunk = connection.recv()
            try:
                shard = encode_chunk(chunk, tok, end_of_text)
            except InputError as e:
                shard = e
            connection.send(shard)


def receive(connection):
    try:
        shard = connection.recv()
    except (EOFError, ConnectionError) as e:
        raise InputError("a worker process was killed, perhaps for lack of memory. Run the same command with "
                         "fewer --processes; it resumes.") from e
    if isinstance(shard, InputError):
        raise shard
    return shard


def choose_processes():
    """Return the number of worker processes: --processes, or one per core that this process may use."""
    if processes:
        return processes
    if hasattr(os, 'sched_getaffinity'):
        return len(os.sched_getaffinity(0))  # a job on a cluster gets some of the machine's cores
    return os.cpu_count()


# -----------------------------------------------------------------------------
# the tokenizer


def choose_tokenizer(chosen, paths, text_key, chat):
    """Return the tokenizer that --tokenizer names. A vocabulary that is learned is learned from the files."""
    if not chosen:
        sizes = [os.path.getsize(path) for path in paths if os.path.isfile(path)]  # not those of the Hub
        is_small = len(sizes) == len(paths) and sum(sizes) < 1e6
        chosen = 'char' if is_small and not chat else 'gpt2'
        print0(f"--tokenizer={chosen} by default")
    if chat and (chosen == 'char' or chosen.startswith('bpe:')):
        raise InputError(f"--tokenizer={chosen} learns a vocabulary from plain text, not from conversations. "
                         "Use the model's tokenizer (data/NAME, a checkpoint, hf:FOLDER), byte or gpt2.")
    if chosen == 'char':
        chars = set()
        n_documents = 0
        for passage in read_documents(paths, text_key):
            chars.update(passage.text)
            n_documents += passage.begins
        added = [END_OF_TEXT] if n_documents > 1 else []
        state = {'kind': 'char', 'chars': ''.join(sorted(chars)), 'added': added}
    elif chosen.startswith('bpe:'):
        size = chosen.removeprefix('bpe:')
        if not size.isdecimal():
            raise InputError(f"not the size of a vocabulary: --tokenizer={chosen}. Write a number, as in "
                             "bpe:8192.")
        print0(f"learning {size} tokens")
        state = learn_bpe(int(size), texts_to_learn_from(paths, text_key)).state()
    elif chosen == 'byte':
        state = {'kind': 'byte'}
    elif chosen.startswith('hf:'):
        import huggingface
        state = huggingface.read_tokenizer(chosen.removeprefix('hf:'))
    elif os.path.isdir(chosen) and bin_files(chosen, 'train'):
        state = read_tokenizer_files(chosen, read_meta(chosen))
    elif os.path.isdir(chosen) or chosen.endswith('.pt'):
        import checkpoint
        state = checkpoint.tokenizer_state_of(checkpoint.read(checkpoint.find(chosen)))
    elif os.path.exists(chosen) or chosen.endswith('.json'):
        state = hugging_face_state(chosen)
    else:
        state = {'kind': 'tiktoken', 'name': chosen}
    if chat:
        from conversations import with_chat_tokens
        state = with_chat_tokens(state)
    return make_tokenizer(state)


def texts_to_learn_from(paths, text_key):
    """Yield the beginnings of at most 64 of the files, 67 million characters together."""
    chosen = paths[::len(paths) // 64 + 1]
    for path in chosen:
        n_left = (1 << 26) // len(chosen)
        for passage in read_documents([path], text_key):
            for start in range(0, min(n_left, len(passage.text)), 1 << 16):  # longer ones take much memory
                yield passage.text[start:start + (1 << 16)]
            n_left -= len(passage.text)
            if n_left <= 0:
                break


# -----------------------------------------------------------------------------
# the dataset's folder. While it is not finished, plan.json has the plan, the tokenizer and the complete
# shards; meta.json is written last

OUR_FILES = re.compile(r'((train|val)(_\d{6})?\.(bin|mask|starts)|meta\.(json|pkl)|'
                       r'tokenizer(_config)?\.(json|tiktoken))(\.tmp)?')


def write_json(path, value):
    write_whole(path, json.dumps(value, indent=1).encode())


def begin(folder, plan, tok, end_of_text):
    """Remove an older dataset from the folder, and write the tokenizer. Return the content of plan.json."""
    # a folder with plan.json and without meta.json is not read as a dataset
    write_json(os.path.join(folder, 'plan.json'), {})
    for file in ['meta.json', *os.listdir(folder)]:
        path = os.path.join(folder, file)
        if OUR_FILES.fullmatch(file) and os.path.exists(path):
            os.remove(path)
    meta = write_tokenizer_files(folder, tok, dtype_of(tok))
    meta['end_of_text'] = end_of_text
    if tok.state()['kind'] == 'char':  # the vocabulary as nanoGPT writes it
        stoi = {char: id for id, char in enumerate(tok.state()['chars'])} | tok.special
        itos = {id: char for char, id in stoi.items()}
        vocabulary = {'vocab_size': tok.n_vocab, 'itos': itos, 'stoi': stoi}
        write_whole(os.path.join(folder, 'meta.pkl'), pickle.dumps(vocabulary))
    meta['command'] = shlex.join(['python', 'prepare.py', *sys.argv[1:]])
    meta['plan'] = plan
    meta['shards'] = []  # of {split: entry of meta.json}
    write_json(os.path.join(folder, 'plan.json'), meta)
    return meta


def finish(folder, meta):
    del meta['shards']
    write_json(os.path.join(folder, 'meta.json'), meta)
    os.remove(os.path.join(folder, 'plan.json'))


def make_text(folder, plan, meta, tok, paths, separated):
    """Write the shards, then meta.json. Return its content.

    meta: the content of an unfinished plan.json, whose shards are not made again, or None.
    """
    text_key = plan['text_key']
    val_fraction = plan['val_fraction']
    first = next(read_documents(paths, text_key), None)
    if first is None:
        raise InputError("the input has no text. Use other files.")
    if first.text.rstrip().endswith(END_OF_TEXT):
        print0(f"note: the first row ends in {END_OF_TEXT}. It is text there, and not the token that stands "
               "before each document. Remove it from the rows.")
    documents = read_documents(paths, text_key)
    n_bytes = plan['shard_mb'] * 1e6
    if has_few_documents(paths, text_key, val_fraction):
        chunks = gather_chunks(documents, n_bytes, val_fraction=0)
        chunks = (with_end_as_val(chunk, val_fraction) for chunk in chunks)
    else:
        chunks = gather_chunks(documents, n_bytes, val_fraction)

    shards = meta['shards'] if meta else []
    chunks = itertools.islice(chunks, len(shards), None)  # the missing ones
    end_of_text = tok.end_of_text if separated else None
    max_tokens = plan['max_tokens'] or math.inf
    encoded = encode_chunks(chunks, tok, end_of_text, choose_processes())

    def count(split, key):
        return sum(shard[split][key] for shard in shards if split in shard)

    while count('train', 'tokens') < max_tokens:
        shard = next(encoded, None)
        if shard is None:
            break
        if meta is None:  # only now, as the input could be read and encoded
            meta = begin(folder, plan, tok, end_of_text)
            shards = meta['shards']
        for entry, content in shard.values():
            write_whole(os.path.join(folder, entry['file']), content)
        shards.append({split: entry for split, (entry, content) in shard.items()})
        write_json(os.path.join(folder, 'plan.json'), meta)
        print0(f"{count('train', 'tokens'):,} tokens to train on")
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
                print0(f"note: the tokenizer drops {n_lost:,} bytes of the text for {split}, as its "
                       "vocabulary lacks some characters. byte, gpt2 and bpe:8192 have all.")
    finish(folder, meta)
    return meta


def make_conversations(folder, plan, tok, paths):
    """Write the splits of conversations, which are held in memory, then meta.json.

    train.bin has the ids, train.mask a bit per id, set if the assistant says it, and train.starts the
    positions at which the conversations begin.
    """
    from conversations import chat_format
    form = chat_format(tok)
    conversations = read_conversations(paths)
    val_fraction = plan['val_fraction']
    n_train = round((1 - val_fraction) * len(conversations))
    are_few = len(conversations) * val_fraction < 5  # a hash might choose none for val: it is the end
    rendered = {'train': [], 'val': []}
    for number, messages in enumerate(conversations):
        if are_few:
            in_val = number >= n_train
        else:
            said = [[message['role'], message['content']] for message in messages]
            in_val = is_hashed_below(json.dumps(said, ensure_ascii=False), val_fraction)
        rendered['val' if in_val else 'train'].append(form.render(messages))
    if not rendered['train']:
        raise InputError("no conversation to train on. Use more of them, in a form of docs/chat.md, or a "
                         "smaller --val_fraction.")

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
    finish(folder, meta)
    return meta


def read_conversations(paths):
    """Return the conversations, lists of messages. Rows that cannot be used are skipped and counted."""
    from conversations import messages_of, unread_keys
    conversations = []
    skipped = collections.defaultdict(list)  # {reason: positions of rows}
    unread = collections.Counter()  # {key: number of rows}
    for path in paths:
        for position, row in read_rows(local_path(path)):
            try:
                conversations.append(messages_of(row))
                unread.update(unread_keys(row))
            except InputError as e:
                skipped[str(e)].append(position)
    for reason, positions in skipped.items():
        print0(f"note: skipping {len(positions):,} rows: {reason} (first: {positions[0]})")
    if unread:
        keys = [f"{key} ({n:,} rows)" for key, n in unread.most_common(9)]
        print0(f"note: these keys are not read: {', '.join(keys)}")
    return conversations


# -----------------------------------------------------------------------------
# the script


def main():
    folder_of_all = data_dir or DATA_DIR
    if name in BENCHMARKS:
        fetch_benchmark(BENCHMARKS[name], folder_of_all)
        return

    # which dataset, of which files
    dataset = name
    sources = input
    if sources is not None and ('name' not in given or os.path.isfile(name)):
        raise InputError("--input needs a name for the dataset. Write: python prepare.py NAME --input FILE "
                         "FILE")
    if sources is None and name not in BUILT_IN and os.path.exists(name):
        file = os.path.basename(os.path.abspath(name))
        dataset = os.path.splitext(file.removesuffix('.gz'))[0]
        sources = [name]
    if sources is None and (chat or dataset not in BUILT_IN):
        raise InputError(f"neither a file or folder nor a built-in dataset: {dataset}. Name a file, here or "
                         "with --input=PATH, or, without --chat, one of "
                         f"{', '.join([*BUILT_IN, *BENCHMARKS])}.")
    check_range(config, ['val_fraction'], 0, 1, exclude=1)
    check_range(config, ['shard_mb', 'max_tokens', 'processes'], 0, exclude=0)
    folder = folder_of(dataset, data_dir)
    built_in = BUILT_IN.get(dataset, BuiltIn('', tokenizer=''))
    chosen = tokenizer or built_in.tokenizer
    if sources is not None:
        paths = find_files(sources)
    elif built_in.source.startswith('hf:'):
        paths = find_hub_files(built_in.source)
    elif built_in.source:
        paths = [os.path.join(folder, 'input.txt')]
        fetch(built_in.source, paths[0])
    else:
        paths = find_pystdlib()
    if any(kind_of(path) == 'parquet' for path in paths):
        import_package('pyarrow')  # before anything is downloaded

    # the plan: all that decides the result. The same plan is resumed, or complete
    stamps = []  # which change when the content of a file does
    for path in [*paths, chosen]:
        if os.path.isfile(path):
            status = os.stat(path)
            path = f'{os.path.abspath(path)} {status.st_size} {status.st_mtime_ns}'
        stamps.append(path)
    plan = {
        'tokenizer': chosen,
        'text_key': text_key,
        'val_fraction': built_in.val_fraction if val_fraction is None else val_fraction,
        'max_tokens': max_tokens,
        'shard_mb': shard_mb,
        'chat': chat,
        'files': hashlib.sha256('\n'.join(stamps).encode('utf-8', 'surrogateescape')).hexdigest(),
    }

    with lock_folder(folder):
        exists = bool(bin_files(folder, 'train'))
        meta = read_json(os.path.join(folder, 'meta.json'))
        unfinished = read_json(os.path.join(folder, 'plan.json'))
        resuming = not meta and unfinished.get('plan') == plan
        if exists and meta.get('plan') == plan and not overwrite:
            print0(f"{folder} is complete already. To make it again, add --overwrite.")
        elif exists and not resuming and not overwrite:
            command = meta.get('command') or unfinished.get('command') or 'another program'
            raise InputError(f"{folder} contains another dataset ({command}), or its input has changed. "
                             "Choose another name, or replace it with --overwrite.")
        else:
            if resuming:
                print0(f"resuming after {len(unfinished['shards'])} shards")
                tok = make_tokenizer(read_tokenizer_files(folder, unfinished))
            else:
                unfinished = None
                tok = choose_tokenizer(chosen, paths, text_key, chat)
            if chat:
                meta = make_conversations(folder, plan, tok, paths)
            else:
                meta = make_text(folder, plan, unfinished, tok, paths, built_in.separated)

    for split, entry in meta['splits'].items():
        print0(f"{folder}, {split}: {entry['tokens']:,} tokens, {entry['documents']:,} documents, "
               f"{entry['bytes']:,} bytes of text")
    state = meta['tokenizer']
    print0(f"tokenizer {state.get('name', state['kind'])}, {meta['vocab_size']:,} ids")
    config_file = 'config/finetune_chat.py' if chat else built_in.config
    command = ['python', 'train.py', config_file, f'--dataset={dataset}']
    if data_dir:
        command.append(f'--data_dir={data_dir}')
    print0(f"to train on it: {shlex.join(command)}")


if __name__ == '__main__':
    try:
        main()
    except KeyboardInterrupt:
        print0("stopped. The same command resumes after the last complete shard.")
        sys.exit(130)
