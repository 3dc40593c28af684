"""
Write a checkpoint as a Hugging Face folder, which transformers and what builds on it open.

    $ python export.py --out_dir=out --to=out-hf
    $ python export.py --init_from=out/ckpt_best.pt --to=out-hf --dtype=bfloat16

The other way needs no export: --init_from=FOLDER_OR_NAME in train.py and sample.py reads such a folder, or a model on the Hub.
"""

from configurator import configure, fail, out_of_range

# -----------------------------------------------------------------------------
init_from = 'resume'  # 'resume': the checkpoint in out_dir; or the path of one; or a Hugging Face folder or name
out_dir = 'out'  # ignored if init_from is not 'resume'
to: str = None  # the folder to write; it must not exist, or be empty
dtype = 'float32'  # 'float32', 'bfloat16', 'float16' of the weights
shard_gb = 5.0  # the largest file, in 10^9 bytes
dataset: str = None  # whose tokenizer to write; None: the checkpoint's own (one of nanoGPT's names the folder in data/)
data_dir: str = None  # where the datasets lie. None: data/ beside this file
# -----------------------------------------------------------------------------
knobs, given = configure(globals())

import os
import shutil
import tempfile

problems = out_of_range(knobs, above_zero='shard_gb', words=dict(dtype='float32 bfloat16 float16'))
if not to:
    problems.append("nowhere to write. name a folder: --to=FOLDER")
elif os.path.exists(to) and (not os.path.isdir(to) or os.listdir(to)):
    problems.append(f"{to} is {'not empty' if os.path.isdir(to) else 'a file'}. name another folder, or remove it")
if problems:
    fail(*problems)

try:
    import huggingface_hub, safetensors, tokenizers  # now, not after a long time of reading weights
except ImportError as e:
    fail(f"to export, a package is needed that is not installed ({e.name}). pip install safetensors huggingface_hub tokenizers")
import torch

import checkpoint
import huggingface

state = checkpoint.read(checkpoint.find(out_dir, hub=False) if init_from == 'resume' else checkpoint.find(init_from))
config = checkpoint.model_config(state)
tokenizer_state = checkpoint.tokenizer_state(state, dataset, data_dir)
to_path = os.path.abspath(to)
part = None
try:
    os.makedirs(os.path.dirname(to_path), exist_ok=True)
    part = tempfile.mkdtemp(prefix='.' + os.path.basename(to_path), dir=os.path.dirname(to_path))  # under its own name when it is whole
    huggingface.write(part, state['model'], config, tokenizer_state, dtype, shard_gb)
    back = huggingface.read(part)  # what was written must be what was meant
    for name, p in state['model'].items():
        if not name.endswith('.attn.bias') and not torch.equal(back['model'].get(name, p[:0]), p.to(getattr(torch, dtype))):
            fail(f"{name} came out different. please report this with your checkpoint's model_args: {state['model_args']}")
    if os.path.isdir(to_path):
        os.rmdir(to_path)
    os.chmod(part, 0o755)  # mkdtemp's are the owner's alone
    os.replace(part, to_path)
except ValueError as e:
    fail(f"{state['path']} cannot be exported: {e}. train with one of the presets: --arch=gpt2, llama or modern")
except OSError as e:
    fail(f"cannot write {to} ({e.strerror or e}). make room, or use --to=ANOTHER")
finally:
    shutil.rmtree(part or '', ignore_errors=True)

size = sum(os.path.getsize(os.path.join(to, name)) for name in os.listdir(to))
print(f"{to}: {huggingface.to_config(config)[0]['architectures'][0]}, {sum(p.numel() for p in back['model'].values()) / 1e6:.2f}M numbers in {dtype}, "
      f"{size / 1e6:.1f} MB; read back, identical")
print(f"open it: python -c \"from transformers import pipeline; print(pipeline('text-generation', '{to}')('The ', max_new_tokens=50)[0]['generated_text'])\"")
print(f"train on: python train.py --init_from={to} --dataset=...; sample: python sample.py --init_from={to}")
