"""Strangers at the port of a process with few files: it stays up, keeps files for itself, and the
peers of the job get in.
"""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Iterator
from itertools import product
from multiprocessing.connection import Connection

import pytest

from ps_server.keys import JobKeys
from ps_server.transport.zmq_sockets import ZmqClientTransport, ZmqServerTransport
from tests.support.polling import until
from tests.support.sampling import sample
from tests.support.strangers import ATTACKS, files_of, flooded

FILES = 128
STRANGERS = 120
WORKERS = len(ATTACKS) + 2
KEYS = JobKeys.new(workers=WORKERS, shards=1)
WAIT_S = 50.0


def listen(pipe: Connection, keys: JobKeys | None) -> None:
    """Answer every peer that says `worker`, until told to end; strangers are not known."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    transport = ZmqServerTransport("tcp://127.0.0.1:0", keys.of_shard(0) if keys else None)
    pipe.send(transport.address)
    while not pipe.poll():
        for peer, frames in transport.receive(0.05):
            if bytes(frames[0]) == b"worker":
                transport.known(peer)
                transport.send(peer, frames)
    transport.close()


class Listener:
    """The process that listens.

    Args:
        encrypted: whether peers need a key.
    """

    def __init__(self, encrypted: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        keys = KEYS if encrypted else None
        self._process = context.Process(target=listen, args=(theirs, keys), daemon=True)
        self._process.start()
        self._keys = keys
        self.address: str = self._pipe.recv()
        self.port = int(self.address.rpartition(":")[2])
        self._next = 0

    def files(self) -> int:
        """Return how many files it has open."""
        assert self._process.pid is not None
        return files_of(self._process.pid)

    def connect(self) -> ZmqClientTransport:
        """Return a connection of the next worker."""
        self._next += 1
        return ZmqClientTransport(
            [self.address], self._keys.of_worker(self._next - 1) if self._keys else None
        )

    def close(self) -> None:
        """End it."""
        self._pipe.send("end")
        self._process.join(WAIT_S)
        assert self._process.exitcode == 0


@pytest.fixture(scope="module")
def listener(request: pytest.FixtureRequest) -> Iterator[Listener]:
    listener = Listener(request.param)
    yield listener
    listener.close()


def is_answered(worker: ZmqClientTransport) -> bool:
    """Return whether what a worker says is answered in time."""
    sent: list[bool] = []

    def answered() -> bool:
        if not sent and worker.send(0, [b"worker"]):
            sent.append(True)
        return bool(worker.receive(0.02))

    until(answered, "the listener did not answer", WAIT_S)
    return True


@pytest.mark.parametrize(
    ("listener", "attack"),
    sample(list(product([True, False], ATTACKS)), every=2),
    indirect=["listener"],
)
def test_a_worker_gets_in_during_an_attack(attack: str, listener: Listener) -> None:
    with flooded(listener.port, STRANGERS, ATTACKS[attack]) as flood:
        worker = listener.connect()
        try:
            assert is_answered(worker)
            for _ in range(STRANGERS):
                flood.add()
            until(lambda: listener.files() < FILES // 2, "too many files are open", WAIT_S)
            assert worker.lost == frozenset()
            assert worker.send(0, [b"worker"])
            until(lambda: bool(worker.receive(0.02)), "the worker was cut off", WAIT_S)
        finally:
            worker.close()
    until(lambda: listener.files() < 40, "connections that have ended keep their files", WAIT_S)
