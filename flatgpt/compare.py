"""
Is run B better than run A? Compare the ends of finished runs, with the noise that different seeds show.

A side is a list of runs that differ in the seed. They may have several lengths: runs whose compute differs by
less than a factor of SAME_LENGTH have one length, and the mean of their final losses is its end.

The difference d = (mean of B) - (mean of A) has a standard error e with f degrees of freedom:

    A and B have the same seeds; s is the standard deviation of the differences of the n pairs
        e^2 = s^2 / n
        f = n - 1
    other seeds (Welch); s_A and s_B are the standard deviations of n_A and n_B runs
        e^2 = s_A^2 / n_A + s_B^2 / n_B
        f = e^4 / ((s_A^2 / n_A)^2 / (n_A - 1) + (s_B^2 / n_B)^2 / (n_B - 1))
    a single run in A or B; s is the standard deviation of all ends, pooled
        e^2 = s^2 / n_A + s^2 / n_B
        f = the sum of n - 1 over all ends

Runs with the same seed train on the same batches in the same order, so that much of their noise cancels.
The interval from d - t e to d + t e contains the true difference with 95% confidence, where t is the 97.5%
quantile of Student's distribution. B is better if the interval is below 0, worse if it is above 0.

The compute that a side needs for a loss is interpolated between the ends of two of its lengths: the loss is
taken to be linear in the logarithm of the compute. The middle of a run is never used, as its loss would be
lower if the learning rate had already fallen.
"""

import hashlib
import itertools
import math
import os
import re
import shlex
import statistics

import numpy as np

from configurator import InputError
from flatgpt.files import format_duration, read_json, run_flags

SAME_LENGTH = 1.25
FINISHED = 0.3  # a schedule is finished if its learning rate ends below this share of the peak
# 97.5% quantiles of Student's distribution, which are nearly linear in 1 / (degrees of freedom)
T_DEGREES = [math.inf, 60, 20, 10, 8, 6, 5, 4, 3, 2, 1]
T_QUANTILES = [1.960, 2.000, 2.086, 2.228, 2.306, 2.447, 2.571, 2.776, 3.182, 4.303, 12.706]
COSTS = ['compute', 'iter', 'seconds']  # columns of log.csv; read_run() adds compute, in FLOPs

# -----------------------------------------------------------------------------
# runs, and the ends of a side


def read_run(folder, log):
    """Return a finished run as a dict. log: the rows of its log.csv, {column: number}."""
    record = read_json(os.path.join(folder, 'run.json'))
    if not log or not record:
        raise InputError(f"{folder} has no log.csv or no run.json. Name the folders of runs.")
    if 'flops_per_token' not in record:
        raise InputError(f"run.json in {folder} has no flops_per_token: an older train.py wrote it. Train "
                         "again.")
    evaluations = [row for row in log if 'val_loss' in row and row['iter'] == record['max_iters']]
    if not evaluations or record['iterations'] == 0:
        flags = run_flags(folder, record['config'].get('data_dir'))
        raise InputError(f"{folder} is not finished, or has no validation loss at its end: "
                         f"{record['iterations']} of {record['max_iters']} iterations, "
                         f"{record['outcome'] or 'in progress'}. Only finished runs can be compared. To "
                         f"finish one: python train.py --init_from=resume {flags}.")
    for row in log:
        row['compute'] = row['tokens'] * record['flops_per_token']
    return {'folder': folder, 'record': record, 'log': log, 'end': evaluations[-1]}


def evaluated_on(run, metric):
    """Return a text that says on what the final `metric` of a run was measured; None if that is unknown."""
    record = run['record']
    val = record['dataset']['val']
    is_all = record['val_targets'] == val['tokens'] - 1
    if metric == 'val_loss':
        identity = f"checksum {val['sha256']}"
        if val['sha256'] == 'unknown':  # as in nanoGPT's folders
            identity = f"dataset {record['dataset']['name']}, without a checksum"
        if is_all:
            return f"all {val['tokens']:,} tokens ({identity})"
        return (f"{record['val_targets']:,} of {val['tokens']:,} tokens ({identity}), in sequences of "
                f"{record['config']['block_size']}")
    if is_all and record['val_bytes'] and metric in run['end']:
        size = f"{record['val_bytes']:,} bytes in {record['val_documents']} documents"
        return f"all of the text, which is taken to be the same because of its size: {size}"
    return None


