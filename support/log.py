"""What a run tells while it trains: console, log.csv, run.json, wandb; and the clock that measures it."""

import contextlib
import csv
import io
import itertools
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
from support.checkpoint import command_line, newest, resume_line
from support.compiling import trial_step
from support.console import format_duration
from support.errors import first_line

REPORT_EVERY = 60  # seconds, at most: drawing takes a second


class Clock:
    """Seconds of training: it stands still while the run evaluates, samples and saves."""

    def __init__(self, run, dist):
        saved = run.ckpt if run.resuming else {}
        self.dist, self.max_iters = dist, run.knobs['max_iters']
        self.seconds = saved.get('seconds', 0.0)
        self.spent = saved.get('spent', {})  # seconds of 'eval', 'save', 'sample'
        self.show = dist.progress('training', run.start_iter)
        self.note = ''  # for the live line

    def start(self):
        self.origin = time.perf_counter() - self.seconds
        self.lap_began, self.steps = self.seconds, 0

    def read(self):
        self.dist.synchronize()  # a GPU may be behind by more than an iteration
        self.seconds = time.perf_counter() - self.origin

    @contextlib.contextmanager
    def paused(self):
        self.read()
        yield
        self.origin = time.perf_counter() - self.seconds

    @contextlib.contextmanager
    def spending(self, what):
        """Add the seconds of this block to spent[what]."""
        t0 = time.perf_counter()
        yield
        self.spent[what] = self.spent.get(what, 0.0) + time.perf_counter() - t0

    def tick(self, it):
        """The update of iteration `it` was made."""
        self.steps += 1
        self.show(it + 1, self.max_iters, self.note)

    def lap(self, batches):
        """Milliseconds per iteration since the last lap. data_wait: the share of it that batches took."""
        self.read()
        elapsed = self.seconds - self.lap_began
        self.data_wait = batches.waited / elapsed
        ms = 1000 * elapsed / self.steps
        self.lap_began, self.steps, batches.waited = self.seconds, 0, 0.0
        return ms

    def state(self):
        return {'seconds': self.seconds, 'spent': self.spent}


def tell_duration(model, ddp_model, batch, autocast, dist, run):
    """Say how long the run will take, if that is more than a minute, by two micro-batches, whose gradients
    are dropped."""
    k, n = run.k, run.k.max_iters - run.start_iter
    if k.eval_only or n <= 0:
        return
    batch = [tensor.to(dist.device) for tensor in batch]
    for _ in range(2):  # the first one is slower
        t0 = time.perf_counter()
        trial_step(model, ddp_model, batch, autocast)
        dist.synchronize()
        step = time.perf_counter() - t0
        # seconds, in whole ones; a quarter more for updates and the log, which took 0.03 to 0.69 of this
        training = dist.all_reduce_max(1.25 * step * run.grad_accum_steps * n)
        if training < 60:
            return
    evaluating = step / 3 * run.eval_windows * len(run.data.splits) / k.batch_size / dist.world_size
    dist.print(f"time      about {format_duration(training)} for {n:,} iterations here, by forward and "
               f"backward passes of {step * run.grad_accum_steps:.3f} s; an evaluation about "
               f"{format_duration(evaluating)} more")


