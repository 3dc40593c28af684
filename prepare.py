"""
Turn text into a dataset: the folder data/<name>/ with train.bin, val.bin and meta.json, which train.py reads.

    $ python prepare.py                        # the source code of this Python's library: no download
    $ python prepare.py shakespeare_char       # a set that has a name; the table below has all of them
    $ python prepare.py mystories.txt          # a text of your own becomes data/mystories
    $ python prepare.py chats.json --chat      # conversations become data/chats
    $ python prepare.py mine --input='texts/*.jsonl' --tokenizer=bpe:8192 --val_fraction=0.01
    $ python prepare.py mine --input='hf:OWNER/NAME/data/train-*.parquet'    # files of the Hugging Face Hub

What is read, and what a document is: docs/data.md. The input is divided into pieces of about 100 MB, and each
becomes a shard, so after a kill or on a full disk the same command makes those that are missing.
"""

from configurator import configure, error

# -----------------------------------------------------------------------------
name = 'pystdlib'  # of the dataset: one of the table below, another one with --input, or a file with text
input: list = None  # file, folder or pattern, or hf:OWNER/NAME/PATTERN; may be given several times
tokenizer: str = None  # 'char', 'byte', 'gpt2' or another of tiktoken's, 'bpe:8192' (learned from the text),
# a tokenizer.json, 'hf:FOLDER_OR_NAME' of a model, the folder of a dataset, a ckpt.pt. None: that of the
# named set; else gpt2 for conversations and above 1 MB of text, char below
text_key = 'text'  # where the text is in a row of .jsonl or .json; the column of .parquet
chat = False  # the input is conversations, see docs/chat.md
bad_rows = 'stop'  # at a row that is no conversation; 'skip': leave such rows out
val_fraction: float = None  # share of the documents, chosen by a hash, for val.bin; of few documents it is
# the end of their text. None: that of the named set, else 0.1
max_tokens: int = None  # stop after the shard with which train has so many
shard_mb = 100.0  # megabytes of input for a shard
processes: int = None  # that encode. None: one per core
overwrite = False  # replace a dataset that was made in another way
data_dir: str = None  # where the datasets are. None: data/ beside this file
# -----------------------------------------------------------------------------
if __name__ == '__main__':  # the processes that encode import this file, too
    config, given = configure(globals(), positional='name')

import codecs
import collections
import concurrent.futures
import dataclasses
import fnmatch
import functools
import glob
import gzip
import hashlib
import http.client
import io
import itertools
import json
import math
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
import time
import urllib.request
import zipfile
import zlib

import numpy as np

import checkpoint
import huggingface
from chat import chat_format, messages_of, with_chat_tokens
from common import first_line, print0, read_json, replacing, write_whole
from dataset import DATA_DIR, bin_files, folder_of, read_meta
from tokenizer import (
    END_OF_TEXT, HFTokenizer, hugging_face_state, learn_bpe, make_tokenizer, read_tokenizer_files,
    write_tokenizer_files)

# -----------------------------------------------------------------------------
# sets that have a name


@dataclasses.dataclass
class NamedSet:
    source: str  # a URL, or hf:OWNER/NAME/PATTERN; '': the files of this Python
    tokenizer: str = 'gpt2'
    val_fraction: float = 0.1
    config: str = ''  # that trains on it


TINYSHAKESPEARE = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'
OPENWEBTEXT = 'hf:Skylion007/openwebtext/plain_text/*.parquet'
FINEWEB = 'hf:HuggingFaceFW/fineweb/sample/10BT/*.parquet'
FINEWEB_EDU = 'hf:HuggingFaceFW/fineweb-edu/sample/10BT/*.parquet'
TINYSTORIES = 'hf:roneneldan/TinyStories/data/train-*.parquet'
NAMED_SETS = {
    'pystdlib': NamedSet('', 'byte', config='config/quickstart.py'),
    'shakespeare_char': NamedSet(TINYSHAKESPEARE, 'char', config='config/train_shakespeare_char.py'),
    'shakespeare': NamedSet(TINYSHAKESPEARE, config='config/finetune_shakespeare.py'),
    'openwebtext': NamedSet(OPENWEBTEXT, val_fraction=0.0005, config='config/train_gpt2.py'),
    'fineweb': NamedSet(FINEWEB, val_fraction=0.0005, config='config/train_fineweb_124m.py'),
    'fineweb_edu': NamedSet(FINEWEB_EDU, val_fraction=0.0005, config='config/train_edu_124m.py'),
    'tinystories': NamedSet(TINYSTORIES, val_fraction=0.0005),
}
# made as nanoGPT makes them, byte for byte
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
    except (OSError, http.client.HTTPException) as e:
        error(f"{url} cannot be downloaded ({first_line(e)}). put that file at {path}, and run it again")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    write_whole(path, content)


def fetch_benchmark(benchmark, folder):
    """Put the files of a benchmark into `folder`, where eval.py and train.py look for them."""
    path = os.path.join(folder, os.path.basename(BENCHMARKS[benchmark]))
    fetch(BENCHMARKS[benchmark], path)
    if path.endswith('.zip'):
        with zipfile.ZipFile(path) as f:
            f.extractall(folder)
    print0(f"{path} is there. measure on it: python eval.py --tasks={benchmark}")


# -----------------------------------------------------------------------------
# which files

