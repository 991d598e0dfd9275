"""Which test batches are whose."""

from __future__ import annotations

import pytest

from poseidon.engine.tester import own_batches


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize(("start", "count"), [(0, 10), (10, 10), (3, 1), (5, 0), (4, 2)])
def test_every_batch_belongs_to_one_worker(workers: int, start: int, count: int) -> None:
    for rank in range(workers):
        mine = [n for n in range(start, start + count) if n % workers == rank]
        assert own_batches(rank, workers, start, count) == len(mine)
