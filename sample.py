"""
Generate text with a trained model. The checkpoint has all that is needed, the tokenizer included.

    $ python sample.py out-quickstart
    $ python sample.py --init_from=out/ckpt_best.pt --start="To be" --num_samples=3 --temperature=0
    $ python sample.py --out_dir=out-quickstart --start=- --num_samples=1 --stop=$'\\n\\n'
    $ python sample.py --out_dir=out-chat --chat

A single sample is printed while it is generated. Ctrl-C ends it and keeps the text.
"""

from configurator import configure, escape_control_characters, fail, out_of_range, say

# -----------------------------------------------------------------------------
init_from = 'resume'  # the checkpoint in out_dir; or PATH of one; or a Hugging Face folder or name
out_dir = 'out'  # the run's folder, if init_from is 'resume'
dataset: str = None  # whose tokenizer to use. None: the checkpoint's (nanoGPT's checkpoints name a dataset)
data_dir: str = None  # the folder with the datasets. None: data/ beside this file
start = ''  # the prompt, '<|endoftext|>' in it is that token. '': where a text begins; FILE:PATH; '-': stdin
chat = False  # True: a conversation, with a model that was finetuned on some (config/finetune_chat.py)
prompts: str = None  # in place of start: a file with a prompt per line (not empty); \n in it is a new line
num_samples = 10  # for each prompt
batch_size = 64  # samples generated at once; fewer need less memory
max_new_tokens = 500  # per sample
temperature = 0.8  # 1: the model's own probabilities; lower: less random; 0: always the most likely token
top_k: int | None = 200  # sample from that many most likely tokens. None: from all
top_p: float | None = None  # sample from the most likely tokens with this total probability. None, 1: all
stop: str = None  # end a sample at this text, and leave it out; where the model ends its text it ends anyway
seed = 1337
device = 'auto'  # 'cpu', 'cuda', 'cuda:1', 'mps'; auto: a GPU if there is one
dtype = 'auto'  # of the weights: 'float32', 'bfloat16', 'float16'
compile: bool | str = False  # torch.compile the step of one token; 'auto': on GPUs, if it works
# -----------------------------------------------------------------------------
knobs, given = configure(globals(), positional='out_dir')

import itertools
import signal
import sys
import time

from support.console import exit_on_broken_pipe

signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is something to print, Ctrl-C just ends the script
exit_on_broken_pipe()

import torch

from model import GPT
from support import cpu, devices
from support.compiling import compile_model
from support.errors import explain
from support.load import find, model_and_tokenizer
from support.samples import Session, answer_file, begin, prompts_in, read_text, talk

sys.stdout.reconfigure(errors='replace')  # the console's encoding may lack what a model writes

# -----------------------------------------------------------------------------
# the prompts

if problems := out_of_range(knobs, above_zero='num_samples batch_size max_new_tokens top_k top_p',
                            from_zero='temperature seed'):
    fail(*problems)

if prompts:
    texts = prompts_in(prompts)
elif start == '-':
    texts = [read_text('-').removesuffix('\n')]  # the one that echo adds
else:
    texts = [read_text(start[5:]) if start.startswith('FILE:') else start]

# -----------------------------------------------------------------------------
# the model

device, _ = devices.choose_device(device)
cpu.watch(device)
dtype, _ = devices.choose_dtype(dtype, device)
compiling, _ = devices.choose_compile(compile, device)

source = find(out_dir, hub=False) if init_from == 'resume' else init_from
model, tokenizer = model_and_tokenizer(GPT, source, dataset, data_dir)

try:
    samples = [begin(text, tokenizer, stop) for text in texts for _ in range(num_samples)]
except ValueError as e:
    fail(f"a prompt cannot be encoded: {e}. use --{'prompts' if prompts else 'start'} with other ones")
if any(max(sample.ids) >= model.config.vocab_size for sample in samples):
    fail(f"a prompt has ids beyond the {model.config.vocab_size} of the model: it was trained with another "
         "tokenizer. name its dataset with --dataset=NAME")
cpu.to_inference(model, device, dtype, compiling)
generator = torch.Generator(device).manual_seed(seed)  # its own: the same seed gives the same text
explain('memory', 'not enough memory', "use a smaller --batch_size or --max_new_tokens", 2)
static = False
if compiling:
    # as many texts as there will be at once, and about as long: the step is compiled for a length of the
    # cache, in steps of 128
    idx = torch.zeros(1 if chat else min(len(samples), batch_size), max_new_tokens,
                      dtype=torch.long, device=device)
    note = compile_model(model, lambda: model.generate(idx, 4, static=True), compile,
                         mode='reduce-overhead', dynamic=False)
    static = note is None
    say(note or 'compiled')

# -----------------------------------------------------------------------------
# generating

interrupted = False


def on_interrupt(number, frame):
    """Ctrl-C ends the text after this token; a second one ends the script."""
    global interrupted
    interrupted = True
    signal.signal(signal.SIGINT, signal.SIG_DFL)


# the latter does less bookkeeping: a tenth more tokens per second of a small model (dev/LOG.md, 2026-11-22)
@(torch.no_grad if static else torch.inference_mode)()
def generate(ids, on_token):
    """Continue equally long lists of ids until on_token(the next ids, (B, 1)) is True, or Ctrl-C. Returns the
    number of steps."""
    global interrupted
    interrupted = False
    signal.signal(signal.SIGINT, on_interrupt)
    try:
        out = model.generate(torch.tensor(ids, device=device), max_new_tokens, temperature, top_k, top_p,
                             tokenizer.n_vocab, generator=generator, static=static,
                             on_token=lambda new: on_token(new) or interrupted)
    except FloatingPointError as e:
        say(f"error: {e} (in {dtype}). try --dtype=float32, else an older checkpoint")
        sys.exit(3)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return out.size(1) - len(ids[0])


def print_new(sample):
    text = sample.new_text()
    if sys.stdout.isatty():
        text = escape_control_characters(text)
    print(text, end='\n---------------\n' if sample.finished else '', flush=True)


if chat:
    session = Session(model, tokenizer, max_new_tokens, lambda ids, on_token: generate([ids], on_token))
    answer_file(session, texts) if prompts or 'start' in given else talk(session)
    sys.exit()

live = len(samples) == 1  # a single one is printed while it is generated
if live:
    print_new(samples[0])  # the prompt
steps, t0 = 0, time.perf_counter()
made = -sum(len(sample.shown) for sample in samples)  # without the prompts
while samples and not interrupted:  # after Ctrl-C: what there is of a batch
    length = len(samples[0].ids)
    batch = list(itertools.takewhile(lambda sample: len(sample.ids) == length, samples[:batch_size]))
    samples = samples[len(batch):]

    def on_token(ids):
        for sample, id in zip(batch, ids[:, 0].tolist()):
            sample.add(id)
        if live:
            print_new(batch[0])
        return all(sample.done for sample in batch)

    steps += generate([sample.ids for sample in batch], on_token)
    for sample in batch:
        sample.finish()
        print_new(sample)
        made += len(sample.shown)
if interrupted:
    sys.exit(128 + signal.SIGINT)
seconds = time.perf_counter() - t0
# of the embeddings a step reads a row of each text
weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
read = steps * weights * getattr(torch, dtype).itemsize
say(f"{source}: {made:,} tokens, {made / seconds:,.0f} per second, "
    f"{read / seconds / 1e9:.2f} GB/s of weights read")
