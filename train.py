"""
Train a GPT. Everything that happens is in this file, from top to bottom: knobs, processes and device, where
to start, data, model and optimizer, helpers, the loop.

    $ python train.py config/quickstart.py                                    # a laptop, five minutes
    $ python train.py config/train_gpt2.py --batch_size=32                    # one GPU
    $ torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py  # eight; more: docs/cluster.md
"""

import os

from configurator import launched_by_torchrun, process_ranks, InputError, check_range, configure, kinds_of, print0

# -----------------------------------------------------------------------------
# The defaults train GPT-2 (124M) on OpenWebText. None: derived, or off; the comment says which.
# files
out_dir = 'out'  # checkpoints, log.csv, run.json, report.md
init_from = 'scratch'  # 'resume': continue the run in out_dir. Or the weights to start from: a run's folder,
# a checkpoint, a Hugging Face folder or name ('gpt2')
auto_resume = False  # if out_dir holds a run, continue it, whatever init_from says: for restarts
resume_step = 0  # the checkpoint to resume from, by its iteration; 0: the newest
overwrite = False  # if out_dir holds a run, delete it
always_save_checkpoint = True  # False: at evaluations only those that improve the validation loss
save_interval: int = None  # iterations between checkpoints. None: at each evaluation; 0: only at the end. If
# given, a multiple of eval_interval: the best is one of them. Each 1e9 tokens: 1e9 / tokens per iteration
keep_checkpoints = 2  # the newest ones, besides the best; 0: all
# data
dataset = 'openwebtext'  # data/<dataset>, made by prepare.py
data_dir: str = None  # None: data/ beside this file
batch_size = 12  # sequences per micro-batch and process
block_size = 1024  # context length, in tokens
gradient_accumulation_steps = 5 * 8  # micro-batches per iteration, over all processes
total_batch_size: int = None  # tokens per iteration; if given, gradient_accumulation_steps follows from it
document_mask = False  # attention stays inside a document. Conversations: always
overfit_batch = False  # train on the first batch only. If its loss stays far from 0, something is broken
seed = 1337  # of the initial weights, the order of the data, dropout
# model
arch = 'gpt2'  # 'gpt2', 'llama', 'modern': see model.py
n_layer = 12
n_head = 12
n_embd = 768
n_kv_head: int = None  # key/value heads (grouped-query attention). None: n_head
mlp_width: int = None  # hidden size of the MLP. None: 4 n_embd; for swiglu 8/3, up to a multiple of 64
dropout = 0.0  # 0 for pretraining; for small data and finetuning try 0.1 or more
bias = False  # in Linear and LayerNorm
# optimizer
learning_rate = 6e-4  # peak lr. The next three are for some of the parameters; None: this one
matrix_lr: float = None  # matrices inside the blocks. None with muon: 0.02
embedding_lr: float = None  # embeddings, including a tied head
head_lr: float = None  # an untied head
matrix_optimizer = 'adamw'  # or 'muon': for the matrices inside the blocks
momentum = 0.95  # of muon; less for short runs with small batches
weight_decay = 1e-1  # on matrices and embeddings
matrix_weight_decay: float = None  # on the matrices inside the blocks. None: weight_decay
beta1 = 0.9
beta2 = 0.95
adam_eps = 1e-8
grad_clip = 1.0  # clip the gradient norm to this; 0: off
# schedule
max_iters = 600000  # number of updates; fewer if one of the next two ends earlier
max_tokens: float = None
max_epochs: float = None
lr_schedule = 'cosine'  # 'linear', 'constant'; 'wsd': constant, then linear at the end
decay_fraction = 0.5  # wsd: the lr falls over this last share of lr_decay_iters
decay_lr = True  # False: learning_rate throughout, without warmup
warmup_iters = 2000
lr_decay_iters: int = None  # iteration at which min_lr is reached. None: max_iters
min_lr: float = None  # None: 0 for wsd, else learning_rate / 10
# evaluation and samples; intervals are in iterations
eval_interval = 2000  # 0: only at the end
eval_iters = 200  # batches of each split, always the same ones; 0: all of val, and as many of train
eval_only = False  # evaluate once and exit
stop_val_loss: float = None  # stop when the validation loss is this low
tasks = ''  # benchmarks: 'hellaswag,core'
tasks_interval = 0  # 0: only at the end
max_per_task = 0  # examples of each task; 0: all
sample_interval = 0  # 0: never
sample_growth = 1.0  # each gap between samples is this times the one before
sample_prompts: str = None  # file with a prompt per line; a line given twice gives two texts. None: three
# short prompts
sample_tokens = 100
temperature = 0.8  # 0: always the likeliest token
top_k = 200
top_p = 1.0
# logging
log_interval = 1  # iterations between lines on the console and in log.csv; each waits for the device
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
max_minutes: float = None  # save and stop after this much time
# -----------------------------------------------------------------------------
config, given = configure(globals())  # all knobs as a dict; the names that a config file or a flag has set

