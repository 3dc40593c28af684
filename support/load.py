"""How a checkpoint is read: ours, nanoGPT's or a Hugging Face folder. Nothing in it is executed, everything
is checked."""

import contextlib
import glob
import os
import pickle
import re
import reprlib
import warnings

import torch

import dataset
from configurator import fail
from model import GPT, GPTConfig
from support import cpu
from support.checkpoint import VERSION, Damaged, newest, numbered, verify_records
from support.dataset_meta import read_meta, read_tokenizer_state
from support.errors import first_line
from support.hub_datasets import is_folder, is_hub_name
from support.tokenizer import make_tokenizer
from support.tokenizer import check_tokenizer_state

# the types of what may be missing from a checkpoint, as from nanoGPT's
OPTIONAL = {'optimizer': dict, 'scaler': dict, 'tokenizer': dict, 'evaluation': dict, 'trained_on': dict,
            'environment': dict, 'seconds': float, 'bad_steps': int, 'wandb_run_id': str, 'version': int,
            'optimizer_class': str, 'loss_sum': list}


def find(source, hub=True):
    """The path that `source` means: a file; a run folder's ckpt.pt, else its newest checkpoint; a Hugging
    Face folder, or with `hub` a name there."""
    if os.path.isfile(source) or (hub and is_hub_name(source)):
        return source
    if not os.path.isdir(source):
        no_checkpoint(source)
    path = os.path.join(source, 'ckpt.pt')
    if os.path.exists(path):
        return path
    path = newest(source)
    if path is None and is_folder(source):
        return source
    if path is None:
        from support import foreign
        path = foreign.newest(source)
    if path is None:
        no_checkpoint(source)
    return path


def no_checkpoint(path):
    """Say so, and name the folders here that hold checkpoints, the newest first."""
    found = {}
    for file in glob.glob(os.path.join('*', 'ckpt*.pt')):
        if os.path.exists(file):  # a link's target may be gone
            folder = os.path.dirname(file)
            found[folder] = max(found.get(folder, 0), os.path.getmtime(file))
    names = sorted(found, key=found.get, reverse=True)
    there = f"there is: {', '.join(names[:8])}" if names else 'no folder here has one'
    where = 'in' if os.path.isdir(path) else 'at'
    fail(f"no checkpoint {where} {path} ({there}). train first (--init_from=auto), or name another with "
         "--out_dir or --init_from: a run's folder, a file such as out/ckpt_00001000.pt (resume:PATH), or a "
         "Hugging Face folder or name (gpt2, OWNER/NAME)")


def candidates(out_dir):
    """What a resume may start from, best first: the numbered ones, newest first, then ckpt.pt and
    ckpt_best.pt if they are other files."""
    paths, seen = [], set()
    links = [os.path.join(out_dir, name) for name in ('ckpt.pt', 'ckpt_best.pt')]
    for path in numbered(out_dir)[::-1] + links:
        # another run, which lock() will tell of, may be removing it
        with contextlib.suppress(FileNotFoundError):
            stat = os.stat(path)
            if (stat.st_dev, stat.st_ino or path) not in seen:
                seen.add((stat.st_dev, stat.st_ino or path))
                paths.append(path)
    return paths


def newest_whole(out_dir, tell=print):
    """The path of the first candidate that is whole; damaged ones are named. If none is, that is an error,
    never a new beginning."""
    damaged = []
    for path in candidates(out_dir):
        try:
            unpack(path)
        except Damaged as e:
            damaged.append(f"{path} {e}")
            continue
        for what in damaged:
            tell(f"note: {what}. it is left out")
        return path
    if not damaged:
        no_checkpoint(out_dir)
    fail(f"no checkpoint in {out_dir} is whole ({'; '.join(damaged)}). bring one back from a copy, or start "
         "anew with --init_from=scratch --overwrite")


def unpack(path, verify=True):
    """What the checkpoint file `path` holds, its checksums verified. Nothing in it is executed. Raises
    Damaged."""
    # a run may replace it meanwhile, and torch opens it twice: once for the table of contents, once for the
    # numbers. Those of two files give weights that are wrong, and finite
    for _ in range(100):
        before, found, damaged = identity(path), None, None
        try:
            found = unpack_once(path, verify)
        except Damaged as e:
            damaged = e
        if identity(path) == before:
            break
    else:
        damaged = Damaged('is replaced faster than it can be read')
    if damaged:
        raise damaged
    return found


