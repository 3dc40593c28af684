"""
How a run folder is written and read. A checkpoint is one file of plain types: nanoGPT's six keys (model, optimizer,
model_args, iter_num, best_val_loss, config) and what an exact resume and an offline sample.py need besides.

At every instant a run's folder holds a whole one: each is written under another name, flushed to the disk, read back and renamed.

    out_dir/ckpt_00000500.pt   the state after 500 iterations; the last few of them stay
    out_dir/ckpt.pt            the newest one, or the best one with always_save_checkpoint=False; ckpt_best.pt the best one

    model, tokenizer = checkpoint.load('out')
"""

import contextlib
import csv
import os
import pickle
import re
import shutil
import threading
import time
import warnings
import zipfile

import torch

import dataset
import huggingface
import report
from configurator import fail, warn
from model import GPT, GPTConfig

NUMBERED = re.compile(r'ckpt_(\d{8,})\.pt')
VERSION = 1  # of the keys below
KINDS = {'optimizer': dict, 'scaler': dict, 'tokenizer': dict, 'evaluation': dict, 'trained_on': dict, 'environment': dict, 'seconds': float,
         'bad_steps': int, 'wandb_run_id': str, 'version': int}  # what of a checkpoint may be missing, as in nanoGPT's


class Damaged(Exception):
    """A file that is no whole checkpoint, and why."""


class NotSaved(Exception):
    """A checkpoint that could not be written, and why; the older ones are as they were."""


def numbered(out_dir):
    """The paths of out_dir's numbered checkpoints, oldest first."""
    names = os.listdir(out_dir) if os.path.isdir(out_dir) else []
    return [os.path.join(out_dir, name) for name in sorted(filter(NUMBERED.fullmatch, names), key=lambda n: (len(n), n))]


def newest(out_dir):
    """The path of the checkpoint to resume from: the newest numbered one, else a ckpt.pt as nanoGPT leaves it, else None."""
    single = os.path.join(out_dir, 'ckpt.pt')
    return (numbered(out_dir) or [single if os.path.exists(single) else None])[-1]


def candidates(out_dir):
    """What a resume may begin with, best first: the numbered ones, newest first, then ckpt.pt and ckpt_best.pt if they are other files."""
    paths, seen = [], set()
    for path in numbered(out_dir)[::-1] + [os.path.join(out_dir, name) for name in ('ckpt.pt', 'ckpt_best.pt')]:
        if os.path.exists(path) and (inode := (os.stat(path).st_dev, os.stat(path).st_ino or path)) not in seen:
            seen.add(inode)
            paths.append(path)
    return paths


def newest_whole(out_dir, tell=print):
    """The path of the first candidate that is whole; the others are named. None left is an error, never a new beginning."""
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
    fail(f"no checkpoint in {out_dir} is whole ({'; '.join(damaged)}). bring one back from a copy, or begin anew with --init_from=scratch --overwrite")


def starting_point(procs, init_from, out_dir, overwrite=False, eval_only=False, resume_from=None):
    """What train.py's init_from means: (the checkpoint to start from or None, whether its run goes on, whether in another folder).
    The main process chooses, as a folder may look different to another for a moment; all of them read."""
    path = resuming = branching = None
    if procs.is_main:
        path, resuming, branching = choose(procs, init_from, out_dir, overwrite, eval_only, resume_from)
    path, resuming, branching = procs.share((path, resuming, branching))
    if resuming and not os.path.isfile(path):
        fail(f"{path} is not there for this process: another run is writing into that folder, or its disk is not shared by all machines. wait for "
             "its end, or name a folder that all of them see", everywhere=True)
    state = read(path, verify=not resuming) if path else None
    named = NUMBERED.fullmatch(os.path.basename(path)) if resuming and not branching else None
    if named and int(named[1]) != state['iter_num']:  # else it would be in the way of the numbers that come
        fail(f"{path} holds iteration {state['iter_num']}. rename it to ckpt_{state['iter_num']:08d}.pt, or take it out of the folder")
    if resuming and 'optimizer' not in state:
        fail(f"{path} holds weights only, no run to go on with. start a new one from them: --init_from={path} --out_dir=ANOTHER")
    return state, resuming, branching


