"""
What a GPU has to show, in short steps: that the numbers are right, that nobody waits, and how fast it is.

    $ bash runs/gpu_records.sh --out=FOLDER --peer=PATH_TO_NANOGPT      # again and again, until every step has its result
    $ bash runs/gpu_records.sh --out=FOLDER --table                     # dev/records/gpu.md from what there is

Each step takes less than nine minutes in a process of its own and leaves FOLDER/<step>.json. One whose file is there is not made again; one that
failed, or did not end in time, is. So a machine that one has for ten minutes at a time is enough.
"""

import os
import sys

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
from configurator import configure, fail, knobs_of, out_of_range

# -----------------------------------------------------------------------------
out = os.path.join(HERE, 'out-gpu')  # where the results go
peer: str = None  # a checkout of nanoGPT, to compare with
text: str = None  # tinyshakespeare's file, for the race; None: prepare.py downloads it
gutenberg: str = None  # the folder with gutenberg_train.jsonl.gz; None: without the race at 124M
only: str = None  # steps, as 'losses,guard'; made again even if their results are there
list = False  # True: name the steps and whether they are done
minutes = 9.0  # stop the step that is running after so many, and begin no other
table = False  # True: write the table
record = os.path.join(HERE, 'dev', 'records', 'gpu.md')  # its file
smoke = False  # True: tiny networks on the CPU, to see that all of it works
# -----------------------------------------------------------------------------
knobs, given = configure(globals())

import contextlib
import csv
import functools
import glob
import hashlib
import json
import multiprocessing
import signal
import statistics
import subprocess
import tempfile
import time
import traceback

import torch

import checkpoint
from dataset import write_whole
from measure import process_memory
from measure_step import make_model, made_up, ours, settings
from parallel import choose_dtype, choose_compile, compile_model
from races import machine

if smoke:
    import torch._dynamo  # the optimizer does, for a second: once, and not in each process that is forked
TRAIN_PY = os.path.join(HERE, 'train.py')
DEVICE = torch.device('cpu' if smoke else 'cuda')  # not asked for before a step runs: a process that has talked to a GPU cannot be forked
DEFAULTS = knobs_of(TRAIN_PY)[0]
SHAPE = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, batch_size=4) if smoke else dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=16)
RUN = dict(SHAPE, learning_rate=1e-3, warmup_iters=5, gradient_accumulation_steps=2, matmul_precision='highest')
ITERS = 6 if smoke else 40
ARCHS = ('gpt2', 'llama', 'modern')
work = None  # a temporary folder, of each step's own


class NotHere(Exception):
    """Why a step makes no sense here."""


def contestant(arch='gpt2', dtype='float32', device=DEVICE, compiling=False, **more):
    k = settings({**DEFAULTS, **RUN, 'arch': arch, 'compile': compiling, **more}, device, dtype, compiling, 65)
    return ours(k, made_up(work, 65, 2**16))


def twenty_losses(*args, **more):
    it = contestant(*args, **more)
    losses = torch.stack([it.step() for _ in range(20)]).tolist()
    it.close()
    torch._dynamo.reset()
    return losses


def script(name, *flags, launcher=()):
    """The output of a script. A smoke test forks, which saves the seconds of importing torch."""
    command = [sys.executable, *launcher, os.path.join(HERE, name), *map(str, flags)]
    if smoke and not launcher:
        import runpy
        path = os.path.join(work, 'said')
        if (pid := os.fork()) == 0:
            with open(path, 'w') as f:
                os.dup2(f.fileno(), 1)
            sys.argv, status = command[1:], 1
            try:
                runpy.run_path(command[1], run_name='__main__')
                status = 0
            except SystemExit as e:
                status = e.code or 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status == 0, f"{' '.join(command)} ended with status {status}"
        with open(path) as f:
            return f.read()
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE)
    assert done.returncode == 0, f"{' '.join(command)} ended with status {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}"
    return done.stdout


