"""Faults and what has to hold. Each case is a function; its docstring is its line in the table; it raises AssertionError or returns what
was seen. A case marked `slow` is left out of the quick round; those marked `torchrun`, `tmpfs` and `hosts` need what their names say."""

import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# before torch, which it gives one thread
from harness import PLACE, REPO, RUN, SCRATCH, Child, copy, die_at, fingerprint, log_without_times, make_dataset, resume, same_as_through, stop_at, through, train

import torch
from conftest import TEXT

import checkpoint
import model

CASES = {}


def case(*marks):
    def add(function):
        CASES[function.__name__] = (function, marks)
        return function
    return add


# -----------------------------------------------------------------------------
# exact resume


@case()
def stopped_and_resumed(quick):
    """stopped after k updates, resumed to N without a flag, for every k (quick: three)"""
    ks = (1, 7, 23) if quick else range(1, 40)
    for k in ks:
        out = train(sabotage=stop_at(k), expect=143).out
        assert checkpoint.newest(str(out)).endswith(f'{k:08d}.pt')
        same_as_through(resume(out).out)
    out = train('--max_iters=11', '--lr_decay_iters=40').out  # a budget that is extended: its end was evaluated, which the log says
    same_as_through(resume(out, '--max_iters=40').out, log=False)
    return f"parameters, optimizer and log.csv of {len(ks)} runs equal those of the through run"


@case()
def evaluation_and_logging_at_any_interval(quick):
    """other eval_interval, log_interval, save_interval, keep_checkpoints"""
    want, _ = through()
    settings = [['--eval_interval=3', '--log_interval=2'], ['--eval_interval=0', '--save_interval=11'], ['--eval_iters=5', '--keep_checkpoints=1', '--log_interval=0']]
    for flags in settings:
        assert fingerprint(train(*flags).out) == want, flags
    return f"the same bits with {len(settings)} settings"


@case()
def several_processes_stopped_and_resumed(quick):
    """2 processes to k, resumed on 2"""
    out = resume(train(sabotage=stop_at(11), ranks=2, expect=143).out, ranks=2).out
    want = train(ranks=2)
    assert fingerprint(out) == fingerprint(want.out) and log_without_times(out) == log_without_times(want.out)
    return "the same bits and log"


@case()
def another_number_of_processes(quick):
    """1 process to k, then 4, then 2, same global batch"""
    out = train(sabotage=stop_at(9), expect=143).out
    first = resume(out, sabotage=stop_at(21), ranks=4, expect=143).text()
    assert 'processes 1 -> 4' in first, first
    resume(out, ranks=2)
    a, b = log_without_times(out), through()[1]
    far = max(abs(float(x['loss']) - float(y['loss'])) for x, y in zip(a, b, strict=True) if x['loss'])
    assert far < 1e-3, far
    return f"same samples, losses within {far:.0e}, and the resume says why not to the bit"


@case()
def what_an_exact_resume_depends_on(quick):
    """resumed with two threads, another micro-batch, bfloat16"""
    for flags, threads, words in (([], 2, 'threads 1 -> 2'), (['--batch_size=4', '--total_batch_size=128'], 1, 'batch_size 2 -> 4'), (['--dtype=bfloat16'], 1, 'dtype float32 -> bfloat16')):
        done = subprocess.run([sys.executable, REPO / 'train.py', *PLACE, '--init_from=resume', f'--out_dir={some_run()}', *flags], capture_output=True, text=True,
                              env={**os.environ, 'OMP_NUM_THREADS': str(threads)})
        assert done.returncode == 0 and re.search(f'note: from here on not the bits of an uninterrupted run.*{words}', done.stdout), done.stdout + done.stderr
    assert 'not the bits' not in resume(some_run()).text()
    return "it says that it cannot be exact, and why"


@case()
def deterministic_on_any_number_of_processes(quick):
    """deterministic=True: 1, 2, 4 processes; 1 -> 4 -> 2; kill -9 between"""
    flags = ['--deterministic']
    want, want_log = through(*flags)
    for ranks in (2, 4):
        child = train(*flags, ranks=ranks)
        assert fingerprint(child.out) == want and log_without_times(child.out) == want_log, ranks
    out = train(*flags, sabotage=stop_at(9), expect=143).out
    child = Child(*PLACE, '--init_from=resume', out=out, ranks=4).until('iter 15:')
    child.signal(signal.SIGKILL)
    child.wait()
    last = resume(out, ranks=2)
    assert 'up to rounding' not in last.text()
    assert fingerprint(out) == want and log_without_times(out) == want_log
    return f"one hash, {want}"


# -----------------------------------------------------------------------------
# kill -9