class Logger:
    """The console's lines, and the rows of log.csv and wandb."""

    def __init__(self, run, clock, dist):
        self.run, self.clock, self.dist, self.knobs = run, clock, dist, run.knobs
        self.row = {}  # of the present iteration: what was measured before its update
        saved = run.ckpt if run.resuming else {}
        # of the losses, each with 0.98 of the weight of the one after it: their weighted sum and the sum of
        # the weights, on the device, so that no iteration waits
        self.loss_sum = torch.tensor(saved.get('loss_sum') or [0.0, 0.0], device=dist.device)
        # in checkpoints: a resume continues the same curves
        self.wandb_run_id = saved.get('wandb_run_id') if run.continues else None
        self.reported = time.monotonic()
        self.outputs = []  # what takes rows, and how the run ended
        if self.knobs['wandb_log'] and dist.is_main:
            self.outputs.append(WandbLog(self.knobs, self.wandb_run_id))
            self.wandb_run_id = self.outputs[0].run.id
        if dist.is_main and not self.knobs['eval_only']:
            self.outputs += [CsvLog(f"{self.knobs['out_dir']}/log.csv", run.start_iter, run.compares),
                             RunRecord(run)]

    def metrics(self, it, metrics):
        """What an evaluation found before the update of iteration `it`."""
        if not metrics:
            return
        self.row = {**self.counts(it), **metrics,
                    **{f'{name}_seconds': seconds for name, seconds in self.clock.spent.items()}}
        interval = self.knobs['log_interval']
        if not interval or it % interval or it >= self.knobs['max_iters']:
            self.flush()  # else its line is completed by iteration()

    def counts(self, it):
        """How far the run is: tokens before the update of iteration `it`, seconds until now."""
        tokens = it * self.run.tokens_per_iter
        return {'iter': it, 'tokens': tokens, 'tokens_total': self.run.tokens_before + tokens,
                'seconds': self.clock.seconds}

    def add(self, loss):
        """Count an iteration's loss, a tensor, into the mean of the latest ones."""
        self.loss_sum *= 0.98
        self.loss_sum += torch.stack([loss, torch.ones_like(loss)]).where(loss.isfinite(), 0.0)

    def iteration(self, it, measured):
        """Print the line of iteration `it`. measured: loss, lr, grad_norm, ms per iteration, mfu (or nan),
        and whatever else should become a column of log.csv."""
        run, ms, loss = self.run, measured['ms'], measured['loss']
        epoch = it * run.tokens_per_iter / run.tokens_per_epoch
        per_second = 1000 * run.tokens_per_iter / ms
        mfu = None if math.isnan(measured['mfu']) else 100 * measured['mfu']
        data = 100 * self.clock.data_wait
        total, weight = self.loss_sum.tolist()
        smooth = total / weight if weight else None
        self.clock.note = f", loss {smooth:.4f}" if weight else ''
        self.dist.print(console.fit([
            f"iter {it}: loss {loss:.4f}", f"time {ms:.2f}ms", f"mfu {mfu:.2f}%" if mfu else '',
            f"lr {measured['lr']:.2e}", f"grad norm {measured['grad_norm']:.2f}", f"{per_second:,.0f} tok/s",
            f"epoch {epoch:.2f}", f"data {data:.1f}%",
            # the first one is slower
            f"eta {format_duration((self.knobs['max_iters'] - it - 1) * ms / 1000)}" if it > run.start_iter
            else '']))
        self.row = {
            **self.counts(it), 'progress': (it + 1) / self.knobs['max_iters'], 'epoch': epoch, 'data': data,
            'loss_smooth': smooth, 'tokens_per_second': per_second,
            'memory_gb': devices.peak_memory(self.dist.device), **measured, 'mfu': mfu,
            **self.row}  # an evaluation's seconds are those before the update
        with self.clock.paused():
            self.flush()

    def flush(self):
        """Write the row of the present iteration, and if it has an evaluation the report, once a minute."""
        if self.row:
            for output in self.outputs:
                output.log(self.row)
        if 'train_loss' in self.row and time.monotonic() > self.reported + REPORT_EVERY:
            self.write_report()
        self.row = {}

    def state(self):
        return {'wandb_run_id': self.wandb_run_id, 'loss_sum': self.loss_sum.tolist()}

    def close(self, it, saver, stop):
        """The last line of a run that ended at pass `it`, its report. Returns the exit status."""
        self.flush()
        outcome = self.last_line(it, saver, stop)
        for output in self.outputs:
            output.end(outcome=outcome, iterations=it, seconds=self.clock.seconds,
                       best_val_loss=saver.best_val_loss)
        for line in self.write_report():
            self.dist.print(line)
        self.dist.close()
        return stop.exit_status() if saver.whole or stop.gave_up else 4

    def last_line(self, it, saver, stop):
        """Prints how the run ended; returns it in a few words."""
        if stop.gave_up:  # the guard has said why
            return f"gave up: {stop.gave_up}"
        run, out_dir = self.run, self.knobs['out_dir']
        last = newest(out_dir)
        if not saver.whole:
            if run.dist.is_main:
                again = resume_line(run) if last else command_line(run, sys.argv[1:])
                say("error: the last checkpoint could not be written, see above (before it: "
                    f"{last or 'none'}). mend that, then: {again}")
            return 'ended without its last checkpoint'
        if stop.is_stopping():
            saved = (f"saved in {out_dir}. to continue: {resume_line(run)}"
                     if last and saver.writes else "with nothing saved yet")
            reason = f"stopped by {stop.reason()}"
            outcome = f"{reason} after {it:,} iterations"
            self.last_word(f"{outcome}, {saved}")
            # where a time limit ended it is chance: seeds of one limit are a group of plot.py's
            return reason if 'max_minutes' in reason else outcome
        if not self.knobs['eval_only']:
            best = (f", best validation loss {saver.best_val_loss:.4f} (ckpt_best.pt)"
                    if saver.best_val_loss < math.inf else '')
            self.last_word(f"done: {it:,} iterations in {format_duration(self.clock.seconds)}{best}. to see "
                           f"what it writes: python sample.py --out_dir={shlex.quote(out_dir)}"
                           + run.data.train.sample_flag)
        return 'done'

    def last_word(self, text):
        """Also where nobody reads standard output any more: after `| tee log.txt` and Ctrl-C."""
        self.dist.print(text)
        if self.dist.is_main and getattr(sys.stdout, 'name', '') == os.devnull:  # see say()
            say(text)

    def write_report(self):
        """report.md and loss.png. Returns lines for the console."""
        self.reported, out_dir = time.monotonic(), self.knobs['out_dir']
        if not self.dist.is_main or self.knobs['eval_only']:
            return []
        try:
            return report.write(out_dir)
        except Exception as e:  # a picture is no reason to end otherwise than the run did
            warn(f"no report ({type(e).__name__}: {e}). python plot.py {out_dir} --report=True makes it")
            return []


