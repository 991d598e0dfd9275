"""Memory of GPUs that the workers of a host lend each other for torch.distributed, on simulated
devices.
"""

from __future__ import annotations

import logging
import sys

import pytest
import torch
from torch import Tensor

from poseidon.torch.process_group import lent_blocks
from poseidon.torch.process_group.collectives import Collectives
from poseidon.torch.process_group.lent_blocks import Lent, LentBlocks
from poseidon.torch.process_group.mesh import Mesh
from poseidon.torch.process_group.worker_parts import ReduceRule
from ps_server import RemoteProtocolError
from tests.poseidon.torch.process_group.test_collectives import meshes, on_all
from tests.support.simulated_device import (
    Race,
    SimulatedDevice,
    SimulatedEvent,
    simulated_devices,
)

SIZE = 20_000
LATEST = 5
"""The seed of a device on which work runs only where something waits for it."""


def means(devices: list[SimulatedDevice], calls: int) -> None:
    """Average a tensor over the workers of a host, so many times."""

    def run(mesh: Mesh) -> None:
        device = devices[mesh.rank]
        group = Collectives(mesh, "0", range(mesh.size))
        for _ in range(calls):
            own = torch.full((SIZE,), 1.0 + mesh.rank, device=device.torch)
            with device.on(device.stream()):
                device.synchronize()
                device.copies.clear()
                group.all_reduce(own, ReduceRule.MEAN)
                assert own.cpu().tolist() == [1.5] * SIZE
        mesh.flush()

    with meshes(2, hosts=[(0, 1)]) as made:
        on_all(made, run)


def test_no_byte_passes_through_the_host_once_the_patterns_are_read() -> None:
    with simulated_devices(2, 0) as devices:
        means(devices, 3)
        # its own part for the other worker, and the mean; the last one is the test's
        assert [dict(device.copies) for device in devices] == [{"peer": 2, "out": 1}] * 2


@pytest.mark.parametrize("how", ["lend", "borrow"])
def test_gpus_that_do_not_share_memory_are_named_once(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> bytes:
        raise RuntimeError("peer access is not supported\nbetween these two devices")

    monkeypatch.setattr(SimulatedDevice, how, refuse)
    with caplog.at_level(logging.WARNING), simulated_devices(2, 0) as devices:
        means(devices, 4)
        assert not any(device.copies["peer"] for device in devices)
    assert caplog.messages == [
        "the GPUs of this machine do not share memory (worker 1, GPU of worker 0: peer access is "
        "not supported); torch.distributed passes their tensors through the host's memory"
    ]


def test_a_pattern_with_other_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(device: SimulatedDevice, handle: bytes) -> Tensor:
        borrow(device, handle)
        return device.put(torch.zeros(lent_blocks.PATTERN))

    borrow = SimulatedDevice.borrow
    monkeypatch.setattr(SimulatedDevice, "borrow", zeros)
    with simulated_devices(2, 0) as (first, second):
        own, other = LentBlocks(), LentBlocks()
        other.offered(0, own.offer(1, first.put(torch.zeros(1))))
        second.learns(first.knows())
        ((owner, problem),) = other.answers(second.put(torch.zeros(1)))
        assert (owner, problem) == (0, "a copy has other values than were written")
        assert own.answered(1, problem)
        assert own.readers_of([1]) == []


def test_a_block_is_used_again_once_it_is_read_and_no_more_memory_is_lent_than_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lent_blocks, "MOST_BYTES", 2 * lent_blocks.LEAST_BLOCK_BYTES)
    with simulated_devices(2, LATEST) as (first, second):
        own, other = LentBlocks(), LentBlocks()
        other.offered(0, own.offer(1, first.put(torch.zeros(1))))
        second.learns(first.knows())
        like = second.put(torch.zeros(SIZE))
        assert other.answers(like) == [(0, "")]
        for value in (1.0, 2.0):
            (place,) = own.put(first.put(torch.full((SIZE,), value)), [1])
            second.learns(first.knows())
            assert other.take(0, place, like).cpu().tolist() == [value] * SIZE
        assert (place.number, bool(place.handle)) == (1, True)
        assert own.put(first.put(torch.zeros(SIZE)), [1]) == []
        assert not own.all_read(set())
        assert own.all_read({1})
        first.learns(second.knows())
        own.read(0, 1)
        (place,) = own.put(first.put(torch.full((SIZE,), 3.0)), [1])
        second.learns(first.knows())
        assert place == Lent(0, 4 * SIZE, b"")
        assert other.take(0, place, like).cpu().tolist() == [3.0] * SIZE
        with pytest.raises(RemoteProtocolError, match="worker 0 lends no such memory"):
            other.take(0, Lent(7, 4, b""), like)
        other.close()
        own.close()


@pytest.mark.parametrize("where", ["put", "take"])
def test_a_race_is_found(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor is read before it is in the block, or its block is written to while it is read."""
    synchronize = SimulatedEvent.synchronize

    def elsewhere(self: SimulatedEvent) -> None:
        if sys._getframe(1).f_code.co_name != where:
            synchronize(self)

    monkeypatch.setattr(SimulatedEvent, "synchronize", elsewhere)
    with pytest.raises(Race), simulated_devices(2, LATEST) as (first, second):
        own, other = LentBlocks(), LentBlocks()
        like = second.put(torch.zeros(SIZE))
        other.offered(0, own.offer(1, first.put(torch.zeros(1))))
        second.learns(first.knows())
        assert other.answers(like) == [(0, "")]
        for _ in range(2):
            (place,) = own.put(first.put(torch.ones(SIZE)), [1])
            second.learns(first.knows())
            found = other.take(0, place, like)
            first.learns(second.knows())
            own.read(place.number, 1)
        second.synchronize()
        del found
        other.close()
