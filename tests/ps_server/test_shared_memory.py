"""A worker and a shard of one machine: the same bits as through a socket, and nothing that a
peer could not do there too.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
from ps_server.network import Network
from ps_server.protocol import messages as m
from ps_server.protocol.frames import decode, encode
from ps_server.protocol.placement import Chunk, place
from ps_server.shared_memory import (
    LEAST_BYTES,
    NONCE_BYTES,
    Layout,
    Segment,
    ShardSharedMemory,
    WorkerSharedMemory,
    is_local,
    new_memory,
)
from ps_server.transport.base import Frames
from ps_server.transport.zmq_sockets import ZmqClientTransport
from tests.support.cluster import TIMEOUT_S, TOKEN, run_workers, socket_store, zeros
from tests.support.memory_transport import MemoryNetwork

SLOT_BYTES = 2 * LEAST_BYTES
MARKER = 0xC1
HERE_ENTRY = 2**32 - 1
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


def test_a_value_that_is_read_late_is_not_the_next_one() -> None:
    spec = StoreSpec(workers=1, shards=1, tables=store().tables)
    found = []

    def work(client: Client, _: int) -> None:
        client.start(zeros(spec))
        for _ in range(2):
            client.push(0, np.ones(SIZE, np.float32), rate=1.0)
            client.clock()
            client._until_fresh(0, 0)  # the value has come, and is not read yet
            found.append(client._pump.session.values.copies[0][0].unread)

    with socket_store(1, 1, share_memory=True) as connect:
        run_workers(connect, spec, work)
    assert [value is not None and value.max() for value in found] == [-1.0, np.float32(-2.9)]


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


def test_a_shard_that_is_a_process_of_its_own_takes_the_memory(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passing = Passing(monkeypatch)
    command = [sys.executable, "-m", "ps_server", "--listen=tcp://127.0.0.1:0", "--workers=1"]
    with subprocess.Popen(command, cwd=repository, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["address"]
        client = Client([address], Network(timeout_s=TIMEOUT_S), store=store())
        value = np.zeros(SIZE, np.float32)
        client.start(zeros(store()))
        for _ in range(5):
            client.push(0, np.ones(SIZE, np.float32), rate=1.0)
            client.clock()
            client.read(0, value)
        client.close()
        process.stdout.read()  # until the process ends, which writes to it last
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
    assert is_local("tcp://127.0.0.1:1")
    assert is_local("tcp://localhost:65535")
    assert not is_local("tcp://192.0.2.1:80")  # for documentation: nobody's
    assert not is_local("tcp://[2001:db8::1]:80")
    assert not is_local("tcp://no such host:80")


def test_nothing_is_offered_to_another_machine_or_for_small_arrays() -> None:
    chunks = place(store()).of_shard
    for addresses in ([], ["tcp://192.0.2.1:80"]):
        assert WorkerSharedMemory(addresses).offers(chunks) == {}
    assert WorkerSharedMemory([HERE]).offers(lambda _: []) == {}
    worker = WorkerSharedMemory([HERE])
    assert worker.offers(chunks)[0].slot_bytes == LEAST_BYTES
    worker.close()


@pytest.fixture
def offered() -> Iterator[m.MemoryOffer]:
    """Memory as a worker would offer it."""
    layout = Layout(NONCE_BYTES, 4, LEAST_BYTES)
    made = new_memory(layout.total_bytes)
    assert made is not None
    file, memory = made
    memory[:NONCE_BYTES] = b"n" * NONCE_BYTES
    yield m.MemoryOffer(os.getpid(), file, b"n" * NONCE_BYTES, 4, LEAST_BYTES)
    os.close(file)


def test_memory_that_is_as_it_was_offered_is_taken_once(offered: m.MemoryOffer) -> None:
    memory = ShardSharedMemory()
    assert memory.accept(b"worker", offered) == m.MemoryAnswer(opened=True)
    with pytest.raises(RemoteProtocolError, match="once"):
        memory.accept(b"worker", offered)
    with pytest.raises(PermissionError):
        os.ftruncate(offered.file, 0)  # it is sealed


@pytest.mark.parametrize(
    "change",
    [
        {"process": 2**22 + 1},
        {"file": 9999},
        {"nonce": b"m" * NONCE_BYTES},
        {"nonce": b""},
        {"slots": 5},
    ],
    ids=lambda change: "another " + next(iter(change)),
)
def test_memory_that_is_not_as_it_was_offered_is_left_alone(
    offered: m.MemoryOffer, change: dict[str, object]
) -> None:
    words = {name: getattr(offered, name) for name in m.MemoryOffer.__slots__}
    offer = m.MemoryOffer(**{**words, **change})
    assert ShardSharedMemory().accept(b"worker", offer) == m.MemoryAnswer(opened=False)


def test_a_file_is_not_memory(tmp_path: Path) -> None:
    layout = Layout(NONCE_BYTES, 4, LEAST_BYTES)
    path = tmp_path / "memfd:poseidon"
    path.write_bytes((b"n" * NONCE_BYTES).ljust(layout.total_bytes, b"\0"))
    with path.open("r+b") as file:
        offer = m.MemoryOffer(os.getpid(), file.fileno(), b"n" * NONCE_BYTES, 4, LEAST_BYTES)
        assert ShardSharedMemory().accept(b"worker", offer) == m.MemoryAnswer(opened=False)


def test_memory_that_could_be_cut_short_is_refused() -> None:
    layout = Layout(NONCE_BYTES, 4, LEAST_BYTES)
    file = os.memfd_create("poseidon")
    os.ftruncate(file, layout.total_bytes)
    os.write(file, b"n" * NONCE_BYTES)
    offer = m.MemoryOffer(os.getpid(), file, b"n" * NONCE_BYTES, 4, LEAST_BYTES)
    assert ShardSharedMemory().accept(b"worker", offer) == m.MemoryAnswer(opened=False)
    os.close(file)


def test_a_worker_that_offers_twice_is_refused_and_a_stranger_not_heard() -> None:
    memory = WorkerSharedMemory([HERE])
    chunk = Chunk(table=0, index=0, start=0, stop=SIZE, shard=0)
    offered = memory.offers(lambda _: [chunk])[0]
    network = MemoryNetwork(1)
    server = Server(Shard(0, 1, TOKEN), network.server(0))
    thread = threading.Thread(target=server.serve, name="ps-shard")
    thread.start()
    worker = network.client("worker")
    for message in (offered, m.Hello(0, TOKEN), offered, offered):
        worker.send(0, encode(message))
    heard: list[m.Message] = []
    try:
        while len(heard) < 3:
            for _, frames in worker.receive(TIMEOUT_S):
                heard += [said.message for said in decode(memory.receive(0, frames))]
    finally:
        server.stop()
        thread.join()
        memory.close()
    assert heard == [m.Welcome(0), m.MemoryAnswer(opened=True), m.Fault("memory is offered once")]
    assert server.shard.counts.faults == 2


def test_an_answer_that_nobody_asked_for_is_an_error() -> None:
    with pytest.raises(RemoteProtocolError, match="not made"):
        WorkerSharedMemory([HERE]).answered(0, m.MemoryAnswer(opened=True))


def ends(slots: int = 2) -> tuple[Segment, Segment]:
    layout = Layout(16, slots, SLOT_BYTES)
    memory = mmap.mmap(-1, layout.total_bytes)
    return Segment(memory, layout, sender=0), Segment(memory, layout, sender=1)


def large(value: int, size: int = LEAST_BYTES) -> bytes:
    return bytes([value]) * size


def test_a_packet_is_one_frame_without_the_bytes_of_large_arrays() -> None:
    one, other = ends()
    frames = [b"head", large(1), b"", b"tail", large(2, SLOT_BYTES), large(3, LEAST_BYTES - 1)]
    sent, taken = one.write(frames)
    assert len(taken) == 2
    assert len(sent) == 1
    assert len(sent[0]) < LEAST_BYTES + 100
    assert [bytes(frame) for frame in other.read(sent)] == frames
    sent, taken = one.write(frames[2:4])
    assert (len(sent), taken) == (1, [])
    assert list(other.read(sent)) == frames[2:4]


def test_a_packet_that_does_not_fit_is_sent_as_it_is() -> None:
    one, other = ends(slots=1)
    there, back = one.write([large(1)])[0], other.write([large(2)])[0]
    assert bytes(other.read(there)[0]) == large(1)
    assert bytes(one.read(back)[0]) == large(2)
    for frames in ([large(1), large(2)], [large(1, SLOT_BYTES + 1)]):
        assert one.write(frames) == (frames, [])
        assert other.read(frames) == frames
    assert one.write([large(1)])[1] == [0]
    for frames in ([b"head", b"", b"tail"], [], [b""]):  # of a peer that shares nothing
        assert other.read(frames) == frames


def test_the_receiver_works_on_the_array_where_it_lies() -> None:
    one, other = ends(slots=1)
    (frame,) = other.read(one.write([large(0)])[0])
    np.frombuffer(frame, np.uint8)[:] = 7
    del frame
    packet = one.write([large(1)])[0]
    (frame,) = other.read(packet)
    assert bytes(frame) == large(1)


def test_a_slot_comes_back_when_nothing_refers_to_it_any_more() -> None:
    one, other = ends(slots=1)
    (frame,) = other.read(one.write([large(1)])[0])
    tensor = torch.from_numpy(np.frombuffer(frame, np.float32))
    rest = tensor[5:]
    del frame, tensor
    assert one.write([large(2)])[1] == []  # `rest` is still there
    assert rest.view(torch.uint8).unique().tolist() == [1]
    del rest
    assert one.write([large(3)])[1] == [0]


def test_an_array_that_its_sender_keeps_is_not_copied() -> None:
    one, other = ends(slots=1)
    kept = one.allocate(LEAST_BYTES)
    assert kept is not None
    for value in (1, 2):
        kept[:] = value
        sent, taken = one.write([memoryview(kept)])
        assert taken == []
        (frame,) = other.read(sent)
        assert memoryview(frame).readonly
        kept[:1] = 9  # the receiver sees it: nothing was copied
        assert bytes(frame) == b"\x09" + large(value)[1:]
        del frame
    assert one.allocate(LEAST_BYTES) is None  # its slot stays taken
    assert one.write([large(3)])[0] == [large(3)]


def test_a_kept_slot_comes_back_when_nothing_refers_to_its_array() -> None:
    one, _ = ends(slots=1)
    kept = one.allocate(LEAST_BYTES)
    assert kept is not None
    tensor = torch.from_numpy(kept.view(np.float32))
    del kept
    assert one.write([large(1)])[1] == []
    del tensor
    assert one.write([large(1)])[1] == [0]


@pytest.mark.parametrize("size", [LEAST_BYTES - 1, SLOT_BYTES + 1])
def test_no_slot_is_kept_for_an_array_that_fits_none(size: int) -> None:
    assert ends()[0].allocate(size) is None


def test_a_packet_that_was_not_sent_frees_its_slots() -> None:
    one, _ = ends(slots=1)
    _, taken = one.write([large(1)])
    assert one.write([large(2)])[1] == []
    one.withdraw(taken)
    assert one.write([large(2)])[1] == [0]


def packet(*entries: tuple[int, int], count: int | None = None, rest: bytes = b"") -> bytes:
    """A frame as `write` makes it."""
    head = struct.pack("<BI", MARKER, len(entries) if count is None else count)
    return head + b"".join(struct.pack("<II", *entry) for entry in entries) + rest


@pytest.mark.parametrize(
    "entry",
    [
        (2, LEAST_BYTES),
        (2**31 - 1, LEAST_BYTES),
        (2**31 + 2, LEAST_BYTES),
        (0, SLOT_BYTES + 1),
        (0, 0),
    ],
    ids=["no such slot", "far from any", "no such kept one", "larger than a slot", "nothing"],
)
def test_an_array_that_cannot_be_is_refused(entry: tuple[int, int]) -> None:
    _, other = ends()
    with pytest.raises(RemoteProtocolError, match="no array of"):
        other.read([packet(entry)])


@pytest.mark.parametrize(
    "frame",
    [
        packet((0, LEAST_BYTES))[:-1],
        packet(count=2**32 - 1),
        packet()[:-1],
        packet((HERE_ENTRY, 4), rest=b"123"),
        packet((HERE_ENTRY, 2), rest=b"123"),
    ],
    ids=["entries", "too many entries", "head", "too few bytes", "too many bytes"],
)
def test_a_packet_that_is_cut_short_is_refused(frame: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match=r"cut short|ends at"):
        ends()[1].read([frame])


@given(st.binary(max_size=60))
def test_nonsense_is_refused_or_gives_frames_of_the_segment(nonsense: bytes) -> None:
    one, other = ends()
    with contextlib.suppress(RemoteProtocolError):
        found = other.read([bytes([MARKER]) + nonsense])
        assert all(len(frame) <= SLOT_BYTES for frame in found)
    assert bytes(other.read(one.write([large(9)])[0])[0]) == large(9)
