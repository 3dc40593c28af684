"""What a run takes from the checkpoint it starts from, and what must fit."""

import dataclasses

from configurator import check, fail
from model import GPTConfig
from support import load
from support.old_knobs import translate
from support.resumed_fields import check_fields
from support.run import LAUNCH
from support.tokenizer import same_tokenizer

FIELDS = [field.name for field in dataclasses.fields(GPTConfig)]
ARCHITECTURE = [name for name in FIELDS if name not in ('vocab_size', 'dropout')]


def take_over(run):
    """Knobs of the run that is resumed, the network of any checkpoint. Given ones win where they may."""
    ckpt = run.ckpt
    before = load.model_config(ckpt)
    if run.resuming:
        check_fields(ckpt)
        run.start_iter, run.best_val_loss = ckpt['iter_num'], ckpt['best_val_loss']
        if run.branching:  # a run of its own, with a best loss of its own
            run.best_val_loss = float('inf')
        inherit_knobs(run)
    free = free_fields(run)
    if not run.resuming:
        check_block_size(run, before, free)
    for name in ARCHITECTURE:
        if name not in run.knobs:
            continue
        if name in run.given and name not in free and run.given[name] != getattr(before, name):
            run.dist.print(f"note: {name}={run.given[name]} is ignored, the checkpoint has "
                           f"{getattr(before, name)}")
        if name not in run.given or name not in free:
            run.knobs[name] = getattr(before, name)
    run.tokens_before = ckpt.get('tokens')  # completed by data_problems()


def inherit_knobs(run):
    """The run's own knobs hold, unless they are given now."""
    never = {'init_from', 'overwrite', 'allow_change', 'eval_only', *LAUNCH, *ARCHITECTURE}
    # some say the same thing: with --budget given, the run's max_iters is void
    for alternatives in (('max_iters', 'budget'), ('total_batch_size', 'gradient_accumulation_steps')):
        if any(name in run.given for name in alternatives):
            never.update(name for name in alternatives if name not in run.given)
    if 'lr_schedule' in run.given and 'decay_lr' not in run.given:
        never.add('decay_lr')
    if run.branching and ('max_iters' in run.given or 'budget' in run.given):
        never.add('lr_decay_iters')  # the branch has an end of its own
    run.changed = inherit(run.knobs, run.kinds, run.given, translate(run.ckpt['config']), never)
    run.dist.print(f"resuming from {run.ckpt['path']}, after {run.ckpt['iter_num']:,} iterations")
    for name, (old, new) in run.changed.items():
        run.dist.print(f"  {name}: {old} -> {new}")


def inherit(knobs, kinds, given, saved, never=()):
    """Take over into `knobs` those of an earlier run, `saved`, except those that are given now and those in
    `never`. Returns the differences that were asked for, {name: (saved, now)}. Values of another type are
    left out."""
    differences = {}
    for name, value in saved.items():
        if name not in knobs or name in never:
            continue
        value, wanted = check(value, kinds[name])
        if wanted:
            continue
        if name not in given:
            knobs[name] = value
        elif knobs[name] != value:
            differences[name] = (value, knobs[name])
    return differences


def free_fields(run):
    """The fields of GPTConfig that no weights depend on, so that a new run may have others than the
    checkpoint."""
    if run.resuming:
        return ()
    if load.model_config(run.ckpt).positions == 'rope':
        return ('block_size', 'rope_theta', 'rope_scaling')
    return ('block_size',)


def check_block_size(run, before, free):
    k, path = run.knobs, run.ckpt['path']
    if 'block_size' not in run.given and before.block_size > k['block_size']:
        run.dist.print(f"note: block_size={k['block_size']} of the {before.block_size} that {path} has. for "
                       f"all of it: --block_size={before.block_size}")
        run.given['block_size'] = k['block_size']
    if 'block_size' in run.given and k['block_size'] > before.block_size:
        if before.positions == 'learned':
            fail(f"block_size={k['block_size']}, but {path} has learned only {before.block_size} positions. "
                 f"use --block_size={before.block_size} or less")
        run.dist.print(f"note: block_size={k['block_size']} is more than the {before.block_size} that {path} "
                       "was trained with")


