"""
Where prepare.py's text comes from and who does the work: files of every kind, data sets of the Hugging Face Hub, portions of text
for a pool of processes, a tokenizer of one's own, and a look into a finished folder. Nothing that is read here is executed.

A document is an iterator over pieces of text, so that a long one never is in memory as a whole; a portion is about a million
characters, of many documents or of a part of one. Where a portion ends depends on the text alone, not on who encodes it or whether
a run was interrupted: so the same bytes come out.
"""

import base64
import codecs
import collections
import concurrent.futures
import contextlib
import dataclasses
import errno
import glob
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import re
import signal
import sys
import sysconfig
import threading
import time
import tokenize
import zlib

import numpy as np

try:
    from isal import igzip as gzip  # twice as fast as Python's own
except ImportError:
    import gzip

from configurator import fail, quiet_when_cut_off
from dataset import END_OF_TEXT, Prefetch, bin_files, byte_letters, make_tokenizer, missing, read_meta, read_tokenizer_state

CHUNK = 1 << 20  # characters in a portion
LONGEST = 1 << 24  # characters without a place to cut at, after which the cut is forced
SAMPLE = 1 << 26  # characters that a tokenizer of one's own learns from
WAITS = (1, 2, 5, 10, 30)  # seconds before a download is tried again
READABLE = r'\.(txt|md|jsonl)(\.gz|\.zst)?$|\.parquet$'
MAGIC = {b'\x1f\x8b': 'gz', b'\x28\xb5\x2f\xfd': 'zst', b'PAR1': 'parquet', b'BZh': 'bz2', b'\xfd7zXZ': 'xz', b'PK\x03\x04': 'zip', b'%PDF': 'pdf'}


class Problem(Exception):
    """What prepare.py tells as `error: ...`; for those who work in a thread, where nobody listens to an exit."""


@dataclasses.dataclass
class File:
    path: str  # here, or in the repository
    size: int
    stamp: str  # changes when the content does
    repo: str = None  # of the Hub
    revision: str = None


# -----------------------------------------------------------------------------
# which files


def walk(root, leave_out=()):
    for path, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - set(leave_out))
        yield from (os.path.join(path, file) for file in sorted(files))


def local_files(input):
    """The files that --input means, in the order of their names."""
    if os.path.isdir(input):
        paths = [path for path in walk(input) if re.search(READABLE, path)]
    else:
        paths = [input] if os.path.exists(input) else sorted(p for p in glob.glob(input, recursive=True) if os.path.isfile(p))
    if not paths:
        what = 'no .txt, .md, .jsonl or .parquet file in' if os.path.isdir(input) else 'no such file, folder or pattern:'
        fail(f"{what} {input}. name your text with --input")
    for path in paths:
        if re.search(r'\.(bz2|xz|zip|tar|tgz|pdf|docx|html?)(\.gz|\.zst)?$|\.parquet\.', path):
            fail(f"a kind of file that is not read ({path}). make it .txt, .md, .jsonl (plain, .gz or .zst) or .parquet")
    return [stat(path) for path in paths]


def stat(path):
    found = os.stat(path)
    return File(path, found.st_size, str(found.st_mtime_ns))


def pystdlib_files():
    """The .py files of this Python's standard library, without its tests and what was installed besides."""
    root = sysconfig.get_paths()['stdlib']
    paths = walk(root, leave_out={'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__'})
    return [stat(path) for path in paths if path.endswith('.py')]


