"""
Train a GPT, on a laptop or on a cluster. The knobs below are the manual; python train.py --help prints them.

    $ python train.py config/quickstart.py                                    # a laptop, no GPU
    $ python train.py config/train_gpt2.py                                    # one GPU
    $ torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py  # eight GPUs of one machine

A first run may want another dataset, out_dir, batch_size, block_size, n_layer, n_head, n_embd, learning_rate,
max_iters. Several machines, Slurm, FSDP: docs/cluster.md.
An estimate first: python plan.py config/train_gpt2.py
"""

from typing import Literal

from configurator import configure

# -----------------------------------------------------------------------------
# The defaults train GPT-2 124M on OpenWebText. A knob that is None is derived or off, see its comment.
# files
out_dir = 'out'  # checkpoints, log.csv, run.json, report.md
init_from = 'scratch'  # 'resume': continue the run in out_dir; 'auto': resume if there is one;
# 'resume:PATH': continue that checkpoint in a new out_dir; PATH or a Hugging Face name: its weights only;
# 'auto:PATH': resume if there is a run in out_dir, else start from these weights; with torchrun's
# --max-restarts every word means its auto
overwrite = False  # True: a new run deletes the one that is in out_dir; not under --max-restarts
always_save_checkpoint = True  # False: only if the validation loss improves, at save_interval, at the end
save_interval: int = None  # iterations between checkpoints. None: one at each evaluation; 0: at the end
keep_checkpoints = 2  # the newest ones, besides the best; 0: all
# data
dataset = 'openwebtext'  # the folder data/<dataset>, made by prepare.py
data_dir: str = None  # None: data/ beside this file
batch_size = 12  # sequences per micro-batch and process
block_size = 1024  # context length, in tokens
gradient_accumulation_steps = 5 * 8  # over all processes: 12 x 1024 x 40 = 491,520 tokens per iteration
total_batch_size: int = None  # tokens per iteration; gradient_accumulation_steps follows, unless given later
token_noise = 0.0  # this share of the input is replaced by tokens of the batch; for small data try 0.05
teacher: str = None  # runs, as A,B, whose predictions are learned as well: distillation, for small data
document_mask = False  # True: a document sees no other. Conversations: always
seed = 1337  # for the initial weights, the order of the data, dropout and noise
# model
arch = 'gpt2'  # 'gpt2', 'llama', 'modern', 'local': see model.py
n_layer = 12
n_head = 12
n_embd = 768
n_kv_head: int = None  # key/value heads (grouped-query attention). None: n_head
mlp_width: int = None  # hidden size of the MLP. None: 4 n_embd; for swiglu 8/3, up to a multiple of 64
dropout = 0.0  # 0 for pretraining; for small data and finetuning try 0.1 or more
bias = False  # in Linear and LayerNorm
# parts of arch
norm: str = None  # 'layernorm', 'rmsnorm', 'rmsnorm_plain' (no gains). None here and below: as arch
mlp: str = None  # 'gelu', 'gelu_tanh', 'relu2', 'swiglu'
positions: str = None  # 'learned', 'rope'
rope_theta: float = None  # larger for longer contexts
rope_scaling: str = None  # 'none', 'llama3:FACTOR:LOW:HIGH:ORIGINAL_BLOCK_SIZE'
qk_norm: bool = None  # normalize queries and keys
tie: bool = None  # one matrix for the embedding and the head
softcap: float = None  # tanh bound on the logits; 0: none
# optimizer
learning_rate = 6e-4  # peak lr. The next three are for some of the parameters; None: this one
matrix_lr: float = None  # for the matrices inside the blocks. None with muon: 0.02
embedding_lr: float = None  # for the embeddings, including a tied head
head_lr: float = None  # for an untied head
matrix_optimizer: Literal['adamw', 'muon'] = 'adamw'  # for the matrices in the blocks
momentum = 0.95  # of muon; less for short runs with small batches
weight_decay = 1e-1  # on matrices and embeddings only
matrix_weight_decay: float = None  # on the matrices inside the blocks. None: weight_decay
beta1 = 0.9
beta2 = 0.95
adam_eps = 1e-8  # the configs of 'modern' set 1e-10: its head starts at 0
grad_clip = 1.0  # clip the gradient norm to this; 0: off
# schedule
max_iters = 600000  # number of updates
budget: str = None  # instead of max_iters: '1e9 tokens', '3 epochs', '20 tokens_per_param' (Chinchilla's)
# wsd: constant, then linear at the end
lr_schedule: Literal['cosine', 'linear', 'wsd', 'constant'] = 'cosine'
decay_fraction = 0.5  # for wsd: over this last share of the run the lr falls
decay_lr = True  # False: learning_rate throughout, whatever lr_schedule says, without warmup
warmup_iters = 2000  # of linear warmup of the lr
lr_decay_iters: int = None  # iteration at which min_lr is reached. None: max_iters
min_lr: float = None  # None: 0 for wsd, else learning_rate / 10
# evaluation and logging
eval_interval = 2000  # iterations between evaluations; 0: only at the end
eval_iters = 200  # batches of each split, always the same ones; 0: all of val.bin, and as many of train
eval_only = False  # evaluate once and exit
stop_val_loss: float = None  # end the run when the validation loss, if there is one, is this low
tasks = ''  # benchmarks: 'hellaswag,core'; 'core:500': with 500 examples of each task
tasks_interval = 0  # iterations between them; 0: only at the end
sample_interval: int | str = 0  # iterations between samples; '100x1.5': gaps grow; 0: never
sample_prompts: str = None  # file with a prompt per line. None: three empty ones
sample_tokens: int | str = 200  # length of each; '64 temperature=1 top_p=0.8'
overfit_batch = False  # True: one batch only. If its loss stays far from 0, something is broken
log_interval = 1  # iterations between lines on the console and in log.csv
wandb_log = False
wandb_project = 'owt'
wandb_run_name = 'gpt2'
# system
device = 'auto'  # 'cpu', 'cuda', 'cuda:1', 'mps'
dtype = 'auto'  # 'float32', 'bfloat16', 'float16' (with a GradScaler)
compile: bool | str = 'auto'  # torch.compile; auto: on GPUs, if it works there
backend = 'auto'  # 'nccl', 'gloo'
ddp_timeout = 600  # seconds a process waits for the others
shard = 1  # processes that share one copy of the model. 1: DDP; 0: all of them (FSDP); 8: hybrid
activation_checkpointing = False  # recompute activations in backward: less memory, up to a third more compute
peak_flops: float = None  # of this GPU, for MFU; None: by a table
max_minutes: float = None  # save and stop before this much time has passed
# -----------------------------------------------------------------------------
knobs, given = configure(globals())  # config files and --key=value, which win

