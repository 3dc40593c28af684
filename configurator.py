"""
The knobs at the top of a script, set by config files and --key=value. This file needs no other.

    $ python train.py config/train_gpt2.py --batch_size=32 --compile  # or --batch_size 32; all: --help

Flags win wherever they stand on the line. Config files see them: in place of the first value that a file
gives to such a name stands the flag's, so what it computes from it agrees. Of two files the later one wins.
A file is executed: run only what you would run as a program.

A script calls `knobs, given = configure(globals())` right below its block of knobs: plain assignments, whose
values or annotations (`min_lr: float = None`, `lr_schedule: Literal['cosine', 'linear'] = 'cosine'`) tell the
types. Instead of that call, exec(open('configurator.py').read()) works as in nanoGPT.
"""

# of a script that executes this file, before those below take their place
names_of_caller = None if __name__ == 'configurator' else dict(globals())

import ast
import contextlib
import json
import os
import signal
import sys
import threading
import time
import types
import typing
import unicodedata


def fail(*problems, everywhere=False):
    """Print a line `error: what (value). what to do` per problem and exit with status 2. One process per
    machine prints what all of them find; `everywhere`: what only this one may have met."""
    if everywhere or os.environ.get('LOCAL_RANK', '0') == '0':
        lines = ['error: ' + ' '.join(problem.splitlines()) for problem in problems]
        say('\n'.join(lines))
        if path := os.environ.get('TORCHELASTIC_ERROR_FILE'):  # torchrun's report ends with what is in it
            with contextlib.suppress(OSError), open(path, 'x') as f:
                json.dump({'message': '; '.join(lines), 'timestamp': int(time.time())}, f)
        if not everywhere and os.environ.get('TORCHELASTIC_MAX_RESTARTS', '0') != '0':
            os.kill(os.getppid(), signal.SIGTERM)  # torchrun would try again, to the same end
    else:
        time.sleep(3)  # torchrun ends all as soon as one has ended: let the one that prints be the first
    sys.exit(2)


def warn(what):
    say(f'warning: {what}')


def note(text):
    if os.environ.get('LOCAL_RANK', '0') == '0':
        say(text, 'stdout')


def say(text, stream='stderr'):
    """Print on standard error or 'stdout'. That it is gone (a closed pipe, a full disk) stops nothing."""
    try:
        print(escape_control_characters(text), file=getattr(sys, stream), flush=True)
    except OSError as e:  # at its end Python would try again, and change the exit status
        setattr(sys, stream, open(os.devnull, 'w'))
        if stream == 'stdout':
            warn(f"standard output is gone ({e.strerror}), the work continues without it")


def escape_control_characters(text):
    """`text` as a terminal may print it, which obeys control characters: they become \\x1b and the like."""
    harmless = '\n\t\u200c\u200d'  # the last two are joiners that some scripts need
    return ''.join(c if c in harmless or unicodedata.category(c)[0] != 'C' else repr(c)[1:-1] for c in text)


def out_of_range(knobs, above_zero, from_zero='', below_one=''):
    """The problems with numbers outside their range, None being fine; the arguments are strings of names."""
    problems = []
    for names, in_range, remedy in ((above_zero, lambda v: v > 0, 'use a number above 0'),
                                    (from_zero, lambda v: v >= 0, 'use 0 or more'),
                                    (below_one, lambda v: 0 <= v < 1, 'use 0 or more, but less than 1')):
        for name in names.split():
            if knobs[name] is not None and not in_range(knobs[name]):
                problems.append(f"{name} is out of range ({knobs[name]}). {remedy}")
    return problems


if sys.version_info < (3, 11):
    fail(f"this Python is too old ({sys.version.split()[0]}). use 3.11 or newer")


class Knobs(dict):
    kinds = None  # {name: the types and words it may have}


def configure(script, positional=None, like=None):
    """Apply sys.argv to the knobs in `script`, a script's globals(). positional: the knob that a bare word
    sets; if it is a list, all of them. like: the path of another script, whose knobs are taken as well.
    Returns (all knobs, the ones that were given), two dicts; all mistakes are told at once."""
    prepare_process()
    knobs = plain(script)
    if positional:
        knobs[positional] = script[positional]
    argv, kinds = sys.argv[1:], types_of(script, knobs)
    if {'--help', '-h'} & set(argv) and (help := helper()):
        argv, words = help.split_words(argv)
        given, problems = parse_args(argv, knobs, kinds, positional)
        text = help.text(script, knobs, kinds, given, words, positional, like)
        if problems or not text:
            fail(*problems or [f"no knob is about that ({' '.join(words)}). --help without it shows all"])
        say(text, 'stdout')
        sys.exit()
    if like:
        theirs = helper().names_at_top(like)
        knobs, kinds = {**plain(theirs), **knobs}, {**types_of(theirs, plain(theirs)), **kinds}
    given, problems = parse_args(argv, knobs, kinds, positional)
    if problems:
        fail(*problems)
    knobs = Knobs({**knobs, **given})
    knobs.kinds = kinds
    script.update(knobs)
    return knobs, given


