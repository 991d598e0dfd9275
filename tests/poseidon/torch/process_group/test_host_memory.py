"""Blocks of memory between two ends in one process, which opens its own memory as a neighbour does."""

from __future__ import annotations

import gc

import pytest
import torch

from poseidon.torch.process_group.host_memory import Place, SharedBlocks
from ps_server import RemoteProtocolError, TransportError
from ps_server.transport.base import Buffer

SIZE = 100_000


def payload(value: int, size: int = SIZE) -> Buffer:
    return bytes([value]) * size


def put(blocks: SharedBlocks, value: int, receivers: int = 1, size: int = SIZE) -> Place:
    place = blocks.put(payload(value, size), receivers)
    assert place is not None
    return place


def test_a_payload_is_read_where_it_is_by_each_receiver() -> None:
    own, other = SharedBlocks(), SharedBlocks()
    place = put(own, 7, receivers=2)
    assert not own.all_open
    views = [other.get(place, number) for number in range(2)]
    assert own.all_open
    assert all(bytes(view) == payload(7) for view in views)
    own.close()
    assert bytes(views[1]) == payload(7)  # the memory outlives its sender


def test_a_block_is_used_again_once_all_receivers_have_let_go_of_it() -> None:
    own, other = SharedBlocks(), SharedBlocks()
    place = put(own, 1, receivers=2)
    first, second = (torch.frombuffer(other.get(place, n), dtype=torch.uint8) for n in range(2))
    del first
    gc.collect()
    assert put(own, 2).file != place.file
    assert second[0] == 1
    del second
    gc.collect()
    assert put(own, 3).file == place.file
    own.close()


def test_the_smallest_block_that_is_large_enough_is_used() -> None:
    own, other = SharedBlocks(), SharedBlocks()
    large, small = put(own, 1, size=4 * SIZE), put(own, 2)
    for place in (large, small):
        other.get(place, 0)
    gc.collect()
    assert put(own, 3).file == small.file
    assert put(own, 4, size=2 * SIZE).file == large.file
    own.close()


@pytest.mark.parametrize("number", [-1, 5000])
def test_a_receiver_without_a_flag_is_refused(number: int) -> None:
    own, other = SharedBlocks(), SharedBlocks()
    with pytest.raises(RemoteProtocolError):
        other.get(put(own, 1), number)
    own.close()


def test_a_payload_beyond_its_block_is_refused() -> None:
    own, other = SharedBlocks(), SharedBlocks()
    place = put(own, 1)
    with pytest.raises(RemoteProtocolError):
        other.get(place._replace(payload_bytes=place.block_bytes), 0)
    own.close()


def test_memory_that_is_not_a_block_is_not_opened() -> None:
    with pytest.raises(TransportError, match="cannot open memory of process 1"):
        SharedBlocks().get(Place(1, 0, 2 * SIZE, SIZE), 0)