import functools
import gc
import math
import signal
import sys
import time
import traceback
import warnings
from contextlib import nullcontext, suppress

# Threads of GNU's OpenMP spin while they wait for each other. Beside one busy process a step of a small
# network on two cores took 3 to 41 times as long; with fewer spins 2 to 2.4, and a tenth longer alone
os.environ.setdefault('GOMP_SPINCOUNT', '3000')

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel as DDP

import checkpoint
from benchmarks import evaluate_tasks, load_tasks
from dataset import DROPOUT, SAMPLES, Dataset, Loader, hash_seed
from evaluation import text_loss
from files import append_row, first_line, format_count, format_duration, lock_folder, read_json, run_flags, write_json
from model import GPT, GPTConfig
from optim import create_optimizer, load_moments
from plot import write_report
from processes import (
    all_finite, all_reduce_any, autocast, check_same, choose_compile,
    choose_device, choose_dtype, clip_grad_norm, environment, full_state_dict, init_processes, loss_chunk_size,
    mean_over_processes, name_of, peak_flops_of, peak_memory, shard_model, synchronize, warm_up)
from sampling import generate_text, next_sample_step, prompts_for_samples


# -----------------------------------------------------------------------------
# processes and device
start_time = time.perf_counter()  # unlike time.time(), it is never set back
ddp = launched_by_torchrun()
rank, local_rank, world_size = process_ranks()
master_process = rank == 0  # prints, logs and saves
device = choose_device(device, local_rank)  # 'cpu', 'cuda:0', 'mps'
config['device'] = device
device_type = device.partition(':')[0]
if ddp:
    init_processes(backend, device, ddp_timeout)

