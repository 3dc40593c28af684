"""
Train a GPT, on a laptop or on a cluster. The knobs below are the manual.

    $ python train.py config/quickstart.py                                    # a laptop, no GPU
    $ python train.py config/train_gpt2.py --total_batch_size=491520          # one GPU
    $ torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py  # eight GPUs of one machine

Two machines, with 10.0.0.1 for the address of the first; this line there, and with --node_rank=1 on the second:
    $ torchrun --nnodes=2 --node_rank=0 --nproc_per_node=8 --master_addr=10.0.0.1 --master_port=29500 train.py config/train_gpt2.py
(If your cluster has no InfiniBand, prepend NCCL_IB_DISABLE=1.)
"""

from configurator import configure, fail, inherit, out_of_range

# -----------------------------------------------------------------------------
# The defaults train GPT-2 124M on OpenWebText. A knob that is None is computed from others; its comment says how.
# files
out_dir = 'out'  # the run's folder: checkpoints, log.csv, run.json, report.md
init_from = 'scratch'  # 'resume': go on from out_dir. 'auto': that if it holds a run, else 'scratch'. PATH of a checkpoint, or a Hugging Face folder or name ('gpt2', 'OWNER/NAME'): its weights, a new run
resume_from: str = None  # with init_from='resume': a checkpoint of another run to go on from, in a new out_dir, e.g. to decay from there
overwrite = False  # True: 'scratch' deletes the run that out_dir holds
always_save_checkpoint = True  # False: save only when the validation loss improved, at save_interval if set, and at the end; ckpt.pt is then the best
save_interval: int = None  # iterations between checkpoints. None: one with each evaluation
keep_checkpoints = 2  # how many of the numbered ones stay; the best one stays besides
allow_change = False  # True: 'resume' goes on even if the data or the tokens per iteration are not those of the run
# data
dataset = 'openwebtext'  # the folder data/<dataset>, made by prepare.py
data_dir: str = None  # where the datasets lie. None: data/ beside this file
batch_size = 12  # sequences per micro-batch and process: what fits into memory
block_size = 1024  # tokens per sequence
gradient_accumulation_steps = 5 * 8  # micro-batches per iteration, over all processes: 12 x 1024 x 40 = 491,520 tokens
total_batch_size: int = None  # tokens per iteration, over all processes; if set, the accumulation steps are computed from it
seed = 1337  # of the initial weights, the order of the data, and dropout
# model
arch = 'gpt2'  # its parts: 'gpt2', 'llama', 'modern'; they can be chosen one by one below
n_layer = 12
n_head = 12
n_embd = 768
dropout = 0.0  # 0 is good for pre-training; for small data or finetuning try 0.1 and more
bias = False  # in Linear and LayerNorm
# parts of the model; None: what arch has, see the table in model.py
n_kv_head: int = None  # heads of keys and values, a divisor of n_head. None: n_head
mlp_width: int = None  # channels inside the MLP. None: 4 n_embd, or 8/3 n_embd for swiglu
norm: str = None  # 'layernorm', 'rmsnorm', 'rmsnorm_plain' (without gains)
norm_eps: float = None  # added to the variance
embd_norm: bool = None  # a norm after the embedding as well
positions: str = None  # 'learned', 'rope'
rope_theta: float = None  # larger for longer contexts
rope_scaling: str = None  # 'none', 'linear:FACTOR', 'llama3:FACTOR:LOW:HIGH:ORIGINAL_BLOCK_SIZE'
fused_qkv: bool = None  # query, key and value in one matrix
qk_norm: bool = None  # a norm on queries and keys
mlp: str = None  # 'gelu', 'gelu_tanh' (OpenAI's), 'relu2', 'swiglu'
tie: bool = None  # one matrix for embedding and head
softcap: float = None  # bound of the logits; 0: none
init: str = None  # 'gpt2', 'modern': the rules for the initial weights
# optimizer
learning_rate = 6e-4  # its peak, of everything that has none of its own in the next four lines
matrix_optimizer = 'adamw'  # of the matrices inside the blocks: 'adamw', or 'muon', which wants query, key and value apart (arch llama or modern)
matrix_lr: float = None  # of the same. None: 0.02 for muon, whose rates have another unit, else learning_rate
embedding_lr: float = None  # of embeddings, a tied head among them. None: learning_rate
head_lr: float = None  # of an untied head. None: learning_rate
weight_decay = 1e-1  # on matrices and embeddings, not on biases and norms
matrix_weight_decay: float = None  # on the matrices inside the blocks. None: weight_decay
beta1 = 0.9
beta2 = 0.95
adam_eps = 1e-8  # 1e-5 has calmed runs that diverged; modern's zero head wants 1e-10
momentum = 0.95  # of muon
grad_clip = 1.0  # the largest norm of the gradient; 0: any
# budget and schedule
max_iters = 600000  # updates to make, unless one of the next three is set
max_tokens: int = None  # tokens to train on
max_epochs: float = None  # passes over the data, fractions too
tokens_per_param: float = None  # tokens per parameter of the model; 20 is Chinchilla's
lr_schedule = 'cosine'  # after the warm-up: 'cosine' or 'linear' down to min_lr, 'constant', or 'wsd': constant, and linear only at the end
decay_fraction = 0.5  # of 'wsd': the last part, in which the rate falls
decay_lr = True  # False: 'constant', whatever lr_schedule says
warmup_iters = 2000  # the learning rate rises linearly
lr_decay_iters: int = None  # where min_lr is reached and kept. None: at the end
min_lr: float = None  # None: 0 for 'wsd', else learning_rate / 10
# evaluation and logging
eval_interval = 2000  # iterations between evaluations; 0: only of the last weights
eval_iters = 200  # batches per evaluation, the same ones each time; 0: all of val.bin, and as much of train.bin
eval_tokens: int = None  # tokens per evaluation instead: comparable between batch sizes
hellaswag_interval = 0  # iterations between its 10,042 questions, asked of the last weights too; 0: never. Files as for eval.py
core_interval = 0  # the same for CORE, 22 tasks
core_max_per_task = 500  # questions of each, the same ones each time
tasks_dir: str = None  # where hellaswag_val.jsonl and eval_bundle/ lie. None: data/ beside this file
sample_interval = 0  # iterations between texts that it writes into samples.md, also at the end; 0: none
sample_growth = 1.0  # each gap is so many times the one before: 2 with an interval of 100 samples at 100, 300, 700, 1500, ...
sample_prompts: str = None  # a file with a prompt per line. None: three times none
sample_tokens = 200  # tokens of each
eval_only = False  # evaluate once, write nothing, exit
dry_run = False  # print the plan, and by three iterations on random tokens what it takes: memory, disk, hours; write nothing, exit
world_size: int = None  # with dry_run: the plan for so many GPUs, which need not be here, reckoned for a network of any size. A run has as many as torchrun starts
gpu_memory: float = None  # with dry_run: GB of each. None: 80 with world_size, else what the GPU here has
overfit_batch = False  # True: the batch of the first iteration every time. If its loss does not go to nearly 0 in a few hundred, model or loop is broken
stop_val_loss: float = None  # end the run when the validation loss is as low as that
max_bad_steps = 10  # updates whose loss or gradient is not finite are skipped; after so many in a row the run gives up
log_interval = 1  # iterations between lines on the console and in log.csv; 0: none
write_report = True  # at the end, interrupted or not, report.md and loss.png (which needs matplotlib) from what is in out_dir
wandb_log = False  # also log to Weights & Biases (WANDB_MODE=offline needs no account)
wandb_project = 'owt'
wandb_run_name = 'gpt2'
# system
device = 'auto'  # 'cpu', 'cuda', 'cuda:1', 'mps'; auto: the GPU if there is one
dtype = 'auto'  # 'float32', 'bfloat16', 'float16' (with a gradient scaler); auto: bfloat16 where the hardware has it, else float16 on a GPU, float32 elsewhere
compile: bool | str = 'auto'  # torch.compile: True, False; auto: on a GPU, if it works there
matmul_precision = 'high'  # of float32 products: 'highest', 'high' (TF32 on NVIDIA GPUs), 'medium'
peak_flops: float = None  # FLOP/s that MFU is a share of. None: from a table of GPUs in model.py
backend = 'auto'  # of torch.distributed: 'nccl', 'gloo'; auto: nccl on GPUs, gloo elsewhere
ddp_timeout = 600  # seconds that a process waits for the others
shard = 'none'  # what each process holds: 'none': all (DDP). 'full': its share of weights, gradients and optimizer state (FSDP), for models too large for that
shard_size: int = None  # of 'full': so many neighbours, as the GPUs of one machine, share a copy (hybrid). None: all processes
activation_checkpointing = False  # True: memory of a block's input instead of all that is inside, for a third more computing
chunked_loss: bool | str = 'auto'  # True: the logits of a few tokens at a time, never of all; auto: where all would take much of the memory
max_minutes: float = None  # stop and save before so many have passed, as before a cluster's time limit
deterministic = False  # True: the same bits on 1, 2, 4, ... processes; one thread on a CPU, sums in a fixed order
# -----------------------------------------------------------------------------
knobs, given = configure(globals())

