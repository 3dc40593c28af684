"""
Write text with a trained model. The checkpoint has all that is needed, the tokenizer included.

    $ python sample.py out-quickstart
    $ python sample.py --init_from=gpt2 --start='The answer is' --num_samples=3 --max_new_tokens=100
    $ python sample.py out-quickstart --prompts=prompts.txt --temperature=0
    $ python sample.py out-chat --chat

A single sample is printed while it is made. Ctrl-C ends it and keeps the text.
"""

from configurator import configure, error

# -----------------------------------------------------------------------------
init_from = 'resume'  # the checkpoint in out_dir; or a checkpoint, a Hugging Face folder or name ('gpt2')
out_dir = 'out'  # the run's folder, if init_from is 'resume'
dataset: str = None  # whose tokenizer to use. None: the checkpoint's; nanoGPT's checkpoints name a dataset
data_dir: str = None  # the folder of the datasets. None: data/ beside this file
start = ''  # the prompt; \n is a new line, '<|endoftext|>' that token. 'FILE:prompt.txt'; '-': standard input
prompts: str = None  # in place of start: a file with a prompt per line
chat = False  # talk to a model that was finetuned on conversations
num_samples = 10  # for each prompt
batch_size = 64  # samples that are made at once; fewer need less memory
max_new_tokens = 500  # per sample
temperature = 0.8  # 1: the model's own probabilities; lower: less random; 0: always the likeliest token
top_k: int | None = 200  # draw among so many likeliest tokens. None: all
top_p = 1.0  # draw among the likeliest tokens that have this probability together
stop: str = None  # end a sample before this text. Where the model ends its text it ends anyway
seed = 1337
device = 'auto'  # 'cpu', 'cuda', 'cuda:1', 'mps'
dtype = 'auto'  # of the weights: 'float32', 'bfloat16', 'float16'
compile: bool | str = False  # on a GPU: compile the step of one token, which pays for much text
# -----------------------------------------------------------------------------
config, given = configure(globals(), positional='out_dir')

import os
import signal
import sys
import time

import torch

import checkpoint
from chat import chat_format, converse, fit_prompt
from common import choose_compile, choose_device, choose_dtype
from evaluation import read_prompts, read_text
from model import prompt_ids

if hasattr(signal, 'SIGPIPE'):
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this script without a traceback
for name in ('num_samples', 'batch_size', 'max_new_tokens', 'top_k'):
    if config[name] is not None and config[name] < 1:
        error(f"{name} is out of range ({config[name]}). use 1 or more")
if temperature < 0:
    error(f"temperature is out of range ({temperature}). use 0 or more")
if not 0 < top_p <= 1:
    error(f"top_p is out of range ({top_p}). use a number above 0, at most 1: all")

# -----------------------------------------------------------------------------
# the prompts
if prompts is not None:
    texts = read_prompts(prompts)
elif start == '-':
    texts = [read_text('-').removesuffix('\n')]  # the one that echo adds
elif start.startswith('FILE:'):
    texts = [read_text(os.path.expanduser(start[5:]))]
else:
    texts = [start.replace('\\n', '\n')]
if stop is not None:
    stop = stop.replace('\\n', '\n')

# -----------------------------------------------------------------------------
# the model
device = choose_device(device)
dtype = choose_dtype(dtype, device)
compile = choose_compile(compile, device)
source = out_dir if init_from == 'resume' else init_from
try:
    model, tokenizer = checkpoint.load(source, dataset, data_dir)
except ValueError as e:
    error(str(e))
if device == 'cpu' and model.get_num_params(non_embedding=False) < 50e6:
    # Its steps are too short to be divided. Alone two threads are no faster; beside another busy process they
    # wait for each other (2 cores, tokens/s with one and two threads: toy 835 and 16, baby 135 and 14)
    torch.set_num_threads(1)
for p in model.parameters():  # not the table of rotations, which stays float32
    p.data = p.data.to(getattr(torch, dtype))
model.to(device)
generator = torch.Generator(device).manual_seed(seed)  # its own: the same seed gives the same text

# -----------------------------------------------------------------------------
# generating


def text_after(prompt_ids, new_ids, stop_ids):
    """(what the new ids add to the text of the prompt, whether the text is complete)"""
    ends = [new_ids.index(token) for token in stop_ids if token in new_ids]
    if ends:
        new_ids = new_ids[:min(ends)]
    # the whole text is decoded each time: some tokenizers decode the beginning of a text differently
    text = tokenizer.decode(prompt_ids + new_ids)[len(tokenizer.decode(prompt_ids)):]
    if stop and stop in text:
        return text.partition(stop)[0], True
    return text, len(ends) > 0


