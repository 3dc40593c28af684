"""
The network: one GPTConfig, one GPT. With arch='gpt2' it has nanoGPT's parameter names, initialization and
function. From top to bottom: the settings, positions, attention, the block, the GPT with its loss, and how
ids and texts are generated. This file works when it is copied alone, but for from_pretrained().

Letters for shapes: B batch, T positions, C channels (n_embd), H heads, K key/value heads (n_kv_head), D
channels of a head (C = H * D), S positions of the keys, V vocabulary.
References: GPT-2, https://github.com/openai/gpt-2/blob/master/src/model.py;
https://github.com/karpathy/nanoGPT; Llama 2, https://arxiv.org/abs/2307.09288;
https://github.com/karpathy/nanochat
"""

import dataclasses
import math

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

# -----------------------------------------------------------------------------
# settings

# The presets of `arch`. All are architectures of Hugging Face transformers as well (huggingface.py)
GPT2 = dict(
    norm='layernorm',  # or rmsnorm; rmsnorm_plain: without gains
    norm_eps=1e-5,
    bias=True,  # in Linear and LayerNorm
    positions='learned',  # or rope
    rope_theta=1e4,
    rope_scaling=None,  # Llama 3's: a dict, see rope_table
    embd_norm=False,  # a norm after the embedding as well
    fused_qkv=True,  # query, key and value in one matrix. Muon needs three
    qk_norm=False,  # a norm without gains on queries and keys, after the rotation
    mlp='gelu',  # exact, as in nanoGPT; OpenAI's has gelu_tanh. or relu2, swiglu
    tie=True,  # one matrix for the embedding and the head: https://arxiv.org/abs/1608.05859
    softcap=0.0,  # logits stay between -softcap and softcap; 0: no bound
    init='gpt2',  # or modern, see init_weights
)
LLAMA = dict(GPT2, norm='rmsnorm', bias=False, positions='rope', fused_qkv=False, mlp='swiglu', tie=False)
MODERN = dict(LLAMA, norm='rmsnorm_plain', norm_eps=1e-6, embd_norm=True, qk_norm=True, mlp='relu2',
              softcap=15.0, init='modern')
PRESETS = {'gpt2': GPT2, 'llama': LLAMA, 'modern': MODERN}

NANOGPT_FIELDS = ['block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'dropout', 'bias']
# What nanoGPT's network has beside these fields, whatever the presets above are edited to: a checkpoint that
# leaves a part out means this one. Do not edit
NANOGPT = dict(norm='layernorm', norm_eps=1e-5, positions='learned', rope_theta=1e4, rope_scaling=None,
               embd_norm=False, fused_qkv=True, qk_norm=False, mlp='gelu', tie=True, softcap=0.0, init='gpt2')


@dataclasses.dataclass
class GPTConfig:
    """Fields that are None become those of the preset `arch`; n_kv_head becomes n_head, mlp_width 4C (for
    swiglu 8C/3). ValueError, with a line for the user, for what cannot be built or trained."""
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
    rope_scaling: dict = None
    embd_norm: bool = None
    fused_qkv: bool = None
    qk_norm: bool = None
    mlp: str = None
    tie: bool = None
    softcap: float = None
    init: str = None

    def __post_init__(self):
        if self.arch not in PRESETS:
            raise ValueError(f"no such arch ({self.arch}). use {', '.join(PRESETS)}")
        for name, value in PRESETS[self.arch].items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.n_kv_head is None:
            self.n_kv_head = self.n_head
        if self.mlp_width is None:
            self.mlp_width = 4 * self.n_embd
            if self.mlp == 'swiglu':
                # three matrices of 8C/3 have as many weights as two of 4C; a multiple of 64
                self.mlp_width = math.ceil(8 * self.n_embd / (3 * 64)) * 64
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}. use "
                             f"--n_embd={self.n_embd // self.n_head * self.n_head + self.n_head}")
        if self.positions == 'rope' and self.n_embd // self.n_head % 2:
            raise ValueError(f"n_embd / n_head is odd ({self.n_embd} / {self.n_head}), but rope rotates "
                             f"pairs. use --n_embd={self.n_embd + self.n_head}")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head={self.n_head} is not a multiple of n_kv_head={self.n_kv_head}. use "
                             f"--n_kv_head={math.gcd(self.n_head, self.n_kv_head)}")
        if self.bias and self.norm != 'layernorm':
            raise ValueError(f"bias=True is for norm=layernorm, and {self.norm} has none. leave bias out")
        if self.tie and self.init == 'modern':
            raise ValueError("init=modern starts the head at zero, and with tie=True the embedding is the "
                             "same matrix. use tie=False, or another init")

    def model_args(self):
        """The fields as a dict, for a checkpoint. A gpt2 has nanoGPT's seven, so that nanoGPT's sample.py
        reads it, and others only where they differ from nanoGPT's network."""
        args = dataclasses.asdict(self)
        if self.arch == 'gpt2':
            nanogpt = {**NANOGPT, 'arch': 'gpt2', 'n_kv_head': self.n_head, 'mlp_width': 4 * self.n_embd}
            for name, value in dataclasses.asdict(self).items():
                off = False  # a field that somebody has added, such as window=0
                if name not in NANOGPT_FIELDS and value == nanogpt.get(name, off):
                    del args[name]
        return args


