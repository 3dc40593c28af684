"""
The network, the optimizer and the loop in which dev/ideas.py tries ideas, on a CPU: what there is in model.py
and support/ is used, and each idea is an option here.
"""

import dataclasses
import math
import time
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from model import MLP, CausalSelfAttention, GPTConfig, apply_rotary_emb, make_norm
from support.cpu_kernels import scaled_dot_product_attention
from support.muon import MuonAdamW, zeropower_via_newtonschulz
from support.near import BigramEmbedding, Near, ShortConv
from support.rope_table import rope_table

HEADS = 'c_q.weight', 'c_k.weight', 'c_v.weight'
GATE_CHANNELS = 12  # of its input that a gate reads


@dataclasses.dataclass
class Options:
    """As they are here: the recipe before any of the ideas. modded-nanogpt is
    https://github.com/KellerJordan/modded-nanogpt"""
    # the network: modern's of model.py
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 192
    block_size: int = 256
    norm: Literal['rmsnorm_plain', 'layernorm'] = 'rmsnorm_plain'
    qk_norm: bool = True
    n_kv_head: int = None
    mlp_width: int = None
    # ideas for the attention
    no_attention: str = ''  # layers without it, '0,1'; the first ones are near_layers of model.py
    query_scale: float = 1.0  # above 1: sharper attention
    value_embeddings: bool = False  # for the values, an embedding in each layer (modded-nanogpt, after
    # https://arxiv.org/abs/2410.17897)
    head_gate: bool = False  # the input scales each head's output (modded-nanogpt, pull request 117; also
    # https://arxiv.org/abs/2505.06708)
    shifted_keys: bool = False  # half of each key from the position before, in every other layer
    # (modded-nanogpt's partial key offset)
    # ideas for what goes through the layers
    embedding_share: bool = False  # each layer adds a learned share of the embedding (modded-nanogpt's x0)
    smear: bool = False  # a learned share of the embedding before (modded-nanogpt, pull request 130)
    conv_attention: bool = False  # a convolution of 4 before the attention, https://arxiv.org/abs/2512.17351
    conv_mlp: bool = False  # the same before the MLP: one half of --arch=local
    pairs: int = 0  # rows of an embedding of pairs of tokens (modded-nanogpt, record 62), the other half
    triples: int = 0  # the same of three tokens
    # the optimizer: Muon for the matrices in the layers, AdamW for the rest
    matrix_lr: float = 0.03
    embedding_lr: float = 0.1
    hashed_lr: float = None  # of pairs and triples. None: embedding_lr
    learning_rate: float = 0.01  # of the head, of vectors and gates
    beta2: float = 0.95  # AdamW's
    momentum: float = 0.95  # Muon's
    second_momentum: float = 0.0  # a slower average of the gradients, half and half with the first, as in
    # https://arxiv.org/abs/2409.03137; 0: none
    decay: float = 0.0  # weight decay of the matrices, itself multiplied by the learning rate's share of its
    # peak: https://arxiv.org/abs/2506.02285
    row_beta2: float = 0.0  # divide each row of Muon's update by the running root mean square of its entries,
    # and keep the size of the whole (NorMuon, https://arxiv.org/abs/2510.05491); 0: do not
    head_muon: bool = False  # queries, keys and values are orthogonalized head by head
    muon_iterations: int = 5
    polar_from: float = 0.0  # Polar Express's coefficients for singular values from this on,
    # https://arxiv.org/abs/2505.16932; 0: those of support/muon.py
    polar_cushion: float = 0.0  # its protection of what is below this share of the largest singular value
    # the loop
    iterations: int = 400  # of a complete schedule: the learning rates fall to zero over its last part
    decay_fraction: float = 0.7  # that part
    batch_size: int = 8
    half_batch: float = 0.0  # up to this share of the run, half as many windows
    grow: str = ''  # shorter windows at first: '0.3:64,0.6:128' is 64 up to 30% of the run, then 128 up to
    # 60%; the tokens of a batch stay (https://arxiv.org/abs/2108.06084)
    average: float = 0.0  # mean of the weights over this last share of the run
    eval_windows: int = 300  # of block_size tokens, from the start of the text that chooses
    seed: int = 1


# -----------------------------------------------------------------------------
# the network


