"""
Write a checkpoint as a Hugging Face folder, which transformers and what builds on it open, or as a GGUF
file for llama.cpp.

    $ python export.py --out_dir=out --to=out-hf
    $ python export.py --init_from=out/ckpt_best.pt --to=out-hf --dtype=bfloat16
    $ python export.py --out_dir=out --to=out-hf --push=OWNER/NAME --dry_run
    $ python export.py --out_dir=out --to=model.gguf --gguf_dtype=q8_0

The other way needs no export: --init_from=FOLDER_OR_NAME in train.py and sample.py reads such a folder, or a
model on the Hub.
"""

from typing import Literal

from configurator import configure, fail, out_of_range

# -----------------------------------------------------------------------------
# 'resume': the checkpoint in out_dir; or the path of a checkpoint; or a Hugging Face folder or name
init_from = 'resume'
out_dir = 'out'  # ignored if init_from is not 'resume'
to: str = None  # the folder to write, which must not exist, or be empty; or a file NAME.gguf
dtype: Literal['float32', 'bfloat16', 'float16'] = 'float32'  # of the weights in a folder
gguf_dtype: Literal['f32', 'f16', 'bf16', 'q8_0'] = 'f16'  # of the matrices in a GGUF file
shard_gb = 5.0  # the largest file of a folder, in 10^9 bytes
push: str = None  # upload the folder to this repository of the Hub, OWNER/NAME; a new one is private
dry_run = False  # True: print what push would upload, and do not
# whose tokenizer to write. None: the checkpoint's own; one of nanoGPT's names the folder in data_dir
dataset: str = None
data_dir: str = None  # the folder of the datasets. None: data/ beside this file
# -----------------------------------------------------------------------------
knobs, given = configure(globals())

import importlib.util
import os
import tempfile

from support.console import make_output_last

make_output_last()

problems = out_of_range(knobs, above_zero='shard_gb')
is_gguf = bool(to) and to.endswith('.gguf')
if not to:
    problems.append("nowhere to write. name a folder: --to=FOLDER, or a file: --to=NAME.gguf")
elif is_gguf:
    if os.path.exists(to):
        problems.append(f"{to} is there already. name another file with --to, or remove it")
elif os.path.isdir(to) and os.listdir(to):
    problems.append(f"{to} is not empty. name another folder, or remove it")
elif os.path.exists(to) and not os.path.isdir(to):
    problems.append(f"{to} is a file. name another folder, or remove it")
if is_gguf and push:
    problems.append(f"only folders are uploaded (--push={push}). hf upload {push} {to}")
if is_gguf and 'dtype' in given:
    problems.append(f"dtype is that of a folder (--dtype={dtype}). for a GGUF file use --gguf_dtype=f32, "
                    "f16, bf16 or q8_0")
if not is_gguf and 'gguf_dtype' in given:
    problems.append(f"gguf_dtype is that of a GGUF file (--to={to}). for a folder use --dtype, or name a "
                    "file with --to=NAME.gguf")
packages = ['gguf'] if is_gguf else ['safetensors', 'huggingface_hub', 'tokenizers']
missing = [name for name in packages if importlib.util.find_spec(name) is None]  # said before the long work
if missing:
    problems.append(f"to export, a package is needed that is not installed ({missing[0]}). pip install "
                    f"{' '.join(packages)}")
if problems:
    fail(*problems)

import torch

from support import load
from support.model_card import model_card, n_parameters

if push:
    from support import hf_push
    if wrong := hf_push.check(push):
        fail(*wrong)
    if not dry_run:
        hf_push.log_in()
state = load.read(load.find(out_dir, hub=False) if init_from == 'resume' else load.find(init_from))
config = load.model_config(state)
tokenizer_state = load.tokenizer_state(state, dataset, data_dir)
parent, name = os.path.split(os.path.abspath(to))
n_params = f"{n_parameters(state['model'], config) / 1e6:.2f}M parameters"


def write_folder():
    """A Hugging Face folder, complete before it gets its name."""
    from support import huggingface
    card = model_card(push or name, state, config, tokenizer_state, dtype)
    with tempfile.TemporaryDirectory(prefix='.' + name, dir=parent) as temporary:
        folder = os.path.join(temporary, name)
        kind = huggingface.write(folder, state['model'], config, tokenizer_state, dtype, shard_gb, card)
        back = huggingface.read(folder)['model']  # what was written must be what was meant
        for key, p in state['model'].items():
            if key.endswith('.attn.bias'):  # nanoGPT's early checkpoints: the causal mask
                continue
            if key not in back or not torch.equal(back[key], p.to(getattr(torch, dtype))):
                fail(f"{key} came out different. please report this with your checkpoint's model_args: "
                     f"{state['model_args']}")
        if os.path.isdir(to):
            os.rmdir(to)
        os.replace(folder, os.path.join(parent, name))
    size = sum(os.path.getsize(os.path.join(to, file)) for file in os.listdir(to))
    print(f"{to}: {kind}, {n_params} in {dtype}, {size / 1e6:.1f} MB; read back, identical")
    print("open it: python -c \"from transformers import pipeline; print(pipeline('text-generation', "
          f"'{to}')('The ', max_new_tokens=50)[0]['generated_text'])\"")
    print(f"train on: python train.py --init_from={to} --dataset=...; sample: python sample.py "
          f"--init_from={to}")


def write_gguf():
    """A GGUF file, complete before it gets its name."""
    from support import gguf_file
    with tempfile.TemporaryDirectory(prefix='.' + name, dir=parent) as temporary:
        path = os.path.join(temporary, name)
        arch = gguf_file.write(path, state['model'], config, tokenizer_state, gguf_dtype,
                               name.removesuffix('.gguf'))
        os.replace(path, to)
    if arch == 'gpt2' and config.mlp == 'gelu':
        print(gguf_file.GELU_NOTE)
    size = os.path.getsize(to)
    print(f"{to}: {arch}, {n_params} in {gguf_dtype}, {size / 1e6:.1f} MB; read back, the same")
    print(f"open it: llama-cli -m {to} -no-cnv -n 50 -p 'The '")


try:
    os.makedirs(parent, exist_ok=True)
    if is_gguf:
        write_gguf()
    else:
        write_folder()
except ValueError as e:
    fail(f"{state['path']} cannot be exported: {e}")
except OSError as e:
    fail(f"cannot write {to} ({e.strerror or e}). make room, or use --to=ANOTHER")

if push and dry_run:
    print(f"dry run: to {push} would be uploaded", *hf_push.listing(to), sep='\n')
elif push:
    print(f"uploaded to {hf_push.push(to, push)}; a new repository is private until you change that there")
