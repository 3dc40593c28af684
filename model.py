"""
The network: one GPTConfig, one GPT. With arch='gpt2' it has nanoGPT's parameter names, initialisation and function.

Letters for shapes: B batch, T positions, C channels (n_embd), H heads, K heads of keys and values (n_kv_head), D channels
of a head (C = H * D), V vocabulary.
References: the GPT-2 paper and https://github.com/openai/gpt-2/blob/master/src/model.py; https://github.com/karpathy/nanoGPT;
Llama 2, https://arxiv.org/abs/2307.09288; https://github.com/karpathy/nanochat
"""

import dataclasses
import math
import re

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# The parts of the three presets. Each preset is an architecture of Hugging Face transformers as well (huggingface.py).
PRESETS = ('gpt2', 'llama', 'modern')
PARTS = {
    'norm': ('layernorm', 'rmsnorm', 'rmsnorm_plain'),  # plain: without gains
    'norm_eps': (1e-5, 1e-5, 1e-6),
    'bias': (True, False, False),  # in matrices and LayerNorm
    'positions': ('learned', 'rope', 'rope'),
    'rope_theta': (10000.0, 10000.0, 10000.0),  # the slowest pair of channels turns once in 2 pi theta positions
    'rope_scaling': ('none', 'none', 'none'),  # or 'linear:FACTOR', or Llama 3's 'llama3:FACTOR:LOW:HIGH:ORIGINAL_BLOCK_SIZE'
    'embd_norm': (False, False, True),  # a norm after the embedding as well
    'fused_qkv': (True, False, False),  # query, key and value in one matrix; apart, as Muon needs them
    'qk_norm': (False, False, True),  # a norm without gains on queries and keys, after they were rotated
    'mlp': ('gelu', 'swiglu', 'relu2'),  # gelu is exact, as in nanoGPT; OpenAI's GPT-2 has gelu_tanh, 1e-4 away in the logits
    'tie': (True, False, False),  # one matrix for the embedding and the head: https://arxiv.org/abs/1608.05859
    'softcap': (0.0, 0.0, 15.0),  # logits stay between -softcap and softcap; 0: anywhere
    'init': ('gpt2', 'gpt2', 'modern'),  # see GPT.init_weights
}
WORDS = {'norm': ('layernorm', 'rmsnorm', 'rmsnorm_plain'), 'positions': ('learned', 'rope'), 'mlp': ('gelu', 'gelu_tanh', 'relu2', 'swiglu'), 'init': ('gpt2', 'modern')}
LARGEST = {'n_layer': 10_000, 'block_size': 2**23, 'vocab_size': 2**32, 'n_embd': 2**20, 'mlp_width': 2**24}  # a file may say anything, and what has no weights is made from it


