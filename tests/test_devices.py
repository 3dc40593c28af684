"""The device, its dtype and the number of processes follow from the machine and from torchrun's variables."""

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
def test_there_are_several_processes_only_if_all_variables_of_torchrun_are_set(torchrun, monkeypatch,
                                                                              missing):
    assert launched_by_torchrun() and process_ranks() == (1, 1, 2)
    monkeypatch.delenv(missing)
    assert not launched_by_torchrun() and process_ranks() == (0, 0, 1)


def test_an_accelerator_that_is_not_supported_is_named_and_the_cpu_is_used(monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, 'current_accelerator', lambda check_available: torch.device('xpu'))
    assert processes.choose_device('auto') == 'cpu'
    assert 'xpu' in capsys.readouterr().out


def test_processes_that_train_together_do_not_share_an_apple_gpu(torchrun, monkeypatch):
    monkeypatch.setattr(torch.accelerator, 'current_accelerator', lambda check_available: torch.device('mps'))
    assert processes.choose_device('auto') == 'cpu'


@pytest.mark.parametrize('capabilities, dtype', [
    ({'architecture': 'x86_64', 'avx512_bf16': True, 'amx_bf16': False}, 'bfloat16'),
    ({'architecture': 'x86_64', 'avx512_bf16': False, 'amx_bf16': True}, 'bfloat16'),
    ({'architecture': 'x86_64', 'avx512_bf16': False, 'amx_bf16': False, 'avx2': True}, 'float32'),
    ({'architecture': 'aarch64', 'neon': True, 'bf16': True}, 'bfloat16'),
    ({'architecture': 'aarch64', 'neon': True, 'bf16': False}, 'float32'),
    ({'architecture': 'ppc64le'}, 'float32'),
])
def test_bfloat16_is_chosen_on_a_cpu_that_multiplies_it(monkeypatch, capabilities, dtype):
    monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda: types.MappingProxyType(capabilities))
    assert processes.choose_dtype('auto', 'cpu') == dtype


def test_bfloat16_is_used_on_an_apple_gpu_only_if_it_is_asked_for():
    assert processes.choose_dtype('auto', 'mps') == 'float32'
    assert processes.choose_dtype('bfloat16', 'mps') == 'bfloat16'


def test_a_value_that_only_one_process_has_is_named(monkeypatch):
    everyone = [{'train': 9, 'val': 1}, {'train': 9}]

    def all_gather_object(output, value):
        output[:] = everyone

    monkeypatch.setattr(torch.distributed, 'is_initialized', lambda: True)
    monkeypatch.setattr(torch.distributed, 'get_world_size', lambda: 2)
    monkeypatch.setattr(torch.distributed, 'all_gather_object', all_gather_object)
    for _ in range(2):  # the first process has it, then the second
        with pytest.raises(InputError, match='val'):
            processes.check_same(everyone[0])
        everyone.reverse()
