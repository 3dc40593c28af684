"""
What is downloaded: files of models of the Hugging Face Hub, the files of its data sets, tinyshakespeare and
benchmarks.
A data set's parquet, .jsonl and .txt files are downloaded one after the other, checked, read and removed. A
script that would make it is never run; the Hub's own parquet conversion is read instead.
"""

import contextlib
import dataclasses
import fnmatch
import hashlib
import os
import re
import urllib.request
import zipfile

from configurator import fail
from support.dataset_meta import sha256_of
from support.errors import first_line
from support.files import write_whole

# as nanoGPT calls them
GPT2_NAMES = {name: 'openai-community/' + name for name in 'gpt2 gpt2-medium gpt2-large gpt2-xl'.split()}
# url, sha256
TINYSHAKESPEARE = (
    'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt',
    '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed')
# what eval.py --tasks reads
BENCHMARKS = {
    'hellaswag': 'https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl',
    'core': 'https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip',
}


def hub():
    """The package huggingface_hub, without its own lines and bars."""
    try:
        import huggingface_hub.utils
    except ImportError:
        fail("for the Hugging Face Hub a package is needed that is not installed (huggingface_hub). "
             "pip install huggingface_hub")
    huggingface_hub.utils.disable_progress_bars()
    huggingface_hub.utils.logging.set_verbosity_error()  # not a line for each of its retries
    return huggingface_hub


def explain(e, what, remedy):
    """End with one line: because of the exception e of huggingface_hub's there is no `what`."""
    fail(f"{what} cannot be had from {hub().constants.ENDPOINT} ({type(e).__name__}: {first_line(e)}). check "
         "its name (no file or folder here has it); accept its terms and log in if it wants that (hf auth "
         f"login); go online and try again; or {remedy}", everywhere=True)


# -----------------------------------------------------------------------------
# files of a model


def is_hub_name(source):
    """Whether `source` may name a model on the Hub: gpt2 and its sisters, OWNER/NAME, OWNER/NAME@REVISION."""
    if os.path.exists(source) or source.endswith(('.pt', '.bin', '.safetensors')):
        return False
    return source in GPT2_NAMES or bool(re.fullmatch(r'[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?', source))


def is_folder(source):
    return os.path.isfile(os.path.join(source, 'config.json'))


def get_file(source, name, needed=True):
    """The path of the file `name` of the model `source`: in a folder, in Hugging Face's cache, or downloaded.
    If the model has no such file: an error if it is needed, else None."""
    if os.path.isdir(source):
        path = os.path.join(source, name)
        if needed and not os.path.isfile(path):
            fail(f"no {name} in {source}. name a folder of transformers' save_pretrained or export.py")
        return path if os.path.isfile(path) else None
    package, (repo, _, revision) = hub(), GPT2_NAMES.get(source, source).partition('@')
    revision = revision or None
    try:
        return package.hf_hub_download(repo, name, revision=revision)
    except Exception as e:  # the network has many ways to fail, and they have no common class
        absent = isinstance(e, package.errors.EntryNotFoundError)
        if isinstance(e, package.errors.LocalEntryNotFoundError):  # the Hub does not answer
            # the cache knows that there is no such file, or it was never asked for
            cached = package.try_to_load_from_cache(repo, name, revision=revision)
            absent = cached is not None or isinstance(e.__cause__, package.errors.OfflineModeIsEnabled)
        if absent and not needed:
            return None
        explain(e, f"{name} of {source}", "name a folder")


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
    try:
        api = hub().HfApi()
        info = api.dataset_info(repo, revision=revision or None, files_metadata=True)
        names = choose_files(info, config, split)
        if not names and not revision:  # made by a script or from archives: the Hub keeps its own conversion
            with contextlib.suppress(hub().errors.RevisionNotFoundError):
                info = api.dataset_info(repo, revision='refs/convert/parquet', files_metadata=True)
                names = choose_files(info, config, split)
    except Exception as e:
        explain(e, f'hf:{spec}', "name files on this machine with --input")
    if not names:
        fail(f"no parquet or text files in hf:{spec}. name a configuration and split of its page there")
    return [File(file.rfilename, file.size, file.lfs.sha256 if file.lfs else file.blob_id, repo, info.sha)
            for file in sorted(info.siblings, key=lambda file: file.rfilename) if file.rfilename in names]


