"""Connections between the workers of a host: the handshake, messages, and the errors of workers
that do not connect or end.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgpack
import pytest

from poseidon.exchange.host.group import new_file
from poseidon.exchange.host.links import HostLinks
from poseidon.exchange.worker_links import VERSION
from ps_server import PeerLost, RemoteProtocolError, StalenessTimeout, TransportError
from ps_server.network import Network
from ps_server.transport.base import Frames
from tests.support.threads import on_threads
from tests.support.unauthenticated import another_user

HEADER = msgpack.packb([VERSION, "Part"])


@pytest.fixture
def address() -> Iterator[str]:
    with TemporaryDirectory(prefix="p") as folder:  # short: the name of a socket has few letters
        yield str(Path(folder) / "one" / "workers")


class End:
    """One worker's connections, and what has come."""

    def __init__(self, address: str, rank: int, size: int, *, token: bytes = b"", **of: float):
        network = Network(
            rank=rank,
            size=size,
            ranks=range(4, 4 + size),
            token=token,
            timeout_s=of.get("timeout_s", 20.0),
        )
        self.monitor = network.new_monitor(closed="closed", hangs="")
        self.came: list[tuple[int, bytes]] = []
        self.links = HostLinks(address, network, monitor=self.monitor, receive=self._receive)
        self.file = -1

    def _receive(self, sender: int, frames: Frames) -> None:
        self.came.append((sender, bytes(frames[1])))

    def meet(self, hello: bytes = b"hello") -> dict[int, bytes]:
        rank = self.links.others[-1] + 1 if self.links.others else 0
        own = new_file() if rank % (len(self.links.others) + 1) == 0 else None
        hellos, self.file = self.links.meet(hello, own)
        return hellos

    def send(self, to: Sequence[int], payload: bytes) -> None:
        with self.monitor:
            self.links.send(to, 0, [HEADER, payload])

    def await_count(self, count: int) -> None:
        self.monitor.wait_for(lambda: True if len(self.came) >= count else None, "nothing came")

    def close(self) -> None:
        self.links.close()
        if self.file >= 0:
            os.close(self.file)


def ends(address: str, size: int) -> list[End]:
    return [End(address, rank, size) for rank in range(size)]


def together(all_ends: Sequence[End], body: Callable[[int, End], None]) -> None:
    def run(rank: int) -> None:
        try:
            body(rank, all_ends[rank])
        finally:
            all_ends[rank].close()

    on_threads(len(all_ends), run)


def test_all_meet_and_share_a_file(address: str) -> None:
    def body(rank: int, end: End) -> None:
        hellos = end.meet(b"hello %d" % rank)
        assert hellos == {other: b"hello %d" % other for other in range(3) if other != rank}
        if rank == 0:
            os.ftruncate(end.file, 4711)
        barrier.wait()
        assert os.fstat(end.file).st_size == 4711
        barrier.wait()

    barrier = threading.Barrier(3)
    together(ends(address, 3), body)
    assert not list(Path(address).parent.glob("*"))  # no name is left


def test_messages_come_whole_and_in_order(address: str) -> None:
    large = os.urandom(3_000_000)

    def body(rank: int, end: End) -> None:
        end.meet()
        end.links.start()
        for payload in (b"", b"one", large, b"two"):
            end.send(end.links.others, payload)
        end.await_count(8)
        for other in end.links.others:
            own = [payload for sender, payload in end.came if sender == other]
            assert own == [b"", b"one", large, b"two"]
        end.links.leave()

    together(ends(address, 3), body)


def test_a_worker_that_ends_is_named_by_its_rank_in_the_job(address: str) -> None:
    def body(rank: int, end: End) -> None:
        end.meet()
        end.links.start()
        if rank == 1:
            end.links._streams[0].socket.shutdown(socket.SHUT_RDWR)
            return
        with pytest.raises(PeerLost, match=r"^worker 5, on this machine, has gone$"):
            end.await_count(1)

    together(ends(address, 2), body)


def test_the_others_get_the_error_of_the_one_that_fails(address: str) -> None:
    def body(rank: int, end: End) -> None:
        end.meet()
        end.links.start()
        if rank == 2:
            end.links.fail(PeerLost("shard 3 has gone"))
            return
        with pytest.raises(PeerLost, match=r"^shard 3 has gone$"):
            end.await_count(1)

    together(ends(address, 3), body)


def test_who_has_left_is_waited_for_until_all_have(address: str) -> None:
    def body(rank: int, end: End) -> None:
        end.meet()
        end.links.start()
        if rank == 0:
            end.monitor.wait_for(lambda: True if end.links.left == {1} else None, "no leave")
            end.send([1], b"a question")
        end.links.leave()
        assert rank == 0 or end.came == [(0, b"a question")]

    together(ends(address, 2), body)


def test_a_worker_that_does_not_come_is_not_waited_for(address: str) -> None:
    for rank in (0, 1):
        end = End(address, rank, 2, timeout_s=0.05)
        with pytest.raises(StalenessTimeout, match=r"did not listen|not every worker"):
            end.meet()
        end.close()


@pytest.mark.parametrize("rank", [1, 2])
def test_another_number_of_workers_is_refused(address: str, rank: int) -> None:
    expected = rf"local rank ({rank} expects 3 .* worker 4 expects 2|0 expects 2 .* expects 3)$"

    def body(rank: int, end: End) -> None:
        with pytest.raises(PeerLost, match=expected):
            end.meet()

    together([End(address, 0, 2), End(address, rank, 3)], body)


def test_a_process_of_another_job_is_refused(address: str) -> None:
    def body(rank: int, end: End) -> None:
        with pytest.raises((RemoteProtocolError, PeerLost)):
            end.meet()

    together([End(address, 0, 2, token=b"a"), End(address, 1, 2, token=b"b")], body)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_another_user_is_refused(address: str) -> None:
    end = End(address, 1, 2, timeout_s=2.0)
    Path(address).parent.mkdir(exist_ok=True)
    os.chmod(Path(address).parent.parent, 0o777)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        os.chmod(Path(address).parent, 0o777)
        with another_user():
            listener.bind(f"{address}-0")
            listener.listen(1)
        with pytest.raises(TransportError, match="another user of this machine listens at"):
            end.meet()
    end.close()


def test_a_folder_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    end = End(str(tmp_path / "none" / "at all" / "workers"), 0, 2)
    with pytest.raises(TransportError, match=r"^cannot listen on .*: No such file or directory$"):
        end.meet()
    end.close()