def prepare_process():
    # closed streams (`>&-`) lead nowhere; else what a library prints may end up in the next file that opens
    for fd, (name, mode) in enumerate((('stdin', 'r'), ('stdout', 'w'), ('stderr', 'w'))):
        if getattr(sys, name) is None:
            try:
                os.fstat(fd)
            except OSError:
                os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is fd
            setattr(sys, name, open(os.devnull, mode))
    if hasattr(sys.stdout, 'reconfigure'):  # a path may have what the console's encoding lacks
        sys.stdout.reconfigure(errors='backslashreplace')
    if threading.current_thread() is threading.main_thread():  # Ctrl-C: no traceback. Some ask for more
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.excepthook = explain_missing_package


def helper():
    """support/help.py, which explains --help and mistakes; None where this file was taken without it."""
    with contextlib.suppress(ImportError):
        from support import help
        return help


def explain_missing_package(kind, error, traceback):
    if kind is ModuleNotFoundError and error.name in ('torch', 'numpy', 'wandb'):
        fail(f"a package is missing in {sys.executable} ({error}). source .venv/bin/activate, where you made "
             "one, or pip install -r requirements.txt")
    sys.__excepthook__(kind, error, traceback)


def plain(script):
    """The knobs among a script's names."""
    return {name: value for name, value in script.items()
            if not name.startswith('_') and isinstance(value, (int, float, str, types.NoneType))}


def types_of(script, knobs):
    """{knob: the types and words it may have}, from its annotation if it has one, else from its default."""
    module = sys.modules.get(script.get('__name__'))
    annotations = script.get('__annotations__') or getattr(module, '__annotations__', {})
    kinds = {}
    for name, value in knobs.items():
        annotation = annotations.get(name, type(value))
        kinds[name] = list(typing.get_args(annotation) or (annotation,))
        if value is None:
            kinds[name].append(type(None))
    return kinds


def parse_args(argv, knobs, kinds, positional):
    """({knob: value}, problems) of command-line arguments, the value that counts most last."""
    given, (flags, files, problems) = {}, parse_line(argv, knobs, kinds, positional)
    for path in () if problems else files:  # a file may take its time: not behind a mistyped flag
        assigned, mistakes = run_config(path, {**knobs, **given, **flags, '_flags': flags}, knobs)
        problems += mistakes
        for name in [name for name in assigned if name in knobs]:
            value, wanted = check(assigned[name], kinds[name])
            if wanted:
                problems.append(f"{name} in {path} takes {wanted} ({assigned[name]!r})")
            given.pop(name, None)
            given[name] = value
    return {**{name: given[name] for name in given if name not in flags}, **flags}, problems


def parse_line(argv, knobs, kinds, positional=None):
    """({knob: value} of flags and bare words, config files, problems)."""
    given, files, problems, argv = {}, [], [], list(argv)
    while argv:
        arg = argv.pop(0)
        is_flag, name = arg.startswith('-'), arg.lstrip('-').partition('=')[0]
        if is_flag and '=' not in arg and argv and is_value(argv[0], kinds.get(name), positional):
            arg += '=' + argv.pop(0)  # --batch_size 32
        if any('\ud800' <= c <= '\udfff' for c in arg):  # as Python marks bytes that are not UTF-8
            problems.append(f"not UTF-8 ({arg}). rename the file or folder, or type it in another way")
        elif is_flag:
            value, problem = parse_flag(arg, name, knobs, kinds)
            if problem:
                problems.append(problem)
                continue
            if list in kinds[name]:  # it collects
                value = [*given.get(name, []), value]
            given.pop(name, None)
            given[name] = value
        elif arg.endswith('.py'):
            files.append(arg)
        elif positional and isinstance(knobs[positional], list):
            given[positional] = given.get(positional, []) + [arg]
        elif positional and positional not in given:
            given[positional] = arg
        else:
            problems.append(f"neither a config file nor --key=value ({arg}). write it as --KEY={arg}, see "
                            "--help")
    return given, files, problems


def is_value(arg, kinds, positional):
    """Whether `arg`, which follows --key, is the value of a knob of these kinds. A switch takes True or
    False; another word only where it could be nothing else."""
    if arg.startswith('-') and not arg[1:2].isdigit() and arg != '-':
        return False
    is_certain = kinds and bool not in kinds  # not if the knob is unknown
    return is_certain or arg.lower() in ('true', 'false') or not (positional or arg.endswith('.py'))