# -----------------------------------------------------------------------------
# positions


def rope_table(config):
    """cos and sin of the angle by which position t rotates pair i of a head's channels, (2, T, D/2) float32
    on the CPU."""
    D = config.n_embd // config.n_head
    exponents = torch.arange(0, D, 2, dtype=torch.float32, device='cpu') / D
    inv_freq = 1.0 / config.rope_theta ** exponents  # (D/2)
    if config.rope_scaling is not None:
        # Llama 3.1: squeeze the positions of the low frequencies, with a smooth transition to the high ones
        # (transformers, modeling_rope_utils.py: _compute_llama3_parameters)
        factor = config.rope_scaling['factor']
        low = config.rope_scaling['low_freq_factor']
        high = config.rope_scaling['high_freq_factor']
        turns = config.rope_scaling['original_max_position_embeddings'] * inv_freq / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)  # 0 for pairs that turn `low` times or less
        inv_freq = (1 - keep) * inv_freq / factor + keep * inv_freq
    t = torch.arange(config.block_size, dtype=torch.float32, device='cpu')
    angles = torch.outer(t, inv_freq)  # (T, D/2)
    return torch.stack((angles.cos(), angles.sin()))  # (2, T, D/2)


def apply_rotary_emb(x, rope):
    """x (B, H, T, D) with its channels i and i + D/2 rotated by rope (2, T, D/2):
    https://arxiv.org/abs/2104.09864"""
    cos, sin = rope.to(x.dtype)
    a, b = x.chunk(2, dim=-1)  # both (B, H, T, D/2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)  # (B, H, T, D)


def positions_in_document(doc_ids):
    """The position of each token in its own document, (B, T), counted from 0."""
    positions = torch.arange(doc_ids.size(1), device=doc_ids.device)  # (T)
    is_first = doc_ids[:, 1:] != doc_ids[:, :-1]  # (B, T - 1), but for the window's first token
    begins = F.pad(positions[1:] * is_first, (1, 0))  # (B, T)
    return positions - begins.cummax(dim=1).values


# -----------------------------------------------------------------------------
# attention


