"""Faults on one machine, and what has to hold."""

import errno
import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

# before torch, which it gives one thread
from harness import (PATIENCE, PLACE, REPO, RUN, SCRATCH, Child, case, die_at, fingerprint, log_without_times,
                     make_dataset, newest_state, resume, same_as_through, slowly, some_run, stop_at, through,
                     train)

import torch

import dataset
import model
from support import checkpoint, guard, load, setup

# -----------------------------------------------------------------------------
# exact resume


@case()
def stopped_and_resumed(quick):
    """stopped after k updates, resumed to N without a flag, for every k (quick: three)"""
    ks = (1, 23) if quick else range(1, 32)
    for k in ks:
        same_as_through(resume(train(sabotage=stop_at(k), expect=143).out).out)
    out = train('--max_iters=11', '--lr_decay_iters=32').out
    # a budget that is extended: the log says that its end was evaluated
    same_as_through(resume(out, '--max_iters=32').out, log=False)
    return f"parameters, optimizer and log.csv of {len(ks)} runs equal those of the through run"


@case()
def what_an_exact_resume_depends_on(quick):
    """resumed with two threads, another micro-batch, bfloat16, in two processes, with edited code"""
    def two_threads():
        torch.set_num_threads(2)

    larger = ['--batch_size=4', '--total_batch_size=128']
    for flags, sabotage, ranks, words in (([], two_threads, 1, 'threads 1 -> 2'),
                                          (larger, None, 1, 'batch_size 2 -> 4'),
                                          (['--dtype=bfloat16'], None, 1, 'dtype float32 -> bfloat16'),
                                          ([], None, 2, 'processes 1 -> 2'),
                                          ([], lambda: setattr(setup, 'sha256_of', repr), 1, 'code of train.py .* -> ')):
        text = resume(some_run(), *flags, sabotage=sabotage, ranks=ranks).text()
        assert re.search(f'note: from here on perhaps not the bits of an uninterrupted run.*{words}', text), text
    assert 'not the bits' not in resume(some_run()).text()
    return "it says that it cannot be exact, and why"


# -----------------------------------------------------------------------------
# kill -9


@case()
def killed_at_random_instants(quick):
    """kill -9 at 100 random instants (quick: 6), a checkpoint after each update; each start resumes what the
    kill before has left, and the last one ends with the bits of a run that nobody disturbed"""
    kills, flags = 6 if quick else 100, ['--lr_decay_iters=4000', '--eval_interval=70']
    # in full on a real disk, where a save takes its time
    out, inside = Path(tempfile.mkdtemp(dir=SCRATCH if quick else None)), 0
    for i in range(kills):
        child = Child(*RUN, *flags, '--max_iters=100000', '--init_from=auto', out=out)
        time.sleep(PATIENCE * (0.15 + random.random() * 0.5))
        child.signal(signal.SIGKILL)
        assert child.wait() == -9, f"it ended before kill {i + 1}\n{child.text()[-1500:]}"
        inside += bool(list(out.glob('*.tmp')))
    at = newest_state(out)['iter_num'] if checkpoint.newest(str(out)) else 0
    flags.append(f'--max_iters={at + 10}')
    train(*flags, '--init_from=auto', out=out)
    assert not list(out.glob('*.tmp'))
    same_as_through(out, *flags, log=False)
    logs = [[{**row, 'progress': ''} for row in log] for log in (log_without_times(out), through(*flags)[1])]
    assert logs[0] == logs[1], 'log.csv differs'  # progress: its end was another at first
    shutil.rmtree(out)
    return f"{kills} kills until iteration {at}, {inside} of them inside a save; the bits as undisturbed"


@case()
def killed_at_each_point_of_a_save(quick):
    """kill -9 before each step of writing a checkpoint"""
    # of the fifth or a later one: each has two of some steps
    points = [(os, 'replace', 9), (os, 'link', 5)]
    if not quick:
        points += [(torch, 'save', 5), (checkpoint, 'verify_records', 5), (os, 'fsync', 9), (os, 'fsync', 10),
                   (os, 'remove', 9), (os, 'remove', 10), (checkpoint, 'link', 5), (os, 'replace', 10)]
    for point in points:
        killed_in_a_save(die_at(*point))
    return f"{len(points)} points: every file whole, the same bits after the resume"


