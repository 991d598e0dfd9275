"""The measurement of copies, from the host to itself."""

from __future__ import annotations

import torch

from poseidon.cluster.doctor.gpu_copies import measure


def test_copies_are_measured_each_way() -> None:
    (found,) = measure([torch.device("cpu")], size_bytes=1 << 16)
    assert found.keys() == {"to", "back"}
    assert min(found.values()) > 0
