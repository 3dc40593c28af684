"""
Checkpoints: which one is meant, what is in it, the model that it makes; what a resumed run takes from it; and
how one is written. A run's folder has

    out_dir/ckpt_00000500.pt   the state after 500 iterations; the newest few stay
    out_dir/ckpt.pt            a link to the newest, or with always_save_checkpoint=False to the best
    out_dir/ckpt_best.pt       a link to the one with the lowest validation loss

Nothing in a file that is read is executed. From Python: model, tokenizer = load('out').
What cannot be read is a ValueError of one line; functions that only train.py calls end with error().
"""

import dataclasses
import errno
import glob
import json
import math
import os
import re
import shutil
import warnings
import zipfile

import numpy as np
import torch
import torch.distributed

import huggingface
from common import first_line, print0, read_json, read_rows, replacing, write_rows
from configurator import INVALID, error, fit_value
from dataset import bin_files, folder_of, read_meta
from model import GPT, GPTConfig
from tokenizer import check_state, make_tokenizer, read_tokenizer_files, same_tokenizer

NUMBERED = re.compile(r'ckpt_(\d{8,})\.pt')
LINKS = ['ckpt.pt', 'ckpt_best.pt']
MODEL_FIELDS = [field.name for field in dataclasses.fields(GPTConfig)]

# -----------------------------------------------------------------------------
# which file


def number_of(path):
    """The iteration in the name of a numbered checkpoint, or None."""
    found = NUMBERED.fullmatch(os.path.basename(path))
    return int(found[1]) if found else None


def numbered(out_dir):
    """The paths of a run's numbered checkpoints, oldest first."""
    names = os.listdir(out_dir) if os.path.isdir(out_dir) else []
    paths = [os.path.join(out_dir, name) for name in names if NUMBERED.fullmatch(name)]
    return sorted(paths, key=number_of)


def candidates(out_dir):
    """The paths of a run's checkpoints in the order in which a resume tries them, each file once. nanoGPT
    leaves a ckpt.pt and no numbered ones."""
    paths = numbered(out_dir)[::-1]
    for name in LINKS:
        path = os.path.join(out_dir, name)
        if os.path.exists(path) and not any(os.path.samefile(path, other) for other in paths):
            paths.append(path)
    return paths


def newest(out_dir):
    """The path of the newest checkpoint, or None."""
    paths = candidates(out_dir)
    return paths[0] if paths else None


def exists(out_dir):
    """Whether the folder holds a run."""
    return newest(out_dir) is not None


def find(source):
    """The path that `source` means: a file; a run's ckpt.pt, else its newest checkpoint; a Hugging Face
    folder or name as it is."""
    source = os.fspath(source)
    if os.path.isfile(source) or huggingface.is_hub_name(source):
        return source
    path = os.path.join(source, 'ckpt.pt')
    if os.path.exists(path):
        return path
    if exists(source):
        return newest(source)
    if os.path.exists(os.path.join(source, 'config.json')):
        return source
    raise ValueError(no_checkpoint(source))


def no_checkpoint(source):
    folders = sorted({os.path.dirname(path) for path in glob.glob('*/ckpt*.pt')})
    there = ', '.join(folders) or 'none here'
    return (f"no checkpoint in {source} (there is: {there}). train first, or name a run's folder, a "
            "checkpoint, a Hugging Face folder or name (gpt2, OWNER/NAME)")


# -----------------------------------------------------------------------------
# what is in a file


class Settings:
    """Stands for a class of plain attributes in a checkpoint, such as build-nanogpt's GPTConfig and
    argparse.Namespace. It takes the attributes, and has no code."""


def safe_classes(path):
    """The classes that a checkpoint may name besides torch's, for torch.serialization.safe_globals: numpy's
    scalars, and what Settings can stand for."""
    scalar = np.float64(0).__reduce__()[0]
    found = [np.dtype]
    for module in ['numpy.core.multiarray', 'numpy._core.multiarray']:
        found.append((scalar, f'{module}.scalar'))
    for kind in [np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64,
                 np.float16, np.float32, np.float64, np.str_]:
        found.append(type(np.dtype(kind)))
    for name in torch.serialization.get_unsafe_globals_in_checkpoint(path):
        if name.endswith('Config') or name == 'argparse.Namespace':
            found.append((Settings, name))
    return found


