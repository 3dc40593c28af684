"""What a run tells while it trains: console, log.csv, run.json, wandb; and the clock that measures it."""

import contextlib
import csv
import importlib.util
import io
import math
import os
import platform
import shlex
import subprocess
import sys
import time

import torch

from configurator import fail, say, warn
from support import console, devices, files, report
from support.checkpoint import newest, resume_line
from support.console import format_duration
from support.errors import first_line

# docs/reading_logs.md explains them. A metric with another name gets a column of its own
COLUMNS = ('iter', 'progress', 'loss', 'loss_smooth', 'train_loss', 'val_loss', 'perplexity', 'bpb',
           'hellaswag', 'core', 'lr', 'grad_norm', 'tokens', 'tokens_total', 'epoch', 'ms',
           'tokens_per_second', 'mfu', 'data', 'memory_gb', 'seconds', 'eval_seconds', 'save_seconds',
           'sample_seconds')


class Clock:
    """Seconds of training: it stands still while the run evaluates, samples and saves."""

    def __init__(self, run, dist):
        saved = run.ckpt if run.resuming else {}
        self.dist, self.max_iters = dist, run.knobs['max_iters']
        self.seconds = saved.get('seconds', 0.0)
        self.spent = dict(saved.get('spent', {}))  # seconds of 'eval', 'save', 'sample'
        self.show = dist.progress('training', run.start_iter)
        self.note = ''  # for the live line

    def start(self):
        self.origin = time.perf_counter() - self.seconds
        self.lap_began, self.steps = self.seconds, 0

    @contextlib.contextmanager
    def paused(self):
        self.dist.synchronize()
        self.seconds = time.perf_counter() - self.origin
        yield
        self.origin = time.perf_counter() - self.seconds

    @contextlib.contextmanager
    def spending(self, what):
        """Add the seconds of this block to spent[what]."""
        t0 = time.perf_counter()
        try:
            yield
        finally:
            self.spent[what] = self.spent.get(what, 0.0) + time.perf_counter() - t0

    def tick(self, it):
        """The update of iteration `it` was made."""
        self.steps += 1
        self.show(it + 1, self.max_iters, self.note)

    def lap(self, batches):
        """Milliseconds per iteration since the last lap. data_wait: the share of it that batches took."""
        self.seconds = time.perf_counter() - self.origin
        elapsed = self.seconds - self.lap_began
        self.data_wait = batches.waited / max(elapsed, 1e-9)
        ms = 1000 * elapsed / self.steps
        self.lap_began, self.steps, batches.waited = self.seconds, 0, 0.0
        return ms

    def state(self):
        return {'seconds': self.seconds, 'spent': dict(self.spent)}


