"""The choice of the device, the dtype and the number of processes."""

import os
import sys
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from test_model import lively, random_ids

from configurator import InputError, launched_by_torchrun, process_ranks
from flatgpt import files, processes

TORCHRUN = {'RANK': '1', 'LOCAL_RANK': '1', 'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '1'}


@pytest.fixture
def torchrun(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize('missing', TORCHRUN)
def test_there_are_several_processes_only_if_all_variables_are_set(torchrun, monkeypatch, missing):
    assert launched_by_torchrun() and process_ranks() == (1, 1, 2)
    monkeypatch.delenv(missing)
    assert not launched_by_torchrun() and process_ranks() == (0, 0, 1)


@pytest.mark.parametrize('found', ['xpu', 'mps'])  # not supported; cannot be shared by processes
def test_the_cpu_is_used_if_the_accelerator_cannot_be(torchrun, monkeypatch, capsys, found):
    monkeypatch.setattr(torch.accelerator, 'current_accelerator', lambda check_available: torch.device(found))
    monkeypatch.setenv('RANK', '0')  # which prints
    assert processes.choose_device('auto') == 'cpu'
    assert found == 'mps' or found in capsys.readouterr().out


@pytest.mark.parametrize('capabilities, dtype', [
    ({'architecture': 'x86_64', 'avx512_bf16': True, 'amx_bf16': False}, 'bfloat16'),
    ({'architecture': 'x86_64', 'avx512_bf16': False, 'amx_bf16': True}, 'bfloat16'),
    ({'architecture': 'x86_64', 'avx512_bf16': False, 'amx_bf16': False, 'avx2': True}, 'float32'),
    ({'architecture': 'aarch64', 'neon': True, 'bf16': True}, 'bfloat16'),
    ({'architecture': 'aarch64', 'neon': True, 'bf16': False}, 'float32'),
    ({'architecture': 'ppc64le'}, 'float32'),
])
def test_bfloat16_is_chosen_on_a_cpu_with_instructions_for_it(monkeypatch, capabilities, dtype):
    monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda: MappingProxyType(capabilities))
    assert processes.choose_dtype('auto', 'cpu') == dtype


def test_bfloat16_is_used_on_an_apple_gpu_only_on_request_and_if_its_attention_is_right(monkeypatch):
    for version, dtype in [('2.12.1', 'float32'), ('2.13.0', 'bfloat16'), ('2.14.1', 'bfloat16')]:
        monkeypatch.setattr(torch, '__version__', torch.torch_version.TorchVersion(version))
        assert processes.choose_dtype('auto', 'mps') == 'float32'
        assert processes.choose_dtype('bfloat16', 'mps') == dtype


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_a_token_is_not_changed_by_later_ones_on_this_machines_accelerator(dtype):
    try:
        torch.zeros(1, device='mps')
        device = 'mps'
    except RuntimeError:
        device = 'cpu'
    if processes.choose_dtype(str(dtype).removeprefix('torch.'), device) == 'float32':
        dtype = torch.float32
    print(device, dtype)
    net = lively('gpt2', block_size=64).to(device, dtype)
    idx = random_ids(2, 64).to(device)
    other = idx.clone()
    other[:, 32:] = idx[:, 32:].flip(1)
    with torch.no_grad():
        logits = net(idx, idx)[0].float()
        other_logits = net(other, other)[0].float()
    torch.testing.assert_close(logits[:, :32], other_logits[:, :32])
    assert (logits - other_logits)[:, 32:].abs().max() > 1


def test_the_only_device_of_a_kind_may_be_numbered():
    assert processes.choose_device('cpu:0') == 'cpu'


@pytest.mark.parametrize('cuda, noted', [(None, True), ('13.0', False)])
def test_a_gpu_that_torch_is_not_built_for_is_mentioned(monkeypatch, capsys, cuda, noted):
    monkeypatch.setattr(torch.version, 'cuda', cuda)
    monkeypatch.setattr(processes.shutil, 'which', lambda name: f'C:\\Windows\\System32\\{name}.exe')
    assert processes.choose_device('auto') == 'cpu'
    assert ('whl/cu' in capsys.readouterr().out) == noted


def test_without_torch_compile_nothing_is_compiled_unless_it_was_asked_for(monkeypatch, capsys):
    def refuse(function):
        raise RuntimeError('torch.compile is not supported on Python 3.99+')

    monkeypatch.setattr(torch, 'compile', lambda function: function)
    assert processes.choose_compile('auto', 'cuda:0') is True
    monkeypatch.setattr(torch, 'compile', refuse)
    assert processes.choose_compile('auto', 'cuda:0') is False
    assert 'Python 3.99' in capsys.readouterr().out
    assert processes.choose_compile(True, 'cuda:0') is True


def test_a_folder_is_locked_on_windows(monkeypatch, tmp_path):
    locked = []

    def locking(descriptor, mode, n_bytes):
        if locked:
            raise PermissionError(13, 'Permission denied')
        locked.append((mode, n_bytes))

    monkeypatch.setitem(sys.modules, 'msvcrt', SimpleNamespace(locking=locking, LK_NBLCK=2))
    monkeypatch.setitem(sys.modules, 'fcntl', None)
    lock = files.lock_folder(f'{tmp_path}/out')
    with pytest.raises(InputError, match='another process'):
        files.lock_folder(f'{tmp_path}/out')
    lock.close()
    assert locked == [(2, 1)]


def test_a_file_that_another_program_has_open_for_a_moment_is_replaced(monkeypatch, tmp_path):
    replace = os.replace
    refused = []

    def replace_later(source, target):
        if len(refused) < 3:
            refused.append(target)
            raise PermissionError(13, 'Permission denied')
        replace(source, target)

    monkeypatch.setattr(os, 'replace', replace_later)
    files.write_whole(str(tmp_path / 'file'), b'content')
    assert (tmp_path / 'file').read_bytes() == b'content' and len(refused) == 3


def test_a_value_that_differs_between_processes_is_named(monkeypatch):
    values = [{'train': 9, 'val': 1}, {'train': 9}]

    def all_gather_object(output, value):
        output[:] = values

    monkeypatch.setattr(torch.distributed, 'is_initialized', lambda: True)
    monkeypatch.setattr(torch.distributed, 'get_world_size', lambda: 2)
    monkeypatch.setattr(torch.distributed, 'all_gather_object', all_gather_object)
    for value in values:  # also if this process does not have it
        with pytest.raises(InputError, match='val'):
            processes.check_same(value)
