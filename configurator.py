"""
The knobs at the top of a script, set by config files and by --key=value. This file needs no other.

    $ python train.py config/train_gpt2.py --batch_size=32 --compile=False     # all knobs: --help

A knob is a plain assignment above the call `config, given = configure(globals())`. Its default determines its
type; if that is None, or if a knob takes several types, an annotation does: `min_lr: float = None`. Flags win
over config files, wherever they stand; of two files the later one wins. A config file is Python and is
executed: run only what you would run as a program. It sees the flags, so `n_head = n_embd // 64` agrees with
--n_embd.

`exec(open('configurator.py').read())` in place of that call works as in nanoGPT.
"""

import ast
import builtins
import difflib
import math
import os
import re
import signal
import sys
import time
import traceback
import types
import typing

# names of other trainers for these knobs, for "did you mean"
OTHER_NAMES = {
    'lr': 'learning_rate',
    'max_lr': 'learning_rate',
    'max_steps': 'max_iters',
    'num_iterations': 'max_iters',
    'train_iterations': 'max_iters',
    'steps_per_epoch': 'max_iters',
    'training_tokens': 'max_tokens',
    'num_epochs': 'max_epochs',
    'warmup_steps': 'warmup_iters',
    'context_length': 'block_size',
    'max_seq_len': 'block_size',
    'sequence_length': 'block_size',
    'mini_batch_size': 'batch_size',
    'device_batch_size': 'batch_size',
    'tokens_per_update': 'total_batch_size',
    'grad_accum': 'gradient_accumulation_steps',
    'grad_accum_steps': 'gradient_accumulation_steps',
    'depth': 'n_layer',
    'layers': 'n_layer',
    'n_layers': 'n_layer',
    'num_layers': 'n_layer',
    'n_heads': 'n_head',
    'num_heads': 'n_head',
    'dim': 'n_embd',
    'd_model': 'n_embd',
    'embd_size': 'n_embd',
    'multiple_of': 'mlp_width',
    'dropout_p': 'dropout',
    'max_grad_norm': 'grad_clip',
    'eval_every': 'eval_interval',
    'eval_freq': 'eval_interval',
    'save_every': 'save_interval',
    'save_steps': 'save_interval',
    'token_ckpt': 'save_interval',
    'sample_every': 'sample_interval',
    'core_metric_every': 'tasks_interval',
    'model_gen_multiplier': 'sample_growth',
    'resume_from_step': 'resume_step',
    'load_ckpt': 'init_from',
    'ckpt_dir': 'out_dir',
    'log_file': 'out_dir',
    'logdir': 'out_dir',
    'bf16': 'dtype',
    'enable_compilation': 'compile',
    'use_torch_compile': 'compile',
}
# knobs of other trainers that are not knobs here
ELSEWHERE = {
    'vocab_size': 'it follows from the dataset, see prepare.py --tokenizer',
    'tokenizer_path': 'it follows from the dataset, see prepare.py --tokenizer',
    'theta': 'rope_theta is in model.py',
    'eps': 'adam_eps belongs to the optimizer, norm_eps is in model.py',
    'use_prev_scheduler': 'a resumed run keeps its schedule',
}
PLAIN_TYPES = (int, float, str, list, tuple, dict, types.NoneType)
# texts, in which ~ is a character like any other; in all other knobs it is the home folder
TEXT_KNOBS = ['start', 'stop']
SWITCH_VALUES = ['true', 'false', 'auto', '1', '0']  # words that are values after a switch: --compile false
# a single hyphen before a name, or the dash into which some editors turn two hyphens
WRONG_DASH = re.compile('[-\u2010-\u2015\u2212]+[a-zA-Z_]')


class InputError(ValueError):
    """A mistake that the user can correct: a setting, a file, sizes that do not match.

    The message says what is wrong and what to do. A script that called configure() prints it as one line
    `error: ...` and exits with status 2.
    """


