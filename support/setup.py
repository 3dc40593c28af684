"""
Settles the knobs of train.py: where to start, what follows from what, what cannot be. Everything that a
person can get wrong is checked here, before the model is built, and all problems are told at once.
"""

import dataclasses
import math
import os
from types import SimpleNamespace

import torch

from configurator import fail, out_of_range
from dataset import Dataset
from model import GPT, GPTConfig
from optim import MUON_LR
from support import checkpoint, cpu, devices, files, load, log, resume
from support.chunked_loss import usable_on
from support.console import wrap
from support.conversations import open_dataset
from support.errors import explain_out_of_memory
from support.evaluate import parse_amount, parse_eval_iters, parse_interval
from support.hub_datasets import is_hub_name
from support.samples import parse_style
from support.parallel import shard_problems

PATHS = ('data_dir', 'sample_prompts')  # may differ between machines
ABOVE_ZERO = ('batch_size block_size gradient_accumulation_steps total_batch_size n_layer n_head n_embd '
              'n_kv_head keep_checkpoints save_interval lr_decay_iters '
              'adam_eps peak_flops max_minutes')
FROM_ZERO = ('seed max_iters warmup_iters eval_interval tasks_interval log_interval '
             'learning_rate matrix_lr embedding_lr head_lr min_lr weight_decay matrix_weight_decay '
             'grad_clip shard')
BELOW_ONE = 'dropout beta1 beta2 momentum'
# far above all that makes sense; their products have to be numbers of float32
BELOW_1E15 = ('learning_rate', 'matrix_lr', 'embedding_lr', 'head_lr', 'min_lr', 'weight_decay',
              'matrix_weight_decay')


