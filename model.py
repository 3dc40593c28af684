"""
The network: one GPTConfig, one GPT. With arch='gpt2' it has nanoGPT's parameter names, initialisation and
function. From top to bottom: the settings and their checks, positions, attention, the block with its MLP and
what `local` has beside attention, the GPT with mask and loss, how text is generated. In an empty folder this
file works alone, but for from_pretrained and load; support/cpu.py and support/devices.py replace parts of a
model by others.

Letters for shapes: B batch, T positions, C channels (n_embd), H heads, K key/value heads (n_kv_head), D
channels of a head (C = H * D), S positions of the keys, V vocabulary.
References: GPT-2, https://github.com/openai/gpt-2/blob/master/src/model.py;
https://github.com/karpathy/nanoGPT; Llama 2, https://arxiv.org/abs/2307.09288;
https://github.com/karpathy/nanochat
"""

import contextlib
import dataclasses
import math

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

# -----------------------------------------------------------------------------
# settings

# The presets of `arch`. The first three are architectures of Hugging Face transformers as well; local learns
# sooner from little text.
GPT2 = dict(
    norm='layernorm',  # or rmsnorm; rmsnorm_plain: without gains
    norm_eps=1e-5,
    bias=True,  # in Linear and LayerNorm
    positions='learned',  # or rope
    rope_theta=1e4,
    rope_scaling='none',  # for others see train.py
    embd_norm=False,  # a norm after the embedding as well
    fused_qkv=True,  # query, key and value in one matrix. Muon needs three
    qk_norm=False,  # a norm without gains on queries and keys, after the rotation
    mlp='gelu',  # exact, as in nanoGPT; OpenAI's has gelu_tanh. or relu2, swiglu
    tie=True,  # one matrix for the embedding and the head: https://arxiv.org/abs/1608.05859
    softcap=0.0,  # logits stay between -softcap and softcap; 0: no bound
    init='gpt2',  # or modern
    near=0,  # rows of BigramEmbedding; above 0 each block has a ShortConv as well
    near_layers=0,  # extra blocks without attention, before the n_layer others
)
LLAMA = dict(GPT2, norm='rmsnorm', bias=False, positions='rope', fused_qkv=False, mlp='swiglu', tie=False)
MODERN = dict(LLAMA, norm='rmsnorm_plain', norm_eps=1e-6, embd_norm=True, qk_norm=True, mlp='relu2',
              softcap=15.0, init='modern')
PRESETS = {'gpt2': GPT2, 'llama': LLAMA, 'modern': MODERN, 'local': dict(MODERN, near=16384, near_layers=1)}

# what can be built. A file may say anything, and even what has no weights takes time and memory to build
WORDS = {'norm': ('layernorm', 'rmsnorm', 'rmsnorm_plain'), 'positions': ('learned', 'rope'),
         'mlp': ('gelu', 'gelu_tanh', 'relu2', 'swiglu'), 'init': ('gpt2', 'modern')}
RANGES = {  # name: (least, below)
    'n_layer': (1, 2**10), 'n_head': (1, 2**20), 'n_kv_head': (1, 2**20), 'n_embd': (1, 2**20),
    'mlp_width': (1, 2**24), 'block_size': (1, 2**23), 'vocab_size': (1, 2**32), 'near': (0, 2**32),
    'near_layers': (0, 2**10), 'dropout': (0, 1), 'softcap': (0, 1e30), 'norm_eps': (1e-30, 1e30),
    'rope_theta': (1e-30, 1e30)}
NANOGPT_FIELDS = 'block_size vocab_size n_layer n_head n_embd dropout bias'.split()


