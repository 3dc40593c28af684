"""
What a GPU has to show, in rows: that the numbers are right, that no step waits for it, how fast it is.

    $ bash runs/gpu_records.sh first          # the most telling rows, in less than ten minutes
    $ bash runs/gpu_records.sh second         # and `third`: the next tens of minutes
    $ bash runs/gpu_records.sh --smoke=True   # the same rows with tiny networks on a CPU

Each row is made by train.py, sample.py or dev/bench.py in processes of their own, and read from what they
print. It is written as soon as it is known, with all that was printed, to <results>. The same command again
makes the rows that were interrupted, then those that failed. `python dev/gpu_records.py watch NAME train.py
FLAGS` runs train.py in this process, watched from outside by one of the functions in WATCHES.

For a machine without git and without the internet: what is laid into out-carried/ is found there (text.*,
corpus.*, nanogpt/, tiktoken/, commit), as in
    $ git describe --always > out-carried/commit; tar -czf flatgpt.tar.gz $(git ls-files) out-carried
"""

import os
import sys
from typing import Literal

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [HERE, os.path.join(HERE, 'dev')]
from configurator import configure, fail, out_of_range

# -----------------------------------------------------------------------------
part: Literal['first', 'second', 'third'] = 'first'  # then those after it, while there is time
results = os.path.join(HERE, 'out-gpu.tar.gz')  # a table, and of each row its numbers and what was printed
minutes = 9.5  # end what is running after so many
only: str = None  # rows, as 'waits_gpt2,growth', repeated even if they are there
show = False  # True: name the rows and which of them are there
smoke = False  # True: tiny networks on the CPU
# None: what is in out-carried/
text: str = None  # a text of a megabyte, such as tinyshakespeare, for training on characters
corpus: str = None  # documents, such as a .jsonl.gz of 30 MB, for training with GPT-2's tokens
peer: str = None  # a checkout of nanoGPT to compare with
# -----------------------------------------------------------------------------
watching = sys.argv[2:] if sys.argv[1:2] == ['watch'] else None
if watching is None:
    knobs, given = configure(globals(), positional='part')

import multiprocessing
import platform
import re
import shutil
import signal
import statistics
import subprocess
import tarfile
import tempfile
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
import torch._dynamo  # every optimizer imports it, for two seconds: here once, not in each forked row

import common
from common import after_each_update, check_peer, flags_of, make_tokens, run_forked
from model import GPT, GPTConfig
from support import devices
from support.compiling import compile_model
from support.report import read_log
from support.files import read_json, write_json

PARTS = 'first', 'second', 'third'
DEVICE = 'cpu' if smoke else 'cuda'
SMALL = dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=16)
LARGE = dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=32)
V = 50304
if smoke:
    SMALL, V = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, batch_size=4), 65
    LARGE = SMALL
ITERS = 6 if smoke else 40
RUN = dict(SMALL, learning_rate=1e-3, warmup_iters=5, gradient_accumulation_steps=2, dropout=0.1,
           eval_interval=0, eval_iters=1, log_interval=1, compile=False, overwrite=True)
COMPILE = not smoke
EXACT = dict(watch=['deterministic'], env=dict(CUBLAS_WORKSPACE_CONFIG=':4096:8'))
ITERATION = re.compile(r'^iter (\d+): loss (\S+), time ([\d.]+)ms', re.M)


class NotHere(Exception):
    """Why a row makes no sense here."""


class TimeUp(Exception):
    pass


# -----------------------------------------------------------------------------
# processes


