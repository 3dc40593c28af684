"""
The knobs at the top of a script, set by config files and by --key=value. This file needs no other.

    $ python train.py config/train_gpt2.py --batch_size=32 --compile=False     # all knobs: --help

A knob is a plain assignment above the call `config, given = configure(globals())`. Its default tells its
type; where that is None, or where a knob takes several types, an annotation does: `min_lr: float = None`.
Flags win over config files, wherever they stand; of two files the later one wins. A config file is Python
and is executed: run only what you would run as a program.

`exec(open('configurator.py').read())` in place of that call works as in nanoGPT.
"""

import ast
import difflib
import math
import os
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
    'num_steps': 'max_iters',
    'num_iterations': 'max_iters',
    'train_iterations': 'max_iters',
    'training_tokens': 'max_tokens',
    'num_epochs': 'max_epochs',
    'budget': 'max_tokens or max_epochs',
    'warmup_steps': 'warmup_iters',
    'context_length': 'block_size',
    'max_seq_len': 'block_size',
    'sequence_length': 'block_size',
    'seq_len': 'block_size',
    'mini_batch_size': 'batch_size',
    'device_batch_size': 'batch_size',
    'tokens_per_update': 'total_batch_size',
    'grad_accum_steps': 'gradient_accumulation_steps',
    'n_layers': 'n_layer',
    'num_layers': 'n_layer',
    'depth': 'n_layer',
    'n_heads': 'n_head',
    'num_heads': 'n_head',
    'n_kv_heads': 'n_kv_head',
    'd_model': 'n_embd',
    'dim': 'n_embd',
    'dropout_p': 'dropout',
    'max_grad_norm': 'grad_clip',
    'clip_grad_norm': 'grad_clip',
    'eval_every': 'eval_interval',
    'val_every': 'eval_interval',
    'save_every': 'save_interval',
    'checkpoint_interval': 'save_interval',
    'token_ckpt': 'save_interval',
    'log_every': 'log_interval',
    'model_gen_multiplier': 'sample_growth',
    'resume_from_step': 'resume_step',
    'load_ckpt': 'init_from',
    'log_dir': 'out_dir',
    'num_return_sequences': 'num_samples',
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
        annotation = annotations.get(name, type(value))
        kinds[name] = list(typing.get_args(annotation))
        if not kinds[name] and name in annotations:  # `min_lr: float = None`
            kinds[name] = [annotation, types.NoneType]
        elif not kinds[name]:
            kinds[name] = [annotation]
        if value is None and name not in annotations:  # as in nanoGPT's scripts: nothing is known of it
            kinds[name] = [bool, int, float, str, types.NoneType]
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
                error(f"no knob is called {name} ({word}). {suggestion(name, knobs)}")
            if not equals and words and is_value(words[0], kinds[name]):  # --batch_size 32
                text = words.pop(0)
            elif not equals and bool in kinds[name]:  # --compile
                text = 'True'
            if list in kinds[name]:  # it collects: --input=a --input=b
                flags[name] = [*flags.get(name, []), text]
                continue
            value = parse_value(text, kinds[name])
            if value is INVALID:
                error(f"{name} takes {wording(kinds[name])} ({word})")
            flags[name] = value
        elif word.endswith('.py'):
            config_files.append(word)
        elif positional and isinstance(knobs[positional], list):
            flags[positional] = [*flags.get(positional, []), word]
        elif positional and positional not in flags:
            flags[positional] = word
        else:
            error(f"neither a config file nor --key=value ({word}). write --KEY={word}; --help lists all")
    return flags, config_files


def is_value(word, kinds):
    """Whether the word behind `--key` is its value. A switch takes True or False."""
    if word.lower() in ('true', 'false'):
        return True
    if bool in kinds:
        return str in kinds and not word.startswith('--') and not word.endswith('.py')
    return not word.startswith('--')


INVALID = object()


