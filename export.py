"""
Write a checkpoint as a Hugging Face folder, which transformers and what builds on it open, or as a GGUF
file for llama.cpp.

    $ python export.py --out_dir=out --to=out-hf
    $ python export.py --init_from=out/ckpt_best.pt --to=out-hf --dtype=bfloat16
    $ python export.py --out_dir=out --to=out-hf && hf upload OWNER/NAME out-hf
    $ python export.py --out_dir=out --to=model.gguf --dtype=q8_0

The other way needs no export: --init_from=FOLDER_OR_NAME in train.py and sample.py reads such a folder, or a
model on the Hub.
"""

from typing import Literal

from configurator import configure, fail

# -----------------------------------------------------------------------------
# 'resume': the checkpoint in out_dir; or the path of a checkpoint; or a Hugging Face folder or name
init_from = 'resume'
out_dir = 'out'  # ignored if init_from is not 'resume'
to: str = None  # the folder to write, which must not exist, or be empty; or a file NAME.gguf
dtype: Literal['float32', 'bfloat16', 'float16', 'q8_0'] = 'float32'  # of the weights; q8_0: in GGUF files
# whose tokenizer to write. None: the checkpoint's own; one of nanoGPT's names the folder in data_dir
dataset: str = None
data_dir: str = None  # the folder of the datasets. None: data/ beside this file
# -----------------------------------------------------------------------------
knobs, given = configure(globals())

import glob
import importlib.util
import os
import shlex
import tempfile

from support.console import make_output_last

make_output_last()

if not to:
    fail("nowhere to write. name a folder: --to=FOLDER, or a file: --to=NAME.gguf")
is_gguf = to.endswith('.gguf')
if os.path.exists(to) and (not os.path.isdir(to) or os.listdir(to)):
    fail(f"{to} is there already, and not empty. name another one with --to, or remove it")
if dtype == 'q8_0' and not is_gguf:
    fail("a folder cannot hold dtype=q8_0. use --dtype=bfloat16, or --to=NAME.gguf")

import torch

from model import GPT
from support import gguf, hf_export, huggingface, load
from support.chat import chat_format
from support.tokenizer import make_tokenizer

ckpt = load.read(load.find(out_dir if init_from == 'resume' else init_from, hub=init_from != 'resume'))
model = load.build(GPT, ckpt, ckpt['model_args'].get('dropout', 0.0))
config, weights = model.config, model.state_dict()
tokenizer_state = load.tokenizer_state(ckpt, dataset, data_dir)
answers = chat_format(make_tokenizer(tokenizer_state)) is not None  # a question, or a text to continue
prompt = [{'role': 'user', 'content': 'Hello'}] if answers else 'The '
parent, name = os.path.split(os.path.abspath(to))
n_params = model.get_num_params(non_embedding=False)


def write_folder(path):
    """Write a Hugging Face folder; returns its class in transformers."""
    kind = hf_export.write(path, weights, config, tokenizer_state, dtype,
                           hf_export.model_card(name, ckpt, n_params, prompt))
    back = huggingface.read(path)  # what was written must be what was meant
    for key, p in weights.items():
        p = p.to(getattr(torch, dtype))
        # biases that are all 0 are left out
        if not torch.equal(back['model'].get(key, torch.zeros_like(p)), p):
            raise ValueError(f"{key} came out different. please report this")
    if importlib.util.find_spec('transformers'):
        check_logits(path, load.build(GPT, back).eval())
    return kind


def check_logits(path, model):
    """model.py may be yours by now: transformers' network must give the same logits."""
    import transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path, ignore_mismatched_sizes=True).float().eval()  # of another size: other logits
    idx = torch.arange(min(1024, config.block_size))[None] % config.vocab_size
    with torch.no_grad():
        logits = theirs(idx).logits
        difference = ((model(idx, full_logits=True)[0] - logits).abs().max() / logits.abs().max()).item()
    if not difference < 1e-3:
        raise ValueError(f"transformers' {type(theirs).__name__} computes something else than model.py: "
                         f"logits differ by {difference:.1%}. has model.py been edited?")


try:
    os.makedirs(parent, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix='.' + name, dir=parent) as temporary:
        path = os.path.join(temporary, name)  # complete before it gets its name
        if is_gguf:
            kind = gguf.write(path, weights, config, tokenizer_state, dtype, name.removesuffix('.gguf'))
        else:
            kind = write_folder(path)
        size = sum(map(os.path.getsize, [path] if is_gguf else glob.glob(os.path.join(path, '*'))))
        if os.path.isdir(to):
            os.rmdir(to)
        os.replace(path, os.path.join(parent, name))
except ValueError as e:
    fail(f"{ckpt['path']} cannot be exported: {e}")
except ImportError as e:
    fail(f"to export, a package is needed that is not installed ({e}). pip install tokenizers "
         "safetensors huggingface_hub gguf")
except OSError as e:
    fail(f"cannot write {to} ({e.strerror or e}). make room, or use --to=ANOTHER")
print(f"{to}: {kind}, {n_params / 1e6:.2f}M parameters in {dtype}, {size / 1e6:.1f} MB"
      + ('' if is_gguf else "; read back, identical"))
path = shlex.quote(to)
if is_gguf:
    print(f"open it: llama-cli -m {path}" + ('' if answers else " -no-cnv -n 50 -p 'The '"))
else:
    print(f"open it: python -c \"from transformers import pipeline; print(pipeline('text-generation', {to!r})"
          f"({prompt!r}, max_new_tokens=50)[0]['generated_text'])\"")
    print(f"train on: python train.py --init_from={path} --dataset=...; sample: python sample.py "
          f"--init_from={path}{' --chat' if answers else ''}; publish: hf upload OWNER/NAME {path}")