def data_problems(run):
    """What is wrong with the dataset and the checkpoint together. Settles the vocabulary and the tokens so
    far."""
    ckpt, data, knobs = run.ckpt, run.data, run.knobs
    run.config.vocab_size = ckpt['model_args']['vocab_size']
    so_far = run.start_iter * run.tokens_per_iter
    run.tokens_before = (so_far if run.tokens_before is None else run.tokens_before) - so_far
    problems = []
    known = ckpt.get('tokenizer')
    if known:
        fits = same_tokenizer(known, data.tokenizer_state)
        if data.packed and not run.resuming:  # finetuning: the roles of conversations may be new
            from support.chat_format import without_chat_tokens
            fits = fits or same_tokenizer(known, without_chat_tokens(data.tokenizer_state))
            run.config.vocab_size = max(run.config.vocab_size, data.vocab_size)
    else:  # nanoGPT's: the size has to do, which may be padded
        fits = data.meta['vocab_size'] <= run.config.vocab_size <= data.vocab_size
    if not fits:
        problems.append(f"dataset {knobs['dataset']} has another tokenizer than the checkpoint "
                        f"({data.meta['vocab_size']} ids, {run.config.vocab_size} there). train on a dataset "
                        "made with the checkpoint's tokenizer, or from scratch")
    for tokens in data.splits.values():  # some tokenizers have an id or two more than their model
        tokens.vocab_size = min(tokens.vocab_size, run.config.vocab_size)
    if run.continues and not (problems or knobs['allow_change'] or knobs['eval_only']):
        problems += change_problems(run)
    return problems


def change_problems(run):
    """A resumed run would train on some samples twice and on some never if these have changed."""
    for name, old in run.ckpt.get('trained_on', {}).items():
        new = run.trained_on.get(name)
        if new == old:
            continue
        name = name.removesuffix(' ids')  # which an older checkpoint lacks
        if name == 'tokens per iteration':
            what, remedy = name, f"keep it with --total_batch_size={old}"
        else:
            what = name + '.bin'
            remedy = "bring the old data back, or start a new run from these weights with --init_from=PATH"
        return [f"{what} changed since this run was saved ({old} -> {new}). {remedy}; to continue all the "
                "same: --allow_change"]
    return []


def tell_what_changed(run):
    """A note if the resume cannot be bit-exact."""
    old = run.ckpt.get('environment', {})
    changed = [f"{name} {value} -> {run.environment.get(name)}" for name, value in old.items()
               if run.environment.get(name) != value]
    if changed:
        run.dist.print("note: from here on not the bits of an uninterrupted run, but the same up to "
                       f"rounding: {', '.join(changed)}")


def last_evaluation(ckpt):
    found = ckpt.get('evaluation', {})
    if 'metrics' in found or not found:
        return found
    from support.old_knobs import evaluation_of_version_1
    return evaluation_of_version_1(found)


def model_of_checkpoint(run):
    """Its GPT, with room for the tokens that the dataset has added."""
    changes = {name: run.knobs[name] for name in free_fields(run)}
    model = load.build(run.ckpt, run.knobs['dropout'], **changes)
    if run.config.vocab_size > model.config.vocab_size:
        from support.grow_vocabulary import grow_vocabulary
        grow_vocabulary(model, run.config.vocab_size, run.knobs['seed'])
    return model


def load_optimizer_state(run, optimizer, scaler):
    from support import optimizer_state
    try:
        optimizer_state.load_optimizer_state(optimizer, run.ckpt, run.dist.print)
        if run.ckpt.get('scaler') and scaler.is_enabled():
            scaler.load_state_dict(run.ckpt['scaler'])
    except Exception as e:  # a file may say anything
        path = run.ckpt['path']
        fail(f"the optimizer's state in {path} cannot be used ({type(e).__name__}: {e}). take an older "
             f"checkpoint, or start a new run from its weights: --init_from={path} --out_dir=ANOTHER")
