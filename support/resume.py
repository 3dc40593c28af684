"""What a run takes from the checkpoint it starts from, and what must fit."""

import dataclasses
import math
import shlex

import torch

from configurator import check, fail
from model import GPT, GPTConfig
from support import load
from support.chat import without_chat_tokens
from support.checkpoint import LAUNCH
from support.parallel import shard_problems
from support.tokenizer import same_tokenizer

ARCHITECTURE = {field.name for field in dataclasses.fields(GPTConfig)} - {'vocab_size', 'dropout'}
# they say the same thing, the second one wins
ALTERNATIVES = ('max_iters', 'budget'), ('gradient_accumulation_steps', 'total_batch_size')


def take_over(run, kinds):
    """Knobs of the run that is resumed, the network of any checkpoint. Given ones win where they may."""
    before = load.model_config(GPT, run.ckpt)
    size = before.block_size
    if run.resuming:
        run.start_iter = run.ckpt['iter_num']
        inherit_knobs(run, kinds)
    elif 'block_size' not in run.given:
        run.given['block_size'] = run.knobs['block_size'] = min(size, run.knobs['block_size'])
    elif run.given['block_size'] > size and before.positions == 'learned':
        fail(f"block_size={run.given['block_size']}, but {run.ckpt['path']} has learned only {size} "
             f"positions. use --block_size={size} or less")
    for name in sorted(ARCHITECTURE.intersection(run.knobs)):
        saved = getattr(before, name)
        now = run.given.get(name, saved)
        if now != saved and (run.resuming or name not in load.FREE):
            run.dist.print(f"note: {name}={now} is ignored, the checkpoint has {saved}")
            now = saved
        run.knobs[name] = now


def inherit_knobs(run, kinds):
    """The run's own knobs hold, unless they are given now."""
    given, saved = run.given, run.ckpt['config']
    never = {'init_from', 'overwrite', 'eval_only', *LAUNCH, *ARCHITECTURE}
    if 'environment' not in run.ckpt:  # nanoGPT's: its dtype was chosen for another device
        never.add('dtype')
        # what its resume keeps, whatever it writes into config
        saved |= run.ckpt['optimizer']['param_groups'][0]
        saved |= zip('beta1 beta2 adam_eps'.split(), (*saved.get('betas', ''), saved.get('eps')))
        tokens = math.prod(saved.get(name, run.knobs[name])
                           for name in 'batch_size block_size gradient_accumulation_steps'.split())
        run.ckpt.update(tokens=tokens * run.start_iter, trained_on={'tokens per iteration': tokens})
    if shard_problems(saved.get('shard', 1), run.dist.world_size):
        never.add('shard')
    for plain, counted in ALTERNATIVES:  # with --budget given, max_iters is void, the run's and a config's
        if counted in given:
            never.add(plain)
        elif plain in given:
            never.add(counted)
    if 'lr_schedule' in given:
        never.add('decay_lr')
    run.dist.print(f"resuming from {run.ckpt['path']}, after {run.ckpt['iter_num']:,} iterations")
    for name in [name for name in saved if name in run.knobs and name not in never]:
        value, wanted = check(saved[name], kinds[name])
        if wanted:  # a file may say anything
            continue
        if name not in given:
            run.knobs[name] = value
        elif run.knobs[name] != value:
            run.dist.print(f"  {name}: {value} -> {run.knobs[name]}")
            run.ckpt['bad_steps'] = 0  # with other knobs its updates may be finite


def data_problems(run):
    """What is wrong with the dataset and the checkpoint together. Settles the vocabulary and the tokens so
    far."""
    ckpt, data, knobs, config = run.ckpt, run.data, run.knobs, run.config
    config.vocab_size = ckpt['model_args']['vocab_size']
    so_far = run.start_iter * run.tokens_per_iter
    run.tokens_before = ckpt.get('tokens', so_far) - so_far
    known, state, n = ckpt.get('tokenizer'), data.tokenizer_state, data.meta['vocab_size']
    # finetuning on conversations: their roles may be new, four ids and perhaps <|bos|>
    new = 'chat' in data.meta and not run.resuming and without_chat_tokens(state)
    if not known:  # nanoGPT's: the size has to do, which may be padded
        fits = n - (5 if new else 0) <= config.vocab_size <= data.vocab_size
    else:
        fits = same_tokenizer(known, state) or new and same_tokenizer(known, new)
    if new and fits and n > config.vocab_size:
        config.vocab_size = data.vocab_size
    if not fits:
        return [f"dataset {knobs['dataset']} has another tokenizer than the checkpoint ({n} ids, "
                f"up to {config.vocab_size} there). train from scratch, or on one made by prepare.py "
                f"--tokenizer={'' if ckpt['path'].endswith('.pt') else 'hf:'}{shlex.quote(ckpt['path'])}"]
    if not run.continues or knobs['eval_only']:
        return []
    # else the run would train on some samples twice and on some never
    for name, old in reversed(ckpt['trained_on'].items()):  # the data first, on which the batch may depend
        new = run.trained_on.get(name)
        if new != old:
            what = f"{name.split()[0]}.bin"
            remedy = "bring the old data back, or start a new run from these weights with --init_from=PATH"
            if name == 'tokens per iteration':
                what, remedy = name, f"keep it with --total_batch_size={old}, or leave out what changed it"
            return [f"{what} changed since this run was saved ({old} -> {new}). {remedy}; to continue all "
                    f"the same, as another run: --init_from=resume:{knobs['out_dir']} --out_dir=ANOTHER"]
    return []


