"""Which records a worker reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import poseidon
from poseidon.errors import UsageError
from poseidon.torch.sampler import SharedSampler
from tests.support.samplers import sampler_of


def samplers(records: int, workers: int, **settings: object) -> list[SharedSampler]:
    return [
        sampler_of(range(records), own=range(rank, rank + 1), workers=workers, **settings)
        for rank in range(workers)
    ]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class StreamWithLength(Stream):
    def __len__(self) -> int:
        return 3


class WithoutLength:
    def __getitem__(self, index: int) -> int:
        return index


STREAM = r"Stream\w* is an IterableDataset; .*islice\(records, group\.rank"


@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        (Stream(), STREAM),
        (StreamWithLength(), STREAM),
        (WithoutLength(), r"WithoutLength has no len\(\)"),
        (iter([1]), r"list_iterator has no len\(\)"),
        ([], "the dataset is empty"),
    ],
)
def test_records_without_numbers_are_refused(dataset: Any, sentence: str) -> None:
    with poseidon.distribute(nn.Linear(1, 1), poseidon.SGD(lr=1)) as group:
        for read in (group.sampler, lambda records: group.loader(records, 1)):
            with pytest.raises(UsageError, match=sentence):
                read(dataset)


@pytest.mark.parametrize(("records", "workers"), [(12, 3), (10, 3), (2, 3), (5, 1)])
def test_all_records_are_read_by_as_many_each(records: int, workers: int) -> None:
    parts = [list(sampler) for sampler in samplers(records, workers)]
    assert {len(part) for part in parts} == {-(-records // workers)}
    assert {record for part in parts for record in part} == set(range(records))
    assert len(samplers(records, workers)[0]) == len(parts[0])


def test_parts_of_batches_together_are_the_batch_of_one_process() -> None:
    (alone,) = samplers(24, 1)
    parts = [list(sampler) for sampler in samplers(24, 2)]
    order = list(alone)
    for start in range(0, 24, 8):
        together = [record for part in parts for record in part[start // 2 : start // 2 + 4]]
        assert sorted(together) == sorted(order[start : start + 8])


def test_each_epoch_has_an_order_that_can_be_had_again() -> None:
    first, second = samplers(20, 2)[0], samplers(20, 2)[0]
    orders = [list(first) for _ in range(2)]
    assert orders[0] != orders[1]
    second.epoch = 1
    assert list(second) == orders[1]
    assert list(samplers(20, 2, seed=1)[0]) != orders[0]


def test_without_shuffling_records_come_in_turn() -> None:
    assert [list(sampler) for sampler in samplers(5, 2, shuffle=False)] == [[0, 2, 4], [1, 3, 0]]


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(UsageError, match="the dataset is empty"):
        samplers(0, 2)


def test_the_order_does_not_depend_on_the_scripts_default_device() -> None:
    expected = list(sampler_of(range(5), own=range(1), workers=1))
    with torch.device("meta"):
        assert list(sampler_of(range(5), own=range(1), workers=1)) == expected


def test_a_place_within_an_epoch_is_gone_on_from() -> None:
    """`set_epoch`, as a loop calls it at the head of each epoch, keeps the place in the epoch
    that the saved run was in.
    """
    returned: list[int] = []
    first = sampler_of(range(10), own=range(1, 2), workers=2)
    whole = sampler_of(range(10), own=range(1, 2), workers=2)
    _, expected = [list(whole) for _ in range(2)]
    list(first)
    epoch = iter(first)
    assert [next(epoch) for _ in range(2)] == expected[:2]
    state = first.state_dict()
    assert (state["epoch"], state["position"], first.position) == (1, 2, 2)
    again = sampler_of(range(10), own=range(1, 2), workers=2, on_return=returned.append)
    again.load_state_dict(state)
    assert (again.epoch, again.position) == (1, 2)
    again.set_epoch(1)
    assert list(again) == expected[2:]
    assert returned == [1]
    assert again.state_dict()["epoch"] == 2
    again.set_epoch(1)  # the whole of it, once more
    assert list(again) == expected


@pytest.mark.parametrize("own", [range(3), range(1, 3)])
def test_a_sampler_with_a_batch_size_gives_whole_batches_in_turn(own: range) -> None:
    def batches(some: range) -> list[list[int]]:
        sampler = sampler_of(range(20), own=some, workers=3, turn=4)
        order = list(sampler)
        assert len(order) == len(sampler)
        return [order[start : start + 4] for start in range(0, len(order), 4)]

    alone = [batches(range(v, v + 1)) for v in range(3)]
    assert batches(own) == [alone[v][i] for i in range(2) for v in own]
    assert {record for part in alone for batch in part for record in batch} == set(range(20))
