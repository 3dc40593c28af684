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


def number_of(path):
    """Return the iteration in the name of a numbered checkpoint or evaluation, or None."""
    match = re.fullmatch(r'(?:ckpt|eval)_(\d{8,})\.(?:pt|json)', os.path.basename(path))
    return int(match[1]) if match else None


def numbered(out_dir):
    """Return the paths of a run's numbered checkpoints, oldest first."""
    paths = glob.glob(os.path.join(glob.escape(out_dir), 'ckpt_*.pt'))
    return sorted([path for path in paths if number_of(path) is not None], key=number_of)


def candidates(out_dir):
    """Return the paths of a run's checkpoints in the order in which a resume tries them.

    The links are last, for nanoGPT's ckpt.pt.
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
    """Return the path of the checkpoint `source`: a file, or a run's folder, of which ckpt.pt is taken, else
    the newest one. Hugging Face folders and names are returned as they are."""
    source = os.fspath(source)
    if os.path.isfile(source):
        return source
    for path in [os.path.join(source, 'ckpt.pt'), *candidates(source)]:
        if os.path.exists(path):
            return path
    import huggingface
    if os.path.exists(os.path.join(source, 'config.json')) or huggingface.is_hub_name(source):
        return source
    raise InputError(f"no checkpoint found: {source}. Name a run's folder, a checkpoint, or a Hugging Face "
                     "folder or name (gpt2, OWNER/NAME).")


# -----------------------------------------------------------------------------
# read a file


def unreadable(path, e):
    """Return the InputError for a file that made reading fail with the exception e."""
    return InputError(f"{path} is not a checkpoint of flatgpt or nanoGPT, nor a Hugging Face folder, or is "
                      f"damaged ({type(e).__name__}: {first_line(e)}). Use another one; docs/from_nanogpt.md "
                      "has the ways to convert.")


def unpack(path, verify=True):
    """Return what torch.save wrote into a file; the tensors are mapped. verify: test the checksums."""
    try:
        check_not_lfs_pointer(path)
        with open(path, 'rb') as file:
            damaged = zipfile.ZipFile(file).testzip() if verify else None
            if damaged:
                raise InputError(f"{path} is damaged: the checksum of {damaged} is wrong. Use another "
                                 "checkpoint.")
            # A run may replace the file meanwhile, and torch opens it twice, for the table of contents and
            # for the tensors. Those of two files would be wrong weights that are finite
            source = f'/proc/self/fd/{file.fileno()}'  # not /dev/fd: on macOS that shares the file's position
            if not os.path.exists(source):  # macOS, Windows
                source = path
            classes = torch.serialization.get_unsafe_globals_in_checkpoint(source)
            if classes:
                raise InputError(
                    f"{path} contains {', '.join(classes)}, which could run code. If you trust the file, "
                    "save its weights alone (docs/from_nanogpt.md keeps the optimizer, too): python -c "
                    f"\"import torch; c = torch.load('{path}', map_location='cpu', weights_only=False); "
                    "torch.save({k: c[k] for k in ['model', 'model_args']}, 'plain.pt')\"")
            return torch.load(source, map_location='cpu', weights_only=True, mmap=True)
    except InputError:
        raise
    except Exception as e:  # a file may contain anything
        raise unreadable(path, e) from e


def read(path, verify=True):
    """
    Return the checkpoint at `path` (see find), checked against model.py: a dict with the tensors on the CPU.

    model             {name: tensor}, without the prefixes of torch.compile and DDP
    model_args        the arguments of GPTConfig
    optimizer, scaler their states; None if the file has weights only
    iter_num, best_val_loss, best_iter, tokens_per_iter, train_seconds
    config, given     all settings, and those that were given, {name: value}
    n_iters           the number of iterations that the clock has set, or None
    tokenizer, data   the tokenizer's state, and what identifies the data; None if unknown
    path
    """
    path = os.fspath(path)
    if os.path.isfile(path):
        raw = unpack(path, verify)
    else:
        import huggingface
        raw = huggingface.read(path)
    ckpt = {'optimizer': None, 'scaler': None, 'iter_num': 0, 'best_val_loss': math.inf, 'best_iter': None,
            'tokens_per_iter': None, 'train_seconds': 0.0, 'n_iters': None, 'tokenizer': None, 'data': None}
    try:
        ckpt.update(raw, path=path, iter_num=int(raw.get('iter_num', 0)),
                    best_val_loss=float(raw.get('best_val_loss', math.inf)))
        ckpt.update(flatgpt_settings(raw) if 'given' in raw else nanogpt_settings(raw))
        ckpt['model'] = clean_weights(raw['model'])
        ckpt['model_args'] = complete_args(raw['model_args'], ckpt['model'])
        check_weights(ckpt)
    except InputError:
        raise
    except Exception as e:  # a file may contain anything
        raise unreadable(path, e) from e
    return ckpt


def flatgpt_settings(raw):
    """Return `config` and `given` of one of our checkpoints."""
    config = dict(raw['config'])
    given = raw['given']
    if not isinstance(given, dict):  # commit 67db31c stored the names
        given = {name: config[name] for name in given}
    return {'config': config, 'given': given}


def nanogpt_settings(raw):
    """Return `config`, `given` and `tokens_per_iter` of nanoGPT's checkpoints, or of weights without any."""
    config = dict(raw.get('config', {}))
    if raw.get('optimizer'):
        group = raw['optimizer']['param_groups'][0]
        if 'betas' in group:  # what a resume uses there, whatever it writes into config
            config['weight_decay'] = group['weight_decay']
            config['beta1'], config['beta2'] = group['betas']
    tokens_per_iter = None
    if 'gradient_accumulation_steps' in config:
        sequences = config['batch_size'] * config['gradient_accumulation_steps']
        tokens_per_iter = sequences * config['block_size']
    given = {}
    for name, value in config.items():
        if name not in ('device', 'dtype', 'compile', 'backend'):  # chosen for another machine
            given[name] = value
    return {'config': config, 'given': given, 'tokens_per_iter': tokens_per_iter}


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
    completed = {}
    if args.get('arch', 'gpt2') == 'gpt2':
        completed.update(NANOGPT)  # not the preset, which may have been edited
        completed['bias'] = 'transformer.ln_f.bias' in weights  # nanoGPT's first versions lack this field
    for name, value in args.items():
        if name in MODEL_FIELDS or value:  # an unknown field that is off: other code may have added it
            completed[name] = value
    embedding = weights['transformer.wte.weight']
    if args.get('tie', True):
        weights.setdefault('lm_head.weight', embedding)
    if not torch.equal(weights['lm_head.weight'], embedding):
        completed['tie'] = False  # forks of nanoGPT that untie the head do not record it
    return completed


