"""nanoGPT's exec(open('configurator.py').read()): config files and --key=value change the caller's
globals."""

import ast
import os
import sys
import types

from configurator import fail, parse_flag, plain, say, types_of
from support.config_file import find_config, mistyped, run_config
from support.did_you_mean import suggest
from support.separate_value import is_value

LITERALS = (list, tuple, dict)  # nanoGPT takes these from the command line, too


def override(script, before):
    """Apply sys.argv to `script`, the globals of a script or notebook, which were `before` when the exec
    began. As in nanoGPT each of its values is a knob, and config files run among its names; mistakes are
    reported as configure() does."""
    for name in script.keys() - before.keys():
        del script[name]
    script.update(before, sys=sys)  # `time` may have been a function, and `check` a knob
    names, problems, argv = dict(script), [], arguments()
    if '--help' in argv or '-h' in argv:
        print('\n'.join(f'--{name}={value!r}' for name, value in knobs_of(names).items()))
        sys.exit(0)
    while argv:
        arg = argv.pop(0)
        if arg.startswith('-'):
            kinds = kinds_of(names).get(arg.lstrip('-'), ())
            if '=' not in arg and argv and is_value(argv[0], kinds, None):
                arg += '=' + argv.pop(0)
            problems += set_one(names, arg)
        else:
            problems += run_config_among(names, arg)
    if problems:
        fail(*problems)
    script.update(names)


def arguments():
    """Those of the command line; a notebook's own (-f kernel.json) are nobody's."""
    return [] if sys.argv[0].endswith('kernel_launcher.py') else sys.argv[1:]


def set_one(names, arg):
    """Apply --key=value to `names`. Returns the problems."""
    knobs = knobs_of(names)
    name, _, text = arg.lstrip('-').partition('=')
    if isinstance(knobs.get(name), LITERALS) and arg.startswith('--'):
        try:
            value, problem = ast.literal_eval(text), None
        except (SyntaxError, ValueError):
            value = None
        if type(value) is not type(knobs[name]):
            problem = f"{name} takes a {type(knobs[name]).__name__} ({arg})"
    else:
        name, value, problem = parse_flag(arg, knobs, kinds_of(names))
    if problem:
        return [problem]
    tell(f"Overriding: {name} = {value}")
    names[name] = value
    return []


def run_config_among(names, path):
    """Run a config file; what it sets, its helpers too, is set in `names`. Returns the problems."""
    knobs = knobs_of(names)
    scope, assigned, used, problem = run_config(path, names)
    if problem:
        return [problem]
    tell(f"Overriding config with {path}:")
    with open(find_config(path), encoding='utf-8') as f:
        tell(f.read())
    names.update({name: scope[name] for name in assigned})
    return [f"unknown knob in {path} ({name}). {suggest(name, knobs)}" for name in sorted(assigned)
            if name not in knobs and plain({name: scope[name]}) and mistyped(name, assigned, used, knobs)]


def knobs_of(names):
    literals = {name: value for name, value in names.items() if isinstance(value, LITERALS)}
    return {name: value for name, value in {**plain(names), **literals}.items() if not name.startswith('_')}


def kinds_of(names):
    """As types_of(), but None without an annotation may become anything."""
    kinds = types_of(names, knobs_of(names))
    anything = [bool, int, float, str, types.NoneType]
    return {name: anything if set(found) == {types.NoneType} else found for name, found in kinds.items()}


def tell(text):
    if os.environ.get('LOCAL_RANK', '0') == '0':
        say(text, 'stdout')
