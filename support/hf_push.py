"""Uploading a folder to the Hugging Face Hub."""

import os

from configurator import fail
from support.hub_datasets import one_line


def check(name):
    """The problems with `name` for a repository, in a list."""
    from huggingface_hub import errors, utils
    try:
        utils.validate_repo_id(name)
        if '/' in name:
            return []
    except errors.HFValidationError:
        pass
    return [f"{name!r} names no repository of the Hub. use --push=OWNER/NAME"]


def log_in():
    """An error unless the Hub knows who we are: better before a long work than after it."""
    from huggingface_hub import HfApi, constants, errors
    try:
        return HfApi().whoami()['name']
    except errors.LocalTokenNotFoundError:
        fail("to upload you have to be logged in to Hugging Face (no token found). hf auth login")
    except Exception as e:  # the network has many ways to fail, and they have no common class
        status = getattr(getattr(e, 'response', None), 'status_code', None)
        if status == 401:
            fail(f"{constants.ENDPOINT} does not accept your token ({one_line(e)}). hf auth login")
        fail(f"{constants.ENDPOINT} cannot be asked who you are ({type(e).__name__}: {one_line(e)}). try "
             "again, or export without --push")


def push(folder, name):
    """Upload a folder's files to the repository OWNER/NAME, which is made, private, if there is none. Returns
    its address."""
    from huggingface_hub import HfApi, utils
    utils.disable_progress_bars()
    try:
        api = HfApi()
        api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message='Upload by flatgpt')
    except Exception as e:  # as above
        fail(f"{folder} is written, but could not be uploaded to {name} ({type(e).__name__}: {one_line(e)}). "
             f"try again: hf upload {name} {folder}")
    return f'{api.endpoint}/{name}'


def listing(folder):
    """Lines that say what would be uploaded."""
    for file in sorted(os.listdir(folder)):
        yield f"  {os.path.getsize(os.path.join(folder, file)):>15,} bytes  {file}"
