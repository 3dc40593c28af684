"""What a run says about itself: one batch, a goal that is reached, the live line."""

import os
import re
import struct

import pytest
import warm
from conftest import NO_PICTURES, saved


def test_one_batch_may_be_trained_on_again_and_again(script, tiny):
    # without learning, the same loss
    still = '--learning_rate=0 --min_lr=0 --max_iters=4 --overwrite'.split()
    assert len(set(script('train.py', *tiny, '--overfit_batch', *still).losses().values())) == 1
    assert len(set(script('train.py', *tiny, *still).losses().values())) == 4


def test_a_run_ends_when_it_is_good_enough(works, tiny, tmp_path):
    flags = ('--max_iters=400 --eval_interval=10 --log_interval=0 --save_interval=1000 '
             '--sample_interval=1000 --sample_tokens=5').split()
    result = works('train.py', *tiny, *flags, '--stop_val_loss=2')
    assert 'it writes' in result.out, 'the end is the end'
    steps = re.findall(r'step (\d+): .* val loss ([\d.]+)', result.out)
    assert float(steps[-1][1]) <= 2 < float(steps[-2][1]) and int(steps[-1][0]) < 400
    assert 'as low as stop_val_loss=2' in result.out and 'done: ' in result.out
    ckpt = saved(tmp_path / 'out')
    assert ckpt['iter_num'] == int(steps[-1][0]), 'saved, whatever save_interval says'
    result = works('train.py', *tiny, *flags, '--init_from=resume')
    assert 'as low as stop_val_loss=2' in result.out and saved(tmp_path / 'out')['iter_num'] == ckpt['iter_num']


# train.py with a print of the user's own in its loop, on both streams
NOISY = """
import runpy, sys
from support.log import Clock
tick = Clock.tick

def noisy(self, it):
    tick(self, it)
    print('my own', it, end=' ')
    print('line')
    print('and an error', it, file=sys.stderr)

Clock.tick = noisy
sys.argv[0] = 'train.py'
runpy.run_path('train.py', run_name='__main__')
"""


def on_a_terminal(columns, *command):
    """(all that a script writes to a terminal of so many columns, the lines that stay there)"""
    pty, fcntl, termios = map(pytest.importorskip, ('pty', 'fcntl', 'termios'))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack('HHHH', 40, columns, 0, 0))
    process = warm.Process(*command, files=[theirs] * 3, env={'PYTHONPATH': NO_PICTURES})
    os.close(theirs)
    shown = b''
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # as Linux says that the other end is closed
            part = b''
        if not part:
            break
        shown += part
    os.close(ours)
    assert process.wait()[0] == 0, shown
    shown = shown.decode().replace('\r\n', '\n')
    return shown, [line.split('\r\033[K')[-1] for line in shown.split('\n')]


def test_a_terminal_has_a_live_line_below_all_that_is_printed(script, tiny, tmp_path, monkeypatch):
    monkeypatch.delenv('COLUMNS', raising=False)
    (tmp_path / 'noisy.py').write_text(NOISY)
    flags = [*tiny, '--max_iters=100', '--eval_interval=0', '--log_interval=50']
    shown, lines = on_a_terminal(80, tmp_path / 'noisy.py', *flags)
    form = r'(training|evaluating \w+) +\d+% [\d,]+ of [\d,]+(, loss [\d.]+)?, \d+m\d\ds left'
    live = re.findall(rf'(?m)(?:\033\[K|^)({form})(?=\r|$)', shown)
    assert live and max(len(line) for line, *_ in live) < 80
    for i in range(100):
        assert lines.count(f'my own {i} line') == lines.count(f'and an error {i}') == 1, i
    assert not any('left' in line for line in lines)
    line, = [line for line in lines if line.startswith('iter 50: ')]
    assert re.fullmatch(r'iter 50: loss \d\.\d{4}, time [\d.]+ms, lr .*, grad norm [\d.]+, [\d,]+ tok/s', line)
    assert re.search(r'(?m)^step 100: train loss .*, val loss ', '\n'.join(lines))

    piped = script('train.py', *flags, '--overwrite').out
    assert not re.search(r'\r|left', piped)
    line, = re.findall(r'(?m)^iter 50: .*', piped)
    assert re.search(r', epoch [\d.]+, data [\d.]+%, eta \d+m\d\ds$', line)
    assert 'batch     64 tokens per iteration = 4 sequences x 16 tokens x 1 micro-batches x 1 process\n' in piped
