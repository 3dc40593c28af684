"""
The model: its settings, GPTConfig, and the network, GPT.

With arch='gpt2', its parameter names, initial weights and outputs are those of nanoGPT. From top to bottom:
settings, positions, attention, the block, the GPT with its loss. flatgpt/sampling.py generates faster, with a
KV cache. This file works when it is copied alone: only from_pretrained() imports other files.

Letters for shapes: B batch, T positions, C channels (n_embd), H heads, K key/value heads (n_kv_head), D
channels of a head (C = H * D), S positions of the keys, V vocabulary.
References: GPT-2, https://github.com/openai/gpt-2/blob/master/src/model.py;
https://github.com/karpathy/nanoGPT; Llama 2, https://arxiv.org/abs/2307.09288;
https://github.com/karpathy/nanochat
"""

import dataclasses
import math
import numbers
import typing

import torch
import torch.nn as nn
import torch.utils.checkpoint
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

# -----------------------------------------------------------------------------
# settings

# nanoGPT's network. Do not edit it: checkpoints of a gpt2 leave these values out, as nanoGPT's do, and they
# are filled in again when one is read
NANOGPT = dict(
    norm='layernorm',  # or 'rmsnorm'; 'rmsnorm_plain': without gains
    norm_eps=1e-5,
    bias=True,  # in Linear and LayerNorm
    positions='learned',  # or 'rope'
    rope_theta=1e4,
    rope_scaling=None,  # a dict for Llama 3's scaling, see rope_table
    embd_norm=False,  # another norm after the embedding
    fused_qkv=True,  # query, key and value in one matrix; Muon needs three
    qk_norm=False,  # a norm without gains on queries and keys, after the rotation
    mlp='gelu',  # exact, as in nanoGPT; or 'gelu_tanh' (OpenAI's), 'relu2', 'swiglu'
    tie=True,  # one matrix for the embedding and the head: https://arxiv.org/abs/1608.05859
    softcap=0.0,  # bound the logits to (-softcap, softcap); 0: no bound
    init='gpt2',  # or 'modern', see init_weights
)
# The presets of `arch`, for you to edit. Unedited, they are the GPT-2, Llama and NanoChat of transformers
GPT2 = dict(NANOGPT)
LLAMA = dict(NANOGPT, norm='rmsnorm', bias=False, positions='rope', fused_qkv=False, mlp='swiglu', tie=False)
MODERN = dict(LLAMA, norm='rmsnorm_plain', norm_eps=1e-6, embd_norm=True, qk_norm=True, mlp='relu2',
              softcap=15.0, init='modern')
PRESETS = {'gpt2': GPT2, 'llama': LLAMA, 'modern': MODERN}