def print_exception(kind, exception, trace):
    """Print an InputError as one line and exit with status 2, any other exception as Python does."""
    if not isinstance(exception, InputError):
        sys.__excepthook__(kind, exception, trace)
        return
    if process_ranks()[1] > 0:
        # if all processes fail alike, the first one prints; torchrun ends the others while they sleep
        time.sleep(3)
    print(f'error: {exception}', file=sys.stderr, flush=True)
    sys.exit(2)


def launched_by_torchrun():
    """Return whether torchrun has started this process. Some platforms set one of these variables alone."""
    needed = ['RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT']
    return all(name in os.environ for name in needed)


def process_ranks():
    """Return (rank, local rank, world size) of this process; (0, 0, 1) unless torchrun has started it."""
    if not launched_by_torchrun():
        return 0, 0, 1
    return int(os.environ['RANK']), int(os.environ['LOCAL_RANK']), int(os.environ['WORLD_SIZE'])


def print0(text):
    """Print in the first process only. A closed pipe or a full disk does not end the run."""
    if process_ranks()[0] != 0:
        return
    try:
        print(text, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, 'w')  # otherwise Python tries again at exit, and changes the status


def configure(script, positional=None, takes_configs=True):
    """
    Apply sys.argv to the knobs in `script`, a script's globals(). Return two dicts: all knobs with their
    values, and those that a config file or a flag has set.

    positional: the knob that a word without -- sets; if it is a list, all such words. takes_configs: whether
    a word that ends in .py is a config file, which is executed.
    """
    sys.excepthook = print_exception
    if hasattr(sys.stdout, 'reconfigure'):  # paths and texts may have characters that the console lacks
        sys.stdout.reconfigure(errors='backslashreplace')
    if '--help' in sys.argv[1:] or '-h' in sys.argv[1:]:
        print_help(script)
        sys.exit()
    knobs = {}
    for name, value in script.items():
        if not name.startswith('_') and isinstance(value, PLAIN_TYPES):
            knobs[name] = value
    kinds = kinds_of(script, knobs)
    texts, words = read_arguments(sys.argv[1:], kinds)
    config_files = []
    for word in words:
        if word.endswith('.py') and takes_configs:
            config_files.append(word)
        elif positional is None or WRONG_DASH.match(word):
            raise InputError(f"{word} is neither a config file (.py) nor a flag. Write --NAME=VALUE, with "
                             "two hyphens; --help lists all names.")
        elif positional in texts and list not in kinds[positional]:
            lists = [f'--{name}' for name in knobs if list in kinds[name]]
            several = f" Several files follow {' or '.join(lists)}." if lists else ''
            raise InputError(f"{positional} is given twice: {texts[positional][0]}, {word}. "
                             f"Remove one.{several}")
        else:
            texts.setdefault(positional, []).append(word)
    check_known([name for name in texts if name not in knobs], knobs)
    flags = {name: read_value(name, texts[name], knobs[name], kinds[name]) for name in texts}

    changed = dict(flags)
    knobs.update(flags)  # before the config files, which may compute with them; run_config() keeps them
    for path in config_files:
        from_file = run_config(path, script, knobs, kinds, flags)
        knobs.update(from_file)
        changed.update(from_file)
    for name, value in knobs.items():
        knobs[name] = expand_home(name, value)
    script.update(knobs)
    given = {name: knobs[name] for name in changed}
    return knobs, given


def check_range(config, names, low, high=None, exclude=None):
    """Raise InputError unless each knob in `names` is None or a number from `low` to `high`.

    exclude: an end of the range that does not belong to it.
    """
    limits = f'a number above {low}' if exclude == low else f'{low} or more'
    if high is not None:
        limits += f', below {high}' if exclude == high else f', at most {high}'
    for name in names:
        value = config[name]
        if value is None:
            continue
        too_high = high is not None and value > high
        if value < low or value == exclude or too_high:
            raise InputError(f"{name} is out of range: {value}. Use {limits}.")