def parse_flag(arg, name, knobs, kinds):
    """(value, problem) of --key=value, or of --key for True."""
    if name not in knobs:
        help = helper()
        return None, f"unknown knob ({arg}). {help.suggest(name, knobs) if help else 'the script lists all'}"
    equals, text = arg.lstrip('-').partition('=')[1:]
    prefix, colon, path = text.rpartition(':')
    if path.startswith('~/') and (prefix == 'FILE' or name not in ('start', 'stop')):  # those two are texts
        text = prefix + colon + os.path.expanduser(path)  # a shell does it only at a word's beginning
    value, wanted = parse(text, kinds[name]) if equals else check(True, kinds[name])
    return value, wanted and f"{name} takes {wanted} ({arg})"


def parse(text, kinds):
    """(the value that `text` stands for among `kinds`, None), or (None, what would have been right)."""
    word = text.strip().lower()
    if type(None) in kinds and word == 'none':
        return None, None
    words = ('true', 'false') if int in kinds else ('true', 'false', '1', '0')
    if bool in kinds and word in words:
        return word in ('true', '1'), None
    for number in (int, float):
        with contextlib.suppress(ValueError):
            if int in kinds or float in kinds:
                return check(number(text), kinds)
    return check(text, kinds)


def check(value, kinds):
    """(`value` as one of `kinds`, None), or (None, what would have been right). An int is a fine float, 1e5
    is a fine int, True is not a number."""
    if type(value) is float and not abs(value) < 1e100:  # nor is nan
        return None, 'a finite number below 1e100'
    if type(value) is int and not abs(value) < 2**63:
        return None, 'a whole number below 2**63'
    if type(value) in kinds or (type(value) is str and value in kinds):
        return value, None
    if type(value) is int and float in kinds:
        return float(value), None
    if type(value) is float and int in kinds and value.is_integer():
        return check(int(value), kinds)
    words = {bool: 'True or False', int: 'a whole number', float: 'a number', str: 'text',
             types.NoneType: 'None'}
    return None, ' or '.join(words.get(kind, kind) for kind in kinds)


def run_config(path, names, knobs):
    """Run the config file `path` in a copy of `names`. Returns ({name: value} of what it sets, problems)."""
    help, here, assigned = helper(), os.path.dirname(os.path.abspath(__file__)), {}
    # config/x.py works from any folder: the working directory comes first, then the one of this file
    found = next((file for file in (path, os.path.join(here, path)) if os.path.isfile(file)), None)
    if found is None:
        return {}, [f"config file not found ({path}). looked in {os.getcwd()} and beside configurator.py"]

    class Scope(dict):
        def __setitem__(self, name, value):
            # instead of its first value the flag's, so that what follows from it agrees
            super().__setitem__(name, value if name in assigned else names.get('_flags', {}).get(name, value))
            assigned[name] = value  # also what repeats the default: a resume must know it

    scope = Scope({**names, '__file__': found, '__name__': 'config'})
    try:
        with open(found, 'rb') as f:
            tree = ast.parse(f.read(), found)
        exec(compile(tree, found, 'exec'), scope)
    except (Exception, SystemExit) as e:
        if isinstance(e, SystemExit) and e.code == 2:  # fail() has said why
            raise
        tb = e.__traceback__.tb_next or e.__traceback__  # the frame of the file; it may not have begun
        line = e.lineno if isinstance(e, SyntaxError) else tb.tb_lineno
        return {}, [f"{path}:{line} stopped with {type(e).__name__} ({e}). correct that line"]
    # what a function set by `global`, or globals() did
    assigned.update({name: scope[name] for name in names if name[:2] != '__' and name in scope
                     and scope[name] is not names[name]})
    mistyped, unused = help.names_of_no_knob(path, plain(assigned), tree, knobs) if help else ([], [])
    if unused:
        note(f"note: {path} sets what is no knob and what it does not use itself: {', '.join(unused)}")
    return assigned, mistyped


def override(script, before):
    """Apply sys.argv to `script`, the globals of a script or notebook, which were `before` when the exec
    began. As in nanoGPT each of its values is a knob, and what config files set is set, helpers too."""
    for name in script.keys() - before.keys():
        del script[name]
    script.update(before, sys=sys)  # `time` may have been a function, and `check` a knob
    knobs, anything = plain(script), [bool, int, float, str, types.NoneType]
    kinds = {name: anything if knobs[name] is None else [type(knobs[name])] for name in knobs}
    argv = [] if sys.argv[0].endswith('kernel_launcher.py') else sys.argv[1:]  # a notebook's are nobody's
    flags, files, problems = parse_line(argv, knobs, kinds)
    for path in files:
        assigned, mistakes = run_config(path, {**script, **flags, '_flags': flags}, knobs)
        problems += mistakes
        note(f"Overriding config with {path}: {', '.join(assigned)}")
        script.update(assigned)
    for name, value in flags.items():
        note(f"Overriding: {name} = {value}")
        script[name] = value
    if problems:
        fail(*problems)


if names_of_caller is not None:
    sys.path.append(os.getcwd())
    from configurator import override
    override(globals(), names_of_caller)
