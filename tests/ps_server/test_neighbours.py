"""A worker and a shard of one machine: the same bits as through a socket, and nothing that a peer could not do there too."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ps_server import (
    Client,
    Keeping,
    RemoteProtocolError,
    Rule,
    Server,
    Shard,
    StoreSpec,
    TableSpec,
)
from ps_server.lanes import LEAST_BYTES, Layout
from ps_server.neighbours import NONCE_BYTES, ShardNeighbours, WorkerNeighbours, is_here, new_memory
from ps_server.protocol import messages as m
from ps_server.protocol.wire import decode, encode
from ps_server.transport.base import Frames
from ps_server.transport.memory import MemoryNetwork
from ps_server.transport.zmq_sockets import ZmqClientTransport
from tests.support.cluster import TIMEOUT_S, TOKEN, run_workers, socket_store, zeros

SIZE = 3 * LEAST_BYTES // 4
HERE = "tcp://127.0.0.1:5555"


def store(workers: int = 1, **table: object) -> StoreSpec:
    rows = 3  # chunks of LEAST_BYTES each
    spec = TableSpec(name="w", size=SIZE, rows=rows, rule=Rule(momentum=0.9), **table)  # type: ignore[arg-type]
    return StoreSpec(workers=workers, shards=1, tables=(spec,))


def trained(spec: StoreSpec, *, share_memory: bool, iterations: int = 5) -> list[bytes]:
    """The value that each worker of a job ends with."""
    found: dict[int, bytes] = {}

    def work(client: Client, rank: int) -> None:
        value = np.zeros(SIZE, np.float32)
        random = np.random.default_rng(rank)
        client.start(zeros(spec))
        for _ in range(iterations):
            client.read(0, value)
            change = random.standard_normal(SIZE, dtype=np.float32)
            client.push(0, change, rate=0.1)
            client.clock()
        client.read(0, value, staleness=0)
        found[rank] = value.tobytes()
        client.barrier()

    with socket_store(spec.workers, 1, share_memory=share_memory) as connect:
        run_workers(connect, spec, work)
    return [found[rank] for rank in range(spec.workers)]


# Stale: of several workers, who comes first decides the last bit.
@pytest.mark.parametrize(
    "spec",
    [store(), store(2), store(2, keeping=Keeping.AVERAGE), store(staleness=1)],
    ids=["one worker", "rule", "average", "stale"],
)
def test_the_bits_are_those_of_a_socket(spec: StoreSpec) -> None:
    shared = trained(spec, share_memory=True)
    assert len(set(shared)) == 1
    assert shared == trained(spec, share_memory=False)


class Passing:
    """Counts the bytes that clients hand to their sockets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        send = ZmqClientTransport.send

        def counted(transport: ZmqClientTransport, to: int, frames: Frames) -> bool:
            taken = send(transport, to, frames)
            self.bytes += taken * sum(memoryview(frame).nbytes for frame in frames)
            return taken

        monkeypatch.setattr(ZmqClientTransport, "send", counted)


def test_large_arrays_do_not_pass_through_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    passing = Passing(monkeypatch)
    iterations = 5
    trained(store(), share_memory=False, iterations=iterations)
    assert passing.bytes > (iterations + 1) * 4 * SIZE  # and the first value
    passing.bytes = 0
    trained(store(), share_memory=True, iterations=iterations)
    assert passing.bytes < 2 * 4 * SIZE


