"""
Settles the knobs of train.py: where to start, what follows from what, what cannot be. Everything that a
person can get wrong is checked here, before the model is built, and all problems are told at once.
"""

import dataclasses
from types import SimpleNamespace

import torch

from configurator import fail, out_of_range
from dataset import Dataset
from model import GPT, GPTConfig
from optim import MUON_LR
from support import checkpoint, devices, folders, run_plan, shared_cpu
from support.console import wrap
from support.errors import explain_out_of_memory
from support.evaluate import parse_eval_iters, parse_interval
from support.samples import style_problems
from support.run import Run

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
        from support.start import find_start
        run.ckpt, run.resuming, run.branching = find_start(k, dist)
    settle(run)
    choose_system(run)
    if run.resuming and not k['eval_only']:
        from support import resume
        resume.tell_what_changed(run)
    explain_out_of_memory(run)
    run.overview = run_plan.overview(run)
    run.plan = '\n'.join(wrap(run.overview, indent=10) + wrap(run_plan.notes(run)))
    return run


def settle(run):
    """What follows from run.knobs, the checkpoint and the dataset."""
    settle_length(run)
    if run.ckpt:
        from support import resume
        run.from_scratch = False
        resume.take_over(run)
        run.asked = dict(run.knobs)
    stop_if(knob_problems(run))
    stop_if(shape_problems(run))
    stop_if(data_problems(run))
    if run.knobs['budget'] is not None:
        from support.budget import derive_max_iters
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
    if k.sample_interval or k.sample_tokens != 200:
        problems += style_problems(k.sample_tokens)
    if k.wandb_log:
        from support.wandb_log import wandb_problems
        problems += wandb_problems()
    if k.batch_size * k.block_size >= 2**31:
        problems.append(f"batch_size x block_size is out of range ({k.batch_size} x {k.block_size}). use a "
                        "smaller micro-batch and more of them: --gradient_accumulation_steps")
    if k.shard != 1 and k.shard >= 0:
        from support.sharding import shard_problems
        problems += shard_problems(k.shard, dist.world_size, k.deterministic, dist.device, k.dtype)
    if dist.is_main and not k.eval_only:
        problems += folders.folder_problems(k.out_dir)
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
        from support.batch_problems import not_a_multiple
        return [*problems, not_a_multiple(k, n)]
    run.grad_accum_steps = counted // unit
    powers_of_two = run.grad_accum_steps.bit_count() == n.bit_count() == 1
    if k.deterministic and not powers_of_two:
        from support.batch_problems import no_powers_of_two
        problems.append(no_powers_of_two(n, run.grad_accum_steps))
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
    run.data = run.data or Dataset(k.dataset, k.data_dir)  # plan.py needs none
    problems = [tokens.too_short(k.block_size) for tokens in run.data.splits.values()]
    problems = [problem for problem in problems if problem]
    run.samples_per_epoch = max(1, len(run.data.train) // k.block_size)
    if run.data.packed:
        run.samples_per_epoch = run.data.pack(k.block_size, k.seed)
    if k.document_mask and not run.data.packed:
        from support.document_mask import mask_documents
        problems += mask_documents(run.data)
    run.trained_on = {name: tokens.fingerprint for name, tokens in run.data.splits.items()}
    run.trained_on.update({f'{name} ids': tokens.sampled for name, tokens in run.data.splits.items()})
    run.trained_on['tokens per iteration'] = run.tokens_per_iter
    dist.assert_same_on_all_ranks(run.trained_on)
    if run.ckpt:
        from support import resume
        problems += resume.data_problems(run)
    else:
        run.config.vocab_size = run.data.vocab_size
    if not problems:
        run.n_params, run.checkpoint_bytes = count_parameters(run.config, k.matrix_optimizer)
        if dist.is_main and not k.eval_only:
            problems += folders.space_problems(k.out_dir, run.checkpoint_bytes, k.keep_checkpoints)
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
    if knobs['deterministic']:
        from support.deterministic import make_deterministic
        make_deterministic(dist.device)
    if knobs['shard'] != 1:
        from support.sharding import shard_problems
        stop_if(shard_problems(knobs['shard'], dist.world_size, False, dist.device, knobs['dtype']))
    dist.assert_same_on_all_ranks({'dtype': knobs['dtype'], 'compile': knobs['compile']})
    run.environment = {'torch': str(torch.__version__), 'device': devices.name_of(dist.device)}
    if dist.device.type == 'cpu':
        run.environment['threads'] = torch.get_num_threads()
        run.why['threads'] = shared_cpu.watch(dist.device)
    if not knobs['deterministic']:
        run.environment['processes'] = dist.world_size
    run.environment.update(dtype=knobs['dtype'], compile=knobs['compile'], batch_size=knobs['batch_size'])
