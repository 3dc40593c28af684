"""
What a reader pays: lines, bytes and decisions, beside the limits that we have set ourselves.

    $ python dev/size.py

Counted as loaded: every file of this project that a run of 20 iterations with an evaluation and a save has
imported before it writes its report, on a plain CPU; what the report loads then is told beside it.
"""

import ast
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
EVENING = ('train.py', 'model.py', 'optim.py', 'dataset.py', 'configurator.py')
WIDTH = 110
# runs train.py, and prints the project's files that are loaded when the report begins, and at the end
SPY = """
import json, runpy, sys
sys.path.insert(0, {repo!r})
sys.argv = {argv!r}
def loaded():
    files = [getattr(module, '__file__', None) or '' for module in list(sys.modules.values())]
    return sorted(path for path in files if path.startswith({repo!r}))
from support import log
before, write_report = [], log.Logger.write_report
def spy(self):
    before.extend(loaded())
    write_report(self)
log.Logger.write_report = spy
try:
    runpy.run_path(sys.argv[0], run_name='__main__')
except SystemExit as e:
    assert not e.code, e.code
print('LOADED ' + json.dumps([before, loaded()]))
"""


def main():
    before, after = loaded_files()
    train = REPO / 'train.py'
    rows = [('train.py', *size([train]), 310, 15.5),
            ('the evening: ' + ', '.join(EVENING), *size(EVENING), 1300, 60),
            ('loaded by python train.py', *size(before), 2500, 130),
            ('  and by its report', *size(set(after) - set(before)), None, None)]
    print(f"{'':66} {'lines':>6} {'limit':>6} {'KB':>7} {'limit':>6}")
    for name, lines, size_, most_lines, most_kb in rows:
        print(f"{name:66} {lines:6,} {most_lines or '':>6} {size_ / 1000:7.1f} {most_kb or '':>6}")
    loop = next(node for node in ast.parse(train.read_text()).body if isinstance(node, ast.For))
    lines = loop.end_lineno - loop.lineno + 1
    print(f"\nthe loop of train.py: {lines} lines (limit 60), {decisions(loop)} decisions (limit 15)")
    print(f"knobs of train.py: {len(knobs())} (limit 75)")
    print(f"words in README.md: {len((REPO / 'README.md').read_text().split()):,} (limit 1,700)")
    files = [path for path in tracked() if path.suffix == '.py' and 'tests' not in path.parts]
    wide = [(path, n) for path in files for n, line in enumerate(path.read_text().split('\n'), 1)
            if len(line) > WIDTH]
    print(f"lines over {WIDTH} characters: {len(wide)} "
          f"{[f'{path.relative_to(REPO)}:{n}' for path, n in wide[:9]]}")
    large = [(length(node), path, node) for path in files for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    for kind, most in ((ast.FunctionDef, 60), (ast.ClassDef, 130)):
        found = [f"{path.relative_to(REPO)}: {node.name} {n}" for n, path, node in large
                 if isinstance(node, kind) and n > most]
        kinds = 'functions' if kind is ast.FunctionDef else 'classes'
        print(f"{kinds} of more than {most} lines: {len(found)} {found[:9]}")


def size(paths):
    """(lines, bytes) of files, named from the project's root."""
    content = [(REPO / path).read_bytes() for path in paths]
    return sum(text.count(b'\n') for text in content), sum(map(len, content))


def length(node):
    return node.end_lineno - node.lineno + 1


def decisions(tree):
    """Every if, conditional expression, condition of a comprehension, and / or."""
    n = 0
    for node in ast.walk(tree):
        n += isinstance(node, (ast.If, ast.IfExp)) + len(getattr(node, 'ifs', ()))
        n += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
    return n


def knobs():
    sys.path.insert(0, str(REPO))
    from support.config_file import knobs_of
    return knobs_of(REPO / 'train.py')[0]


def tracked():
    done = subprocess.run(['git', '-C', REPO, 'ls-files'], capture_output=True, text=True, check=True)
    return [REPO / name for name in done.stdout.splitlines() if (REPO / name).exists()]


def loaded_files():
    """(files loaded before the report, files loaded at the end) by a run on a plain CPU."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / 'tiny'
        data.mkdir()
        meta = {'tokenizer': {'kind': 'byte'}, 'vocab_size': 257, 'end_of_text': 256, 'dtype': 'uint16',
                'splits': {}}
        (data / 'meta.json').write_text(json.dumps(meta))
        for split in ('train', 'val'):
            (data / f'{split}.bin').write_bytes(b'a\0b\0' * 2000)
        flags = dict(dataset='tiny', data_dir=folder, out_dir=f'{folder}/out', device='cpu', dtype='float32',
                     n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=2, warmup_iters=2,
                     gradient_accumulation_steps=1, max_iters=20, eval_interval=10, eval_iters=2)
        argv = [str(REPO / 'train.py'), *(f'--{name}={value}' for name, value in flags.items())]
        code = SPY.format(repo=str(REPO), argv=argv)
        done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=folder,
                              env={**os.environ, 'OMP_NUM_THREADS': '1'})
    lines = [line for line in done.stdout.splitlines() if line.startswith('LOADED ')]
    if not lines:
        sys.exit(f"the run failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    before, after = json.loads(lines[0][7:])
    train = str(REPO / 'train.py')  # run by runpy, so it is in no module
    return sorted({*before, train}), sorted({*after, train})


if __name__ == '__main__':
    main()