def share(files, part, parts):
    """The files of one of several machines: neighbours, of about as many bytes as everybody's."""
    total, before, mine = sum(file.size for file in files), 0, []
    for file in files:
        if min(parts - 1, (2 * before + file.size) * parts // (2 * total or 1)) == part - 1:
            mine.append(file)
        before += file.size
    return mine


# -----------------------------------------------------------------------------
# what is in them


class Zst(io.RawIOBase):
    """The bytes in a .zst file. zstandard's own reader takes a file whose end is missing for a whole one; this one does not."""

    def __init__(self, file):
        import zstandard
        self.file, self.make, self.frame, self.data, self.rest = file, zstandard.ZstdDecompressor().decompressobj, None, b'', b''

    def readable(self):
        return True

    def readinto(self, out):
        while not self.data:
            packed = self.rest or self.file.read(1 << 14)  # little, because it may become ten thousand times as much
            if not packed:
                if self.frame is not None:
                    raise EOFError('its end is missing')
                return 0
            self.frame = self.frame or self.make()
            self.data, self.rest = self.frame.decompress(packed), b''
            if self.frame.eof:  # files may be several ones, put together
                self.rest, self.frame = self.frame.unused_data, None
        n = min(len(out), len(self.data))
        out[:n], self.data = self.data[:n], self.data[n:]
        return n


def open_bytes(path):
    """The content of a file and the file itself, whose tell() is how far it was read."""
    raw = open(path, 'rb')
    begin = raw.read(8)
    raw.seek(0)
    ending = next((kind for kind in ('gz', 'zst', 'parquet') if path.endswith('.' + kind)), None)
    found = next((kind for magic, kind in MAGIC.items() if begin.startswith(magic)), None)
    if begin and found != ending:
        what = f"is no .{ending}" if found is None else f"is .{found}" if ending is None else f"is .{found}, not .{ending}"
        remedy = ("rename it, or fetch it again" if found in (None, 'gz', 'zst', 'parquet') else "unpack it first")
        fail(f"{path} {what} by its content (it begins with {begin[:4]!r}). {remedy}")
    try:
        return (gzip.open(raw, 'rb') if ending == 'gz' else io.BufferedReader(Zst(raw), 1 << 18) if ending == 'zst' else raw), raw
    except ImportError:
        fail(f"to read {path} a package is needed that is not installed (zstandard). pip install zstandard")


@contextlib.contextmanager
def explained(path):
    """Turn what can go wrong while reading the text file `path` into one line."""
    try:
        yield
    except UnicodeDecodeError:
        fail(f"{path} is not UTF-8 (byte {bad_byte(path)}). convert it (iconv -f latin1 -t utf-8), or use --encoding_errors=replace")
    except (EOFError, OSError, zlib.error) as e:
        fail(f"{path} cannot be read to its end ({e}). fetch or compress it again")
    except Exception as e:
        if type(e).__name__ not in ('IsalError', 'ZstdError', 'ArrowInvalid', 'ArrowException', 'ArrowNotImplementedError'):
            raise
        fail(f"{path} cannot be read to its end ({' '.join(str(e).split())[:120]}). fetch or compress it again")


def bad_byte(path):
    """The offset of the first byte that is not UTF-8."""
    decoder, offset = codecs.getincrementaldecoder('utf-8')(), 0
    content, _ = open_bytes(path)
    while True:
        block, kept = content.read(CHUNK), len(decoder.getstate()[0])
        try:
            decoder.decode(block, final=not block)
        except UnicodeDecodeError as e:
            return offset - kept + e.start
        offset += len(block)


def documents_of(path, text_key, errors, skip):
    """The documents of a file from number `skip` on: (number, pieces of text, how many bytes of the file are read)."""
    if path.endswith('.py'):
        yield from ([] if skip else [(0, python_source(path), lambda: 0)])
    elif path.endswith('.parquet'):
        yield from rows_of(path, text_key, skip)
    else:
        content, raw = open_bytes(path)
        # utf-8-sig: Windows likes to begin a file with a mark that is not part of the text
        with explained(path), raw, io.TextIOWrapper(content, encoding='utf-8-sig', errors=errors) as f:
            if re.search(r'\.jsonl(\.gz|\.zst)?$', path):
                for number, line in enumerate(f):
                    if number >= skip and line.strip():
                        yield number, sliced(text_of(line, text_key, f'{path}:{number + 1}')), raw.tell
            elif not skip:
                yield 0, pieces_of(f, path), raw.tell


def python_source(path):
    try:
        with tokenize.open(path) as f:  # honours the encoding that the file declares
            yield f.read()
    except (SyntaxError, UnicodeDecodeError):
        pass  # a file that is wrong on purpose


def pieces_of(f, path):
    with explained(path):  # also here: the one who asks for the next piece is not inside the other
        while piece := f.read(CHUNK):
            if '\0' in piece:
                fail(f"{path} is not text (it holds a NUL character). name text files only with --input")
            yield piece


def sliced(text):
    return (text[i:i + CHUNK] for i in range(0, len(text), CHUNK))


def text_of(line, text_key, where):
    try:
        text = json.loads(line)[text_key]
    except (ValueError, RecursionError) as e:
        fail(f"{where} is not JSON ({e}). correct or remove that line")
    except (KeyError, TypeError, IndexError):
        fail(f"{where} has no text under the key {text_key!r}. name the right one with --text_key")
    if not isinstance(text, str):
        fail(f"{where} has no text under {text_key!r} but {type(text).__name__}. name the right key with --text_key")
    if not text.isascii() and ('\\ud' in line or '\\uD' in line):  # JSON can hold half a surrogate pair, which is no text: it becomes U+FFFD
        text = text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
    return text


def rows_of(path, text_key, skip):
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        fail(f"to read {path} a package is needed that is not installed (pyarrow). pip install pyarrow")
    open_bytes(path)[1].close()  # says so if it is something else
    with explained(path):
        with pyarrow.parquet.ParquetFile(path) as f:
            names, rows, size = f.schema_arrow.names, f.metadata.num_rows, os.path.getsize(path)
            if text_key not in names:
                fail(f"{path} has no column {text_key!r} (it has {', '.join(names)[:200]}). name the right one with --text_key")
            kind = f.schema_arrow.field(text_key).type
            kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            if not any(fits(kind) for fits in (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_null)):
                fail(f"{path} has no text in the column {text_key!r} but {kind}. name the right one with --text_key")
            number, groups = 0, []
            for group in range(f.num_row_groups):  # those that are skipped need not be read
                if number + f.metadata.row_group(group).num_rows <= skip and not groups:
                    number += f.metadata.row_group(group).num_rows
                else:
                    groups.append(group)
            for batch in f.iter_batches(256, row_groups=groups, columns=[text_key], use_threads=False):
                for text in batch.column(0).to_pylist():
                    if number >= skip and text:
                        yield number, sliced(text), lambda: size * number // rows
                    number += 1


def at_hand(files, first, folder):
    """The number and path of each file from number `first` on; those of the Hub are fetched into `folder`, the next ones meanwhile,
    and removed again when they were read."""
    if not any(file.repo for file in files):
        yield from ((i, files[i].path) for i in range(first, len(files)))
        return
    ahead = Prefetch(lambda i: fetch(files[i], folder) if i < len(files) else None, first, ahead=1)
    try:
        for i in range(first, len(files)):
            path = ahead.next()
            yield i, path
            os.remove(path)
    finally:
        ahead.close()


def documents(files, text_key, errors, folder=None, start=(0, 0)):
    """(file number, document number, pieces, tell) for all documents from `start` on."""
    for i, path in at_hand(files, start[0], folder):
        for number, pieces, tell in documents_of(path, text_key, errors, start[1] if i == start[0] else 0):
            yield i, number, pieces, tell


# -----------------------------------------------------------------------------
# portions of work


def letter_then_space(text, end):
    """The last place before `end` where every tokenizer's pattern cuts anyway: between a letter and a space. So the ids of the pieces
    are the ids of the whole. (No pattern of tiktoken's joins a letter to a following space, or looks back.)"""
    found = re.match(r'.*[^\W\d_](?=[ \n\r\t])', text[:end + 1], re.DOTALL)
    return found.end() if found else 0


def end_of_line(text, end):
    """For tokenizers whose ids may depend on what stands further away: Llama 2's, say, puts a space before what it is given. They get
    a document as a whole if it is not longer than a long book: they take 150 bytes of memory per character."""
    return text.rfind('\n', 0, end) + 1 or end


CUTS = {'anywhere': lambda text, end: end, 'words': letter_then_space, 'nowhere': end_of_line}


def cut_up(pieces, find):
    """The same text in pieces that end where `find` says. Each depends only on the text from its beginning on."""
    rest, window = '', CHUNK
    for piece in pieces:
        rest += piece
        while len(rest) > window:
            end = find(rest, window)
            if not end and window < LONGEST:
                window *= 2
                continue
            if not end:
                print(f"note: {window:,} characters without a space after a letter; the text was cut there")
            yield rest[:end or window]
            rest, window = rest[end or window:], CHUNK
    if rest:
        yield rest


def side_of(text, val_fraction):
    """'train' or 'val', by a hash of how a document begins: it stays on its side when others are added."""
    digest = hashlib.blake2b(text[:1 << 16].encode('utf-8', 'replace'), digest_size=8).digest()
    return 'val' if int.from_bytes(digest) < val_fraction * 2**64 else 'train'


def portions(documents, cut, val_fraction, start=(0, 0, 0)):
    """Lists of (side, whether a document begins, text), each with the place behind it (file, document, characters) from where
    another run could go on, and tell() of its file."""
    portion, size, noted = [], 0, False
    for i, number, pieces, tell in documents:
        first = next(pieces, '')
        side = side_of(first, val_fraction)
        done = start[2] if (i, number) == tuple(start[:2]) else 0  # what an earlier run has made of this document
        pieces = itertools.chain([first], pieces)
        for text in cut_up(behind(pieces, done) if done else pieces, CUTS[cut]):
            if cut == 'nowhere' and done and not noted:
                print(f"note: documents of over {CHUNK:,} characters are cut at ends of lines, where this tokenizer may see a beginning")
                noted = True
            portion.append((side, done == 0, text))
            done, size, read = done + len(text), size + len(text), tell()
            if size >= CHUNK:
                yield portion, (i, number, done), read
                portion, size = [], 0
    if portion:
        yield portion, (i, number, done), read


def behind(pieces, n):
    for piece in pieces:
        if n < len(piece):
            yield piece[n:]
        n = max(0, n - len(piece))


def encode(tok, dtype, begin, portion):
    """A portion as {side: (ids, documents)}, and how often it contains what looks like the special token."""
    ids, documents = {'train': [], 'val': []}, collections.Counter()
    for side, begins, text in portion:
        if begins and begin is not None:
            ids[side].append(np.array([begin]))
        try:
            ids[side].append(tok.encode(text))
        except ValueError as e:  # a vocabulary that lacks a character
            raise Problem(f"{e}. use --tokenizer=byte, or another that has every character")
        documents[side] += begins
    return {side: (np.concatenate(parts, dtype=dtype, casting='unsafe'), documents[side]) for side, parts in ids.items() if parts}, \
        sum(text.count(END_OF_TEXT) for _, _, text in portion)


def encode_in_order(portions, workers, *settings):
    """(encode(*settings, portion), place, bytes read) for each portion, in their order, by as many processes; only a few portions are
    under way at a time."""
    if workers == 1:
        yield from ((encode(*settings, portion), *where) for portion, *where in portions)
        return
    # a forked process has the tokenizer at once; where forking is not safe, a new Python imports the script again and is sent it
    context = multiprocessing.get_context('fork' if sys.platform == 'linux' else 'spawn')
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, start_worker, settings)
    try:
        pool.submit(os.getpid).result()  # the processes start now, before there are threads
        waiting = collections.deque()
        for portion, *where in portions:
            waiting.append((pool.submit(encode_here, portion), where))
            if len(waiting) > 2 * workers:
                future, where = waiting.popleft()
                yield future.result(), *where
        for future, where in waiting:
            yield future.result(), *where
    except concurrent.futures.process.BrokenProcessPool:
        raise Problem(f"one of the {workers} workers was killed (out of memory?). run it again with fewer --workers: it goes on where it was")
    finally:
        pool.shutdown(cancel_futures=True)


