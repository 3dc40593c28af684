"""The tokenizer that --tokenizer names or, if it names none, one that fits the size of the text."""

import importlib.util
import os

from configurator import fail
from support.dataset_meta import bin_files, read_meta, read_tokenizer_state
from support.read_text import kind_of
from support.tokenizer import CharTokenizer, make_tokenizer

# bytes of text from which on each is taken, and why; bytes per token were measured on English books
BY_SIZE = (
    (0, 'byte', "of a small text only bytes occur often enough to be learned"),
    (500_000, 'bpe:512', "enough to learn frequent syllables, about 2.2 bytes per token"),
    (3_000_000, 'bpe:2048', "enough to learn frequent words, about 3 bytes per token"),
    (30_000_000, 'bpe:8192', "enough to learn most words"),
    (300_000_000, 'gpt2', "enough for each of its 50,257 tokens to occur often"),
)
PACKED = {'gz': 3, 'zst': 3, 'parquet': 2, 'epub': 2}  # bytes of text in a byte of such a file, about


def choose_tokenizer(name, files, documents):
    """The tokenizer `name` (None: by size) for the documents(files)."""
    name = name or by_size(files)
    if name == 'char':  # a first pass over the text, to see which characters occur
        chars = set()
        for _, _, pieces, _ in documents(files):
            for piece in pieces:
                chars.update(piece)
        return CharTokenizer(sorted(chars))
    if name.startswith('bpe:'):
        from support.learn_bpe import learn_bpe, sample
        n_vocab = int(name[4:])
        print(f"learning {n_vocab} tokens", flush=True)
        return learn_bpe(n_vocab, sample(documents, files))
    if name.startswith('hf:') or '/' in name or os.sep in name or name.endswith('.json'):
        return make_tokenizer(state_at(name.removeprefix('hf:')))
    return make_tokenizer({'kind': 'byte'} if name == 'byte' else {'kind': 'tiktoken', 'name': name})


def state_at(source):
    """The state of the tokenizer in a dataset's folder, a .json file, or a Hugging Face folder or name."""
    if os.path.exists(os.path.join(source, 'meta.json')) or bin_files(source, 'train'):
        return read_tokenizer_state(source, read_meta(source))
    from support.huggingface import read_tokenizer
    state = read_tokenizer(source)
    if make_tokenizer(state).end_of_text is None:
        print(f"note: {source} has no token that begins or ends a text: documents follow each other without "
              "a mark")
    return state


def by_size(files):
    """The name of the tokenizer for that much text, told with the reason."""
    if all(kind_of(file.path) == 'npy' for file in files):
        print("tokenizer gpt2: what .npy files hold, unless --tokenizer says otherwise")
        return 'gpt2'
    size = sum(file.size * PACKED.get(file.path.lower().rpartition('.')[2], 1) for file in files)
    _, name, why = [row for row in BY_SIZE if size >= row[0]][-1]
    if name.startswith('bpe:') and not importlib.util.find_spec('tokenizers'):
        better, name = name, 'byte' if size < 30e6 else 'gpt2'
        why = f"{better} would be better, but needs a package: pip install tokenizers"
    amount = f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:,.0f} KB"
    print(f"tokenizer {name} for {amount} of text: {why}. another: "
          "--tokenizer=char, byte, bpe:1024, gpt2, ...")
    return name


def check_replacement(folder, tokenizer, same_bytes):
    """Fail if `folder` holds a dataset whose ids mean something else, which a run may need, or one that was
    made elsewhere and perhaps cannot be made again. same_bytes: it would be replaced by itself."""
    if not bin_files(folder, 'train'):
        return
    there = os.path.exists(os.path.join(folder, 'meta.json'))
    if there and unreadable(folder):
        return
    meta = read_meta(folder)
    old, new = (state.get('name', state['kind']) for state in (meta['tokenizer'], tokenizer.state()))
    if old != new:
        fail(f"{folder} holds a dataset with another tokenizer ({old}, not {new}). give this one another "
             f"name, or the same --tokenizer={old}, or replace that one with --overwrite")
    if not there and not same_bytes:
        fail(f"{folder} holds a dataset that prepare.py did not make ({bin_files(folder, 'train')[0]}). give "
             "this one another name, or replace that one with --overwrite")


def unreadable(folder):
    """Whether meta.json is damaged, or says that the folder is not finished."""
    from support.files import read_json
    meta = read_json(os.path.join(folder, 'meta.json'))
    return meta.get('unfinished') or not isinstance(meta.get('tokenizer'), dict) or 'splits' not in meta