class Attention(CausalSelfAttention):

    def __init__(self, config, layer_idx, options):
        super().__init__(config, layer_idx)
        self.options = options
        if options.value_embeddings:
            self.value_wte = nn.Embedding(config.vocab_size, config.n_embd)
            self.value_share = nn.Parameter(torch.tensor([0.5]))
        if options.head_gate:
            self.gate = nn.Linear(GATE_CHANNELS, config.n_head, bias=False)

    def forward(self, x, idx, rope):
        options, (B, T, C) = self.options, x.shape
        q, k, v = self.c_q(x), self.c_k(x), self.c_v(x)
        if options.value_embeddings:
            v = v + (self.value_share * self.value_wte(idx)).to(v.dtype)
        q, k, v = (y.view(B, T, n, -1).transpose(1, 2)  # (B, H, T, D), (B, K, T, D)
                   for y, n in ((q, self.n_head), (k, self.n_kv_head), (v, self.n_kv_head)))
        q, k = self.qk_norm(apply_rotary_emb(q, rope)), self.qk_norm(apply_rotary_emb(k, rope))
        if options.shifted_keys and self.layer_idx % 2:
            own, earlier = k.chunk(2, dim=-1)
            earlier = torch.cat((earlier[:, :, :1], earlier[:, :, :-1]), dim=2)
            k = torch.cat((own, earlier), dim=-1)
        if options.query_scale != 1:
            q = q * options.query_scale
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if options.head_gate:
            gates = 2 * torch.sigmoid(self.gate(x[..., :GATE_CHANNELS]))  # (B, T, H), 1 at first
            y = y * gates.transpose(1, 2)[..., None]
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):

    def __init__(self, config, layer_idx, options):
        super().__init__()
        self.ln_1, self.ln_2 = make_norm(config), make_norm(config)
        self.attn, self.mlp = Attention(config, layer_idx, options), MLP(config)
        if str(layer_idx) in options.no_attention.split(','):
            self.attn = None
        self.conv_1 = ShortConv(config.n_embd, layer_idx) if options.conv_attention else None
        self.conv_2 = ShortConv(config.n_embd, layer_idx) if options.conv_mlp else None
        self.shares = nn.Parameter(torch.tensor([1.0, 0.0])) if options.embedding_share else None

    def forward(self, x, first, idx, rope, near):
        """first: what the first layer got."""
        if self.shares is not None:
            x = self.shares[0] * x + self.shares[1] * first
        if self.attn:
            h = self.ln_1(x)
            x = x + self.attn(self.conv_1(h, near) if self.conv_1 else h, idx, rope)
        h = self.ln_2(x)
        return x + self.mlp(self.conv_2(h, near) if self.conv_2 else h)


class TrigramEmbedding(nn.Embedding):
    """BigramEmbedding with one token more."""

    def forward(self, idx, near):
        one, two = near.before(idx + 1, 2)
        return super().forward(((idx * 1_000_003 + one) * 1_000_003 + two) % self.num_embeddings)


class Network(nn.Module):

    def __init__(self, options, vocab_size):
        super().__init__()
        same = ('block_size', 'n_layer', 'n_head', 'n_embd', 'norm', 'qk_norm', 'n_kv_head', 'mlp_width')
        config = GPTConfig(arch='modern', vocab_size=vocab_size,
                           **{name: getattr(options, name) for name in same})
        C, self.softcap = config.n_embd, config.softcap
        self.wte = nn.Embedding(vocab_size, C)
        self.pairs = BigramEmbedding(options.pairs, C) if options.pairs else None
        self.triples = TrigramEmbedding(options.triples, C) if options.triples else None
        self.smear = nn.Parameter(torch.zeros(C)) if options.smear else None
        self.ln_e, self.ln_f = make_norm(config), make_norm(config)
        self.h = nn.ModuleList([Block(config, layer_idx, options) for layer_idx in range(config.n_layer)])
        self.lm_head = nn.Linear(C, vocab_size, bias=False)
        self.register_buffer('rope', rope_table(config), persistent=False)
        # as in model.py: 1 for embeddings, 1 / sqrt(3 fan-in) for matrices, nothing from a layer at first
        for name, p in self.named_parameters():
            if name.endswith(('c_proj.weight', 'lm_head.weight', 'gate.weight')):
                nn.init.zeros_(p)
            elif name.endswith('value_wte.weight'):  # values have that size
                nn.init.normal_(p, std=3 ** -0.5)
            elif p.dim() == 2 and not name.startswith(('wte', 'pairs', 'triples')):
                nn.init.normal_(p, std=(3 * p.size(1)) ** -0.5)

    def forward(self, idx, targets, reduction='mean'):
        T = idx.size(1)
        x, near = self.wte(idx), Near(torch.arange(T))
        for hashed in (self.pairs, self.triples):
            if hashed is not None:
                x = x + hashed(idx, near)
        if self.smear is not None:
            before, = near.before(x, 1)
            x = x + self.smear * before
        first = x = self.ln_e(x)
        for block in self.h:
            x = block(x, first, idx, self.rope[:, :T], near)
        logits = self.lm_head(self.ln_f(x)).float()
        logits = self.softcap * torch.tanh(logits / self.softcap)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


