"""Tasks and samples in the training loop: at the right iterations, the same after a resume, without a
trace in the training."""

import re
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, make_dataset, rows, same, saved
from test_eval import ASCII
from test_tasks import BYTES, ONE, PLAIN, make_net, write_tasks

from support import files, samples, signals
from support.evaluate import Interrupted
from support.tokenizer import make_tokenizer


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    """A folder with a dataset, tasks and prompts; the flags of a tiny run; those of one with evaluations."""
    folder = tmp_path_factory.mktemp('inloop')
    make_dataset(write_tasks(folder / 'data'), 'ascii', ASCII)
    (folder / 'prompts.txt').write_text('7 times\n\n4 times 4 is 16.\\n5\n3\n')
    plain = [*TINY, f"--data_dir={folder / 'data'}", '--dataset=ascii', '--block_size=64', '--dropout=0.1',
             '--max_iters=7']
    evaluated = [*plain, '--tasks=hellaswag,core:5', '--tasks_interval=2',
                 '--sample_interval=1x2', f"--sample_prompts={folder / 'prompts.txt'}", '--sample_tokens=12']
    return folder, plain, evaluated


@pytest.fixture
def finished(works, place):
    """The folder of a run with all evaluations, made once."""
    folder, _, evaluated = place
    out = folder / 'finished'
    if not out.exists():
        (out / 'stdout').write_text(works('train.py', *evaluated, f'--out_dir={out}').out)
    return out


def logged(folder):
    log = rows(folder)
    return {name: {int(row['iter']): float(row[name]) for row in log if row[name]}
            for name in 'loss val_loss hellaswag core'.split()}


def samples_of(folder):
    return (folder / 'samples.md').read_text()


def test_the_training_is_left_alone(works, place, finished, tmp_path):
    _, plain, _ = place
    works('train.py', *plain, f"--out_dir={tmp_path / 'plain'}")
    a, b = (saved(folder, 'ckpt_00000007.pt') for folder in (tmp_path / 'plain', finished))
    assert same(a['model'], b['model']) and same(a['optimizer']['state'], b['optimizer']['state']), 'to the bit'
    log, without = logged(finished), logged(tmp_path / 'plain')
    assert log['loss'] == without['loss'] and log['val_loss'] == without['val_loss']
    assert list(log['hellaswag']) == list(log['core']) == [2, 4, 6, 7]
    assert re.findall('(?m)^## after (.*) iterations', samples_of(finished)) == ['1', '3', '7'], 'gaps of 1, 2 and 4'


def test_the_end_is_what_eval_finds(script, place, finished, tmp_path):
    folder, _, _ = place
    log, out = logged(finished), (finished / 'stdout').read_text()
    assert f"step 7: hellaswag {100 * log['hellaswag'][7]:.2f} \u00b1" in out
    assert f"step 7: CORE {log['core'][7]:.4f}, the mean of 4" in out
    copy = shutil.copytree(finished, tmp_path / 'copy')
    result = script('eval.py', f'--out_dir={copy}', '--split=none', '--tasks=hellaswag,core:5',
                    f"--data_dir={folder / 'data'}", '--device=cpu', '--dtype=float32')
    assert files.read_json(copy / 'eval.json')['core'] == pytest.approx(log['core'][7]), result.err
    assert 'eval.json and report.md' in result.out
    text = (copy / 'report.md').read_text()
    assert '| HellaSwag accuracy |' in text
    assert text.index('## Samples') < text.index('## Settings') < text.index('## Evaluations')
    assert '## By eval.py, after 7 iterations' in text and '- sums: accuracy ' in text


def test_after_interruptions_all_is_as_without(script, place, finished, tmp_path, monkeypatch):
    from support.signals import Stop
    _, _, evaluated = place
    real, calls = Stop.is_stopping, [0]

    def is_stopping(self):  # called some eighty times, between the batches of evaluations
        calls[0] += 1
        if calls[0] in (20, 40, 60):
            signal.raise_signal(signal.SIGTERM)
        return real(self)
    monkeypatch.setattr(Stop, 'is_stopping', is_stopping)
    flags = [*evaluated, f"--out_dir={tmp_path / 'parts'}", '--init_from=auto']
    assert [script('train.py', *flags).status for _ in range(4)] == [143, 143, 143, 0]
    assert logged(tmp_path / 'parts') == logged(finished)
    assert samples_of(tmp_path / 'parts') == samples_of(finished)
    assert (tmp_path / 'parts' / 'report.md').read_text().count(': stopped by SIGTERM after ') == 3