def choose_metric(runs):
    """
    Return the column to compare, and a text that says on what it was measured.

    It is the loss if all runs were evaluated on the same tokens, otherwise bits per byte if they were
    evaluated on the same text. Otherwise, raise InputError.
    """
    for metric in ['val_loss', 'val_bpb']:
        texts = {evaluated_on(run, metric) for run in runs}
        if len(texts) == 1 and None not in texts:
            return metric, texts.pop()
    first, *others = [(run['folder'], evaluated_on(run, 'val_loss')) for run in runs]
    other = next(pair for pair in others if pair[1] != first[1])
    raise InputError(f"{first[0]} and {other[0]} were evaluated on different data: {first[1]}; {other[1]}. "
                     "Train both with --eval_iters=0, on datasets with the same validation text.")


def ends_of(runs, metric):
    """Return the ends of a side, dicts, the shortest length first. 'std' is None for a single run."""
    lengths = []
    for run in sorted(runs, key=lambda run: run['end']['compute']):
        if not lengths or run['end']['compute'] > SAME_LENGTH * lengths[-1][0]['end']['compute']:
            lengths.append([])
        lengths[-1].append(run)
    ends = []
    for length in lengths:
        length.sort(key=lambda run: run['record']['config']['seed'])
        seeds = [run['record']['config']['seed'] for run in length]
        if len(set(seeds)) < len(seeds):
            folders = ', '.join(run['folder'] for run in length)
            raise InputError(f"the runs of a side must have different seeds: {folders} have {seeds}. Train "
                             "with another --seed, or name the runs of the other side after --versus.")
        losses = [run['end'][metric] for run in length]
        end = {'runs': length, 'seeds': seeds, 'losses': losses, 'n': len(losses), 'std': None}
        end['loss'] = statistics.mean(losses)
        if len(losses) > 1:
            end['std'] = statistics.stdev(losses)
        for cost in COSTS:
            end[cost] = statistics.mean(run['end'][cost] for run in length)
        ends.append(end)
    return ends


# -----------------------------------------------------------------------------
# the arithmetic


def t_quantile(degrees):
    return float(np.interp(1 / degrees, [1 / n for n in T_DEGREES], T_QUANTILES))


def difference(a, b, ends, noise=None):
    """Return the difference of the ends a and b, its standard error, half the width of its interval, and the
    verdict, as in the docstring above. ends: all ends. noise: the standard deviation of a run, if known."""
    result = {'difference': b['loss'] - a['loss'], 'method': 'unknown', 'verdict': 'unknown'}
    repeated = [end for end in ends if end['std']]
    if noise is not None:
        result['method'] = f'for a standard deviation of {noise:g}, as given'
        result['error'] = noise * math.sqrt(1 / a['n'] + 1 / b['n'])
        degrees = math.inf
    elif a['n'] > 1 and a['seeds'] == b['seeds']:
        result['method'] = 'from pairs of runs with the same seed'
        differences = [loss_b - loss_a for loss_a, loss_b in zip(a['losses'], b['losses'])]
        result['error'] = statistics.stdev(differences) / math.sqrt(a['n'])
        degrees = a['n'] - 1
    elif a['std'] and b['std']:
        result['method'] = 'from the standard deviations of both'
        part_a = a['std'] ** 2 / a['n']
        part_b = b['std'] ** 2 / b['n']
        result['error'] = math.sqrt(part_a + part_b)
        degrees = (part_a + part_b) ** 2 / (part_a ** 2 / (a['n'] - 1) + part_b ** 2 / (b['n'] - 1))
    elif repeated:
        result['method'] = 'for the standard deviation of the runs that were repeated'
        degrees = sum(end['n'] - 1 for end in repeated)
        variance = sum((end['n'] - 1) * end['std'] ** 2 for end in repeated) / degrees
        result['error'] = math.sqrt(variance * (1 / a['n'] + 1 / b['n']))
    else:
        return result
    result['half_width'] = t_quantile(degrees) * result['error']
    result['verdict'] = 'within noise'
    if abs(result['difference']) > result['half_width']:
        result['verdict'] = 'better' if result['difference'] < 0 else 'worse'
    return result


def interpolate(side, target):
    """
    Return the costs at which a side, a list of ends, reaches the loss of the end `target`, {cost: number};
    None if that loss is not between two neighbouring ends.

    'factor' is the uncertainty of the compute, if all three have the same seeds, otherwise None: with 95%
    confidence the compute is between compute / factor and compute * factor.
    """
    for short, long in zip(side, side[1:]):
        if not short['loss'] >= target['loss'] >= long['loss'] or short['loss'] == long['loss']:
            continue
        share = (short['loss'] - target['loss']) / (short['loss'] - long['loss'])  # of the way to `long`
        costs = {cost: short[cost] ** (1 - share) * long[cost] ** share for cost in COSTS}
        costs['factor'] = None
        if target['n'] > 1 and short['seeds'] == long['seeds'] == target['seeds']:
            shares = []
            for loss_short, loss_long, loss in zip(short['losses'], long['losses'], target['losses']):
                shares.append((loss_short - loss) / (loss_short - loss_long))
            half_width = t_quantile(target['n'] - 1) * statistics.stdev(shares) / math.sqrt(target['n'])
            costs['factor'] = (long['compute'] / short['compute']) ** min(half_width, 100)
        return costs
    return None