def other_format(path, start):
    """What a file is that begins with the bytes `start` and is no checkpoint, and how it becomes one; else
    None."""
    magic = int.from_bytes(start[:4], 'little')
    if start[:4] == b'GGUF':
        return (f"{path} is a GGUF, of llama.cpp. name the Hugging Face folder that it was made from; "
                "docs/huggingface.md has the lines that make one of the GGUF")
    if start[8:9] == b'{' and int.from_bytes(start[:8], 'little') < 10**8:
        return (f"{path} is a safetensors file. name its folder, where it is model.safetensors beside a "
                f"config.json: --init_from={os.path.dirname(path) or '.'}")
    if magic == 20240326:
        return (f"{path} is a model of llm.c. make a folder of it there: python dev/eval/export_hf.py "
                f"--input={path} --output=FOLDER, and name that: --init_from=FOLDER")
    if magic == 20240520:
        return f"{path} holds llm.c's tokens. name a model"
    return None


def unpack(path, verify=True):
    """What torch.save has written into a file; its tensors stay mapped. verify: look at the checksums."""
    try:
        with open(path, 'rb') as file, warnings.catch_warnings(action='ignore'):
            start = file.read(16)
            problem = other_format(path, start)
            if problem:
                raise ValueError(problem)
            if start[:4] != b'PK\x03\x04':  # as torch wrote before 1.6
                return torch.load(path, map_location='cpu', weights_only=True)
            if verify:
                with zipfile.ZipFile(file) as records:
                    wrong = records.testzip()
                if wrong is not None:
                    raise zipfile.BadZipFile(f"the checksum of {wrong} is wrong")
            # A run may replace the file meanwhile, and torch opens it twice: for the table of contents, and
            # for the numbers. Those of two files would give weights that are wrong, and finite
            same_file = f'/dev/fd/{file.fileno()}'
            source = same_file if os.path.exists(same_file) else path
            with torch.serialization.safe_globals(safe_classes(source)):
                refused = torch.serialization.get_unsafe_globals_in_checkpoint(source)
                if refused:
                    raise ValueError(
                        f"{path} holds {refused[0]}, which could run code: refused. if you trust the file, "
                        f"keep what is plain: python -c \"import torch; c = torch.load('{path}', "
                        "weights_only=False); torch.save({k: c[k] for k in ['model', 'model_args', "
                        "'iter_num']}, 'plain.pt')\"")
                return torch.load(source, map_location='cpu', weights_only=True, mmap=True)
    except Exception as e:  # a damaged file leads its readers anywhere
        if isinstance(e, ValueError) and str(e).startswith(path):
            raise
        why = type(e).__name__
        if isinstance(e, (OSError, zipfile.BadZipFile)):
            why = first_line(e)
        raise ValueError(f"{path} is damaged, or no checkpoint ({why}). bring it back from a copy, or use "
                         "another one of its run")


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
    raw = unpack(path, verify) if os.path.isfile(path) else huggingface.read(path)
    try:
        ckpt = normalize(raw, path)
        check_weights(ckpt)
    except Exception as e:  # a file may say anything
        if isinstance(e, ValueError) and str(e).startswith(path):
            raise
        raise ValueError(f"{path} is no checkpoint of model.py's GPT ({type(e).__name__}: {first_line(e)}). "
                         "name another, or use the code that it was trained with")
    return ckpt