# -----------------------------------------------------------------------------
# the optimizer


class Muon(MuonAdamW):
    """support/muon.py's for one process, with the ideas for it."""
    dtype = torch.bfloat16

    def __init__(self, groups, options):
        super().__init__(groups, lr=options.learning_rate, betas=(0.8, options.beta2), eps=1e-10,
                         weight_decay=0.0, fused=True)
        self.options, self.n_steps = options, 0
        self.coefficients = polar_express(options) if options.polar_from else None

    def step(self):
        self.n_steps += 1
        super().step()

    def muon_step(self, params, lr, weight_decay, momentum):
        rows, columns = params[0].shape
        updates = self.averages('fast', params, momentum)
        if self.options.second_momentum:
            at_first = self.n_steps / (self.n_steps + 9)  # an average of all gradients so far
            slow = self.averages('slow', params, min(self.options.second_momentum, at_first))
            updates = torch._foreach_lerp(updates, slow, 0.5)
        else:
            updates = torch._foreach_lerp([p.grad for p in params], updates, momentum)
        updates = torch.stack(updates).to(self.dtype).view(-1, self.rows_of(params[0]), columns)
        updates = self.orthogonalize(updates).reshape(-1, rows, columns)
        if self.options.row_beta2:
            updates = self.normalize_rows(updates.float(), params)
        torch._foreach_mul_(params, 1 - lr * weight_decay)
        step_size = -lr * math.sqrt(max(1, rows / columns))
        torch._foreach_add_(params, [update.float() * step_size for update in updates])

    def rows_of(self, p):
        """How many rows of a matrix are orthogonalized together."""
        own = (group for group in self.param_groups if any(p is q for q in group['params']))
        return next(own).get('head_size') or len(p)

    def averages(self, name, params, momentum):
        """The running averages `name` of the gradients, brought up to date."""
        for p in params:
            if name not in self.state[p]:
                self.state[p][name] = torch.zeros_like(p)
        averages = [self.state[p][name] for p in params]
        torch._foreach_lerp_(averages, [p.grad for p in params], 1 - momentum)
        return averages

    def normalize_rows(self, updates, params):
        beta2, means = self.options.row_beta2, updates.square().mean(dim=2, keepdim=True)
        for p, mean in zip(params, means):
            self.state[p].setdefault('rows', torch.zeros_like(mean)).lerp_(mean, 1 - beta2)
        running = torch.stack([self.state[p]['rows'] for p in params]) / (1 - beta2 ** self.n_steps)
        normalized = updates * (running + 1e-10).rsqrt()
        sizes = (y.norm(dim=(1, 2), keepdim=True) for y in (updates, normalized))
        return normalized * (next(sizes) / (next(sizes) + 1e-10))  # some are zeros at first

    def orthogonalize(self, G):
        if not self.coefficients:
            return zeropower_via_newtonschulz(G, self.options.muon_iterations)
        X = G.mT if G.size(-2) > G.size(-1) else G
        X = X / (1.01 * X.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # 1.01: below one after rounding, too
        for a, b, c in self.coefficients:
            A = X @ X.mT
            X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
        return X.mT if G.size(-2) > G.size(-1) else X


def polar_express(options):
    """[(a, b, c)] of polynomials ax + bx^3 + cx^5, one after the other, that bring all from polar_from to 1
    as near to 1 as can be."""
    low, high, found = options.polar_from, 1.0, []
    for _ in range(options.muon_iterations):
        abc = best_quintic(max(low, options.polar_cushion * high), high)
        at_low, at_high = (abc @ (x, x**3, x**5) for x in (low, high))
        middle = (at_low + at_high) / 2  # is 1, if there is no cushion
        found.append([float(number) for number in abc / middle])
        low, high = at_low / middle, 2 - at_low / middle
    return found


def best_quintic(low, high):
    """The (a, b, c) for which ax + bx^3 + cx^5 is nearest to 1 from low to high, by Remez's algorithm: its
    error has the same size at four points, with changing signs."""
    inner = (3 * low + high) / 4, (low + 3 * high) / 4
    for _ in range(50):
        x = np.array((low, *inner, high))
        a, b, c, _ = np.linalg.solve(np.stack((x, x**3, x**5, (1, -1, 1, -1)), axis=1), np.ones(4))
        root = math.sqrt(9 * b**2 - 20 * a * c)  # where the slope is zero
        inner = math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))
    return np.array((a, b, c))


