"""
The network: one GPTConfig, one GPT. With arch='gpt2' it has nanoGPT's parameter names, initialisation and
function.

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
from torch.utils.checkpoint import checkpoint

from support.cpu_kernels import in_bfloat16_on_gpu, scaled_dot_product_attention

# The parts of the presets. The first three are architectures of Hugging Face transformers as well; local
# learns sooner from little text (support/near.py).
PRESETS = ('gpt2', 'llama', 'modern', 'local')
PARTS = {
    'norm': ('layernorm', 'rmsnorm', 'rmsnorm_plain', 'rmsnorm_plain'),  # plain: without gains
    'norm_eps': (1e-5, 1e-5, 1e-6, 1e-6),
    'bias': (True, False, False, False),  # in Linear and LayerNorm
    'positions': ('learned', 'rope', 'rope', 'rope'),
    'rope_theta': (1e4, 1e4, 1e4, 1e4),
    'rope_scaling': ('none', 'none', 'none', 'none'),  # for others see train.py
    'embd_norm': (False, False, True, True),  # a norm after the embedding as well
    'fused_qkv': (True, False, False, False),  # query, key and value in one matrix. Muon needs three
    'qk_norm': (False, False, True, True),  # a norm without gains on queries and keys, after the rotation
    'mlp': ('gelu', 'swiglu', 'relu2', 'relu2'),  # gelu is exact, as in nanoGPT; OpenAI's has gelu_tanh
    # one matrix for the embedding and the head: https://arxiv.org/abs/1608.05859
    'tie': (True, False, False, False),
    'softcap': (0.0, 0.0, 15.0, 15.0),  # logits stay between -softcap and softcap; 0: no bound
    'init': ('gpt2', 'gpt2', 'modern', 'modern'),
    'near': (0, 0, 0, 16384),  # rows of an embedding of pairs of tokens, with convolutions; 0: none
    'near_layers': (0, 0, 0, 1),  # before the n_layer others, without attention
}
NANOGPT_FIELDS = ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'dropout', 'bias')


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
        for name, values in PARTS.items():
            if getattr(self, name) is None and self.arch in PRESETS:
                setattr(self, name, values[PRESETS.index(self.arch)])
        if self.n_kv_head is None:
            self.n_kv_head = self.n_head
        if self.mlp_width is None and self.mlp == 'swiglu':
            # three matrices of 8C/3 have as many weights as two of 4C
            self.mlp_width = -(-8 * self.n_embd // (3 * 64)) * 64
        elif self.mlp_width is None:
            self.mlp_width = 4 * self.n_embd

    def problems(self):
        """What cannot be built, as lines for the user; [] if all is well."""
        from support.model_checks import config_problems
        return config_problems(self, PRESETS)

    def model_args(self):
        """What a checkpoint stores. For a plain GPT-2 no more than nanoGPT's sample.py takes."""
        args = dataclasses.asdict(self)
        if self.arch != 'gpt2':
            return args
        plain = GPTConfig(**{name: args[name] for name in NANOGPT_FIELDS})
        return {name: value for name, value in args.items()
                if name in NANOGPT_FIELDS or value != getattr(plain, name)}


def apply_rotary_emb(x, rope):
    """x (B, H, T, D) with its channels i and i + D/2 rotated by rope (2, T, D/2):
    https://arxiv.org/abs/2104.09864"""
    cos, sin = rope.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class LayerNorm(nn.LayerNorm):

    def __init__(self, ndim, bias, eps=1e-5):
        super().__init__(ndim, eps=eps, bias=bias)


def make_norm(config):
    if config.norm == 'layernorm':
        return LayerNorm(config.n_embd, config.bias, config.norm_eps)
    return rms_norm(config.n_embd, config, gains=config.norm == 'rmsnorm')


def rms_norm(ndim, config, gains):
    from support.rms_norm import RMSNorm
    return RMSNorm(ndim, eps=config.norm_eps, elementwise_affine=gains)