def normalize(raw, path):
    """The dict of read() for what is in a file: ours, nanoGPT's, build-nanogpt's, bare weights."""
    if not isinstance(raw, dict) or not raw:
        raise ValueError(f"{path} holds no checkpoint, but a {type(raw).__name__}. name another")
    if 'model' not in raw and all(isinstance(value, torch.Tensor) for value in raw.values()):
        raw = describe_bare_weights(raw, path)
    if not isinstance(raw.get('model'), dict):
        keys = ', '.join(str(key) for key in raw)
        raise ValueError(f"{path} has no weights under 'model' (it has {keys[:200]}). save them again: "
                         "torch.save({'model': model.state_dict(), 'model_args': {...}}, PATH)")
    ckpt = {name: value for name, value in raw.items() if value is not None}
    if isinstance(ckpt.get('config'), Settings) and 'model_args' not in ckpt:
        # build-nanogpt's five fields; its network has biases and the tanh approximation
        ckpt['model_args'] = {'bias': True, 'mlp': 'gelu_tanh', **vars(ckpt.pop('config'))}
        ckpt['iter_num'] = ckpt.get('step', 0)
        ckpt['best_val_loss'] = ckpt.get('val_loss', math.inf)
    config = ckpt.get('config', {})
    if isinstance(config, Settings):
        config = vars(config)

    weights = {}
    for name, p in ckpt['model'].items():
        # torch.compile and DDP put these in front of names, in any order
        parts = [part for part in name.split('.') if part not in ('_orig_mod', 'module')]
        weights['.'.join(parts)] = p
    args = {'bias': 'transformer.ln_f.bias' in weights, 'dropout': 0.0}  # older than these fields
    for name, value in ckpt['model_args'].items():
        args[name] = plain(value)
    head = weights.get('lm_head.weight')
    embedding = weights['transformer.wte.weight']
    if head is None and args.get('tie', True):
        weights['lm_head.weight'] = embedding
    elif head is not None and not torch.equal(head, embedding):
        args['tie'] = False  # no field says so where somebody has taken out the line that ties them

    ckpt['model'] = weights
    ckpt['model_args'] = todays_model_args(args, path)
    ckpt['config'] = {name: plain(value) for name, value in config.items()}
    ckpt['iter_num'] = int(ckpt.get('iter_num', 0))
    ckpt['best_val_loss'] = float(ckpt.get('best_val_loss', math.inf))
    for name in ['optimizer', 'scaler', 'tokenizer', 'data', 'tokens_per_iter']:
        ckpt.setdefault(name, None)
    if ckpt['tokenizer'] is not None:
        check_state(ckpt['tokenizer'])
    for name in ['optimizer', 'data']:
        if not isinstance(ckpt[name], (dict, type(None))):
            raise ValueError(f"{path} has a {type(ckpt[name]).__name__} as its {name}. name another")
    if 'trained_on' in ckpt:
        fill_in_older(ckpt, path)
    elif 'given' not in ckpt:
        fill_in_nanogpt(ckpt)
    ckpt['given'] = set(ckpt['given'])
    ckpt['train_seconds'] = float(ckpt.get('train_seconds', 0.0))
    ckpt['path'] = path
    return ckpt


def plain(value):
    """A number of numpy's or torch's as one of Python's; anything else as it is."""
    if isinstance(value, (np.generic, torch.Tensor)) and value.ndim == 0:
        return value.item()
    return value


def todays_model_args(args, path):
    """The arguments of GPTConfig for those of an older version."""
    if args.get('arch') == 'local' or args.get('near') or args.get('near_layers'):
        raise ValueError(f"{path} is of the preset local, which is gone. git checkout a170a90 "
                         "brings its code back")
    scaling = args.get('rope_scaling')
    if scaling == 'none':
        args['rope_scaling'] = None
    elif isinstance(scaling, str):  # 'llama3:8:1:4:8192'
        numbers = [float(number) for number in scaling.split(':')[1:]]
        args['rope_scaling'] = dict(zip(huggingface.ROPE_SCALING, numbers, strict=True))
    for name in list(args):
        if name not in MODEL_FIELDS and not args[name]:
            del args[name]  # off, and not known here: other code may have had it
    return args


ALL_BUT = {'device', 'dtype', 'compile', 'backend'}  # chosen for another machine


def fill_in_older(ckpt, path):
    """Today's keys for a checkpoint from before `given` was saved in it: run.json has it."""
    config = ckpt['config']
    trained_on = ckpt['trained_on']
    ckpt['tokens_per_iter'] = trained_on['tokens per iteration']
    ckpt['train_seconds'] = ckpt['seconds']
    ckpt['loss_ema'] = ckpt.get('loss_sum')
    ckpt['data'] = {'name': config.get('dataset')}
    for split in ['train', 'val']:  # '1,003,854 tokens, sha256 0123456789abcdef'
        found = re.match(r'([\d,]+) tokens, sha256 ([^,]+)', trained_on.get(split, ''))
        if found:
            ckpt['data'][split] = {'tokens': int(found[1].replace(',', '')), 'sha256': found[2]}
    record = read_json(os.path.join(os.path.dirname(path), 'run.json'))
    ckpt['given'] = set(record.get('given') or set(config) - ALL_BUT)
    if 'budget' in ckpt['given']:
        ckpt['given'].add('max_iters')  # it is in there