def empty_model(config):
    """Return a GPT without weights, which takes no time for random numbers."""
    with torch.device('meta'):
        model = GPT(config)
    if any(buffer.is_meta for buffer in model.buffers()):  # a table that edited code has added
        model = GPT(config)
    return model


def check_weights(ckpt):
    """Raise InputError unless the weights are finite, and those of the network that model_args describe."""
    path = ckpt['path']
    config = GPTConfig(**ckpt['model_args'])
    if config.n_layer > len(ckpt['model']):  # building all of them could take forever
        raise InputError(f"{path} has fewer weights than layers: {config.n_layer}. Use another checkpoint.")
    expected = {name: p.shape for name, p in empty_model(config).state_dict().items()}
    shapes = {name: p.shape for name, p in ckpt['model'].items()}
    for name in sorted(expected | shapes):
        if shapes.get(name) != expected.get(name):
            raise InputError(f"{path} is of another network: {name} has the shape {shapes.get(name)} there, "
                             f"{expected.get(name)} here. Use the code that it was trained with.")
        if not torch.isfinite(ckpt['model'][name]).all():
            raise InputError(f"{path} has a weight that is not finite: {name}. Use an earlier checkpoint.")


def build_model(ckpt, block_size=None, dropout=0.0, vocab_size=None):
    """Return the GPT of a checkpoint, on the CPU.

    block_size: a shorter context, with rope also a longer one. vocab_size: a larger vocabulary.
    """
    config = GPTConfig(**{**ckpt['model_args'], 'dropout': dropout})
    if block_size and config.positions == 'rope':
        config.block_size = block_size
    model = empty_model(config)
    expected = model.state_dict()
    weights = {}
    for name, p in ckpt['model'].items():
        weights[name] = p.to(expected[name].dtype, copy=True)  # a copy, as it is mapped from a file
    model.load_state_dict(weights, assign=True)
    if config.tie:
        model.transformer.wte.weight = model.lm_head.weight
    if block_size and block_size != config.block_size:
        model.crop_block_size(block_size)
    if vocab_size and vocab_size > config.vocab_size:
        grow_vocabulary(model, vocab_size)
    return model


