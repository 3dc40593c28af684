"""
The loss of a model over a text, in nats per token and in bits per byte; and what is measured now and then in
the training loop. No evaluation leaves a trace in the training.
"""

import contextlib
import math

import numpy as np
import torch

from support.tokenizer import token_bytes


def windows(n_targets, block_size, most=None):
    """Where windows begin that lie side by side over a text with n_targets targets (its ids from the second
    one on): at most so many of them, evenly spread."""
    n = max(1, math.ceil(n_targets / block_size))
    count = min(n, most or n)
    return np.arange(count) * n // count * block_size


@contextlib.contextmanager
def eval_mode(model):
    """Inside, the model is in eval mode and no gradients are kept; afterwards it is as before."""
    was_training = model.training
    model.eval()
    try:
        # the graph of an evaluation takes a CPU longer to compile than it saves
        with torch.no_grad(), torch.compiler.set_stance(
                'force_eager' if next(model.parameters()).is_cpu else 'default'):
            yield
    finally:
        model.train(was_training)


class Interrupted(Exception):
    """The run is asked to stop in the middle of an evaluation, which then counts for nothing."""


def rounds(n, dist, poll, tick):
    """This process's share of the numbers below n, as pairs (i, counts). Every process makes as many rounds,
    since Stop.poll and a sharded model need all of them: where there are no numbers left for this one,
    it helps the others with the last one, and `counts` is False."""
    for first in range(0, n, dist.world_size):
        if poll() == 'stop':
            raise Interrupted
        tick(min(first + dist.world_size, n), n)
        i = first + dist.rank
        if i < n:
            yield i, True
        elif dist.sharded:
            yield n - 1, False


def text_loss(model, tokens, windows, block_size, batch_size, dist, autocast, token_bytes,
              poll=lambda: None, tick=lambda done, n: None):
    """The mean loss of `tokens` over `windows`, perplexity, bits per byte and errors, as a dict. token_bytes:
    bytes per token id, 0 for special tokens, which bits per byte leave out: they compare models with
    different tokenizers (None where all are 0). The processes share the windows, and each window has its own
    place in the sums, so the result does not depend on the number of processes."""
    device, n = model.lm_head.weight.device, len(windows)
    sizes = torch.as_tensor(token_bytes, dtype=torch.float32, device=device)
    sums = torch.zeros(4, n, device=device)  # per window: nats, nats of text, targets, bytes
    with eval_mode(model):
        for b, counts in rounds(math.ceil(n / batch_size), dist, poll, tick):
            at = slice(b * batch_size, (b + 1) * batch_size)
            starts = windows[at]
            # the last batch is filled up: a compiled model sees one shape only, and the same strides
            batch = tokens.eval_batch(np.resize(starts, batch_size), block_size)
            x, y, *doc_ids = (torch.from_numpy(part).to(device).contiguous() for part in batch)
            y[len(starts):] = -1  # not counted
            counted = y >= 0
            with autocast:
                nats = model(x, y, *doc_ids, reduction='none', return_logits=False)[1]
                nats = nats.float().view(y.shape) * counted  # (B, T)
            if counts:
                size = sizes[y.clamp(min=0)] * counted
                parts = nats.sum(1), (nats * (size > 0)).sum(1), counted.sum(1), size.sum(1)
                sums[:, at] = torch.stack(parts)[:, :len(starts)]
    dist.all_reduce_sum(sums)
    nats, text_nats, count, size = sums.cpu().double()
    loss, loss_error = ratio_of_sums(nats, count)
    bpb, bpb_error = ratio_of_sums(text_nats / math.log(2), size) if size.sum() > 0 else (None, None)
    return {'loss': loss, 'loss_error': loss_error, 'perplexity': math.exp(min(loss, 700.0)),
            'bpb': bpb, 'bpb_error': bpb_error, 'tokens': int(count.sum()), 'bytes': int(size.sum())}


def ratio_of_sums(part, whole):
    """sum(part) / sum(whole) and its standard error (nan for one window), taking windows as independent."""
    n, total = len(part), whole.sum()
    ratio = part.sum() / total
    variance = (part - ratio * whole).square().sum() * n / (n - 1 or math.nan)
    return ratio.item(), (variance.sqrt() / total).item()


def ngram_bits_per_byte(text, seen, longest=5):
    """How well counts predict each byte of `text` from up to so many before it: those of the bytes `seen`,
    mixed with what one byte less predicts, by how many different bytes have followed (Witten and Bell)."""
    text, seen = (np.frombuffer(part, np.uint8).astype(np.int64) for part in (text, seen))
    p, grams, seen_grams = 1 / 256, text, seen  # a gram: a byte and, in the higher bits, those before it
    for n in range(longest + 1):
        kinds, counts = np.unique(seen_grams[n:], return_counts=True)
        contexts, starts, different = np.unique(kinds >> 8, return_index=True, return_counts=True)
        count = look_up(grams, kinds, counts)
        total = look_up(grams >> 8, contexts, np.add.reduceat(counts, starts))
        different = np.maximum(1, look_up(grams >> 8, contexts, different))
        p = (count + different * p) / (total + different)
        grams = grams | np.roll(text, n + 1) << 8 * (n + 1)
        seen_grams = seen_grams | np.roll(seen, n + 1) << 8 * (n + 1)
    return -np.log2(p[longest:]).mean()  # nothing stands before the first ones


