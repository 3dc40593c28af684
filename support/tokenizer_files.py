"""A tokenizer's own files in the folder of a dataset: what is too long for meta.json."""

import hashlib
import os

from configurator import fail

# by their key in the tokenizer's state
TOKENIZER_FILES = {'ranks': 'tokenizer.tiktoken', 'json': 'tokenizer.json', 'config': 'tokenizer_config.json'}


def read_files(folder, state, checksums):
    """Put the contents of the files that `state` names in their places. checksums: {file: sha256}."""
    for key in TOKENIZER_FILES:
        if f'{key}_file' not in state:
            continue
        path = os.path.join(folder, os.path.basename(str(state.pop(f'{key}_file'))))
        try:
            with open(path, 'rb') as f:
                content = f.read()
            state[key] = content if key == 'ranks' else content.decode()
        except (OSError, UnicodeDecodeError) as e:
            fail(f"the tokenizer's file cannot be read ({path}: {e}). run prepare.py for this dataset again")
        expected = checksums.get(os.path.basename(path))
        if expected and hashlib.sha256(content).hexdigest() != expected:
            fail(f"the tokenizer's file is damaged ({path}: its checksum is not the one in meta.json). run "
                 "prepare.py for this dataset again")
