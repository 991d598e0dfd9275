"""The measurement of copies, from the host to itself."""

from __future__ import annotations

import pytest
import torch

from poseidon.cluster.doctor.gpu_copies import measure, rate, wait_of


def test_copies_are_measured_each_way() -> None:
    (found,) = measure([torch.device("cpu")], size_bytes=1 << 16)
    assert found.keys() == {"to", "back"}
    assert min(found.values()) > 0


def test_a_rate_includes_the_end_of_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the GPU that is measured, which need not be torch's current one."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    target, second = torch.zeros(8), torch.device("cuda", 1)
    assert rate(target, torch.ones(8), wait_of(second)) > 0
    assert waited == [second, second]
    assert target.tolist() == [1.0] * 8
