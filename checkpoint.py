"""
Checkpoints: which one is meant, what is in it, the model that it makes; what a resumed run takes from it; and
how one is written. A run's folder has

    out_dir/ckpt_00000500.pt   the state after 500 iterations; the newest few stay
    out_dir/ckpt.pt            a link to the newest, or with always_save_checkpoint=False to the best
    out_dir/ckpt_best.pt       a link to the one with the lowest validation loss
    out_dir/eval_00000500.json what eval.py has measured of that state

Nothing in a file that is read is executed. From Python: model, tokenizer = load('out').
What cannot be read is a ValueError of one line; the functions that scripts alone call end with raise InputError().
"""

import dataclasses
import glob
import math
import os
import re
import shutil
import zipfile

import numpy as np
import torch
import torch.distributed

import huggingface
from configurator import INVALID, InputError, fit_value, print0
from dataset import folder_of, padded_vocab_size, read_meta
from files import lock_folder, check_not_lfs_pointer, first_line, read_json, read_rows, replacing, write_rows
from model import GPT, NANOGPT, GPTConfig
from tokenizer import make_tokenizer, read_tokenizer_files, same_tokenizer


LINKS = ['ckpt.pt', 'ckpt_best.pt']
MODEL_FIELDS = [field.name for field in dataclasses.fields(GPTConfig)]

# -----------------------------------------------------------------------------
# which file


def number_of(path):
    """The iteration in the name of a numbered checkpoint or evaluation, or None."""
    found = re.fullmatch(r'(?:ckpt|eval)_(\d{8,})\.(?:pt|json)', os.path.basename(path))
    return int(found[1]) if found else None


def numbered(out_dir):
    """The paths of a run's numbered checkpoints, oldest first."""
    paths = glob.glob(os.path.join(glob.escape(out_dir), 'ckpt_*.pt'))
    return sorted([path for path in paths if number_of(path) is not None], key=number_of)


def candidates(out_dir):
    """The paths of a run's checkpoints in the order in which a resume tries them. nanoGPT leaves a ckpt.pt
    and no numbered ones."""
    links = [os.path.join(out_dir, name) for name in LINKS]
    return numbered(out_dir)[::-1] + [path for path in links if os.path.exists(path)]


def newest(out_dir):
    """The path of the newest checkpoint, or None."""
    paths = candidates(out_dir)
    return paths[0] if paths else None


def exists(out_dir):
    """Whether the folder holds a run."""
    return bool(candidates(out_dir))


def find(source):
    """The path that `source` means: a file; a run's ckpt.pt, else its newest checkpoint; a Hugging Face
    folder or name as it is."""
    source = os.fspath(source)
    if os.path.isfile(source) or huggingface.is_hub_name(source):
        return source
    for path in [os.path.join(source, 'ckpt.pt'), *candidates(source)]:
        if os.path.exists(path):
            return path
    if os.path.exists(os.path.join(source, 'config.json')):
        return source
    raise InputError(f"no checkpoint in {source}. train first, or name a run's folder, a checkpoint, a "
                     "Hugging Face folder or name (gpt2, OWNER/NAME)")


# -----------------------------------------------------------------------------
# what is in a file


class Settings:
    """Stands for a class of plain attributes in a checkpoint, such as build-nanogpt's GPTConfig and
    argparse.Namespace. It takes the attributes, and has no code."""


