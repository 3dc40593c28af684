"""What is measured now and then in the training loop. No evaluation leaves a trace in the training."""

import math
import re

from support.evaluate import text_loss, windows
from support.tokenizer_state import token_bytes


def parse_interval(interval):
    """(interval, growth): 100 -> (100, 1.0), '100x1.5' -> (100, 1.5). ValueError for anything else."""
    found = re.fullmatch(r'(\d+)(?:x(\d+(?:\.\d+)?))?', str(interval))
    if not found or (found[2] and not 1 <= float(found[2]) < 1e6):
        raise ValueError(interval)
    return int(found[1]), float(found[2] or 1)


def parse_eval_iters(eval_iters):
    """(batches, tokens), one of them 0: 200 -> (200, 0), '1e6 tokens' -> (0, 1000000). ValueError for
    anything else."""
    found = re.fullmatch(r'\s*([\d.]+(?:e\d+)?)\s*tokens\s*', str(eval_iters))
    if found and 1 <= float(found[1]) < 2**62:
        return 0, int(float(found[1]))
    if found or int(eval_iters) < 0:
        raise ValueError(eval_iters)
    return int(eval_iters), 0


def in_interval(it, interval):
    """Whether an interval ends at iteration `it`: a function of it alone, so a resume agrees."""
    interval, growth = parse_interval(interval)
    if interval == 0:
        return False
    if growth == 1:
        return it % interval == 0
    # interval * (1 + growth + growth^2 + ...), the sum that ends nearest to `it`
    k = round(math.log1p(it * (growth - 1) / interval) / math.log(growth))
    return it == round(interval * (growth ** k - 1) / (growth - 1))


class Evaluator:
    """Runs what is due. evaluated: {name: (interval, function(it) -> {metric: number})}."""

    def __init__(self, evaluated, run, clock, stop, dist):
        self.evaluated, self.clock, self.stop, self.dist = evaluated, clock, stop, dist
        self.eval_only, self.stop_val_loss = run.knobs['eval_only'], run.knobs['stop_val_loss']
        # what was measured last, which is not measured again after a resume
        self.done = {'iter': None, 'names': [], 'metrics': {}}
        if not self.eval_only:
            self.done.update(run.last_evaluation)

    def due(self, it, last):
        """The names of what is due at pass `it`. Random weights have a loss, but are not tested further."""
        return [name for name, (interval, _) in self.evaluated.items()
                if last or self.eval_only or (in_interval(it, interval) and (it > 0 or name == 'loss'))]

    def run(self, it, last):
        """({metric: number} of what is due, whether this is the last pass: the validation loss may be low
        enough)."""
        if self.done['iter'] != it:
            self.done = {'iter': it, 'names': [], 'metrics': {}}
        for name, (_, function) in self.evaluated.items():
            if name in self.done['names'] or name not in self.due(it, last) or self.stop.poll() == 'stop':
                continue
            with self.clock.spending('sample' if name == 'sample' else 'eval'):
                metrics = function(it)
            if not self.stop.is_stopping():  # else it was interrupted
                self.done['names'].append(name)
                self.done['metrics'].update(metrics)
            last = last or self.good_enough()
        return self.done['metrics'], last

    def good_enough(self):
        goal = self.stop_val_loss
        if goal is None or self.done['metrics'].get('val_loss', math.inf) > goal:
            return False
        self.dist.print(f"the validation loss is as low as stop_val_loss={goal:g}")
        return True

    def state(self):
        return {'evaluation': self.done}


def losses(model, data, counts, batch_size, dist, autocast, stop, it):
    """{train_loss, val_loss, perplexity, bpb} over the first `counts[split]` windows of each split; {} if
    interrupted."""
    block_size = model.config.block_size
    sizes = token_bytes(data.tokenizer_state, model.config.vocab_size)
    found = {}
    for split, tokens in data.splits.items():
        rows = windows(counts[split] * block_size, block_size)
        found[split] = text_loss(model, tokens, rows, block_size, batch_size, dist, autocast, sizes,
                                 stop.asks_to_stop, dist.progress(f'evaluating {split}'))
        if found[split] is None:
            return {}
    losses = ', '.join(f"{split} loss {result['loss']:.4f}" for split, result in found.items())
    if 'val' in found and dist.on_terminal:
        losses += f", perplexity {found['val']['perplexity']:.2f}"
    dist.print(f"step {it}: {losses}")
    metrics = {f'{split}_loss': result['loss'] for split, result in found.items()}
    if 'val' in found:
        metrics.update(perplexity=found['val']['perplexity'], bpb=found['val']['bpb'])
    return metrics


def tasks(run, model, dist, autocast, stop):
    """An evaluation: benchmarks, their files read now."""
    from support import tasks
    return tasks.of_run(run, model, dist, autocast, stop)


def samples(run, model, dist, autocast, stop):
    """An evaluation that measures nothing but writes samples.md; its prompts are read now."""
    from support import samples
    return samples.of_run(run, model, dist, autocast, stop)
