"""One of our tokenizers as Hugging Face's tokenizer.json and tokenizer_config.json."""

import json
import re

from support.chat import ASSISTANT_END, chat_format
from support.hf_tokenizer import bytes_to_unicode
from support.tokenizer import END_OF_TEXT

# Readers insist on an id that ends a text, and a vocabulary of characters has none. They are told the first
# of these that it has, else its last character: transformers leaves that one out when it shows a text without
# special tokens, so a new line would be a bad choice. generate() does not stop there.
RARE = '\x00\x03\x04\x1a\x0c|~^`\\$@#&%*_=+<>{}[]'


def to_tokenizer_json(tokenizer, block_size):
    """The texts of the two files."""
    state = tokenizer.state()
    if state['kind'] == 'hf':  # as it came
        settings = json.dumps({'tokenizer_class': 'PreTrainedTokenizerFast'})
        return state['json'], state.get('config') or settings
    if state['kind'] == 'ids' or not all(len(c) == 1 for c in state.get('chars', '')):
        raise ValueError("transformers has no such tokenizer: ids that are no text, or several characters "
                         "each")
    from tokenizers import AddedToken
    special, ends = tokenizer.special_ids(), None
    if state['kind'] == 'char':
        chars = state['chars']
        out = char_tokenizer(chars, special)
        ends = next((c for c in RARE if c in chars), chars[-1])
        out.add_tokens([AddedToken(ends, special=False, normalized=False)])
    elif state['kind'] == 'byte':
        special = {END_OF_TEXT: tokenizer.end_of_text, **special}
        out = bpe_tokenizer({bytes([i]): i for i in range(256)}, special)
    else:
        out = bpe_tokenizer(tokenizer.encoding._mergeable_ranks, special, tokenizer.encoding._pat_str)
    out.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    settings = {'tokenizer_class': 'PreTrainedTokenizerFast', 'model_max_length': block_size,
                'clean_up_tokenization_spaces': False}
    for text, id in special.items():
        if id == tokenizer.end_of_text:
            ends = text
    if ends:
        settings.update(bos_token=ends, eos_token=ends, pad_token=ends)
    if form := chat_format(tokenizer):  # finetuned on conversations
        settings.update(eos_token=ASSISTANT_END, chat_template=form.template)
    return out.to_str(pretty=True), json.dumps(settings, indent=2)


def char_tokenizer(chars, special):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    vocab = {**{c: i for i, c in enumerate(chars)}, **special}
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


def oniguruma(pattern):
    """A regular expression of tiktoken's for the package `tokenizers`, in whose dialect {1,3}+ repeats (it is
    not possessive) and $ is the end of a line."""
    return re.sub(r'(\{\d+(?:,\d*)?\})\+', r'\1', pattern).replace('$', r'\z')


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
