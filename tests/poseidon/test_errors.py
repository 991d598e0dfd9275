"""An error that quotes a damaged file is still one line of what can be printed."""

from __future__ import annotations

import pytest

from poseidon.errors import DataError, DefinitionError, PoseidonError, SnapshotError, shown


def test_what_cannot_be_printed_is_escaped() -> None:
    assert shown("a\n\x1b[31m\u2028b\xff é") == "a\\n\\x1b[31m\\u2028bÿ é"
    assert shown("as it was") == "as it was"


@pytest.mark.parametrize("kind", (DataError, DefinitionError, SnapshotError))
def test_a_long_name_is_cut(kind: type[PoseidonError]) -> None:
    said = str(kind("layer '" + "x" * 10**6 + "' is wrong"))
    assert len(said) < 1010
    assert said.startswith("layer 'xxx") and said.endswith("xxx' is wrong")


def test_a_definitions_place_is_kept() -> None:
    error = DefinitionError("wrong\x08", source="a\tb", line=3)
    assert str(error) == "a\\tb:3: wrong\\x08"
    assert error.message == "wrong\\x08"
