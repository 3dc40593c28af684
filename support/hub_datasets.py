"""
Data sets of the Hugging Face Hub: their parquet, .jsonl and .txt files, downloaded one after the other,
checked, read and removed. A script that would make a data set is never run; the Hub's own parquet
conversion is read instead.
"""

import contextlib
import errno
import hashlib
import io
import os
import re
import time

from configurator import fail
from support.prefetch import Prefetch
from support.read_text import READABLE, File, Problem, kind_of

WAITS = (1, 2, 5, 10, 30)  # seconds before a download is tried again
DISK_ERRORS = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES
GLOB_TO_RE = {'**/': '(.*/)?', '**': '.*', '*': '[^/]*', '?': '[^/]'}


# -----------------------------------------------------------------------------
# which files


def find_files(spec):
    """The files of OWNER/NAME[@REVISION][:CONFIG][:SPLIT], with sizes and checksums."""
    try:
        from huggingface_hub import HfApi, constants, errors
    except ImportError:
        fail(f"to read hf:{spec} a package is needed that is not installed (huggingface_hub). "
             "pip install huggingface_hub pyarrow")
    endpoint = constants.ENDPOINT
    try:
        return ask_hub(spec, endpoint, HfApi(), errors)
    except errors.GatedRepoError:
        fail(f"hf:{spec} is open only to those who accepted its terms at {endpoint}. accept them, "
             "then: hf auth login")
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError):
        fail(f"no such data set at {endpoint} (hf:{spec}). name OWNER/NAME as it is written there; "
             "for a private one: hf auth login")
    except Exception as e:  # the network has many ways to fail, and they have no common class
        what = f"{type(e).__name__}: {' '.join(str(e).split())[:100]}"
        fail(f"cannot get the list of files of hf:{spec} from {endpoint} ({what}). "
             "go online and run it again, or name files on this machine with --input")


def ask_hub(spec, endpoint, api, errors):
    repo, config, split = (spec.split(':') + ['', ''])[:3]
    repo, _, revision = repo.partition('@')
    if config in ('train', 'validation', 'test') and not split:
        config, split = '', config
    info = api.dataset_info(repo, revision=revision or None)
    paths, configs = choose_files(info, config, split)
    if not paths and not revision:  # made by a script or from archives: the Hub keeps its own conversion
        with contextlib.suppress(errors.RevisionNotFoundError):
            info = api.dataset_info(repo, revision='refs/convert/parquet')
            paths, more = choose_files(info, config, split)
            configs |= more
    if not paths:
        fail(f"no parquet or text files of that name in hf:{spec} at {endpoint}. "
             f"name one of its configurations: {', '.join(sorted(configs)) or 'none was found'}")
    files = []
    for i in range(0, len(paths), 500):
        some = paths[i:i + 500]
        found = api.get_paths_info(repo, some, revision=info.sha, repo_type='dataset')
        found = {file.path: file for file in found}
        files += [as_file(found[path], repo, info.sha) for path in some]
    return files


def as_file(found, repo, revision):
    checksum = str(found.lfs.sha256 if found.lfs else found.blob_id)
    # it becomes part of a file's name, and a mirror may answer anything
    if not re.fullmatch('[0-9a-f]{40}|[0-9a-f]{64}', checksum) or not isinstance(found.size, int):
        raise ValueError(f"{found.path[:60]} has no checksum or size that can be ({checksum[:20]!r})")
    return File(found.path, found.size, checksum, repo, revision)


def choose_files(info, config, split):
    """The readable files of a configuration and a split ('' for the default ones), and the names of the
    data set's configurations. The card describes both; without it the names of folders and files have to
    tell."""
    names = sorted(file.rfilename for file in info.siblings if re.search(READABLE, file.rfilename))
    names = [name for name in names if not name.startswith(('README', 'LICENSE'))]
    tables = [name for name in names if name.endswith('.parquet')]
    names = tables or [name for name in names if kind_of(name) in ('txt', 'jsonl')]

    entries = (info.card_data or {}).get('configs') or []
    described = {str(entry.get('config_name')): entry.get('data_files') or []
                 for entry in entries if isinstance(entry, dict)}
    default = 'default' if 'default' in described else next(iter(described), '')
    patterns = patterns_of(described.get(config or default, []), split or 'train')
    if patterns:
        chosen = [name for name in names if any(re.fullmatch(pattern, name) for pattern in patterns)]
        return chosen, set(described)

    folders = {name.partition('/')[0] for name in names if '/' in name}
    folder = config or ('default' if 'default' in folders else '')
    if folder:
        names = [name for name in names if name.startswith(folder + '/')]
    chosen = [name for name in names if contains_word(name, re.escape(split or 'train'))]
    any_split = 'train|validation|valid|test'
    if not split and not any(contains_word(name, any_split) for name in names):
        chosen = names
    return chosen, set(described) or folders