def killed_in_a_save(sabotage, *flags, **kwargs):
    """All checkpoints of a run that ends by kill -9 are whole, and it continues to the same bits."""
    child = train(*flags, sabotage=sabotage, expect=-9)
    assert whole_ones(child.out), child.text()[-1000:]
    same_as_through(resume(child.out).out, **kwargs)


def whole_ones(out):
    """The checkpoints in `out`, all of which have to be whole."""
    paths = [str(path) for path in out.glob('ckpt*.pt')]
    for path in paths:
        load.unpack(path)  # raises Damaged
    return paths


# -----------------------------------------------------------------------------
# damaged files


@case()
def truncated(quick):
    """the newest checkpoint cut to 0, 1, 100 bytes, half, all but one"""
    size = os.path.getsize(some_run() / 'ckpt_00000030.pt')
    for length in (0, size - 1) if quick else (0, 1, 100, size // 2, size - 1):
        out = some_run()
        os.truncate(out / 'ckpt_00000030.pt', length)
        text = resume(out).text()
        assert 'ckpt_00000030.pt is damaged' in text and 'after 29 iterations' in text, text
        same_as_through(out)
    return "named, the one before taken, the same bits at the end"


@case()
def bits_flipped(quick):
    """one bit flipped at 60 random places (quick: 3)"""
    found, n = 0, 3 if quick else 60
    for i in range(n):
        out = some_run()
        content = bytearray((out / 'ckpt_00000030.pt').read_bytes())
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        (out / 'ckpt_00000030.pt').write_bytes(content)
        found += 'ckpt_00000030.pt is ' in resume(out).text()
        same_as_through(out)
    return f"{found} of {n} found by checksum, the others lay between the records; the same bits each time"


# -----------------------------------------------------------------------------
# a full disk


def no_large_files():
    """Sabotage: no file may grow beyond what a checkpoint takes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))


def has_no_room(sabotage):
    """The text of a run whose checkpoints find no room; with room again it ends with the same bits."""
    out = some_run()
    text = resume(out, '--max_iters=34', '--lr_decay_iters=32', sabotage=sabotage, expect=4).text()
    assert 'warning: ' in text and 'File too large' in text, text
    assert 'error: the last checkpoint could not be written' in text, text
    assert checkpoint.newest(str(out)).endswith('30.pt') and not list(out.glob('*.tmp'))
    same_as_through(resume(out).out)
    return text


@case()
def files_may_not_grow(quick):
    """RLIMIT_FSIZE below the size of a checkpoint (EFBIG)"""
    has_no_room(no_large_files)
    return "a warning each time, status 4 at the end, the older ones whole, resumed to the same bits"


@case('namespaces')
def disk_is_full(quick):
    """a small tmpfs fills up while it trains, stays full until the end, and is emptied"""
    disk = Path(tempfile.mkdtemp(dir=SCRATCH))
    subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=3m', 'tmpfs', disk], check=True)
    child = Child(*RUN, '--max_iters=100000', out=disk / 'out').until('iter 10:')
    with suppress(OSError), open(disk / 'filler', 'wb', buffering=0) as f:
        while True:
            f.write(bytes(4096))
    child.until('could not be written (No space left on device)')
    assert whole_ones(child.out)
    seen = checkpoint.newest(str(child.out))
    child.signal(signal.SIGTERM)
    assert child.wait() == 4 and checkpoint.newest(str(child.out)) == seen, child.text()[-1000:]
    (disk / 'filler').unlink()
    flags = [f"--max_iters={newest_state(child.out)['iter_num'] + 20}", '--lr_decay_iters=100000']
    same_as_through(resume(child.out, *flags).out, *flags, log=False)
    subprocess.run(['umount', disk], check=True)
    return "No space left on device: a warning, the older ones whole, status 4, resumed to the same bits"


# -----------------------------------------------------------------------------
# a thread that saves, as on a GPU


def saving_by_a_thread():
    """Sabotage: checkpoints are written by a thread, slowly, so that iterations pass meanwhile."""
    real_init, real_save = checkpoint.Saver.__init__, torch.save

    def init(self, *args):
        real_init(self, *args)
        self.is_async = True

    def save(*args):
        time.sleep(0.02)
        real_save(*args)

    checkpoint.Saver.__init__, torch.save = init, save


@case()
def saved_beside_the_training(quick):
    """checkpoints written by a thread beside the training, as on a GPU: slow ones, kill -9 inside, files that
    may not grow"""
    same_as_through(train('--save_interval=3', sabotage=saving_by_a_thread).out, log=False)
    for function in ('replace',) if quick else ('replace', 'fsync', 'link'):
        def sabotage():
            saving_by_a_thread()
            die_at(os, function, 7)()
        killed_in_a_save(sabotage, '--save_interval=3', log=False)

    def no_room():
        saving_by_a_thread()
        no_large_files()
    assert 'tries again in a minute' in has_no_room(no_room)
    return ("the same bits; killed inside: every file whole; no room: a warning, status 4 at the end, the "
            "older ones whole")


# -----------------------------------------------------------------------------
# signals


def paste(line):
    """The run that a printed line starts, to its end."""
    python, script, *flags = shlex.split(line)
    out, = re.findall('--out_dir=(.*)', '\n'.join(flags))
    assert (python, script) == ('python', str(REPO / 'train.py')), line
    return train(*flags, base=(), out=out)


@case()
def signals_that_stop(quick):
    """SIGTERM, SIGINT, SIGUSR1, SIGHUP, SIGQUIT"""
    flags = ['--max_iters=150', '--save_interval=1000']
    for name in ('SIGHUP',) if quick else 'SIGTERM SIGINT SIGUSR1 SIGHUP SIGQUIT'.split():
        child = Child(*RUN, *flags, sabotage=slowly(0.02)).until('iter 20:').stop(getattr(signal, name))
        assert f'stopped by {name} after' in child.text(), child.text()[-1000:]
        paste(re.search('to continue: (.*)', child.text())[1])
        same_as_through(child.out, *flags)
    return "status 143, 130, 138, 129, 131; the line that is printed continues to the same bits and log"


@case()
def signal_that_saves(quick):
    """SIGUSR2"""
    child = Child(*RUN, '--max_iters=2000', '--save_interval=1500', '--eval_interval=0',
                  sabotage=slowly(0.01))
    child.until('iter 5:').signal(signal.SIGUSR2)
    child.until('iter 30:')
    assert 5 < newest_state(child.out)['iter_num'] <= 30
    child.stop()
    return "a checkpoint at once, and the run continues"


def saving_for(seconds):
    """A run in the midst of a save that takes so long."""
    def sabotage():
        real = torch.save

        def save(*args):
            print('SAVING', flush=True)
            time.sleep(seconds)
            real(*args)
        torch.save = save
    return Child(*RUN, '--save_interval=10', sabotage=sabotage).until('SAVING')


@case()
def signal_twice(quick):
    """SIGHUP and SIGTERM within milliseconds during a save; one more after two seconds"""
    child = saving_for(0.3)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
        child.signal(number)
        time.sleep(0.002)
    assert child.wait() in (143, 129) and whole_ones(child.out), child.text()[-1000:]
    same_as_through(resume(child.out).out, log=False)
    child, t0 = saving_for(20), time.time()
    child.signal(signal.SIGTERM)
    time.sleep(2.2)
    child.signal(signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM and time.time() - t0 < 7
    return ("within two seconds they are one request: the save ends, it stops, and the bits are the same at "
            "the end; a later one ends it at once")


@case()
def signal_during_an_evaluation(quick):
    """SIGTERM during a long evaluation"""
    def slow():
        real = model.GPT.forward

        def forward(self, *args, **kwargs):
            time.sleep(0 if self.training else 0.02)
            return real(self, *args, **kwargs)
        model.GPT.forward = forward
    flags = ['--eval_interval=31', '--eval_iters=500', '--save_interval=1000']
    child = Child(*PLACE, '--init_from=resume', *flags, out=some_run(), sabotage=slow).until('iter 30:')
    time.sleep(0.3)
    t0 = time.time()
    child.stop()
    took = time.time() - t0
    assert took < 3 and 'after 31 iterations' in child.text() and 'step 31:' not in child.text(), child.text()
    assert 'step 31:' in resume(child.out, '--max_iters=34', '--eval_iters=2').text()
    return f"stopped within {took:.0f} s, evaluated after the resume"


@case()
def time_is_up(quick):
    """max_minutes"""
    minutes, t0 = 0.05 if quick else 0.1, time.time()
    text = train('--max_iters=100000', f'--max_minutes={minutes}', '--save_interval=100000',
                 '--eval_interval=0', sabotage=slowly(0.01), expect=143).text()
    assert re.search('stopped by max_minutes after [1-9][0-9]* iterations, saved in', text), text
    assert time.time() - t0 < 60 * minutes + 1, text[-500:]
    return "status 143, saved, the line to continue with"


@case()
def signal_to_one_of_several(quick):
    """SIGTERM to one of 2 processes"""
    flags = ['--save_interval=1000']
    for rank in (1,) if quick else (0, 1):
        child = Child(*RUN, *flags, ranks=2, sabotage=slowly(0.05)).until('iter 5:')
        child.signal(signal.SIGTERM, rank)
        child.wait()
        assert child.statuses == [143, 143], child.statuses
        same_as_through(resume(child.out, ranks=2).out, *flags, ranks=2)
    return "all stop after the same iteration, save, status 143 each; the same bits and log after the resume"


# -----------------------------------------------------------------------------
# losses that are no numbers


def poison(bad, rank=None):
    """Sabotage: the loss of the iterations in `bad` is nan, in all processes or in one of them."""
    def sabotage():
        real, real_step, now = model.GPT.forward, guard.Guard.step, [0]

        def step(self, it, *args):
            now[0] = it + 1
            return real_step(self, it, *args)

        def forward(self, idx, targets=None, *args, **kwargs):
            logits, loss = real(self, idx, targets, *args, **kwargs)
            if self.training and targets is not None and now[0] in bad:
                loss = loss * float('nan')
            return logits, loss
        guard.Guard.step = step
        if rank is None or os.environ.get('RANK') == str(rank):
            model.GPT.forward = forward
    return sabotage


@case()
def a_loss_is_nan(quick):
    """nan in the loss of one iteration, on one process and on one of two"""
    child = train('--eval_interval=0', '--save_interval=10', '--max_iters=15', '--lr_decay_iters=32',
                  sabotage=poison({12}))
    note, = [line for line in child.text().splitlines() if 'was skipped' in line]
    assert 'the update of iteration 12 was skipped, its loss is nan, its gradient norm nan' in note, note
    # without the sabotage that iteration is a good one: the same samples, weights, dropout and lr
    again = paste(note.split('again: ')[1])
    rows = [row for log in (log_without_times(again.out), through('--eval_interval=0')[1])
            for row in log if row['iter'] == '12']
    found, normal = [[row[name] for name in ('loss', 'grad_norm', 'lr')] for row in rows]
    assert found == normal
    a, b = (train('--eval_interval=0', f'--log_interval={n}', sabotage=poison({12})).out for n in (1, 9))
    assert fingerprint(a) == fingerprint(b), 'when it is looked at changes nothing'
    two = train('--eval_interval=0', ranks=2, sabotage=poison({12, 13}, rank=1))
    assert 'iteration 12 was skipped' in two.text(), two.text()[-800:]
    return ("skipped on all processes alike, told with iteration, loss, norm and the line that replays it; "
            "weights finite")


@case()
def every_loss_is_nan(quick):
    """nan from iteration 22 on, which is looked at each 17 iterations"""
    child = train('--save_interval=20', '--eval_interval=0', '--log_interval=17', '--max_iters=100',
                  sabotage=poison(set(range(22, 1000))), expect=3)
    text, state = child.text(), newest_state(child.out)
    assert f'error: {34 + 1 - 22} updates in a row were skipped' in text and text.count('error: ') == 1, text
    assert all(torch.isfinite(p).all() for p in state['model'].values()) and state['iter_num'] == 20
    return "status 3, the last good checkpoint untouched"


@case()
def the_weights_are_ruined(quick):
    """a learning rate of 1e12, so that no loss is finite any more; resumed by the line that is printed"""
    flags = '--arch=gpt2 --matrix_optimizer=adamw --max_iters=60 --lr_decay_iters=60 --eval_interval=0'.split()
    ruin = ['--learning_rate=1e12', '--matrix_lr=1e12', '--grad_clip=0']
    out = train('--save_interval=5', *flags, sabotage=stop_at(30), expect=143).out
    text = resume(out, *ruin, '--save_interval=1', expect=3).text()
    assert text.count('error: ') == 1 and 'updates in a row were skipped' in text, text
    good, line = re.search(r'(\S+\.pt) is from before. to continue .* learning rates: (.*)', text).groups()
    assert load.read(good)['iter_num'] == 30, text
    # it trains once these are smaller
    line = re.sub(r'(\w+(_lr|_rate))=\S+', r'\1=1e-4', line)
    assert line.count('=1e-4') == 2, line
    assert 'skipped' not in paste(line).text()
    out = train('--save_interval=5', *flags, '--max_iters=34', sabotage=poison(set(range(23, 32)))).out
    saved = sorted(path.name for path in out.glob('ckpt_0*'))
    assert saved == ['ckpt_00000020.pt', 'ckpt_00000034.pt'], saved
    return ("status 3, no ruined weights in the place of good ones; the printed line, with smaller rates, "
            "trains")


# -----------------------------------------------------------------------------
# one writer


@case()
def two_runs_in_one_folder(quick):
    """a second run into the same out_dir, while the first trains and after kill -9"""
    first = Child(*RUN, '--max_iters=100000', '--save_interval=10', sabotage=slowly(0.02)).until('iter 11:')
    for flags in (['--init_from=resume'], ['--overwrite']):
        second = train(*flags, out=first.out, expect=2)
        assert 'another run is writing into' in second.text(), second.text()
    seen = len(re.findall('iter ', first.text()))
    first.until(f'iter {seen + 10}:').signal(signal.SIGKILL)
    assert first.wait() == -9
    resume(first.out, '--max_iters=10')
    return "refused with status 2, the first unharmed; kill -9 frees the lock"


# -----------------------------------------------------------------------------
# the data


@case()
def data_truncated_under_a_run(quick):
    """train.bin cut short, or replaced, while a run reads it"""
    folder = make_dataset(SCRATCH / 'data', 'shrinking')
    child = Child(*RUN, '--dataset=shrinking', '--max_iters=100000').until('iter 10:')
    os.truncate(folder / 'train.bin', 64)
    assert child.wait() == 2 and 'became shorter while it was read' in child.text(), child.text()[-1000:]
    assert newest_state(child.out)['iter_num'] >= 10
    folder = make_dataset(SCRATCH / 'data', 'replaced')
    child = Child(*RUN, '--dataset=replaced', sabotage=slowly(0.02)).until('iter 3:')
    (folder / 'new').write_bytes(bytes(80000))
    os.replace(folder / 'new', folder / 'train.bin')
    assert child.wait() == 0
    same_as_through(child.out)
    return "cut: status 2, the checkpoints are whole; replaced by renaming: it continues with what it opened"


def unreadable(nth, number):
    """Sabotage: from the nth read of the training data on, the system refuses."""
    def sabotage():
        real, calls = dataset.Tokens.read_file, [0]

        def read_file(self, part, *args):
            calls[0] += 'train' in self.path and part.nbytes < 100  # not the long ones of the beginning
            if calls[0] >= nth:
                raise OSError(number, os.strerror(number))
            return real(self, part, *args)
        dataset.Tokens.read_file = read_file
    return sabotage


@case()
def data_cannot_be_read(quick):
    """EIO from train.bin in an iteration, and in an evaluation; ESTALE on two processes"""
    # 8 windows in an iteration, 4 in an evaluation: iteration 9, the evaluation after 14
    for nth, ranks, number in ((82, 1, errno.EIO), (122, 1, errno.EIO), (42, 2, errno.ESTALE)):
        child = train(sabotage=unreadable(nth, number), ranks=ranks, expect=2)
        assert f'train.bin cannot be read ({os.strerror(number)})' in child.text(), child.text()
        same_as_through(resume(child.out, ranks=ranks).out, ranks=ranks)
    return "status 2, one line; the same bits after the resume"


# -----------------------------------------------------------------------------
# a process of several


@case()
def a_process_is_lost(quick):
    """kill -9 of one of 3 processes, nobody restarts it"""
    for rank in (0,) if quick else (0, 2):
        child = Child(*RUN, '--gradient_accumulation_steps=3', '--max_iters=100000', ranks=3).until('iter 5:')
        child.signal(signal.SIGKILL, rank)
        child.wait(limit=30)
        lines = [line for line in child.text().splitlines() if line.startswith('error: lost contact')]
        assert sorted(child.statuses) == [-9, 5, 5] and len(lines) == 2, child.text()[-3000:]
        assert 'Traceback' not in child.text() and '--init_from=resume' in lines[0], child.text()[-3000:]
        at = newest_state(child.out)['iter_num']
        resume(child.out, f'--max_iters={at + 2}', '--lr_decay_iters=100000', ranks=3)
    return "the others end within seconds, one line and status 5 each"