import math  # only now: --help and a mistyped knob are answered without waiting for torch
import random
import sys

import numpy as np
import torch

from dataset import DROPOUT, NOISE, Loader, hash_seed
from model import GPT
from optim import create_optimizer
from support import checkpoint, cpu, devices, evaluate, load, log, parallel, resume, setup
from support.compiling import compile_for_training
from support.guard import Guard
from support.samples import samples_in_loop
from support.signals import Stop
from support.tasks import tasks_in_loop

# -----------------------------------------------------------------------------
# what follows from the knobs: where to start, derived values, checks, the run plan

dist = parallel.init(device, backend, ddp_timeout)
run = setup.resolve(knobs, given, dist)
globals().update(run.knobs)  # the last time that knobs are set: no more 'auto'

data, config = run.data, run.config  # a Dataset, a GPTConfig
ckpt, start_iter = run.ckpt, run.start_iter  # the checkpoint to start from, or None
grad_accum_steps = run.grad_accum_steps  # of this process; gradient_accumulation_steps is over all of them

# -----------------------------------------------------------------------------
# data


def batch_number(it, micro_step):
    """Counted over all iterations and processes. With two processes and three micro-steps each: 0, 1, 2 are
    the first process's, 3, 4, 5 the second one's, then comes the next iteration."""
    return (it * dist.world_size + dist.rank) * grad_accum_steps + micro_step


def get_batch(it, micro_step):
    """A micro-batch of this process: x, y (batch_size, block_size), maybe doc_ids. It keeps no state, so no
    resume, evaluation or further process changes which samples an iteration sees."""
    number = batch_number(0 if overfit_batch else it, micro_step)
    first = number * batch_size
    x, *others = data.train.batch(seed, range(first, first + batch_size), block_size)
    if token_noise:  # against learning by heart: https://arxiv.org/abs/1703.02573. The targets stay
        rng = np.random.default_rng(hash_seed(seed, NOISE, number))
        x = np.where(rng.random(x.shape) < token_noise, rng.permuted(x, axis=None), x)
    return [torch.from_numpy(part) for part in (x, *others)]


