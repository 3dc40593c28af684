"""What a run tells while it trains: console, log.csv, run.json, wandb; and the clock that measures it."""

import contextlib
import csv
import importlib.metadata
import importlib.util
import io
import math
import os
import platform
import shlex
import subprocess
import sys
import time

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
        """Milliseconds per iteration since the last lap; `data_wait` is the share of it spent waiting for
        batches."""
        self.seconds = time.perf_counter() - self.origin
        elapsed = self.seconds - self.lap_began
        self.data_wait = batches.waited / max(elapsed, 1e-9)
        ms = 1000 * elapsed / self.steps
        self.lap_began, self.steps, batches.waited = self.seconds, 0, 0.0
        return ms

    def state(self):
        return {'seconds': self.seconds, 'spent': dict(self.spent)}


class Logger:

    def __init__(self, run, clock, dist):
        self.run, self.clock, self.dist, self.knobs = run, clock, dist, run.knobs
        self.row = {}  # of the present iteration: what was measured before its update
        self.average_ms = None  # per iteration, over the latest ones, for the time left
        self.losses = []  # logged ones, for overfit_batch
        self.loss_sum = (run.ckpt.get('loss_sum') if run.continues else None) or [0.0, 0.0]  # and weight
        self.wandb, self.wandb_run_id = None, run.ckpt.get('wandb_run_id') if run.continues else None
        writes = dist.is_main and not self.knobs['eval_only']
        if self.knobs['wandb_log'] and dist.is_main:
            self.wandb = WandbLog(self.knobs, self.wandb_run_id)
            self.wandb_run_id = self.wandb.id  # goes into checkpoints: a resume continues the same curves
        self.csv = CsvLog(os.path.join(self.knobs['out_dir'], 'log.csv'), run.start_iter) if writes else None
        self.record = RunRecord(self.knobs['out_dir'], self.knobs, facts(run), run.continues, run.start_iter,
                                enabled=writes)

    def metrics(self, it, metrics):
        """What an evaluation found before the update of iteration `it`."""
        if metrics:
            times = {f'{name}_seconds': self.clock.spent.get(name) for name in ('eval', 'save', 'sample')}
            self.row = {'iter': it, **metrics, **times}
            interval = self.knobs['log_interval']
            if not interval or it % interval or it >= self.knobs['max_iters']:
                self.row.update(tokens=it * self.run.tokens_per_iter, seconds=self.clock.seconds)
                self.flush()  # else its line is completed by iteration()

    def iteration(self, it, measured):
        """Print the line of iteration `it`. measured: loss, lr, grad_norm, ms per iteration, mfu (or nan),
        and whatever else should become a column of log.csv."""
        run, clock, ms = self.run, self.clock, measured['ms']
        tokens = (it + 1) * run.tokens_per_iter
        epoch = tokens / self.knobs['block_size'] / run.samples_per_epoch
        per_second = 1000 * run.tokens_per_iter / ms
        mfu = None if math.isnan(measured['mfu']) else 100 * measured['mfu']
        parts = {'loss': f"iter {it}: loss {measured['loss']:.4f}", 'time': f"time {ms:.2f}ms",
                 'mfu': f"mfu {mfu:.2f}%" if mfu else '', 'lr': f"lr {measured['lr']:.2e}",
                 'grad_norm': f"grad norm {measured['grad_norm']:.2f}", 'speed': f"{per_second:,.0f} tok/s",
                 'epoch': f"epoch {epoch:.2f}", 'data': f"data {100 * clock.data_wait:.1f}%",
                 'eta': self.time_left(it, ms)}
        smooth = smooth_loss(self.loss_sum, measured['loss'])
        self.print_iteration({name: part for name, part in parts.items() if part}, tokens, smooth)
        self.row.update({
            **measured, 'iter': it, 'progress': (it + 1) / self.knobs['max_iters'], 'epoch': epoch,
            'mfu': mfu, 'loss_smooth': smooth, 'seconds': clock.seconds, 'tokens': tokens,
            'tokens_total': run.tokens_before + tokens, 'tokens_per_second': per_second,
            'data': 100 * clock.data_wait, 'memory_gb': devices.peak_memory(self.dist.device)})
        self.flush()
        self.losses.append(measured['loss'])
        if it == 0 and run.start == 'scratch':
            self.check_first_loss(measured['loss'])

    def print_iteration(self, parts, tokens, smooth):
        if not self.dist.on_terminal:  # people's scripts find the numbers there
            return self.dist.print(', '.join(parts.values()))
        self.dist.print(console.fit(parts))
        before = self.run.tokens_before
        in_all = f" ({console.amount(before + tokens)} in all)" if before else ''
        loss = '' if smooth is None else f", loss {smooth:.4f}"
        self.clock.note = f"{loss}, {console.amount(tokens)} tokens{in_all}"

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
        return {'wandb_run_id': self.wandb_run_id, 'loss_sum': list(self.loss_sum)}

    def close(self, it, saver, stop):
        """The last line of a run that ended at pass `it`, its report. Returns the exit status."""
        self.flush()
        status = stop.exit_status() if saver.whole or stop.gave_up else 4
        outcome = self.last_line(it, saver, stop)
        if self.wandb:
            self.wandb.end(outcome=outcome, iterations=it, best_val_loss=saver.best_val_loss)
        self.record.end(outcome, iterations=it, seconds=self.clock.seconds, best_val_loss=saver.best_val_loss)
        if self.csv:
            self.csv.close()
            self.write_report()
        self.dist.close()
        return status

    def last_line(self, it, saver, stop):
        """Prints how the run ended; returns it in a few words."""
        if stop.is_stopping() or not saver.whole:
            return self.early_end(it, saver, stop)
        if not self.knobs['eval_only']:
            best = f", best validation loss {saver.best_val_loss:.4f}" if self.run.data.val else ''
            then = '\n' if self.dist.on_terminal else '. '
            self.dist.print(f"done: {it:,} iterations in {format_duration(self.clock.seconds)}{best}{then}to "
                            f"see what it writes: python sample.py --out_dir={self.knobs['out_dir']}"
                            + self.run.data.train.sample_flag)
        if self.knobs['overfit_batch'] and self.losses:
            self.dist.print(overfit_note([loss for loss in self.losses if math.isfinite(loss)]))
        return 'done'

    def early_end(self, it, saver, stop):
        run = self.run
        out_dir = run.knobs['out_dir']
        if stop.gave_up:  # the guard has said why
            return f"gave up: {stop.gave_up}"
        if not saver.whole:
            if run.dist.is_main:
                say(f"error: the last checkpoint could not be written ({newest(out_dir) or 'none'} "
                    f"is the newest). make room, then: {resume_line(run, 'auto')}")
            return 'ended without its last checkpoint'
        saved = f"saved in {out_dir}. to continue: {resume_line(run)}"
        if it == run.start_iter and not run.resuming:
            saved = "with nothing to save yet"
        run.dist.print(f"stopped by {stop.reason()} after {it:,} iterations, {saved}")
        return f'stopped by {stop.reason()}'

    def write_report(self):
        out_dir = self.knobs['out_dir']
        try:
            self.dist.print('\n'.join(report.write(out_dir)))
        except Exception as e:  # a picture is no reason to end otherwise than the run did
            warn(f"no report ({type(e).__name__}: {e}). python plot.py {out_dir} --report=True makes it")


