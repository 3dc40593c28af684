"""
Overrides for the knobs at the top of a script: config files and --key=value, in the order given, later ones
win.

    $ python train.py config/train_gpt2.py --batch_size=32 --compile      # or --batch_size 32
    $ python train.py --help

A script calls `knobs, given = configure(globals())` right below its block of knobs: plain assignments, whose
values or annotations (`min_lr: float = None`, `lr_schedule: Literal['cosine', 'linear'] = 'cosine'`) tell the
types. A config file is Python and is executed, like the script itself: run only the ones you would run as a
program. Instead of that call, exec(open('configurator.py').read()) works as in nanoGPT.
"""

_names_before = dict(globals())  # only for that exec: see the end

import os
import signal
import sys
import threading
import time
import types
import typing


def fail(*problems, everywhere=False):
    """Print a line `error: what (value). what to do` per problem and exit with status 2. All processes find
    the same mistakes, so one per machine prints them, unless `everywhere`: what only this process may have
    met."""
    if everywhere or os.environ.get('LOCAL_RANK', '0') == '0':
        for problem in problems:
            say('error: ' + ' '.join(problem.splitlines()))
        if 'TORCHELASTIC_ERROR_FILE' in os.environ:
            from support.torchrun_error import tell_torchrun
            tell_torchrun(problems)
    else:
        time.sleep(3)  # torchrun ends all as soon as one has ended: let the one that prints be the first
    sys.exit(2)


def warn(what):
    say(f'warning: {what}')


def say(text, stream='stderr'):
    """Print on standard error or 'stdout'. That it is gone (a closed pipe, a full disk) is no reason to
    stop."""
    if not text.replace('\n', '').isprintable():  # a name from a file may hold commands to a terminal
        from support.streaming import escape_control_characters
        text = escape_control_characters(text)
    try:
        print(text, file=getattr(sys, stream), flush=True)
    except OSError as e:  # at its end Python would try again, and change the exit status
        setattr(sys, stream, open(os.devnull, 'w'))
        if stream == 'stdout':
            warn(f"standard output is gone ({e.strerror}), the work continues without it")


if sys.version_info < (3, 11):  # what comes next would be a traceback
    fail(f"this Python is too old ({sys.version.split()[0]}). use 3.11 or newer")


class Knobs(dict):
    """{name: value}, and in `kinds` {name: the types and words it may have}."""


def configure(script, positional=None, like=None):
    """Apply sys.argv to the knobs in `script`, a script's globals(). positional: the knob that a bare word
    sets; if it is a list, all of them. like: the path of another script, whose knobs are taken as well.
    Returns (all knobs, the ones that were given), two dicts; every mistake found is reported at once, with
    status 2."""
    if None in (sys.stdin, sys.stdout, sys.stderr):  # started with >&- or the like
        from support.closed_streams import open_closed_streams
        open_closed_streams()
    if threading.current_thread() is threading.main_thread():  # Ctrl-C: no traceback. Some ask for more
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(sys.stdout, 'reconfigure'):  # a path may have what the console's encoding lacks
        sys.stdout.reconfigure(errors='backslashreplace')
    knobs = plain(script)
    if positional:
        knobs[positional] = script[positional]
    if any(arg in ('--help', '-h') for arg in sys.argv[1:]):
        from support.help import print_help
        print_help(script, knobs, positional, like)
        sys.exit(0)
    kinds = types_of(script, knobs)
    if like:
        from support.config_file import knobs_of
        others, their_kinds = knobs_of(like)
        knobs, kinds = {**others, **knobs}, {**their_kinds, **kinds}
        script.update(knobs)
    from support.errors import explain_missing_package
    explain_missing_package(os.path.dirname(os.path.abspath(__file__)))
    given, problems = parse_args(sys.argv[1:], knobs, kinds, positional)
    if problems:
        fail(*problems)
    if '~/' in str(given):
        from support.expand_home import expand_home
        given = {name: expand_home(name, value) for name, value in given.items()}
    script.update(given)
    knobs = Knobs({**knobs, **given})
    knobs.kinds = kinds
    return knobs, given