def fill_in_nanogpt(ckpt):
    """Today's keys for a checkpoint of nanoGPT's, and for weights alone."""
    config = ckpt['config']
    group = ckpt['optimizer']['param_groups'][0] if ckpt['optimizer'] else {}
    if {'weight_decay', 'betas', 'eps'} <= set(group):  # AdamW's
        # a resume there goes on with the optimizer's, and writes other ones into config
        config['weight_decay'] = group['weight_decay']
        config['beta1'], config['beta2'] = group['betas']
        config['adam_eps'] = group['eps']
    ckpt['given'] = set(config) - ALL_BUT
    sizes = [config.get(name) for name in ['batch_size', 'block_size', 'gradient_accumulation_steps']]
    if None not in sizes:
        ckpt['tokens_per_iter'] = math.prod(sizes)


def describe_bare_weights(weights, path):
    """A checkpoint's dict for a state_dict() alone, whose sizes are in a config.json beside it: GPTConfig's,
    or Hugging Face's."""
    sizes = read_json(os.path.join(os.path.dirname(path), 'config.json'))
    if 'model_type' in sizes:
        return huggingface.as_checkpoint(sizes, weights, None, path)
    if 'n_head' in sizes:
        args = {name: value for name, value in sizes.items() if name in MODEL_FIELDS}
        return {'model': weights, 'model_args': args}
    found = {'n_head': '?'}
    layers = re.findall(r'\bh\.(\d+)\.', ' '.join(weights))
    found['n_layer'] = 1 + max([int(number) for number in layers], default=-1)
    for name, p in weights.items():
        if name.endswith('wte.weight'):
            found['vocab_size'], found['n_embd'] = p.shape
        if name.endswith('wpe.weight'):
            found['block_size'] = p.size(0)
    raise ValueError(f"{path} holds bare weights, which do not tell n_head. write all sizes into a "
                     f"config.json beside it: {json.dumps(found)}")


# -----------------------------------------------------------------------------
# the model


def model_config(ckpt):
    """The GPTConfig of a checkpoint."""
    for name, value in ckpt['model_args'].items():
        if name not in MODEL_FIELDS:
            raise ValueError(f"{ckpt['path']} is of a network with {name}={value!r}, which model.py has not. "
                             "use the code that it was trained with")
    return GPTConfig(**ckpt['model_args'])


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
    weights = ckpt['model']
    config = model_config(ckpt)
    n_layer = len({name.split('.')[2] for name in weights if name.startswith('transformer.h.')})
    if config.n_layer != n_layer or config.block_size > 2**23:  # else the next line could take for ever
        raise ValueError(f"{path} has {n_layer} layers, and says n_layer={config.n_layer}, block_size="
                         f"{config.block_size}. use another checkpoint")
    expected = empty_model(config).state_dict()
    for name in list(weights):
        if name.endswith(CONSTANTS) and name not in expected:
            del weights[name]
    for name in sorted(set(expected) ^ set(weights)):
        has = "lacks" if name in expected else "has"
        raise ValueError(f"{path} {has} the weight {name}, unlike model.py's {config.arch}. use the code "
                         "that it was trained with, or another checkpoint")
    for name, p in weights.items():
        if p.shape != expected[name].shape:
            raise ValueError(f"{path} has {name} in the shape {tuple(p.shape)}, where model_args give "
                             f"{tuple(expected[name].shape)}. use another checkpoint")
        if not torch.isfinite(p).all():
            raise ValueError(f"{path} has a weight that is not finite ({name}). use an earlier checkpoint")