def unpack(path, verify=True):
    """What torch.save has written into a file; its tensors stay mapped. verify: look at the checksums."""
    check_not_lfs_pointer(path)
    with open(path, 'rb') as file:
        start = file.read(9)
        if start[:4] == b'GGUF':
            raise InputError(f"{path} is a GGUF, of llama.cpp. docs/huggingface.md has the lines that make a "
                             "Hugging Face folder of it; name that")
        if start[4:] == b'\0\0\0\0{':
            raise InputError(f"{path} is a safetensors file. name its folder, with the config.json: "
                             f"--init_from={os.path.dirname(path) or '.'}")
        if int.from_bytes(start[:4], 'little') == 20240326:
            raise InputError(f"{path} is a model of llm.c. its dev/eval/export_hf.py makes a Hugging Face "
                             "folder of it; name that")
        if verify:
            damaged = zipfile.ZipFile(file).testzip()
            if damaged:
                raise InputError(f"{path} is damaged (the checksum of {damaged}). use another checkpoint")
        # A run may replace the file meanwhile, and torch opens it twice: for the table of contents, and for
        # the numbers. Those of two files would give weights that are wrong, and finite
        source = f'/proc/self/fd/{file.fileno()}'  # not /dev/fd: on macOS that shares the file's position
        if not os.path.exists(source):  # macOS, Windows
            source = path
        allowed = [np.dtype]
        for kind in [np.bool_, np.int32, np.int64, np.float32, np.float64, np.str_]:
            allowed.append(type(np.dtype(kind)))
        for name in torch.serialization.get_unsafe_globals_in_checkpoint(source):
            if name.endswith('.multiarray.scalar'):  # of numpy 1 or 2
                allowed.append((np.float64(0).__reduce__()[0], name))
            elif name.endswith('Config') or name == 'argparse.Namespace':
                allowed.append((Settings, name))
            elif name != 'numpy.dtype':
                raise InputError(
                    f"{path} holds {name}, which could run code: refused. if you trust the file, keep what "
                    f"is plain: python -c \"import torch; c = torch.load('{path}', weights_only=False); "
                    "torch.save({k: c[k] for k in ['model', 'model_args', 'iter_num']}, 'plain.pt')\"")
        with torch.serialization.safe_globals(allowed):
            return torch.load(source, map_location='cpu', weights_only=True, mmap=True)


def read(path, verify=True):
    """The checkpoint at `path` (see find), checked against model.py; a dict whose tensors are on the CPU:

    model             {name: tensor}, without the names that wrappers give
    model_args        the arguments of GPTConfig
    optimizer, scaler their states; None where there are weights only
    iter_num, best_val_loss, tokens_per_iter, train_seconds
    config, given     the knobs, and the set of those that were given
    tokenizer, data   its state, and what tells the data; None where the file does not say
    path
    """
    path = os.fspath(path)
    try:
        raw = unpack(path, verify) if os.path.isfile(path) else huggingface.read(path)
        ckpt = normalize(raw, path)
        check_weights(ckpt)
    except Exception as e:  # a file may say anything
        if str(e).startswith(path):
            raise
        raise InputError(f"{path} is damaged, or no checkpoint of model.py's GPT ({type(e).__name__}: "
                         f"{first_line(e)}). use another one, or the code that it was trained with")
    return ckpt


ALL_BUT = {'device', 'dtype', 'compile', 'backend'}  # chosen for another machine


def normalize(raw, path):
    """The dict of read() for what is in a file: ours, nanoGPT's, commit a170a90's, build-nanogpt's."""
    if 'model' not in raw:
        raise InputError(f"{path} has no weights under 'model', as bare weights have not. save them with "
                         "their sizes: torch.save({'model': model.state_dict(), 'model_args': {...}}, PATH)")
    ckpt = {'optimizer': None, 'scaler': None, 'iter_num': 0, 'best_val_loss': math.inf, 'config': {},
            'given': None, 'tokenizer': None, 'data': None, 'tokens_per_iter': None, 'train_seconds': 0.0, 'n_iters': None}
    ckpt = {**ckpt, **raw, 'path': path}
    config = ckpt['config']
    if isinstance(config, Settings):
        config = vars(config)
    if 'model_args' not in ckpt:  # build-nanogpt's; its network has biases and the tanh approximation
        ckpt['model_args'] = {'bias': True, 'mlp': 'gelu_tanh', **config}
        ckpt['iter_num'] = ckpt['step']
        config = {}
    config = {name: plain(value) for name, value in config.items()}
    ckpt['config'] = config
    ckpt['iter_num'] = int(ckpt['iter_num'])
    ckpt['best_val_loss'] = float(ckpt['best_val_loss'])

    weights = {}
    for name, p in ckpt['model'].items():
        # torch.compile and DDP put these in front of names, in any order
        parts = [part for part in name.split('.') if part not in ('_orig_mod', 'module')]
        weights['.'.join(parts)] = p
    args = {'bias': 'transformer.ln_f.bias' in weights, 'dropout': 0.0}  # nanoGPT's first lack these fields
    if ckpt['model_args'].get('arch', 'gpt2') == 'gpt2':
        args.update(NANOGPT)  # whatever the preset has been edited to
    for name, value in ckpt['model_args'].items():
        if name in MODEL_FIELDS or value:  # else it is off, and not known here: other code may have had it
            args[name] = plain(value)
    if isinstance(args.get('rope_scaling'), str):  # of commit a170a90: 'none', or 'llama3:8:1:4:8192'
        numbers = [float(number) for number in args['rope_scaling'].split(':')[1:]]
        args['rope_scaling'] = dict(zip(huggingface.ROPE_SCALING, numbers)) or None
    embedding = weights['transformer.wte.weight']
    if args.get('tie', True):
        weights.setdefault('lm_head.weight', embedding)
    if not torch.equal(weights['lm_head.weight'], embedding):
        args['tie'] = False  # no field says so where somebody has taken out the line that ties them
    ckpt['model'] = weights
    ckpt['model_args'] = args

    if 'trained_on' in ckpt:  # commit a170a90's
        ckpt['tokens_per_iter'] = ckpt['trained_on']['tokens per iteration']
        ckpt['train_seconds'] = ckpt['seconds']
        ckpt['given'] = read_json(os.path.join(os.path.dirname(path), 'run.json')).get('given')
    elif ckpt['given'] is None:  # nanoGPT's
        group = ckpt['optimizer']['param_groups'][0] if ckpt['optimizer'] else {}
        if 'betas' in group:  # a resume there goes on with the optimizer's, and writes other ones into config
            config['weight_decay'] = group['weight_decay']
            config['beta1'], config['beta2'] = group['betas']
        if 'gradient_accumulation_steps' in config:
            sequences = config['batch_size'] * config['gradient_accumulation_steps']
            ckpt['tokens_per_iter'] = sequences * config['block_size']
    if ckpt['given'] is None:
        ckpt['given'] = set(config) - ALL_BUT
    ckpt['given'] = set(ckpt['given'])
    if 'budget' in ckpt['given']:  # commit a170a90's max_iters came from it
        ckpt['given'].add('max_iters')
    return ckpt


