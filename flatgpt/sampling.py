"""
Fast generation: a KV cache, a Sampler that continues token ids, and texts from prompts.

    sampler = Sampler(model, batch_size=4, max_length=500, temperature=0.8, top_k=200)
    idx = sampler.generate(idx, 300, seed=1)  # idx (4, T) token ids
    text = generate_text(model, tokenizer, 'Once upon a time', 300)

A Sampler computes each new token from the keys and values of the earlier ones, and on CUDA replays a
captured step. Up to block_size ids, the probabilities are those of GPT.generate(), except for rounding. From
there on GPT.generate() drops one id per step, and a Sampler half of the context at once. Letters for shapes:
see model.py.
"""

import gc
import math
import weakref

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from configurator import InputError, print0
from model import matmul_dtype


FREE_STREAMS = {}  # {device: streams for captures that no Sampler uses now}


def without_cudnn_attention():
    """Return a context manager, or decorator, that excludes cuDNN's attention. It makes a new plan for each
    length, which is slow while a cache grows (https://github.com/modelscope/FunASR/issues/3704)."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


class KVCache:
    """Keys and values of B sequences of up to `size` positions, (B, K, size, D) per layer.

    static: attention always reads all `size` positions and masks those that are not filled; their number is
    on the device only. So no Python number changes from step to step, which a CUDA graph requires.
    """

    def __init__(self, model, B, size, static=False):
        config = model.config
        weight = model.lm_head.weight
        shape = (B, config.n_kv_head, size, config.n_embd // config.n_head)
        dtype = matmul_dtype(weight)
        self.k = [torch.zeros(shape, dtype=dtype, device=weight.device) for _ in range(config.n_layer)]
        self.v = [torch.zeros(shape, dtype=dtype, device=weight.device) for _ in range(config.n_layer)]
        self.size = size
        self.static = static
        self.n_keys = size if static else 0  # positions that attention reads
        self.length = torch.zeros(1, dtype=torch.long, device=weight.device)  # positions that are filled
        self.positions = None  # (T), of the ids of this forward pass; set by advance()

    def reset(self):
        """Start again at position 0."""
        self.length.zero_()
        if not self.static:
            self.n_keys = 0

    def advance(self, T):
        """Return the positions (T) of the next T ids, whose keys and values update() will store."""
        self.positions = self.length + torch.arange(T, device=self.length.device)
        self.length.add_(T)
        if not self.static:
            self.n_keys += T
        return self.positions

    def update(self, layer_idx, k, v):
        """Store k, v (B, K, T, D) of a layer. Return the keys and values to attend to, (B, K, S, D) each."""
        keys = self.k[layer_idx].index_copy_(2, self.positions, k)
        values = self.v[layer_idx].index_copy_(2, self.positions, v)
        return keys[:, :, :self.n_keys], values[:, :, :self.n_keys]


def sample_next(logits, temperature=1.0, top_k=None, top_p=1.0, generator=None, noise=None):
    """Draw the next ids (B, 1) from logits (B, V).

    temperature 0: the most likely id. top_k: among the k most likely ids. top_p: among the most likely ids
    whose probabilities add up to top_p. noise (B, V): exponential random numbers, instead of a generator.
    """
    if temperature < 1e-6:  # zero, or so small that the division below would overflow
        return logits.argmax(dim=-1, keepdim=True)
    ids = None  # (B, k), of the columns of logits if these are sorted
    if top_k or top_p < 1:
        V = logits.size(-1)
        k = min(top_k, V) if top_k else V
        logits, ids = logits.topk(k)  # (B, k), most likely first
    probs = F.softmax(logits / temperature, dim=-1)
    if top_p < 1:
        before = probs.cumsum(dim=-1) - probs  # (B, k), the sum of the more likely ones; 0 for the first
        probs = probs.masked_fill(before > top_p, 0)
    # Draw as torch.multinomial does: if e is exponential noise, argmax(p / e) is i with probability p_i. That
    # function also checks its input, for which the host would wait for the GPU
    if noise is None:
        noise = torch.empty_like(probs).exponential_(generator=generator)
    # noise of mps may be zero before torch 2.14 (https://github.com/pytorch/pytorch/issues/192577). 0 / 0 is
    # nan, the largest value for argmax
    noise = noise[:, :probs.size(-1)].clamp_min(torch.finfo(noise.dtype).tiny)
    drawn = (probs / noise).argmax(dim=-1, keepdim=True)  # (B, 1)
    return drawn if ids is None else ids.gather(1, drawn)


class Sampler:
    """A generator of token ids, for one model, batch size and set of sampling options.

    max_length: the maximum number of ids of a sequence, including the prompt; the cache holds at most
    block_size of them. vocab_size: only ids below it are drawn; the others are padding. capture: replay the
    step of one token as a CUDA graph, which takes a fraction of a second to capture; by default on CUDA.
    compile: compile that step as well, which pays off for long texts. Do not replace weights afterwards: a
    captured step reads the old ones.

    Nothing that a Sampler owns refers to it, so that its cache and graph are freed with its last reference;
    if it is compiled, with the next garbage collection.
    """

    def __init__(self, model, batch_size, max_length, temperature=1.0, top_k=None, top_p=1.0,
                 vocab_size=None, capture=None, compile=False):
        weight = model.lm_head.weight
        self.block_size = model.config.block_size
        self.vocab_size = min(vocab_size or weight.size(0), weight.size(0))
        self.settings = {'temperature': temperature, 'top_k': top_k, 'top_p': top_p}
        self.generator = torch.Generator(weight.device)
        # by FSDP, which adds this method. Its parameters do not tell: after an evaluation, some are whole
        self.is_sharded = hasattr(model, 'set_requires_gradient_sync')
        # FSDP gathers the weights in hooks, which run only if the model itself is called. In other cases call
        # forward(), which is not compiled: the model may be, and would be compiled again for each length
        self.forward = model if self.is_sharded else model.forward
        size = min(math.ceil(max_length / 128) * 128, self.block_size)  # attention masks need round shapes
        if capture is None:
            capture = weight.is_cuda and not self.is_sharded
        self.cache = KVCache(model, batch_size, size, static=capture)
        self.graph = None
        if capture:
            # all that changes from step to step is on the device at fixed addresses, so that the host replays
            # one graph instead of launching some hundred kernels
            device = weight.device
            self.ids = torch.zeros(batch_size, size + 1, dtype=torch.long, device=device)  # by position
            self.noise = torch.ones(batch_size, self.vocab_size, device=device)
            self.is_finite = torch.ones((), dtype=torch.bool, device=device)
            if weight.is_cuda:
                self.capture_graph(compile)

    def draw(self, logits, noise=None):
        """Return the next ids (B, 1) from logits (B, 1, V), and a bool tensor: whether the largest logit is
        finite, which it is not if any logit is nan."""
        logits = logits[:, -1, :self.vocab_size].float()  # (B, V)
        ids = sample_next(logits, generator=self.generator, noise=noise, **self.settings)
        return ids, torch.isfinite(logits.amax())

    @torch.no_grad()
    @without_cudnn_attention()
    def generate(self, idx, max_new_tokens, seed=None, on_tokens=None):
        """Return idx (B, T) continued by up to max_new_tokens ids. Call model.eval() first.

        seed: of the random numbers; by default drawn from torch's generator. on_tokens(new) is called with
        the new ids (B, n); if it returns True, generation stops. The result contains all n, even those after
        the end of a text. When block_size positions are filled, the last half of them is kept as the context.
        Raise FloatingPointError if logits are not finite.
        """
        if seed is None:
            seed = torch.randint(2 ** 62, ()).item()
        self.generator.manual_seed(seed)
        length = idx.size(1) + max_new_tokens  # of the result
        assert min(length, self.block_size) <= self.cache.size, "make the Sampler with a larger max_length"
        context_start = max(idx.size(1) - self.block_size, 0)
        n_cached = 0  # ids of the context whose keys and values are in the cache
        self.cache.reset()
        while idx.size(1) < length:
            if idx.size(1) - context_start > self.block_size:
                # keep the last half of the context and compute it again, as its positions change
                context_start = idx.size(1) - (self.block_size + 1) // 2
                n_cached = 0
                self.cache.reset()
            if n_cached == 0 or not self.cache.static:
                # the whole context at first, then its newest id
                logits, _ = self.forward(idx[:, context_start + n_cached:], cache=self.cache)
                new, is_finite = self.draw(logits)  # (B, 1)
                n_cached = idx.size(1) - context_start
            else:
                # several ids at a time, as looking at them waits for the GPU
                n = min(16, length - idx.size(1), self.cache.size - n_cached)
                new, is_finite = self.draw_several(idx[:, -1], n_cached, n)  # (B, n)
                n_cached += n
            if not is_finite:
                raise FloatingPointError("the logits are not finite")
            idx = torch.cat((idx, new), dim=1)
            if on_tokens is not None and on_tokens(new) and not self.is_sharded:
                break  # with FSDP, all processes have to make the same number of steps
        return idx

    def draw_next(self):
        """Compute the ids at position cache.length + 1 from those at cache.length, and `noise`."""
        idx = self.ids.index_select(1, self.cache.length)  # (B, 1)
        logits, _ = self.forward(idx, cache=self.cache)  # advances cache.length
        new, is_finite = self.draw(logits, self.noise)
        self.is_finite.logical_and_(is_finite)
        self.ids.index_copy_(1, self.cache.length, new)

    def draw_several(self, ids, position, n):
        """Return the next n ids (B, n) after `ids` (B) at `position`, and whether all logits were finite."""
        self.ids[:, position] = ids
        self.is_finite.fill_(True)
        for _ in range(n):
            # not in the graph, which would have to know the generator
            self.noise.exponential_(generator=self.generator)
            if self.graph is not None:
                self.graph.replay()
            else:  # on a CPU, in tests
                self.draw_next()
        return self.ids[:, position + 1:position + 1 + n].clone(), self.is_finite

    @torch.no_grad()
    @without_cudnn_attention()
    def capture_graph(self, compile):
        """Capture draw_next() as a CUDA graph."""
        draw_next = torch.compile(self.draw_next, dynamic=False) if compile else self.draw_next
        # without autocast's cache of weights, which would be freed before the graph reads it
        precision = torch.autocast('cuda', torch.get_autocast_dtype('cuda'), cache_enabled=False,
                                   enabled=torch.is_autocast_enabled('cuda'))
        # a stream that no other Sampler uses now, as the end of a graph frees workspaces that other graphs of
        # the stream use (https://github.com/pytorch/pytorch/issues/193402); not always a new one, as each
        # keeps a workspace
        free_streams = FREE_STREAMS.setdefault(self.ids.device, [])
        stream = free_streams.pop() if free_streams else torch.cuda.Stream(self.ids.device)
        weakref.finalize(self, free_streams.append, stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.ids.device), precision:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # left also if the capture fails
                # first twice without capturing, as torch's documentation asks: libraries allocate their
                # workspaces, and the compiler compiles
                for _ in range(2):
                    self.cache.reset()
                    draw_next()
                collecting = gc.isenabled()
                gc.disable()  # if the collector freed another graph now, the capture would fail
                try:
                    # thread_local: work of other threads does not end the capture
                    with torch.cuda.graph(graph, stream=stream, capture_error_mode='thread_local'):
                        draw_next()
                finally:
                    if collecting:
                        gc.enable()
            torch.cuda.current_stream().wait_stream(stream)
        self.graph = graph


# -----------------------------------------------------------------------------
# texts


def prompt_ids(tokenizer, text):
    """Return the ids of a prompt, a list. An empty text becomes the id that starts a document or, if there is
    none, id 0, as the model needs some id."""
    ids = tokenizer.encode_prompt(text)
    if ids:
        return ids
    if tokenizer.end_of_text is not None:
        return [tokenizer.end_of_text]
    return [0]


def text_after(tokenizer, ids, new_ids, stop_ids, stop=None):
    """Return the text of new_ids as a continuation of ids, and whether it has ended.

    It ends before the first of stop_ids, or before the text `stop`.
    """
    has_ended = False
    for i, token in enumerate(new_ids):
        if token in stop_ids:
            new_ids = new_ids[:i]
            has_ended = True
            break
    # all ids are decoded, as some tokenizers decode the start of a text differently
    text = tokenizer.decode(ids + new_ids)[len(tokenizer.decode(ids)):]
    if stop and stop in text:
        return text.partition(stop)[0], True
    return text, has_ended


def generate_text(model, tokenizer, text, max_new_tokens, temperature=1.0, top_k=None, top_p=1.0, seed=None,
                  stop=None, sampler=None):
    """Return `text` continued by up to max_new_tokens tokens.

    The text ends before tokenizer.stop_ids and before the text `stop`. seed: of the random numbers; by
    default drawn from torch's generator. sampler: a Sampler of batch size 1 to use with its settings, to
    write several texts with one.
    """
    ids = prompt_ids(tokenizer, text)
    if sampler is None:
        capture = None  # on CUDA
        if max_new_tokens < 64:
            capture = False  # capturing takes as long as some dozens of tokens
        sampler = Sampler(model, 1, len(ids) + max_new_tokens, temperature, top_k, top_p, tokenizer.n_vocab,
                          capture)
    new_ids = []

    def on_tokens(new):
        new_ids.extend(new[0].tolist())
        if stop is None:  # no need to decode
            return any(token in tokenizer.stop_ids for token in new[0].tolist())
        return text_after(tokenizer, ids, new_ids, tokenizer.stop_ids, stop)[1]

    sampler.generate(torch.tensor([ids], device=model.lm_head.weight.device), max_new_tokens, seed, on_tokens)
    return text + text_after(tokenizer, ids, new_ids, tokenizer.stop_ids, stop)[0]


# -----------------------------------------------------------------------------
# prompts


def read_text(path):
    """Return the text of a UTF-8 file, without a byte order mark."""
    try:
        with open(path, encoding='utf-8-sig') as f:
            return f.read()
    except (OSError, UnicodeError) as e:
        raise InputError(f"no prompt can be read from {path}: {e}. Name a file of UTF-8 text.")


def read_prompts(path):
    """Return the prompts in a file, one per line. Empty lines are skipped; \\n in a line is a new line
    inside the prompt."""
    prompts = []
    for line in read_text(path).split('\n'):
        if line.strip():
            prompts.append(line.replace('\\n', '\n'))
    if not prompts:
        raise InputError(f"the file has no prompt: {path}. Write one per line.")
    return prompts


def prompts_for_samples(path, tokenizer):
    """Return the prompts for samples during training: those in the file `path`, or three short ones if that
    is None. Prompts that the tokenizer cannot encode are skipped."""
    prompts = read_prompts(path) if path else ['', 'The ', 'Hello, I am']
    encodable = []
    for prompt in prompts:
        try:
            tokenizer.encode_prompt(prompt)
            encodable.append(prompt)
        except InputError as e:
            print0(f"note: no samples of the prompt {prompt!r}: {e}")
    return encodable


def next_sample_step(it, interval, growth=1.0):
    """Return the first iteration >= `it` at which samples are due.

    Each gap is `growth` times the one before, but never smaller: 100 and 1.5 give 100, 250, 475, ... The
    result depends on `it` alone, so that a resumed run samples at the same iterations.
    """
    if growth <= 1:
        return math.ceil(it / interval) * interval
    gap = interval
    step = interval
    while round(step) < it:
        gap *= growth
        step += gap
    return round(step)
