"""Connections between the workers of a host: messages, files, and the errors of workers that do
not connect or end.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

import pytest

from poseidon.exchange.local.connection import (
    HEAD,
    Connection,
    Kind,
    Message,
    accept,
    connect,
    refuse,
    send_all,
)
from ps_server import PeerLost, RemoteProtocolError, StalenessTimeout, TransportError
from ps_server.network import Network
from tests.support.unauthenticated import another_user

Pair = tuple[Connection, Connection]

UNIX_SOCKETS = Path("/proc/net/unix")
LISTENING = "00010000"
"""The kernel's flag there for a socket that accepts connections."""


@pytest.fixture
def pair() -> Iterator[Pair]:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    connections = Connection(a, "the leading worker", 20.0), Connection(b, "worker 1", 20.0)
    yield connections
    for connection in connections:
        connection.close()


@pytest.fixture(params=["there", "to be made"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    with TemporaryDirectory(prefix="p") as folder:  # short: the name of a socket has few letters
        yield str(
            Path(folder) / "workers"
            if request.param == "there"
            else Path(folder) / "one" / "workers"
        )
        Path(folder).mkdir(exist_ok=True)


@pytest.mark.parametrize("kind", Kind)
def test_every_message_comes_as_it_was_sent(pair: Pair, kind: Kind) -> None:
    pair[0].send(
        kind, b"one", bytearray(b""), memoryview(b"two"), index=2**32 - 1, number=2**64 - 1
    )
    pair[0].send(kind)
    expected = Message(kind=kind, index=2**32 - 1, number=2**64 - 1, payload=bytearray(b"onetwo"))
    assert pair[1].receive() == expected
    assert pair[1].receive() == Message(kind=kind, payload=bytearray())


def test_a_payload_larger_than_the_sockets_buffer_arrives_whole(pair: Pair) -> None:
    payload = os.urandom(3_000_000)
    sender = threading.Thread(target=lambda: pair[0].send(Kind.FACTORS, payload))
    sender.start()
    assert pair[1].receive().payload == payload
    sender.join()


def test_a_file_can_be_handed_over(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("inside", encoding="utf-8")
    with (tmp_path / "file").open("rb") as file:
        pair[0].send(Kind.WELCOME, b"with a file", files=[file.fileno()])
    message, files = pair[1].receive_files(20.0)
    assert message.payload == b"with a file"
    with os.fdopen(files[0], "rb") as file:
        assert file.read() == b"inside"


def test_whoever_has_gone_is_named(pair: Pair) -> None:
    pair[0].close()
    with pytest.raises(PeerLost, match=r"^worker 1 on this machine has gone$"):
        pair[1].receive()
    with pytest.raises(PeerLost, match=r"^worker 1 on this machine has gone$"):
        pair[1].send(Kind.PART)
    send_all([pair[1]], Kind.VALUE)  # whoever listens hears of it


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Connection]]:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    connection = Connection(b, "worker 1", 20.0)
    yield a, connection
    connection.close()
    a.close()


@pytest.mark.parametrize("kind", [0, max(Kind, key=lambda kind: kind.value).value + 1, 255])
def test_a_message_of_an_unknown_kind_breaks_the_protocol(
    raw: tuple[socket.socket, Connection], kind: int
) -> None:
    raw[0].sendall(HEAD.pack(kind, 0, 0, 0))
    with pytest.raises(
        RemoteProtocolError,
        match=f"^worker 1 on this machine sent a message of unknown kind {kind}$",
    ):
        raw[1].receive()


@pytest.mark.parametrize("sent", [b"", HEAD.pack(Kind.HELLO.value, 0, 0, 5) + b"hell"])
def test_a_first_message_that_does_not_end_is_not_waited_for(
    raw: tuple[socket.socket, Connection], sent: bytes
) -> None:
    raw[0].sendall(sent)
    with pytest.raises(PeerLost, match=r"^worker 1 on this machine does not answer: timed out$"):
        raw[1].receive_files(0.05)


def come(address: str, number: int) -> None:
    connection = connect(address, Network(timeout_s=20.0))
    connection.send(Kind.HELLO, b"hello", number=number)
    connection.receive_files(20.0)
    connection.close()


def test_all_workers_of_a_machine_meet_whoever_comes_first(address: str) -> None:
    threads = [threading.Thread(target=come, args=(address, number)) for number in (2, 1)]
    for thread in threads:
        thread.start()
    heard: list[int] = []
    connections = accept(
        address, Network(size=3, timeout_s=20.0), lambda hello: heard.append(hello.number)
    )
    assert sorted(heard) == [1, 2]
    assert [connection.peer for connection in connections] == ["worker 1", "worker 2"]
    assert not Path(address).parent.exists()
    for connection in connections:
        connection.send(Kind.WELCOME)
    for thread in threads:
        thread.join()
    for connection in connections:
        connection.close()


def test_a_folder_that_holds_something_else_stays(address: str) -> None:
    Path(address).parent.mkdir(exist_ok=True)
    Path(address).with_name("other").touch()
    assert accept(address, Network(size=1, timeout_s=20.0), lambda hello: None) == []
    assert [path.name for path in Path(address).parent.iterdir()] == ["other"]


def test_a_number_out_of_range_is_refused_and_told_so(address: str) -> None:
    said: list[str] = []

    def stranger() -> None:
        connection = connect(address, Network(timeout_s=20.0))
        connection.send(Kind.HELLO, number=2)
        message = connection.receive()
        said.append(message.payload.decode())
        connection.close()

    thread = threading.Thread(target=stranger)
    thread.start()
    with pytest.raises(PeerLost, match=r"^a worker of this machine came as number 2 of 2$"):
        accept(address, Network(size=2, timeout_s=20.0), lambda hello: None)
    thread.join()
    assert said == ["a worker of this machine came as number 2 of 2"]


def test_a_reason_may_quote_a_name_that_is_not_utf_8(pair: Pair) -> None:
    refuse([pair[0]], TransportError("no caf\udce9"))
    assert pair[1].receive().payload == b"no caf\\udce9"


def test_who_does_not_come_in_time_is_one_sentence(address: str) -> None:
    with pytest.raises(
        StalenessTimeout, match=r"^not every worker of this machine came within 0\.01 s$"
    ):
        accept(address, Network(size=2, timeout_s=0.01), lambda hello: None)
    with pytest.raises(
        StalenessTimeout, match=r"^the leading worker did not listen at .* within 0\.01 s$"
    ):
        connect(address, Network(timeout_s=0.01))


def test_an_address_that_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match=r"^cannot listen on .*nowhere"):
        accept(
            str(tmp_path / "nowhere" / "one" / "workers"),
            Network(size=2, timeout_s=1.0),
            lambda hello: None,
        )
    with pytest.raises(TransportError, match=r"^cannot connect to .*: AF_UNIX path too long$"):
        connect("/" + "x" * 200, Network(timeout_s=1.0))


