"""
docs/hacking.md: each of its diffs applies, needs hardly more edits than in nanoGPT, trains, resumes
bit-exactly after a SIGKILL, and is used by the report, the plan and sample.py. And the traps: no copy of the
code bypasses an edit.
"""

import copy
import functools
import os
import re
import shutil
import subprocess
import sys
import types

import pytest
import torch

import warm
from conftest import REPO, TEXT, TINY, captured, make_dataset, same

PAGE = (REPO / 'docs' / 'hacking.md').read_text(encoding='utf-8')
DIFFS = re.findall(r'```diff\n(.*?)```', PAGE, re.DOTALL)
# in the order of the page: the hunks that the same change takes in nanoGPT, counted at its commit 3adf61e;
# ours, by the page's table; the flags that it is trained with
CHANGES = {
    'knob': (4, ['--label_smoothing=0.1']),
    'schedule': (1, ['--lr_schedule=exponential']),
    'sgd': (1, ['--learning_rate=0.1']),
    'lion': (2, ['--learning_rate=1e-3']),
    'alibi': (4, ['--positions=alibi']),
    'minp': (2, []),
    'mixture': (2, ['--second_dataset=other']),
    'number': (1, []),
    'evaluation': (2, []),
    'block': (1, ['--arch=modern', '--matrix_optimizer=muon']),
    'window': (6, ['--window=3']),
    'averaged': (7, ['--ema_decay=0.9']),
}
HERE = '--device=cpu --dtype=float32 --compile=False --data_dir=data'.split()
TRAIN = [*TINY, *HERE, '--dataset=tiny', '--dropout=0.1', '--max_iters=20', '--eval_interval=10',
         '--save_interval=5']

# runs scripts one after the other; a training into the folder `killed` ends by SIGKILL in iteration 12
DRIVER = '''
import os, runpy, signal, shlex, sys
from support.guard import Guard
if not any(command.startswith('plot.py') for command in sys.argv):
    sys.modules['matplotlib'] = None  # drawing takes a second
step = Guard.step

def step_or_die(self, it, *args):
    if it == 12 and self.run.knobs['out_dir'] == 'killed' and not self.run.resuming:
        signal.raise_signal(signal.SIGKILL)
    step(self, it, *args)

Guard.step = step_or_die
for command in sys.argv[1:]:
    sys.argv = shlex.split(command)
    runpy.run_path(sys.argv[0], run_name='__main__')
'''
# a model with random weights: the logits of a text, read whole, and through a cache in two parts and token by
# token
ALIBI = '''
import torch
from model import GPT, GPTConfig, KVCache

for dtype, n_kv_head, tolerance in ((torch.float32, 4, 1e-4), (torch.bfloat16, 2, 0.1)):
    torch.manual_seed(0)
    config = dict(block_size=16, vocab_size=11, n_layer=2, n_head=4, n_embd=32, n_kv_head=n_kv_head)
    model = GPT(GPTConfig(positions='alibi', **config)).eval().to(dtype)
    for block in model.transformer.h:
        block.attn.c_attn.weight.data *= 20  # so that it matters where it looks
    idx = torch.randint(11, (2, 12))
    with torch.no_grad():
        whole = model(idx, full_logits=True)[0].float()
        model.config.positions = 'none'
        effect = (whole - model(idx, full_logits=True)[0]).abs().mean()
        model.config.positions = 'alibi'
        for static in (False, True):
            cache, parts = KVCache(model, 2, 16, static), []
            for new in (idx[:, :5], idx[:, 5:8], *idx[:, 8:].split(1, dim=1)):
                parts.append(model(new, full_logits=True, cache=cache.advance(new.size(1)))[0])
            error = (torch.cat(parts, dim=1) - whole).abs().mean()
            assert error < tolerance * effect, (dtype, static, error, effect)
    model.crop_block_size(8)
    assert not any('wpe' in name for name, _ in model.named_parameters())
    print('alibi agrees in', dtype)
'''
# min_p=0.5 leaves what is at least half as likely as the likeliest
MINP = '''
import torch
from model import GPT, GPTConfig, sample_next

logits = torch.tensor([[2.0, 1.5, 0.0, -1.0]]).repeat(200, 1)
assert set(sample_next(logits, 1.0, min_p=0.5)[:, 0].tolist()) == {0, 1}
model = GPT(GPTConfig(block_size=8, vocab_size=11, n_layer=1, n_head=2, n_embd=16)).eval()
idx = torch.zeros(1, 2, dtype=torch.long)
assert torch.equal(model.generate(idx, 9, min_p=1.0), model.generate(idx, 9, temperature=0))
print('min_p agrees')
'''

