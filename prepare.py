"""
Turn text into a dataset: the folder data/<name>/ with train.bin, val.bin and meta.json that train.py reads.

    $ python prepare.py                                        # pystdlib: the source code of this Python's library, no download
    $ python prepare.py shakespeare_char                       # tinyshakespeare by characters, as in nanoGPT (a download of 1.1 MB)
    $ python prepare.py mybook --input=book.txt --tokenizer=char
    $ python prepare.py mine --input='texts/*.jsonl.gz' --tokenizer=gpt2 --val_fraction=0.01

--input is a file, a folder or a pattern: .txt (one document each) and .jsonl (one per line), plain or .gz. <|endoftext|> stands
before each document, except with --tokenizer=char, which has no such id, and in the sets made as nanoGPT makes them.
"""

from configurator import configure, fail, out_of_range

# -----------------------------------------------------------------------------
name = 'pystdlib'  # the dataset: pystdlib, shakespeare_char, shakespeare, or a name of your own with --input
input: str = None  # file, folder or pattern with the text; for shakespeare it stands in for the download
tokenizer: str = None  # 'char', 'byte', 'gpt2' or another of tiktoken's, 'hf:FOLDER_OR_NAME' of a Hugging Face model. None: what the named set has, else gpt2
text_key = 'text'  # where the text is in a line of .jsonl
val_fraction = 0.1  # share of the documents (chosen by a hash) for val.bin, or of a single document's end; 0.001 is plenty of 10 GB
data_dir: str = None  # where the datasets lie. None: data/ beside this file
# -----------------------------------------------------------------------------
knobs, given = configure(globals(), positional='name')

import contextlib
import glob
import gzip
import hashlib
import itertools
import json
import os
import re
import shlex
import sys
import sysconfig
import time
import tokenize
import urllib.request
import zlib

import numpy as np

from dataset import DATA_DIR, END_OF_TEXT, KNOWN, TOKENIZER_FILES, CharTokenizer, make_tokenizer

SHAKESPEARE_URL = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'
SHAKESPEARE_SHA256 = '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'
AS_NANOGPT = {'shakespeare_char': 'char', 'shakespeare': 'gpt2'}  # byte for byte nanoGPT's files
CHUNK = 1 << 20  # characters read at a time
LONGEST = 1 << 24  # characters without a place to cut at, after which the cut is forced

problems = out_of_range(knobs, below_one='val_fraction')
if name != os.path.basename(name) or name in ('', '.', '..'):
    problems.append(f"the name of a dataset is a folder's name ({name}). use a plain word, and --data_dir=PATH for another place")
if name not in KNOWN and input is None:
    problems.append(f"no text for the dataset {name}. say where it is: python prepare.py {name} --input=FILE_OR_FOLDER "
                    f"(made without it: {', '.join(KNOWN)})")
if name == 'pystdlib' and input is not None:
    problems.append("pystdlib is this Python's library, not --input. give your dataset a name: python prepare.py NAME --input=...")
if problems:
    fail(*problems)
folder = os.path.join(data_dir or DATA_DIR, name)
tokenizer = tokenizer or AS_NANOGPT.get(name) or ('byte' if name == 'pystdlib' else 'gpt2')

# -----------------------------------------------------------------------------
# where documents come from. A document is an iterator over pieces of text, so that a long one never is in memory as a whole


def pystdlib():
    """The .py files of this Python's standard library, without its tests and what was installed besides."""
    root = sysconfig.get_paths()['stdlib']
    for path in walk(root, leave_out={'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__'}):
        if path.endswith('.py'):
            try:
                with tokenize.open(path) as f:  # honours the encoding that the file declares
                    text = f.read()
            except (SyntaxError, UnicodeDecodeError):
                continue  # a file that is wrong on purpose
            if text:
                yield iter([text])


def walk(root, leave_out=()):
    for path, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - set(leave_out))
        yield from (os.path.join(path, file) for file in sorted(files))