def train(name, *flags, V=65, **more):
    """Run train.py into work/<name>; its newest checkpoint."""
    made_up(work, V, 2**16)
    shape = dict(RUN, max_iters=ITERS, lr_decay_iters=ITERS, eval_interval=0, eval_iters=1, write_report=False, dropout=0.1, compile=False, dtype='auto', device=DEVICE) | more
    launcher = shape.pop('launcher', ())
    script('train.py', *(f'--{key}={value}' for key, value in shape.items()), f'--data_dir={work}', f'--dataset={V}', f'--out_dir={work}/{name}', *flags, launcher=launcher)
    return checkpoint.read(os.path.join(work, name, 'ckpt.pt'))


def tensors(saved):
    """All numbers of a checkpoint, weights and moments, in one order."""
    moments = [t for state in saved['optimizer']['state'].values() for t in state.values()]
    return [t.float().cpu() for t in (*saved['model'].values(), *moments) if torch.is_tensor(t)]


def difference(a, b):
    """The largest one between two checkpoints."""
    return max((x - y).abs().max().item() for x, y in zip(tensors(a), tensors(b), strict=True))


def bench(*flags):
    """The numbers of bench.py."""
    path = os.path.join(work, 'bench.json')
    print(script('bench.py', *flags, f'--device={DEVICE.type}', f'--json_file={path}'), flush=True)
    with open(path) as f:
        return json.load(f)


# -----------------------------------------------------------------------------
# the steps: each returns rows (what, result, whether it is as it should be or None) and, for the file, the numbers behind them


def losses():
    """20 losses of each preset, on a CPU in float32 and here in every dtype, compiled and not"""
    rows, raw = [], {}
    kinds = ['float32', 'bfloat16'] + ['float16'] * (not smoke)
    for arch in ARCHS:
        want = raw[f'{arch}, CPU'] = twenty_losses(arch, device=torch.device('cpu'))
        for dtype in kinds:
            for compiling in (False,) if smoke or dtype == 'float16' else (False, True):
                got = raw[f'{arch}, {dtype}, {compiling}'] = twenty_losses(arch, dtype, compiling=compiling)
                apart = max(abs(a - b) for a, b in zip(want, got))
                # float16 begins with updates that its scaler skips, so it is behind
                right = got[-1] < got[0] if dtype == 'float16' else apart < {'float32': 2e-3, 'bfloat16': 0.05}[dtype]
                what = f"{arch}, {dtype}{', compiled' * compiling}: largest difference from the CPU, first to last loss"
                rows.append((what, f"{apart:.2g}; {got[0]:.4f} to {got[-1]:.4f}", right))
    return rows, raw


def guard():
    """an update whose gradient is not a number is skipped, and nobody waits for the device"""
    rows = []
    for arch, optimizer in (('gpt2', 'adamw'), ('modern', 'muon')):
        it = contestant(arch, matrix_optimizer=optimizer)
        for _ in range(3):
            it.step()
        before = [p.detach().clone() for p in it.model.parameters()]
        x = torch.zeros(2, 16, dtype=torch.long, device=DEVICE)
        it.model(x, x)[1].backward()
        next(it.model.parameters()).grad.fill_(float('nan'))
        nan = torch.tensor(float('nan'), device=DEVICE)
        with no_waiting():
            norm = torch.nn.utils.clip_grad_norm_(it.model.parameters(), 1.0)
            it.guard.step(3, nan, norm)
        same = all(torch.equal(a, b) for a, b in zip(before, it.model.parameters()))
        skipped = it.guard.report()[0]
        it.close()
        rows.append((f'{optimizer}: updates skipped; the weights are as before', f"{skipped}; {same}", skipped == 1 and same))
    return rows, {}


class no_waiting:
    """An operation that makes the host wait for the GPU is an error here."""

    def __enter__(self):
        if DEVICE.type == 'cuda':
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode('error')

    def __exit__(self, *error):
        if DEVICE.type == 'cuda':
            torch.cuda.set_sync_debug_mode('default')


