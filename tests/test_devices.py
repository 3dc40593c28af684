"""The choice of the device, the dtype and the number of processes."""

import types

import pytest
import torch

import processes
from configurator import InputError, launched_by_torchrun, process_ranks

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
    monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda: types.MappingProxyType(capabilities))
    assert processes.choose_dtype('auto', 'cpu') == dtype


def test_bfloat16_is_used_on_an_apple_gpu_only_on_request():
    assert processes.choose_dtype('auto', 'mps') == 'float32'
    assert processes.choose_dtype('bfloat16', 'mps') == 'bfloat16'


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
