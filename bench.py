"""
How fast it is on this machine, beside nanoGPT: a table, and the same as JSON.

    $ python bench.py --peer=PATH_TO_NANOGPT                               # a step of training, two small networks
    $ python bench.py config/train_gpt2.py --batch_size=8                  # of that configuration
    $ python bench.py --sizes=124M --batch_sizes=8,16,32 --profile=traces  # on a GPU: the best micro-batch, and where the time goes
    $ python bench.py --what=sample --sizes=baby --rounds=9                # writing text: dev/measure_sample.py

The contestants start from the same weights, get the same batches and take turns in one process, round after round, so that a slow
minute of the machine hits them all; what is told is the median and the range, and "times the first" is taken round by round.
"""

from configurator import configure, fail, out_of_range

# -----------------------------------------------------------------------------
what = 'train'  # 'train': steps of training; 'sample': writing text; 'data': making batches; 'prepare': making ids; 'start': until the first step; 'all'
peer: str = None  # a checkout of nanoGPT to compare with. None: only our own
sizes: str = None  # of 'train' and 'sample': names from their tables SIZES. None: 'toy,baby', or what the config file says; 'baby,baby8' for 'sample'
archs = 'gpt2,modern'  # of 'train'; --arch=llama, or a config file's, is that one alone
batch_sizes: str = None  # micro-batches to try, as '8,16,32'; too large a one is a row that says so. None: the size's own
iters = 10  # steps that are timed, in each round
warm_up = 5  # steps before
rounds = 5
loss_steps = 0  # train all contestants so many steps before they are timed, and tell the mean loss of the last 20
vocab_size: int = None  # of the made-up tokens that stand in where no dataset is named or it is not there. None: the size's own
tokens: int = None  # of 'sample': how many to write. None: as the size says
text: str = None  # of 'prepare': a .jsonl.gz of documents
profile: str | bool = False  # a folder for traces of our steps, to be opened at https://ui.perfetto.dev; True: out-traces
json_file: str = None  # where the numbers go. None: nowhere
# -----------------------------------------------------------------------------
knobs, given = configure(globals(), like='train.py')

import collections
import gc
import json
import os
import statistics
import sys
import tempfile
import time

import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'dev'))
import measure_prepare
import measure_sample
import measure_start
from dataset import DATA_DIR, Dataset, bin_files
from measure import grows_by, matmul_peak, median_and_range, out_of_memory, seconds, synchronize, write_trace
from measure_step import made_up, nanogpt, ours, settings
from model import GPT, GPTConfig, data_sheet_peak
from parallel import Processes, choose_compile, choose_dtype
from races import machine

SMALL = dict(vocab_size=65, learning_rate=1e-3, warmup_iters=20)
LARGE = dict(vocab_size=50304, block_size=1024, batch_size=8, warmup_iters=20)
SIZES = {  # of 'train': what differs from the defaults of train.py
    'toy': dict(n_layer=4, n_head=4, n_embd=128, batch_size=12, block_size=64, **SMALL),  # nanoGPT's README line for a CPU
    'baby': dict(n_layer=6, n_head=6, n_embd=384, batch_size=16, block_size=256, **SMALL),  # its network for Shakespeare
    '124M': dict(LARGE, n_layer=12, n_head=12, n_embd=768, batch_size=1),  # on a CPU one sequence takes seconds
    '350M': dict(LARGE, n_layer=24, n_head=16, n_embd=1024),
    '774M': dict(LARGE, n_layer=36, n_head=20, n_embd=1280),
    '1.5B': dict(LARGE, n_layer=48, n_head=25, n_embd=1600),
    'knobs': {},  # those given, and train.py's defaults
}
WHATS = 'train start sample data prepare'
PARTS = ('data', 'forward', 'backward', 'optimizer')

problems = out_of_range(
    knobs, above_zero='tokens rounds iters warm_up vocab_size batch_size block_size gradient_accumulation_steps total_batch_size n_layer n_head n_embd',
    from_zero='loss_steps seed learning_rate grad_clip weight_decay warmup_iters', below_one='dropout', words=dict(what=WHATS + ' all', matrix_optimizer='adamw muon'))
