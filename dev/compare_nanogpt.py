"""
nanoGPT's README line for a CPU, run by nanoGPT and by flatgpt: when does the validation loss reach 1.90, and what is it in the end
over the whole of val.bin? Both run at once, but never at the same moment: every two seconds one is halted and the other goes on, so
that a machine whose speed drifts is the same for both. Only the seconds in which a program was allowed to run are counted.

    $ python dev/compare_nanogpt.py PATH_TO_NANOGPT PATH_TO_TINYSHAKESPEARE [pairs]
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
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


class Run:
    """One program's training: the seconds it ran, those until it printed a validation loss of 1.90 or less, and its steps' times."""

    def __init__(self, cwd, *more):
        self.seconds, self.since, self.reached, self.ms = 0.0, time.perf_counter(), None, []
        self.process = subprocess.Popen([sys.executable, '-u', 'train.py', *LINE, *more], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.halt()
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        for line in self.process.stdout:
            if (found := re.search(r'^step .*val loss ([\d.]+)', line)) and float(found[1]) <= 1.90 and self.reached is None:
                self.reached = self.seconds + time.perf_counter() - self.since
            if found := re.search(r'time ([\d.]+)ms', line):
                self.ms.append(float(found[1]))

    def halt(self):
        self.seconds += time.perf_counter() - self.since
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self, seconds):
        self.since = time.perf_counter()
        self.process.send_signal(signal.SIGCONT)
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        self.halt()


def whole_val(checkpoint):
    out = subprocess.run([sys.executable, 'train.py', *LINE, f'--init_from={checkpoint}', '--eval_only', '--eval_iters=0', f'--data_dir={work}',
                          f'--out_dir={work}/none'], cwd=repo, check=True, capture_output=True, text=True).stdout
    return float(re.search(r'val loss ([\d.]+)', out)[1])


print('| pair | program | seconds to 1.90 | seconds in all | median ms per iteration | loss over all of val.bin, best checkpoint |')
print('|---|---|---|---|---|---|')
for i in range(pairs):
    runs = {'nanoGPT': Run(nanogpt, f'--out_dir={work}/nanoGPT{i}'), 'flatgpt': Run(repo, f'--out_dir={work}/flatgpt{i}', f'--data_dir={work}', f'--seed={1337 + i}')}
    while any(run.process.returncode is None for run in runs.values()):
        for run in runs.values():
            if run.process.returncode is None:
                run.go_on(2)
    for name, run in runs.items():
        loss = whole_val(f'{work}/{name}{i}/ckpt.pt')
        print(f"| {i + 1} | {name} | {run.reached and round(run.reached, 1)} | {run.seconds:.1f} | {sorted(run.ms)[len(run.ms) // 2]:.1f} | {loss:.4f} |", flush=True)
