"""
--help: a script's docstring and its knobs, with the values that config files and flags before it give them.
The comments of the block of knobs are the texts.

    $ python train.py --help                        # the essential ones first
    $ python train.py config/quickstart.py --help   # with that file's values
    $ python train.py --help lr                     # only knobs that have to do with lr
"""

import ast
import dataclasses
import os
import re
import sys
import textwrap

from configurator import fail, parse_args, types_of
from support.console import exit_on_broken_pipe, width
from support.did_you_mean import ALIASES
from support.separate_value import is_value

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
        is_flag, of_knob = arg.startswith('-'), kinds.get(previous[2:], ())
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
