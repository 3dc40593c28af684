"""
Set the knobs at the top of a script by config files and --key=value.

    $ python train.py config/train_gpt2.py --batch_size=32 --compile=False     # all knobs: --help

A knob is a plain assignment above the call `config, given = configure(globals())`. Its default determines its
type; if that is None, or if a knob takes several types, an annotation does: `min_lr: float = None`,
`compile: bool | str = 'auto'`, `widths: list[int] = []`, `mode: Literal['fast', 'exact'] = 'fast'`. Flags win
over config files, wherever they stand; of two files the later one wins. A config file is Python and is
executed: run only what you would run as a program. It sees the flags, so `n_head = n_embd // 64` agrees with
--n_embd.

`exec(open('configurator.py').read())` in place of that call works as in nanoGPT. This file needs no
other.
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
# texts, which are used as they are; in all other knobs ~ is the home folder, and s3://... is refused
TEXT_KNOBS = ['start', 'stop']
# The ranges of numbers: the lowest and the highest value, which of the two is excluded, and the names. A name
# that a script does not have is ignored, and so is a value that is not a number
RANGES = [
    (1, math.inf, None, [
        'batch_size', 'block_size', 'gradient_accumulation_steps', 'total_batch_size', 'n_layer',
        'n_head', 'n_embd', 'n_kv_head', 'mlp_width', 'max_new_tokens', 'num_samples', 'top_k',
        'ddp_timeout', 'threads']),
    (0, 2**62, None, ['seed']),  # sample.py adds to it, and the sum must fit in an int64
    (0, 1, 1, ['dropout', 'momentum', 'beta1', 'beta2', 'val_fraction', 'smooth']),
    (0, math.inf, 0, [
        'learning_rate', 'max_tokens', 'max_epochs', 'train_minutes', 'max_minutes', 'shard_mb',
        'noise']),
    (0, math.inf, None, [
        'matrix_lr', 'embedding_lr', 'head_lr', 'min_lr', 'weight_decay', 'matrix_weight_decay',
        'adam_eps', 'grad_clip', 'max_iters', 'warmup_iters', 'lr_decay_iters', 'eval_interval',
        'eval_iters', 'eval_tokens', 'log_interval', 'save_interval', 'keep_checkpoints', 'resume_step',
        'tasks_interval', 'max_per_task', 'sample_interval', 'sample_growth', 'sample_tokens',
        'temperature', 'shard']),
    (0, 1, 0, ['decay_fraction', 'top_p']),
]
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
            knobs[name] = plain_value(value)
    kinds = kinds_of(script, knobs)
    texts, words = read_arguments(sys.argv[1:], kinds)
    config_files = []
    for word in words:
        if word.endswith('.py') and takes_configs:
            config_files.append(word)
        elif positional is None or WRONG_DASH.match(word):
            raise InputError(f"{word} is neither a config file (.py) nor a flag. Write --NAME=VALUE, with "
                             "two hyphens; --help lists all names.")
        elif positional in texts and not takes(kinds[positional], list):
            raise InputError(f"{positional} is given twice: {texts[positional][0]}, {word}. Remove one.")
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
        knobs[name] = local_value(name, value)
    given = {name: knobs[name] for name in changed}
    check_ranges(given)
    script.update(knobs)
    return knobs, given


def check_ranges(config):
    """Raise InputError if a number in `config`, {knob: value}, is not in its range in RANGES."""
    for low, high, excluded, names in RANGES:
        limits = f'a number above {low}' if excluded == low else f'{low} or more'
        if high < math.inf:
            limits += f', below {high}' if excluded == high else f', at most {high}'
        for name in names:
            value = config.get(name)
            is_number = isinstance(value, (int, float))
            if is_number and (not low <= value <= high or value == excluded):
                raise InputError(f"{name} is out of range: {value}. Use {limits}.")


def check_choice(config, name, choices):
    """Raise InputError unless the knob `name` is one of `choices`."""
    if config[name] not in choices:
        names = ', '.join(str(choice) for choice in choices)
        raise InputError(f"{name} must be one of {names}: {config[name]}.")


def kinds_of(script, knobs):
    """Return {knob: list of the kinds of values that it takes}, from its annotation or else its default.

    A kind is a type (int, list[int]), or a single value ('fast', from a Literal).
    """
    annotations = annotations_of(script)
    kinds = {}
    for name, value in knobs.items():
        if name in annotations:
            kinds[name] = annotations[name]
        elif value is None:  # as in nanoGPT's scripts: any type
            kinds[name] = [bool, int, float, str]
        else:
            kinds[name] = [type(value)]
        if fit_value(value, kinds[name]) is INVALID:  # the default is always valid: `min_lr: float = None`
            kinds[name].append(value)
    return kinds


def annotations_of(script):
    """Return {name: kinds} from the annotations in a script's globals().

    One that cannot be evaluated, or that contains a type whose values are not plain, is skipped.
    """
    annotations = script.get('__annotations__', {})
    if script.get('__annotate__'):  # since Python 3.14, they are computed when they are needed
        import annotationlib
        annotations = annotationlib.call_annotate_function(
            script['__annotate__'], annotationlib.Format.FORWARDREF)
    kinds = {}
    for name, annotation in annotations.items():
        holder = types.ModuleType(name)  # of this annotation alone, as the first that fails ends the call
        holder.__annotations__ = {name: annotation}
        try:
            hint = typing.get_type_hints(holder, script)[name]
        except Exception:  # such as a name that is imported for type checkers only
            continue
        if all(plain_type(kind) in (bool, *PLAIN_TYPES) for kind in kinds_in(hint)):
            kinds[name] = kinds_in(hint)
    return kinds


def kinds_in(hint):
    """Return the kinds in a type: [bool, str] for bool | str, ['a', 'b'] for Literal['a', 'b']."""
    hint = getattr(hint, '__value__', hint)  # of a statement `type Size = int | str`
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return [hint]
    kinds = []
    for member in typing.get_args(hint):
        kinds += kinds_in(member)
    return kinds


def plain_type(kind):
    """Return the type of a kind's values: list for list[int], str for 'fast'."""
    if isinstance(kind, type):
        return kind
    return typing.get_origin(kind) or type(kind)


