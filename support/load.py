"""
How a checkpoint is read: ours, nanoGPT's, build-nanogpt's or a Hugging Face folder. Nothing in it is
executed, everything is checked. `cls` is the class of the network, model.GPT, whose settings are cls.Config.
"""

import contextlib
import functools
import glob
import os
import pickle
import re
import reprlib
import warnings

import torch

from configurator import fail
from support import cpu, huggingface
from support.checkpoint import VERSION, Damaged, newest, numbered, verify_records
from support.dataset_meta import folder_of, read_meta, read_tokenizer_state
from support.errors import first_line
from support.hub_datasets import is_folder, is_hub_name
from support.tokenizer import check_tokenizer_state, make_tokenizer

# the types of what may be missing from a checkpoint, as from nanoGPT's
OPTIONAL = {'optimizer': dict, 'scaler': dict, 'tokenizer': dict, 'evaluation': dict, 'trained_on': dict,
            'environment': dict, 'seconds': float, 'bad_steps': int, 'wandb_run_id': str, 'version': int,
            'optimizer_class': str, 'loss_sum': list}
BUILD_NANOGPT = {'block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'dropout', 'bias'}  # its config
# causal masks and rotations, which older versions of nanoGPT and transformers saved among the weights
CONSTANTS = '.attn.bias', '.attn.masked_bias', '.rotary_emb.inv_freq'


# -----------------------------------------------------------------------------
# which file


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
    build_nanogpts = sorted(glob.glob(os.path.join(glob.escape(source), 'model_*[0-9].pt')))
    path = newest(source) or (source if is_folder(source) else None) or (build_nanogpts or [None])[-1]
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
    found = {}
    links = [os.path.join(out_dir, name) for name in ('ckpt.pt', 'ckpt_best.pt')]
    for path in numbered(out_dir)[::-1] + links:
        # another run, which lock() will tell of, may be removing it
        with contextlib.suppress(FileNotFoundError):
            stat = os.stat(path)
            found.setdefault((stat.st_dev, stat.st_ino or path), path)
    return list(found.values())


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


# -----------------------------------------------------------------------------
# what is in it


def unpack(path, verify=True):
    """What the checkpoint file `path` holds, its checksums verified. Nothing in it is executed. Raises
    Damaged."""
    # a run may replace it meanwhile, and torch opens it twice: once for the table of contents, once for the
    # numbers. Those of two files give weights that are wrong, and finite
    for _ in range(100):
        before = identity(path)
        try:
            found = unpack_once(path, verify)
        except Damaged:
            if identity(path) == before:
                raise
        else:
            if identity(path) == before:
                return found
    raise Damaged('is replaced faster than it can be read')


def identity(path):
    """What differs between two files that had the same name, one after the other."""
    try:
        stat = os.stat(path)
    except (OSError, ValueError):  # ValueError: a zero byte in the name
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


class Settings:
    """Stands for build-nanogpt's GPTConfig: it takes the attributes, and has no code."""


def unpack_once(path, verify):
    if not os.path.isfile(path):
        raise Damaged('is no file')
    try:
        with open(path, 'rb') as f:
            zipped = f.read(4) == b'PK\3\4'  # older ones of torch are not, and have no checksums
    except OSError as e:
        raise Damaged(f"cannot be read ({e.strerror})") from e
    if zipped:
        verify_records(path, checksums=verify)
    load = functools.partial(torch.load, path, map_location='cpu', weights_only=True, mmap=zipped)
    try:
        with warnings.catch_warnings(action='ignore'):  # about files that are refused below
            return load()
    except pickle.UnpicklingError as e:
        wants = re.findall(r'GLOBAL ([\w.]+)', str(e))
        if zipped and wants:
            wants = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            if all(re.fullmatch(r'[\w.]*Config', name) for name in wants):
                with torch.serialization.safe_globals([(Settings, name) for name in wants]):
                    return load()
        if zipped or wants:
            fail(f"{path} holds more than tensors and plain values ({', '.join(wants)}); refused, as loading "
                 "it would run code. save it again with plain dicts only")
        raise Damaged('is damaged (it is not even the beginning of a checkpoint)') from e
    except Exception as e:  # as a pickle, a text may be any nonsense
        why = first_line(e) if zipped else 'it is not even the beginning of a checkpoint'
        raise Damaged(f"is damaged ({why})") from e


def read(path, verify=True):
    """The checkpoint at `path` (see find) as a dict on the CPU, with 'path' in it."""
    if not os.path.isfile(path):
        return huggingface.read(path)
    if path.endswith(('.safetensors', '.json')):
        fail(f"{path} is part of a Hugging Face folder. name the folder: {os.path.dirname(path) or '.'}")
    try:
        ckpt = unpack(path, verify)
    except Damaged as e:
        others = [p for p in candidates(os.path.dirname(path) or '.') if not os.path.samefile(p, path)]
        fail(f"{path} {e}. take an older checkpoint{f': {others[0]}' if others else ', if there is one'}")
    with explained(path):
        assert ckpt.get('version', VERSION) <= VERSION, 'a newer flatgpt wrote it: update this one'
        return checked(ckpt, path)


@contextlib.contextmanager
def explained(path):
    try:
        yield
    except Exception as e:  # a file may say anything
        fail(f"{path} is not a checkpoint of flatgpt or nanoGPT ({type(e).__name__}: {first_line(e)}). take "
             "one that train.py wrote")


def checked(ckpt, path):
    """The checkpoint's dict with what older versions lack; an exception of some kind if it says what cannot
    be."""
    if isinstance(ckpt.get('config'), Settings):
        sizes = vars(ckpt['config'])
        assert sizes.keys() <= BUILD_NANOGPT, f'not build-nanogpt: {", ".join(sizes.keys() - BUILD_NANOGPT)}'
        ckpt = {'model': ckpt['model'], 'iter_num': ckpt.get('step', 0), 'config': {},
                'best_val_loss': ckpt.get('val_loss', float('inf')),
                # a network with its five fields has biases and the tanh approximation
                'model_args': {'bias': True, 'mlp': 'gelu_tanh', **sizes}}
    # nanoGPT saves the names of the compiled model
    weights = {name.removeprefix('_orig_mod.').removeprefix('module.'): p
               for name, p in ckpt['model'].items()}
    for name, p in weights.items():
        plain = torch.is_tensor(p) and p.is_floating_point() and p.layout is torch.strided
        # a view may say that it is larger than any memory
        if not plain or p.device.type != 'cpu' or p.numel() * p.element_size() > p.untyped_storage().nbytes():
            raise ValueError(f'{name} is no plain tensor of floats')
    # older than that flag, or than the next ones
    bias = 'transformer.ln_f.bias' in weights
    args = {'bias': bias, 'dropout': 0.0, 'near_layers': 0, **ckpt['model_args']}
    n_layers = len({name.split('.')[2] for name in weights if name.startswith('transformer.h.')})
    assert args['n_layer'] + args['near_layers'] == n_layers, f"n_layer is {args['n_layer']}, not {n_layers}"
    ckpt = {name: value for name, value in ckpt.items() if value is not None or name not in OPTIONAL}
    for name in OPTIONAL.keys() & ckpt.keys():
        assert isinstance(ckpt[name], OPTIONAL[name]), f'{name} is {reprlib.repr(ckpt[name])[:60]}'
    if 'tokenizer' in ckpt:
        check_tokenizer_state(ckpt['tokenizer'])
    it = int(ckpt.get('iter_num', 0))
    assert 0 <= it < 10**12, f"iter_num is {it}"
    return {**ckpt, 'model': weights, 'model_args': args, 'iter_num': it, 'path': path,
            'best_val_loss': float(ckpt.get('best_val_loss', 'inf')), 'config': dict(ckpt.get('config', {}))}


# -----------------------------------------------------------------------------
# what becomes of it


def model_config(cls, ckpt, **changes):
    """The cls.Config of a checkpoint, with changes."""
    with explained(ckpt['path']):
        config = cls.Config(**ckpt['model_args'])
        problems = config.problems()
        assert not problems, problems
    return cls.Config(**{**ckpt['model_args'], **changes})


def build(cls, ckpt, dropout=0.0, **changes):
    """The network of a checkpoint, with its weights, on the CPU. changes: a smaller block_size; with rotary
    positions any block_size, rope_theta and rope_scaling, as no weights depend on them."""
    config = model_config(cls, ckpt, dropout=dropout, **changes)
    block_size = config.block_size
    if config.positions == 'learned':
        config.block_size = ckpt['model_args']['block_size']
    with torch.device('meta'):  # no time for random numbers that are overwritten at once
        model = cls(config)
    if any(buffer.is_meta for buffer in model.buffers()):  # a table of yours, which no checkpoint brings
        model = cls(config)
    # copied, as the file may be replaced while it is mapped
    weights = {name: p.to(torch.float32, copy=True) for name, p in ckpt['model'].items()
               if not name.endswith(CONSTANTS)}
    if not all(torch.isfinite(p).all() for p in weights.values()):
        fail(f"the weights of {ckpt['path']} are not finite. take an older checkpoint")
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as e:
        why = first_line(' '.join(str(e).split()))
        fail(f"the weights of {ckpt['path']} do not fit its model_args ({why}). take one that train.py wrote")
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
    # a name, never a path: the file may be a stranger's
    known = name == os.path.basename(name) and name not in ('', '.', '..')
    if known and os.path.isdir(folder := folder_of(name, data_dir)):
        meta = read_meta(folder)
        if meta['vocab_size'] <= vocab_size < meta['vocab_size'] + 64:
            return read_tokenizer_state(folder, meta)
        fail(f"dataset {name} has {meta['vocab_size']} tokens, the checkpoint {vocab_size}. name the one it "
             "was trained on with --dataset=NAME")
    if vocab_size in (50257, 50304) and not dataset_name:  # as nanoGPT assumes
        return {'kind': 'tiktoken', 'name': 'gpt2'}
    fail(f"the checkpoint does not tell its tokenizer, and there is no dataset {name or '?'}. name the one "
         "it was trained on with --dataset=NAME")


def model_and_tokenizer(cls, source='out', dataset_name=None, data_dir=None):
    """(model, tokenizer) of a run's folder, a checkpoint, or a Hugging Face folder or name, on the CPU, in
    eval mode."""
    ckpt = read(find(source))
    model, tokenizer = build(cls, ckpt).eval(), make_tokenizer(tokenizer_state(ckpt, dataset_name, data_dir))
    cpu.faster(model)
    model.tokenizer = tokenizer  # for model.generate('a text', 100)
    return model, tokenizer
