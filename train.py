"""
Train a GPT.

This script runs from top to bottom: settings; processes and device; resume, or start from weights; data;
model and optimizer; helper functions; the printed plan; the run's folder; the training loop.

    $ python train.py config/quickstart.py                                    # a laptop, four minutes
    $ python train.py config/train_gpt2.py --batch_size=32                    # one GPU
    $ torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py  # eight; more: docs/cluster.md
"""

from configurator import (
    InputError, check_choice, check_ranges, configure, kinds_of, launched_by_torchrun, print0, process_ranks)


# -----------------------------------------------------------------------------
# The defaults train GPT-2 (124M) on OpenWebText. A value of None is derived from other settings or disables
# the feature, as noted.
# files
out_dir = 'out'  # checkpoints, log.csv, run.json, report.md
# 'scratch'; 'resume': continue the run in out_dir; or the weights to start from: a run's folder, a
# checkpoint, a Hugging Face folder or name ('gpt2')
init_from = 'scratch'
auto_resume = False  # if out_dir contains a run, continue it, whatever init_from says: for restarts
resume_step = 0  # the checkpoint to resume from, by its iteration; 0: the newest
overwrite = False  # if out_dir contains a run, delete it
always_save_checkpoint = True  # False: at evaluations, save only if the validation loss has improved
# iterations between checkpoints. None: at each evaluation; 0: only at the end. Use a multiple of
# eval_interval, so that the best checkpoint is saved, too
save_interval: int = None
keep_checkpoints = 2  # the newest ones, in addition to the best; 0: all
# data
dataset = 'openwebtext'  # data/<dataset>, made by prepare.py
data_dir: str = None  # None: data/ next to this file
batch_size = 12  # sequences per micro-batch and process
block_size = 1024  # context length, in tokens
gradient_accumulation_steps = 5 * 8  # micro-batches per iteration, over all processes
total_batch_size: int = None  # tokens per iteration; if set, it determines gradient_accumulation_steps
document_mask = False  # keep attention inside documents; always on for conversations
overfit_batch = False  # train on the first batch only; if its loss does not approach 0, something is broken
seed = 1337  # of the initial weights, the order of the data, dropout
# model
arch = 'gpt2'  # 'gpt2', 'llama', 'modern': see model.py
n_layer = 12
n_head = 12
n_embd = 768
n_kv_head: int = None  # key/value heads (grouped-query attention). None: n_head
# hidden size of the MLP. None: 4 * n_embd; for swiglu 8/3 * n_embd, rounded up to a multiple of 64
mlp_width: int = None
dropout = 0.0  # 0 for pretraining; for small data and finetuning try 0.1 or more
bias = False  # in Linear and LayerNorm
# optimizer
learning_rate = 6e-4  # peak learning rate; the next three override it for some parameter groups
matrix_lr: float = None  # matrices inside the blocks. None with muon: 0.02
embedding_lr: float = None  # embeddings, including a tied head
head_lr: float = None  # an untied head
matrix_optimizer = 'adamw'  # or 'muon': for the matrices inside the blocks
momentum = 0.95  # of muon; lower for short runs with small batches
weight_decay = 1e-1  # on matrices and embeddings
matrix_weight_decay: float = None  # on the matrices inside the blocks. None: weight_decay
beta1 = 0.9
beta2 = 0.95
adam_eps = 1e-8
grad_clip = 1.0  # maximum norm of the gradient; 0: no clipping
# schedule
max_iters = 600000  # number of updates; fewer if one of the next two is reached earlier
max_tokens: float = None
max_epochs: float = None
# replaces the three above: train for this long. The first 25 updates are timed to compute how many fit
train_minutes: float = None
lr_schedule = 'cosine'  # 'linear', 'constant'; 'wsd': constant, then linear at the end
decay_fraction = 0.5  # wsd: the share of lr_decay_iters over which the learning rate falls
decay_lr = True  # False: learning_rate throughout, without warm-up
warmup_iters = 2000
lr_decay_iters: int = None  # iteration at which min_lr is reached. None: the last one
min_lr: float = None  # None: 0 for wsd, else learning_rate / 10
# evaluation and samples; intervals are in iterations
eval_interval = 2000  # 0: only at the end
eval_iters = 200  # batches of each split, always the same ones; 0: all of val, and as many of train
eval_only = False  # evaluate once and exit
tasks = ''  # benchmarks: 'hellaswag,core'
tasks_interval = 0  # 0: only at the end
max_per_task = 0  # examples of each task; 0: all
sample_interval = 0  # 0: never
sample_growth = 1.0  # each gap between samples is this factor times the one before
# a file with one prompt per line; a repeated line gives another sample. None: three short prompts
sample_prompts: str = None
sample_tokens = 100
temperature = 0.8  # 0: always the most likely token
top_k = 200
top_p = 1.0
# logging
log_interval = 1  # iterations between lines on the console and in log.csv; each line waits for the device
wandb_log = False
wandb_project = 'owt'
wandb_run_name = 'gpt2'
# system
device = 'auto'  # 'cpu', 'cuda', 'cuda:1', 'mps'
dtype = 'auto'  # 'float32', 'bfloat16', 'float16' (with a GradScaler)
compile: bool | str = 'auto'  # torch.compile; auto: on GPUs, if it works there
backend = 'auto'  # of torch.distributed: 'nccl', 'gloo'
ddp_timeout = 600  # seconds that a process waits for the others
shard = 1  # processes that share one copy of the model. 1: DDP; 0: all of them (FSDP); 8: hybrid
activation_checkpointing = False  # recompute activations in backward: less memory, a third more compute
max_minutes: float = None  # save and stop after this time, even if the schedule is not finished
# -----------------------------------------------------------------------------
config, given = configure(globals())  # two dicts: all settings; those that a config file or a flag has set

