"""
Generate text with a trained model. The checkpoint has all that is needed, the tokenizer included.

    $ python sample.py --out_dir=out-quickstart
    $ python sample.py --init_from=out/ckpt_best.pt --start="To be" --num_samples=3 --temperature=0
    $ python sample.py --init_from=gpt2-xl --start=FILE:prompt.txt
    $ python sample.py --out_dir=out-quickstart --start=- --num_samples=1 --stop=$'\\n\\n'
    $ python sample.py --out_dir=out-quickstart --prompts=prompts.txt --num_samples=1
    $ python sample.py --out_dir=out-chat --chat

A single sample is printed while it is generated. Ctrl-C ends it and keeps the text.
"""

from configurator import configure, escape_control_characters, fail, out_of_range, say

# -----------------------------------------------------------------------------
init_from = 'resume'  # the checkpoint in out_dir; or PATH of one; or a Hugging Face folder or name
out_dir = 'out'  # ignored if init_from is not 'resume'
dataset: str = None  # whose tokenizer to use. None: the checkpoint's (nanoGPT's checkpoints name a dataset)
data_dir: str = None  # the folder with the datasets. None: data/ beside this file
start = '\n'  # the prompt, in which '<|endoftext|>' is that token; or FILE:prompt.txt; or '-': standard input
chat = False  # True: a conversation, with a model that was finetuned on some (config/finetune_chat.py)
prompts: str = None  # a file with a prompt per line, in place of start; \n in it is a new line
num_samples = 10  # for each prompt
batch_size = 64  # samples generated at once; fewer need less memory
max_new_tokens = 500  # per sample
temperature = 0.8  # 1: the model's own probabilities; lower: less random; 0: always the most likely token
top_k: int | None = 200  # sample from that many most likely tokens. None: from all
top_p: float | None = None  # sample from the most likely tokens with this total probability. None: from all
stop: str = None  # end a sample at this text and leave it out, e.g. '<|endoftext|>'
seed = 1337
device = 'auto'  # 'cpu', 'cuda', 'cuda:1', 'mps'; auto: a GPU if there is one
dtype = 'auto'  # of the weights: 'float32', 'bfloat16', 'float16'
compile: bool | str = 'auto'  # torch.compile the step of one token; auto: on GPUs, for long texts
# -----------------------------------------------------------------------------
knobs, given = configure(globals())

import itertools
import signal
import sys

from support.console import exit_on_broken_pipe

signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is something to print, Ctrl-C just ends the script
exit_on_broken_pipe()

import torch

from support import devices, shared_cpu
from support.chat import Session, answer_file, talk
from support.compiling import compile_model
from support.errors import first_line
from support.load import find, model_and_tokenizer
from support.samples import prompts_in
from support.streaming import Sample
from support.tokenizer import END_OF_TEXT, empty_prompt

sys.stdout.reconfigure(errors='replace')  # the console's encoding may lack what a model writes

# -----------------------------------------------------------------------------
# the prompts


def read(path, what, remedy):
    """The text of a file, or of standard input ('-')."""
    try:
        with open(0 if path == '-' else path, 'rb', closefd=path != '-') as f:
            return f.read().decode().replace('\r\n', '\n')
    except OSError as e:
        problems.append(f"{what} cannot be read ({path}: {e.strerror}). {remedy}")
    except UnicodeDecodeError as e:
        problems.append(f"{what} is not UTF-8 ({path}, byte {e.start}). save it as UTF-8")
    return ''


problems = out_of_range(knobs, above_zero='num_samples batch_size max_new_tokens top_k top_p',
                        from_zero='temperature seed')
if top_p is not None and top_p > 1:
    problems.append(f"top_p is out of range ({top_p}). use a number in (0, 1]")
if stop == '':
    problems.append("stop is empty. leave it out, or name a text")
if prompts is not None and 'start' in given:
    problems.append(f"two sources of prompts (--start={start} and --prompts={prompts}). give one of them")

chatting = not chat and start == '-' and prompts is None and sys.stdin.isatty()  # prompts come line by line
if chatting:
    texts = []
elif prompts is not None:
    texts = prompts_in(read(prompts, "the file of prompts", "name one with --prompts=PATH"))
    if not texts and not problems:
        problems.append(f"no prompt in the file ({prompts}). write one per line")
elif start.startswith('FILE:'):
    texts = [read(start[5:], "the prompt's file", "name one with --start=FILE:PATH")]
elif start == '-' or (chat and 'start' not in given and not sys.stdin.isatty()):
    text = read('-', "standard input", "give it a text, or use --start=TEXT")
    texts = [text.removesuffix('\n')]  # the one that echo adds
    if chat:  # a question per line
        texts = [line for line in text.split('\n') if line]
else:
    texts = [start]
talking = chat and prompts is None and 'start' not in given and sys.stdin.isatty()
if problems:
    fail(*problems)

# -----------------------------------------------------------------------------
# the model

device, _ = devices.choose_device(device)
shared_cpu.watch(device)
dtype, _ = devices.choose_dtype(dtype, device)
compiling, _ = devices.choose_compile(compile, device)

path = find(out_dir, hub=False) if init_from == 'resume' else init_from
model, tokenizer = model_and_tokenizer(path, dataset, data_dir)
stop_ids, stop_text = [], stop
if stop == END_OF_TEXT and tokenizer.stop_ids:
    stop_ids, stop_text = tokenizer.stop_ids, None


