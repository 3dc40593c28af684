"""
The loss of a text, in nats per token and in bits per byte.

It does not depend on the number of processes, and computing it does not affect training.
"""

import math
from contextlib import nullcontext

import numpy as np
import torch

from configurator import process_ranks
from flatgpt.processes import all_reduce_sum, to_device


@torch.no_grad()
def text_loss(model, split, n_sequences, batch_size, ctx, should_stop=None):
    """
    Return the loss of a split of a Dataset over n_sequences sequences of block_size tokens, spread evenly
    over it; 0: all of it. All processes call this, after model.eval().

    The result is a dict: loss (nats per token), bpb (bits per byte), loss_error and bpb_error (their standard
    errors), tokens and bytes (the number of predicted ones). Special tokens such as <|endoftext|> count in
    the loss only, so that bits per byte can be compared between tokenizers. bpb is None if the lengths of the
    tokens in bytes are unknown. ctx: autocast's context. should_stop: called in all processes before each
    batch; if it returns True, the result is None.
    """
    assert not model.training, "call model.eval() first: dropout would change the loss"
    device = next(model.parameters()).device
    block_size = model.config.block_size
    token_bytes = torch.as_tensor(split.token_bytes, dtype=torch.float32, device=device)
    starts = split.eval_starts(block_size, n_sequences)
    n_batches = math.ceil(len(starts) / batch_size)
    # One column per sequence: nats, nats of text, tokens, bytes. Each column is filled by one process, so the
    # sums do not depend on the number of processes
    columns = torch.zeros(4, len(starts), device=device)
    for i, is_repeat in share_of_range(n_batches, process_ranks()):
        if should_stop is not None and should_stop():
            return None
        indices = np.arange(i * batch_size, min((i + 1) * batch_size, len(starts)))
        # the last batch is filled with repetitions, so that all batches of a compiled model have one shape
        x, y, doc_ids = split.eval_batch(np.resize(starts[indices], batch_size), block_size)
        x = to_device(x, str(device))  # (B, T)
        y = to_device(y, str(device))  # (B, T), -1: no target
        if doc_ids is not None:
            doc_ids = to_device(doc_ids, str(device))
        # On a CPU, compiling for evaluation takes longer than it saves. Elsewhere keep the stance, which is
        # 'force_eager' if the compiler has failed in warm_up()
        eager = torch.compiler.set_stance('force_eager') if device.type == 'cpu' else nullcontext()
        with eager, ctx:
            _, nats = model(x, y, doc_ids, reduction='none', return_logits=False)
        if not is_repeat:
            nats = nats.view(y.shape)  # (B, T), 0 where there is no target
            is_target = y >= 0
            n_bytes = token_bytes[y.clamp(min=0)] * is_target
            text_nats = nats * (n_bytes > 0)
            sums = torch.stack((nats.sum(1), text_nats.sum(1), is_target.sum(1), n_bytes.sum(1)))  # (4, B)
            columns[:, indices] = sums[:, :len(indices)]
    nats, text_nats, n_tokens, n_bytes = all_reduce_sum(columns).cpu().double()
    loss, loss_error = ratio_of_sums(nats, n_tokens)
    bpb, bpb_error = None, None
    if n_bytes.sum() > 0:
        bpb, bpb_error = ratio_of_sums(text_nats / math.log(2), n_bytes)
    return {'loss': loss, 'loss_error': loss_error, 'bpb': bpb, 'bpb_error': bpb_error,
            'tokens': int(n_tokens.sum()), 'bytes': int(n_bytes.sum())}


def share_of_range(n, ranks):
    """
    Yield this process's share of range(n) as pairs (i, is_repeat). ranks: process_ranks().

    All processes get the same number of pairs, as FSDP needs all of them for each batch. A process with fewer
    indices repeats the last one, which must not be counted again.
    """
    rank, _, world_size = ranks
    for first in range(0, n, world_size):
        i = first + rank
        yield min(i, n - 1), i >= n


def ratio_of_sums(a, b):
    """Return sum(a) / sum(b) and its standard error, assuming independent sequences; nan if there is one."""
    n = len(a)
    ratio = a.sum() / b.sum()
    if n == 1:
        return ratio.item(), math.nan
    variance = (a - ratio * b).square().sum() * n / (n - 1)
    return ratio.item(), (variance.sqrt() / b.sum()).item()