def start_worker(*settings):
    global worker_settings
    worker_settings = settings
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of us; the one who started us answers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # nobody tells us when that one is killed
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()


def encode_here(portion):
    return encode(*worker_settings, portion)


def ids_of_parts(folders, metas, start):
    """What encode_in_order gives, from finished parts; the place is (part, 0 for train or 1 for val, ids)."""
    for i, (folder, meta) in enumerate(zip(folders, metas)):
        for j, side in enumerate(('train', 'val')):
            if (i, j) < tuple(start[:2]) or side not in meta['splits']:
                continue
            entry, n = meta['splits'][side], 0
            done = start[2] if (i, j) == tuple(start[:2]) else 0
            for shard in entry.get('shards') or [{'file': side + '.bin', **entry}]:
                path, digest = os.path.join(folder, shard['file']), hashlib.sha256()
                for ids in blocks([path], np.dtype(meta['dtype']).newbyteorder('<')):
                    digest.update(ids)
                    new, n = ids[max(0, done - n):], n + len(ids)
                    if len(new):
                        yield ({side: (new, entry['documents'] if n == len(ids) else 0)}, 0), (i, j, n), 0
                if digest.hexdigest() != shard['sha256']:
                    raise Problem(f"{path} has not the checksum that it was made with. make that part again: {meta['command']}")