def input_files():
    if os.path.isdir(input):
        paths = [path for path in walk(input) if re.search(r'\.(txt|jsonl)(\.gz)?$', path)]
    else:
        paths = [input] if os.path.exists(input) else sorted(p for p in glob.glob(input, recursive=True) if os.path.isfile(p))
    if not paths:
        what = 'no .txt or .jsonl file (.gz too) in' if os.path.isdir(input) else 'no such file, folder or pattern:'
        fail(f"{what} {input}. name your text with --input")
    for path in paths:
        if re.search(r'\.(parquet|zst|bz2|xz|zip|pdf|docx|html?)$', path):
            fail(f"a kind of file that is not read ({path}). make it .txt or .jsonl, plain or .gz")
    return paths


def documents_of(paths):
    for path in paths:
        # utf-8-sig: Windows likes to begin a file with a mark that is not part of the text
        with (gzip.open if path.endswith('.gz') else open)(path, 'rt', encoding='utf-8-sig') as f:
            if re.search(r'\.jsonl(\.gz)?$', path):
                yield from (iter([text]) for text in lines_of(f, path))
            else:
                yield pieces_of(f, path)


@contextlib.contextmanager
def explained(path):
    """Turn what can go wrong while reading the text file `path` into one line."""
    try:
        yield
    except UnicodeDecodeError:
        fail(f"{path} is not UTF-8 (byte {bad_byte(path)}). convert it: iconv -f latin1 -t utf-8")
    except (EOFError, OSError, zlib.error) as e:
        fail(f"{path} cannot be read to its end ({e}). fetch or compress it again")


def pieces_of(f, path):
    with explained(path):
        while piece := f.read(CHUNK):
            if '\0' in piece:
                fail(f"{path} is not text (it holds a NUL character). name text files only with --input")
            yield piece


def lines_of(f, path):
    with explained(path):
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[text_key]
            except ValueError as e:
                fail(f"{path}:{number} is not JSON ({e}). correct or remove that line")
            except (KeyError, TypeError, IndexError):
                fail(f"{path}:{number} has no text under the key {text_key!r}. name the right one with --text_key")
            if not isinstance(text, str):
                fail(f"{path}:{number} has no text under {text_key!r} but {type(text).__name__}. name the right key with --text_key")
            if text:
                # JSON can hold half a surrogate pair, which is no text: it becomes U+FFFD
                yield text if text.isascii() else text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')


def bad_byte(path):
    """The offset of the first byte that is not UTF-8."""
    offset = 0
    with (gzip.open if path.endswith('.gz') else open)(path, 'rb') as f:
        for line in f:
            try:
                line.decode('utf-8')
            except UnicodeDecodeError as e:
                return offset + e.start
            offset += len(line)
    return offset


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
        return content.decode('utf-8')
    except UnicodeDecodeError as e:
        fail(f"{path} is not UTF-8 (byte {e.start}). name a text file with --input")


# -----------------------------------------------------------------------------
# from documents to ids


def whole_words(pieces):
    """The same text, re-cut where every tokenizer's pattern cuts anyway: between a letter and a space. So the ids of the pieces
    are the ids of the whole. (No pattern of tiktoken's joins a letter to a following space, or looks back.)"""
    rest = next(pieces)
    for piece in pieces:
        if end := re.match(r'.*[^\W\d_](?=[ \n\r\t])', rest, re.DOTALL):
            yield rest[:end.end()]
            rest = rest[end.end():]
        elif len(rest) > LONGEST:
            print(f"note: {len(rest):,} characters without a space after a letter; the text was cut there")
            yield rest
            rest = ''
        rest += piece
    yield rest