def parse_args(argv, knobs, kinds, positional):
    """({knob: value}, problems) of command-line arguments."""
    given, flags, problems, argv = {}, set(), [], list(argv)
    while argv:
        arg = argv.pop(0)
        is_flag, name = arg.startswith('-'), arg.lstrip('-')
        if is_flag and '=' not in arg and argv:  # --batch_size 32
            from support.separate_value import is_value
            if is_value(argv[0], kinds.get(name, ()), positional):
                arg += '=' + argv.pop(0)
        if any('\ud800' <= c <= '\udfff' for c in arg):  # as Python marks bytes that are not UTF-8
            problems.append(f"not UTF-8 ({arg}). rename the file or folder, or type it in another way")
        elif is_flag:
            name, value, problem = parse_flag(arg, knobs, kinds)
            if problem:
                problems.append(problem)
                continue
            if list in kinds[name]:  # it collects
                value = [*(given[name] if name in flags else []), value]
            elif name in flags and os.environ.get('LOCAL_RANK', '0') == '0':
                say(f"note: --{name} is given twice, the last one counts ({value!r})", 'stdout')
            flags.add(name)
            given.pop(name, None)  # `given` is in the order in which its values came
            given[name] = value
        elif arg.endswith('.py'):
            from support.config_file import read_config
            changes, mistakes = read_config(arg, {**knobs, **given}, kinds)
            given = {**{name: given[name] for name in given if name not in changes}, **changes}
            problems += mistakes
        elif positional and isinstance(knobs[positional], list):
            given[positional] = given.get(positional, []) + [arg]
        elif positional and positional not in given:
            given[positional] = arg
        else:
            problems.append(f"neither a config file nor --key=value ({arg}). see python "
                            f"{os.path.basename(sys.argv[0])} --help")
    return given, problems


def parse_flag(arg, knobs, kinds):
    """(knob, value, problem) of --key=value, or of --key for True."""
    name, equals, text = arg.lstrip('-').partition('=')
    if name not in knobs:
        from support.did_you_mean import suggest
        return name, None, f"unknown knob ({arg}). {suggest(name, knobs)}"
    if not arg.startswith('--'):
        return name, None, f"one dash ({arg}). write -{arg}"
    if equals:
        value, wanted = parse(text, kinds[name])
        return name, value, f"{name} takes {wanted} ({arg})" if wanted else None
    if bool not in kinds[name]:
        return name, None, f"no value ({arg}). write --{name}=..."
    return name, True, None


def out_of_range(knobs, above_zero='', from_zero='', below_one=''):
    """The problems with numbers outside their range, None being fine; the arguments are strings of names."""
    problems = []
    for names, in_range, remedy in ((above_zero, lambda v: v > 0, 'use a number above 0'),
                                    (from_zero, lambda v: v >= 0, 'use 0 or more'),
                                    (below_one, lambda v: 0 <= v < 1, 'use 0 or more, but less than 1')):
        for name in names.split():
            if knobs[name] is not None and not in_range(knobs[name]):
                problems.append(f"{name} is out of range ({knobs[name]}). {remedy}")
    return problems


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


def parse(text, kinds):
    """(the value that `text` stands for among `kinds`, None), or (None, what would have been right)."""
    word = text.strip().lower()
    if type(None) in kinds and word == 'none':
        return None, None
    words = ('true', 'false') if int in kinds else ('true', 'false', '1', '0')
    if bool in kinds and word in words:
        return word in ('true', '1'), None
    if int in kinds or float in kinds:
        for number in (int, float):
            try:
                return check(number(text), kinds)
            except ValueError:
                pass
    if str in kinds or text in kinds:
        return text, None
    return None, describe(kinds)


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
    return None, describe(kinds)


def describe(kinds):
    from support.did_you_mean import describe
    return describe(kinds)


if not globals().get('__file__', '').endswith('configurator.py'):  # exec(open('configurator.py').read())
    sys.path.append(os.getcwd())
    from support.exec_configurator import override
    override(globals(), _names_before)
