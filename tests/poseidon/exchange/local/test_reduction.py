"""How workers of a machine agree on the way that tensors move."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from poseidon.exchange.base import Trained
from poseidon.exchange.local.group import HostTree, LocalGroup
from poseidon.exchange.local.reduction import Hello, ReductionKind, Welcome, default_kind, join
from ps_server import RemoteProtocolError
from ps_server.network import Network
from ps_server.protocol.virtual_workers import VirtualWorkers


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
    assert default_kind(devices, HostTree.mean(len(devices))) is kind
    virtual = HostTree(placed=VirtualWorkers((0, 2, 3)), first=0, workers=2, averages=False)
    assert default_kind(devices, virtual) is ReductionKind.SHARED_MEMORY


def test_messages_are_unpacked_as_they_were_packed() -> None:
    hello = Hello.of([Trained(name="w", tensor=nn.Parameter(torch.zeros(2, 3)))])
    assert hello == Hello(sizes=[6], device="") == Hello.unpack(hello.pack())
    welcome = Welcome(
        address="127.0.0.1 5",
        by_factors=frozenset({0, 2}),
        private_histories=True,
    )
    assert Welcome.unpack(welcome.pack()) == welcome


WELCOME = {
    "address": "",
    "by_factors": [0],
    "private_histories": False,
    "schemes": [],
}


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xff",
        b"[1]",
        b'{"sizes": [6]}',
        b'{"sizes": 6, "device": ""}',
        b'{"sizes": ["6"], "device": ""}',
        b'{"sizes": [6], "device": 1}',
        b'{"sizes": [6], "device": "", "more": 1}',
        b"[" * 100_000,
    ],
)
def test_a_malformed_hello_is_one_sentence(packed: bytes) -> None:
    with pytest.raises(
        RemoteProtocolError, match=r"^a worker of this machine sent a hello that cannot be read"
    ):
        Hello.unpack(packed)


@pytest.mark.parametrize(
    "changed",
    [
        {"address": 1},
        {"by_factors": 3},
        {"by_factors": ["0"]},
        {"private_histories": "no"},
        {"schemes": [3]},
    ],
)
def test_a_malformed_welcome_is_one_sentence(changed: dict[str, object]) -> None:
    Welcome.unpack(json.dumps(WELCOME).encode())
    for packed in (
        json.dumps({**WELCOME, **changed}),
        json.dumps({k: v for k, v in WELCOME.items() if k not in changed}),
    ):
        with pytest.raises(
            RemoteProtocolError, match=r"^the leader of this machine sent a welcome that cannot be"
        ):
            Welcome.unpack(packed.encode())


def test_a_welcome_without_its_memory_is_one_sentence() -> None:
    welcome = Welcome.unpack(json.dumps(WELCOME).encode())
    with pytest.raises(
        RemoteProtocolError, match=r"^the leader of this machine sent no shared memory$"
    ):
        join(
            [],
            LocalGroup(address="", network=Network(rank=1, size=2), tree=HostTree.mean(2)),
            welcome,
            [],
        )
