"""
Turn text into a dataset: the folder data/<name>/ with train.bin, val.bin and meta.json that train.py reads.

    $ python prepare.py                        # pystdlib: this Python's own source code, no download
    $ python prepare.py shakespeare_char       # tinyshakespeare by characters, as nanoGPT has it (1.1 MB)
    $ python prepare.py book.txt               # data/book; the tokenizer is chosen by the size of the text
    $ python prepare.py mine --input='texts/*.jsonl.zst' --tokenizer=bpe:8192 --val_fraction=0.01
    $ python prepare.py openwebtext            # 24 GB from the Hub become 9 billion tokens
    $ python prepare.py mine --show            # what is in it, checked
    $ python prepare.py hellaswag              # the benchmark's examples, for eval.py; or core

--input is a file, a folder or a pattern: .txt, .md, .html, .epub (one document each), .jsonl (one per line)
and .parquet (one per row), most of them also as .gz or .zst; or hf:OWNER/NAME[:CONFIG][:SPLIT], a data set of
the Hugging Face Hub; or .npy, token ids. It may be given several times. <|endoftext|> stands before each
document, except with --tokenizer=char, which has no such id, and in the two sets that are made as nanoGPT
makes them. See docs/data.md.

If it is interrupted or killed, or the disk is full: the same command continues where it stopped.
"""

from typing import Literal

from configurator import configure, fail, out_of_range

# -----------------------------------------------------------------------------
name = 'pystdlib'  # the dataset: pystdlib, shakespeare_char, shakespeare, openwebtext, fineweb, fineweb_edu,
# tinystories, or any name of your own with --input; hellaswag, core: the files of a benchmark
input: str | list = None  # file, folder or pattern, several times if you like, or hf:OWNER/NAME with the
# text; for a named set of text: use this instead of downloading it
tokenizer: str = None  # 'char', 'byte', 'gpt2' or another of tiktoken's, 'bpe:8192' (learned from the text),
# 'hf:FOLDER_OR_NAME' of a Hugging Face model, the path of a tokenizer's .json, another dataset, a ckpt.pt.
# None: what the named set has, else by the size of the text
text_key = 'text'  # where the text is in a line of .jsonl, or the column of .parquet
encoding = 'auto'  # of plain text: 'utf-8', 'cp1252', ...; auto: UTF-8 or else a good guess, file by file
encoding_errors: Literal['strict', 'replace'] = 'strict'  # replace: by U+FFFD
val_fraction: float = None  # part of the documents (chosen by a hash) that goes to val.bin; of a single
# document its end. None: 0.1, for the sets from the Hub 0.0005
max_tokens: int = None  # stop when train.bin has that many, and val.bin a text. Few documents are divided
# anew after that: then train.bin has more or fewer
shard_tokens = 500_000_000  # a longer split is written as files of that many tokens (1 GB)
workers: int = None  # threads that encode. None: one per core
overwrite = False  # True: replace a dataset that was made in another way
show = False  # print what is in the dataset, and check it
chat = False  # True: --input has conversations, in .jsonl or .parquet; see data/README.md
bad_rows: Literal['stop', 'skip'] = 'stop'  # with --chat: rows that are no conversation
data_dir: str = None  # where the datasets are. None: data/ beside this file
# -----------------------------------------------------------------------------
knobs, given = configure(globals(), positional='name')

import json
import os
import shlex
import shutil
import signal
import sys
import time

from support import encode_text, hub_datasets, read_text
from support.chat import chat_format, with_chat_tokens
from support.choose_tokenizer import choose_tokenizer
from support.conversations import open_dataset, read_conversations, write_splits
from support.dataset_meta import DATA_DIR, KNOWN, bin_files, folder_of, sha256_of, write_meta_pkl
from support.console import exit_on_broken_pipe, make_output_last
from support.files import read_json
from support.hub_datasets import BENCHMARKS, TINYSHAKESPEARE, fetch, fetch_benchmark
from support.tokenizer import make_tokenizer, write_tokenizer
from support.write_dataset import Draft, move_into_place, only_writer

