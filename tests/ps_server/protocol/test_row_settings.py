"""The description of a row table: its limits, and the number of its rows on each shard."""

from __future__ import annotations

import pytest

from ps_server.errors import SpecError
from ps_server.protocol.row_settings import MAX_ROWS, RowRule, RowRuleKind, RowTableSpec


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"rows": 0}, "rows 0; expected 1 to"),
        ({"rows": MAX_ROWS + 1}, "expected 1 to 4294967295"),
        ({"dim": 0}, "dim 0; expected 1 to"),
        ({"scale": float("inf")}, "scale inf"),
        ({"seed": -1}, "seed -1"),
        ({"staleness": -1}, "staleness -1"),
    ],
)
def test_a_description_out_of_range_is_refused(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        RowTableSpec(**{"name": "users", "rows": 5, "dim": 2, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["beta1", "beta2"])
def test_the_constants_of_a_rule_are_checked(name: str) -> None:
    with pytest.raises(SpecError, match=f"{name} is 1.0; expected 0 <= {name} < 1"):
        RowRule(**{name: 1.0})  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="eps is -1"):
        RowRule(eps=-1.0)


@pytest.mark.parametrize("rows", [1, 2, 7, 9])
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_every_row_is_on_one_shard(rows: int, shards: int) -> None:
    spec = RowTableSpec(name="t", rows=rows, dim=1)
    expected = [len(range(shard, rows, shards)) for shard in range(shards)]
    assert [spec.rows_on(shard, shards) for shard in range(shards)] == expected


def test_widths_of_the_histories() -> None:
    widths = {kind: RowRule(kind=kind).history_widths(8) for kind in RowRuleKind}
    assert widths == {
        RowRuleKind.SGD: (),
        RowRuleKind.ADAM: (8, 8),
        RowRuleKind.ADAGRAD: (8,),
        RowRuleKind.ROW_WISE_ADAGRAD: (1,),
    }
