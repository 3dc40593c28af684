"""
Write a checkpoint as a Hugging Face folder, which transformers and what builds on it open.

    $ pip install safetensors huggingface_hub tokenizers
    $ python export.py --out_dir=out --to=out-hf
    $ python export.py --init_from=out/ckpt_best.pt --to=out-hf --dtype=bfloat16
    $ hf upload OWNER/NAME out-hf

The other way needs no export: --init_from=FOLDER_OR_NAME in train.py and sample.py reads such a folder, or a
model on the Hub.
"""

from configurator import InputError, configure

# -----------------------------------------------------------------------------
init_from = 'resume'  # the run in out_dir; or a run's folder, a checkpoint, a Hugging Face folder or name
out_dir = 'out'  # for init_from='resume'
to: str = None  # the folder to write, which must not exist, or be empty
dtype = 'float32'  # of the weights; 'bfloat16', 'float16': half the size
dataset: str = None  # whose tokenizer to write. None: the checkpoint's own; nanoGPT's have none
data_dir: str = None  # None: data/ beside this file
# -----------------------------------------------------------------------------
config, given = configure(globals())

import importlib.util
import os
import tempfile

import torch

import checkpoint
import huggingface
from conversations import chat_format
from tokenizer import make_tokenizer


if not to:
    raise InputError("nowhere to write. name a folder: --to=FOLDER")
if dtype not in ('float32', 'bfloat16', 'float16'):
    raise InputError(f"no such dtype ({dtype}). use --dtype=float32, bfloat16 or float16")
if os.path.exists(to) and (not os.path.isdir(to) or os.listdir(to)):
    raise InputError(f"{to} is there already, and not empty. name another folder with --to, or remove it")

try:
    ckpt = checkpoint.read(checkpoint.find(out_dir if init_from == 'resume' else init_from))
    tokenizer = make_tokenizer(checkpoint.tokenizer_state_of(ckpt, dataset, data_dir))
except ValueError as e:
    raise InputError(str(e))
model = checkpoint.build_model(ckpt).eval()
n_params = model.get_num_params(non_embedding=False)
chat = chat_format(tokenizer)  # None: it continues texts, and answers no questions
prompt = 'The '
if chat:
    prompt = [{'role': 'user', 'content': 'Hello'}]
has_transformers = importlib.util.find_spec('transformers') is not None
parent, name = os.path.split(os.path.abspath(to))

card = f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A language model, not trained to avoid harm. License: not chosen yet; whoever publishes it chooses one.

| | |
|---|---|
| parameters | {n_params:,} |
| dataset | {ckpt['config'].get('dataset', 'unknown')} |
| iterations | {ckpt['iter_num']:,} |
| best validation loss | {ckpt['best_val_loss']:.4f} |

```python
from transformers import pipeline
generate = pipeline('text-generation', '{name}')
print(generate({prompt!r}, max_new_tokens=50)[0]['generated_text'])
```
"""


def check_folder(folder):
    """ValueError if transformers' network has other logits with what was written than model.py, which may
    have been edited."""
    import transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, ignore_mismatched_sizes=True)
    theirs = theirs.float().eval()
    ours = checkpoint.build_model(checkpoint.read(folder)).eval()
    idx = torch.arange(min(1024, ours.config.block_size))[None] % ours.config.vocab_size  # (1, T)
    with torch.no_grad():
        wanted = theirs(idx).logits
        logits, _ = ours(idx, idx)
    difference = ((logits - wanted).abs().max() / wanted.abs().max()).item()
    if not difference < 1e-3:
        raise InputError(f"transformers' {type(theirs).__name__} computes something else than model.py: "
                         f"logits differ by {difference:.1%}. undo the edits of model.py")


try:
    os.makedirs(parent, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix='.' + name, dir=parent) as temporary:
        folder = os.path.join(temporary, name)  # complete before it gets its name
        kind = huggingface.write_folder(folder, model.state_dict(), model.config, tokenizer, dtype, chat,
                                        card)
        if has_transformers:
            check_folder(folder)
        os.replace(folder, os.path.join(parent, name))
except ValueError as e:
    raise InputError(f"{ckpt['path']} cannot be exported: {e}")
except ImportError as e:
    raise InputError(f"a package is needed that is not installed ({e.name}). pip install safetensors huggingface_hub "
          "tokenizers")
except OSError as e:
    raise InputError(f"{to} cannot be written ({e}). make room, or name another folder with --to")

compared = "the same logits in transformers" if has_transformers else "not compared: pip install transformers"
print(f"{to}: {kind}, {n_params / 1e6:.2f}M parameters in {dtype}; {compared}")
chat_flag = ' --chat' if chat else ''
print(f"sample: python sample.py --init_from={to}{chat_flag}; publish: hf upload OWNER/NAME {to}")