def without_cudnn_attention():
    """A context or decorator that keeps cuDNN out of attention: it plans anew for each length, half a second
    each (https://github.com/modelscope/FunASR/issues/3704; not measured by us)."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def make_norm(config):
    if config.norm == 'layernorm':
        return nn.LayerNorm(config.n_embd, config.norm_eps, bias=config.bias)
    has_gains = {'rmsnorm': True, 'rmsnorm_plain': False}
    return nn.RMSNorm(config.n_embd, config.norm_eps, elementwise_affine=has_gains[config.norm])


def causal_mask(positions, n_keys):
    """True where a query, by its position (T), sees a key: not later. (T, S)"""
    return torch.arange(n_keys, device=positions.device) <= positions[:, None]


def document_mask(doc_ids):
    """True where a query sees a key: not later, and of the same document, doc_ids (B, T). (B, 1, T, T)"""
    causal = causal_mask(torch.arange(doc_ids.size(1), device=doc_ids.device), doc_ids.size(1))
    return (causal & (doc_ids[:, :, None] == doc_ids[:, None, :]))[:, None]


def document_block_mask(doc_ids):
    """The same for FlexAttention, which skips blocks of 128 x 128 where nobody sees anybody: no (T, T) in
    memory."""
    B, T = doc_ids.shape

    def sees(b, h, query, key):
        return (key <= query) & (doc_ids[b, query] == doc_ids[b, key])

    return create_block_mask(sees, B, None, T, T, device=doc_ids.device)


def attention(q, k, v, mask=None, is_causal=False, dropout_p=0.0):
    """softmax(q k^T / sqrt(D)) v of q (B, H, T, D) and k, v (B, K, S, D) -> (B, H, T, D)."""
    B, H, T, D = q.shape
    K = k.size(1)
    if isinstance(mask, BlockMask):
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=K < H)
    # where the definition itself is faster: with 64 positions torch's kernel takes 3 times as long (a step of
    # 4 layers of 128 channels 1.5 to 1.7 times), with 512 still 1.1
    by_definition = q.device.type == 'cpu' and q.dtype == torch.bfloat16 and is_causal and T <= 512
    if K < H and (by_definition or (mask is not None and q.device.type == 'cuda')):
        # on CUDA with a mask and enable_gqa torch takes the plain formula, unless cuDNN has a kernel: 4.8 ms
        # and 2,315 MB where repeated keys need 1.6 ms and 169 MB (H100, 16 heads over 4, 8 x 1024)
        k, v = k.repeat_interleave(H // K, dim=1), v.repeat_interleave(H // K, dim=1)  # (B, H, S, D)
    if by_definition:
        future = torch.full((T, T), -math.inf, dtype=q.dtype).triu(1)
        scores = torch.baddbmm(future, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=D ** -0.5)  # (B * H, T, T)
        weights = F.dropout(scores.softmax(dim=-1), dropout_p)
        return weights.view(B, H, T, T) @ v
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal,
                                          enable_gqa=k.size(1) < H)


class CausalSelfAttention(nn.Module):

    def __init__(self, config, layer_idx=0):
        super().__init__()
        C = config.n_embd
        D = C // config.n_head
        self.n_head = config.n_head
        self.layer_idx = layer_idx
        self.dropout = config.dropout
        self.widths = [C, config.n_kv_head * D, config.n_kv_head * D]  # of query, key and value
        self.fused_qkv = config.fused_qkv
        if self.fused_qkv:
            self.c_attn = nn.Linear(C, sum(self.widths), bias=config.bias)
        else:
            self.c_q = nn.Linear(C, self.widths[0], bias=config.bias)
            self.c_k = nn.Linear(C, self.widths[1], bias=config.bias)
            self.c_v = nn.Linear(C, self.widths[2], bias=config.bias)
        self.c_proj = nn.Linear(C, C, bias=config.bias)
        self.qk_norm = nn.RMSNorm(D, config.norm_eps, elementwise_affine=False) if config.qk_norm else None
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x, rope=None, mask=None, cache=None):
        B, T, C = x.shape
        D = C // self.n_head
        if self.fused_qkv:
            q, k, v = self.c_attn(x).split(self.widths, dim=2)
        else:
            q, k, v = self.c_q(x), self.c_k(x), self.c_v(x)
        q = q.view(B, T, -1, D).transpose(1, 2)  # (B, H, T, D)
        k = k.view(B, T, -1, D).transpose(1, 2)  # (B, K, T, D)
        v = v.view(B, T, -1, D).transpose(1, 2)  # (B, K, T, D)
        if rope is not None:
            q, k = apply_rotary_emb(q, rope), apply_rotary_emb(k, rope)
        if self.qk_norm is not None:
            q, k = self.qk_norm(q).to(v.dtype), self.qk_norm(k).to(v.dtype)  # autocast's is float32 on CUDA
        if cache is not None:
            k, v = cache.update(self.layer_idx, k, v)  # (B, K, S, D)
        is_causal = bool(mask is None and T == k.size(2))  # compiled, T may be a symbol
        dropout_p = self.dropout if self.training else 0.0
        y = attention(q, k, v, mask, is_causal, dropout_p)  # (B, H, T, D)
        y = y.transpose(1, 2).reshape(B, T, C)  # the heads side by side again
        return self.resid_dropout(self.c_proj(y))


# -----------------------------------------------------------------------------
# the block


def relu2(x):
    x = F.relu(x)
    return x * x  # https://arxiv.org/abs/2109.08668; square() would be float32 under CUDA's autocast


def gelu_tanh(x):
    return F.gelu(x, approximate='tanh')


# swiglu: https://arxiv.org/abs/2002.05202
ACTIVATIONS = {'gelu': F.gelu, 'gelu_tanh': gelu_tanh, 'relu2': relu2, 'swiglu': F.silu}


class MLP(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.act = ACTIVATIONS[config.mlp]
        self.has_gate = config.mlp == 'swiglu'
        if self.has_gate:
            self.c_gate = nn.Linear(config.n_embd, config.mlp_width, bias=config.bias)
        self.c_fc = nn.Linear(config.n_embd, config.mlp_width, bias=config.bias)
        self.c_proj = nn.Linear(config.mlp_width, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        if self.has_gate:
            x = self.act(self.c_gate(x)) * self.c_fc(x)
        else:
            x = self.act(self.c_fc(x))
        return self.dropout(self.c_proj(x))


class Block(nn.Module):

    def __init__(self, config, layer_idx=0):
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = CausalSelfAttention(config, layer_idx)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x, rope=None, mask=None, cache=None):
        x = x + self.attn(self.ln_1(x), rope, mask, cache)
        x = x + self.mlp(self.ln_2(x))
        return x


# -----------------------------------------------------------------------------
# the whole


def matmul_dtype(x):
    """The dtype in which a matrix product takes x: autocast's, where that is on."""
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return x.dtype


