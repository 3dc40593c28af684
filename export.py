"""
Write a checkpoint as a Hugging Face folder, for transformers and other programs that open such folders.

    $ pip install safetensors huggingface_hub tokenizers
    $ python export.py --out_dir=out --to=out-hf
    $ python export.py --init_from=out/ckpt_best.pt --to=out-hf --dtype=bfloat16
    $ hf upload OWNER/NAME out-hf

For the other direction, --init_from=FOLDER_OR_NAME of train.py and sample.py reads such a folder, or a model
on the Hub.
"""

from configurator import InputError, check_choice, configure

# -----------------------------------------------------------------------------
init_from = 'resume'  # the run in out_dir; or a run's folder, a checkpoint, a Hugging Face folder or name
out_dir = 'out'  # for init_from='resume'
to: str = None  # the folder to write, which must not exist, or be empty
dtype = 'float32'  # of the weights; 'bfloat16', 'float16': half the size
dataset: str = None  # whose tokenizer to write. None: the checkpoint's own; nanoGPT's have none
data_dir: str = None  # None: data/ next to this file
# -----------------------------------------------------------------------------
config, given = configure(globals())
check_choice(config, 'dtype', ['float32', 'bfloat16', 'float16'])

import importlib.util
import os
import tempfile

import torch

import checkpoint
import huggingface
from conversations import chat_format
from tokenizer import import_package, make_tokenizer

if not to:
    raise InputError("the folder to write is missing. Use --to=FOLDER.")
if os.path.exists(to) and (not os.path.isdir(to) or os.listdir(to)):
    raise InputError(f"{to} exists and is not empty. Choose another folder with --to, or remove it.")
for package in ['safetensors', 'huggingface_hub', 'tokenizers']:
    import_package(package)

ckpt = checkpoint.read(checkpoint.find(out_dir if init_from == 'resume' else init_from))
tokenizer = make_tokenizer(checkpoint.tokenizer_state_of(ckpt, dataset, data_dir))
model = checkpoint.build_model(ckpt).eval()
n_params = model.get_num_params(non_embedding=False)
chat = chat_format(tokenizer)  # None unless the model was finetuned on conversations
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

A language model that was not trained to avoid harm. License: to be chosen by its publisher.

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
    """Raise InputError if the model in `folder` has other logits in transformers than in model.py, which may
    have been edited."""
    import transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, ignore_mismatched_sizes=True)
    theirs = theirs.float().eval()
    ours = checkpoint.build_model(checkpoint.read(folder)).eval()
    idx = torch.arange(min(1024, ours.config.block_size))[None] % ours.config.vocab_size  # (1, T)
    with torch.no_grad():
        expected = theirs(idx).logits
        logits, _ = ours(idx, idx)
    difference = ((logits - expected).abs().max() / expected.abs().max()).item()
    if not difference < 1e-3:
        raise InputError(f"{ckpt['path']} cannot be exported: its logits differ by {difference:.1%} from "
                         f"those of transformers' {type(theirs).__name__}. Undo the edits of model.py.")


try:
    os.makedirs(parent, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix='.' + name, dir=parent) as temporary:
        folder = os.path.join(temporary, name)  # complete before it gets its name
        kind = huggingface.write_folder(folder, model.state_dict(), model.config, tokenizer, dtype, chat,
                                        card)
        if has_transformers:
            check_folder(folder)
        os.replace(folder, os.path.join(parent, name))
except OSError as e:
    raise InputError(f"{to} cannot be written: {e}. Make room, or choose another folder with --to.") from e

compared = "the same logits in transformers" if has_transformers else "not compared: pip install transformers"
print(f"{to}: {kind}, {n_params / 1e6:.2f}M parameters in {dtype}; {compared}")
chat_flag = ' --chat' if chat else ''
print(f"to sample: python sample.py --init_from={to}{chat_flag}; to publish: hf upload OWNER/NAME {to}")
