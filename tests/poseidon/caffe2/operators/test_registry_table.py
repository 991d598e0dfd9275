"""The table of operators in docs/caffe2.md matches the registry."""

from __future__ import annotations

import re

import pytest

from poseidon.caffe2.operators.registry import is_registered
from tests.support import caffe2_operator_table as made

HINT = "write it anew: python -m tests.support.caffe2_operator_table"
PAGE = made.PAGE.read_text(encoding="utf-8")


def test_the_page_has_all_operators_with_their_inputs_and_outputs() -> None:
    assert made.section(made.TABLE, PAGE) == made.table(), HINT


def test_no_operator_that_the_page_calls_missing_is_there() -> None:
    names = re.findall(r"`(\w+)`", made.section(made.MISSING, PAGE))
    assert names
    assert [name for name in names if is_registered(name)] == [], HINT


def test_the_page_names_all_operators_that_are_missing() -> None:
    if not made.CAFFE2.is_file():
        pytest.skip(f"Caffe2's list of operators is not there: {made.CAFFE2}")
    assert made.section(made.MISSING, PAGE) == made.missing_text(made.missing()), HINT