import dataclasses  # only now: --help and a mistyped knob are answered without waiting for torch
import importlib.util
import math
import os
import shlex
import signal
import sys
import time
from contextlib import nullcontext

import torch

import checkpoint
import plan
import report
import samples
import tasks
from dataset import DATA_DIR, Dataset, Prefetch, bin_files, hash64, same_tokenizer, train_starts
from model import GPT, GPTConfig
from optim import MUON_LR, Guard, create_optimizer, load_optimizer_state, own
from parallel import Processes, Requests, TreeSum, choose_compile, choose_dtype, choose_loss_rows, compile_model, explain_out_of_memory, make_deterministic, uncompile

procs = Processes(device, backend, ddp_timeout)
device, master = procs.device, procs.is_main
procs.agree({name: value for name, value in knobs.items() if name not in ('data_dir', 'tasks_dir', 'sample_prompts')})

# -----------------------------------------------------------------------------
# where to start: nothing, a run to go on with, or the weights of a checkpoint

if init_from not in ('scratch', 'resume', 'auto'):
    Dataset(dataset, data_dir)  # says what is missing before weights are fetched
saved, resuming, branching = checkpoint.starting_point(procs, init_from, out_dir, overwrite, eval_only or dry_run, resume_from)
LAUNCH = ('out_dir', 'data_dir', 'wandb_log', 'device', 'dtype', 'compile', 'backend', 'ddp_timeout', 'peak_flops', 'matmul_precision', 'max_minutes', 'stop_val_loss',
          'sample_prompts', 'tasks_dir', 'shard', 'shard_size')  # no path is taken from a checkpoint, which may be a stranger's
ARCHITECTURE = [field.name for field in dataclasses.fields(GPTConfig) if field.name not in ('vocab_size', 'dropout')]
BUDGETS = ('max_tokens', 'max_epochs', 'tokens_per_param')
if resuming:
    # the run's own knobs hold, unless given now. Some say the same thing: with --max_tokens given, the run's max_iters is void
    never = ['init_from', 'resume_from', 'overwrite', 'allow_change', 'eval_only', 'dry_run', 'world_size', 'gpu_memory', *LAUNCH, *ARCHITECTURE]
    for alternatives in (('max_iters', *BUDGETS), ('total_batch_size', 'gradient_accumulation_steps')):
        if any(name in given for name in alternatives):
            never += [name for name in alternatives if name not in given]
    if 'lr_schedule' in given and 'decay_lr' not in given:
        never.append('decay_lr')
    if branching and any(name in given for name in ('max_iters', *BUDGETS)) and 'lr_decay_iters' not in given:
        never.append('lr_decay_iters')  # the branch has an end of its own
    changed = inherit(globals(), knobs, given, saved['config'], never)
    procs.print(f"resuming from {saved['path']}, after {saved['iter_num']:,} iterations")
    for name, (old, new) in changed.items():
        procs.print(f"  {name}: {old} -> {new}")