def plain(value):
    """A number of numpy's or torch's as one of Python's; anything else as it is."""
    if isinstance(value, (np.generic, torch.Tensor)):
        return value.item()
    return value


# -----------------------------------------------------------------------------
# the model


def empty_model(config):
    """A GPT without weights: no time for random numbers that are overwritten at once."""
    with torch.device('meta'):
        model = GPT(config)
    if any(buffer.is_meta for buffer in model.buffers()):  # a table that somebody has added
        model = GPT(config)
    return model


# causal masks and rotations, which older versions of nanoGPT and transformers saved among the weights
CONSTANTS = ('.attn.bias', '.attn.masked_bias', '.rotary_emb.inv_freq')


def check_weights(ckpt):
    """ValueError if the weights are not those of the network that model_args describe, or not finite. Takes
    out what is no weight."""
    path = ckpt['path']
    config = GPTConfig(**ckpt['model_args'])
    if config.n_layer > len(ckpt['model']):  # to build them all could take for ever
        raise InputError(f"{path} has fewer weights than layers ({config.n_layer}). use another checkpoint")
    expected = {name: p.shape for name, p in empty_model(config).state_dict().items()}
    weights = {}
    for name, p in ckpt['model'].items():
        if name in expected or not name.endswith(CONSTANTS):
            weights[name] = p
    found = {name: p.shape for name, p in weights.items()}
    for name in sorted(expected | found):
        if found.get(name) != expected.get(name):
            raise InputError(f"{path} is of another network: the shape of {name} is {found.get(name)} there, "
                             f"and {expected.get(name)} here. use the code that it was trained with")
        if not torch.isfinite(weights[name]).all():
            raise InputError(f"{path} has a weight that is not finite ({name}). use an earlier checkpoint")
    ckpt['model'] = weights


def build_model(ckpt, block_size=None, dropout=0.0, vocab_size=None):
    """The GPT of a checkpoint, on the CPU. block_size: fewer positions, with rope also more; vocab_size: more
    ids, see grow_vocabulary."""
    config = GPTConfig(**{**ckpt['model_args'], 'dropout': dropout})
    if block_size and config.positions == 'rope':
        config.block_size = block_size
    model = empty_model(config)
    expected = model.state_dict()
    weights = {}
    for name, p in ckpt['model'].items():
        weights[name] = p.to(expected[name].dtype, copy=True)  # it is mapped from a file
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
    """Give embedding and head rows for the ids up to vocab_size. A new row is the mean of the old ones and a
    little noise, so that new tokens begin as likely as the average one, and apart from each other."""
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


