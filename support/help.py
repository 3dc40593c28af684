"""
What configurator.py asks for: --help, and what a mistyped knob or config file was probably meant to be.

--help prints a script's docstring and its knobs, with the values that config files and flags give them. The
comments of the block of knobs are the texts.

    $ python train.py --help                        # the essential ones first
    $ python train.py config/quickstart.py --help   # with that file's values
    $ python train.py --help lr                     # only knobs that have to do with lr
"""

import ast
import dataclasses
import difflib
import os
import re
import sys
import textwrap

from configurator import fail, is_value, note, parse_args, plain, types_of
from support.console import exit_on_broken_pipe, width

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



# of train.py: what a first run wants to change
ESSENTIAL = ('out_dir', 'init_from', 'dataset', 'batch_size', 'block_size', 'n_layer', 'n_head', 'n_embd',
             'learning_rate', 'max_iters')


@dataclasses.dataclass
class Knob:
    name: str
    default: str  # as the source has it
    comment: str
    group: str


def print_help(script, knobs, positional, like=None):
    path = script['__file__']
    name = os.path.basename(path)
    args, words, kinds, previous = [], [], types_of(script, knobs), ''
    for arg in sys.argv[1:]:
        is_flag, of_knob = arg.startswith('-'), kinds.get(previous[2:])
        if is_flag or arg.endswith('.py') or (of_knob and is_value(arg, of_knob, positional)):
            args += [arg] if arg not in ('--help', '-h') else []
        else:
            words.append(arg)
        previous = arg
    given, problems = parse_args(args, knobs, kinds, positional)
    if problems:
        fail(*problems)
    exit_on_broken_pipe()
    found = read_block(path, knobs)
    if words:
        show_matching(found, words, given, name)
    else:
        word = f'[{positional}] ' if positional else ''
        print((script['__doc__'] or '').strip() + '\n')
        print(f"usage: python {name} {word}[config/file.py ...] [--key=value ...]")
        show_all(found, given)
        print(f"\nonly those about a word: python {name} --help WORD")
    if like:
        like = os.path.basename(like)
        print(f"\nand all knobs of {like}, see python {like} --help")


def show_all(found, given):
    essential = [knob for knob in found if knob.name in ESSENTIAL] if len(found) > 40 else []
    if essential:
        print("\nthe essential ones")
        show(essential, given)
    rest = [knob for knob in found if knob not in essential]
    for group in dict.fromkeys(knob.group for knob in rest):
        print(f"\n{group}" if group else '')
        show([knob for knob in rest if knob.group == group], given)


def show_matching(found, words, given, script):
    """Those that have one of the words in their name, or as another name for it, or in their comment."""
    words = [word.lower().replace('-', '_') for word in words]
    matching = [knob for knob in found for word in words
                if word in knob.name or ALIASES.get(word) == knob.name
                or re.search(rf'\b{re.escape(word)}', f'{knob.group} {knob.comment}'.lower())]
    if not matching:
        fail(f"no knob is about that ({', '.join(words)}). all of them: python {script} --help")
    show([knob for knob in found if knob in matching], given)


def show(some, given):
    """A paragraph for each knob: its value, what it means, and its default if the value is another."""
    column, most = 30, min(width(), 110)
    for knob in some:
        value, text = knob.default, knob.comment
        if knob.name in given:
            value, text = repr(given[knob.name]), f"{text} [default:\xa0{knob.default}]".strip()
        begin = f"  --{knob.name}={value}"
        if len(begin) >= column or not text:
            print(begin)
            begin = ''
        if text:
            text = textwrap.fill(text, most, initial_indent=begin.ljust(column), break_long_words=False,
                                 subsequent_indent=' ' * column, break_on_hyphens=False)
            print(text.replace('\xa0', ' '))  # [default: 3] is not torn


def read_block(path, knobs):
    """The Knobs of a script's block, in its order. A comment of up to three words alone on its line begins a
    group where there are many knobs; a longer one belongs to the knob below if that has no other, else to the
    one above."""
    with open(path, encoding='utf-8') as f:
        source = f.read().partition('\nknobs, given = configure(')[0]
    lines, found, group, above = source.splitlines(), [], '', ''
    grouped = len(knobs) > 40
    nodes = {node.lineno: node for node in ast.parse(source).body
             if isinstance(node, (ast.Assign, ast.AnnAssign))}
    for number in range(1, len(lines) + 1):
        line, node = lines[number - 1], nodes.get(number)
        if line.startswith('# ---') or not (line.startswith('#') or node):
            above = ''
        elif node is None and grouped and len(line.split()) <= 4:
            group, above = line[1:].strip(), ''
        elif node is None:
            above = f'{above} {line[1:].strip()}'.strip()
        else:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            comment = line[node.end_col_offset:].strip().removeprefix('#').strip()
            if above and not comment:
                comment = above
            elif above and found:
                found[-1].comment += f' {above}'
            above = ''
            if isinstance(target, ast.Name) and target.id in knobs:
                value = line[node.value.col_offset:node.value.end_col_offset]
                if isinstance(node.value, ast.BinOp):
                    value = repr(knobs[target.id])
                found.append(Knob(target.id, value, choices_of(node, comment) + comment, group))
    return found


def choices_of(node, comment):
    """"'cosine', 'linear': " for a knob that takes one of these words, unless its comment tells them."""
    annotation = getattr(node, 'annotation', None)
    words = [part.value for part in ast.walk(annotation or node)
             if annotation and isinstance(part, ast.Constant) and isinstance(part.value, str)]
    if not words or all(word in comment for word in words):
        return ''
    return ', '.join(map(repr, words)) + ('; ' if comment else '')


def knobs_of(path):
    """(knobs, kinds) at the top of a script, without running more of it than that."""
    with open(path, encoding='utf-8') as f:
        block = f.read().partition('\nknobs, given = configure(')[0]
    names = {}
    exec(compile(block, path, 'exec'), names)
    return plain(names), types_of(names, plain(names))


# -----------------------------------------------------------------------------
# did you mean


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


def similar(name, knobs, cutoff=0.6):
    """The knob that is spelled most like `name`, or None."""
    return next(iter(difflib.get_close_matches(name, knobs, n=1, cutoff=cutoff)), None)


def names_of_no_knob(path, assigned, tree, knobs):
    """The problems with names that the config file `path`, of this syntax tree, assigns to no knob. A config
    may have names of its own, as in n_layers = 6; n_layer = n_layers, and some are merely left over."""
    used = {node.id for node in ast.walk(tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    problems, idle = [], []
    for name in [name for name in assigned if name not in knobs]:
        if is_mistyped(name, assigned, used, knobs):
            problems.append(f"unknown knob in {path} ({name}). {suggest(name, knobs)}; names that begin "
                            "with _ are yours")
        elif name not in used:
            idle.append(name)
    if idle:
        note(f"note: {path} sets what is no knob and what it does not use itself: {', '.join(idle)}")
    return problems


def is_mistyped(name, assigned, used, knobs):
    """Whether it looks like a knob that is not set, or is what others call one and is not used."""
    close = similar(name, knobs, cutoff=0.8)
    if close and not (close in assigned and name in used):
        return True
    return name not in used and ALIASES.get(name) in knobs


def no_config(path):
    """The rest of the line about a config file that is not there."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    folder = os.path.join(root, 'config')
    known = [f'config/{name}' for name in os.listdir(folder)] if os.path.isdir(folder) else []
    close = difflib.get_close_matches(path, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ''
    return f"looked in {' and '.join(dict.fromkeys([os.getcwd(), root]))}{hint}"
