"""
What a GPU has to show, in steps: that the numbers are right, that no step waits for the GPU, how fast it is.

    $ bash runs/gpu_records.sh --out=FOLDER --peer=PATH_TO_NANOGPT   # until every step has its result
    $ bash runs/gpu_records.sh --out=FOLDER --table                  # dev/records/gpu.md from what there is

Each step takes less than nine minutes in a process of its own and leaves FOLDER/<step>.json. One whose file
is there is not repeated; one that failed, or did not end in time, is.
"""

import os
import sys

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
from configurator import configure, fail, out_of_range

# -----------------------------------------------------------------------------
out = os.path.join(HERE, 'out-gpu')  # where the results go
peer: str = None  # a checkout of nanoGPT, to compare with
text: str = None  # tinyshakespeare's file, for the race. None: prepare.py downloads it
gutenberg: str = None  # the folder with gutenberg_train.jsonl.gz. None: without the race at 124M
only: str = None  # steps, as 'losses,growth'; repeated even if their results are there
list = False  # True: name the steps and whether they are done
minutes = 9.0  # stop the step that is running after so many, and begin no other
table = False  # True: write the table
record = os.path.join(HERE, 'dev', 'records', 'gpu.md')  # its file
smoke = False  # True: tiny networks on the CPU, and only the steps of SMOKE unless `only` says
# -----------------------------------------------------------------------------
knobs, given = configure(globals())

import contextlib
import functools
import glob
import hashlib
import json
import multiprocessing
import signal
import statistics
import tempfile
import time
import traceback

import torch

from common import after_each_update, check_peer, flags_of, machine, make_tokens, run_script
from model import GPT, GPTConfig
from support.compiling import compile_model
from support.curves import read_log
from support.devices import choose_compile
from support.files import write_json

if smoke:
    import torch._dynamo  # every optimizer imports it, for two seconds: here once, not in each step
DEVICE = torch.device('cpu' if smoke else 'cuda')  # not used here: a process that uses a GPU cannot be forked
SHAPE = dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=16)
if smoke:
    SHAPE = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, batch_size=4)
ITERS = 6 if smoke else 40
RUN = dict(SHAPE, learning_rate=1e-3, warmup_iters=5, gradient_accumulation_steps=2, dropout=0.1,
           eval_interval=0, eval_iters=1, device=DEVICE, compile=False)
ARCHS = ('gpt2', 'llama', 'modern')
work = None  # a temporary folder, of each step's own


class NotHere(Exception):
    """Why a step makes no sense here."""


def run_flags(name, iterations=ITERS, V=65, **more):
    """The flags of a run of train.py into work/<name>."""
    settings = dict(RUN, max_iters=iterations, lr_decay_iters=ITERS) | more
    data = dict(data_dir=work, dataset=make_tokens(work, V, 2**16), out_dir=os.path.join(work, name))
    return flags_of({**settings, **data})


def train(name, *flags, launcher=(), **more):
    """Run train.py into work/<name>; returns its newest checkpoint."""
    run_script('train.py', *run_flags(name, **more), *flags, launcher=launcher, fork=smoke and not launcher)
    return torch.load(os.path.join(work, name, 'ckpt.pt'), map_location='cpu', weights_only=True)


def tensors(saved):
    """All numbers of a checkpoint, weights and moments, in one order."""
    moments = [t for state in saved['optimizer']['state'].values() for t in state.values()]
    return [t.float() for t in (*saved['model'].values(), *moments) if torch.is_tensor(t)]


def difference(a, b):
    """The largest difference between two checkpoints."""
    return max((x - y).abs().max().item() for x, y in zip(tensors(a), tensors(b), strict=True))


def bench(*flags):
    """The numbers of dev/bench.py, and its tables on the console."""
    path = os.path.join(work, 'bench.json')
    flags = *flags, f'--device={DEVICE.type}', f'--json_file={path}'
    print(run_script('dev/bench.py', *flags, fork=smoke), flush=True)
    with open(path) as f:
        return json.load(f)


COMPILED = (False,) if smoke else (False, True)

