"""docs/caffe_compatibility.md is up to date, and no field of a layer is forgotten."""

from __future__ import annotations

import re

import pytest

from tests.support import golden
from tests.support.compatibility import HEAD, PAGE, ROOT, effect, fields_of, page, table


def lines_without_figures(text: str) -> list[str]:
    return [re.sub(r"\|[^|]*\|$", "|", line) for line in text.splitlines() if line.startswith("| ")]


def pairs(text: str) -> list[tuple[str, str]]:
    """Layer and field of each line of the table."""
    found, kind = [], ""
    for line in lines_without_figures(text)[1:]:
        first, field = (cell.strip().strip("*") for cell in line.split("|")[1:3])
        kind = first or kind
        found.append((kind, field))
    return found


def test_the_page_has_every_type_and_field() -> None:
    assert PAGE.read_text(encoding="utf-8").startswith(HEAD), (
        "run python -m tests.support.compatibility"
    )
    expected = [(row.kind, row.field) for row in table()]
    assert pairs(PAGE.read_text(encoding="utf-8")) == expected, (
        "run python -m tests.support.compatibility"
    )


@pytest.mark.needs("data")
def test_the_page_names_every_case() -> None:
    fresh = page(dict.fromkeys(golden.cases(), 0.0))
    assert lines_without_figures(PAGE.read_text(encoding="utf-8")) == lines_without_figures(
        fresh
    ), "run python -m tests.support.compatibility"


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
