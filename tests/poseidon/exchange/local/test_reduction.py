"""How workers of a machine agree on the way that tensors move."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from poseidon.exchange.base import Trained
from poseidon.exchange.local.reduction import Hello, ReductionKind, Welcome, default_kind


@pytest.mark.parametrize(
    ("devices", "kind"),
    [
        (["", ""], ReductionKind.SHARED_MEMORY),
        (["GPU-1", "GPU-2"], ReductionKind.PROCESS_GROUP),
        (["GPU-1", "GPU-1"], ReductionKind.SHARED_MEMORY),  # NCCL takes no two processes on one GPU
        (["GPU-1", ""], ReductionKind.SHARED_MEMORY),
        (["GPU-1"], ReductionKind.PROCESS_GROUP),
    ],
)
def test_a_group_needs_a_device_for_each(devices: list[str], kind: ReductionKind) -> None:
    assert default_kind(devices) is kind


def test_messages_are_unpacked_as_they_were_packed() -> None:
    hello = Hello.of([Trained(name="w", tensor=nn.Parameter(torch.zeros(2, 3)))])
    assert hello == Hello(sizes=[6], device="") == Hello.unpack(hello.pack())
    welcome = Welcome(
        kind=ReductionKind.PROCESS_GROUP,
        address="127.0.0.1 5",
        by_factors=frozenset({0, 2}),
        private_histories=True,
    )
    assert Welcome.unpack(welcome.pack()) == welcome
