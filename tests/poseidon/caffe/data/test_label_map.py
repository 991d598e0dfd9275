"""Label maps: names and labels, and files that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.caffe.data.label_map import check_unique, labels_of, names_of, read_label_map
from poseidon.errors import DataError

TEXT = 'item { name: "cat" label: 1 } item { name: "dog" label: 2 display_name: "Dog" }'


def test_names_and_labels(tmp_path: Path) -> None:
    (tmp_path / "map").write_text(TEXT)
    found = read_label_map(tmp_path / "map")
    assert names_of(found) == {1: "cat", 2: "dog"}
    assert labels_of(found) == {"cat": 1, "dog": 2}
    check_unique(found, tmp_path / "map")


@pytest.mark.parametrize(
    ("what", "again"), [("name cat", 'name: "cat" label: 7'), ("label 2", 'name: "x" label: 2')]
)
def test_what_occurs_twice_is_refused(tmp_path: Path, what: str, again: str) -> None:
    (tmp_path / "map").write_text(f"{TEXT} item {{ {again} }}")
    with pytest.raises(DataError, match=f"has the {what} more than once"):
        check_unique(read_label_map(tmp_path / "map"), tmp_path / "map")


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    (tmp_path / "map").write_text(TEXT, encoding="utf-8-sig")
    assert read_label_map(tmp_path / "map").item[0].name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the label map"),
        ("", "has no item"),
        ("item { lable: 3 }", "lable"),
        ("\xff", "UTF-8"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "map").write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=message):
        read_label_map(tmp_path / "map")