class Row:
    """A row in the making: its commands, one after another, and all that they print."""

    def __init__(self, log, work, until):
        self.log, self.work, self.until = open(log, 'a+'), work, until

    def run(self, *words, launcher=(), status=0, alone=False, **env):
        """What a command prints. status: the one that is right; alone: even in a smoke test in a process that
        imports torch anew."""
        words = [str(word) for word in words]
        self.log.seek(0, 2)
        self.log.write(f"$ {' '.join([*launcher, *words])}\n")
        self.log.flush()
        begin, t0, to = self.log.tell(), time.monotonic(), self.log.fileno()
        if smoke and not launcher and not alone:
            fork = multiprocessing.get_context('fork')
            process = fork.Process(target=run_forked, args=(words, HERE, to, to))
            process.start()
        else:
            process = subprocess.Popen([sys.executable, '-u', *launcher, *words], cwd=HERE,
                                       stdout=to, stderr=to, env={**os.environ, **env})
        try:
            found = self.wait(process, self.until)
        except BaseException:
            process.terminate()  # first in a way that lets it end the processes that it has started
            try:
                self.wait(process, time.monotonic() + 10)
            except TimeUp:
                process.kill()
            raise
        self.log.seek(begin)
        said = self.log.read()
        print(f'    {time.monotonic() - t0:5.1f} s  {words[0]}', flush=True)
        if found != status:
            last = (said.strip().splitlines() or ['it printed nothing'])[-1]
            raise RuntimeError(f'{words[0]} ended with status {found}, not {status}: {last[:300]}')
        return said

    def wait(self, process, until):
        """The process's status."""
        left = max(0, until - time.monotonic())
        if isinstance(process, subprocess.Popen):
            try:
                return process.wait(left)
            except subprocess.TimeoutExpired:
                raise TimeUp from None
        process.join(left)
        if process.is_alive():
            raise TimeUp
        return process.exitcode

    # what most rows are made of

    def train(self, name, *flags, launcher=(), status=0, watch=(), vocab_size=65, env=None, **settings):
        """A run of train.py into <work>/<name> on made-up tokens: its losses, milliseconds, all it said."""
        data = dict(data_dir=self.work, dataset=make_tokens(self.work, vocab_size, 2**21))
        settings = {**RUN, 'max_iters': ITERS, 'lr_decay_iters': ITERS, 'device': DEVICE, **settings, **data}
        words = flags_of({**settings, 'out_dir': os.path.join(self.work, name)})
        scripts = ('dev/gpu_records.py', 'watch', *watch, 'train.py') if watch else ('train.py',)
        said = self.run(*scripts, *words, *flags, launcher=launcher, status=status, **(env or {}))
        steps = ITERATION.findall(said)
        return SimpleNamespace(said=said, losses=[float(loss) for _, loss, _ in steps],
                               ms=[float(ms) for _, _, ms in steps])

    def train_on_text(self, prepared, *flags):
        """A run of train.py on a dataset made from a text: its time and its best loss, as a row."""
        self.run('prepare.py', *prepared, f'--data_dir={self.work}')
        said = self.run('train.py', *flags, f'--data_dir={self.work}', f'--device={DEVICE}',
                        f"--out_dir={os.path.join(self.work, 'run')}")
        done = re.search(r'^done: .* iterations in (\S+), best validation loss (\d+\.\d+)', said, re.M)
        return [('time of training, best validation loss', f'{done[1]}, {done[2]}', None)]

    def state(self, name):
        """All numbers of the newest checkpoint of <work>/<name>, weights and moments, in one order."""
        path = os.path.join(self.work, name, 'ckpt.pt')
        saved = torch.load(path, map_location='cpu', weights_only=True)
        moments = [t for state in saved['optimizer']['state'].values() for t in state.values()]
        return [t.float() for t in (*saved['model'].values(), *moments) if torch.is_tensor(t)]

    def difference(self, a, b):
        """The largest difference between the checkpoints of two runs."""
        pairs = zip(self.state(a), self.state(b), strict=True)
        return max((x - y).abs().max().item() for x, y in pairs)

    def bench(self, *flags):
        """The numbers of dev/bench.py."""
        path = os.path.join(self.work, 'bench.json')
        self.run('dev/bench.py', *flags, f'--device={DEVICE}', f'--json_file={path}')
        return read_json(path)


# -----------------------------------------------------------------------------
# watched from outside, train.py or a part of it; each prints what it found


def show_machine(*_):
    """What there is: hardware, versions, programs."""
    print(common.machine())
    if shutil.which('nvidia-smi'):
        subprocess.run(['nvidia-smi'])
    for name in ('python3', 'gcc', 'nvcc'):
        print(f'{name}: {shutil.which(name)}')
    print(f'Python {platform.python_version()}, CUDA {torch.version.cuda}, {torch.cuda.device_count()} GPUs')