@dataclasses.dataclass
class GPTConfig:
    """Parts that are None become those of `arch`, two of them computed: n_kv_head = n_head, mlp_width = 4C (8C/3 for swiglu)."""
    block_size: int = 1024
    vocab_size: int = 50304  # GPT-2's 50257, padded to a multiple of 64: matrix products like round shapes
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = None
    arch: str = 'gpt2'
    n_kv_head: int = None  # fewer than n_head: grouped-query attention, https://arxiv.org/abs/2305.13245
    mlp_width: int = None
    norm: str = None
    norm_eps: float = None
    positions: str = None
    rope_theta: float = None
    rope_scaling: str = None
    embd_norm: bool = None
    fused_qkv: bool = None
    qk_norm: bool = None
    mlp: str = None
    tie: bool = None
    softcap: float = None
    init: str = None

    def __post_init__(self):
        for name, values in PARTS.items():
            if getattr(self, name) is None and self.arch in PRESETS:
                setattr(self, name, values[PRESETS.index(self.arch)])
        self.n_kv_head = self.n_head if self.n_kv_head is None else self.n_kv_head
        if self.mlp_width is None:  # three matrices of 8C/3 are as many weights as two of 4C
            self.mlp_width = -(-8 * self.n_embd // (3 * 64)) * 64 if self.mlp == 'swiglu' else 4 * self.n_embd

    def problems(self):
        """What cannot be built, or makes no sense, as lines `what (value). what to do`. The values may come from a file."""
        if self.arch not in PRESETS:
            return [f"no such arch ({self.arch}). use {', '.join(PRESETS)}"]
        wrong = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is not field.type and not (field.type is float and type(value) is int):
                wrong.append(f"{field.name} is {value!r}. use a value of the type {field.type.__name__}")
            elif field.type in (int, float) and not (0 if field.name in ('dropout', 'softcap') else 1e-30) <= value < LARGEST.get(field.name, 1e30):
                wrong.append(f"{field.name} is out of range ({value}). use a number above 0" + (f" and below {LARGEST[field.name]:,}" if field.name in LARGEST else ''))
            elif field.name in WORDS and value not in WORDS[field.name]:
                wrong.append(f"no such {field.name} ({value}). use {', '.join(WORDS[field.name])}")
        if wrong:
            return wrong
        C, H, K = self.n_embd, self.n_head, self.n_kv_head
        if C % H:
            wrong.append(f"n_embd={C} is not a multiple of n_head={H}. use --n_embd={C // H * H or H} or --n_embd={C // H * H + H}")
        if H % K:
            wrong.append(f"n_head={H} is not a multiple of n_kv_head={K}. use --n_kv_head={max(k for k in range(1, min(H, K) + 1) if H % k == 0)}")
        if self.positions == 'rope' and C % H == 0 and C // H % 2:
            wrong.append(f"rope turns pairs of channels, and a head has {C // H}. use --n_embd={C + H}")
        if self.bias and self.norm != 'layernorm':
            wrong.append(f"bias=True makes no sense here: {self.norm} has no bias, nor have the matrices beside it in {self.arch}. leave bias out")
        if self.positions == 'learned' and (self.rope_scaling != 'none' or self.rope_theta != 10000):
            wrong.append("rope_theta and rope_scaling make no sense with learned positions. leave them out, or use --positions=rope")
        if self.tie and self.init == 'modern':
            wrong.append("init=modern starts the head at zero, and with tie=True the embedding is the same matrix. use --init=gpt2 or --tie=False")
        try:
            parse_rope_scaling(self.rope_scaling)
        except ValueError:
            wrong.append(f"no such rope_scaling ({self.rope_scaling}). use none, linear:FACTOR or llama3:FACTOR:LOW:HIGH:ORIGINAL_BLOCK_SIZE")
        return wrong

    def model_args(self):
        """What a checkpoint stores; of a GPT-2 no more than nanoGPT's sample.py takes, unless a part was changed."""
        args = dataclasses.asdict(self)
        if self.arch == 'gpt2':
            plain = GPTConfig(*(args[name] for name in NANOGPT))
            args = {name: value for name, value in args.items() if name in NANOGPT or value != getattr(plain, name)}
        return args


NANOGPT = ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'dropout', 'bias')  # the fields of nanoGPT's GPTConfig


def parse_rope_scaling(text):
    """'none' -> [], 'linear:4' -> [4.0], 'llama3:8:1:4:8192' -> [8.0, 1.0, 4.0, 8192.0]; ValueError for anything else."""
    kind, *numbers = text.split(':')
    numbers = [float(number) for number in numbers]
    if len(numbers) != {'none': 0, 'linear': 1, 'llama3': 4}.get(kind) or any(not 0 < number < math.inf for number in numbers) or \
            (kind == 'llama3' and numbers[1] >= numbers[2]):
        raise ValueError(text)
    return numbers