class Progress:
    """A bar on a terminal, a line now and then elsewhere."""

    def __init__(self, files, first, max_tokens, train):
        self.before = np.cumsum([0] + [file.size for file in files])  # bytes before each file
        self.total, self.max_tokens, self.bar = int(self.before[-1]), max_tokens, None
        self.first, self.text = (train.tokens / max_tokens if max_tokens else self.before[first] / max(1, self.total)), None
        self.begun = self.shown = time.time()
        if sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                from tqdm import tqdm
                self.bar = tqdm(total=100, initial=round(100 * self.first, 2), dynamic_ncols=True,
                                bar_format='{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}')

    def show(self, file, bytes_read, train, val):
        """A portion is done; its file was read as far as bytes_read."""
        now, tokens, text = time.time(), train.tokens + val.tokens, train.bytes + val.bytes
        self.text = text if self.text is None else self.text  # of an earlier run, and the first portion
        share = train.tokens / self.max_tokens if self.max_tokens else min(1.0, (self.before[file] + bytes_read) / max(1, self.total))
        seconds = max(now - self.begun, 1e-9)
        line = f"{tokens:,} tokens, {(text - self.text) / seconds / 1e6:.1f} MB/s"
        if self.bar is not None:
            self.bar.set_postfix_str(line, refresh=False)
            self.bar.update(max(0, round(100 * share, 2) - self.bar.n))
        elif now > self.shown + 10:
            self.shown = now
            print(f"{line}, {share:.0%}, {max(0, seconds * (1 - share) / max(1e-9, share - self.first)):,.0f} s left", flush=True)

    def close(self):
        if self.bar is not None:
            self.bar.close()