def loss_divisor(it, micro_step):
    """What a micro-batch's mean loss is divided by, so that they add up to the mean over the iteration's
    targets: grad_accum_steps, unless some targets are masked, as in conversations. Those that a get_batch of
    yours masks (-1) have to be counted here too, or it is a mean of the micro-batches' means."""
    it = 0 if overfit_batch else it
    first, size = batch_number(it, micro_step) * batch_size, batch_size * grad_accum_steps * dist.world_size
    ours = data.train.count_targets(seed, range(first, first + batch_size), block_size)
    all_of_it = data.train.count_targets(seed, range(it * size, (it + 1) * size), block_size)
    return all_of_it / (ours * dist.world_size)


batches = Loader(get_batch, start_iter, grad_accum_steps, dist.device)

# -----------------------------------------------------------------------------
# model and optimizer

torch.manual_seed(seed)
np.random.seed(seed)  # these two for what you add
random.seed(seed)
torch.set_float32_matmul_precision('highest' if dtype == 'float32' else 'high')  # high: TF32
model = resume.model_of_checkpoint(run) if ckpt else GPT(config)
cpu.faster(model)  # on a CPU: norms and attention by kernels of ours
if teacher:  # learns from all logits at once
    load.distill(model, teacher, run.data, dist.device)
else:  # if they are too large for that, a part of the tokens at a time
    devices.use_chunked_loss(model, batch_size * block_size, dist.device)
model.set_activation_checkpointing(activation_checkpointing)
model = dist.place(model, shard, dtype)  # onto the device: whole, or this process's shard
autocast = devices.autocast(dist.device, dtype)
peak_flops = peak_flops or devices.peak_flops_of(dist.device)
scaler = torch.amp.GradScaler(dist.device.type, enabled=dtype == 'float16')
muon_dtype = 'bfloat16' if dtype != 'float32' and devices.has_bfloat16(dist.device) else 'float32'
optimizer = create_optimizer(model, learning_rate, weight_decay, (beta1, beta2), adam_eps, matrix_optimizer,
                             matrix_lr, embedding_lr, head_lr, matrix_weight_decay, momentum, muon_dtype)
if run.resuming:  # else only the weights are ckpt's, if there is one
    resume.restore_optimizer(run, optimizer, scaler)
stop = Stop(dist, max_minutes)  # from here on SIGTERM, Ctrl-C, ... are requests to save and stop
ddp_model = dist.wrap(model)  # trains; `model`, inside it, is evaluated and saved
if compile:  # tried on one step, gradients dropped; 'auto': off if it fails
    ddp_model = compile_for_training(model, ddp_model, get_batch(start_iter, 0), autocast, dist, run)
dist.check_batches(ddp_model)  # no two processes may train on the same one
log.tell_duration(model, ddp_model, get_batch(start_iter, 0), autocast, dist, run)
guard = Guard(optimizer, scaler, stop, dist, run)  # skips updates that are not finite

# -----------------------------------------------------------------------------
# helpers


def get_lr(it):
    # 1) linear warmup
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if lr_schedule == 'constant' or it < run.decay_start:  # decay_start: the warmup's end; wsd: later
        return learning_rate
    # 2) past the end of the decay
    if it >= lr_decay_iters:
        return min_lr
    # 3) in between, from 1 down to 0
    progress = (it - run.decay_start) / (lr_decay_iters - run.decay_start)
    factor = 0.5 * (1 + math.cos(math.pi * progress)) if lr_schedule == 'cosine' else 1 - progress
    return min_lr + factor * (learning_rate - min_lr)


def estimate_loss(it):
    """Mean loss over windows spread evenly over each split, the same ones each time, shared by processes."""
    return evaluate.losses(model, data, run.eval_windows, batch_size, dist, autocast, stop, it)


# What is measured now and then: name -> (interval, function of the iteration that returns {metric: number}).
# Add yours here; each metric becomes a column of log.csv. All processes call it, with the model in train
# mode and gradients on: use eval_mode in support/evaluate.py
evaluated = {'loss': (eval_interval, estimate_loss)}
if tasks:
    evaluated['tasks'] = tasks_interval, tasks_in_loop(run, model, dist, autocast, stop)
