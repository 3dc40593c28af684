"""How a config file is run, and a script's block of knobs without the rest of it."""

import ast
import importlib
import os
import types

from configurator import check, plain, say, types_of
from support.did_you_mean import is_known_elsewhere, no_config, similar, suggest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# nanoGPT runs a config among the names of its train.py, so some use these without importing them
NANOGPT_IMPORTS = dict(os='os', time='time', math='math', pickle='pickle', np='numpy', torch='torch')


def find_config(path):
    """config/x.py works from any folder: the working directory comes first, then the scripts' own. None: not
    there."""
    for found in (path, os.path.join(ROOT, path)):
        if os.path.isfile(found):
            return found


def read_config(path, knobs, kinds):
    """Run the config file `path` in a copy of the knobs. Returns ({knob: value}, problems)."""
    scope, assigned, used, problem = run_config(path, knobs)
    if problem:
        return {}, [problem]
    changes, problems, idle = {}, [], []
    for name in sorted(assigned):
        value = scope[name]
        if name in knobs:
            value, wanted = check(value, kinds[name])
            if wanted:
                problems.append(f"{name} in {path} takes {wanted} ({scope[name]!r})")
            else:
                changes[name] = value
        elif not name.startswith('_') and plain({name: value}):
            if mistyped(name, assigned, used, knobs):
                problems.append(f"unknown knob in {path} ({name}). {suggest(name, knobs)}; names that begin "
                                "with _ are yours")
            elif name not in used:
                idle.append(name)
    if idle and os.environ.get('LOCAL_RANK', '0') == '0':
        say(f"note: {path} sets what is no knob and what it does not use itself: {', '.join(idle)}", 'stdout')
    return changes, problems


def run_config(path, before):
    """Run the config file `path` in a copy of the names `before`. Returns (all names, those that it set,
    those that it read, None), or a problem in the last place."""
    found = find_config(path)
    if found is None:
        return {}, set(), set(), no_config(path, ROOT)
    scope, assigned = {**before, '__file__': found, '__name__': 'config'}, set()

    # an assignment that repeats the default counts, too: a resume must know what was asked for
    class Recorder(dict):
        def __setitem__(self, name, value):
            scope[name] = value
            assigned.add(name)

    problem, used = None, set()
    try:
        with open(found, encoding='utf-8') as f:
            tree = ast.parse(f.read(), found)
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        used = {node.id for node in names if isinstance(node.ctx, ast.Load)}
        scope.update({name: importlib.import_module(module) for name, module in NANOGPT_IMPORTS.items()
                      if name in used and name not in scope})
        exec(compile(tree, found, 'exec'), scope, Recorder())
    except UnicodeDecodeError as e:
        problem = f"{path} is not UTF-8 (byte {e.start}). save it as UTF-8"
    except SyntaxError as e:
        problem = f"{path}:{e.lineno} is not Python ({e.msg}). correct that line"
    except (Exception, SystemExit) as e:
        if isinstance(e, SystemExit) and e.code == 2:  # fail() has said why
            raise
        tb = e.__traceback__
        while tb.tb_next is not None and tb.tb_frame.f_code.co_filename != found:
            tb = tb.tb_next
        problem = f"{path}:{tb.tb_lineno} stopped with {type(e).__name__} ({e}). correct that line"
    # what a function set by `global`, or globals() did
    assigned.update(name for name in before if scope.get(name) is not before[name])
    return scope, assigned, used, problem


def mistyped(name, assigned, used, knobs):
    """Whether the name of no knob must be a mistake. A config may have names of its own, as in n_layers = 6;
    n_layer = n_layers, and some are merely left over; one that looks like a knob which is not set, or that is
    what others call one and is not used, was meant to do something."""
    close = similar(name, knobs, cutoff=0.8)
    if close and not (close in assigned and name in used):
        return True
    return name not in used and is_known_elsewhere(name, knobs)


def knobs_of(path):
    """(knobs, kinds) at the top of a script, without running more of it than that."""
    with open(path, encoding='utf-8') as f:
        block = f.read().partition('\nknobs, given = configure(')[0]
    module = types.ModuleType('block')
    exec(compile(block, path, 'exec'), module.__dict__)
    knobs = plain(module.__dict__)
    return knobs, types_of(module.__dict__, knobs)
