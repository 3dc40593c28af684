"""
What configurator.py asks for: --help, and what a mistyped knob or config file was probably meant to be.

--help prints a script's docstring and its knobs, with the values that config files and flags give them. The
comments of the block of knobs are the texts.

    $ python train.py --help                        # the essential ones first
    $ python train.py config/quickstart.py --help   # with that file's values
    $ python train.py --help lr                     # only knobs that have to do with lr
"""

import ast
import difflib
import os
import re
import shutil
import textwrap

# of train.py: what a first run wants to change
ESSENTIAL = ('out_dir', 'init_from', 'dataset', 'batch_size', 'block_size', 'n_layer', 'n_head', 'n_embd',
             'learning_rate', 'max_iters')
# what other trainers call it -> what it is called here, where the spelling does not tell
ALIASES = dict(
    lr='learning_rate', max_lr='learning_rate', max_grad_norm='grad_clip', steps='max_iters',
    max_steps='max_iters', epochs='budget', num_epochs='budget', target_param_data_ratio='budget',
    context_length='block_size', seq_len='block_size', max_seq_len='block_size', depth='n_layer',
    embd_size='n_embd', d_model='n_embd', hidden_size='n_embd', eval_every='eval_interval',
    top_p='sample_tokens',
    core_metric_every='tasks_interval', hellaswag='tasks', save_dir='out_dir', resume='init_from',
    checkpoint='init_from', use_wandb='wandb_log', precision='dtype', bf16='dtype', prompt='start',
    num_proc='workers',
)
# what others have and this has in another way
INSTEAD = dict(
    tokenizer="the dataset has one: python prepare.py NAME --input=TEXT --tokenizer=PATH",
    vocab_size="it is the dataset's",
    num_gpus="torchrun says it: torchrun --standalone --nproc_per_node=N train.py ...",
)

# -----------------------------------------------------------------------------
# --help


def split_words(argv):
    """(the arguments without --help and the words after it, these words: what it is about)"""
    at = next(i for i, arg in enumerate(argv) if arg in ('--help', '-h'))
    words = [arg for arg in argv[at + 1:] if not arg.startswith('-') and not arg.endswith('.py')]
    return argv[:at] + [arg for arg in argv[at + 1:] if arg not in words], words


def text(script, knobs, kinds, given, words, positional, like):
    """All of it, or with `words` the knobs that have one of them in their name, as another name for it, or in
    their comment; '' if there is none."""
    name = os.path.basename(script['__file__'])
    found, lines = read_block(script['__file__'], knobs, kinds), []
    words = [word.lower().replace('-', '_') for word in words]
    if words:
        found = [row for row in found if any(
            word in row[1] or ALIASES.get(word) == row[1]
            or re.search(rf'\b{re.escape(word)}', f'{row[0]} {row[3]}'.lower()) for word in words)]
    else:
        word = f'[{positional}] ' if positional else ''
        lines = [script['__doc__'].strip(), '',
                 f"usage: python {name} {word}[config/file.py ...] [--key=value ...]"]
        if len(found) > 40:
            essential = [('the essential ones', *row[1:]) for row in found if row[1] in ESSENTIAL]
            found = essential + [row for row in found if row[1] not in ESSENTIAL]
    for i, (group, *knob) in enumerate(found):
        if not words and (i == 0 or group != found[i - 1][0]):
            lines.append(f"\n{group}" if group else '')
        lines += paragraph(*knob, given)
    if not words:
        lines.append(f"\nonly those about a word: python {name} --help WORD")
    if like and lines:
        like = os.path.basename(like)
        lines.append(f"\nand all knobs of {like}, see python {like} --help")
    return '\n'.join(lines)


def paragraph(name, default, comment, given):
    """The lines about a knob: its value, what it means, and its default if the value is another."""
    column, begin = 30, f"  --{name}={repr(given[name]) if name in given else default}"
    if name in given:
        comment += f" [default:\xa0{default}]"
    alone = [begin] if len(begin) >= column or not comment else []
    width = min(shutil.get_terminal_size().columns, 110)
    lines = textwrap.wrap(comment, width, initial_indent=('' if alone else begin).ljust(column),
                          subsequent_indent=' ' * column, break_long_words=False, break_on_hyphens=False)
    return alone + [line.replace('\xa0', ' ') for line in lines]  # [default: 3] is not torn


def read_block(path, knobs, kinds):
    """[(group, knob, its default as the source has it, comment)] of a script's block, in its order. A comment
    of up to three words alone on its line begins a group where there are many knobs; a longer one belongs to
    the knob below if that has no other, else to the one above."""
    found, group, above = [], '', ''
    for line in block_of(path).splitlines():
        knob = re.fullmatch(r'(\w+)(?:: [^=]+)? = (.+?)(?:  # (.*))?', line)
        if knob and knob[1] in knobs:
            name, default, comment = knob[1], knob[2], knob[3] or ''
            if above and not comment:
                comment = above
            elif above and found:
                found[-1] += (above,)
            words = [kind for kind in kinds[name] if isinstance(kind, str)]
            if not all(word in comment for word in words):
                comment = ', '.join(map(repr, words)) + ('; ' if comment else '') + comment
            found.append((group, name, repr(knobs[name]) if ' * ' in default else default, comment))
        if not line.startswith('# ') or line.startswith('# ---'):
            above = ''
        elif len(knobs) > 40 and len(line.split()) <= 4:
            group, above = line[2:], ''
        else:
            above = f'{above} {line[2:]}'.strip()
    return [(*row[:3], ' '.join(row[3:])) for row in found]


def block_of(path):
    with open(path, encoding='utf-8') as f:
        return f.read().partition('\nknobs, given = configure(')[0]


def names_at_top(path):
    """The names at the top of a script, without running more of it than that."""
    names = {}
    exec(compile(block_of(path), path, 'exec'), names)
    return names


# -----------------------------------------------------------------------------
# did you mean


def suggest(name, knobs):
    """The rest of the line about an unknown knob."""
    name = name.replace('-', '_').lower()
    meant = ALIASES.get(name)
    if meant not in knobs:
        if 'max_iters' in knobs and (instead := INSTEAD.get(name.removesuffix('_path'))):
            return instead
        meant = similar(name, knobs)
    return f"did you mean --{meant}?" if meant else "--help lists all of them"


def similar(name, knobs, cutoff=0.65):
    """The knob that is spelled most like `name`, or None."""
    return next(iter(difflib.get_close_matches(name, knobs, n=1, cutoff=cutoff)), None)


def names_of_no_knob(path, assigned, tree, knobs):
    """(problems, other names) of what the config file `path`, of this syntax tree, assigns to no knob and
    makes no use of: what looks like a knob, or is one elsewhere, is a mistake."""
    used = {node.id for node in ast.walk(tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    unused = [name for name in assigned if name not in knobs and name not in used]
    meant = [name for name in unused if similar(name, knobs, cutoff=0.8) or ALIASES.get(name) in knobs]
    problems = [f"unknown knob in {path} ({name}). {suggest(name, knobs)}; names that begin with _ are yours"
                for name in meant]
    return problems, [name for name in unused if name not in meant]