def parse_value(text, kinds):
    """What `text` stands for among the types `kinds`, or INVALID."""
    word = text.strip().lower()
    if types.NoneType in kinds and word == 'none':
        return None
    if bool in kinds and word in ('true', 'false'):
        return word == 'true'
    if bool in kinds and int not in kinds and word in ('0', '1'):
        return word == '1'
    if int in kinds or float in kinds:
        try:
            number = int(text)
        except ValueError:
            try:
                number = float(text)  # 1e5
            except ValueError:
                number = None
        if number is not None:
            return fit_value(number, kinds)
    return fit_value(text, kinds)


def fit_value(value, kinds):
    """`value` as one of the types `kinds`, or INVALID. An int is a fine float, 1e5 is a fine int."""
    if type(value) is float and not math.isfinite(value):
        return INVALID
    if type(value) is float and float not in kinds and value.is_integer():
        value = int(value)
    if type(value) is int and abs(value) >= 2**63:
        return INVALID
    if type(value) is int and int not in kinds and float in kinds:
        value = float(value)
    return value if type(value) in kinds else INVALID


def wording(kinds):
    words = {bool: 'True or False', int: 'a whole number', float: 'a number', str: 'text', list: 'text',
             types.NoneType: 'None'}
    return ' or '.join(words[kind] for kind in kinds)


def suggestion(name, knobs):
    """What was meant by the name of no knob."""
    meant = OTHER_NAMES.get(name.lower().replace('-', '_'))
    if meant and meant.split()[0] in knobs:
        return f'did you mean {meant}?'
    close = difflib.get_close_matches(name, knobs, n=1)
    if close:
        return f'did you mean {close[0]}?'
    return '--help lists all'


def run_config(path, knobs, kinds):
    """{knob: value} of what the config file `path` sets; it sees the knobs as they are."""
    # config/x.py is found from any folder: the working directory comes first, then the one of this file
    found = path
    if not os.path.isfile(found):
        found = os.path.join(os.path.dirname(os.path.abspath(__file__)), path)
    if not os.path.isfile(found):
        error(f"config file not found ({path}). name one such as config/train_gpt2.py")
    try:
        with open(found, encoding='utf-8-sig') as f:
            tree = ast.parse(f.read(), found)
    except (OSError, SyntaxError, ValueError) as e:  # ValueError: not UTF-8, or a null byte
        error(f"{path} is not a config file ({e}). write Python assignments, in UTF-8: batch_size = 32")
    names = dict(knobs, __file__=found, __name__='config')
    before = dict(names)
    try:
        exec(compile(tree, found, 'exec'), names)
    except Exception as e:
        line = traceback.extract_tb(e.__traceback__)[-1].lineno
        error(f"{path} stopped with {type(e).__name__} ({e}, line {line}). correct that line")
    # what the file assigns, also where it repeats a default: a resume has to know that it was given
    assigned = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in names:
            assigned[node.id] = names[node.id]
    for name in knobs:  # in another way, such as globals().update(...)
        if names.get(name, before[name]) is not before[name]:
            assigned[name] = names[name]
    changed = {}
    for name, value in assigned.items():
        if name in knobs:
            changed[name] = fit_value(value, kinds[name])
            if changed[name] is INVALID:
                error(f"{name} takes {wording(kinds[name])} ({name} = {value!r} in {path})")
        elif not name.startswith('_') and isinstance(value, (int, float, str)):
            answer = suggestion(name, knobs)
            if answer.startswith('did you mean'):
                error(f"no knob is called {name} ({path}). {answer}")
            if os.environ.get('RANK', '0') == '0':
                print(f"note: {name} in {path} is not a knob")
    return changed


def print_help(script):
    """Print the docstring of the script and its block of knobs, as they stand in the file."""
    with open(script['__file__'], encoding='utf-8') as f:
        source = f.read()
    print(ast.get_docstring(ast.parse(source)))
    lines = source.splitlines()
    rules = [i for i, line in enumerate(lines) if line.startswith('# ------')]
    if len(rules) >= 2:
        print('\nThe knobs and their defaults:\n')
        print('\n'.join(lines[rules[0] + 1:rules[1]]))


if __name__ != 'configurator':  # executed inside another script, as in nanoGPT
    import configurator
    configurator.configure(globals())