class GPT(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.config = config
        parts = {'wte': nn.Embedding(config.vocab_size, config.n_embd)}
        if config.positions == 'learned':
            parts['wpe'] = nn.Embedding(config.block_size, config.n_embd)
        parts['ln_e'] = make_norm(config) if config.embd_norm else nn.Identity()
        parts['drop'] = nn.Dropout(config.dropout)
        parts['h'] = nn.ModuleList([Block(config, layer_idx) for layer_idx in range(config.n_layer)])
        parts['ln_f'] = make_norm(config)
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie:
            self.transformer.wte.weight = self.lm_head.weight
        # a table, in no checkpoint; on the CPU also where the rest is on 'meta'
        self.register_buffer('rope', rope_table(config) if config.positions == 'rope' else None,
                             persistent=False)
        self.activation_checkpointing = False  # keep a block's input, and compute the rest again in backward
        self.loss_chunk_size = 0  # tokens whose logits the loss holds at a time, if none are returned; 0: all
        self.captured = None  # the last CapturedStep of generate(), for its next call
        if not self.lm_head.weight.is_meta:
            self.init_weights()

    def init_weights(self):
        """Standard deviations. gpt2: 0.02 for matrices and embeddings, 0.02 / sqrt(2L) for residual
        projections. modern: 1 for the embedding, 1 / sqrt(3 fan-in) for matrices, 0 for residual projections
        and head, so that every block starts as nothing (https://github.com/KellerJordan/modded-nanogpt).
        Biases 0, gains 1."""
        modern = self.config.init == 'modern'
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=1.0 if modern else 0.02)
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=(3 * module.in_features) ** -0.5 if modern else 0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        # drawn a second time, as in nanoGPT: so a seed gives the same weights here as there
        for name, p in self.named_parameters():
            if modern and name.endswith(('c_proj.weight', 'lm_head.weight')):
                nn.init.zeros_(p)
            elif name.endswith('c_proj.weight'):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * self.config.n_layer))

    def forward(self, idx, targets=None, doc_ids=None, cache=None, reduction='mean', return_logits=True):
        """
        idx (B, T) token ids, targets (B, T) the ids that follow, -1 to leave one out -> logits (B, T, V) and
        loss in nats: the mean over the targets, with reduction='none' one of each, (B * T). Without targets
        the logits are the last position's, (B, 1, V), and the loss is None. doc_ids (B, T): the number of the
        document that a position belongs to, if attention is to stay inside it. With a KVCache, idx continues
        what is in it. return_logits=False saves memory and time beside a loss.
        """
        B, T = idx.shape
        assert T <= self.config.block_size, f"{T} positions are more than block_size={self.config.block_size}"
        if cache is None:
            positions = torch.arange(T, device=idx.device)  # (T)
        else:
            positions = cache.advance(T)  # (T)
        mask = None  # not needed for a whole text (is_causal does it), nor for one query that sees all keys
        if doc_ids is not None and self.uses_block_mask(doc_ids):
            mask = document_block_mask(doc_ids)
        elif doc_ids is not None:
            mask = document_mask(doc_ids)  # (B, 1, T, T)
        elif cache is not None and (cache.static or 1 < T < cache.n_keys):
            mask = causal_mask(positions, cache.n_keys)  # (T, S)

        x = self.transformer.wte(idx)  # (B, T, C)
        if self.config.positions == 'learned':
            if doc_ids is not None:
                positions = positions_in_document(doc_ids)  # (B, T)
            x = x + self.transformer.wpe(positions)
        # over all documents of a window: rope is relative, and the mask keeps them apart
        rope = None if self.rope is None else self.rope[:, positions]  # (2, T, D/2)
        x = self.transformer.drop(self.transformer.ln_e(x))
        if x.device.type == 'cuda' and matmul_dtype(x) == torch.bfloat16:
            # the residual stream as well: a tenth of a step's memory traffic (124M), and no loss that we saw
            # (4 layers, 3 seeds: 2.3883 -> 2.3913, 2.3945 -> 2.3932, 2.4130 -> 2.4131). A CPU gains nothing
            x = x.bfloat16()
        for block in self.transformer.h:
            if self.activation_checkpointing and self.training and torch.is_grad_enabled():
                x = checkpoint(block, x, rope, mask, use_reentrant=False)
            else:
                x = block(x, rope, mask, cache)
        x = self.transformer.ln_f(x)

        if targets is None:
            return self.logits(x[:, -1:]), None  # [:, [-1]] copies from the host: no CUDA graph could hold it
        targets = targets.flatten()  # (B * T)
        if self.loss_chunk_size and not return_logits:
            return None, self.loss_by_chunks(x, targets, reduction)
        logits = self.logits(x)  # (B, T, V)
        loss = self.loss(logits, targets, reduction)
        if not return_logits:
            logits = None  # torch.compile would compute a gradient for them, of zeros
        return logits, loss

    def uses_block_mask(self, doc_ids):
        """FlexAttention where it is compiled. It has no dropout, and torch's compiler for DDP refused it
        (https://github.com/pytorch/pytorch/issues/137481)."""
        no_dropout = not self.training or self.config.dropout == 0
        return (doc_ids.device.type == 'cuda' and torch.compiler.is_compiling() and no_dropout
                and not torch.distributed.is_initialized())

    def logits(self, x):
        """(..., C) -> (..., V)"""
        logits = self.lm_head(x)
        if self.config.softcap:
            logits = self.config.softcap * torch.tanh(logits.float() / self.config.softcap)
        return logits

    def loss(self, logits, targets, reduction='mean'):
        """The cross entropy of logits (..., V), N positions in all, and targets (N)."""
        # float32 whatever autocast says: bfloat16 would round the loss to three digits
        flat = logits.float().view(-1, logits.size(-1))  # (N, V)
        loss = F.cross_entropy(flat, targets, ignore_index=-1, reduction=reduction)
        if reduction == 'mean':  # which is nan over no targets
            loss = torch.where((targets >= 0).any(), loss, 0.0)
        return loss

    def loss_by_chunks(self, x, targets, reduction):
        """The same loss from x (B, T, C), with the logits of loss_chunk_size tokens in memory at a time. They
        are computed once more in backward: a third more arithmetic in the head, a tenth of a step of 124M."""
        def chunk_losses(x, targets):
            return self.loss(self.logits(x), targets, 'none')

        x_chunks = x.flatten(0, 1).split(self.loss_chunk_size)  # each (n, C)
        target_chunks = targets.split(self.loss_chunk_size)  # each (n)
        losses = []
        for x_chunk, target_chunk in zip(x_chunks, target_chunks):
            losses.append(checkpoint(chunk_losses, x_chunk, target_chunk, use_reentrant=False))
        losses = torch.cat(losses)  # (B * T), 0 where a target is left out
        if reduction == 'none':
            return losses
        return losses.sum() / (targets >= 0).sum().clamp(min=1)

    @classmethod
    def from_pretrained(cls, source, override_args=None):
        """The GPT of a Hugging Face name ('gpt2', 'OWNER/NAME') or folder, a checkpoint or a run's folder, on
        the CPU. override_args: {'dropout': 0.1} or {'block_size': 256}."""
        from checkpoint import build_model, find, read  # here, so that this file works alone
        return build_model(read(find(source)), **(override_args or {}))

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type=None):
        """nanoGPT's AdamW; train.py calls create_optimizer in optim.py."""
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [{'params': [p for p in params if p.dim() >= 2], 'weight_decay': weight_decay},
                  {'params': [p for p in params if p.dim() < 2], 'weight_decay': 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)

    def crop_block_size(self, block_size):
        """Keep the first `block_size` positions."""
        assert block_size <= self.config.block_size
        self.config.block_size = block_size
        if self.config.positions == 'learned':
            wpe = self.transformer.wpe
            wpe.weight = nn.Parameter(wpe.weight[:block_size].clone())
            wpe.num_embeddings = block_size

    def get_num_params(self, non_embedding=True):
        """Number of parameters, by default without embeddings; a tied one stays, as in nanoGPT."""
        n_params = sum(p.numel() for p in self.parameters())
        if non_embedding:
            for module in self.modules():
                if isinstance(module, nn.Embedding) and module.weight is not self.lm_head.weight:
                    n_params -= module.weight.numel()
        return n_params

    def flops_per_token(self):
        """Forward and backward: 6 per weight of a matrix product, 12 L C T for attention (PaLM, app. B)."""
        weights = 0
        for _, module in self.named_modules(remove_duplicate=False):
            if isinstance(module, nn.Linear):
                weights += module.weight.numel()
        return 6 * weights + 12 * self.config.n_layer * self.config.n_embd * self.config.block_size

    def estimate_mfu(self, fwdbwd_per_iter, dt, peak_flops=None):
        """Model FLOPs utilization: the share of peak_flops (FLOP/s) that fwdbwd_per_iter sequences of
        block_size tokens in dt seconds make; nan without it. common.py has a table."""
        if peak_flops is None:
            return math.nan
        return self.flops_per_token() * self.config.block_size * fwdbwd_per_iter / dt / peak_flops

    @torch.no_grad()
    @without_cudnn_attention()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=1.0, vocab_size=None,
                 generator=None, on_tokens=None, use_cache=True, compile=False):
        """
        Continue idx (B, T) by up to max_new_tokens ids each; call model.eval() first. temperature 0: the
        likeliest id; top_k, top_p: see sample_next. Ids from vocab_size on (padding) are not drawn.
        generator: of the draws; None: torch's. Ends early when on_tokens, called with what is new, (B, n),
        returns True. FloatingPointError if logits are not finite. When block_size ids are full, the last half
        of them is kept as context. The cache changes the speed, not the text (but for rounding). On CUDA a
        step is captured and replayed, 16 at a time (see CapturedStep); compile=True compiles it first, for
        long texts.
        """
        B, T = idx.shape
        block_size = self.config.block_size
        end = T + max_new_tokens
        start = max(T - block_size, 0)  # where the context begins
        n_cached = 0  # ids of the context whose keys and values are in the cache
        size = min(math.ceil(end / 128) * 128, block_size)  # rounded up, to use a captured step again
        sampling = {'temperature': temperature, 'top_k': top_k, 'top_p': top_p}
        cache = None
        captured = None
        if use_cache and self.can_capture(max_new_tokens):
            captured = self.captured_step(B, size, vocab_size, sampling, compile, generator)
            cache = captured.cache
            generator = captured.generator
        elif use_cache:
            cache = KVCache(self, B, size)

        while idx.size(1) < end:
            if idx.size(1) - start > block_size:
                start = idx.size(1) - (block_size + 1) // 2
                n_cached = 0
            # the next ids, (B, n)
            if captured is not None and n_cached > 0:
                n = min(16, end - idx.size(1), size - n_cached)
                new, finite = captured.run(self, n, n_cached, idx[:, -1])
                n_cached += n
            else:
                if cache is not None and n_cached == 0:
                    cache.reset()
                # forward, not self(): where the model is compiled, each new length would be compiled
                logits, _ = self.forward(idx[:, start + n_cached:], cache=cache)
                logits = logits[:, -1, :vocab_size].float()  # (B, V)
                finite = torch.isfinite(logits.amax())
                new = sample_next(logits, generator=generator, **sampling)
                if cache is not None:
                    n_cached = idx.size(1) - start
            if not finite:
                raise FloatingPointError("the network's outputs (logits) are not finite")
            idx = torch.cat((idx, new), dim=1)
            if on_tokens is not None and on_tokens(new) and not self.is_sharded():
                break  # with FSDP all processes make as many steps
        return idx

    def can_capture(self, max_new_tokens):
        """Whether generate() captures its step: on CUDA, for texts that are long enough to pay for it (a
        fraction of a second), and not with FSDP, which gathers the weights before each use."""
        return self.lm_head.weight.is_cuda and max_new_tokens >= 64 and not self.is_sharded()

    def is_sharded(self):
        """Whether FSDP has divided the weights among processes."""
        return any(hasattr(p, 'to_local') for p in self.parameters())

    def captured_step(self, B, size, vocab_size, sampling, compile, generator):
        """The CapturedStep of the call before, if it fits, or a new one; seeded by `generator`."""
        shape = (B, size, vocab_size, sampling, compile)
        # a graph reads the weights where they lay when it was captured
        addresses = [tensor.data_ptr() for tensor in [*self.parameters(), *self.buffers()]]
        key = (shape, addresses, matmul_dtype(self.lm_head.weight), self.training,
               torch.is_inference_mode_enabled())
        if self.captured is None or self.captured.key != key:
            self.captured = None  # free its memory first
            self.captured = CapturedStep(self, *shape)
            self.captured.key = key
        seed = torch.randint(2 ** 62, (1,), generator=generator, device=self.lm_head.weight.device)
        self.captured.generator.manual_seed(seed.item())
        self.captured.finite.fill_(True)
        return self.captured


