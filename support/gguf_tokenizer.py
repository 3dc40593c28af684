"""
A tokenizer of ours as the keys of a GGUF file. llama.cpp has byte-level BPE, but splits a text only by the
regular expressions that it knows by name. A tokenizer with another one is refused: it would give other ids.
"""

import json

from support.chat import chat_format
from support.hf_export_tokenizer import merges_of, oniguruma
from support.hf_tokenizer import bytes_to_unicode
from support.tokenizer import PATTERN
from support.tokenizer import END_OF_TEXT, make_tokenizer

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # llama.cpp's types of tokens
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
LLAMA3_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
                  r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# The pattern, as tokenizer.json has it, and llama.cpp's name for it. Ours (GPT-4's) differs from Llama 3's in
# one thing: it takes white space at the end of the text as one piece, also if a new line is inside.
PRE = {oniguruma(GPT2_PATTERN): 'gpt-2', oniguruma(PATTERN): 'llama-bpe', LLAMA3_PATTERN: 'llama-bpe'}
WHOLE_WORDS = ('llama-bpe',)  # of those, the ones that look for a whole word in the vocabulary first
# a list of merges must not be empty; this one cannot occur, as letters are merged one by one
NO_MERGES = ['<|no <|merges']


def vocabulary(state, vocab_size):
    """{key: value} for the tokenizer with this state and a network with vocab_size ids. ValueError if
    llama.cpp has no such tokenizer."""
    kind = state['kind']
    tokenizer = make_tokenizer(state)
    if kind == 'hf':
        return of_tokenizer_json(json.loads(state['json']), tokenizer, vocab_size)
    if kind == 'char' and state.get('added'):
        raise ValueError("llama.cpp's vocabulary of characters has no tokens for a conversation's roles. "
                         "train and finetune with --tokenizer=byte, gpt2 or bpe:N")
    if kind == 'char':
        return characters(tokenizer.chars, vocab_size)
    letters = bytes_to_unicode()
    if kind == 'byte':
        words = {i: (letters[i], NORMAL) for i in range(256)}
        words[tokenizer.end_of_text] = (END_OF_TEXT, CONTROL)
        words.update({id: (token, CONTROL) for token, id in tokenizer.special_ids().items()})
        return bpe(words, NO_MERGES, 'gpt-2', tokenizer, vocab_size)
    encoding = tokenizer.encoding
    ranks, special = encoding._mergeable_ranks, encoding._special_tokens
    words = {id: (''.join(letters[b] for b in token), NORMAL) for token, id in ranks.items()}
    words.update({id: (token, CONTROL) for token, id in special.items()})
    merges = [' '.join(''.join(letters[b] for b in part) for part in pair) for pair in merges_of(ranks)]
    pre = PRE.get(oniguruma(encoding._pat_str))
    if pre is None:
        raise ValueError("llama.cpp does not know the regular expression with which the tokenizer "
                         f"{encoding.name} splits a text. use --tokenizer=gpt2, bpe:N, byte or char")
    if len(merges) < sum(len(token) > 1 for token in ranks) and pre not in WHOLE_WORDS:
        raise ValueError(f"some tokens of {encoding.name} are not made of two others, which llama.cpp's "
                         f"{pre} needs. use another tokenizer")
    return bpe(words, merges, pre, tokenizer, vocab_size)


def of_tokenizer_json(content, tokenizer, vocab_size):
    """vocabulary() of a tokenizer.json."""
    model, pre_tokenizer = content['model'], content.get('pre_tokenizer') or {}
    steps = pre_tokenizer.get('pretokenizers', [pre_tokenizer])
    added = content.get('added_tokens') or []
    if model.get('type') == 'WordLevel' and pattern_of(steps[0]) == r'[\s\S]':  # our characters
        chars = sorted(model['vocab'], key=model['vocab'].get)
        return characters(chars, vocab_size)
    pre = pre_tokenizer_name(steps)
    if model.get('type') != 'BPE' or content.get('normalizer') or pre is None:
        raise ValueError(f"its tokenizer ({tokenizer.state()['name']}) is not one that we can describe to "
                         "llama.cpp. write a folder, --to=FOLDER, and try llama.cpp's convert_hf_to_gguf.py")
    words = {id: (token, NORMAL) for token, id in model['vocab'].items()}
    for token in added:
        words[token['id']] = (token['content'], CONTROL if token.get('special') else USER_DEFINED)
    pairs = [merge.split(' ') if isinstance(merge, str) else merge for merge in model.get('merges') or []]
    return bpe(words, [' '.join(pair) for pair in pairs] or NO_MERGES, pre, tokenizer, vocab_size)


def pattern_of(step):
    """The regular expression of a Split in a tokenizer.json, or None."""
    return (step.get('pattern') or {}).get('Regex')


def pre_tokenizer_name(steps):
    """llama.cpp's name for the steps of a tokenizer.json that split a text, or None."""
    *first, last = steps
    if last.get('type') != 'ByteLevel' or last.get('add_prefix_space'):
        return None
    if last.get('use_regex', True):
        if not first:
            return 'gpt-2'
        if len(first) == 1 and first[0].get('type') == 'Digits' and first[0].get('individual_digits'):
            return 'smollm'
        return None
    if not first:
        return 'gpt-2'  # our bytes: there is nothing to merge
    return PRE.get(pattern_of(first[0])) if len(first) == 1 else None


def bpe(words, merges, pre, tokenizer, vocab_size):
    """The keys of a byte-level BPE; words {id: (text, type)}."""
    words = {i: words.get(i, (f'[PAD{i}]', UNUSED)) for i in range(vocab_size)}
    keys = {
        'tokenizer.ggml.model': 'gpt2',
        'tokenizer.ggml.pre': pre,
        **tokens(words),
        'tokenizer.ggml.merges': merges,
        'tokenizer.ggml.add_bos_token': tokenizer.encode_prompt('a')[:1] == [tokenizer.end_of_text],
    }
    if tokenizer.end_of_text is not None:
        keys['tokenizer.ggml.bos_token_id'] = tokenizer.end_of_text
        keys['tokenizer.ggml.eos_token_id'] = tokenizer.stop_ids[0]
    if form := chat_format(tokenizer):
        keys['tokenizer.chat_template'] = form.template
    return keys


def characters(chars, vocab_size):
    """The keys of one id per character: RWKV's tokenizer, which takes the longest token that fits, and is the
    only one for which llama.cpp does not insist on an id that ends a text."""
    words = {}
    for i in range(vocab_size):
        if i < len(chars):
            words[i] = (''.join(escape(c) for c in chars[i]), NORMAL)
        else:
            words[i] = (rf'\xff{i}', UNUSED)  # no text has this byte
    return {'tokenizer.ggml.model': 'rwkv', **tokens(words)}


def escape(c):
    """A character as it stands in RWKV's vocabulary: as it is, or its bytes in hexadecimal digits."""
    if c.isascii() and c.isprintable() and c != '\\':
        return c
    return ''.join(rf'\x{byte:02x}' for byte in c.encode('utf-8', 'surrogatepass'))


def tokens(words):
    keys = {'tokenizer.ggml.tokens': [text for text, _ in words.values()],
            'tokenizer.ggml.token_type': [kind for _, kind in words.values()]}
    unused = [i for i, (_, kind) in words.items() if kind == UNUSED]
    if unused:
        keys['tokenizer.ggml.suppress_tokens'] = unused  # never generated, by what knows this key
    return keys
