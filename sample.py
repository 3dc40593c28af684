"""
Write text with a trained model. The checkpoint has all that is needed, the tokenizer included.

    $ python sample.py out-quickstart
    $ python sample.py --init_from=gpt2 --start='The answer is' --num_samples=3 --max_new_tokens=100
    $ python sample.py out-quickstart --prompts=prompts.txt --temperature=0
    $ python sample.py out-chat --chat

A single sample is printed while it is made. Ctrl-C ends it and keeps the text so far.
"""

from configurator import InputError, check_range, configure

# -----------------------------------------------------------------------------
init_from = 'resume'  # the checkpoint in out_dir; or a checkpoint, a Hugging Face folder or name ('gpt2')
out_dir = 'out'  # the run's folder, if init_from is 'resume'
dataset: str = None  # whose tokenizer to use. None: the checkpoint's; nanoGPT's checkpoints name a dataset
data_dir: str = None  # the folder of the datasets. None: data/ beside this file
start = ''  # the prompt; \n is a new line, '<|endoftext|>' that token. Or 'FILE:prompt.txt'
prompts: str = None  # in place of start: a file with a prompt per line
chat = False  # talk to a model that was finetuned on conversations
num_samples = 10  # for each prompt
batch_size = 64  # samples of a prompt that are made at once; fewer need less memory
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

import signal
import sys
import time

import torch

import checkpoint
from conversations import chat_format, converse, fit_prompt
from processes import choose_compile, choose_device, choose_dtype
from sampling import Sampler, prompt_ids, read_prompts, read_text, text_after


if hasattr(signal, 'SIGPIPE'):
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this script without a traceback
check_range(config, ['num_samples', 'batch_size', 'max_new_tokens', 'top_k'], 1)
check_range(config, ['temperature'], 0)
check_range(config, ['top_p'], 0, 1, exclude=0)
check_range(config, ['seed'], 0, 2**63 - 1)
if prompts is not None:
    texts = read_prompts(prompts)
elif start.startswith('FILE:'):
    texts = [read_text(start.removeprefix('FILE:'))]
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
    raise InputError(str(e))
if device == 'cpu' and model.get_num_params(non_embedding=False) < 50e6:
    # Its steps are too short to be divided. Alone two threads are no faster; beside another busy process they
    # wait for each other (2 cores, tokens/s with one and two threads: toy 835 and 16, baby 135 and 14)
    torch.set_num_threads(1)
for p in model.parameters():  # not the table of rotations, which stays float32
    p.data = p.data.to(getattr(torch, dtype))
model.to(device)
n_calls = 0  # of generate()

# -----------------------------------------------------------------------------
# generating


def generate(ids, n, stop_ids, live=False):
    """Continue the prompt `ids` n times. Returns the texts that follow it, and whether Ctrl-C ended them.
    live: print the first one while it is made."""
    global n_calls
    rows = [[] for _ in range(n)]  # the new ids
    n_shown = 0  # characters that are printed
    next_look = 0.0

    def on_tokens(new):  # (n, number of new ids)
        nonlocal n_shown, next_look
        for row, tokens in zip(rows, new.tolist()):
            row += tokens
        if time.perf_counter() < next_look:
            return False
        next_look = time.perf_counter() + 0.05  # decoding a long text may take as long as making a token
        results = [text_after(tokenizer, ids, row, stop_ids, stop) for row in rows]
        if live:
            # without an end that may change: part of a character, or the beginning of the stop text
            text = results[0][0].rstrip('\ufffd')
            if stop:
                text = text[:max(0, len(text) - len(stop) + 1)]
            shown = text[n_shown:]
            n_shown += len(shown)
            print(shown, end='', flush=True)
        return all(is_complete for _, is_complete in results)

    interrupted = False
    try:
        with torch.inference_mode():  # a tenth more tokens/s of a small network than no_grad()
            sampler = Sampler(model, n, len(ids) + max_new_tokens, temperature, top_k, top_p,
                              tokenizer.n_vocab, compile=compile)
            sampler.generate(torch.tensor([ids] * n, device=device), max_new_tokens, seed + n_calls, on_tokens)
            n_calls += 1
    except KeyboardInterrupt:
        interrupted = True
    except FloatingPointError as e:
        print(f"error: {e} (in {dtype}). try --dtype=float32, else an older checkpoint", file=sys.stderr)
        sys.exit(3)
    texts = [text_after(tokenizer, ids, row, stop_ids, stop)[0] for row in rows]
    if live:
        print(texts[0][n_shown:], end='', flush=True)
    return texts, interrupted


# -----------------------------------------------------------------------------
# the prompts
stop_ids = tokenizer.stop_ids
if chat:
    form = chat_format(tokenizer)
    if form is None:
        raise InputError(f"{source} knows no conversations: its tokenizer has no roles. "
              "python prepare.py FILE --chat makes a dataset for config/finetune_chat.py")
    stop_ids = form.stop_ids
    num_samples = 1
    block_size = model.config.block_size
    most = block_size - min(max_new_tokens, block_size // 2)  # tokens of a prompt
    if prompts is None and 'start' not in given:
        converse(form, lambda ids: generate(ids, 1, stop_ids, live=True)[0][0], most)
        sys.exit()
encoded = []
for text in texts:
    try:
        if chat:
            ids, _ = fit_prompt(form, [{'role': 'user', 'content': text}], most)
        else:
            ids = prompt_ids(tokenizer, text)
    except ValueError as e:
        raise InputError(f"a prompt cannot be encoded ({text[:40]!r}): {e}")
    if max(ids) >= model.config.vocab_size:
        raise InputError(f"a prompt has the id {max(ids)}, and the model only {model.config.vocab_size} ids: it was "
              "trained with another tokenizer. name its dataset with --dataset=NAME")
    encoded.append(ids)

# -----------------------------------------------------------------------------
# samples, or the answer to each prompt
live = len(texts) == 1 and num_samples == 1 and not chat
for text, ids in zip(texts, encoded):
    for first in range(0, num_samples, batch_size):
        if live:
            print(text, end='', flush=True)
        new_texts, interrupted = generate(ids, min(batch_size, num_samples - first), stop_ids, live)
        for new_text in new_texts:
            if chat:
                print(new_text.replace('\n', '\\n'), flush=True)
            else:
                print('' if live else text + new_text, end='\n---------------\n', flush=True)
        if interrupted:
            sys.exit(128 + signal.SIGINT)
