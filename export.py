"""
Write a checkpoint as a Hugging Face folder, which transformers and what builds on it open.

    $ python export.py --out_dir=out --to=out-hf
    $ python export.py --init_from=out/ckpt_best.pt --to=out-hf --dtype=bfloat16

The other way needs no export: --init_from=FOLDER_OR_NAME in train.py and sample.py reads such a folder, or a
model on the Hub.
"""

from typing import Literal

from configurator import configure, fail, out_of_range

# -----------------------------------------------------------------------------
# 'resume': the checkpoint in out_dir; or the path of a checkpoint; or a Hugging Face folder or name
init_from = 'resume'
out_dir = 'out'  # ignored if init_from is not 'resume'
to: str = None  # the folder to write; it must not exist, or be empty
dtype: Literal['float32', 'bfloat16', 'float16'] = 'float32'  # of the weights
shard_gb = 5.0  # the largest file, in 10^9 bytes
# whose tokenizer to write. None: the checkpoint's own; one of nanoGPT's names the folder in data_dir
dataset: str = None
data_dir: str = None  # the folder of the datasets. None: data/ beside this file
# -----------------------------------------------------------------------------
knobs, given = configure(globals())

import os
import tempfile

from support.lasting_output import make_output_last

make_output_last()

problems = out_of_range(knobs, above_zero='shard_gb')
if not to:
    problems.append("nowhere to write. name a folder: --to=FOLDER")
elif os.path.isdir(to) and os.listdir(to):
    problems.append(f"{to} is not empty. name another folder, or remove it")
elif os.path.exists(to) and not os.path.isdir(to):
    problems.append(f"{to} is a file. name another folder, or remove it")
if problems:
    fail(*problems)

try:
    import huggingface_hub, safetensors, tokenizers  # now, not after a long time of reading weights
except ImportError as e:
    fail(f"to export, a package is needed that is not installed ({e.name}). pip install safetensors "
         "huggingface_hub tokenizers")
import torch

from support import huggingface, load

state = load.read(load.find(out_dir, hub=False) if init_from == 'resume' else load.find(init_from))
config = load.model_config(state)
tokenizer_state = load.tokenizer_state(state, dataset, data_dir)

parent, name = os.path.split(os.path.abspath(to))
try:
    os.makedirs(parent, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix='.' + name, dir=parent) as temporary:
        folder = os.path.join(temporary, name)  # under its final name when it is complete
        kind = huggingface.write(folder, state['model'], config, tokenizer_state, dtype, shard_gb)
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
except ValueError as e:
    fail(f"{state['path']} cannot be exported: {e}. train with one of the presets: --arch=gpt2, llama or "
         "modern")
except OSError as e:
    fail(f"cannot write {to} ({e.strerror or e}). make room, or use --to=ANOTHER")

size = sum(os.path.getsize(os.path.join(to, file)) for file in os.listdir(to))
n = sum(p.numel() for p in back.values())
print(f"{to}: {kind}, {n / 1e6:.2f}M numbers in {dtype}, {size / 1e6:.1f} MB; read back, identical")
print("open it: python -c \"from transformers import pipeline; print(pipeline('text-generation', "
      f"'{to}')('The ', max_new_tokens=50)[0]['generated_text'])\"")
print(f"train on: python train.py --init_from={to} --dataset=...; sample: python sample.py --init_from={to}")
