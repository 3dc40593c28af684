"""
nanoGPT's README line for a CPU, run by nanoGPT and by flatgpt in turn: when does the validation loss reach 1.90, and what is
it in the end over the whole of val.bin?

    $ python dev/compare_nanogpt.py PATH_TO_NANOGPT PATH_TO_TINYSHAKESPEARE [pairs]
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

LINE = ('config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 --batch_size=12 '
        '--n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0').split()
repo = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
nanogpt, text, pairs = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2]), int((sys.argv[3:] or [2])[0])
work = tempfile.mkdtemp()

# the same text for both, each prepared by its own script
shutil.copy(text, os.path.join(nanogpt, 'data/shakespeare_char/input.txt'))
subprocess.run([sys.executable, 'data/shakespeare_char/prepare.py'], cwd=nanogpt, check=True, stdout=subprocess.DEVNULL)
subprocess.run([sys.executable, 'prepare.py', 'shakespeare_char', f'--input={text}', f'--data_dir={work}'], cwd=repo, check=True, stdout=subprocess.DEVNULL)


def run(name, cwd, *more):
    """Seconds from the start of the process until a printed validation loss of 1.90 or less, and until its end."""
    t0, reached, ms = time.time(), None, []
    p = subprocess.Popen([sys.executable, '-u', 'train.py', *LINE, *more], cwd=cwd, stdout=subprocess.PIPE, text=True)
    for line in p.stdout:
        if (found := re.search(r'val loss ([\d.]+)', line)) and float(found[1]) <= 1.90 and reached is None and line.startswith('step'):
            reached = time.time() - t0
        if found := re.search(r'time ([\d.]+)ms', line):
            ms.append(float(found[1]))
    assert p.wait() == 0
    return reached, time.time() - t0, sorted(ms)[len(ms) // 2]


def whole_val(checkpoint):
    out = subprocess.run([sys.executable, 'train.py', *LINE, f'--init_from={checkpoint}', '--eval_only', '--eval_iters=0', f'--data_dir={work}',
                          f'--out_dir={work}/none'], cwd=repo, check=True, capture_output=True, text=True).stdout
    return float(re.search(r'val loss ([\d.]+)', out)[1])


print('| run | program | seconds to 1.90 | seconds in all | median ms per iteration | loss over all of val.bin, best checkpoint |')
print('|---|---|---|---|---|---|')
for i in range(pairs):
    for name, cwd, more in (('nanoGPT', nanogpt, [f'--out_dir={work}/nano{i}']),
                            ('flatgpt', repo, [f'--out_dir={work}/flat{i}', f'--data_dir={work}', f'--seed={1337 + i}'])):
        reached, total, ms = run(name, cwd, *more)
        loss = whole_val(f"{work}/{'nano' if name == 'nanoGPT' else 'flat'}{i}/ckpt.pt")
        print(f"| {i + 1} | {name} | {reached and round(reached, 1)} | {total:.1f} | {ms:.1f} | {loss:.4f} |", flush=True)