def print_new(text, n_shown, is_complete):
    """Print a growing text from its character n_shown on. Returns how many are printed now: an end that may
    change, part of a character or the beginning of the stop text, is held back."""
    if not is_complete:
        text = text.rstrip('\ufffd')
        if stop:
            text = text[:max(0, len(text) - len(stop) + 1)]
    print(text[n_shown:], end='', flush=True)
    return max(n_shown, len(text))


interrupted = False  # by Ctrl-C, in the last generate()


def on_interrupt(number, frame):
    """Ctrl-C ends the text after this token; a second one ends the script."""
    global interrupted
    interrupted = True
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def generate(prompts, stop_ids, live=False):
    """Continue equally long lists of ids. Returns the texts that follow, and how many tokens they took. live:
    print the first one while it is made."""
    global interrupted
    interrupted = False
    rows = [[] for _ in prompts]  # the new ids
    n_shown = 0
    last_look = time.time()

    def on_tokens(new):  # (B, n)
        nonlocal n_shown, last_look
        for row, tokens in zip(rows, new.tolist()):
            row += tokens
        if interrupted:
            return True
        if time.time() - last_look < 0.05:  # decoding a long text may take as long as making a token
            return False
        last_look = time.time()
        results = [text_after(prompt, row, stop_ids) for prompt, row in zip(prompts, rows)]
        if live:
            n_shown = print_new(results[0][0], n_shown, results[0][1])
        return all(is_complete for _, is_complete in results)

    signal.signal(signal.SIGINT, on_interrupt)  # KeyboardInterrupt could come in the middle of a print()
    try:
        with torch.inference_mode():  # a tenth more tokens/s of a small network than no_grad()
            model.generate(torch.tensor(prompts, device=device), max_new_tokens, temperature, top_k, top_p,
                           vocab_size=tokenizer.n_vocab, stop_ids=stop_ids, generator=generator,
                           on_tokens=on_tokens, compile=compile)
    except FloatingPointError as e:
        print(f"error: {e} (in {dtype}). try --dtype=float32, else an older checkpoint", file=sys.stderr)
        sys.exit(3)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    texts = [text_after(prompt, row, stop_ids)[0] for prompt, row in zip(prompts, rows)]
    if live:
        print_new(texts[0], n_shown, is_complete=True)
    return texts, sum(len(row) for row in rows)


# -----------------------------------------------------------------------------
# a conversation, or an answer to each prompt
if chat:
    form = chat_format(tokenizer)
    if form is None:
        error(f"{source} knows no conversations: its tokenizer has neither roles nor a chat template. "
              "python prepare.py FILE --chat makes a dataset for config/finetune_chat.py")
    block_size = model.config.block_size
    most = block_size - min(max_new_tokens, block_size // 2)  # tokens of a prompt
    if prompts is None and 'start' not in given:
        converse(form, lambda ids: generate([ids], form.stop_ids, live=True)[0][0], most)
        sys.exit()
    for text in texts:
        try:
            ids, _ = fit_prompt(form, [{'role': 'user', 'content': text}], most)
        except ValueError as e:
            error(f"a prompt cannot be answered ({text[:40]!r}): {e}")
        answers, _ = generate([ids], form.stop_ids)
        print(answers[0].replace('\n', '\\n'), flush=True)
        if interrupted:
            sys.exit(128 + signal.SIGINT)
    sys.exit()

# -----------------------------------------------------------------------------
# samples
samples = []  # (prompt, its ids), in the order in which they are printed
for text in texts:
    try:
        ids = prompt_ids(tokenizer, text)
    except ValueError as e:
        error(f"a prompt cannot be encoded: {e}. use another --{'prompts' if prompts else 'start'}")
    if max(ids) >= model.config.vocab_size:
        error(f"a prompt has the id {max(ids)}, and the model only {model.config.vocab_size} ids: it was "
              "trained with another tokenizer. name its dataset with --dataset=NAME")
    samples += [(text, ids)] * num_samples

live = len(samples) == 1  # a single one is printed while it is made
n_tokens = 0
t0 = time.time()
while samples and not interrupted:
    # equally long prompts, as all samples of one prompt are, go through the model together
    batch = []
    length = len(samples[0][1])
    while samples and len(batch) < batch_size and len(samples[0][1]) == length:
        batch.append(samples.pop(0))
    if live:
        print(batch[0][0], end='', flush=True)
    texts, n_new = generate([ids for _, ids in batch], tokenizer.stop_ids, live)
    n_tokens += n_new
    for (prompt, _), text in zip(batch, texts):
        print('' if live else prompt + text, end='\n---------------\n', flush=True)
if interrupted:
    sys.exit(128 + signal.SIGINT)
seconds = time.time() - t0
print(f"{source}: {n_tokens:,} tokens, {n_tokens / seconds:,.0f} per second", file=sys.stderr)
