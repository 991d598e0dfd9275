"""What another worker sends that is not a message of the mesh."""

from __future__ import annotations

import msgpack
import pytest

from poseidon.exchange.worker_links import VERSION
from poseidon.torch.process_group.mesh import Mesh
from ps_server import RemoteProtocolError
from ps_server.network import Network

BROKEN = b"\xc1"
"""A byte that msgpack never writes."""


@pytest.mark.parametrize("payload", [BROKEN, b"", msgpack.packb(7), msgpack.packb({}) * 2])
@pytest.mark.parametrize(
    "header",
    [
        ["Shared", "g", 0, 0, "call", "place"],
        ["Lent", "g", 0, 0, "call", "place"],
        ["Ask", 3],
        ["Taken", "one"],
        ["Nosuch"],
    ],
)
def test_what_is_no_message_is_refused(header: list[object], payload: bytes) -> None:
    mesh = Mesh(Network(size=2), lambda payload: [payload] * 2, neighbours=[0, 1])
    with pytest.raises(RemoteProtocolError):
        mesh._receive(1, [msgpack.packb([VERSION, *header]), payload])
    mesh.close()


def test_an_answer_that_is_not_msgpack_is_refused() -> None:
    mesh = Mesh(Network(rank=1, size=2), lambda payload: [payload] * 2)
    with pytest.raises(RemoteProtocolError, match="not msgpack"):
        mesh._receive(0, [msgpack.packb([VERSION, "Answer", 0]), BROKEN])
    mesh.close()