AS_NANOGPT = {'shakespeare_char': 'char', 'shakespeare': 'gpt2'}  # the same bytes as nanoGPT's files
HUB = {
    'openwebtext': 'hf:Skylion007/openwebtext',
    'tinystories': 'hf:roneneldan/TinyStories',
    'fineweb': 'hf:HuggingFaceFW/fineweb:sample-10BT',
    'fineweb_edu': 'hf:HuggingFaceFW/fineweb-edu:sample-10BT',
}
# how each is trained; others by config/mybook.py, or if they are large by train.py's defaults
TRAIN = {'pystdlib': 'config/quickstart.py', 'shakespeare_char': 'config/train_shakespeare_char.py',
         'fineweb': 'config/train_fineweb_124m.py'}

# what was not given; a tokenizer is chosen below, once the size of the text is known
looks_like_path = os.sep in name or '.' in name or os.path.isfile(name)
if looks_like_path and name not in KNOWN and input is None and not show:
    if not os.path.exists(name):
        fail(f"no such file or folder ({name}). name the one with your text")
    name, input = read_text.name_of(name), name
    print(f"dataset {name}")
input = input or HUB.get(name)
sources = [input] if isinstance(input, str) else input  # hf:... , or paths
tokenizer = tokenizer or {**AS_NANOGPT, **dict.fromkeys(HUB, 'gpt2'), 'pystdlib': 'byte'}.get(name)
if val_fraction is None:
    val_fraction = 0.0005 if name in HUB else 0.1
workers = workers or os.cpu_count()
as_nanogpt = name in AS_NANOGPT
folder = folder_of(name, data_dir)
unfinished = os.path.join(folder, 'unfinished')
command = shlex.join(['python', 'prepare.py'] + sys.argv[1:])
# what decides the bytes: a run that was interrupted is continued, and a dataset made again, with these only
settings = {key: knobs[key] for key in ('tokenizer text_key encoding encoding_errors val_fraction max_tokens '
                                        'shard_tokens chat bad_rows').split()}
settings['input'] = [path if path.startswith('hf:') else os.path.abspath(path) for path in sources or ()]

# -----------------------------------------------------------------------------
# from files to ids, from ids to the dataset


def encode_files():
    """Text becomes ids in unfinished/, up to max_tokens of train. Returns what meta.json says."""
    files, source = find_files()
    draft = Draft(unfinished, settings, files, mark_documents=not as_nanogpt)
    if not draft.resume():
        draft.start(choose_tokenizer(tokenizer, files, documents))
    for encoded, place in encode(draft):
        draft.add(encoded, place, max_tokens)
        if draft.place[0] == len(files):
            break
    meta = {**draft.finish(val_fraction), 'source': source}
    if name == 'shakespeare_char':  # nanoGPT's script writes it too
        write_meta_pkl(os.path.join(unfinished, 'meta.pkl'), meta['tokenizer']['chars'])
    return meta


def encode(draft):
    """([(split, ids), ...], place) of each portion, from where the draft stands."""
    if encode_text.are_ids(draft.files):
        return encode_text.read_npy(draft.files, draft.encoder, draft.place)
    split_at = draft.encoder.tokenizer.split_at
    portions = encode_text.portions(documents(draft.files, draft.place), split_at, split_of, draft.place)
    # bytes and characters are encoded as fast as they are read
    return encode_text.encode_in_order(portions, 1 if split_at == 'anywhere' else workers, draft.encoder)


# -----------------------------------------------------------------------------
# what the text is


