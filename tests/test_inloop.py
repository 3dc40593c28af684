"""Questions and samples in the loop: at the right iterations, the same after a resume and on any number of processes, without a trace in the training."""

import contextlib
import csv
import json
import re
import signal
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, make_dataset, torchrun
from test_eval import TEXT
from test_tasks import BYTES, make_net, write_questions

import checkpoint
import samples
from dataset import make_tokenizer


@pytest.fixture
def run(tmp_path):
    """The flags of a tiny run that is asked, and writes, while it trains."""
    write_questions(tmp_path / 'questions')
    make_dataset(tmp_path / 'data', 'ascii', ''.join(map(chr, range(32, 127))) + '\n' + TEXT.replace('\u00e9', 'e'))
    (tmp_path / 'prompts.txt').write_text('7 times\n\n4 times 4 is 16.\\n5\n3\n')
    plain = [*TINY, f"--data_dir={tmp_path / 'data'}", '--dataset=ascii', '--block_size=64', '--dropout=0.1', '--max_iters=7', f"--out_dir={tmp_path / 'out'}"]
    return plain, [*plain, '--hellaswag_interval=2', '--core_interval=3', '--core_max_per_task=5', f"--tasks_dir={tmp_path / 'questions'}", '--sample_interval=1',
                   '--sample_growth=2', f"--sample_prompts={tmp_path / 'prompts.txt'}", '--sample_tokens=12']


def found(folder):
    with open(folder / 'log.csv', newline='') as f:
        rows = list(csv.DictReader(f))
    return {name: {int(row['iter']): row[name] for row in rows if row[name]} for name in ('loss', 'val_loss', 'hellaswag', 'core', 'sample_seconds')}


def test_the_training_is_left_alone_and_the_end_is_what_eval_finds(script, run, tmp_path):
    plain, asked = run
    assert script('train.py', *plain, f"--out_dir={tmp_path / 'plain'}").status == 0
    result = script('train.py', *asked)
    assert result.status == 0, result.err
    a, b = (checkpoint.read(str(tmp_path / name / 'ckpt_00000007.pt')) for name in ('plain', 'out'))
    assert all(torch.equal(p, b['model'][name]) for name, p in a['model'].items()), 'every bit of every parameter'
    assert all(torch.equal(x, b['optimizer']['state'][k][name]) for k, state in a['optimizer']['state'].items() for name, x in state.items())
    log = found(tmp_path / 'out')
    assert log['loss'] == found(tmp_path / 'plain')['loss'] and log['val_loss'] == found(tmp_path / 'plain')['val_loss']
    assert list(log['hellaswag']) == [2, 4, 6, 7] and list(log['core']) == [3, 6, 7]
    assert re.findall('(?m)^## after (.*) iterations', (tmp_path / 'out' / 'samples.md').read_text()) == ['1', '3', '7'], 'gaps of 1, 2 and 4'
    assert f"step 7: hellaswag {100 * float(log['hellaswag'][7]):.2f} \u00b1" in result.out and f"step 7: CORE {float(log['core'][7]):.4f} over 4 tasks" in result.out
    result = script('eval.py', f"--out_dir={tmp_path / 'out'}", '--split=none', '--tasks=hellaswag,core', '--max_per_task=5', f"--tasks_dir={tmp_path / 'questions'}", '--device=cpu', '--dtype=float32')
    told = json.loads((tmp_path / 'out' / 'eval.json').read_text())
    assert told['core'] == pytest.approx(float(log['core'][7])), result.err
    assert 'eval.json and report.md' in result.out
    text = (tmp_path / 'out' / 'report.md').read_text()
    assert '## Samples, after 7 iterations' in text and '| hellaswag | core |' in text and '## By eval.py, after 7 iterations' in text and '| sums | 2 | 5' in text


def test_samples_are_the_prompts_with_what_follows(script, run, tmp_path):
    _, asked = run
    assert script('train.py', *asked).status == 0
    text = (tmp_path / 'out' / 'samples.md').read_text()
    last = text.split('## after 7 iterations\n\n')[1]
    parts = re.findall("(?s)(.*?) goes on:\n\n```text\n(.*?)\n```\n\n", last)
    assert [prompt for prompt, _ in parts] == ["'7 times'", "'4 times 4 is 16.\\n5'", "'3'"] and all(len(new) == 12 for _, new in parts)
    assert len({new for _, new in parts}) == 3
    script('train.py', *asked, '--overwrite', '--sample_prompts=None', '--sample_growth=1', '--sample_interval=7')
    text = (tmp_path / 'out' / 'samples.md').read_text()
    assert text.count('```text') == 3 and 'goes on' not in text