ROW_KINDS = ['jsonl', 'json', 'parquet']
TEXT_KINDS = ['txt', 'md', *ROW_KINDS]  # what is read of a folder
PANDOC = 'make text of it: pandoc -t plain --wrap=none {0} -o {1}.txt'
UNPACK = 'unpack it, and name the files that were in it'
OTHER_KINDS = {
    'html': PANDOC, 'htm': PANDOC, 'epub': PANDOC, 'docx': PANDOC, 'odt': PANDOC, 'rtf': PANDOC,
    'pdf': 'make text of it: pdftotext {0} {1}.txt',
    'csv': 'make rows of it: python -c "import sys, pandas as pd; pd.read_csv(sys.argv[1]).to_parquet('
           'sys.argv[2])" {0} {1}.parquet',
    'zip': UNPACK, 'tar': UNPACK, 'tgz': UNPACK, 'bz2': UNPACK, 'xz': UNPACK, 'zst': UNPACK, '7z': UNPACK,
    'bin': 'it holds token ids: put it into data/NAME as train.bin, see data/README.md',
    'npy': 'it holds token ids: put it into data/NAME, where train.py reads it',
}


def kind_of(path):
    """'txt', 'jsonl', ...: a file's ending; of a compressed file the one before .gz."""
    base, ending = os.path.splitext(os.path.basename(path).lower().removesuffix('.gz'))
    return ending[1:]


def find_files(sources):
    """The paths of files with text in `sources`: paths, folders, patterns, hf:OWNER/NAME/PATTERN. A file is
    read once, under whatever names it is found."""
    found = {}  # by their real paths
    for source in sources:
        if source.startswith('hf:'):
            for path in find_hub_files(source):
                found[path] = path
            continue
        pattern = os.path.expanduser(source)
        matches = [pattern] if os.path.lexists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not matches:
            error(f"no such file or folder ({source}). name the one with your text")
        chosen = []
        others = []
        for path in matches:
            if os.path.isdir(path):
                inside = list(files_below(path))
                chosen += [file for file in inside if kind_of(file) in TEXT_KINDS]
                others += [file for file in inside if kind_of(file) not in TEXT_KINDS]
            elif kind_of(path) in OTHER_KINDS:
                others.append(path)
            else:
                chosen.append(path)  # any other kind is plain text
        if not chosen:
            error(nothing_to_read(source, others))
        if others:
            print0(f"skipping {len(others):,} files of other kinds in {source}, such as {others[0]}")
        for path in chosen:
            found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def nothing_to_read(source, others):
    """What to say where the files of a source, `others`, are none that are read."""
    if not others:
        return f"no files in {source}. name the file or folder with your text"
    base = os.path.splitext(others[0])[0]
    remedy = OTHER_KINDS.get(kind_of(others[0]), 'name its files, to read them as plain text: --input=FILE')
    remedy = remedy.format(shlex.quote(others[0]), shlex.quote(base))
    return f"no .txt, .md, .jsonl, .json or .parquet ({others[0]}). {remedy}"


def files_below(root, leave_out=()):
    """The files in a folder and the folders below, sorted, but for hidden ones."""
    for path, folders, files in os.walk(root):
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
    """'hf:OWNER/NAME/FILE' for each file of a Hub dataset that fits OWNER/NAME/PATTERN, by default the
    .parquet ones."""
    owner, _, rest = source.removeprefix('hf:').partition('/')
    repo_name, _, pattern = rest.partition('/')
    repo = f'{owner}/{repo_name}'
    try:
        import huggingface_hub
        names = huggingface_hub.HfApi().list_repo_files(repo, repo_type='dataset')
    except ImportError:
        error("the Hugging Face Hub needs a package (huggingface_hub). pip install huggingface_hub")
    except Exception as e:  # the network has many ways to fail, and they have no common class
        error(f"{source} cannot be listed ({type(e).__name__}: {first_line(e)}). check the name and the "
              "network; some sets want you to accept their terms and to log in: hf auth login")
    found = sorted(name for name in names if fnmatch.fnmatch(name, pattern or '*.parquet'))
    if not found:
        error(f"{source} fits none of its files ({', '.join(names[:5])}, ...). name a pattern of theirs")
    return [f'hf:{repo}/{name}' for name in found]


def local_path(path):
    """The path of a file on this machine; hf:OWNER/NAME/FILE is downloaded into the Hub's cache."""
    if not path.startswith('hf:'):
        return path
    import huggingface_hub
    owner, repo_name, file = path.removeprefix('hf:').split('/', 2)
    try:
        return huggingface_hub.hf_hub_download(f'{owner}/{repo_name}', file, repo_type='dataset')
    except Exception as e:
        raise ValueError(f"{path} cannot be downloaded ({type(e).__name__}: {first_line(e)}). run the same "
                         "command again later: it goes on with this file")


# -----------------------------------------------------------------------------
# what is in a file. What is wrong with it is a ValueError of one line

LARGEST_JSON = 200e6  # bytes of a file that is one JSON value, and so in memory as a whole


@dataclasses.dataclass
class Part:
    """A file, or the bytes of one from start to stop."""
    path: str
    start: int = 0
    stop: int = sys.maxsize
    continues: bool = False  # whether a document goes on at `start`


def read_blocks(part):
    """The bytes of a part, decompressed, a megabyte at a time."""
    opened = gzip.open if part.path.lower().endswith('.gz') else open
    left = part.stop - part.start
    try:
        with opened(part.path, 'rb') as f:
            f.seek(part.start)
            while left > 0:
                block = f.read(min(left, 1 << 20))
                if not block:
                    break
                left -= len(block)
                yield block
    except (OSError, EOFError, zlib.error) as e:  # the last two: of a .gz that is cut off or damaged
        raise ValueError(f"{part.path} cannot be read to its end ({first_line(e)}). make it readable, or "
                         "save or download it again")


def encoding_of(path):
    """'utf-16' for a file that begins with its byte order mark, else 'utf-8'."""
    start = next(read_blocks(Part(path, stop=2)), b'')
    return 'utf-16' if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else 'utf-8'