# -----------------------------------------------------------------------------
# the Hub: a data set is its parquet files, wherever they come from; a script that would make them is not run


def hub_files(spec):
    """The files of hf:OWNER/NAME[:CONFIG][:SPLIT], with size and checksum."""
    try:
        import huggingface_hub
    except ImportError:
        fail(f"to read hf:{spec} a package is needed that is not installed (huggingface_hub). pip install huggingface_hub pyarrow")
    repo, *rest = spec.split(':')
    repo, _, revision = repo.partition('@')
    config, split = (rest + [''] * 2)[:2]
    if config in ('train', 'validation', 'test') and not split:
        config, split = '', config
    api, errors, endpoint = huggingface_hub.HfApi(), huggingface_hub.errors, huggingface_hub.constants.ENDPOINT
    try:
        info = api.dataset_info(repo, revision=revision or None)
        paths, configs = choose(info, config, split)
        if not paths and not revision:  # made by a script or from archives: the Hub keeps its own conversion
            with contextlib.suppress(errors.RevisionNotFoundError):
                info = api.dataset_info(repo, revision='refs/convert/parquet')
                paths, more = choose(info, config, split)
                configs |= more
        if not paths:
            fail(f"no parquet or text files of that name in hf:{spec} at {endpoint}. "
                 f"name one of its configurations: {', '.join(sorted(configs)) or 'none was found'}")
        found = {}
        for i in range(0, len(paths), 500):
            found.update({file.path: file for file in api.get_paths_info(repo, paths[i:i + 500], revision=info.sha, repo_type='dataset')})
    except (errors.GatedRepoError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as e:
        gated = isinstance(e, errors.GatedRepoError)
        fail(f"hf:{spec} is open only to those who accepted its terms at {endpoint}. accept them, then: hf auth login" if gated else
             f"no such data set at {endpoint} (hf:{spec}). name OWNER/NAME as it stands there; for a private one: hf auth login")
    except Exception as e:  # the network has many ways to fail, and they have no common class
        fail(f"the list of files of hf:{spec} does not come from {endpoint} ({type(e).__name__}: {' '.join(str(e).split())[:100]}). "
             "go online and run it again, or name files here with --input")
    return [File(path, found[path].size, found[path].lfs.sha256 if found[path].lfs else found[path].blob_id, repo, info.sha) for path in paths]


def choose(info, config, split):
    """The readable files of a data set that belong to a configuration and a split, and the names of its configurations."""
    names = sorted(file.rfilename for file in info.siblings if re.search(READABLE, file.rfilename) and not re.match(r'(README|LICENSE)', file.rfilename))
    names = [name for name in names if name.endswith('.parquet')] or [name for name in names if not name.endswith('.md')]
    described = {str(entry.get('config_name')): entry.get('data_files') or [] for entry in (info.card_data or {}).get('configs') or [] if isinstance(entry, dict)}
    default = config or ('default' if 'default' in described else next(iter(described), ''))
    patterns = described.get(default, [])  # a pattern, patterns, or {'split', 'path': pattern or patterns}
    patterns = [p if isinstance(p, dict) else {'path': p} for p in (patterns if isinstance(patterns, list) else [patterns])]
    wanted = [glob_to_re(path) for p in patterns if p.get('split', split or 'train') == (split or 'train')
              for path in (p['path'] if isinstance(p['path'], list) else [p['path']])]
    if wanted:
        return [name for name in names if any(re.fullmatch(pattern, name) for pattern in wanted)], set(described)
    folders = {name.partition('/')[0] for name in names if '/' in name}
    if config:
        names = [name for name in names if name.startswith(config + '/')]
    elif 'default' in folders:
        names = [name for name in names if name.startswith('default/')]
    of_split = [name for name in names if re.search(rf"(^|[/_.-]){re.escape(split or 'train')}([/_.-]|$)", name)]
    others = any(re.search(r'(^|[/_.-])(train|validation|valid|test)([/_.-]|$)', name) for name in names)
    return of_split if of_split or split or others else names, set(described) or folders


def glob_to_re(pattern):
    return re.sub(r'\\\*\\\*/|\\\*\\\*|\\\*|\\\?', lambda m: {r'\*\*/': '(.*/)?', r'\*\*': '.*', r'\*': '[^/]*', r'\?': '[^/]'}[m[0]], re.escape(pattern))


def fetch(file, folder):
    """Download a file of the Hub into `folder`, going on with what is there of it; its path when size and checksum are right."""
    import huggingface_hub
    from huggingface_hub.file_download import http_get  # hf_hub_download begins anew after a kill, and these files are large
    huggingface_hub.utils.disable_progress_bars()
    huggingface_hub.utils.logging.set_verbosity_error()
    path, what = os.path.join(folder, f'{file.stamp[:16]}_{os.path.basename(file.path)}'), ''  # another version is another file
    url = huggingface_hub.hf_hub_url(file.repo, file.path, repo_type='dataset', revision=file.revision)
    os.makedirs(folder, exist_ok=True)
    for wait in (*WAITS, None):
        try:
            with open(path, 'ab') as f:
                if f.tell() > file.size:
                    f.truncate(0)
                http_get(url, f, resume_size=f.tell(), headers=huggingface_hub.utils.build_hf_headers(), expected_size=file.size)
            digest = hashlib.sha256() if len(file.stamp) == 64 else hashlib.sha1(b'blob %d\0' % file.size)  # small files are kept by git
            with open(path, 'rb') as f:
                while block := f.read(CHUNK):
                    digest.update(block)
            if os.path.getsize(path) == file.size and digest.hexdigest() == file.stamp:
                return path
            what = f"{os.path.getsize(path):,} bytes of {file.size:,} came, with the wrong checksum"
            os.remove(path)
        except Exception as e:  # the network has many ways to fail, and they have no common class
            if getattr(e, 'errno', None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES):
                raise  # it was the disk
            what = f"{type(e).__name__}: {' '.join(str(e).split())[:150]}"
            if getattr(getattr(e, 'response', None), 'status_code', None) in (401, 403, 404):
                break  # and will be
        if wait is not None:
            print(f"note: {file.path}: {what}; again in {wait} s", flush=True)
            time.sleep(wait)
    raise Problem(f"{file.path} of hf:{file.repo} cannot be fetched from {huggingface_hub.constants.ENDPOINT} ({what}). "
                  "run it again: it goes on where it was")


# -----------------------------------------------------------------------------
# a tokenizer of one's own

PATTERN = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s")  # GPT-4's


def train_bpe(n_vocab, texts):
    """A byte-level BPE of n_vocab ids, <|endoftext|> the last of them, learnt from `texts` by the `tokenizers` package. It is used
    by tiktoken, which is three times as fast."""
    try:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    except ImportError:
        fail("to train a tokenizer a package is needed that is not installed (tokenizers). pip install tokenizers")
    # Oniguruma, which `tokenizers` uses, reads {1,3}+ as "again and again", not as possessive, and $ as the end of a line
    onig = re.sub(r'(\{\d+(?:,\d*)?\})\+', r'\1', PATTERN).replace('$', r'\z')
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(onig), 'isolated'),
                                                     pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=n_vocab - 1, initial_alphabet=alphabet, show_progress=False))
    bytes_of = {letter: byte for byte, letter in byte_letters().items()}
    learnt = sorted((id, bytes(bytes_of[letter] for letter in token)) for token, id in learner.get_vocab().items())
    tokens = [bytes([b]) for b in range(256)] + [token for _, token in learnt if len(token) > 1]
    if len(tokens) < n_vocab - 1:
        print(f"note: the text is enough for {len(tokens) + 1:,} ids, not for {n_vocab:,}")
    ranks = b''.join(base64.b64encode(token) + b' %d\n' % rank for rank, token in enumerate(tokens))
    return make_tokenizer({'kind': 'tiktoken', 'name': f'bpe:{n_vocab}', 'pat_str': PATTERN, 'special_tokens': {END_OF_TEXT: len(tokens)}, 'ranks': ranks})