# -----------------------------------------------------------------------------
# where to start. On a resume, what the run was started with (its flags and configs) holds unless it is given
# again now; what was left to this file is this file's; architecture and block_size are the checkpoint's
has_run = all_reduce_any(master_process and checkpoint.exists(out_dir))  # as the first process sees it
resuming = init_from == 'resume' or (auto_resume and has_run)
if int(os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')) > 0:
    overwrite = False  # the run that is there is this one, and torchrun has restarted it
    resume_step = 0
if has_run and not (resuming or overwrite or eval_only):
    raise InputError(f"{out_dir} already holds a run. continue it: --init_from=resume; keep it: --out_dir=ANOTHER; "
          "delete it: --overwrite=True")
ckpt = None
lock = None
if resuming:
    if has_run and master_process and not eval_only:
        lock = lock_folder(out_dir)  # before it is read: another run may be writing
    ckpt = checkpoint.load_for_resume(out_dir, resume_step)
elif init_from != 'scratch':
    ckpt = checkpoint.load_weights(init_from)
if ckpt:
    kinds = kinds_of(globals(), config)  # the types that a checkpoint's values are checked against
    config, given = checkpoint.inherit(config, given, ckpt, resuming, kinds)  # prints each difference
    globals().update(config)
start_iter = ckpt['iter_num'] if resuming else 0
at_least_1 = ['batch_size', 'block_size', 'gradient_accumulation_steps', 'total_batch_size', 'n_layer',
              'n_head', 'n_embd', 'n_kv_head', 'mlp_width', 'sample_tokens', 'top_k', 'ddp_timeout']
at_least_0 = ['max_iters', 'warmup_iters', 'lr_decay_iters', 'learning_rate', 'matrix_lr', 'embedding_lr',
              'head_lr', 'weight_decay', 'matrix_weight_decay', 'adam_eps', 'grad_clip', 'eval_interval',
              'eval_iters', 'log_interval', 'save_interval', 'sample_interval', 'sample_growth',
              'tasks_interval', 'max_per_task', 'keep_checkpoints', 'resume_step', 'shard', 'temperature']
check_range(config, at_least_1, 1)
check_range(config, at_least_0, 0)
check_range(config, ['max_tokens', 'max_epochs', 'max_minutes'], 0, exclude=0)
check_range(config, ['dropout', 'beta1', 'beta2', 'momentum'], 0, 1, exclude=1)
check_range(config, ['decay_fraction', 'top_p'], 0, 1, exclude=0)
check_range(config, ['min_lr'], 0, learning_rate if decay_lr else None)
check_range(config, ['seed'], 0, 2**63 - 1)
if lr_schedule not in ('cosine', 'linear', 'constant', 'wsd'):
    raise InputError(f"no such lr_schedule ({lr_schedule}). use cosine, linear, constant or wsd")
if matrix_optimizer not in ('adamw', 'muon'):
    raise InputError(f"no such matrix_optimizer ({matrix_optimizer}). use adamw or muon")
check_same({name: config[name] for name in config if name not in ('device', 'data_dir', 'wandb_run_name')})

# -----------------------------------------------------------------------------
# data, and what follows from the knobs; config keeps them as they were given, with 'auto' and None, but for
# the device
data = Dataset(dataset, data_dir, block_size, seed, document_mask)
check_same(data.fingerprint)
dtype = choose_dtype(dtype, device)
compile = choose_compile(compile, device) and not eval_only  # for one evaluation it would not pay
if shard == 0:
    shard = world_size
if world_size % shard:
    raise InputError(f"shard={shard} does not divide the {world_size} processes. use a divisor of them, or 0: all")
micro_batches = gradient_accumulation_steps  # per iteration, over all processes
if total_batch_size:
    micro_batches = total_batch_size / (batch_size * block_size)  # a fraction, if that does not divide
if micro_batches % world_size:
    raise InputError(f"an iteration is {micro_batches:g} micro-batches of {batch_size} x {block_size} tokens, which do "
          f"not divide among {world_size} processes. change batch_size, or the number of tokens")
grad_accum_steps = int(micro_batches) // world_size  # of this process
samples_per_iter = batch_size * grad_accum_steps * world_size
tokens_per_iter = samples_per_iter * block_size
tokens_per_epoch = data.train.n_targets(block_size)
if max_tokens:
    max_iters = min(max_iters, math.ceil(max_tokens / tokens_per_iter))
if max_epochs:
    max_iters = min(max_iters, math.ceil(max_epochs * tokens_per_epoch / tokens_per_iter))
if lr_decay_iters is None:
    lr_decay_iters = max_iters
if min_lr is None:
    min_lr = 0.0 if lr_schedule == 'wsd' else learning_rate / 10
vocab_size = data.vocab_size
if ckpt:  # same tokenizer; on a resume same data and batch, as samples would be repeated or left out
    vocab_size = checkpoint.check_data(ckpt, data, tokens_per_iter, resuming and not eval_only)
benchmarks = load_tasks(tasks, max_per_task, data_dir, data.tokenizer, block_size) if tasks else {}
prompts = prompts_for_samples(sample_prompts, data.tokenizer) if sample_interval else []


def micro_batch_number(it, micro_step):
    """Counted over all iterations and processes. Samples and dropout follow from it: no state to save."""
    return (it * world_size + rank) * grad_accum_steps + micro_step


@functools.lru_cache(maxsize=2)  # asked for by each micro-batch
def targets_of_iteration(it):
    """How many targets of an iteration, over all processes, are not masked."""
    numbers = range(it * samples_per_iter, (it + 1) * samples_per_iter)
    return data.train.count_targets(seed, numbers, block_size)


def get_batch(it, micro_step):
    """x, y (batch_size, block_size), document ids or None, divisor. y is -1 where the loss is masked, as in
    conversations; micro-batch losses divided by `divisor` add up to the iteration's mean over its targets."""
    it = 0 if overfit_batch else it
    first = micro_batch_number(it, micro_step) * batch_size
    x, y, doc_ids = data.train.batch(seed, range(first, first + batch_size), block_size)
    divisor = grad_accum_steps
    if data.train.masked:
        divisor = targets_of_iteration(it) / (max(1, (y >= 0).sum()) * world_size)
    return x, y, doc_ids, divisor


batches = Loader(get_batch, start_iter, grad_accum_steps, device)  # for a GPU it reads ahead

# -----------------------------------------------------------------------------
# model and optimizer
torch.manual_seed(seed)
torch.set_float32_matmul_precision('highest' if dtype == 'float32' else 'high')  # high: TF32
if ckpt:
    model = checkpoint.build_model(ckpt, block_size, dropout, vocab_size)
else:
    try:
        model = GPT(GPTConfig(vocab_size=vocab_size, block_size=block_size, arch=arch, n_layer=n_layer,
                              n_head=n_head, n_kv_head=n_kv_head, n_embd=n_embd, mlp_width=mlp_width,
                              dropout=dropout, bias=bias))
    except ValueError as e:  # sizes that do not fit together
        raise InputError(str(e))
if matrix_optimizer == 'muon' and model.config.fused_qkv:
    raise InputError(f"muon wants query, key and value in matrices of their own, and arch={arch} has them in one. use "
          "--arch=llama or modern, or --matrix_optimizer=adamw")
model.activation_checkpointing = activation_checkpointing
model.loss_chunk_size = loss_chunk_size(device, batch_size * block_size, model.config.vocab_size, compile)
n_params = model.get_num_params(non_embedding=False)
if shard > 1:
    shard_model(model, shard, dtype, device)  # FSDP: before the optimizer, as parameters become DTensors
model.to(device)
optimizer = create_optimizer(
    model, learning_rate=learning_rate, weight_decay=weight_decay, betas=(beta1, beta2), eps=adam_eps,
    matrix_optimizer=matrix_optimizer, matrix_lr=matrix_lr, embedding_lr=embedding_lr, head_lr=head_lr,
    matrix_weight_decay=matrix_weight_decay, momentum=momentum,
    dtype='bfloat16' if dtype == 'bfloat16' else 'float32', replicas=world_size if shard == 1 else 1)
scaler = torch.amp.GradScaler(device_type, enabled=dtype == 'float16')
if resuming:
    try:
        n_fresh = load_moments(optimizer, ckpt['optimizer'])  # rates, betas and decay are this run's
    except ValueError as e:
        raise InputError(str(e))
    if n_fresh:
        print0(f"note: {n_fresh} parameters start without moments, as the checkpoint has none of theirs")
    if scaler.is_enabled() and ckpt.get('scaler'):
        scaler.load_state_dict(ckpt['scaler'])
ctx = autocast(device, dtype)
if compile and (shard > 1 or device_type == 'cpu'):
    # FSDP gathers a block before it computes; on a CPU the whole is no faster, and takes minutes to compile
    for block in model.transformer.h:
        block.compile()
elif compile:
    # CUDA graphs, where the host launches kernels more slowly than the GPU computes them. Not with
    # accumulation (https://github.com/pytorch/pytorch/issues/169545)
    graphs = not ddp and grad_accum_steps == 1 and not activation_checkpointing and n_params < 50e6
    model.compile(mode='reduce-overhead' if graphs else None)


def wrap_ddp():
    """The model that trains; `model` itself, inside it, is evaluated and saved."""
    if not ddp or shard > 1:
        return model
    # the heir of broadcast_buffers is not in torch 2.9 yet
    warnings.filterwarnings('ignore', message='`broadcast_buffers` is deprecated')
    return DDP(model, device_ids=[local_rank] if device_type == 'cuda' else None, broadcast_buffers=False,
               gradient_as_bucket_view=True)


ddp_model = wrap_ddp()
if (compile or ddp or device_type == 'cuda') and not eval_only:
    # A first step, whose gradients are dropped: compiling is not on the clock, and too large a batch shows at
    # once. DDP reorders its buckets after its first backward pass, which changes the order of its sums: done
    # here, a resumed run sums in the same order
    with_doc_ids = document_mask or data.train.masked
    optional = compile and config['compile'] == 'auto'  # where the compiler fails, the run goes on
    if not warm_up(ddp_model, batch_size, block_size, with_doc_ids, ctx, device, optional):
        del ddp_model  # the failed step may have left it in the middle of something
        gc.collect()
        ddp_model = wrap_ddp()
        warm_up(ddp_model, batch_size, block_size, with_doc_ids, ctx, device, optional=False)

# -----------------------------------------------------------------------------
# helpers


def get_lr(it):
    if not decay_lr:
        return learning_rate
    # 1) linear warmup
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    decay_start = warmup_iters
    if lr_schedule == 'wsd':
        decay_start = max(warmup_iters, round(lr_decay_iters * (1 - decay_fraction)))
    # 2) constant until the decay
    if lr_schedule == 'constant' or it < decay_start:
        return learning_rate
    # 3) past its end
    if it >= lr_decay_iters:
        return min_lr
    # 4) in between, from 1 down to 0
    coeff = 1 - (it - decay_start) / (lr_decay_iters - decay_start)
    if lr_schedule == 'cosine':
        coeff = 0.5 * (1 - math.cos(math.pi * coeff))
    return min_lr + coeff * (learning_rate - min_lr)


def estimate_loss():
    """Loss and bits per byte of each split, {'train_loss': 3.1, ...}, over eval_iters x batch_size windows
    spread evenly over it: always the same ones, shared by the processes. None if should_stop() ended it."""
    n_windows = eval_iters * batch_size or data.n_eval_windows(block_size)
    metrics = {}
    for split, tokens in data.splits.items():
        found = text_loss(model, tokens, n_windows, block_size, batch_size, ctx, rank, world_size,
                          should_stop)
        if found is None:
            return None
        metrics[f'{split}_loss'] = found['loss']
        metrics[f'{split}_bpb'] = found['bpb']
    return metrics


def wall_seconds():
    """Return the time since the start of train.py, plus that of the starts before a resume."""
    return wall_seconds_before + time.perf_counter() - start_time


def log(it, metrics):
    """A row of log.csv, and of Weights & Biases; metrics: {column: number}."""
    tokens = it * tokens_per_iter
    row = {'iter': it, 'tokens': tokens, 'tokens_total': tokens_before + tokens, 'seconds': train_seconds,
           'wall_seconds': wall_seconds(), **metrics}
    if master_process and not eval_only:
        append_row(os.path.join(out_dir, 'log.csv'), row)
        if wandb_log:
            names = {'loss': 'iter/loss', 'train_loss': 'train/loss', 'val_loss': 'val/loss'}
            wandb.log({names.get(name, name): value for name, value in row.items() if value is not None})


def save(it, best_val_loss, best_iter, improved):
    """nanoGPT's six keys, and what an exact resume and an offline sample.py need. Whether it was written."""
    state = full_state_dict({  # gathers what FSDP has divided: all processes take part
        'model': model.state_dict(keep_vars=True),  # so that a tied matrix is recognized, and saved once
        'optimizer': optimizer.state_dict(),
        'model_args': model.config.model_args(),
        'iter_num': it,
        'best_val_loss': best_val_loss,
        'config': config,
        'given': sorted(given),
        'scaler': scaler.state_dict(),
        'tokenizer': data.tokenizer_state,
        'data': data.fingerprint,
        'tokens_per_iter': tokens_per_iter,
        'tokens': tokens_before + it * tokens_per_iter,
        'train_seconds': train_seconds,
        'wall_seconds': wall_seconds(),
        'best_iter': best_iter,
        'commit': record['commit'],
        'starts': record['starts'],
        'loss_ema': loss_ema,
        'wandb_run_id': wandb_run_id,
    })
    # whole or not at all; a full disk is a warning, and the older ones stay
    failed = master_process and not checkpoint.save(
        out_dir, state, best=improved, only_best=not always_save_checkpoint, keep=keep_checkpoints)
    return not all_reduce_any(failed)


def note_failure(job, e):
    """Print the traceback of a job that training can do without. Raise it where it has to end the run: with
    several processes, as the others may wait for this one, unless the job fails in all of them alike."""
    if eval_only or (ddp and not isinstance(e, FloatingPointError)):
        raise e
    print0(f"note: {job} failed, training continues\n{traceback.format_exc()}")


stop_signal = 0


def request_stop(number, frame):
    global stop_signal
    if stop_signal and number == signal.SIGINT and not ddp:
        raise KeyboardInterrupt  # a second Ctrl-C does not wait for the save. torchrun sends two by itself
    stop_signal = number
    if master_process:
        text = f"{signal.Signals(number).name} received: saving, then stopping"
        if not ddp:
            text += ". Ctrl-C stops at once, without saving"
        with suppress(OSError):  # the terminal may be closed
            os.write(1, f'{text}\n'.encode())  # print() fails if the signal came in the middle of another one


for name in ('SIGTERM', 'SIGINT', 'SIGUSR1', 'SIGHUP'):
    number = getattr(signal, name, None)  # Windows does not have the last two
    if name == 'SIGHUP' and number and signal.getsignal(number) == signal.SIG_IGN:
        continue  # nohup: the run outlives its terminal
    if number:
        signal.signal(number, request_stop)


def should_stop():
    """Return whether a signal came or max_minutes are over, in any process. All processes call it."""
    out_of_time = max_minutes is not None and time.perf_counter() - start_time > 60 * max_minutes
    return all_reduce_any(stop_signal or out_of_time)  # over gloo: no wait for a GPU

# -----------------------------------------------------------------------------
# the plan, then the run's folder: touched only now, when all that can fail has succeeded
overrides = [f"{name}={config[name]}" for name in config if name in given]
print0(f"overrides: {', '.join(overrides) or 'none'}")
validation = data.val.summary(block_size) if data.val else 'none'
print0(f"dataset: {data.name}, {data.train.summary(block_size)}, {tokens_per_epoch / tokens_per_iter:,.1f} "
       f"iterations per epoch; validation: {validation}")
print0(f"model: {arch}, n_layer {n_layer}, n_head {n_head}, n_embd {n_embd}, block_size {block_size}, "
       f"vocab_size {model.config.vocab_size}: {n_params:,} parameters, "
       f"{model.flops_per_token() / 1e6:,.1f} MFLOPs per token")
print0(f"batch: {tokens_per_iter:,} tokens per iteration = {batch_size} sequences x {block_size} tokens "
       f"x {grad_accum_steps} micro-batches x {world_size} processes")
budget = max_iters * tokens_per_iter
print0(f"budget: {max_iters:,} iterations = {format_count(budget)} tokens = "
       f"{budget / tokens_per_epoch:.2f} epochs = {budget / n_params:.1f} tokens per parameter")
schedule = f"learning_rate {learning_rate:g}"
for name in ('matrix_lr', 'embedding_lr', 'head_lr'):
    if config[name] is not None:
        schedule += f", {name} {config[name]:g}"
if decay_lr:
    schedule += f", warm-up {warmup_iters:,} iterations ({warmup_iters / max(1, max_iters):.1%} of the run)"
if decay_lr and lr_schedule != 'constant':
    schedule += f", {lr_schedule} to {min_lr:g} at iteration {lr_decay_iters:,}"
print0(f"schedule: {schedule}")
print0(f"system: {name_of(device)} ({device}), {dtype}, compile {compile}, torch {torch.__version__}")
print0(f"a guess has the loss ln({model.config.vocab_size}) = {math.log(model.config.vocab_size):.2f}")
wandb_run_id = ckpt.get('wandb_run_id') if resuming else None
if wandb_log and master_process and not eval_only:
    import wandb
    try:
        wandb_run_id = wandb.init(project=wandb_project, name=wandb_run_name, config=config,
                                  id=wandb_run_id, resume='allow').id
    except Exception as e:  # no login, a name that it does not take, no network
        raise InputError(f"Weights & Biases does not start ({first_line(e)}). wandb login, WANDB_MODE=offline or "
              "--wandb_log=False")
record = {
    **environment(device), 'dtype': dtype, 'compile': compile, 'config': config, 'given': sorted(given),
    'dataset': data.fingerprint, 'tokenizer': data.tokenizer_state.get('name', data.tokenizer_state['kind']),
    'n_params': n_params, 'tokens_per_iter': tokens_per_iter, 'max_iters': max_iters, 'from_iter': start_iter,
    'outcome': None}
starts = []  # of this run; the first one tells which weights a finetuning began from
if resuming:
    starts = read_json(os.path.join(out_dir, 'run.json')).get('starts') or ckpt.get('starts') or []
record['starts'] = [*starts, {
    'time': time.strftime('%Y-%m-%d %H:%M:%S %z'), 'command': record['command'], 'commit': record['commit'],
    'init_from': 'resume' if resuming else init_from, 'from_iter': start_iter}]
if master_process and not eval_only:
    # the lock is held as long as the process lives: no other run writes here
    lock = checkpoint.prepare_folder(out_dir, start_iter, overwrite and not resuming, lock,
                                     ckpt.get('best_iter') if resuming else None)
    write_json(os.path.join(out_dir, 'run.json'), record)

# -----------------------------------------------------------------------------
# the loop: max_iters updates. The last pass makes none: it evaluates, samples and saves the final weights
best_val_loss = ckpt['best_val_loss'] if resuming else math.inf
best_iter = ckpt.get('best_iter') if resuming else None
train_seconds = ckpt['train_seconds'] if resuming else 0.0  # without evaluating, sampling, saving
wall_seconds_before = ckpt.get('wall_seconds', train_seconds) if resuming else 0.0
tokens_before = ckpt.get('tokens', 0) if ckpt else 0  # what the weights had seen when this run began
loss_ema = [0.0, 0.0]  # of the logged losses, each with 0.98 of the weight of the next: sum, weight
if resuming:
    tokens_before = max(0, tokens_before - start_iter * tokens_per_iter)
    loss_ema = ckpt.get('loss_ema') or loss_ema
ckpt = None  # free its memory
samples = ''
written = True  # False: the newest checkpoint could not be written
outcome = 'done'
loss_sum = torch.zeros((), device=device)  # of the last iteration
logged_iter, logged_seconds = start_iter, train_seconds  # at the last log line
start_seconds = train_seconds
t0 = time.perf_counter()
for it in range(start_iter, max(start_iter, max_iters) + 1):
    last = it >= max_iters
    stopping = should_stop()
    evaluating = not stopping and (last or eval_only or (eval_interval > 0 and it % eval_interval == 0))
    benchmarking = not stopping and tasks and (last or eval_only or (
        tasks_interval > 0 and it > 0 and it % tasks_interval == 0))
    sampling = not stopping and it > 0 and sample_interval > 0 and (
        last or it == next_sample_step(it, sample_interval, sample_growth))
    saving = last or stopping or (save_interval and it % save_interval == 0)

    # once in a while: evaluate, save, run benchmarks, sample. The clock stands still
    if evaluating or benchmarking or sampling or saving:
        synchronize(device)
        train_seconds += time.perf_counter() - t0
        if not all_finite([loss_sum, *model.parameters()]):  # a good checkpoint stays in its place
            outcome = 'diverged'
            break
        model.eval()
        val_loss = math.inf
        if evaluating:
            metrics = estimate_loss()
            if metrics is None:  # interrupted: it counts for nothing
                evaluating = benchmarking = sampling = False
                stopping = saving = True
        if evaluating:
            losses = {split: metrics[f'{split}_loss'] for split in data.splits}
            print0(f"step {it}: " + ', '.join(f"{split} loss {losses[split]:.4f}" for split in losses))
            if not math.isfinite(sum(losses.values())):
                outcome = 'diverged'
                break
            log(it, metrics)
            val_loss = losses.get('val', math.inf)
            if stop_val_loss is not None and val_loss <= stop_val_loss:
                print0(f"the validation loss is as low as stop_val_loss={stop_val_loss:g}")
                last = saving = True
                benchmarking = bool(tasks)
                sampling = it > 0 and sample_interval > 0
        improved = it > 0 and val_loss < best_val_loss
        if save_interval is None:
            saving = saving or improved or (evaluating and always_save_checkpoint)
        if saving and (it > start_iter or improved) and not eval_only:
            new_best_loss = val_loss if improved else best_val_loss
            new_best_iter = it if improved else best_iter
            written = save(it, new_best_loss, new_best_iter, improved)
            if written:
                best_val_loss, best_iter = new_best_loss, new_best_iter
                record.update(iterations=it, best_val_loss=best_val_loss, best_iter=best_iter,
                              train_seconds=train_seconds)
                if master_process:
                    write_json(os.path.join(out_dir, 'run.json'), record)
        # what may fail, or take hours, comes after the weights are saved
        if benchmarking:
            try:
                task_metrics, _ = evaluate_tasks(model, benchmarks, ctx, rank, world_size, should_stop)
                if task_metrics:
                    log(it, task_metrics)
                if len(task_metrics) < len(benchmarks):  # interrupted
                    sampling = False
                    stopping = last  # before the last pass, the next one saves and stops
            except Exception as e:
                note_failure('the benchmarks', e)
        if sampling:  # in all processes, as FSDP needs them
            try:
                text = f'samples after {it} iterations'
                if not last:
                    next_step = next_sample_step(it + 1, sample_interval, sample_growth)
                    text += f', the next after {min(next_step, max_iters)}'
                text += '\n'
                for i, prompt in enumerate(prompts):
                    if should_stop():
                        break
                    sample_seed = hash_seed(seed, SAMPLES, it, i)
                    # blocks that are compiled by themselves would be compiled for each length
                    eager = torch.compiler.set_stance('force_eager') if compile else nullcontext()
                    with ctx, eager:
                        sample = generate_text(model, data.tokenizer, prompt, sample_tokens, temperature,
                                               top_k, top_p, sample_seed)
                    text += f'---\n{sample}\n'
                samples = text
                print0(samples)
            except Exception as e:
                note_failure('a sample', e)
        model.train()
        t0 = time.perf_counter()
    if last or stopping or eval_only:
        break

    # the gradient, over micro-batches and processes
    loss_sum = torch.zeros((), device=device)
    for micro_step in range(grad_accum_steps):
        if dropout:
            torch.manual_seed(hash_seed(seed, DROPOUT, micro_batch_number(it, micro_step)))
        # average gradients at the last micro-step alone; to be set before forward, as no_sync() would
        is_last_micro_step = micro_step == grad_accum_steps - 1
        if shard > 1:
            # takes memory: until the last one, each process holds the gradient of all parameters
            model.set_requires_gradient_sync(is_last_micro_step)
        elif ddp:
            ddp_model.require_backward_grad_sync = is_last_micro_step
        x, y, doc_ids, divisor = next(batches)
        with ctx:
            _, loss = ddp_model(x, y, doc_ids, return_logits=False)
        loss = loss / divisor
        scaler.scale(loss).backward()
        loss_sum += loss.detach()

    # the update
    lr = get_lr(it)
    for group in optimizer.param_groups:
        group['lr'] = lr * group['lr_scale']
    scaler.unscale_(optimizer)
    logging = log_interval > 0 and it % log_interval == 0
    if grad_clip or logging:
        grad_norm = clip_grad_norm(model, grad_clip)  # 0: only measured. With FSDP, the norm over all shards
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)

    # the log: the only place where the host waits for the device
    if logging:
        lossf, norm = torch.stack((mean_over_processes(loss_sum), grad_norm)).tolist()
        train_seconds += time.perf_counter() - t0
        t0 = time.perf_counter()
        dt = max(1e-9, train_seconds - logged_seconds) / (it + 1 - logged_iter)  # a clock may be coarse
        logged_iter, logged_seconds = it + 1, train_seconds
        if not math.isfinite(lossf):
            print0(f"iter {it}: loss {lossf}")
            outcome = 'diverged'
            break
        mfu = model.estimate_mfu(batch_size * grad_accum_steps, dt, peak_flops_of(device))
        epoch = it * tokens_per_iter / tokens_per_epoch
        tokens_so_far = format_count(tokens_before + (it + 1) * tokens_per_iter)
        loss_ema = [0.98 * loss_ema[0] + lossf, 0.98 * loss_ema[1] + 1]
        perplexity = math.exp(min(lossf, 700.0))
        mfu_text = f", mfu {mfu * 100:.2f}%" if mfu > 0 else ''  # nan: the device's peak is unknown
        print0(f"iter {it}: loss {lossf:.4f}, time {dt * 1000:.2f}ms{mfu_text}, ppl {perplexity:.2f}, "
               f"lr {lr:.2e}, norm {norm:.2f}, {tokens_per_iter / dt:,.0f} tok/s, {tokens_so_far} tokens, "
               f"epoch {epoch:.2f}, {(it + 1) / max_iters:.1%}, "
               f"eta {format_duration((max_iters - it - 1) * dt)}")
        log(it, {'progress': (it + 1) / max_iters, 'epoch': epoch, 'loss': lossf,
                 'loss_smooth': loss_ema[0] / loss_ema[1], 'perplexity': perplexity, 'lr': lr,
                 'grad_norm': norm, 'ms': dt * 1000, 'tokens_per_second': tokens_per_iter / dt,
                 'mfu': mfu if mfu > 0 else None, 'memory_gb': peak_memory(device),
                 'data_wait': batches.waited})  # seconds, since the start