def watch_waits(*words):
    """A wait for the GPU between updates 5 and 25 is an error."""
    def check(n):
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode('error' if 5 <= n < 25 else 'default')
        return n == 26
    said = 'none'
    try:
        after_each_update(check, *words)
    except RuntimeError as e:
        traceback.print_exc()
        where = traceback.extract_tb(e.__traceback__)[-1]
        said = f'{str(e).splitlines()[0][:100]} in {where.name}'
    print(f'waits in 20 iterations: {said}', flush=True)


def watch_growth(last, *words):
    """The memory that the updates after the first 200 add, up to the last one."""
    marks = []

    def look(n):
        if n >= 200 and n % 100 == 0:  # the first ones are still filling the allocators
            pages = int(Path('/proc/self/statm').read_text().split()[1])
            on_gpu = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
            marks.append((pages * os.sysconf('SC_PAGE_SIZE'), on_gpu))
            print(f'update {n}: {marks[-1][0]:,} bytes of the process, {on_gpu:,} of the GPU', flush=True)
        return n == int(last)
    after_each_update(look, *words)
    grown = [(after - before) / 1e6 for before, after in zip(marks[0], marks[-1])]
    print(f'grown by {grown[0]:.1f} MB, on the GPU by {grown[1]:.3f} MB', flush=True)


def watch_deterministic(*words):
    """With torch's deterministic algorithms: no sums in any order."""
    torch.use_deterministic_algorithms(True)
    after_each_update(lambda n: False, *words)


def whole_logits(last, *words):
    """The logits of all tokens at once, however much of the memory they take."""
    devices.choose_loss_chunk_size = lambda *args: 0
    after_each_update(lambda n: n == int(last), *words)


def same_texts(n, device, dtype):
    """Greedy texts of n tokens with the cache, without it, and by the compiled step."""
    n, device = int(n), torch.device(device)
    for arch in ('gpt2', 'llama', 'modern'):
        torch.manual_seed(1)
        shape = dict(n_layer=6, n_head=6, n_embd=384, block_size=256) if n > 50 else dict(
            n_layer=2, n_head=2, n_embd=32, block_size=32)
        net = GPT(GPTConfig(vocab_size=65, arch=arch, **shape)).to(device, getattr(torch, dtype)).eval()
        for p in net.parameters():
            if not p.count_nonzero():
                torch.nn.init.normal_(p, std=0.02)  # modern's zeros would make all logits equal
        idx = torch.arange(6, device=device).view(2, 3)
        want = net.generate(idx, n, temperature=0, use_cache=False)
        same = (want == net.generate(idx, n, temperature=0)).float().mean().item()
        print(f'{arch}, with the cache: {same:.1%} of the tokens are the same', flush=True)
        if device.type == 'cuda':
            note = compile_model(net, lambda: net.generate(idx, 4, temperature=0, static=True), 'auto',
                                 mode='reduce-overhead', dynamic=False)
            same = (want == net.generate(idx, n, temperature=0, static=True)).float().mean().item()
            print(f"{arch}, compiled: {same:.1%} of the tokens are the same {note or ''}", flush=True)
            torch._dynamo.reset()


WATCHES = {'machine': show_machine, 'waits': watch_waits, 'growth': watch_growth,
           'deterministic': watch_deterministic, 'whole_logits': whole_logits, 'texts': same_texts}

# -----------------------------------------------------------------------------
# the rows: each returns [(what, result, whether it is right, or None)]


def machine(row):
    said = row.run('dev/gpu_records.py', 'watch', 'machine', alone=True)
    return [('machine', said.splitlines()[0], None)]


def step(row, arch='gpt2', watch=(), **settings):
    """How fast a training step of 124M is, how often it is compiled."""
    how = dict(LARGE, compile=COMPILE, dropout=0.0, gradient_accumulation_steps=1, vocab_size=V, arch=arch,
               max_iters=10 if smoke else 60, log_interval=2 if smoke else 10)
    how |= {} if smoke else settings
    found = row.train('step', watch=watch, env=dict(TORCH_LOGS='recompiles,graph_breaks'), **how)
    ms = statistics.median(found.ms[1:])
    speed = 1000 * how['batch_size'] * how['block_size'] / ms
    compiled = re.search(r'compiled in (\d+) s', found.said)
    shares = re.findall(r'mfu ([\d.]+%)', found.said) or ['not known']
    again, breaks = found.said.count('Recompiling function'), found.said.count('Graph break')
    # one is right: the graph of evaluations, where no gradient is kept
    right = again <= 1 and not breaks and found.losses[-1] < found.losses[0] and bool(compiled) == COMPILE
    size = f"{arch}, micro-batch {how['batch_size']}"
    return [(f'{size}: tokens/s', f'{speed:,.0f}, {ms:.1f} ms, MFU {shares[-1]}', None),
            (f'{size}: seconds to compile, recompiles, graph breaks, first and last loss',
             f'{compiled and compiled[1]}, {again}, {breaks}, {found.losses[0]}, {found.losses[-1]}', right)]