class Logger:
    """The console's lines, and the rows of log.csv and wandb."""

    def __init__(self, run, clock, dist):
        self.run, self.clock, self.dist, self.knobs = run, clock, dist, run.knobs
        self.row = {}  # of the present iteration: what was measured before its update
        self.average_ms = None  # per iteration, over the latest ones, for the time left
        saved = run.ckpt if run.continues else {}
        # of the losses, each with 0.98 of the weight of the one after it: their weighted sum and the sum of
        # the weights, on the device, so that no iteration waits
        self.loss_sum = torch.tensor(saved.get('loss_sum') or [0.0, 0.0], device=dist.device)
        self.wandb, self.wandb_run_id = None, saved.get('wandb_run_id')
        self.csv = self.record = None
        if not dist.is_main:
            return
        if self.knobs['wandb_log']:
            self.wandb = WandbLog(self.knobs, self.wandb_run_id)
            self.wandb_run_id = self.wandb.id  # goes into checkpoints: a resume continues the same curves
        if not self.knobs['eval_only']:
            self.csv = CsvLog(os.path.join(self.knobs['out_dir'], 'log.csv'), run.start_iter)
            self.record = RunRecord(run)

    def metrics(self, it, metrics):
        """What an evaluation found before the update of iteration `it`."""
        if metrics:
            times = {f'{name}_seconds': self.clock.spent.get(name) for name in ('eval', 'save', 'sample')}
            self.row = {'iter': it, **metrics, **times}
            interval = self.knobs['log_interval']
            if not interval or it % interval or it >= self.knobs['max_iters']:
                self.row.update(tokens=it * self.run.tokens_per_iter, seconds=self.clock.seconds)
                self.flush()  # else its line is completed by iteration()

    def add(self, loss):
        """Count an iteration's loss, a tensor, into the mean of the latest ones."""
        new = torch.stack([loss, torch.ones_like(loss)])
        self.loss_sum = 0.98 * self.loss_sum + new.where(loss.isfinite(), 0.0)

    def iteration(self, it, measured):
        """Print the line of iteration `it`. measured: loss, lr, grad_norm, ms per iteration, mfu (or nan),
        and whatever else should become a column of log.csv."""
        run, clock, ms = self.run, self.clock, measured['ms']
        tokens = (it + 1) * run.tokens_per_iter
        epoch = tokens / self.knobs['block_size'] / run.samples_per_epoch
        per_second = 1000 * run.tokens_per_iter / ms
        mfu = None if math.isnan(measured['mfu']) else 100 * measured['mfu']
        total, weight = self.loss_sum.tolist()
        smooth = total / weight if weight else None
        parts = {'loss': f"iter {it}: loss {measured['loss']:.4f}", 'time': f"time {ms:.2f}ms",
                 'mfu': f"mfu {mfu:.2f}%" if mfu else '', 'lr': f"lr {measured['lr']:.2e}",
                 'grad_norm': f"grad norm {measured['grad_norm']:.2f}", 'speed': f"{per_second:,.0f} tok/s",
                 'epoch': f"epoch {epoch:.2f}", 'data': f"data {100 * clock.data_wait:.1f}%",
                 'eta': self.time_left(it, ms)}
        parts = {name: part for name, part in parts.items() if part}
        # people's scripts find the numbers where there is no terminal
        self.dist.print(console.fit(parts) if self.dist.on_terminal else ', '.join(parts.values()))
        clock.note = f", loss {smooth:.4f}" if weight else ''
        self.row.update({
            **measured, 'iter': it, 'progress': (it + 1) / self.knobs['max_iters'], 'epoch': epoch,
            'mfu': mfu, 'loss_smooth': smooth, 'seconds': clock.seconds, 'tokens': tokens,
            'tokens_total': run.tokens_before + tokens, 'tokens_per_second': per_second,
            'data': 100 * clock.data_wait, 'memory_gb': devices.peak_memory(self.dist.device)})
        self.flush()
        if it == 0 and run.start == 'scratch':
            self.check_first_loss(measured['loss'])

    def time_left(self, it, ms):
        if it >= self.run.start_iter + 5:  # the first iterations are slower
            self.average_ms = ms if self.average_ms is None else 0.9 * self.average_ms + 0.1 * ms
        if self.average_ms is None:
            return ''
        return f"eta {format_duration((self.knobs['max_iters'] - it - 1) * self.average_ms / 1000)}"

    def check_first_loss(self, loss):
        vocab_size = self.run.data.meta['vocab_size']
        expected = math.log(vocab_size)
        # weights of 0.02 spread tied logits by 0.02 sqrt(C), which adds half of its square
        if math.isfinite(loss) and abs(loss - expected) > 0.5 + 2e-4 * self.knobs['n_embd']:
            self.dist.print(first_loss_note(loss, expected, vocab_size))

    def flush(self):
        """Write the row of the present iteration; one that says nothing but its number is not written."""
        row = {name: value for name, value in self.row.items() if value is not None}
        self.row = {}
        if len(row) > 1 and self.csv:
            self.csv.write(row)
        if len(row) > 1 and self.wandb:
            self.wandb.log(row)

    def state(self):
        return {'wandb_run_id': self.wandb_run_id, 'loss_sum': self.loss_sum.tolist()}

    def close(self, it, saver, stop):
        """The last line of a run that ended at pass `it`, its report. Returns the exit status."""
        self.flush()
        status = stop.exit_status() if saver.whole or stop.gave_up else 4
        outcome = self.last_line(it, saver, stop)
        if self.wandb:
            self.wandb.end(outcome=outcome, iterations=it, best_val_loss=saver.best_val_loss)
        if self.csv:
            self.record.end(outcome, iterations=it, seconds=self.clock.seconds,
                            best_val_loss=saver.best_val_loss)
            self.csv.close()
            self.write_report()
        self.dist.close()
        return status

    def last_line(self, it, saver, stop):
        """Prints how the run ended; returns it in a few words."""
        if stop.gave_up:  # the guard has said why
            return f"gave up: {stop.gave_up}"
        run, out_dir = self.run, self.knobs['out_dir']
        if not saver.whole:
            if run.dist.is_main:
                say(f"error: the last checkpoint could not be written ({newest(out_dir) or 'none'} "
                    f"is the newest). make room, then: {resume_line(run, 'auto')}")
            return 'ended without its last checkpoint'
        if stop.is_stopping():
            saved = f"saved in {out_dir}. to continue: {resume_line(run)}"
            if it == run.start_iter and not run.resuming:
                saved = "with nothing to save yet"
            run.dist.print(f"stopped by {stop.reason()} after {it:,} iterations, {saved}")
            return f'stopped by {stop.reason()}'
        if not self.knobs['eval_only']:
            best = f", best validation loss {saver.best_val_loss:.4f}" if run.data.val else ''
            then = '\n' if self.dist.on_terminal else '. '
            self.dist.print(f"done: {it:,} iterations in {format_duration(self.clock.seconds)}{best}{then}to "
                            f"see what it writes: python sample.py --out_dir={out_dir}"
                            + run.data.train.sample_flag)
        return 'done'

    def write_report(self):
        out_dir = self.knobs['out_dir']
        try:
            self.dist.print('\n'.join(report.write(out_dir)))
        except Exception as e:  # a picture is no reason to end otherwise than the run did
            warn(f"no report ({type(e).__name__}: {e}). python plot.py {out_dir} --report=True makes it")


