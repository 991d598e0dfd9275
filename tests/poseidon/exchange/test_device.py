"""The contract of a device: on the host there is nothing to wait for."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from poseidon.errors import UsageError
from poseidon.exchange.compute_options import Arithmetic, ComputeOptions
from poseidon.exchange.device import DONE, HOST, choose_fastest, compute_on, device_of


def test_on_the_host_nothing_waits() -> None:
    assert device_of(torch.device("cpu")) is HOST
    assert HOST.is_host
    with HOST.on(HOST.stream()):
        memory = HOST.host_memory(2, 3)
        event = HOST.event()
    HOST.wait(event)
    assert event.query()
    assert memory.shape == (2, 3)
    copied = HOST.copy(torch.ones(2, 3), memory, None, DONE)
    assert copied.query()
    assert torch.equal(memory, torch.ones(2, 3))


@pytest.mark.needs("gpu")
def test_a_copy_from_a_gpu_comes_after_what_it_waits_for() -> None:
    torch_device = torch.device("cuda")
    device = device_of(torch_device)
    x = torch.ones(1 << 20, device=torch_device)
    for _ in range(50):
        x = x * 1.0001
    host = device.host_memory(1 << 20)
    assert host.is_pinned()
    copied = device.copy(x, host, device.stream(), device.event())
    copied.synchronize()
    assert torch.equal(host, x.cpu())


def test_a_process_computes_on_its_gpu_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    compute_on(torch.device("cpu"))
    assert torch.backends.cudnn.allow_tf32
    assert not chosen
    compute_on(torch.device("cuda", 1))
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32
    assert chosen == [torch.device("cuda", 1)]


@pytest.fixture
def flags_of_torch() -> Iterator[None]:
    """Restores what `compute_on` sets beside attributes."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("flags_of_torch")
def test_flags_set_torch_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    for module, name in (
        (torch.backends.cudnn, "deterministic"),
        (torch.backends.cudnn, "benchmark"),
    ):
        monkeypatch.setattr(module, name, False)
    tf32 = ComputeOptions(precision=Arithmetic.TF32)
    with pytest.raises(UsageError, match=r"--precision=tf32 is arithmetic of GPUs.*--gpu=IDS"):
        compute_on(torch.device("cpu"), tf32)
    compute_on(torch.device("cuda", 0), tf32)
    assert torch.backends.cudnn.allow_tf32 and torch.backends.cuda.matmul.allow_tf32
    exact = ComputeOptions(deterministic=True)
    compute_on(torch.device("cuda", 0), exact)
    assert not torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.deterministic and torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    for options, shapes_change, expected in (
        (tf32, False, True),
        (tf32, True, False),
        (exact, False, False),
    ):
        choose_fastest(options, shapes_change=shapes_change)
        assert torch.backends.cudnn.benchmark is expected