def guard(row):
    """A learning rate that ruins the weights: such updates are skipped, and ten of them end the run."""
    found = row.train('guard', status=3, max_iters=40, learning_rate=1e14, warmup_iters=0, grad_clip=0)
    return [('updates that are not finite', 'skipped, then the run ended', 'in a row' in found.said)]


def waits(row, arch, optimizer, compiling):
    """Between two log lines nobody waits for the GPU."""
    how = dict(arch=arch, matrix_optimizer=optimizer, compile=compiling and COMPILE)
    found = row.train('waits', watch=['waits'], max_iters=2000, log_interval=1000, **how)
    said = re.search(r'^waits in 20 iterations: (.*)', found.said, re.M)[1]
    return [('waits in 20 iterations', said, said == 'none')]


def growth(row):
    """A thousand steps take no more memory than the first."""
    tiny = dict(n_layer=1, n_head=2, n_embd=32, block_size=32, batch_size=2, gradient_accumulation_steps=1)
    last = 400 if smoke else 1200
    found = row.train('growth', watch=['growth', last], max_iters=2000, log_interval=1000, **tiny)
    said = re.search(r'^grown by (([\d.-]+) MB, on the GPU by ([\d.-]+) MB)', found.said, re.M)
    return [('growth of the process', said[1], float(said[2]) < 20 and float(said[3]) <= 0)]


def torchrun(row, n=1, **how):
    """Processes under torchrun against plain python; without dropout, whose masks compiling changes."""
    if n > 1 and not smoke and torch.cuda.device_count() < n:
        raise NotHere('one GPU alone')
    launcher, rows = ('-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={n}'), []
    row.train('plain', dropout=0.0)
    for compiling in {False, COMPILE}:
        row.train('other', launcher=launcher, dropout=0.0, compile=compiling, **how,
                  env=dict(GLOO_SOCKET_IFNAME='lo', OMP_NUM_THREADS='1'))
        apart = row.difference('plain', 'other')
        rows.append((f'compile={compiling}: largest difference of weights and moments', f'{apart:.2g}',
                     apart < 1e-2))
    return rows


def bench(row, size, arch, batches, *flags):
    """Training steps, beside nanoGPT's if they are GPT-2's."""
    if peer and arch == 'gpt2':
        flags += f'--peer={peer}',
    tiny = ['--sizes=toy', '--n_layer=1', '--rounds=1', '--warm_up=1', '--turn=0.1', '--batch_sizes=2']
    how = tiny if smoke else [f'--sizes={size}', f'--batch_sizes={batches}', '--rounds=2', '--turn=5']
    rows = []
    for one in row.bench(*how, f'--archs={arch}', *flags)['train']:
        what, said = f"{one['contestant']}, micro-batch {one['batch_size']}", 'out of memory'
        if one['seconds'] is not None:
            share, ratio = one['of_data_sheet'] or 0, one['ratio']
            said = f"{one['tokens_per_second']:,.0f} tokens/s, {share:.1%} of the data sheet"
            said += f", {ratio[0]:.3f} of nanoGPT's time" if ratio else ''
        rows.append((what, said, None))
    return rows


def profile(row, arch, batch):
    """Where the time of a step goes: the operators are in the log."""
    flags = [f'--sizes={"toy" if smoke else "124M"}', f'--batch_sizes={2 if smoke else batch}']
    row.bench('--what=profile', *flags, f'--archs={arch}', f'--traces={row.work}')
    return [('a profile', 'in the log', None)]


