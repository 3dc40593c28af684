"""
Overrides for the knobs at the top of a script: config files and --key=value, in the order given, later ones win.

    $ python train.py config/train_gpt2.py --batch_size=32 --compile
    $ python train.py --help

A script calls `knobs, given = configure(globals())` right below its block of knobs: plain assignments, whose values
(or annotations, as in `min_lr: float = None`) tell the types. A config file is Python and is executed, like the script
itself: run only the ones you would run as a program.
"""

import ast
import difflib
import os
import signal
import sys
import time
import types

# what other trainers call it -> what it is called here; only for "did you mean"
ALIASES = dict(
    lr='learning_rate', max_lr='learning_rate', max_grad_norm='grad_clip', clip='grad_clip', eps='adam_eps',
    steps='max_iters', max_steps='max_iters', num_iterations='max_iters', train_iterations='max_iters', iters='max_iters',
    training_tokens='max_tokens', epochs='max_epochs', num_epochs='max_epochs', target_param_data_ratio='tokens_per_param',
    context_length='block_size', seq_len='block_size', max_seq_len='block_size', sequence_length='block_size',
    mini_batch_size='batch_size', micro_batch_size='batch_size', device_batch_size='batch_size',
    tokens_per_update='total_batch_size', batch_tokens='total_batch_size', grad_accum='gradient_accumulation_steps',
    grad_accum_steps='gradient_accumulation_steps', accumulation_steps='gradient_accumulation_steps',
    n_layers='n_layer', num_layers='n_layer', depth='n_layer', n_heads='n_head', num_heads='n_head',
    n_embed='n_embd', d_model='n_embd', hidden_size='n_embd', embedding_dim='n_embd', dim='n_embd',
    warmup_steps='warmup_iters', warmup_iterations='warmup_iters', schedule='lr_schedule', scheduler='lr_schedule',
    eval_every='eval_interval', eval_freq='eval_interval', eval_steps='eval_iters', log_every='log_interval',
    save_every='save_interval', save_steps='save_interval', output_dir='out_dir', log_dir='out_dir',
    load_ckpt='init_from', resume='init_from', checkpoint='init_from', model='init_from', use_wandb='wandb_log',
    precision='dtype', use_compile='compile', torch_compile='compile', prompt='start', length='max_new_tokens',
    max_tokens_to_generate='max_new_tokens', n='num_samples', output='name', out='name', val_frac='val_fraction',
    num_workers='workers', n_workers='workers', num_proc='workers', shard_size='shard_tokens', text_column='text_key', column='text_key',
)


def fail(*problems, everywhere=False):
    """Print a line `error: what (value). what to do` per problem and exit with status 2. All processes find the same mistakes,
    so one per machine says them, unless `everywhere`: what only this process may have met."""
    if everywhere or os.environ.get('LOCAL_RANK', '0') == '0':
        for problem in problems:
            print('error:', ' '.join(problem.splitlines()), file=sys.stderr, flush=True)
    else:
        time.sleep(3)  # torchrun ends all as soon as one has ended: the one that speaks shall be the first
    sys.exit(2)


def warn(what):
    """A line on standard error; not being able to write it is no reason to stop."""
    try:
        print(f'warning: {what}', file=sys.stderr, flush=True)
    except OSError:
        pass


