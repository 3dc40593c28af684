"""
Write a checkpoint as a Hugging Face folder, which transformers and other programs read.

    $ pip install safetensors huggingface_hub tokenizers
    $ python export.py out --to=out-hf
    $ python export.py --init_from=out/ckpt_best.pt --to=out-hf --dtype=bfloat16
    $ hf upload OWNER/NAME out-hf

train.py, sample.py and eval.py read such a folder, or a model on the Hub, with --init_from=FOLDER_OR_NAME.
"""

from configurator import InputError, check_choice, configure

# -----------------------------------------------------------------------------
init_from = 'resume'  # the checkpoint in out_dir; or a checkpoint, a Hugging Face folder or name
out_dir = 'out'  # the run's folder, if init_from is 'resume'
to: str = None  # the folder to write, which must not exist
dtype = 'float32'  # dtype of the weights; 'bfloat16' and 'float16' halve the size
dataset: str = None  # the dataset whose tokenizer is written. None: the checkpoint's tokenizer
data_dir: str = None  # None: data/ next to this file
# -----------------------------------------------------------------------------
config, given = configure(globals(), positional='out_dir')

import os
import shlex
import tempfile

import torch

from flatgpt import checkpoint, huggingface
from flatgpt.conversations import chat_format
from flatgpt.files import script_path
from flatgpt.tokenizer import import_package, make_tokenizer

if not to:
    raise InputError("no folder to write. Name one: --to=FOLDER.")
if os.path.exists(to):
    raise InputError(f"{to} exists already. Name another folder with --to, or remove it.")
check_choice(config, 'dtype', ['float32', 'bfloat16', 'float16'])
for package in ['safetensors', 'huggingface_hub', 'tokenizers']:
    import_package(package)

# -----------------------------------------------------------------------------
# the model
ckpt = checkpoint.read(checkpoint.find(out_dir if init_from == 'resume' else init_from))
tokenizer = make_tokenizer(checkpoint.tokenizer_state_of(ckpt, dataset, data_dir))
model = checkpoint.build_model(ckpt).eval()
n_params = model.get_num_params(non_embedding=False)
kind = huggingface.CLASSES[model.config.arch]
chat = chat_format(tokenizer)  # None if the model only continues texts
parent, name = os.path.split(os.path.abspath(to))


def compare(folder):
    """Compare the logits of transformers and model.py. Raise InputError if they differ, as after an edit.

    Return False if transformers is not installed or too old for this network, else True.
    """
    try:
        import transformers
        their_class = getattr(transformers, kind)
    except (ImportError, AttributeError):
        return False
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # a weight of another shape is not an error here, as the comparison below finds it
    theirs = their_class.from_pretrained(folder, ignore_mismatched_sizes=True).float().eval()
    ours = checkpoint.build_model(checkpoint.read(folder)).eval()
    idx = torch.arange(min(1024, ours.config.block_size))[None] % ours.config.vocab_size  # (1, T)
    with torch.no_grad():
        their_logits = theirs(idx).logits
        logits, _ = ours(idx, idx)  # with targets, so that all positions have logits
    difference = ((logits - their_logits).abs().max() / their_logits.abs().max()).item()
    if not difference < 1e-3:  # also if it is nan
        raise InputError(f"{kind} of transformers and model.py compute different logits: they differ by "
                         f"{difference:.1%}. Undo the edits of model.py.")
    return True


# -----------------------------------------------------------------------------
# write a temporary folder, and rename it once it is complete and compared
os.makedirs(parent, exist_ok=True)
with tempfile.TemporaryDirectory(prefix='.' + name, dir=parent) as temporary:
    folder = os.path.join(temporary, name)
    huggingface.write_folder(folder, model.state_dict(), model.config, tokenizer, dtype, chat)
    compared = compare(folder)
    os.replace(folder, os.path.join(parent, name))

if compared:
    note = "transformers computes the same logits"
else:
    note = "logits not compared with transformers: pip install --upgrade transformers"
print(f"{to}: {kind}, {n_params / 1e6:.2f}M parameters in {dtype}; {note}")
chat_flag = ' --chat' if chat else ''
print(f"sample: python {script_path('sample.py')} --init_from={shlex.quote(to)}{chat_flag}; publish: "
      f"hf upload OWNER/NAME {shlex.quote(to)}")