# what lies three or more positions back counts for nothing in one layer, whole and through a cache
WINDOW = '''
import torch
from model import GPT, GPTConfig, KVCache

torch.manual_seed(0)
config = dict(block_size=16, vocab_size=11, n_layer=1, n_head=2, n_embd=32, window=3)
model, idx = GPT(GPTConfig(**config)).eval(), torch.randint(11, (1, 9))
other = idx.clone()
other[0, :4] = 10 - other[0, :4]
with torch.no_grad():
    for static in (False, True):
        texts = []
        for text in (idx, other):
            cache = KVCache(model, 1, 16, static)
            parts = [model(new, full_logits=True, cache=cache.advance(new.size(1)))[0]
                     for new in (text[:, :5], *text[:, 5:].split(1, dim=1))]
            texts.append(torch.cat(parts, dim=1))
            torch.testing.assert_close(texts[-1], model(text, full_logits=True)[0])
        torch.testing.assert_close(texts[0][:, 6:], texts[1][:, 6:])
        assert not torch.allclose(texts[0][:, 5], texts[1][:, 5])
print('the window agrees')
'''


@pytest.fixture(scope='session')
def copies(tmp_path_factory):
    """copies(name) -> a copy of the project with that change, and with two datasets of the same
    characters."""
    base, made = tmp_path_factory.mktemp('hacking'), {}
    env = {**os.environ, 'GIT_CEILING_DIRECTORIES': str(base)}

    def copy(name):
        if name in made:
            return made[name]
        folder = base / name
        for part in ('', 'support', 'config'):
            (folder / part).mkdir()
            for file in (REPO / part).glob('*.py'):
                shutil.copy2(file, folder / part)
        make_dataset(folder / 'data')
        make_dataset(folder / 'data', 'other', TEXT[::-1])
        diff = DIFFS[list(CHANGES).index(name)].encode()
        done = subprocess.run('git apply --recount -'.split(), input=diff, cwd=folder, env=env,
                              capture_output=True)
        assert done.returncode == 0, f"docs/hacking.md, {name}: {done.stderr.decode()}make its diff again"
        (folder / 'driver.py').write_text(DRIVER)
        (folder / 'alibi.py').write_text(ALIBI)
        (folder / 'minp.py').write_text(MINP)
        (folder / 'window.py').write_text(WINDOW)
        made[name] = folder
        return folder

    return copy


def hunks(folder):
    """How many hunks git counts between the project and its changed copy."""
    files = [path.relative_to(folder) for part in ('', 'support') for path in (folder / part).glob('*.py')]
    changed = [file for file in files if (REPO / file).exists()
               and (REPO / file).read_bytes() != (folder / file).read_bytes()]
    count = 0
    for file in changed:
        command = ['git', 'diff', '--no-index', '-U0', REPO / file, folder / file]
        diff = captured(command).stdout
        count += sum(line.startswith('@@') for line in diff.splitlines())
    return count


def run(folder, *commands):
    """(status, output) of a process that runs these commands one after the other."""
    process = warm.Process('driver.py', *(' '.join(command) for command in commands), repo=folder)
    out = process.stdout.read().decode()
    status, errors = process.wait()
    return status, out + errors