def sampling():
    """greedy text with the cache, without it, in autocast, and by the compiled step"""
    rows = []
    for arch in ARCHS:
        k = settings({**DEFAULTS, **RUN, 'arch': arch}, DEVICE, 'float32', False, 65)
        net = make_model(k).eval()
        for p in net.parameters():
            if not p.count_nonzero():
                torch.nn.init.normal_(p, std=0.02)  # modern's zeros would make all logits equal
        n, idx = 40 if smoke else 300, torch.arange(6, device=DEVICE).view(2, 3)  # beyond the edge of the window

        def agree(**how):
            want, got = net.generate(idx, n, temperature=0, use_cache=False), net.generate(idx, n, temperature=0, **how)
            return (want == got).float().mean().item()
        rows.append((f'{arch}, float32: tokens that are the same with the cache and without', f'{(share := agree()):.1%}', share == 1))
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):  # near ties may be rounded either way, and a text that once differs goes on to differ
            rows.append((f'{arch}, in bfloat16 autocast: the same', f'{agree():.1%}', None))
        if not smoke:
            note = compile_model(net, lambda: net.generate(idx, 4, temperature=0, static=True), 'auto', mode='reduce-overhead', dynamic=False)
            share = agree(static=True)
            rows.append((f'{arch}, float32: the compiled step against the one without a cache', f'{share:.1%}' + (f' ({note})' if note else ''), share == 1 and not note))
            torch._dynamo.reset()
    return rows, {}


def deterministic():
    """--deterministic=True twice"""
    sums = [hashlib.sha256(b''.join(t.numpy().tobytes() for t in tensors(train(name, deterministic=True)))).hexdigest()[:16] for name in 'ab']
    return [('hashes of weights and moments of two runs', ', '.join(sums), sums[0] == sums[1])], {}


