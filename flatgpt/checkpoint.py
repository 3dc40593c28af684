"""
Find, read, check and write checkpoints; decide what a resume takes over.

A run's folder contains

    out_dir/ckpt_00000500.pt    the state after 500 iterations; the newest few are kept
    out_dir/ckpt.pt             a link to the newest one, or with always_save_checkpoint=False to the best
    out_dir/ckpt_best.pt        a link to the one with the lowest validation loss
    out_dir/eval_00000500.json  the results of eval.py for that state

Nothing in a file that is read is executed. From Python: model, tokenizer = load('out').
"""

import copy
import dataclasses
import glob
import inspect
import io
import math
import os
import pickle
import re
import shutil
import types
import zipfile

import numpy as np
import torch

from configurator import INVALID, InputError, fit_value, print0, process_ranks
from flatgpt.dataset import folder_of, padded_vocab_size, read_meta
from flatgpt.files import check_not_lfs_pointer, first_line, read_rows, replacing, write_rows
from flatgpt.processes import broadcast, innermost
from flatgpt.tokenizer import make_tokenizer, read_tokenizer_files, same_tokenizer
from model import GPT, NANOGPT, GPTConfig
from optim import MuonAdamW

LINKS = ['ckpt.pt', 'ckpt_best.pt']
MODEL_FIELDS = [field.name for field in dataclasses.fields(GPTConfig)]

# -----------------------------------------------------------------------------
# find a file


def numbered(out_dir):
    """Return the paths of a run's numbered checkpoints, oldest first."""
    name = 'ckpt_' + '[0-9]' * 8 + '.pt'
    return sorted(glob.glob(os.path.join(glob.escape(out_dir), name)))


def candidates(out_dir):
    """Return the paths of a run's checkpoints in the order in which a resume tries them.

    The one with the highest iteration is first, whatever its name: ckpt.pt may be nanoGPT's, or a newer one
    from elsewhere. Links that are damaged are last.
    """
    paths = numbered(out_dir)[::-1]
    for name in LINKS:
        path = os.path.join(out_dir, name)
        if os.path.exists(path) and not any(os.path.samefile(path, other) for other in paths):
            paths.append(path)
    iterations = {}
    for path in paths:
        it = iteration_of(path)
        iterations[path] = -1 if it == math.inf else it
    return sorted(paths, key=iterations.get, reverse=True)


def newest(out_dir):
    """Return the path of a run's newest checkpoint, or None."""
    paths = candidates(out_dir)
    return paths[0] if paths else None


def exists(out_dir):
    """Return whether the folder contains a run."""
    return newest(out_dir) is not None


def find(source):
    """Return the path of the checkpoint `source`: a file, or a run's folder, in which ckpt.pt is used if it
    exists, else the newest one. Hugging Face folders and names are returned as they are."""
    source = os.fspath(source)
    for path in [source, os.path.join(source, 'ckpt.pt'), newest(source)]:
        if path and os.path.isfile(path):
            return path
    from flatgpt import huggingface
    if os.path.exists(os.path.join(source, 'config.json')) or huggingface.is_hub_name(source):
        return source
    raise InputError(f"no checkpoint found: {source}. Name a run's folder, a checkpoint, or a Hugging Face "
                     "folder or name (gpt2, OWNER/NAME).")


# -----------------------------------------------------------------------------
# read a file


def unpack(path, verify=True):
    """Return what torch.save wrote to `path`, with memory-mapped tensors. verify: check the checksums."""
    check_not_lfs_pointer(path)
    with open(path, 'rb') as file:
        archive = zipfile.ZipFile(file)
        # torch compresses nothing, so that a small file cannot need much memory
        is_compressed = any(entry.file_size > entry.compress_size for entry in archive.infolist())
        if is_compressed or (verify and archive.testzip()):
            raise InputError(f"{path} is damaged: a size or checksum is wrong. Use another checkpoint.")
        # torch opens the path several times. A run may replace the file in between, and the tensors would be
        # read at positions of the other file. So give torch the open file, which stays the same
        source = f'/proc/self/fd/{file.fileno()}'  # not /dev/fd: on macOS, it shares the file's position
        if not os.path.exists(source):  # macOS, Windows
            source = path
        classes = torch.serialization.get_unsafe_globals_in_checkpoint(source)
        if classes:
            raise InputError(f"{path} contains {', '.join(classes)}, which could run code. If you trust the "
                             "file, convert it as in docs/from_nanogpt.md.")
        return torch.load(source, map_location='cpu', weights_only=True, mmap=True)