def build_model(ckpt, block_size=None, dropout=0.0, vocab_size=None):
    """The GPT of a checkpoint, on the CPU. block_size: fewer positions, with rope also more; vocab_size: more
    ids, see grow_vocabulary."""
    config = dataclasses.replace(model_config(ckpt), dropout=dropout)
    if block_size is not None and config.positions == 'rope':
        config.block_size = block_size
    if block_size is not None and block_size > config.block_size:
        raise ValueError(f"{ckpt['path']} has learned {config.block_size} positions "
                         f"(block_size={block_size}). use --block_size={config.block_size} or less")
    model = empty_model(config)
    expected = model.state_dict()
    weights = {}
    for name, p in ckpt['model'].items():
        weights[name] = p.to(expected[name].dtype, copy=True)  # it is mapped from a file
    model.load_state_dict(weights, assign=True)
    if config.tie:
        model.transformer.wte.weight = model.lm_head.weight
    if block_size is not None and block_size < config.block_size:
        model.crop_block_size(block_size)
    if vocab_size is not None and vocab_size > config.vocab_size:
        grow_vocabulary(model, vocab_size)
    return model


@torch.no_grad()
def grow_vocabulary(model, vocab_size):
    """Give embedding and head rows for the ids up to vocab_size. A new row is the mean of the old ones and a
    little noise, so that new tokens begin as likely as the average one, and apart from each other."""
    generator = torch.Generator().manual_seed(torch.initial_seed())
    for module in [model.lm_head, model.transformer.wte]:
        old = module.weight
        new = old.mean(0, keepdim=True).repeat(vocab_size - old.size(0), 1)
        noise = torch.randn(new.shape, generator=generator) * old.std() * 0.1
        module.weight = torch.nn.Parameter(torch.cat((old, new + noise.to(new.dtype))))
    if model.config.tie:
        model.transformer.wte.weight = model.lm_head.weight
    model.lm_head.out_features = vocab_size
    model.transformer.wte.num_embeddings = vocab_size
    model.config.vocab_size = vocab_size


def tokenizer_state_of(ckpt, dataset=None, data_dir=None):
    """The tokenizer's state of a checkpoint. It says so itself; of nanoGPT's, or if a dataset is named, that
    one's folder does."""
    if dataset is None and ckpt['tokenizer'] is not None:
        return ckpt['tokenizer']
    vocab_size = ckpt['model_args']['vocab_size']
    name = dataset or ckpt['config'].get('dataset') or 'NAME'
    folder = folder_of(name, data_dir)  # a name, not a path: it may be a stranger's
    has_meta = any(os.path.exists(os.path.join(folder, file)) for file in ['meta.json', 'meta.pkl'])
    if has_meta or bin_files(folder, 'train'):
        meta = read_meta(folder)
        state = read_tokenizer_files(folder, meta)
        n_ids = meta['vocab_size']
        if n_ids <= vocab_size < n_ids + 64 and same_tokenizer(ckpt['tokenizer'], state):  # it may be padded
            return state
        raise ValueError(f"dataset {name} has another tokenizer than {ckpt['path']} ({n_ids} ids, up to "
                         f"{vocab_size} there). name the one that it was trained on: --dataset=NAME")
    if dataset is None and vocab_size in (50257, 50304):  # as nanoGPT assumes
        return {'kind': 'tiktoken', 'name': 'gpt2'}
    raise ValueError(f"{ckpt['path']} does not tell its tokenizer, and there is no dataset {folder}. name "
                     "the one that it was trained on: --dataset=NAME --data_dir=PATH")


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
        error(str(e))
    print0(f"weights of {path}")
    return ckpt


def load_for_resume(out_dir, step=0):
    """The checkpoint that a run goes on from: the newest valid one, or that of iteration `step`. All
    processes call it; the first one decides, as a folder may look different to another for a moment."""
    choice = [None, None]  # the path, or what is wrong
    if os.environ.get('RANK', '0') == '0':
        try:
            choice[0] = newest_valid(out_dir, step)
        except ValueError as e:
            choice[1] = str(e)
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(choice, src=0, device=torch.device('cpu'))
    path, problem = choice
    if problem:
        error(problem)
    return read(path, verify=False)


