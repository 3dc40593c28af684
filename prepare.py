"""
Turn text into a dataset: the folder data/<name>/ with train.bin, val.bin and meta.json, which train.py reads.

    $ python prepare.py                        # the source code of this Python's library: no download
    $ python prepare.py shakespeare_char       # a set that has a name; the table below has all of them
    $ python prepare.py mystories.txt          # a text of your own becomes data/mystories
    $ python prepare.py chats.json --chat      # conversations become data/chats
    $ python prepare.py mine --input='texts/*.jsonl' --tokenizer=bpe:8192 --val_fraction=0.01
    $ python prepare.py mine --input='hf:OWNER/NAME/data/train-*.parquet'    # files of the Hugging Face Hub

What is read, and what a document is: docs/data.md. This process reads the documents of all files, in order,
and gathers them into pieces of about 100 MB. Other processes encode them: piece k becomes shard k. After a
kill or on a full disk the same command makes the shards that are missing.
"""

from configurator import InputError, configure, print0

# -----------------------------------------------------------------------------
name = 'pystdlib'  # of the dataset: one of the table below, another one with --input, or a file with text
input: list = None  # files, folders or patterns, or hf:OWNER/NAME/PATTERN: --input a.txt b.txt
tokenizer: str = None  # 'char', 'byte', 'gpt2' or another of tiktoken's, 'bpe:8192' (learned from the text),
# a tokenizer.json, 'hf:FOLDER_OR_NAME' of a model, the folder of a dataset, a ckpt.pt. None: that of the
# named set; else gpt2 for conversations and above 1 MB of text, char below
text_key = 'text'  # where the text is in a row of .jsonl or .json; the column of .parquet
chat = False  # the input is conversations, see docs/chat.md
val_fraction: float = None  # share of the documents, chosen by a hash, for val.bin; of few documents it is
# the end of their text. None: that of the named set, else 0.1
max_tokens: int = None  # stop after the shard with which train has so many
shard_mb = 100.0  # megabytes of text for a shard
processes: int = None  # that encode. None: one per core that this process may use
overwrite = False  # replace a dataset that was made in another way
data_dir: str = None  # where the datasets are. None: data/ beside this file
# -----------------------------------------------------------------------------
if __name__ == '__main__':  # the processes that encode import this file, too
    config, given = configure(globals(), positional='name', takes_configs=False)

import collections
import concurrent.futures
import dataclasses
import fnmatch
import functools
import glob
import gzip
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import pickle
import re
import shlex
import shutil
import signal
import sys
import sysconfig
import threading
import urllib.request
import zipfile
import zlib

import numpy as np

import checkpoint
import huggingface
from conversations import chat_format, messages_of, unread_keys, with_chat_tokens
from dataset import DATA_DIR, bin_files, folder_of, read_meta
from files import lock_folder, check_not_lfs_pointer, first_line, read_json, write_whole
from tokenizer import (
    END_OF_TEXT, hugging_face_state, learn_bpe, make_tokenizer, read_tokenizer_files, without_surrogates,
    write_tokenizer_files)


# -----------------------------------------------------------------------------
# sets that have a name


@dataclasses.dataclass
class NamedSet:
    source: str  # a URL, or hf:OWNER/NAME/PATTERN; '': the files of this Python
    tokenizer: str = 'gpt2'
    val_fraction: float = 0.1
    config: str = 'config/small_text.py'  # that trains on it


TINYSHAKESPEARE = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'
NAMED_SETS = {
    'pystdlib': NamedSet('', 'byte', config='config/quickstart.py'),
    'shakespeare_char': NamedSet(TINYSHAKESPEARE, 'char', config='config/train_shakespeare_char.py'),
    'shakespeare': NamedSet(TINYSHAKESPEARE, config='config/finetune_shakespeare.py'),
    'openwebtext': NamedSet('hf:Skylion007/openwebtext/plain_text/*.parquet', val_fraction=0.0005,
                            config='config/train_gpt2.py'),
    'fineweb': NamedSet('hf:HuggingFaceFW/fineweb/sample/10BT/*.parquet', val_fraction=0.0005,
                        config='config/train_fineweb_124m.py'),
    'fineweb_edu': NamedSet('hf:HuggingFaceFW/fineweb-edu/sample/10BT/*.parquet', val_fraction=0.0005,
                            config='config/train_edu_124m.py'),
    'tinystories': NamedSet('hf:roneneldan/TinyStories/data/train-*.parquet', val_fraction=0.0005),
}
# made as nanoGPT makes them, byte for byte: without <|endoftext|>
AS_NANOGPT = ['shakespeare_char', 'shakespeare']
# for eval.py --tasks
BENCHMARKS = {
    'hellaswag': 'https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl',
    'core': 'https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip',
}


