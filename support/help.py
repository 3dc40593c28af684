"""--help: a script's docstring and its block of knobs, as they stand in the source. That block is the
manual."""

import ast
import os

from support.console import exit_on_broken_pipe


def print_help(script, knobs, positional, like=None):
    with open(script['__file__'], encoding='utf-8') as f:
        source = f.read()
    lines, tree = source.splitlines(), ast.parse(source).body
    end = len(lines)
    for node in reversed(tree):
        if 'configure(globals()' in ast.unparse(node):
            end = node.lineno
    numbers = []
    for node in tree:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.lineno < end:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and target.id in knobs:
                numbers.append(node.lineno)
    first = min(numbers) - 1
    while lines[first - 1].startswith('#') and not lines[first - 1].startswith('# ---'):
        first -= 1
    exit_on_broken_pipe()
    name = os.path.basename(script['__file__'])
    word = f'[{positional}] ' if positional else ''
    print((script['__doc__'] or '').strip() + '\n')
    print(f"usage: python {name} {word}[config/file.py ...] [--key=value ...]\n")
    print('\n'.join(lines[first:max(numbers)]))
    if like:
        like = os.path.basename(like)
        print(f"\nand all knobs of {like}, see python {like} --help")
