"""
Record what nanoGPT computes in tests/reference/nanogpt.json, to which the tests compare our network.

    $ python tests/record_nanogpt.py PATH_TO_A_CHECKOUT_OF_NANOGPT

The weights are sines of their index, so that no random generator is involved. Only the norms of the initial
weights are those of seed 0.
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch

REFERENCE = Path(__file__).parent / 'reference' / 'nanogpt.json'
SHAPES = {  # with and without bias, and one with odd sizes
    'bias': dict(block_size=32, vocab_size=65, n_layer=3, n_head=4, n_embd=64, dropout=0.0, bias=True),
    'no_bias': dict(block_size=32, vocab_size=65, n_layer=3, n_head=4, n_embd=64, dropout=0.0, bias=False),
    'odd': dict(block_size=17, vocab_size=101, n_layer=2, n_head=3, n_embd=48, dropout=0.0, bias=True),
}
ADAMW = dict(weight_decay=0.1, learning_rate=3e-3, betas=(0.9, 0.95))


def fill(model):
    """Set the weights to a function of their index: about 0.1 in size, and about 1 in LayerNorms."""
    with torch.no_grad():
        for k, (name, p) in enumerate(sorted(model.named_parameters())):
            index = torch.arange(p.numel(), dtype=torch.float64)
            wave = torch.sin(index * (0.7 + 0.1 * (k % 7)) + k).view(p.shape)
            if 'ln_' in name and name.endswith('weight'):
                p.copy_(1 + 0.1 * wave)
            else:
                p.copy_(0.1 * wave)


def tokens(config):
    """Return idx and targets (2, T), a function of their index. One target is masked."""
    index = torch.arange(2 * (config.block_size + 1)).view(2, -1)
    ids = (index * 7919 + 13) % config.vocab_size
    targets = ids[:, 1:].clone()
    targets[0, 3] = -1
    return ids[:, :-1], targets


def measure(model):
    """Return logits, loss and gradient norms for these weights and tokens, as plain numbers."""
    initial = {name: p.norm().item() for name, p in model.named_parameters()}
    fill(model)
    idx, targets = tokens(model.config)
    logits, loss = model(idx, targets)
    loss.backward()
    grads = {name: p.grad.norm().item() for name, p in model.named_parameters()}
    last = model(idx)[0]
    return {'loss': loss.item(), 'logits': logits[1, -1].tolist(), 'last': last[0, 0].tolist(),
            'grads': grads, 'names': list(model.state_dict()), 'initial': initial}


def train(model, optimizer, steps=40):
    """Return the losses of some training steps, on batches that are a function of their index."""
    fill(model)
    losses = []
    T = model.config.block_size
    for it in range(steps):
        ids = (torch.arange(4 * (T + 1)).view(4, -1) * 7919 + 17 * it) % model.config.vocab_size
        loss = model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


if __name__ == '__main__':
    spec = importlib.util.spec_from_file_location('nanogpt_model', Path(sys.argv[1]) / 'model.py')
    nanogpt = importlib.util.module_from_spec(spec)
    sys.modules['nanogpt_model'] = nanogpt
    spec.loader.exec_module(nanogpt)
    record = {'torch': str(torch.__version__)}
    for name, shape in SHAPES.items():
        torch.manual_seed(0)
        record[name] = measure(nanogpt.GPT(nanogpt.GPTConfig(**shape)))
    model = nanogpt.GPT(nanogpt.GPTConfig(**SHAPES['bias']))
    record['curve'] = train(model, model.configure_optimizers(**ADAMW, device_type='cpu'))
    REFERENCE.write_text(json.dumps(record))
    print(f"wrote {REFERENCE}")