@torch.no_grad()
def grow_vocabulary(model, vocab_size):
    """Add rows to the embedding and the head, for ids up to vocab_size.

    A new row is the mean of the old ones and a little noise: new tokens start as likely as the average one,
    and different from each other.
    """
    for module in [model.lm_head, model.transformer.wte]:
        old = module.weight
        new = old.mean(0, keepdim=True).repeat(vocab_size - old.size(0), 1)
        noise = torch.randn(new.shape) * old.std() * 0.1
        module.weight = torch.nn.Parameter(torch.cat((old, new + noise)))
    if model.config.tie:
        model.transformer.wte.weight = model.lm_head.weight
    model.lm_head.out_features = vocab_size
    model.transformer.wte.num_embeddings = vocab_size
    model.config.vocab_size = vocab_size


# -----------------------------------------------------------------------------
# the tokenizer


def is_compatible(ckpt, state, n_ids, n_added=0):
    """Return whether a tokenizer with n_ids ids may be the checkpoint's.

    nanoGPT's checkpoints only have its size, which may be padded. n_added: the number of special tokens that
    may be new.
    """
    known = ckpt['tokenizer']
    vocab_size = ckpt['model_args']['vocab_size']
    if known is None:
        return n_ids - n_added <= vocab_size <= padded_vocab_size(n_ids, state)
    if n_added:
        known = without_special_tokens(known)
        state = without_special_tokens(state)
    return n_ids - n_added <= vocab_size and same_tokenizer(known, state)


def without_special_tokens(state):
    return {key: value for key, value in state.items() if key not in ('added', 'special_tokens')}


