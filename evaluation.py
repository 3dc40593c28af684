"""
The loss of a text, in nats per token and in bits per byte. Call model.eval() first, in all processes; the result
does not depend on the number of processes, and training is not disturbed.
"""

import math
from contextlib import nullcontext

import numpy as np
import torch

from processes import all_reduce_sum


# -----------------------------------------------------------------------------
# the loss of a text


@torch.no_grad()
def text_loss(model, split, n_windows, block_size, batch_size, ctx, rank=0, world_size=1,
              should_stop=None):
    """
    The loss of a split of a Dataset over n_windows windows, spread evenly over it (0: all of it).

    Returns a dict: loss (nats per token), perplexity, bpb (bits per byte), loss_error and bpb_error (their
    standard errors), tokens and bytes (how many were predicted). Bits per byte leave out tokens that are no
    text, such as <|endoftext|>, and so compare models with different tokenizers; they are None where the
    bytes of the tokens are unknown.

    should_stop: called by all processes before each batch; if it returns True, the result is None.
    """
    assert not model.training, "call model.eval() first: dropout would change the loss"
    device = next(model.parameters()).device
    starts = split.eval_starts(block_size, n_windows)
    n_batches = math.ceil(len(starts) / batch_size)
    token_bytes = torch.as_tensor(split.token_bytes, dtype=torch.float32, device=device)
    # each window has its own place in the sums, so it does not matter which process fills it
    sums = torch.zeros(4, len(starts), device=device)  # per window: nats, nats of text, targets, bytes
    for batch, counts in shared_among(n_batches, rank, world_size):
        if should_stop is not None and should_stop():
            return None
        place = slice(batch * batch_size, (batch + 1) * batch_size)
        n_rows = len(starts[place])
        # the last batch is filled up: a compiled model sees one shape only
        x, y, doc_ids = split.eval_batch(np.resize(starts[place], batch_size), block_size)
        x = torch.from_numpy(x).contiguous().to(device)  # (B, T)
        y = torch.from_numpy(y).contiguous().to(device)  # -1: no target
        if doc_ids is not None:
            doc_ids = torch.from_numpy(doc_ids).contiguous().to(device)
        # A CPU takes longer to compile an evaluation's graph than that saves. Never set 'default' here: after
        # a compiler has failed in warm_up(), the stance is 'force_eager' for the whole process
        eager = torch.compiler.set_stance('force_eager') if device.type == 'cpu' else nullcontext()
        with eager, ctx:
            _, nats = model(x, y, doc_ids, reduction='none', return_logits=False)
        if counts:
            is_target = y >= 0
            nats = nats.view(y.shape)  # (B, T), 0 where there is no target
            n_bytes = token_bytes[y.clamp(min=0)] * is_target
            text_nats = nats * (n_bytes > 0)
            parts = (nats.sum(1), text_nats.sum(1), is_target.sum(1), n_bytes.sum(1))
            sums[:, place] = torch.stack(parts)[:, :n_rows]
    nats, text_nats, n_targets, n_bytes = all_reduce_sum(sums).cpu().double()
    loss, loss_error = ratio_of_sums(nats, n_targets)
    bpb, bpb_error = None, None
    if n_bytes.sum() > 0:
        bpb, bpb_error = ratio_of_sums(text_nats / math.log(2), n_bytes)
    return {'loss': loss, 'loss_error': loss_error, 'perplexity': math.exp(min(loss, 700.0)), 'bpb': bpb,
            'bpb_error': bpb_error, 'tokens': int(n_targets.sum()), 'bytes': int(n_bytes.sum())}


def shared_among(n, rank, world_size):
    """This process's share of range(n), as pairs (i, counts). Where it has fewer numbers than the others it
    repeats the last one, and `counts` is False: a model sharded by FSDP needs all processes each time."""
    for first in range(0, n, world_size):
        i = first + rank
        yield min(i, n - 1), i < n


def ratio_of_sums(parts, wholes):
    """(sum(parts) / sum(wholes), its standard error), taking the windows as independent; of one window the
    error is nan."""
    n = len(parts)
    ratio = parts.sum() / wholes.sum()
    if n == 1:
        return ratio.item(), math.nan
    variance = (parts - ratio * wholes).square().sum() * n / (n - 1)
    return ratio.item(), (variance.sqrt() / wholes.sum()).item()
