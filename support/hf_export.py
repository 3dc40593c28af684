"""
A model written as a Hugging Face folder, which transformers and what builds on it open: its weights under
their names, its tokenizer as tokenizer.json, a card.

    ckpt = load.read('out/ckpt.pt')
    hf_export.write('out-hf', ckpt['model'], GPTConfig(**ckpt['model_args']), ckpt['tokenizer'])
"""

import json
import os
import re

import torch

from support.chat import ASSISTANT_END, chat_format
from support.hf_tokenizer import bytes_to_unicode, oniguruma
from support.huggingface import convert, preset_of, to_config, weight_names
from support.tokenizer import make_tokenizer

# Readers insist on an id that ends a text, and a vocabulary of characters has none. They are told the first
# of these that it has, else its last character: transformers leaves that one out when it shows a text without
# special tokens, so a new line would be a bad choice. generate() does not stop there.
RARE = '\x00\x03\x04\x1a\x0c|~^`\\$@#&%*_=+<>{}[]'


def write(folder, weights, config, tokenizer_state, dtype='float32', card=''):
    """Write a model (our weights, its GPTConfig) and its tokenizer into `folder`, the weights in `dtype`.
    card: the text of its README.md. Returns the name of its class in transformers; ValueError if it has
    none."""
    from huggingface_hub import save_torch_state_dict
    tokenizer = make_tokenizer(tokenizer_state)
    theirs = to_config(config, tokenizer, dtype)
    content, settings = to_tokenizer_json(tokenizer, config.block_size)
    texts = {'config.json': json.dumps(theirs, indent=2),
             'generation_config.json': json.dumps(generation_config(config, tokenizer), indent=2),
             'tokenizer.json': content, 'tokenizer_config.json': settings, 'README.md': card}
    os.makedirs(folder, exist_ok=True)
    save_torch_state_dict(their_weights(weights, config, getattr(torch, dtype)), folder,
                          metadata={'format': 'pt'})
    for name, text in texts.items():
        with open(os.path.join(folder, name), 'w', encoding='utf-8') as f:
            f.write(text.rstrip('\n') + '\n')
    # safetensors makes its files for their owner alone; those just written have what the umask says
    mode = os.stat(os.path.join(folder, 'config.json')).st_mode
    for name in os.listdir(folder):
        os.chmod(os.path.join(folder, name), mode)
    return theirs['architectures'][0]


def their_weights(weights, config, dtype):
    """Our weights {name: tensor} under their names, in their layout and in `dtype`."""
    arch, out = preset_of(config), {}
    names = weight_names(arch, config.n_layer)
    if added := sorted(set(weights) - set(names)):
        raise ValueError(f"{added[0]} is not in {arch}. nothing else reads it")
    for ours, theirs in names.items():
        if ours in weights and not (config.tie and ours == 'lm_head.weight'):
            out[theirs] = convert(ours, weights[ours], config.n_embd, config.n_head, arch).to(dtype)
    if arch == 'gpt2' and not config.bias:  # transformers' GPT-2 always has biases
        for name in [name for name in out if re.search(r'(ln_.|c_attn|c_proj|c_fc)\.weight$', name)]:
            # the outputs come last in a Conv1D
            out[name.removesuffix('weight') + 'bias'] = torch.zeros(out[name].shape[-1], dtype=dtype)
    return out