# -----------------------------------------------------------------------------
# the steps: each returns rows (what, result, whether it is right, or None) and the numbers behind them


def losses():
    """20 losses of each preset, on a CPU in float32 and here in every dtype, compiled and not"""
    rows, raw = [], {}

    def twenty(**how):
        name = ', '.join(map(str, how.values()))
        more = dict(dropout=0.0, lr_schedule='constant', log_interval=1)
        train(name, '--overwrite', iterations=20, **more, **how)
        raw[name] = [loss for loss in read_log(os.path.join(work, name))['loss'] if loss is not None]
        return name, raw[name]
    for arch in ARCHS:
        _, want = twenty(arch=arch, dtype='float32', device='cpu', compile=False)
        for dtype, most in (('float32', 2e-3), ('bfloat16', 0.05)):
            for compiling in COMPILED:
                name, got = twenty(arch=arch, dtype=dtype, device=DEVICE.type, compile=compiling)
                apart = max(abs(a - b) for a, b in zip(want, got, strict=True))
                said = f'{apart:.2g}; {got[0]:.4f} to {got[-1]:.4f}'
                what = f'{name}: largest difference from the CPU, first to last loss'
                rows.append((what, said, apart < most))
    return rows, raw


def sampling():
    """greedy text with the cache, without it, and by the compiled step"""
    rows = []
    shape = {name: SHAPE[name] for name in ('n_layer', 'n_head', 'n_embd', 'block_size')}
    for arch in ARCHS:
        torch.manual_seed(1)
        net = GPT(GPTConfig(vocab_size=65, arch=arch, **shape)).to(DEVICE).eval()
        for p in net.parameters():
            if not p.count_nonzero():
                torch.nn.init.normal_(p, std=0.02)  # modern's zeros would make all logits equal
        idx = torch.arange(6, device=DEVICE).view(2, 3)
        n = 40 if smoke else 300  # beyond the end of the window
        want = net.generate(idx, n, temperature=0, use_cache=False)
        share = (want == net.generate(idx, n, temperature=0)).float().mean().item()
        rows.append((f'{arch}: the same tokens with the cache and without', f'{share:.1%}', share == 1))
        if not smoke:
            note = compile_model(net, lambda: net.generate(idx, 4, temperature=0, static=True), 'auto',
                                 mode='reduce-overhead', dynamic=False)
            share = (want == net.generate(idx, n, temperature=0, static=True)).float().mean().item()
            rows.append((f'{arch}: the same tokens compiled', f"{share:.1%} {note or ''}", share == 1))
            torch._dynamo.reset()
    return rows, {}


def deterministic():
    """--deterministic=True twice"""
    sums = []
    for name in 'ab':
        found = tensors(train(name, deterministic=True))
        sums.append(hashlib.sha256(b''.join(t.numpy().tobytes() for t in found)).hexdigest()[:16])
    return [('hashes of weights and moments of two runs', ', '.join(sums), sums[0] == sums[1])], {}


def resume():
    """a whole run against half of one and a resume, eager and deterministic"""
    return [resumed('eager'), resumed('deterministic=True', deterministic=True)], {}


def resume_compiled():
    """the same, compiled"""
    if not choose_compile('auto', DEVICE)[0]:
        raise NotHere('nothing is compiled on a CPU')
    return [resumed('compiled', compile=True)], {}