def newest_valid(out_dir, step):
    """The path of the newest checkpoint (step: of that iteration) that a run can go on from; others are
    named, and left out. ValueError if there is none: that is never a new beginning."""
    problems = []
    paths = candidates(out_dir)
    for path in paths:
        if step and number_of(path) not in (None, step):
            continue
        try:
            ckpt = read(path)
            check_optimizer(ckpt)
        except Exception as e:  # a file may say anything
            problems.append(first_line(e))
            continue
        if step and ckpt['iter_num'] != step:
            continue
        for problem in problems:
            print0(f"note: left out: {problem}")
        return path
    if len(problems) == 1:
        raise ValueError(problems[0])
    if problems:
        raise ValueError(f"no checkpoint in {out_dir} can be resumed: {'; '.join(problems)}")
    if paths:
        names = ', '.join(os.path.basename(path) for path in paths)
        raise ValueError(f"no checkpoint in {out_dir} is of iteration {step} (there is: {names}). name "
                         "another with --resume_step, or leave it out for the newest")
    raise ValueError(no_checkpoint(out_dir))


def check_optimizer(ckpt):
    """ValueError if a run cannot go on from a checkpoint, but start from its weights."""
    problem = None
    if not ckpt['optimizer']:
        problem = "holds weights only, no optimizer"
    elif ckpt['config'].get('teacher'):
        problem = "learned from a teacher, which is gone"
    else:
        for moments in ckpt['optimizer']['state'].values():
            for name, value in moments.items():
                if isinstance(value, torch.Tensor) and not torch.isfinite(value).all():
                    problem = f"has an optimizer's state that is not finite ({name})"
    if problem:
        path = ckpt['path']
        raise ValueError(f"{path} {problem}. start a run from its weights: --init_from={path} "
                         "--out_dir=ANOTHER")


# never taken from a checkpoint: what belongs to this start and this machine; and paths, which may be a
# stranger's
OF_THIS_START = [
    'out_dir', 'init_from', 'auto_resume', 'resume_step', 'overwrite', 'eval_only', 'data_dir',
    'sample_prompts', 'wandb_log', 'device', 'backend', 'ddp_timeout', 'shard', 'max_minutes',
]
# knobs that say the same thing: one that is given now replaces all that was given of them
SAME_THING = [
    ['max_iters', 'max_tokens', 'max_epochs'],
    ['gradient_accumulation_steps', 'total_batch_size'],
    ['lr_schedule', 'decay_lr'],
]


def inherit(config, given, ckpt, resuming, kinds):
    """The knobs of a run that starts from a checkpoint, and the names of those that have been given.

    The architecture is the checkpoint's, block_size too (a new run may have a smaller one). On a resume, what
    the run was given holds unless it is given again; what was left to train.py is train.py's. Each difference
    is printed. If the evaluation is another one, ckpt's best_val_loss becomes inf.
    """
    config = dict(config)
    path = ckpt['path']
    folder = os.path.realpath(os.path.dirname(path))
    if resuming:
        print0(f"resuming from {path}, after {ckpt['iter_num']:,} iterations")
    elif config['overwrite'] and folder == os.path.realpath(config['out_dir']):
        error(f"--overwrite would delete {path}, from which the run is to start. name another --out_dir")
    inherit_architecture(config, given, ckpt, resuming)
    if not resuming:
        return config, set(given)
    all_given = inherit_knobs(config, given, ckpt, kinds)
    if not same_evaluation(config, ckpt):
        ckpt['best_val_loss'] = math.inf
        print0("note: evaluations read other windows than before (eval_iters x batch_size, document_mask; "
               "nanoGPT's are random): the best loss begins anew")
    return config, all_given


def inherit_architecture(config, given, ckpt, resuming):
    network = model_config(ckpt)
    for name in MODEL_FIELDS:
        if name not in config or name == 'dropout':
            continue
        value = getattr(network, name)
        if name == 'block_size' and not resuming:
            more = network.positions == 'rope'
            if name in given and config[name] > value and not more:
                error(f"block_size={config[name]}, and {ckpt['path']} has learned {value} positions. use "
                      f"--block_size={value} or less")
            if name in given:
                value = config[name]
            value = min(value, config[name])
        if name in given and config[name] != value:
            print0(f"note: {name}={config[name]} is ignored, the checkpoint has {value}")
        config[name] = value


def inherit_knobs(config, given, ckpt, kinds):
    """Set in `config` what the run was given, unless it is given now. Returns the names given then or now."""
    replaced = set(given)
    for names in SAME_THING:
        if given.intersection(names):
            replaced.update(names)
    all_given = set(given)
    ignored = []
    for name, before in ckpt['config'].items():
        if name in OF_THIS_START or name in MODEL_FIELDS and name != 'dropout':
            continue
        was_given = name in ckpt['given']
        value = INVALID
        if name in config:
            value = fit_value(before, kinds[name])
        if value is INVALID:  # a knob that is gone, or has other values now
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
    return all_given