class CsvLog:
    """log.csv: a row per logged or evaluated iteration. A resume at `start` first drops the rows from there
    on: they are written again, once. What a full disk does not take waits. compares: whether the losses to
    come are of the windows of those before, which else get a column of their own."""

    def __init__(self, path, start, compares):
        self.path, self.columns, self.waiting = path, list(report.COLUMNS), []
        try:
            rows = self.read() if os.path.exists(path) else []
            rows = [row for row in rows if int(row['iter']) < start]
            for row in () if compares else rows:
                row['val_loss_before'] = row.pop('val_loss') or row.get('val_loss_before')
            self.rewrite(rows)
        except OSError as e:
            fail(f"{path} cannot be written ({e.strerror}). make room, or name another --out_dir")
        except (ValueError, KeyError, csv.Error) as e:
            fail(f"{path} is no log of a run ({type(e).__name__}: {first_line(e)}). move it away")

    def read(self):
        """Its whole rows. Columns that are not ours stay."""
        with open(self.path, newline='', encoding='utf-8') as f:
            return [row for row in csv.DictReader(f) if None not in row.values() and None not in row]

    def rewrite(self, rows):
        """Write the file anew, with all the columns that `rows` have."""
        columns = list(dict.fromkeys(itertools.chain(self.columns, *rows)))
        with files.replacing(self.path) as f:
            f.write(as_csv(columns, dict(zip(columns, columns)), *rows))
        self.columns = columns

    def log(self, *rows):
        """rows: {column: number} each"""
        self.waiting += rows
        try:
            self.flush()
        except (OSError, ValueError, csv.Error) as e:  # no reason to end a run
            if len(self.waiting) == 1:
                warn(f"log.csv could not be written ({e}), the run continues; its rows wait")

    def flush(self):
        """Write the rows that wait: all of them or none."""
        if not set().union(*self.waiting) <= set(self.columns):
            self.rewrite(self.read() + self.waiting)
        else:
            size = os.path.getsize(self.path)
            try:
                with open(self.path, 'ab') as f:
                    f.write(as_csv(self.columns, *self.waiting))
            except OSError:
                os.truncate(self.path, size)
                raise
        self.waiting.clear()

    def end(self, **summary):
        self.log()
        if self.waiting:
            warn("log.csv lacks its last rows")