def whole_lines(pieces):
    """The same text, in one if it is not longer than a large book; else cut at ends of lines. For tokenizers whose ids may depend on
    what stands further away; Llama 2's, say, puts a space before what it is given, and takes 150 bytes of memory per character."""
    rest, cuts = '', 0
    for piece in pieces:
        rest += piece
        if len(rest) > 1 << 22:
            end = rest.rfind('\n') + 1 or len(rest)
            yield rest[:end]
            rest, cuts = rest[end:], cuts + 1
    if cuts:
        print(f"note: a document of over {1 << 22:,} characters was cut at {cuts} ends of lines, where this tokenizer may see a beginning")
    yield rest


class Split:
    """A .bin file as it grows, under a temporary name."""

    def __init__(self, name, dtype):
        self.name, self.dtype = name, dtype
        self.file = open(os.path.join(folder, name + '.bin.tmp'), 'w+b')
        self.tokens = self.documents = 0

    def write(self, ids):
        self.file.write(np.asarray(ids).astype(self.dtype).tobytes())
        self.tokens += len(ids)

    def chunks(self):
        """All ids written so far, some at a time."""
        self.file.seek(0)
        while block := self.file.read(1 << 22):
            yield np.frombuffer(block, dtype=self.dtype)

    def move_tail(self, other, n):
        """Let the last n ids be the other's."""
        self.file.seek((self.tokens - n) * self.dtype.itemsize)
        while block := self.file.read(1 << 22):
            other.write(np.frombuffer(block, dtype=self.dtype))
        self.tokens -= n
        self.file.truncate(self.tokens * self.dtype.itemsize)

    def finish(self, byte_lengths):
        """Flush to disk; the entry for meta.json."""
        digest, n_bytes = hashlib.sha256(), 0
        for ids in self.chunks():
            digest.update(ids)
            n_bytes += int(byte_lengths[ids].sum())
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return {'tokens': self.tokens, 'bytes': n_bytes, 'documents': self.documents, 'sha256': digest.hexdigest()}