def fits(ckpt, state, n_ids, n_added=0):
    """Whether a tokenizer with n_ids ids may be the checkpoint's. Of nanoGPT's only the size is known, which
    may be padded. n_added: up to so many special tokens may be new."""
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
    """The tokenizer's state of a checkpoint. It says so itself; of nanoGPT's, or if a dataset is named, that
    one's folder does."""
    if dataset is None and ckpt['tokenizer'] is not None:
        return ckpt['tokenizer']
    name = dataset or ckpt['config'].get('dataset') or 'openwebtext'  # train.py's default
    folder = folder_of(name, data_dir)  # a name, not a path: it may be a stranger's
    if dataset and not os.path.isdir(folder):
        raise InputError(f"no dataset {folder}. name the one that {ckpt['path']} was trained on")
    meta = read_meta(folder)  # GPT-2's where there is none, as nanoGPT assumes
    state = read_tokenizer_files(folder, meta)
    if not fits(ckpt, state, meta['vocab_size']):
        raise InputError(f"the dataset {folder} is missing, or has another tokenizer than {ckpt['path']} "
                         f"({meta['vocab_size']} ids, up to {ckpt['model_args']['vocab_size']} there). name "
                         "the one that it was trained on: --dataset=NAME --data_dir=PATH")
    return state


def load(source='out', dataset=None, data_dir=None):
    """(model, tokenizer) of a run's folder, a checkpoint, or a Hugging Face folder or name; the model is on
    the CPU, in eval mode. ValueError for what cannot be loaded."""
    ckpt = read(find(source))
    model = build_model(ckpt).eval()
    return model, make_tokenizer(tokenizer_state_of(ckpt, dataset, data_dir))


# -----------------------------------------------------------------------------
# where train.py starts


def load_weights(source):
    """The checkpoint whose weights start a new run."""
    try:
        path = find(source)
        ckpt = read(path)
    except ValueError as e:
        raise InputError(str(e))
    print0(f"weights of {path}")
    return ckpt


def load_for_resume(out_dir, step=0):
    """The checkpoint that a run goes on from: the newest valid one, or that of iteration `step`. All
    processes call it; the first one decides, as a folder may look different to another for a moment."""
    choice = [None]
    if os.environ.get('RANK', '0') == '0':
        choice = [newest_valid(out_dir, step)]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(choice, src=0, device=torch.device('cpu'))
    path = choice[0]
    if path is None:  # that is never a new beginning
        raise InputError(f"no checkpoint in {out_dir} can be resumed (resume_step={step}). name another run, or start "
              "one from weights: --init_from=PATH --out_dir=ANOTHER")
    return read(path, verify=False)


def newest_valid(out_dir, step):
    """The path of the newest checkpoint (step: of that iteration) that a run can go on from, or None; others
    are named, and left out."""
    for path in candidates(out_dir):
        if step and number_of(path) not in (None, step):
            continue
        try:
            ckpt = read(path)
            check_optimizer(ckpt)
        except Exception as e:  # a file may say anything
            print0(f"note: left out: {first_line(e)}")
            continue
        if step in (0, ckpt['iter_num']):
            return path
    return None


def check_optimizer(ckpt):
    """ValueError if a run cannot go on from a checkpoint, but start from its weights."""
    path = ckpt['path']
    if not ckpt['optimizer']:
        raise InputError(f"{path} holds weights only, no optimizer. start a run from its weights: "
                         f"--init_from={path}")
    if ckpt['config'].get('teacher'):  # of commit a170a90
        raise InputError(f"{path} learned from a teacher, which is gone. start a run from its weights: "
                         f"--init_from={path}")
    for moments in ckpt['optimizer']['state'].values():
        for name, value in moments.items():
            if isinstance(value, torch.Tensor) and not torch.isfinite(value).all():
                raise InputError(f"{path} has an optimizer's state that is not finite ({name}). use an "
                                 "earlier checkpoint")


# never restored from a checkpoint: what a start does; and, named in a note, what belongs to its machine, and
# paths, as the checkpoint may be untrusted
START = ['out_dir', 'init_from', 'auto_resume', 'resume_step', 'overwrite', 'eval_only']
OF_THIS_START = [
    'data_dir', 'sample_prompts', 'wandb_log', 'device', 'backend', 'ddp_timeout', 'shard', 'max_minutes',
]
# knobs that say the same thing: one that is given now replaces all that was given of them
SAME_THING = [
    ['max_iters', 'max_tokens', 'max_epochs', 'train_minutes'],
    ['gradient_accumulation_steps', 'total_batch_size'],
    ['lr_schedule', 'decay_lr'],
]