def look_up(wanted, keys, values):
    """The values of the `wanted` keys, 0 for those that are not there. keys are sorted."""
    at = np.searchsorted(keys, wanted) % len(keys)
    return np.where(keys[at] == wanted, values[at], 0)


# -----------------------------------------------------------------------------
# in the training loop


def parse_interval(interval):
    """(interval, growth): 100 -> (100, 1.0), '100x1.5' -> (100, 1.5). ValueError for anything else."""
    gap, _, growth = str(interval).partition('x')
    gap, growth = int(gap), float(growth or 1)
    if gap < 0 or not 1 <= growth < 1e6:
        raise ValueError(interval)
    return gap, growth


def next_end(it, interval):
    """The first iteration from `it` on at which an interval ends, a function of both alone, so that a resume
    agrees: with 100 that is 0, 100, 200, ..., with '100x1.5' it is 0, 100, 250, 475, ..."""
    gap, growth = parse_interval(interval)
    if gap == 0:
        return math.inf
    if growth == 1:
        return math.ceil(it / gap) * gap
    end = 0.0
    while round(end) < it:
        end, gap = end + gap, gap * growth
    return round(end)


class Evaluator:
    """Runs what is due. evaluated: {name: (interval, function(it) -> {metric: number})}."""

    def __init__(self, evaluated, run, clock, stop, dist):
        self.evaluated, self.clock, self.stop, self.dist = evaluated, clock, stop, dist
        self.knobs = run.knobs
        # what was measured last, which is not measured again after a resume
        self.done = {'iter': None, 'names': []}
        if run.compares and not self.knobs['eval_only']:
            self.done.update(run.ckpt.get('evaluation', {}))

    def due(self, it, last):
        """The names of what is due at pass `it`. Before the first update that is the loss alone. What
        was measured at an old end is told once more, as log.csv begins anew there."""
        everything = last or self.knobs['eval_only']
        told = self.done['names'] if self.done['iter'] == it else []
        return [name for name, (interval, _) in self.evaluated.items() if everything or name in told
                or (next_end(it, interval) == it and (it > 0 or name == 'loss'))]

    def run(self, it, last):
        """({metric: number} of what is due, whether this is the last pass: the validation loss may be low
        enough)."""
        if self.done['iter'] != it:
            self.done = {'iter': it, 'names': [], 'metrics': {}}
        metrics = self.done['metrics']
        for name, (_, function) in self.evaluated.items():
            if name in self.due(it, last) and name not in self.done['names'] and self.stop.poll() != 'stop':
                with self.clock.spending('sample' if name == 'sample' else 'eval'):
                    with contextlib.suppress(Interrupted):
                        # yours may give each process other numbers, but all have to decide alike
                        found = self.dist.all_gather_object(function(it))[0]
                        twice = found.keys() & metrics.keys()
                        assert not twice, f"{name} in `evaluated` gives {twice}, as another does: rename them"
                        metrics.update(found)
                        self.done['names'].append(name)
            goal = self.knobs['stop_val_loss']  # which may have been reached before a resume
            if goal is not None and not last and metrics.get('val_loss', math.inf) <= goal:
                self.dist.print(f"the validation loss is as low as stop_val_loss={goal:g}")
                last = True
        if last:
            self.stop.deadline = math.inf  # all is done: time can no longer be up
        return metrics, last

    def state(self):
        return {'evaluation': self.done}


def losses(model, data, n_windows, batch_size, dist, autocast, stop, it):
    """{train_loss, val_loss, perplexity, bpb} over n_windows windows of each split, evenly spread; or all.
    The last two are those of the validation text, where there is one."""
    block_size = model.config.block_size
    sizes = token_bytes(data.tokenizer_state, model.config.vocab_size)
    found = {}
    for split, tokens in data.splits.items():
        found[split] = text_loss(
            model, tokens, windows(tokens.n_targets(block_size), block_size, n_windows), block_size,
            batch_size, dist, autocast, sizes, stop.poll, dist.progress(f'evaluating {split}'))
    losses = ', '.join(f"{split} loss {result['loss']:.4f}" for split, result in found.items())
    judged = found.get('val', found['train'])
    dist.print(f"step {it}: {losses}")
    return {**{f'{split}_loss': result['loss'] for split, result in found.items()},
            'perplexity': judged['perplexity'], 'bpb': judged['bpb']}