def first_loss_note(loss, expected, vocab_size):
    """For random weights whose first loss is not about ln(vocab_size)."""
    if loss < expected:
        why = ("below: random weights cannot know that much. does a position see the one it is to predict "
               "(the causal mask, the shift of the targets), or are the weights not random?")
    else:
        why = ("above: the network is sure of what it cannot know. are the initial weights too large, is a "
               "norm missing, or is vocab_size far above the ids that occur?")
    return f"note: the first loss is {loss:.2f}; ln({vocab_size}) is {expected:.2f}, and it is far {why}"


class CsvLog:
    """log.csv: a row per logged or evaluated iteration. A resume at `start` first drops the rows from there
    on: they are written again, once. What a full disk does not take waits."""

    def __init__(self, path, start):
        self.path, self.columns, rows = path, list(COLUMNS), []
        self.waiting, self.unwritten, self.warned = [], b'', False  # rows, the rest of a row
        try:
            if os.path.exists(path):
                rows = [row for row in self.read() if int(row['iter']) < start]
            self.rewrite(rows, self.columns)
        except OSError as e:
            fail(f"{path} cannot be written ({e.strerror}). make room, or name another --out_dir")
        except (ValueError, KeyError, csv.Error) as e:
            fail(f"{path} is not the log of a run ({type(e).__name__}: {first_line(e)}). move it away, and a "
                 "new one starts")

    def read(self):
        """Its whole rows. Columns that are not ours stay."""
        with open(self.path, newline='', encoding='utf-8') as f:
            reader = csv.DictReader(f)
            rows = [row for row in reader if None not in row.values() and None not in row]
            self.columns += [name for name in reader.fieldnames or () if name not in self.columns]
        return rows

    def rewrite(self, rows, columns):
        content = as_csv(columns, dict(zip(columns, columns)), *rows)
        with files.replacing(self.path) as f:
            f.write(content)
        self.columns = columns
        self.file = open(self.path, 'ab', buffering=0)  # so that it is known what the disk has taken

    def write(self, row):
        """row: {column: number}"""
        self.waiting.append(row)
        try:
            self.flush()
            self.warned = False
        except (OSError, ValueError, csv.Error) as e:  # no reason to end a run
            if not self.warned:
                warn(f"log.csv could not be written ({getattr(e, 'strerror', None) or e}), the run "
                     "continues; its rows wait")
            self.warned = True

    def flush(self):
        while self.unwritten or self.waiting:
            if not self.unwritten:
                if new := [name for name in self.waiting[0] if name not in self.columns]:
                    self.rewrite(self.read(), self.columns + new)
                self.unwritten = as_csv(self.columns, self.waiting.pop(0))
            self.unwritten = self.unwritten[self.file.write(self.unwritten):]

    def close(self):
        with contextlib.suppress(OSError):
            self.file.close()
        if self.waiting or self.unwritten:
            warn(f"log.csv lacks its last {len(self.waiting) + bool(self.unwritten):,} rows")


def as_csv(columns, *rows):
    text = io.StringIO()
    csv.DictWriter(text, columns, lineterminator='\n').writerows(rows)
    return text.getvalue().encode()


# -----------------------------------------------------------------------------
# run.json: what a run was asked to do, on which machine and code, and how it ended

PACKAGES = ('torch', 'numpy', 'tiktoken', 'tokenizers', 'wandb')


