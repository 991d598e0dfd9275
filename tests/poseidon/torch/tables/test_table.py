"""`Table` as a module: its arguments, its indices, and its copies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import poseidon
from poseidon.errors import UsageError
from poseidon.torch.distribute import distribute
from poseidon.torch.tables.table import distinct


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"rows": 0}, "rows 0; expected 1 to"),
        ({"dim": 0}, "dim 0; expected 1 to"),
        ({"init": "xavier"}, "init of zeros, uniform, normal"),
        ({"mode": "max"}, "mode of rows, sum, mean"),
        ({"scale": -1.0}, "scale -1"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, object], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        poseidon.Table(**{"rows": 4, "dim": 2, **arguments})  # type: ignore[arg-type]


def test_a_table_is_used_within_a_group() -> None:
    table = poseidon.Table(4, 2)
    with pytest.raises(UsageError, match="a Table of 4 rows has no shards; expected it in the"):
        table(torch.tensor([1]))
    with distribute(table, poseidon.SGD(lr=0.1)) as group:
        table(torch.tensor([[1, 3]])).sum().backward()
        group.step()
        copied = copy.deepcopy(table)
        restored = pickle.loads(pickle.dumps(table))
        assert table(torch.tensor([[1, 3]])).shape == (1, 2, 2)
        for other in (copied, restored):
            with pytest.raises(UsageError, match="has no shards"):
                other(torch.tensor([1]))
        group.drop()
    with pytest.raises(UsageError, match="has no shards"):
        table(torch.tensor([1]))
    assert list(table.parameters()) == []
    assert table.state_dict() == {}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # in torch's compiler
def test_a_compiled_module_has_a_graph_on_each_side_of_a_table() -> None:
    module = torch.nn.Sequential(poseidon.Table(9, 2, init="zeros"), torch.nn.Linear(2, 1))
    compiled = torch.compile(module, backend="eager")
    with distribute(compiled, poseidon.SGD(lr=1.0)) as group:
        weight = module[1].weight.detach().clone()
        compiled(torch.tensor([4])).sum().backward()
        group.step()
        with torch.no_grad():
            assert torch.equal(module[0](torch.tensor([4])), -weight)


@pytest.mark.parametrize(
    ("indices", "reason"),
    [
        (torch.tensor([0, 10]), "was given the index 10; expected 0 to 9"),
        (torch.tensor([-1, 3]), "was given the index -1; expected 0 to 9"),
        (torch.tensor([0.5]), "was given indices of torch.float32"),
    ],
)
def test_indices_are_checked(indices: torch.Tensor, reason: str) -> None:
    with pytest.raises(UsageError, match=f"Table {reason}"):
        distinct(indices, 10, None, "Table")


@pytest.mark.parametrize("padding_idx", [None, 0, 4, 7, 9])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_distinct_rows_and_their_places(padding_idx: int | None, dtype: torch.dtype) -> None:
    indices = torch.tensor([[7, 4], [4, 9], [0, 7]], dtype=dtype)
    rows, places = distinct(indices, 10, padding_idx, "Table")
    assert rows.tolist() == [row for row in (0, 4, 7, 9) if row != padding_idx]
    named = [*rows.tolist(), padding_idx]
    assert [[named[at] for at in pair] for pair in places.tolist()] == indices.tolist()


def test_no_indices() -> None:
    rows, places = distinct(torch.zeros((2, 0), dtype=torch.int64), 10, 3, "Table")
    assert len(rows) == 0
    assert places.shape == (2, 0)