if what != 'all':
    tables = {'train': SIZES, 'sample': measure_sample.SIZES}
    problems += [f"no such size ({name}). use {', '.join(tables[what])}" for name in (sizes or '').split(',') if what in tables and sizes and name not in tables[what]]
problems += [f"no such micro-batch ({n}). use numbers above 0, as in --batch_sizes=8,16" for n in (batch_sizes or '1').split(',') if not (n.isdecimal() and int(n))]
problems += [p for arch in archs.split(',') for p in GPTConfig(arch=arch).problems() if 'no such arch' in p]
if peer is not None and not os.path.isfile(os.path.join(peer, 'model.py')):
    problems.append(f"no model.py in the peer's folder ({peer}). name a checkout of nanoGPT with --peer=PATH")
if what == 'prepare' and not (text and os.path.isfile(text)):
    problems.append(f"what=prepare wants a .jsonl.gz of documents ({text}). name it with --text=PATH")
if problems:
    fail(*problems)
procs = Processes(knobs['device'])
if procs.many:
    fail("bench.py is one process (RANK is set). start it with plain python")
device, gpu = procs.device, procs.device.type == 'cuda'
dtype, _ = choose_dtype(knobs['dtype'], device)
compiling, why_compile = choose_compile(knobs['compile'], device)

# -----------------------------------------------------------------------------
# the race


def settings_of(name, arch, vocab_size, batch_size=None):
    """The knobs of a contestant: train.py's defaults with one micro-batch to a step, the size's, and those given, each over the ones before."""
    k = {**knobs, 'gradient_accumulation_steps': 1, **SIZES[name], **given, 'arch': arch}
    k['batch_size'] = batch_size or k['batch_size']
    _, problem = procs.divide(k['gradient_accumulation_steps'], k['total_batch_size'], k['batch_size'], k['block_size'])
    if problem:
        fail(problem)
    return settings(k, device, dtype, compiling, vocab_size)


def find_data(name, folder):
    """(a Dataset, its vocabulary, words for it): the one that is named, or tokens made up in `folder`."""
    wanted = 'dataset' in given or name == 'knobs'
    if wanted and bin_files(os.path.join(knobs['data_dir'] or DATA_DIR, knobs['dataset']), 'train'):
        data = Dataset(knobs['dataset'], knobs['data_dir'])
        return data, data.vocab_size, f"{knobs['dataset']}, {data.train.n:,} tokens"
    data = made_up(folder, knobs['vocab_size'] or SIZES[name].get('vocab_size', 50304))
    return data, data.vocab_size, f"{data.train.n:,} made-up tokens of {data.vocab_size:,}" + (f", as there is no dataset {knobs['dataset']}" if wanted else '')


def parts_of(step, n):
    """Seconds of each part of a step, medians of n. Here the clock is read when the device has done a part; in the rounds nobody waits for it."""
    spent, since = [collections.Counter() for _ in range(n)], None

    def mark(part):
        nonlocal since
        synchronize(device)
        now = time.perf_counter()
        counter[part], since = counter[part] + now - since, now
    for counter in spent:
        synchronize(device)
        since = time.perf_counter()
        step(mark)
    return {part: statistics.median(counter[part] for counter in spent) for part in PARTS}


def state_bytes(contestant):
    """Weights and moments."""
    moments = (t for state in contestant.optimizer.state.values() for t in state.values() if torch.is_tensor(t))
    return sum(t.nbytes for t in (*contestant.model.parameters(), *moments))


