"""The text of tinyshakespeare, from which nanoGPT makes its two smallest datasets."""

import hashlib
import os

from configurator import fail
from support.files import write_whole

URL = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'
SHA256 = '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'


def find(path, folder):
    """The path of the text: `path` if it is given, else input.txt in the dataset's folder, downloaded if
    it is not there."""
    if path and not os.path.exists(path):
        fail(f"no such file ({path}). name tinyshakespeare's text, or leave --input out to download it")
    path = path or os.path.join(folder, 'input.txt')
    if not os.path.exists(path):
        download(path)
    with open(path, 'rb') as f:
        if hashlib.sha256(f.read()).hexdigest() != SHA256:
            print(f"note: {path} is not nanoGPT's tinyshakespeare (its checksum differs); it is used anyway")
    return path


def download(path):
    import urllib.request
    print(f"downloading {URL}")
    try:
        with urllib.request.urlopen(URL, timeout=60) as response:
            content = response.read()
    except OSError as e:
        fail(f"cannot download {URL} ({getattr(e, 'reason', e)}). put that file at {path}, or name it with "
             "--input=FILE")
    if hashlib.sha256(content).hexdigest() != SHA256:
        fail(f"what came from {URL} is not tinyshakespeare ({len(content):,} bytes, wrong checksum); "
             f"it was not kept. try again, or put the right file at {path}")
    write_whole(path, content)


def read(path, errors):
    """The text as nanoGPT reads it: one string, line ends as they are."""
    try:
        with open(path, 'rb') as f:
            return f.read().decode('utf-8', errors)
    except UnicodeDecodeError as e:
        fail(f"{path} is not UTF-8 (byte {e.start}). name a text file with --input")
