"""
Settles the knobs of train.py: where a run starts, what follows from what, what cannot be. All that a person
can get wrong is checked here, before the model is built. Then the plan of the run is printed.
"""

import dataclasses
import math
import os
import sys
from types import SimpleNamespace

import torch

from configurator import fail, out_of_range
from dataset import Dataset
from model import GPT, GPTConfig
from optim import MUON_LR
from support import checkpoint, cpu, devices, files, load, resume
from support.conversations import open_dataset
from support.dataset_meta import sha256_of
from support.errors import explain, explain_lost_data
from support.evaluate import parse_interval
from support.parallel import shard_problems
from support.samples import parse_style

ABOVE_ZERO = ('batch_size block_size gradient_accumulation_steps total_batch_size n_layer n_head n_embd '
              'n_kv_head lr_decay_iters adam_eps peak_flops max_minutes ddp_timeout')
FROM_ZERO = ('seed max_iters warmup_iters decay_fraction eval_interval eval_iters tasks_interval '
             'log_interval grad_clip shard save_interval keep_checkpoints learning_rate matrix_lr '
             'embedding_lr head_lr min_lr weight_decay matrix_weight_decay')


@dataclasses.dataclass
class Run:
    """The settled plan of a run: what train.py and the files in support/ need to know besides the knobs."""
    knobs: dict  # settled: no 'auto', and None only where it means something
    given: dict  # those that were set by a config file or a flag
    dist: object
    # 'weights': of a checkpoint; 'resume': its run goes on; 'branch': in another folder, as a run of its own
    start: str = 'scratch'
    lock: object = None  # the open file that keeps other runs out of out_dir
    ckpt: dict = None  # the checkpoint to start from
    asked: dict = None  # the knobs as they were asked for, with their 'auto'; goes into checkpoints
    config: GPTConfig = None
    data: Dataset = None
    start_iter: int = 0
    grad_accum_steps: int = 1  # micro-batches per iteration of one process
    tokens_before: int = 0  # what the weights had seen when this run began
    tokens_per_epoch: int = 1
    n_params: int = 0
    n_block_params: int = 0  # of them in the blocks
    optimizer_bytes: int = 0
    checkpoint_bytes: int = 0
    trained_on: dict = None  # what decides which samples an iteration sees
    environment: dict = None  # what the bits of a result depend on besides the knobs
    code: dict = None  # checksums of what people edit
    overview: list = None  # lines: dataset, model, batch, ...

    @property
    def k(self):
        """The knobs, as k.batch_size."""
        return SimpleNamespace(**self.knobs)

    @property
    def resuming(self):
        return self.start in ('resume', 'branch')

    @property
    def continues(self):
        """Whether out_dir's run is continued, rather than a new one begun."""
        return self.start == 'resume'

    @property
    def compares(self):
        """Whether out_dir's run is continued, and evaluated over the same windows as before, in the same way:
        only then its losses compare."""
        before = self.ckpt['config'] if self.continues and 'evaluation' in self.ckpt else {}
        return (before.get('eval_iters', -1) * before.get('batch_size', 1)
                == self.k.eval_iters * self.k.batch_size
                and before.get('document_mask') == self.k.document_mask)

    @property
    def tokens_per_iter(self):
        """Over all processes."""
        return self.k.batch_size * self.k.block_size * self.grad_accum_steps * self.dist.world_size

    @property
    def decay_start(self):
        """The iteration at which the learning rate begins to fall."""
        k = self.k
        if k.lr_schedule != 'wsd':
            return k.warmup_iters
        return max(k.warmup_iters, round(k.lr_decay_iters * (1 - k.decay_fraction)))

    @property
    def lrs(self):
        """The peaks that differ from learning_rate."""
        found = {name: self.knobs[name] for name in ('matrix_lr', 'embedding_lr', 'head_lr')}
        if self.knobs['matrix_optimizer'] == 'muon' and found['matrix_lr'] is None:
            found['matrix_lr'] = MUON_LR
        if self.config.tie:  # the head is the embedding
            del found['head_lr']
        return {name: lr for name, lr in found.items() if lr is not None}

    @property
    def eval_windows(self):
        """How many windows of block_size tokens of each split an evaluation reads, or all that it has."""
        k, split = self.k, self.data.val or self.data.train
        return k.eval_iters * k.batch_size or math.ceil(split.n_targets(k.block_size) / k.block_size)

    def state(self, it):
        """Its part of a checkpoint."""
        return {'tokenizer': self.data.tokenizer_state, 'trained_on': self.trained_on,
                'tokens': self.tokens_before + it * self.tokens_per_iter, 'environment': self.environment,
                'torch': str(torch.__version__), 'version': checkpoint.VERSION}


