"""The flood's command line, and its connections, which a shard counts."""

from __future__ import annotations

import time

import pytest
import zmq

from benchmarks import flood
from ps_server.keys import JobKeys
from ps_server.transport.zmq_sockets import ZmqServerTransport


@pytest.mark.parametrize("kind", flood.KINDS)
def test_every_kind_knocks(kind: str) -> None:
    keys = JobKeys.new(workers=1, shards=1)
    shard = ZmqServerTransport("tcp://127.0.0.1:0", keys.of_shard(0))
    with zmq.Context() as context:
        end = (
            flood.connect(shard.address)
            if kind == "connections"
            else flood.dial(context, shard.address, keys.shards[0].public, kind)
        )
        deadline = time.monotonic() + 20
        while shard.refused == 0 and time.monotonic() < deadline:
            assert shard.receive(0.05) == []
        assert shard.refused > 0
        end()
    shard.close()
