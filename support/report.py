"""report.md and loss.png of a run, made from what is in its folder: run.json, log.csv, eval.json,
samples.md."""

import math
import os
import re
import statistics

from support.console import format_duration
from support.curves import is_evaluation, points, read_log, remarks, remarks_on_validation, values
from support.draw import draw, label_of
from support.files import read_json, write_whole

ROWS = 12  # of the table of evaluations, at most
NO_END = 'killed, or still running'


def write(out_dir):
    """Write report.md and loss.png. Returns lines for the console: where they are, and what is amiss."""
    picture = os.path.join(out_dir, 'loss.png')
    told = f" and {picture}"
    try:
        draw([out_dir], picture, title=os.path.basename(os.path.abspath(out_dir)), lr=True)
    except ImportError:
        told = (" (no loss.png, as matplotlib is not installed: pip install matplotlib, then python plot.py "
                f"{out_dir} --report=True)")
    except Exception as e:  # the page matters more than the picture
        told = f" (no loss.png: {e})"
    log = read_log(out_dir)
    lines = page(out_dir, log, picture=told == f" and {picture}")
    path = os.path.join(out_dir, 'report.md')
    write_whole(path, '\n'.join(lines).encode('utf-8', 'replace'))
    return [f"report: {path}{told}", *(f"note: {remark}" for remark in remarks_on_validation(log))]


def page(out_dir, log, picture):
    """The lines of report.md; each section ends with an empty one."""
    run = read_json(os.path.join(out_dir, 'run.json'))
    seconds = run.get('seconds', last(log, 'seconds') or 0)
    yield from [f"# {os.path.basename(os.path.abspath(out_dir))}", '']
    yield from section('run.json or log.csv', summary, run, log, seconds)
    if picture:
        yield from ["![The loss](loss.png)", '']
    notes = remarks(log)
    if notes:
        yield from ["## Remarks", '', *(f"- {note}" for note in notes), '']
    yield from latest_samples(os.path.join(out_dir, 'samples.md'))
    yield from evaluations(log)
    yield from section('eval.json', eval_results, read_json(os.path.join(out_dir, 'eval.json')))
    yield from section('run.json', settings, run, log, seconds)
    yield from section('run.json', sessions, run.get('sessions', []))


def section(file, function, *args):
    """The lines of function(*args), or one that says that `file` is no help."""
    try:
        return list(function(*args))
    except Exception as e:  # a file may say anything
        return [f"(This part is missing, as {file} cannot be understood: {type(e).__name__}.)", '']


def last(log, name):
    """The last number in a column, or None."""
    return (values(log, name) or [None])[-1]


def summary(run, log, seconds):
    """How it ended, and the best validation loss."""
    made = int(max([last(log, 'iter') or 0] + [it + 1 for it, _ in points(log, 'iter', 'loss')]))
    made = run.get('iterations', made)
    tokens = made * run['tokens_per_iter'] if 'tokens_per_iter' in run else int(last(log, 'tokens') or 0)
    outcome = run.get('outcome') or NO_END
    of = f" of {run['max_iters']:,}" if run.get('max_iters') else ''
    yield (f"**{outcome[0].upper()}{outcome[1:]}** after {made:,}{of} iterations, {tokens:,} tokens, "
           f"{format_duration(seconds)} of training.")

    losses = points(log, 'iter', 'val_loss')
    if losses:
        it, best = min(losses, key=lambda point: point[1])
        bpb = dict(points(log, 'iter', 'bpb')).get(it)
        bits = f", {bpb:.4f} bits per byte" if bpb else ''
        if losses[-1][0] != it:
            end = f"; the last one was {losses[-1][1]:.4f}."
        elif it > 0:
            end = ", the last one."
        else:
            end = ", before any training; there was no later evaluation."
        yield (f"Best validation loss **{best:.4f}** (perplexity {math.exp(min(best, 700)):.2f}{bits}) at "
               f"iteration {it:,.0f}{end}")
    yield ''


