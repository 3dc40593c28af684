"""
The network: one GPTConfig, one GPT. Same parameter names, initialisation and function as nanoGPT's.

Letters for shapes: B batch, T positions, C channels (n_embd), H heads, D channels of a head (C = H * D), V vocabulary.
References: the GPT-2 paper and https://github.com/openai/gpt-2/blob/master/src/model.py; https://github.com/karpathy/nanoGPT
"""

import math
import re
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304  # GPT-2's 50257, padded to a multiple of 64: matrix products like round shapes
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # in Linear and LayerNorm, like GPT-2. False: a bit better and faster


class CausalSelfAttention(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)  # query, key, value in one product
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.dropout = config.dropout

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)  # 3 x (B, H, T, D)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        y = y.transpose(1, 2).reshape(B, T, C)  # the heads side by side again: (B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU()  # exact, as in nanoGPT; OpenAI's GPT-2 has the tanh form, 1e-4 away in the logits
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):

    def __init__(self, config):
        super().__init__()
        assert config.n_embd % config.n_head == 0, f"n_embd={config.n_embd} is not a multiple of n_head={config.n_head}"
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            wpe=nn.Embedding(config.block_size, config.n_embd),
            drop=nn.Dropout(config.dropout),
            h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            ln_f=nn.LayerNorm(config.n_embd, bias=config.bias),
        ))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight  # tied: https://arxiv.org/abs/1608.05859
        self.init_weights()

    def init_weights(self):
        """GPT-2's rules: N(0, 0.02) for matrices and embeddings, zero biases; residual projections narrower, as 1/sqrt(2L)."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for name, p in self.named_parameters():  # a second draw, so that a seed gives the very weights that it gives in nanoGPT
            if name.endswith('c_proj.weight'):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * self.config.n_layer))

    def forward(self, idx, targets=None, full_logits=False):
        """idx (B, T) token ids, targets (B, T) the ids that follow, -1 to leave one out. Returns (logits, mean loss in nats).
        Without targets the loss is None and the logits are the last position's, (B, 1, V), unless full_logits."""
        B, T = idx.shape
        assert T <= self.config.block_size, f"{T} positions are more than block_size={self.config.block_size}"
        pos = torch.arange(T, device=idx.device)  # (T)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))  # (B, T, C)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x if full_logits else x[:, [-1], :]), None
        logits = self.lm_head(x)  # (B, T, V)
        # float32 whatever autocast says: bfloat16 would round the loss to three digits
        loss = F.cross_entropy(logits.float().view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)
        return logits, loss

    def crop_block_size(self, block_size):
        """Shorten the context, keeping the first `block_size` positions, e.g. of weights that were trained with more."""
        assert block_size <= self.config.block_size
        self.config.block_size = block_size
        self.transformer.wpe.weight = nn.Parameter(self.transformer.wpe.weight[:block_size].clone())
        self.transformer.wpe.num_embeddings = block_size

    def get_num_params(self, non_embedding=True):
        """Number of parameters; by default without the position embeddings, as nanoGPT counts (the tied head stays in)."""
        n = sum(p.numel() for p in self.parameters())
        return n - self.transformer.wpe.weight.numel() if non_embedding else n

    def flops_per_token(self):
        """Forward and backward: 6 per weight of a matrix product, 12 L C T for attention (PaLM, appendix B: not halved)."""
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 6 * weights + 12 * self.config.n_layer * self.config.n_embd * self.config.block_size

    def estimate_mfu(self, fwdbwd_per_iter, dt, peak_flops=None):
        """Model FLOPs utilization: what `fwdbwd_per_iter` sequences of block_size tokens in `dt` seconds used of the peak
        FLOP/s of this device (or of `peak_flops`). None for a device that PEAK_FLOPS does not know."""
        device = self.lm_head.weight.device
        if peak_flops is None and device.type == 'cuda':
            words = re.split('[^a-z0-9]+', torch.cuda.get_device_name(device).lower())  # 'nvidia', 'h100', '80gb', 'hbm3'
            if not {'laptop', 'ti', 'super', 'd', 'max', 'mig'} & set(words):  # "RTX 4080 SUPER", "4090 D", Max-Q: other peaks
                peak_flops = next((peak for key, peak in PEAK_FLOPS.items() if set(key.split()) <= set(words)), None)
        if peak_flops is None:
            return None
        return self.flops_per_token() * self.config.block_size * fwdbwd_per_iter / dt / peak_flops

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, vocab_size=None, stop=None, generator=None):
        """Continue idx (B, T) by up to max_new_tokens ids each. temperature 0 is greedy; ids from vocab_size on (padding)
        are never produced; ends early when every row has produced the id `stop`. Call model.eval() first."""
        done = torch.zeros(idx.size(0), dtype=torch.bool, device=idx.device)
        for _ in range(max_new_tokens):
            logits, _ = self(idx[:, -self.config.block_size:])  # what no longer fits is forgotten
            idx_next = sample_next(logits[:, -1, :vocab_size].float(), temperature, top_k, top_p, generator)  # (B, 1)
            idx = torch.cat((idx, idx_next), dim=1)
            if stop is not None:
                done |= idx_next[:, 0] == stop
                if done.all():
                    break
        return idx


def sample_next(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """Draw the next ids (B, 1) from logits (B, V): of the top_k likeliest ones, of the likeliest that make up top_p."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    probs, ids = F.softmax(logits / temperature, dim=-1).sort(dim=-1, descending=True)  # both (B, V), likeliest first
    if top_k is not None:
        probs[:, top_k:] = 0
    if top_p is not None:
        probs = probs.masked_fill(probs.cumsum(-1) - probs > top_p * probs.sum(-1, keepdim=True), 0)  # the first one always stays
    return ids.gather(1, torch.multinomial(probs, num_samples=1, generator=generator))


# FLOP/s of dense bfloat16 matrix products (float16 where there is no bfloat16) by the makers' data sheets; looked up in
# this order by the words of torch.cuda.get_device_name(). A float32 run is measured against the same number.
PEAK_FLOPS = {
    'gb200': 2.5e15, 'b200': 2.25e15, 'h200': 989e12, 'h100 pcie': 756e12, 'h100 nvl': 835e12, 'h100': 989e12, 'h800': 989e12,
    'gh200': 989e12, 'a100': 312e12, 'a800': 312e12, 'a10g': 70e12, 'a40': 149.7e12, 'a30': 165e12, 'a10': 125e12,
    'l40s': 362e12, 'l40': 181e12, 'l4': 121e12, 'v100': 125e12, 't4': 65e12,
    'rtx 5090': 209.5e12, 'rtx 4090': 165.2e12, 'rtx 4080': 97.5e12, 'rtx 3090': 71.2e12, 'rtx 3080': 59.5e12,
    'rtx 6000 ada': 364.2e12, 'rtx a6000': 154.8e12, 'mi325x': 1307e12, 'mi300x': 1307e12, 'mi250x': 191.5e12,
}