def sample(documents, files):
    """Texts to learn from: all of it if it is little, else the beginnings of files spread over all; of the Hub's files the first one."""
    files = files[:1] if any(file.repo for file in files) else files[::-(-len(files) // 64)]
    for file in files:
        left = SAMPLE // len(files)
        for _, _, pieces, _ in documents([file]):
            for text in cut_up(pieces, letter_then_space):
                yield from (text[i:i + 65536] for i in range(0, min(len(text), left), 65536))  # longer ones take much memory
                left -= len(text)
                if left <= 0:
                    break
            if left <= 0:
                break


# -----------------------------------------------------------------------------
# what is in a folder


def blocks(paths, dtype, start=0):
    """The ids in the files from number `start` on, some at a time."""
    for path in paths:
        n = os.path.getsize(path) // dtype.itemsize
        with open(path, 'rb') as f:
            f.seek(min(start, n) * dtype.itemsize)
            while block := f.read(1 << 22):
                yield np.frombuffer(block, dtype)
        start = max(0, start - n)


def show(folder):
    """Print what a dataset is and check what it promises; True if all of it holds."""
    quiet_when_cut_off()
    if not bin_files(folder, 'train'):
        fail(missing(os.path.basename(folder), os.path.dirname(folder)))
    meta = read_meta(folder)
    state = read_tokenizer_state(folder, meta)
    tok, dtype, fine = make_tokenizer(state), np.dtype(meta['dtype']).newbyteorder('<'), True
    print(f"{folder}: {meta['vocab_size']:,} ids ({state.get('name', state['kind'])}, {meta['dtype']}), from {meta.get('source', 'an unknown source')}")
    if 'command' in meta:
        print(f"made by: {meta['command']}")

    def check(what, holds):
        nonlocal fine
        fine &= bool(holds)
        print(f"  {'ok   ' if holds else 'WRONG'} {what}")

    lengths = tok.byte_lengths()
    for split in ('train', 'val'):
        entry = meta['splits'].get(split, {})
        paths = bin_files(folder, split)
        if not paths and not entry:
            continue
        parts = entry.get('shards') or [{'file': os.path.basename(path), 'tokens': entry.get('tokens'), 'sha256': entry.get('sha256')} for path in paths]
        n = n_bytes = largest = documents = 0
        right_sizes = [os.path.basename(path) for path in paths] == [part['file'] for part in parts]
        right_sums = True
        for path, part in zip(paths, parts):
            digest, tokens = hashlib.sha256(), 0
            for ids in blocks([path], dtype):
                digest.update(ids)
                tokens, largest = tokens + len(ids), max(largest, int(ids.max()))
                n_bytes += int(lengths[ids[ids < len(lengths)]].sum())
                documents += int((ids == meta['end_of_text']).sum()) if meta.get('end_of_text') is not None else 0
            n += tokens
            right_sizes &= part['tokens'] in (None, tokens) and os.path.getsize(path) % dtype.itemsize == 0
            right_sums &= part['sha256'] in (None, digest.hexdigest())
        print(f"{split}: {n:,} tokens, {n_bytes:,} bytes of text, {n_bytes / max(1, n):.2f} bytes per token, "
              f"{entry.get('documents', documents):,} documents, {len(paths)} file{'s' * (len(paths) != 1)}")
        check("the files and their lengths", right_sizes and entry.get('tokens', n) == n)
        check(f"largest id {largest:,}, vocabulary {meta['vocab_size']:,}", largest < meta['vocab_size'])
        check("checksums" if parts and parts[0]['sha256'] else "no checksums to compare with", right_sums)
        if 'bytes' in entry:
            check("bytes of text", entry['bytes'] == n_bytes)
        if documents and 'documents' in entry:
            check(f"{END_OF_TEXT} before each document", documents == entry['documents'])
        begin = np.concatenate(list(itertools.islice(blocks(paths, dtype), 1)) or [np.zeros(0, dtype)])[:2000]
        cuts = (np.flatnonzero(begin == meta['end_of_text'])[:4].tolist() if documents else []) or [0]
        for a, b in zip(cuts, [*cuts[1:], len(begin)][:3]):
            text = tok.decode(begin[a:b][:80].tolist())
            print(f"  | {''.join(c if c.isprintable() else ' ' for c in text)[:150]}")
    return fine