def resolve(knobs, given, dist):
    """The Run that `knobs` ask for, of which `given` were set by the user; its plan is printed. Ends with
    status 2 if there is a problem."""
    # paths may differ between machines; wandb's name may hold the time, and the first process alone uses it
    dist.assert_same_on_all_ranks({name: value for name, value in knobs.items()
                                   if name not in ('data_dir', 'sample_prompts', 'wandb_run_name')})
    run = Run(dict(knobs), dict(given), dist)
    find_start(run)
    settle(run, knobs.kinds)
    system = settle_system(run)
    if run.resuming and not run.k.eval_only:
        resume.tell_what_changed(run)
    explain("can't allocate memory|not enough memory|out of memory", 'out of memory',
            "half the --batch_size with twice the --gradient_accumulation_steps trains the same in less; so "
            "does --activation_checkpointing. else a smaller --block_size or model", 2)
    explain('wandb login', 'Weights & Biases does not know you',
            "run wandb login, or keep what it gets here with WANDB_MODE=offline, or --wandb_log=False", 2)
    run.overview = [dataset_line(run), *shape_lines(run), system]
    if not run.k.eval_only:
        run.overview.append(expectation(run))
    dist.print('\n'.join(run.overview))
    n = run.start_iter
    if run.resuming and n >= run.k.max_iters and not run.k.eval_only:
        dist.print(f"this run is done: {n:,} of {run.k.max_iters:,} iterations. to train on: "
                   f"--max_iters={2 * max(1, n)}")
    return run


def settle(run, kinds):
    """What follows from run.knobs, the checkpoint and the dataset. kinds: the types of the knobs."""
    # unless the first one was given after it, as by a flag after a config file
    given = list(run.given)
    for first, second in resume.ALTERNATIVES:
        if {first, second} <= set(given) and given.index(first) > given.index(second):
            run.given.pop(second)
            run.knobs[second] = None
    if run.ckpt:
        resume.take_over(run, kinds)
    run.asked = dict(run.knobs)
    check_knobs(run)
    settle_shape(run)
    explain_lost_data()
    settle_data(run)
    settle_schedule(run)


def stop_if(problems):
    if problems:
        fail(*problems)


def find_start(run):
    """Reads the checkpoint that init_from means. One process chooses it, as a folder may look different to
    another for a moment; all of them read."""
    path, run.start = run.dist.all_gather_object(choose_start(run, run.k) if run.dist.rank == 0 else None)[0]
    if path is None:
        return
    run.ckpt = load.read(path, verify=not run.continues)
    if run.start == 'weights':
        run.dist.print(f"weights of {path}")
    if run.resuming and 'optimizer' not in run.ckpt:
        fail(f"{path} holds weights only. start a run from them: --init_from={path} --out_dir=ANOTHER")


def choose_start(run, k):
    """(the path of a checkpoint or None, what Run.start says of it)"""
    word, _, source = k.init_from.partition(':')
    here = checkpoint.newest(k.out_dir)
    # a training that torchrun may start again, or Slurm, goes on
    auto = word == 'auto' or not k.eval_only and os.environ.get('TORCHELASTIC_MAX_RESTARTS', '0') != '0'
    if k.init_from == 'resume' or (auto and here):
        if here and run.dist.is_main and not k.eval_only:  # plan.py writes nothing
            run.lock = checkpoint.lock(k.out_dir)  # before it is read: another run may be writing
        return load.newest_whole(k.out_dir), 'resume'
    if here and not k.overwrite and not k.eval_only:
        fail(f"{k.out_dir} already holds a run. continue it: --init_from=resume; keep it: --out_dir=ANOTHER; "
             "delete it: --overwrite")
    path, start = None, 'scratch'
    if word == 'resume':
        start = 'branch'
        path = load.newest_whole(source) if os.path.isdir(source) else load.find(source, hub=False)
    elif k.init_from not in ('scratch', 'auto'):
        path, start = load.find(source if word == 'auto' else k.init_from), 'weights'
    if k.overwrite and path and os.path.realpath(os.path.dirname(path)) == os.path.realpath(k.out_dir):
        fail(f"--overwrite would delete init_from's {path} in out_dir itself. name another --out_dir")
    return path, start


def check_knobs(run):
    """What is wrong with single knobs."""
    k = run.k
    problems = out_of_range(run.knobs, above_zero=ABOVE_ZERO, from_zero=FROM_ZERO,
                            below_one='dropout token_noise beta1 beta2 momentum')
    for name, parse, remedy in (
            ('sample_interval', parse_interval, "0 or more, or with a growth from 1, such as 100x1.5"),
            ('sample_tokens', parse_style, "a million or less but above 0, and behind it, if you like, "
             "temperature (0 or more), top_k and top_p (up to 1), as in '64 temperature=1 top_p=0.8'")):
        try:
            parse(run.knobs[name])
        except ValueError:
            problems.append(f"{name} is out of range ({run.knobs[name]}). use {remedy}")
    if k.wandb_log:  # before anything is removed; the folder wandb/ of runs is not enough
        import wandb
        wandb.init
    stop_if(problems)