if saved:
    before = checkpoint.model_config(saved)
    if not resuming and 'block_size' not in given and before.block_size > block_size:
        procs.print(f"note: block_size={block_size} of the {before.block_size} that {saved['path']} has. for all of it: --block_size={before.block_size}")
        given['block_size'] = block_size
    free = () if resuming else ('block_size', 'rope_theta', 'rope_scaling') if before.positions == 'rope' else ('block_size',)  # no weights
    if 'block_size' in given and block_size > before.block_size and 'block_size' in free and before.positions == 'learned':
        fail(f"block_size={block_size}, but {saved['path']} has learned only {before.block_size} positions. use --block_size={before.block_size} or less")
    if block_size > before.block_size and 'block_size' in free:
        procs.print(f"note: block_size={block_size} is more than the {before.block_size} that {saved['path']} was trained with")
    for name in ARCHITECTURE:
        if name in given and name not in free and given[name] != getattr(before, name):
            procs.print(f"note: {name}={given[name]} is ignored, the checkpoint has {getattr(before, name)}")
        if name not in given or name not in free:
            globals()[name] = knobs[name] = getattr(before, name)

# -----------------------------------------------------------------------------
# what follows from the knobs, checked before the model is built; mistakes are collected and told together

problems = out_of_range(
    knobs, above_zero='batch_size block_size gradient_accumulation_steps total_batch_size n_layer n_head n_embd keep_checkpoints '
    'save_interval core_max_per_task sample_tokens max_tokens max_epochs tokens_per_param lr_decay_iters eval_tokens adam_eps peak_flops max_minutes max_bad_steps shard_size '
    'world_size gpu_memory',
    from_zero='seed max_iters warmup_iters eval_interval hellaswag_interval core_interval sample_interval eval_iters log_interval learning_rate matrix_lr embedding_lr head_lr min_lr '
    'weight_decay matrix_weight_decay grad_clip',
    below_one='dropout beta1 beta2 momentum', words=dict(lr_schedule='cosine linear constant wsd', matrix_optimizer='adamw muon', matmul_precision='highest high medium', shard='none full'))
if planned := [f'{name}={knobs[name]:g}' for name in ('world_size', 'gpu_memory') if knobs[name] is not None and not dry_run]:
    problems.append(f"{' and '.join(planned)} is for plans. add --dry_run, or leave it out: a run has the processes that torchrun starts, and the GPUs that are there")
elif world_size and procs.many:
    problems.append(f"world_size={world_size} under torchrun: one process reckons the plan. use python in its place")
elif world_size and not problems:
    procs.world_size, procs.device, gpu_memory = world_size, torch.device('cpu'), gpu_memory or 80.0  # what follows is for processes that are elsewhere
problems += procs.cannot_shard(shard, shard_size, deterministic)
if chunked_loss not in (True, False, 'auto'):
    problems.append(f"no such value of chunked_loss ({chunked_loss}). use --chunked_loss=auto, True or False")
if wandb_log and getattr(importlib.util.find_spec('wandb'), 'origin', None) is None:  # the folder wandb/ that runs leave is no package
    problems.append("wandb_log=True, but wandb is not installed. pip install wandb, or leave it out: log.csv has the same numbers")
if sample_growth < 1:
    problems.append(f"sample_growth is out of range ({sample_growth}). use a number from 1")
if len(budgets := [name for name in BUDGETS if knobs[name] is not None]) > 1:
    problems.append(f"more than one budget ({', '.join(budgets)}). keep one of them")
if batch_size * block_size >= 2**31:
    problems.append(f"batch_size x block_size is out of range ({batch_size} x {block_size}). use a smaller micro-batch and more of them: --gradient_accumulation_steps")
if master and not (eval_only or dry_run) and (problem := checkpoint.no_folder(out_dir)):
    problems.append(problem)
if problems:
    fail(*problems)  # below, some of them are divided by
config = GPTConfig(dropout=dropout, **{name: knobs[name] for name in ARCHITECTURE})
problems += config.problems()
if matrix_optimizer == 'muon' and config.fused_qkv:
    problems.append(f"matrix_optimizer=muon wants query, key and value apart, and this {arch} has them in one matrix. use --arch=llama or modern, "
                    "or --matrix_optimizer=adamw")
rates = {name: value for name, value in dict(matrix_lr=matrix_lr, embedding_lr=embedding_lr, head_lr=head_lr).items() if value is not None}
if matrix_optimizer == 'muon':
    rates.setdefault('matrix_lr', MUON_LR)
if rates and learning_rate == 0:
    problems.append("learning_rate=0 stops everything, as the other rates are multiples of it. use a number above 0")
if not 0 < decay_fraction <= 1:
    problems.append(f"decay_fraction is out of range ({decay_fraction}). use a number in (0, 1]")
# how many micro-batches of an iteration this process makes
accumulation, problem = procs.divide(gradient_accumulation_steps, total_batch_size, batch_size, block_size)
if problem:
    problems.append(problem)
elif deterministic and not all(n.bit_count() == 1 for n in (procs.world_size, accumulation)):
    problems.append(f"deterministic=True adds pairwise and wants powers of two ({procs.world_size} processes, {accumulation} micro-batches in each). "
                    f"use 1, 2, 4, ... processes and --gradient_accumulation_steps={2 ** ((procs.world_size * accumulation).bit_length() - 1)}")
if problems:
    fail(*problems)
samples_per_iter = accumulation * procs.world_size * batch_size
tokens_per_iter = samples_per_iter * block_size