def first_loss_note(loss, expected, vocab_size):
    """For random weights whose first loss is not about ln(vocab_size)."""
    if loss < expected:
        return (f"note: the first loss is {loss:.2f}, far below ln({vocab_size}) = {expected:.2f}: random "
                "weights cannot know that much. does a position see the one it is to predict (the causal "
                "mask, the shift of the targets), or are the weights not random?")
    return (f"note: the first loss is {loss:.2f}, far above ln({vocab_size}) = {expected:.2f}: the network "
            "is sure of what it cannot know. are the initial weights too large (init, a changed layer), is "
            "a norm missing, or is vocab_size far above the ids that occur?")


def overfit_note(losses):
    """What overfit_batch has shown, by the losses of its iterations."""
    if not losses:
        return "overfit_batch: no finite loss was logged. model or loop is broken"
    first, last = losses[0], min(losses[-5:])
    if last < 0.1 * first:
        return (f"overfit_batch: the loss of one batch fell from {first:.3f} to {last:.4f}. model and loop "
                "learn")
    return (f"overfit_batch: the loss of one batch fell from {first:.3f} to {last:.3f} in {len(losses):,} "
            "logged iterations, not to nearly 0. give it more of them or a larger learning rate, and no "
            "dropout; if that does not help, model or loop is broken")