def same_evaluation(config, ckpt):
    """Whether the losses of both evaluations compare: they are over the same windows."""
    before = ckpt['config']
    if ckpt['data'] is None or not isinstance(before.get('eval_iters'), int):
        return False  # nanoGPT's windows are random
    same_windows = before['eval_iters'] * before['batch_size'] == config['eval_iters'] * config['batch_size']
    return same_windows and before.get('document_mask', False) == config['document_mask']


def check_data(ckpt, data, tokens_per_iter, resuming):
    """error() if the dataset has another tokenizer than the checkpoint; on a resume also for other data, or
    another number of tokens per iteration: samples would be repeated or left out. Returns the vocabulary
    size that the model needs: the checkpoint's, or more where conversations bring tokens of their own."""
    path = ckpt['path']
    known = ckpt['tokenizer']
    vocab_size = ckpt['model_args']['vocab_size']
    n_ids = data.meta['vocab_size']
    fits = same_tokenizer(known, data.tokenizer_state) and n_ids <= vocab_size
    if known is None:  # nanoGPT's: the size has to do, which may be padded
        fits = n_ids <= vocab_size <= data.vocab_size
    if not fits and data.train.masked and not resuming:
        # finetuning on conversations: their four roles may be new, and perhaps <|bos|>
        fits = same_tokenizer(known, without_added_tokens(data.tokenizer_state, known))
        if known is None:
            fits = n_ids - 5 <= vocab_size <= data.vocab_size
        if fits and n_ids > vocab_size:
            vocab_size = data.vocab_size
    if not fits:
        error(f"dataset {data.name} has another tokenizer than {path} ({n_ids} ids, up to {vocab_size} "
              "there). make one with the checkpoint's: python prepare.py NAME --input=FILE "
              f"--tokenizer={path}")
    if not resuming:
        return vocab_size
    new_run = f"or start a new run from these weights: --init_from={path} --out_dir=ANOTHER"
    for split in ['train', 'val']:
        before = (ckpt['data'] or {}).get(split)
        now = data.fingerprint.get(split)
        if before and not same_split(before, now):
            error(f"{split}.bin of dataset {data.name} is not the one of {path} ({before} -> {now}). bring "
                  f"the old data back, {new_run}")
    before = ckpt['tokens_per_iter']
    if before not in (None, tokens_per_iter):
        error(f"the run has {before} tokens per iteration, and this start {tokens_per_iter}. keep them with "
              f"--total_batch_size={before}, {new_run}")
    return vocab_size


def same_split(before, now):
    """Whether two fingerprints may be of the same tokens; a checksum may be unknown."""
    if now is None or before['tokens'] != now['tokens']:
        return False
    sums = before.get('sha256', 'unknown'), now['sha256']
    return 'unknown' in sums or sums[0] == sums[1]


def without_added_tokens(state, known):
    """The state of a tokenizer without the special tokens that `known`, a state or None, has not."""
    known = known or {}
    trimmed = {key: value for key, value in state.items() if key != 'added'}
    if 'added' in known:
        trimmed['added'] = known['added']
    if 'special_tokens' in known:
        trimmed['special_tokens'] = known['special_tokens']
    return trimmed


# -----------------------------------------------------------------------------
# writing


def lock_folder(folder):
    """Keep other processes out of a folder as long as the returned file is open, however this one ends."""
    try:
        lock = open(os.path.join(folder, '.lock'), 'a')
    except OSError as e:
        error(f"{folder} cannot be written into ({e.strerror}). name another folder")
    try:
        import fcntl
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # Windows
        pass
    except OSError as e:
        if e.errno in (errno.EACCES, errno.EAGAIN):
            error(f"another process is writing into {folder}. wait until it ends, or name another folder")
        print0(f"note: {folder} cannot be locked ({e.strerror}). take care that no other process uses it")
    return lock