class CausalSelfAttention(nn.Module):

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
        self.qk_norm = nn.Identity()
        if config.qk_norm:
            self.qk_norm = rms_norm(D, config, gains=False)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.dropout, self.layer_idx = config.dropout, layer_idx

    def forward(self, x, rope=None, cache=None, mask=None):
        B, T, C = x.shape
        if self.fused:
            q, k, v = self.c_attn(x).split(self.widths, dim=2)
        else:
            q, k, v = self.c_q(x), self.c_k(x), self.c_v(x)
        q = q.view(B, T, self.n_head, -1).transpose(1, 2)  # (B, H, T, D)
        k = k.view(B, T, self.n_kv_head, -1).transpose(1, 2)  # (B, K, T, D)
        v = v.view(B, T, self.n_kv_head, -1).transpose(1, 2)
        if rope is not None:
            q, k = apply_rotary_emb(q, rope), apply_rotary_emb(k, rope)
        q, k = self.qk_norm(q), self.qk_norm(k)
        if cache is not None:
            k, v = cache.update(self.layer_idx, k, v)  # (B, K, S, D)
            mask = cache.mask
        causal = True if mask is None and T == k.size(2) else False  # a bool, where a compiled T is a symbol
        # this one line is the attention, on every device, in training and with a cache
        y = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal,
                                         dropout_p=self.dropout if self.training else 0.0,
                                         enable_gqa=self.n_kv_head < self.n_head)  # (B, H, T, D)
        y = y.transpose(1, 2).reshape(B, T, C)  # the heads side by side again: (B, T, C)
        return self.resid_dropout(self.c_proj(y))


def relu2(x):
    x = F.relu(x)
    return x * x  # https://arxiv.org/abs/2109.08668; square() would be float32 under CUDA's autocast


def gelu_tanh(x):
    return F.gelu(x, approximate='tanh')


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


class Block(nn.Module):

    def __init__(self, config, layer_idx=0):
        super().__init__()
        self.ln_1 = self.attn = None
        if layer_idx >= 0:  # below: near_layers
            self.ln_1, self.attn = make_norm(config), CausalSelfAttention(config, layer_idx)
        self.ln_2 = make_norm(config)
        self.mlp = SwiGLU(config) if config.mlp == 'swiglu' else MLP(config)
        if config.near:
            from support.near import ShortConv
            self.conv = ShortConv(config.n_embd, layer_idx)
        self.activation_checkpointing = False  # True: keep only the input, recompute the rest in backward

    def forward(self, x, *context):
        if self.activation_checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(self.compute, x, *context, use_reentrant=False)
        return self.compute(x, *context)

    def compute(self, x, rope=None, cache=None, mask=None, near=None):
        if self.attn:
            x = x + self.attn(self.ln_1(x), rope, cache, mask)
        h = self.ln_2(x)
        x = x + self.mlp(self.conv(h, near) if near else h)
        return x