def fetch(url, path):
    """Download `url` to `path`, if there is no such file."""
    if os.path.exists(path):
        return
    print0(f"downloading {url}")
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            content = response.read()
    except Exception as e:  # the network has many ways to fail, and they have no common class
        raise InputError(f"{url} cannot be downloaded ({first_line(e)}). put that file at {path}, and run it again")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    write_whole(path, content)


# -----------------------------------------------------------------------------
# which files

ROW_KINDS = ['jsonl', 'json', 'parquet']
TEXT_KINDS = ['txt', 'md', *ROW_KINDS]  # what is read of a folder
KINDS_IN_WORDS = '.txt, .md, .jsonl, .json or .parquet'
PANDOC = 'make text of it: pandoc -t plain --wrap=none {0} -o {0}.txt'
OTHER_KINDS = {  # what to do with files that are no text, or whose markup would be read as text
    'html': PANDOC, 'htm': PANDOC, 'epub': PANDOC, 'docx': PANDOC, 'odt': PANDOC, 'rtf': PANDOC,
    'pdf': 'make text of it: pdftotext {0} {0}.txt',
    'csv': 'make rows of it, in Python: pandas.read_csv(PATH).to_parquet(PATH + ".parquet")',
}


def kind_of(path):
    """'txt', 'jsonl', ...: a file's ending; of a compressed file the one before .gz."""
    return os.path.splitext(path.lower().removesuffix('.gz'))[1][1:]


def check_packages(inputs, spec=''):
    """Exit if a package is missing that these paths or a --tokenizer need: before a download, not after."""
    needed = []
    if any(source.startswith('hf:') for source in inputs):
        needed.append('huggingface_hub')
    if any(kind_of(source) == 'parquet' for source in inputs):
        needed.append('pyarrow')
    if spec.startswith('bpe:'):
        needed += ['tokenizers', 'tiktoken']
    missing = []
    for package in needed:
        try:
            importlib.import_module(package)
        except ImportError:
            missing.append(package)
    if missing:
        raise InputError(f"packages are not installed: {', '.join(missing)}. Run: pip install {' '.join(missing)}")


def find_files(sources):
    """The paths of files with text in `sources`: paths, folders, patterns, hf:OWNER/NAME/PATTERN. A file is
    read once, under whatever names it is found."""
    found = {}  # by their real paths
    for source in sources:
        pattern = os.path.expanduser(source)
        if source.startswith('hf:'):
            matches = find_hub_files(source)
        elif os.path.exists(pattern):
            matches = [pattern]
        else:
            matches = sorted(glob.glob(pattern, recursive=True))
        chosen = []
        others = []
        unreadable = []  # an OSError for each folder
        for path in matches:
            files = files_below(path, onerror=unreadable.append) if os.path.isdir(path) else [path]
            for file in files:
                kind = kind_of(file)
                # any other kind is plain text, too, if it is named; in a folder it may be an image
                if kind in TEXT_KINDS or file == path and kind not in OTHER_KINDS:
                    chosen.append(file)
                else:
                    others.append(file)
        if any(kind_of(file) in ROW_KINDS for file in chosen):
            for file in list(chosen):
                # the card of a data set, which is no text of it
                if os.path.basename(file).lower() == 'readme.md' and file != pattern:
                    chosen.remove(file)
                    others.append(file)
        if unreadable:
            print0(f"skipping {len(unreadable):,} folders that cannot be read: {first_line(unreadable[0])}")
        if not chosen:
            what = others[0] if others else source
            remedy = OTHER_KINDS.get(kind_of(what), 'name a file with text, or a folder that has some')
            raise InputError(f"no {KINDS_IN_WORDS} ({what}). {remedy.format(shlex.quote(what))}")
        if others:
            print0(f"skipping {len(others):,} files of other kinds in {source}, such as {others[0]}")
        for path in chosen:
            if not path.startswith('hf:') and not os.path.isfile(path):  # a pipe, or a link to nowhere
                raise InputError(f"not a regular file: {path}. Save its text to a file, as it is read more than once")
            found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def files_below(root, leave_out=(), onerror=None):
    """The files in a folder and the folders below, sorted, but for hidden ones. Links are followed, and each
    folder is read once. onerror: called with the OSError of a folder that cannot be read."""
    seen = set()
    for path, folders, files in os.walk(root, followlinks=True, onerror=onerror):
        real = os.path.realpath(path)
        if real in seen:  # a link may lead to a folder above
            folders[:] = []
            continue
        seen.add(real)
        folders[:] = sorted(folder for folder in folders if folder[0] != '.' and folder not in leave_out)
        for file in sorted(files):
            if file[0] != '.':
                yield os.path.join(path, file)