def rope_table(config):
    """The cosine and sine of the angle by which position t turns pair i of a head's channels, (2, T, D/2) in float32."""
    D = config.n_embd // config.n_head
    # on the CPU even where modules are built without memory ('meta'): it is no weight that a checkpoint would bring
    speeds = 1.0 / config.rope_theta ** (torch.arange(0, D, 2, dtype=torch.float32, device='cpu') / D)  # (D/2)
    scaling = parse_rope_scaling(config.rope_scaling)
    if len(scaling) == 1:  # positions, squeezed
        speeds = speeds / scaling[0]
    if len(scaling) == 4:  # only the slow ones, with a smooth transition
        factor, low, high, original = scaling
        fast = ((original * speeds / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        speeds = (1 - fast) * speeds / factor + fast * speeds
    angles = torch.outer(torch.arange(config.block_size, dtype=torch.float32, device='cpu'), speeds)  # (T, D/2)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x, rope):
    """x (B, H, T, D) with its channels i and i + D/2 turned by rope (2, T, D/2): https://arxiv.org/abs/2104.09864"""
    cos, sin = rope.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def relu2(x):
    x = F.relu(x)
    return x * x  # https://arxiv.org/abs/2109.08668; square() would be float32 in CUDA's autocast


def gelu_tanh(x):
    return F.gelu(x, approximate='tanh')


class RMSNorm(nn.RMSNorm):
    """torch's, but on a CPU, where that is a chain of small steps, with a backward pass of its own: two to five times as fast."""

    def forward(self, x):
        if x.device.type != 'cpu' or x.dtype == torch.float64 or torch.compiler.is_compiling():
            return super().forward(x)
        y = PlainRMSNorm.apply(x, self.eps) if torch.is_grad_enabled() else plain_rmsnorm(x, self.eps)[0]
        return y if self.weight is None else y * self.weight.to(y.dtype)


def plain_rmsnorm(x, eps):
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = (length.square() / x.size(-1) + eps).rsqrt()  # stays float32: rounded, it would shift a whole row
    return (x * scale).to(x.dtype), scale


class PlainRMSNorm(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, eps):
        y, scale = plain_rmsnorm(x, eps)
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        y, scale = ctx.saved_tensors
        along = (grad * y).mean(dim=-1, keepdim=True)  # what points along y changes nothing
        return (torch.addcmul(grad, y, along, value=-1) * scale).to(grad.dtype), None


def make_norm(config):
    if config.norm == 'layernorm':
        return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.bias)
    return RMSNorm(config.n_embd, eps=config.norm_eps, elementwise_affine=config.norm == 'rmsnorm')


def attend(q, k, v, dropout=0.0, mask=None):
    """Attention: q (B, H, T, D) asks k, v (B, K, S, D), where H is a multiple of K. Causal where S = T; one query (T = 1) may ask
    all; else `mask` (T, S) tells what it may ask."""
    T, S = q.size(2), k.size(2)
    if q.device.type == 'cpu' and q.dtype == torch.bfloat16 and T == S <= 512 and mask is None:
        # the definition itself: for short sequences torch's fused kernel for CPUs takes up to seven times as long (dev/LOG.md)
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
        future = torch.full((T, T), -math.inf, dtype=q.dtype).triu(1)
        scores = torch.baddbmm(future, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=q.size(-1) ** -0.5)  # (B * H, T, T)
        return F.dropout(scores.softmax(dim=-1), dropout).view(*q.shape[:2], T, T) @ v
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None and T == S, enable_gqa=k.size(1) < q.size(1))


