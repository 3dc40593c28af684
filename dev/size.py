"""
What a person has to know who carries this project on: a table of numbers with their limits.

    $ python dev/size.py           # the table; ends with status 1 if a limit is passed
    $ python dev/size.py --list    # and what was counted: circles, crumbs, errors, imports inside functions

tests/test_house.py asserts that the same numbers are within the same limits. All of it is read from the
files that git tracks, nothing is run. Product is every .py outside tests/, dev/, config/, data/ and docs/.
Code tokens are Python's own, without comments and docstrings, so neither long lines nor short names make them
fewer; they are counted with Python 3.11, as later tokenizers cut f-strings into more.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from functools import cache
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
NO_PRODUCT = ('tests', 'dev', 'config', 'data', 'docs')
SCRIPTS = ('train.py', 'prepare.py', 'sample.py', 'eval.py', 'export.py', 'plan.py', 'plot.py')
WIDTH, SCREEN = 110, 60  # characters of a line, lines of a function
ALONE = ('model.py', 'optim.py', 'configurator.py')  # each works in an empty folder, with torch and numpy

# {what: (ceiling, aim)}. A ceiling only falls: lower it with the commit that allows it. A commit that has to
# raise one says what leaves instead.
LIMITS = {
    'code tokens, top level': (19_400, 20_000),
    'code tokens, support/': (44_600, 46_000),
    'code tokens, product': (64_000, 64_000),  # 55,000 is the real aim
    'code tokens, tests/': (75_000, 75_000),
    'code tokens, dev/': (18_000, 18_000),
    'files in support/': (34, 36),
    'files in support/ below 70 lines that fewer than three others import': (0, 0),
    'files in support/ above 450 lines': (0, 0),
    'imports of ours inside functions': (3, 12),
    'files of ours in circles of imports': (0, 0),
    'files that configurator.py reaches': (2, 4),
    'files that train.py reaches': (31, 32),
    'files that should stand alone and do not': (0, 0),
    'places that make an error message': (183, 230),
    'places where one is assigned or returned': (12, 20),
    'lines over 110 characters': (0, 0),
    'functions over 60 lines': (0, 0),
    'lines of train.py': (310, 310),
    'lines of model.py': (700, 700),  # the whole network
    'lines of optim.py': (185, 200),
    'lines of configurator.py': (330, 330),
    'lines of sample.py': (176, 200),
    'knobs of train.py': (75, 75),
    "lines of train.py's loop": (48, 60),
    "decisions in train.py's loop": (8, 15),
    'words in README.md': (1_700, 1_700),
}


# -----------------------------------------------------------------------------
# the files


@cache
def tracked():
    """Paths from the project's root: those that git tracks or, without git, all but what runs leave."""
    try:
        done = subprocess.run(['git', '-C', REPO, 'ls-files'], capture_output=True, text=True, check=True)
        names = done.stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        paths = [path.relative_to(REPO) for path in REPO.rglob('*')]
        names = [str(path) for path in paths if not path.parts[0].startswith(('.', 'out'))]
    return [name for name in sorted(names) if (REPO / name).is_file()]


def python_files(*folders):
    """The .py files in these top folders."""
    return [name for name in tracked() if name.endswith('.py') and name.split('/')[0] in folders]


@cache
def product():
    return [name for name in tracked() if name.endswith('.py') and name.split('/')[0] not in NO_PRODUCT]


@cache
def text_of(name):
    return (REPO / name).read_text(encoding='utf-8')


@cache
def tree_of(name):
    return ast.parse(text_of(name))


def docstrings(tree):
    """The constants of a tree that are docstrings."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    return [node.body[0].value for node in ast.walk(tree)
            if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None]


def code_tokens(name):
    free = {(node.lineno, node.col_offset) for node in docstrings(tree_of(name))}
    layout = {getattr(tokenize, kind) for kind in 'COMMENT NL NEWLINE INDENT DEDENT ENDMARKER'.split()}
    tokens = tokenize.generate_tokens(io.StringIO(text_of(name)).readline)
    return sum(token.type not in layout and token.start not in free for token in tokens)


# -----------------------------------------------------------------------------
# who imports whom


def module_file(name):
    """The product's file that a dotted name, or the beginning of it, stands for; or None."""
    while name:
        if (file := name.replace('.', '/') + '.py') in product():
            return file
        name = name.rpartition('.')[0]