def as_csv(columns, *rows):
    text = io.StringIO()
    csv.DictWriter(text, columns, lineterminator='\n').writerows(rows)
    return text.getvalue().encode()


# -----------------------------------------------------------------------------
# run.json: what a run was asked to do, on which machine and code, and how it ended


class RunRecord:
    """run.json. Each start is a session; if a run is continued, those of before are kept."""

    def __init__(self, run):
        self.path = f"{run.knobs['out_dir']}/run.json"
        before = files.read_json(self.path) if run.continues else {}
        knobs = before.get('knobs') or run.knobs
        now_set = {**run.knobs, 'init_from': knobs.get('init_from')}  # where it began, also after a resume
        changed = {name: knobs.get(name) for name in run.given.keys() - report.ASIDE
                   if now_set[name] != knobs.get(name)}
        done = before if run.start_iter >= run.k.max_iters else {}  # nothing is trained: it stays as it was
        self.session = {
            'started': now(), 'from_iter': run.start_iter, 'outcome': None,
            'command': command_line(run, sys.argv[1:]),
            'machine': platform.node(), 'system': platform.platform(),
            'python': platform.python_version(), 'commit': code_version()}
        self.content = {
            'plan': run.overview, 'max_iters': run.k.max_iters,
            'tokens_per_iter': run.tokens_per_iter, 'environment': run.environment,
            'code': run.code,
            'dataset': {'name': run.data.name, 'folder': run.data.folder,
                        **{key: run.data.meta.get(key) for key in ('splits', 'source', 'command')}},
            'knobs': now_set, 'changed': {**changed, **before.get('changed', {})},
            'given': sorted({*before.get('given', ()), *run.given}), 'outcome': None, **done,
            'sessions': [*before.get('sessions', []), self.session]}
        self.write()

    def log(self, row):
        """The rows are in log.csv."""

    def end(self, outcome, iterations, **summary):
        self.content.update(outcome=outcome, iterations=iterations, **summary)
        self.session.update(outcome=outcome, ended=now(), to_iter=iterations)
        self.write()

    def write(self):
        try:
            files.write_json(self.path, self.content)
        except OSError as e:  # a full disk must not end a run
            warn(f"{self.path} could not be written ({e.strerror}), the run continues")


def now():
    return time.strftime('%Y-%m-%d %H:%M:%S %z')


def code_version():
    """The commit of the code, with '-dirty' if any of its files was changed since."""
    command = ['git', '-C', os.path.dirname(__file__), 'describe', '--always', '--dirty', '--abbrev=40',
               '--exclude=*']
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git here
        return None


# -----------------------------------------------------------------------------
# the rows of log.csv, for Weights & Biases

NAMES = {'train_loss': 'train/loss', 'val_loss': 'val/loss'}  # nanoGPT's


class WandbLog:
    gone = False

    def __init__(self, knobs, run_id):
        import wandb
        self.run = wandb.init(project=knobs['wandb_project'], name=knobs['wandb_run_name'], config=knobs,
                              id=run_id, resume='allow')
        self.run.define_metric('*', step_metric='iter')

    def log(self, row):
        self.tell(self.run.log, {NAMES.get(name, name): value for name, value in row.items()
                                 if value is not None})

    def end(self, **summary):
        """What wandb shows of the run in its tables."""
        self.tell(self.run.summary.update, summary)

    def tell(self, function, values):
        """function(values), as long as wandb's own process lives."""
        try:
            if not self.gone:
                function(values)
        except Exception as e:  # whatever it is: log.csv has the same numbers
            self.gone = True
            warn(f"wandb is gone ({first_line(e)}), the run continues without it")
