"""How text is generated: token by token, with a cache of keys and values."""

import torch
from torch.nn import functional as F

from support.tokenizer import empty_prompt
from support.varying_shapes import varying_shapes


@torch.no_grad()
@varying_shapes()
def generate(model, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, vocab_size=None,
             stop=None, generator=None, use_cache=True, static=False, on_token=None):
    """
    Continue idx (B, T) by up to max_new_tokens ids each; call model.eval() first. temperature 0 is
    greedy; ids from vocab_size on (padding) are never drawn. Ends early when every row has drawn the id
    `stop`, or one of several, or when on_token, called with the new ids (B, 1) of each step, returns
    True. FloatingPointError if logits were not finite: on a CPU with on_token at once, else at the end, as
    a GPU would have to wait, and processes that share a model go in step. When block_size ids are full,
    the last half of them is kept as context. The cache changes the speed, not the text. static: shapes
    stay the same from step to step, for a compiled model.
    """
    (B, T), block_size = idx.shape, model.config.block_size
    cache = None
    if use_cache:
        size = -(-(T + max_new_tokens) // 128) * 128  # rounded: similar lengths share a compiled step
        cache = KVCache(model, B, min(size, block_size), static)
    stop = None if stop is None else torch.tensor(stop, device=idx.device)
    done = torch.zeros(B, dtype=torch.bool, device=idx.device)
    finite = torch.ones((), dtype=torch.bool, device=idx.device)
    watched = on_token is not None and idx.device.type == 'cpu'
    start = max(T - block_size, 0)  # where the context begins
    for _ in range(max_new_tokens):
        if idx.size(1) - start > block_size:
            start = idx.size(1) - (block_size + 1) // 2
            if cache:
                cache.end = 0
        new = idx_next if cache and cache.end else idx[:, start:]  # the ids that are not in the cache yet
        # other lengths are not worth compiling
        step = model if static and new.size(1) == 1 else model.forward
        logits, _ = step(new, cache=cache.advance(new.size(1)) if cache else None)
        logits = logits[:, -1, :vocab_size].float()
        finite &= torch.isfinite(logits.amax())
        if watched and not finite:
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


def generate_text(model, text, max_new_tokens, temperature=1.0, top_k=None, top_p=None, **options):
    """`text` with its continuation, which ends before <|endoftext|>."""
    tokenizer = getattr(model, 'tokenizer', None)
    if tokenizer is None:
        raise TypeError("generate() wants token ids (B, T); a text only if load() made the model: "
                        "model, tokenizer = load('out')")
    ids = tokenizer.encode_prompt(text) or empty_prompt(tokenizer)
    idx = torch.tensor([ids], device=model.lm_head.weight.device)
    stop = tokenizer.stop_ids or ()
    options = {'vocab_size': tokenizer.n_vocab, 'stop': stop or None, **options}
    idx = generate(model, idx, max_new_tokens, temperature, top_k, top_p, **options)
    new = idx[0, len(ids):].tolist()
    return text + tokenizer.decode(ids + [i for i in new if i not in stop])[len(tokenizer.decode(ids)):]


class KVCache:
    """Keys and values (B, K, S, D) per layer of the first `end` positions of B texts, all allocated at once.
    static: attention reads all S positions behind a mask, so that every step has the same shapes."""

    def __init__(self, model, B, S, static=False):
        config, weight = model.config, model.transformer.wte.weight
        device = weight.device.type
        dtype = weight.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        elif device == 'cpu':
            dtype = torch.float32  # bfloat16 takes attention up to eight times as long there (dev/LOG.md)
        shape = (B, config.n_kv_head, S, config.n_embd // config.n_head)
        zeros = lambda: torch.zeros(shape, dtype=dtype, device=weight.device)
        self.k = [zeros() for _ in range(config.n_layer)]
        self.v = [zeros() for _ in range(config.n_layer)]
        self.size, self.device, self.static, self.end = S, weight.device, static, 0
        self.ends = {}
        if config.near:
            from support.near import ends
            self.ends = ends(config, B, weight)
        if static:
            # they are written to, for which CUDA graphs would be given up
            for tensor in (*self.k, *self.v, *self.ends.values()):
                torch._dynamo.mark_static_address(tensor, guard=False)

    def advance(self, T):
        """Make room for T more positions, which the next forward pass fills. Returns self."""
        self.positions = torch.arange(self.end, self.end + T, device=self.device)  # of the queries
        self.end += T
        self.visible = self.size if self.static else self.end
        self.mask = None  # attention needs none for a whole text, or for one query that sees all keys
        if T != self.visible and (T > 1 or self.static):
            keys = torch.arange(self.visible, device=self.device)
            self.mask = keys <= self.positions[:, None]  # (T, S)
        return self

    def before(self, name, x):
        """What ended the pass before this one, (B, n, ...), zeros if there was none; keeps the end of x
        (B, T, ...) for the next."""
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
    drawn = torch.searchsorted(sums, threshold, right=True).clamp_(max=sums.size(-1) - 1)  # after nan: none
    return drawn if ids is None else ids.gather(1, drawn)
