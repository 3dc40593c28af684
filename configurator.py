"""
The knobs at the top of a script, set by config files and by --key=value. This file needs no other.

    $ python train.py config/train_gpt2.py --batch_size=32 --compile=False     # all knobs: --help

A knob is a plain assignment above the call `config, given = configure(globals())`. Its default tells its
type; where that is None, or where a knob takes several types, an annotation does: `min_lr: float = None`.
Flags win over config files, wherever they stand; of two files the later one wins. A config file is Python
and is executed: run only what you would run as a program.

`exec(open('configurator.py').read())` in place of that call works as in nanoGPT.
"""

import builtins
import difflib
import math
import os
import re
import sys
import time
import traceback
import types
import typing

# what other trainers call these knobs, for "did you mean"
OTHER_NAMES = {
    'lr': 'learning_rate',
    'max_lr': 'learning_rate',
    'max_steps': 'max_iters',
    'num_iterations': 'max_iters',
    'train_iterations': 'max_iters',
    'training_tokens': 'max_tokens',
    'num_epochs': 'max_epochs',
    'warmup_steps': 'warmup_iters',
    'context_length': 'block_size',
    'max_seq_len': 'block_size',
    'sequence_length': 'block_size',
    'mini_batch_size': 'batch_size',
    'device_batch_size': 'batch_size',
    'tokens_per_update': 'total_batch_size',
    'grad_accum_steps': 'gradient_accumulation_steps',
    'n_layers': 'n_layer',
    'n_heads': 'n_head',
    'dim': 'n_embd',
    'd_model': 'n_embd',
    'dropout_p': 'dropout',
    'max_grad_norm': 'grad_clip',
    'eval_every': 'eval_interval',
    'save_every': 'save_interval',
    'token_ckpt': 'save_interval',
    'model_gen_multiplier': 'sample_growth',
    'resume_from_step': 'resume_step',
    'load_ckpt': 'init_from',
}


def error(text):
    """Print `error: what (value). what to do` and exit with status 2: for what a person can get wrong."""
    if os.environ.get('LOCAL_RANK', '0') != '0':
        # what all processes find is printed once: torchrun ends the others before they get here
        time.sleep(3)
    print(f'error: {text}', file=sys.stderr, flush=True)
    sys.exit(2)


def configure(script, positional=None):
    """Apply sys.argv to the knobs in `script`, a script's globals().

    positional: the knob that a bare word sets; where it is a list, all of them. Returns a dict of all
    knobs, and the set of the names that a config file or a flag has set.
    """
    if hasattr(sys.stdout, 'reconfigure'):  # a path or a text may have what the console's encoding lacks
        sys.stdout.reconfigure(errors='backslashreplace')
    if '--help' in sys.argv[1:] or '-h' in sys.argv[1:]:
        print_help(script)
        sys.exit()
    knobs = {}
    for name, value in script.items():
        if not name.startswith('_') and isinstance(value, (int, float, str, list, type(None))):
            knobs[name] = value
    kinds = kinds_of(script, knobs)
    flags, config_files = read_arguments(sys.argv[1:], knobs, kinds, positional)
    given = set(flags)
    for path in config_files:
        changed = run_config(path, knobs, kinds)
        knobs.update(changed)
        given.update(changed)
    knobs.update(flags)
    script.update(knobs)
    return knobs, given


def kinds_of(script, knobs):
    """{knob: the types that it takes}, from its annotation if it has one, else from its default."""
    # Python 3.14 makes a module's annotations when its attribute is read
    module = sys.modules.get(script.get('__name__'))
    annotations = script.get('__annotations__') or getattr(module, '__annotations__', {})
    kinds = {}
    for name, value in knobs.items():
        if name in annotations:  # `bool | str`, or `float`, whose default is None
            several = typing.get_args(annotations[name])
            kinds[name] = list(several) or [annotations[name], types.NoneType]
        elif value is None:  # as in nanoGPT's scripts: nothing is known of it
            kinds[name] = [bool, int, float, str, types.NoneType]
        else:
            kinds[name] = [type(value)]
    return kinds


