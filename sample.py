"""
Write text with a trained model. Everything needed, the tokenizer included, is in the checkpoint.

    $ python sample.py --out_dir=out-quickstart
    $ python sample.py --init_from=out/ckpt_best.pt --start="To be" --num_samples=3 --temperature=0
    $ python sample.py --init_from=gpt2-xl --start=FILE:prompt.txt
    $ python sample.py --out_dir=out-quickstart --start=- --num_samples=1 --stop=$'\\n\\n'
    $ python sample.py --out_dir=out-quickstart --prompts=prompts.txt --num_samples=1

A single sample appears as it is made. Ctrl-C ends it, and what is there stays.
"""

from configurator import configure, fail, out_of_range, quiet_when_cut_off

# -----------------------------------------------------------------------------
init_from = 'resume'  # 'resume': the checkpoint in out_dir; or the path of one; or a Hugging Face folder or name (gpt2, OWNER/NAME)
out_dir = 'out'  # ignored if init_from is not 'resume'
dataset: str = None  # whose tokenizer to use; None: the checkpoint's own (one of nanoGPT's names the folder in data/)
data_dir: str = None  # where the datasets lie. None: data/ beside this file
start = '\n'  # the prompt, or FILE:prompt.txt, or '-': standard input, line by line at a terminal; '<|endoftext|>' is that token where there is one
prompts: str = None  # a file with a prompt per line, instead of start; empty lines are passed over
num_samples = 10  # for each prompt
batch_size = 64  # how many samples are made at once: fewer take less memory
max_new_tokens = 500  # of each sample
temperature = 0.8  # 1: the model's own probabilities, below: less random, 0: always the likeliest token
top_k: int | None = 200  # draw from that many of the likeliest tokens. None: from all
top_p: float | None = None  # draw from the likeliest tokens that together have this probability. None: from all
stop: str = None  # end a sample at this text, such as '<|endoftext|>', and leave it out
seed = 1337
device = 'auto'  # 'cpu', 'cuda', 'cuda:1', 'mps'; auto: the GPU if there is one
dtype = 'auto'  # of the weights: 'float32', 'bfloat16', 'float16'; auto: bfloat16 where that is faster
compile: bool | str = 'auto'  # torch.compile the step of one token; auto: on GPUs, for more tokens than that takes
# -----------------------------------------------------------------------------
knobs, given = configure(globals())

import itertools
import signal
import sys
import unicodedata

signal.signal(signal.SIGINT, signal.SIG_DFL)  # as long as there is nothing to print, Ctrl-C just ends it
quiet_when_cut_off()

import torch

import checkpoint
from dataset import END_OF_TEXT, empty_prompt
from parallel import choose_compile, choose_device, choose_dtype, compile_model

sys.stdout.reconfigure(errors='replace')  # a model may produce what the console's encoding lacks


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


problems = out_of_range(knobs, above_zero='num_samples batch_size max_new_tokens top_k top_p', from_zero='temperature seed')
if top_p is not None and top_p > 1:
    problems.append(f"top_p is out of range ({top_p}). use a number in (0, 1]")
if stop == '':
    problems.append("stop is empty. leave it out, or name a text")
if prompts is not None and 'start' in given:
    problems.append(f"two sources of prompts (--start={start} and --prompts={prompts}). give one of them")
chatting = start == '-' and prompts is None and sys.stdin.isatty()  # line by line
if prompts is not None:
    texts = [line for line in read(prompts, "the file of prompts", "name one with --prompts=PATH").split('\n') if line]
    if not texts and not problems:
        problems.append(f"no prompt in the file ({prompts}). write one per line")
elif start.startswith('FILE:'):
    texts = [read(start[5:], "the prompt's file", "name one with --start=FILE:PATH")]
elif start == '-' and not chatting:
    texts = [read('-', "standard input", "give it a text, or use --start=TEXT").removesuffix('\n')]  # that of echo
else:
    texts = [start]
if problems:
    fail(*problems)
device, _ = choose_device(device)
asked, (dtype, _) = dtype, choose_dtype(dtype, device)
compiling, _ = choose_compile(compile, device)

path = checkpoint.find(out_dir, hub=False) if init_from == 'resume' else init_from
model, tokenizer = checkpoint.load(path, dataset, data_dir)
stop_ids = tokenizer.stop_ids if stop == END_OF_TEXT and tokenizer.stop_ids else []
stop_text = None if stop_ids else stop


def encode(text):
    """(ids, how many of them are not to be shown)"""
    try:
        ids = tokenizer.encode_prompt(text)
        begin = ids or empty_prompt(tokenizer)
    except ValueError as e:
        fail(f"the prompt cannot be encoded: {e}. use {'--prompts' if prompts else '--start'} with other characters")
    hidden = int(ids[:1] == [tokenizer.end_of_text] and not text.startswith(tokenizer.decode(ids[:1])))  # Llama's <s>
    if max(begin) >= model.config.vocab_size:
        fail(f"the prompt has the token id {max(begin)}, the model only {model.config.vocab_size} ids: it was trained with another tokenizer. name its dataset with --dataset=NAME")
    return begin, hidden


