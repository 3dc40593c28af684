"""What a run tells while it trains: console, log.csv, run.json, wandb; and the clock that measures it."""

import contextlib
import csv
import io
import math
import os
import time

from configurator import fail, warn
from support import console, devices, files, shared_cpu
from support.console import format_duration
from support.errors import first_line
from support.run_json import RunRecord

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
        self.pace = shared_cpu.Pace()
        self.loss_sum = (run.ckpt.get('loss_sum') if run.continues else None) or [0.0, 0.0]  # and weight
        self.wandb, self.wandb_run_id = None, run.ckpt.get('wandb_run_id') if run.continues else None
        writes = dist.is_main and not self.knobs['eval_only']
        if self.knobs['wandb_log'] and dist.is_main:
            from support.wandb_log import WandbLog
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
        if self.dist.device.type == 'cpu' and (note := self.pace.note(ms)):
            self.dist.print(note)
        self.row.update({
            **measured, 'iter': it, 'progress': (it + 1) / self.knobs['max_iters'], 'epoch': epoch,
            'mfu': mfu, 'loss_smooth': smooth, 'seconds': clock.seconds, 'tokens': tokens,
            'tokens_total': run.tokens_before + tokens, 'tokens_per_second': per_second,
            'data': 100 * clock.data_wait, 'memory_gb': devices.peak_memory(self.dist.device)})
        self.flush()
        self.losses.append(measured['loss'])
        if it == 0 and run.from_scratch:
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
            from support.sanity import first_loss_note
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
            from support.early_end import last_line
            return last_line(self.run, it, saver, stop)
        if not self.knobs['eval_only']:
            best = f", best validation loss {saver.best_val_loss:.4f}" if self.run.data.val else ''
            then = '\n' if self.dist.on_terminal else '. '
            self.dist.print(f"done: {it:,} iterations in {format_duration(self.clock.seconds)}{best}{then}to "
                            f"see what it writes: python sample.py --out_dir={self.knobs['out_dir']}"
                            + self.run.data.train.sample_flag)
        if self.knobs['overfit_batch'] and self.losses:
            from support.sanity import overfit_note
            self.dist.print(overfit_note([loss for loss in self.losses if math.isfinite(loss)]))
        return 'done'

    def write_report(self):
        out_dir = self.knobs['out_dir']
        try:
            from support import report
            self.dist.print('\n'.join(report.write(out_dir)))
        except Exception as e:  # a picture is no reason to end otherwise than the run did
            warn(f"no report ({type(e).__name__}: {e}). python plot.py {out_dir} --report=True makes it")


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
        with files.removed_on_error(self.path + '.tmp'):
            with files.create(self.path + '.tmp') as f:
                f.write(content)
            os.replace(self.path + '.tmp', self.path)
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