def open_to_all(folder: Path) -> None:
    """It, and the one around it where that was made for the test, too."""
    for each in (folder, folder.parent):
        if each != Path(gettempdir()):
            each.chmod(0o777)


@pytest.mark.needs("root")
def test_another_user_is_turned_away_even_where_the_folder_is_open(address: str) -> None:
    Path(address).parent.mkdir(exist_ok=True)
    open_to_all(Path(address).parent)
    found: list[Connection] = []
    leader = threading.Thread(
        target=lambda: found.extend(
            accept(address, Network(size=2, timeout_s=20.0), lambda hello: None)
        )
    )
    leader.start()
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.settimeout(20.0)
    # the kernel notes who listens at that moment, and `another_user` is for all threads
    _await_listener(address)
    Path(address).chmod(0o777)
    with another_user():
        stranger.connect(address)
    assert stranger.recv(1) == b"", "the connection was not cut"
    worker = connect(address, Network(timeout_s=20.0))
    worker.send(Kind.HELLO, number=1)
    leader.join()
    assert len(found) == 1
    for closing in (stranger, worker, *found):
        closing.close()


def _await_listener(address: str) -> None:
    deadline = time.monotonic() + 20.0
    while not any(
        _listens(connection.split(), address)
        for connection in UNIX_SOCKETS.read_text().splitlines()
    ):
        assert time.monotonic() < deadline


def _listens(words: list[str], address: str) -> bool:
    return words[-1] == address and words[3] == LISTENING


@pytest.mark.needs("root")
def test_a_leader_that_is_another_user_is_not_believed(address: str) -> None:
    Path(address).parent.mkdir(exist_ok=True)
    open_to_all(Path(address).parent)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        with another_user():
            listener.bind(address)
            listener.listen(1)
        with pytest.raises(TransportError, match="another user of this machine listens at"):
            connect(address, Network(timeout_s=20.0))