def test_the_page_has_each_change_once():
    assert len(DIFFS) == len(CHANGES)
    assert len(re.findall(r'(?m)^## \d+\. ', PAGE)) == 11
    assert all(len(line) <= 111 for diff in DIFFS for line in diff.splitlines() if line[0:1] == '+')


@pytest.mark.parametrize('name', CHANGES)
def test_a_change_needs_few_edits_trains_resumes_reports_samples_and_is_planned(name, copies):
    folder, (nanogpt, flags) = copies(name), CHANGES[name]
    row = re.findall(r'(?m)^\| [^|]+ \| (\d+) \| (\d+) \|$', PAGE)[list(CHANGES).index(name)]
    assert row == (str(hunks(folder)), str(nanogpt))
    assert hunks(folder) <= nanogpt + 1

    status, out = run(folder, ['train.py', '--out_dir=whole', *TRAIN, *flags],
                      ['train.py', '--out_dir=killed', *TRAIN, *flags])
    assert status == -9, out
    assert 'iter 19: ' in out and 'iter 11: ' in out.split('iter 19: ')[1], out
    # a fresh process needs no flag but where it is
    sample = 'sample.py --out_dir=killed --device=cpu --num_samples=2 --max_new_tokens=30'.split()
    more = {'number': ['plot.py killed --y=weight_norm --to=norm.png'.split()], 'alibi': [['alibi.py']],
            'minp': [['minp.py']], 'window': [['window.py']],
            'averaged': [[*sample, '--averaged=True'],
                         ['eval.py', '--out_dir=killed', *HERE[:1], '--averaged=True', '--data_dir=data']]}
    status, out = run(folder, ['train.py', '--out_dir=killed', '--init_from=resume', *HERE], sample,
                      *more.get(name, []), ['plan.py', *TRAIN, *flags])
    assert status == 0, out
    assert 'after 10 iterations' in out and 'note: ' not in out and '\ndisk ' in out, out
    assert out.count('---------------') == (4 if name == 'averaged' else 2), out

    whole, killed = (torch.load(folder / out_dir / 'ckpt_00000020.pt') for out_dir in ('whole', 'killed'))
    assert whole['optimizer']['state'] and same(whole['optimizer'], killed['optimizer'])
    assert same(whole['model'], killed['model'])
    assert same(whole.get('averaged'), killed.get('averaged'))
    check_that_it_did_something(name, folder, whole, out)


def check_that_it_did_something(name, folder, ckpt, out):
    report = (folder / 'killed' / 'report.md').read_text()
    log = (folder / 'killed' / 'log.csv').read_text()
    assert ': 20 of 20 iterations' in report
    if name == 'knob':
        assert ckpt['model_args']['label_smoothing'] == ckpt['config']['label_smoothing'] == 0.1
    if name == 'schedule':
        # at iteration 11, halfway between 1e-2 and 1e-3
        assert 'schedule  exponential' in out and 'lr 3.16e-03' in out
    if name in ('sgd', 'lion'):
        kept = {'sgd': ('SGD', 'momentum_buffer'), 'lion': ('Lion', 'momentum')}[name]
        assert kept == (ckpt['optimizer_class'], *ckpt['optimizer']['state'][0])
    if name == 'alibi':
        assert 'transformer.wpe.weight' not in ckpt['model'] and out.count('alibi agrees') == 2
    if name == 'window':
        assert 'the window agrees' in out
    if name == 'averaged':
        # that of the weights themselves is in the log, of the average another one
        assert f'{ckpt["evaluation"]["metrics"]["val_loss"]:.4f}' != re.search(r'tiny/val: loss ([0-9.]+)', out)[1]
        assert not same(ckpt['averaged'], ckpt['model'])
    if name == 'minp':
        assert 'min_p agrees' in out
    if name == 'number':
        assert (folder / 'norm.png').stat().st_size > 10_000 and 'weight_norm' in log
    if name == 'evaluation':
        assert 'accuracy' in log and '| accuracy |' in report


# -----------------------------------------------------------------------------
# traps


