"""How a config file is run, and a script's block of knobs without the rest of it."""

import os
import types

from configurator import check, plain, types_of
from support.did_you_mean import no_config, suggest


def find_config(path, script_dir):
    """config/x.py works from any folder: the working directory comes first, then the script's own. None: not
    there."""
    for found in (path, os.path.join(script_dir, path)):
        if os.path.isfile(found):
            return found


def read_config(path, knobs, kinds, script_dir):
    """Run the config file `path` in a copy of the knobs. Returns ({knob: value}, problems)."""
    found = find_config(path, script_dir)
    if found is None:
        return {}, [no_config(path, script_dir)]
    scope, assigned = {**knobs, '__file__': found, '__name__': 'config'}, set()

    # an assignment that repeats the default counts, too: a resume must know what was asked for
    class Recorder(dict):
        def __setitem__(self, name, value):
            scope[name] = value
            assigned.add(name)

    try:
        with open(found, encoding='utf-8') as f:
            exec(compile(f.read(), found, 'exec'), scope, Recorder())
    except UnicodeDecodeError as e:
        return {}, [f"{path} is not UTF-8 (byte {e.start}). save it as UTF-8"]
    except SyntaxError as e:
        return {}, [f"{path}:{e.lineno} is not Python ({e.msg}). correct that line"]
    except (Exception, SystemExit) as e:
        tb = e.__traceback__
        while tb.tb_next is not None and tb.tb_frame.f_code.co_filename != found:
            tb = tb.tb_next
        return {}, [f"{path}:{tb.tb_lineno} stopped with {type(e).__name__} ({e}). correct that line"]
    changes, problems = {}, []
    for name in sorted(assigned):
        value = scope[name]
        if name.startswith('_') or isinstance(value, types.ModuleType):
            continue
        if name not in knobs:
            problems.append(f"unknown knob in {path} ({name}). {suggest(name, knobs)}; names that begin with "
                            "_ are yours")
            continue
        value, wanted = check(value, kinds[name])
        if wanted:
            problems.append(f"{name} in {path} takes {wanted} ({scope[name]!r})")
        else:
            changes[name] = value
    return changes, problems


def knobs_of(path):
    """(knobs, kinds) at the top of a script, without running more of it than that."""
    with open(path, encoding='utf-8') as f:
        block = f.read().partition('\nknobs, given = configure(')[0]
    module = types.ModuleType('block')
    exec(compile(block, path, 'exec'), module.__dict__)
    knobs = plain(module.__dict__)
    return knobs, types_of(module.__dict__, knobs)