def find_files():
    """The files with the text, and a name for where it comes from."""
    if as_nanogpt and not input:
        path = os.path.join(folder, 'input.txt')
        fetch(*TINYSHAKESPEARE, path)
        return [read_text.stat(path)], TINYSHAKESPEARE[0]
    if name == 'pystdlib':
        return read_text.find_pystdlib(), f"standard library of Python {sys.version.split()[0]}"
    if not sources[0].startswith('hf:'):
        return read_text.find_files(sources), ', '.join(sources)
    files = hub_datasets.find_files(sources[0][3:])
    size = sum(file.size for file in files) / 1e9
    print(f"{sources[0]}: {len(files)} files of {size:.2f} GB, downloaded one after the other", flush=True)
    return files, f"{sources[0]} at commit {files[0].revision}"


def documents(files, start=(0, 0)):
    """(file number, document number, pieces of text) for each document from `start` on."""
    if as_nanogpt:  # two: the first nine tenths of the characters, and the rest
        text = ''.join(read_text.read_pieces(files[0].path, encoding, encoding_errors))
        cut = int(len(text) * (1 - val_fraction))
        return ((0, i, iter([part])) for i, part in enumerate((text[:cut], text[cut:]))
                if (0, i) >= tuple(start[:2]))
    return read_text.documents(files, text_key, encoding, encoding_errors,
                               os.path.join(unfinished, 'download'), start)


def split_of(number, beginning):
    """The split that a document belongs to."""
    if as_nanogpt:
        return ('train', 'val')[number]
    return encode_text.split_by_hash(beginning, val_fraction)


def make_conversations():
    """A dataset of conversations, for a model that answers. Returns what meta.json says."""
    # the tokenizer of the model which is to be finetuned: there is no text here whose size could choose one
    tok = make_tokenizer(with_chat_tokens(choose_tokenizer(tokenizer or 'gpt2', [], documents).state()))
    rows = ((f'{file.path}:{number + 1}', row) for file in read_text.find_files(sources)
            for number, row in read_text.rows(file.path, strict=False))
    talks = ((split_of(0, json.dumps([[*message.values()] for message in talk], ensure_ascii=False)), talk)
             for talk in read_conversations(rows, bad_rows))
    shutil.rmtree(unfinished, ignore_errors=True)
    dtype = encode_text.Encoder(tok).dtype
    splits = write_splits(unfinished, talks, tok, dtype)
    if 'train' not in splits:
        fail(f"no conversation in {', '.join(sources)} to train on. give it more of them, or a smaller "
             "--val_fraction")
    return {**write_tokenizer(unfinished, tok, dtype), 'splits': splits, 'chat': chat_format(tok).template,
            'source': ', '.join(sources)}


# -----------------------------------------------------------------------------
# checks before, a summary after


def check_knobs():
    problems = out_of_range(knobs, below_one='val_fraction', above_zero='max_tokens shard_tokens workers')
    if name not in KNOWN and input is None and not show:
        problems.append(f"no text for the dataset {name}. say where it is: python prepare.py "
                        f"{shlex.quote(name)} --input=FILE_OR_FOLDER, or ./{name} if it is a folder here "
                        f"(made without it: {', '.join(KNOWN)})")
    if (name == 'pystdlib' or chat and name in KNOWN) and input is not None:
        problems.append(f"{name} is not made of --input. give your dataset a name: python prepare.py NAME "
                        "--input=...")
    if chat and tokenizer and tokenizer.startswith(('char', 'bpe:')):
        problems.append(f"--chat learns no tokenizer ({tokenizer}), it takes that of the model to finetune. "
                        "use --tokenizer=OUT_DIR/ckpt.pt, its own, or byte, gpt2, hf:OWNER/NAME")
    if sources and len(sources) > 1 and (as_nanogpt or 'hf:' in str(input)):
        problems.append(f"only one --input here ({', '.join(input)}). several may be files and folders")
    if problems:
        fail(*problems)


