"""The values that workers exchange beside gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from poseidon.engine.leaf import packed
from poseidon.errors import SnapshotError, UsageError
from poseidon.exchange.broadcast import PIECE_BYTES
from poseidon.torch.group import Group
from poseidon.torch.plain_values import decode, encode, reduce
from poseidon.torch.process_group.worker_parts import ReduceRule
from poseidon.torch.update_rules import SGD
from tests.support.module_groups import together

VALUES: list[object] = [
    3,
    True,
    2.5,
    None,
    "α\n",
    b"\x00\xff",
    (1, [2, {"x": (None,)}]),
    {"loss": 1.5, 3: ["a"]},
    torch.tensor([1.5, float("inf")], dtype=torch.bfloat16),
    {"scores": torch.arange(4).reshape(2, 2)},
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_as_it_was(value: object) -> None:
    found = decode(encode(value, "gather"), 0, None)
    assert repr(found) == repr(value)


@pytest.mark.parametrize(
    "value", [np.float32(1), {"x": [object()]}, {1, 2}, {(1, 2): 3}, nn.ReLU()]
)
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(UsageError, match=r"^gather\(\) was given a \w+; expected tensors, numbers"):
        encode(value, "gather")


def test_bytes_that_would_run_code_are_refused() -> None:
    with pytest.raises(SnapshotError, match=r"^the value of worker 1 is no"):
        decode(packed(print), 1, None)


@pytest.mark.parametrize(
    ("values", "how", "expected"),
    [
        ([1, 2, 4], "sum", 7),
        ([1.5, 2.0], "sum", 3.5),
        ([2**53, 1], "sum", 2**53 + 1),
        ([1, 2], "mean", 1.5),
        ([3, 1], "min", 1),
        ([True, False], "max", 1),
        ([2**63 - 1, 2**64], "sum", 3 * 2**63 - 1),
        ([torch.tensor([1, 5]), torch.tensor([4, 2])], "max", torch.tensor([4, 5])),
        ([torch.tensor(1), torch.tensor(2)], "mean", torch.tensor(1.5, dtype=torch.float64)),
        (
            [torch.tensor([256.0], dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16) * 2],
            "sum",
            torch.tensor([258.0], dtype=torch.bfloat16),
        ),
    ],
)
def test_reductions(values: list[Any], how: str, expected: object) -> None:
    found = reduce(values, ReduceRule(how))
    assert type(found) is type(expected)
    assert bool((torch.as_tensor(found == expected)).all())


def test_workers_exchange_values() -> None:
    seen: list[tuple[object, ...]] = [(), ()]
    large = PIECE_BYTES // 4 + 5

    def body(module: nn.Module, group: Group) -> None:
        of_numpy: Any = np.float32(group.rank)
        of_all = group.gather({"rank": group.rank, "x": torch.full((group.rank * large,), 2.0)})
        group.barrier()
        seen[group.rank] = (
            [part["rank"] for part in of_all],
            [part["x"].numel() for part in of_all],
            float(of_all[1]["x"].sum()),
            group.mean(of_numpy),
            group.broadcast("of rank 1" if group.rank else None, src=1),
            group.broadcast(None if group.rank else [1]),
            group.all_reduce(group.rank + 1),
            group.all_reduce(torch.tensor([1.0, group.rank]), op="max").tolist(),
        )

    together(2, lambda rank: nn.Linear(1, 1), SGD(lr=1), body)
    expected = ([0, 1], [0, large], 2.0 * large, 0.5, "of rank 1", [1], 3, [1.0, 1.0])
    assert seen == [expected, expected]


def test_a_worker_alone_has_its_own() -> None:
    def body(module: nn.Module, group: Group) -> None:
        group.barrier()
        assert group.gather(3) == [3]
        assert group.broadcast("x") == "x"
        assert group.all_reduce(2.5, op="mean") == 2.5
        assert group.all_reduce(np.float32(2.5)) == 2.5

    together(1, lambda rank: nn.Linear(1, 1), SGD(lr=1), body)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda group: group.all_reduce(1, op="avg"), r"op is 'avg'; expected one of 'sum', "),
        (lambda group: group.broadcast(1, src=2), r"src=2; expected 0 to 1"),
        (lambda group: group.all_reduce({"a": 1}), r"all_reduce\(\) was given a dict; expected"),
        (lambda group: group.all_reduce(torch.ones(1) * 1j), r"given a tensor of torch.complex64"),
        (lambda group: group.mean([1.0]), r"mean\(\) was given a list; expected a real number"),
        (lambda group: group.mean(torch.ones(1) * 1j), r"given a tensor of torch.complex64"),
        (lambda group: group.all_reduce([1, 2.5][group.rank]), r"worker 0 gives all_reduce\(\)"),
        (lambda group: group.all_reduce(torch.ones(1 + group.rank)), "a tensor of torch.float32"),
        (lambda group: group.gather(1) if group.rank else group.barrier(), "worker 0 calls"),
    ],
)
def test_calls_that_do_not_fit(call: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        together(2, lambda rank: nn.Linear(1, 1), SGD(lr=1), lambda module, group: call(group))