# -----------------------------------------------------------------------------
# the end: run.json, report.md, the last line
batches.close()
if outcome == 'done' and stopping:
    outcome = 'stopped'
if outcome != 'diverged' and not written:
    outcome += ' without its last checkpoint'
if master_process and not eval_only:
    record.update(outcome=outcome, iterations=it, best_val_loss=best_val_loss, best_iter=best_iter,
                  train_seconds=train_seconds)
    if it > start_iter:
        seconds = max(1e-9, train_seconds - start_seconds)
        record['tokens_per_second'] = (it - start_iter) * tokens_per_iter / seconds
    write_json(os.path.join(out_dir, 'run.json'), record)
    write_report(out_dir, samples)
    best_text = f"best validation loss {best_val_loss:.4f} at {best_iter}, " if best_iter else ''
    print0(f"{outcome}: {it:,} iterations in {format_duration(train_seconds)}, {best_text}newest checkpoint: "
           f"{checkpoint.newest(out_dir)}")
    if outcome == 'diverged':
        print(f"error: the loss or a weight is not finite after {it} iterations. go on from the newest "
              "checkpoint with a lower rate: --init_from=resume --learning_rate=...", file=sys.stderr)
    elif outcome == 'done':
        chat_flag = ' --chat' if data.train.masked else ''
        print0(f"what it writes: python sample.py {run_flags(out_dir, data_dir)}{chat_flag}")
    else:
        print0(f"to go on: --init_from=resume {run_flags(out_dir, data_dir)}")
if ddp:
    del ddp_model
    gc.unfreeze()  # see warm_up
    gc.collect()  # DDP is a cycle, and has to go before its process group: else a process may abort
    torch.distributed.barrier()  # nobody leaves while another still talks
    torch.distributed.destroy_process_group()
if outcome == 'diverged':  # the loss or a weight is not finite
    sys.exit(3)
if not written:
    sys.exit(1)
if stop_signal:
    sys.exit(128 + stop_signal)  # as a shell expects it