def make_dataset():
    """Make it, by text or by conversations, and move it into place. Returns what meta.json says."""
    old = meta = read_json(os.path.join(folder, 'meta.json'))
    same = meta.get('made_with') == settings
    if not same and not overwrite and bin_files(folder, 'train'):
        fail(f"{folder} holds another dataset ({meta.get('command', 'made elsewhere')}). give this one "
             "another name, or replace that one with --overwrite")
    if not (same and meta.pop('unfinished', False)):  # else killed while files took their places
        meta = make_conversations() if chat else encode_files()
        meta |= {'command': command, 'made_with': settings}
        if old.get('splits', meta['splits']) != meta['splits']:
            print(f"note: this replaces another dataset, which was in {folder}. runs on it cannot go "
                  "on in place")
    move_into_place(folder, unfinished, meta)
    return meta


def show_dataset():
    """Print what is in the dataset, how it begins, and whether it is what was made. Returns that."""
    exit_on_broken_pipe()
    data, right = open_dataset(name, data_dir), True
    state, tokenizer = data.tokenizer_state, data.tokenizer()
    print(f"{folder}: {data.meta['vocab_size']:,} ids ({state.get('name', state['kind'])}), from "
          f"{data.meta.get('source', 'an unknown source')}, made by: {data.meta.get('command', 'unknown')}")
    for split, tokens in data.splits.items():
        entry = data.meta['splits'].get(split, {})
        known = [part.get('sha256') for part in entry.get('shards', [entry])]
        same = known == [sha256_of(path) for path in tokens.paths]
        right &= same or None in known
        found = 'unknown' if None in known else 'right' if same else 'WRONG'
        print(f"{split}: {tokens.n:,} tokens, {entry.get('documents') or 'unknown'} documents, "
              f"checksums {found}: {tokenizer.decode(tokens.windows([0], min(100, tokens.n))[0].tolist())!r}")
    return right


def print_summary(meta, seconds):
    for split, entry in meta['splits'].items():
        files = f"{split}_*.bin ({len(entry['shards'])} files)" if 'shards' in entry else f"{split}.bin"
        counts = [f"{entry[what]:,} {what}" for what in ('tokens', 'documents', 'bytes') if entry[what]]
        print(f"{os.path.join(folder, files)}: {', '.join(counts)} of text")
    where = f" --data_dir={shlex.quote(data_dir)}" if data_dir else ''
    train = f"--dataset={shlex.quote(name)}{where}"
    if chat:
        train = f"config/finetune_chat.py {train} --init_from=THE_RUN_TO_FINETUNE"
    elif name in TRAIN:
        train = TRAIN[name] + where
    elif sum(entry['tokens'] for entry in meta['splits'].values()) < 1e8:
        train += ' config/mybook.py'  # more is enough for train.py's defaults, GPT-2 for days
    state = meta['tokenizer']
    print(f"vocabulary of {meta['vocab_size']:,} ids ({state.get('name', state['kind'])}), {seconds:.1f} s. "
          f"{'finetune' if chat else 'train'} on it: python train.py {train}")


def stop(number, frame):
    """At once and not by an exception, which would wait for the threads. The files are whole at any
    moment."""
    os.write(2, b'interrupted; run it again, it continues from what was saved\n')
    os._exit(128 + number)


def main():
    """Make what `name` says, and tell it, or in one line what went wrong."""
    if name in BENCHMARKS and input is None and not show:
        return fetch_benchmark(name, data_dir or DATA_DIR)
    check_knobs()
    if show:
        sys.exit(not show_dataset())
    make_output_last()
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    t0 = time.time()
    try:
        with only_writer(folder):
            meta = make_dataset()
    except ImportError as e:
        fail(f"a package is needed that is not installed ({e.name}). pip install {e.name}")
    except OSError as e:
        fail(f"cannot read or write ({e.filename or folder}: {e.strerror or e}). make room and run it again, "
             "or use --data_dir=ANOTHER")
    print_summary(meta, time.time() - t0)


if __name__ == '__main__':
    main()