def resumed(words, **more):
    """A row of `resume`."""
    whole = train('whole', '--overwrite', **more)
    again = difference(whole, train('again', '--overwrite', **more))
    train('parts', '--overwrite', iterations=ITERS // 2, **more)
    apart = difference(whole, train('parts', '--init_from=resume', **more))
    # what two uninterrupted runs differ by is the GPU's own rounding, e.g. of sums in any order
    exact = smoke or 'deterministic' in more
    right = apart == 0 if exact else apart <= max(2 * again, 1e-6)
    return f'{words}: largest difference after it; of two whole runs', f'{apart:.2g}; {again:.2g}', right


def torchrun(n=1, **how):
    """one process under torchrun, compiled and not, against plain python"""
    plain, rows = train('plain', dropout=0.0), []
    launcher = ('-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={n}')
    for compiling in COMPILED:
        other = train('other', '--overwrite', launcher=launcher, dropout=0.0, compile=compiling, **how)
        apart = difference(plain, other)
        what = f'compile={compiling}: largest difference of weights and moments'
        rows.append((what, f'{apart:.2g}', apart < 1e-2))
    return rows, {}


def shard():
    """two processes that share the weights (--shard=0), against plain python"""
    if not smoke and torch.cuda.device_count() < 2:
        raise NotHere('one GPU alone')
    return torchrun(2, shard=0)


def no_sync():
    """between two log lines nobody waits for the device"""
    rows = []

    def check(n):
        if DEVICE.type == 'cuda':
            torch.cuda.set_sync_debug_mode('error' if 5 <= n < 25 else 'default')
        return n == 26
    for arch, optimizer, compiling in (
            ('gpt2', 'adamw', False), ('modern', 'muon', False), ('gpt2', 'adamw', not smoke)):
        how = dict(arch=arch, matrix_optimizer=optimizer, compile=compiling)
        flags = run_flags('no_sync', iterations=2000, log_interval=1000, overwrite=True, **how)
        try:
            after_each_update(check, 'train.py', *flags)
            said = 'none'
        except RuntimeError as e:
            where = traceback.extract_tb(e.__traceback__)[-1]
            said = f'{str(e).splitlines()[0][:100]} in {where.name}'
        if DEVICE.type == 'cuda':
            torch.cuda.set_sync_debug_mode('default')
        name = ', '.join(map(str, how.values()))
        rows.append((f'{name}: waits in 20 iterations', said, said == 'none'))
    return rows, {}


def growth():
    """memory over 1,000 tiny steps, after the first 200"""
    marks = []
    last = 400 if smoke else 1200

    def look(n):
        if n >= 200 and n % 100 == 0:  # the first ones are still filling the allocators
            with open('/proc/self/statm') as f:
                pages = int(f.read().split()[1])
            on_gpu = torch.cuda.memory_allocated() if DEVICE.type == 'cuda' else 0
            marks.append((pages * os.sysconf('SC_PAGE_SIZE'), on_gpu))
        return n == last
    tiny = dict(n_layer=1, n_embd=32, block_size=32, batch_size=2, gradient_accumulation_steps=1)
    after_each_update(look, 'train.py', *run_flags('growth', iterations=2000, log_interval=1000, **tiny))
    grown = [after - before for before, after in zip(marks[0], marks[-1])]
    said = f'{grown[0] / 1e6:.1f} MB; {grown[1] / 1e6:.3f} MB'
    right = grown[0] < 20e6 and grown[1] <= 0
    return [("growth of the process and of the GPU's tensors", said, right)], {'marks': marks}


def speed(size, arch, sweep):
    """training steps by dev/bench.py"""
    flags = [f'--sizes={size}', f'--batch_sizes={sweep}', '--rounds=3']
    if smoke:
        flags = ['--sizes=toy', '--n_layer=1', '--rounds=1', '--warm_up=1', '--turn=0.1', '--batch_sizes=2']
    if peer and arch == 'gpt2':
        flags.append(f'--peer={peer}')
    found = bench(*flags, f'--arch={arch}')
    rows = []
    for row in found['train']:
        said = 'out of memory'
        if row['seconds'] is not None:
            share, ratio = row['of_data_sheet'] or 0, row.get('ratio', 1)
            ms = 1000 * row['seconds_per_iteration']
            said = (f"{row['tokens_per_second']:,.0f} tokens/s, {ms:.1f} ms, "
                    f"{share:.1%} of the data sheet, {ratio:.2f} of the first one's time")
        what = f"{size}, {row['contestant']}, micro-batch {row['batch_size']} x {row['block_size']}"
        rows.append((what, said, None))
    return rows, found


def sample(size):
    """tokens per second of generate() by dev/bench.py"""
    flags = ['--sizes=baby', '--tokens=4', '--rounds=1'] if smoke else [f'--sizes={size}', '--rounds=3']
    if peer:
        flags.append(f'--peer={peer}')
    found = bench('--what=sample', *flags)
    rows = []
    for row in found['sample']:
        speed = row['batch'] / statistics.median(row['seconds_per_step'])
        said = f"{speed:,.0f} tokens/s, {row['ratio']:.1f} times the first"
        if row['share']:
            said += f", {row['share']:.0%} of the bandwidth"
        rows.append((f"{row['size']}, {row['batch']} at once, {row['contestant']}", said, None))
    return rows, found


def start():
    """seconds to the first step; what was compiled once is in a cache"""
    found = bench('--what=start', f'--rounds={1 if smoke else 4}', '--archs=gpt2')
    rows = []
    for until, seconds in found['start'].items():
        later = statistics.median(seconds[1:] or seconds)
        rows.append((until, f'{seconds[0]:.1f} s the first time, then {later:.1f} s', None))
    return rows, found


def save():
    """what a checkpoint of 124M costs the loop"""
    large = dict(V=50304, n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=8)
    large = {} if smoke else large
    train('saving', iterations=30, eval_interval=10, keep_checkpoints=1, log_interval=1, **large)
    log = read_log(os.path.join(work, 'saving'))
    took = log['save_seconds'][-1] / 3
    size = max(map(os.path.getsize, glob.glob(os.path.join(work, 'saving', 'ckpt_*.pt'))))
    iterations = 1000 * took / [ms for ms in log['ms'] if ms is not None][-1]
    return [(f'a checkpoint of {size / 1e9:.2f} GB', f'{took:.2f} s, {iterations:.0f} iterations', None)], {}


def race(which, seed):
    """dev/race.py with one seed; at 124M two minutes of each contestant"""
    if which == '124M' and not gutenberg:
        raise NotHere('no --gutenberg=FOLDER')
    folder = os.path.join(out, f'race_{which}_{seed}')
    flags = [f'--text={text}'] if text else []
    if which == '124M':
        flags = ['--shakespeare=False', f'--gutenberg={gutenberg}', '--minutes=2']
    if smoke:
        flags.append('--smoke')
    flags += [f'--first_seed={seed}', '--seeds=1', f'--out={folder}']
    run_script('dev/race.py', 'gpu', *flags, fork=smoke)
    with open(os.path.join(folder, 'race_gpu.json')) as f:
        found = json.load(f)
    rows = []
    for curves in found.values():
        for name, (curve,) in curves.items():
            said = f'{curve[-1][1]:.0f}, {curve[-1][2]:.4f}, {min(point[2] for point in curve):.4f}'
            rows.append((f'{name}: seconds, validation loss in the end, the best one', said, None))
    return rows, found


STEPS = {f.__name__: f for f in (
    losses, sampling, deterministic, resume, resume_compiled, torchrun, shard, no_sync, growth)}
# to compile two large networks takes minutes: one micro-batch to a step
SWEEPS = {'124M': ['8,16,32,64'], '350M': ['8,16,32'], '774M': ['8', '16'], '1.5B': ['4', '8', '16']}
for size, sweeps in SWEEPS.items():
    for sweep in sweeps:
        for arch in ('gpt2', 'modern'):
            name = f"train_{size}_{arch}_{sweep.replace(',', '_')}"
            STEPS[name] = functools.partial(speed, size, arch, sweep)
for size in ('baby', 'baby8', 'modern', '124M', '1.5B'):
    STEPS[f'sample_{size}'] = functools.partial(sample, size)
STEPS.update(start=start, save=save)
for which in ('shakespeare', '124M'):
    for seed in (1, 2, 3):
        STEPS[f'race_{which}_{seed}'] = functools.partial(race, which, seed)
# those that need no further process
SMOKE = 'sampling,deterministic,resume,no_sync,growth,sample_baby,save,race_shakespeare_1'

# -----------------------------------------------------------------------------
# running them, and the table


def path(name, end='json'):
    return os.path.join(out, f'{name}.{end}')


def run(name):
    """A step, in a process of its own."""
    global work
    os.setsid()  # so that all it starts can be ended with it
    if smoke:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as work:
        t0 = time.perf_counter()
        try:
            rows, raw = STEPS[name]()
        except BaseException as e:
            why = f"failed: {type(e).__name__}: {(str(e).strip().splitlines() or [''])[0][:300]}"
            if isinstance(e, NotHere):
                why = f'not measured: {e}'
            else:
                traceback.print_exc()
            with open(path(name, 'failed'), 'w') as f:
                f.write(why)
            return
    result = {'machine': machine(), 'seconds': time.perf_counter() - t0, 'rows': rows, 'numbers': raw}
    write_json(path(name), result)
    if os.path.exists(path(name, 'failed')):
        os.remove(path(name, 'failed'))


def describe(name):
    return getattr(STEPS[name], 'func', STEPS[name]).__doc__


def write_table():
    """Everything that there is, and 'not measured' for the rest."""
    flags = '--out=FOLDER --peer=PATH_TO_NANOGPT --text=input.txt --gutenberg=FOLDER'
    lines = ['# On a GPU', '', f'`bash runs/gpu_records.sh {flags}`, again and again, then `--table`;',
             'the steps are in [gpu_records.py](../gpu_records.py).', '']
    machines, rows = {}, []
    for name in STEPS:
        found = [('', 'not measured', None)]
        if os.path.exists(path(name)):
            with open(path(name)) as f:
                result = json.load(f)
            machines.setdefault(result['machine'], []).append(name)
            found = result['rows']
        elif os.path.exists(path(name, 'failed')):
            with open(path(name, 'failed')) as f:
                why = f.read()
            found = [('', why, False if why.startswith('failed') else None)]
        first, words = f'**{name}**: {describe(name)}', {None: '', True: 'yes', False: '**NO**'}
        for what, said, right in found:
            rows.append(f"| {first} | {what} | {said.replace('|', '/')} | {words[right]} |")
            first = ''
    lines += [f"{made}: {', '.join(names)}." for made, names in machines.items()]
    if not machines:
        lines.append('**Nothing of it was measured yet**: no GPU was at hand.')
    if smoke:
        lines += ['', '**A smoke test with tiny networks on a CPU: the numbers mean nothing.**']
    lines += ['', '| step | what | result | as it should be |', '|---|---|---|---|', *rows]
    os.makedirs(os.path.dirname(os.path.abspath(record)), exist_ok=True)
    with open(record, 'w') as f:
        f.write('\n'.join(lines) + '\n')
    print('\n'.join(lines))


def run_in_time(names):
    """Run these steps until the minutes are over."""
    until, fork = time.monotonic() + 60 * minutes, multiprocessing.get_context('fork')
    for name in names:
        left = until - time.monotonic()
        if left <= 0:
            print(f'time is up before {name}; the same command continues with it')
            break
        print(f'{name}: {describe(name)}', flush=True)
        t0, process = time.monotonic(), fork.Process(target=run, args=(name,))
        process.start()
        process.join(left)
        if process.is_alive():
            with contextlib.suppress(ProcessLookupError):  # it may not have a group yet
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
            print(f'{name}: time was up; the same command starts it anew')
            break
        if process.exitcode and not os.path.exists(path(name, 'failed')):  # not even Python could tell why
            with open(path(name, 'failed'), 'w') as f:
                f.write(f'failed: it ended with status {process.exitcode}')
        said = f'done in {time.monotonic() - t0:.0f} s'
        if os.path.exists(path(name, 'failed')):
            with open(path(name, 'failed')) as f:
                said = f.read()
        print(f'{name}: {said}', flush=True)


if __name__ == '__main__':
    problems = out_of_range(knobs, above_zero='minutes') + check_peer(peer)
    asked = only.split(',') if only else []
    problems += [f'no such step ({name}). see --list' for name in asked if name not in STEPS]
    if problems:
        fail(*problems)
    if list:
        for name in STEPS:
            print(f"{'done  ' if os.path.exists(path(name)) else '      '} {name}: {describe(name)}")
        sys.exit()
    os.makedirs(out, exist_ok=True)
    if only:
        run_in_time(asked)
    elif not table:
        names = SMOKE.split(',') if smoke else STEPS
        run_in_time([name for name in names if not os.path.exists(path(name))])
    if table or smoke:
        write_table()