def read_arguments(argv, knobs, kinds, positional):
    """({knob: value} of flags and bare words, [config files])."""
    flags = {}
    config_files = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word.startswith('--'):
            name, equals, text = word[2:].partition('=')
            if name not in knobs:
                answer = suggestion(name, knobs) or '--help lists all'
                error(f"no knob is called {name} ({word}). {answer}")
            following = words[0] if words else '--'
            if not equals and bool in kinds[name] and following.lower() not in ('true', 'false', 'auto'):
                text = 'True'  # --compile
            elif not equals and not following.startswith('--'):
                text = words.pop(0)  # --batch_size 32
        elif word.endswith('.py'):
            config_files.append(word)
            continue
        elif positional and (positional not in flags or list in kinds[positional]):
            name = positional
            text = word
        else:
            error(f"neither a config file nor --key=value ({word}). write --KEY={word}; --help lists all")
        if list in kinds[name]:  # it collects: --input=a --input=b
            flags[name] = [*flags.get(name, []), text]
        else:
            flags[name] = check_value(parse_value(text, kinds[name]), name, kinds, word)
    return flags, config_files


INVALID = object()


def parse_value(text, kinds):
    """What `text` stands for among the types `kinds`, or INVALID."""
    words = {'true': True, 'false': False, 'none': None}
    word = text.strip().lower()
    if word in words and type(words[word]) in kinds:
        return words[word]
    for kind in (int, float, str):  # 3, 1e5, anything
        try:
            value = fit_value(kind(text), kinds)
        except ValueError:
            continue
        if value is not INVALID:
            return value
    return INVALID


def fit_value(value, kinds):
    """`value` as one of the types `kinds`, or INVALID. An int is a fine float, 1e5 a fine int, 0 and 1 are
    fine switches."""
    if type(value) is float and not math.isfinite(value):
        return INVALID
    if type(value) is float and float not in kinds and value.is_integer():
        value = int(value)
    if type(value) is int and int not in kinds and float in kinds:
        value = float(value)
    if type(value) is int and int not in kinds and value in (0, 1):
        value = bool(value)
    return value if type(value) in kinds else INVALID


def check_value(value, name, kinds, where):
    if value is INVALID:
        names = {types.NoneType: 'None'}
        types_of_knob = ' or '.join(names.get(kind, kind.__name__) for kind in kinds[name])
        error(f"{name} takes {types_of_knob} ({where}). --help lists all knobs")
    return value


def suggestion(name, knobs):
    """What was meant by the name of no knob; '' if nobody knows."""
    meant = OTHER_NAMES.get(name.replace('-', '_'))
    if meant in knobs:
        return f'did you mean {meant}?'
    for close in difflib.get_close_matches(name, knobs, n=1):
        return f'did you mean {close}?'
    return ''


def run_config(path, knobs, kinds):
    """{knob: value} of what the config file `path` sets; it sees the knobs as they are."""
    # config/x.py is found from any folder: the working directory comes first, then the one of this file
    found = path
    if not os.path.isfile(found):
        found = os.path.join(os.path.dirname(os.path.abspath(__file__)), path)
    # It sees the knobs beside Python's builtins. So this dict gets what it sets, in whatever way, also where
    # that repeats a default: a resume has to know that it was given
    if not os.path.isfile(found):
        error(f"config file not found ({path}). name one such as config/train_gpt2.py")
    names = {'__file__': found, '__builtins__': {**vars(builtins), **knobs}}
    try:
        with open(found, encoding='utf-8-sig') as f:
            code = compile(f.read(), found, 'exec')
    except (OSError, SyntaxError, ValueError) as e:  # ValueError: not UTF-8, or a null byte
        error(f"{path} is not a config file ({e}). write Python assignments, in UTF-8: batch_size = 32")
    try:
        exec(code, names)
    except Exception as e:
        line = traceback.extract_tb(e.__traceback__)[-1].lineno
        error(f"{path} stopped with {type(e).__name__} ({e}, line {line}). correct that line")
    changed = {}
    for name, value in names.items():
        if name in knobs:
            value = fit_value(value, kinds[name])
            changed[name] = check_value(value, name, kinds, f'{name} = {names[name]!r} in {path}')
        elif not name.startswith('_') and isinstance(value, (int, float, str)):
            answer = suggestion(name, knobs)
            if answer:
                error(f"no knob is called {name} ({path}). {answer}")
            if os.environ.get('RANK', '0') == '0':
                print(f"note: {name} in {path} is not a knob")
    return changed


def print_help(script):
    """Print the docstring of the script and its block of knobs, as they stand in the file."""
    with open(script['__file__'], encoding='utf-8') as f:
        parts = re.split('# ------+\n', f.read())
    print(script['__doc__'])
    print(*parts[1:2])  # between the first two rules


if __name__ != 'configurator':  # executed inside another script, as in nanoGPT
    import configurator
    configurator.configure(globals())