no_data = world_size and not saved and not bin_files(os.path.join(data_dir or DATA_DIR, dataset), 'train')
data = plan.NO_DATA if no_data else Dataset(dataset, data_dir)
splits = {name: tokens for name, tokens in (('train', data.train), ('val', data.val)) if tokens is not None}
problems += [tokens.too_short(block_size) for tokens in splits.values() if tokens.too_short(block_size)]
samples_per_epoch = max(1, data.train.n // block_size)
config.vocab_size = before.vocab_size if saved else data.vocab_size
if saved:
    known = saved.get('tokenizer')  # unknown of nanoGPT's: then the size has to do, which may be padded, as ours is for BPE
    fits = same_tokenizer(known, data.tokenizer_state) if known else config.vocab_size <= data.vocab_size
    if not fits or (data.meta['vocab_size'] > config.vocab_size and not known):
        problems.append(f"dataset {dataset} has another tokenizer than the checkpoint ({data.meta['vocab_size']} ids, {config.vocab_size} there). "
                        "train on a dataset made with the checkpoint's tokenizer, or from scratch")
    for tokens in splits.values():  # some tokenizers have an id or two more than their model, which no text should contain
        tokens.vocab_size = min(tokens.vocab_size, config.vocab_size)
# an iteration's samples follow from these: with others a resume would train on some twice and on some never
trained_on = {name: tokens.fingerprint for name, tokens in splits.items()}
trained_on['tokens per iteration'] = tokens_per_iter
procs.agree(trained_on)
others = {name: old for name, old in saved.get('trained_on', {}).items() if trained_on.get(name) != old} if resuming else {}
if others and not (branching or allow_change or eval_only or problems):
    name, old = next(iter(others.items()))
    problems.append(f"{name + '.bin' * (name in splits)} changed since this run was saved ({old} -> {trained_on.get(name)}). " + (f"keep it with --total_batch_size={old}" if name == 'tokens per iteration'
                    else "bring the old data back, or begin a new run from these weights with --init_from=PATH") + "; to go on all the same: --allow_change")
with torch.device('meta'):  # to count only: no memory is used
    shapes = {} if problems else {name: p.numel() for name, p in GPT(config).named_parameters()}
n_params = sum(shapes.values())
# weights and AdamW's two moments; Muon has one
checkpoint_bytes = 12 * n_params - (4 * sum(n for name, n in shapes.items() if name.startswith('transformer.h.')) if matrix_optimizer == 'muon' else 0)
if master and not (eval_only or dry_run) and (problem := checkpoint.too_little_space(out_dir, checkpoint_bytes, keep_checkpoints)):
    problems.append(problem)
if max_epochs is not None:
    if no_data:
        problems.append(f"max_epochs={max_epochs:g} of a dataset that is not here ({dataset}). use --max_tokens")
    max_tokens = max_epochs * samples_per_epoch * block_size
if tokens_per_param is not None:
    max_tokens = tokens_per_param * n_params
if max_tokens is not None:
    max_iters = math.ceil(max_tokens / tokens_per_iter)
lr_decay_iters = max_iters if lr_decay_iters is None else lr_decay_iters
lr_schedule = lr_schedule if decay_lr else 'constant'
min_lr = (0.0 if lr_schedule == 'wsd' else learning_rate / 10) if min_lr is None else min_lr
decay_start = max(warmup_iters, round(lr_decay_iters * (1 - decay_fraction))) if lr_schedule == 'wsd' else warmup_iters
if lr_schedule != 'constant' and 0 < lr_decay_iters <= warmup_iters and not eval_only:
    problems.append(f"warmup_iters={warmup_iters} leaves nothing of lr_decay_iters={lr_decay_iters}. use --warmup_iters={lr_decay_iters // 20}")
if problems:
    fail(*problems)
dtype, why_dtype = choose_dtype(dtype, None if world_size else device)
compiling, why_compile = choose_compile(compile, device)
if deterministic:
    make_deterministic(device)
if shard == 'full' and dtype == 'float16':
    fail("dtype=float16 with shard=full: its gradient scaler is not known to work there. use --dtype=bfloat16 or float32")
procs.agree({'dtype': dtype, 'compile': compiling})
environment = procs.environment(deterministic, dtype=dtype, compile=compiling, batch_size=batch_size)
if resuming and not eval_only and (changed := [f"{name} {old} -> {environment.get(name)}" for name, old in saved.get('environment', {}).items() if environment.get(name) != old]):
    procs.print(f"note: from here on not the bits of an uninterrupted run, but the same up to rounding: {', '.join(changed)}")

overview = [
    f"dataset   {dataset} is not here: a vocabulary of {data.vocab_size:,}, GPT-2's, is assumed" if no_data else
    f"dataset   {dataset}: {data.train.n:,} tokens" + (f", {data.val.n:,} for validation" if data.val else " and no val.bin: no validation loss, no best checkpoint"),
    f"model     {arch}, {n_layer} layers, {n_head} heads, {n_embd} channels, {block_size} positions, vocabulary {config.vocab_size:,}: {n_params:,} parameters",
    f"batch     {tokens_per_iter:,} tokens per iteration = {batch_size} sequences x {block_size} tokens x {accumulation} "
    f"micro-batches x {procs.world_size} process{'es' * (procs.world_size > 1)}",
    f"budget    {max_iters:,} iterations = {max_iters * tokens_per_iter:,} tokens = " +
    (f"{max_iters * samples_per_iter / samples_per_epoch:.2f} epochs = " if not no_data else '') +
    f"{max_iters * tokens_per_iter / n_params:.1f} tokens per parameter" + (f" (from {budgets[0]})" if budgets else ""),
    f"schedule  {lr_schedule}, {learning_rate:g}" + (f" ({', '.join(f'{name} {value:g}' for name, value in rates.items())})" if rates else '') +
    f" after {warmup_iters:,} iterations of warm-up ({warmup_iters / max(1, max_iters):.1%})" +
    (f" until {decay_start:,}" if lr_schedule == 'wsd' else '') + (f", {min_lr:g} at iteration {lr_decay_iters:,}" if lr_schedule != 'constant' else '') +
    ('' if lr_schedule == 'constant' or lr_decay_iters <= max_iters else ', which is after the end'),
    f"system    {world_size:,} GPUs of {gpu_memory:g} GB elsewhere, {dtype} ({why_dtype})" if world_size else
    f"system    {device} ({procs.why_device}), {dtype} ({why_dtype}), compile {'on' if compiling else 'off'} ({why_compile})",
    "expect    " + (f"a first loss of about ln({data.meta['vocab_size']}) = {math.log(data.meta['vocab_size']):.2f}; " if not saved else '') +
    "checkpoints of " + (f"{checkpoint_bytes / 1e9:.2f} GB" if checkpoint_bytes > 1e8 else f"{checkpoint_bytes / 1e6:.1f} MB") + f" in {out_dir}",
]
procs.print('\n'.join(overview))
if max_iters * samples_per_iter > 100 * samples_per_epoch and not eval_only:
    procs.print(f"note: that is {max_iters * samples_per_iter / samples_per_epoch:,.0f} times over the same text. a smaller network and fewer iterations (config/quickstart.py) or more text "
                "would serve it better")
if lr_schedule != 'constant' and min_lr > learning_rate:
    procs.print(f"note: min_lr={min_lr:g} is above learning_rate={learning_rate:g}, so the rate rises to the end. usual is --min_lr={learning_rate / 10:g}")
if branching and lr_schedule == 'wsd' and decay_start < saved['iter_num'] < lr_decay_iters:
    procs.print(f"note: the decay would have begun at iteration {decay_start:,}, so the rate falls at once. for the whole decay from here on: "
                f"--decay_fraction={1 - saved['iter_num'] / lr_decay_iters:.4g}")
if world_size:
    setup = plan.Setup(config, dtype, batch_size, accumulation, world_size, gpu_memory, shard, shard_size, activation_checkpointing, chunked_loss, matrix_optimizer)
    procs.print('\n'.join(plan.forecast(setup, max_iters, checkpoint_bytes, keep_checkpoints, peak_flops)))
    sys.exit()

# -----------------------------------------------------------------------------
# data

def read_batch(n):
    """Micro-batch n of this process, counted over all iterations: x, y of shape (batch_size, block_size). A function of that number
    alone, and the batch of an iteration is the same however many processes share it."""
    it, micro = divmod(n, accumulation)
    it = 0 if overfit_batch else it
    first = ((it * procs.world_size + procs.rank) * accumulation + micro) * batch_size
    starts = train_starts(seed, range(first, first + batch_size), data.train.n, block_size)
    return to_tensors(data.train.windows(starts, block_size + 1))


def to_tensors(windows):
    x, y = torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())  # the target is the next token
    return (x.pin_memory(), y.pin_memory()) if device.type == 'cuda' else (x, y)  # from pinned memory the copy runs beside the computation