def patterns_of(data_files, split):
    """Regular expressions for the files of a split. A card gives a pattern, a list of them, or a list of
    {'split', 'path': a pattern or a list of them}."""
    found = []
    for entry in data_files if isinstance(data_files, list) else [data_files]:
        if not isinstance(entry, dict):
            entry = {'path': entry}
        if entry.get('split', split) == split:
            paths = entry['path']
            found += paths if isinstance(paths, list) else [paths]
    return [glob_to_re(path) for path in found]


def glob_to_re(pattern):
    parts = re.split(r'(\*\*/|\*\*|\*|\?)', pattern)
    return ''.join(GLOB_TO_RE.get(part) or re.escape(part) for part in parts)


def contains_word(name, word):
    return re.search(rf'(^|[/_.-])({word})([/_.-]|$)', name)


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
            os.remove(path)
    finally:
        ahead.close()


def download(file, folder):
    """Download a File of the Hub into `folder`, continuing with what is there of it. Returns its path
    once size and checksum are right; raises Problem if that does not happen."""
    import huggingface_hub
    huggingface_hub.utils.disable_progress_bars()
    huggingface_hub.utils.logging.set_verbosity_error()
    # another version of a file gets another name
    path = os.path.join(folder, f'{file.stamp[:16]}_{os.path.basename(file.path)}')
    os.makedirs(folder, exist_ok=True)
    for wait in (*WAITS, None):
        try:
            download_rest(file, path)
            if os.path.getsize(path) == file.size and checksum(path, file) == file.stamp:
                return path
            what = f"{os.path.getsize(path):,} bytes of {file.size:,} came, with the wrong checksum"
            os.remove(path)
        except Exception as e:  # the network has many ways to fail, and they have no common class
            if getattr(e, 'errno', None) in DISK_ERRORS:
                raise
            what = f"{type(e).__name__}: {' '.join(str(e).split())[:150]}"
            if getattr(getattr(e, 'response', None), 'status_code', None) in (401, 403, 404):
                break  # it will be the same next time
        if wait is not None:
            print(f"note: {file.path}: {what}; trying again in {wait} s", flush=True)
            time.sleep(wait)
    raise Problem(f"{file.path} of hf:{file.repo} cannot be downloaded from "
                  f"{huggingface_hub.constants.ENDPOINT} ({what}). "
                  "run it again: it continues where it stopped")


def download_rest(file, path):
    """Append to `path` what it lacks. hf_hub_download() would start again after a kill."""
    import huggingface_hub
    from huggingface_hub.file_download import http_get
    url = huggingface_hub.hf_hub_url(file.repo, file.path, repo_type='dataset', revision=file.revision)
    headers = huggingface_hub.utils.build_hf_headers()
    with Announced(path, file.size) as f:
        if f.tell() > file.size:
            f.truncate(0)
        http_get(url, f, resume_size=f.tell(), headers=headers, expected_size=file.size)


class Announced(io.BufferedWriter):
    """A file that is appended to, up to the size that was announced: whoever sends more could fill the
    disk."""

    def __init__(self, path, size):
        super().__init__(io.FileIO(path, 'a'))
        self.size = size

    def write(self, data):
        if self.tell() + len(data) > self.size:
            raise ValueError(f"more than the {self.size:,} bytes that were announced")
        return super().write(data)


def checksum(path, file):
    """The checksum that the Hub has for a file: sha256, or git's sha1 if it is small."""
    digest = hashlib.sha256() if len(file.stamp) == 64 else hashlib.sha1(b'blob %d\0' % file.size)
    with open(path, 'rb') as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