def inherit(config, given, ckpt, resuming, kinds):
    """The knobs of a run that starts from a checkpoint, and the names of those that have been given.

    The architecture is the checkpoint's, block_size too (a new run may have a smaller one, with rope any). On
    a resume, what the run was given holds unless it is given again; what was left to train.py is train.py's.
    Each difference is printed. If the evaluation is another one, ckpt's best_val_loss becomes inf.
    """
    config = dict(config)
    path = ckpt['path']
    folder = os.path.realpath(os.path.dirname(path))
    if resuming:
        print0(f"resuming from {path}, after {ckpt['iter_num']:,} iterations")
    elif config['overwrite'] and folder == os.path.realpath(config['out_dir']):
        raise InputError(f"--overwrite would delete {path}, from which the run is to start. name another --out_dir")

    network = GPTConfig(**ckpt['model_args'])
    for name in MODEL_FIELDS:
        if name not in config or name == 'dropout':
            continue
        value = getattr(network, name)
        if name == 'block_size' and not resuming:
            if name in given and network.positions == 'rope':
                continue
            value = min(value, config[name])
        if name in given and config[name] != value:
            print0(f"note: {name}={config[name]} is ignored, the checkpoint has {value}")
        config[name] = value
    if not resuming:
        return config, {name: config[name] for name in given}

    replaced = set(given)
    for names in SAME_THING:
        if set(given).intersection(names):
            replaced.update(names)
    all_given = set(given)
    ignored = []
    not_restored = []
    for name, before in ckpt['config'].items():
        if name in START or name in MODEL_FIELDS and name != 'dropout':
            continue
        was_given = name in ckpt['given']
        if name in OF_THIS_START:
            if was_given and name not in given and name in config and config[name] != before:
                not_restored.append(f'{name}={before!r}')
            continue
        value = INVALID  # a knob that is gone, or has other values now
        if name in config:
            value = fit_value(before, kinds[name])
        if value is INVALID:
            if was_given:
                ignored.append(f'{name}={before!r}')
            continue
        if was_given and name not in replaced:
            config[name] = value
            all_given.add(name)
        if config[name] != value:
            print0(f"  {name}: {value!r} -> {config[name]!r}")
    if ignored:
        print0(f"note: ignored, as train.py has no such knob, or none with this value: {', '.join(ignored)}")
    if not_restored:
        print0(f"note: not restored from the checkpoint: {', '.join(not_restored)}. give it again")

    if ckpt['data'] is None or windows_of(config) != windows_of(ckpt['config']):
        ckpt['best_val_loss'] = math.inf
        print0("note: evaluations read other windows than before (eval_iters x batch_size, document_mask; "
               "nanoGPT's are random): the best loss begins anew")
    return config, {name: config[name] for name in all_given}


def windows_of(config):
    """What tells which windows an evaluation reads; the data and block_size stay the same on a resume."""
    return config['eval_iters'] * config['batch_size'], config['document_mask']


def check_data(ckpt, data, tokens_per_iter, resuming):
    """raise InputError() if the dataset has another tokenizer than the checkpoint; on a resume also for other data, or
    another number of tokens per iteration: samples would be repeated or left out. Returns the vocabulary
    size that the model needs: the checkpoint's, or more where conversations bring tokens of their own."""
    path = ckpt['path']
    vocab_size = ckpt['model_args']['vocab_size']
    n_ids = data.meta['vocab_size']
    n_added = 0
    if data.train.masked and not resuming:
        n_added = 5  # finetuning on conversations: their four roles may be new, and perhaps <|bos|>
    if not fits(ckpt, data.tokenizer_state, n_ids, n_added):
        raise InputError(f"dataset {data.name} has another tokenizer than {path} ({n_ids} ids, up to {vocab_size} "
              "there). make one with the checkpoint's: python prepare.py NAME --input=FILE "
              f"--tokenizer={path}")
    if n_ids > vocab_size:
        vocab_size = data.vocab_size
    if not resuming:
        return vocab_size
    new_run = f"or start a new run from these weights: --init_from={path} --out_dir=ANOTHER"
    for split in ['train', 'val']:
        before = (ckpt['data'] or {}).get(split)
        now = data.fingerprint.get(split)
        if before and before != now:
            raise InputError(f"{split}.bin of dataset {data.name} is not the one of {path} ({before} -> {now}). bring "
                  f"the old data back, {new_run}")
    before = ckpt['tokens_per_iter']
    if before not in (None, tokens_per_iter):
        raise InputError(f"the run has {before} tokens per iteration, and this start {tokens_per_iter}. keep them with "
              f"--total_batch_size={before}, {new_run}")
    return vocab_size