def check_choice(config, name, choices):
    """Raise InputError unless the knob `name` is one of `choices`."""
    if config[name] not in choices:
        names = ', '.join(str(choice) for choice in choices)
        raise InputError(f"{name} must be one of {names}: {config[name]}.")


def kinds_of(script, knobs):
    """Return {knob: list of the types that it takes}, from its annotation if it has one, else its default."""
    # since Python 3.14, the annotations of a module are made when its attribute is read
    module = sys.modules.get(script.get('__name__'))
    annotations = script.get('__annotations__') or getattr(module, '__annotations__', {})
    kinds = {}
    for name, value in knobs.items():
        if name in annotations:  # `bool | str`; or `float`, whose default is None
            several = typing.get_args(annotations[name])
            kinds[name] = list(several) or [annotations[name], types.NoneType]
        elif value is None:  # as in nanoGPT's scripts: any type
            kinds[name] = [bool, int, float, str, types.NoneType]
        else:
            kinds[name] = [type(value)]
    return kinds


def read_arguments(argv, kinds):
    """Return the values of the flags, {name: list of texts}, and the list of words that belong to no flag."""
    texts = {}
    words = []
    name = None  # the flag that takes the next word
    for word in argv:
        if word.startswith('--'):
            name, equals, text = word[2:].partition('=')
            texts.setdefault(name, [])
            if equals:
                texts[name].append(text)
            elif bool in kinds.get(name, []):
                texts[name].append('True')  # --compile; the next word may be another value
            if equals and list not in kinds.get(name, []):
                name = None
            continue
        ends_list = list in kinds.get(name, []) and WRONG_DASH.match(word)
        ends_switch = bool in kinds.get(name, []) and word.lower() not in SWITCH_VALUES
        if name is None or ends_list or ends_switch:
            words.append(word)
            name = None
            continue
        texts[name].append(word)
        if list not in kinds.get(name, []):  # a list takes all words up to the next flag
            name = None
    return texts, words


def check_known(unknown, knobs):
    """Raise InputError if there are unknown flags, with a hint for each."""
    hints = []
    for name in unknown:
        answer = suggestion(name, knobs)
        hints.append(f'--{name} ({answer})' if answer else f'--{name}')
    if hints:
        raise InputError(f"unknown settings: {', '.join(hints)}. --help lists all.")


def read_value(name, texts, default, kinds):
    """Return the value of a knob from the texts of its flag, the last of them unless the knob is a list."""
    if not texts:
        raise InputError(f"--{name} has no value. Write --{name}=VALUE.")
    if list not in kinds:
        return check_value(parse_value(texts[-1], kinds), name, kinds, f'--{name}={texts[-1]}')
    items = [type(item) for item in default or ['']]
    return [check_value(parse_value(text, items), name, items, text) for text in texts]


def expand_home(name, value):
    """Return the value of a knob with ~ replaced by the home folder, which no shell does after `=`."""
    if isinstance(value, list):
        return [expand_home(name, item) for item in value]
    if not isinstance(value, str):
        return value
    if name in TEXT_KNOBS and not value.startswith('FILE:'):
        return value
    # also in hellaswag,~/mine.jsonl, hf:~/model and FILE:~/prompt.txt
    return re.sub(r'(^|,|hf:|FILE:)~(?=[/\\]|$)', lambda match: match[1] + os.path.expanduser('~'), value)


INVALID = object()


def parse_value(text, kinds):
    """Return the value of `text` as one of the types `kinds`, or INVALID."""
    words = {'true': True, 'false': False, 'none': None}
    word = text.strip().lower()
    if word in words and type(words[word]) in kinds:
        return words[word]
    for kind in (int, float, str, ast.literal_eval):  # 3, 1e5, anything, (0.9, 0.95)
        try:
            value = fit_value(kind(text), kinds)
        except (ValueError, OverflowError, TypeError, SyntaxError):
            continue
        if value is not INVALID:
            return value
    return INVALID