# -----------------------------------------------------------------------------
# generating


class KVCache:
    """Keys and values of B texts with up to `size` positions, (B, K, size, D) per layer, allocated at once.
    static: attention reads all `size` behind a mask, and the number of positions so far is on the device
    alone. So a pass depends on no number of the host, and a CUDA graph can hold it."""

    def __init__(self, model, B, size, static=False):
        config = model.config
        weight = model.lm_head.weight
        shape = (B, config.n_kv_head, size, config.n_embd // config.n_head)
        options = {'dtype': matmul_dtype(weight), 'device': weight.device}
        self.k = [torch.zeros(shape, **options) for _ in range(config.n_layer)]
        self.v = [torch.zeros(shape, **options) for _ in range(config.n_layer)]
        self.size = size
        self.static = static
        self.n_keys = size if static else 0  # positions that attention reads
        self.length = torch.zeros(1, dtype=torch.long, device=weight.device)  # positions so far
        self.positions = self.length  # of the ids of this pass; advance() sets it

    def reset(self):
        """Begin anew. What is in it is overwritten before anybody looks at it."""
        self.length.zero_()
        if not self.static:
            self.n_keys = 0

    def advance(self, T):
        """The positions (T) of the next T ids, whose keys and values update() will bring."""
        self.positions = self.length + torch.arange(T, device=self.length.device)
        self.length.add_(T)
        if not self.static:
            self.n_keys += T
        return self.positions

    def update(self, layer_idx, k, v):
        """Store k, v (B, K, T, D) of a layer; returns all that attention reads, (B, K, S, D) each."""
        keys = self.k[layer_idx].index_copy_(2, self.positions, k)
        values = self.v[layer_idx].index_copy_(2, self.positions, v)
        return keys[:, :, :self.n_keys], values[:, :, :self.n_keys]


def sample_next(logits, temperature=1.0, top_k=None, top_p=1.0, generator=None, noise=None):
    """Draw the next ids (B, 1) from logits (B, V): among the top_k likeliest, among the likeliest that make
    up top_p. noise (B, V): exponential random numbers, if they are drawn elsewhere."""
    if temperature < 1e-6:  # 0, or so small that the division below would overflow
        return logits.argmax(dim=-1, keepdim=True)
    ids = None
    if top_k or top_p < 1:
        V = logits.size(-1)
        logits, ids = logits.topk(min(top_k or V, V))  # (B, k), likeliest first
    probs = F.softmax(logits / temperature, dim=-1)
    if top_p < 1:
        probs = probs.masked_fill(probs.cumsum(dim=-1) - probs > top_p, 0)  # the first one always stays
    # the largest p / e, e exponential, is i with probability p_i: the draw of torch.multinomial, without its
    # checks, for which the host would wait for a GPU
    if noise is None:
        noise = torch.empty_like(probs).exponential_(generator=generator)
    drawn = (probs / noise[:, :probs.size(-1)]).argmax(dim=-1, keepdim=True)  # (B, 1)
    return drawn if ids is None else ids.gather(1, drawn)


class CapturedStep:
    """
    The step of generate() from the newest ids of B texts to the next ones, as a CUDA graph: all that changes
    from step to step, ids, position, cache and random numbers, lies on the device at fixed addresses, and the
    host replays the graph instead of launching some hundred kernels: 3,051 tokens/s, compiled 3,851, where
    221 were without (H100, bfloat16, one text, 6 layers of 384), and 1,209 and 1,453 for 194 with 124M.
    The model keeps it for the next call of the same shape. On a CPU, in tests, it runs without a graph.
    """

    def __init__(self, model, B, size, vocab_size, sampling, compile):
        weight = model.lm_head.weight
        self.key = None  # what it was made for
        self.vocab_size = min(vocab_size or weight.size(0), weight.size(0))
        self.sampling = sampling
        self.cache = KVCache(model, B, size, static=True)
        self.ids = torch.zeros(B, size + 1, dtype=torch.long, device=weight.device)  # by their positions
        self.noise = torch.ones(B, self.vocab_size, device=weight.device)
        self.finite = torch.ones((), dtype=torch.bool, device=weight.device)
        self.generator = torch.Generator(weight.device)
        self.graph = None
        if weight.is_cuda:
            self.capture(model, compile)

    def __reduce__(self):
        return type(None), ()  # in a copy of the model, or a file: None, as a graph cannot move

    def step(self, model, draw_next):
        self.noise.exponential_(generator=self.generator)  # apart, as torch.compile knows no generators
        draw_next(model)

    def draw_next(self, model):
        idx = self.ids.index_select(1, self.cache.length)  # (B, 1)
        logits, _ = model.forward(idx, cache=self.cache)  # moves the position on
        logits = logits[:, -1, :self.vocab_size].float()  # (B, V)
        self.finite.logical_and_(torch.isfinite(logits.amax()))
        self.ids.index_copy_(1, self.cache.length, sample_next(logits, noise=self.noise, **self.sampling))

    def capture(self, model, compile):
        draw_next = torch.compile(self.draw_next, dynamic=False) if compile else self.draw_next
        # without autocast's cache of weights: it would be gone when the graph reads it
        precision = torch.autocast('cuda', torch.get_autocast_dtype('cuda'), cache_enabled=False,
                                   enabled=torch.is_autocast_enabled('cuda'))
        with torch.cuda.device(self.ids.device), precision:
            # first without capturing, on a stream of its own, as torch's documentation asks: libraries
            # allocate their workspaces, and the compiler compiles
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self.cache.reset()
                    self.step(model, draw_next)
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            self.graph.register_generator_state(self.generator)
            # thread_local: what other threads do meanwhile does not end the capture
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode='thread_local'):
                self.step(model, draw_next)

    def run(self, model, n, position, ids):
        """n steps, from `ids` (B) at `position`: the next ids (B, n), and whether all logits so far were
        finite."""
        self.ids[:, position] = ids
        for _ in range(n):
            if self.graph is not None:
                self.graph.replay()
            else:
                self.step(model, self.draw_next)
        return self.ids[:, position + 1:position + 1 + n].clone(), self.finite