def settle_shape(run):
    """Builds run.config and divides the batch among micro-batches and processes."""
    k, n = run.k, run.dist.world_size
    run.config = make_config(run.knobs, run.ckpt)
    problems = run.config.problems()
    if k.matrix_optimizer == 'muon' and run.config.fused_qkv:
        problems.append("matrix_optimizer=muon wants query, key and value in matrices of their own, and "
                        f"{k.arch} has them in one. use --arch=llama or modern, or --matrix_optimizer=adamw")
    if run.lrs and k.learning_rate == 0:
        problems.append("learning_rate=0 stops all: other rates are multiples of it. use a number above 0")
    name, unit, of = 'gradient_accumulation_steps', n, f'the number {n} of processes, over which it counts'
    if k.total_batch_size:
        name, unit = 'total_batch_size', k.batch_size * k.block_size * n
        of = f"batch_size x block_size x processes = {k.batch_size} x {k.block_size} x {n} = {unit}"
    counted = run.knobs[name]
    run.grad_accum_steps = max(1, counted // unit)
    if counted % unit:
        tokens = k.total_batch_size or counted * k.batch_size * k.block_size
        other = f"use {run.grad_accum_steps * unit} or {(run.grad_accum_steps + 1) * unit}"
        if run.continues:  # its batch stays as it is
            other = ("take another number of processes, or go on as another run: --init_from=resume:"
                     f"{k.out_dir} --out_dir=ANOTHER, where you {other}")
        remedy = next((f"the same batch: --batch_size={size} --total_batch_size={tokens}"
                       for size in range(k.batch_size, 0, -1) if tokens % (size * k.block_size * n) == 0),
                      other)
        problems.append(f"{name}={counted} is not a multiple of {of}. {remedy}")
    stop_if(problems)
    # for run.json, as it follows from total_batch_size
    run.knobs['gradient_accumulation_steps'] = run.grad_accum_steps * n


def make_config(knobs, ckpt=None):
    """The GPTConfig of the knobs, and for what is not a knob, of the checkpoint."""
    values = {**(ckpt['model_args'] if ckpt else {}), **knobs}
    return GPTConfig(**{field.name: values[field.name] for field in dataclasses.fields(GPTConfig)
                        if field.name in values})


def settle_data(run):
    """Opens the dataset, which decides the vocabulary; counts parameters and tokens."""
    k = run.k
    # plan.py needs no data
    run.data = run.data or open_dataset(k.dataset, k.data_dir, k.seed, k.document_mask,
                                        run.ckpt and run.ckpt['model_args']['vocab_size'])
    problems = [*filter(None, (tokens.problem(k.block_size) for tokens in run.data.splits.values()))]
    run.tokens_per_epoch = run.data.train.n_targets(k.block_size)
    run.trained_on = {'tokens per iteration': run.tokens_per_iter}
    for name, tokens in run.data.splits.items():
        run.trained_on |= {name: tokens.fingerprint, f'{name} ids': tokens.sampled}
    if run.ckpt:
        problems += resume.data_problems(run)
    else:
        run.config.vocab_size = run.data.vocab_size
    stop_if(problems)
    with torch.device('meta'):  # to count only: no memory is used
        model = GPT(run.config)
    run.n_params = model.get_num_params(non_embedding=False)
    run.n_block_params = sum(p.numel() for p in model.transformer.h.parameters())
    # AdamW's two moments in float32, of which Muon has one
    run.optimizer_bytes = 8 * run.n_params - 4 * run.n_block_params * (k.matrix_optimizer == 'muon')
    run.checkpoint_bytes = 4 * run.n_params + run.optimizer_bytes + len(str(run.data.tokenizer_state))
    if run.dist.is_main and not k.eval_only:
        stop_if(files.space_problems(k.out_dir, run.checkpoint_bytes, k.keep_checkpoints or 1,
                                     checkpoint.numbered(k.out_dir) if k.keep_checkpoints else []))


def settle_schedule(run):
    """Derives the knobs of the schedule from each other."""
    k = run.knobs
    if k['budget'] is not None:
        k['max_iters'] = run.asked['max_iters'] = iterations(run, k['budget'])
    if not k['decay_lr']:  # in nanoGPT that is no warmup, either
        k['lr_schedule'], k['warmup_iters'] = 'constant', 0
    if k['lr_decay_iters'] is None:
        k['lr_decay_iters'] = k['max_iters']
    if k['min_lr'] is None:
        k['min_lr'] = 0.0 if k['lr_schedule'] == 'wsd' else k['learning_rate'] / 10
    warmup, end = k['warmup_iters'], k['lr_decay_iters']
    if k['lr_schedule'] != 'constant' and 0 < end <= warmup and not k['eval_only']:
        fail(f"warmup_iters={warmup} leaves nothing of lr_decay_iters={end}. use --warmup_iters={end // 20}")


def iterations(run, budget):
    """How many iterations `budget`, a text, stands for."""
    tokens_per = {'tokens': 1, 'epochs': run.tokens_per_epoch, 'tokens_per_param': run.n_params}
    try:
        number, unit = budget.split()
        tokens = float(number) * tokens_per[unit]
        if not 0 < tokens < 2**62:  # where there is no data, epochs are 0 tokens
            raise ValueError
    except (ValueError, KeyError):
        fail(f"budget is out of range ({budget}). use a number above 0 and what it counts: '1e9 tokens', "
             "'3 epochs' (of a dataset that is here) or '20 tokens_per_param'")
    return math.ceil(tokens / run.tokens_per_iter)


def settle_system(run):
    """Settles dtype and compile, the same on all processes. Returns the plan's line about them."""
    knobs, device, n = run.knobs, run.dist.device, run.dist.world_size
    knobs['device'] = str(device)
    knobs['dtype'], why_dtype = devices.choose_dtype(knobs['dtype'], device)
    knobs['compile'], why_compile = devices.choose_compile(knobs['compile'], device)
    stop_if(shard_problems(knobs['shard'], n, knobs['dtype']))
    chosen = {name: knobs[name] for name in 'dtype compile batch_size shard'.split()}
    run.code = {f"code of {name.replace('__main__', 'train')}.py":
                sha256_of(getattr(sys.modules[name], '__file__', __file__))[:8]
                for name in '__main__ model optim dataset'.split()}
    run.dist.assert_same_on_all_ranks(chosen | run.trained_on | run.code)
    run.environment = {'torch': str(torch.__version__), 'device': devices.name_of(device), 'processes': n,
                       **chosen, **run.code}
    threads = ''
    if device.type == 'cpu':
        run.environment['threads'] = torch.get_num_threads()
        threads = f", {cpu.watch(device)}"
    return (f"system    {device} ({run.dist.why_device}){threads}, {knobs['dtype']} ({why_dtype}), "
            f"compile {'on' if knobs['compile'] else 'off'} ({why_compile})")


def expectation(run):
    expect = f"checkpoints of {run.checkpoint_bytes / 1e6:,.1f} MB in {run.k.out_dir}"
    if not run.ckpt:
        n = run.config.vocab_size
        expect = f"a first loss of about ln({n}) = {math.log(n):.2f}; {expect}"
    return f"expect    {expect}"


def dataset_line(run):
    validation = (f", {run.data.val.size:,} for validation" if run.data.val
                  else " and no val.bin: no validation loss, no best checkpoint")
    return f"dataset   {run.knobs['dataset']}: {run.data.train.summary(run.knobs['block_size'])}{validation}"


def shape_lines(run):
    """Model, batch, budget, schedule; the same for a plan of machines that are not here."""
    k, n = run.k, run.dist.world_size
    layers = f"{k.n_layer} layer{'s' if k.n_layer > 1 else ''}"
    if run.config.near_layers:
        layers += f' and {run.config.near_layers} near'  # without attention: near_layers in model.py
    yield (f"model     {k.arch}, {layers}, {k.n_head} head{'s' * (k.n_head > 1)}, {k.n_embd} channels, "
           f"{k.block_size} positions, vocabulary {run.config.vocab_size:,}: {run.n_params:,} parameters")
    yield (f"batch     {run.tokens_per_iter:,} tokens per iteration = {k.batch_size} sequences x "
           f"{k.block_size} tokens x {run.grad_accum_steps} micro-batches x {n} process{'es' * (n > 1)}")
    if k.eval_only:
        return
    tokens = k.max_iters * run.tokens_per_iter
    # plan.py needs no data
    times = f" = {tokens / run.tokens_per_epoch:.2f} epochs" if run.tokens_per_epoch else ''
    yield (f"budget    {k.max_iters:,} iterations = {tokens:,} tokens{times} = "
           f"{tokens / run.n_params:.1f} tokens per parameter" + (f" ({k.budget})" if k.budget else ''))
    lrs = ', '.join(f'{name} {value:g}' for name, value in run.lrs.items())
    line = f"schedule  {k.lr_schedule}, {k.learning_rate:g}" + (f" ({lrs})" if lrs else '')
    line += f" after {k.warmup_iters:,} iterations of warm-up ({k.warmup_iters / max(1, k.max_iters):.1%})"
    line += f" until {run.decay_start:,}" if k.lr_schedule == 'wsd' else ''
    if k.lr_schedule != 'constant':
        line += f", {k.min_lr:g} at iteration {k.lr_decay_iters:,}"
    yield line
