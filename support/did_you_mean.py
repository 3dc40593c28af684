"""What a mistyped knob or config file was probably meant to be."""

import difflib
import os

from support.old_knobs import REMOVED

# what other trainers call it -> what it is called here
ALIASES = dict(
    lr='learning_rate', max_lr='learning_rate', max_grad_norm='grad_clip', clip='grad_clip',
    eps='adam_eps', steps='max_iters', max_steps='max_iters', num_iterations='max_iters',
    train_iterations='max_iters', iters='max_iters', training_tokens='budget', epochs='budget',
    num_epochs='budget', target_param_data_ratio='budget', context_length='block_size',
    seq_len='block_size', max_seq_len='block_size', sequence_length='block_size',
    mini_batch_size='batch_size', micro_batch_size='batch_size', device_batch_size='batch_size',
    tokens_per_update='total_batch_size', batch_tokens='total_batch_size',
    grad_accum='gradient_accumulation_steps', grad_accum_steps='gradient_accumulation_steps',
    accumulation_steps='gradient_accumulation_steps', n_layers='n_layer', num_layers='n_layer',
    depth='n_layer', n_heads='n_head', num_heads='n_head', n_embed='n_embd', d_model='n_embd',
    hidden_size='n_embd', embedding_dim='n_embd', dim='n_embd', warmup_steps='warmup_iters',
    warmup_iterations='warmup_iters', schedule='lr_schedule', scheduler='lr_schedule',
    eval_every='eval_interval', eval_freq='eval_interval', eval_steps='eval_iters',
    log_every='log_interval', save_every='save_interval', save_steps='save_interval',
    output_dir='out_dir', log_dir='out_dir', load_ckpt='init_from', resume='init_from',
    checkpoint='init_from', model='init_from', use_wandb='wandb_log', precision='dtype',
    use_compile='compile', torch_compile='compile', prompt='start', length='max_new_tokens',
    max_tokens_to_generate='max_new_tokens', n='num_samples', output='name', out='name',
    val_frac='val_fraction', num_workers='workers', n_workers='workers', num_proc='workers',
    text_column='text_key', column='text_key',
)


def suggest(name, knobs):
    """The rest of the line about an unknown knob."""
    name = name.replace('-', '_').lower()
    if name in REMOVED and ('total_batch_size' in knobs or name == 'tasks_dir'):
        return f"it is gone; use {REMOVED[name]}"
    if ALIASES.get(name) in knobs:
        return f"did you mean --{ALIASES[name]}?"
    close = difflib.get_close_matches(name, knobs, n=1, cutoff=0.6)
    return f"did you mean --{close[0]}?" if close else "--help lists all of them"


def no_config(path, script_dir):
    """The line about a config file that is not there."""
    folder = os.path.join(script_dir, 'config')
    known = [f'config/{name}' for name in os.listdir(folder)] if os.path.isdir(folder) else []
    close = difflib.get_close_matches(path, known, n=1)
    folders = dict.fromkeys([os.getcwd(), os.path.abspath(script_dir)])
    hint = f"; did you mean {close[0]}?" if close else ''
    return f"config file not found ({path}). looked in {' and '.join(folders)}{hint}"