def prompt_ids(tokenizer, text):
    """The ids to start from, a list: those of `text`, or of what begins a text if it is empty."""
    ids = tokenizer.encode_prompt(text)
    if ids:
        return ids
    return [0] if tokenizer.end_of_text is None else [tokenizer.end_of_text]


def text_after(tokenizer, ids, new_ids, stop_ids, stop=None):
    """(The text that new_ids add to the one of ids, up to the first of stop_ids and to the text `stop`;
    whether there was one of them.)"""
    has_ended = False
    for i, token in enumerate(new_ids):
        if token in stop_ids:
            new_ids = new_ids[:i]
            has_ended = True
            break
    # the whole text is decoded, as some tokenizers decode the beginning of a text differently
    text = tokenizer.decode(ids + new_ids)[len(tokenizer.decode(ids)):]
    if stop and stop in text:
        return text.partition(stop)[0], True
    return text, has_ended


def generate_text(model, tokenizer, text, max_new_tokens, temperature=1.0, top_k=None, top_p=1.0, seed=None,
                  stop=None):
    """`text` with its continuation by up to max_new_tokens tokens, which ends before the end of the text
    (tokenizer.stop_ids) and before the text `stop`. seed: of the draws; None: torch's generator."""
    ids = prompt_ids(tokenizer, text)
    device = model.lm_head.weight.device
    generator = None
    if seed is not None:
        generator = torch.Generator(device).manual_seed(seed)
    new_ids = []

    def on_tokens(new):
        new_ids.extend(new[0].tolist())
        if stop is None:  # no need to decode
            return any(token in tokenizer.stop_ids for token in new[0].tolist())
        return text_after(tokenizer, ids, new_ids, tokenizer.stop_ids, stop)[1]

    model.generate(torch.tensor([ids], device=device), max_new_tokens, temperature, top_k, top_p,
                   tokenizer.n_vocab, generator, on_tokens)
    return text + text_after(tokenizer, ids, new_ids, tokenizer.stop_ids, stop)[0]