def write_whole(path, content):
    """Write the bytes `content` to `path`, whole or not at all."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + '.tmp', 'wb') as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())
    os.replace(path + '.tmp', path)


def remove_temporary():
    for split in ('train', 'val'):
        if split in open_splits:
            open_splits[split].file.close()  # Windows removes no open file
        if os.path.exists(os.path.join(folder, split + '.bin.tmp')):
            os.remove(os.path.join(folder, split + '.bin.tmp'))
    if os.path.isdir(folder) and not os.listdir(folder):
        os.rmdir(folder)


# -----------------------------------------------------------------------------
# the work

open_splits = {}
try:
    if name in AS_NANOGPT:  # nanoGPT's split: the first nine tenths of the characters, and the rest
        text, source = tinyshakespeare(), input or SHAKESPEARE_URL
        cut = int(len(text) * (1 - val_fraction))
        documents = lambda: iter([('train', iter([text[:cut]])), ('val', iter([text[cut:]]))])
    elif name == 'pystdlib':
        source = f"standard library of Python {sys.version.split()[0]}"
        documents = lambda: ((None, document) for document in pystdlib())
    else:
        paths, source = input_files(), input
        documents = lambda: ((None, document) for document in documents_of(paths))

    if tokenizer == 'char':  # a first pass, to see which characters there are
        chars = set()
        for _, document in documents():
            for piece in document:
                chars.update(piece)
        tok = CharTokenizer(sorted(chars))
    elif tokenizer.startswith('hf:'):
        import huggingface
        tok = make_tokenizer(huggingface.read_tokenizer(tokenizer[3:]))
    else:
        tok = make_tokenizer({'kind': 'byte'} if tokenizer == 'byte' else {'kind': 'tiktoken', 'name': tokenizer})
    dtype = np.dtype('<u2' if tok.n_vocab <= 1 << 16 else '<u4')

    os.makedirs(folder, exist_ok=True)
    open_splits.update(train=Split('train', dtype), val=Split('val', dtype))
    train, val = open_splits.values()
    t0 = shown = time.time()
    look_alikes = 0
    for side, document in documents():
        first = next(document, '')
        if not first:
            continue
        if side is None:  # by a hash of how the document begins: it stays on its side when others are added
            digest = hashlib.blake2b(first[:1 << 16].encode('utf-8', 'replace'), digest_size=8).digest()
            side = 'val' if int.from_bytes(digest) < val_fraction * 2**64 else 'train'
        split = val if side == 'val' else train
        split.documents += 1
        if tok.end_of_text is not None and name not in AS_NANOGPT:
            split.write([tok.end_of_text])
        pieces = itertools.chain([first], document)
        for piece in pieces if tok.cut == 'anywhere' else whole_words(pieces) if tok.cut == 'words' else whole_lines(pieces):
            try:
                split.write(tok.encode(piece))
            except ValueError as e:  # a vocabulary that lacks a character
                fail(f"{e}. use --tokenizer=byte, or another that has every character")
            look_alikes += piece.count(END_OF_TEXT)
            if time.time() > shown + 10:
                shown = time.time()
                print(f"{train.tokens + val.tokens:,} tokens in {train.documents + val.documents:,} documents, {shown - t0:.0f} s", flush=True)
    if train.tokens == 0:  # one document, or few and chance put all of them on that side
        val.move_tail(train, val.tokens)
        train.documents, val.documents = val.documents, 0
    if val.tokens == 0 and val_fraction > 0:
        train.move_tail(val, int(train.tokens * val_fraction))
        if train.documents > 1:
            print("note: of so few documents the hash chose none for validation; the end of the last one serves instead")
    if train.tokens < 2 or (val_fraction > 0 and val.tokens < 2):
        fail(f"too little text ({train.tokens} tokens to train on, {val.tokens} to validate). bring more, or use --val_fraction=0")

    state = tok.state()
    files = {key: state.pop(key) for key in TOKENIZER_FILES if state.get(key) is not None}  # too long for meta.json
    command = shlex.join(['python', 'prepare.py'] + sys.argv[1:])
    splits = {split.name: split.finish(tok.byte_lengths()) for split in (train, val) if split.tokens > 0}
    # meta.json says that the folder is whole, so it says the contrary while the files change places
    meta_path = os.path.join(folder, 'meta.json')
    write_whole(meta_path, json.dumps({'unfinished': True, 'command': command}).encode())
    for key, content in files.items():
        write_whole(os.path.join(folder, TOKENIZER_FILES[key]), content if isinstance(content, bytes) else content.encode())
        state[f'{key}_file'] = TOKENIZER_FILES[key]
    for split in ('train', 'val'):
        if split in splits:
            os.replace(os.path.join(folder, split + '.bin.tmp'), os.path.join(folder, split + '.bin'))
        elif os.path.exists(os.path.join(folder, split + '.bin')):
            os.remove(os.path.join(folder, split + '.bin'))
    meta = {'tokenizer': state, 'vocab_size': tok.n_vocab, 'end_of_text': tok.end_of_text, 'dtype': 'uint16' if dtype.itemsize == 2 else 'uint32',
            'splits': splits, 'source': source, 'command': command}
    write_whole(meta_path, json.dumps(meta, indent=1).encode())
except KeyboardInterrupt:
    print("interrupted; run it again", file=sys.stderr)
    sys.exit(130)
except OSError as e:
    fail(f"cannot read or write ({e.filename or folder}: {e.strerror or e}). make room, or use --data_dir=ANOTHER")
finally:
    remove_temporary()

if look_alikes:
    print(f"note: the text itself contains {END_OF_TEXT} ({look_alikes:,} times); there it is text, not the special token")
for split, entry in splits.items():
    print(f"{os.path.join(folder, split + '.bin')}: {entry['tokens']:,} tokens, {entry['documents']:,} documents, {entry['bytes']:,} bytes of text")
print(f"vocabulary of {tok.n_vocab:,} ids ({tokenizer}), {time.time() - t0:.1f} s. train on it: python train.py --dataset={name}")