def find_pystdlib():
    """The .py files of this Python's standard library, without its tests and installed packages."""
    leave_out = ['test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__']
    folder = sysconfig.get_paths()['stdlib']
    return [path for path in files_below(folder, leave_out) if path.endswith('.py')]


def find_hub_files(source):
    """'hf:OWNER/NAME/FILE' for each file of a Hub dataset that fits source, 'hf:OWNER/NAME/PATTERN'."""
    try:
        import huggingface_hub
        owner, repo_name, pattern = source.removeprefix('hf:').split('/', 2)
        repo = f'{owner}/{repo_name}'
        names = huggingface_hub.HfApi().list_repo_files(repo, repo_type='dataset')
    except Exception as e:
        raise InputError(f"{source} cannot be listed ({type(e).__name__}: {first_line(e)}). it is to be "
              "hf:OWNER/NAME/PATTERN, and needs pip install huggingface_hub and the network; some sets want "
              "you to accept their terms and to log in: hf auth login")
    # a pattern of the Hub's matches in folders below as well, but like any other no hidden file
    found = [name for name in names if fnmatch.fnmatch(name, pattern) and os.path.basename(name)[0] != '.']
    found.sort()
    if not found:
        raise InputError(f"{source} fits none of its files ({', '.join(names[:5])}, ...). name a pattern of theirs")
    return [f'hf:{repo}/{name}' for name in found]


def local_path(path):
    """The path of a file on this machine; hf:OWNER/NAME/FILE is downloaded into the Hub's cache."""
    if not path.startswith('hf:'):
        return path
    import huggingface_hub
    owner, repo_name, file = path.removeprefix('hf:').split('/', 2)
    return huggingface_hub.hf_hub_download(f'{owner}/{repo_name}', file, repo_type='dataset')


# -----------------------------------------------------------------------------
# what is in a file. What is wrong with it is a ValueError of one line


def read_text(path, by_line=False):
    """The text of a file, a million characters or a line at a time; each line ends in \\n."""
    opened = gzip.open if path.lower().endswith('.gz') else open
    remedy = (f"Decompress it, or convert it to {KINDS_IN_WORDS}. If it is text in another encoding: "
              f"iconv -f ENCODING -t utf-8 {shlex.quote(path)} > NEW_FILE, with cp1252, gb18030, euc-kr, "
              "utf-16le, ... as ENCODING")
    try:
        check_not_lfs_pointer(path)
        with opened(path, 'rb') as file:
            has_utf16_mark = file.peek(2).startswith((b'\xff\xfe', b'\xfe\xff'))
            f = io.TextIOWrapper(file, 'utf-16' if has_utf16_mark else 'utf-8-sig')
            blocks = f if by_line else iter(lambda: f.read(1 << 20), '')
            try:
                for text in blocks:
                    if '\0' in text:
                        raise InputError(f"{path} is not text in UTF-8 (it has NUL bytes). {remedy}")
                    yield text
            except UnicodeDecodeError as e:
                offset = file.tell() - len(e.object) + e.start  # e.object is what was read last
                byte = e.object[e.start]
                raise InputError(f"{path} is not text in {e.encoding.upper()} (byte 0x{byte:02x} at offset "
                                 f"{offset}). {remedy}")
    except (OSError, EOFError, zlib.error) as e:  # the last two: of a .gz that is cut off or damaged
        raise InputError(f"{path} cannot be read to its end ({first_line(e)}). make it readable, or save or "
                         "download it again")


def read_rows(path):
    """(where it is, the row) for each row of a .jsonl, .json or .parquet."""
    if kind_of(path) == 'parquet':
        yield from read_parquet(path)
        return
    is_array = kind_of(path) == 'json'  # or a single row; held in memory as a whole
    texts = [''.join(read_text(path))] if is_array else read_text(path, by_line=True)
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as e:
            raise InputError(f"{path}, line {number} is not JSON ({first_line(e)}). correct or remove it; a "
                             "file with a row in each line is named .jsonl, one with an array of rows .json")
        if is_array and isinstance(row, list):
            for number, element in enumerate(row, start=1):
                yield f'{path}, row {number}', element
        else:
            yield f'{path}, line {number}', row


