"""Random streams: the states of the generators of a process and of its virtual workers."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from poseidon.engine.leaf import packed, unpacked
from poseidon.engine.random_streams import (
    RandomStreams,
    random_state,
    seed_generators,
    seed_of,
    set_random_state,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def state_stays() -> Iterator[None]:
    before = random_state(CPU)
    yield
    set_random_state(before, CPU)


def draw() -> tuple[float, float, float, float]:
    """Of each generator; the second normal number of a pair is kept in its state."""
    return (
        random.gauss(0, 1),
        float(np.random.normal()),
        float(np.random.random()),
        torch.rand(()).item(),
    )


def draw_in_turn() -> tuple[float, ...]:
    """A turn ends without a normal number that numpy keeps."""
    return (*draw(), float(np.random.normal()))


def test_all_generators_go_on() -> None:
    draw()
    state = unpacked(packed(random_state(CPU)), "a test")
    expected = [draw() for _ in range(3)]
    set_random_state(state, CPU)
    assert [draw() for _ in range(3)] == expected


def test_the_first_stream_follows_from_the_seed_and_the_number() -> None:
    assert seed_of(2, 7) == 0x1BAF3C79F9CC4788
    expected = {}
    for virtual_worker in range(4):
        seed_generators(seed_of(virtual_worker, 7), CPU)
        expected[virtual_worker] = [draw_in_turn() for _ in range(2)]
    assert len({tuple(drawn) for drawn in expected.values()}) == 4
    torch.manual_seed(5)
    script = random_state(CPU)
    outside = [draw_in_turn() for _ in range(4)]
    set_random_state(script, CPU)
    streams = RandomStreams(range(1, 4), 7, CPU)
    found: dict[int | None, list[tuple[float, ...]]] = {1: [], 2: [], 3: [], None: []}
    for _ in range(2):
        for virtual_worker in (1, None, 3, 2, None):
            streams.enter(virtual_worker)
            found[virtual_worker].append(draw_in_turn())
    assert found == {1: expected[1], 2: expected[2], 3: expected[3], None: outside}


def test_a_turn_may_begin_within_a_transform_of_torch_func() -> None:
    def begun(streams: RandomStreams) -> list[tuple[float, ...]]:
        drawn = [draw_in_turn()]
        streams.enter(None)
        return [*drawn, draw_in_turn()]

    torch.manual_seed(5)
    state = random_state(CPU)
    plain = RandomStreams(range(1), None, CPU)
    plain.begin(0)
    expected = begun(plain)
    set_random_state(state, CPU)
    streams = RandomStreams(range(1), None, CPU)

    def loss(x: torch.Tensor) -> torch.Tensor:
        streams.begin(0)
        return x.sum()

    torch.func.grad(loss)(torch.ones(2))
    assert begun(streams) == expected


def test_a_stream_is_saved_and_loaded_during_its_turn_and_at_other_times() -> None:
    streams, again = (RandomStreams(range(2), 7, CPU) for _ in range(2))
    streams.enter(0)
    draw_in_turn()
    states = [unpacked(packed(streams.of(virtual_worker)), "a test") for virtual_worker in (0, 1)]
    drawn = draw_in_turn()
    streams.enter(None)
    again.enter(1)
    for virtual_worker, state in enumerate(states):
        again.load(virtual_worker, state)
    other = draw_in_turn()
    again.enter(0)
    assert draw_in_turn() == drawn
    again.enter(None)
    streams.enter(1)
    assert draw_in_turn() == other


def test_workers_with_the_same_seeds_draw_numbers_of_their_own() -> None:
    """Those of a script that was told no number of virtual workers."""

    def run(worker: int, seed: int) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
        torch.manual_seed(0)
        streams = RandomStreams(range(worker, worker + 1), None, CPU)
        before = streams.of(None)  # what the script seeds after distribute() counts
        seed_generators(seed, CPU)
        assert streams.of(worker)["torch"].tolist() != before["torch"].tolist()
        within, outside = [], []
        for _ in range(2):
            streams.enter(worker)
            within.append(draw_in_turn())
            streams.enter(None)
            outside.append(draw_in_turn())
            torch.manual_seed(seed)  # a new epoch: no virtual worker's number repeats
        return within, outside

    first, second, other = run(0, 7), run(1, 7), run(0, 8)
    assert first == run(0, 7)
    assert first[1] == second[1] != other[1]
    drawn = [number for within, _ in (first, second, other) for turn in within for number in turn]
    assert len(set(drawn)) == len(drawn)


def test_a_stream_that_has_not_begun_is_saved() -> None:
    streams, again = (RandomStreams(range(3, 4), None, CPU) for _ in range(2))
    seed_generators(7, CPU)
    state = unpacked(packed(streams.of(3)), "a test")
    streams.enter(3)
    drawn = draw_in_turn()
    seed_generators(8, CPU)
    again.load(3, state)
    again.enter(3)
    assert draw_in_turn() == drawn