def create_optimizer(network, options):
    lrs = {'heads': options.matrix_lr, 'matrix': options.matrix_lr, 'embedding': options.embedding_lr,
           'hashed': options.hashed_lr or options.embedding_lr, 'rest': options.learning_rate}
    params = {role: [] for role in lrs}
    for name, p in network.named_parameters():
        if name.startswith(('pairs', 'triples')):
            params['hashed'].append(p)
        elif name.endswith('wte.weight'):
            params['embedding'].append(p)
        elif p.dim() < 2 or name.endswith(('lm_head.weight', 'gate.weight')):
            params['rest'].append(p)
        elif options.head_muon and name.endswith(HEADS):
            params['heads'].append(p)
        else:
            params['matrix'].append(p)
    return Muon([{'params': params[role], 'lr': lr, 'peak_lr': lr, 'muon': role in ('heads', 'matrix'),
                  'head_size': options.n_embd // options.n_head if role == 'heads' else None,
                  'momentum': options.momentum}
                 for role, lr in lrs.items() if params[role]], options)


# -----------------------------------------------------------------------------
# the loop


def get_batch(tokens, rng, it, options):
    """(idx, targets) of iteration `it`."""
    T = options.block_size
    for stage in reversed(options.grow.split(',') if options.grow else []):
        end, length = stage.split(':')
        if it < float(end) * options.iterations:
            T = int(length)
    B = options.batch_size * options.block_size // T
    if it < options.half_batch * options.iterations:
        B //= 2
    starts = rng.integers(0, len(tokens) - T - 1, B)
    windows = np.stack([tokens[start:start + T + 1] for start in starts]).astype(np.int64)
    windows = torch.from_numpy(windows)  # (B, T + 1)
    return windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def estimate_loss(network, tokens, options):
    """Bits per token over the first windows."""
    T = options.block_size
    n = min(options.eval_windows, (len(tokens) - 1) // T)
    windows = np.stack([tokens[i * T:(i + 1) * T + 1] for i in range(n)]).astype(np.int64)
    with torch.autocast('cpu', torch.bfloat16):
        losses = [network(some[:, :-1], some[:, 1:], 'none') for some in torch.from_numpy(windows).split(20)]
    return torch.cat(losses).mean().item() / math.log(2)


def train(options, train_tokens, val_tokens, vocab_size):
    """(bits per token; if weights are averaged, those without that, else None; ms per iteration; the
    optimizer's ms)"""
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    rng = np.random.default_rng(options.seed)
    network = Network(options, vocab_size)
    optimizer, averaged = create_optimizer(network, options), AveragedModel(network)
    times = []
    for it in range(options.iterations):
        idx, targets = get_batch(train_tokens, rng, it, options)
        t0 = time.perf_counter()
        with torch.autocast('cpu', torch.bfloat16):
            loss = network(idx, targets)
        loss.backward()
        t1 = time.perf_counter()
        share = min(1, (options.iterations - it) / (options.decay_fraction * options.iterations))
        for group in optimizer.param_groups:
            group['lr'] = share * group['peak_lr']
            group['weight_decay'] = share * options.decay if group['muon'] else 0.0
        optimizer.step()
        optimizer.zero_grad()
        t2 = time.perf_counter()
        times.append((t2 - t0, t2 - t1))
        if it >= (1 - options.average) * options.iterations:
            averaged.update_parameters(network)
    ms, optimizer_ms = 1000 * np.mean(times, axis=0)
    bits = estimate_loss(network, val_tokens, options)
    if options.average:
        return estimate_loss(averaged, val_tokens, options), bits, ms, optimizer_ms
    return bits, None, ms, optimizer_ms