def names_imported(node, importer):
    """The dotted names of an import statement, relative ones resolved; [] for other nodes."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    folder = importer.split('/')[:-node.level] if node.level else []
    base = '.'.join([*folder, *([node.module] if node.module else [])])
    return [f'{base}.{alias.name}'.lstrip('.') for alias in node.names] + [base]


@cache
def imports():
    """[(importer, line, the file of ours, whether inside a function)], each once."""
    found = set()
    for name in product():
        tree = tree_of(name)
        inner = {id(node) for function in ast.walk(tree) if isinstance(function, ast.FunctionDef | ast.Lambda)
                 for node in ast.walk(function)}
        for node in ast.walk(tree):
            for target in map(module_file, names_imported(node, name)):
                if target and target != name:
                    found.add((name, node.lineno, target, id(node) in inner))
    return sorted(found)


@cache
def imported_by(name):
    return {target for importer, _, target, _ in imports() if importer == name}


@cache
def reach(name):
    """A file and all those of ours that it imports, however indirectly."""
    seen, left = {name}, [name]
    while left:
        new = imported_by(left.pop()) - seen
        seen |= new
        left += new
    return seen


def in_circles():
    """The files that reach themselves by their imports."""
    return [name for name in product() if any(name in reach(target) for target in imported_by(name))]


def crumbs():
    """Files in support/ that are short and that hardly anybody imports."""
    return [name for name in python_files('support')
            if lines(name) < 70 and sum(name in imported_by(other) for other in product()) < 3]


def not_alone():
    at_top = {importer for importer, _, _, inside in imports() if not inside}
    return [name for name in ALONE if name in at_top]


# -----------------------------------------------------------------------------
# other things that are counted


def lines(name):
    return text_of(name).count('\n')


def length(node):
    return node.end_lineno - node.lineno + 1


def error_places():
    """Where the product makes an error message: raise, fail, warn, a line added to a list of problems."""
    found = []
    for name in product():
        for node in ast.walk(tree_of(name)):
            called = node.func if isinstance(node, ast.Call) else None
            word = getattr(called, 'id', getattr(called, 'attr', None))
            if (isinstance(node, ast.Raise) and node.exc) or word in ('fail', 'warn') or (
                    word == 'append' and 'problem' in ast.unparse(called)):
                found.append(f'{name}:{node.lineno}')
    return found


def other_errors():
    """Words that are assigned to problems, or returned by a function of problems: counted apart, so that none
    of the places above becomes one of these."""
    found = []
    for name in product():
        for node in ast.walk(tree_of(name)):
            values = []
            if isinstance(node, ast.Assign | ast.AugAssign):
                target = node.target if isinstance(node, ast.AugAssign) else node.targets[0]
                values = [node.value] if 'problem' in ast.unparse(target) else []
            elif isinstance(node, ast.FunctionDef) and re.search('problem|mistake|too_short|why', node.name):
                values = [one.value for one in ast.walk(node) if isinstance(one, ast.Return | ast.Yield)]
            found += [f'{name}:{part.lineno}' for value in values if value for part in ast.walk(value)
                      if isinstance(part, ast.JoinedStr)]
    return sorted(set(found))


def wide_lines():
    shell = [name for name in tracked() if name.startswith('runs/')]
    return [f'{name}:{n}' for name in {*product(), *python_files('dev', 'config', 'data'), *shell}
            for n, line in enumerate(text_of(name).splitlines(), 1) if len(line) > WIDTH]


def long_functions():
    functions = [(name, node) for name in [*product(), *python_files('dev')]
                 for node in ast.walk(tree_of(name)) if isinstance(node, ast.FunctionDef)]
    return [f'{name}: {node.name}, {length(node)} lines' for name, node in functions if length(node) > SCREEN]


def loop():
    return max((node for node in tree_of('train.py').body if isinstance(node, ast.For)), key=length)


def decisions(tree):
    """Every if, conditional expression, condition of a comprehension, and / or."""
    n = 0
    for node in ast.walk(tree):
        n += isinstance(node, ast.If | ast.IfExp) + len(getattr(node, 'ifs', ()))
        n += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
    return n


def knobs(script):
    """The names that a script assigns before it calls configure()."""
    names = []
    for node in tree_of(script).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if 'configure' in ast.unparse(node.value or node):
                return names
            names.append(ast.unparse(target))
    return names


def measure():
    """{what: number} for all of LIMITS; tokens are left out where Python cuts them otherwise."""
    found = {}
    if sys.version_info[:2] == (3, 11):
        top = [name for name in product() if '/' not in name]
        parts = {'top level': top, 'support/': set(product()) - set(top), 'product': product(),
                 'tests/': python_files('tests'), 'dev/': python_files('dev')}
        found = {f'code tokens, {part}': sum(map(code_tokens, names)) for part, names in parts.items()}
    support = python_files('support')
    found |= {
        'files in support/': len(support),
        'files in support/ below 70 lines that fewer than three others import': len(crumbs()),
        'files in support/ above 450 lines': sum(lines(name) > 450 for name in support),
        'imports of ours inside functions': sum(inside for *_, inside in imports()),
        'files of ours in circles of imports': len(in_circles()),
        'files that configurator.py reaches': len(reach('configurator.py')),
        'files that train.py reaches': len(reach('train.py')),
        'files that should stand alone and do not': len(not_alone()),
        'places that make an error message': len(error_places()),
        'places where one is assigned or returned': len(other_errors()),
        'lines over 110 characters': len(wide_lines()),
        'functions over 60 lines': len(long_functions()),
        'knobs of train.py': len(knobs('train.py')),
        "lines of train.py's loop": length(loop()),
        "decisions in train.py's loop": decisions(loop()),
        'words in README.md': len(text_of('README.md').split()),
    }
    return found | {f'lines of {name}': lines(name) for name in
                    ('train.py', 'model.py', 'optim.py', 'configurator.py', 'sample.py')}


def main():
    found = measure()
    print(f"{'':70} {'now':>8} {'ceiling':>8} {'aim':>8}")
    for what, (ceiling, aim) in LIMITS.items():
        now = f'{found[what]:,}' if what in found else '-'
        passed = '  OVER' if found.get(what, 0) > ceiling else ''
        print(f'{what:70} {now:>8} {ceiling:8,} {aim:8,}{passed}')
    if '--list' in sys.argv:
        inside = [f'{importer}:{line} {target}' for importer, line, target, inside in imports() if inside]
        lists = {'inside functions': inside, 'train.py reaches': sorted(reach('train.py'))}
        for count in (in_circles, crumbs, not_alone, error_places, other_errors, wide_lines, long_functions):
            lists[count.__name__] = count()
        for what, names in lists.items():
            print(f'\n{what}: ' + ', '.join(names))
    sys.exit(any(found.get(what, 0) > ceiling for what, (ceiling, _) in LIMITS.items()))


if __name__ == '__main__':
    main()
