"""Plans of `--exchange=auto`, written to files and read again."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.errors import SnapshotError, UsageError
from poseidon.exchange.auto.recorded import RecordedPlan
from poseidon.exchange.options import Scheme

PLAN = RecordedPlan(
    schemes={"fc.weight": Scheme.FACTORS, "fc.bias": Scheme.SERVER}, basis="measured: 1 ms"
)


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "exchange_plan.json"
    path.write_text(PLAN.to_json())
    assert RecordedPlan.read(path) == PLAN
    assert PLAN.of(["fc.bias", "fc.weight"]) == (Scheme.SERVER, Scheme.FACTORS)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["fc.weight", "fc.bias", "more"], "it has no tensor 'more'"),
        (["fc.weight"], "it has a tensor 'fc.bias'"),
    ],
)
def test_a_plan_of_another_net_is_refused(names: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PLAN.of(names)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"schemes": ["ps"]}', '{"schemes": {"a": "mail"}}', '{"schemes": {"a": []}}'],
)
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"plan\.json is not a plan of an exchange"):
        RecordedPlan.read(path)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"cannot read the exchange plan .*: No such file"):
        RecordedPlan.read(tmp_path / "plan.json")