def tokenizer_state_of(ckpt, dataset=None, data_dir=None):
    """Return the state of a checkpoint's tokenizer; the one of a dataset if it is named, or if the checkpoint
    has none, as nanoGPT's."""
    if dataset is None and ckpt['tokenizer'] is not None:
        return ckpt['tokenizer']
    name = dataset or ckpt['config'].get('dataset') or 'openwebtext'  # nanoGPT's default
    folder = folder_of(name, data_dir)  # not a path, as the checkpoint may be untrusted
    if dataset and not os.path.isdir(folder):
        raise InputError(f"dataset not found: {folder}. Name the one that {ckpt['path']} was trained on.")
    meta = read_meta(folder)  # GPT-2's if there is no file, as in nanoGPT
    state = read_tokenizer_files(folder, meta)
    if not is_compatible(ckpt, state, meta['vocab_size']):
        vocab_size = ckpt['model_args']['vocab_size']
        raise InputError(f"{folder} does not exist, or has another tokenizer than {ckpt['path']}: "
                         f"{meta['vocab_size']} ids, up to {vocab_size} there. Name the dataset that it was "
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

    The first process decides, as others may see another state of a network folder.
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
    """Return the path of the newest checkpoint that can be resumed, or None. step: only of that iteration."""
    for path in candidates(out_dir):
        if step and number_of(path) not in (None, step):
            continue
        try:
            ckpt = read(path)
            check_optimizer(ckpt)
        except InputError as e:
            print0(f"note: skipped: {e}")
            continue
        if step in (0, ckpt['iter_num']):
            return path
    return None


def check_optimizer(ckpt):
    """Raise InputError unless a checkpoint has an optimizer's state to resume from."""
    path = ckpt['path']
    if not ckpt['optimizer']:
        raise InputError(f"{path} has weights only, without an optimizer. Start a new run from them: "
                         f"--init_from={path}.")
    try:
        for moments in ckpt['optimizer']['state'].values():
            for name, value in moments.items():
                if not torch.isfinite(torch.as_tensor(value)).all():
                    raise InputError(f"{path} has an optimizer state that is not finite: {name}. Use an "
                                     "earlier checkpoint.")
    except InputError:
        raise
    except Exception as e:  # a file may contain anything
        raise unreadable(path, e) from e


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

    The architecture is the checkpoint's. On a resume, all other settings are train.py's defaults, then those
    that the run was given before, then those that are given now. config, given: as configure() returns them.
    kinds: the types of the settings, which the checkpoint's values are checked against.
    """
    path = ckpt['path']
    if resuming:
        print0(f"resuming from {path}, after {ckpt['iter_num']:,} iterations")
    else:
        print0(f"weights of {path}")
        folder = os.path.realpath(os.path.dirname(path))
        if config['overwrite'] and folder == os.path.realpath(config['out_dir']):
            raise InputError(f"--overwrite would delete the weights to start from: {path}. Choose another "
                             "--out_dir.")
    restored = restored_settings(config, given, ckpt, kinds) if resuming else {}
    network = network_settings(config, given, ckpt, resuming)
    config = {**config, **restored, **network}
    for name, before in ckpt['config'].items():
        before = fit_value(before, kinds.get(name, []))
        if not resuming or before is INVALID or name in OF_THIS_START or name in network:
            continue
        if before != config[name]:
            print0(f"  {name}: {before!r} -> {config[name]!r}")
    return config, {name: config[name] for name in [*restored, *given]}


def restored_settings(config, given, ckpt, kinds):
    """Return the settings that the resumed run was given before, and that still hold."""
    replaced = set(given)
    for names in EXCLUSIVE:
        if replaced.intersection(names):
            replaced.update(names)
    restored = {}
    not_restored = []
    for name, before in ckpt['given'].items():
        if name in replaced:
            continue
        value = fit_value(before, kinds.get(name, []))  # INVALID also if there is no such setting
        if value is not INVALID and name not in OF_THIS_START:
            restored[name] = value
        elif value is INVALID or value != config[name]:
            not_restored.append(f'{name}={before!r}')
    if not_restored:
        print0(f"note: not restored from the checkpoint: {', '.join(not_restored)}")
    return restored


def network_settings(config, given, ckpt, resuming):
    """Return the settings that the checkpoint's network determines, all of its fields but dropout.

    A new run may have a shorter context and, with rope, any.
    """
    network = GPTConfig(**ckpt['model_args'])
    settings = {}
    for name in MODEL_FIELDS:
        if name in config and name != 'dropout':
            settings[name] = getattr(network, name)
    if not resuming:
        settings['block_size'] = min(network.block_size, config['block_size'])
        if network.positions == 'rope' and 'block_size' in given:
            settings['block_size'] = config['block_size']
    for name, value in settings.items():
        if name in given and config[name] != value:
            print0(f"note: {name}={config[name]} is ignored, the checkpoint has {value}")
    return settings


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
        n_added = 5  # finetuning on conversations: four roles, and perhaps <|bos|>
    if not is_compatible(ckpt, data.tokenizer_state, n_ids, n_added):
        raise InputError(f"the tokenizer of dataset {data.name} is not that of {path}: {n_ids} ids, up to "
                         f"{vocab_size} there. Make a dataset with it: python prepare.py NAME --input=FILE "
                         f"--tokenizer={path}.")
    if n_ids > vocab_size:
        vocab_size = data.vocab_size
    if not resuming:
        return vocab_size
    new_run = f"start a new run from these weights: --init_from={path} --out_dir=ANOTHER."
    for split in ['train', 'val']:
        before = (ckpt['data'] or {}).get(split)
        now = data.fingerprint.get(split)
        if before and before != now:
            raise InputError(f"{split}.bin of dataset {data.name} is not that of {path}: {before} -> {now}. "
                             f"Restore the old data, or {new_run}")
    before = ckpt['tokens_per_iter']
    if before not in (None, tokens_per_iter):
        raise InputError(f"the number of tokens per iteration has changed: {before} -> {tokens_per_iter}. "
                         f"Keep it with --total_batch_size={before}, or {new_run}")
    return vocab_size


def best_so_far(ckpt, config, out_dir):
    """
    Return the lowest validation loss of a resumed run and its iteration; (inf, None) if that starts again.

    It does if evaluations read other sequences than before, or if the best checkpoint up to this iteration is
    gone. All processes call it, after prepare_folder().
    """
    has_best = broadcast(os.path.exists(os.path.join(out_dir, 'ckpt_best.pt')))
    before = {**config, **ckpt['config']}
    same_number = config['eval_iters'] * config['batch_size'] == before['eval_iters'] * before['batch_size']
    same_mask = config['document_mask'] == before['document_mask']
    if has_best and same_number and same_mask:
        return ckpt['best_val_loss'], ckpt['best_iter']
    if math.isfinite(ckpt['best_val_loss']):
        print0("note: the best validation loss starts again, as its checkpoint is gone, or evaluations read "
               "other sequences (eval_iters x batch_size, document_mask)")
    return math.inf, None


@torch.no_grad()
def load_moments(optimizer, state):
    """
    Copy the moments in `state`, the state_dict() of an optimizer, to the parameters of the same names.

    Unlike load_state_dict(), keep this optimizer's groups with their learning rates, betas and weight decay,
    and FSDP's shards. Return the number of parameters that start without moments: those that were frozen or
    had another optimizer.
    """
    names, n_params = names_of(optimizer.param_groups)
    saved_names, n_saved = names_of(state['param_groups'])
    if not saved_names or not names:  # nanoGPT and commit 67db31c store no names, but have the same order
        if n_saved != n_params:
            raise InputError(f"the optimizer state has another number of parameters: {n_saved}, not "
                             f"{n_params}. Train the same ones, or start a new run from the weights.")
        saved_names = names = range(n_params)
    index_of = {name: i for i, name in enumerate(saved_names)}  # the key in state['state']
    names = iter(names)
    n_without = 0
    for group in optimizer.param_groups:
        needed = None
        if group.get('muon'):
            needed = 'momentum_buffer'
        elif 'betas' in group:
            needed = 'exp_avg'
        for p, name in zip(group['params'], names):
            moments = state['state'].get(index_of.get(name), {})
            if moments and (needed is None or needed in moments):
                optimizer.state[p] = {key: moment_of(p, key, value) for key, value in moments.items()}
            else:
                n_without += 1
    return n_without


def names_of(groups):
    """Return the names of the parameters in all groups, [] if they have none, and their number."""
    names = []
    n_params = 0
    for group in groups:
        names += group.get('param_names', [])
        n_params += len(group['params'])
    return names, n_params


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

    delete: remove the run that is in it. best_iter: the best iteration up to start_iter, if there is one.
    Files of later iterations are renamed to *.old.
    """
    for name in os.listdir(out_dir):
        unfinished = name.endswith('.pt.tmp')  # of a process that was killed
        if RUN_FILES.fullmatch(name) and (delete or unfinished):
            os.remove(os.path.join(out_dir, name))
    if exists(out_dir) and not numbered(out_dir):  # nanoGPT's ckpt.pt, which the first save would replace
        link(newest(out_dir), os.path.join(out_dir, 'ckpt_original.pt'))
    for name in sorted(os.listdir(out_dir), reverse=True):  # newest first: a kill in between leaves no gap
        path = os.path.join(out_dir, name)
        iteration = iteration_of(path)
        if iteration is not None and iteration > start_iter:
            os.replace(path, path + '.old')

    checkpoints = numbered(out_dir)
    best = [path for path in checkpoints if number_of(path) == best_iter]
    for name, paths in [('ckpt.pt', checkpoints), ('ckpt_best.pt', best)]:
        path = os.path.join(out_dir, name)
        if paths and not os.path.exists(path):
            link(paths[-1], path)

    log = os.path.join(out_dir, 'log.csv')
    if os.path.exists(log):
        columns, rows = read_rows(log)
        earlier = [row for row in rows if int(row['iter']) < start_iter]  # the others are written again
        if earlier:
            write_rows(log, columns, earlier)
        else:
            os.replace(log, log + '.old')


def iteration_of(path):
    """Return the iteration of a file in a run's folder, from its name; of a link, from its content. None for
    other files."""
    if os.path.basename(path) not in LINKS:
        return number_of(path)
    try:
        return int(unpack(path, verify=False)['iter_num'])
    except Exception:  # a file may contain anything
        return math.inf  # damaged


def save(out_dir, state, best, only_best, keep):
    """
    Write `state` as the checkpoint of its iter_num, completely or not at all, and remove all but the newest
    `keep` (0: keep all). Return whether it was written; if not, a warning gives the reason.

    best: its validation loss is the lowest so far. only_best: ckpt.pt is the best one, not the newest.
    """
    path = os.path.join(out_dir, f"ckpt_{state['iter_num']:08d}.pt")
    try:
        with replacing(path) as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as e:  # RuntimeError: torch's, raised in place of the system's
        print0(f"warning: {path} could not be written ({first_line(innermost(e))}), training continues. The "
               "older checkpoints are unchanged")
        return False
    names = []
    if best:
        names.append('ckpt_best.pt')
    if best or not only_best or not os.path.exists(os.path.join(out_dir, 'ckpt_best.pt')):
        names.append('ckpt.pt')
    try:
        if keep:  # first, as a link may be a copy that needs the space
            for old in numbered(out_dir)[:-keep]:
                os.remove(old)
        for name in names:
            link(path, os.path.join(out_dir, name))
    except OSError as e:
        print0(f"warning: {path} is written, but {' and '.join(names)} may still be an older one "
               f"({first_line(e)})")
    return True


def link(path, name):
    """Make `name` a hard link to the file `path`, or a copy if the file system has no links."""
    if os.path.exists(name) and os.path.samefile(path, name):
        return
    try:
        os.link(path, name + '.tmp')
        os.replace(name + '.tmp', name)
        return
    except OSError:  # no hard links, or name.tmp exists
        pass
    with replacing(name) as copy, open(path, 'rb') as file:
        shutil.copyfileobj(file, copy)