def settings(run, log, seconds):
    """The plan, speed and time, machine, code and data."""
    yield from ["## Settings", '', "| | |", "|---|---|"]
    for line in run.get('plan') or []:
        yield f"| {line[:10].strip()} | {line[10:].replace('|', ' ')} |"
    speeds = values(log, 'tokens_per_second')
    if speeds:
        speed = f"{statistics.median(speeds):,.0f} tokens/s in the median"
        if values(log, 'mfu'):
            speed += f", MFU {statistics.median(values(log, 'mfu')):.1f}%"
        if last(log, 'memory_gb'):
            speed += f", {last(log, 'memory_gb'):.2f} GB of memory at most"
        yield f"| speed | {speed} |"
    time = f"{format_duration(seconds)} training"
    for name, word in (('eval', 'evaluating'), ('save', 'saving'), ('sample', 'sampling')):
        spent = last(log, f'{name}_seconds')
        if spent:
            time += f", {format_duration(spent)} {word}"
    yield f"| time | {time} |"
    if run.get('sessions'):
        s = run['sessions'][-1]
        yield (f"| machine | {s.get('machine')}, {s.get('system')}, {s.get('cpus')} CPUs, Python "
               f"{s.get('python')}, torch {s.get('torch')} |")
        changed = ', with changes' if s.get('changed_since') else ''
        yield f"| code | commit {(s.get('commit') or 'unknown')[:12]}{changed} |"
    for split, part in (run.get('dataset') or {}).get('splits', {}).items():
        sha256 = (part.get('sha256') or 'unknown')[:16]
        yield f"| {split}.bin | {part.get('tokens', 0):,} tokens, sha256 {sha256} |"
    yield ''


def sessions(all_sessions):
    """When the run was started and resumed, with the commands."""
    if not all_sessions:
        return
    yield from ["| started | from iteration | ended | how |", "|---|---|---|---|"]
    for s in all_sessions:
        outcome = s.get('outcome') or NO_END
        yield f"| {s.get('started')} | {s.get('from_iter', 0):,} | {s.get('ended', '')} | {outcome} |"
    commands = dict.fromkeys(s.get('command', '') for s in all_sessions)  # each one once
    yield from ['', "```sh", *commands, "```", '']


def evaluations(log):
    """The table of evaluations in the loop, thinned if it is long."""
    columns = [name for name in log if values(log, name) and is_evaluation(log, name)
               and name != 'perplexity' and not name.endswith('_seconds')]
    rows = [i for i in range(len(log.get('iter', []))) if any(log[name][i] is not None for name in columns)]
    if not rows:
        return
    yield from ["## Evaluations", '']
    if len(rows) > ROWS:
        yield from [f"{ROWS} of {len(rows):,}; all of them are in log.csv.", '']
        rows = [rows[round(k * (len(rows) - 1) / (ROWS - 1))] for k in range(ROWS)]
    names = [name for name in ('iter', 'tokens', *columns, 'seconds') if values(log, name)]
    heads = {'iter': 'iteration', 'seconds': 'training time'}
    yield table_row(heads.get(name) or label_of(name).split(' (')[0] for name in names)
    yield '|' + '---:|' * len(names)
    yield from (table_row(cell(name, log[name][i]) for name in names) for i in rows)
    yield ''


def table_row(cells):
    return f"| {' | '.join(cells)} |"


def cell(name, value):
    if value is None:
        return ''
    if name == 'seconds':
        return format_duration(value)
    return f"{value:,.0f}" if name in ('iter', 'tokens') else f"{value:,.4f}"


def eval_results(found):
    """What eval.py measured."""
    if not found.get('texts') and not found.get('tasks'):
        return
    yield from [f"## By eval.py, after {found.get('iter', 0):,} iterations", '']
    for name, r in found.get('texts', {}).items():
        bits = f", {r['bpb']:.4f} ± {r['bpb_error'] or 0:.4f} bits per byte" if r['bpb'] else ''
        yield (f"- {name}: loss {r['loss']:.4f} ± {r['loss_error'] or 0:.4f}, perplexity "
               f"{r['perplexity']:.2f}{bits} over {r['tokens']:,} tokens")
    if found.get('tasks'):
        yield from ['', "| task | shots | examples | accuracy | chance |", "|---|---:|---:|---:|---:|"]
    for name, r in found.get('tasks', {}).items():
        truncated = f" ({r['truncated']:,} truncated)" if r.get('truncated') else ''
        accuracy = f"{100 * r['accuracy']:.2f} ± {100 * r['error']:.2f} %"
        examples = f"{r['questions']:,}{truncated}"
        yield table_row([name, str(r['shots']), examples, accuracy, f"{100 * r['chance']:.1f} %"])
    if found.get('core') is not None:
        yield from ['', f"CORE {found['core']:.4f}"]
    yield ''


def latest_samples(path):
    """The last section of samples.md."""
    if os.path.exists(path):
        with open(path, encoding='utf-8', errors='replace') as f:
            sections = re.split(r'(?m)^## (?=after [\d,]+ iterations$)', f.read())
        if sections[-1].strip():
            yield f"## Samples, {sections[-1]}"