def edited(old, new):
    """model.py as a module of its own, with `old` replaced."""
    source = (REPO / 'model.py').read_text(encoding='utf-8')
    assert source.count(old) == 1, old
    module = types.ModuleType('edited_model')
    sys.modules['edited_model'] = module
    exec(compile(source.replace(old, new), 'edited_model', 'exec'), module.__dict__)
    return module


def all_logits(module, cached, dtype=torch.bfloat16):
    """Logits of one text by random weights, on the CPU."""
    from model import KVCache
    from support import cpu
    torch.manual_seed(1)
    config = module.GPTConfig(block_size=16, vocab_size=11, n_layer=2, n_head=2, n_embd=32)
    model, idx = module.GPT(config).eval().to(dtype), torch.randint(11, (2, 9))
    for block in model.transformer.h:
        block.attn.c_attn.weight.data *= 20
    if dtype == torch.bfloat16:
        cpu.faster(model)
    with torch.no_grad():
        if not cached:
            return model(idx, full_logits=True)[0].float()
        cache = KVCache(model, 2, 16)
        parts = [model(new, full_logits=True, cache=cache.advance(new.size(1)))[0]
                 for new in (idx[:, :6], *idx[:, 6:].split(1, dim=1))]
        return torch.cat(parts, dim=1).float()


@pytest.mark.parametrize('edit', ['(q, k, v, scale=0.9,', '(q, k.roll(1, 0), v,'])
@pytest.mark.parametrize('cached', [False, True])
def test_an_edit_of_the_line_of_the_attention_holds_in_bfloat16_on_a_cpu_and_with_the_cache(edit, cached):
    import model
    change = edited('scaled_dot_product_attention(q, k, v,', f'scaled_dot_product_attention{edit}')
    before, after = all_logits(model, cached), all_logits(change, cached)
    right = all_logits(change, cached=False, dtype=torch.float32)
    # rounding to bfloat16 is much less than the effect of the edit; of a bypassed one it would be all
    assert (after - right).abs().mean() < 0.3 * (after - before).abs().mean()


@pytest.mark.parametrize('old, new', [
    ('reduction=reduction)', 'reduction=reduction, label_smoothing=0.1)'),
    ('return logits, F.cross_entropy(', 'return logits, x.square().mean() + F.cross_entropy('),
    ('flat = logits.float()', 'flat = 2 * logits.float()'),
    # PaLM's z-loss
    ('return logits, F.cross_entropy(', 'return logits, 1e-4 * flat.logsumexp(-1).square().mean() + F.cross_entropy('),
])
def test_an_edited_loss_is_not_bypassed_by_the_chunked_one(old, new):
    from support.devices import chunked_loss
    change = edited(old, new)
    net = change.GPT(change.GPTConfig(block_size=16, vocab_size=11, n_layer=1, n_head=2, n_embd=32))
    idx, found = torch.arange(32).view(2, 16) % 11, []
    for loss_of in (net.loss, functools.partial(chunked_loss, net, 8)):
        net.loss = loss_of
        net.zero_grad()
        loss = net(idx, idx)[1]
        loss.backward()
        found.append((loss, net.lm_head.weight.grad.clone()))
    torch.testing.assert_close(*found)


def test_what_is_added_to_the_loss_counts_once_in_the_chunked_one():
    from support.devices import chunked_loss
    change = edited('return logits, F.cross_entropy(', 'return logits, 1.0 + F.cross_entropy(')
    net = change.GPT(change.GPTConfig(block_size=16, vocab_size=11, n_layer=1, n_head=2, n_embd=32))
    idx = torch.arange(32).view(2, 16) % 11
    targets = idx.where(idx > 7, -1)
    whole = net(idx, targets)[1]
    net.loss = functools.partial(chunked_loss, net, 8)
    torch.testing.assert_close(net(idx, targets)[1], whole)