class Cache:
    """Keys and values, (B, K, S, D) per layer, of the first `end` positions of B texts: what generate() need not compute again.
    All of it is allocated here. `static`: attention reads all S positions behind a mask, so that each step has the same shapes."""

    def __init__(self, model, B, S, static=False):
        config, weight = model.config, model.transformer.wte.weight
        kind = weight.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        self.k, self.v = ([torch.zeros(B, config.n_kv_head, S, config.n_embd // config.n_head, dtype=dtype, device=weight.device)
                           for _ in range(config.n_layer)] for _ in 'kv')
        self.size, self.device, self.static, self.end = S, weight.device, static, 0
        for tensor in (*self.k, *self.v) if static else ():
            torch._dynamo.mark_static_address(tensor, guard=False)  # it is written to, and a CUDA graph would be given up for that

    def advance(self, T):
        """Make ready for T more positions, which the next forward pass fills."""
        self.positions = torch.arange(self.end, self.end + T, device=self.device)
        self.end += T
        self.seen = self.size if self.static else self.end
        plain = T == self.seen or (T == 1 and not self.static)  # attend() needs no mask
        self.mask = None if plain else torch.arange(self.seen, device=self.device) <= self.positions[:, None]  # (T, S)
        return self

    def extend(self, layer, k, v):
        """Put k, v (B, K, T, D) into their positions; returns all that may be asked, (B, K, S, D) each."""
        self.k[layer].index_copy_(2, self.positions, k.to(self.k[layer].dtype))  # under autocast CUDA's norms return float32
        self.v[layer].index_copy_(2, self.positions, v.to(self.v[layer].dtype))
        return self.k[layer][:, :, :self.seen], self.v[layer][:, :, :self.seen]


class ChunkedLoss(torch.autograd.Function):
    """Mean cross-entropy of the logits softcap(x W^T) for x (N, C), W (V, C), targets (N), `rows` of them at a time: the logits (N, V) are
    never in memory as a whole, as the gradients of a chunk are made while it is there. https://arxiv.org/abs/2410.10989"""

    @staticmethod
    def forward(ctx, x, weight, targets, softcap, rows):
        kind, dx, dw, total = x.device.type, torch.empty_like(x), torch.zeros_like(weight), 0.0
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        w, targets = weight.to(dtype), targets.view(-1, 1)
        with torch.autocast(kind, enabled=False):
            for part, target, out in zip(x.split(rows), targets.split(rows), dx.split(rows)):
                part, keep, target = part.to(dtype), target >= 0, target.clamp(min=0)
                logits = cap(part @ w.mT, softcap)
                logp = F.log_softmax(logits.float(), dim=-1)  # (rows, V)
                total = total - (logp.gather(1, target) * keep).sum()
                d = logp.exp_().scatter_add_(1, target, torch.full_like(logp[:, :1], -1.0))  # by the logits: probabilities, less one for the target
                d = (d * (1 - (logits / softcap).square()) if softcap else d).to(dtype)
                out.copy_(d @ w * keep)
                dw += d.mT @ (part * keep)
        ctx.save_for_backward(dx, dw, n := (targets >= 0).sum())
        return total / n

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        dx, dw, n = ctx.saved_tensors
        return dx.mul_(grad / n), dw.mul_(grad / n), None, None, None  # not before: float16 has no room for a share of a mean


def chunked_loss(x, head, targets, softcap, reduction, rows):
    """The loss as GPT.forward defines it, for x (N, C) and targets (N), without ever holding all logits."""
    if reduction == 'mean' and torch.is_grad_enabled():
        return ChunkedLoss.apply(x, head.weight, targets, softcap, rows)
    losses = torch.cat([F.cross_entropy(cap(head(part), softcap).float(), target, ignore_index=-1, reduction='none')
                        for part, target in zip(x.split(rows), targets.split(rows))])
    return losses if reduction == 'none' else losses.sum() / (targets >= 0).sum()


def cap(logits, softcap):
    """Logits between -softcap and softcap, in float32; 0: as they are."""
    return softcap * torch.tanh(logits.float() / softcap) if softcap else logits


class CausalSelfAttention(nn.Module):

    def __init__(self, config, layer_idx):
        super().__init__()
        C, D = config.n_embd, config.n_embd // config.n_head
        self.widths = (C, config.n_kv_head * D, config.n_kv_head * D)  # of query, key and value
        self.fused = config.fused_qkv
        if self.fused:
            self.c_attn = nn.Linear(C, sum(self.widths), bias=config.bias)
        else:
            self.c_q, self.c_k, self.c_v = (nn.Linear(C, width, bias=config.bias) for width in self.widths)
        self.c_proj = nn.Linear(C, C, bias=config.bias)
        self.qk_norm = RMSNorm(D, eps=config.norm_eps, elementwise_affine=False) if config.qk_norm else nn.Identity()
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.n_kv_head, self.dropout, self.layer_idx = config.n_head, config.n_kv_head, config.dropout, layer_idx

    def forward(self, x, rope=None, cache=None):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(self.widths, dim=2) if self.fused else (self.c_q(x), self.c_k(x), self.c_v(x))
        q = q.view(B, T, self.n_head, -1).transpose(1, 2)  # (B, H, T, D)
        k = k.view(B, T, self.n_kv_head, -1).transpose(1, 2)  # (B, K, T, D)
        v = v.view(B, T, self.n_kv_head, -1).transpose(1, 2)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        q, k = self.qk_norm(q), self.qk_norm(k)
        if cache is not None:
            k, v = cache.extend(self.layer_idx, k, v)  # (B, K, S, D)
        y = attend(q, k, v, self.dropout if self.training else 0.0, cache.mask if cache is not None else None)  # (B, H, T, D)
        y = y.transpose(1, 2).reshape(B, T, C)  # the heads side by side again: (B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.mlp_width, bias=config.bias)
        self.act = {'gelu': F.gelu, 'gelu_tanh': gelu_tanh, 'relu2': relu2}[config.mlp]
        self.c_proj = nn.Linear(config.mlp_width, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class SwiGLU(nn.Module):
    """https://arxiv.org/abs/2002.05202"""

    def __init__(self, config):
        super().__init__()
        self.c_gate = nn.Linear(config.n_embd, config.mlp_width, bias=config.bias)
        self.c_fc = nn.Linear(config.n_embd, config.mlp_width, bias=config.bias)
        self.c_proj = nn.Linear(config.mlp_width, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(F.silu(self.c_gate(x)) * self.c_fc(x)))


class PackedLinear(nn.Module):
    """A Linear of bfloat16 for inference on a CPU, its weights in oneDNN's own order: for few rows F.linear, which takes them as they
    lie, needs 1.3 to 1.5 times as long (dev/LOG.md). Both functions are without a public name; torch.compile uses them too."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = torch.ops.mkldnn._reorder_linear_weight(linear.weight.data, 1), linear.bias

    def forward(self, x):
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, 'none', [], '')


class Block(nn.Module):

    def __init__(self, config, layer_idx):
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = CausalSelfAttention(config, layer_idx)
        self.ln_2 = make_norm(config)
        self.mlp = SwiGLU(config) if config.mlp == 'swiglu' else MLP(config)
        self.activation_checkpointing = False  # True: keeps only its input, and computes the inside again for the backward pass

    def forward(self, x, rope=None, cache=None):
        if self.activation_checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(self.compute, x, rope, use_reentrant=False)
        return self.compute(x, rope, cache)

    def compute(self, x, rope=None, cache=None):
        x = x + self.attn(self.ln_1(x), rope, cache)
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):

    def __init__(self, config):
        super().__init__()
        if problems := config.problems():
            raise ValueError('; '.join(problems))
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            **(dict(wpe=nn.Embedding(config.block_size, config.n_embd)) if config.positions == 'learned' else {}),
            ln_e=make_norm(config) if config.embd_norm else nn.Identity(),
            drop=nn.Dropout(config.dropout),
            h=nn.ModuleList([Block(config, layer_idx) for layer_idx in range(config.n_layer)]),
            ln_f=make_norm(config),
        ))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie:
            self.transformer.wte.weight = self.lm_head.weight
        self.register_buffer('rope', rope_table(config) if config.positions == 'rope' else None, persistent=False)
        self.loss_rows = 0  # tokens at a time whose logits are made for the loss, which then comes without logits; 0: all at once
        self.init_weights()

    def init_weights(self):
        """By standard deviation. gpt2: 0.02 for matrices and embeddings, residual projections narrower, as 1/sqrt(2L).
        modern: 1 for the embedding, 1/sqrt(3 fan-in) for matrices; residual projections and head zero, so that every block
        begins as nothing and the first loss is ln V (https://github.com/KellerJordan/modded-nanogpt). Biases zero, gains one."""
        modern = self.config.init == 'modern'
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=(3 * module.in_features) ** -0.5 if modern else 0.02)
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=1.0 if modern else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for name, p in self.named_parameters():  # a second draw, so that a seed gives the very weights that it gives in nanoGPT
            if modern and name.endswith(('c_proj.weight', 'lm_head.weight')):
                nn.init.zeros_(p)
            elif name.endswith('c_proj.weight'):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * self.config.n_layer))

    def forward(self, idx, targets=None, full_logits=False, reduction='mean', cache=None):
        """idx (B, T) token ids, targets (B, T) the ids that follow, -1 to leave one out. Returns (logits, mean loss in nats), or with
        reduction='none' that of each of the B * T targets; the logits are None where loss_rows is set. Without targets the loss is None and the logits are the last position's,
        (B, 1, V), unless full_logits.
        With a cache (cache.advance(T)) idx goes on where the ids before ended."""
        B, T = idx.shape
        assert T <= self.config.block_size, f"{T} positions are more than block_size={self.config.block_size}"
        positions = torch.arange(T, device=idx.device) if cache is None else cache.positions
        x = self.transformer.wte(idx)  # (B, T, C)
        if self.config.positions == 'learned':
            x = x + self.transformer.wpe(positions)
        x = self.transformer.drop(self.transformer.ln_e(x))
        rope = None if self.rope is None else self.rope[:, :T] if cache is None else self.rope[:, positions]
        for block in self.transformer.h:
            x = block(x, rope, cache)
        x = self.transformer.ln_f(x)
        if targets is not None and self.loss_rows:
            return None, chunked_loss(x.flatten(0, 1), self.lm_head, targets.reshape(-1), self.config.softcap, reduction, self.loss_rows)
        if targets is None and not full_logits:
            x = x[:, [-1], :]
        logits = cap(self.lm_head(x), self.config.softcap)  # (B, T, V)
        if targets is None:
            return logits, None
        # float32 whatever autocast says: bfloat16 would round the loss to three digits
        loss = F.cross_entropy(logits.float().view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1, reduction=reduction)
        return logits, loss

    def crop_block_size(self, block_size):
        """Shorten the context, keeping the first `block_size` positions, e.g. of weights that were trained with more."""
        assert block_size <= self.config.block_size
        self.config.block_size = block_size
        if self.config.positions == 'rope':
            self.rope = self.rope[:, :block_size].clone()
        else:
            self.transformer.wpe.weight = nn.Parameter(self.transformer.wpe.weight[:block_size].clone())
            self.transformer.wpe.num_embeddings = block_size

    def get_num_params(self, non_embedding=True):
        """Number of parameters; by default without embeddings, as nanoGPT counts (a tied one stays in: it is the head as well)."""
        embeddings = ['wpe'] * (self.config.positions == 'learned') + ['wte'] * (not self.config.tie)
        return sum(p.numel() for p in self.parameters()) - sum(self.transformer[name].weight.numel() for name in embeddings if non_embedding)

    def flops_per_token(self):
        """Forward and backward: 6 per weight of a matrix product, 12 L C T for attention (PaLM, appendix B: not halved)."""
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 6 * weights + 12 * self.config.n_layer * self.config.n_embd * self.config.block_size

    def estimate_mfu(self, fwdbwd_per_iter, dt, peak_flops=None):
        """Model FLOPs utilization: what `fwdbwd_per_iter` sequences of block_size tokens in `dt` seconds used of the peak
        FLOP/s of this device (or of `peak_flops`). None for a device that PEAK_FLOPS does not know."""
        peak_flops = data_sheet_peak(self.lm_head.weight.device) if peak_flops is None else peak_flops
        if peak_flops is None:
            return None
        return self.flops_per_token() * self.config.block_size * fwdbwd_per_iter / dt / peak_flops

    def to_inference(self, device, dtype):
        """For generate() alone: the weights in `dtype` (a word) on `device`, and where a CPU has bfloat16, laid out for it. Returns self."""
        for p in self.parameters():  # not the table of angles
            p.data = p.data.to(device, getattr(torch, dtype))
        if torch.device(device).type == 'cpu' and dtype == 'bfloat16' and torch.backends.mkldnn.is_available():
            for module in list(self.modules()):
                for name, child in module.named_children():
                    if isinstance(child, nn.Linear):
                        setattr(module, name, PackedLinear(child))
        return self.to(device)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, vocab_size=None, stop=None, generator=None,
                 use_cache=True, static=False, on_token=None):
        """Continue idx (B, T) by up to max_new_tokens ids each. temperature 0 is greedy; ids from vocab_size on (padding)
        are never produced; ends early when every row has produced the id `stop`, or one of several, or when on_token, called with
        the new ids (B, 1) of each step, returns True. A window of block_size ids that is full goes on from its last half.
        The cache changes the time, not the text. static: a compiled model makes the steps of one id. Call model.eval() first."""
        (B, T), block_size = idx.shape, self.config.block_size
        size = -(-(T + max_new_tokens) // 128) * 128  # rounded: calls of similar lengths share a compiled step
        cache = Cache(self, B, min(size, block_size), static) if use_cache else None
        stop = None if stop is None else torch.tensor(stop, device=idx.device)
        done = torch.zeros(B, dtype=torch.bool, device=idx.device)
        start = max(T - block_size, 0)  # of the window
        for _ in range(max_new_tokens):
            if idx.size(1) - start > block_size:  # the window is full
                start = idx.size(1) - (block_size + 1) // 2
                if use_cache:
                    cache.end = 0
            new = idx_next if use_cache and cache.end else idx[:, start:]  # the ids of the window that the cache lacks
            step = self if static and new.size(1) == 1 else self.forward  # other lengths are not worth compiling
            logits, _ = step(new, cache=cache.advance(new.size(1)) if use_cache else None)
            idx_next = sample_next(logits[:, -1, :vocab_size].float(), temperature, top_k, top_p, generator)  # (B, 1)
            idx = torch.cat((idx, idx_next), dim=1)
            if on_token is not None and on_token(idx_next):
                break
            if stop is not None:
                done |= torch.isin(idx_next[:, 0], stop)
                if done.all():
                    break
        return idx


def sample_next(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """Draw the next ids (B, 1) from logits (B, V): of the top_k likeliest ones, of the likeliest that make up top_p."""
    if temperature < 1e-6:  # 0, or so little that the division below would overflow
        return logits.argmax(dim=-1, keepdim=True)
    ids = None
    if top_k is not None or top_p is not None:
        logits, ids = logits.topk(min(top_k or logits.size(-1), logits.size(-1)), dim=-1)  # both (B, k), likeliest first
    probs = F.softmax(logits / temperature, dim=-1)
    if top_p is not None:
        probs = probs.masked_fill(probs.cumsum(-1) - probs > top_p, 0)  # the first one always stays
    # the first id whose sum of probabilities passes a random share of the whole; torch.multinomial would make a GPU's host wait
    sums = probs.cumsum(-1)
    share = torch.rand(logits.size(0), 1, generator=generator, device=logits.device)
    drawn = torch.searchsorted(sums, share * sums[:, -1:], right=True)
    return drawn if ids is None else ids.gather(1, drawn)


def data_sheet_peak(device):
    """FLOP/s of a device by PEAK_FLOPS; None for one that it does not know."""
    if device.type != 'cuda':
        return None
    words = re.split('[^a-z0-9]+', torch.cuda.get_device_name(device).lower())  # 'nvidia', 'h100', '80gb', 'hbm3'
    if {'laptop', 'ti', 'super', 'd', 'max', 'mig'} & set(words):  # "RTX 4080 SUPER", "4090 D", Max-Q: other peaks
        return None
    return next((peak for key, peak in PEAK_FLOPS.items() if set(key.split()) <= set(words)), None)


# FLOP/s of dense bfloat16 matrix products (float16 where there is no bfloat16) by the makers' data sheets; looked up in
# this order by the words of torch.cuda.get_device_name(). A float32 run is measured against the same number.
PEAK_FLOPS = {
    'gb200': 2.5e15, 'b200': 2.25e15, 'h200': 989e12, 'h100 pcie': 756e12, 'h100 nvl': 835e12, 'h100': 989e12, 'h800': 989e12,
    'gh200': 989e12, 'a100': 312e12, 'a800': 312e12, 'a10g': 70e12, 'a40': 149.7e12, 'a30': 165e12, 'a10': 125e12,
    'l40s': 362e12, 'l40': 181e12, 'l4': 121e12, 'v100': 125e12, 't4': 65e12,
    'rtx 5090': 209.5e12, 'rtx 4090': 165.2e12, 'rtx 4080': 97.5e12, 'rtx 3090': 71.2e12, 'rtx 3080': 59.5e12,
    'rtx 6000 ada': 364.2e12, 'rtx a6000': 154.8e12, 'mi325x': 1307e12, 'mi300x': 1307e12, 'mi250x': 191.5e12,
}