def prepare_folder(out_dir, start_iter, delete, lock=None):
    """Make a run's folder ready to be written from iteration `start_iter` on. What is later goes out of the
    way, to *.old; only with `delete` a run is removed. lock: that of a resume, which has it already. Returns
    the lock, to be kept."""
    try:
        os.makedirs(out_dir, exist_ok=True)
        resuming = lock is not None
        if not resuming:
            lock = lock_folder(out_dir)
        if delete:
            delete_run(out_dir)
        elif not resuming and exists(out_dir):
            error(f"another run has written into {out_dir} in the meantime. start again")
        for name in os.listdir(out_dir):
            if re.fullmatch(r'(ckpt.*\.pt|log\.csv|run\.json)\.tmp', name):
                os.remove(os.path.join(out_dir, name))  # of a process that was killed
        if exists(out_dir) and not numbered(out_dir):  # nanoGPT's, whose name the first save takes
            original = os.path.join(out_dir, f'ckpt_original_{start_iter:08d}.pt')
            link(newest(out_dir), original)
            print0(f"note: {newest(out_dir)} is kept as {original}")
        move_later_checkpoints(out_dir, start_iter)
        drop_later_rows(os.path.join(out_dir, 'log.csv'), start_iter)
    except (OSError, ValueError) as e:
        error(f"out_dir cannot be written into ({out_dir}: {first_line(e)}). name another --out_dir")
    return lock


def delete_run(out_dir):
    files = [*LINKS, 'log.csv', 'run.json', 'report.md', 'loss.png']
    for name in os.listdir(out_dir):
        if name in files or NUMBERED.fullmatch(name.removesuffix('.old')):
            os.remove(os.path.join(out_dir, name))


def move_later_checkpoints(out_dir, start_iter):
    """What a resume from iteration start_iter does not go on from, damaged ones included, becomes *.old."""
    later = [path for path in numbered(out_dir) if number_of(path) > start_iter]
    for name in LINKS:
        path = os.path.join(out_dir, name)
        if not os.path.exists(path):
            continue
        if any(os.path.samefile(path, other) for other in later):
            os.remove(path)  # it has another name
            continue
        try:
            is_later = int(unpack(path, verify=False)['iter_num']) > start_iter
        except (ValueError, KeyError, TypeError):  # damaged
            is_later = True
        if is_later:
            os.replace(path, path + '.old')
    for path in reversed(later):  # the newest first, so that a kill in between leaves no gap
        os.replace(path, path + '.old')
    ckpt_pt = os.path.join(out_dir, 'ckpt.pt')
    if numbered(out_dir) and not os.path.exists(ckpt_pt):
        link(numbered(out_dir)[-1], ckpt_pt)


def drop_later_rows(path, start_iter):
    """Take the rows of log.csv from iteration start_iter on away: they are written anew."""
    if not os.path.exists(path):
        return
    columns, rows = read_rows(path)
    earlier = [row for row in rows if row.get('iter', '').isdecimal() and int(row['iter']) < start_iter]
    if earlier:
        write_rows(path, columns, earlier)  # also where none is dropped, as the last one may be half a row
    else:
        os.replace(path, path + '.old')


def save(out_dir, state, best, only_best, keep):
    """Write `state` as the checkpoint of its iter_num, whole or not at all, and remove all but the newest
    `keep` (0: keep all). best: its validation loss is the lowest so far; only_best: ckpt.pt names the best
    one. Returns whether it was written; if not, a warning says why, and the older ones are as they were."""
    path = os.path.join(out_dir, f"ckpt_{state['iter_num']:08d}.pt")
    try:
        with replacing(path) as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as e:
        cause = e
        if isinstance(e, RuntimeError) and isinstance(e.__context__, OSError):
            cause = e.__context__  # which torch hides behind its own
        print0(f"warning: {path} could not be written ({first_line(cause)}). the run goes on, and the older "
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
    """Let `name` be another name of the file `path`, or a copy where the file system has no hard links."""
    if os.path.exists(name) and os.path.samefile(path, name):
        return
    temporary = name + '.tmp'
    if os.path.lexists(temporary):
        os.remove(temporary)
    try:
        os.link(path, temporary)
        os.replace(temporary, name)
    except OSError:
        with replacing(name) as copy, open(path, 'rb') as file:
            shutil.copyfileobj(file, copy)