def train_in_turns(contestants, data):
    """{name: row} of contestants {name: (maker, knobs)}: losses, seconds per step of each round, seconds of the parts, memory."""
    rows, there = {name: dict(dtype=None, losses=[], seconds_per_step=[], parts={}, peak_bytes=None, out_of_memory=False) for name in contestants}, {}
    for name, (make, k) in contestants.items():
        try:
            there[name] = contestant = make(k, data)
            losses = torch.stack([contestant.step() for _ in range(max(warm_up, loss_steps))]).tolist()
            rows[name].update(dtype=contestant.dtype, losses=losses[:loss_steps])
        except Exception as e:
            if not out_of_memory(e):
                raise
            rows[name]['out_of_memory'] = True
        if rows[name]['out_of_memory']:  # not in `except`, whose traceback holds the tensors
            if contestant := there.pop(name, None):
                contestant.close()
            contestant = None
            clean_up()
    for _ in range(rounds):
        for name, contestant in there.items():
            if gpu and len(there) > 1:
                torch.cuda.empty_cache()  # what the one before has kept for itself
                contestant.step()
            rows[name]['seconds_per_step'].append(seconds(lambda: [contestant.step() for _ in range(iters)], device) / iters)
    for name, contestant in there.items():
        grown = grows_by(lambda: [contestant.step() for _ in range(2)], device)
        rows[name].update(parts=parts_of(contestant.step, iters), peak_bytes=grown and grown + state_bytes(contestant))
        if profile and name != 'nanoGPT':
            k = contestants[name][1]
            write_trace(contestant.step, 'out-traces' if profile is True else profile, f"{name.replace(', ', '-')}-{k.n_layer}x{k.n_embd}-batch{k.batch_size}", device)
        contestant.close()
    return rows


def clean_up():
    gc.collect()
    if compiling:
        torch._dynamo.reset()
    torch.cuda.empty_cache()