def resume(**how):
    """iterations in one go against half of them and a resume, eager and deterministic"""
    rows = []
    for words, more in {'eager': {}, 'deterministic=True': dict(deterministic=True)}.items() if not how else {'compiled': how}.items():
        whole = train('whole', '--overwrite', **more)
        again = difference(whole, train('again', '--overwrite', **more))
        train('parts', '--overwrite', **more, max_iters=ITERS // 2)
        apart = difference(whole, train('parts', '--init_from=resume', **more))
        # what two uninterrupted runs differ by is the GPU's own rounding, e.g. of sums in any order
        right = apart == 0 if 'deterministic' in words or smoke else apart <= max(2 * again, 1e-6)
        rows.append((f'{words}: largest difference after a resume; of two whole runs', f'{apart:.2g}; {again:.2g}', right))
    return rows, {}


def resume_compiled():
    """the same, compiled"""
    if not choose_compile('auto', DEVICE)[0]:
        raise NotHere('nothing is compiled on a CPU')
    return resume(compile=True)


def torchrun():
    """one process under torchrun, with DDP and compiled, against plain python"""
    launcher = ('-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=1')
    plain = train('plain')
    rows = []
    for words, more in {'DDP': {}, **({} if smoke else {'DDP, compiled': dict(compile=True)})}.items():
        apart = difference(plain, train('ddp', '--overwrite', launcher=launcher, **more))
        rows.append((f'{words}: largest difference of weights and moments', f'{apart:.2g}', apart < 1e-2))
    return rows, {}


def shard():
    """--shard=full with one process against plain python"""
    if 'shard' not in DEFAULTS:
        raise NotHere('train.py has no such knob')
    launcher = ('-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=1')
    apart = difference(train('plain'), train('sharded', launcher=launcher, shard='full'))
    return [('largest difference of weights and moments', f'{apart:.2g}', apart < 1e-2)], {}


def no_sync():
    """between two log lines nobody waits for the device"""
    rows = []
    for arch, more in (('gpt2', {}), ('modern', dict(matrix_optimizer='muon')), ('gpt2', dict(compiling=not smoke))):
        it = contestant(arch, choose_dtype('auto', DEVICE)[0], **more)
        for _ in range(5):
            it.step()
        try:
            with no_waiting():
                for _ in range(20):
                    it.step()
            said = 'none'
        except RuntimeError as e:
            said = str(e).splitlines()[0][:100] + ' in ' + traceback.extract_tb(e.__traceback__)[-1].name
        rows.append((f"{arch}{', muon' * ('matrix_optimizer' in more)}{', compiled' * more.get('compiling', False)}: waits in 20 iterations", said, said == 'none'))
        it.close()
    return rows, {}


def growth():
    """memory over 1,000 tiny steps, after the first 200"""
    it = contestant(**dict(n_layer=2, n_head=2, n_embd=64, block_size=64, batch_size=4))
    marks = []
    for i in range(300 if smoke else 1200):
        it.step()
        if i >= 199 and (i + 1) % 100 == 0:  # the first ones are still filling the allocators
            marks.append((process_memory() or 0, torch.cuda.memory_allocated() if DEVICE.type == 'cuda' else 0))
    it.close()
    grown = [last - first for first, last in zip(marks[0], marks[-1])]
    return [("growth of the process and of the GPU's tensors", f"{grown[0] / 1e6:.1f} MB; {grown[1] / 1e6:.3f} MB", grown[0] < 20e6 and grown[1] <= 0)], {'marks': marks}


def speed(size, arch, sweep):
    """steps of training by bench.py"""
    tiny = ['--sizes=toy', '--n_layer=1', '--iters=1', '--rounds=1', '--warm_up=1', '--batch_sizes=2,4', '--dtype=float32']
    real = [f'--sizes={size}', f'--batch_sizes={sweep}', '--iters=10', '--rounds=3']
    found = bench(*(tiny if smoke else real), f'--arch={arch}', *([f'--peer={peer}'] if peer and arch == 'gpt2' else []))
    rows, best = [], {}
    for row in found['train']['rows']:
        what = f"{size}, {row['contestant']}, micro-batch {row['batch_size']} x {row['block_size']}"
        if row['out_of_memory']:
            rows.append((what, 'out of memory', None))
            continue
        rows.append((what, speed_of(row), None))
        best[row['contestant']] = max(best.get(row['contestant'], row), row, key=lambda r: r['tokens_per_second'])
    speeds = [row['tokens_per_second'] for row in best.values()]
    if ',' in sweep:
        said = ', '.join(f"{who} {row['tokens_per_second']:,.0f} tokens/s at {row['batch_size']}" for who, row in best.items())
        rows.append((f'{size}, each at its best micro-batch', said + (f', {speeds[1] / speeds[0]:.2f} times' if len(speeds) == 2 else ''), None))
    return rows, found


def speed_of(row):
    percent = lambda share, of: '' if share is None else f', {share:.1%} of the {of}'
    return (f"{row['tokens_per_second']:,.0f} tokens/s, {1000 * statistics.median(row['seconds_per_step']):.1f} ms" + percent(row['of_data_sheet'], 'data sheet') +
            percent(row['of_matrix_peak'], 'matrix peak') +
            (f", {row['peak_bytes'] / 1e9:.1f} GB" if row['peak_bytes'] else '') + (f", {statistics.median(row['ratio']):.2f} times the first" if row['ratio'] else ''))


def sample(size):
    """tokens per second of generate() by bench.py"""
    tiny = ['--sizes=baby', '--tokens=4', '--rounds=1', '--dtype=float32']
    found = bench('--what=sample', *(tiny if smoke else [f'--sizes={size}', '--rounds=3']), *([f'--peer={peer}'] if peer else []))
    rows = []
    for row in found['sample']:
        if who := row.get('contestant'):
            step = statistics.median(row['seconds_per_step'])
            share = '' if who in ('nanoGPT', 'ours, no cache') else f", {row['bytes_per_step'] / row['bandwidth'] / step:.0%} of the bandwidth"
            rows.append((f"{row['size']}, {row['batch']} at once, {who}", f"{row['batch'] / step:,.0f} tokens/s, {row['ratio']:.1f} times the first{share}", row['same_text']))
    return rows, found


def start():
    """seconds to the first step; what was compiled once is in a cache"""
    found = [bench('--what=start', '--rounds=1', *['--compile=False'] * smoke) for _ in range(1 if smoke else 4)]
    again = [statistics.median(row['seconds'][0] for row in rows) for rows in zip(*(f['start'] for f in found[1:] or found))]
    return [(row['until'], f"{row['seconds'][0]:.1f} s the first time, then {seconds:.1f} s", None) for row, seconds in zip(found[0]['start'], again)], found


def save():
    """what a checkpoint of 124M costs the loop"""
    large = {} if smoke else dict(V=50304, n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=8)
    train('saving', max_iters=30, eval_interval=10, keep_checkpoints=1, dropout=0.0, **large)
    with open(os.path.join(work, 'saving', 'log.csv'), newline='') as f:
        log = [*csv.DictReader(f)]
    took = float(log[-1]['save_seconds']) / 3
    size = max(map(os.path.getsize, glob.glob(os.path.join(work, 'saving', 'ckpt_*.pt'))))
    return [(f'a checkpoint of {size / 1e9:.2f} GB', f"{took:.2f} s, {1000 * took / float(log[-2]['ms']):.0f} iterations", None)], {}


def race(which, seed):
    """dev/race_gpu.py with one seed; at 124M two minutes of each contestant"""
    if which == '124M' and not gutenberg:
        raise NotHere('no --gutenberg=FOLDER')
    folder = os.path.join(out, f'race_{which}_{seed}')
    flags = ['--shakespeare=False', f'--gutenberg={gutenberg}', '--minutes=2'] if which == '124M' else [f'--text={text}'] * bool(text)
    script('dev/race_gpu.py', f'--first_seed={seed}', '--seeds=1', f'--out={folder}', *flags, *['--smoke'] * smoke)
    with open(os.path.join(folder, 'race_gpu.json')) as f:
        found = json.load(f)
    return [(f'{name}: seconds, validation loss in the end, the best one', f'{curve[-1][1]:.0f}, {curve[-1][2]:.4f}, {min(point[2] for point in curve):.4f}', None)
            for curves in found.values() for name, (curve,) in curves.items()], found


STEPS = {f.__name__: f for f in (losses, guard, sampling, deterministic, resume, resume_compiled, torchrun, shard, no_sync, growth)}
# to compile two large networks takes minutes: one micro-batch to a step
for size, sweeps in {'124M': ['8,16,32,64'], '350M': ['8,16,32'], '774M': ['8', '16'], '1.5B': ['4', '8', '16']}.items():
    for sweep in sweeps:
        STEPS.update({f'train_{size}_{arch}' + f'_{sweep}' * (len(sweeps) > 1): functools.partial(speed, size, arch, sweep) for arch in ('gpt2', 'modern')})
STEPS.update({f'sample_{size}': functools.partial(sample, size) for size in ('baby', 'baby8', 'modern', '124M', '1.5B')})
STEPS.update(start=start, save=save, **{f'race_{which}_{seed}': functools.partial(race, which, seed) for which in ('shakespeare', '124M') for seed in (1, 2, 3)})
if smoke:  # the others are the same with other numbers
    STEPS = {name: step for name, step in STEPS.items() if step in (losses, guard, sampling, deterministic, resume, torchrun, shard, no_sync, growth, start, save) or
             name in ('train_124M_gpt2', 'train_124M_modern', 'sample_baby', 'race_shakespeare_1', 'race_124M_1')}

# -----------------------------------------------------------------------------


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
            if not isinstance(e, NotHere):
                traceback.print_exc()
            why = f'not measured: {e}' if isinstance(e, NotHere) else f"failed: {type(e).__name__}: {(str(e).strip().splitlines() or [''])[0][:300]}"
            with open(path(name, 'failed'), 'w') as f:
                f.write(why)
            return
        write_whole(path(name), json.dumps({'machine': machine(), 'seconds': time.perf_counter() - t0, 'rows': rows, 'numbers': raw}, indent=1).encode())
        if os.path.exists(path(name, 'failed')):
            os.remove(path(name, 'failed'))


def describe(name):
    return getattr(STEPS[name], 'func', STEPS[name]).__doc__


def write_table():
    """Everything that there is, and 'not measured' for the rest."""
    lines = ['# On a GPU', '', '`bash runs/gpu_records.sh --out=FOLDER --peer=PATH_TO_NANOGPT --text=input.txt --gutenberg=FOLDER`, again and again, then `--table`;',
             'the steps are in [gpu_records.py](../gpu_records.py).', '']
    machines, rows = {}, []
    for name in STEPS:
        found = []
        if os.path.exists(path(name)):
            with open(path(name)) as f:
                result = json.load(f)
            machines.setdefault(result['machine'], []).append(name)
            found = [(what, said, {None: '', True: 'yes', False: '**NO**'}[right]) for what, said, right in result['rows']]
        elif os.path.exists(path(name, 'failed')):
            with open(path(name, 'failed')) as f:
                found = [('', why := f.read(), '**NO**' if why.startswith('failed') else '')]
        for i, (what, said, right) in enumerate(found or [('', 'not measured', '')]):
            rows.append(f"| {f'**{name}**: {describe(name)}' if i == 0 else ''} | {what} | {said.replace('|', '/')} | {right} |")
    lines += [f"{made}: {', '.join(names)}." for made, names in machines.items()] or ['**Nothing of it was measured yet**: no GPU was at hand.']
    if smoke:
        lines += ['', '**A smoke test with tiny networks on a CPU: the numbers mean nothing.**']
    lines += ['', '| step | what | result | as it should be |', '|---|---|---|---|', *rows]
    os.makedirs(os.path.dirname(os.path.abspath(record)), exist_ok=True)
    with open(record, 'w') as f:
        f.write('\n'.join(lines) + '\n')
    print('\n'.join(lines))


def main():
    problems = out_of_range(knobs, above_zero='minutes') + [f"no such step ({name}). see --list" for name in (only or '').split(',') if only and name not in STEPS]
    if peer is not None and not os.path.isfile(os.path.join(peer, 'model.py')):
        problems.append(f"no model.py in the peer's folder ({peer}). name a checkout of nanoGPT with --peer=PATH")
    if problems:
        fail(*problems)
    if list:
        print('\n'.join(f"{'done  ' if os.path.exists(path(name)) else '      '} {name}: {describe(name)}" for name in STEPS))
        return
    os.makedirs(out, exist_ok=True)
    until, fork = time.monotonic() + 60 * minutes, multiprocessing.get_context('fork')
    for name in (only.split(',') if only else [name for name in STEPS if not os.path.exists(path(name))] if not table else []):
        if (left := until - time.monotonic()) <= 0:
            print(f'time is up before {name}; the same command goes on with it')
            break
        print(f'{name}: {describe(name)}', flush=True)
        t0, process = time.monotonic(), fork.Process(target=run, args=(name,))
        process.start()
        process.join(left)
        if process.is_alive():
            with contextlib.suppress(ProcessLookupError):  # it may not have come so far as to have a group
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
            print(f'{name}: time was up; the same command begins it anew')
            break
        if process.exitcode and not os.path.exists(path(name, 'failed')):  # not even Python could say why
            with open(path(name, 'failed'), 'w') as f:
                f.write(f'failed: it ended with status {process.exitcode}')
        outcome = 'done'
        if os.path.exists(path(name, 'failed')):
            with open(path(name, 'failed')) as f:
                outcome = f.read()
        print(f"{name}: {outcome}, {time.monotonic() - t0:.0f} s", flush=True)
    if table or smoke:
        write_table()


main()