def smooth_loss(loss_sum, loss):
    """The mean of the logged losses up to this one, each with 0.9 of the weight of the one after it.
    loss_sum: their weighted sum and the sum of the weights, which are brought up to date."""
    if math.isfinite(loss):
        loss_sum[:] = 0.9 * loss_sum[0] + loss, 0.9 * loss_sum[1] + 1
    return loss_sum[0] / loss_sum[1] if loss_sum[1] else None


def facts(run):
    """What run.json tells besides the knobs."""
    dataset = {'name': run.data.name, 'folder': run.data.folder}
    dataset.update({key: run.data.meta.get(key) for key in ('splits', 'source', 'command')})
    return {'plan': run.overview, 'max_iters': run.knobs['max_iters'], 'parameters': run.n_params,
            'tokens_per_iter': run.tokens_per_iter, 'tokens_before': run.tokens_before,
            'environment': run.environment, 'dataset': dataset}


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
    """The run.json of `out_dir`: `knobs` is a dict, `facts` what follows from them. Each start is a session;
    if the run is `continued`, those of before are kept."""

    def __init__(self, out_dir, knobs, facts, continued, iter_num, enabled=True):
        self.path = os.path.join(out_dir, 'run.json') if enabled else None
        if not enabled:
            return
        earlier = files.read_json(self.path).get('sessions') if continued else []
        earlier = earlier if isinstance(earlier, list) else []  # a file may say anything
        sessions = [*earlier, describe_session(iter_num)]
        self.content = {**facts, 'knobs': knobs, 'outcome': None, 'sessions': sessions}
        self.write()

    def end(self, outcome, **figures):
        """`outcome`: 'done', 'stopped by ...', 'gave up: ...'. `figures`: iterations=1000, ..."""
        if self.path:
            self.content.update(outcome=outcome, **figures)
            session = self.content['sessions'][-1]
            session.update(outcome=outcome, ended=now(), to_iter=figures.get('iterations'))
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
        **{name: version(name) for name in PACKAGES if name in sys.modules},
        **code_version(),
        'outcome': None,
    }


def now():
    return time.strftime('%Y-%m-%d %H:%M:%S %z')


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # used from its source tree
        return getattr(sys.modules[package], '__version__', None)


def code_version():
    """The commit of the code, and whether any of its files was changed since."""
    try:
        changes = git('status', '--porcelain', '--untracked-files=no')
        return {'commit': git('rev-parse', 'HEAD'), 'changed_since': changes != ''}
    except (OSError, subprocess.SubprocessError):
        return {'commit': None}


def git(*args):
    command = ['git', '-C', os.path.dirname(os.path.abspath(__file__)), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


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
        self.tell(lambda run: run.log({NAMES.get(name, name): value for name, value in row.items()}))

    def end(self, **summary):
        """What wandb shows of the run in its tables."""
        self.tell(lambda run: run.summary.update(summary))

    def tell(self, function):
        """function(run), as long as wandb's own process lives."""
        if self.run is None:
            return
        try:
            function(self.run)
        except Exception as e:  # whatever it is: log.csv has the same numbers
            reason = first_line(e)
            warn(f"wandb is gone ({reason}), the run continues without it")
            self.run = None
