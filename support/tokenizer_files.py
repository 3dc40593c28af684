"""A tokenizer's own files in the folder of a dataset: what is too long for meta.json."""

import hashlib
import os

from configurator import fail
from support.files import write_whole

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


def write_tokenizer(folder, tokenizer, dtype):
    """What meta.json says of a tokenizer whose ids are stored as `dtype`; what is too long for it is written
    to files in `folder`. Returns two dicts, the second with the files' checksums if there are any."""
    state, checksums = tokenizer.state(), {}
    for key, file in TOKENIZER_FILES.items():
        if state.get(key) is not None:
            content = state.pop(key)
            content = content if isinstance(content, bytes) else content.encode()
            write_whole(os.path.join(folder, file), content)
            state[f'{key}_file'] = file
            checksums[file] = hashlib.sha256(content).hexdigest()
    meta = {'tokenizer': state, 'vocab_size': tokenizer.n_vocab, 'end_of_text': tokenizer.end_of_text,
            'dtype': 'uint16' if dtype.itemsize == 2 else 'uint32'}
    return meta, {'checksums': checksums} if checksums else {}