def generation_config(config, tokenizer):
    """generation_config.json, a dict: what transformers' generate() does by default."""
    stop = (chat_format(tokenizer) or tokenizer).stop_ids or [None]  # after an answer, or a text
    out = {'bos_token_id': tokenizer.end_of_text, 'eos_token_id': stop if len(stop) > 1 else stop[0],
           'pad_token_id': stop[0], 'max_new_tokens': max(1, config.block_size // 2)}
    if config.vocab_size > tokenizer.n_vocab:  # ids that only pad the vocabulary
        out['suppress_tokens'] = list(range(tokenizer.n_vocab, config.vocab_size))
    return out


def model_card(name, ckpt, n_params, prompt):
    """The text of README.md: from what the model was made, how to load it; prompt: what it is given there."""
    loss = ckpt.get('evaluation', {}).get('metrics', {}).get('val_loss', 'unknown')
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A language model, not trained to avoid harm. License: not chosen yet; whoever publishes it chooses one.

| | |
|---|---|
| parameters | {n_params:,} |
| dataset | {ckpt['config'].get('dataset', 'unknown')} |
| iterations | {ckpt['iter_num']:,} |
| validation loss (eval_iters={ckpt['config'].get('eval_iters', 'unknown')}; 0: of all the text) | {loss} |

```python
from transformers import pipeline
generate = pipeline('text-generation', '{name}')
print(generate({prompt!r}, max_new_tokens=50)[0]['generated_text'])
```
"""


# -----------------------------------------------------------------------------
# a tokenizer of ours as tokenizer.json and tokenizer_config.json


def to_tokenizer_json(tokenizer, block_size):
    """The texts of the two files."""
    from tokenizers import AddedToken
    state = tokenizer.state()
    if state['kind'] == 'hf':  # as it came
        settings = json.dumps({'tokenizer_class': 'PreTrainedTokenizerFast'})
        return state['json'], state.get('config') or settings
    if state['kind'] == 'ids':
        raise ValueError("its ids are no text, for which transformers has no tokenizer")
    special, ends = tokenizer.special, None
    if state['kind'] == 'char':
        chars = state['chars']
        out = char_tokenizer({**{c: i for i, c in enumerate(chars)}, **special})
        ends = next((c for c in RARE if c in chars), chars[-1])
        out.add_tokens([AddedToken(ends, special=False, normalized=False)])
    elif state['kind'] == 'byte':
        out = bpe_tokenizer({bytes([i]): i for i in range(256)}, special)
    else:
        out = bpe_tokenizer(tokenizer.encoding._mergeable_ranks, special, tokenizer.encoding._pat_str)
    out.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    settings = {'tokenizer_class': 'PreTrainedTokenizerFast', 'model_max_length': block_size,
                'clean_up_tokenization_spaces': False}
    if ends := next((text for text, id in special.items() if id == tokenizer.end_of_text), ends):
        settings.update(bos_token=ends, eos_token=ends, pad_token=ends)
    if form := chat_format(tokenizer):  # finetuned on conversations
        settings.update(eos_token=ASSISTANT_END, chat_template=form.template)
    return out.to_str(pretty=True), json.dumps(settings, indent=2)


def char_tokenizer(vocab):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    out = Tokenizer(models.WordLevel(vocab))  # without an unknown token: an unknown character is an error
    out.pre_tokenizer = pre_tokenizers.Split(Regex(r'[\s\S]'), 'isolated')
    out.decoder = decoders.Fuse()
    return out


def bpe_tokenizer(ranks, special, pattern=None):
    """A byte-level BPE: ranks {token, in bytes: id}, special {text: id}, the regular expression that splits
    the text (tiktoken's; None: nothing does)."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    letters = bytes_to_unicode()

    def spell(token):
        return ''.join(letters[b] for b in token)

    vocab = {spell(token): rank for token, rank in ranks.items()}
    merges = [(spell(a), spell(b)) for a, b in merges_of(ranks)]
    # ignore_merges: a word in the vocabulary is that token, however its merges would end, as in tiktoken
    out = Tokenizer(models.BPE({**vocab, **special}, merges, ignore_merges=True))
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    if pattern:
        steps.insert(0, pre_tokenizers.Split(Regex(oniguruma(pattern)), 'isolated'))
    out.pre_tokenizer = pre_tokenizers.Sequence(steps)
    out.decoder = decoders.ByteLevel()
    return out


def merges_of(ranks):
    """The merges that made the tokens {bytes: rank}, in order: the last merge of each token, found by merging
    its bytes with the tokens of lower rank."""
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i:i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:])]
            i = pairs.index(min(pairs))
            if pairs[i] >= rank:
                break  # not made of two tokens: it is only found whole (ignore_merges)
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            yield parts