def test_after_an_interruption_all_is_as_without(script, run, tmp_path, monkeypatch):
    import parallel
    _, asked = run
    assert script('train.py', *asked).status == 0
    want, text = found(tmp_path / 'out'), (tmp_path / 'out' / 'samples.md').read_text()
    real, n = parallel.Requests.asked, [0]

    def stop(self):  # asked some sixty times; anywhere, most often in the middle of an evaluation
        n[0] += 1
        self.stop = self.stop or (128 + signal.SIGTERM if n[0] in (20, 30, 37) else 0)
        return real(self)
    monkeypatch.setattr(parallel.Requests, 'asked', stop)
    statuses = [script('train.py', *asked, f"--out_dir={tmp_path / 'parts'}", '--init_from=auto').status for _ in range(4)]
    assert statuses == [143, 143, 143, 0]
    got = found(tmp_path / 'parts')
    assert all(got[name] == want[name] for name in ('loss', 'val_loss', 'hellaswag', 'core')) and (tmp_path / 'parts' / 'samples.md').read_text() == text


def test_two_processes_ask_and_write_the_same(script, run, tmp_path):
    _, asked = run
    asked = [*asked, '--deterministic=True', '--gradient_accumulation_steps=2', '--max_iters=3', '--dropout=0']
    threads = torch.get_num_threads()
    try:
        assert script('train.py', *asked).status == 0
    finally:
        torch.set_num_threads(threads)
    want, text = found(tmp_path / 'out'), (tmp_path / 'out' / 'samples.md').read_text()
    result = torchrun(2, 'train.py', *asked, f"--out_dir={tmp_path / 'two'}")
    assert result.status == 0, result.err
    got = found(tmp_path / 'two')
    assert all(got[name] == want[name] for name in ('loss', 'val_loss', 'hellaswag', 'core')) and (tmp_path / 'two' / 'samples.md').read_text() == text


def test_gaps_grow_and_depend_on_the_iteration_alone():
    assert [it for it in range(40) if samples.due(it, 10)] == [0, 10, 20, 30]
    assert [it for it in range(1, 4000) if samples.due(it, 100, 2)] == [100, 300, 700, 1500, 3100]
    for interval, growth in ((1, 1.5), (50, 1.01), (7, 3), (2000, 1.2)):
        at, gap, want = 0.0, interval, []
        while at < 100_000:
            at, gap = at + gap, gap * growth
            want.append(round(at))
        got = [it for it in range(1, 100_000) if samples.due(it, interval, growth)]
        assert got == sorted(set(want))[:len(got)] and len(got) >= len(set(want)) - 1


def test_a_compiled_model_samples_uncompiled_and_stays_compiled():
    net = make_net('llama', False).train()
    calls = []
    net.compile(backend=lambda graph, inputs: calls.append(1) or graph)
    compiled, state = net._compiled_call_impl, torch.get_rng_state()
    procs = SimpleNamespace(rank=0, world_size=1, sharded=False, sum=lambda tensor: tensor)
    prompts = samples.read_prompts(None, make_tokenizer(BYTES))
    assert prompts == [('', [256])] * 3
    texts = samples.write(net, make_tokenizer(BYTES), prompts, 8, 5, 1337, procs, contextlib.nullcontext())
    assert not calls and net._compiled_call_impl is compiled and net.training and torch.equal(state, torch.get_rng_state())
    assert texts == samples.write(net, make_tokenizer(BYTES), prompts, 8, 5, 1337, procs, contextlib.nullcontext())
    assert texts != samples.write(net, make_tokenizer(BYTES), prompts, 8, 6, 1337, procs, contextlib.nullcontext())
    assert samples.write(net, make_tokenizer(BYTES), prompts, 8, 5, 1337, procs, contextlib.nullcontext(), stop=lambda: True) is None


def test_what_is_absent_is_told_before_anything_is_trained(script, run, tmp_path):
    plain, asked = run
    (tmp_path / 'empty.txt').write_text('\n')
    for args, words in ((['--hellaswag_interval=2', f'--tasks_dir={tmp_path}'], 'hellaswag_val.jsonl'), (['--core_interval=2', f'--tasks_dir={tmp_path}'], 'eval_bundle'),
                        (['--sample_interval=2', '--sample_prompts=nowhere.txt'], 'nowhere.txt'), (['--sample_interval=2', f"--sample_prompts={tmp_path / 'empty.txt'}"], 'empty'),
                        (['--sample_growth=0.5'], 'sample_growth'), (['--core_max_per_task=0'], 'core_max_per_task')):
        result = script('train.py', *plain, *args)
        assert result.status == 2 and words in result.err and result.err.count('error: ') == 1 and not (tmp_path / 'out').exists(), (args, result.err)
    (tmp_path / 'questions' / 'eval_bundle' / 'eval_data' / 'who.jsonl').unlink()
    result = script('train.py', *asked)
    assert result.status == 2 and 'who.jsonl' in result.err and 'http' in result.err