def choose(procs, init_from, out_dir, overwrite, eval_only, resume_from):
    resuming = init_from in ('resume', 'auto') and newest(out_dir) is not None
    if resume_from is not None and init_from not in ('resume', 'auto'):
        fail(f"resume_from={resume_from} goes with --init_from=resume. to start a new run from its weights: --init_from={resume_from}")
    branching = resume_from is not None and not (init_from == 'auto' and resuming)  # from another run's checkpoint into a folder of its own
    if branching:
        if resuming and not (overwrite or eval_only):
            fail(f"{out_dir} already holds a run, and resume_from begins one. go on with it: --init_from=auto; keep it: --out_dir=ANOTHER; delete it: --overwrite")
        if not (os.path.isfile(resume_from) or newest(resume_from)):
            fail(f"no checkpoint at resume_from={resume_from}. name a file such as out/ckpt_00001000.pt, or a run's folder for its newest one")
        path = newest_whole(resume_from, procs.print) if os.path.isdir(resume_from) else resume_from
        if os.path.realpath(os.path.dirname(path)) == os.path.realpath(out_dir) and not eval_only:
            fail(f"resume_from names a checkpoint in out_dir itself ({path}). go on in another folder: --out_dir=ANOTHER")
        return path, True, True
    if resuming:
        return newest_whole(out_dir, procs.print), True, False
    if init_from == 'resume':
        fail(f"no checkpoint in {out_dir} to resume from. name the run's folder with --out_dir, or use --init_from=auto or scratch")
    path = None
    if init_from not in ('scratch', 'auto'):
        if not os.path.exists(init_from) and not huggingface.is_hub_name(init_from):
            fail(f"init_from is neither a file nor a known word ({init_from}). use scratch, resume, auto, the path of a checkpoint, or a Hugging Face "
                 "folder or name (gpt2, OWNER/NAME)")
        path = find(init_from)
        if overwrite and os.path.realpath(os.path.dirname(path)) == os.path.realpath(out_dir):
            fail(f"--overwrite would delete the checkpoint to start from ({path}). name another --out_dir")
    if not (overwrite or eval_only) and newest(out_dir):
        fail(f"{out_dir} already holds a run. go on with it: --init_from=resume; keep it: --out_dir=ANOTHER; delete it: --overwrite")
    return path, False, False


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
    keep the last `keep`. Raises NotSaved if the disk does not take it."""
    path = os.path.join(out_dir, f"ckpt_{state['iter_num']:08d}.pt")
    try:
        with open(path + '.tmp', 'wb') as f:  # a file, not a path: with a path torch forgets the system's error
            torch.save(state, f)
            f.flush()
            os.fsync(f.fileno())
        check_sums(path + '.tmp')  # what cannot be read back shall not take the place of what can
        os.replace(path + '.tmp', path)
        for name in links:
            link(path, os.path.join(out_dir, name))
        dataset.sync_folder(out_dir)  # the names, too, have to reach the disk before older files go
        for old in numbered(out_dir)[:-keep]:
            os.remove(old)
    except (OSError, RuntimeError, Damaged) as e:
        error = e.__context__ if isinstance(e, RuntimeError) else e  # torch hides the system's error behind its own
        if not isinstance(error, (OSError, Damaged)):
            raise
        if os.path.exists(path + '.tmp'):
            os.remove(path + '.tmp')
        raise NotSaved(f"{path} could not be written ({getattr(error, 'strerror', None) or error})") from e


class Writer:
    """Calls save() for one checkpoint after another: at once, or `beside` the training by a thread, for which the state has to be a copy.
    Whoever wants to know how it ended asks finish()."""

    def __init__(self, beside, failed):
        """failed(): called when a checkpoint could not be written, by the thread if there is one."""
        self.beside, self.failed, self.thread, self.error, self.longest = beside, failed, None, None, 0.0  # seconds that a thread has written at most

    def start(self, out_dir, state, links, keep):
        self.thread = threading.Thread(target=self.work, args=(out_dir, state, links, keep))  # no daemon: a process that ends waits for it
        self.thread.start() if self.beside else self.thread.run()

    def work(self, *args):
        t0 = time.monotonic()
        try:
            save(*args)
            self.longest = max(self.longest, (time.monotonic() - t0) * self.beside)
        except NotSaved as e:
            self.error = e
            warn(f"{e}. the run goes on, and tries again in a minute; the checkpoints before are as they were")
            self.failed()
        except BaseException as e:  # belongs to who waits
            self.error = e

    def finish(self):
        """Whether the last checkpoint that was begun could be written; waits for its end."""
        if self.thread is not None and self.beside:
            self.thread.join()
        error, self.thread, self.error = self.error, None, None
        if error is not None and not isinstance(error, NotSaved):
            raise error
        return error is None


def finite(weights):
    """Whether all numbers in the dict of tensors `weights` are finite."""
    return all(torch.isfinite(p).all() for p in weights.values())


def nearest_folder(out_dir):
    """out_dir, or what it will be made in."""
    folder = os.path.abspath(out_dir)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    return folder


def no_folder(out_dir):
    """A problem to report if out_dir is not a folder that can be written into, or made. Else None."""
    folder = nearest_folder(out_dir)
    if not out_dir or not os.path.isdir(folder):
        return f"out_dir is no folder and cannot become one ({out_dir!r}). name another with --out_dir"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"out_dir cannot be written into ({out_dir!r}). name another folder with --out_dir"


def too_little_space(out_dir, size, keep):
    """A problem to report if the disk has no room for checkpoints of `size` bytes: those kept, the best and one being written. Else None."""
    there = 0
    for path in candidates(out_dir):
        with contextlib.suppress(FileNotFoundError):  # another run, which lock() will tell of, may be removing it
            there += os.path.getsize(path)
    need, free = 1.05 * size * (keep + 2) + 2**20, shutil.disk_usage(nearest_folder(out_dir)).free + there
    if need > free:
        return (f"too little space on the disk of {out_dir} ({free / 1e9:.3f} GB free; {keep} checkpoints, the best and one being written take {need / 1e9:.3f}). "
                "make room, name another --out_dir" + (", or use a smaller --keep_checkpoints" if keep > 1 else ''))


def link(path, name):
    """Let `name` be another name of the file `path` (it outlives the number), or a copy where the file system has no links."""
    if os.path.exists(name + '.tmp'):
        os.remove(name + '.tmp')
    try:
        os.link(path, name + '.tmp')
    except OSError:
        shutil.copyfile(path, name + '.tmp')
    os.replace(name + '.tmp', name)


def lock(out_dir):
    """Make out_dir, and this process the only run that writes into it, as long as what is returned is kept."""
    try:
        os.makedirs(out_dir, exist_ok=True)
        return dataset.lock(out_dir, 'run')
    except (OSError, ValueError) as e:
        fail(f"out_dir cannot be written into ({out_dir!r}: {e}). name another folder with --out_dir", everywhere=True)


def clean(out_dir, start, overwrite):
    """Remove what an earlier run left in the locked out_dir: of a new run (start is None) all of it, to go on at `start` what is in the way."""
    if start is None and not overwrite and newest(out_dir):
        fail(f"another run has written into {out_dir} in the meantime. start again")
    try:
        for name in os.listdir(out_dir):
            path = os.path.join(out_dir, name)
            if re.fullmatch(r'(ckpt.*\.pt|log\.csv)\.tmp', name) or (start is None and (NUMBERED.fullmatch(name) or name in ('ckpt.pt', 'ckpt_best.pt', 'log.csv', *report.FILES))):
                os.remove(path)
            elif NUMBERED.fullmatch(name) and int(name[5:-3]) > start:  # in the way of the numbers that come
                try:
                    unpack(path)
                except Damaged:
                    os.replace(path, path + '.damaged')
                else:
                    fail(f"{path} was written by another run in the meantime. start again")
    except (OSError, ValueError) as e:
        fail(f"out_dir cannot be written into ({out_dir!r}: {e}). name another folder with --out_dir", everywhere=True)


def check_sums(path):
    """Raise Damaged unless every record of the file has the checksum that it was written with: torch.load does not look."""
    try:
        with zipfile.ZipFile(path) as records:
            wrong = records.testzip()
    except Exception as e:  # a damaged table of contents may lead zipfile anywhere
        raise Damaged(f"is damaged ({str(e).strip().splitlines()[0][:120]})") from e
    if wrong is not None:
        raise Damaged(f"is damaged (the checksum of {wrong} is wrong)")


def unpack(path, verify=True):
    """What the checkpoint file `path` holds, its checksums verified. Nothing in it is executed. Raises Damaged."""
    if not os.path.isfile(path):
        raise Damaged('is no file')
    try:
        with open(path, 'rb') as f:
            begin = f.read(4)
    except OSError as e:
        raise Damaged(f"cannot be read ({e.strerror})") from e
    if not begin:
        raise Damaged('is damaged (it is empty)')
    zipped = begin == b'PK\3\4'  # older ones of torch are not, and have no checksums
    if zipped and verify:
        check_sums(path)
    try:
        with warnings.catch_warnings(action='ignore'):  # about files that are refused below
            return torch.load(path, map_location='cpu', weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as e:
        wants = re.search(r'GLOBAL ([\w.]+)', str(e))
        if zipped or wants:
            fail(f"{path} holds more than tensors and plain values{f' (it wants {wants[1]})' if wants else ''}; refused, as loading it "
                 "would run code. save it again with plain dicts only")
        raise Damaged('is damaged (it is not even the beginning of a checkpoint)') from e
    except Exception as e:  # as a pickle, a text may be any nonsense
        why = (str(e).strip() or type(e).__name__).splitlines()[0][:120] if zipped else 'it is not even the beginning of a checkpoint'
        raise Damaged(f"is damaged ({why})") from e


def read(path, verify=True):
    """The checkpoint at `path` (see find), ours, nanoGPT's or Hugging Face's, as a dict on the CPU."""
    if not os.path.isfile(path):
        return huggingface.read(path)
    if path.endswith(('.safetensors', '.json')):
        fail(f"{path} is a part of a Hugging Face folder. name the folder: {os.path.dirname(path) or '.'}")
    try:
        state = unpack(path, verify)
    except Damaged as e:
        others = [other for other in candidates(os.path.dirname(path) or '.') if not os.path.samefile(other, path)]
        fail(f"{path} {e}. take an older checkpoint" + (f": {others[0]}" if others else ', if there is one'))
    if isinstance(state, dict) and isinstance(state.get('version'), int) and state['version'] > VERSION:
        fail(f"{path} was written by a newer flatgpt (version {state['version']}, this one reads {VERSION}). update this one")
    try:
        assert isinstance(state, dict), 'it is not a dict'
        # nanoGPT saves the compiled model's names
        state['model'] = {name.removeprefix('_orig_mod.').removeprefix('module.'): p for name, p in state['model'].items()}
        state['model_args'].setdefault('bias', 'transformer.ln_f.bias' in state['model'])  # older than that flag, or than the next
        state['model_args'].setdefault('dropout', 0.0)
        check_model_args(state['model_args'], state['model'])
        state = {name: value for name, value in state.items() if value is not None or name not in KINDS}
        for name in KINDS.keys() & state.keys():
            assert isinstance(state[name], KINDS[name]), f'{name} is {state[name]!r:.60}'
        if 'tokenizer' in state:
            dataset.check_tokenizer_state(state['tokenizer'])
        state['iter_num'], state['best_val_loss'] = int(state.get('iter_num', 0)), float(state.get('best_val_loss', float('inf')))
        assert 0 <= state['iter_num'] < 10**12, f"iter_num is {state['iter_num']}"
        state['config'], state['path'] = dict(state.get('config', {})), path
    except Exception as e:  # a file may say anything
        fail(f"{path} is not a checkpoint of flatgpt or nanoGPT ({type(e).__name__}: {e}). take one that train.py wrote")
    return state


def check_model_args(args, weights):
    """Raise ValueError where model_args are not what the weights have: a model is built from them, however large they say."""
    if problems := GPTConfig(**args).problems():
        raise ValueError(problems[0])
    for name, p in weights.items():
        if not (torch.is_tensor(p) and p.is_floating_point() and p.layout is torch.strided and p.device.type == 'cpu') or \
                p.numel() * p.element_size() > p.untyped_storage().nbytes():  # a view may say that it is larger than any memory
            raise ValueError(f'{name} is no plain tensor of floats')
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
    if not finite(weights):
        fail(f"the weights of {state['path']} are not finite. take an older checkpoint")
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
    columns = ('iter', 'progress', 'loss', 'train_loss', 'val_loss', 'perplexity', 'bpb', 'hellaswag', 'core', 'lr', 'grad_norm', 'tokens', 'tokens_total', 'epoch', 'ms',
               'tokens_per_second', 'mfu', 'data', 'memory_gb', 'seconds', 'eval_seconds', 'save_seconds', 'sample_seconds')  # docs/reading_logs.md explains them
    in_wandb = {'loss': 'train/batch_loss', 'train_loss': 'train/loss', 'val_loss': 'val/loss', 'perplexity': 'val/perplexity', 'bpb': 'val/bpb', 'hellaswag': 'val/hellaswag', 'core': 'val/core'}  # the losses' names are nanoGPT's

    def __init__(self, out_dir, start, run=None, enabled=True):
        self.file, self.run, self.complains = None, run, True
        if not enabled:
            return
        if run:
            run.define_metric('*', step_metric='iter')
            for name in ('train_loss', 'val_loss', 'perplexity', 'bpb', 'hellaswag', 'core'):  # in its tables the best, not the last
                run.define_metric(self.in_wandb[name], step_metric='iter', summary='max' if name in ('hellaswag', 'core') else 'min')
        path, rows = os.path.join(out_dir, 'log.csv'), []
        try:
            if os.path.exists(path):
                with open(path, newline='', encoding='utf-8') as f:
                    rows = [row for row in csv.DictReader(f) if row['iter'].isdecimal() and int(row['iter']) < start and None not in row.values()]
            with open(path + '.tmp', 'w', newline='', encoding='utf-8') as f:
                writer = csv.DictWriter(f, self.columns, extrasaction='ignore', lineterminator='\n')
                writer.writeheader()
                writer.writerows(rows)
            os.replace(path + '.tmp', path)
            self.file = open(path, 'a', newline='', encoding='utf-8')
        except OSError as e:
            fail(f"{path} cannot be written ({e.strerror}). make room, or name another --out_dir")
        except (ValueError, KeyError, csv.Error) as e:
            fail(f"{path} is not the log of a run ({type(e).__name__}: {e}). move it away, and a new one begins")
        self.writer = csv.DictWriter(self.file, self.columns, lineterminator='\n')

    def write(self, row):
        """`row`: {column: number}, missing and None ones stay empty; a row that says nothing but its `iter` is not written."""
        row = {name: value for name, value in row.items() if value is not None}
        if self.file and len(row) > 1:
            try:
                self.writer.writerow(row)
                self.file.flush()
            except OSError as e:  # a full disk must not end a run; what the file did not take waits for the next row
                if self.complains:
                    warn(f"log.csv could not be written ({e.strerror}), the run goes on")
                self.complains = False
        if self.run and len(row) > 1:
            self.run.log({self.in_wandb.get(name, name): value for name, value in row.items()})

    def end(self, **summary):
        """What wandb shows of the run in its tables."""
        if self.run:
            self.run.summary.update(summary)
