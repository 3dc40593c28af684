"""
Turn text into a dataset: the folder data/<name>/ with train.bin, val.bin and meta.json that train.py reads.

    $ python prepare.py                        # pystdlib: this Python's own source code, no download
    $ python prepare.py shakespeare_char       # tinyshakespeare by characters, as nanoGPT has it (1.1 MB)
    $ python prepare.py book.txt               # data/book; the tokenizer is chosen by the size of the text
    $ python prepare.py mine --input='texts/*.jsonl.zst' --tokenizer=bpe:8192 --val_fraction=0.01
    $ python prepare.py openwebtext            # 24 GB from the Hub become 9 billion tokens
    $ python prepare.py mine --show            # what is in it, checked

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
# tinystories, or any name of your own with --input
input: str | list = None  # file, folder, pattern, several with commas, or hf:OWNER/NAME with the text; for a
# named set: use this instead of downloading it
tokenizer: str = None  # 'char', 'byte', 'gpt2' or another of tiktoken's, 'bpe:8192' (learned from the text),
# 'hf:FOLDER_OR_NAME' of a Hugging Face model, the path of a tokenizer's .json or of another dataset.
# None: what the named set has, else by the size of the text
text_key = 'text'  # where the text is in a line of .jsonl, or the column of .parquet
encoding = 'utf-8'  # of plain text: 'cp1252', 'utf-16', ...; 'auto': UTF-8 or else a good guess, file by file
encoding_errors: Literal['strict', 'replace'] = 'strict'  # replace: by U+FFFD
val_fraction: float = None  # part of the documents (chosen by a hash) that goes to val.bin; of a single
# document its end. None: 0.1, for the sets from the Hub 0.0005
max_tokens: int = None  # stop when train.bin has that many, and read no further
shard_tokens = 500_000_000  # a longer split is written as files of that many tokens (1 GB)
workers: int = None  # processes that encode. None: one per core
part: str = None  # '3/8': only the third eighth of the files, as one of eight machines or jobs
join = False  # put the parts together, once all are done
overwrite = False  # True: replace a dataset that was made with another tokenizer
show = False  # print what is in the dataset, and check it
chat = False  # True: --input has conversations, in .jsonl or .parquet; see data/README.md
bad_rows: Literal['stop', 'skip'] = 'stop'  # with --chat: rows that are no conversation
data_dir: str = None  # where the datasets are. None: data/ beside this file
# -----------------------------------------------------------------------------
knobs, given = configure(globals(), positional='name')

import codecs
import contextlib
import os
import re
import shlex
import signal
import sys
import time

from dataset import DATA_DIR
from support import dataset_folder, encode_text, find_text, hub_datasets, parts, read_text
from support import tinyshakespeare, token_files
from support.choose_tokenizer import check_replacement, choose_tokenizer
from support.dataset_meta import read_tokenizer_state
from support.missing_dataset import KNOWN
from support.lasting_output import make_output_last
from support.progress_bar import ProgressBar
from support.tokenizer import END_OF_TEXT, make_tokenizer
from support.unread import output_may_end
from support.write_dataset import Draft, divide

AS_NANOGPT = {'shakespeare_char': 'char', 'shakespeare': 'gpt2'}  # the same bytes as nanoGPT's files
HUB = {
    'openwebtext': 'hf:Skylion007/openwebtext',
    'tinystories': 'hf:roneneldan/TinyStories',
    'fineweb': 'hf:HuggingFaceFW/fineweb:sample-10BT',
    'fineweb_edu': 'hf:HuggingFaceFW/fineweb-edu:sample-10BT',
}

# how each is trained; others by config/mybook.py, or if they are large by train.py's defaults
TRAIN = {'pystdlib': 'config/quickstart.py', 'shakespeare_char': 'config/train_shakespeare_char.py',
         'openwebtext': 'config/train_gpt2.py', 'fineweb': 'config/train_fineweb_124m.py'}


def check_knobs():
    problems = out_of_range(knobs, below_one='val_fraction', above_zero='max_tokens shard_tokens workers')
    if name != os.path.basename(name) or name in ('', '.', '..'):
        problems.append(f"the name of a dataset is a folder's name ({name}). use a plain word, and "
                        "--data_dir=PATH for another place")
    if input is None and os.path.splitext(name)[1].lower() in ('.txt', '.md', '.html', '.epub', '.jsonl'):
        problems.append(f"no such file ({name}). name the one with your text")
    elif name not in KNOWN and input is None and not show and not join:
        problems.append(f"no text for the dataset {name}. say where it is: python prepare.py {name} "
                        f"--input=FILE_OR_FOLDER (made without it: {', '.join(KNOWN)})")
    if name == 'pystdlib' and input is not None:
        problems.append("pystdlib is this Python's library, not --input. give your dataset a name: "
                        "python prepare.py NAME --input=...")
    found = re.fullmatch(r'(\d+)/(\d+)', '1/1' if part is None else part)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        problems.append(f"part is which one of how many ({part}). write --part=1/8 to --part=8/8")
    elif part and name in AS_NANOGPT:
        problems.append(f"{name} is not made in parts. leave out --part")
    elif part and join:
        problems.append("--join puts all parts together. leave out --part")
    if tokenizer and tokenizer.startswith('bpe:'):
        size = re.fullmatch(r'bpe:(\d{1,7})', tokenizer)
        if not size or int(size[1]) < 257:
            problems.append(f"no such size of a vocabulary ({tokenizer}). write bpe:N with 257 or more, say "
                            "--tokenizer=bpe:8192")
    if chat and (input is None or name in KNOWN or part or join):
        problems.append("--chat makes a dataset of your own from --input, without --part and --join. write "
                        "python prepare.py NAME --chat --input=FILE_OR_FOLDER")
    if chat and tokenizer and (tokenizer == 'char' or tokenizer.startswith('bpe:')):
        problems.append(f"--chat learns no tokenizer ({tokenizer}), it takes that of the model to finetune. "
                        "use --tokenizer=data/NAME, its dataset, or byte, gpt2, hf:OWNER/NAME")
    if isinstance(input, list) and len(input) > 1 and (name in AS_NANOGPT or 'hf:' in str(input)):
        problems.append(f"only one --input here ({', '.join(input)}). several may be files, folders, "
                        "patterns")
    try:
        encoding == 'auto' or codecs.lookup(encoding)
    except LookupError:
        problems.append(f"no such encoding ({encoding}). use utf-8, cp1252, utf-16, ... or auto")
    if problems:
        fail(*problems)


if input is None and name not in KNOWN and (os.path.isfile(name) or (os.sep in name and os.path.isdir(name))):
    name, input = find_text.name_of(name), name
    print(f"dataset {name}, the same as: python prepare.py {shlex.quote(name)} --input={shlex.quote(input)}")
check_knobs()
# what was not given; a tokenizer is chosen below, once the size of the text is known
input = input or HUB.get(name)
tokenizer = tokenizer or {**AS_NANOGPT, **dict.fromkeys(HUB, 'gpt2'), 'pystdlib': 'byte'}.get(name)
sources = [input] if isinstance(input, str) else input  # hf:... , or paths
if val_fraction is None:
    val_fraction = 0.0005 if name in HUB else 0.1
if workers is None:
    workers = encode_text.count_cores()
# where it goes
dataset_dir = os.path.join(data_dir or DATA_DIR, name)
folder = os.path.join(dataset_dir, f"part_{part.replace('/', '_of_')}") if part else dataset_dir
unfinished = os.path.join(folder, 'unfinished')
command = shlex.join(['python', 'prepare.py'] + sys.argv[1:])
# what decides the bytes: a run that was interrupted is continued with the same ones only
settings = dict(name=name, input=input, tokenizer=tokenizer, text_key=text_key,
                encoding=encoding, encoding_errors=encoding_errors, val_fraction=val_fraction,
                max_tokens=max_tokens, shard_tokens=shard_tokens, part=part)


def main():
    """Make the dataset, and say so, or in one line what went wrong."""
    if show:
        from support.show_dataset import show_dataset
        if not os.path.isdir(folder):
            fail(f"no dataset {name} in {os.path.dirname(folder)}. make it: python prepare.py {name} "
                 "--input=FILE_OR_FOLDER")
        sys.exit(0 if show_dataset(folder) else 1)
    make_output_last()
    # tidies up, unlike what the system does by default
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    t0 = time.time()
    try:
        with dataset_folder.only_writer(folder, unfinished, dataset_dir):
            meta, look_alikes = make_dataset()
    except KeyboardInterrupt:
        print("interrupted; run it again, it continues from what was saved", file=sys.stderr)
        sys.exit(130)
    except read_text.Problem as e:
        fail(str(e))
    except OSError as e:
        fail(f"cannot read or write ({e.filename or folder}: {e.strerror or e}). make room and run it again, "
             "or use --data_dir=ANOTHER")
    print_summary(meta, look_alikes, time.time() - t0)


def make_dataset():
    """Text becomes ids in unfinished/, whose files take their places when all of them are written. Returns
    what meta.json says, and how often the text contains END_OF_TEXT."""
    before = dataset_folder.read_before(folder)
    if 'splits' in before and before.get('command') != command:
        print(f"note: {folder} holds a dataset ({before.get('command', 'made elsewhere')}); it is replaced "
              "once the new one is complete")
    if chat:
        return make_conversations(), 0
    meta = dataset_folder.interrupted_meta(folder, before, settings, join)
    if meta:
        dataset_folder.move_into_place(folder, unfinished, meta, before.get('made_with'))
        return meta, 0

    os.makedirs(unfinished, exist_ok=True)
    return join_parts() if join else encode_files()


def make_conversations():
    """A dataset of conversations, for a model that answers."""
    from support.chat_dataset import make_chat_dataset
    from support.chat_format import with_chat_tokens
    # that of the model which is to be finetuned: there is no text here whose size could choose one
    tok = make_tokenizer(with_chat_tokens(choose_tokenizer(tokenizer or 'gpt2', [], documents).state()))
    if not overwrite:
        check_replacement(folder, tok, same_bytes=False)
    return make_chat_dataset(folder, unfinished, sources, tok, val_fraction, bad_rows, workers, command)


# -----------------------------------------------------------------------------
# from files or parts to ids


def encode_files():
    all_files, source = find_files()
    files, limit, more = all_files, max_tokens, {}
    if part:
        number, n_parts = map(int, part.split('/'))
        files = parts.files_of_part(all_files, number, n_parts)
        limit = max_tokens and -(-max_tokens // n_parts)
        more = {'part': part, 'made_with': settings}
    draft = Draft(unfinished, settings, files, mark_documents=name not in AS_NANOGPT)
    with contextlib.closing(draft):
        if not draft.resume():
            tok = choose_tokenizer(tokenizer, all_files, documents)  # all parts choose the same one
            if not overwrite:
                check_replacement(dataset_dir, tok, same_bytes=name in AS_NANOGPT)
            draft.start(tok)
        return complete(draft, encode(draft), limit, source, more)


def find_files():
    """The files with the text, and a name for where it comes from."""
    if name in AS_NANOGPT:
        path = tinyshakespeare.find(sources[0] if input else None, folder)
        return [find_text.stat(path)], sources[0] if input else tinyshakespeare.URL
    if name == 'pystdlib':
        return find_text.find_pystdlib(), f"standard library of Python {sys.version.split()[0]}"
    if not sources[0].startswith('hf:'):
        return find_text.find_files(sources), ', '.join(sources)
    files = hub_datasets.find_files(sources[0][3:])
    size = sum(file.size for file in files) / 1e9
    print(f"{sources[0]}: {len(files)} files of {size:.2f} GB, downloaded one after the other", flush=True)
    return files, f"{sources[0]} at commit {files[0].revision}"


def documents(files, start=(0, 0)):
    """(file number, document number, pieces of text, tell) for each document from `start` on."""
    if name in AS_NANOGPT:
        text = tinyshakespeare.read(files[0].path, encoding_errors)
        return [(0, 0, iter([text]), lambda: 0)]
    paths = hub_datasets.local_paths(files, start[0], os.path.join(unfinished, 'download'))
    return read_text.documents(paths, text_key, encoding, encoding_errors, start)


def encode(draft):
    """Yield ({split: (ids, documents)}, look-alikes, place, bytes read) from where the draft stands."""
    split_at = draft.encoder.tokenizer.split_at
    if token_files.are_ids(draft.files):
        return token_files.read_ids(draft)
    if name not in AS_NANOGPT:
        text = documents(draft.files, draft.place[:2])
        portions = encode_text.portions(text, split_at, val_fraction, draft.place)
    elif draft.tokens():  # they were saved all at once
        portions = []
    else:  # nanoGPT's split: the first nine tenths of the characters, and the rest
        text = tinyshakespeare.read(draft.files[0].path, encoding_errors)
        cut = int(len(text) * (1 - val_fraction))
        portions = [([('train', True, text[:cut]), ('val', True, text[cut:])], (0, 0, 0), 0)]
    # bytes and characters are encoded faster than they are sent to another process
    n_workers = 1 if split_at == 'anywhere' else workers
    return encode_text.encode_in_order(portions, n_workers, draft.encoder)


def join_parts():
    folders, metas = parts.finished_parts(folder, name)
    files = [find_text.stat(os.path.join(path, 'meta.json')) for path in folders]
    draft = Draft(unfinished, {**metas[0]['made_with'], 'part': None}, files)
    with contextlib.closing(draft):
        if not draft.resume():
            tok = make_tokenizer(read_tokenizer_state(folders[0], metas[0]))
            if not overwrite:
                check_replacement(folder, tok, same_bytes=False)
            draft.start(tok)
        ids = parts.ids_of_parts(folders, metas, draft.place)
        return complete(draft, ids, max_tokens, metas[0]['source'], {'parts': len(folders)})


# -----------------------------------------------------------------------------
# from ids to the dataset


def complete(draft, results, limit, source, more):
    """Write all ids into the draft, up to `limit` tokens of train, and move the files into place."""
    dataset_folder.check_room(folder, draft, limit)
    if not draft.complete:
        progress = ProgressBar(draft, limit)
        for encoded, look_alikes, place, bytes_read in results:
            draft.add(encoded, look_alikes, place, limit)
            progress.show(bytes_read)
            if draft.complete:
                results.close()  # ends its workers
                break
        progress.close()
        draft.complete = True
    if not part:
        divide(draft, draft.settings['val_fraction'])
    meta = {**draft.finish(), 'source': source, 'command': command, **more}
    if name == 'shakespeare_char':  # nanoGPT's script writes it too
        from support.meta_pkl import write_meta_pkl
        write_meta_pkl(os.path.join(unfinished, 'meta.pkl'), meta['tokenizer']['chars'])
    dataset_folder.move_into_place(folder, unfinished, meta, draft.settings)
    return meta, draft.look_alikes


def print_summary(meta, look_alikes, seconds):
    if look_alikes:
        print(f"note: the text itself contains {END_OF_TEXT} ({look_alikes:,} times); there it is text, "
              "not the special token")
    for split, entry in meta['splits'].items():
        files = f"{split}.bin"
        if 'shards' in entry:
            files = f"{split}_*.bin ({len(entry['shards'])} files)"
        print(f"{os.path.join(folder, files)}: {entry['tokens']:,} tokens, {entry['documents']:,} documents, "
              f"{entry['bytes']:,} bytes of text")
    state = meta['tokenizer']
    made = f"vocabulary of {meta['vocab_size']:,} ids ({state.get('name', state['kind'])}), {seconds:.1f} s."
    dataset, where = shlex.quote(name), ''
    if data_dir:
        where = f" --data_dir={shlex.quote(data_dir)}"
    if chat:
        print(f"{made} finetune on it: python train.py config/finetune_chat.py --dataset={dataset}{where} "
              "--init_from=THE_RUN_TO_FINETUNE")
    elif part:
        print(f"{made} when all parts are there: python prepare.py {dataset}{where} --join")
    elif name in TRAIN:
        print(f"{made} train on it: python train.py {TRAIN[name]}{where}")
    elif sum(entry['tokens'] for entry in meta['splits'].values()) < 1e8:
        print(f"{made} train on it: python train.py --dataset={dataset}{where} config/mybook.py")
    else:  # enough for train.py's defaults, GPT-2 for days
        print(f"{made} train on it: python train.py --dataset={dataset}{where}")


if __name__ == '__main__':  # not in the workers, which import this file where processes cannot be forked
    with output_may_end():
        main()