def iteration_of(path):
    """Return the iteration of a file in a run's folder, from its name or, for ckpt.pt and ckpt_best.pt, from
    its content (infinity if it is missing or damaged); 0 for other files."""
    name = os.path.basename(path)
    match = re.fullmatch(r'(ckpt|eval)_(\d{8})\.(pt|json)', name)
    if match:
        return int(match[2])
    if name not in LINKS:
        return 0
    try:
        return int(unpack(path, verify=False)['iter_num'])
    except Exception:  # a file may contain anything
        return math.inf


# What a checkpoint contains besides tensors: the value if it is missing, and the allowed types. Numbers are
# finite and not negative. Other entries, such as yours, are not checked
NONE = types.NoneType
FIELDS = {
    'model': (None, [dict]),  # {name: tensor}
    'model_args': (None, [dict]),  # the arguments of GPTConfig
    'optimizer': (None, [dict, NONE]),  # its state; None if the file has weights only
    'optimizer_class': (None, [str, NONE]),
    'scaler': (None, [dict, NONE]),
    'iter_num': (0, [int]),
    'best_val_loss': (math.inf, [float]),
    'best_iter': (None, [int, NONE]),
    'evaluation': (None, [dict, NONE]),  # what the validation loss depends on besides the weights
    'samples': (None, [int, NONE]),  # training samples read so far
    'tokens': (0, [int]),  # that the weights were trained on
    'tokens_per_iter': (None, [int, NONE]),
    'n_iters': (None, [int, NONE]),  # the number of iterations, if it was measured for train_minutes
    'train_seconds': (0.0, [float]),
    'wall_seconds': (0.0, [float]),
    'config': ({}, [dict]),  # all settings
    'given': (None, [dict, list, NONE]),  # those that were given
    'tokenizer': (None, [dict, NONE]),  # its state
    'data': (None, [dict, NONE]),  # what identifies the data
    'commit': (None, [str, NONE]),
    'starts': ([], [list]),
    'wandb_run_id': (None, [str, NONE]),
}


def read(path, verify=True, strict=True):
    """
    Return the checkpoint at `path` (see find), checked against model.py: a dict with the entries in FIELDS,
    others that the file has, and `path`. The tensors are on the CPU, the weights under the network's names.

    strict: the weights must be exactly those of the network, see fit_weights().
    """
    path = os.fspath(path)
    try:
        if os.path.isfile(path):
            content = unpack(path, verify)
        else:
            from flatgpt import huggingface
            content = huggingface.read(path)
        ckpt = {**content, **checked_fields(content), 'path': path}
        # nanoGPT's has none, commit 67db31c's has names only; dtype and compile depend on the machine
        if not isinstance(ckpt['given'], dict):
            config = ckpt['config']
            ckpt['given'] = {name: config[name] for name in config if name not in ('dtype', 'compile')}
        fit_weights(ckpt, strict)
    except InputError:
        raise
    except Exception as e:  # a file may contain anything
        raise InputError(f"{path} is not a checkpoint of flatgpt or nanoGPT, nor a Hugging Face folder, or "
                         f"is damaged ({type(e).__name__}: {first_line(e)}). Use another one; "
                         "docs/from_nanogpt.md has the ways to convert.") from e
    return ckpt


def checked_fields(content):
    """Return the entries of a checkpoint that FIELDS lists. Raise ValueError if one has another type."""
    fields = {}
    for name, (default, kinds) in FIELDS.items():
        value = content.get(name, default)
        if isinstance(value, torch.Tensor) and value.dim() == 0:  # nanoGPT's best_val_loss
            value = value.item()
        if isinstance(value, dict):
            value = dict(value) if dict in kinds else INVALID  # a state_dict is an OrderedDict
        elif value != default:
            value = fit_value(value, kinds)
        if isinstance(value, dict) and name in ('config', 'given'):
            if not all(isinstance(key, str) and key.isidentifier() for key in value):
                value = INVALID
        if value is INVALID or (isinstance(value, (int, float)) and value < 0):
            raise ValueError(f"{name} has another type or range")
        fields[name] = value
    return fields


