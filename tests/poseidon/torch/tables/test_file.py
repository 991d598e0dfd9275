"""Rows of a table in a file: to the bit, and damage is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from poseidon.errors import SnapshotError
from poseidon.torch.tables.file import read_rows, rows_path, write_rows
from ps_server import RowRule, RowRuleKind, RowTableSpec
from ps_server.protocol.messages import Array, RowIds

SPEC = RowTableSpec(
    name="users", rows=9, dim=2, rule=RowRule(kind=RowRuleKind.ROW_WISE_ADAGRAD), seed=3
)


def pieces() -> list[tuple[RowIds, list[Array]]]:
    random = np.random.default_rng(0)
    return [
        (
            np.array(rows, np.uint32),
            [random.random((len(rows), width)).astype(np.float32) for width in (2, 1)],
        )
        for rows in ([1, 8], [0, 3, 5])
    ]


def test_rows_come_back_to_the_bit(tmp_path: Path) -> None:
    path = rows_path(tmp_path / "run_iter_4.pt", 0)
    write_rows(path, SPEC, 4, pieces())
    assert [each.name for each in tmp_path.iterdir()] == ["run_iter_4.pt.rows0"]
    found = list(read_rows(path, SPEC, 4))
    for (rows, arrays), (written, values) in zip(found, pieces(), strict=True):
        assert rows.tobytes() == written.tobytes()
        assert [a.tobytes() for a in arrays] == [a.tobytes() for a in values]


def test_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    write_rows(path, SPEC, 4, pieces())
    whole = path.read_bytes()
    body = whole.index(b"\n") + 1
    with pytest.raises(SnapshotError, match=r'has a different table.*"updates": 5'):
        list(read_rows(path, SPEC, 5))
    for cut in (body, body + 10, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(SnapshotError, match="is truncated"):
            list(read_rows(path, SPEC, 4))
    for changed, reason in [
        (b"no header\n", "a different table: no header"),
        (whole[:body] + b"\xff" * 8, "a piece of"),
        (whole[: body + 8] + b"\x09\0\0\0" + whole[body + 12 :], "out of order"),
    ]:
        path.write_bytes(changed)
        with pytest.raises(SnapshotError, match=reason):
            list(read_rows(path, SPEC, 4))
    path.unlink()
    with pytest.raises(SnapshotError, match=r"cannot read .*rows: No such file"):
        list(read_rows(path, SPEC, 4))
    with pytest.raises(SnapshotError, match=r"cannot write .*: No such file"):
        write_rows(tmp_path / "no" / "rows", SPEC, 4, pieces())
