"""Which records a worker reads."""

from __future__ import annotations

import pytest
import torch

from poseidon.engine.sampler import SharedSampler
from poseidon.errors import UsageError


def samplers(records: int, workers: int, **settings: object) -> list[SharedSampler]:
    return [
        SharedSampler(range(records), rank=rank, workers=workers, **settings)  # type: ignore[arg-type]
        for rank in range(workers)
    ]


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
    expected = list(SharedSampler(range(5), rank=0, workers=1))
    with torch.device("meta"):
        assert list(SharedSampler(range(5), rank=0, workers=1)) == expected