@dataclasses.dataclass
class Run:
    """The settled plan of a run: what train.py and the files in support/ need to know besides the knobs."""
    knobs: dict  # settled: no 'auto', and None only where it means something
    kinds: dict  # {knob: its types}
    asked: dict  # as they were asked for; goes into checkpoints
    given: dict  # those that were set by a config file or a flag
    dist: object
    ckpt: dict = None  # the checkpoint to start from
    resuming: bool = False  # its run is continued
    branching: bool = False  # in another folder, as a run of its own
    changed: dict = dataclasses.field(default_factory=dict)  # {knob: (before, now)} that were given anew
    config: GPTConfig = None
    data: Dataset = None
    start_iter: int = 0
    best_val_loss: float = math.inf
    grad_accum_steps: int = 1  # micro-batches per iteration of one process
    tokens_per_iter: int = 0  # over all processes
    tokens_before: int = 0  # what the weights had seen when this run began
    samples_per_epoch: int = 1
    decay_start: int = 0  # iteration at which the learning rate begins to fall
    lrs: dict = dataclasses.field(default_factory=dict)  # the peaks that differ from learning_rate
    n_params: int = 0
    checkpoint_bytes: int = 0
    trained_on: dict = None  # what decides which samples an iteration sees
    environment: dict = None  # what the bits of a result depend on besides the knobs
    why: dict = None  # why a device, dtype, ... was chosen
    overview: list = None  # lines: dataset, model, batch, ...
    plan: str = ''  # the same with notes, for the console
    from_scratch: bool = True  # random weights

    @property
    def continues(self):
        """Whether out_dir's run is continued, rather than a new one begun."""
        return self.resuming and not self.branching

    @property
    def last_evaluation(self):
        """What the resumed checkpoint was found to be worth."""
        if not self.continues:
            return {}
        return resume.last_evaluation(self.ckpt)

    @property
    def eval_windows(self):
        """How many windows of block_size tokens of each split an evaluation reads: {split: number}."""
        k = SimpleNamespace(**self.knobs)
        have = {split: tokens.n_windows(k.block_size) for split, tokens in self.data.splits.items()}
        batches, tokens = parse_eval_iters(k.eval_iters)
        wanted = batches * k.batch_size or have.get('val', have['train'])
        if tokens:
            wanted = max(1, tokens // k.block_size)
        return {split: min(wanted, n) for split, n in have.items()}

    def loss_chunk_size(self, model):
        """Tokens at a time in the loss, if all logits would take much of the memory; else 0."""
        tokens, device = self.knobs['batch_size'] * self.knobs['block_size'], self.dist.device
        memory = devices.memory_of(device)
        size = devices.choose_loss_chunk_size(device, tokens, self.config.vocab_size, memory)
        if size:
            return size if usable_on(model, self.dist) else 0
        return 0

    def state(self, it):
        """Its part of a checkpoint."""
        return {'tokenizer': self.data.tokenizer_state, 'trained_on': self.trained_on,
                'tokens': self.tokens_before + it * self.tokens_per_iter, 'environment': self.environment,
                'torch': str(torch.__version__), 'version': checkpoint.VERSION}


def resolve(knobs, given, dist):
    """The Run that `knobs` ask for, of which `given` were set by the user. Ends with status 2 if there is a
    problem."""
    dist.assert_same_on_all_ranks({name: value for name, value in knobs.items() if name not in PATHS})
    run = Run(knobs=dict(knobs), kinds=knobs.kinds, asked=dict(knobs), given=dict(given), dist=dist)
    k = run.knobs
    if k['init_from'].partition(':')[0] not in ('scratch', 'resume', 'auto'):
        Dataset(k['dataset'], k['data_dir'])  # says what is missing before weights are downloaded
    here = dist.broadcast_object(checkpoint.newest(k['out_dir']) if dist.is_main else None)
    if k['init_from'] != 'scratch' or (here and not k['overwrite'] and not k['eval_only']):
        run.ckpt, run.resuming, run.branching = find_start(k, dist)
    settle(run)
    choose_system(run)
    if run.resuming and not k['eval_only']:
        resume.tell_what_changed(run)
    explain_out_of_memory()
    run.overview = overview(run)
    run.plan = '\n'.join(wrap(run.overview, indent=10) + wrap(notes(run)))
    return run


def settle(run):
    """What follows from run.knobs, the checkpoint and the dataset."""
    settle_length(run)
    if run.ckpt:
        run.from_scratch = False
        resume.take_over(run)
        run.asked = dict(run.knobs)
    stop_if(knob_problems(run))
    stop_if(shape_problems(run))
    stop_if(data_problems(run))
    if run.knobs['budget'] is not None:
        derive_max_iters(run)
    stop_if(schedule_problems(run))


def settle_length(run):
    """max_iters and budget say the same thing, and budget wins if both are set; but not if max_iters was
    given after it, as by a flag after a config file."""
    given = list(run.given)
    if {'max_iters', 'budget'} <= set(given) and given.index('max_iters') > given.index('budget'):
        del run.given['budget']
        run.knobs['budget'] = run.asked['budget'] = None


def stop_if(problems):
    if problems:
        fail(*problems)


def knob_problems(run):
    """What is wrong with single knobs, as a list of lines."""
    knobs, dist = run.knobs, run.dist
    k = SimpleNamespace(**knobs)
    problems = out_of_range(knobs, above_zero=ABOVE_ZERO, from_zero=FROM_ZERO, below_one=BELOW_ONE)
    problems += [f"{name} is out of range ({knobs[name]:g}). use a number below 1e15" for name in BELOW_1E15
                 if (knobs[name] or 0) >= 1e15]
    if not 0 < k.decay_fraction <= 1:
        problems.append(f"decay_fraction is out of range ({k.decay_fraction}). use a number in (0, 1]")
    try:
        parse_eval_iters(k.eval_iters)
    except ValueError:
        problems.append(f"eval_iters is out of range ({k.eval_iters}). use 0 or more, or tokens, such as "
                        "'1e6 tokens'")
    try:
        parse_interval(k.sample_interval)
    except ValueError:
        problems.append(f"sample_interval is out of range ({k.sample_interval}). use a number from 0, or one "
                        "with a growth from 1, such as 100x1.5")
    try:
        parse_style(k.sample_tokens)
    except ValueError:
        problems.append(f"sample_tokens is out of range ({k.sample_tokens}). use a million or less but above "
                        "0, and behind it, if you like, temperature (0 or more), top_k, top_p (up to 1) and "
                        "prompts, as in '64 temperature=1 top_p=0.8 prompts=1'")
    if k.wandb_log:
        problems += log.wandb_problems()
    if k.batch_size * k.block_size >= 2**31:
        problems.append(f"batch_size x block_size is out of range ({k.batch_size} x {k.block_size}). use a "
                        "smaller micro-batch and more of them: --gradient_accumulation_steps")
    if k.shard != 1 and k.shard >= 0:
        problems += shard_problems(k.shard, dist.world_size, dist.device, k.dtype)
    if dist.is_main and not k.eval_only:
        problems += files.folder_problems(k.out_dir)
    return problems


def shape_problems(run):
    """Builds run.config and divides the batch; what is wrong with them."""
    k, n = SimpleNamespace(**run.knobs), run.dist.world_size
    run.config = make_config(run.knobs, run.ckpt)
    problems = run.config.problems()
    if k.matrix_optimizer == 'muon' and run.config.fused_qkv:
        problems.append("matrix_optimizer=muon wants query, key and value in matrices of their own, and "
                        f"{k.arch} has them in one. use --arch=llama or modern, or --matrix_optimizer=adamw")
    lrs = dict(matrix_lr=k.matrix_lr, embedding_lr=k.embedding_lr, head_lr=k.head_lr)
    run.lrs = {name: lr for name, lr in lrs.items() if lr is not None}
    if k.matrix_optimizer == 'muon':
        run.lrs.setdefault('matrix_lr', MUON_LR)
    if run.lrs and k.learning_rate == 0:
        problems.append("learning_rate=0 stops everything, as the other learning rates are multiples of it. "
                        "use a number above 0")
    counted, unit = k.gradient_accumulation_steps, n
    if k.total_batch_size:
        counted, unit = k.total_batch_size, k.batch_size * k.block_size * n  # tokens
    if counted % unit:
        return [*problems, not_a_multiple(k, n)]
    run.grad_accum_steps = counted // unit
    run.tokens_per_iter = k.batch_size * k.block_size * run.grad_accum_steps * n
    return problems


def make_config(knobs, ckpt=None):
    """The GPTConfig of the knobs, and for what is not a knob, of the checkpoint."""
    before = ckpt['model_args'] if ckpt else {}
    fields = [field.name for field in dataclasses.fields(GPTConfig)]
    values = {name: knobs[name] if name in knobs else before.get(name) for name in fields}
    return GPTConfig(**{name: value for name, value in values.items() if value is not None or name in knobs})


def data_problems(run):
    """Opens the dataset; what is wrong with it, or with it and the checkpoint."""
    k, dist = SimpleNamespace(**run.knobs), run.dist
    # plan.py needs no data
    run.data = run.data or open_dataset(k.dataset, k.data_dir, k.seed, k.document_mask,
                                        run.ckpt and run.ckpt['model_args']['vocab_size'])
    problems = [tokens.problem(k.block_size) for tokens in run.data.splits.values()]
    problems = [problem for problem in problems if problem]
    run.samples_per_epoch = run.data.train.samples_per_epoch(k.block_size)
    run.trained_on = {name: tokens.fingerprint for name, tokens in run.data.splits.items()}
    run.trained_on.update({f'{name} ids': tokens.sampled for name, tokens in run.data.splits.items()})
    run.trained_on['tokens per iteration'] = run.tokens_per_iter
    dist.assert_same_on_all_ranks(run.trained_on)
    if run.ckpt:
        problems += resume.data_problems(run)
    else:
        run.config.vocab_size = run.data.vocab_size
    if not problems:
        run.n_params, run.checkpoint_bytes = count_parameters(run.config, k.matrix_optimizer)
        if dist.is_main and not k.eval_only:
            problems += files.space_problems(k.out_dir, run.checkpoint_bytes, k.keep_checkpoints,
                                             checkpoint.numbered(k.out_dir))
    return problems


def count_parameters(config, matrix_optimizer):
    """(their number, bytes of a checkpoint: the weights and AdamW's two moments, or Muon's one, in
    float32)"""
    with torch.device('meta'):  # to count only: no memory is used
        sizes = {name: p.numel() for name, p in GPT(config).named_parameters()}
    n = sum(sizes.values())
    matrices = sum(size for name, size in sizes.items() if name.startswith('transformer.h.'))
    return n, 12 * n - (4 * matrices if matrix_optimizer == 'muon' else 0)


def schedule_problems(run):
    """Derives the knobs of the schedule from each other; what is wrong with them."""
    knobs = run.knobs
    if not knobs['decay_lr']:  # in nanoGPT that is no warmup, either
        knobs['lr_schedule'], knobs['warmup_iters'] = 'constant', 0
    if knobs['lr_decay_iters'] is None:
        knobs['lr_decay_iters'] = knobs['max_iters']
    wsd = knobs['lr_schedule'] == 'wsd'
    if knobs['min_lr'] is None:
        knobs['min_lr'] = 0.0 if wsd else knobs['learning_rate'] / 10
    warmup, end = knobs['warmup_iters'], knobs['lr_decay_iters']
    run.decay_start = decay_start(knobs)
    if knobs['lr_schedule'] != 'constant' and 0 < end <= warmup and not knobs['eval_only']:
        return [f"warmup_iters={warmup} leaves nothing of lr_decay_iters={end}. use "
                f"--warmup_iters={end // 20}"]
    return []


def decay_start(knobs):
    """The iteration at which the learning rate begins to fall."""
    if knobs['lr_schedule'] != 'wsd':
        return knobs['warmup_iters']
    return max(knobs['warmup_iters'], round(knobs['lr_decay_iters'] * (1 - knobs['decay_fraction'])))


def choose_system(run):
    """Settles dtype and compile, the same on all processes."""
    knobs, dist = run.knobs, run.dist
    knobs['dtype'], why_dtype = devices.choose_dtype(knobs['dtype'], dist.device)
    knobs['compile'], why_compile = devices.choose_compile(knobs['compile'], dist.device)
    run.why = {'device': dist.why_device, 'dtype': why_dtype, 'compile': why_compile}
    knobs['device'] = str(dist.device)
    if knobs['deterministic']:  # on GPUs; CPUs always are
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
        torch.use_deterministic_algorithms(dist.device.type == 'cuda')
        torch.utils.deterministic.fill_uninitialized_memory = False
    if knobs['shard'] != 1:
        stop_if(shard_problems(knobs['shard'], dist.world_size, dist.device, knobs['dtype']))
    dist.assert_same_on_all_ranks({'dtype': knobs['dtype'], 'compile': knobs['compile']})
    run.environment = {'torch': str(torch.__version__), 'device': devices.name_of(dist.device)}
    if dist.device.type == 'cpu':
        run.environment['threads'] = torch.get_num_threads()
        run.why['threads'] = cpu.watch(dist.device)
    run.environment.update(processes=dist.world_size, dtype=knobs['dtype'], compile=knobs['compile'], batch_size=knobs['batch_size'])


def find_start(k, dist):
    """(the checkpoint to start from or None, whether its run is continued, whether in another folder). The
    main process chooses, as a folder may look different to another for a moment; all of them read."""
    choice = (None, False, False)
    if dist.is_main:
        choice = choose(k['init_from'], k['out_dir'], k['overwrite'], k['eval_only'], dist.print)
    path, resuming, branching = dist.broadcast_object(choice)
    if path is None:
        return None, False, False
    if resuming and not os.path.isfile(path):
        fail(f"{path} is not there for this process: another run is writing into that folder, or its disk is "
             "not shared by all machines. wait until it ends, or name a folder that all of them "
             "see", everywhere=True)
    ckpt = load.read(path, verify=not resuming)
    it = ckpt['iter_num']
    number = checkpoint.NUMBERED.fullmatch(os.path.basename(path))
    # it would be in the way of the next ones
    if resuming and not branching and number and int(number[1]) != it:
        fail(f"{path} holds iteration {it}. rename it to ckpt_{it:08d}.pt, or take it out of the folder")
    if resuming and 'optimizer' not in ckpt:
        fail(f"{path} holds weights only, no run to continue. start a new one from them: --init_from={path} "
             "--out_dir=ANOTHER")
    return ckpt, resuming, branching


def choose(init_from, out_dir, overwrite, eval_only, tell):
    """(path or None, resuming, branching)"""
    word, _, source = init_from.partition(':')
    here = checkpoint.newest(out_dir)
    if word in ('resume', 'auto') and source and not (word == 'auto' and here):
        return choose_branch(source, out_dir, overwrite, eval_only, tell), True, True
    if word in ('resume', 'auto') and here:
        return load.newest_whole(out_dir, tell), True, False
    if init_from == 'resume':
        fail(f"no checkpoint in {out_dir} to resume from{load.runs()}. name the run's folder with --out_dir, or "
             "use --init_from=auto or scratch")
    path = None if init_from in ('scratch', 'auto') else choose_weights(init_from, out_dir, overwrite)
    if here and not overwrite and not eval_only:
        fail(f"{out_dir} already holds a run. continue it: --init_from=resume; keep it: --out_dir=ANOTHER; "
             "delete it: --overwrite")
    return path, False, False


def choose_branch(source, out_dir, overwrite, eval_only, tell):
    """The checkpoint of another run, to be continued in a folder of its own."""
    if checkpoint.newest(out_dir) and not (overwrite or eval_only):
        fail(f"{out_dir} already holds a run, and resume:{source} would start one. continue it: "
             "--init_from=auto; keep it: --out_dir=ANOTHER; delete it: --overwrite")
    if not os.path.isfile(source) and not checkpoint.newest(source):
        fail(f"no checkpoint at {source}{load.runs()}. name a file such as out/ckpt_00001000.pt, or a run's "
             "folder for its newest one")
    path = load.newest_whole(source, tell) if os.path.isdir(source) else source
    if os.path.realpath(os.path.dirname(path)) == os.path.realpath(out_dir) and not eval_only:
        fail(f"resume:{source} names a checkpoint in out_dir itself. continue in another folder: "
             "--out_dir=ANOTHER")
    return path


def choose_weights(source, out_dir, overwrite):
    """The checkpoint, or Hugging Face folder or name, whose weights start a new run."""
    if not os.path.exists(source) and not is_hub_name(source):
        fail(f"init_from is neither a file nor a known word ({source}). use scratch, resume, auto, "
             "resume:PATH, the path of a checkpoint, or a Hugging Face folder or name (gpt2, OWNER/NAME)")
    path = load.find(source)
    if overwrite and os.path.realpath(os.path.dirname(path)) == os.path.realpath(out_dir):
        fail(f"--overwrite would delete the checkpoint to start from ({path}). name another --out_dir")
    return path


def not_a_multiple(k, world_size):
    """k: the knobs. The nearest batches that can be divided."""
    if k.total_batch_size:
        tokens = k.batch_size * k.block_size * world_size
        low = max(1, k.total_batch_size // tokens) * tokens
        return (f"total_batch_size={k.total_batch_size} is not a multiple of batch_size x block_size x "
                f"processes = {k.batch_size} x {k.block_size} x {world_size} = {tokens}. nearest: "
                f"{low} or {low + tokens}")
    steps = k.gradient_accumulation_steps
    low = max(1, steps // world_size) * world_size
    return (f"gradient_accumulation_steps={steps} counts over all processes and is not a multiple of "
            f"their number {world_size}. nearest: {low} or {low + world_size}")


def derive_max_iters(run):
    """Sets max_iters by what `budget` says."""
    k = run.knobs
    try:
        k['max_iters'] = iterations(run, k['budget'])
    except ValueError:
        fail(f"budget is out of range ({k['budget']}). use a number above 0 and what it counts: '1e9 "
             "tokens', '3 epochs' or '20 tokens_per_param'")


def iterations(run, budget):
    """How many iterations `budget`, a text, stands for; ValueError if it is none."""
    epoch = run.samples_per_epoch * run.knobs['block_size']
    tokens_per = {'tokens': 1, 'epochs': epoch, 'tokens_per_param': run.n_params}
    number, unit = parse_amount(budget, *tokens_per)
    return math.ceil(number * tokens_per[unit] / run.tokens_per_iter)


MANY_EPOCHS = 20  # from 16 times over the same text on little is gained (arXiv 2305.16264)


def overview(run):
    """Lines about dataset, model, batch, budget, schedule, system."""
    k = SimpleNamespace(**run.knobs)
    return [dataset_line(run, k),
            model_line(run, k),
            batch_line(run, k),
            budget_line(run, k),
            schedule_line(run, k),
            system_line(run, k),
            expect_line(run, k)]


def dataset_line(run, k):
    line = f"dataset   {k.dataset}: {run.data.train.summary(k.block_size)}"
    if run.data.val:
        return line + f", {run.data.val.size:,} for validation"
    return line + " and no val.bin: no validation loss, no best checkpoint"


def model_line(run, k):
    layers = f"{k.n_layer} layer{'s' if k.n_layer > 1 else ''}"
    if run.config.near_layers:
        layers += f' and {run.config.near_layers} near'  # without attention: near_layers in model.py
    return (f"model     {k.arch}, {layers}, {k.n_head} heads, {k.n_embd} channels, "
            f"{k.block_size} positions, vocabulary {run.config.vocab_size:,}: {run.n_params:,} parameters")


def batch_line(run, k):
    n = run.dist.world_size
    return (f"batch     {run.tokens_per_iter:,} tokens per iteration = {k.batch_size} sequences x "
            f"{k.block_size} tokens x {run.grad_accum_steps} micro-batches x {n} "
            f"process{'es' if n > 1 else ''}")


def budget_line(run, k):
    tokens = k.max_iters * run.tokens_per_iter
    line = f"budget    {k.max_iters:,} iterations = {tokens:,} tokens"
    if run.samples_per_epoch:
        line += f" = {epochs(run):.2f} epochs"
    line += f" = {tokens / run.n_params:.1f} tokens per parameter"
    return line + (f" ({k.budget})" if k.budget else '')


def schedule_line(run, k):
    lrs = ', '.join(f'{name} {value:g}' for name, value in run.lrs.items())
    line = f"schedule  {k.lr_schedule}, {k.learning_rate:g}" + (f" ({lrs})" if lrs else '')
    share = 'longer than the run'
    if k.warmup_iters <= k.max_iters:
        share = f'{k.warmup_iters / max(1, k.max_iters):.1%}'
    line += f" after {k.warmup_iters:,} iterations of warm-up ({share})"
    if k.lr_schedule == 'constant':
        return line
    if k.lr_schedule == 'wsd':
        line += f" until {run.decay_start:,}"
    line += f", {k.min_lr:g} at iteration {k.lr_decay_iters:,}"
    return line if k.lr_decay_iters <= k.max_iters else line + ', which is after the end'


def system_line(run, k):
    threads = f", {run.why['threads']}" if 'threads' in run.why else ''
    return (f"system    {run.dist.device} ({run.why['device']}){threads}, {k.dtype} ({run.why['dtype']}), "
            f"compile {'on' if k.compile else 'off'} ({run.why['compile']})")


def expect_line(run, k):
    size = run.checkpoint_bytes
    size = f"{size / 1e9:.2f} GB" if size > 1e8 else f"{size / 1e6:.1f} MB"
    line = f"checkpoints of {size} in {k.out_dir}"
    if run.ckpt:
        return f"expect    {line}"
    vocab_size = run.data.meta['vocab_size']
    return f"expect    a first loss of about ln({vocab_size}) = {math.log(vocab_size):.2f}; {line}"


def epochs(run):
    samples = run.knobs['max_iters'] * run.tokens_per_iter // run.knobs['block_size']
    return samples / run.samples_per_epoch


def notes(run):
    """Lines about what is allowed but probably not meant."""
    k = SimpleNamespace(**run.knobs)
    if k.eval_only:
        return []
    done = run.resuming and run.start_iter >= k.max_iters
    found = []
    if epochs(run) > MANY_EPOCHS and not k.overfit_batch:
        found.append(many_epochs(run, k))
    if not k.decay_lr and ('lr_schedule' in run.given or run.given.get('warmup_iters')):
        found.append(rate_is_fixed(run, k))
    if 0 < k.max_iters <= k.warmup_iters and not done:
        found.append(only_warmup(run, k))
    if k.lr_schedule != 'constant' and k.min_lr > k.learning_rate:
        found.append(rate_rises(run, k))
    if run.branching and k.lr_schedule == 'wsd' and run.decay_start < run.start_iter < k.lr_decay_iters:
        found.append(late_branch(run, k))
    if done:
        found.append(is_done(run, k))
    return found


def many_epochs(run, k):
    tokens = MANY_EPOCHS * run.samples_per_epoch * k.block_size
    remedy = f"--max_iters={max(1, tokens // run.tokens_per_iter)}"
    if not k.dropout:
        remedy += ' --dropout=0.2'
    return (f"note: that is {epochs(run):,.0f} times over the same text, and the validation loss "
            f"may rise long before the end. use {remedy}, a smaller network (config/mybook.py), or more text")


def rate_is_fixed(run, k):
    """nanoGPT's decay_lr=False leaves out the warmup as well."""
    names = [name for name in ('lr_schedule', 'warmup_iters') if name in run.given]
    given = ' and '.join(f"{name}={run.given[name]}" for name in names)
    return (f"note: decay_lr=False is a fixed learning rate without warmup and makes no use of {given}. for "
            "that: --decay_lr=True, with --lr_schedule=constant if the rate shall not fall")


def only_warmup(run, k):
    highest = k.learning_rate * k.max_iters / (k.warmup_iters + 1)
    flags = f"--warmup_iters={k.max_iters // 20}"
    if k.lr_schedule != 'constant':
        flags += f" --lr_decay_iters={k.max_iters}"
    return (f"note: all of the {k.max_iters:,} iterations are warmup (warmup_iters={k.warmup_iters}), in "
            f"which the learning rate only comes to {highest:.2g}, not {k.learning_rate:g}. for a run of "
            f"this length: {flags}")


def rate_rises(run, k):
    return (f"note: min_lr={k.min_lr:g} is above learning_rate={k.learning_rate:g}, so it rises to the end. "
            f"usual is --min_lr={k.learning_rate / 10:g}")


def late_branch(run, k):
    return (f"note: the decay would have begun at iteration {run.decay_start:,}, so the learning rate falls "
            "at once. for the whole decay from here on: "
            f"--decay_fraction={1 - run.start_iter / k.lr_decay_iters:.4g}")


def is_done(run, k):
    return (f"this run is done: {run.start_iter:,} of {k.max_iters:,} iterations. to train on: "
            f"--max_iters={2 * max(1, run.start_iter)}")