def test_a_shard_that_is_a_process_of_its_own_takes_the_memory(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passing = Passing(monkeypatch)
    command = [sys.executable, "-m", "ps_server", "--listen=tcp://127.0.0.1:0", "--workers=1"]
    with subprocess.Popen(command, cwd=repository, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["address"]
        client = Client([address], rank=0, store=store(), timeout_s=TIMEOUT_S)
        value = np.zeros(SIZE, np.float32)
        client.start(zeros(store()))
        for _ in range(5):
            client.push(0, np.ones(SIZE, np.float32), rate=1.0)
            client.clock()
            client.read(0, value)
        client.close()
    assert process.returncode == 0
    np.testing.assert_allclose(value, -(1 + 1.9 + 2.71 + 3.439 + 4.0951), rtol=1e-6)
    assert passing.bytes < 2 * 4 * SIZE


def test_files_and_memory_are_gone_after_the_job() -> None:
    trained(store(), share_memory=True)
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    trained(store(), share_memory=True)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files
    assert "memfd:poseidon" not in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_an_address_of_another_machine_is_not_here() -> None:
    assert is_here("tcp://127.0.0.1:1")
    assert is_here("tcp://localhost:65535")
    assert not is_here("tcp://192.0.2.1:80")  # for documentation: nobody's
    assert not is_here("tcp://[2001:db8::1]:80")
    assert not is_here("tcp://no such host:80")


def test_nothing_is_offered_to_another_machine_or_for_small_arrays() -> None:
    network = MemoryNetwork(1)
    client = Client(network.client("worker"), rank=0, store=store(), token=TOKEN)
    chunks = client._session.chunks_on
    client.close()
    for addresses in ([], ["tcp://192.0.2.1:80"]):
        assert WorkerNeighbours(addresses).offers(chunks) == {}
    assert WorkerNeighbours([HERE]).offers(lambda _: []) == {}
    worker = WorkerNeighbours([HERE])
    assert worker.offers(chunks)[0].place_bytes == LEAST_BYTES
    worker.close()


@pytest.fixture
def offered() -> Iterator[m.Share]:
    """Memory as a worker would offer it."""
    layout = Layout(NONCE_BYTES, 4, LEAST_BYTES)
    file, memory = new_memory(layout.total_bytes)
    memory[:NONCE_BYTES] = b"n" * NONCE_BYTES
    yield m.Share(os.getpid(), file, b"n" * NONCE_BYTES, 4, LEAST_BYTES)
    os.close(file)


def test_memory_that_is_as_it_was_offered_is_taken_once(offered: m.Share) -> None:
    neighbours = ShardNeighbours()
    assert neighbours.accept(b"worker", offered) == m.Shared(taken=True)
    with pytest.raises(RemoteProtocolError, match="once"):
        neighbours.accept(b"worker", offered)


@pytest.mark.parametrize(
    "change",
    [{"process": 2**22 + 1}, {"file": 9999}, {"nonce": b"m" * NONCE_BYTES}, {"nonce": b""}, {"places": 5}],
    ids=lambda change: "another " + next(iter(change)),
)
def test_memory_that_is_not_as_it_was_offered_is_left_alone(
    offered: m.Share, change: dict[str, object]
) -> None:
    words = {name: getattr(offered, name) for name in m.Share.__slots__}
    share = m.Share(**{**words, **change})
    assert ShardNeighbours().accept(b"worker", share) == m.Shared(taken=False)


def test_a_file_is_not_memory(tmp_path: Path) -> None:
    layout = Layout(NONCE_BYTES, 4, LEAST_BYTES)
    path = tmp_path / "memfd:poseidon"
    path.write_bytes((b"n" * NONCE_BYTES).ljust(layout.total_bytes, b"\0"))
    with path.open("r+b") as file:
        share = m.Share(os.getpid(), file.fileno(), b"n" * NONCE_BYTES, 4, LEAST_BYTES)
        assert ShardNeighbours().accept(b"worker", share) == m.Shared(taken=False)


def test_memory_that_could_be_cut_short_is_refused() -> None:
    layout = Layout(NONCE_BYTES, 4, LEAST_BYTES)
    file = os.memfd_create("poseidon")
    os.ftruncate(file, layout.total_bytes)
    os.write(file, b"n" * NONCE_BYTES)
    share = m.Share(os.getpid(), file, b"n" * NONCE_BYTES, 4, LEAST_BYTES)
    assert ShardNeighbours().accept(b"worker", share) == m.Shared(taken=False)
    os.close(file)


def test_sealed_memory_cannot_be_cut_short(offered: m.Share) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(offered.file, 0)


def test_a_worker_that_offers_twice_is_refused_and_a_stranger_not_heard(offered: m.Share) -> None:
    network = MemoryNetwork(1)
    server = Server(Shard(0, 1, TOKEN), network.server(0))
    thread = threading.Thread(target=server.serve, name="ps-shard")
    thread.start()
    worker = network.client("worker")
    for message in (offered, m.Hello(0, TOKEN), offered, offered):
        worker.send(0, encode(message))
    heard: list[m.Message] = []
    while len(heard) < 3:
        heard += [said.message for _, frames in worker.receive(TIMEOUT_S) for said in decode(frames)]
    server.stop()
    thread.join()
    assert heard == [m.Welcome(0), m.Shared(taken=True), m.Fault("memory is offered once")]
    assert server.shard.counts.faults == 2


def test_an_answer_that_nobody_asked_for_is_an_error() -> None:
    with pytest.raises(RemoteProtocolError, match="not asked"):
        WorkerNeighbours([HERE]).answered(0, m.Shared(taken=True))
