"""
Write text with a trained model.

    $ python sample.py out-quickstart
    $ python sample.py --init_from=gpt2 --start='The answer is' --num_samples=3 --max_new_tokens=100
    $ python sample.py out-quickstart --prompts=prompts.txt --temperature=0
    $ python sample.py out-chat --chat

The checkpoint contains all that is needed, including the tokenizer. A single sample is printed while it is
generated. Ctrl-C ends it and keeps the text so far.
"""

from configurator import InputError, configure

# -----------------------------------------------------------------------------
init_from = 'resume'  # the checkpoint in out_dir; or a checkpoint, a Hugging Face folder or name ('gpt2')
out_dir = 'out'  # the run's folder, if init_from is 'resume'
dataset: str = None  # whose tokenizer to use. None: the checkpoint's; nanoGPT's checkpoints name a dataset
data_dir: str = None  # the folder of the datasets. None: data/ next to this file
start = ''  # the prompt; \n is a new line, '<|endoftext|>' that token. Or 'FILE:prompt.txt'
prompts: str = None  # a file with a prompt per line, instead of start
chat = False  # talk to a model that was finetuned on conversations
num_samples = 10  # for each prompt
batch_size = 64  # samples of a prompt that are generated at once; fewer need less memory
max_new_tokens = 500  # per sample
temperature = 0.8  # 1: the model's own probabilities; lower: less random; 0: always the most likely token
top_k: int | None = 200  # draw among this number of most likely tokens. None: all
top_p = 1.0  # draw among the most likely tokens whose probabilities add up to this
stop: str = None  # end a sample before this text; it also ends at the model's end-of-text token
seed = 1337
device = 'auto'  # 'cpu', 'cuda', 'cuda:1', 'mps'
dtype = 'auto'  # of the weights: 'float32', 'bfloat16', 'float16'
compile: bool | str = False  # on a GPU, compile the step of one token, which pays off for long texts
# -----------------------------------------------------------------------------
config, given = configure(globals(), positional='out_dir')

import signal
import sys
import time

import torch

from flatgpt import checkpoint
from flatgpt.processes import choose_compile, choose_device, choose_dtype
from flatgpt.sampling import Sampler, prompt_ids, read_prompts, read_text, text_after

if hasattr(signal, 'SIGPIPE'):
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this script without a traceback
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
used_device = choose_device(device)
weight_dtype = choose_dtype(dtype, used_device)
source = out_dir if init_from == 'resume' else init_from
model, tokenizer = checkpoint.load(source, dataset, data_dir)
if used_device == 'cpu' and model.get_num_params(non_embedding=False) < 50e6:
    # next to a busy program, a second thread makes such short steps many times slower (dev/results.md)
    torch.set_num_threads(1)
for p in model.parameters():  # not the table of rotations, which stays float32
    p.data = p.data.to(getattr(torch, weight_dtype))
model.to(used_device)
block_size = model.config.block_size

# -----------------------------------------------------------------------------
# the prompts, as token ids
stop_ids = tokenizer.stop_ids
is_talking = False  # at the terminal, instead of answering prompts
max_prompt = block_size  # ids
if chat:
    from flatgpt.conversations import chat_format, converse, fit_prompt
    form = chat_format(tokenizer)
    if form is None:
        raise InputError(f"{source} was not trained on conversations: its tokenizer has no roles. Use python "
                         "prepare.py FILE --chat and config/finetune_chat.py.")
    stop_ids = form.stop_ids
    num_samples = 1
    max_prompt = block_size - min(max_new_tokens, block_size // 2)
    is_talking = prompts is None and 'start' not in given
encoded = []
for text in texts:
    if chat:
        ids, _ = fit_prompt(form, [{'role': 'user', 'content': text}], max_prompt)
    else:
        ids = prompt_ids(tokenizer, text)
    if max(ids) >= model.config.vocab_size:
        raise InputError(f"a prompt has the id {max(ids)}, but the model has {model.config.vocab_size} ids: "
                         "it was trained with another tokenizer. Name its dataset: --dataset=NAME.")
    encoded.append(ids)

# -----------------------------------------------------------------------------
# one sampler for all texts. A batch is always filled, so that one captured step serves all
rows_at_once = min(batch_size, num_samples)
max_length = block_size if is_talking else max(len(ids) for ids in encoded) + max_new_tokens
sampler = Sampler(model, rows_at_once, max_length, temperature, top_k, top_p, tokenizer.n_vocab,
                  compile=choose_compile(compile, used_device))
n_calls = 0  # of generate(); call i uses seed + i, so that the length of earlier texts does not matter


def generate(ids, printing=False):
    """Continue the prompt `ids` in each row of a batch. Return the new texts, and whether Ctrl-C ended them.

    printing: print the text of the first row while it is generated.
    """
    global n_calls
    new_ids = [[] for _ in range(rows_at_once)]
    n_printed = 0  # characters
    next_check = 0.0

    def on_tokens(new):  # (rows_at_once, number of new ids)
        nonlocal n_printed, next_check
        for row, tokens in zip(new_ids, new.tolist()):
            row += tokens
        if time.perf_counter() < next_check:
            return False
        next_check = time.perf_counter() + 0.05  # decoding a long text may take as long as generating a token
        results = [text_after(tokenizer, ids, row, stop_ids, stop) for row in new_ids]
        if printing:
            # without an end that may still change: part of a character, or the beginning of the stop text
            text = results[0][0].rstrip('\ufffd')
            if stop:
                text = text[:max(0, len(text) - len(stop) + 1)]
            new_text = text[n_printed:]
            n_printed += len(new_text)  # before printing, as Ctrl-C may interrupt that
            print(new_text, end='', flush=True)
        return all(has_ended for _, has_ended in results)

    was_interrupted = False
    try:
        with torch.inference_mode():  # a tenth faster than no_grad() for a small network
            idx = torch.tensor([ids] * rows_at_once, device=used_device)
            sampler.generate(idx, max_new_tokens, seed + n_calls, on_tokens)
    except KeyboardInterrupt:
        was_interrupted = True
    except FloatingPointError as e:
        print(f"error: {e} in {weight_dtype}. Try --dtype=float32, or an older checkpoint.", file=sys.stderr)
        sys.exit(3)
    n_calls += 1
    texts = [text_after(tokenizer, ids, row, stop_ids, stop)[0] for row in new_ids]
    if printing:
        print(texts[0][n_printed:], end='', flush=True)
    return texts, was_interrupted


if is_talking:
    converse(form, lambda ids: generate(ids, printing=True)[0][0], max_prompt)
    sys.exit()
streaming = len(texts) == 1 and num_samples == 1 and not chat
for text, ids in zip(texts, encoded):
    for first in range(0, num_samples, rows_at_once):
        if streaming:
            print(text, end='', flush=True)
        new_texts, was_interrupted = generate(ids, streaming)
        for new_text in new_texts[:num_samples - first]:
            if chat:
                print(new_text.replace('\n', '\\n'), flush=True)
            elif streaming:  # the text has been printed already
                print('\n---------------', flush=True)
            else:
                print(f'{text}{new_text}\n---------------', flush=True)
        if was_interrupted:
            sys.exit(128 + signal.SIGINT)