def new_samples(text):
    """num_samples samples that begin with `text`."""
    knob = '--start' if prompts is None else '--prompts'
    try:
        ids = tokenizer.encode_prompt(text)
        begin = ids or empty_prompt(tokenizer)
    except ValueError as e:
        if prompts is not None or chatting or 'start' in given:
            fail(f"the prompt cannot be encoded: {e}. use {knob} with other characters")
        ids, begin = [], empty_prompt(tokenizer)  # a vocabulary without a new line
    vocab_size = model.config.vocab_size
    if max(begin) >= vocab_size:
        fail(f"the prompt has the token id {max(begin)}, the model only {vocab_size} ids: it was trained "
             "with another tokenizer. name its dataset with --dataset=NAME")
    # a first token that the tokenizer adds by itself, such as Llama's <s>, is not shown
    first = ids[:1]
    hidden = first == [tokenizer.end_of_text] and not text.startswith(tokenizer.decode(first))
    return [Sample(begin, int(hidden), tokenizer, stop_ids, stop_text) for _ in range(num_samples)]


samples = [] if chat else [sample for text in texts for sample in new_samples(text)]
n_texts = min(len(samples) or (1 if chat else num_samples), batch_size)  # at once
model.to_inference(device, dtype, n_texts=n_texts, compiling=compiling)
generator = torch.Generator(device).manual_seed(seed)  # its own: the same seed gives the same text
static = False
# compiling takes half a minute or more and saves some milliseconds per step (estimated, not measured)
n_steps = len(samples) / batch_size * max_new_tokens
if compiling and (compile != 'auto' or chatting or n_steps > 10_000):
    idx = torch.zeros(n_texts, 1, dtype=torch.long, device=device)
    note = compile_model(model, lambda: model.generate(idx, 4, static=True), compile,
                         mode='reduce-overhead', dynamic=False)
    static = note is None
    say(note or 'compiled')

# -----------------------------------------------------------------------------
# generating

interrupted = False
# the latter does less bookkeeping: a tenth more tokens per second of a small model (dev/LOG.md)
without_gradients = torch.no_grad if static else torch.inference_mode


def on_interrupt(number, frame):
    """Ctrl-C ends the text after this token; a second one ends the script."""
    global interrupted
    interrupted = True
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def prompt_length(sample):
    return len(sample.ids)


def make_batches(samples):
    """Batches of up to batch_size samples with equally long prompts."""
    batches = []
    for _, group in itertools.groupby(sorted(samples, key=prompt_length), prompt_length):
        group = list(group)
        batches += [group[i:i + batch_size] for i in range(0, len(group), batch_size)]
    return batches


@without_gradients()
def generate(batch, live):
    """Continue the samples of a batch; live: print the only one while it is generated."""
    new_ids = []

    def on_token(ids):  # (B, 1)
        new_ids.append(ids)
        if live or stop_text:  # otherwise they are decoded at the end: reading them makes a GPU wait
            for sample, id in zip(batch, ids[:, 0].tolist()):
                sample.add(id)
        if live:
            print_new(batch[0])
        return interrupted or all(sample.done for sample in batch)

    idx = torch.tensor([sample.ids for sample in batch], device=device)  # (B, T)
    try:
        model.generate(idx, max_new_tokens, temperature, top_k, top_p, tokenizer.n_vocab, stop_ids or None,
                       generator, static=static, on_token=on_token)
    except FloatingPointError as e:
        say(f"error: {e} (in {dtype}). try --dtype=float32, else an older checkpoint")
        sys.exit(3)
    except RuntimeError as e:
        if 'memory' not in str(e):
            raise
        fail(f"not enough memory for {len(batch)} texts at once ({first_line(e)}). use a "
             "smaller --batch_size or --max_new_tokens")
    if not (live or stop_text):
        for sample, ids in zip(batch, torch.cat(new_ids, dim=1).tolist()):
            for id in ids:
                sample.add(id)
    for sample in batch:
        sample.finish()


def print_new(sample):
    text = sample.new_text()
    if sys.stdout.isatty():
        text = escape_control_characters(text)
    if sample.finished:
        text += '\n---------------\n'
    print(text, end='', flush=True)


def write(samples):
    """Generate and print the samples, in their order. After Ctrl-C: what there is of them."""
    global interrupted
    interrupted = False
    live = len(samples) == 1
    signal.signal(signal.SIGINT, on_interrupt)
    if live:
        print_new(samples[0])  # the prompt
    for batch in make_batches(samples):
        generate(batch, live)
        while samples and (samples[0].finished or interrupted):
            sample = samples.pop(0)
            if sample.finished:
                print_new(sample)
        if interrupted:
            break
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@without_gradients()
def continue_ids(ids, on_token):
    """Generate after `ids`, one token at a time; for a conversation."""
    global interrupted
    interrupted = False
    signal.signal(signal.SIGINT, on_interrupt)
    model.generate(torch.tensor([ids], device=device), max_new_tokens, temperature, top_k, top_p,
                   tokenizer.n_vocab, None, generator, static=static,
                   on_token=lambda new: interrupted or on_token(new))
    signal.signal(signal.SIGINT, signal.SIG_DFL)


if chat:
    session = Session(model, tokenizer, max_new_tokens, continue_ids)
    if talking:
        talk(session)
    else:
        answer_file(session, texts)
    sys.exit()
write(samples)
while chatting:
    print('> ', end='', flush=True)
    try:
        write(new_samples(input()))
    except EOFError:  # Ctrl-D
        break
    except SystemExit:  # the line cannot be encoded: fail() has said so
        continue
if interrupted:
    sys.exit(128 + signal.SIGINT)