def read_text(part):
    """The text of a part, a block at a time; each line ends in \\n."""
    decoder = codecs.getincrementaldecoder(encoding_of(part.path))()
    decoder = io.IncrementalNewlineDecoder(decoder, translate=True)
    end = part.start  # of what was read
    is_first = part.start == 0
    for block in itertools.chain(read_blocks(part), [b'']):
        end += len(block)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as e:
            offset = end - len(e.object) + e.start
            what = f"byte 0x{e.object[e.start]:02x} at offset {offset}"
            raise ValueError(f"{part.path} is not {e.encoding.upper()} ({what}). if it is text, convert it: "
                             f"{iconv('ENCODING', part.path)}, with cp1252, gb18030, euc-kr, ... as ENCODING")
        if '\0' in text:
            raise ValueError(f"{part.path} holds NUL characters, so it is no text in UTF-8. if it is UTF-16 "
                             f"without a mark: {iconv('utf-16le', part.path)}")
        if is_first and text:
            text = text.removeprefix('\ufeff')
            is_first = False
        yield text


def iconv(encoding, path):
    base, ending = os.path.splitext(path)
    return f"iconv -f {encoding} -t utf-8 {shlex.quote(path)} > {shlex.quote(base + '.utf8' + ending)}"


def read_rows(part, column=None):
    """(where it is, the row) for each row of a .jsonl, .json or .parquet, of which only `column` is read."""
    if kind_of(part.path) == 'parquet':
        yield from read_parquet(part.path, column)
    elif kind_of(part.path) == 'json' and is_one_json_value(part.path):
        yield from read_json_value(part.path)
    else:
        behind = f' behind byte {part.start:,}' if part.start else ''
        for number, line in enumerate(read_lines(part), start=1):
            if not line.strip():
                continue
            where = f'{part.path}{behind}, line {number}'
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as e:
                raise ValueError(f"{where} is not JSON ({first_line(e)}). correct or remove that line; in "
                                 ".jsonl each line is a row, in .json the file may be an array of them")
            yield where, row


def read_lines(part):
    rest = ''
    for block in read_text(part):
        *lines, rest = (rest + block).split('\n')
        yield from lines
    yield rest


def is_one_json_value(path):
    """Whether a .json is one value, as a rule an array of rows, and not a row in each line."""
    head = next(read_text(Part(path))).lstrip()
    return head.startswith('[') or head.split('\n')[0].strip() == '{'


def read_json_value(path):
    if os.path.getsize(path) > LARGEST_JSON:
        raise ValueError(f"{path} is one JSON value of more than {LARGEST_JSON / 1e6:.0f} MB. make a line of "
                         f"each row: jq -c '.[]' {shlex.quote(path)} > ROWS.jsonl")
    try:
        rows = json.loads(''.join(read_text(Part(path))))
    except (json.JSONDecodeError, RecursionError) as e:
        raise ValueError(f"{path} is not JSON ({first_line(e)}). correct it; if each line is a row, name it "
                         ".jsonl")
    if not isinstance(rows, list):
        rows = [rows]
    for number, row in enumerate(rows, start=1):
        yield f'{path}, row {number}', row


def read_parquet(path, column):
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path} needs a package (pyarrow). pip install pyarrow")
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as f:
            # without that column all are read, so that the error can name them
            columns = [column] if column in f.schema_arrow.names else None
            for batch in f.iter_batches(256, columns=columns, use_threads=False):
                for row in batch.to_pylist():
                    number += 1
                    yield f'{path}, row {number}', row
    except (OSError, pyarrow.lib.ArrowException) as e:
        raise ValueError(f"{path} cannot be read to its end ({first_line(e)}). save or download it again")


# -----------------------------------------------------------------------------
# documents


def read_documents(part, key, notes, split_at='anywhere'):
    """(begins, text, path) for the documents of a part. A long one comes as several texts of about a million
    characters, which are cut where it does not change their ids; only the first of them begins one. notes: a
    dict that counts what should be told."""
    local = dataclasses.replace(part, path=local_path(part.path))
    if kind_of(part.path) in ROW_KINDS:
        texts = read_texts(local, key, notes)
    else:
        texts = divide_at_markers(read_text(local), notes)
    # 'nowhere': Llama 2's tokenizer, for one, puts a space before whatever it is given. So only a text that
    # is longer than most books is cut, as it takes 150 bytes of memory per character
    size = 1 << 24 if split_at == 'nowhere' else 1 << 20
    begins = not part.continues
    held = ''  # of the document
    for text, is_end in texts:
        held += text
        start = 0
        while len(held) - start > size:
            cut = start + find_cut(held[start:start + size + 1], split_at)
            yield begins, held[start:cut], part.path
            begins = False
            start = cut
        held = held[start:]
        if is_end:
            if held:
                yield begins, held, part.path
            held = ''
            begins = True


def find_cut(text, split_at):
    """The last place in a text where it may be cut without changing its ids."""
    cut = 0
    if split_at == 'words':
        # between a letter and a space: no pattern of a tokenizer joins the two, or looks back
        found = re.match(r'.*[^\W\d_](?=[ \n\r\t])', text, re.DOTALL)
        if found:
            cut = found.end()
    elif split_at == 'nowhere':
        cut = text.rfind('\n') + 1
    return cut or len(text) - 1


def divide_at_markers(blocks, notes):
    """(text, whether a document ends with it) of plain text, in which <|endoftext|> separates documents, as
    TinyStories has it, each on a line of its own."""
    held = ''  # the end of a block, where a marker may begin
    follows_marker = False
    for block in itertools.chain(blocks, [None]):
        *ended, rest = (held + (block or '')).split(END_OF_TEXT)
        if block is not None:
            held = rest[-len(END_OF_TEXT) + 1:]
            rest = rest[:-len(END_OF_TEXT) + 1]
        for text in ended:
            yield text.removeprefix('\n') if follows_marker else text, True
            follows_marker = True
            notes['markers'] += 1
        if follows_marker and rest:
            rest = rest.removeprefix('\n')
            follows_marker = False
        yield rest, block is None


