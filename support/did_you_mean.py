"""What a mistyped knob, value or config file was probably meant to be."""

import difflib
import os
import types

# what other trainers call it -> what it is called here
ALIASES = dict(
    lr='learning_rate', max_lr='learning_rate', max_grad_norm='grad_clip', clip='grad_clip',
    eps='adam_eps', steps='max_iters', max_steps='max_iters', num_iterations='max_iters',
    train_iterations='max_iters', iters='max_iters', num_steps='max_iters', training_tokens='budget',
    epochs='budget', num_epochs='budget', target_param_data_ratio='budget', context_length='block_size',
    seq_len='block_size', max_seq_len='block_size', sequence_length='block_size',
    mini_batch_size='batch_size', micro_batch_size='batch_size', device_batch_size='batch_size',
    tokens_per_update='total_batch_size', batch_tokens='total_batch_size',
    grad_accum='gradient_accumulation_steps', grad_accum_steps='gradient_accumulation_steps',
    accumulation_steps='gradient_accumulation_steps', n_layers='n_layer', num_layers='n_layer',
    depth='n_layer', n_heads='n_head', num_heads='n_head', n_embed='n_embd', embd_size='n_embd',
    emb_dim='n_embd', d_model='n_embd', hidden_size='n_embd', embedding_dim='n_embd', dim='n_embd',
    theta='rope_theta', warmup='warmup_iters', warmup_steps='warmup_iters',
    warmup_iterations='warmup_iters', warmup_ratio='warmup_iters', schedule='lr_schedule',
    scheduler='lr_schedule', eval_every='eval_interval', eval_freq='eval_interval',
    eval_steps='eval_iters', log_every='log_interval', save_every='save_interval',
    save_steps='save_interval', token_ckpt='save_interval', sample_every='sample_interval',
    core_metric_every='tasks_interval', output_dir='out_dir',
    log_dir='out_dir', logdir='out_dir', ckpt_dir='out_dir', save_dir='out_dir', dataset_dir='data_dir',
    load_ckpt='init_from', resume='init_from', resume_from_step='init_from', checkpoint='init_from',
    model='init_from', use_wandb='wandb_log', precision='dtype',
    use_compile='compile', torch_compile='compile', enable_compilation='compile',
    gradient_checkpointing='activation_checkpointing', prompt='start', length='max_new_tokens',
    max_tokens_to_generate='max_new_tokens', n='num_samples', output='name', out='name',
    val_frac='val_fraction', num_workers='workers', n_workers='workers', num_proc='workers',
    text_column='text_key', column='text_key', tokenizer_path='tokenizer',
)
# what others have and this has in another way: the knob of the script that is asked -> what to say
INSTEAD = {
    'tokenizer': ('max_iters', "the tokenizer belongs to the dataset: python prepare.py NAME "
                               "--input=TEXT --tokenizer=PATH"),
    'log_file': ('max_iters', "the log is log.csv in --out_dir"),
    'model_gen_multiplier': ('sample_interval', "did you mean --sample_interval=100x1.5? each gap is half as "
                                                "long again"),
    'vocab_size': ('max_iters', "it is the dataset's"),
    'steps_per_epoch': ('budget', "it is computed: --budget='3 epochs'"),
    'use_prev_scheduler': ('lr_schedule', "nothing is needed: a resume continues the schedule"),
    'multiple_of': ('mlp_width', "did you mean --mlp_width=N?"),
}
INSTEAD['tokenizer_path'] = INSTEAD['tokenizer']


def suggest(name, knobs):
    """The rest of the line about an unknown knob."""
    name = name.replace('-', '_').lower()
    if ALIASES.get(name) in knobs:
        return f"did you mean --{ALIASES[name]}?"
    script, what = INSTEAD.get(name, (None, None))
    if script in knobs:
        return what
    close = similar(name, knobs)
    return f"did you mean --{close}?" if close else "--help lists all of them"


def is_known_elsewhere(name, knobs):
    """Whether a knob was called that by other trainers."""
    return ALIASES.get(name) in knobs


def similar(name, knobs, cutoff=0.6):
    """The knob that is spelled most like `name`, or None."""
    return next(iter(difflib.get_close_matches(name, knobs, n=1, cutoff=cutoff)), None)


def no_config(path, script_dir):
    """The line about a config file that is not there."""
    folder = os.path.join(script_dir, 'config')
    known = [f'config/{name}' for name in os.listdir(folder)] if os.path.isdir(folder) else []
    close = difflib.get_close_matches(path, known, n=1)
    folders = dict.fromkeys([os.getcwd(), os.path.abspath(script_dir)])
    hint = f"; did you mean {close[0]}?" if close else ''
    return f"config file not found ({path}). looked in {' and '.join(folders)}{hint}"


def describe(kinds):
    """What a knob of these kinds takes."""
    words = {bool: 'True or False', int: 'a whole number', float: 'a number', str: 'text',
             types.NoneType: 'None'}
    found = [', '.join(kind for kind in kinds if isinstance(kind, str))]
    found += [words[kind] for kind in words if kind in kinds]
    return ' or '.join(word for word in found if word)