def fit_value(value, kinds):
    """Return `value` as one of the types `kinds`, or INVALID: 3 as a float, 1e5 as an int, 0 as a bool."""
    if type(value) is float and not math.isfinite(value):
        return INVALID
    if type(value) is float and float not in kinds and value.is_integer():
        value = int(value)
    if type(value) is int and int not in kinds and float in kinds:
        value = float(value)
    if type(value) is int and int not in kinds and value in (0, 1):
        value = bool(value)
    return value if type(value) in kinds else INVALID


def check_value(value, name, kinds, source):
    if value is INVALID:
        names = {types.NoneType: 'None'}
        types_of_knob = ' or '.join(names.get(kind, kind.__name__) for kind in kinds)
        raise InputError(f"{name} must be of type {types_of_knob}: {source}.")
    return value


def suggestion(name, knobs):
    """Return a hint for an unknown setting, or '' if no name is close."""
    name = name.replace('-', '_')
    if OTHER_NAMES.get(name) in knobs:
        return f'did you mean {OTHER_NAMES[name]}?'
    # below 0.71, vocab_size leads to block_size
    for close in difflib.get_close_matches(name, knobs, n=1, cutoff=0.71):
        return f'did you mean {close}?'
    return ELSEWHERE.get(name, '')


def run_config(path, script, knobs, kinds, flags):
    """Return {knob: value} of what the config file `path` sets. It sees the knobs with the flags applied."""
    # config/x.py is found from any folder: first in the working directory, then next to this file
    file = path
    if not os.path.isfile(file):
        file = os.path.join(os.path.dirname(os.path.abspath(__file__)), path)
    if not os.path.isfile(file):
        raise InputError(f"config file not found: {path}. There are some in config/, such as "
                         "config/train_gpt2.py.")
    # The knobs are added to the file's builtins, so that it can read them, while `names` contains only what
    # the file assigns. A value that equals the default counts, too: a resume has to know it
    names = {'__file__': file, '__builtins__': {**vars(builtins), **knobs}}
    statements = []
    try:
        with open(file, encoding='utf-8-sig') as f:
            for node in ast.parse(f.read(), file).body:
                statements.append(compile(ast.Module([node], []), file, 'exec'))
    except (OSError, SyntaxError, ValueError) as e:  # ValueError: not UTF-8, or a null byte
        raise InputError(f"{path} is not a config file: {e}. Write Python assignments in UTF-8, such as "
                         "batch_size = 32.")
    try:
        for statement in statements:
            exec(statement, names)
            names.update(flags)  # the next statement may compute with a knob that a flag has set
    except InputError:
        raise
    except Exception as e:
        line = traceback.extract_tb(e.__traceback__)[-1].lineno
        raise InputError(f"{path} failed in line {line}: {type(e).__name__}: {e}. Correct that line.")
    changed = {}
    for name, value in names.items():
        if name in flags or name.startswith('_'):
            continue
        if name in knobs:
            value = fit_value(value, kinds[name])
            changed[name] = check_value(value, name, kinds[name], f'{name} = {names[name]!r} in {path}')
        elif name in script and value is not script[name]:
            kind = type(script[name]).__name__
            raise InputError(f"{name} in {path} is not a knob, as its default is a {kind}. Make it a number, "
                             "a text, a list, a tuple or a dict.")
        elif isinstance(value, PLAIN_TYPES):
            answer = suggestion(name, knobs)
            if answer:
                raise InputError(f"unknown setting in {path}: {name} ({answer}). Names of your own begin "
                                 "with _.")
            print0(f"note: {name} in {path} is not a knob")
    return changed


def print_help(script):
    """Print the docstring of the script and its block of knobs, as they are in the file."""
    if hasattr(signal, 'SIGPIPE'):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this without a traceback
    with open(script['__file__'], encoding='utf-8') as f:
        parts = re.split('# ------+\n', f.read())
    print(script['__doc__'])
    print(*parts[1:2])  # between the first two rules


if __name__ != 'configurator':  # executed inside another script, as in nanoGPT
    import configurator
    configurator.configure(globals())