def read_texts(part, key, notes):
    """(text, True) of the rows that have one."""
    for where, row in read_rows(part, key):
        if not isinstance(row, dict):
            raise ValueError(f"{where} is no row with a text ({str(row)[:60]!r}). a row is an object: "
                             f"{{{key!r}: ...}}; if the file is an array of them, name it .json")
        text = row.get(key, 0)
        if text is not None and not isinstance(text, str):
            raise ValueError(no_text(where, row, key))
        if text:
            if text[-40:].rstrip().endswith(END_OF_TEXT):
                notes['texts that end in the marker'] += 1
            # JSON can hold half of a surrogate pair, which is no character: it becomes U+FFFD
            yield text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace'), True


def no_text(where, row, key):
    """What to say of a row that has no text where it should be."""
    keys = ', '.join(row)
    if {'messages', 'conversations', 'instruction'} & set(row):
        return f"{where} is a conversation (its keys: {keys}). for a dataset of conversations add --chat"
    if key in row:
        return (f"{where} has a {type(row[key]).__name__} under {key!r}, not a text. name another one with "
                "--text_key, or save it again as text")
    return f"{where} has no text under {key!r} (its keys: {keys}). name the right one with --text_key"


def divide_splits(documents, val_fraction, at_line):
    """(split, begins, text, path) for the documents of a piece: by a hash of how each begins, so that it
    stays where it is when others are added. If there are so few that val might have none, val is the end of
    their text; at most 100 million characters are held for that."""
    documents = iter(documents)
    n_few = math.ceil(5 / val_fraction) if val_fraction else 0
    n_documents = -1
    while n_documents < n_few:
        group = []
        n_documents = 0
        size = 0
        for document in documents:
            group.append(document)
            n_documents += document[0]
            size += len(document[1])
            if n_documents >= n_few or size > 1e8:
                break
        if not group:
            return
        if n_documents < n_few:
            yield from cut_off_end(group, int((1 - val_fraction) * size), at_line)
    split = None
    for begins, text, path in itertools.chain(group, documents):
        if begins or split is None:
            split = split_by_hash(text, val_fraction)
        yield split, begins, text, path


def cut_off_end(documents, n_train, at_line):
    """The same, with the first n_train characters for train; at_line: less, if a line ends near."""
    for begins, text, path in documents:
        if 0 < n_train < len(text):
            cut = text.rfind('\n', 0, n_train) + 1 if at_line else n_train
            if cut < n_train / 2:
                cut = n_train
            yield 'train', begins, text[:cut], path
            yield 'val', False, text[cut:], path
        else:
            yield 'train' if n_train > 0 else 'val', begins, text, path
        n_train -= len(text)


def split_by_hash(text, val_fraction):
    digest = hashlib.blake2b(text[:1 << 16].encode('utf-8', 'replace'), digest_size=8).digest()
    return 'val' if int.from_bytes(digest, 'big') < val_fraction * 2**64 else 'train'


# -----------------------------------------------------------------------------
# pieces of the input, each of which becomes a shard


def plan_pieces(paths, piece_bytes, split_at):
    """[the Parts of each piece], each of about piece_bytes. A .parquet, a compressed file and one of the Hub
    are not divided."""
    pieces = []
    parts = []
    filled = 0
    for path in paths:
        for part, size in divide_file(path, piece_bytes, split_at):
            if parts and filled + size > 1.25 * piece_bytes:
                pieces.append(parts)
                parts = []
                filled = 0
            parts.append(part)
            filled += size
    pieces.append(parts)
    return pieces