def test_parameters_that_are_shared_stay_one_and_buffers_what_they_are_when_loaded():
    from support import load
    change = edited("        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)\n",
                    "        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)\n"
                    "        self.transformer.h[1].mlp.c_fc.weight = self.transformer.h[0].mlp.c_fc.weight\n"
                    "        self.register_buffer('mask', torch.ones(2, dtype=torch.bool))\n"
                    "        self.transformer.wpe.weight.requires_grad_(False).lr_mult = 2\n")
    config = change.GPTConfig(block_size=16, vocab_size=11, n_layer=2, n_head=2, n_embd=32)
    net = change.GPT(config)
    again = load.build(change.GPT, {'model': net.state_dict(), 'model_args': config.model_args(), 'path': 'x'})
    assert len(list(again.parameters())) == len(list(net.parameters()))
    assert again.lm_head.weight is again.transformer.wte.weight
    assert again.mask.dtype == torch.bool
    p = again.transformer.wpe.weight
    assert p.lr_mult == 2 and not p.requires_grad


@pytest.mark.parametrize('field', ['x: float = 0.0', 'x: float = -1.0', 'x: int = None',
                                   'x: float | None = 0.5'])
def test_a_field_of_gptconfig_needs_no_knob_and_no_range(field):
    from support.setup import make_config
    change = edited('    near_layers: int = None\n\n', f'    near_layers: int = None\n    {field}\n\n')
    assert change.GPTConfig().problems() == []
    assert change.GPTConfig(dropout=-0.1).problems() and change.GPTConfig(softcap=float('nan')).problems()
    assert change.GPT(change.GPTConfig(n_layer=1, n_head=1, n_embd=4, vocab_size=5, block_size=4))
    assert make_config({'n_layer': 3, 'x': 5}).n_layer == 3  # a knob that is no field


def test_a_field_without_a_knob_is_taken_from_the_checkpoint(monkeypatch):
    from support import setup
    change = edited('    near_layers: int = None\n\n', '    near_layers: int = None\n    x: float = 0.0\n\n')
    monkeypatch.setattr(setup, 'GPTConfig', change.GPTConfig)
    assert setup.make_config({'n_layer': 3}).x == 0.0
    saved = change.GPTConfig(n_layer=3, x=0.5).model_args()
    assert saved['x'] == 0.5 and setup.make_config({'n_layer': 3}, {'model_args': saved}).x == 0.5


def test_a_table_that_no_checkpoint_brings_is_there_after_a_resume(monkeypatch):
    from support import load
    change = edited("        self.register_buffer('rope', rope, persistent=False)\n",
                    "        self.register_buffer('rope', rope, persistent=False)\n"
                    "        self.register_buffer('table', torch.arange(4), persistent=False)\n")
    model = change.GPT(change.GPTConfig(n_layer=1, n_head=1, n_embd=4, vocab_size=5, block_size=4))
    again = load.build(change.GPT, {'model': model.state_dict(), 'model_args': model.config.model_args(), 'path': ''})
    assert again.table.tolist() == [0, 1, 2, 3] and same(again.state_dict(), model.state_dict())


@pytest.mark.parametrize('kind, options', [('AdamW', dict(amsgrad=True)), ('Adafactor', {})])
def test_the_state_of_any_optimizer_of_torch_is_resumed(kind, options):
    from support.resume import load_optimizer_state
    torch.manual_seed(0)
    net, notes = torch.nn.Linear(3, 2), []

    def optimizer_of(net):
        return getattr(torch.optim, kind)(net.parameters(), lr=0.1, **options)

    def step(net, optimizer):
        optimizer.zero_grad()
        net(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
    optimizer = optimizer_of(net)
    step(net, optimizer)
    other = copy.deepcopy(net)
    again = optimizer_of(other)
    state = copy.deepcopy(optimizer.state_dict())
    load_optimizer_state(again, {'optimizer': state, 'optimizer_class': kind}, notes.append)
    step(net, optimizer), step(other, again)
    assert same(other.state_dict(), net.state_dict()) and not notes