def cost_of_same_loss(ends_a, ends_b, a, b, noise=None):
    """
    Return by how many times more of each cost B needs than A for the same loss, {cost: number}.

    'relation' is 'about' if this is interpolated between the ends of a side; 'same' if two ends do not differ
    beyond noise; 'less' or 'more' than this if an end of B is better or worse; None if the noise is unknown.
    """
    costs = interpolate(ends_b, a)
    if costs:
        ratios = {cost: costs[cost] / a[cost] for cost in COSTS}
        return {**ratios, 'factor': costs['factor'], 'relation': 'about', 'loss': a['loss']}
    costs = interpolate(ends_a, b)
    if costs:
        ratios = {cost: b[cost] / costs[cost] for cost in COSTS}
        return {**ratios, 'factor': costs['factor'], 'relation': 'about', 'loss': b['loss']}
    end = ends_b[0] if b['loss'] < a['loss'] else ends_b[-1]
    verdict = difference(a, end, ends_a + ends_b, noise)['verdict']
    relations = {'better': 'less', 'worse': 'more', 'within noise': 'same', 'unknown': None}
    return {**{cost: end[cost] / a[cost] for cost in COSTS}, 'relation': relations[verdict], 'end': end}


def compare_runs(logs_a, logs_b, noise=None):
    """Compare two sides, each {folder: rows of its log.csv}. Return a dict, the input of report()."""
    runs_a = [read_run(folder, log) for folder, log in logs_a.items()]
    runs_b = [read_run(folder, log) for folder, log in logs_b.items()]
    metric, data = choose_metric(runs_a + runs_b)
    ends_a = ends_of(runs_a, metric)
    ends_b = ends_of(runs_b, metric)
    # the two ends with the most similar compute; of several such pairs, the longest
    pairs = list(itertools.product(reversed(ends_a), reversed(ends_b)))
    a, b = min(pairs, key=lambda pair: abs(math.log(pair[0]['compute'] / pair[1]['compute'])))
    rates = [run['record']['lr'] / run['record']['config']['learning_rate'] for run in runs_a + runs_b]
    final_rate = max(rates)
    result = difference(a, b, ends_a + ends_b, noise)
    result.update(metric=metric, data=data, runs={'A': runs_a, 'B': runs_b},
                  ends={'A': ends_a, 'B': ends_b}, a=a, b=b, final_rate=final_rate, same_loss=None)
    result['used'] = {cost: b[cost] / a[cost] for cost in COSTS}
    if final_rate < FINISHED:
        result['same_loss'] = cost_of_same_loss(ends_a, ends_b, a, b, noise)
    return result


# -----------------------------------------------------------------------------
# the text


def facts(run):
    """Return what may cause a difference between runs, {name: text}: code, data, settings, machine."""
    record = run['record']
    diff = record['diff']
    if diff:
        names = re.findall('^(?:diff --git .* b/|# untracked.*: )(.*)', diff, re.M)
        diff = f"{', '.join(names)} (checksum {hashlib.sha256(diff.encode()).hexdigest()[:8]})"
    commits = dict.fromkeys(str(start['commit']) for start in record['starts'])
    values = {'commit': ', '.join(commits), 'uncommitted diff': diff or 'none'}
    for split in ['train', 'val']:
        values[f'{split} data'] = record['dataset'][split]
    values.update(record['config'])
    for name in ['tokenizer', 'n_params', 'dtype', 'compile', 'torch', 'device', 'machine', 'processes',
                 'threads']:
        values[name] = record[name]
    del values['out_dir']
    return {name: str(value) for name, value in values.items()}


def differing(*sides):
    """Return {name: its values in each side, a list of texts} of the facts that differ between runs."""
    all_facts = [[facts(run) for run in side] for side in sides]
    names = dict.fromkeys(name for side in all_facts for run_facts in side for name in run_facts)
    found = {}
    for name in names:
        values = [dict.fromkeys(run_facts.get(name, 'missing') for run_facts in side) for side in all_facts]
        if any(side != values[0] or len(side) > 1 for side in values):
            found[name] = [', '.join(side) for side in values]
    return found