def divide_file(path, piece_bytes, split_at):
    """[(Part, its bytes)] of a file."""
    if path.startswith('hf:'):
        return [(Part(path), piece_bytes)]
    size = os.path.getsize(path)
    n = round(size / piece_bytes)
    kind = kind_of(path)
    is_rows = kind in ROW_KINDS
    if (n < 2 or kind == 'parquet' or path.lower().endswith('.gz') or encoding_of(path) == 'utf-16'
            or kind == 'json' and is_one_json_value(path) or not is_rows and split_at == 'nowhere'):
        return [(Part(path), size)]
    parts = []
    start = 0
    with open(path, 'rb') as f:
        for i in range(1, n + 1):
            stop = size
            if i < n:
                f.seek(max(size * i // n, start + 1))
                stop = find_file_cut(f, is_rows)
            if stop > start:
                continues = start > 0 and not is_rows
                parts.append((Part(path, start, stop, continues), stop - start))
            start = stop
    return parts


def find_file_cut(f, is_rows):
    """Where to cut an open file from here on: behind a row; in plain text at the next marker, if one is near,
    else between a letter and a space."""
    if is_rows:
        f.readline()
        return f.tell()
    window = f.read(8 << 20)
    begin = f.tell() - len(window)
    marker = window.find(END_OF_TEXT.encode())
    if marker >= 0:
        return begin + marker  # what follows is the empty rest of the document before
    n_before = 0  # bytes of a character that was begun before
    while n_before < len(window) and window[n_before] & 0xc0 == 0x80:
        n_before += 1
    text = window[n_before:].decode('utf-8', 'ignore')
    found = re.search(r'[^\W\d_](?=[ \n\r\t])', text) or re.search(r'\n|$', text)
    return begin + n_before + len(text[:found.end()].encode())


# -----------------------------------------------------------------------------
# shards

SPLITS = ['train', 'val']


@dataclasses.dataclass
class Job:
    """What a process that encodes has to know."""
    folder: str  # where the shards are written, and the tokenizer is
    text_key: str
    val_fraction: float
    as_nanogpt: bool  # no <|endoftext|>, and val begins inside of a line


def dtype_of(tok):
    return np.dtype('<u2' if tok.n_vocab <= 1 << 16 else '<u4')


def shard_path(folder, split, number):
    return os.path.join(folder, f'{split}_{number:06d}.bin')


def record_path(folder, number):
    return os.path.join(folder, f'shard_{number:06d}.json')


def encode_shard(number, parts, job):
    """Write the ids of a piece of the input to train_00000k.bin and val_00000k.bin, then a record of what is
    in them: a shard that has one is whole. Returns the record."""
    tok = tokenizer_in(job.folder)
    notes = collections.Counter()
    documents = itertools.chain.from_iterable(
        read_documents(part, job.text_key, notes, tok.split_at) for part in parts)
    train = shard_path(job.folder, 'train', number)
    val = shard_path(job.folder, 'val', number)
    own = f'.{os.getpid()}'  # a process of a start that was killed may not have ended yet
    with replacing(train + own) as train_file, replacing(val + own) as val_file:
        writers = {'train': Writer(train_file, tok), 'val': Writer(val_file, tok)}
        for split, begins, text, path in divide_splits(documents, job.val_fraction, not job.as_nanogpt):
            writer = writers[split]
            writer.counts['documents'] += begins
            if begins and not job.as_nanogpt and tok.end_of_text is not None:
                writer.write([tok.end_of_text])
            try:
                ids = tok.encode(text)
            except ValueError as e:
                raise ValueError(f"{path}: {first_line(e)}. {OTHER_TOKENIZER}")
            writer.write(ids)
            writer.counts['bytes'] += len(text.encode('utf-8', 'surrogatepass'))
            notes['characters'] += len(text)
            notes['lost characters'] += tok.count_lost(text, ids)
        record = {'train': writers['train'].close(), 'val': writers['val'].close(), 'notes': notes}
    os.replace(train + own, train)
    os.replace(val + own, val)
    write_whole(record_path(job.folder, number), json.dumps(record).encode())
    return record


class Writer:
    """Appends ids to an open file, and counts."""

    def __init__(self, file, tok):
        self.file = file
        self.dtype = dtype_of(tok)
        self.sha256 = hashlib.sha256()
        self.counts = {'tokens': 0, 'bytes': 0, 'documents': 0}
        # a tokenizer of Hugging Face may drop text: then the bytes of its tokens are not those of the text
        self.token_bytes = None
        if isinstance(tok, HFTokenizer):
            self.token_bytes = tok.token_bytes()
            self.counts['token_bytes'] = 0

    def write(self, ids):
        ids = np.asarray(ids, dtype=self.dtype)
        self.file.write(ids)
        self.sha256.update(ids)
        self.counts['tokens'] += len(ids)
        if self.token_bytes is not None:
            self.counts['token_bytes'] += int(self.token_bytes[ids].sum())

    def close(self):
        return {**self.counts, 'sha256': self.sha256.hexdigest()}


def encode_shards(pieces, job, n_processes, max_tokens):
    """The records of all shards, or of those with which train has max_tokens. One that is there is not made
    again."""
    records = [read_json(record_path(job.folder, number)) or None for number in range(len(pieces))]
    n_missing = records.count(None)
    if n_missing < len(pieces):
        print0(f"going on: {len(pieces) - n_missing} of {len(pieces)} shards are there")
    n_processes = min(n_processes, n_missing)
    executor = None
    if n_processes > 1:
        # forks of a process without threads; of one with torch in it they could hang
        context = multiprocessing.get_context('forkserver' if sys.platform == 'linux' else 'spawn')
        executor = concurrent.futures.ProcessPoolExecutor(n_processes, context, follow_parent)
    jobs = {}  # {number: Future}
    n_train = 0
    try:
        for number in range(len(pieces)):
            # some ahead, as max_tokens may end it
            for ahead in range(number, min(number + n_processes + 1, len(pieces))):
                if executor and records[ahead] is None and ahead not in jobs:
                    jobs[ahead] = executor.submit(encode_shard, ahead, pieces[ahead], job)
            if number in jobs:
                records[number] = jobs[number].result()
            elif records[number] is None:
                records[number] = encode_shard(number, pieces[number], job)
            n_tokens = records[number]['train']['tokens']
            n_train += n_tokens
            if len(pieces) > 1:
                print0(f"shard {number + 1} of {len(pieces)}: {n_tokens:,} tokens to train on")
            if max_tokens is not None and n_train >= max_tokens:
                return records[:number + 1]
    except concurrent.futures.BrokenExecutor:
        raise ValueError("a process that encodes was killed, perhaps for lack of memory. run the same "
                         "command with fewer --processes: it goes on")
    finally:
        if executor:
            for process in multiprocessing.active_children():  # after an error they would go on for minutes
                process.terminate()
            executor.shutdown(cancel_futures=True)
    return records


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


def choose_tokenizer(spec, paths, key):
    """The tokenizer that --tokenizer names; a vocabulary that is learned is learned from the files."""
    if spec == 'char':
        chars = set()
        n_documents = 0
        for path in paths:
            for begins, text, _ in read_documents(Part(path), key, collections.Counter()):
                chars.update(text)
                n_documents += begins
        added = [END_OF_TEXT] if n_documents > 1 else []
        return make_tokenizer({'kind': 'char', 'chars': ''.join(sorted(chars)), 'added': added})
    if spec.startswith('bpe:'):
        if not spec[4:].isdecimal():
            raise ValueError(f"no such size of a vocabulary ({spec}). use a number from 257 on, as bpe:8192")
        print0(f"learning {spec[4:]} tokens")
        return learn_bpe(int(spec[4:]), texts_to_learn_from(paths, key))
    if spec == 'byte':
        return make_tokenizer({'kind': 'byte'})
    if spec.startswith('hf:'):
        return make_tokenizer(huggingface.read_tokenizer(spec.removeprefix('hf:')))
    if os.path.isdir(spec) and bin_files(spec, 'train'):
        return make_tokenizer(read_tokenizer_files(spec, read_meta(spec)))
    if spec.endswith('.pt') or checkpoint.exists(spec):
        return make_tokenizer(checkpoint.tokenizer_state_of(checkpoint.read(checkpoint.find(spec))))
    if spec.endswith(('.json', '.model')) or os.path.isdir(spec):
        return make_tokenizer(hugging_face_state(spec))
    return make_tokenizer({'kind': 'tiktoken', 'name': spec})


def write_tokenizer(folder, tok):
    meta = write_tokenizer_files(folder, tok, dtype_of(tok))
    write_whole(os.path.join(folder, 'tokenizer_meta.json'), to_json(meta))


@functools.cache  # GPT-2's takes a quarter of a second to make
def tokenizer_in(folder):
    """What write_tokenizer() has written."""
    meta = read_json(os.path.join(folder, 'tokenizer_meta.json'))
    return make_tokenizer(read_tokenizer_files(folder, meta))


def texts_to_learn_from(paths, key):
    """The beginnings of about 64 of the files, 64 million characters together."""
    chosen = paths[::math.ceil(len(paths) / 64)]
    for path in chosen:
        left = (1 << 26) // len(chosen)
        for _, text, _ in read_documents(Part(path), key, collections.Counter()):
            text = text[:left]
            left -= len(text)
            for start in range(0, len(text), 1 << 16):  # longer ones take much memory
                yield text[start:start + (1 << 16)]
            if left == 0:
                break


def default_tokenizer(paths):
    """The tokenizer of a text that has none by name."""
    megabytes = sum(os.path.getsize(path) for path in paths if not path.startswith('hf:')) / 1e6
    spec = 'gpt2' if chat or megabytes > 1 or paths[0].startswith('hf:') else 'char'
    print0(f"tokenizer {spec}, as there are {megabytes:.2f} MB. also: --tokenizer=char, byte, gpt2, bpe:8192")
    return spec


# -----------------------------------------------------------------------------
# a dataset, in the folder `work`. Each returns what meta.json says of the tokenizer and the splits


def make_text(work, paths, spec, share, as_nanogpt):
    if not os.path.exists(os.path.join(work, 'tokenizer_meta.json')):
        write_tokenizer(work, choose_tokenizer(spec, paths, text_key))
    tok = tokenizer_in(work)
    pieces = plan_pieces(paths, shard_mb * 1e6, tok.split_at)
    job = Job(work, text_key, share, as_nanogpt)
    records = encode_shards(pieces, job, processes or os.cpu_count(), max_tokens)
    meta = {**read_json(os.path.join(work, 'tokenizer_meta.json')), 'splits': {}}
    for split in SPLITS:
        entry = describe_split([record[split] for record in records], split)
        if entry['tokens']:
            meta['splits'][split] = entry
    if meta['splits'].get('train', {}).get('tokens', 0) < 2:
        shutil.rmtree(work, ignore_errors=True)  # these shards are of no use
        raise ValueError("too little text: none to train on. use more, or a smaller --val_fraction")
    print_notes(records)
    return meta


def describe_split(entries, split):
    """The entry of a split in meta.json: what its shards have together, and which they are, if several."""
    total = {key: 0 for key in entries[0] if key != 'sha256'}
    shards = []
    for number, entry in enumerate(entries):
        for key in total:
            total[key] += entry[key]
        if entry['tokens']:
            file = os.path.basename(shard_path('', split, number))
            shards.append({'file': file, 'tokens': entry['tokens'], 'sha256': entry['sha256']})
    if len(entries) == 1:  # becomes train.bin, as nanoGPT has it
        return {**total, 'sha256': entries[0]['sha256']}
    return {**total, 'shards': shards}


def print_notes(records):
    """What the texts have that a person would not expect."""
    total = collections.Counter()
    for record in records:
        total.update(record['notes'])
    if total['markers']:
        print0(f"{END_OF_TEXT} separates the documents of plain text ({total['markers']:,} times)")
    n_ending = total['texts that end in the marker']
    if n_ending:
        print0(f"note: {n_ending:,} texts end in {END_OF_TEXT}. in a row that is text, and not the token, "
               "which stands before each document anyway: remove it from the rows")
    if total['lost characters']:
        print0(f"note: the tokenizer loses {total['lost characters']:,} of the text's "
               f"{total['characters']:,} characters. {OTHER_TOKENIZER}")


def make_conversations(work, paths, spec, share):
    """Beside the ids of a split, train.bin, lie train.mask, a bit per id, set if the assistant says it, and
    train.starts, where each conversation begins. All of them are in memory."""
    tok = make_tokenizer(with_chat_tokens(choose_tokenizer(spec, [], '').state()))
    meta = write_tokenizer_files(work, tok, dtype_of(tok))
    form = chat_format(tok)
    conversations = read_conversations(paths)
    n_few = 5 / share if share else 0
    found = {'train': [], 'val': []}
    for number, messages in enumerate(conversations):
        key = json.dumps([list(message.values()) for message in messages], ensure_ascii=False)
        split = split_by_hash(key, share)
        if len(conversations) < n_few:
            split = 'val' if number >= round((1 - share) * len(conversations)) else 'train'
        try:
            found[split].append(form.render(messages))
        except ValueError as e:
            raise ValueError(f"{first_line(e)}. {OTHER_TOKENIZER}")
    if not found['train']:
        raise ValueError("no conversation to train on. give more of them, or a smaller --val_fraction")
    meta['splits'] = {}
    for split, rendered in found.items():
        if rendered:
            meta['splits'][split] = write_conversations(work, split, rendered, tok)
    meta['chat'] = form.template
    return meta


def read_conversations(paths):
    """The messages of each row of the files, a list."""
    conversations = []
    n_skipped = 0
    for path in paths:
        for where, row in read_rows(Part(local_path(path))):
            try:
                conversations.append(messages_of(row))
            except ValueError as e:
                if bad_rows != 'skip':
                    raise ValueError(f"{where} is no conversation ({first_line(e)}). correct it, see "
                                     "docs/chat.md, or leave out all such rows with --bad_rows=skip")
                n_skipped += 1
    if n_skipped:
        print0(f"note: {n_skipped:,} rows are no conversations and were left out")
    return conversations


def write_conversations(work, split, rendered, tok):
    """Write conversations, (ids, mask) each, as a split. Returns its entry in meta.json."""
    ids = np.concatenate([ids for ids, _ in rendered]).astype(dtype_of(tok))
    mask = np.concatenate([mask for _, mask in rendered])
    ends = np.cumsum([len(ids) for ids, _ in rendered])
    starts = np.concatenate(([0], ends[:-1])).astype('<u8').tobytes()
    bits = np.packbits(mask, bitorder='little').tobytes()
    write_whole(shard_path(work, split, 0), ids.tobytes())
    write_whole(os.path.join(work, f'{split}.mask'), bits)
    write_whole(os.path.join(work, f'{split}.starts'), starts)
    return {'tokens': len(ids), 'bytes': int(tok.token_bytes()[ids].sum()), 'documents': len(rendered),
            'targets': int(mask.sum()), 'sha256': hashlib.sha256(ids).hexdigest(),
            'mask_sha256': hashlib.sha256(bits + starts).hexdigest()}


# -----------------------------------------------------------------------------
# the script

# what a dataset has besides meta.json
OUR_FILES = re.compile(
    r'(train|val)(_\d{6})?\.(bin|mask|starts)|meta\.pkl|tokenizer(_config)?\.(json|tiktoken)')


def to_json(value):
    return json.dumps(value, indent=1, ensure_ascii=False).encode('utf-8', 'backslashreplace')


def files_of(work, meta):
    """{name of a file of the dataset besides meta.json: its path in `work`}"""
    names = list(meta['checksums'])
    if meta['tokenizer']['kind'] == 'char':
        names.append('meta.pkl')
    if 'chat' in meta:
        for split in meta['splits']:
            names += [f'{split}.mask', f'{split}.starts']
    files = {name: os.path.join(work, name) for name in names}
    for split, entry in meta['splits'].items():
        if 'shards' not in entry:  # nanoGPT's name for a single one
            files[f'{split}.bin'] = shard_path(work, split, 0)
        for shard in entry.get('shards', []):
            files[shard['file']] = os.path.join(work, shard['file'])
    return files


def move_into_place(folder, work, meta):
    """Move a whole dataset from `work` into its folder, in place of what was there. Meanwhile meta.json says
    that it is unfinished; after a kill in between this is done again."""
    path = os.path.join(folder, 'meta.json')
    write_whole(path, to_json({**meta, 'unfinished': True}))
    files = files_of(work, meta)
    for name, ready in files.items():
        if os.path.exists(ready):
            os.replace(ready, os.path.join(folder, name))
    for name in os.listdir(folder):
        if OUR_FILES.fullmatch(name) and name not in files:  # of what was there
            os.remove(os.path.join(folder, name))
    write_whole(path, to_json(meta))


def is_movable(folder, work, meta):
    """Whether each file of a dataset is still in `work`, or in its place already."""
    for name, ready in files_of(work, meta).items():
        if not os.path.exists(ready) and not os.path.exists(os.path.join(folder, name)):
            return False
    return True


def is_whole(folder, meta):
    """Whether the files of a dataset are as they were made."""
    try:
        read_tokenizer_files(folder, meta)
    except ValueError:
        return False
    width = np.dtype(meta['dtype']).itemsize
    for split, entry in meta['splits'].items():
        for shard in entry.get('shards') or [{'file': f'{split}.bin', 'tokens': entry['tokens']}]:
            path = os.path.join(folder, shard['file'])
            if not os.path.exists(path) or os.path.getsize(path) != shard['tokens'] * width:
                return False
    return True


def stamp_of(path):
    """What changes when the content of a file does."""
    if path.startswith('hf:'):
        return path
    found = os.stat(path)
    return f'{os.path.abspath(path)} {found.st_size} {found.st_mtime_ns}'


def check_knobs(sources, dataset):
    if val_fraction is not None and not 0 <= val_fraction < 1:
        error(f"val_fraction is a share ({val_fraction}). use 0 or more, but less than 1")
    for knob, value in (('max_tokens', max_tokens), ('shard_mb', shard_mb), ('processes', processes)):
        if value is not None and value <= 0:
            error(f"{knob} is out of range ({value}). use a number above 0")
    if bad_rows not in ('stop', 'skip'):
        error(f"no such value of bad_rows ({bad_rows}). use stop or skip")
    if sources is None and dataset not in NAMED_SETS:
        error(f"no such file or folder, and no set of that name ({dataset}). name a file with text, here or "
              f"with --input=PATH, or one of {', '.join([*NAMED_SETS, *BENCHMARKS])}")
    if chat and sources is None:
        error(f"{dataset} has no conversations. name a file that has: python prepare.py FILE --chat")
    if chat and tokenizer and (tokenizer == 'char' or tokenizer.startswith('bpe:')):
        error(f"--chat learns no tokenizer (tokenizer={tokenizer}). use that of the model to finetune: "
              "--tokenizer=OUT_DIR/ckpt.pt; or byte, gpt2, hf:OWNER/NAME")


def main():
    start_time = time.time()
    if name in BENCHMARKS:
        fetch_benchmark(name, data_dir or DATA_DIR)
        return
    dataset = name
    sources = input
    if sources is None and name not in NAMED_SETS and os.path.exists(name):
        dataset = os.path.basename(os.path.abspath(name)).removesuffix('.gz')
        if not os.path.isdir(name):
            dataset = os.path.splitext(dataset)[0]
        sources = [name]
    check_knobs(sources, dataset)
    folder = folder_of(dataset, data_dir)
    named = NAMED_SETS.get(dataset, NamedSet('', ''))
    if sources is None and named.source.startswith('hf:'):
        sources = [named.source]
    if sources is not None:
        paths = find_files(sources)
        source = ', '.join(sources)
    elif dataset == 'pystdlib':
        paths = find_pystdlib()
        source = f'standard library of Python {sys.version.split()[0]}'
    else:
        paths = [os.path.join(folder, 'input.txt')]
        source = named.source
        fetch(source, paths[0])
    try:
        spec = tokenizer or named.tokenizer or default_tokenizer(paths)
        stamps = [stamp_of(path) for path in paths]
        if spec.endswith('.json'):
            stamps.append(stamp_of(spec))
    except OSError as e:
        error(f"{e.filename} cannot be read ({e.strerror}). name another file")
    share = named.val_fraction if val_fraction is None else val_fraction

    # what decides the result: with the same an earlier preparation is continued, or is done
    plan = {'tokenizer': spec, 'text_key': text_key, 'val_fraction': share, 'max_tokens': max_tokens,
            'shard_mb': shard_mb, 'chat': chat, 'bad_rows': bad_rows,
            'files': hashlib.sha256('\n'.join(stamps).encode('utf-8', 'surrogateescape')).hexdigest()}
    old = read_json(os.path.join(folder, 'meta.json'))
    if bin_files(folder, 'train') and not overwrite and not old.get('unfinished'):
        if old.get('plan') == plan and is_whole(folder, old):
            print0(f"{folder} is there already")
            print_summary(dataset, folder, old, named)
            return
        if old.get('plan') != plan:
            error(f"{folder} holds another dataset ({old.get('command', 'made elsewhere')}), or the text "
                  "has changed. give this one another name, or replace that one with --overwrite")

    work = os.path.join(folder, 'unfinished')
    try:
        os.makedirs(work, exist_ok=True)
        with checkpoint.lock_folder(work):
            if read_json(os.path.join(work, 'plan.json')) != plan:
                for file in os.listdir(work):
                    if file != '.lock':
                        os.remove(os.path.join(work, file))
                write_whole(os.path.join(work, 'plan.json'), to_json(plan))
            meta = read_json(os.path.join(work, 'meta.json'))  # if it was killed while it moved them
            if not meta or not is_movable(folder, work, meta):
                meta = make_files(work, paths, spec, share, dataset)
                meta['source'] = source
                meta['command'] = shlex.join(['python', 'prepare.py'] + sys.argv[1:])
                meta['plan'] = plan
                write_whole(os.path.join(work, 'meta.json'), to_json(meta))
            move_into_place(folder, work, meta)
        shutil.rmtree(work, ignore_errors=True)
    except ValueError as e:  # of the text or the tokenizer
        remove_empty(folder, work)
        error(str(e))
    except OSError as e:
        error(f"{e.filename or folder} cannot be read or written ({e.strerror or first_line(e)}). make room, "
              "and run the same command again: it goes on; or name another --data_dir")
    print_summary(dataset, folder, meta, named)
    print0(f"it took {time.time() - start_time:.1f} s")


def make_files(work, paths, spec, share, dataset):
    """The files of a dataset in `work`. Returns what meta.json says of them."""
    if chat:
        return make_conversations(work, paths, spec, share)
    meta = make_text(work, paths, spec, share, dataset in AS_NANOGPT)
    if meta['tokenizer']['kind'] == 'char':  # the same vocabulary for what reads nanoGPT's folders
        state = meta['tokenizer']
        itos = dict(enumerate([*state['chars'], *state.get('added', [])]))
        stoi = {token: id for id, token in itos.items()}
        content = pickle.dumps({'vocab_size': len(itos), 'itos': itos, 'stoi': stoi})
        write_whole(os.path.join(work, 'meta.pkl'), content)
    return meta


def remove_empty(folder, work):
    """Remove what was begun, unless there are shards from which the same command can go on."""
    if not glob.glob(os.path.join(glob.escape(work), 'shard_*.json')):
        shutil.rmtree(work, ignore_errors=True)
        if not os.listdir(folder):
            os.rmdir(folder)


def print_summary(dataset, folder, meta, named):
    what = 'conversations' if 'chat' in meta else 'documents'
    for split, entry in meta['splits'].items():
        file = f'{split}.bin'
        if 'shards' in entry:
            file = f"{split}_*.bin ({len(entry['shards'])} files)"
        print0(f"{os.path.join(folder, file)}: {entry['tokens']:,} tokens, {entry['documents']:,} {what}, "
               f"{entry['bytes']:,} bytes of text")
    where = f' --data_dir={shlex.quote(data_dir)}' if data_dir else ''
    flags = f'--dataset={shlex.quote(dataset)}{where}'
    if 'chat' in meta:
        flags = f'config/finetune_chat.py {flags} --init_from=THE_RUN_TO_FINETUNE'
    elif named.config:
        flags = f'{named.config}{where}'
    elif meta['splits']['train']['tokens'] < 1e8:
        flags = f'config/small_text.py {flags}'
    state = meta['tokenizer']
    print0(f"tokenizer {state.get('name', state['kind'])}, {meta['vocab_size']:,} ids. train on it: "
           f"python train.py {flags}")


if __name__ == '__main__':
    try:
        main()
    except KeyboardInterrupt:
        print0("stopped. the same command goes on from the shards that are there")
        sys.exit(130)