def takes(kinds, wanted):
    """Return whether values of the type `wanted` are among `kinds`."""
    return wanted in [plain_type(kind) for kind in kinds]


def read_arguments(argv, kinds):
    """Return the values of the flags, {name: list of texts}, and the list of words that belong to no flag."""
    lists = [name for name in kinds if takes(kinds[name], list)]
    switches = [name for name in kinds if takes(kinds[name], bool)]
    texts = {}
    words = []
    name = None  # the flag that takes the next word
    for word in argv:
        if word.startswith('--'):
            name, equals, text = word[2:].partition('=')
            texts.setdefault(name, [])
            if equals:
                texts[name].append(text)
            elif name in switches:
                texts[name].append('True')  # --compile; the next word may be another value
            if equals and name not in lists:
                name = None
            continue
        ends_list = name in lists and WRONG_DASH.match(word)
        ends_switch = name in switches and word.lower() not in SWITCH_VALUES
        if name is None or ends_list or ends_switch:
            words.append(word)
            name = None
            continue
        texts[name].append(word)
        if name not in lists:  # a list takes all words up to the next flag
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
    for kind in kinds:
        if plain_type(kind) is list:
            item_kinds = [type(item) for item in default or ['']]
            if typing.get_args(kind):  # list[int]
                item_kinds = kinds_in(typing.get_args(kind)[0])
            return [check_value(parse_value(text, item_kinds), name, item_kinds, text) for text in texts]
    return check_value(parse_value(texts[-1], kinds), name, kinds, f'--{name}={texts[-1]}')


def local_value(name, value):
    """Return the value of a knob with ~ replaced by the home folder, which no shell does after `=`.

    Raise InputError if it is the address of a file that is not on this machine.
    """
    if isinstance(value, (list, tuple)):
        return type(value)([local_value(name, item) for item in value])
    if not isinstance(value, str):
        return value
    if name in TEXT_KNOBS and not value.startswith('FILE:'):
        return value
    if re.search(r'(^|,|hf:|FILE:)[a-zA-Z][a-zA-Z0-9+.-]+://', value):  # s3://, gs://, https://
        raise InputError(f"{name} is an address, not a path on this machine: {value}. Copy or mount the "
                         "files. If this setting may be an address, add it to TEXT_KNOBS in configurator.py.")
    # also in hellaswag,~/mine.jsonl, hf:~/model and FILE:~/prompt.txt
    return re.sub(r'(^|,|hf:|FILE:)~(?=[/\\]|$)', lambda match: match[1] + os.path.expanduser('~'), value)


INVALID = object()


def parse_value(text, kinds):
    """Return the value of `text` as one of `kinds`, or INVALID."""
    words = {'true': True, 'false': False, 'none': None}
    word = text.strip().lower()
    if word in words and fit_value(words[word], kinds) is not INVALID:
        return words[word]
    for convert in (int, float, str, ast.literal_eval):  # 3, 1e5, anything, (0.9, 0.95)
        try:
            value = fit_value(convert(text), kinds)
        except (ValueError, OverflowError, TypeError, SyntaxError):
            continue
        if value is not INVALID:
            return value
    return INVALID


def plain_value(value):
    """Return a value of numpy or pathlib, or a list, tuple or dict of such values, as Python's own types."""
    if hasattr(value, 'tolist') and not isinstance(value, type):
        value = value.tolist()  # a number of a scalar
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value) in (list, tuple):
        return type(value)([plain_value(item) for item in value])
    if type(value) is dict:
        return {plain_value(key): plain_value(item) for key, item in value.items()}
    return value


def fit_value(value, kinds):
    """Return `value` as one of `kinds`, or INVALID.

    3 becomes a float, 1e5 an int, 0 a bool, a list a tuple, and a value of numpy or pathlib one of Python.
    """
    value = plain_value(value)
    if type(value) is float and not math.isfinite(value):
        return INVALID
    if type(value) is float and not takes(kinds, float) and value.is_integer():
        value = int(value)
    if type(value) is int and not takes(kinds, int) and takes(kinds, float):
        value = float(value)
    if type(value) is int and not takes(kinds, int) and value in (0, 1):
        value = bool(value)
    if type(value) is list and not takes(kinds, list):
        value = tuple(value)
    for kind in kinds:
        is_value = isinstance(kind, PLAIN_TYPES)
        if type(value) is plain_type(kind) and (value == kind or not is_value):
            return value
    return INVALID


def check_value(value, name, kinds, source):
    if value is INVALID:
        names = []
        for kind in kinds:
            name_of_kind = repr(kind) if isinstance(kind, PLAIN_TYPES) else plain_type(kind).__name__
            names.append(name_of_kind.replace('NoneType', 'None'))
        raise InputError(f"{name} must be {' or '.join(names)}: {source}.")
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
        line = [frame.lineno for frame in traceback.extract_tb(e.__traceback__) if frame.filename == file][-1]
        raise InputError(f"{path} failed in line {line}: {type(e).__name__}: {e}. Correct that line.")
    changed = {}
    for name, value in names.items():
        if name in flags or name.startswith('_'):
            continue
        if name in knobs:
            source = f'{name} = {plain_value(value)!r} in {path}'
            changed[name] = check_value(fit_value(value, kinds[name]), name, kinds[name], source)
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