def command(run, flags, iterations=None):
    """Return the command that started a run, with other flags. iterations: another length."""
    words = ['python', run['record']['starts'][0]['command']]
    if iterations:
        for name in ['max_tokens', 'max_epochs', 'train_minutes', 'lr_decay_iters']:  # also set the length
            if run['record']['config'].get(name) is not None:
                words.append(f'--{name}=None')
        words.append(f'--max_iters={iterations}')
    return ' '.join([*words, flags])


def text_of_ends(result):
    """Return the lines about the final losses and their spread."""
    lines = [f"final {result['metric']}, on {result['data']}"]
    for side, ends in result['ends'].items():
        for end in ends:
            losses = [f"{run['folder']} {loss:.4f}" for run, loss in zip(end['runs'], end['losses'])]
            text = (f"{side}: {end['iter']:,.0f} iterations, {end['compute']:.2e} FLOPs, "
                    f"{format_duration(end['seconds'])} of training: {', '.join(losses)}")
            if end['std'] is not None:
                text += f": mean {end['loss']:.4f}, standard deviation {end['std']:.4f}"
            lines.append(text)
            mixed = [name for name in differing(end['runs']) if name != 'seed']
            if mixed:
                lines.append(f"note: these runs of {side} differ in more than the seed: {', '.join(mixed)}")
    return lines


def text_of_verdict(result):
    """Return the lines about the difference of the losses."""
    a = result['a']
    b = result['b']
    text = (f"difference B - A, after {a['iter']:,.0f} iterations of A and {b['iter']:,.0f} of B: "
            f"{result['difference']:+.4f}")
    if result['verdict'] == 'unknown':
        lines = [text, "The noise is unknown, as no side has several runs with different losses. Train each "
                 "side, with its own code, with several seeds:"]
        for end in (a, b):
            run = end['runs'][0]
            text = command(run, f"--seed=$s --out_dir={shlex.quote(run['folder'])}-seed$s")
            lines.append(f"    for s in 1 2 3; do {text}; done")
        return lines
    low = result['difference'] - result['half_width']
    high = result['difference'] + result['half_width']
    lines = [text, f"standard error: {result['error']:.4f}, {result['method']}",
             f"95% interval: {low:+.4f} to {high:+.4f}"]
    if result['verdict'] == 'within noise':
        lines.append("B and A are within noise: the interval contains 0.")
    else:
        lines.append(f"B is {result['verdict']} than A, with 95% confidence.")
    return lines


def text_of_costs(result, same_machine):
    """Return the lines about compute, iterations and training time of B, as multiples of those of A."""
    def multiples(costs):
        text = f"{costs['compute']:.2f} x A's compute, {costs['iter']:.2f} x its iterations"
        if same_machine:
            text += f" and, at the measured speeds, {costs['seconds']:.2f} x its training time"
        return text

    lines = [f"B used {multiples(result['used'])}."]
    if not same_machine:
        lines.append("Training times are not compared, as device, processes or threads differ.")
    same = result['same_loss']
    if same is None:
        lines.append("What B needs for the same loss is not computed, as a schedule is not finished: its "
                     f"learning rate ended at {result['final_rate']:.0%} of its peak.")
    elif same['relation'] == 'about':
        lines.append(f"For a loss of {same['loss']:.4f}, B needs about {multiples(same)}.")
        if same['factor'] is None:
            lines.append("The uncertainty of these numbers is unknown, as the ends have different seeds.")
        else:
            low = same['compute'] / same['factor']
            high = same['compute'] * same['factor']
            lines.append(f"The 95% interval of this compute is {low:.3g} to {high:.3g} x A's compute.")
    elif same['relation'] == 'same':
        lines.append(f"B reaches about A's loss with {multiples(same)}.")
    elif same['relation'] is not None:
        run = same['end']['runs'][0]
        iterations = round(same['end']['iter'] * (0.5 if same['relation'] == 'less' else 2))
        text = command(run, f"--out_dir={shlex.quote(run['folder'])}-{iterations}", iterations)
        lines.append(f"For A's loss, B needs {same['relation']} than {multiples(same)}.")
        lines.append("To measure how much, train B at another length, once with each seed:")
        lines.append(f"    {text}")
    return lines


def report(result):
    """Return the result of compare_runs() as text."""
    found = differing(*result['runs'].values())
    same_machine = not any(name in found for name in ['device', 'processes', 'threads'])
    lines = [*text_of_ends(result), '', *text_of_verdict(result), '']
    lines += [*text_of_costs(result, same_machine), '']
    lines.append("differences between the runs:" if found else "differences between the runs: none recorded")
    for name, (of_a, of_b) in found.items():
        lines.append(f"  {name}: A {of_a} | B {of_b}")
    return '\n'.join(lines)
