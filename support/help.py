"""
What configurator.py asks for: --help, and what a mistyped knob or config file was probably meant to be.

--help prints a script's docstring and its knobs, with the values that config files and flags give them. The
comments of the block of knobs are the texts.

    $ python train.py --help                        # all of them
    $ python train.py config/quickstart.py --help   # with that file's values
    $ python train.py --help lr                     # only knobs that have to do with lr
"""

import ast
import difflib
import itertools
import os
import re
import shutil
import textwrap

# -----------------------------------------------------------------------------
# --help


def split_words(argv):
    """(the arguments without --help and the words after it, these words: what it is about)"""
    at = next(i for i, arg in enumerate(argv) if arg in ('--help', '-h'))
    words = [arg for arg in argv[at + 1:] if not arg.startswith('-') and not arg.endswith('.py')]
    return argv[:at] + [arg for arg in argv[at + 1:] if arg not in words], words


def text(script, knobs, kinds, given, words, positional, like):
    """All of it, or with `words` the knobs that have a word in their name or comment that begins with one of
    them; '' if there is none."""
    name = os.path.basename(script['__file__'])
    found, lines = read_block(script['__file__'], knobs, kinds), []
    if words:
        about = re.compile(rf"(\b|_)({'|'.join(map(re.escape, words))})", re.IGNORECASE)
        found = [row for row in found if about.search(' '.join(map(str, row)))]
    else:
        word = f'[{positional}] ' if positional else ''
        lines = [script['__doc__'].strip(), '',
                 f"usage: python {name} {word}[config/file.py ...] [--key=value ...]"]
    for group, rows in itertools.groupby(found, lambda row: row[0]):
        lines.append(f"\n{group}")
        for row in rows:
            lines += paragraph(*row[1:], given)
    if not words:
        lines.append(f"\nonly those about a word: python {name} --help WORD")
    if like and lines:
        like = os.path.basename(like)
        lines.append(f"\nand all knobs of {like}, see python {like} --help")
    return '\n'.join(lines)


def paragraph(name, default, comment, given):
    """The lines about a knob: its value, what it means, and its default if the value is another."""
    begin = f"  --{name}={given.get(name, default)!r}".ljust(28) + '  '
    if name in given:
        comment += f" [default: {default!r}]"
    width = min(shutil.get_terminal_size().columns, 110)
    return textwrap.wrap(comment, width, initial_indent=begin, subsequent_indent=' ' * 30,
                         break_long_words=False, break_on_hyphens=False) or [begin.rstrip()]


def read_block(path, knobs, kinds):
    """[[group, knob, its default, comment]] of a script's block, in its order. A comment of up to three words
    alone on its line begins a group; a longer one belongs to the knob below if that has no other, else to the
    one above."""
    found, group, above = [], '', ''
    for line in block_of(path).splitlines():
        knob = re.fullmatch(r'(\w+)(?:: [^=]+)? = .+?(?:  # (.*))?', line)
        if knob and knob[1] in knobs:
            name, comment = knob[1], knob[2] or above
            if knob[2] and above and found:
                found[-1][3] += f' {above}'
            words = ', '.join(repr(kind) for kind in kinds[name] if isinstance(kind, str))
            found.append([group, name, knobs[name], '; '.join(filter(None, [words, comment]))])
        if not line.startswith('# ') or line.startswith('# ---'):
            above = ''
        elif len(line.split()) <= 4:
            group, above = line[2:], ''
        else:
            above = f'{above} {line[2:]}'.strip()
    return found


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
    meant = similar(name.replace('-', '_').lower(), knobs)
    return f"did you mean --{meant}?" if meant else "--help lists all of them"


def similar(name, knobs):
    """The knob that is spelled most like `name`, or None."""
    return next(iter(difflib.get_close_matches(name, knobs, n=1, cutoff=0.8)), None)


def names_of_no_knob(path, assigned, tree, knobs):
    """(problems, other names) of what the config file `path`, of this syntax tree, assigns to no knob and
    makes no use of: what looks like a knob, or is one elsewhere, is a mistake."""
    used = {node.id for node in ast.walk(tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    unused = [name for name in assigned if name not in knobs and name not in used]
    meant = [name for name in unused if similar(name, knobs)]
    problems = [f"unknown knob in {path} ({name}). {suggest(name, knobs)}; names that begin with _ are yours"
                for name in meant]
    return problems, [name for name in unused if name not in meant]