def to_device(x, y):
    beside = device.type == 'cuda'  # elsewhere it has to wait: on MPS the source could be gone before it is read
    return x.to(device, non_blocking=beside), y.to(device, non_blocking=beside)


# -----------------------------------------------------------------------------
# model and optimizer

smaller = next((batch_size // n for n in range(2, math.isqrt(batch_size) + 1) if batch_size % n == 0), 1)
explain_out_of_memory(f"the same tokens per iteration from micro-batches of {smaller} sequences: --batch_size={smaller} --total_batch_size={tokens_per_iter}" if batch_size > 1 else
                      "use a smaller --block_size or a smaller model, or more memory")
torch.manual_seed(seed)
torch.set_float32_matmul_precision(matmul_precision)
model = checkpoint.build(saved, dropout, **{name: knobs[name] for name in free}) if saved else GPT(config)
model.loss_rows = choose_loss_rows(chunked_loss, device, batch_size * block_size, config.vocab_size)
for block in model.transformer.h:
    block.activation_checkpointing = activation_checkpointing
model = procs.place(model, shard, shard_size, dtype)
autocast = nullcontext() if dtype == 'float32' else torch.autocast(device.type, dtype=getattr(torch, dtype))
scaler = torch.amp.GradScaler(device.type, enabled=dtype == 'float16')
optimizer = create_optimizer(model, learning_rate, weight_decay, (beta1, beta2), adam_eps, matrix_optimizer, matrix_lr, embedding_lr, head_lr,
                             matrix_weight_decay, momentum)
start, best_val_loss, seconds, evaluation, wandb_run_id, bad_steps = 0, float('inf'), 0.0, {}, None, 0
if resuming:
    try:
        load_optimizer_state(optimizer, saved['optimizer'])
        if saved.get('scaler') and scaler.is_enabled():
            scaler.load_state_dict(saved['scaler'])
    except Exception as e:  # a file may say anything
        fail(f"the optimizer's state in {saved['path']} cannot be used ({type(e).__name__}: {e}). take an older checkpoint, or begin a new run from its weights: "
             f"--init_from={saved['path']} --out_dir=ANOTHER")
    start, best_val_loss = saved['iter_num'], saved['best_val_loss']
    seconds, bad_steps = saved.get('seconds', 0.0), saved.get('bad_steps', 0)
    if branching:  # a run of its own, with a best loss and curves of its own
        best_val_loss = float('inf')
    else:
        evaluation, wandb_run_id = saved.get('evaluation', {}), saved.get('wandb_run_id')
tokens_before = saved.get('tokens', start * tokens_per_iter) - start * tokens_per_iter if saved else 0  # what the weights had seen when this run began
from_scratch = not saved
spent = report.Stopwatch(saved.get('spent', {}) if resuming else {})  # seconds for evaluating, saving, sampling
saved = None  # gives its memory back
lengths = tasks.byte_lengths(data.tokenizer_state, config.vocab_size)  # for bits per byte
guard = Guard(optimizer, scaler, device, max_bad_steps, bad_steps)

requests = Requests(procs, max_minutes)  # from here on a signal is a request
wrapped = procs.wrap(model, deterministic)  # what trains; the plain model keeps its name: it is evaluated, saved and counted
if compiling:
    def first_step():
        procs.average_gradients(wrapped, procs.sharded)  # if it fails in one process, the others must not wait for it; but FSDP would keep what it does not send
        with autocast:
            loss = wrapped(*to_device(*read_batch(start * accumulation)))[1]
        loss.backward()
        model.zero_grad(set_to_none=True)
    t0 = time.perf_counter()
    note = compile_model(model, first_step, compile)
    if procs.any(bool(note)) and not note:
        note = uncompile(model, 'it failed in another process')
    procs.print(note or f"compiled in {time.perf_counter() - t0:.0f} s")
    wrapped = procs.wrap(model, deterministic) if note else wrapped  # anew: the failed step may have left it in the middle of something

# -----------------------------------------------------------------------------
# helpers

def interrupted():
    return requests.asked() > Requests.SAVE  # to be asked by all processes, or by none


def evaluate(it):
    """Losses and bits per byte over the first windows of each split: the same ones each time. None if interrupted."""
    found = {}
    for split, tokens in splits.items():
        wanted = max(1, eval_tokens // block_size) if eval_tokens else eval_iters * batch_size or (data.val or data.train).n_windows(block_size)
        windows = tasks.cut(min(wanted, tokens.n_windows(block_size)) * block_size, block_size)
        found[split] = tasks.text_loss(model, tokens, windows, block_size, batch_size, procs, autocast, lengths, interrupted, procs.ticker(f'evaluating {split}'))
        if found[split] is None:
            return None
    procs.print(f"step {it}: " + ', '.join(f"{split} loss {found[split]['loss']:.4f}" for split in splits))
    return {**{split: found[split]['loss'] for split in splits}, **{measure: found['val'][measure] for measure in ('perplexity', 'bpb') if data.val}}


# What is done once in a while, by what it finds: (interval, growth of the interval, job). No job leaves a trace in the training
jobs = {'train': (eval_interval, 1.0, evaluate)}
for name, interval, most in (('hellaswag', hellaswag_interval, 0), ('core', core_interval, core_max_per_task)):
    if interval > 0:
        jobs[name] = interval, 1.0, tasks.exam(name, tasks_dir or DATA_DIR, data.tokenizer(), most, model, batch_size, procs, autocast, interrupted)
if sample_interval > 0:
    jobs['sample'] = sample_interval, sample_growth, samples.writer(None if eval_only else out_dir, data.tokenizer(), sample_prompts, sample_tokens, seed, model, procs, autocast, interrupted)


def due(name, it, last):
    """Whether the job is one of pass `it`. Random weights are not asked questions."""
    interval, growth, _ = jobs[name]
    return last or eval_only or (interval > 0 and (it > 0 or name == 'train') and samples.due(it, interval, growth))


def get_lr(it):
    # 1) linear warm-up
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if lr_schedule == 'constant' or it < decay_start:
        return learning_rate
    # 2) past the end of the decay
    if it >= lr_decay_iters:
        return min_lr
    # 3) in between, from 1 down to 0
    progress = (it - decay_start) / (lr_decay_iters - decay_start)
    factor = 0.5 * (1 + math.cos(math.pi * progress)) if lr_schedule == 'cosine' else 1 - progress
    return min_lr + factor * (learning_rate - min_lr)


def save(it, best):
    """Write the checkpoint of iteration `it`, on a GPU beside the training; ckpt.pt is the newest or, with always_save_checkpoint=False, the
    best one. Weights that are not finite end the run."""
    if procs.any(not checkpoint.finite({name: own(p) for name, p in model.named_parameters()})):
        give_up(it, "the weights are not finite")
    gathered = procs.gather({'model': model.state_dict(keep_vars=True), 'optimizer': optimizer.state_dict()}, copy=writer.beside)
    requests.saved()
    if master:
        state = {**gathered, 'scaler': scaler.state_dict(), 'model_args': config.model_args(),
                 'iter_num': it, 'best_val_loss': best_val_loss, 'config': knobs, 'tokenizer': data.tokenizer_state, 'evaluation': evaluation,
                 'seconds': seconds, 'spent': dict(spent), 'tokens': tokens_before + it * tokens_per_iter, 'wandb_run_id': wandb_run_id,
                 'bad_steps': int(guard.in_a_row), 'trained_on': trained_on, 'environment': environment, 'torch': str(torch.__version__), 'version': checkpoint.VERSION}
        newest = always_save_checkpoint or best or data.val is None or not os.path.exists(os.path.join(out_dir, 'ckpt.pt'))
        writer.start(out_dir, state, ['ckpt.pt'] * newest + ['ckpt_best.pt'] * best, keep_checkpoints)


def saved():
    """Whether the last checkpoint that was begun is on the disk; waits for it."""
    whole = writer.finish()
    requests.writing = writer.longest
    return not procs.any(not whole)


def close(outcome, it):
    global wrapped
    log.end(outcome=outcome, iterations=it, best_val_loss=best_val_loss)
    run.end(outcome, write_report, iterations=it, seconds=seconds, best_val_loss=best_val_loss)
    wrapped = None  # DDP has to go before the process group does: otherwise a process now and then aborts at its very end
    procs.close()


def give_up(it, why):
    saved()
    if master:
        print(f"error: {why} at iteration {it} ({checkpoint.newest(out_dir) or 'no checkpoint'} is from before). go on from there "
              f"with smaller rates (now {', '.join(f'--{name}={value:g}' for name, value in {'learning_rate': learning_rate, **rates}.items())}): --init_from=resume", file=sys.stderr)
    close(f"gave up: {why}", it)
    sys.exit(3)


def look_at_guard():
    """Tell which updates were skipped since the last time, and how to see the first of them again; give up if it does not end."""
    n, in_a_row, bad_it, loss, norm = guard.report()
    if n:
        path = checkpoint.newest(out_dir)
        begin = ['--init_from=resume', f'--resume_from={path}'] if path else sys.argv[1:]
        replay = [*begin, f'--out_dir={out_dir}-replay', f'--max_iters={bad_it + 1}', f'--lr_decay_iters={lr_decay_iters}', '--log_interval=1', '--eval_interval=0', '--eval_iters=1',
                  '--hellaswag_interval=0', '--core_interval=0', '--sample_interval=0']
        procs.print(f"note: the update of iteration {bad_it} was skipped, its loss is {loss:.4g}, its gradient norm {norm:.4g}, lr {get_lr(bad_it):.2e} ({n} skipped since the "
                    f"last line, {in_a_row} in a row). that iteration once more: {command(replay)}")
    if in_a_row >= max_bad_steps:
        give_up(it, f"{in_a_row} updates in a row were skipped, as their loss or gradient is not finite (max_bad_steps={max_bad_steps})")


def command(args):
    """The line that starts train.py as it was started now, with `args` and the knobs that no checkpoint hands on."""
    n, local = procs.world_size, int(os.environ.get('LOCAL_WORLD_SIZE', 1))
    launcher = 'python' if not procs.many else f"torchrun --standalone --nproc_per_node={n}" if n == local else f"torchrun --nnodes={n // local} --nproc_per_node={local} ..."
    again = [f'--{name}={given[name]}' for name in LAUNCH if name in given and not any(arg.startswith(f'--{name}=') for arg in args)]
    return f"{launcher} {shlex.join([sys.argv[0], *args, *again])}"

# -----------------------------------------------------------------------------
# the loop: pass `it` starts with `it` updates made; the last pass evaluates and saves but does not update

if dry_run:
    measured = plan.measure(model, wrapped, optimizer, scaler, autocast, procs, batch_size, block_size, accumulation)
    mfu = model.estimate_mfu(accumulation * batch_size, measured[-1], peak_flops)
    procs.print('\n'.join(plan.table(measured, procs, batch_size, block_size, accumulation, max_iters, checkpoint_bytes, keep_checkpoints, mfu, gpu_memory)))
    if link := plan.bandwidth(procs):
        procs.print(link)
    wrapped = None
    procs.close()
    sys.exit()
if resuming and start >= max_iters and not eval_only:
    procs.print(f"this run is done: {start:,} of {max_iters:,} iterations. to train on: --max_iters={2 * max(1, start)}")
wandb_run = None
if master and not eval_only:
    lock = checkpoint.lock(out_dir)
if wandb_log and master:
    import wandb
    try:
        wandb_run = wandb.init(project=wandb_project, name=wandb_run_name, config=knobs, id=wandb_run_id, resume='allow')
    except wandb.Error as e:
        fail(f"wandb does not start ({str(e).splitlines()[0]}). wandb login, WANDB_MODE=offline, or leave wandb_log out", everywhere=True)
    wandb_run_id = wandb_run.id  # goes into the checkpoint: a resume continues the same curves
if master and not eval_only:
    checkpoint.clean(out_dir, start if resuming and not branching else None, overwrite)
facts = {'plan': overview, 'max_iters': max_iters, 'parameters': n_params, 'tokens_per_iter': tokens_per_iter, 'tokens_before': tokens_before, 'environment': environment,
         'dataset': {'name': dataset, 'folder': data.folder, **{key: data.meta.get(key) for key in ('splits', 'source', 'command')}}}
resolved = {**{name: globals()[name] for name in knobs}, 'device': str(device), 'compile': compiling}
run = report.Run(out_dir, resolved, facts, resuming and not branching, start, enabled=master and not eval_only)
log = checkpoint.Log(out_dir, start, wandb_run, enabled=master and not eval_only)
tree = TreeSum(procs, model) if deterministic else None
whole, best_before = True, best_val_loss  # whether the newest checkpoint could be written; the best loss without it
writer = checkpoint.Writer(beside=device.type == 'cuda', failed=lambda: requests.saved(again_in=60))
if not eval_only:
    batches = Prefetch(read_batch, start * accumulation, ahead=0 if device.type == 'cpu' else 2)  # in order; where a GPU computes, by a thread
    x, y = to_device(*batches.next())
    batches.waited = 0.0  # the first one cannot come sooner
origin = time.perf_counter() - seconds  # perf_counter() - origin is the time spent on training, without evaluating and saving
logged_at, steps = seconds, 0  # when the last log line was, and the steps made since
step_time = None  # seconds per step, averaged over the latest ones
tick = procs.ticker('training', start, 'iterations')  # a last line on a terminal, with the time left, evaluations and all
for it in range(start, max(start, max_iters) + 1):
    row, last = {'iter': it}, it >= max_iters

    # once in a while: evaluate, save, stop if asked
    asked = requests.asked()
    first = branching and it == start  # is saved, so that the branch can be resumed, whatever comes
    if any(due(name, it, last) for name in jobs) or asked or first or (save_interval and it % save_interval == 0):
        procs.synchronize()
        seconds = time.perf_counter() - origin
        with spent('save'):
            best_val_loss = best_val_loss if saved() else best_before  # the best of those that were kept
        look_at_guard()
        evaluation = evaluation if evaluation.get('iter') == it else {'iter': it}
        found = {}
        for name in jobs:
            if due(name, it, last) and asked <= Requests.SAVE and (eval_only or name not in evaluation):  # not once more after a resume
                with spent('sample' if name == 'sample' else 'eval'):
                    found.update(jobs[name][2](it) or {})
                evaluation.update(found)
                asked = requests.asked()
            if stop_val_loss is not None and evaluation.get('val', math.inf) <= stop_val_loss and not last:
                procs.print(f"the validation loss is as low as stop_val_loss={stop_val_loss:g}")
                last = True  # what is due at the end is due now
        improved = found.get('val', math.inf) < best_val_loss  # False if it is not a number
        best_before, best_val_loss = best_val_loss, found['val'] if improved else best_val_loss
        regular = it % save_interval == 0 if save_interval else always_save_checkpoint
        is_new = it > start or first or (resuming and improved)  # not the file that was just read, not the random weights of the beginning
        if is_new and (improved or regular or asked or last or first) and not eval_only:
            with spent('save'):
                save(it, improved)
                whole = saved() if asked or last or not writer.beside else True  # what nobody waits for is looked at the next time
            best_val_loss = best_val_loss if whole else best_before
            if whole and asked == Requests.SAVE:
                procs.print(f"saved in {out_dir} after {it:,} iterations, as asked")
        origin = time.perf_counter() - seconds
    if evaluation.get('iter') == it and len(evaluation) > 1:
        row.update(train_loss=evaluation.get('train'), val_loss=evaluation.get('val'), **{name: evaluation.get(name) for name in ('perplexity', 'bpb', 'hellaswag', 'core')},
                   **{f'{name}_seconds': spent.get(name) for name in ('eval', 'save', 'sample')})
    if asked > Requests.SAVE or last or eval_only:
        break

    # the gradient, summed over micro-batches, averaged over processes
    loss_sum = torch.zeros((), device=device)
    for micro in range(accumulation):
        if dropout > 0:  # its random numbers, too, are a function of where we are: there is no state to save
            torch.manual_seed(int(hash64(seed, 3, (it * procs.world_size + procs.rank) * accumulation + micro)[0]) >> 1)
        procs.average_gradients(wrapped, micro == accumulation - 1)  # before forward, which looks at it as well as backward
        with autocast:
            micro_loss = wrapped(x, y)[1] / accumulation
        x, y = to_device(*batches.next())  # the next one, while the device still works
        scaler.scale(micro_loss).backward()
        loss_sum += micro_loss.detach()
        if deterministic:
            tree.add(micro_loss)
    loss = tree.finish() if deterministic else procs.sum(loss_sum) / procs.world_size

    # the update
    lr = get_lr(it)
    for group in optimizer.param_groups:
        group['lr'] = lr * group['lr_scale']  # each has its own rate, one factor moves all of them
    scaler.unscale_(optimizer)
    grad_norm = procs.clip(model, grad_clip if grad_clip > 0 else math.inf)
    guard.step(it, loss, grad_norm)  # skips what is not finite
    optimizer.zero_grad(set_to_none=True)
    steps += 1
    tick(it + 1, max_iters)

    # the log; reading the loss waits for the device, so not at every step
    if log_interval > 0 and it % log_interval == 0:
        loss = loss.item()
        seconds = time.perf_counter() - origin
        waiting, batches.waited = batches.waited / max(seconds - logged_at, 1e-9), 0.0
        dt, logged_at, steps = (seconds - logged_at) / steps, seconds, 0
        if it >= start + 5:  # the first steps are slower
            step_time = dt if step_time is None else 0.9 * step_time + 0.1 * dt
        mfu = model.estimate_mfu(accumulation * batch_size, dt, peak_flops)
        row.update(loss=loss, lr=lr, grad_norm=grad_norm.item(), tokens=(it + 1) * tokens_per_iter, tokens_total=tokens_before + (it + 1) * tokens_per_iter,
                   progress=(it + 1) / max_iters, seconds=seconds, ms=1000 * dt, data=100 * waiting, memory_gb=procs.memory(),
                   epoch=(it + 1) * samples_per_iter / samples_per_epoch, tokens_per_second=tokens_per_iter / dt, mfu=mfu and 100 * mfu)
        procs.print(f"iter {it}: loss {loss:.4f}, time {1000 * dt:.2f}ms, " + (f"mfu {100 * mfu:.2f}%, " if mfu else "") +
                    f"lr {lr:.2e}, grad norm {row['grad_norm']:.2f}, {tokens_per_iter / dt:,.0f} tok/s, epoch {row['epoch']:.2f}, data {row['data']:.1f}%" +
                    (f", eta {report.duration((max_iters - it - 1) * step_time)}" if step_time else ""))
        if it == 0 and from_scratch and (note := plan.first_loss(loss, data.meta['vocab_size'], n_embd)):
            procs.print(note)
    log.write(row)
    if 'loss' in row:
        look_at_guard()
log.write(row)
if not eval_only:
    batches.close()

outcome = 'done'
if not whole:
    outcome = 'ended without its last checkpoint'
    problem = f"the last checkpoint could not be written ({checkpoint.newest(out_dir) or 'none'} is the newest). make room, then: {command(['--init_from=auto', f'--out_dir={out_dir}'])}"
    if master:
        print(f"error: {problem}", file=sys.stderr)
elif asked > Requests.SAVE:
    by = 'max_minutes' if asked > 255 else signal.Signals(asked - 128).name
    outcome = f'stopped by {by}'
    procs.print(f"stopped by {by} after {it:,} iterations, " + (f"saved in {out_dir}. to go on: {command(['--init_from=resume', f'--out_dir={out_dir}'])}" if it > start or resuming
                else "with nothing to save yet"))
elif not eval_only:
    procs.print(f"done: {it:,} iterations in {report.duration(seconds)}" + (f", best validation loss {best_val_loss:.4f}" if data.val else "") +
                f". to see what it writes: python sample.py --out_dir={out_dir}")
    if overfit_batch and log_interval > 0 and master and it > 0:
        procs.print(plan.learned_by_heart([loss for _, loss in report.points(report.read_log(out_dir), 'iter', 'loss')]))
close(outcome, it)
if not whole or asked > Requests.SAVE:
    sys.exit(4 if not whole else asked % 256)