def bench_train():
    """Steps of training at each size, micro-batch and arch. Returns the peaks and the rows, dicts."""
    names = [name for name in sizes.split(',') if name in SIZES] if sizes else ['knobs'] if any(arg.endswith('.py') for arg in sys.argv[1:]) else ['toy', 'baby']
    torch.set_float32_matmul_precision(knobs['matmul_precision'])
    peaks = {kind: matmul_peak(device, kind) for kind in sorted({'float32', dtype, choose_dtype('auto', device)[0]})}
    sheet = knobs['peak_flops'] or data_sheet_peak(device)
    print('large matrix products: ' + ', '.join(f"{peak / 1e12:,.2f} TFLOP/s in {kind}" for kind, peak in peaks.items()) +
          (f" ({sheet / 1e12:,.1f} by the data sheet)" if sheet else '') + f"; compile {'on' if compiling else 'off'} ({why_compile})")
    rows, folder = [], tempfile.TemporaryDirectory()
    for name in names:
        data, V, words = find_data(name, folder.name)
        print(f"{name}: {words}", flush=True)
        readable = len(bin_files(data.folder, 'train')) == 1 and data.meta['dtype'] == 'uint16'
        if peer and not readable:
            print(f"{name}: without nanoGPT, which reads one train.bin of uint16")
        for B in [int(n) for n in batch_sizes.split(',')] if batch_sizes else [None]:
            contestants = {f'ours, {arch}': (ours, settings_of(name, arch, V, B)) for arch in ([knobs['arch']] if 'arch' in given else archs.split(','))}
            theirs = settings_of(name, 'gpt2', V, B)
            if peer and readable and set(theirs.config.model_args()) <= {'n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'vocab_size', 'dropout'}:
                contestants = {'nanoGPT': (lambda k, data: nanogpt(k, data, peer), theirs), **contestants}
            if problem := data.train.too_short(theirs.block_size):
                fail(problem)
            with torch.device('meta'):
                nets = {who: GPT(k.config) for who, (_, k) in contestants.items()}
            # on a GPU in turns only if they are small: else each would have less memory than alone
            alone = gpu and sum(16 * net.get_num_params(False) for net in nets.values()) > 0.1 * torch.cuda.get_device_properties(device).total_memory
            found = {}
            for group in [{who: contestant} for who, contestant in contestants.items()] if alone else [contestants]:
                found.update(train_in_turns(group, data))
                clean_up()
            first = next(iter(found.values()))['seconds_per_step']
            for who, row in found.items():
                k, net = contestants[who][1], nets[who]
                row.update(size=name, contestant=who, data=words, parameters=net.get_num_params(False))
                row.update({field: getattr(k, field) for field in ('batch_size', 'block_size', 'accumulation')})
                if row['seconds_per_step']:
                    row['tokens_per_second'] = k.batch_size * k.accumulation * k.block_size / statistics.median(row['seconds_per_step'])
                    row['ratio'] = [a / b for a, b in zip(first, row['seconds_per_step'])]
                    flops = net.flops_per_token() * row['tokens_per_second']
                    row['of_matrix_peak'], row['of_data_sheet'] = flops / peaks[row['dtype']], flops / sheet if sheet else None
                    row['final_loss'] = statistics.mean(row['losses'][-20:]) if loss_steps else None
                rows.append(row)
    print('\n' + '\n'.join(table(rows)))
    return {'matrix_peaks': peaks, 'data_sheet': sheet, 'rows': rows}


def table(rows):
    """The rows for reading; then each contestant at the micro-batch that suits it best."""
    heads = ['size', 'micro-batch', 'contestant', 'tokens/s', 'times the first', 'ms per step', *PARTS, 'of the matrix peak', 'of the data sheet', 'memory, GB']
    heads += [f'loss of {loss_steps} steps'] * bool(loss_steps)
    yield '| ' + ' | '.join(heads) + ' |'
    yield '|---' * len(heads) + '|'
    percent = lambda share: '' if share is None else f'{share:.1%}'
    best = {}
    for row in rows:
        cells = [row['size'], f"{row['batch_size']} x {row['block_size']}" + f" x {row['accumulation']}" * (row['accumulation'] > 1)]
        if row['out_of_memory']:
            cells += [row['contestant'], 'out of memory'] + [''] * (len(heads) - 4)
        else:
            n = row['tokens_per_second'] * statistics.median(row['seconds_per_step'])  # tokens in a step
            cells += [f"{row['contestant']}, {row['dtype']}", median_and_range([n / s for s in row['seconds_per_step']]), median_and_range(row['ratio'], 2) if row['ratio'] else '',
                      f"{1000 * statistics.median(row['seconds_per_step']):.2f}", *(f"{1000 * row['parts'][part]:.2f}" for part in PARTS)]
            cells += [percent(row['of_matrix_peak']), percent(row['of_data_sheet']), '' if row['peak_bytes'] is None else f"{row['peak_bytes'] / 1e9:.3g}"]
            cells += [f"{row['final_loss']:.4f}"] if loss_steps else []
            so_far = best.setdefault(row['size'], {}).setdefault(row['contestant'], row)
            if row['tokens_per_second'] > so_far['tokens_per_second']:
                best[row['size']][row['contestant']] = row
        yield '| ' + ' | '.join(map(str, cells)) + ' |'
    for name, contestants in best.items() if batch_sizes else ():
        first = next(iter(contestants.values()))['tokens_per_second']
        yield f"\n{name}, each at its best micro-batch: " + '; '.join(
            f"{who} {row['tokens_per_second']:,.0f} tokens/s at {row['batch_size']} ({row['tokens_per_second'] / first:.2f} times the first)" for who, row in contestants.items())


# -----------------------------------------------------------------------------
# the rest of what can be asked


def bench_start():
    return measure_start.start(SIZES['baby'], [f'--{name}={knobs[name]}' for name in ('device', 'dtype', 'compile')], rounds)


def bench_sample():
    names = [name for name in sizes.split(',') if name in measure_sample.SIZES] if sizes else ['baby', 'baby8']
    return measure_sample.sample(names, device, dtype, knobs['compile'], peer, tokens, rounds, knobs['seed'])


def bench_prepare():
    if not text:
        return print('not measured: a text is wanted, --text=PATH of a .jsonl.gz')
    return measure_prepare.prepare(os.path.abspath(text), rounds)


if __name__ == '__main__':
    print(machine())
    result = {'command': ' '.join(['python', 'bench.py', *sys.argv[1:]]), 'machine': machine(), 'knobs': given}
    for part, run in {'train': bench_train, 'start': bench_start, 'sample': bench_sample, 'data': measure_prepare.data, 'prepare': bench_prepare}.items():
        if what in (part, 'all'):
            print(f'\n{part}\n' if what == 'all' else '')
            result[part] = run()
    if json_file:
        with open(json_file, 'w') as f:
            json.dump(result, f, indent=1)
            f.write('\n')