@case()
def killed_at_random_instants(quick):
    """kill -9 at 100 random instants (quick: 8), a checkpoint after each update"""
    kills, flags = (8, ['--max_iters=600']) if quick else (100, ['--max_iters=4000'])
    out, done, inside = Path(tempfile.mkdtemp(dir=SCRATCH if quick else None)), 0, 0  # in full on a real disk, where a save takes its time
    while done < kills:
        child = Child(*RUN, *flags, '--init_from=auto', '--eval_interval=70', out=out)
        time.sleep(0.15 + random.random() * 0.5)
        child.signal(signal.SIGKILL)
        status = child.wait()
        assert status == -9, f"it ended before kill {done + 1}: {status}\n{child.text()[-1500:]}"
        inside += bool(list(out.glob('*.tmp')))
        done += 1
    at = checkpoint.read(checkpoint.newest(str(out)))['iter_num'] if checkpoint.newest(str(out)) else 0
    train(*flags, '--init_from=auto', '--eval_interval=70', out=out)
    want = same_as_through(out, *flags, '--eval_interval=70')
    assert not list(out.glob('*.tmp'))
    shutil.rmtree(out)
    return f"{kills} kills until iteration {at}, {inside} of them inside a save; hash {want}, as undisturbed"


@case()
def killed_at_each_point_of_a_save(quick):
    """kill -9 before and after each step of writing a checkpoint"""
    points = [(torch, 'save', 'after'), (os, 'replace', 'before'), (os, 'replace', 'after'), (os, 'remove', 'before')] if quick else [(torch, 'save', 'before'), (torch, 'save', 'after'), (os, 'fsync', 'after'), (checkpoint, 'check_sums', 'after'), (os, 'replace', 'before'), (os, 'replace', 'after'),
              (checkpoint, 'link', 'before'), (checkpoint, 'link', 'after'), (os, 'remove', 'before'), (os, 'remove', 'after')]
    for module, function, when in points:
        child = train(sabotage=die_at(module, function, when, 9), expect=-9)
        whole = [path for path in map(str, child.out.glob('ckpt*.pt')) if checkpoint.unpack(path)]
        assert whole, (function, when)
        same_as_through(resume(child.out).out)
    return f"{len(points)} points: every file whole, the same bits after the resume"


# -----------------------------------------------------------------------------
# damaged files


def some_run():
    return copy(stopped_at(30))


_stopped = {}


def stopped_at(k):
    if k not in _stopped:
        _stopped[k] = train(sabotage=stop_at(k), expect=143).out
    return _stopped[k]


@case()
def truncated(quick):
    """the newest checkpoint cut to 0, 1, 100 bytes, half, all but one"""
    for cut in (0, 1, 100, 0.5, -1):
        out = some_run()
        path = out / 'ckpt_00000030.pt'
        size = path.stat().st_size
        os.truncate(path, int(size * cut) if 0 < cut < 1 else cut % size)
        text = resume(out).text()
        assert 'ckpt_00000030.pt is damaged' in text and 'after 29 iterations' in text, text
        same_as_through(out)
    return "named, the one before taken, the same bits at the end"


@case()
def bits_flipped(quick):
    """one bit flipped at 60 random places (quick: 3), and a page of zeros"""
    found, n = 0, 3 if quick else 60
    for i in range(n + 1):
        out = some_run()
        path = out / 'ckpt_00000030.pt'
        content = bytearray(path.read_bytes())
        if i < n:
            content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        else:
            content[8192:12288] = bytes(4096)
        path.write_bytes(content)
        text = resume(out).text()
        found += 'ckpt_00000030.pt is ' in text
        assert i < n or 'ckpt_00000030.pt is damaged' in text, text
        same_as_through(out)
    return f"{found} of {n + 1} found by checksum, the others lay between the records; the same bits each time"


