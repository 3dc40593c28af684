"""
Find, read, check and write checkpoints; merge the settings when a run is resumed. A run's folder contains

    out_dir/ckpt_00000500.pt    the state after 500 iterations; the newest few are kept
    out_dir/ckpt.pt             a link to the newest one, or with always_save_checkpoint=False to the best
    out_dir/ckpt_best.pt        a link to the one with the lowest validation loss
    out_dir/eval_00000500.json  the results of eval.py for that state

Nothing in a file that is read is executed. From Python: model, tokenizer = load('out').
"""

import dataclasses
import glob
import math
import os
import re
import shutil
import zipfile

import torch

from configurator import INVALID, InputError, fit_value, print0, process_ranks
from dataset import folder_of, padded_vocab_size, read_meta
from files import check_not_lfs_pointer, first_line, read_rows, replacing, write_rows
from model import GPT, NANOGPT, GPTConfig
from processes import broadcast, innermost
from tokenizer import make_tokenizer, read_tokenizer_files, same_tokenizer

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

    The links are last: one of them may be nanoGPT's ckpt.pt, or the only name of the best checkpoint.
    """
    links = [os.path.join(out_dir, name) for name in LINKS]
    return numbered(out_dir)[::-1] + [path for path in links if os.path.exists(path)]


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
    import huggingface
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
        if verify and zipfile.ZipFile(file).testzip():
            raise InputError(f"{path} is damaged: a checksum is wrong. Use another checkpoint.")
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


def read(path, verify=True):
    """
    Return the checkpoint at `path` (see find), checked against model.py: a dict with the tensors on the CPU.

    model             {name: tensor}, without the prefixes of torch.compile and DDP
    model_args        the arguments of GPTConfig
    optimizer, scaler their states; None if the file has weights only
    iter_num, best_val_loss, best_iter, tokens_per_iter, train_seconds
    config, given     all settings, and those that were given, {name: value}
    n_iters           the number of iterations, if it was measured for train_minutes, or None
    tokenizer, data   the tokenizer's state, and what identifies the data; None if unknown
    path
    """
    path = os.fspath(path)
    ckpt = {'optimizer': None, 'scaler': None, 'iter_num': 0, 'best_val_loss': math.inf, 'best_iter': None,
            'tokens_per_iter': None, 'train_seconds': 0.0, 'n_iters': None, 'tokenizer': None, 'data': None,
            'config': {}}
    try:
        if os.path.isfile(path):
            ckpt.update(unpack(path, verify))
        else:
            import huggingface
            ckpt.update(huggingface.read(path))
        ckpt['path'] = path
        ckpt['best_val_loss'] = float(ckpt['best_val_loss'])  # nanoGPT's is a tensor
        config = ckpt['config']
        if 'given' not in ckpt:  # nanoGPT's; dtype and compile depend on the machine
            ckpt['given'] = {name: config[name] for name in config if name not in ('dtype', 'compile')}
        elif not isinstance(ckpt['given'], dict):  # commit 67db31c stored the names
            ckpt['given'] = {name: config[name] for name in ckpt['given']}
        ckpt['model'] = clean_weights(ckpt['model'])
        ckpt['model_args'] = complete_args(ckpt['model_args'], ckpt['model'])
        check_weights(ckpt)
    except InputError:
        raise
    except Exception as e:  # a file may contain anything
        raise InputError(f"{path} is not a checkpoint of flatgpt or nanoGPT, nor a Hugging Face folder, or "
                         f"is damaged ({type(e).__name__}: {first_line(e)}). Use another one; "
                         "docs/from_nanogpt.md has the ways to convert.") from e
    return ckpt


# -----------------------------------------------------------------------------
# the network

# causal masks and rotations, which older versions of nanoGPT and transformers saved among the weights
CONSTANTS = ('.attn.bias', '.attn.masked_bias', '.rotary_emb.inv_freq')


def clean_weights(weights):
    """Return the weights under their names in a GPT."""
    cleaned = {}
    for name, p in weights.items():
        # torch.compile and DDP put these in front of names, in any order
        parts = [part for part in name.split('.') if part not in ('_orig_mod', 'module')]
        if not name.endswith(CONSTANTS):
            cleaned['.'.join(parts)] = p
    return cleaned


def complete_args(args, weights):
    """Return the arguments of GPTConfig with those that a file leaves out. A tied head is added to `weights`
    if it is missing."""
    # without the fields of other code that are off
    args = {name: value for name, value in args.items() if name in MODEL_FIELDS or value}
    if args.get('arch', 'gpt2') == 'gpt2':
        args = {**NANOGPT, **args}  # not the preset, which may have been edited
    embedding = weights['transformer.wte.weight']
    if args.get('tie', True):
        weights.setdefault('lm_head.weight', embedding)
    if not torch.equal(weights['lm_head.weight'], embedding):
        args = {**args, 'tie': False}  # forks of nanoGPT that untie the head do not record it
    return args


def empty_model(config):
    """Return a GPT on the meta device: its weights have shapes but no values, so it is made quickly."""
    with torch.device('meta'):
        model = GPT(config)
    # no checkpoint contains the buffers. model.py's own is computed anyway; one that an edit has added is not
    if any(buffer.is_meta for buffer in model.buffers()):
        model = GPT(config)
    return model


def check_weights(ckpt):
    """Raise InputError unless the weights are finite, and those of the network that model_args describe."""
    path = ckpt['path']
    weights = ckpt['model']
    config = GPTConfig(**ckpt['model_args'])
    if config.n_layer > len(weights):  # to build all of them could take forever
        raise InputError(f"{path} has fewer weights than layers: {config.n_layer}. Use another checkpoint.")
    expected = empty_model(config).state_dict()
    for name in sorted(expected | weights):
        shape = getattr(weights.get(name), 'shape', None)
        expected_shape = getattr(expected.get(name), 'shape', None)
        if shape != expected_shape:
            raise InputError(f"{path} does not match model.py: {name} has shape {shape} in the file, "
                             f"{expected_shape} in model.py (None: missing). Use the code that it was "
                             "trained with.")
        if not torch.isfinite(weights[name]).all():
            raise InputError(f"{path} has a weight that is not finite: {name}. Use an earlier checkpoint.")


def build_model(ckpt, block_size=None, dropout=0.0, vocab_size=None):
    """Return the GPT of a checkpoint, on the CPU.

    block_size: the new context length, which may be longer only with rope. vocab_size: the new vocabulary
    size; a smaller one is ignored. By default, both are the checkpoint's.
    """
    config = GPTConfig(**{**ckpt['model_args'], 'dropout': dropout})
    n_new = max(0, (vocab_size or 0) - config.vocab_size)
    config.vocab_size += n_new
    if block_size and config.positions == 'rope':
        config.block_size = block_size
    model = empty_model(config)
    weights = {}
    for name, p in model.state_dict().items():
        weights[name] = ckpt['model'][name].to(p.dtype, copy=True)  # not mapped from the file any more
    for name in ['lm_head.weight', 'transformer.wte.weight']:
        weights[name] = add_rows(weights[name], n_new)
    model.load_state_dict(weights, assign=True)
    if config.tie:
        model.transformer.wte.weight = model.lm_head.weight
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
    name = dataset or ckpt['config'].get('dataset') or 'openwebtext'  # nanoGPT's default
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
        if config['overwrite'] and folder == os.path.realpath(config['out_dir']):
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
        changes = [('tokens per iteration', ckpt['tokens_per_iter'], tokens_per_iter)]
        for split in ['train', 'val']:
            before = (ckpt['data'] or {}).get(split)
            changes.append((f'{split}.bin of dataset {data.name}', before, data.fingerprint.get(split)))
        for name, before, now in changes:
            if before and before != now:
                raise InputError(f"{name}: {before} in {path}, now {now}. Restore it, or start a new run "
                                 f"from these weights: --init_from={path} --out_dir=ANOTHER.")
    return data.vocab_size if n_ids > vocab_size else vocab_size


def best_so_far(ckpt, config, out_dir):
    """
    Return the lowest validation loss of a resumed run and its iteration, or (inf, None) if it is not valid.

    It is not valid if ckpt_best.pt is not of that iteration, or if evaluations read other sequences than
    before. All processes call this, after prepare_folder().
    """
    before = ckpt['best_val_loss']
    has_best = broadcast(iteration_of(os.path.join(out_dir, 'ckpt_best.pt'))) == ckpt['best_iter']
    names = ['eval_iters', 'batch_size', 'document_mask']
    same_evaluation = all(config[name] == ckpt['config'].get(name) for name in names)
    if math.isinf(before) or (has_best and same_evaluation):
        return before, ckpt['best_iter']
    print0("note: the best validation loss so far is discarded, as its checkpoint is gone, or one of "
           f"{', '.join(names)} has changed")
    return math.inf, None


@torch.no_grad()
def load_moments(optimizer, state):
    """
    Copy the moments in `state`, the state_dict() of an optimizer, to the parameters of the same names.

    Unlike load_state_dict(), keep this optimizer's groups with their learning rates, betas and weight decay,
    and FSDP's shards. Return the number of parameters that start without moments: those that were frozen or
    had another optimizer.
    """
    names = names_of(optimizer.param_groups)
    saved_names = names_of(state['param_groups'])
    if None in names or None in saved_names:  # nanoGPT and commit 67db31c: no names, but the same order
        if len(saved_names) != len(names):
            raise InputError(f"the optimizer state has another number of parameters: {len(saved_names)}, not "
                             f"{len(names)}. Train the same ones, or start a new run from the weights.")
        saved_names = names = range(len(names))
    # state_dict() numbers the parameters through all groups
    moments_of = {name: state['state'].get(i) for i, name in enumerate(saved_names)}
    names = iter(names)
    n_without = 0
    for group in optimizer.param_groups:
        needed = None  # a moment that shows which optimizer the others are for
        if group.get('muon'):
            needed = 'momentum_buffer'
        elif 'betas' in group:
            needed = 'exp_avg'
        for p in group['params']:
            moments = moments_of.get(next(names))
            if moments and (needed is None or needed in moments):
                optimizer.state[p] = {key: moment_of(p, key, value) for key, value in moments.items()}
            else:
                n_without += 1
    return n_without


def names_of(groups):
    """Return the names of the parameters in all groups, None for those that have no name."""
    names = []
    for group in groups:
        names += group.get('param_names', [None] * len(group['params']))
    return names


def moment_of(p, name, value):
    """Return `value` for the parameter p, on its device. It is a copy, as `value` may be a mapped file."""
    value = torch.as_tensor(value)
    if value.dim() == 0:  # counts the steps; the fused update needs it on the device, too
        return value.to(p.device, torch.float32, copy=True)
    # the fused update does not check shapes, and would write beyond the end of a tensor
    if value.shape != p.shape:
        raise InputError(f"the optimizer's {name} has another shape than its parameter: {tuple(value.shape)}"
                         f", not {tuple(p.shape)}. Start a new run from the weights.")
    value = value.to(p.device, p.dtype, copy=True)
    if hasattr(p, 'to_local'):  # FSDP's DTensor
        from torch.distributed.tensor import distribute_tensor
        # src_data_rank=None: each process takes its rows from its own tensor, so nothing is sent
        return distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)
    return value


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
    earlier = [row for row in rows if int(row['iter']) < start_iter]  # the others are written again
    if earlier:
        write_rows(log, columns, earlier)
    elif os.path.exists(log):
        os.replace(log, log + '.old')


def save(out_dir, state, best, only_best, keep):
    """
    Write `state` as the checkpoint of its iter_num, completely or not at all, and remove all but the newest
    `keep` (0: keep all). Return whether it was written; if not, a warning gives the reason.

    best: its validation loss is the lowest so far. only_best: ckpt.pt is the best one, not the newest.
    """
    path = os.path.join(out_dir, f"ckpt_{state['iter_num']:08d}.pt")
    best_path = os.path.join(out_dir, 'ckpt_best.pt')
    is_written = False
    try:
        with replacing(path) as file:
            torch.save(state, file)
        is_written = True
        if keep:  # before the links, which may be copies that need the space
            for old in numbered(out_dir)[:-keep]:
                os.remove(old)
        if best:
            link(path, best_path)
        if best or not only_best or not os.path.exists(best_path):
            link(path, os.path.join(out_dir, 'ckpt.pt'))
    except (OSError, RuntimeError) as e:  # RuntimeError: torch's, raised in place of the system's
        print0(f"warning: {path} or a link to it could not be written ({first_line(innermost(e))}), training "
               "continues. Older checkpoints are kept")
    return is_written


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
