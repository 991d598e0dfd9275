"""The contract of a device: on the host there is nothing to wait for."""

from __future__ import annotations

import pytest
import torch

from poseidon.exchange.device import DONE, HOST, compute_on, device_of


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