# imported only now, so that --help and mistakes in flags do not wait for torch
import functools
import gc
import itertools
import math
import os
import random
import signal
import sys
import time
import traceback
import warnings
from contextlib import nullcontext, suppress

# OpenMP's threads spin while they wait for each other. With fewer spins, training next to another busy
# program takes twice as long instead of up to 40 times, and a tenth longer if it runs alone (dev/LOG.md)
os.environ.setdefault('GOMP_SPINCOUNT', '3000')

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from flatgpt import checkpoint
from flatgpt.dataset import MICRO_BATCH, SAMPLES, UPDATE, Dataset, hash_seed
from flatgpt.evaluation import text_loss
from flatgpt.files import (
    append_row, first_line, format_count, format_duration, lock_folder, read_json, run_flags, script_path,
    write_json)
from flatgpt.processes import (
    Stopwatch, all_finite, all_reduce_any, autocast, broadcast, check_same, choose_compile, choose_device,
    choose_dtype, clip_grad_norm, device_name, environment, full_state_dict, init_processes, loss_chunk_size,
    mean_over_processes, peak_flops_of, peak_memory, shard_model, to_device, warm_up)
from model import GPT, GPTConfig
from optim import create_optimizer

# -----------------------------------------------------------------------------
# processes and device
start_time = time.perf_counter()  # unlike time.time(), it is never set back
ddp = launched_by_torchrun()
ddp_rank, ddp_local_rank, ddp_world_size = process_ranks()
master_process = ddp_rank == 0  # prints, logs and saves
used_device = choose_device(device, ddp_local_rank)  # 'cpu', 'cuda:0', 'mps'
device_type = used_device.partition(':')[0]
if ddp:
    init_processes(backend, used_device, ddp_timeout)

