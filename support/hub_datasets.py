"""
What is downloaded: files of models of the Hugging Face Hub, the files of its data sets, and tinyshakespeare.
A data set's parquet, .jsonl and .txt files are downloaded one after the other, checked, read and removed. A
script that would make it is never run; the Hub's own parquet conversion is read instead.
"""

import contextlib
import dataclasses
import errno
import hashlib
import os
import re
import time
import urllib.request

from configurator import fail
from support.errors import first_line
from support.files import write_whole
from dataset import Prefetch

# as nanoGPT calls them
GPT2_NAMES = {name: 'openai-community/' + name for name in ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')}
TINYSHAKESPEARE = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'
TINYSHAKESPEARE_SHA256 = '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'
WAITS = (1, 2, 5, 10, 30)  # seconds before a download is tried again
DISK_ERRORS = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES
GLOB_TO_RE = {'**/': '(.*/)?', '**': '.*', '*': '[^/]*', '?': '[^/]'}


def hub():
    """The package huggingface_hub, without its own lines and bars."""
    try:
        import huggingface_hub
        import huggingface_hub.utils
    except ImportError:
        fail("for the Hugging Face Hub a package is needed that is not installed (huggingface_hub). "
             "pip install huggingface_hub")
    huggingface_hub.utils.disable_progress_bars()
    huggingface_hub.utils.logging.set_verbosity_error()  # not a line for each of its retries
    return huggingface_hub


def one_line(e):
    """The message of an exception, for one of ours."""
    return first_line(e)


def explain(e, kind, what, remedy):
    """End with one line: because of the exception e of huggingface_hub's there is no `what`."""
    errors, endpoint = hub().errors, hub().constants.ENDPOINT
    status = getattr(getattr(e, 'response', None), 'status_code', None)
    if isinstance(e, errors.GatedRepoError):
        problem, remedy = f"{what} wants its terms accepted at {endpoint}", "accept them, then: hf auth login"
    elif isinstance(e, (errors.RepositoryNotFoundError, errors.RevisionNotFoundError,
                        errors.HFValidationError)):
        problem = f"no such {kind} at {endpoint} ({what})"
        remedy = "name OWNER/NAME as it is written there; for a private one: hf auth login"
    elif isinstance(e, errors.EntryNotFoundError) and status:
        problem = f"{endpoint} has no {what}"
    else:  # the network has many ways to fail, and they have no common class
        why = f"{type(e).__name__}: {one_line(e)}"
        problem = f"{what} cannot be had, {endpoint} does not answer as it should ({why})"
        remedy = f"go online or try again, or {remedy}"
    fail(f"{problem}. {remedy}", everywhere=True)


# -----------------------------------------------------------------------------
# files of a model


def is_hub_name(source):
    """Whether `source` may name a model on the Hub: gpt2 and its sisters, OWNER/NAME, OWNER/NAME@REVISION."""
    if os.path.exists(source) or source.endswith(('.pt', '.bin', '.safetensors')):
        return False
    return source in GPT2_NAMES or bool(re.fullmatch(r'[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?', source))


def is_folder(source):
    return os.path.isfile(os.path.join(source, 'config.json'))


def repo_of(source):
    """'gpt2' -> ('openai-community/gpt2', None); 'a/b@main' -> ('a/b', 'main')"""
    repo, _, revision = GPT2_NAMES.get(source, source).partition('@')
    return repo, revision or None


def get_file(source, name, needed=True):
    """The path of the file `name` of the model `source`: in a folder, in Hugging Face's cache, or downloaded.
    If the model has no such file: an error if it is needed, else None."""
    if os.path.isdir(source):
        path = os.path.join(source, name)
        if needed and not os.path.isfile(path):
            fail(f"no {name} in {source}. name a folder that transformers' save_pretrained or export.py "
                 "wrote")
        return path if os.path.isfile(path) else None
    package, (repo, revision) = hub(), repo_of(source)
    try:
        return package.hf_hub_download(repo, name, revision=revision)
    except Exception as e:
        if isinstance(e, package.errors.LocalEntryNotFoundError):  # the Hub does not answer
            e = e.__cause__ or e
            cached = package.try_to_load_from_cache(repo, name, revision=revision)
            if cached is None:  # nanoGPT's users have it as plain gpt2
                cached = package.try_to_load_from_cache(source.partition('@')[0], name)
            if isinstance(cached, str):
                return cached
            # the cache knows that there is no such file, or it was never asked for
            if not needed and (cached is not None or isinstance(e, package.errors.OfflineModeIsEnabled)):
                return get_file(source, 'config.json') and None
        elif not needed and isinstance(e, package.errors.EntryNotFoundError):
            return None
        explain(e, 'model', f"{name} of {source}", "name a folder")


# -----------------------------------------------------------------------------
# which files of a data set


@dataclasses.dataclass
class File:
    """A file with text, of this machine or of a data set of the Hub."""
    path: str
    size: int
    stamp: str  # changes when the content does: the time it was modified, or the Hub's checksum
    repo: str = None  # of the Hub
    revision: str = None


def find_files(spec):
    """The files of OWNER/NAME[@REVISION][:CONFIG][:SPLIT], with sizes and checksums."""
    repo, config, split = (spec.split(':') + ['', ''])[:3]
    repo, _, revision = repo.partition('@')
    if config in ('train', 'validation', 'test') and not split:
        config, split = '', config
    try:
        api = hub().HfApi()
        info = api.dataset_info(repo, revision=revision or None)
        paths, configs = choose_files(info, config, split)
        if not paths and not revision:  # made by a script or from archives: the Hub keeps its own conversion
            with contextlib.suppress(hub().errors.RevisionNotFoundError):
                info = api.dataset_info(repo, revision='refs/convert/parquet')
                paths, more = choose_files(info, config, split)
                configs |= more
        found = {}
        for i in range(0, len(paths), 500):
            some = api.get_paths_info(repo, paths[i:i + 500], revision=info.sha, repo_type='dataset')
            found |= {file.path: file for file in some}
    except Exception as e:
        explain(e, 'data set', f'hf:{spec}', "name files on this machine with --input")
    if not paths:
        fail(f"no parquet or text files of that name in hf:{spec}. name one of its configurations: "
             f"{', '.join(sorted(configs)) or 'none was found'}")
    stamps = {path: file.lfs.sha256 if file.lfs else file.blob_id for path, file in found.items()}
    return [File(path, found[path].size, stamps[path], repo, info.sha) for path in paths]


def choose_files(info, config, split):
    """The readable files of a configuration and a split ('' for the default ones), and the names of the
    data set's configurations. The card describes both; without it the names of folders and files have to
    tell."""
    every = sorted(file.rfilename for file in info.siblings)
    every = [name for name in every if not name.startswith(('README', 'LICENSE'))]
    names = [name for name in every if name.endswith('.parquet')]
    names = names or [name for name in every if re.search(r'\.(txt|jsonl)(\.gz|\.zst)?$', name)]

    entries = (info.card_data or {}).get('configs') or []
    described = {str(entry['config_name']): entry.get('data_files') or [] for entry in entries}
    default = 'default' if 'default' in described else next(iter(described), '')
    patterns = patterns_of(described.get(config or default, []), split or 'train')
    if patterns:
        return [name for name in names if re.fullmatch('|'.join(patterns), name)], set(described)

    folders = {name.partition('/')[0] for name in names if '/' in name}
    folder = config or ('default' if 'default' in folders else '')
    names = [name for name in names if not folder or name.startswith(folder + '/')]
    any_split = [name for name in names if contains_word(name, 'train|validation|valid|test')]
    if split or any_split:
        names = [name for name in names if contains_word(name, re.escape(split or 'train'))]
    return names, set(described) or folders


def patterns_of(data_files, split):
    """Regular expressions for the files of a split. A card gives a pattern, a list of them, or a list of
    {'split', 'path': a pattern or a list of them}."""
    def listed(value):
        return value if isinstance(value, list) else [value]

    entries = [entry if isinstance(entry, dict) else {'path': entry} for entry in listed(data_files)]
    return [glob_to_re(path) for entry in entries if entry.get('split', split) == split
            for path in listed(entry['path'])]


def glob_to_re(pattern):
    parts = re.split(r'(\*\*/|\*\*|\*|\?)', pattern)
    return ''.join(GLOB_TO_RE.get(part) or re.escape(part) for part in parts)


def contains_word(name, words):
    return re.search(rf'(^|[/_.-])({words})([/_.-]|$)', name)


# -----------------------------------------------------------------------------
# downloads


def local_paths(files, first, folder):
    """Yield the number and the path of each file from number `first` on. Files of the Hub are downloaded
    into `folder`, the next one while the caller reads, and removed after they were read."""
    if not any(file.repo for file in files):
        yield from ((i, files[i].path) for i in range(first, len(files)))
        return
    ahead = Prefetch((download(file, folder) for file in files[first:]), ahead=1)
    try:
        for i in range(first, len(files)):
            path = next(ahead)
            yield i, path
            os.remove(os.path.realpath(path))
    finally:
        ahead.close()


def download(file, folder):
    """Download a File of the Hub into `folder`, a cache of huggingface_hub's. Returns its path once size and
    checksum are right; ends with status 2 if that does not happen."""
    for wait in (*WAITS, None):
        try:
            path = hub().hf_hub_download(file.repo, file.path, repo_type='dataset', revision=file.revision,
                                         cache_dir=folder)
            if checksum(path, file) == file.stamp:
                return path
            os.remove(os.path.realpath(path))
            raise ValueError("what came has the wrong checksum")
        except Exception as e:  # the network has many ways to fail, and they have no common class
            if getattr(e, 'errno', None) in DISK_ERRORS:
                raise
            # some will be the same next time
            if wait is None or getattr(getattr(e, 'response', None), 'status_code', None) in (401, 403, 404):
                explain(e, 'data set', f"{file.path} of hf:{file.repo}",
                        "run it again: it continues where it stopped")
            print(f"note: {file.path}: {first_line(e)}; trying again in {wait} s", flush=True)
            time.sleep(wait)


def checksum(path, file):
    """The checksum that the Hub has for a file: sha256, or git's sha1 if it is small."""
    digest = hashlib.sha256() if len(file.stamp) == 64 else hashlib.sha1(b'blob %d\0' % file.size)
    with open(path, 'rb') as f:
        return hashlib.file_digest(f, lambda: digest).hexdigest()


def find_tinyshakespeare(path):
    """nanoGPT's first text, at `path`, downloaded if there is no such file."""
    if not os.path.exists(path):
        print(f"downloading {TINYSHAKESPEARE}")
        try:
            with urllib.request.urlopen(TINYSHAKESPEARE, timeout=60) as response:
                content = response.read()
            if hashlib.sha256(content).hexdigest() != TINYSHAKESPEARE_SHA256:
                raise OSError(f"{len(content):,} bytes with a wrong checksum came")
        except OSError as e:
            fail(f"cannot download {TINYSHAKESPEARE} ({first_line(e)}). put that file at {path}, or name it "
                 "with --input=FILE")
        write_whole(path, content)