def setting(ckpt, name, default):
    """Return a setting of the run that wrote a checkpoint; `default` if it is missing or of another type."""
    value = ckpt['config'].get(name, default)
    return value if type(value) is type(default) else default


# -----------------------------------------------------------------------------
# the network

# causal masks and rotations, which older versions of nanoGPT and transformers saved among the weights
CONSTANTS = ('.attn.bias', '.attn.masked_bias', '.rotary_emb.inv_freq')
MAX_BLOCK_SIZE = 2**20  # no weight shows the length of rotary positions, and their table needs memory


def without_prefixes(name):
    """Return a weight's name without what torch.compile and DDP put in front of names, in any order."""
    return '.'.join(part for part in name.split('.') if part not in ('_orig_mod', 'module'))


def complete_args(args, weights):
    """Return the arguments of GPTConfig with those that a file leaves out, without those of other code."""
    args = {name: value for name, value in args.items() if name in MODEL_FIELDS}
    if args.get('arch', 'gpt2') == 'gpt2':
        args = {**NANOGPT, **args}  # not the preset, which may have been edited
    plain_names = {without_prefixes(name): p for name, p in weights.items()}
    embedding = plain_names['transformer.wte.weight']
    if not torch.equal(plain_names.get('lm_head.weight', embedding), embedding):
        args = {**args, 'tie': False}  # forks of nanoGPT that untie the head do not record it
    return args


