"""
Print the table of depths in docs/gpus.md, and what they cost.

    $ python dev/depths.py

Tokens/s are arithmetic: the FLOPs of a token (model.py) at the MFU, relative to 989 TFLOP/s, that was
measured for `modern` with Muon at 124M (38.6%), and for a network of 10.7M (17.6%) below 10 layers. Memory is
arithmetic, too: parameters with their optimizer's state (12 bytes with Muon, 16 with AdamW), 4 bytes per
logit, and 32 per token, layer and channel, which fits the 18.5 GB that were measured for 124M.
"""

import os
import sys

import torch

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, REPO)

from configurator import configure
from model import GPT, GPTConfig

VOCAB_SIZE = 50257  # GPT-2's

with open(os.path.join(REPO, 'train.py')) as f:
    settings_block = f.read().partition('config, given = configure(globals())')[0]
print('| depth | width | parameters | tokens | iterations x tokens | tokens/s | hours | dollars | GB |')
print('|---|---|---|---|---|---|---|---|---|')
for depth in (4, 6, 8, 12, 16, 20, 24, 32):
    sys.argv = ['train.py', os.path.join(REPO, 'config', 'depth.py'), f'--n_layer={depth}']
    script = {}
    exec(settings_block, script)
    config, _ = configure(script)
    n_embd = config['n_embd']
    block_size = config['block_size']
    with torch.device('meta'):
        model = GPT(GPTConfig(vocab_size=VOCAB_SIZE, block_size=block_size, arch='modern', n_layer=depth,
                              n_head=config['n_head'], n_embd=n_embd, bias=False))
    n_params = model.get_num_params(non_embedding=False)
    n_matrices = 12 * depth * n_embd**2  # Muon's
    tokens = config['max_iters'] * config['total_batch_size']
    share = 0.386 if depth >= 10 else 0.176
    tokens_per_second = share * 989e12 / model.flops_per_token()
    hours = tokens / tokens_per_second / 3600
    memory = []
    for n_sequences in (8, 16, 32):
        n = n_sequences * block_size
        used = 12 * n_matrices + 16 * (n_params - n_matrices)
        used += 4 * n * model.config.vocab_size + 32 * n * depth * n_embd
        memory.append(f'{used / 1e9:.1f}')
    print(f"| {depth} | {n_embd} | {n_params / 1e6:,.1f}M | {tokens / 1e9:.2f}B | {config['max_iters']:,} x "
          f"{config['total_batch_size']:,} | {tokens_per_second:,.0f} | {hours:.2f} | {3 * hours:.2f} | "
          f"{', '.join(memory)} |")
