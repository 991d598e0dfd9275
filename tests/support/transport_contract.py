"""What every transport must do, as one scenario that each implementation runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ps_server.transport.base import ClientTransport, Frames, ServerTransport

Pair = tuple[ServerTransport, ClientTransport]
WAIT_S = 10.0


def _server_receive(server: ServerTransport, count: int) -> list[tuple[bytes, Frames]]:
    got: list[tuple[bytes, Frames]] = []
    while len(got) < count:
        batch = server.receive(WAIT_S)
        assert batch, f"{len(got)} of {count} messages came"
        got.extend(batch)
    return got


def check_transport(make: Callable[[], Pair]) -> None:
    """Order, answers by peer name, several and empty frames, large frames, wake, close."""
    server, client = make()
    try:
        for i in range(100):
            client.send(0, [b"%d" % i, b"", b"x" * i])
        got = _server_receive(server, 100)
        assert [bytes(frames[0]) for _, frames in got] == [b"%d" % i for i in range(100)]
        assert all(len(frames) == 3 and not bytes(frames[1]) for _, frames in got)
        (peer,) = {peer for peer, _ in got}
        large = np.arange(1_000_000, dtype=np.float32)
        server.send(peer, [b"h", large.data.cast("B")])
        (received,) = client.receive(WAIT_S)
        assert received[0] == 0
        assert np.array_equal(np.frombuffer(received[1][1], dtype=np.float32), large)
        server.send(b"nobody of that name", [b"dropped"])
        assert client.receive(0.0) == []
        client.wake()
        assert client.receive(WAIT_S) == []
        server.wake()
        assert server.receive(WAIT_S) == []
        client.send(0, [b"last words"])
        client.close()
        assert bytes(_server_receive(server, 1)[0][1][0]) == b"last words"
    finally:
        server.close()
