"""How long one waits for the first step: `python bench.py --what=start`."""

import os
import subprocess
import sys
import tempfile
import time

from configurator import fail
from measure import median_and_range
from measure_step import made_up

TRAIN_PY = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'train.py')


def start(shape, knobs, rounds):
    """Seconds from the command on: until torch is there, until --help is over, until train.py's first step of a network of this shape is
    logged. `knobs` are flags for train.py. Returns the rows, dicts."""
    folder = tempfile.TemporaryDirectory()
    data = made_up(folder.name, shape['vocab_size'])
    train = [TRAIN_PY, *(f'--{name}={value}' for name, value in shape.items() if name != 'vocab_size'), f'--data_dir={folder.name}', f'--dataset={os.path.basename(data.folder)}',
             f'--out_dir={folder.name}/out', '--overwrite', '--gradient_accumulation_steps=1', '--max_iters=1000',
             '--eval_interval=0', '--write_report=False', *knobs]
    commands = {'import torch': (['-c', 'import torch; print(1)'], ''), 'train.py --help': ([TRAIN_PY, '--help'], 'and never'),
                'the first step of train.py': (train, 'iter 0:')}
    rows = []
    print('| from the command to | seconds |\n|---|---|')
    for name, (command, line) in commands.items():
        rows.append(dict(until=name, seconds=[until(command, line) for _ in range(rounds)]))
        print(f"| {name} | {median_and_range(rows[-1]['seconds'], 2)} |", flush=True)
    return rows


def until(command, line):
    """Seconds until a script prints a line that begins like this, or ends."""
    t0 = time.perf_counter()
    process = subprocess.Popen([sys.executable, '-u', *command], stdout=subprocess.PIPE, text=True)
    said = next((text for text in process.stdout if text.startswith(line)), None)
    if said is None and process.wait():
        fail(f"{command[0]} ended with status {process.returncode}. the command was: python {' '.join(command)}")
    s = time.perf_counter() - t0
    process.kill()
    process.wait()
    process.stdout.close()
    return s
