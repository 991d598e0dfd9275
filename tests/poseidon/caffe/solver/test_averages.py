"""Averages over workers and iterations."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from poseidon.caffe.solver.averages import (
    SmoothedLoss,
    accumulate,
    as_outputs,
    join,
    pack,
    parts,
    split,
    total,
)
from poseidon.errors import DataError


def test_the_window_is_caffes() -> None:
    smoothed = SmoothedLoss(3)
    assert math.isnan(smoothed.value)
    seen = []
    for loss in (6.0, 0.0, 3.0, 9.0):
        smoothed.add(torch.tensor(loss))
        seen.append(smoothed.value)
    assert seen == [6.0, 3.0, 3.0, 4.0]
    assert SmoothedLoss(3, smoothed.losses).value == 4.0


def test_packed_numbers_are_summed_in_worker_order_and_named() -> None:
    payloads = [
        pack(1.0 * rank, {"a": torch.tensor([1.0, 2.0]), "l": torch.tensor(rank)})
        for rank in (1, 2)
    ]
    numbers = total(payloads)
    assert numbers.tolist() == [3.0, 2.0, 4.0, 3.0]
    outputs = as_outputs(numbers[1:].tolist(), {"a": 2, "l": 1}, {"l": 0.5})
    assert [(o.name, o.value, o.loss_weight) for o in outputs] == [
        ("a", 2, 0),
        ("a", 4, 0),
        ("l", 3, 0.5),
    ]


def test_sums_are_kept_in_double() -> None:
    sums: dict[str, torch.Tensor] = {}
    for _ in range(1000):
        accumulate(sums, {"x": torch.tensor(0.1)})
    assert float(sums["x"]) == pytest.approx(1000 * float(torch.tensor(0.1)), rel=1e-12)


def test_outputs_that_change_their_shape_have_no_mean() -> None:
    payloads = [pack(1.0, {"a": torch.zeros(size)}) for size in (3, 4)]
    with pytest.raises(DataError, match="have 3, 4 numbers on the workers"):
        total(payloads)
    sums = {"a": torch.zeros(2, 3, dtype=torch.float64)}
    with pytest.raises(DataError, match="output 'a' has shape 2x1 after 2x3, expected one shape"):
        accumulate(sums, {"a": torch.zeros(2, 1)})


def test_the_parts_of_all_processes_are_those_of_all_virtual_workers_in_order() -> None:
    own = [b"a", b"", b"cc" * 300, b"d"]
    for bounds in ((0, 4), (0, 1, 4), (0, 2, 3, 4)):
        payloads = [join(own[a:b]) for a, b in pairwise(bounds)]
        assert parts(payloads) == own
    assert split(join([])) == []