# -----------------------------------------------------------------------------
# Where to start. On a resume, settings given at the start are kept unless they are given again; settings that
# were never given use this file's current defaults. The architecture and block_size are the checkpoint's
is_restart = int(os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')) > 0  # torchrun repeats the same command
has_run = broadcast(checkpoint.exists(out_dir))
resuming = init_from == 'resume' or (auto_resume and has_run)
deleting = overwrite and not resuming and not is_restart
if has_run and not (resuming or deleting or eval_only):
    raise InputError(f"{out_dir} already contains a run. To continue it, use --init_from=resume, or "
                     "--auto_resume=True if torchrun restarts this command; to keep it, --out_dir=ANOTHER; "
                     "to delete it, --overwrite=True.")
ckpt = None
lock = None
if resuming:
    if has_run and master_process and not eval_only:
        lock = lock_folder(out_dir)  # before reading, as another run may be writing
    ckpt = checkpoint.load_for_resume(out_dir, 0 if is_restart else resume_step)
elif init_from != 'scratch':
    ckpt = checkpoint.read(checkpoint.find(init_from), strict=False)
if ckpt:
    old_config = config
    config, given = checkpoint.inherit(config, given, ckpt, resuming, kinds_of(globals(), config))
    for name in config:
        # assign only what has changed: a setting that you have added may have the name of a variable above
        if config[name] != old_config[name]:
            globals()[name] = config[name]
check_ranges(config)  # configure() has checked what was given, not the defaults and what is inherited
if decay_lr and min_lr is not None and min_lr > learning_rate:
    raise InputError(f"min_lr is out of range: {min_lr}. Use at most learning_rate, {learning_rate:g}.")
check_choice(config, 'lr_schedule', ['cosine', 'linear', 'constant', 'wsd'])
check_choice(config, 'matrix_optimizer', ['adamw', 'muon'])
check_same({name: config[name] for name in config if name not in ('device', 'data_dir', 'wandb_run_name')})

# -----------------------------------------------------------------------------
# data, and values that follow from the settings
data = Dataset(dataset, data_dir, block_size, seed, document_mask)
check_same(data.fingerprint)
compute_dtype = choose_dtype(dtype, used_device)  # of matrix products
use_compile = choose_compile(compile, used_device) and not eval_only  # for one evaluation it does not pay
shard_size = shard or ddp_world_size  # processes that share one copy of the model
if ddp_world_size % shard_size:
    raise InputError(f"shard must divide the number of processes: {shard} and {ddp_world_size}. Use 0 for "
                     "all of them.")
micro_batches = gradient_accumulation_steps  # per iteration, over all processes
if total_batch_size:
    micro_batches = total_batch_size / (batch_size * block_size)
if micro_batches % ddp_world_size:
    raise InputError(f"an iteration of {micro_batches:g} micro-batches of {batch_size} x {block_size} tokens "
                     f"cannot be divided among {ddp_world_size} processes. Change batch_size, "
                     "total_batch_size or gradient_accumulation_steps.")
grad_accum_steps = int(micro_batches) // ddp_world_size  # micro-batches of this process
samples_per_iter = batch_size * grad_accum_steps * ddp_world_size
tokens_per_iter = samples_per_iter * block_size  # at the start; the batch may grow
tokens_per_epoch = data.train.tokens_per_epoch(block_size)
n_eval_sequences = eval_iters * batch_size or data.n_eval_sequences(block_size)
start_iter = ckpt['iter_num'] if resuming else 0
# training samples that all processes have read before the current iteration. Which samples an iteration
# reads follows from this number, so the batch may grow during a run
n_samples = start_iter * samples_per_iter
if resuming and ckpt['samples'] is not None:
    n_samples = ckpt['samples']
n_iters = max_iters  # number of updates
if max_tokens:
    n_iters = min(n_iters, math.ceil(max_tokens / tokens_per_iter))
if max_epochs:
    n_iters = min(n_iters, math.ceil(max_epochs * tokens_per_epoch / tokens_per_iter))
decay_iters = lr_decay_iters
if train_minutes:
    n_iters = math.inf  # until the loop has measured the pace
    if resuming and ckpt['n_iters'] and ckpt['config'].get('train_minutes') == train_minutes:
        n_iters = ckpt['n_iters']  # measured before
    decay_iters = None  # the learning rate falls until the end, lr_decay_iters is ignored
final_lr = min_lr
if min_lr is None:
    final_lr = 0.0 if lr_schedule == 'wsd' else learning_rate / 10
vocab_size = data.vocab_size
if ckpt:  # the same tokenizer; on a resume also the same data and tokens per iteration
    vocab_size = checkpoint.check_data(ckpt, data, tokens_per_iter, resuming and not eval_only)
loaded_tasks = {}  # {name: [Task, ...]}
if tasks:
    from flatgpt.benchmarks import evaluate_tasks, load_tasks
    loaded_tasks = load_tasks(tasks, max_per_task, data_dir, data.tokenizer)
prompts = []
if sample_interval:
    from flatgpt.sampling import Sampler, generate_text, next_sample_step, prompts_for_samples
    prompts = prompts_for_samples(sample_prompts, data.tokenizer)


def samples_of_iter():
    """Return the number of training samples of the current iteration, over all processes."""
    return batch_size * grad_accum_steps * ddp_world_size


def sample_offset(micro_step):
    """Return the number of samples of an iteration before those of a micro-batch of this process."""
    return (micro_step * ddp_world_size + ddp_rank) * batch_size


@functools.lru_cache(maxsize=2)  # each micro-batch asks for it
def count_targets(first, n):
    """Return the number of targets that are not masked in the `n` training samples from `first` on."""
    return data.train.count_targets(seed, range(first, first + n), block_size)


def get_batch(it, micro_step):
    """
    Return x, y (batch_size, block_size), document ids or None, and the number to divide the loss by.

    Without a loss mask that number is grad_accum_steps, as in nanoGPT. With one, as in conversations, y is -1
    where no loss is counted, and micro-batches have different numbers of targets. The model returns the mean
    over the targets of a micro-batch; the divisor weights it so that the gradient, summed over micro-batches
    and averaged over processes, is that of the mean over all targets of the iteration.
    """
    first_of_iter = 0 if overfit_batch else n_samples
    first = first_of_iter + sample_offset(micro_step)
    x, y, doc_ids = data.train.batch(seed, range(first, first + batch_size), block_size)
    divisor = grad_accum_steps
    if data.train.masked:
        n_targets = max(1, (y >= 0).sum())  # of this micro-batch
        divisor = count_targets(first_of_iter, samples_of_iter()) / (n_targets * ddp_world_size)
    if doc_ids is not None:
        doc_ids = to_device(doc_ids, used_device)
    return to_device(x, used_device), to_device(y, used_device), doc_ids, divisor


# -----------------------------------------------------------------------------
# model and optimizer


def seed_everything(number):
    """Seed the generators of Python, numpy and torch, for what this project draws and for what you add."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


seed_everything(seed)
torch.set_float32_matmul_precision('highest' if compute_dtype == 'float32' else 'high')  # high: TF32
if ckpt:
    model = checkpoint.build_model(ckpt, block_size, dropout, vocab_size)
else:
    try:
        model_config = GPTConfig(vocab_size=vocab_size, block_size=block_size, arch=arch, n_layer=n_layer,
                                 n_head=n_head, n_kv_head=n_kv_head, n_embd=n_embd, mlp_width=mlp_width,
                                 dropout=dropout, bias=bias)
    except ValueError as e:  # model.py works alone, and has no InputError
        raise InputError(e)
    model = GPT(model_config)
if matrix_optimizer == 'muon' and model.config.fused_qkv:
    raise InputError(f"muon needs separate matrices for query, key and value, which arch={arch} does not "
                     "have. Use --arch=llama or modern, or --matrix_optimizer=adamw.")
model.activation_checkpointing = activation_checkpointing
model.loss_chunk_size = loss_chunk_size(used_device, batch_size * block_size, model.config.vocab_size,
                                        use_compile)
n_params = model.get_num_params(non_embedding=False)
if shard_size > 1:
    shard_model(model, shard_size, compute_dtype, used_device)  # replaces parameters: before the optimizer
model.to(used_device)
optimizer = create_optimizer(
    model, learning_rate=learning_rate, weight_decay=weight_decay, betas=(beta1, beta2), eps=adam_eps,
    matrix_optimizer=matrix_optimizer, matrix_lr=matrix_lr, embedding_lr=embedding_lr, head_lr=head_lr,
    matrix_weight_decay=matrix_weight_decay, momentum=momentum,
    dtype='bfloat16' if compute_dtype == 'bfloat16' else 'float32')
scaler = torch.amp.GradScaler(device_type, enabled=compute_dtype == 'float16')
if resuming:
    # the moments only, with what the optimizer counts: learning rates, betas and weight decay are this run's
    n_without_moments = checkpoint.load_optimizer(optimizer, ckpt)
    if n_without_moments and start_iter > 0:
        print0(f"note: {n_without_moments} parameters start without moments: the checkpoint has none for "
               f"{type(optimizer).__name__}")
    if scaler.is_enabled() and ckpt['scaler']:
        scaler.load_state_dict(ckpt['scaler'])
ctx = autocast(used_device, compute_dtype)
if use_compile and (shard_size > 1 or device_type == 'cpu'):
    # FSDP gathers a block before it computes; on a CPU, compiling the model as a whole takes minutes
    for block in model.transformer.h:
        block.compile()
elif use_compile:
    # CUDA graphs for models so small that launching kernels takes longer than running them; not with
    # accumulation (https://github.com/pytorch/pytorch/issues/169545)
    graphs = not ddp and grad_accum_steps == 1 and not activation_checkpointing and n_params < 50e6
    model.compile(mode='reduce-overhead' if graphs else None)


def wrap_ddp():
    """Return `model` wrapped in DDP for training, or itself. Evaluation and checkpoints use `model`."""
    if not ddp or shard_size > 1:
        return model
    warnings.filterwarnings('ignore', message='`broadcast_buffers` is deprecated')
    return DDP(model, device_ids=[ddp_local_rank] if device_type == 'cuda' else None, broadcast_buffers=False,
               gradient_as_bucket_view=True)


ddp_model = wrap_ddp()
if (use_compile or ddp or device_type == 'cuda') and not eval_only:
    # Run one step and drop its gradients. After the first backward pass DDP reorders its buckets, and thereby
    # the order in which it sums gradients. From then on it is fixed, so that a resumed run sums alike
    with_doc_ids = document_mask or data.train.masked
    optional = use_compile and compile == 'auto'  # if the compiler fails, train without it
    if not warm_up(ddp_model, batch_size, block_size, with_doc_ids, ctx, used_device, optional):
        del ddp_model  # the failed step may have left it in an inconsistent state
        gc.collect()
        use_compile = False
        model.loss_chunk_size = loss_chunk_size(used_device, batch_size * block_size, model.config.vocab_size,
                                                use_compile)
        ddp_model = wrap_ddp()
        warm_up(ddp_model, batch_size, block_size, with_doc_ids, ctx, used_device, optional=False)

# -----------------------------------------------------------------------------
# functions that the loop calls. They read variables of the run, such as best_val_loss and record, which are
# assigned further down


def get_lr(it):
    if not decay_lr:
        return learning_rate
    # 1) linear warm-up
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    # 2) constant until the decay starts
    if lr_schedule == 'constant' or n_iters == math.inf:
        return learning_rate
    decay_end = n_iters if decay_iters is None else decay_iters
    decay_start = warmup_iters
    if lr_schedule == 'wsd':
        decay_start = max(warmup_iters, round(decay_end * (1 - decay_fraction)))
    if it < decay_start:
        return learning_rate
    # 3) constant after its end
    if it >= decay_end:
        return final_lr
    # 4) in between, from 1 down to 0
    coeff = 1 - (it - decay_start) / (decay_end - decay_start)
    if lr_schedule == 'cosine':
        coeff = 0.5 * (1 - math.cos(math.pi * coeff))
    return final_lr + coeff * (learning_rate - final_lr)


def estimate_loss():
    """
    Return the loss and the bits per byte of each split, {'train_loss': 3.1, ...}; None if interrupted.

    The same sequences, spread evenly over the split, are evaluated each time.
    """
    metrics = {}
    model.eval()
    for split, tokens in data.splits.items():
        result = text_loss(model, tokens, n_eval_sequences, batch_size, ctx, should_stop)
        if result is None:
            metrics = None
            break
        metrics[f'{split}_loss'] = result['loss']
        metrics[f'{split}_bpb'] = result['bpb']
        record[f'{split}_targets'] = result['tokens']  # the number of tokens that the loss is the mean of
    model.train()
    return metrics


def generate_samples(it):
    """Return the texts that the model writes after each prompt. With FSDP, all processes take part."""
    text = f'samples after {it} iterations'
    if it < n_iters:
        next_step = next_sample_step(it + 1, sample_interval, sample_growth)
        text += f', the next after {min(next_step, n_iters)}'
    text += '\n'
    model.eval()
    # blocks that are compiled one by one would be compiled for each length
    eager = torch.compiler.set_stance('force_eager') if use_compile else nullcontext()
    with ctx, eager:
        sampler = Sampler(model, 1, block_size, temperature, top_k, top_p, data.tokenizer.n_vocab)
        for i, prompt in enumerate(prompts):
            if should_stop():
                break
            sample = generate_text(model, data.tokenizer, prompt, sample_tokens,
                                   seed=hash_seed(seed, SAMPLES, it, i), sampler=sampler)
            text += f'---\n{sample}\n'
    model.train()
    return text


def report_failure(job):
    """
    Print the traceback of a job that training can do without, and continue.

    With several processes, raise it again unless the job fails in all of them: others may be waiting.
    """
    error = sys.exception()
    if eval_only or (ddp and not isinstance(error, FloatingPointError)):
        raise error
    model.train()
    print0(f"note: {job} failed, training continues\n{traceback.format_exc()}")


def log(it, metrics):
    """Write a row of log.csv and of Weights & Biases. metrics: {column: number or 0-dim tensor}."""
    global wandb_has_failed
    tokens = n_samples * block_size
    row = {'iter': it, 'tokens': tokens, 'tokens_total': tokens_before + tokens, 'seconds': stopwatch.seconds,
           'wall_seconds': wall_seconds(), **metrics}
    # in all processes, as they take part in reading a tensor that FSDP has sharded
    for name, value in row.items():
        if isinstance(value, torch.Tensor):
            row[name] = value.item()
    if not master_process or eval_only:
        return
    append_row(os.path.join(out_dir, 'log.csv'), row)
    if wandb_run is not None and it >= wandb_run.starting_step:  # a resumed one has the earlier rows
        names = {'loss': 'iter/loss', 'train_loss': 'train/loss', 'val_loss': 'val/loss'}
        values = {names.get(name, name): value for name, value in row.items() if value is not None}
        try:
            wandb_run.log(values, step=it)
        except Exception as e:  # such as the network
            if not wandb_has_failed:
                print0(f"note: Weights & Biases failed, training continues: {first_line(e)}")
            wandb_has_failed = True


def wall_seconds():
    """Return the time since the run was started, without the time between a stop and a resume."""
    return wall_seconds_before + time.perf_counter() - start_time


def run_state(it):
    """Return what a checkpoint contains: nanoGPT's six keys, and what an exact resume and an offline
    sample.py need. Numbers, texts, lists, dicts and tensors can be read again."""
    return checkpoint.plain({
        'model': model.state_dict(keep_vars=True),  # keep_vars: a tied matrix is recognized, and saved once
        'optimizer': optimizer.state_dict(),
        'optimizer_class': type(optimizer).__name__,
        'model_args': model.config.model_args(),
        'iter_num': it,
        'best_val_loss': best_val_loss,
        'config': config,
        'given': given,
        'n_iters': n_iters if train_minutes and n_iters != math.inf else None,
        'scaler': scaler.state_dict(),
        'tokenizer': data.tokenizer_state,
        'data': data.fingerprint,
        'tokens_per_iter': tokens_per_iter,
        'samples': n_samples,
        'tokens': tokens_before + n_samples * block_size,
        'train_seconds': stopwatch.seconds,
        'wall_seconds': wall_seconds(),
        'best_iter': best_iter,
        'evaluation': evaluation,
        'commit': record['commit'],
        'starts': record['starts'],
        'wandb_run_id': wandb_run_id,
    })


def save(it, is_best):
    """Write a checkpoint, and return whether it was written."""
    state = full_state_dict(run_state(it))  # gathers what FSDP has sharded, so all processes take part
    # complete or not at all; a full disk is a warning, and the older checkpoints stay
    failed = master_process and not checkpoint.save(
        out_dir, state, best=is_best, only_best=not always_save_checkpoint, keep=keep_checkpoints)
    return not all_reduce_any(failed)


stop_signal = 0


def request_stop(number, frame):
    global stop_signal
    if stop_signal and number == signal.SIGINT and not ddp:
        raise KeyboardInterrupt  # the second Ctrl-C stops without saving; torchrun sends two for one
    stop_signal = number
    if master_process:
        message = f"{signal.Signals(number).name}: saving and stopping"
        if not ddp:
            message += ". Ctrl-C stops at once, without saving"
        with suppress(OSError):  # the terminal may be closed
            os.write(1, f'{message}\n'.encode())  # not print(), which must not interrupt another print()


for name in ['SIGTERM', 'SIGINT', 'SIGUSR1', 'SIGHUP']:
    number = getattr(signal, name, None)  # Windows does not have the last two
    if number is not None and signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
        signal.signal(number, request_stop)


def should_stop():
    """Return whether any process has got a signal, or max_minutes are over. All processes call it."""
    is_over = max_minutes is not None and time.perf_counter() - start_time > 60 * max_minutes
    return all_reduce_any(stop_signal or is_over)


def print_budget():
    budget = n_iters * tokens_per_iter
    print0(f"budget: {n_iters:,} iterations = {format_count(budget)} tokens = "
           f"{budget / tokens_per_epoch:.2f} epochs = {budget / n_params:.1f} tokens per parameter")


# -----------------------------------------------------------------------------
# the plan
print0(f"overrides: {', '.join(f'{name}={config[name]}' for name in given) or 'none'}")
validation = data.val.summary(block_size) if data.val else 'none'
print0(f"dataset: {data.name}, {data.train.summary(block_size)}, {tokens_per_epoch / tokens_per_iter:,.1f} "
       f"iterations per epoch; validation: {validation}")
print0(f"model: {arch}, n_layer {n_layer}, n_head {n_head}, n_embd {n_embd}, block_size {block_size}, "
       f"vocab_size {model.config.vocab_size}: {n_params:,} parameters, "
       f"{model.flops_per_token() / 1e6:,.1f} MFLOPs per token")
print0(f"batch: {tokens_per_iter:,} tokens per iteration = {batch_size} sequences x {block_size} tokens "
       f"x {grad_accum_steps} micro-batches x {ddp_world_size} processes")
if n_iters == math.inf:
    print0(f"budget: {train_minutes:g} minutes of training; the pace sets the number of iterations")
else:
    print_budget()
schedule = f"learning_rate {learning_rate:g}"
for name in ['matrix_lr', 'embedding_lr', 'head_lr']:
    if config.get(name) is not None:
        schedule += f", {name} {config[name]:g}"
if decay_lr:
    schedule += f", warm-up {warmup_iters:,} iterations"
if decay_lr and lr_schedule != 'constant':
    decay_end = f"iteration {decay_iters:,}" if decay_iters else "the end"
    schedule += f", {lr_schedule} to {final_lr:g} at {decay_end}"
print0(f"schedule: {schedule}")
if decay_lr and warmup_iters >= n_iters:
    print0(f"note: the run ends before its warm-up, at iteration {n_iters:,}")
optimizer_name = 'fused AdamW' if matrix_optimizer == 'adamw' else 'Muon and fused AdamW'
print0(f"system: {device_name(used_device)} ({used_device}), {compute_dtype}, compile {use_compile}, "
       f"{optimizer_name}, torch {torch.__version__}")
print0(f"expected initial loss (uniform guess): ln({model.config.vocab_size}) = "
       f"{math.log(model.config.vocab_size):.2f}")

# -----------------------------------------------------------------------------
# the run's folder: created last, so that a failed start leaves it untouched
wall_seconds_before = ckpt['wall_seconds'] if resuming else 0.0
stopwatch = Stopwatch(used_device, ckpt['train_seconds'] if resuming else 0.0)
tokens_before = ckpt['tokens'] if ckpt else 0  # tokens the weights were trained on before this run
if resuming:  # the checkpoint's number includes the earlier iterations of this run
    tokens_before = max(0, tokens_before - n_samples * block_size)
record = {
    **environment(used_device), 'dtype': compute_dtype, 'compile': use_compile, 'config': config,
    'given': given, 'dataset': data.fingerprint,
    'tokenizer': data.tokenizer_state.get('name', data.tokenizer_state['kind']), 'n_params': n_params,
    'flops_per_token': model.flops_per_token(), 'tokens_per_iter': tokens_per_iter, 'from_iter': start_iter}
# the text of the validation split, whatever the tokenizer; None if the dataset does not say
val_entry = data.val.entry if data.val else {}
record['val_bytes'] = val_entry.get('bytes')
record['val_documents'] = val_entry.get('documents')
starts = []  # of this run; the first one names the weights that a finetuning started from
if resuming:
    starts = read_json(os.path.join(out_dir, 'run.json')).get('starts') or ckpt['starts']
record['starts'] = [*starts, {
    'time': time.strftime('%Y-%m-%d %H:%M:%S %z'), 'command': record['command'], 'commit': record['commit'],
    'init_from': 'resume' if resuming else init_from, 'from_iter': start_iter}]
best_val_loss = math.inf
best_iter = None
evaluation = {'sequences': n_eval_sequences, 'document_mask': data.train.document_mask}
wandb_run = None
wandb_run_id = None
wandb_has_failed = False
checkpoint.check_readable(run_state(start_iter))
if master_process and not eval_only and lock is None:
    lock = lock_folder(out_dir)  # held as long as this process exists
    if checkpoint.exists(out_dir) and not deleting:
        raise InputError(f"another run has written into {out_dir} in the meantime. Start again.")
if wandb_log and master_process and not eval_only:
    if resuming and not resume_step:  # Weights & Biases cannot go back: from an earlier step, a new run
        wandb_run_id = ckpt['wandb_run_id']
    try:
        from wandb import init  # ImportError also if there is only a folder called wandb
        wandb_run = init(project=wandb_project, name=wandb_run_name, config=config, id=wandb_run_id,
                         resume='allow')
        wandb_run.define_metric('iter')
        wandb_run.define_metric('*', step_metric='iter')
    except Exception as e:  # not installed, no login, no network
        raise InputError(f"Weights & Biases does not start: {first_line(e)}. Use pip install wandb, wandb "
                         "login, WANDB_MODE=offline or --wandb_log=False.")
    wandb_run_id = wandb_run.id
if master_process and not eval_only:
    checkpoint.prepare_folder(out_dir, start_iter, deleting, ckpt['best_iter'] if resuming else None)
if resuming:
    best_val_loss, best_iter = checkpoint.best_so_far(ckpt, evaluation, out_dir)
ckpt = None  # free its memory
samples = ''
start_seconds = stopwatch.seconds  # of training, before this process
start_samples = n_samples


def write_record(it, outcome=None):
    """Write run.json and report.md."""
    record.update(outcome=outcome, iterations=it, tokens=n_samples * block_size, max_iters=n_iters,
                  best_val_loss=best_val_loss, best_iter=best_iter, train_seconds=stopwatch.seconds,
                  lr=get_lr(max(0, it - 1)))  # of the last update
    if it > start_iter:
        seconds = max(1e-9, stopwatch.seconds - start_seconds)
        record['tokens_per_second'] = (n_samples - start_samples) * block_size / seconds
    write_json(os.path.join(out_dir, 'run.json'), record)
    from plot import write_report
    write_report(out_dir, samples, picture=outcome is not None)


# -----------------------------------------------------------------------------
# the loop: n_iters updates. The last pass makes no update; it evaluates and saves the final weights
is_saved = True  # False: the newest checkpoint could not be written
outcome = 'done'
loss_is_finite = True  # the loss that was logged or evaluated last
loss_sum = torch.zeros((), device=used_device)  # of the last iteration
data_wait = 0.0  # seconds in get_batch
logged_iter = start_iter
logged_samples = n_samples
logged_seconds = stopwatch.seconds
# for train_minutes: updates 6 to 25 are timed, as the first ones are slower
timing_start = start_iter + 5
timing_end = timing_start + 20
timing_start_seconds = 0.0
if master_process and not eval_only:
    write_record(start_iter)
for it in itertools.count(start_iter):
    is_last = it >= n_iters
    is_stopping = should_stop()

    # evaluate
    metrics = None
    if not is_stopping and (is_last or eval_only or (eval_interval > 0 and it % eval_interval == 0)):
        stopwatch.stop()
        metrics = estimate_loss()
        is_stopping = metrics is None  # interrupted
    val_loss = math.inf
    if metrics is not None:
        losses = {split: metrics[f'{split}_loss'] for split in data.splits}
        print0(f"step {it}: " + ', '.join(f"{split} loss {losses[split]:.4f}" for split in losses))
        log(it, metrics)
        loss_is_finite = loss_is_finite and all(math.isfinite(loss) for loss in losses.values())
        val_loss = losses.get('val', math.inf)

    # save, before benchmarks and samples, which may fail
    is_best = it > 0 and val_loss < best_val_loss
    if save_interval is None:
        # without a validation loss, no checkpoint is known to be better than the newest
        is_due = is_best or (metrics is not None and (always_save_checkpoint or data.val is None))
    else:
        is_due = save_interval > 0 and it % save_interval == 0
    if eval_only:
        is_saving = False
    elif it > start_iter:
        is_saving = is_due or is_last or is_stopping
    elif resuming:  # these weights are in the checkpoint that was read
        is_saving = is_best
    else:  # the initial weights are saved only if the run ends with them
        is_saving = is_last or is_stopping
    if not loss_is_finite or (is_saving and not all_finite([loss_sum, *model.parameters()])):
        outcome = 'diverged'
        break
    if is_saving:
        stopwatch.stop()
        previous_best = (best_val_loss, best_iter)
        if is_best:  # before save(), which stores both
            best_val_loss = val_loss
            best_iter = it
        is_saved = save(it, is_best)
        if not is_saved:
            best_val_loss, best_iter = previous_best
        elif master_process:
            write_record(it)

    # benchmarks
    if tasks and not is_stopping and (
            is_last or eval_only or (tasks_interval > 0 and it > 0 and it % tasks_interval == 0)):
        stopwatch.stop()
        try:
            model.eval()
            scores, _ = evaluate_tasks(model, loaded_tasks, data.tokenizer, ctx, should_stop)
            model.train()
            if scores:  # none if it was interrupted
                log(it, scores)
        except Exception:
            report_failure('a benchmark')

    # samples
    if sample_interval > 0 and not is_stopping and it > 0 and (
            is_last or it == next_sample_step(it, sample_interval, sample_growth)):
        stopwatch.stop()
        try:
            samples = generate_samples(it)
            print0(samples)
        except Exception:
            report_failure('sampling')

    # stop
    if is_last or is_stopping or eval_only:
        break

    # the gradient, summed over micro-batches and averaged over processes
    stopwatch.start()
    loss_sum = torch.zeros((), device=used_device)
    for micro_step in range(grad_accum_steps):
        # all that is drawn for a micro-batch (dropout, and what you add) follows from its index, so there is
        # no random state to save
        index = (n_samples + sample_offset(micro_step)) // batch_size
        seed_everything(hash_seed(seed, MICRO_BATCH, index))
        t0 = time.perf_counter()
        x, y, doc_ids, divisor = get_batch(it, micro_step)
        data_wait += time.perf_counter() - t0
        # synchronize gradients in the last micro-step only; set before forward, as no_sync() would
        is_last_micro_step = micro_step == grad_accum_steps - 1
        if shard_size > 1:
            model.set_requires_gradient_sync(is_last_micro_step)
        elif ddp:
            ddp_model.require_backward_grad_sync = is_last_micro_step
        with ctx:
            _, loss = ddp_model(x, y, doc_ids, return_logits=False)
        loss = loss / divisor
        scaler.scale(loss).backward()
        loss_sum += loss.detach()

    # the update; what it draws is equal in all processes, so that their models stay equal
    seed_everything(hash_seed(seed, UPDATE, it))
    lr = get_lr(it)
    for group in optimizer.param_groups:
        group['lr'] = lr * group['lr_scale']
    scaler.unscale_(optimizer)
    is_logging = log_interval > 0 and it % log_interval == 0
    if grad_clip or is_logging:
        grad_norm = clip_grad_norm(model, grad_clip)  # with FSDP, the norm over all shards
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)

    # log; reading the loss waits for the device
    if is_logging:
        loss_value, norm = torch.stack((mean_over_processes(loss_sum), grad_norm)).tolist()
        loss_is_finite = math.isfinite(loss_value)
        seconds = stopwatch.stop()
        n_logged = it + 1 - logged_iter
        dt = max(1e-9, seconds - logged_seconds) / n_logged  # a clock may be coarse
        sequences = (n_samples + samples_of_iter() - logged_samples) / n_logged  # per iteration
        logged_iter = it + 1
        logged_samples = n_samples + samples_of_iter()
        logged_seconds = seconds
        mfu = model.estimate_mfu(sequences / ddp_world_size, dt, peak_flops_of(used_device))
        progress = (it + 1) / n_iters
        eta = (n_iters - it - 1) * dt if n_iters < math.inf else 60 * train_minutes - seconds
        tokens = n_samples * block_size
        row = {'progress': progress, 'epoch': tokens / tokens_per_epoch, 'loss': loss_value,
               'lr': lr, 'grad_norm': norm, 'ms': dt * 1000, 'tokens_per_second': sequences * block_size / dt,
               'mfu': mfu if mfu > 0 else None,  # nan if the device's peak is unknown
               'memory_gb': peak_memory(used_device), 'data_wait': data_wait}
        mfu_text = f", mfu {mfu * 100:.2f}%" if mfu > 0 else ''
        total_text = f" ({format_count(tokens_before + tokens)} in total)" if tokens_before else ''
        print0(f"iter {it}: loss {loss_value:.4f}, time {row['ms']:.2f}ms{mfu_text}, "
               f"ppl {math.exp(min(loss_value, 700.0)):.2f}, lr {lr:.2e}, norm {norm:.2f}, "
               f"{row['tokens_per_second']:,.0f} tok/s, {format_count(tokens)} tokens{total_text}, "
               f"epoch {row['epoch']:.2f}, {progress:.1%}, eta {format_duration(max(0, eta))}")
        log(it, row)

    # train_minutes: set the number of iterations, once, from the measured speed
    if n_iters == math.inf and it + 1 == timing_start:
        timing_start_seconds = stopwatch.stop()
    if n_iters == math.inf and it + 1 == timing_end:
        seconds_left = 60 * train_minutes - stopwatch.stop()
        seconds_per_iter = max(1e-9, stopwatch.seconds - timing_start_seconds) / (timing_end - timing_start)
        n_iters = broadcast(it + 1 + max(0, round(seconds_left / seconds_per_iter)))
        print_budget()
    n_samples += samples_of_iter()

# -----------------------------------------------------------------------------
# the end: run.json, report.md, the last line
if outcome == 'done' and is_stopping:
    outcome = 'stopped'
if outcome != 'diverged' and not is_saved:
    outcome += ' without its last checkpoint'
if master_process and not eval_only:
    write_record(it, outcome)
    print0(f"report: {os.path.join(out_dir, 'report.md')}")
    best_text = f"best validation loss {best_val_loss:.4f} at {best_iter}, " if best_iter else ''
    newest = checkpoint.newest(out_dir)
    print0(f"{outcome}: {it:,} iterations in {format_duration(stopwatch.seconds)}, {best_text}newest "
           f"checkpoint: {newest}")
    flags = run_flags(out_dir, data_dir)
    if outcome == 'diverged':
        remedy = f"Start again with a lower rate: --learning_rate=..., now {learning_rate:g}."
        if newest:
            remedy = (f"Resume from the newest checkpoint with a lower rate: --init_from=resume {flags} "
                      "--learning_rate=...")
        print(f"error: the loss or a weight is not finite after {it} iterations. {remedy}", file=sys.stderr)
    elif outcome == 'done':
        chat_flag = ' --chat' if data.train.masked else ''
        print0(f"to sample from it: python {script_path('sample.py')} {flags}{chat_flag}")
    elif newest:
        print0(f"to resume: python {script_path()} --init_from=resume {flags}")
if ddp:
    del ddp_model
    gc.unfreeze()  # see warm_up
    gc.collect()  # DDP is a reference cycle; if it outlives its process group, the process may abort
    torch.distributed.barrier()  # wait until all ranks have finished communicating
    torch.distributed.destroy_process_group()
if outcome == 'diverged':
    sys.exit(3)
if not is_saved:
    sys.exit(1)
if stop_signal:
    sys.exit(128 + stop_signal)  # as a shell expects it