def choose_files(info, config, split):
    """The readable files of a configuration and a split ('' for the default ones). The data set's card
    describes them; where it does not, the names of folders and files have to tell."""
    every = sorted(file.rfilename for file in info.siblings)
    names = [name for name in every if name.endswith('.parquet')]
    texts = re.compile(r'(?!README|LICENSE).*\.(txt|jsonl)(\.gz|\.zst)?')
    names = names or [name for name in every if texts.fullmatch(name)]
    entries = (info.card_data or {}).get('configs') or []
    described = {str(entry['config_name']): entry.get('data_files') or [] for entry in entries}
    default = 'default' if 'default' in described else next(iter(described), '')
    if patterns := patterns_of(described.get(config or default, []), split or 'train'):
        return [name for name in names if any(fnmatch.fnmatch(name, p) for p in patterns)]
    for asked, usual in ((config, 'default'), (split, 'train')):
        found = [name for name in names
                 if re.search(rf'(^|[/_.-]){re.escape(asked or usual)}([/_.-]|$)', name)]
        names = found if asked or found else names
    return names


def patterns_of(data_files, split):
    """The patterns of a split's files. A card gives a pattern, a list of them, or a list of {'split', 'path':
    a pattern or a list of them}."""
    if isinstance(data_files, list):
        return [pattern for entry in data_files for pattern in patterns_of(entry, split)]
    if isinstance(data_files, dict):
        return patterns_of(data_files['path'], split) if data_files['split'] == split else []
    return [data_files]


# -----------------------------------------------------------------------------
# downloads


def local_paths(files, first, folder):
    """Yield the number and the path of each file from number `first` on. Files of the Hub are downloaded
    into `folder` one by one, and removed after they were read."""
    for i, file in enumerate(files[first:], first):
        path = download(file, folder) if file.repo else file.path
        yield i, path
        if file.repo:
            os.remove(os.path.realpath(path))


def download(file, folder):
    """Download a File of the Hub into `folder`, a cache of huggingface_hub's, which tries again where the
    network fails. Returns its path once the checksum is right; else ends with status 2."""
    try:
        path = hub().hf_hub_download(file.repo, file.path, repo_type='dataset', revision=file.revision,
                                     cache_dir=folder)
        if len(file.stamp) == 64 and sha256_of(path) != file.stamp:  # small ones have git's sha1 alone
            os.remove(os.path.realpath(path))
            raise ValueError("what came has the wrong checksum")
        return path
    except Exception as e:
        explain(e, f"{file.path} of hf:{file.repo}", "run it again: it continues where it stopped")


def fetch(url, sha256, path):
    """Download `url` to `path`, if there is no such file. sha256: of its bytes; None: not known."""
    if os.path.exists(path):
        return
    print(f"downloading {url}", flush=True)
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            content = response.read()
        if sha256 not in (None, hashlib.sha256(content).hexdigest()):
            raise OSError(f"{len(content):,} bytes with a wrong checksum came")
    except OSError as e:
        fail(f"cannot download {url} ({first_line(e)}). put that file at {path}, and run it again")
    write_whole(path, content)


def fetch_benchmark(name, folder):
    """Put the files of a benchmark into `folder`, where eval.py --tasks looks for them."""
    path = os.path.join(folder, os.path.basename(BENCHMARKS[name]))
    fetch(BENCHMARKS[name], None, path)
    if path.endswith('.zip'):
        with zipfile.ZipFile(path) as f:
            f.extractall(folder)
        path = path.removesuffix('.zip')
    print(f"{path} is there. measure on it: python eval.py --tasks={name}")
