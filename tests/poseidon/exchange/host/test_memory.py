"""The memory that the workers of a host share, on CPUs and between GPUs, and what is left of it when
they are killed.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.device import DONE, HOST
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.host import carrier
from poseidon.exchange.host.carrier import Contributing
from poseidon.exchange.host.group import HostGroup, new_file
from poseidon.exchange.host.memory import HostMemory
from poseidon.exchange.host.pieces import FlatPiece, HostPieces
from poseidon.exchange.job_control import AloneControl
from poseidon.exchange.options import ExchangeKind
from ps_server import Collection, TransportError
from tests.support.exchange_contract import Make, Scenario, train
from tests.support.machines import machines
from tests.support.simulated_device import Race, SimulatedDevice, SimulatedTensor, simulated_devices
from tests.support.threads import on_threads

COUNTS = (1, 1, 2)
PARTS = [[0, 1, 2], [1, 0, 2], [0, 0, 0]]
PIECES = [
    FlatPiece(index=index, start=0, stop=size, is_whole=True, plane=plane)
    for index, (size, plane) in enumerate([(5, 0), (1, 1), (40, 0)])
]


class GroupOnCpus:
    """Workers without GPUs, which contribute `COUNTS` parts."""

    def __init__(self, rank: int, file: int) -> None:
        self.rank, self.size, self.file = rank, len(COUNTS), file
        self.meetings = self.tree = self.peers = self

    def parts(self, worker: int) -> Sequence[None]:
        return (None,) * COUNTS[worker]

    def on(self, *_: object) -> None:
        pass

    def gather(self, payload: bytes) -> Collection:
        payloads = (payload,) * self.size
        return Collection(lambda: payloads, lambda: payloads)


def memory(pieces: Sequence[FlatPiece], rank: int, file: int) -> HostMemory:
    group = cast("HostGroup", GroupOnCpus(rank, file))
    tensors = [Trained(name="w", tensor=torch.zeros(2**20))] * 3
    return HostMemory(HostPieces(tensors, pieces, rank, {2}), group, AloneControl())


def test_what_one_worker_writes_all_others_read() -> None:
    file = new_file()
    one, other = (memory(PIECES, rank, os.dup(file)) for rank in range(2))
    os.close(file)
    for number, value in enumerate(one.values):
        value.fill_(number)
    written = 10.0
    for piece, counts in enumerate(PARTS):
        for worker, count in enumerate(counts):
            assert len(one.parts(piece, worker)) == count
            for place in one.parts(piece, worker):
                written += 1.0
                place.fill_(written)
    read = 10.0
    for piece, counts in enumerate(PARTS):
        assert other.values[piece].tolist() == [piece] * PIECES[piece].size
        for worker in range(len(counts)):
            for place in other.parts(piece, worker):
                read += 1.0
                assert place.tolist() == [read] * PIECES[piece].size
    one.close()
    other.close()


def test_a_host_without_tensors_has_memory_too() -> None:
    memory([], 0, new_file()).close()


@pytest.mark.parametrize(
    ("number", "size", "says"),
    [
        (errno.ENOSPC, 2**20, "cannot share 4 MiB of memory: No space left"),
        (errno.EFBIG, 1, r"cannot share 1 MiB of memory: .* at most 77 bytes \(ulimit -f\)"),
    ],
)
def test_memory_that_cannot_be_had_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, number: int, size: int, says: str
) -> None:
    def truncate(file: int, length: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "ftruncate", truncate)
    monkeypatch.setattr(resource, "getrlimit", {resource.RLIMIT_FSIZE: (77, 77)}.__getitem__)
    large = FlatPiece(index=2, start=0, stop=size, is_whole=True, plane=0)
    with pytest.raises(TransportError, match=says):
        memory([large], 0, new_file())


CHILD = """
import os, signal
from poseidon.exchange.host.group import new_file
from poseidon.exchange.host.memory import _of_file
file = new_file()
_of_file(1000, file).fill_(1.0)
assert os.fstat(file).st_nlink == 0
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.processes
def test_nothing_is_left_of_a_process_that_is_killed(tmp_path: Path) -> None:
    """Its memory is a file of its own, which has no name."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -9, done.stderr
    assert list(tmp_path.iterdir()) == []


# Between GPUs.


def on_device(rank: int) -> torch.device:
    return torch.device("lazy", rank)


def not_lent(monkeypatch: pytest.MonkeyPatch) -> str:
    def lend(device: SimulatedDevice, memory: Tensor) -> bytes:
        if device.torch.index == 1:
            raise RuntimeError("no handle\nof any kind")
        return own(device, memory)

    own = SimulatedDevice.lend
    monkeypatch.setattr(SimulatedDevice, "lend", lend)
    return "(worker 0, GPU of worker 1: it is not lent)"


def out_of_reach(monkeypatch: pytest.MonkeyPatch) -> str:
    def borrow(device: SimulatedDevice, handle: bytes) -> Tensor:
        if device.torch.index == 1:
            raise RuntimeError("peer access is not supported between these two devices")
        return own(device, handle)

    own = SimulatedDevice.borrow
    monkeypatch.setattr(SimulatedDevice, "borrow", borrow)
    return "(worker 1, GPU of worker 0: peer access is not supported between these two devices)"


def another_memory_is_read(monkeypatch: pytest.MonkeyPatch) -> str:
    def borrow(device: SimulatedDevice, handle: bytes) -> Tensor:
        found = own(device, handle)
        return device.put(torch.zeros(found.shape)) if device.torch.index == 0 else found

    own = SimulatedDevice.borrow
    monkeypatch.setattr(SimulatedDevice, "borrow", borrow)
    return "(worker 0, GPU of worker 1: a copy has other values than were written)"


def writes_go_elsewhere(monkeypatch: pytest.MonkeyPatch) -> str:
    def borrow(device: SimulatedDevice, handle: bytes) -> Tensor:
        found = own(device, handle)
        assert isinstance(found, SimulatedTensor)
        return device.put(found.plain) if device.torch.index == 0 else found

    own = SimulatedDevice.borrow
    monkeypatch.setattr(SimulatedDevice, "borrow", borrow)
    return "(worker 1, GPU of worker 0: a copy has other values than were written)"


ONE_HOST = Scenario(iterations=3)
LATEST = 5
"""The seed of a device on which work runs only where something waits for it."""


def ends_of(workers: int, seed: int) -> tuple[list[list[Any]], list[SimulatedDevice]]:
    """Return the weights of the workers of one host, and their devices."""
    with (
        simulated_devices(workers, seed) as devices,
        machines(ExchangeKind.SERVER, (workers,), shards=0) as make,
    ):
        return train(make, workers, ONE_HOST, device_of=on_device), devices


@pytest.mark.parametrize(
    "fault",
    [not_lent, out_of_reach, another_memory_is_read, writes_go_elsewhere],
    ids=lambda fault: str(fault.__name__),
)
def test_where_gpus_cannot_share_memory_pinned_memory_gives_the_same_bits(
    fault: Callable[[pytest.MonkeyPatch], str], caplog: pytest.LogCaptureFixture
) -> None:
    between, devices = ends_of(2, 0)
    assert [set(device.copies) for device in devices] == [{"in", "out", "peer"}] * 2
    assert not caplog.records
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        why = fault(patch)
        through_host, devices = ends_of(2, 0)
    (line,) = caplog.messages
    assert line == (
        f"the GPUs of this machine do not share memory {why}; its workers exchange through the "
        "host's memory"
    )
    for one, other in zip(between, through_host, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("workers", [2, 4])
def test_copies_of_a_gradient(workers: int) -> None:
    """Of w numbers in L pieces each GPU copies L - 1 parts and takes L - 1 values; through the
    host's memory it also copies the other parts in, and its own value out.
    """
    size = workers * 65_536
    for shares in (True, False):
        with (
            pytest.MonkeyPatch.context() as patch,
            simulated_devices(workers, 0) as devices,
            machines(ExchangeKind.SERVER, (workers,), shards=0) as make,
        ):
            if not shares:
                out_of_reach(patch)
            on_threads(workers, lambda rank: one_iteration(make, devices[rank], size))
            own = size // workers
            found = [(dict(device.copies), dict(device.bytes)) for device in devices]
        others = workers - 1
        expected = {"peer": 2 * others} if shares else {"out": others + 1, "in": 2 * others}
        bytes_ = {way: 4 * own * count for way, count in expected.items()}
        assert found == [(expected, bytes_)] * workers


def one_iteration(make: Make, device: SimulatedDevice, size: int) -> None:
    """Train a tensor for an iteration, and count its copies."""
    weight = Trained(name="w", tensor=torch.zeros(size, device=device.torch))
    exchange = make(device.torch.index, [weight], ExchangeSettings())
    try:
        exchange.open(None)
        device.synchronize()
        exchange.control.all_gather(b"")
        device.copies.clear()
        device.bytes.clear()
        device.waits.clear()
        exchange.start(0, 0.1)
        exchange.wait(0)
        exchange.begin(0, torch.ones_like(weight.tensor))
        exchange.finish()
        exchange.wait(0)
        assert not device.waits
    finally:
        exchange.close()


def test_memory_between_gpus_is_float32_whatever_the_tensors_are() -> None:
    def run(rank: int) -> float:
        weight = torch.full((5,), 1.0, device=devices[rank].torch, dtype=torch.bfloat16)
        exchange = make(rank, [Trained(name="w", tensor=weight)], ExchangeSettings())
        try:
            exchange.open(None)
            exchange.start(0, 0.25)
            exchange.wait(0)
            exchange.begin(0, torch.full_like(weight, 1.0 + rank))
            exchange.finish()
            exchange.settle()
        finally:
            exchange.close()
        return float(weight[4])

    with (
        simulated_devices(2, 0) as devices,
        machines(ExchangeKind.SERVER, (2,), shards=0) as make,
    ):
        assert on_threads(2, run) == [1.0 - 0.25 * 1.5] * 2
        assert all(device.copies["peer"] for device in devices)


def tell_before_the_copy_ends(patch: pytest.MonkeyPatch) -> None:
    send = Contributing._send_parts
    patch.setattr(
        Contributing,
        "_send_parts",
        lambda self, copied: send(self, [(number, part, DONE) for number, part, _ in copied]),
    )


def one_place_for_all_parts(patch: pytest.MonkeyPatch) -> None:
    """A part is written where the owner may still read another one."""
    patch.setattr(carrier, "TOLD_ELEMENTS", 1)
    parts = HostMemory.parts

    def one(self: HostMemory, piece: int, worker: int) -> list[Tensor]:
        owners = [one.plane for one in self._pieces.all]
        every = [parts(self, n, worker) for n, o in enumerate(owners) if o == owners[piece]]
        (largest,) = max(every, key=lambda places: places[0].numel() if places else 0)
        return [largest[: len(own)] for own in parts(self, piece, worker)]

    patch.setattr(HostMemory, "parts", one)


def take_values_late(patch: pytest.MonkeyPatch) -> None:
    """A value is read on a stream that does not end before the next part is sent."""
    take = HostMemory.take

    def late(self: HostMemory, number: int, owes: Callable[[int], bool]) -> None:
        with self.device.on(self.device.stream()):
            take(self, number, owes)

    patch.setattr(HostMemory, "take", late)


RACES = [
    tell_before_the_copy_ends,
    one_place_for_all_parts,
    take_values_late,
]


@pytest.mark.parametrize("put_back", RACES, ids=lambda put_back: str(put_back.__name__))
def test_a_race_between_gpus_is_found(
    put_back: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_back(monkeypatch)
    for seed in range(20):
        try:
            ends_of(2, seed)
        except Race:
            return
    pytest.fail("no seed has found it")


@pytest.mark.parametrize("waits", [True, False])
def test_memory_of_others_is_kept_until_the_last_copy_has_ended(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_back = HostMemory.give_back

    def at_once(self: HostMemory) -> None:
        own, self.device = self.device, HOST
        give_back(self)
        self.device = own

    if not waits:
        monkeypatch.setattr(HostMemory, "give_back", at_once)
    with (
        nullcontext() if waits else pytest.raises(Race, match="is freed while copy on stream"),
        simulated_devices(2, LATEST) as devices,
        machines(ExchangeKind.SERVER, (2,), shards=0) as make,
    ):
        on_threads(2, lambda rank: one_iteration(make, devices[rank], 2 * 65_536))


def test_an_owner_passes_no_lent_memory_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange between hosts may read a sum after the value is out, and its place is written."""
    lent, begun = [], []
    lend, begin = SimulatedDevice.lend, Exchange.begin

    def noted_lend(device: SimulatedDevice, memory: Tensor) -> bytes:
        lent.append(memory.block)  # type: ignore[attr-defined]
        return lend(device, memory)

    def noted_begin(self: Exchange, index: int, gradient: Tensor) -> None:
        begun.append(gradient.block)  # type: ignore[attr-defined]
        begin(self, index, gradient)

    monkeypatch.setattr(SimulatedDevice, "lend", noted_lend)
    monkeypatch.setattr(Exchange, "begin", noted_begin)
    ends_of(2, 0)
    assert lent and begun
    assert not {id(block) for block in lent} & {id(block) for block in begun}


def test_memory_that_a_driver_does_not_pin_is_used_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    out_of_reach(monkeypatch)
    pinned, _ = ends_of(2, 0)
    monkeypatch.setattr(SimulatedDevice, "pin", lambda *_: False)
    pageable, _ = ends_of(2, 0)
    for one, other in zip(pinned, pageable, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)
    assert caplog.text.count("cannot be pinned") == 1
