"""
Train each preset for a minute, export it, and let transformers write the same texts: dev/records/export.md.

    $ pip install transformers safetensors huggingface_hub tokenizers
    $ python prepare.py && python dev/compare_transformers.py > dev/records/export.md
"""

import os
import platform
import re
import subprocess
import sys
import tempfile

import torch
import transformers

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
from support import load

PROMPTS = ['class ', 'def __init__(self', 'import ']
TRAIN = ('--max_iters=3000 --block_size=256 --batch_size=4 --matrix_optimizer=adamw --learning_rate=3e-3 '
         '--matrix_lr=3e-3 --embedding_lr=3e-3 --weight_decay=0.1 --beta1=0.9 --beta2=0.99 --adam_eps=1e-8 '
         '--grad_clip=1 --lr_schedule=linear --min_lr=0 --warmup_iters=100 --device=cpu').split()
SAMPLE = '--num_samples=1 --max_new_tokens=100 --temperature=0 --device=cpu --dtype=float32'.split()
END = '---------------\n'  # after a sample


def run(*args):
    done = subprocess.run([sys.executable, *args], cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def compare(arch, folder):
    """Prints a row of the table; returns the last text."""
    out, to = os.path.join(folder, arch), os.path.join(folder, arch + '-hf')
    shape = ['--n_layer=2', '--n_head=4'] + (['--n_kv_head=2'] if arch != 'gpt2' else [])
    log = run('train.py', 'config/quickstart.py', f'--arch={arch}', *TRAIN, *shape, f'--out_dir={out}')
    run('export.py', f'--out_dir={out}', f'--to={to}')
    theirs = transformers.AutoModelForCausalLM.from_pretrained(to)
    tokenizer = transformers.AutoTokenizer.from_pretrained(to)
    ours, _ = load.model_and_tokenizer(out)
    difference, equal = 0, 0
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors='pt')['input_ids']
        want = theirs.generate(ids, max_new_tokens=100, do_sample=False)
        text = run('sample.py', f'--out_dir={out}', f'--start={prompt}', *SAMPLE)
        equal += text == tokenizer.decode(want[0]) + '\n' + END
        with torch.no_grad():
            logits = ours(want, full_logits=True)[0]
            difference = max(difference, (logits - theirs(want).logits).abs().max().item())
    loss = [line for line in log.splitlines() if line.startswith('step ')][-1].split('val loss ')[1]
    trained = re.search(r'done: (.*? in [\dms]+),', log)[1]
    print(f"| {arch} | {type(theirs).__name__} | {trained} | {loss} | {difference:.1e} | "
          f"{equal} of {len(PROMPTS)} |", flush=True)
    return text


transformers.utils.logging.set_verbosity_error()
git = ['git', '-C', HERE, 'describe', '--always', '--dirty']
version = subprocess.run(git, capture_output=True, text=True).stdout.strip()
print(f"""# The same texts from transformers

`python dev/compare_transformers.py` at {version}; torch {torch.__version__}, transformers \
{transformers.__version__}, {platform.machine()}, {os.cpu_count()} CPUs.
Each preset trains for about a minute on pystdlib (bytes), is exported, opened with AutoModelForCausalLM and
AutoTokenizer, and continues {len(PROMPTS)} prompts greedily by 100 tokens, as sample.py --temperature=0 does,
in float32.

| preset | architecture | trained | validation loss | largest difference of the logits | texts equal |
|---|---|---|---|---|---|""")
with tempfile.TemporaryDirectory() as folder:
    texts = {arch: compare(arch, folder) for arch in ('gpt2', 'llama', 'modern')}
for arch, text in texts.items():
    print(f"\n{arch}:\n\n```\n{text.removesuffix(END)}```")
