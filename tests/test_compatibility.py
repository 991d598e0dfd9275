"""docs/caffe_compatibility.md is up to date, and no field of a layer is forgotten."""

from __future__ import annotations

import re

import pytest

from tests.support.compatibility import PAGE, ROOT, effect, fields_of, page, table


def without_figures(text: str) -> list[str]:
    """The page without the last cell of each line of a table."""
    return [re.sub(r"\|[^|]*\|$", "|", line) for line in text.splitlines()]


@pytest.mark.needs("data")
def test_the_page_has_every_type_and_field() -> None:
    shown = without_figures(PAGE.read_text(encoding="utf-8"))
    assert shown == without_figures(page({})), "run python -m tests.support.compatibility"


def test_every_field_is_read_or_said_to_have_no_effect() -> None:
    source = "\n".join(
        path.read_text(encoding="utf-8")
        for room in ("caffe/layers", "caffe/data")
        for path in (ROOT / "poseidon" / room).rglob("*.py")
    )
    words = set(re.findall(r"\w+", source))
    forgotten = [
        (row.kind, field.name)
        for row in table()
        if not row.field
        for _, field in fields_of(row.kind)
        if not effect(field) and field.name not in words
    ]
    assert forgotten == []


@pytest.mark.needs("data")
def test_every_field_is_held_by_a_case_or_a_test() -> None:
    assert [
        (row.kind, row.field) for row in table() if not (row.cases or row.tests or row.note)
    ] == []