def identity(path):
    """What differs between two files that had the same name, one after the other."""
    try:
        stat = os.stat(path)
    except (OSError, ValueError):  # ValueError: a zero byte in the name
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def unpack_once(path, verify):
    if not os.path.isfile(path):
        raise Damaged('is no file')
    try:
        with open(path, 'rb') as f:
            magic = f.read(4)
    except OSError as e:
        raise Damaged(f"cannot be read ({e.strerror})") from e
    if not magic:
        raise Damaged('is damaged (it is empty)')
    zipped = magic == b'PK\3\4'  # older ones of torch are not, and have no checksums
    if zipped:
        verify_records(path, checksums=verify)
    try:
        with warnings.catch_warnings(action='ignore'):  # about files that are refused below
            return torch.load(path, map_location='cpu', weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as e:
        wants = re.search(r'GLOBAL ([\w.]+)', str(e))
        if zipped and wants and wants[1].endswith('Config'):
            from support import foreign
            if (found := foreign.unpack(path)) is not None:
                return found
        if zipped or wants:
            fail(f"{path} holds more than tensors and plain "
                 f"values{f' (it wants {wants[1]})' if wants else ''}; refused, as loading it would run "
                 "code. save it again with plain dicts only")
        raise Damaged('is damaged (it is not even the beginning of a checkpoint)') from e
    except Exception as e:  # as a pickle, a text may be any nonsense
        why = 'it is not even the beginning of a checkpoint'
        if zipped:
            why = first_line(e)
        raise Damaged(f"is damaged ({why})") from e


def read(path, verify=True):
    """The checkpoint at `path` (see find) as a dict on the CPU, with 'path' in it."""
    if not os.path.isfile(path):
        from support import huggingface
        return huggingface.read(path)
    if path.endswith(('.safetensors', '.json')):
        fail(f"{path} is part of a Hugging Face folder. name the folder: {os.path.dirname(path) or '.'}")
    try:
        ckpt = unpack(path, verify)
    except Damaged as e:
        others = [p for p in candidates(os.path.dirname(path) or '.') if not os.path.samefile(p, path)]
        fail(f"{path} {e}. take an older checkpoint{f': {others[0]}' if others else ', if there is one'}")
    version = ckpt.get('version') if isinstance(ckpt, dict) else None
    if isinstance(version, int) and version > VERSION:
        fail(f"{path} was written by a newer flatgpt (version {version}, this one reads {VERSION}). update "
             "this one")
    try:
        if isinstance(ckpt, dict) and 'model_args' not in ckpt:
            from support import foreign
            ckpt = foreign.as_ours(ckpt, path)
        return checked(ckpt, path)
    except Exception as e:  # a file may say anything
        fail(f"{path} is not a checkpoint of flatgpt or nanoGPT ({type(e).__name__}: {e}). take one that "
             "train.py wrote")


def checked(ckpt, path):
    """The checkpoint's dict with what older versions lack; an exception of some kind if it says what cannot
    be."""
    assert isinstance(ckpt, dict), 'it is not a dict'
    # nanoGPT saves the names of the compiled model
    weights = {name.removeprefix('_orig_mod.').removeprefix('module.'): p
               for name, p in ckpt['model'].items()}
    args = ckpt['model_args']
    args.setdefault('bias', 'transformer.ln_f.bias' in weights)  # older than that flag, or than the next ones
    args.setdefault('dropout', 0.0)
    args.setdefault('near_layers', 0)
    check_model_args(args, weights)
    ckpt = {name: value for name, value in ckpt.items() if value is not None or name not in OPTIONAL}
    for name in OPTIONAL.keys() & ckpt.keys():
        assert isinstance(ckpt[name], OPTIONAL[name]), f'{name} is {reprlib.repr(ckpt[name])[:60]}'
    if 'tokenizer' in ckpt:
        check_tokenizer_state(ckpt['tokenizer'])
    it = int(ckpt.get('iter_num', 0))
    assert 0 <= it < 10**12, f"iter_num is {it}"
    best = float(ckpt.get('best_val_loss', 'inf'))
    return {**ckpt, 'model': weights, 'iter_num': it, 'best_val_loss': best,
            'config': dict(ckpt.get('config', {})), 'path': path}


def check_model_args(args, weights):
    """Raise ValueError if model_args are not what the weights have: a model is built from them, however large
    they say."""
    if problems := GPTConfig(**args).problems():
        raise ValueError(problems[0])
    for name, p in weights.items():
        plain = torch.is_tensor(p) and p.is_floating_point() and p.layout is torch.strided
        # a view may say that it is larger than any memory
        if not plain or p.device.type != 'cpu' or p.numel() * p.element_size() > p.untyped_storage().nbytes():
            raise ValueError(f'{name} is no plain tensor of floats')
    vocab_size, n_embd = weights['transformer.wte.weight'].shape
    layers = {name.split('.')[2] for name in weights if name.startswith('transformer.h.')}
    have = dict(vocab_size=vocab_size, n_embd=n_embd, n_layer=len(layers) - args['near_layers'])
    if 'transformer.wpe.weight' in weights:
        have['block_size'] = weights['transformer.wpe.weight'].shape[0]
    for name, value in have.items():
        if args[name] != value:
            raise ValueError(f"{name} is {args[name]}, its weights have {value}")


def model_config(ckpt, **changes):
    """The GPTConfig of a checkpoint, with changes."""
    return GPTConfig(**{**ckpt['model_args'], **changes})


def build(ckpt, dropout=0.0, **changes):
    """The GPT of a checkpoint, with its weights, on the CPU. changes: a smaller block_size; with rotary
    positions any block_size, rope_theta and rope_scaling, as no weights depend on them."""
    config = model_config(ckpt, dropout=dropout, **changes)
    block_size = config.block_size
    if config.positions == 'learned':
        config.block_size = ckpt['model_args']['block_size']
    with torch.device('meta'):  # no time for random numbers that are overwritten at once
        model = GPT(config)
    if any(buffer.is_meta for buffer in model.buffers()):  # a table that you added; no checkpoint brings it
        model = GPT(config)
    # the causal mask of nanoGPT's early days is no weight; copied, as the file may be replaced while it is
    # mapped
    weights = {name: p.to(torch.float32, copy=True) for name, p in ckpt['model'].items()
               if not name.endswith('.attn.bias')}
    if not all(torch.isfinite(p).all() for p in weights.values()):
        fail(f"the weights of {ckpt['path']} are not finite. take an older checkpoint")
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as e:
        fail(f"the weights of {ckpt['path']} do not fit its model_args ({first_line(' '.join(str(e).split()))}). "
             "take one that train.py wrote")
    if config.tie:
        model.transformer.wte.weight = model.lm_head.weight
    if block_size < config.block_size:
        model.crop_block_size(block_size)
    return model


def tokenizer_state(ckpt, dataset_name=None, data_dir=None):
    """What a checkpoint's tokens mean: it says so itself; for nanoGPT's, the folder of its dataset does."""
    if dataset_name is None and ckpt.get('tokenizer'):
        return ckpt['tokenizer']
    vocab_size = ckpt['model_args']['vocab_size']
    name = dataset_name or str(ckpt['config'].get('dataset', ''))
    folder = os.path.join(data_dir or dataset.DATA_DIR, name)
    # a name, never a path: the file may be a stranger's
    if name == os.path.basename(name) and name not in ('', '.', '..') and os.path.isdir(folder):
        meta = read_meta(folder)
        if meta['vocab_size'] <= vocab_size < meta['vocab_size'] + 64:
            return read_tokenizer_state(folder, meta)
        fail(f"dataset {name} has {meta['vocab_size']} tokens, the checkpoint {vocab_size}. name the one it "
             "was trained on with --dataset=NAME")
    if dataset_name:
        fail(f"no dataset {dataset_name} in {data_dir or dataset.DATA_DIR}. name the one that the checkpoint "
             "was trained on")
    if vocab_size in (50257, 50304):  # as nanoGPT assumes
        return {'kind': 'tiktoken', 'name': 'gpt2'}
    fail(f"the checkpoint does not tell its tokenizer and data/{name or '?'} is not there. name its dataset "
         "with --dataset=NAME")


def model_and_tokenizer(source='out', dataset_name=None, data_dir=None):
    """(model, tokenizer) of a run's folder, a checkpoint, or a Hugging Face folder or name, on the CPU, in
    eval mode."""
    ckpt = read(find(source))
    model, tokenizer = build(ckpt).eval(), make_tokenizer(tokenizer_state(ckpt, dataset_name, data_dir))
    cpu.faster(model)
    model.tokenizer = tokenizer  # for model.generate('a text', 100)
    return model, tokenizer