@dataclasses.dataclass
class GPTConfig:
    """Parts that are None become those of `arch`; n_kv_head becomes n_head, mlp_width 4C (8C/3 for
    swiglu)."""
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
    near: int = None
    near_layers: int = None

    def __post_init__(self):
        for name, value in PRESETS.get(self.arch, {}).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.n_kv_head is None:
            self.n_kv_head = self.n_head
        if self.mlp_width is None:
            # three matrices of 8C/3 have as many weights as two of 4C
            C = self.n_embd
            self.mlp_width = math.ceil(8 * C / (3 * 64)) * 64 if self.mlp == 'swiglu' else 4 * C

    def problems(self):
        """What cannot be built, or makes no sense, as lines `what (value). what to do`; [] if all is well."""
        if self.arch not in PRESETS:
            return [f"no such arch ({self.arch}). use {', '.join(PRESETS)}"]
        fields = [field_problem(field, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return list(filter(None, fields)) or part_problems(self)

    def model_args(self):
        """What a checkpoint stores. For a plain GPT-2 no more than nanoGPT's sample.py takes."""
        args = dataclasses.asdict(self)
        if self.arch != 'gpt2':
            return args
        plain = GPTConfig(**{name: args[name] for name in NANOGPT_FIELDS})
        return {name: value for name, value in args.items()
                if name in NANOGPT_FIELDS or value != getattr(plain, name)}


def field_problem(field, value):
    """A line, or None if a field of GPTConfig may have this value."""
    name, kind = field.name, field.type
    if kind not in (bool, int, float, str) or (value is None and field.default is None):
        return None  # a field that somebody added, of a type of its own, or None by default
    if type(value) is not kind and not (kind is float and type(value) is int):
        return f"{name} is {value!r:.60}. use a value of the type {kind.__name__}"
    if value not in WORDS.get(name, [value]):
        return f"no such {name} ({value}). use {', '.join(WORDS[name])}"
    least, below = RANGES.get(name, (-1e30, 1e30))
    if kind in (int, float) and not least <= value < below:  # nan is out of range as well
        return f"{name} is out of range ({value}). use {least} or more, and below {below:,}"
    return None


def part_problems(config):
    """What does not fit together."""
    C, H, K, problems = config.n_embd, config.n_head, config.n_kv_head, []
    step = 2 * H if config.positions == 'rope' else H  # rope rotates pairs of a head's channels
    if C % step:
        of = f"n_head={H}" if step == H else f"2 n_head={step}, as rope takes pairs"
        problems.append(f"n_embd={C} is not a multiple of {of}. use --n_embd={C // step * step + step}")
    if H % K:
        problems.append(f"n_head={H} is not a multiple of n_kv_head={K}. use --n_kv_head={math.gcd(H, K)}")
    if config.bias and config.norm != 'layernorm':
        problems.append(f"bias=True is for norm=layernorm, and {config.norm} has none. leave bias out")
    if config.tie and config.init == 'modern':
        problems.append("init=modern starts the head at zero, and with tie=True the embedding is the same "
                        "matrix. use --tie=False, or another arch")
    if config.positions == 'learned' and (config.rope_scaling != 'none' or config.rope_theta != 10000):
        problems.append("rope_theta and rope_scaling make no sense with learned positions. leave them out, "
                        "or use --positions=rope")
    try:
        parse_rope_scaling(config.rope_scaling)
    except ValueError:
        problems.append(f"no such rope_scaling ({config.rope_scaling}). use none or "
                        "llama3:FACTOR:LOW:HIGH:ORIGINAL_BLOCK_SIZE")
    return problems


# -----------------------------------------------------------------------------
# positions


def rope_table(config):
    """cos and sin of the angle by which position t rotates pair i of a head's channels, (2, T, D/2)
    float32."""
    D = config.n_embd // config.n_head
    exponents = torch.arange(0, D, 2, dtype=torch.float32) / D
    inv_freq = 1.0 / config.rope_theta ** exponents  # (D/2)
    scaling = parse_rope_scaling(config.rope_scaling)
    if scaling:  # llama3: squeeze the positions of the low frequencies, with a smooth transition
        factor, low, high, original = scaling
        turns = original * inv_freq / (2 * math.pi)  # within the original block; low or fewer: slowed down
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        inv_freq = (1 - keep) * inv_freq / factor + keep * inv_freq
    t = torch.arange(config.block_size, dtype=torch.float32)
    angles = torch.outer(t, inv_freq)  # (T, D/2)
    return torch.stack((angles.cos(), angles.sin()))


def parse_rope_scaling(text):
    """'none' -> [], 'llama3:8:1:4:8192' -> [8.0, 1.0, 4.0, 8192.0]; else ValueError."""
    kind, *numbers = text.split(':')
    numbers = [float(number) for number in numbers]
    length = {'none': 0, 'llama3': 4}.get(kind)
    if len(numbers) != length or not all(0 < number < math.inf for number in numbers):
        raise ValueError(text)
    if numbers and numbers[1] >= numbers[2]:
        raise ValueError(text)
    return numbers


def apply_rotary_emb(x, rope):
    """x (B, H, T, D) with its channels i and i + D/2 rotated by rope (2, T, D/2):
    https://arxiv.org/abs/2104.09864"""
    cos, sin = rope.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def positions_in_text(doc_ids):
    """The position of each token in its own text, (B, T), counted from 0."""
    at = torch.arange(doc_ids.size(1), device=doc_ids.device).expand_as(doc_ids)
    begins = torch.ones_like(doc_ids, dtype=torch.bool)
    begins[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    return at - torch.where(begins, at, 0).cummax(dim=1).values


# -----------------------------------------------------------------------------
# attention


class LayerNorm(nn.LayerNorm):

    def __init__(self, ndim, bias, eps=1e-5):
        super().__init__(ndim, eps=eps, bias=bias)


def make_norm(config):
    if config.norm == 'layernorm':
        return LayerNorm(config.n_embd, config.bias, config.norm_eps)
    return nn.RMSNorm(config.n_embd, config.norm_eps, elementwise_affine=config.norm == 'rmsnorm')


class CausalSelfAttention(nn.Module):
    scaled_dot_product_attention = staticmethod(F.scaled_dot_product_attention)  # support/cpu.py has another

    def __init__(self, config, layer_idx=0):
        super().__init__()
        C, D = config.n_embd, config.n_embd // config.n_head
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head
        self.widths = (C, self.n_kv_head * D, self.n_kv_head * D)  # of query, key and value
        self.fused = config.fused_qkv
        if self.fused:
            self.c_attn = nn.Linear(C, sum(self.widths), bias=config.bias)
        else:
            self.c_q, self.c_k, self.c_v = (nn.Linear(C, width, bias=config.bias) for width in self.widths)
        self.c_proj = nn.Linear(C, C, bias=config.bias)
        norm = nn.RMSNorm(D, config.norm_eps, elementwise_affine=False)
        self.qk_norm = norm if config.qk_norm else nn.Identity()
        self.resid_dropout = nn.Dropout(config.dropout)
        self.dropout, self.layer_idx = config.dropout, layer_idx

    def forward(self, x, rope=None, mask=None, cache=None):
        B, T, C = x.shape
        if self.fused:
            q, k, v = self.c_attn(x).split(self.widths, dim=2)
        else:
            q, k, v = self.c_q(x), self.c_k(x), self.c_v(x)
        # heads before positions: q (B, H, T, D), k and v (B, K, T, D)
        q, k, v = [y.view(B, T, -1, C // self.n_head).transpose(1, 2) for y in (q, k, v)]
        if rope is not None:
            q, k = apply_rotary_emb(q, rope), apply_rotary_emb(k, rope)
        q, k, dtype = self.qk_norm(q), self.qk_norm(k), v.dtype
        if cache is not None:
            k, v = cache.update(self.layer_idx, k, v)  # (B, K, S, D)
            q = q.to(k.dtype)  # generating on a CPU: float32, see support/cpu.py
        causal = True if mask is None and T == k.size(2) else False  # a bool, where a compiled T is a symbol
        # this one line is the attention, on every device, in training and with a cache
        y = self.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal,
                                              dropout_p=self.dropout if self.training else 0.0,
                                              enable_gqa=self.n_kv_head < self.n_head)  # (B, H, T, D)
        y = y.to(dtype).transpose(1, 2).reshape(B, T, C)  # the heads side by side again: (B, T, C)
        return self.resid_dropout(self.c_proj(y))


# -----------------------------------------------------------------------------
# the block


def relu2(x):
    x = F.relu(x)
    return x * x  # https://arxiv.org/abs/2109.08668; square() would be float32 under CUDA's autocast


def gelu_tanh(x):
    return F.gelu(x, approximate='tanh')


class MLP(nn.Module):

    def __init__(self, config):
        super().__init__()
        C, width, bias = config.n_embd, config.mlp_width, config.bias
        self.act = {'gelu': F.gelu, 'gelu_tanh': gelu_tanh, 'relu2': relu2, 'swiglu': F.silu}[config.mlp]
        # swiglu: https://arxiv.org/abs/2002.05202
        self.c_gate = nn.Linear(C, width, bias=bias) if config.mlp == 'swiglu' else None
        self.c_fc = nn.Linear(C, width, bias=bias)
        self.c_proj = nn.Linear(width, C, bias=bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = self.act(self.c_gate(x)) * self.c_fc(x) if self.c_gate else self.act(self.c_fc(x))
        return self.dropout(self.c_proj(x))


class BigramEmbedding(nn.Embedding):
    """A row for a token and the one before it. With fewer rows than pairs, some share one, as in fastText
    (https://arxiv.org/abs/1607.04606)."""
    layer_idx = 'ids'  # its name in a KVCache

    def forward(self, idx, positions, cache=None):
        # ids from 1 on, as 0 says that nothing stood before
        previous = what_was_before(self, idx + 1, 1, positions, cache)[0]
        return super().forward((idx * 1_000_003 + previous) % self.num_embeddings)  # a hash, by a prime


class ShortConv(nn.Module):
    """x plus, channel by channel, a learned share of x at each of the three positions before: a depthwise
    convolution, at first without effect (https://arxiv.org/abs/2512.17351)."""
    seen = 3  # positions before its own

    def __init__(self, ndim, layer_idx):
        super().__init__()
        self.shares = nn.ParameterList(torch.zeros(ndim) for _ in range(self.seen))  # one before, two, ...
        self.layer_idx = layer_idx

    def forward(self, x, positions, cache=None):
        y = x
        for share, before in zip(self.shares, what_was_before(self, x, self.seen, positions, cache)):
            y = torch.addcmul(y, before, share.to(x.dtype))
        return y


def what_was_before(module, x, n, positions, cache):
    """[x (B, T, ...) of one position before, of two, ... of n]: zeros where a text begins. positions (T), or
    (B, T) where several texts share a window; cache: a KVCache, with what the module saw last."""
    T = x.size(1)
    if cache is None:
        longer = F.pad(x, (0, 0) * (x.dim() - 2) + (n, 0))  # n zeros before the first position
    else:  # layer_idx is read only here: torch.compile compiles anew for each value of it
        longer = torch.cat((cache.before(module.layer_idx, x), x), dim=1)
    before = [longer[:, n - k:n - k + T] for k in range(1, n + 1)]
    if positions.dim() == 1:
        return before
    at = positions.view(*positions.shape, *[1] * (x.dim() - 2))
    return [y.masked_fill(at < k, 0) for k, y in enumerate(before, 1)]


class Block(nn.Module):

    def __init__(self, config, layer_idx=0, attention=True):
        super().__init__()
        self.ln_1 = self.attn = self.conv = None
        if attention:
            self.ln_1, self.attn = make_norm(config), CausalSelfAttention(config, layer_idx)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)
        if config.near:
            self.conv = ShortConv(config.n_embd, layer_idx)
        self.activation_checkpointing = False  # True: keep only the input, recompute the rest in backward

    def forward(self, *inputs):
        if self.activation_checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(self.compute, *inputs, use_reentrant=False)
        return self.compute(*inputs)

    def compute(self, x, positions=None, rope=None, mask=None, cache=None):
        if self.attn:
            x = x + self.attn(self.ln_1(x), rope, mask, cache)
        h = self.ln_2(x)
        if self.conv:
            h = self.conv(h, positions, cache)
        return x + self.mlp(h)


# -----------------------------------------------------------------------------
# the whole


FLOAT32_BETWEEN_BLOCKS = ('cpu',)  # devices on which bfloat16 from block to block would save nothing


def matmul_dtype(x):
    """The dtype in which a matrix product takes x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class GPT(nn.Module):
    Config = GPTConfig

    def __init__(self, config):
        super().__init__()
        if problems := config.problems():
            raise ValueError('; '.join(problems))
        self.config = config
        near, n_layer = config.near_layers, config.near_layers + config.n_layer
        parts = dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            wpe=nn.Embedding(config.block_size, config.n_embd) if config.positions == 'learned' else None,
            ln_e=make_norm(config) if config.embd_norm else nn.Identity(),
            drop=nn.Dropout(config.dropout),
            h=nn.ModuleList([Block(config, i, attention=i >= near) for i in range(n_layer)]),
            ln_f=make_norm(config),
            bigram=BigramEmbedding(config.near, config.n_embd) if config.near else None,
        )
        self.transformer = nn.ModuleDict({name: part for name, part in parts.items() if part is not None})
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie:
            self.transformer.wte.weight = self.lm_head.weight
        rope = None
        if config.positions == 'rope':
            with torch.device('cpu'):  # also in a network on 'meta': the table is in no checkpoint
                rope = rope_table(config)
        self.register_buffer('rope', rope, persistent=False)
        self.cache_dtype = None  # of keys and values, if another than that of matrix products
        # on 'meta' there is nothing to initialize, and trying would take torch a second
        if not self.lm_head.weight.is_meta:
            self.init_weights()

    def init_weights(self):
        """Standard deviations. gpt2: 0.02 for matrices and embeddings, 0.02 / sqrt(2L) for residual
        projections. modern: 1 for the embedding, 1 / sqrt(3 fan-in) for matrices, 0 for residual projections
        and head, so that every block starts as nothing (https://github.com/KellerJordan/modded-nanogpt).
        Biases 0, gains 1."""
        modern = self.config.init == 'modern'
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=(3 * module.in_features) ** -0.5 if modern else 0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=1.0 if modern else 0.02)
        # drawn a second time, as in nanoGPT: so a seed gives the same weights here as there
        for name, p in self.named_parameters():
            if modern and name.endswith(('c_proj.weight', 'lm_head.weight')):
                nn.init.zeros_(p)
            elif name.endswith('c_proj.weight'):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * self.config.n_layer))

    def forward(self, idx, targets=None, doc_ids=None, full_logits=False, reduction='mean', cache=None,
                return_logits=True):
        """
        idx (B, T) token ids; targets (B, T) the ids that follow, -1 to leave one out. Returns (logits, loss):
        the mean loss in nats, or with reduction='none' that of each of the B * T targets. Without targets the
        loss is None and the logits are the last position's, (B, 1, V), unless full_logits. With a cache, idx
        continues what is in it. doc_ids (B, T), not with a cache: the number of the text that a position
        belongs to, if attention is to stay inside it. return_logits=False saves memory and time beside a
        loss.
        """
        B, T = idx.shape
        assert T <= self.config.block_size, f"{T} positions are more than block_size={self.config.block_size}"
        positions = torch.arange(T, device=idx.device) if cache is None else cache.positions  # (T)
        mask, keys, needs_mask = None, T, doc_ids is not None  # else attention's is_causal is enough
        if cache is not None:
            keys, needs_mask = cache.visible, cache.needs_mask
        if needs_mask:
            mask = self.attention_mask(positions, keys, doc_ids)
        if doc_ids is not None:
            positions = positions_in_text(doc_ids)  # (B, T)
        x = self.transformer.wte(idx)  # (B, T, C)
        if self.config.near:
            x = x + self.transformer.bigram(idx, positions, cache)
        if self.config.positions == 'learned':
            x = x + self.transformer.wpe(positions)
        x = self.transformer.drop(self.transformer.ln_e(x))
        if matmul_dtype(x) == torch.bfloat16 and x.device.type not in FLOAT32_BETWEEN_BLOCKS:
            x = x.bfloat16()  # from block to block: half the bytes, and no loss that we saw (dev/LOG.md)
        rope = None
        if self.rope is not None:
            # (2, T, D/2), over all texts of a window: rope is relative, and the mask keeps the texts apart
            rope = self.rope[:, :T] if cache is None else self.rope[:, positions]
        for block in self.transformer.h:
            x = block(x, positions, rope, mask, cache)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.logits(x if full_logits else x[:, [-1], :]), None
        logits, loss = self.loss(x, targets.reshape(-1), reduction, return_logits)
        if reduction == 'mean':  # which is nan over no targets
            loss = torch.where((targets >= 0).any(), loss, 0.0)
        return logits, loss

    def attention_mask(self, queries, n_keys, doc_ids=None):
        """True where a query, by its position (T), may look at a key: not later and, with doc_ids (B, T), of
        the same text. (T, S) or (B, 1, T, T), in training and with a cache."""
        mask = torch.arange(n_keys, device=queries.device) <= queries[:, None]
        if doc_ids is None:
            return mask
        return (mask & (doc_ids[:, :, None] == doc_ids[:, None, :]))[:, None]

    def loss(self, x, targets, reduction='mean', return_logits=True):
        """(logits or None, loss) of what the last norm gives, x (B, T, C), for targets (B * T)."""
        logits = self.logits(x)
        # float32 whatever autocast says: bfloat16 would round the loss to three digits
        flat = logits.float().view(-1, logits.size(-1))  # (B * T, V)
        if not return_logits:  # torch.compile would compute a gradient for them, of zeros
            logits = None
        return logits, F.cross_entropy(flat, targets, ignore_index=-1, reduction=reduction)

    def logits(self, x):
        """(B, T, C) -> (B, T, V)"""
        logits, softcap = self.lm_head(x), self.config.softcap
        return softcap * torch.tanh(logits.float() / softcap) if softcap else logits

    @classmethod
    def from_pretrained(cls, source, override_args=None):
        """The GPT of a Hugging Face name ('gpt2', 'OWNER/NAME') or folder, a checkpoint or a run's folder, on
        the CPU. override_args: {'dropout': 0.1} and the like, as in nanoGPT."""
        with loader(source) as files:
            return files.build(cls, files.read(files.find(source)), **(override_args or {}))

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type=None):
        """nanoGPT's AdamW; train.py calls create_optimizer in optim.py."""
        groups = [{'params': [p for p in self.parameters() if p.requires_grad and (p.dim() > 1) == matrix],
                   'weight_decay': decay} for matrix, decay in ((True, weight_decay), (False, 0.0))]
        return torch.optim.AdamW(groups, learning_rate, betas, fused=True)

    def set_activation_checkpointing(self, on):
        """Whether blocks keep only their input, and compute the rest again in backward."""
        for block in self.transformer.h:
            block.activation_checkpointing = on

    def crop_block_size(self, block_size):
        """Keep the first `block_size` positions."""
        assert block_size <= self.config.block_size, 'it has fewer positions'
        self.config.block_size = block_size
        if self.config.positions == 'rope':
            self.rope = self.rope[:, :block_size].clone()
        if self.config.positions == 'learned':
            wpe = self.transformer.wpe
            wpe.weight, wpe.num_embeddings = nn.Parameter(wpe.weight[:block_size].clone()), block_size

    def get_num_params(self, non_embedding=True):
        """Number of parameters, by default without embeddings; a tied one stays, as in nanoGPT."""
        n = sum(p.numel() for p in self.parameters())
        if non_embedding:
            n -= sum(m.weight.numel() for m in self.modules()
                     if isinstance(m, nn.Embedding) and m.weight is not self.lm_head.weight)
        return n

    def flops_per_token(self):
        """Forward and backward: 6 per weight of a matrix product, 12 L C T for attention (PaLM, app. B)."""
        config = self.config
        weights = sum(m.weight.numel() for _, m in self.named_modules(remove_duplicate=False)
                      if isinstance(m, nn.Linear))
        return 6 * weights + 12 * config.n_layer * config.n_embd * config.block_size

    def estimate_mfu(self, fwdbwd_per_iter, dt, peak_flops=None):
        """Model FLOPs utilization: the share of peak_flops (FLOP/s) that fwdbwd_per_iter sequences of
        block_size tokens in dt seconds make; nan without it. support/devices.py has a table."""
        if peak_flops is None:
            return math.nan
        return self.flops_per_token() * self.config.block_size * fwdbwd_per_iter / dt / peak_flops

    # without cuDNN's attention, which plans for each new shape, half a second each
    # (https://github.com/modelscope/FunASR/issues/3704; not measured by us)
    @torch.no_grad()
    @sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, vocab_size=None,
                 stop=None, generator=None, use_cache=True, static=False, on_token=None):
        """
        Continue idx (B, T) by up to max_new_tokens ids each; call model.eval() first. Or a text, if the model
        comes from load(). temperature 0 or less: greedy. Ids from vocab_size on (padding) are not drawn. Ends
        early when every row has drawn the id `stop`, or one of several, or when on_token, called with the new
        ids (B, 1) of each step, returns True. FloatingPointError if logits were not finite: with on_token at
        once, else at the end, as a GPU would have to wait, and processes that share a model go in step. When
        block_size ids are full, the last half of them is kept as context. The cache changes the speed, not
        the text. static: shapes stay the same from step to step, for a compiled model.
        """
        if isinstance(idx, str):
            return self.generate_text(idx, max_new_tokens, stop, temperature=temperature, top_k=top_k,
                                      top_p=top_p, generator=generator, on_token=on_token)
        (B, T), block_size = idx.shape, self.config.block_size
        cache = None
        if use_cache:
            size = -(-(T + max_new_tokens) // 128) * 128  # rounded: similar lengths share a compiled step
            cache = KVCache(self, B, min(size, block_size), static)
        stop = None if stop is None else torch.tensor(stop, device=idx.device)
        done = torch.zeros(B, dtype=torch.bool, device=idx.device)
        finite = torch.ones((), dtype=torch.bool, device=idx.device)
        start = max(T - block_size, 0)  # where the context begins
        for _ in range(max_new_tokens):
            if idx.size(1) - start > block_size:
                start = idx.size(1) - (block_size + 1) // 2
                if cache:
                    cache.end = 0  # begin anew; what is in it is overwritten or not looked at
            new = idx_next if cache and cache.end else idx[:, start:]  # the ids that are not in the cache yet
            # other lengths are not worth compiling
            step = self if static and new.size(1) == 1 else self.forward
            logits, _ = step(new, cache=cache.advance(new.size(1)) if cache else None)
            logits = logits[:, -1, :vocab_size].float()
            finite &= torch.isfinite(logits.amax())
            if on_token is not None and not finite:
                break
            idx_next = sample_next(logits, temperature, top_k, top_p, generator)  # (B, 1)
            idx = torch.cat((idx, idx_next), dim=1)
            if on_token is not None and on_token(idx_next):
                break
            if stop is not None:
                done |= torch.isin(idx_next[:, 0], stop)
                if done.all():
                    break
        if not finite:
            raise FloatingPointError("the network's outputs (logits) are not finite")
        return idx

    def generate_text(self, text, max_new_tokens, stop=None, **options):
        """`text` with its continuation, which ends before <|endoftext|> and before the text `stop`."""
        tokenizer = getattr(self, 'tokenizer', None)
        if tokenizer is None:
            raise TypeError("generate() wants token ids (B, T); a text only if load() made the model: "
                            "model, tokenizer = load('out')")
        ids = tokenizer.encode_prompt(text) or [tokenizer.end_of_text or 0]  # empty: what begins a text, or 0
        idx = torch.tensor([ids], device=self.lm_head.weight.device)
        ends = tokenizer.stop_ids or ()
        idx = self.generate(idx, max_new_tokens, vocab_size=tokenizer.n_vocab, stop=ends or None, **options)
        new = [i for i in idx[0, len(ids):].tolist() if i not in ends]
        new = tokenizer.decode(ids + new)[len(tokenizer.decode(ids)):]
        return text + (new.partition(stop)[0] if stop else new)


# -----------------------------------------------------------------------------
# generating


class KVCache:
    """Keys and values (B, K, S, D) per layer of the first `end` positions of B texts, all allocated at once.
    static: attention reads all S positions behind a mask, so that every step has the same shapes."""

    def __init__(self, model, B, S, static=False):
        config, weight = model.config, model.transformer.wte.weight
        self.size, self.device, self.static, self.end = S, weight.device, static, 0
        dtype = model.cache_dtype or matmul_dtype(weight)
        shape = (B, config.n_kv_head, S, config.n_embd // config.n_head)
        layers = range(len(model.transformer.h))
        self.k, self.v = ({i: torch.zeros(shape, dtype=dtype, device=self.device)
                           for i in layers[config.near_layers:]} for _ in 'kv')
        self.ends = {}  # what stood last, for the modules that ask what was before
        if config.near:
            seen = (B, ShortConv.seen, config.n_embd)
            self.ends = {i: torch.zeros(seen, dtype=weight.dtype, device=self.device) for i in layers}
            self.ends['ids'] = torch.zeros(B, 1, dtype=torch.long, device=self.device)
        if static:
            # torch.compile has CUDA graphs for what is changed in place only if its address is fixed
            for tensors in (self.k, self.v, self.ends):
                for tensor in tensors.values():
                    torch._dynamo.mark_static_address(tensor, guard=False)

    def advance(self, T):
        """Make room for T more positions, which the next forward pass fills. Returns self."""
        self.positions = torch.arange(self.end, self.end + T, device=self.device)  # of the queries
        self.end += T
        self.visible = self.size if self.static else self.end
        # none for a whole text, or for one query that sees all keys
        self.needs_mask = T != self.visible and (T > 1 or self.static)
        return self

    def before(self, name, x):
        """What stood at the end of the pass before this one, (B, n, ...), zeros if there was none; keeps the
        end of x (B, T, ...) for the next."""
        end = self.ends[name]
        before = end.masked_fill(self.positions[0] == 0, 0).to(x.dtype)
        end.copy_(torch.cat((before, x), dim=1)[:, -end.size(1):])
        return before

    def update(self, layer, k, v):
        """Store k, v (B, K, T, D) at their positions; returns all keys and values so far, (B, K, S, D)
        each."""
        # under autocast CUDA's norms return float32
        self.k[layer].index_copy_(2, self.positions, k.to(self.k[layer].dtype))
        self.v[layer].index_copy_(2, self.positions, v.to(self.v[layer].dtype))
        return self.k[layer][:, :, :self.visible], self.v[layer][:, :, :self.visible]


def sample_next(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """Draw the next ids (B, 1) from logits (B, V): among the top_k likeliest, among the likeliest that make
    up top_p."""
    if temperature < 1e-6:  # 0, or so small that the division below would overflow
        return logits.argmax(dim=-1, keepdim=True)
    ids = None
    if top_k is not None or top_p is not None:
        k = min(top_k or logits.size(-1), logits.size(-1))
        logits, ids = logits.topk(k, dim=-1)  # both (B, k), likeliest first
    probs = F.softmax(logits / temperature, dim=-1)
    if top_p is not None:
        probs = probs.masked_fill(probs.cumsum(-1) - probs > top_p, 0)  # the first one always stays
    # the first id at which the cumulative probability passes a random number; torch.multinomial would make
    # the host wait for a GPU
    sums = probs.cumsum(-1)
    threshold = torch.rand(logits.size(0), 1, generator=generator, device=logits.device) * sums[:, -1:]
    drawn = torch.searchsorted(sums, threshold, right=True).clamp_(max=sums.size(-1) - 1)  # nan: none
    return drawn if ids is None else ids.gather(1, drawn)


def load(source='out', dataset=None, data_dir=None):
    """(model, tokenizer) of a run, a checkpoint or a Hugging Face model; on the CPU, in eval mode."""
    with loader(source) as files:
        return files.model_and_tokenizer(GPT, source, dataset, data_dir)


@contextlib.contextmanager
def loader(source):
    """support/load.py, which nothing else in this file needs. ValueError for what cannot be loaded."""
    from support import load as files
    try:
        yield files
    except SystemExit:  # a notebook goes on
        raise ValueError(f"{source} cannot be loaded: see the line above") from None