def tell_what_changed(run):
    """Notes on what does not go on as it was."""
    if run.continues and not run.compares:
        run.dist.print("note: evaluations read other windows than before (eval_iters x batch_size, "
                       "document_mask; nanoGPT drew them at random): the best loss begins anew, and "
                       "ckpt_best.pt with it")
    if not run.ckpt['trained_on'].items() <= run.trained_on.items():
        run.dist.print("note: tokens, budget and order of samples go as if all iterations had this batch and "
                       "data: samples come twice or late; other data's val.bin may have been trained on")
    changed = [f"{name} {value} -> {run.environment.get(name)}"
               for name, value in run.ckpt.get('environment', {}).items()
               if run.environment.get(name) != value]
    if changed:
        run.dist.print("note: from here on perhaps not the bits of an uninterrupted run; up to rounding the "
                       "same, if code, data, tokens per iteration, dropout and noise are. "
                       f"changed: {', '.join(changed)}")


def model_of_checkpoint(run):
    """Its GPT, with room for the tokens that the dataset has added."""
    model = load.build(GPT, run.ckpt, run.knobs['dropout'], **{name: run.knobs[name] for name in load.FREE})
    if run.config.vocab_size > model.config.vocab_size:
        grow_vocabulary(model, run.config.vocab_size, run.knobs['seed'])
    return model


def restore_optimizer(run, optimizer, scaler):
    """The optimizer's state, and that of float16's scaler, from the checkpoint of the run."""
    try:
        load_optimizer_state(optimizer, run.ckpt, run.dist.print)
        if run.ckpt.get('scaler') and scaler.is_enabled():
            scaler.load_state_dict(run.ckpt['scaler'])
    except Exception as e:  # a file may say anything
        path = run.ckpt['path']
        fail(f"the optimizer's state in {path} cannot be used ({type(e).__name__}: {e}). if other "
             "parameters were frozen then, freeze these; else take an older one, or start a new run from its "
             f"weights: --init_from={shlex.quote(path)} --out_dir=ANOTHER")


GIVEN = 'lr_scale weight_decay betas eps momentum'.split()  # options of groups that follow from knobs


def load_optimizer_state(optimizer, ckpt, tell):
    """Take over the state of a checkpoint. AdamW's and Muon's: the moments, but the options of this run
    (load_state_dict would silently bring back the old weight_decay, betas and fused). Any other optimizer:
    its own load_state_dict, with the options that follow from knobs. The learning rate is set at every step
    anyway. Raises AssertionError and others if it does not fit."""
    state, now = ckpt['optimizer'], type(optimizer).__name__
    before = ckpt.get('optimizer_class', 'AdamW' if 'betas' in state['param_groups'][0] else 'another')
    if before != now:
        tell(f"note: the optimizer was {before} and is {now}: it starts without a state")
        return
    params = [p for group in optimizer.param_groups for p in group['params']]
    n = sum(len(group['params']) for group in state['param_groups'])
    assert n == len(params), f"it has {n} parameters, not {len(params)}"
    if now in ('AdamW', 'MuonAdamW'):
        # the fused update trusts the shapes: with others it would write beyond the end of a tensor
        for i, moments in state['state'].items():
            shapes = {value.shape for name, value in moments.items() if name != 'step'}
            assert shapes == {params[i].shape}, f'the state of parameter {i} has another shape'
        # before loading, not after: by `fused` torch decides on which device a step counter has to be. The
        # parameters are counted through all groups, in the same order however they are divided into groups
        state = {'state': state['state'], 'param_groups': optimizer.state_dict()['param_groups']}
    for group, new in zip(state['param_groups'], optimizer.param_groups):
        group.update({name: new[name] for name in GIVEN if name in new})
    moments = {i: {name: moment_of(params[i], value) for name, value in own.items()}
               for i, own in state['state'].items()}
    optimizer.load_state_dict({**state, 'state': moments})


def moment_of(p, value):
    """The saved `value` on the device of the parameter p, this process's shard of it if p is sharded, for
    which nothing is sent. Always a copy: on a CPU `value` is the mapped file, which is about to be
    replaced."""
    if not torch.is_tensor(value):
        return value
    if value.shape != p.shape:  # it counts the steps, say; torch decides on which device
        return value.clone()
    if not hasattr(p, 'to_local'):
        return value.to(p.device, copy=True)
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(value.to(p.device), p.device_mesh, p.placements, src_data_rank=None)


@torch.no_grad()
def grow_vocabulary(model, vocab_size, seed):
    """Give embedding and head rows for the ids up to vocab_size. A new row is the mean of the old ones and a
    little noise, so that new tokens begin as likely as the average one, and apart from each other."""
    generator = torch.Generator().manual_seed(seed)
    embedding, head = model.transformer.wte, model.lm_head
    tied = embedding.weight is head.weight
    for module in (head, embedding):
        old = module.weight
        new = old.mean(0, keepdim=True).repeat(vocab_size - old.size(0), 1)
        noise = torch.randn(new.shape, generator=generator) * old.std() * 0.1
        module.weight = torch.nn.Parameter(torch.cat((old, new + noise.to(new.dtype))))
    if tied:
        embedding.weight = head.weight
    model.config.vocab_size = vocab_size