@pytest.mark.parametrize('args, words', [
    ('--data_dir=empty --dataset=ascii --tasks=core --tasks_interval=2', 'prepare.py core'),
    ('--sample_interval=2 --sample_prompts=nowhere.txt', 'nowhere.txt'),
    ('--sample_interval=2 --sample_prompts=empty.txt', 'empty'), ('--sample_interval=2x0.5', 'sample_interval')])
def test_what_is_missing_is_told_before_anything_is_trained(script, place, tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'empty.txt').write_text('\n')
    make_dataset('empty', 'ascii', ASCII)
    result = script('train.py', *place[1], '--out_dir=out', *re.split(' (?=--)', args))
    assert result.status == 2 and result.err.count('error: ') == 1 and words in result.err, result.err
    assert not (tmp_path / 'out').exists()


# -----------------------------------------------------------------------------
# without a run


def test_samples_are_the_prompts_with_what_follows(place, tmp_path, capsys):
    def sampler(prompts):
        k = dict(out_dir=str(tmp_path), sample_prompts=prompts, sample_tokens=12, seed=1337, eval_only=False,
                 sample_interval=5, max_iters=9)
        run = SimpleNamespace(knobs=k, data=SimpleNamespace(tokenizer=lambda: make_tokenizer(BYTES)))
        return samples.samples_in_loop(run, make_net('llama'), ONE, PLAIN, SimpleNamespace(poll=lambda: None))
    sample, unprompted = sampler(str(place[0] / 'prompts.txt')), sampler(None)
    assert sample(3) == sample(7) == {}
    last = samples_of(tmp_path).split('## after 7 iterations\n\n')[1]
    parts = re.findall("(?s)(.*?) continues:\n\n(```+)text\n(.*?)\n\\2\n\n", last)
    assert [prompt for prompt, _, _ in parts] == ["'7 times'", "'4 times 4 is 16.\\n5'", "'3'"]
    assert len({text for _, _, text in parts}) == 3
    out = capsys.readouterr().out
    assert out.startswith("step 3: it writes '7 times") and out.count('\n') == 2
    unprompted(8)
    before = samples_of(tmp_path)
    text = before.split('## after 8 iterations\n\n')[1]
    assert text.count('```text') == 3 and 'continues' not in text
    sample(7), unprompted(8)  # a run that was interrupted after iteration 3 writes the later ones anew
    assert samples_of(tmp_path) == before


def test_samples_are_drawn_as_asked_for_and_the_next_ones_told(works, place, tmp_path):
    folder, plain, _ = place
    flags = [*plain, '--sample_interval=2x1.5', f"--sample_prompts={folder / 'prompts.txt'}"]
    result = works('train.py', *flags, '--sample_tokens=5 temperature=0', f"--out_dir={tmp_path / 'a'}")
    told = re.findall(r'(?m)^step (\d+): it writes .*?(?: \(next at step (\d+)\))?$', result.out)
    assert told == [('2', '5'), ('5', '7'), ('7', '')]
    assert samples_of(tmp_path / 'a').count(' continues:') == 9
    for bad in ('5 heat=1', '5 top_p=2', 'many'):
        with pytest.raises(ValueError):
            samples.parse_style(bad)
    style = samples.parse_style('64 temperature=1 top_p=0.8')
    assert [style[name] for name in 'tokens temperature top_k top_p'.split()] == [64, 1, 200, 0.8]


def test_time_that_is_up_behind_the_last_evaluation_stops_nothing(works, place, tmp_path, monkeypatch):
    monkeypatch.setattr(samples, 'append', lambda *_: monkeypatch.setattr(signals.time, 'monotonic', lambda: 1e9))
    assert 'done: 7' in works('train.py', *place[1], '--sample_interval=100', '--max_minutes=900', f'--out_dir={tmp_path}').out


def test_a_compiled_model_samples_uncompiled_and_stays_compiled():
    net, calls = make_net('llama').train(), []
    net.compile(backend=lambda graph, inputs: calls.append(1) or graph)
    compiled, state = net._compiled_call_impl, torch.get_rng_state()

    def write(it, **kwargs):
        return samples.write(net, make_tokenizer(BYTES), [('', [256])] * 3, 8, it, 1337, PLAIN, **kwargs)
    texts = write(5)
    assert not calls and net._compiled_call_impl is compiled and net.training
    assert torch.equal(state, torch.get_rng_state())
    assert texts == write(5) != write(6)
    with pytest.raises(Interrupted):
        write(5, poll=lambda: 'stop')