# -----------------------------------------------------------------------------
# writing


RUN_FILES = re.compile(r'(ckpt(_best|_original|_\d{8,})?\.pt|eval(_\d{8,})?\.json|log\.csv|run\.json|'
                       r'report\.md|loss\.png)(\.old|\.tmp)?')


def prepare_folder(out_dir, start_iter, delete, lock=None, best_iter=None):
    """Make a run's folder ready to be written from iteration `start_iter` on. What is later goes out of the
    way, to *.old; only with `delete` a run is removed. lock: that of a resume, which has it already.
    best_iter: the best iteration up to start_iter, which ckpt_best.pt names again. Returns the lock, to be
    kept."""
    if lock is None:
        lock = lock_folder(out_dir)
        if exists(out_dir) and not delete:
            raise InputError(f"another run has written into {out_dir} in the meantime. start again")
    for name in os.listdir(out_dir):
        unfinished = name.endswith('.pt.tmp')  # of a process that was killed
        if RUN_FILES.fullmatch(name) and (delete or unfinished):
            os.remove(os.path.join(out_dir, name))
    if exists(out_dir) and not numbered(out_dir):  # nanoGPT's, whose name the first save takes
        link(newest(out_dir), os.path.join(out_dir, 'ckpt_original.pt'))
    evaluations = glob.glob(os.path.join(glob.escape(out_dir), 'eval_*.json'))
    # the newest first, so that a kill in between leaves no gap
    for path in candidates(out_dir) + [path for path in evaluations if number_of(path) is not None]:
        iteration = number_of(path)
        if iteration is None:
            try:
                iteration = unpack(path, verify=False)['iter_num']
            except Exception:
                iteration = math.inf  # damaged
        if iteration > start_iter:
            os.replace(path, path + '.old')
    ckpt_best_pt = os.path.join(out_dir, 'ckpt_best.pt')
    for path in numbered(out_dir):
        if number_of(path) == best_iter and not os.path.exists(ckpt_best_pt):
            link(path, ckpt_best_pt)
    ckpt_pt = os.path.join(out_dir, 'ckpt.pt')
    if numbered(out_dir) and not os.path.exists(ckpt_pt):
        link(numbered(out_dir)[-1], ckpt_pt)
    log = os.path.join(out_dir, 'log.csv')
    if os.path.exists(log):
        columns, rows = read_rows(log)
        earlier = [row for row in rows if int(row['iter']) < start_iter]  # the others are written anew
        if earlier:
            write_rows(log, columns, earlier)
        else:
            os.replace(log, log + '.old')
    return lock


def save(out_dir, state, best, only_best, keep):
    """Write `state` as the checkpoint of its iter_num, whole or not at all, and remove all but the newest
    `keep` (0: keep all). best: its validation loss is the lowest so far; only_best: ckpt.pt names the best
    one. Returns whether it was written; if not, a warning says why, and the older ones are as they were."""
    path = os.path.join(out_dir, f"ckpt_{state['iter_num']:08d}.pt")
    try:
        with replacing(path) as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as e:
        while e.__context__:  # torch hides the system's behind its own
            e = e.__context__
        print0(f"warning: {path} could not be written ({first_line(e)}). the run goes on, and the older "
               "checkpoints are as they were")
        return False
    names = []
    if best:
        names.append('ckpt_best.pt')
    if best or not only_best or not os.path.exists(os.path.join(out_dir, 'ckpt_best.pt')):
        names.append('ckpt.pt')
    try:
        if keep:  # older ones go first, as a link may be a copy and want their room
            for old in numbered(out_dir)[:-keep]:
                os.remove(old)
        for name in names:
            link(path, os.path.join(out_dir, name))
    except OSError as e:
        print0(f"warning: {path} is written, but {' and '.join(names)} may still be an older one "
               f"({first_line(e)}). the run goes on")
    return True


def link(path, name):
    """Let `name` be another name of the file `path`, or a copy where that cannot be."""
    if os.path.exists(name) and os.path.samefile(path, name):
        return
    try:
        os.link(path, name + '.tmp')
        os.replace(name + '.tmp', name)
        return
    except OSError:  # no hard links here, or a file in the way
        pass
    with replacing(name) as copy, open(path, 'rb') as file:
        shutil.copyfileobj(file, copy)
