"""Connections between the workers of a host: who joins, messages, the file that all have, and the errors
of workers that do not connect or end.
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

from poseidon.exchange.host.contributions import HostTree
from poseidon.exchange.host.group import HostGroup, new_file
from poseidon.exchange.host.unix_wire import UnixWire
from poseidon.exchange.worker_links import VERSION, WorkerLinks, read_header
from ps_server import PeerLost, RemoteProtocolError, ServerError, StalenessTimeout, TransportError
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
        self.wire = UnixWire(f"{address}-{rank}", None if rank else new_file())
        network = Network(
            rank=rank,
            size=size,
            ranks=range(4, 4 + size),
            token=token,
            timeout_s=of.get("timeout_s", 20.0),
            wire=self.wire,
        )
        self.monitor = network.new_monitor(closed="closed", hangs="")
        self.came: list[tuple[int, bytes]] = []
        self.met: set[int] = set()
        self.links = WorkerLinks(network, "test", monitor=self.monitor, receive=self._receive)
        self._addresses = [f"{address}-{other}" for other in range(size)]

    def _receive(self, sender: int, frames: Frames) -> None:
        if read_header(frames[0])[1] == "Failed":
            raise PeerLost(bytes(frames[1]).decode())
        if frames[1] == b"hello":
            self.met.add(sender)
        else:
            self.came.append((sender, bytes(frames[1])))

    def meet(self) -> None:
        self.links.connect(self._addresses)
        self.send(self.links.others, b"hello")
        others = {*self.links.others}
        self.monitor.wait_for(lambda: True if self.met == others else None, "not met")

    def send(self, to: Sequence[int], payload: bytes) -> None:
        with self.monitor:
            self.links.send(to, 0, [HEADER, payload])

    def await_count(self, count: int) -> None:
        self.monitor.wait_for(lambda: True if len(self.came) >= count else None, "nothing came")

    def await_left(self) -> None:
        others = {*self.links.others}
        self.monitor.wait_for(lambda: True if self.links.left >= others else None, "not left")

    def close(self) -> None:
        self.links.close()


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
        end.meet()
        assert end.wire.file is not None
        if rank == 0:
            os.ftruncate(end.wire.file, 4711)
        barrier.wait()
        assert os.fstat(end.wire.file).st_size == 4711
        barrier.wait()

    barrier = threading.Barrier(3)
    together(ends(address, 3), body)
    assert not Path(address).parent.exists()  # no name is left


def test_messages_come_whole_and_in_order(address: str) -> None:
    large = os.urandom(3_000_000)

    def body(rank: int, end: End) -> None:
        end.meet()
        for payload in (b"", b"one", large, b"two"):
            end.send(end.links.others, payload)
        end.await_count(8)
        for other in end.links.others:
            own = [payload for sender, payload in end.came if sender == other]
            assert own == [b"", b"one", large, b"two"]

    together(ends(address, 3), body)


def test_what_is_sent_before_the_end_comes(address: str) -> None:
    large = os.urandom(30_000_000)

    def body(rank: int, end: End) -> None:
        end.meet()
        if rank == 0:
            end.send([1], large)
            return
        end.await_left()
        assert end.came == [(0, large)]

    together(ends(address, 2), body)


def test_a_worker_that_ends_is_named_by_its_rank_in_the_job(address: str) -> None:
    def body(rank: int, end: End) -> None:
        end.meet()
        if rank == 1:
            barrier.wait()
            for stream in end.wire._sending:
                assert stream.socket is not None
                stream.socket.shutdown(socket.SHUT_RDWR)
            for key in list(end.wire._selector.get_map().values()):
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.shutdown(socket.SHUT_RDWR)
            barrier.wait()
            return
        barrier.wait()
        with pytest.raises(PeerLost, match=r"^worker 5, on this machine, has gone$"):
            end.await_count(1)
        barrier.wait()

    barrier = threading.Barrier(2)
    together(ends(address, 2), body)


def test_the_others_get_the_error_of_the_one_that_fails(address: str) -> None:
    def body(rank: int, end: End) -> None:
        end.meet()
        barrier.wait()
        if rank == 2:
            end.links.fail(PeerLost("shard 3 has gone"))
            return
        with pytest.raises(PeerLost, match=r"^shard 3 has gone$"):
            end.await_count(1)

    barrier = threading.Barrier(3)
    together(ends(address, 3), body)


def group(address: str, rank: int, size: int, **of: float) -> HostGroup:
    network = Network(rank=rank, size=size, ranks=range(4, 4 + size), timeout_s=20.0)
    return HostGroup(address, network, HostTree.mean(size), ())


def test_who_has_left_answers_until_all_have(address: str) -> None:
    def run(rank: int) -> None:
        end = group(address, rank, 2)
        came: list[int] = []
        end.peers.on("Ask", 0, lambda sender, *_: came.append(sender))
        end.meetings.gather(b"").result()
        if rank == 0:
            end.monitor.wait_for(lambda: True if end.peers.finished else None, "no leave")
            end.send([1], "Ask")
        end.leave()
        assert came == [0] * rank

    on_threads(2, run)


def test_a_worker_that_does_not_come_is_not_waited_for(address: str) -> None:
    for rank in (0, 1):
        network = Network(rank=rank, size=2, ranks=range(4, 6), timeout_s=0.05)
        missing = f"^not every worker has contributed .*; missing: worker {5 - rank}$"
        with pytest.raises(StalenessTimeout, match=missing):
            HostGroup(address, network, HostTree.mean(2), ())


@pytest.mark.parametrize("rank", [1, 2])
def test_another_number_of_workers_is_refused(address: str, rank: int) -> None:
    def run(number: int) -> str:
        with pytest.raises(ServerError) as found:
            group(address, 0, 2) if number == 0 else group(address, rank, 3)
        return str(found.value)

    before = len(os.listdir("/proc/self/fd"))
    found = on_threads(2, run)
    assert len(os.listdir("/proc/self/fd")) == before
    if rank == 1:
        assert (
            found
            == [
                "worker 5 has a different number of workers on this machine than worker 4; all must "
                "have the same"
            ]
            * 2
        )
    else:
        assert found[0] == (
            "a peer joins worker 4 with rank 2; expected one of 2 workers, each once"
        )
        assert found[1] == "worker 4, on this machine, has gone"


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
    with pytest.raises(TransportError, match=r"^cannot listen on .*: No such file or directory$"):
        End(str(tmp_path / "none" / "at all" / "workers"), 0, 2)
