"""How long to train, by another measure than iterations."""

import math
import re

from configurator import fail


def derive_max_iters(run):
    """Sets max_iters by what `budget` says."""
    k = run.knobs
    try:
        k['max_iters'] = iterations(run, k['budget'])
    except ValueError:
        fail(f"budget is out of range ({k['budget']}). use a number above 0 and what it counts: '1e9 "
             "tokens', '3 epochs' or '20 tokens_per_param'")


def iterations(run, budget):
    """How many iterations `budget`, a text, stands for; ValueError if it is none."""
    epoch = run.samples_per_epoch * run.knobs['block_size']
    tokens_per = {'tokens': 1, 'epochs': epoch, 'tokens_per_param': run.n_params}
    found = re.fullmatch(r'\s*([\d.]+(?:e\d+)?)\s*(tokens|epochs|tokens_per_param)\s*', budget)
    tokens = float(found[1]) * tokens_per[found[2]] if found else 0
    if not 0 < tokens < 1e30:
        raise ValueError(budget)
    return math.ceil(tokens / run.tokens_per_iter)
