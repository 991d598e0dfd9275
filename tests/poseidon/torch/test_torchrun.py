"""The variables of torchrun."""

from __future__ import annotations

import socket

import pytest

from poseidon.engine.document import ScriptDocument
from poseidon.exchange.membership import Membership
from poseidon.torch.torchrun import free_address, torchrun_variables
from ps_server.network import Network


def test_a_worker_has_all_variables_of_torchrun() -> None:
    document = ScriptDocument(
        job="job-1",
        output="out",
        token="",
        script="train.py",
        member=Membership(network=Network(rank=5, size=6), hosts=(3, 1, 2)),
        restarts=1,
        max_restarts=3,
    )
    assert torchrun_variables(document, "[fd00::1]:15000") == {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_NAME": "default",
        "ROLE_RANK": "5",
        "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "fd00::1",
        "MASTER_PORT": "15000",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "job-1",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "ACCELERATE_USE_CPU": "true",
    }


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_script_can_listen_at_the_address(host: str) -> None:
    address, _, port = free_address(host).rpartition(":")
    assert address == host
    with socket.socket() as own:
        own.bind(("127.0.0.1", int(port)))