class GPT(nn.Module):

    def __init__(self, config):
        super().__init__()
        if problems := config.problems():
            raise ValueError('; '.join(problems))
        self.config = config
        parts = dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            wpe=nn.Embedding(config.block_size, config.n_embd) if config.positions == 'learned' else None,
            ln_e=make_norm(config) if config.embd_norm else nn.Identity(),
            drop=nn.Dropout(config.dropout),
            h=nn.ModuleList([Block(config, i) for i in range(-config.near_layers, config.n_layer)]),
            ln_f=make_norm(config),
        )
        if config.near:
            from support.near import BigramEmbedding
            parts['bigram'] = BigramEmbedding(config.near, config.n_embd)
        self.transformer = nn.ModuleDict({name: part for name, part in parts.items() if part is not None})
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie:
            self.transformer.wte.weight = self.lm_head.weight
        rope = None
        if config.positions == 'rope':
            from support.rope_table import rope_table
            rope = rope_table(config)
        self.register_buffer('rope', rope, persistent=False)
        self.loss_chunk_size = 0  # see set_memory_saving
        # without memory there is nothing to initialize, and torch takes a second
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
        continues what is in it. doc_ids (B, T): the number of the text that a position belongs to, if
        attention is to stay inside it. return_logits=False saves memory and time beside a loss.
        """
        B, T = idx.shape
        assert T <= self.config.block_size, f"{T} positions are more than block_size={self.config.block_size}"
        positions = torch.arange(T, device=idx.device) if cache is None else cache.positions  # (T)
        mask = None
        if doc_ids is not None:
            from support.document_mask import document_mask, positions_in_text
            mask, positions = document_mask(doc_ids), positions_in_text(doc_ids)  # (B, 1, T, T), (B, T)
        x, near = self.transformer.wte(idx), None  # (B, T, C)
        if self.config.near:
            from support.near import Near
            near = Near(positions, cache)
            x = x + self.transformer.bigram(idx, near)
        if self.config.positions == 'learned':
            x = x + self.transformer.wpe(positions)
        x = self.transformer.drop(self.transformer.ln_e(x))
        if in_bfloat16_on_gpu(x.device):
            x = x.bfloat16()  # from block to block: half the bytes, and no loss that we saw (dev/LOG.md)
        rope = None
        if self.rope is not None:
            rope = self.rope[:, :T] if cache is None else self.rope[:, positions]  # (2, T, D/2)
        for block in self.transformer.h:
            x = block(x, rope, cache, mask, near)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.logits(x if full_logits else x[:, [-1], :]), None
        return self.loss(x, targets.reshape(-1), reduction, return_logits)

    def loss(self, x, targets, reduction='mean', return_logits=True):
        """(logits or None, loss) of what the last norm gives, x (B, T, C), for targets (B * T)."""
        if self.loss_chunk_size:  # the same loss without the logits; train.py checks that it is
            from support.chunked_loss import chunked_loss
            return None, chunked_loss(x.flatten(0, 1), self.lm_head, targets, self.config.softcap, reduction,
                                      self.loss_chunk_size)
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
        from support import load as loading
        return loading.build(loading.read(loading.find(source)), **(override_args or {}))

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type=None):
        """nanoGPT's AdamW; train.py calls create_optimizer itself."""
        from optim import create_optimizer
        return create_optimizer(self, learning_rate, weight_decay, betas, 1e-8)

    def set_memory_saving(self, activation_checkpointing=False, loss_chunk_size=0):
        """Recompute activations in backward; compute the loss loss_chunk_size tokens at a time (0: all at
        once)."""
        self.loss_chunk_size = loss_chunk_size
        for block in self.transformer.h:
            block.activation_checkpointing = activation_checkpointing

    def crop_block_size(self, block_size):
        """Keep the first `block_size` positions."""
        from support.crop_block_size import crop_block_size
        crop_block_size(self, block_size)

    def get_num_params(self, non_embedding=True):
        """Number of parameters, by default without embeddings; a tied one stays, as in nanoGPT."""
        n = sum(p.numel() for p in self.parameters())
        if non_embedding:
            n -= sum(m.weight.numel() for m in self.modules()
                     if isinstance(m, nn.Embedding) and m.weight is not self.lm_head.weight)
        return n

    def flops_per_token(self):
        """Forward and backward."""
        from support.flops import flops_per_token
        return flops_per_token(self)

    def estimate_mfu(self, fwdbwd_per_iter, dt, peak_flops=None):
        """Model FLOPs utilization of fwdbwd_per_iter sequences in dt seconds; nan if this device's peak is
        unknown."""
        if peak_flops is None and self.lm_head.weight.device.type != 'cuda':
            return math.nan
        from support.flops import estimate_mfu
        return estimate_mfu(self, fwdbwd_per_iter, dt, peak_flops)

    def to_inference(self, device, dtype, **options):
        """For generate() alone: the weights on `device` in `dtype`, a string. Returns self."""
        from support.packed_linear import to_inference
        return to_inference(self, device, dtype, **options)

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, *more, **options):
        """Continue idx (B, T) by max_new_tokens ids each; call model.eval() first. Or a text, if the model
        comes from load(). See support/generation.py."""
        from support import generation
        generate = generation.generate_text if isinstance(idx, str) else generation.generate
        return generate(self, idx, max_new_tokens, temperature, top_k, *more, **options)


def load(source='out', dataset=None, data_dir=None):
    """(model, tokenizer) of a run's folder, a checkpoint, or a Hugging Face folder or name, on the CPU, in
    eval mode."""
    from support import load as loading
    return loading.model_and_tokenizer(source, dataset, data_dir)