class Sample:
    """A text in the making: ids go in, text comes out."""

    def __init__(self, ids, hidden):
        self.ids, self.shown, self.done, self.finished = ids, ids[hidden:], False, False
        self.text = tokenizer.decode(self.shown)
        self.begin, self.printed = len(self.text), 0
        # shown[:b] is text already; what follows is decoded behind shown[a:b], as some tokenizers treat a beginning differently
        self.a, self.b = 0, len(self.shown)

    def add(self, id):
        """Take one more id."""
        self.done = self.done or id in stop_ids
        if not self.done:
            self.shown.append(id)
            self.decode()

    def decode(self, last=False):
        """Turn the ids into text, but no character that still lacks some of its bytes, unless no more will come."""
        before, now = tokenizer.decode(self.shown[self.a:self.b]), tokenizer.decode(self.shown[self.a:])
        if last or not now.endswith('\ufffd'):
            self.text += now[len(before):]
            self.a, self.b, self.finished = self.b, len(self.shown), last
            if stop_text and (at := self.text.find(stop_text, self.begin)) >= 0:
                self.text, self.done = self.text[:at], True

    def print(self):
        """Print what is new and certain: not what may be the beginning of the text to stop at."""
        end = len(self.text)
        if stop_text and not self.done and not self.finished:
            end -= max(n for n in range(len(stop_text)) if self.text.endswith(stop_text[:n], self.begin))
        text, self.printed = self.text[self.printed:end], max(end, self.printed)
        if sys.stdout.isatty():  # a model may produce control characters, and a terminal obeys them; letters need the two joiners
            text = ''.join(c if unicodedata.category(c)[0] != 'C' or c in '\n\t\u200c\u200d' else repr(c)[1:-1] for c in text)
        print(text + ('\n---------------\n' if self.finished else ''), end='', flush=True)


def on_interrupt(number, frame):
    """Ctrl-C ends the text after this token; a second one ends everything at once."""
    global interrupted
    interrupted = True
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def write(samples):
    """Continue the samples, those with equally long prompts together, and print them in their order; a single one as it is made."""
    global interrupted
    interrupted, single = False, len(samples) == 1
    signal.signal(signal.SIGINT, on_interrupt)
    groups = [list(group) for _, group in itertools.groupby(sorted(samples, key=prompt_length), prompt_length)]
    for batch in [group[i:i + batch_size] for group in groups for i in range(0, len(group), batch_size)]:
        made = []

        def on_token(ids):
            made.append(ids)
            if single or stop_text:  # else they stay where they are: a GPU would have to wait for the reader
                for sample, id in zip(batch, ids[:, 0].tolist()):
                    sample.add(id)
            if single:
                batch[0].print()
            return interrupted or all(sample.done for sample in batch)

        idx = torch.tensor([sample.ids for sample in batch], device=device)  # (B, T)
        if single:
            batch[0].print()
        try:
            model.generate(idx, max_new_tokens, temperature, top_k, top_p, tokenizer.n_vocab, stop_ids or None, generator, static=static, on_token=on_token)
        except RuntimeError as e:
            if 'memory' not in str(e):
                raise
            fail(f"not enough memory for {len(batch)} texts at once ({str(e).splitlines()[0][:120]}). use a smaller --batch_size or --max_new_tokens")
        if not (single or stop_text):
            for sample, ids in zip(batch, torch.cat(made, dim=1).tolist()):
                for id in ids:
                    sample.add(id)
        for sample in batch:
            sample.decode(last=True)
        while samples and (samples[0].finished or interrupted):
            sample = samples.pop(0)
            if sample.finished:
                sample.print()
        if interrupted:
            break
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def prompt_length(sample):
    return len(sample.ids)


samples = [Sample(*prompt) for prompt in map(encode, texts if not chatting else []) for _ in range(num_samples)]
if asked == 'auto' and device.type == 'cpu' and len(samples) <= 1 and model.get_num_params() < 30e6:
    dtype = 'float32'  # a small model with one text at a time is no faster in bfloat16 (dev/records/sample.md)
model.to_inference(device, dtype)
generator = torch.Generator(device).manual_seed(seed)  # of its own: the same seed gives the same text
static = False
# compiling takes half a minute or more, and saves some milliseconds per step (an estimate, not measured)
if compiling and (compile is True or chatting or len(samples) / batch_size * max_new_tokens > 10_000):
    idx = torch.zeros(1 if chatting else min(len(samples), batch_size), 1, dtype=torch.long, device=device)
    note = compile_model(model, lambda: model.generate(idx, 4, static=True), compile, mode='reduce-overhead', dynamic=False)
    static = note is None
    print(note or 'compiled', file=sys.stderr)

write(samples)
while chatting:
    print('> ', end='', flush=True)
    try:
        prompt = encode(input())
        write([Sample(*prompt) for _ in range(num_samples)])
    except EOFError:
        break
    except SystemExit:
        continue  # it cannot be encoded; its line was printed
if interrupted:
    sys.exit(128 + signal.SIGINT)
