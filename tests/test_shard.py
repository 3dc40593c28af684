"""Sharded training has the losses, the checkpoints and the samples of one process; what saves memory changes
nothing else."""

import sys
from pathlib import Path

import pytest
import torch
from conftest import own_process

sys.path.insert(0, str(Path(__file__).parent / 'faults'))
from harness import RUN, Child, train

from model import GPT, GPTConfig
from support.chunked_loss import ChunkedLoss, use_chunked_loss
from support import checkpoint


def test_every_layout_has_the_losses_of_one_process_and_resumes_exactly():
    done = own_process('tests/faults/layouts.py', '--quick')
    assert done.status == 0, done.out[-2000:] + done.err[-2000:]
    assert 'All are the same up to rounding.' in done.out and done.out.count('hybrid') == 2


def with_and_without(config, change, dtype=torch.float32):
    """[(loss, {name: gradient})] of a network, before and after change(net)."""
    torch.manual_seed(0)
    net = GPT(GPTConfig(block_size=32, vocab_size=101, n_layer=2, n_head=2, n_embd=32, **config)).train()
    for p in net.parameters():
        if not p.count_nonzero():
            torch.nn.init.normal_(p, std=0.1)
    idx = torch.randint(101, (3, 32))
    targets = idx.roll(-1, 1)
    targets[0, :5] = -1
    found = []
    for step in (lambda net: None, change):
        step(net)
        net.zero_grad()
        torch.manual_seed(1)  # dropout's
        with torch.autocast('cpu', torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = net(idx, targets)[1]
        (loss * 7).backward()
        found.append((loss.item(), {name: p.grad.clone() for name, p in net.named_parameters()}))
    return found, net, (idx, targets)


def same(found, loss, gradient):
    (a, grads), (b, grads_) = found
    assert a == pytest.approx(b, abs=loss)
    for name in grads:
        assert (grads[name] - grads_[name]).norm() <= gradient * grads[name].norm(), name


@pytest.mark.parametrize('arch', ['gpt2', 'llama', 'modern', 'local'])  # tied and untied, with softcap and without
def test_the_chunked_loss_is_the_loss(arch):
    def chunked(net):
        use_chunked_loss(net, 7)  # 96 targets: the last chunk is a smaller one
    found, net, (idx, targets) = with_and_without(dict(arch=arch), chunked)
    same(found, 2e-6, 2e-6)
    same(with_and_without(dict(arch=arch), chunked, torch.bfloat16)[0], 2e-5, 2e-2)
    with torch.no_grad():
        each = net(idx, targets, reduction='none')[1]
        mean = net(idx, targets)[1]
        del net.loss
        torch.testing.assert_close(each, net(idx, targets, reduction='none')[1])
        torch.testing.assert_close(mean, net(idx, targets)[1])


def test_the_chunked_loss_never_holds_all_logits():
    V, N, C = 4001, 512, 16
    x, w, largest = torch.randn(N, C, requires_grad=True), torch.randn(V, C, requires_grad=True), []
    from torch.utils._python_dispatch import TorchDispatchMode

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            outs = out if isinstance(out, (tuple, list)) else [out]
            largest.extend(t.numel() for t in outs if torch.is_tensor(t))
            return out
    with Sizes():
        ChunkedLoss.apply(x, w, torch.randint(V, (N,)), 15.0, 64).backward()
    assert max(largest) == max(64 * V, V * C)


@pytest.mark.parametrize('arch', ['gpt2', 'llama', 'modern', 'local'])
def test_activation_checkpointing_changes_no_bit(arch):
    def less(net):
        for block in net.transformer.h:
            block.activation_checkpointing = True
    (a, grads), (b, grads_) = with_and_without(dict(arch=arch, dropout=0.2), less)[0]
    assert a == b and all(torch.equal(grads[name], grads_[name]) for name in grads)


@pytest.mark.parametrize('n, flags, says', [
    (1, ['--shard=0'], 'shard=0 with one process'),
    (2, ['--shard=3'], 'shard=3 does not divide 2 processes'),
    (1, ['--shard=-1'], 'shard is out of range (-1)'),
    (1, ['--shard=full'], 'shard takes a whole number'),
])
def test_sharding_that_cannot_be_is_one_line(tiny, tmp_path, n, flags, says):
    child = Child(*tiny, '--gradient_accumulation_steps=2', *flags, out=tmp_path / 'out', ranks=n)
    child.wait()
    lines = [line for line in child.text().splitlines() if line.startswith('error:')]
    assert len(lines) == 1 and says in lines[0], child.text()
    assert child.statuses == [2] * n and not (tmp_path / 'out').exists()


def test_processes_that_were_started_differently_say_so(tiny, tmp_path):
    (tmp_path / 'mine.py').write_text("import os\nbatch_size = 4 + int(os.environ['RANK'])\n")
    flags = [flag for flag in tiny if 'batch_size' not in flag]
    flags += ['--gradient_accumulation_steps=2', tmp_path / 'mine.py']
    child = Child(*flags, out=tmp_path / 'out', ranks=2)
    child.wait()
    lines = [line for line in child.text().splitlines() if line.startswith('error:')]
    assert lines == ["error: process 1 has another batch_size than process 0 (5, there 4). start all of them "
                     "with the same command, the same config files and the same data"]
    assert child.statuses == [2, 2] and not (tmp_path / 'out').exists()


def test_a_sharded_checkpoint_has_one_copy_of_tied_weights():
    base = [flag for flag in RUN if 'arch' not in flag and 'muon' not in flag]
    sizes = []
    for flags in ([], ['--shard=0']):
        out = train('--max_iters=2', '--warmup_iters=0', *flags, base=base, ranks=2).out
        sizes.append(Path(checkpoint.newest(str(out))).stat().st_size)
    assert abs(sizes[0] - sizes[1]) < 4096
