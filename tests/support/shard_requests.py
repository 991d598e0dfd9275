"""Every request that a worker may send to a shard."""

from __future__ import annotations

from typing import get_args

import numpy as np

from ps_server import RowTableSpec, StoreSpec
from ps_server.protocol import messages as m


def every_request(store: StoreSpec, token: bytes) -> tuple[m.Message, ...]:
    """Return the requests of worker 1, which joins, brings, pushes, reads, lists, stops
    and leaves; all kinds of messages, in a legal order.
    """
    ones = np.ones(store.tables[0].size, dtype=np.float32)
    row, one = np.zeros(1, np.uint32), np.ones(1, np.float32)
    requests: tuple[m.Message, ...] = (
        m.Hello(1, token),
        m.Create(store),
        m.MemoryOffer(1, 0, b"nonce", 8, 4096),
        m.Initial(0, 0, [ones]),
        m.Push(0, 0, 0, 1.0, ones),
        m.Get(0, 0, 0),
        m.GetHistory(0, 0),
        m.Part(0, 1.0, whole=False, payload=b"all"),
        m.Round(0, (0,), (1.0,), (b"all",)),
        m.Gather(0, b"x"),
        m.OutsideNorm(0, 0, (1.0,)),
        m.TotalNorm(0, 1.0),
        m.Signal(m.SignalKind.STOP, 1),
        m.Clock(1),
        m.CreateRows(0, 1, RowTableSpec(name="rows", rows=1, dim=1)),
        m.KeptRows(0, 0, row, [one]),
        m.GetRows(0, 0, 0, row),
        m.PushRows(0, 0, 1.0, row, one),
        m.ReadRows(0, 0, 1),
        m.Leave(),
    )
    assert {type(request) for request in requests} == set(get_args(m.ToShard))
    return requests
