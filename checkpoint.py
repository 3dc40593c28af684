"""
How a run folder is written and read. A checkpoint is one file of plain types: nanoGPT's six keys (model, optimizer,
model_args, iter_num, best_val_loss, config) and what an exact resume and an offline sample.py need besides.

    out_dir/ckpt_00000500.pt   the state after 500 iterations; the last few of them stay
    out_dir/ckpt.pt            the newest one, or the best one with always_save_checkpoint=False; ckpt_best.pt the best one

    model, tokenizer = checkpoint.load('out')
"""

import csv
import os
import pickle
import re
import shutil

import torch

import dataset
import huggingface
from configurator import fail
from model import GPT, GPTConfig

NUMBERED = re.compile(r'ckpt_(\d{8,})\.pt')


def numbered(out_dir):
    """The paths of out_dir's numbered checkpoints, oldest first."""
    names = os.listdir(out_dir) if os.path.isdir(out_dir) else []
    return [os.path.join(out_dir, name) for name in sorted(filter(NUMBERED.fullmatch, names), key=lambda n: (len(n), n))]


def newest(out_dir):
    """The path of the checkpoint to resume from: the newest numbered one, else a ckpt.pt as nanoGPT leaves it, else None."""
    single = os.path.join(out_dir, 'ckpt.pt')
    return (numbered(out_dir) or [single if os.path.exists(single) else None])[-1]


def starting_point(init_from, out_dir, overwrite=False, eval_only=False, resume_from=None):
    """What train.py's init_from means: (the checkpoint to start from or None, whether its run goes on, whether in another folder)."""
    resuming = init_from in ('resume', 'auto') and newest(out_dir) is not None
    path = newest(out_dir) if resuming else None
    if resume_from is not None and init_from not in ('resume', 'auto'):
        fail(f"resume_from={resume_from} goes with --init_from=resume. to start a new run from its weights: --init_from={resume_from}")
    branching = resume_from is not None and not (init_from == 'auto' and resuming)  # from another run's checkpoint into a folder of its own
    if branching:
        if resuming and not (overwrite or eval_only):
            fail(f"{out_dir} already holds a run, and resume_from begins one. go on with it: --init_from=auto; keep it: --out_dir=ANOTHER; delete it: --overwrite")
        path, resuming = newest(resume_from) if os.path.isdir(resume_from) else resume_from, True
        if path is None or not os.path.isfile(path):
            fail(f"no checkpoint at resume_from={resume_from}. name a file such as out/ckpt_00001000.pt, or a run's folder for its newest one")
        if os.path.realpath(os.path.dirname(path)) == os.path.realpath(out_dir) and not eval_only:
            fail(f"resume_from names a checkpoint in out_dir itself ({path}). go on in another folder: --out_dir=ANOTHER")
    if init_from == 'resume' and not resuming:
        fail(f"no checkpoint in {out_dir} to resume from. name the run's folder with --out_dir, or use --init_from=auto or scratch")
    if init_from not in ('scratch', 'resume', 'auto'):
        if not os.path.exists(init_from) and not huggingface.is_hub_name(init_from):
            fail(f"init_from is neither a file nor a known word ({init_from}). use scratch, resume, auto, the path of a checkpoint, or a Hugging Face "
                 "folder or name (gpt2, OWNER/NAME)")
        path = find(init_from)
        if overwrite and os.path.realpath(os.path.dirname(path)) == os.path.realpath(out_dir):
            fail(f"--overwrite would delete the checkpoint to start from ({path}). name another --out_dir")
    if not (resuming or overwrite or eval_only) and newest(out_dir):
        fail(f"{out_dir} already holds a run. go on with it: --init_from=resume; keep it: --out_dir=ANOTHER; delete it: --overwrite")
    state = read(path) if path else None
    if resuming and 'optimizer' not in state:
        fail(f"{path} holds weights only, no run to go on with. start a new one from them: --init_from={path} --out_dir=ANOTHER")
    return state, resuming, branching


def find(source, hub=True):
    """What `source` means: a file; a run folder's ckpt.pt, else its newest numbered one; a Hugging Face folder; or a name there."""
    if os.path.isfile(source) or (hub and huggingface.is_hub_name(source)):
        return source
    if not os.path.isdir(source):
        fail(f"no checkpoint at {source}. train first, or name a checkpoint, a run's folder, or a Hugging Face folder or name (gpt2, OWNER/NAME)")
    path = os.path.join(source, 'ckpt.pt')
    path = path if os.path.exists(path) else newest(source) or (source if huggingface.is_folder(source) else None)
    if path is None:
        fail(f"no checkpoint in {source}. train first, or name another folder with --out_dir or --init_from")
    return path