def empty_model(config):
    """Return a GPT on the meta device: its weights have shapes but no values, so it is made quickly."""
    with torch.device('meta'):
        model = GPT(config)
    # tensors that no checkpoint contains, such as a mask that an edit has added, need their values
    others = list(model.buffers())
    for module in model.modules():
        others += [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
    if any(tensor.is_meta for tensor in others):
        model = GPT(config)
    return model


def listing(names):
    """Return up to three of the names, and how many there are, for a message."""
    if not names:
        return 'none'
    text = ', '.join(repr(name) for name in names[:3])
    return text if len(names) <= 3 else f'{text}, ... ({len(names)})'


def fit_weights(ckpt, strict):
    """
    Complete ckpt['model_args'], and give the tensors in ckpt['model'] their names in the network.

    Raise InputError unless they are finite and those of the network. If not strict, missing weights get their
    initial values in build_model(), and unknown ones are dropped, with a note.
    """
    path = ckpt['path']
    weights = ckpt['model']
    # fields of other code, unless they are off
    unused = [f'model_args.{name}' for name, value in ckpt['model_args'].items()
              if name not in MODEL_FIELDS and value]
    ckpt['model_args'] = complete_args(ckpt['model_args'], weights)
    config = GPTConfig(**ckpt['model_args'])
    # to build this network would take forever, or all memory
    if config.n_layer > len(weights) or config.block_size > MAX_BLOCK_SIZE:
        raise InputError(f"{path} has fewer weights than layers ({config.n_layer}), or a block_size above "
                         f"{MAX_BLOCK_SIZE} ({config.block_size}). Use another checkpoint.")
    # keep_vars: a tensor that the network shares is one object with several names
    network = empty_model(config).state_dict(keep_vars=True)

    # a name is changed or dropped only if the network does not have it
    fitted = {}
    for name, p in weights.items():
        if name not in network:
            name = without_prefixes(name)
        if name in network:
            fitted[name] = p
        elif not name.endswith(CONSTANTS):
            unused.append(name)
    first_names = {}
    for name, tensor in network.items():
        first_name = first_names.setdefault(id(tensor), name)
        if first_name in fitted:
            shared = fitted.setdefault(name, fitted[first_name])  # transformers saves a tied head once
            if shared is not fitted[first_name] and not torch.equal(shared, fitted[first_name]):
                raise InputError(f"{path} does not match model.py: {first_name!r} and {name!r} are one "
                                 "parameter there, but differ in the file. Use the code that it was trained "
                                 "with.")
    missing = [name for name in network if name not in fitted]
    if missing or unused:
        difference = f"missing in the file: {listing(missing)}; missing in model.py: {listing(unused)}"
        if strict:
            raise InputError(f"{path} does not match model.py. {difference}. Use the code that it was "
                             "trained with, or start a new run from what matches: train.py "
                             f"--init_from={path}.")
        print0(f"note: what matches model.py is used of {path}. {difference}")
    for name, p in fitted.items():
        if p.shape != network[name].shape:
            raise InputError(f"{path} does not match model.py: {name!r} has shape {tuple(p.shape)} in the "
                             f"file, {tuple(network[name].shape)} in model.py. Use the code that it was "
                             "trained with.")
        if p.numel() * p.element_size() > p.untyped_storage().nbytes():
            raise InputError(f"{path} is damaged: {name!r} has fewer numbers than its shape says. Use "
                             "another checkpoint.")
        # not a buffer, such as a mask with minus infinity
        if isinstance(network[name], torch.nn.Parameter) and not torch.isfinite(p).all():
            raise InputError(f"{path} has a weight that is not finite: {name!r}. Use an earlier checkpoint.")
    ckpt['model'] = fitted


def build_model(ckpt, block_size=None, dropout=0.0, vocab_size=None):
    """Return the GPT of a checkpoint, on the CPU. Weights that it lacks have their initial values.

    block_size: the new context length, which may be longer only with rope. vocab_size: the new vocabulary
    size; a smaller one is ignored. By default, both are the checkpoint's.
    """
    config = GPTConfig(**{**ckpt['model_args'], 'dropout': dropout})
    weights = dict(ckpt['model'])
    n_new = max(0, (vocab_size or 0) - config.vocab_size)
    if n_new:
        config.vocab_size += n_new
        for name in ['lm_head.weight', 'transformer.wte.weight']:
            weights[name] = add_rows(weights[name], n_new)
    if block_size and config.positions == 'rope':
        config.block_size = block_size
    model = empty_model(config)
    network = model.state_dict(keep_vars=True)  # a shared tensor is one object with several names
    if not network.keys() <= weights.keys():
        model = GPT(config)
        network = model.state_dict(keep_vars=True)
    loaded = {}  # by the id of the network's tensor, so that what it shares stays shared
    for name, tensor in network.items():
        if id(tensor) in loaded:
            continue
        value = tensor.detach()
        if name in weights:
            value = weights[name].to(tensor.dtype, copy=True)  # not mapped from the file any more
        if isinstance(tensor, torch.nn.Parameter):
            value = torch.nn.Parameter(value, tensor.requires_grad)
        loaded[id(tensor)] = value
    model.load_state_dict({name: loaded[id(tensor)] for name, tensor in network.items()}, assign=True)
    if block_size and block_size != config.block_size:
        model.crop_block_size(block_size)
    return model


def add_rows(weight, n_new):
    """Return a matrix with n_new more rows, each the mean of the old ones plus a little noise.

    So a new token starts about as likely as an average one, and no two are equal.
    """
    rows = weight.mean(0, keepdim=True).repeat(n_new, 1)
    noise = torch.randn(rows.shape) * weight.std() * 0.1
    return torch.cat((weight, rows + noise))


# -----------------------------------------------------------------------------
# the tokenizer


def is_compatible(ckpt, state, n_ids, n_added=0):
    """Return whether a tokenizer with n_ids ids can be used with the checkpoint.

    n_added: up to this many of the ids may be missing in the checkpoint, as they are new special tokens.
    nanoGPT's checkpoints have no tokenizer, only a vocab_size, which may be padded.
    """
    vocab_size = ckpt['model_args']['vocab_size']
    if ckpt['tokenizer'] is None:
        return n_ids - n_added <= vocab_size <= padded_vocab_size(n_ids, state)
    return n_ids - n_added <= vocab_size and same_tokenizer(ckpt['tokenizer'], state)


def tokenizer_state_of(ckpt, dataset=None, data_dir=None):
    """Return the state of the tokenizer of `dataset` or, if that is None, of the checkpoint. For nanoGPT's
    checkpoints, which have no tokenizer, it is that of the dataset that the model was trained on."""
    if dataset is None and ckpt['tokenizer'] is not None:
        return ckpt['tokenizer']
    name = dataset or setting(ckpt, 'dataset', 'openwebtext')  # nanoGPT's default
    folder = folder_of(name, data_dir)  # not a path, as the checkpoint may be untrusted
    meta = read_meta(folder)  # GPT-2's if there is no file, as in nanoGPT
    state = read_tokenizer_files(folder, meta)
    if not is_compatible(ckpt, state, meta['vocab_size']):
        vocab_size = ckpt['model_args']['vocab_size']
        raise InputError(f"{folder} does not exist, or its tokenizer ({meta['vocab_size']} ids) does not "
                         f"match {ckpt['path']} (vocab_size {vocab_size}). Name the dataset that it was "
                         "trained on: --dataset=NAME --data_dir=PATH.")
    return state


def load(source='out', dataset=None, data_dir=None):
    """Return (model, tokenizer) of a run's folder, a checkpoint, or a Hugging Face folder or name.

    The model is on the CPU, in eval mode.
    """
    ckpt = read(find(source))
    model = build_model(ckpt).eval()
    return model, make_tokenizer(tokenizer_state_of(ckpt, dataset, data_dir))


# -----------------------------------------------------------------------------
# resume a run


def load_for_resume(out_dir, step=0):
    """Return the newest valid checkpoint of a run, or the one of iteration `step`. All processes call it.

    Rank 0 chooses the file, as other ranks may see an older state of a network file system.
    """
    path = None
    if process_ranks()[0] == 0:
        path = newest_valid(out_dir, step)
    path = broadcast(path)
    if path is None:
        raise InputError(f"no checkpoint in {out_dir} can be resumed (resume_step={step}). Name another run, "
                         "or start one from weights: --init_from=PATH --out_dir=ANOTHER.")
    return read(path, verify=False)


def newest_valid(out_dir, step):
    """Return the path of the newest checkpoint that can be resumed, or None. step: its iteration; 0: any."""
    for path in candidates(out_dir):
        if step and iteration_of(path) != step:
            continue
        try:
            if read(path)['optimizer']:
                others = numbered(out_dir)
                if path not in others and others and iteration_of(path) > iteration_of(others[-1]):
                    print0(f"note: {path} has a higher iteration than {others[-1]}")
                return path
            print0(f"note: skipped: {path} has weights only. Start a new run from them: --init_from={path}")
        except InputError as e:
            print0(f"note: skipped: {e}")
    return None


# never restored from a checkpoint: what belongs to one start or machine; and paths, as the checkpoint may be
# untrusted
OF_THIS_START = [
    'out_dir', 'init_from', 'auto_resume', 'resume_step', 'overwrite', 'eval_only', 'data_dir',
    'sample_prompts', 'wandb_log', 'device', 'backend', 'ddp_timeout', 'shard', 'max_minutes',
]
# mutually exclusive settings: giving one now clears the others
EXCLUSIVE = [
    ['max_iters', 'max_tokens', 'max_epochs', 'train_minutes'],
    ['gradient_accumulation_steps', 'total_batch_size'],
    ['lr_schedule', 'decay_lr'],
]


def inherit(config, given, ckpt, resuming, kinds):
    """
    Return the settings (config, given) of a run that starts from a checkpoint, and print what changes.

    The architecture is the checkpoint's, but a new run may use a smaller block_size, or with rope any. When a
    run is resumed, each other setting has the value that is given now, else the one that the run was given
    before, else the default of train.py.

    config, given: as configure() returns them
    kinds: {name: types}; a value in the checkpoint of another type is ignored
    """
    path = ckpt['path']
    restored = {}
    if resuming:
        print0(f"resuming from {path}, after {ckpt['iter_num']:,} iterations")
        not_restored = {*OF_THIS_START, *given}
        for names in EXCLUSIVE:
            if not_restored.intersection(names):
                not_restored.update(names)
        for name, value in ckpt['given'].items():
            value = fit_value(value, kinds.get(name, []))  # INVALID also if there is no such setting
            if value is not INVALID and name not in not_restored:
                restored[name] = value
    else:
        print0(f"weights of {path}")
        folder = os.path.realpath(os.path.dirname(path))
        if config.get('overwrite') and folder == os.path.realpath(config['out_dir']):
            raise InputError(f"--overwrite would delete the weights to start from: {path}. Choose another "
                             "--out_dir.")

    merged = {**config, **restored}
    network = GPTConfig(**ckpt['model_args'])
    for name in MODEL_FIELDS:
        if name in config and name != 'dropout':
            merged[name] = getattr(network, name)
    if not resuming:
        merged['block_size'] = min(network.block_size, config['block_size'])
        if network.positions == 'rope' and 'block_size' in given:
            merged['block_size'] = config['block_size']
    for name in given:
        if merged[name] != config[name]:
            print0(f"note: {name}={config[name]} is ignored, the checkpoint has {merged[name]}")
    if resuming:
        for name, before in ckpt['config'].items():
            is_of_network = name in MODEL_FIELDS and name != 'dropout'
            if is_of_network or (name in OF_THIS_START and name not in ckpt['given']):
                continue
            now = merged.get(name)  # None if there is no such setting any more
            if before != now:
                print0(f"  {name}: {before!r} -> {now!r}")
    return merged, {name: merged[name] for name in [*restored, *given]}


def check_data(ckpt, data, tokens_per_iter, resuming):
    """
    Return the vocabulary size that the model needs: the checkpoint's, or a larger one if conversations add
    special tokens.

    Raise InputError if the dataset's tokenizer is not the checkpoint's; on a resume also if the data or the
    number of tokens per iteration has changed, as samples would be repeated or skipped.
    """
    path = ckpt['path']
    vocab_size = ckpt['model_args']['vocab_size']
    n_ids = data.meta['vocab_size']
    n_added = 0
    if data.train.masked and not resuming:
        n_added = 5  # finetuning on conversations adds four role tokens and, for some tokenizers, <|bos|>
    if not is_compatible(ckpt, data.tokenizer_state, n_ids, n_added):
        raise InputError(f"the tokenizer of dataset {data.name} is not that of {path}: {n_ids} ids, up to "
                         f"{vocab_size} there. Make a dataset with it: python prepare.py NAME --input=FILE "
                         f"--tokenizer={path}.")
    if resuming:
        changes = [('tokens per iteration', ckpt['tokens_per_iter'] or tokens_per_iter, tokens_per_iter)]
        for split in ['train', 'val']:
            before = (ckpt['data'] or {}).get(split)
            if isinstance(before, dict):  # it may have fewer entries than this version writes
                now = {key: data.fingerprint.get(split, {}).get(key) for key in before}
                changes.append((f'{split}.bin of dataset {data.name}', before, now))
        for name, before, now in changes:
            if before != now:
                raise InputError(f"{name}: {before} in {path}, now {now}. Restore it, or start a new run "
                                 f"from these weights: --init_from={path} --out_dir=ANOTHER.")
    return data.vocab_size if n_ids > vocab_size else vocab_size


def best_so_far(ckpt, evaluation, out_dir):
    """
    Return the lowest validation loss of a resumed run and its iteration, or (inf, None) if it is not valid.

    It is not valid if ckpt_best.pt is not of that iteration, or if `evaluation`, what the validation loss
    depends on besides the weights, has changed. All processes call this, after prepare_folder().
    """
    before = ckpt['best_val_loss']
    has_best = broadcast(iteration_of(os.path.join(out_dir, 'ckpt_best.pt'))) == ckpt['best_iter']
    is_same = ckpt['evaluation'] in (None, evaluation)  # None: written before this was recorded
    if math.isinf(before) or (has_best and is_same):
        return before, ckpt['best_iter']
    print0("note: the best validation loss so far is discarded: its checkpoint is gone, or it was measured "
           "on other sequences")
    return math.inf, None


def load_optimizer(optimizer, ckpt):
    """
    Restore the optimizer's state: of each parameter, by its name, and what the optimizer keeps in its groups.

    Learning rates, betas and other arguments of the optimizer are not restored. Return the number of
    parameters without state: all of them if the checkpoint is of another class of optimizer.
    """
    try:
        return restore_state(optimizer, ckpt)
    except InputError:
        raise
    except Exception as e:  # a file may contain anything
        raise InputError(f"the optimizer's state in {ckpt['path']} does not match this optimizer, or is "
                         f"damaged ({type(e).__name__}: {first_line(e)}). Start a new run from the weights: "
                         f"--init_from={ckpt['path']}.") from e


def restore_state(optimizer, ckpt):
    saved = ckpt['optimizer']
    current = optimizer.state_dict()  # its groups have this run's learning rates
    saved_names = names_of(saved['param_groups'])
    names = names_of(current['param_groups'])
    saved_class = ckpt['optimizer_class']
    if saved_class is None:  # nanoGPT's, and checkpoints before this entry
        has_muon = any(group.get('muon') for group in saved['param_groups'])
        saved_class = 'MuonAdamW' if has_muon else 'AdamW'
    if saved_class != type(optimizer).__name__:
        return len(names)
    if None in names or None in saved_names:  # nanoGPT's have no names, but the same order
        if len(saved_names) != len(names):
            raise InputError(f"the optimizer state has another number of parameters: {len(saved_names)}, not "
                             f"{len(names)}. Train the same ones, or start a new run from the weights.")
        saved_names = names = range(len(names))
    # state_dict() numbers the parameters through all groups
    state_of = {name: saved['state'].get(i) for i, name in enumerate(saved_names)}
    state = dict(current['state'])
    n_without = 0
    i = 0
    for group in optimizer.param_groups:
        for p in group['params']:
            values = state_of.get(names[i])
            if values and is_usable(optimizer, group, p, values):
                state[i] = {key: on_shards(p, value) for key, value in values.items()}
            else:
                n_without += 1
            i += 1
    groups = current['param_groups']
    if len(groups) == len(saved['param_groups']):
        arguments = inspect.signature(type(optimizer)).parameters
        for group, saved_group in zip(groups, saved['param_groups']):
            for key, value in saved_group.items():
                # such as the count of a schedule-free optimizer: its own default, or added later
                if key not in arguments and (key not in group or key in optimizer.defaults):
                    group[key] = value
    optimizer.load_state_dict({'state': state, 'param_groups': groups})
    return n_without


def is_usable(optimizer, group, p, values):
    """
    Return whether the state `values` is one of parameter p. Of a user's own optimizer, each is.

    For AdamW and Muon, raise InputError if a moment has another shape than p: their kernels do not check it,
    and would write beyond the end of a tensor.
    """
    if type(optimizer) not in (torch.optim.AdamW, MuonAdamW):
        return True
    needed = {'momentum_buffer'} if group.get('muon') else {'step', 'exp_avg', 'exp_avg_sq'}
    if not needed <= values.keys():
        return False
    for key, value in values.items():
        expected = () if key == 'step' else p.shape
        shape = torch.as_tensor(value).shape
        if shape != expected:
            raise InputError(f"the optimizer's {key!r} has shape {tuple(shape)}, not {tuple(expected)}. "
                             "Start a new run from the weights.")
    return True


def names_of(groups):
    """Return the names of the parameters in all groups, None for those that have no name."""
    names = []
    for group in groups:
        names += group.get('param_names', [None] * len(group['params']))
    return names


def on_shards(p, value):
    """Return a copy of `value`, which may be mapped from a file; sharded as FSDP shards the parameter p."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if not hasattr(p, 'to_local') or value.shape != p.shape:
        return value.clone()
    from torch.distributed.tensor import distribute_tensor
    # src_data_rank=None: each process takes its rows from its own tensor, so nothing is sent
    return distribute_tensor(value.to(p.device, copy=True), p.device_mesh, p.placements, src_data_rank=None)


# -----------------------------------------------------------------------------
# write a run's folder

RUN_FILES = re.compile(r'(ckpt(_best|_original|_\d{8,})?\.pt|eval(_\d{8,})?\.json|log\.csv|run\.json|'
                       r'report\.md|loss\.png)(\.old|\.tmp)?')


def prepare_folder(out_dir, start_iter, delete, best_iter=None):
    """
    Prepare a run's folder, which the caller has locked, for writing from iteration `start_iter` on.

    delete: remove the files of the run that is in it. Otherwise, files of later iterations are renamed to
    *.old, links included, which the next save makes again. best_iter: the best iteration up to start_iter.
    """
    if exists(out_dir) and not numbered(out_dir):  # nanoGPT's ckpt.pt, which the first save would replace
        link(newest(out_dir), os.path.join(out_dir, 'ckpt_original.pt'))
    # newest first, so that after an interruption no iteration is missing between two others
    for name in sorted(os.listdir(out_dir), reverse=True):
        path = os.path.join(out_dir, name)
        is_unfinished = name.endswith('.pt.tmp')  # a process was killed while it wrote this file
        if RUN_FILES.fullmatch(name) and (delete or is_unfinished):
            os.remove(path)
        elif iteration_of(path) > start_iter:
            os.replace(path, path + '.old')
    best_path = os.path.join(out_dir, 'ckpt_best.pt')
    for path in numbered(out_dir):
        if iteration_of(path) == best_iter and not os.path.exists(best_path):
            link(path, best_path)
    log = os.path.join(out_dir, 'log.csv')
    columns, rows = read_rows(log)
    # by value, as another program may have written 20.0; rows of later iterations are written again
    earlier = [row for row in rows if float(row.get('iter') or 'nan') < start_iter]
    if earlier:
        write_rows(log, columns, earlier)
    elif os.path.exists(log):
        os.replace(log, log + '.old')


def plain(value):
    """Return a nested state in which numpy's arrays and numbers are tensors and Python's numbers, as reading
    numpy's classes from a file could run code."""
    if isinstance(value, dict):
        items = {}
        for key, item in value.items():
            if isinstance(key, np.generic):
                key = key.item()
            items[key] = plain(item)
        return items
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in 'biufc':
        return torch.from_numpy(value.copy())
    return value


def check_readable(state):
    """Raise InputError if a checkpoint with this content could not be read again. Its tensors always can."""
    def without_tensors(value):
        if isinstance(value, dict):
            return {key: without_tensors(item) for key, item in value.items()}
        if isinstance(value, list):
            return [without_tensors(item) for item in value]
        return None if isinstance(value, torch.Tensor) else value

    for name, value in state.items():
        file = io.BytesIO()
        try:
            torch.save(without_tensors(value), file)
            file.seek(0)
            reason = ', '.join(torch.serialization.get_unsafe_globals_in_checkpoint(file))
        except (pickle.PickleError, AttributeError, TypeError) as e:  # such as a function
            reason = first_line(e)
        if reason:
            raise InputError(f"a checkpoint cannot contain {name!r}: {reason}. Store numbers, "
                             "texts, lists, dicts and tensors only.")


def save(out_dir, state, best, only_best, keep):
    """
    Write `state` as the checkpoint of its iter_num, completely or not at all, and remove all but the newest
    `keep` (0: keep all). Return whether it was written; if not, a warning gives the reason.

    best: its validation loss is the lowest so far. only_best: ckpt.pt is the best one, not the newest.
    """
    path = os.path.join(out_dir, f"ckpt_{state['iter_num']:08d}.pt")
    try:
        check_readable(state)
        with replacing(path) as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as e:  # RuntimeError: torch's, raised in place of the system's
        print0(f"warning: {path} could not be written ({first_line(innermost(e))}), training continues. "
               "Older checkpoints are kept")
        return False
    if keep:  # before the links, which may be copies that need the space
        for old in numbered(out_dir)[:-keep]:
            try:
                os.remove(old)
            except OSError as e:  # Windows: another program reads it. The next save tries again
                print0(f"note: {old} could not be removed ({e.strerror})")
    best_path = os.path.join(out_dir, 'ckpt_best.pt')
    links = []
    if best:
        links.append(best_path)
    if best or not only_best or not os.path.exists(best_path):
        links.append(os.path.join(out_dir, 'ckpt.pt'))
    for name in links:
        try:
            link(path, name)
        except OSError as e:
            print0(f"warning: {name} could not be replaced ({e.strerror}), training continues. The newest "
                   f"checkpoint is {path}")
    return True


def link(path, name):
    """Make `name` a hard link to the file `path`, or a copy if the file system has no links."""
    try:
        os.link(path, name + '.tmp')
        os.replace(name + '.tmp', name)
        return
    except OSError:  # no hard links, or name.tmp exists
        pass
    with replacing(name) as copy, open(path, 'rb') as file:
        shutil.copyfileobj(file, copy)
