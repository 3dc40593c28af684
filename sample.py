"""
Write text with a trained model. Everything needed, the tokenizer included, is in the checkpoint.

    $ python sample.py --out_dir=out-quickstart
    $ python sample.py --init_from=out/ckpt_best.pt --start="To be" --num_samples=3 --temperature=0
    $ python sample.py --init_from=gpt2-xl --start=FILE:prompt.txt
"""

from configurator import configure, fail, out_of_range

# -----------------------------------------------------------------------------
init_from = 'resume'  # 'resume': the checkpoint in out_dir; or the path of one; or a Hugging Face folder or name (gpt2, OWNER/NAME)
out_dir = 'out'  # ignored if init_from is not 'resume'
dataset: str = None  # whose tokenizer to use; None: the checkpoint's own (one of nanoGPT's names the folder in data/)
data_dir: str = None  # where the datasets lie. None: data/ beside this file
start = '\n'  # the prompt; '<|endoftext|>' is that token where the tokenizer has it; FILE:prompt.txt reads it from a file
num_samples = 10
max_new_tokens = 500  # of each sample
temperature = 0.8  # 1: the model's own probabilities, below: less random, 0: always the likeliest token
top_k: int | None = 200  # draw from that many of the likeliest tokens. None: from all
top_p: float | None = None  # draw from the likeliest tokens that together have this probability. None: from all
stop: str = None  # end a sample at this text, such as '<|endoftext|>', and leave it out
seed = 1337
device = 'auto'  # 'cpu', 'cuda', 'cuda:1', 'mps'; auto: the GPU if there is one
dtype = 'auto'  # 'float32', 'bfloat16', 'float16'; auto: bfloat16 where the hardware has it
compile: bool | str = False  # torch.compile the model: pays for long runs only
# -----------------------------------------------------------------------------
knobs, given = configure(globals())

import signal
import sys
from contextlib import nullcontext

import torch

import checkpoint
from dataset import END_OF_TEXT
from parallel import choose_compile, choose_device, choose_dtype, compile_model

sys.stdout.reconfigure(errors='replace')  # a model may produce what the console's encoding lacks
if hasattr(signal, 'SIGPIPE'):
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
problems = out_of_range(knobs, above_zero='num_samples max_new_tokens top_k top_p', from_zero='temperature seed')
if top_p is not None and top_p > 1:
    problems.append(f"top_p is out of range ({top_p}). use a number in (0, 1]")
if stop == '':
    problems.append("stop is empty. leave it out, or name a text")
if start.startswith('FILE:'):
    try:
        with open(start[5:], encoding='utf-8') as f:
            start = f.read()
    except OSError as e:
        problems.append(f"the prompt's file cannot be read ({start[5:]}: {e.strerror}). name one with --start=FILE:PATH")
    except UnicodeDecodeError as e:
        problems.append(f"the prompt's file is not UTF-8 ({start[5:]}, byte {e.start}). save it as UTF-8")
if problems:
    fail(*problems)
device, _ = choose_device(device)
dtype, _ = choose_dtype(dtype, device)
compiling, _ = choose_compile(compile, device)

path = checkpoint.find(out_dir, hub=False) if init_from == 'resume' else init_from
model, tokenizer = checkpoint.load(path, dataset, data_dir)
model.to(device)
try:
    ids = tokenizer.encode_prompt(start)
except ValueError as e:
    fail(f"the prompt cannot be encoded: {e}. use --start with other characters")
put_first = ids[:1] == [tokenizer.end_of_text] and not start.startswith(tokenizer.decode(ids[:1]))  # Llama's <s>; not to be shown
if not ids:  # an empty prompt: what every document begins with, or a new line
    ids = [tokenizer.end_of_text] if tokenizer.end_of_text is not None else tokenizer.encode_prompt('\n')
if max(ids) >= model.config.vocab_size:
    fail(f"the prompt has the token id {max(ids)}, the model only {model.config.vocab_size} ids: it was trained with another tokenizer. name its dataset with --dataset=NAME")
idx = torch.tensor([ids] * num_samples, device=device)  # (B, T)
autocast = nullcontext() if dtype == 'float32' else torch.autocast(device.type, dtype=getattr(torch, dtype))
generator = torch.Generator(device).manual_seed(seed)  # of its own: the same seed gives the same text
stop_ids = tokenizer.stop_ids if stop == END_OF_TEXT and tokenizer.stop_ids else None
if compiling:  # dynamic: the sequence grows with each token
    with torch.no_grad(), autocast:
        note = compile_model(model, lambda: model(idx), compile, dynamic=True)
    print(note or 'compiled')

with torch.no_grad(), autocast:
    out = model.generate(idx, max_new_tokens, temperature, top_k, top_p, tokenizer.n_vocab, stop_ids, generator)
for row in out.tolist():
    new = row[len(ids):]
    new = new[:next((i for i, id in enumerate(new) if stop_ids and id in stop_ids), None)]
    prompt, text = tokenizer.decode(ids[put_first:]), tokenizer.decode(ids[put_first:] + new)
    if stop is not None and stop_ids is None and stop in text[len(prompt):]:
        text = text[:text.index(stop, len(prompt))]
    if sys.stdout.isatty():  # a model may produce control characters, and a terminal obeys them
        text = ''.join(c if c.isprintable() or c in '\n\t' else repr(c)[1:-1] for c in text)
    print(text)
    print('---------------')