def save(out_dir, state, links, keep):
    """Write `state` as the checkpoint of its iter_num, whole or not at all; let `links` (of 'ckpt.pt', 'ckpt_best.pt') name it;
    keep the last `keep`. Returns False, writing nothing, if a weight is not finite."""
    if not all(torch.isfinite(p).all() for p in state['model'].values()):
        return False
    path = os.path.join(out_dir, f"ckpt_{state['iter_num']:08d}.pt")
    with open(path + '.tmp', 'wb') as f:  # a kill, at whatever instant, leaves the older files as they were
        torch.save(state, f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(path + '.tmp', path)
    for name in links:
        link(path, os.path.join(out_dir, name))
    for old in numbered(out_dir)[:-keep]:
        os.remove(old)
    return True


def link(path, name):
    """Let `name` be another name of the file `path` (it outlives the number), or a copy where the file system has no links."""
    if os.path.exists(name + '.tmp'):
        os.remove(name + '.tmp')
    try:
        os.link(path, name + '.tmp')
    except OSError:
        shutil.copyfile(path, name + '.tmp')
    os.replace(name + '.tmp', name)


def clear(out_dir):
    """Remove the checkpoints and the log of an earlier run."""
    for name in os.listdir(out_dir):
        if NUMBERED.fullmatch(name) or name in ('ckpt.pt', 'ckpt_best.pt', 'log.csv') or name.endswith('.pt.tmp'):
            os.remove(os.path.join(out_dir, name))


def read(path):
    """The checkpoint at `path` (see find), ours, nanoGPT's or Hugging Face's, as a dict on the CPU. Nothing in it is executed."""
    if not os.path.isfile(path):
        return huggingface.read(path)
    if path.endswith(('.safetensors', '.json')):
        fail(f"{path} is a part of a Hugging Face folder. name the folder: {os.path.dirname(path) or '.'}")
    try:
        state = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
    except pickle.UnpicklingError as e:
        wants = re.search(r'GLOBAL ([\w.]+)', str(e))
        fail(f"{path} holds more than tensors and plain values{f' (it wants {wants[1]})' if wants else ''}; refused, as loading it "
             "would run code. save it again with plain dicts only")
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as e:
        fail(f"{path} cannot be read ({str(e).strip().splitlines()[0][:120]}). take an older checkpoint, if there is one")
    try:
        assert isinstance(state, dict), 'it is not a dict'
        # nanoGPT saves the compiled model's names
        state['model'] = {name.removeprefix('_orig_mod.').removeprefix('module.'): p for name, p in state['model'].items()}
        state['model_args'].setdefault('bias', 'transformer.ln_f.bias' in state['model'])  # older than that flag, or than the next
        state['model_args'].setdefault('dropout', 0.0)
        check_model_args(state['model_args'], state['model'])
        state['iter_num'], state['best_val_loss'] = int(state.get('iter_num', 0)), float(state.get('best_val_loss', float('inf')))
        state['config'], state['path'] = dict(state.get('config', {})), path
    except (KeyError, TypeError, AttributeError, ValueError, AssertionError, IndexError) as e:
        fail(f"{path} is not a checkpoint of flatgpt or nanoGPT ({type(e).__name__}: {e}). take one that train.py wrote")
    return state


def check_model_args(args, weights):
    """Raise ValueError where model_args are not what the weights have: a model is built from them, however large they say."""
    if problems := GPTConfig(**args).problems():
        raise ValueError(problems[0])
    layers = len({name.split('.')[2] for name in weights if name.startswith('transformer.h.')})
    have = dict(zip(('vocab_size', 'n_embd'), weights['transformer.wte.weight'].shape), n_layer=layers)
    if 'transformer.wpe.weight' in weights:
        have['block_size'] = weights['transformer.wpe.weight'].shape[0]
    for name, value in have.items():
        if args[name] != value:
            raise ValueError(f"{name} is {args[name]}, its weights have {value}")


def model_config(state, **changes):
    """The GPTConfig of a checkpoint, with changes."""
    return GPTConfig(**{**state['model_args'], **changes})


def build(state, dropout=0.0, **changes):
    """The GPT of a checkpoint, with its weights, on the CPU. `changes`: a smaller block_size; with rotary positions, which are no
    weights, any one, and rope_theta and rope_scaling."""
    config = model_config(state, dropout=dropout, **changes)
    block_size = config.block_size
    if config.positions == 'learned':
        config.block_size = state['model_args']['block_size']
    with torch.device('meta'):  # no time for random numbers that are overwritten at once
        model = GPT(config)
    # the causal mask of nanoGPT's early days is no weight; copied, as the tensors may be a mapped file that is about to be replaced
    weights = {name: p.to(torch.float32, copy=True) for name, p in state['model'].items() if not name.endswith('.attn.bias')}
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as e:
        fail(f"the weights of {state['path']} do not fit its model_args ({' '.join(str(e).split())[:200]}). take one that train.py wrote")
    if config.tie:
        model.transformer.wte.weight = model.lm_head.weight
    if block_size < config.block_size:
        model.crop_block_size(block_size)
    return model


def tokenizer_state(state, dataset_name=None, data_dir=None):
    """What a checkpoint's tokens mean: it says so itself; of nanoGPT's, the folder of its dataset does."""
    if dataset_name is None and state.get('tokenizer'):
        return state['tokenizer']
    name = dataset_name or str(state['config'].get('dataset', ''))
    folder = os.path.join(data_dir or dataset.DATA_DIR, name)
    if name and name == os.path.basename(name) and os.path.isdir(folder):  # a name, never a path: the file may be a stranger's
        meta = dataset.read_meta(folder)
        if meta['vocab_size'] <= state['model_args']['vocab_size'] < meta['vocab_size'] + 64:
            return dataset.read_tokenizer_state(folder, meta)
        fail(f"dataset {name} has {meta['vocab_size']} tokens, the checkpoint {state['model_args']['vocab_size']}. name the one it "
             "was trained on with --dataset=NAME")
    if dataset_name:
        fail(f"no dataset {dataset_name} in {data_dir or dataset.DATA_DIR}. name the folder of the one that the checkpoint was trained on")
    if state['model_args']['vocab_size'] in (50257, 50304):  # as nanoGPT assumes
        return {'kind': 'tiktoken', 'name': 'gpt2'}
    fail(f"the checkpoint does not tell its tokenizer and data/{name or '?'} is not there. name its dataset with --dataset=NAME")


def load(path='out', dataset_name=None, data_dir=None):
    """(model, tokenizer) of a run folder (its ckpt.pt), a checkpoint file, or a Hugging Face folder or name, on the CPU, in eval mode."""
    state = read(find(path))
    return build(state).eval(), dataset.make_tokenizer(tokenizer_state(state, dataset_name, data_dir))


class Log:
    """log.csv of a run, a row per logged or evaluated iteration, and the same to wandb's `run` if there is one. A resume at
    `start` first drops the rows from there on: they are written again, once."""
    columns = ('iter', 'loss', 'train_loss', 'val_loss', 'lr', 'grad_norm', 'tokens', 'epoch', 'ms', 'tokens_per_second', 'mfu', 'seconds')
    in_wandb = {'loss': 'train/batch_loss', 'train_loss': 'train/loss', 'val_loss': 'val/loss'}  # nanoGPT's names for the latter two

    def __init__(self, out_dir, start, run=None, enabled=True):
        self.file, self.run = None, run
        if not enabled:
            return
        path, rows = os.path.join(out_dir, 'log.csv'), []
        if os.path.exists(path):
            with open(path, newline='', encoding='utf-8') as f:
                rows = [row for row in csv.DictReader(f) if row['iter'].isdigit() and int(row['iter']) < start and None not in row.values()]
        with open(path + '.tmp', 'w', newline='', encoding='utf-8') as f:
            writer = csv.DictWriter(f, self.columns, extrasaction='ignore', lineterminator='\n')
            writer.writeheader()
            writer.writerows(rows)
        os.replace(path + '.tmp', path)
        self.file = open(path, 'a', newline='', encoding='utf-8')
        self.writer = csv.DictWriter(self.file, self.columns, lineterminator='\n')

    def write(self, row):
        """`row`: {column: number}, missing and None ones stay empty; a row that says nothing but its `iter` is not written."""
        row = {name: value for name, value in row.items() if value is not None}
        if self.file and len(row) > 1:
            self.writer.writerow(row)
            self.file.flush()
        if self.run and len(row) > 1:
            self.run.log({self.in_wandb.get(name, name): value for name, value in row.items()})