def losses(row, arch):
    """Twenty losses on a CPU in float32 and here in every dtype, compiled and not."""
    ways = [('float32', False, 2e-3), ('float32', True, 2e-3), ('bfloat16', False, 0.05),
            ('bfloat16', True, 0.05), ('float16', False, 0.05)]
    if smoke:  # a CPU has no float16
        ways = [way for way in ways if not way[1] and way[0] != 'float16']
    how, rows = dict(arch=arch, dropout=0.0, lr_schedule='constant', max_iters=20), []
    want = row.train('cpu', dtype='float32', **{**how, 'device': 'cpu'}).losses
    for dtype, compiling, most in ways:
        got = row.train('here', dtype=dtype, compile=compiling, **how).losses
        apart = max(abs(a - b) for a, b in zip(want, got, strict=True))
        rows.append((f'{dtype}, compile={compiling}: largest difference; first and last loss',
                     f'{apart:.2g}; {got[0]}, {got[-1]}', apart < most))
    return rows


def resume(row, **how):
    """A whole run against half of one and a resume."""
    row.train('whole', **how)
    row.train('again', **how)
    row.train('parts', max_iters=ITERS // 2, **how)
    row.train('parts', init_from='resume', **how)
    again, apart = row.difference('whole', 'again'), row.difference('whole', 'parts')
    # what two whole runs differ by is the GPU's own rounding, e.g. of sums in any order
    right = apart == again == 0 if smoke or 'watch' in how else apart <= max(2 * again, 1e-6)
    return [('largest difference after a resume; of two whole runs', f'{apart:.2g}; {again:.2g}', right)]


def texts(row):
    """Greedy texts with the cache, without it, and by the compiled step."""
    said = row.run('dev/gpu_records.py', 'watch', 'texts', 40 if smoke else 300, DEVICE, 'float32')
    found = re.findall(r'^(\w+, .*): ([\d.]+%) of the tokens (.*)', said, re.M)
    return [(f'{what}: the same tokens', share, share == '100.0%') for what, share, _ in found]


def script_sample(row):
    """sample.py, compiled and not: seconds in all."""
    row.train('run', vocab_size=256)  # without the token that ends a text
    rows = []
    for compiling in {False, COMPILE}:
        t0 = time.monotonic()
        row.run('sample.py', f"--out_dir={os.path.join(row.work, 'run')}", '--num_samples=1', '--start=a',
                f'--max_new_tokens={20 if smoke else 500}', f'--device={DEVICE}', f'--compile={compiling}')
        rows.append((f'compile={compiling}: seconds with the start', f'{time.monotonic() - t0:.1f}', None))
    return rows


def sampling(row, size):
    """Tokens per second of generate()."""
    flags = ['--sizes=baby', '--tokens=4', '--rounds=1'] if smoke else [f'--sizes={size}', '--rounds=3']
    found = row.bench('--what=sample', *flags, *([f'--peer={peer}'] if peer else []))['sample']
    return [(f"{one['batch']} at once, {one['contestant']}",
             f"{one['batch'] / statistics.median(one['seconds_per_step']):,.0f} tokens/s, "
             f"{one['ratio']:.1f} times the first", None) for one in found]


def start(row):
    """Seconds to the first step; what was compiled once is in a cache."""
    found = row.bench('--what=start', f'--rounds={1 if smoke else 3}', '--archs=gpt2')['start']['seconds']
    later = {until: statistics.median(times[1:] or times) for until, times in found.items()}
    return [(until, f'{times[0]:.1f} s the first time, then {later[until]:.1f} s', None)
            for until, times in found.items()]


def save(row):
    """What a checkpoint of 124M costs the loop."""
    row.train('saving', max_iters=30, eval_interval=10, vocab_size=V, **{**LARGE, 'batch_size': 8})
    took = read_log(os.path.join(row.work, 'saving'))['save_seconds'][-1] / 3
    return [('seconds for a checkpoint', f'{took:.2f}', None)]


def shakespeare(row, config):
    """A whole training on characters. nanoGPT's README: 1.4697, three minutes on an A100."""
    if not text and not smoke:
        raise NotHere('no --text=FILE')
    source = text or os.path.join(HERE, 'README.md')
    tiny = flags_of({**RUN, 'max_iters': 4, 'lr_decay_iters': 4, 'warmup_iters': 1}) if smoke else []
    return row.train_on_text(['shakespeare_char', f'--input={source}'], f'config/{config}.py', *tiny)


def learn(row, arch):
    """500 iterations of 65,536 of GPT-2's tokens."""
    if not corpus and not smoke:
        raise NotHere('no --corpus=FILE')
    tokens = [f'--input={corpus}', '--tokenizer=gpt2', '--val_fraction=0.02']
    recipe = ['config/arch_modern.py'] if arch != 'gpt2' else []
    recipe += ['config/arch_local.py'] if arch == 'local' else []
    how = {**LARGE, 'total_batch_size': 65536, 'max_iters': 500, 'warmup_iters': 50, 'eval_interval': 100,
           'eval_iters': 16, 'log_interval': 10}
    if smoke:
        tokens = [f"--input={os.path.join(HERE, 'README.md')}", '--tokenizer=byte']
        how = {**SMALL, 'gradient_accumulation_steps': 1, 'max_iters': 4, 'warmup_iters': 1, 'eval_iters': 1}
    return row.train_on_text(['corpus', *tokens], *flags_of(how), *recipe, '--dataset=corpus')


ROWS = {  # part, seconds at the most, the function, its arguments
    'machine': ('first', 60, machine),
    'step_gpt2_32': ('first', 150, step),
    'guard': ('first', 60, guard),
    'waits_gpt2': ('first', 60, waits, 'gpt2', 'adamw', False),
    'waits_modern': ('first', 60, waits, 'modern', 'muon', False),
    'waits_compiled': ('first', 90, waits, 'gpt2', 'adamw', True),
    'growth': ('first', 90, growth),
    'torchrun': ('first', 150, torchrun),
    'shard': ('first', 150, torchrun, 2, dict(shard=0)),
    'bench_gpt2_64': ('first', 300, bench, '124M', 'gpt2', '64'),
    'profile_gpt2_64': ('first', 150, profile, 'gpt2', 64),
    'whole_logits_64': ('first', 150, step, 'gpt2', ['whole_logits', 50], dict(batch_size=64)),
    'losses_gpt2': ('second', 240, losses, 'gpt2'),
    'texts': ('second', 240, texts),
    'resume': ('second', 150, resume),
    'resume_compiled': ('second', 240, resume, dict(compile=COMPILE)),
    'resume_exact': ('second', 240, resume, EXACT),
    'resume_exact_compiled': ('second', 240, resume, dict(EXACT, compile=COMPILE)),
    'losses_llama': ('second', 240, losses, 'llama'),
    'losses_modern': ('second', 240, losses, 'modern'),
    'sample': ('second', 150, script_sample),
    'step_modern_32': ('third', 150, step, 'modern', (), dict(matrix_optimizer='muon')),
    'bench_modern_64': ('third', 240, bench, '124M', 'modern', '64', '--matrix_optimizer=muon'),
    'profile_modern_64': ('third', 150, profile, 'modern', 64),
    'bench_gpt2_32': ('third', 240, bench, '124M', 'gpt2', '32'),
    'shakespeare': ('third', 400, shakespeare, 'train_shakespeare_char'),
    'shakespeare_modern': ('third', 400, shakespeare, 'train_shakespeare_char_modern'),
    'sampling_baby': ('third', 200, sampling, 'baby'),
    'sampling_124M': ('third', 300, sampling, '124M'),
    'start': ('third', 240, start),
    'save': ('third', 120, save),
    'learn_gpt2': ('third', 400, learn, 'gpt2'),
    'learn_modern': ('third', 400, learn, 'modern'),
    'learn_local': ('third', 400, learn, 'local'),
    'bench_350M': ('third', 300, bench, '350M', 'gpt2', '16'),
    'bench_1.5B': ('third', 400, bench, '1.5B', 'gpt2', '8'),
}

# -----------------------------------------------------------------------------
# making them, and the file of results


def make(name, folder, until):
    """Make a row and write it. Returns what became of it, in a word or a sentence."""
    _, seconds, function, *args = ROWS[name]
    settings = args.pop() if args and isinstance(args[-1], dict) else {}
    seconds *= 3 if smoke else 1  # it may share its cores
    t0, own = time.monotonic(), time.monotonic() + seconds
    result = {'name': name, 'rows': []}
    with tempfile.TemporaryDirectory() as work:
        row = Row(os.path.join(folder, f'{name}.log'), work, min(until, own))
        try:
            result['rows'] = function(row, *args, **settings)
            said = 'done'
        except NotHere as e:
            said = f'not measured: {e}'
        except TimeUp:
            if until <= own:
                return 'interrupted; the same command makes it anew'
            said = f'failed: it took more than {seconds} seconds'
        except Exception as e:
            said = f'failed: {type(e).__name__}: {e}'
            row.log.write(f'\n{said}\n')
        finally:
            row.log.close()
    result |= {'said': said, 'seconds': time.monotonic() - t0}
    write_json(os.path.join(folder, f'{name}.json'), result)
    return said


def become(name, folder):
    """What became of a row: what make() has written, or None."""
    path = os.path.join(folder, f'{name}.json')
    return read_json(path) if os.path.exists(path) else None


def write_table(folder):
    """table.md: everything that there is, and 'not measured' for the rest."""
    lines = ['# On a GPU', '', 'Made by [gpu_records.py](../gpu_records.py).']
    if smoke:
        lines += ['', '**A smoke test with tiny networks on a CPU: the numbers mean nothing.**']
    lines += ['', '| row | what | result | as it should be |', '|---|---|---|---|']
    words = {None: '', True: 'yes', False: '**NO**'}
    for name in ROWS:
        rows = [('', 'not measured', None)]
        if found := become(name, folder):
            rows = found['rows'] or [('', found['said'], None if 'not measured' in found['said'] else False)]
        for what, said, right in rows:
            lines.append(f"| {name} | {what} | {str(said).replace('|', '/')} | {words[right]} |")
    Path(folder, 'table.md').write_text('\n'.join(lines) + '\n')
    return '\n'.join(lines)


def names_asked(folder):
    """The rows to make: those never made come first, then those that failed."""
    if only:
        return only.split(',')
    names = [name for name in ROWS if PARTS.index(ROWS[name][0]) >= PARTS.index(part)]
    found = {name: (become(name, folder) or {'said': ''})['said'] for name in names}
    left = [name for name in names if not found[name].startswith(('done', 'not measured'))]
    return sorted(left, key=lambda name: found[name] != '')


def make_all(folder):
    until = time.monotonic() + 60 * minutes
    for name in names_asked(folder):
        if time.monotonic() >= until - 5:
            print(f'time is up before {name}; the same command continues with it')
            return
        print(f'{name}:', flush=True)
        print(f'  {make(name, folder, until)}', flush=True)
        write_table(folder)
        with tarfile.open(f'{results}.part', 'w:gz') as archive:  # the one file, whole at every instant
            archive.add(folder, 'gpu')
        os.replace(f'{results}.part', results)


def carried(name):
    """The path of a file or folder in out-carried/, named without its endings; or None."""
    return next((str(path) for path in sorted(Path(HERE, 'out-carried').glob(f'{name}*'))), None)


def main():
    with tempfile.TemporaryDirectory() as where:
        folder = os.path.join(where, 'gpu')
        if os.path.exists(results):
            with tarfile.open(results) as archive:
                archive.extractall(where, filter='data')
        os.makedirs(folder, exist_ok=True)
        if show:
            for name in ROWS:
                print(f"{ROWS[name][0]:6}  {name}: {(become(name, folder) or {'said': ''})['said']}")
            return
        make_all(folder)
        print(write_table(folder) + f'\nall of it, with the logs: {results}')


if watching is not None:
    WATCHES[watching[0]](*watching[1:])
elif __name__ == '__main__':
    text, corpus, peer = text or carried('text'), corpus or carried('corpus'), peer or carried('nanogpt')
    problems = out_of_range(knobs, above_zero='minutes') + check_peer(peer)
    problems += [f"no such file ({path}). name one with --{name}=FILE"
                 for name, path in (('text', text), ('corpus', corpus)) if path and not os.path.isfile(path)]
    problems += [f'no such row ({name}). see --show' for name in (only or '').split(',')
                 if name and name not in ROWS]
    if not (smoke or show or torch.cuda.is_available()):
        problems.append('no GPU is here. use --smoke=True for a test on a CPU')
    if problems:
        fail(*problems)
    os.environ['PYTHONUNBUFFERED'] = '1'
    if not os.environ.get('TIKTOKEN_CACHE_DIR') and carried('tiktoken'):
        os.environ['TIKTOKEN_CACHE_DIR'] = carried('tiktoken')
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process is left running
    if smoke:
        torch.set_num_threads(1)
    main()
