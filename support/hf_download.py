"""The files of a Hugging Face model: a folder's, or those of a name on the Hub, which are downloaded."""

import os
import re

from configurator import fail

# as nanoGPT calls them
GPT2_NAMES = {name: 'openai-community/' + name for name in ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')}


def is_hub_name(source):
    """Whether `source` may name a model on the Hub: gpt2 and its sisters, OWNER/NAME, OWNER/NAME@REVISION."""
    if os.path.exists(source) or source.endswith(('.pt', '.bin', '.safetensors')):
        return False
    return source in GPT2_NAMES or bool(re.fullmatch(r'[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?', source))


def is_folder(source):
    return os.path.isfile(os.path.join(source, 'config.json'))


def get_file(source, name, needed=True):
    """The path of the file `name` of the model `source`, a folder or a name on the Hub. If the model has no
    such file: an error if it is needed, else None."""
    if not os.path.isdir(source):
        return download(source, name, needed)
    path = os.path.join(source, name)
    if os.path.isfile(path):
        return path
    if needed:
        fail(f"no {name} in {source}. name a folder that transformers' save_pretrained or export.py wrote")
    return None


def has_file(source, name):
    """Whether the model `source` has the file `name`, without downloading it."""
    if os.path.isdir(source):
        return os.path.isfile(os.path.join(source, name))
    import huggingface_hub
    repo, revision = repo_of(source)
    try:
        return huggingface_hub.HfApi().file_exists(repo, name, revision=revision)
    except Exception:  # only a better message depends on it
        return False


def repo_of(source):
    """'gpt2' -> ('openai-community/gpt2', None); 'a/b@main' -> ('a/b', 'main')"""
    repo, _, revision = GPT2_NAMES.get(source, source).partition('@')
    return repo, revision or None


def download(source, name, needed):
    """get_file() of a name on the Hub: from Hugging Face's cache, or the network."""
    try:
        import huggingface_hub
        from huggingface_hub import constants, errors, utils
    except ImportError:
        fail(f"to download {source} a package is needed that is not installed (huggingface_hub). pip install "
             "huggingface_hub")
    utils.logging.set_verbosity_error()  # not a line for each of its retries
    endpoint = constants.ENDPOINT
    repo, revision = repo_of(source)
    try:
        return huggingface_hub.hf_hub_download(repo, name, revision=revision)
    except errors.LocalEntryNotFoundError as e:  # also an EntryNotFoundError, therefore first
        return without_network(source, name, needed, e.__cause__)
    except errors.EntryNotFoundError:
        if needed:
            fail(f"no {name} in {source} at {endpoint}. choose a model that has it", everywhere=True)
        return None
    except errors.GatedRepoError:
        fail(f"{source} is open only to those who accepted its terms at {endpoint}. accept them, then: hf "
             "auth login", everywhere=True)
    except errors.RepositoryNotFoundError:
        fail(f"no such model at {endpoint} ({source}). name a folder, or OWNER/NAME as it stands there; for "
             "a private one: hf auth login", everywhere=True)
    except Exception as e:  # the network has many ways to fail, and they have no common class
        fail(f"{name} of {source} cannot be downloaded ({type(e).__name__}: {one_line(e)}). try again, or "
             "name a folder", everywhere=True)


def without_network(source, name, needed, cause):
    """download() where the Hub does not answer, because of the exception `cause`."""
    import huggingface_hub
    from huggingface_hub import constants, errors
    repo, revision = repo_of(source)
    cached = huggingface_hub.try_to_load_from_cache(repo, name, revision=revision)
    if cached is None:  # nanoGPT's users have it as plain gpt2
        cached = huggingface_hub.try_to_load_from_cache(source.partition('@')[0], name)
    if isinstance(cached, str):
        return cached
    if not needed:
        if cached is not None:  # the cache knows that there is no such file
            return None
        if isinstance(cause, errors.OfflineModeIsEnabled):
            get_file(source, 'config.json')  # the model is in the cache, this file was never asked for
            return None
    status = getattr(getattr(cause, 'response', None), 'status_code', None)
    what = f"answers with status {status}" if status else f"does not answer ({type(cause).__name__})"
    remedy = 'go online or try again, or name a folder'
    if status in (401, 403):
        remedy = 'hf auth login, if it is private'
    fail(f"{name} of {source} is neither in a folder nor in Hugging Face's cache, and {constants.ENDPOINT} "
         f"{what}. {remedy}", everywhere=True)


def one_line(e):
    """The message of an exception, for one of ours."""
    return ' '.join(str(e).split())[:150]