class RunRecord:
    """out_dir's run.json: the knobs and what follows from them. Each start is a session; if the run goes on,
    those of before are kept."""

    def __init__(self, run):
        self.path = os.path.join(run.knobs['out_dir'], 'run.json')
        earlier = files.read_json(self.path).get('sessions') if run.continues else []
        earlier = earlier if isinstance(earlier, list) else []  # a file may say anything
        meta = run.data.meta
        self.content = {
            'plan': run.overview, 'max_iters': run.knobs['max_iters'], 'parameters': run.n_params,
            'tokens_per_iter': run.tokens_per_iter, 'tokens_before': run.tokens_before,
            'environment': run.environment,
            'dataset': {'name': run.data.name, 'folder': run.data.folder,
                        **{key: meta.get(key) for key in ('splits', 'source', 'command')}},
            'knobs': run.knobs, 'outcome': None, 'sessions': [*earlier, describe_session(run.start_iter)]}
        self.write()

    def end(self, outcome, **figures):
        """`outcome`: 'done', 'stopped by ...', 'gave up: ...'. `figures`: iterations=1000, ..."""
        self.content.update(outcome=outcome, **figures)
        self.content['sessions'][-1].update(outcome=outcome, ended=now(), to_iter=figures['iterations'])
        self.write()

    def write(self):
        try:
            files.write_json(self.path, self.content)
        except OSError as e:  # a full disk must not end a run
            warn(f"{self.path} could not be written ({e.strerror}), the run continues")


def describe_session(iter_num):
    """When, how, where and with which code this process starts."""
    return {
        'started': now(),
        'from_iter': iter_num,
        'command': shlex.join([os.path.basename(sys.executable), *sys.argv]),
        'machine': platform.node(),
        'system': platform.platform(),
        'cpus': os.cpu_count(),
        'python': platform.python_version(),
        **{name: getattr(sys.modules[name], '__version__', None) for name in PACKAGES if name in sys.modules},
        **code_version(),
        'outcome': None,
    }


def now():
    return time.strftime('%Y-%m-%d %H:%M:%S %z')


def code_version():
    """The commit of the code, and whether any of its files was changed since."""
    git = ['git', '-C', os.path.dirname(os.path.abspath(__file__))]
    options = dict(capture_output=True, text=True, timeout=10, check=True)
    try:
        changes = subprocess.run([*git, 'status', '--porcelain', '--untracked-files=no'], **options).stdout
        commit = subprocess.run([*git, 'rev-parse', 'HEAD'], **options).stdout.strip()
        return {'commit': commit, 'changed_since': changes != ''}
    except (OSError, subprocess.SubprocessError):
        return {'commit': None}


# -----------------------------------------------------------------------------
# the rows of log.csv, for Weights & Biases

# the losses have nanoGPT's names
NAMES = {'loss': 'train/batch_loss', 'train_loss': 'train/loss', 'val_loss': 'val/loss',
         'perplexity': 'val/perplexity', 'bpb': 'val/bpb', 'hellaswag': 'val/hellaswag', 'core': 'val/core'}
BEST = {'train_loss': 'min', 'val_loss': 'min', 'perplexity': 'min', 'bpb': 'min', 'hellaswag': 'max',
        'core': 'max'}


def wandb_problems():
    # the folder wandb/ that runs leave is no package
    if getattr(importlib.util.find_spec('wandb'), 'origin', None) is not None:
        return []
    return ["wandb_log=True, but wandb is not installed. pip install wandb, or leave it out: log.csv has "
            "the same numbers"]


class WandbLog:
    gone = False

    def __init__(self, knobs, run_id):
        import wandb
        try:
            self.run = wandb.init(project=knobs['wandb_project'], name=knobs['wandb_run_name'],
                                  config=knobs, id=run_id, resume='allow')
        except wandb.Error as e:
            fail(f"wandb does not start ({first_line(e)}). wandb login, WANDB_MODE=offline, or "
                 "leave wandb_log out", everywhere=True)
        self.id = self.run.id
        self.run.define_metric('*', step_metric='iter')
        for name, best in BEST.items():  # in its tables the best value, not the last
            self.run.define_metric(NAMES[name], step_metric='iter', summary=best)

    def log(self, row):
        self.tell(self.run.log, {NAMES.get(name, name): value for name, value in row.items()})

    def end(self, **summary):
        """What wandb shows of the run in its tables."""
        self.tell(self.run.summary.update, summary)

    def tell(self, function, values):
        """function(values), as long as wandb's own process lives."""
        try:
            if not self.gone:
                function(values)
        except Exception as e:  # whatever it is: log.csv has the same numbers
            warn(f"wandb is gone ({first_line(e)}), the run continues without it")
            self.gone = True