@case()
def all_checkpoints_damaged(quick):
    """every checkpoint damaged"""
    out = some_run()
    for path in set(out.glob('ckpt*.pt')):
        content = bytearray(path.read_bytes())
        for i in range(len(content) // 2, len(content) // 2 + 256):  # longer than the gaps between records
            content[i] = 165  # not flipped: some of these names are one file
        path.write_bytes(content)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for init_from in ('resume', 'auto'):
        text = train(f'--init_from={init_from}', out=out, expect=2).text()
        assert text.count('error: ') == 1 and 'is whole' in text and 'ckpt_00000029.pt' in text, text
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    return "status 2, each file and reason named, nothing touched, no silent start from scratch"


# -----------------------------------------------------------------------------
# a full disk


@case()
def files_may_not_grow(quick):
    """RLIMIT_FSIZE below the size of a checkpoint (EFBIG)"""
    out = some_run()
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
    child = resume(out, '--max_iters=34', '--lr_decay_iters=40', sabotage=limit, expect=4)
    text = child.text()
    assert 'warning: ' in text and 'File too large' in text and 'error: the last checkpoint could not be written' in text, text
    assert checkpoint.newest(str(out)).endswith('30.pt') and not list(out.glob('*.tmp'))
    same_as_through(resume(out).out)
    return "a warning each time, status 4 at the end, the older ones whole, resumed to the same bits"


@case()
def console_is_full(quick):
    """standard output is /dev/full"""
    def full():
        sys.stdout = open('/dev/full', 'w')
    child = train(sabotage=full)
    assert 'standard output is gone (No space left on device)' in child.text()
    same_as_through(child.out)
    return "one warning, the run ends well"


@case('tmpfs')
def disk_is_full(quick):
    """a small tmpfs fills up while it trains, is emptied again, and stays full until the end"""
    done = subprocess.run(['unshare', '-rm', sys.executable, __file__.replace('cases.py', 'run.py'), '--inside=on_a_small_disk'], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().splitlines()[-1]


def on_a_small_disk():
    disk = Path(tempfile.mkdtemp(dir=SCRATCH))
    subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=3m', 'tmpfs', disk], check=True)
    child = Child(*RUN, '--max_iters=100000', out=disk / 'out').until('iter 10:')
    with open(disk / 'filler', 'wb', buffering=0) as f:
        try:
            while True:
                f.write(bytes(4096))
        except OSError:
            pass
    child.until('could not be written (No space left on device)')
    assert all(checkpoint.unpack(str(path)) for path in (disk / 'out').glob('ckpt*.pt'))
    seen = checkpoint.newest(str(disk / 'out'))
    child.signal(signal.SIGTERM)
    assert child.wait() == 4 and checkpoint.newest(str(disk / 'out')) == seen, child.text()[-1000:]
    (disk / 'filler').unlink()
    out = shutil.copytree(disk / 'out', SCRATCH / 'from_disk')
    start = checkpoint.read(checkpoint.newest(str(out)))['iter_num']
    resume(out, f'--max_iters={start + 20}', '--lr_decay_iters=100000')
    want = train(f'--max_iters={start + 20}', '--lr_decay_iters=100000').out
    assert fingerprint(out) == fingerprint(want)
    child = Child(*RUN, '--max_iters=100000', '--init_from=resume', out=disk / 'out').until('iter ')  # room again: it goes on
    child.signal(signal.SIGTERM)
    assert child.wait() == 143
    subprocess.run(['mount', '-o', 'remount,size=1m', disk], capture_output=True)
    (disk / 'filler').write_bytes(b'')
    shutil.rmtree(disk / 'out')
    subprocess.run(['mount', '-o', 'remount,size=700k', disk], check=True)
    text = train(out=disk / 'out', expect=2).text()
    assert 'too little space on the disk' in text and not (disk / 'out').exists(), text
    print("No space left on device: a warning, the older ones whole, status 4, resumed to the same bits; too small from the beginning: status 2")


# -----------------------------------------------------------------------------
# a thread that saves, as on a GPU


@case()
def saved_beside_the_training(quick):
    """checkpoints written by a thread while the training goes on, as on a GPU: slow ones, kill -9 inside, files that may not grow"""
    def beside():
        real_init, real_save = checkpoint.Writer.__init__, torch.save
        checkpoint.Writer.__init__ = lambda self, beside, failed: real_init(self, True, failed)
        torch.save = lambda *args: (time.sleep(0.02), real_save(*args))  # iterations go by meanwhile

    same_as_through(train('--save_interval=3', sabotage=beside).out, log=False)
    for function, when in (('replace', 'before'), ('replace', 'after'), ('fsync', 'after'))[:1 if quick else 3]:
        child = train('--save_interval=3', sabotage=lambda: (beside(), die_at(os, function, when, 7)()), expect=-9)
        assert [path for path in map(str, child.out.glob('ckpt*.pt')) if checkpoint.unpack(path)], (function, when)
        same_as_through(resume(child.out).out, log=False)
    out = some_run()
    limit = lambda: (beside(), resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)))
    text = resume(out, '--max_iters=34', '--lr_decay_iters=40', sabotage=limit, expect=4).text()
    assert 'File too large' in text and 'tries again in a minute' in text and 'error: the last checkpoint could not be written' in text, text
    assert checkpoint.newest(str(out)).endswith('30.pt') and not list(out.glob('*.tmp'))
    same_as_through(resume(out).out)
    return "the same bits; killed inside: every file whole; no room: a warning, status 4 at the end, the older ones whole"


# -----------------------------------------------------------------------------
# signals


def go_on(text):
    """Run the command that the console shows behind 'to go on: ', as a user would paste it."""
    line, = re.findall(r'to go on: (.*)', text)
    words = shlex.split(line)
    assert words[0] in ('python', 'torchrun'), line
    words[:1] = [sys.executable] if words[0] == 'python' else [sys.executable, '-m', 'torch.distributed.run']
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]


@case()
def signals_that_stop(quick):
    """SIGTERM, SIGINT, SIGUSR1"""
    for name in ('SIGUSR1',) if quick else ('SIGTERM', 'SIGINT', 'SIGUSR1'):
        number = getattr(signal, name)
        child = Child(*RUN, '--max_iters=150', '--save_interval=1000').until('iter 20:')
        child.signal(number)
        assert child.wait() == 128 + number and f'stopped by {name} after' in child.text(), child.text()[-1000:]
        go_on(child.text())
        same_as_through(child.out, '--max_iters=150', '--save_interval=1000')
    return "status 143, 130, 138; the line that is printed goes on to the same bits and log"