def configure(script, positional=None, like=None):
    """Apply sys.argv to the knobs in `script`, a script's globals(). `positional` names the knob that a bare word sets; `like` is
    another script beside this one, whose knobs are knobs here as well.
    Returns (all knobs, the ones that were given), two dicts; every mistake found is reported at once, status 2."""
    if hasattr(sys.stdout, 'reconfigure'):  # a path may have what the console's encoding lacks
        sys.stdout.reconfigure(errors='backslashreplace')
    knobs = plain(script)
    if any(arg in ('--help', '-h') for arg in sys.argv[1:]):
        print_help(script, knobs, positional)
        if like:
            print(f"\nand all knobs of {like}, see python {like} --help")
        sys.exit(0)
    kinds = types_of(script, knobs)
    if like:
        others, their_kinds = knobs_of(os.path.join(os.path.dirname(os.path.abspath(script['__file__'])), like))
        knobs, kinds = {**others, **knobs}, {**their_kinds, **kinds}
        script.update(knobs)
    given, problems, notes = {}, [], []
    argv = sys.argv[1:]
    for i, arg in enumerate(argv):
        if arg.startswith('-'):
            name, equals, text = arg.lstrip('-').partition('=')
            following = argv[i + 1] if i + 1 < len(argv) and not argv[i + 1].startswith('-') else None
            if name not in knobs:
                problems.append(f"unknown knob ({arg}). {suggest(name, knobs)}")
            elif not arg.startswith('--'):
                problems.append(f"one dash ({arg}). write -{arg}")
            elif not equals and (bool not in kinds[name] or following in ('True', 'False', 'true', 'false')):
                problems.append(f"no value ({arg}). write --{name}={following if following is not None else '...'}")
                if following is not None:
                    argv[i + 1] = ''  # it was meant as the value: not to be reported once more as a missing file
            else:
                value, problem = (parse(text, kinds[name]) if equals else (True, None))
                if problem:
                    problems.append(f"{name} takes {problem} ({arg})")
                else:
                    if name in given and arg.split('=')[0] in [a.split('=')[0] for a in argv[:i]]:
                        notes.append(f"note: --{name} is given twice, the last one counts ({value!r})")
                    given[name] = value
        elif arg.endswith('.py'):
            changes, mistakes = read_config(arg, {**knobs, **given}, kinds, os.path.dirname(script.get('__file__', '')))
            given.update(changes)
            problems += mistakes
        elif positional and positional not in given and arg:
            given[positional] = arg
        elif arg:
            problems.append(f"neither a config file nor --key=value ({arg}). see python {os.path.basename(sys.argv[0])} --help")
    if problems:
        fail(*problems)
    script.update(given)
    for note in notes:
        if os.environ.get('LOCAL_RANK', '0') == '0':
            print(note)
    return {**knobs, **given}, given


def inherit(script, knobs, given, saved, never=()):
    """Take over the knobs of an earlier run, `saved`, except those that are given now and those in `never`.
    Returns the differences that were asked for, {name: (saved, now)}; values of a wrong type are left out."""
    kinds, differences = types_of(script, knobs), {}
    for name, value in saved.items():
        if name not in knobs or name in never:
            continue
        value, problem = check(value, kinds[name])
        if problem:
            continue
        if name not in given:
            script[name] = knobs[name] = value
        elif knobs[name] != value:
            differences[name] = (value, knobs[name])
    return differences


def out_of_range(knobs, above_zero='', from_zero='', below_one='', words={}):
    """The problems with the knobs named (strings of names): numbers outside their range, words not among those allowed.
    A knob that is None is fine."""
    problems = []
    for names, wrong, remedy in ((above_zero, lambda v: v <= 0, 'use a number above 0'), (from_zero, lambda v: v < 0, 'use 0 or more'),
                                 (below_one, lambda v: not 0 <= v < 1, 'use 0 or more, but less than 1')):
        problems += [f"{name} is out of range ({knobs[name]}). {remedy}" for name in names.split()
                     if knobs[name] is not None and wrong(knobs[name])]
    return problems + [f"no such {name} ({knobs[name]}). use {', '.join(allowed.split())}" for name, allowed in words.items()
                       if knobs[name] not in allowed.split()]


def plain(script):
    """The knobs among a script's names."""
    return {name: value for name, value in script.items() if not name.startswith('_') and isinstance(value, (int, float, str, types.NoneType))}


def knobs_of(path):
    """The knobs at the top of a script, and their types, without running more of it than that."""
    with open(path, encoding='utf-8') as f:
        block = f.read().partition('\nknobs, given = configure(')[0]
    module = types.ModuleType('block')
    exec(compile(block, path, 'exec'), module.__dict__)
    return plain(module.__dict__), types_of({'__annotations__': module.__annotations__}, plain(module.__dict__))


def types_of(script, knobs):
    """{knob: the set of types it may have}, from its annotation where it has one, else from its default."""
    module = sys.modules.get(script.get('__name__'))
    annotations = script.get('__annotations__') or getattr(module, '__annotations__', {})
    kinds = {}
    for name, value in knobs.items():
        annotation = annotations.get(name, type(value))
        kinds[name] = set(getattr(annotation, '__args__', (annotation,))) | ({type(None)} if value is None else set())
    return kinds