def read_parquet(path):
    """The same. If there is a column with the text, only that one is read."""
    import pyarrow.parquet
    number = 0
    check_not_lfs_pointer(path)
    try:
        with pyarrow.parquet.ParquetFile(path) as f:
            columns = None
            if not chat and text_key in f.schema_arrow.names:
                columns = [text_key]
            for batch in f.iter_batches(256, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f'{path}, row {number}', row
    except Exception as e:
        raise InputError(f"{path} cannot be read to its end ({first_line(e)}). save or download it again")


# -----------------------------------------------------------------------------
# documents

# characters that are encoded at once: more than most books. Hugging Face's take 150 bytes of memory for each
LONGEST_TEXT = 1 << 22
HASHED = 1 << 16  # the characters at a document's beginning that decide whether it goes to train or val


def read_documents(paths, notes):
    """(begins, text, path) for the documents of all files, in order. A very long one comes as several texts,
    and only the first of them begins one. notes: a Counter of what should be told."""
    for path in paths:
        path = local_path(path)
        if kind_of(path) in ROW_KINDS:
            texts = read_texts(path, notes)
        else:
            texts = divide_at_markers(path, notes)
        begins = True
        held = ''  # of the document
        for text, is_end in texts:
            held += text
            while len(held) > LONGEST_TEXT:
                # cut between a letter and a space: no pattern of a tokenizer joins the two, or looks back
                found = re.match(r'.*[^\W\d_](?=[ \n\r\t])', held[:LONGEST_TEXT], re.DOTALL)
                cut = found.end() if found else LONGEST_TEXT
                yield begins, held[:cut], path
                begins = False
                held = held[cut:]
            if is_end:
                if held:
                    yield begins, held, path
                held = ''
                begins = True


def divide_at_markers(path, notes):
    """(text, whether a document ends with it) of plain text, in which <|endoftext|> separates documents, as
    TinyStories has it, each on a line of its own."""
    held = ''  # the end of a block, where a marker and its \n may begin
    for block in read_text(path):
        *ended, rest = re.split(r'<\|endoftext\|>(?!\Z)\n?', held + block)
        for text in ended:
            yield text, True
        notes['markers'] += len(ended)
        held = rest[-len(END_OF_TEXT):]
        yield rest[:-len(END_OF_TEXT)], False
    notes['markers'] += held == END_OF_TEXT
    yield held.removesuffix(END_OF_TEXT), True


def read_texts(path, notes):
    """(text, True) of the rows that have one."""
    for where, row in read_rows(path):
        if not isinstance(row, dict):
            raise InputError(f"{where} is no row with a text ({str(row)[:60]!r}). a row is an object: "
                             f"{{{text_key!r}: ...}}; if the file is an array of them, name it .json")
        text = row.get(text_key, 0)
        if text is None:  # as an empty one
            continue
        if not isinstance(text, str):
            raise InputError(f"{where} has no text under {text_key!r} (its keys: {', '.join(row)}). name "
                             "the right one with --text_key; if it is a conversation, add --chat")
        if text.rstrip().endswith(END_OF_TEXT):
            notes['end in marker'] += 1
        # JSON can hold half of a surrogate pair, which is no character: it becomes U+FFFD
        yield without_surrogates(text), True


@dataclasses.dataclass
class Piece:
    shard: str  # what its files have behind train or val in their names, '_000000'; '' if it is the only one
    are_few: bool  # whether all pieces together have few documents
    head: str  # the beginning of its first document, which may be in an earlier piece
    documents: list  # (begins, text, path); the texts are in UTF-8, which takes the least memory


def gather_pieces(documents, n_bytes, are_few):
    """Yield pieces with n_bytes of text each, or a little more."""
    number = 0
    piece = Piece('', are_few, '', [])
    filled = 0
    for begins, text, path in documents:
        if begins:
            head = text[:HASHED]
        if filled >= n_bytes:
            piece.shard = f'_{number:06d}'
            yield piece
            number += 1
            piece = Piece('', are_few, head, [])
            filled = 0
        content = text.encode()
        piece.documents.append((begins, content, path))
        filled += len(content)
    if number:
        piece.shard = f'_{number:06d}'
    yield piece


# -----------------------------------------------------------------------------
# train and val


def has_few_documents(paths, val_fraction):
    """Return whether all files together have so few documents that val might get none."""
    n_documents = 0
    if val_fraction > 0:
        for begins, text, path in read_documents(paths, collections.Counter()):
            n_documents += begins
            if n_documents * val_fraction >= 5:
                return False
    return True


def divide_splits(piece, val_fraction):
    """(split, begins, text, path) for the documents of a piece: by a hash of how each begins, so that it
    stays where it is when others are added. If there are few in all, val is the end of the text of each
    piece, as in nanoGPT."""
    if piece.are_few:
        n_characters = sum(len(content.decode()) for begins, content, path in piece.documents)
        left = int((1 - val_fraction) * n_characters)  # for train
    split = split_by_hash(piece.head, val_fraction)
    for begins, content, path in piece.documents:
        text = content.decode()
        if not piece.are_few:
            if begins:
                split = split_by_hash(text, val_fraction)
            yield split, begins, text, path
            continue
        n_train = min(left, len(text))
        left -= n_train
        if n_train > 0:
            yield 'train', begins, text[:n_train], path
        if n_train < len(text):
            yield 'val', begins and n_train == 0, text[n_train:], path


def split_by_hash(text, val_fraction):
    digest = hashlib.blake2b(text[:HASHED].encode(), digest_size=8).digest()
    return 'val' if int.from_bytes(digest, 'big') < val_fraction * 2**64 else 'train'


# -----------------------------------------------------------------------------
# shards

COUNTS = ['tokens', 'bytes', 'token_bytes', 'documents', 'lost_characters']


def dtype_of(tok):
    return np.dtype('<u2' if tok.n_vocab <= 1 << 16 else '<u4')


def encode_shard(piece, folder):
    """Write the ids of a piece to train_00000k.bin and val_00000k.bin, then a record of what is in them: a
    shard that has one is whole, and is not made again. Returns the record, {split: what meta.json says of
    its file}."""
    record_path = os.path.join(folder, f'shard{piece.shard}.json')
    record = read_json(record_path)
    if record:
        return record
    meta, tok = read_begun(folder)
    dtype = dtype_of(tok)
    token_bytes = tok.token_bytes()
    separator = b''
    if meta['end_of_text'] is not None:
        separator = np.array(meta['end_of_text'], dtype).tobytes()
    content = collections.defaultdict(bytearray)
    counts = collections.defaultdict(collections.Counter)
    for split, begins, text, path in divide_splits(piece, meta['plan']['val_fraction']):
        try:
            ids = tok.encode(text)
        except ValueError as e:
            raise InputError(f"{path}: {first_line(e)}. {OTHER_TOKENIZER}")
        if begins:
            content[split] += separator
        content[split] += ids.astype(dtype).tobytes()
        counts[split]['documents'] += begins
        counts[split]['bytes'] += len(text.encode())
        # a tokenizer of Hugging Face may drop text: then the bytes of its tokens are not those of the text
        counts[split]['token_bytes'] += int(token_bytes[ids].sum())
        counts[split]['lost_characters'] += tok.count_lost(text, ids)
    for split, ids in content.items():
        if not ids:
            continue
        file = f'{split}{piece.shard}.bin'
        write_whole(os.path.join(folder, file), ids)
        record[split] = {'file': file, 'sha256': hashlib.sha256(ids).hexdigest(),
                         'tokens': len(ids) // dtype.itemsize, **counts[split]}
    write_json(record_path, record)
    return record


def encode_shards(pieces, n_processes, folder):
    """The record of each shard, in order."""
    executor = None
    waiting = collections.deque()  # one more than there are processes, so that none of them has to wait
    try:
        for piece in pieces:
            if n_processes == 1 or not piece.shard:
                yield encode_shard(piece, folder)
                continue
            if executor is None:
                # forks of a process without threads; of one with torch in it they could hang
                context = multiprocessing.get_context('forkserver' if sys.platform == 'linux' else 'spawn')
                executor = concurrent.futures.ProcessPoolExecutor(n_processes, context, follow_parent)
            waiting.append(executor.submit(encode_shard, piece, folder))
            if len(waiting) > n_processes:
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()
    except concurrent.futures.BrokenExecutor:
        raise InputError("a process that encodes was killed, perhaps for lack of memory. run the same "
                         "command with fewer --processes: it goes on")
    finally:
        for process in multiprocessing.active_children():  # after an error they would go on for minutes
            process.terminate()
        if executor is not None:
            executor.shutdown(cancel_futures=True)


def choose_processes():
    """Return how many processes encode: --processes, or one per core that this process may use."""
    n_cores = os.cpu_count()
    if hasattr(os, 'sched_getaffinity'):
        n_cores = len(os.sched_getaffinity(0))  # a job on a cluster gets a few of the machine's cores
    n_processes = processes or n_cores
    if sys.platform == 'win32':
        n_processes = min(n_processes, 61)  # ProcessPoolExecutor's limit there
    return n_processes


def follow_parent():
    """In a process that encodes: it ends with the first one, also when that is killed; Ctrl-C is for that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=exit_after_parent, daemon=True).start()


def exit_after_parent():
    multiprocessing.parent_process().join()
    os._exit(1)


# -----------------------------------------------------------------------------
# the tokenizer

OTHER_TOKENIZER = "use another one: --tokenizer=byte, gpt2 or bpe:8192, which have all characters"


def choose_tokenizer(spec, paths):
    """The tokenizer that --tokenizer names; a vocabulary that is learned is learned from the files."""
    if not spec:
        sizes = [os.path.getsize(path) for path in paths if os.path.isfile(path)]  # not those of the Hub
        is_small = len(sizes) == len(paths) and sum(sizes) < 1e6
        spec = 'char' if is_small and not chat else 'gpt2'
        others = 'byte, data/NAME, hf:FOLDER' if chat else 'char, byte, gpt2, bpe:8192'
        print0(f"tokenizer {spec}. also: --tokenizer={others}")
    if chat and (spec == 'char' or spec.startswith('bpe:')):
        raise InputError(f"--tokenizer={spec} learns a vocabulary from plain text, not from conversations. "
                         "use the tokenizer of the model (data/NAME, a checkpoint, hf:FOLDER), byte or gpt2")
    if spec == 'char':
        chars = set()
        n_documents = 0
        for begins, text, _ in read_documents(paths, collections.Counter()):
            chars.update(text)
            n_documents += begins
        state = {'kind': 'char', 'chars': ''.join(sorted(chars)), 'added': []}
        if n_documents > 1:
            state['added'].append(END_OF_TEXT)
    elif spec.startswith('bpe:'):
        size = spec.removeprefix('bpe:')
        if not size.isdecimal():
            raise InputError(f"no size of a vocabulary: --tokenizer={spec}. Write a number, as in bpe:8192")
        print0(f"learning {size} tokens")
        state = learn_bpe(int(size), texts_to_learn_from(paths)).state()
    elif spec == 'byte':
        state = {'kind': 'byte'}
    elif spec.startswith('hf:'):
        state = huggingface.read_tokenizer(spec.removeprefix('hf:'))
    elif os.path.isdir(spec) and bin_files(spec, 'train'):
        state = read_tokenizer_files(spec, read_meta(spec))
    elif spec.endswith('.pt') or checkpoint.exists(spec):
        state = checkpoint.tokenizer_state_of(checkpoint.read(checkpoint.find(spec)))
    elif spec.endswith(('.json', '.model')):
        state = hugging_face_state(spec)
    else:
        state = {'kind': 'tiktoken', 'name': spec}
    tok = make_tokenizer(state)
    if chat:
        tok = make_tokenizer(with_chat_tokens(tok.state()))
    return tok


@functools.cache  # GPT-2's takes a quarter of a second to make
def read_begun(folder):
    """(what begun.json says, its tokenizer)"""
    meta = read_json(os.path.join(folder, 'begun.json'))
    return meta, make_tokenizer(read_tokenizer_files(folder, meta))


def texts_to_learn_from(paths):
    """The beginnings of at most 64 of the files, 67 million characters together."""
    chosen = paths[::len(paths) // 64 + 1]
    for path in chosen:
        left = (1 << 26) // len(chosen)
        for _, text, _ in read_documents([path], collections.Counter()):
            for start in range(0, min(left, len(text)), 1 << 16):  # longer ones take much memory
                yield text[start:start + (1 << 16)]
            left -= len(text)
            if left <= 0:
                break


# -----------------------------------------------------------------------------
# the splits, in the folder `work`; what meta.json says of them is added to `meta`


def write_json(path, value):
    write_whole(path, json.dumps(value, indent=1).encode())


def make_text(work, meta, paths):
    notes = collections.Counter()
    are_few = has_few_documents(paths, meta['plan']['val_fraction'])
    pieces = gather_pieces(read_documents(paths, notes), shard_mb * 1e6, are_few)
    shards = {'train': [], 'val': []}
    n_train = 0
    for record in encode_shards(pieces, choose_processes(), work):
        for split, entry in record.items():
            shards[split].append(entry)
        n_train = sum(entry['tokens'] for entry in shards['train'])
        print0(f"{n_train:,} tokens to train on")
        if max_tokens is not None and n_train >= max_tokens:
            break
    if n_train < 2:
        raise InputError("too little text: none to train on. use more, or a smaller --val_fraction")
    for split, entries in shards.items():
        if entries:
            meta['splits'][split] = {'shards': entries}
            for key in COUNTS:
                meta['splits'][split][key] = sum(entry[key] for entry in entries)

    if notes['markers']:
        print0(f"{END_OF_TEXT} separates the documents of plain text ({notes['markers']:,} times)")
    if notes['end in marker']:
        print0(f"note: {notes['end in marker']:,} texts end in {END_OF_TEXT}. in a row that is text, and not "
               "the token, which stands before each document anyway: remove it from the rows")
    n_lost = sum(entry['lost_characters'] for entry in meta['splits'].values())
    if n_lost:
        print0(f"note: the tokenizer loses {n_lost:,} characters of the text. {OTHER_TOKENIZER}")


def make_conversations(work, meta, paths):
    """Beside the ids of a split, train.bin, lie train.mask, a bit per id, set if the assistant says it, and
    train.starts, where each conversation begins. All of them are in memory."""
    tok = make_tokenizer(read_tokenizer_files(work, meta))
    form = chat_format(tok)
    conversations = []
    skipped = collections.Counter()  # rows by reason
    first = {}  # the first row for each reason
    unread = collections.Counter()  # rows by key
    for path in paths:
        for where, row in read_rows(local_path(path)):
            try:
                conversations.append(messages_of(row))
                unread.update(unread_keys(row))
            except ValueError as e:
                reason = str(e)
                skipped[reason] += 1
                first.setdefault(reason, where)
    if skipped:
        print0(f"note: {skipped.total():,} rows are skipped:")
        for reason, n in skipped.most_common(9):
            print0(f"  {n:,}: {reason} (first: {first[reason]})")
    if unread:
        keys = [f"{key} ({n:,} rows)" for key, n in unread.most_common(9)]
        print0(f"note: these keys are not read: {', '.join(keys)}")

    share = meta['plan']['val_fraction']
    n_train = round((1 - share) * len(conversations))
    are_few = len(conversations) * share < 5  # so few that val might have none: it is the end
    rendered = {'train': [], 'val': []}
    for number, messages in enumerate(conversations):
        if are_few:
            split = 'train' if number < n_train else 'val'
        else:
            said = [[message['role'], message['content']] for message in messages]
            key = json.dumps(said, ensure_ascii=False)
            split = split_by_hash(key, share)
        rendered[split].append(form.render(messages))
    if not rendered['train']:
        raise InputError("no conversation to train on. give more of them, see docs/chat.md, or a smaller "
                         "--val_fraction")

    meta['chat'] = form.template
    for split, pairs in rendered.items():
        if not pairs:
            continue
        ids = np.concatenate([ids for ids, mask in pairs])
        mask = np.concatenate([mask for ids, mask in pairs])
        lengths = np.array([len(ids) for ids, mask in pairs])
        starts = np.cumsum(lengths) - lengths
        files = {
            f'{split}.bin': ids.astype(dtype_of(tok)).tobytes(),
            f'{split}.mask': np.packbits(mask, bitorder='little').tobytes(),
            f'{split}.starts': starts.astype('<u8').tobytes(),
        }
        for file, content in files.items():
            write_whole(os.path.join(work, file), content)
            meta['checksums'][file] = hashlib.sha256(content).hexdigest()
        meta['splits'][split] = {
            'tokens': len(ids), 'bytes': int(tok.token_bytes()[ids].sum()), 'documents': len(pairs),
            'sha256': meta['checksums'][f'{split}.bin'],
            'mask_sha256': hashlib.sha256(files[f'{split}.mask'] + files[f'{split}.starts']).hexdigest()}


# -----------------------------------------------------------------------------
# the script

# what a dataset has besides meta.json
OUR_FILES = re.compile(
    r'(train|val)(_\d{6})?\.(bin|mask|starts)|meta\.pkl|tokenizer(_config)?\.(json|tiktoken)')


def move_into_place(folder, work):
    """Move a whole dataset from `work` into its folder, in place of what was there. While `work` has a
    meta.json, dataset.py reads neither of them; after a kill this is done again."""
    meta = read_json(os.path.join(work, 'meta.json'))
    names = list(meta['checksums'])
    for entry in meta['splits'].values():
        names += [shard['file'] for shard in entry.get('shards', [])]
    for name in names:
        if os.path.exists(os.path.join(work, name)):  # not moved yet
            os.replace(os.path.join(work, name), os.path.join(folder, name))
    for name in os.listdir(folder):
        if OUR_FILES.fullmatch(name) and name not in names:  # of what was there
            os.remove(os.path.join(folder, name))
    os.replace(os.path.join(work, 'meta.json'), os.path.join(folder, 'meta.json'))
    shutil.rmtree(work, ignore_errors=True)


def fetch_benchmark():
    url = BENCHMARKS[name]
    path = os.path.join(data_dir or DATA_DIR, os.path.basename(url))
    fetch(url, path)
    if path.endswith('.zip'):
        with zipfile.ZipFile(path) as f:
            f.extractall(os.path.dirname(path))
    print0(f"{path} is there. measure on it: python eval.py --tasks={name}")


def main():
    # which dataset, of which files
    dataset = name
    sources = input
    if sources is not None and ('name' not in given or os.path.isfile(name)):
        raise InputError("--input needs a name for the dataset. Write it first, and all files behind --input: "
              "python prepare.py NAME --input=FILE --input=FILE")
    if sources is None and name not in NAMED_SETS and os.path.exists(name):
        file = os.path.basename(os.path.abspath(name))
        dataset = os.path.splitext(file.removesuffix('.gz'))[0]
        sources = [name]
    if sources is None and (chat or dataset not in NAMED_SETS):
        raise InputError(f"no such file or folder, and no set of that name ({dataset}). name a file, here or with "
              f"--input=PATH, or one of {', '.join([*NAMED_SETS, *BENCHMARKS])}, which are no conversations")
    folder = folder_of(dataset, data_dir)
    work = os.path.join(folder, 'unfinished')
    named = NAMED_SETS.get(dataset, NamedSet('', ''))
    spec = tokenizer or named.tokenizer
    check_packages(sources or [named.source], spec)
    if sources is not None:
        paths = find_files(sources)
    elif named.source.startswith('hf:'):
        paths = find_hub_files(named.source)
    elif named.source:
        paths = [os.path.join(folder, 'input.txt')]
        fetch(named.source, paths[0])
    else:
        paths = find_pystdlib()
    check_packages(paths)

    # what decides the result: with the same an earlier preparation is continued, or is done
    share = named.val_fraction if val_fraction is None else val_fraction
    stamps = []  # which change when the content of a file does
    for path in [*paths, spec]:
        if os.path.isfile(path):
            found = os.stat(path)
            path = f'{os.path.abspath(path)} {found.st_size} {found.st_mtime_ns}'
        stamps.append(path)
    files = hashlib.sha256('\n'.join(stamps).encode('utf-8', 'surrogateescape')).hexdigest()
    plan = {'tokenizer': spec, 'text_key': text_key, 'val_fraction': share, 'max_tokens': max_tokens,
            'shard_mb': shard_mb, 'chat': chat, 'files': files}

    with lock_folder(folder):
        try:
            meta = make_dataset(folder, work, plan, paths)
        except ValueError as e:  # of the text or the tokenizer
            if not glob.glob('shard_*.json', root_dir=work):  # from which it could go on
                shutil.rmtree(work, ignore_errors=True)
            raise InputError(str(e))
        except OSError as e:  # a full disk
            raise InputError(f"{first_line(e)}. mend that, and run the same command again: it goes on")

    for split, entry in meta['splits'].items():
        print0(f"{folder}, {split}: {entry['tokens']:,} tokens, {entry['documents']:,} documents, "
               f"{entry['bytes']:,} bytes of text")
    state = meta['tokenizer']
    print0(f"tokenizer {state.get('name', state['kind'])}, {meta['vocab_size']:,} ids")
    config = 'config/finetune_chat.py' if chat else named.config
    command = ['python', 'train.py', config, f'--dataset={dataset}']
    if data_dir:
        command.append(f'--data_dir={data_dir}')
    print0(f"train on it: {shlex.join(command)}")


def make_dataset(folder, work, plan, paths):
    """Make the dataset in `work`, then move it into its folder, unless it is there. Returns its meta.json,
    which is called begun.json as long as shards can be missing."""
    if os.path.exists(os.path.join(work, 'meta.json')):  # killed while it moved its files
        move_into_place(folder, work)
    if bin_files(folder, 'train') and not overwrite:
        meta = read_json(os.path.join(folder, 'meta.json'))
        if meta.get('plan') != plan:
            raise InputError(f"{folder} holds another dataset ({meta.get('command', 'made elsewhere')}), or the text "
                  "has changed. give this one another name, or replace that one with --overwrite")
        print0(f"{folder} is there already. --overwrite makes it again")
        return meta

    begun = os.path.join(work, 'begun.json')
    meta = read_json(begun)
    if meta.get('plan') == plan:
        print0("going on from the shards that are there")
    else:
        shutil.rmtree(work, ignore_errors=True)
        os.makedirs(work)
        tok = choose_tokenizer(plan['tokenizer'], paths)
        meta = write_tokenizer_files(work, tok, dtype_of(tok))
        if os.path.basename(folder) in AS_NANOGPT:
            meta['end_of_text'] = None  # no id stands before each document
        if tok.state()['kind'] == 'char':  # the vocabulary for what reads nanoGPT's folders
            stoi = {char: id for id, char in enumerate(tok.state()['chars'])} | tok.special
            itos = {id: char for char, id in stoi.items()}
            content = pickle.dumps({'vocab_size': tok.n_vocab, 'itos': itos, 'stoi': stoi})
            write_whole(os.path.join(work, 'meta.pkl'), content)
            meta['checksums']['meta.pkl'] = hashlib.sha256(content).hexdigest()
        meta['splits'] = {}
        meta['command'] = shlex.join(['python', 'prepare.py'] + sys.argv[1:])
        meta['plan'] = plan
        write_json(begun, meta)
    if chat:
        make_conversations(work, meta, paths)
    else:
        make_text(work, meta, paths)
    write_json(begun, meta)
    os.replace(begun, os.path.join(work, 'meta.json'))  # from here on nothing can go on from these shards
    move_into_place(folder, work)
    return meta


if __name__ == '__main__':
    try:
        if name in BENCHMARKS:
            fetch_benchmark()
        else:
            main()
    except KeyboardInterrupt:
        print0("stopped. the same command goes on from the shards that are there")
        sys.exit(130)