@case()
def signal_that_saves(quick):
    """SIGUSR2"""
    child = Child(*RUN, '--max_iters=2000', '--save_interval=1500', '--eval_interval=0').until('iter 20:')
    child.signal(signal.SIGUSR2)
    end = time.time() + 30
    while not list(child.out.glob('ckpt_*.pt')) and time.time() < end:
        time.sleep(0.01)
    saved = checkpoint.newest(str(child.out))
    assert saved and checkpoint.read(saved)['iter_num'] < 1500
    child.until(f"iter {checkpoint.read(saved)['iter_num'] + 5}:").signal(signal.SIGTERM)
    assert child.wait() == 143
    return "a checkpoint at once, and the run goes on"


def saving_for(seconds):
    """A run in the midst of a save that takes so long."""
    def slow():
        real = torch.save
        torch.save = lambda *args: (print('SAVING', flush=True), time.sleep(seconds), real(*args))
    return Child(*RUN, '--save_interval=10', sabotage=slow).until('SAVING')


@case()
def signal_twice(quick):
    """SIGTERM twice, while a save takes its time"""
    child = saving_for(20)
    t0 = time.time()
    child.signal(signal.SIGTERM)
    time.sleep(0.2)
    child.signal(signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM and time.time() - t0 < 5
    return "the second ends it at once"


@case()
def signal_during_an_evaluation(quick):
    """SIGTERM during a long evaluation"""
    def slow():
        real = model.GPT.forward
        model.GPT.forward = lambda self, *args, **kwargs: (time.sleep(0 if self.training else 0.02), real(self, *args, **kwargs))[1]
    child = Child(*RUN, '--eval_interval=20', '--eval_iters=500', '--max_iters=400', '--save_interval=1000', sabotage=slow)
    child.until('iter 19:')
    time.sleep(0.3)
    t0 = time.time()
    child.signal(signal.SIGTERM)
    assert child.wait() == 143 and time.time() - t0 < 3, child.text()[-500:]
    assert 'after 20 iterations' in child.text() and 'step 20:' not in child.text(), child.text()[-500:]
    text = resume(child.out, '--max_iters=24', '--eval_iters=2').text()
    assert 'step 20:' in text
    return f"stopped within {time.time() - t0:.0f} s, evaluated after the resume"


@case()
def signal_during_a_save(quick):
    """SIGTERM during a save"""
    child = saving_for(0.5)
    child.signal(signal.SIGTERM)
    assert child.wait() == 143
    same_as_through(resume(child.out).out, log=False)
    return "the save ends, one iteration later it stops, the same bits at the end"


@case()
def time_is_up(quick):
    """max_minutes"""
    t0 = time.time()
    child = train('--max_iters=100000', '--max_minutes=0.1', '--save_interval=100000', '--eval_interval=0', expect=143)
    assert re.search('stopped by max_minutes after [1-9][0-9]* iterations, saved in', child.text()) and time.time() - t0 < 7, child.text()[-500:]
    return "status 143, saved, the line to go on with"


@case()
def sigstop_for_a_while(quick):
    """SIGSTOP for 5 s (quick: 1), one of 2 processes"""
    child = Child(*RUN, ranks=2).until('iter 10:')
    child.signal(signal.SIGSTOP, rank=1)
    time.sleep(1 if quick else 5)
    child.signal(signal.SIGCONT, rank=1)
    assert child.wait() == 0
    assert fingerprint(child.out) == fingerprint(train(ranks=2).out)
    return "goes on, the same bits"


@case()
def signal_to_one_of_several(quick):
    """SIGTERM to one of 2 processes"""
    for rank in (0, 1):
        child = Child(*RUN, '--max_iters=150', '--save_interval=1000', ranks=2).until('iter 20:')
        child.signal(signal.SIGTERM, rank=rank)
        child.wait()
        assert child.statuses == [143, 143], child.statuses
        resume(child.out, ranks=2)
        same_as_through(child.out, '--max_iters=150', '--save_interval=1000', ranks=2)
    return "all stop after the same iteration, save, status 143 each; the same bits after the resume"


# -----------------------------------------------------------------------------
# losses that are no numbers


def poison(bad):
    """Sabotage: the loss of the iterations in `bad` is nan (4 micro-batches in each)."""
    def sabotage():
        real, calls = model.GPT.forward, [0]

        def forward(self, idx, targets=None, *args, **kwargs):
            logits, loss = real(self, idx, targets, *args, **kwargs)
            if self.training and targets is not None:
                it, calls[0] = calls[0] // 4, calls[0] + 1
                loss = loss * (float('nan') if it in bad else 1.0)
            return logits, loss
        model.GPT.forward = forward
    return sabotage


@case()
def a_loss_is_nan(quick):
    """nan in the loss of one iteration, of three, on one process and on one of two"""
    child = train('--eval_interval=0', '--save_interval=10', '--max_iters=15', '--lr_decay_iters=40', sabotage=poison({12}))
    note, = [line for line in child.text().splitlines() if 'was skipped' in line]
    assert 'the update of iteration 12 was skipped, its loss is nan, its gradient norm nan' in note, note
    line = shlex.split(note.split('once more: ')[1])[2:]
    again = Child(*line, out=Path(str(child.out) + '-replay'))  # without the sabotage: that iteration is a good one then
    assert again.wait() == 0 and 'iter 12: loss' in again.text(), again.text()
    normal, = [row for row in through('--eval_interval=0')[1] if row['iter'] == '12']
    found, = [row for row in log_without_times(again.out) if row['iter'] == '12']
    assert {**found, 'progress': normal['progress']} == normal, 'the same samples, weights, dropout and rate'
    rows = log_without_times(child.out)
    assert rows[12]['loss'] == 'nan' and rows[13]['loss'] != 'nan' and float(rows[-2]['loss']) < 10
    a, b = (train('--eval_interval=0', f'--log_interval={n}', sabotage=poison({12})).out for n in (1, 9))
    assert fingerprint(a) == fingerprint(b), 'when it is looked at changes nothing'
    text = train('--eval_interval=0', '--save_interval=100', '--log_interval=10', sabotage=poison({12, 13, 25})).text()
    assert '(2 skipped since the last line, 0 in a row)' in text and 'iteration 25' in text, text
    two = Child(*RUN, '--eval_interval=0', ranks=2, sabotage=lambda: poison({6} if os.environ.get('RANK') == '1' else set())())  # 2 micro-batches: iteration 12 and 13
    assert two.wait() == 0 and 'iteration 12 was skipped' in two.text(), two.text()[-800:]
    return "skipped on all processes alike, told with iteration, loss, norm, rate and the line that replays it; weights finite"


@case()
def every_loss_is_nan(quick):
    """nan from iteration 20 on, max_bad_steps=5"""
    for log_interval in (1, 17):
        child = train('--save_interval=10', '--eval_interval=0', '--max_bad_steps=5', f'--log_interval={log_interval}', '--max_iters=100', sabotage=poison(set(range(22, 1000))), expect=3)
        assert '5 updates in a row' in child.text() or 'updates in a row were skipped' in child.text(), child.text()
        state = checkpoint.read(checkpoint.newest(str(child.out)))
        assert checkpoint.finite(state['model'])
        if log_interval == 1:
            assert state['iter_num'] == 20
    return "status 3, the last good checkpoint untouched"


# -----------------------------------------------------------------------------
# one writer


@case()
def two_runs_in_one_folder(quick):
    """a second run into the same out_dir, while the first trains and after kill -9"""
    first = Child(*RUN, '--max_iters=100000', '--save_interval=10').until('iter 11:')
    for flags in (['--init_from=resume'], ['--overwrite']):
        second = train(*flags, out=first.out, expect=2)
        assert 'another run is writing into' in second.text(), second.text()
    first.until('iter 40:').signal(signal.SIGKILL)
    assert first.wait() == -9
    resume(first.out, '--max_iters=10')
    return "refused with status 2, the first unharmed; kill -9 frees the lock"


@case()
def scratch_into_a_run(quick):
    """init_from=scratch into a folder that holds a run"""
    out = some_run()
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    text = train(out=out, expect=2).text()
    assert '--overwrite' in text and {path.name: path.read_bytes() for path in out.iterdir()} == before
    return "refused with status 2, nothing touched"


# -----------------------------------------------------------------------------
# the data


@case()
def data_changed_between(quick):
    """train.bin changed between two runs; --allow_change"""
    folder = make_dataset(SCRATCH / 'data', 'changing')
    out = train('--dataset=changing', '--max_iters=10', '--lr_decay_iters=40').out
    make_dataset(SCRATCH / 'data', 'changing', TEXT + TEXT[:100])
    text = resume(out, '--max_iters=40', expect=2).text()
    assert 'train.bin changed since this run was saved' in text and '--allow_change' in text, text
    resume(out, '--max_iters=40', '--allow_change')
    text = resume(some_run(), '--batch_size=1', expect=2).text()
    assert 'tokens per iteration changed' in text and '--total_batch_size=128' in text, text
    assert folder.exists()
    return "refused with status 2 and the ways out; another batch too"


@case()
def data_truncated_under_a_run(quick):
    """train.bin cut short, or replaced, while a run reads it"""
    folder = make_dataset(SCRATCH / 'data', 'shrinking')
    child = Child(*RUN, '--dataset=shrinking', '--max_iters=100000').until('iter 10:')
    os.truncate(folder / 'train.bin', 64)
    assert child.wait() == 2 and 'became shorter while it was read' in child.text() and 'Traceback' not in child.text()
    assert all(checkpoint.unpack(str(path)) for path in child.out.glob('ckpt*.pt'))
    folder = make_dataset(SCRATCH / 'data', 'replaced')
    child = Child(*RUN, '--dataset=replaced').until('iter 3:')
    (folder / 'new').write_bytes(bytes(80000))
    os.replace(folder / 'new', folder / 'train.bin')
    assert child.wait() == 0
    same_as_through(child.out)
    return "cut: status 2, the checkpoints whole; replaced by renaming: it goes on with what it opened"


# -----------------------------------------------------------------------------
# torchrun


class Torchrun:
    everyone = []

    def __init__(self, n, *args, out, launcher=(), env=None, prefix=(), command=None):
        self.console = open(Path(tempfile.mkdtemp(dir=SCRATCH)) / 'console', 'w+')
        command = command or [sys.executable, '-m', 'torch.distributed.run', *(launcher or ('--standalone',)), f'--nproc_per_node={n}', str(REPO / 'train.py')]
        self.p = subprocess.Popen([*prefix, *command, *RUN, f'--out_dir={out}', *args],
                                  stdout=self.console, stderr=self.console, env={**os.environ, **(env or {})}, start_new_session=True)
        self.everyone.append(self)

    def text(self):
        with open(self.console.name, errors='replace') as f:
            return f.read()

    def until(self, words, limit=90):
        end = time.time() + limit
        while words not in self.text():
            assert time.time() < end and self.p.poll() is None, f"{words!r} did not show up:\n{self.text()[-3000:]}"
            time.sleep(0.02)
        return self

    def workers(self):
        """The process numbers of the workers, by rank."""
        found = {}
        for folder in Path('/proc').iterdir():
            if folder.name.isdigit():
                try:
                    words, env = (folder / 'cmdline').read_bytes().split(b'\0'), dict(pair.split(b'=', 1) for pair in (folder / 'environ').read_bytes().split(b'\0') if b'=' in pair)
                    if any(word.endswith(b'train.py') for word in words) and b'RANK' in env and int((folder / 'stat').read_text().rsplit(')', 1)[1].split()[1]) == self.p.pid:
                        found[int(env[b'RANK'])] = int(folder.name)
                except (OSError, ValueError):
                    continue
        return found

    def wait(self, limit=120):
        try:
            return self.p.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(self.p.pid, signal.SIGKILL)
            raise AssertionError(f"torchrun did not end within {limit} s:\n{self.text()[-3000:]}") from None

    def lose(self):
        """kill -9 of torchrun and all that it started."""
        if self.p.poll() is None:
            for pid in [*self.workers().values(), self.p.pid]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            self.p.wait()


@case('torchrun', 'slow')
def torchrun_is_stopped(quick):
    """SIGTERM to torchrun"""
    out = SCRATCH / 'agent'
    job = Torchrun(2, '--max_iters=4000', '--save_interval=10000', '--eval_interval=0', out=out).until('iter 20:')
    job.p.send_signal(signal.SIGTERM)
    job.wait()
    assert 'stopped by SIGTERM after' in job.text() and 'torchrun --standalone --nproc_per_node=2' in job.text(), job.text()[-2000:]
    n = checkpoint.read(checkpoint.newest(str(out)))['iter_num']
    want = train(f'--max_iters={n}', '--lr_decay_iters=4000', '--save_interval=10000', '--eval_interval=0', ranks=2).out
    assert fingerprint(out) == fingerprint(want)
    return "all processes stop after the same iteration and save"


@case('torchrun', 'slow')
def torchrun_is_killed(quick):
    """kill -9 of torchrun"""
    out = SCRATCH / 'orphans'
    job = Torchrun(2, '--max_iters=100000', '--save_interval=100000', '--eval_interval=0', out=out).until('iter 20:')
    workers = job.workers()
    assert len(workers) == 2
    job.p.kill()
    t0 = time.time()
    while any(Path(f'/proc/{pid}').exists() for pid in workers.values()) and time.time() < t0 + 30:
        time.sleep(0.05)
    assert time.time() < t0 + 30, 'orphans train on'
    assert checkpoint.newest(str(out)), job.text()[-1000:]
    return f"the orphans saved and ended {time.time() - t0:.1f} s later"


@case('torchrun', 'slow')
def a_process_is_killed_and_restarted(quick):
    """kill -9 of one process under torchrun --max-restarts, 6 times"""
    times = []
    for i in range(6):
        out = SCRATCH / f'restart{i}'
        job = Torchrun(2, '--init_from=auto', '--max_iters=300', out=out, launcher=['--standalone', '--max-restarts=2']).until(f'iter {20 + 3 * i}:')
        os.kill(job.workers()[i % 2], signal.SIGKILL)
        t0 = time.time()
        assert job.wait() == 0, job.text()[-3000:]
        times.append(time.time() - t0)
        assert fingerprint(out) == through('--max_iters=300', ranks=2)[0]
    return f"6 of 6 resumed and ended with the same hash, {min(times):.0f} to {max(times):.0f} s later"


@case()
def a_process_is_lost(quick):
    """kill -9 of one of 3 processes, nobody restarts it"""
    times = []
    for rank in (0, 2):
        child = Child(*RUN, '--gradient_accumulation_steps=3', '--max_iters=100000', ranks=3).until('iter 20:')
        child.signal(signal.SIGKILL, rank)
        t0 = time.time()
        child.wait(limit=30)
        times.append(time.time() - t0)
        lines = [line for line in child.text().splitlines() if line.startswith('error: ')]
        assert sorted(child.statuses) == [-9, 5, 5] and len(lines) == 2 and 'Traceback' not in child.text(), child.text()[-3000:]
        assert all('lost contact with the other processes' in line and '--init_from=resume' in line for line in lines), lines
        resume(child.out, f'--max_iters={checkpoint.read(checkpoint.newest(str(child.out)))["iter_num"] + 2}', '--lr_decay_iters=100000', ranks=3)
    return f"the others end within {max(times):.1f} s, one line and status 5 each"


# -----------------------------------------------------------------------------
# two hosts


def hosts():
    """Two network namespaces joined by a cable; inside a user namespace of its own."""
    sh = lambda line: subprocess.run(line, shell=True, check=True)
    for i in (1, 2):
        sh(f'ip netns add h{i}')
    sh('ip link add v1 netns h1 type veth peer name v2 netns h2')
    for i in (1, 2):
        sh(f'ip -n h{i} addr add 10.77.0.{i}/24 dev v{i} && ip -n h{i} link set v{i} up && ip -n h{i} link set lo up')


def cable(state):
    subprocess.run(f'ip -n h1 link set v1 {state}', shell=True, check=True)


def on_host(i, out, *args):
    return Torchrun(1, '--deterministic', *args, out=out, prefix=['ip', 'netns', 'exec', f'h{i}'], env={'GLOO_SOCKET_IFNAME': f'v{i}', 'NCCL_SOCKET_IFNAME': f'v{i}'},
                    launcher=['--nnodes=2', f'--node_rank={i - 1}', '--master_addr=10.77.0.1', '--master_port=29577'])


def by_script(i, out, *args, nodes='2', wait='600'):
    return Torchrun(1, '--deterministic', *args, out=out, prefix=['ip', 'netns', 'exec', f'h{i}'], command=['bash', str(REPO / 'runs' / 'multinode.sh'), '10.77.0.1', nodes],
                    env={'NPROC': '1', 'WAIT': wait, 'VIRTUAL_ENV': sys.prefix, 'PATH': f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"})


def in_namespaces(function):
    """The last line that `function` prints, run in a user and a network namespace of its own."""
    done = subprocess.run(['unshare', '-rnm', 'bash', '-c', f'mount -t tmpfs tmpfs /run && {shlex.quote(sys.executable)} {shlex.quote(__file__.replace("cases.py", "run.py"))} --inside={function.__name__}'],
                          capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout.strip().splitlines()[-1]


@case('hosts', 'slow')
def two_hosts(quick):
    """two hosts in network namespaces, deterministic=True; a cable cut between them"""
    return in_namespaces(on_two_hosts)


def on_two_hosts():
    hosts()
    want, _ = through('--deterministic')
    out = SCRATCH / 'hosts'
    jobs = [on_host(i, out) for i in (1, 2)]
    for job in jobs:
        assert job.wait() == 0, job.text()[-3000:]
    assert fingerprint(out) == want
    out = SCRATCH / 'cut'
    jobs = [on_host(i, out, '--max_iters=100000', '--ddp_timeout=10') for i in (1, 2)]
    jobs[0].until('iter 20:')
    cable('down')
    t0, ended = time.time(), []
    while len(ended) < 2 and time.time() < t0 + 150:
        ended = [job.p.poll() for job in jobs if job.p.poll() is not None]
        time.sleep(0.2)
    took = time.time() - t0
    for job in jobs:
        if job.p.poll() is None:
            os.killpg(job.p.pid, signal.SIGKILL)
            job.p.wait()
    assert ended and 0 not in ended
    cable('up')
    n = checkpoint.read(checkpoint.newest(str(out)))['iter_num']
    jobs = [on_host(i, out, '--init_from=auto', f'--max_iters={n + 20}', '--lr_decay_iters=100000') for i in (1, 2)]
    for job in jobs:
        assert job.wait() == 0, job.text()[-3000:]
    want = train('--deterministic', f'--max_iters={n + 20}', '--lr_decay_iters=100000').out
    assert fingerprint(out) == fingerprint(want)
    print(f"the hash of one process; cut: {len(ended)} of 2 launchers ended within {took:.0f} s (the other's torchrun was ended by hand after 150); joined again: resumed to the same bits"
          if len(ended) < 2 else f"the hash of one process; cut: both ended within {took:.0f} s; joined again: resumed to the same bits")


LONG = ['--max_iters=300', '--save_interval=5', '--eval_interval=100', '--ddp_timeout=10']


def end_well(jobs, out, limit=200):
    """All of `jobs` end with status 0, and `out` holds what one process would have made, alone and undisturbed."""
    for job in jobs:
        assert job.wait(limit) == 0, job.text()[-4000:]
    assert fingerprint(out) == through('--deterministic', *LONG)[0]


def losing(n, job):
    """How many times the workers of `job` lost the others; in one line each, without a traceback."""
    lines = [line for line in job.text().splitlines() if 'error: lost contact' in line]
    assert len(lines) >= n and 'Error: [' not in job.text(), job.text()[-4000:]
    return len(lines)


@case('hosts', 'slow')
def a_cable_is_cut_and_mended(quick):
    """runs/multinode.sh on two hosts; the cable is cut for 3 s, then for 20 s with ddp_timeout=10"""
    return in_namespaces(on_a_mended_cable)


def on_a_mended_cable():
    hosts()
    out = SCRATCH / 'mended'
    jobs = [by_script(i, out, *LONG) for i in (1, 2)]
    jobs[0].until('iter 30:')
    cable('down')
    time.sleep(3)
    cable('up')
    jobs[0].until('iter 100:')
    assert not any('lost contact' in job.text() for job in jobs), 'three seconds cost no more than that'
    cable('down')
    time.sleep(20)
    cable('up')
    t0 = time.time()
    jobs[0].until('resuming from', limit=120)
    again = time.time() - t0
    for job in jobs:
        losing(1, job)
    end_well(jobs, out)
    print(f"3 s: it waits and goes on; 20 s: both hosts' processes give up after 10, and train again {again:.0f} s after the cable was mended; the hash of one process")


@case('hosts', 'slow')
def a_host_comes_back(quick):
    """a host that comes before the head; kill -9 of all that runs on one of two hosts, then the same line there once more"""
    return in_namespaces(on_a_host_that_comes_back)


def on_a_host_that_comes_back():
    hosts()
    out = SCRATCH / 'back'
    alone = by_script(2, out, *LONG, wait='2')
    assert alone.wait() == 2 and alone.text().startswith('error: nobody answers at the head (10.77.0.1:29500) within 2 s.') and alone.text().count('\n') == 1, alone.text()
    jobs = [by_script(i, out, *LONG) for i in (1, 2)]
    jobs[0].until('iter 50:')
    jobs[1].lose()
    jobs[1] = by_script(2, out, *LONG)
    t0 = time.time()
    jobs[0].until('resuming from', limit=120)
    again = time.time() - t0
    losing(1, jobs[0])
    end_well(jobs, out)
    print(f"it waits for the head, and says so in a line if none comes; both train again {again:.0f} s after the kill; the hash of one process")


@case('hosts', 'slow')
def a_host_is_lost(quick):
    """two hosts of --nnodes=1:2; one vanishes (its cable is cut first, so there is no goodbye), the other goes on alone"""
    return in_namespaces(on_a_lost_host)


def on_a_lost_host():
    hosts()
    out = SCRATCH / 'lost'
    jobs = [by_script(i, out, *LONG, nodes='1:2') for i in (1, 2)]
    jobs[0].until('iter 50:')
    cable('down')
    jobs[1].lose()
    t0 = time.time()
    jobs[0].until('resuming from', limit=150)
    again = time.time() - t0
    jobs[0].until('x 4 micro-batches x 1 process\n')
    losing(1, jobs[0])
    end_well(jobs[:1], out)
    print(f"it goes on alone {again:.0f} s later, with the same samples; the hash of one process")


@case('hosts', 'slow')
def a_host_joins(quick):
    """--nnodes=1:2 with one host; a second one comes while it trains"""
    return in_namespaces(on_a_host_that_joins)


def on_a_host_that_joins():
    hosts()
    out = SCRATCH / 'grown'
    flags = ['--max_iters=100000', '--save_interval=1000', '--eval_interval=0']
    jobs = [by_script(1, out, *flags, nodes='1:2').until('iter 10:', limit=120)]
    jobs.append(by_script(2, out, *flags, nodes='1:2'))
    jobs[0].until('x 2 micro-batches x 2 processes', limit=120)
    seen = len(jobs[0].text())
    while jobs[0].text()[seen:].count('iter ') < 20:
        time.sleep(0.02)
    for job in jobs:
        job.p.send_signal(signal.SIGTERM)
    for job in jobs:
        job.wait()
    assert jobs[0].text().count('stopped by SIGTERM') + jobs[1].text().count('stopped by SIGTERM') == 2, jobs[0].text()[-3000:]  # once for the newcomer
    n = checkpoint.read(checkpoint.newest(str(out)))['iter_num']
    want = train('--deterministic', *flags, f'--max_iters={n}', '--lr_decay_iters=100000').out
    assert fingerprint(out) == fingerprint(want)
    print(f"it saves, starts again with both of them, {n} iterations in all; the hash of one process")