def parse(text, kinds):
    """The value that `text` stands for among `kinds`, and what would have been right if there is none."""
    word = text.strip().lower()
    if type(None) in kinds and word == 'none':
        return None, None
    if bool in kinds and word in ('true', 'false', '1', '0') and not (word in '10' and int in kinds):
        return word in ('true', '1'), None
    if int in kinds or float in kinds:
        try:
            return check(int(text), kinds)
        except ValueError:
            try:
                return check(float(text), kinds)
            except ValueError:
                pass
    if str in kinds:
        return text, None
    return None, describe(kinds)


def check(value, kinds):
    """`value` as one of `kinds`: an int is a fine float, 1e5 is a fine int, True is not a number."""
    if type(value) is float and not abs(value) < 1e100:  # nor is nan
        return None, 'a finite number below 1e100'
    if type(value) is int and not abs(value) < 2**63:
        return None, 'a whole number below 2**63'
    if type(value) in kinds:
        return value, None
    if type(value) is int and float in kinds:
        return float(value), None
    if type(value) is float and int in kinds and value.is_integer():
        return check(int(value), kinds)
    return None, describe(kinds)


def describe(kinds):
    words = {bool: 'True or False', int: 'a whole number', float: 'a number', str: 'text', type(None): 'None'}
    return ' or '.join(words[kind] for kind in words if kind in kinds)


def read_config(path, knobs, kinds, script_dir):
    """Run the config file `path` in a copy of the knobs. Returns (what it sets, its mistakes)."""
    # config/x.py works from any folder: the working directory first, then the script's own
    found = path if os.path.exists(path) else os.path.join(script_dir, path)
    if not os.path.isfile(found):
        folders = dict.fromkeys([os.getcwd(), os.path.abspath(script_dir)])
        known = [f'config/{name}' for name in os.listdir(os.path.join(script_dir, 'config'))] if os.path.isdir(os.path.join(script_dir, 'config')) else []
        close = difflib.get_close_matches(path, known, n=1)
        return {}, [f"config file not found ({path}). looked in {' and '.join(folders)}" + (f"; did you mean {close[0]}?" if close else '')]
    scope, assigned = {**knobs, '__file__': found, '__name__': 'config'}, set()

    class Recorder(dict):  # an assignment that repeats the default counts, too: a resume must know what was asked for
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
    changes, mistakes = {}, []
    for name in sorted(assigned):
        value = scope[name]
        if name.startswith('_') or isinstance(value, types.ModuleType):
            continue
        if name not in knobs:
            mistakes.append(f"unknown knob in {path} ({name}). {suggest(name, knobs)}; names that begin with _ are yours")
        else:
            value, problem = check(value, kinds[name])
            if problem:
                mistakes.append(f"{name} in {path} takes {problem} ({scope[name]!r})")
            else:
                changes[name] = value
    return changes, mistakes


def suggest(name, knobs):
    name = name.replace('-', '_').lower()
    if ALIASES.get(name) in knobs:
        return f"did you mean --{ALIASES[name]}?"
    close = difflib.get_close_matches(name, knobs, n=1, cutoff=0.6)
    return f"did you mean --{close[0]}?" if close else "--help lists all of them"


def quiet_when_cut_off():
    """From now on `| head` ends this process without a word."""
    if hasattr(signal, 'SIGPIPE'):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def print_help(script, knobs, positional):
    """The script's docstring and its block of knobs, as they stand in the source: that block is the manual."""
    with open(script['__file__'], encoding='utf-8') as f:
        source = f.read()
    lines, tree = source.splitlines(), ast.parse(source).body
    end = min((node.lineno for node in tree if 'configure(globals()' in ast.unparse(node) and not isinstance(node, ast.ImportFrom)), default=len(lines))
    targets = {node.lineno: getattr(node, 'target', None) or node.targets[0]
               for node in tree if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.lineno < end}
    numbers = [n for n, target in targets.items() if isinstance(target, ast.Name) and target.id in knobs]
    first, last = min(numbers) - 1, max(numbers)
    while lines[first - 1].startswith('#') and not lines[first - 1].startswith('# ---'):
        first -= 1
    quiet_when_cut_off()
    print((script['__doc__'] or '').strip() + '\n')
    print(f"usage: python {os.path.basename(script['__file__'])} {f'[{positional}] ' if positional else ''}"
          "[config/file.py ...] [--key=value ...]\n")
    print('\n'.join(lines[first:last]))
