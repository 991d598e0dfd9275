"""Batches of what a user gives."""

from __future__ import annotations

import numpy as np
import pytest

from poseidon.errors import UsageError
from poseidon.pycaffe.batches import batches, joined


@pytest.mark.parametrize(("count", "sizes"), [(4, [2, 2]), (5, [2, 2, 2]), (1, [2]), (0, [])])
def test_batches_are_filled_up_and_joined_without_it(count: int, sizes: list[int]) -> None:
    given = {"a": np.arange(count, dtype=np.float32) + 1, "b": np.ones((count, 3))}
    found = list(batches(given, 2))
    assert [len(batch["a"]) for batch in found] == sizes
    assert sum(float(batch["b"].sum()) for batch in found) == 3 * count
    rows = [row for batch in found for row in batch["a"]]
    np.testing.assert_array_equal(joined({"a": rows}, count)["a"], given["a"])


@pytest.mark.parametrize("given", [{}, {"a": np.ones(3), "b": np.ones(4)}])
def test_arrays_must_agree(given: dict[str, np.ndarray]) -> None:
    with pytest.raises(UsageError, match="expected arrays of equally many records"):
        list(batches(given, 2))