if sample_interval:
    evaluated['sample'] = sample_interval, samples_in_loop(run, model, dist, autocast, stop)


def state(it, best_val_loss):
    """What a checkpoint holds: nanoGPT's six keys, and what an exact resume and an offline sample.py need."""
    # keep_vars: a tied matrix is recognized and saved once. run.asked: knobs as given, with their 'auto'
    return dist.full_state_dict({  # whole tensors, each a copy if training goes on while they are written
        'model': model.state_dict(keep_vars=True), 'optimizer': optimizer.state_dict(),
        'model_args': config.model_args(), 'iter_num': it, 'best_val_loss': best_val_loss,
        'config': run.asked, 'optimizer_class': type(optimizer).__name__, 'scaler': scaler.state_dict(),
        **guard.state(), **clock.state(), **evaluator.state(), **logger.state(), **run.state(it),
    }, copy=saver.is_async)


clock = log.Clock(run, dist)  # seconds of training
evaluator = evaluate.Evaluator(evaluated, run, clock, stop, dist)  # knows what is due
saver = checkpoint.Saver(state, run, clock, guard, stop, dist)  # knows when to save, and the best loss
logger = log.Logger(run, clock, dist)  # console, log.csv, run.json, wandb
ckpt = run.ckpt = None  # no longer needed: free its memory

# -----------------------------------------------------------------------------
# the loop: iteration `it` starts with `it` updates made; the last one evaluates and saves but does not update

clock.start()
for it in range(start_iter, max(start_iter, max_iters) + 1):
    last = it >= max_iters

    # once in a while: evaluate, sample, save. The clock stands still meanwhile
    request = stop.poll()  # None, 'save' or 'stop', the same in every process
    if evaluator.due(it, last) or saver.due(it, request):
        with clock.paused():
            guard.report()  # tells skipped updates; after ten in a row it stops the run, unsaved
            metrics, last = evaluator.run(it, last)  # last: also if stop_val_loss is reached
            saver.save(it, metrics, last)
            logger.metrics(it, metrics)
    if last or eval_only or stop.is_stopping():
        break

    # the gradient, averaged over micro-batches and processes
    loss_sum = torch.zeros((), device=dist.device)
    for micro_step in range(grad_accum_steps):
        # random numbers, of dropout above all, are seeded anew for each micro-batch: no state to save
        torch.manual_seed(hash_seed(seed, DROPOUT, batch_number(it, micro_step)))
        # DDP averages gradients at the last micro-step alone, FSDP at each; must be set before forward
        ddp_model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
        batch = next(batches)
        with autocast:
            batch_loss = ddp_model(*batch, return_logits=False)[1]  # of (None, mean loss)
            micro_loss = batch_loss / loss_divisor(it, micro_step)
        scaler.scale(micro_loss).backward()
        loss_sum += micro_loss.detach()
    loss = dist.mean(loss_sum)  # over the processes, the same in all of them

    # the update
    lr = get_lr(it) if decay_lr else learning_rate  # a get_lr of yours need not ask
    for group in optimizer.param_groups:
        group['lr'] = lr * group.get('lr_scale', 1.0)  # a group's share
    scaler.unscale_(optimizer)
    grad_norm = dist.clip_grad_norm_(model, grad_clip)
    guard.step(it, loss, grad_norm)  # optimizer.step(), unless loss or gradient are not finite
    optimizer.zero_grad()
    model.zero_grad()  # also of parameters that an optimizer of yours leaves out
    clock.tick(it)
    logger.add(loss)  # into the mean of the latest ones

    # the log. It waits for the device: a larger log_interval waits less often
    if log_interval > 0 and it % log_interval == 0:
        ms = clock.lap(batches)  # per iteration since the last line
        mfu = model.estimate_mfu(batch_size * grad_accum_steps, ms / 1000, peak_flops)
        # what you add becomes a column of log.csv
        logger.iteration(it, dict(loss=loss.item(), lr=lr, grad_norm=grad_norm.item(), ms=ms, mfu=mfu))
        guard.report()

batches.close()
ddp_model = None  # DDP has to go before the process group does
if status := logger.close(it, saver, stop):  # last line, report; ends the process group
    sys.exit(status)