NANOGPT_FIELDS = ['block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'dropout', 'bias']


@dataclasses.dataclass
class GPTConfig:
    """The settings of a GPT.

    Fields that are None take the value of the preset `arch`. n_kv_head defaults to n_head, mlp_width to 4C
    (for swiglu 8C/3). Raise ValueError if the sizes are not compatible.
    """
    block_size: int = 1024
    vocab_size: int = 50304  # GPT-2's 50257, padded to a multiple of 64, which is faster
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
        for name, kind in typing.get_type_hints(type(self)).items():
            value = getattr(self, name)
            if value is None or not isinstance(kind, type):  # a union, in a field that you have added
                continue
            number_kinds = {int: numbers.Integral, float: numbers.Real}  # numpy's, too
            if not isinstance(value, number_kinds.get(kind, kind)):
                raise ValueError(f"{name} must be of type {kind.__name__}: {value!r}.")
            if kind is int and value < 0:
                raise ValueError(f"{name} must not be negative: {value}.")
        if self.arch not in PRESETS:
            raise ValueError(f"unknown arch: {self.arch}. Use {', '.join(PRESETS)}.")
        for name, value in PRESETS[self.arch].items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.n_kv_head is None:
            self.n_kv_head = self.n_head
        if self.mlp_width is None:
            self.mlp_width = 4 * self.n_embd
            if self.mlp == 'swiglu':
                # three matrices of width 8C/3 have as many weights as two of width 4C; a multiple of 64
                self.mlp_width = math.ceil(8 * self.n_embd / (3 * 64)) * 64
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd must be a multiple of n_head: {self.n_embd} and {self.n_head}.")
        if self.positions == 'rope' and self.n_embd // self.n_head % 2:
            raise ValueError(f"n_embd / n_head must be even, as rotary positions rotate pairs of channels: "
                             f"{self.n_embd} / {self.n_head}.")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head must be a multiple of n_kv_head: {self.n_head} and {self.n_kv_head}.")
        if self.bias and self.norm != 'layernorm':
            raise ValueError(f"bias=True needs LayerNorm, and {self.arch} has {self.norm}. Use bias=False.")
        if self.tie and self.init == 'modern':
            raise ValueError("init='modern' starts the head at zero, and with tie=True the embedding. "
                             "Use tie=False.")

    def model_args(self):
        """Return the fields as a dict, for a checkpoint.

        For a gpt2, these are nanoGPT's seven fields, all that nanoGPT's sample.py accepts, and those fields
        whose value is not nanoGPT's.
        """
        args = dataclasses.asdict(self)
        if self.arch != 'gpt2':
            return args
        defaults = {**NANOGPT, 'arch': 'gpt2', 'n_kv_head': self.n_head, 'mlp_width': 4 * self.n_embd}
        for name in list(args):
            default = defaults.get(name, 0)  # a field that you have added, such as window=0, is off
            if name not in NANOGPT_FIELDS and args[name] == default:
                del args[name]
        return args


# -----------------------------------------------------------------------------
# positions


def rope_table(config):
    """Return cos and sin of the angle by which position t rotates pair i of a head's channels.

    (2, T, D/2), float32, on the CPU.
    """
    D = config.n_embd // config.n_head
    exponents = torch.arange(0, D, 2, dtype=torch.float32, device='cpu') / D
    inv_freq = 1.0 / config.rope_theta ** exponents  # (D/2)
    if config.rope_scaling is not None:
        # Llama 3.1: divide the low frequencies by `factor`, keep the high ones, interpolate in between
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
    """Rotate the channels i and i + D/2 of x (B, H, T, D) by rope (2, T, D/2):
    https://arxiv.org/abs/2104.09864"""
    cos, sin = rope.to(x.dtype)
    a, b = x.chunk(2, dim=-1)  # both (B, H, T, D/2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)  # (B, H, T, D)


def positions_in_document(doc_ids):
    """Return the position of each token in its own document, (B, T).

    Documents 4 4 4 9 9 give the positions 0 1 2 0 1.
    """
    t = torch.arange(doc_ids.size(1), device=doc_ids.device)  # (T): 0 1 2 3 4
    is_first = doc_ids[:, 1:] != doc_ids[:, :-1]  # (B, T - 1): whether a document begins
    starts = F.pad(t[1:] * is_first, (1, 0))  # (B, T): 0 0 0 3 0
    starts = starts.cummax(dim=1).values  # (B, T): 0 0 0 3 3
    return t - starts  # (B, T): 0 1 2 0 1


# -----------------------------------------------------------------------------
# attention


def make_norm(config):
    if config.norm == 'layernorm':
        return nn.LayerNorm(config.n_embd, config.norm_eps, bias=config.bias)
    has_gains = {'rmsnorm': True, 'rmsnorm_plain': False}
    return nn.RMSNorm(config.n_embd, config.norm_eps, elementwise_affine=has_gains[config.norm])


def causal_mask(positions, n_keys):
    """Return a mask (T, S) that is True where a query, at `positions` (T), attends to a key."""
    return torch.arange(n_keys, device=positions.device) <= positions[:, None]


def document_mask(doc_ids):
    """Return a mask (B, 1, T, T) that is True for earlier keys of the same document, by doc_ids (B, T)."""
    causal = causal_mask(torch.arange(doc_ids.size(1), device=doc_ids.device), doc_ids.size(1))
    return (causal & (doc_ids[:, :, None] == doc_ids[:, None, :]))[:, None]


def document_block_mask(doc_ids):
    """Return the same mask for FlexAttention, which skips 128 x 128 blocks that are fully masked."""
    B, T = doc_ids.shape

    def attends(b, h, query, key):
        return (key <= query) & (doc_ids[b, query] == doc_ids[b, key])

    return create_block_mask(attends, B, None, T, T, device=doc_ids.device)


def attention(q, k, v, mask=None, is_causal=False, dropout_p=0.0):
    """
    Return softmax(q k^T / sqrt(D)) v, (B, H, T, D), of q (B, H, T, D) and k, v (B, K, S, D).

    The mask (GPT.attention_mask makes it):
        None, is_causal      a sequence from its first position on: training, evaluation, a prompt
        None                 one query that attends to all keys: a new token with a KV cache
        (T, S) bool          a KV cache of fixed size, or several queries after cached ones
        (B, 1, T, T) bool    documents that are kept apart
        a BlockMask          the same, compiled on CUDA
    The kernel:
        FlexAttention        for a BlockMask
        the formula itself   bfloat16 on a CPU for up to 512 positions, where it is faster
        torch's SDPA         otherwise; it chooses among FlashAttention, cuDNN, memory-efficient attention
    """
    B, H, T, D = q.shape
    K = k.size(1)
    if isinstance(mask, BlockMask):
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=K < H)
    by_formula = q.device.type == 'cpu' and q.dtype == torch.bfloat16 and is_causal and T <= 512
    if K < H and (by_formula or (mask is not None and q.device.type == 'cuda')):
        # the formula below needs as many key as query heads; and on CUDA, before torch 2.14, no fused kernel
        # takes enable_gqa with a mask, which makes it three times as slow
        k = k.repeat_interleave(H // K, dim=1)  # (B, H, S, D)
        v = v.repeat_interleave(H // K, dim=1)  # (B, H, S, D)
    if by_formula:
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
            # autocast's norm returns float32 on CUDA
            q, k = self.qk_norm(q).to(v.dtype), self.qk_norm(k).to(v.dtype)
        if cache is not None:
            k, v = cache.update(self.layer_idx, k, v)  # (B, K, S, D)
        # as many keys as queries: a sequence from its start. More keys: one new token, which attends to all
        is_causal = bool(mask is None and T == k.size(2))  # bool(): when compiled, T may be symbolic
        dropout_p = self.dropout if self.training else 0.0
        y = attention(q, k, v, mask, is_causal, dropout_p)  # (B, H, T, D)
        y = y.transpose(1, 2).reshape(B, T, C)  # concatenate the heads
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
# the model


def matmul_dtype(x):
    """Return the dtype in which x enters a matrix product: autocast's where it is enabled, else its own."""
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return x.dtype


class GPT(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.config = config
        modules = {'wte': nn.Embedding(config.vocab_size, config.n_embd)}
        if config.positions == 'learned':
            modules['wpe'] = nn.Embedding(config.block_size, config.n_embd)
        modules['ln_e'] = make_norm(config) if config.embd_norm else nn.Identity()
        modules['drop'] = nn.Dropout(config.dropout)
        modules['h'] = nn.ModuleList([Block(config, layer_idx) for layer_idx in range(config.n_layer)])
        modules['ln_f'] = make_norm(config)
        self.transformer = nn.ModuleDict(modules)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie:
            self.transformer.wte.weight = self.lm_head.weight
        # not saved in checkpoints; on the CPU even if the weights are on 'meta'
        self.register_buffer('rope', rope_table(config) if config.positions == 'rope' else None,
                             persistent=False)
        self.activation_checkpointing = False  # keep only the input of each block, recompute in backward
        self.loss_chunk_size = 0  # tokens whose logits the loss holds at a time, if none are returned; 0: all
        if not self.lm_head.weight.is_meta:
            self.init_weights()

    def init_weights(self):
        """Draw the initial weights.

        gpt2: standard deviation 0.02 for matrices and embeddings, 0.02 / sqrt(2L) for residual projections.
        modern: 1 for the embedding, 1 / sqrt(3 fan-in) for matrices, 0 for residual projections and the head,
        so that each block starts as the identity (https://github.com/KellerJordan/modded-nanogpt).
        """
        modern = self.config.init == 'modern'
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                std = 1.0 if modern else 0.02
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear):
                std = (3 * module.in_features) ** -0.5 if modern else 0.02
                nn.init.normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        # these are drawn twice, as in nanoGPT, so that a seed gives nanoGPT's weights
        for name, p in self.named_parameters():
            if modern and name.endswith(('c_proj.weight', 'lm_head.weight')):
                nn.init.zeros_(p)
            elif name.endswith('c_proj.weight'):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * self.config.n_layer))

    def forward(self, idx, targets=None, doc_ids=None, cache=None, reduction='mean', return_logits=True):
        """
        Return logits (B, T, V) and the loss in nats for token ids idx (B, T) and targets (B, T).

        targets: the next token of each position; -1 is ignored. Without targets, the logits are those of the
        last position, (B, 1, V), and the loss is None. reduction: 'mean' over the targets, or 'none' for one
        loss per position, (B * T). doc_ids (B, T): the document of each token; attention then stays inside
        documents. cache: a sampling.KVCache with the tokens before idx. return_logits=False: return None for
        the logits, which saves memory.
        """
        B, T = idx.shape
        assert T <= self.config.block_size, f"{T} positions are more than block_size={self.config.block_size}"
        if cache is None:
            positions = torch.arange(T, device=idx.device)  # (T)
        else:
            positions = cache.advance(T)  # (T)
        mask = self.attention_mask(positions, doc_ids, cache)

        x = self.transformer.wte(idx)  # (B, T, C)
        if self.config.positions == 'learned':
            if doc_ids is not None:
                positions = positions_in_document(doc_ids)  # (B, T)
            x = x + self.transformer.wpe(positions)
        # rope is relative, so positions need not start again at each document
        rope = None if self.rope is None else self.rope[:, positions]  # (2, T, D/2)
        x = self.transformer.drop(self.transformer.ln_e(x))
        if x.device.type == 'cuda' and matmul_dtype(x) == torch.bfloat16:
            x = x.bfloat16()  # the residual stream: less memory traffic, the same loss (dev/LOG.md)
        for block in self.transformer.h:
            if self.activation_checkpointing and self.training and torch.is_grad_enabled():
                x = torch.utils.checkpoint.checkpoint(block, x, rope, mask, use_reentrant=False)
            else:
                x = block(x, rope, mask, cache)
        x = self.transformer.ln_f(x)

        if targets is None:
            return self.compute_logits(x[:, -1:]), None  # not [:, [-1]]: a CUDA graph cannot copy its index
        logits = None
        if return_logits:  # in training they are not: torch.compile would compute their gradient, all zeros
            logits = self.compute_logits(x)  # (B, T, V)
        loss = self.compute_loss(x, targets.flatten(), reduction, logits)
        return logits, loss

    def attention_mask(self, positions, doc_ids, cache):
        """Return the mask for the queries at `positions` (T), or None; attention() lists the cases."""
        if doc_ids is not None:
            # not with dropout, which FlexAttention lacks, nor with DDP, where compiling it is not tested
            # (https://github.com/pytorch/pytorch/issues/137481)
            no_dropout = not self.training or self.config.dropout == 0
            if (doc_ids.device.type == 'cuda' and torch.compiler.is_compiling() and no_dropout
                    and not (torch.distributed.is_available() and torch.distributed.is_initialized())):
                return document_block_mask(doc_ids)
            return document_mask(doc_ids)  # (B, 1, T, T)
        if cache is not None and (cache.static or 1 < len(positions) < cache.n_keys):
            return causal_mask(positions, cache.n_keys)  # (T, S)
        return None

    def compute_logits(self, x):
        """Map x (..., C) to logits (..., V)."""
        logits = self.lm_head(x)
        if self.config.softcap:
            logits = self.config.softcap * torch.tanh(logits.float() / self.config.softcap)
        return logits

    def compute_loss(self, x, targets, reduction='mean', logits=None):
        """
        Return the loss for x (B, T, C) and targets (B * T).

        logits: those of x if they exist already, or those of another head

        With loss_chunk_size, the logits of that many tokens exist at a time. They are recomputed in backward.
        """
        if logits is None and self.loss_chunk_size == 0:
            logits = self.compute_logits(x)  # (B, T, V)
        if logits is not None:
            loss = self.cross_entropy(logits, targets, reduction)
            if reduction == 'mean':  # nan if all targets are -1
                loss = torch.where((targets >= 0).any(), loss, 0.0)
            return loss

        def chunk_losses(x, targets):
            return self.cross_entropy(self.compute_logits(x), targets, 'none')

        x_chunks = x.flatten(0, 1).split(self.loss_chunk_size)  # each (n, C)
        target_chunks = targets.split(self.loss_chunk_size)  # each (n)
        losses = []
        for x_chunk, target_chunk in zip(x_chunks, target_chunks):
            losses.append(torch.utils.checkpoint.checkpoint(
                chunk_losses, x_chunk, target_chunk, use_reentrant=False))
        losses = torch.cat(losses)  # (B * T), 0 where the target is -1
        if reduction == 'none':
            return losses
        return losses.sum() / (targets >= 0).sum().clamp(min=1)

    def cross_entropy(self, logits, targets, reduction):
        """Return the loss of logits (..., V), of N positions in total, and targets (N). Edit it here."""
        # float32 whatever autocast says: bfloat16 would round the loss to three digits
        flat = logits.float().view(-1, logits.size(-1))  # (N, V)
        return F.cross_entropy(flat, targets, ignore_index=-1, reduction=reduction)

    @classmethod
    def from_pretrained(cls, source, override_args=None):
        """Return the GPT of a Hugging Face name ('gpt2', 'OWNER/NAME'), a folder or a checkpoint, on the CPU.

        override_args: {'dropout': 0.1} or {'block_size': 256}.
        """
        from flatgpt.checkpoint import build_model, find, read  # here, so that this file works alone
        return build_model(read(find(source)), **(override_args or {}))

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type=None):
        """Return nanoGPT's AdamW; train.py uses create_optimizer() of optim.py instead."""
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
        """Return the number of parameters, by default without embeddings. An embedding that is tied to the
        head is counted, as in nanoGPT."""
        n_params = sum(p.numel() for p in self.parameters())
        if non_embedding:
            for module in self.modules():
                if isinstance(module, nn.Embedding) and module.weight is not self.lm_head.weight:
                    n_params -= module.weight.numel()
        return n_params

    def flops_per_token(self):
        """Return the FLOPs of forward and backward: 6 per weight of a matrix product, 12 L C T for attention
        (PaLM, appendix B)."""
        weights = 0
        # remove_duplicate=False: a module that is used twice computes twice
        for _, module in self.named_modules(remove_duplicate=False):
            if isinstance(module, nn.Linear):
                weights += module.weight.numel()
        return 6 * weights + 12 * self.config.n_layer * self.config.n_embd * self.config.block_size

    def estimate_mfu(self, fwdbwd_per_iter, dt, peak_flops=None):
        """Return the model FLOPs utilization, a share of peak_flops (FLOP/s), or nan if that is None.

        fwdbwd_per_iter: sequences of block_size tokens that are trained on in dt seconds.
        """
        if peak_flops is None:
            return math.nan
        return self.flops_per_token() * self.config.block_size * fwdbwd_per_iter / dt / peak_flops

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        """Return idx (B, T) continued by max_new_tokens ids. Call model.eval() first.

        As in nanoGPT, the whole context is computed again for each token. It is slow and plain, and what the
        tests compare sampling.Sampler with.
        """
        for _ in range(max_new_tokens):
            logits, _ = self(idx[:, -self.config.block_size:])
            logits = logits[:, -1, :] / temperature  # (B, V)
            if top_k is not None:
                top, _ = torch.topk(logits, min(top_k, logits.size(-1)))
                logits[logits < top[:, [-1]]] = -math.inf
            probs = F.softmax(logits, dim=-1)
            idx_next = torch.multinomial(probs, num_samples=1)  # (B, 1)
            idx = torch.cat((idx, idx_next), dim=1)
        return idx
