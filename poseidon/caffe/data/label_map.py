"""Label maps: the names of classes, as a LabelMap in text form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from poseidon.caffe.proto.caffe_pb2 import LabelMap
from poseidon.caffe.proto.text import parse, read_text
from poseidon.errors import DataError, PoseidonError


def read_label_map(path: Path) -> LabelMap:
    """Read a label map.

    Raises:
        DataError: the file cannot be read or parsed, or is empty.
    """
    try:
        found = parse(read_text(path), LabelMap(), source=str(path))
    except PoseidonError as error:
        raise DataError(f"cannot read the label map {error}") from error
    if not found.item:
        raise DataError(f"the label map {path} has no item")
    return found


def names_of(labels: LabelMap) -> dict[int, str]:
    return {item.label: item.name for item in labels.item}


def labels_of(labels: LabelMap) -> dict[str, int]:
    """Return the label of each name."""
    return {item.name: item.label for item in labels.item}


def check_unique(labels: LabelMap, path: Path) -> None:
    """Raise DataError if a name or a label occurs twice."""
    for what, values in (
        ("name", [item.name for item in labels.item]),
        ("label", [str(item.label) for item in labels.item]),
    ):
        twice = sorted({value for value in values if values.count(value) > 1})
        if twice:
            raise DataError(f"the label map {path} has the {what} {twice[0]} more than once")


def label_map_text(names: Sequence[str]) -> str:
    """Return the LabelMap of classes, from label 1 on, and of the background in text form."""
    quoted = [name.replace("\\", "\\\\").replace('"', '\\"') for name in names]
    items = [
        ("none_of_the_above", 0, "background"),
        *((name, n, name) for n, name in enumerate(quoted, 1)),
    ]
    return "".join(
        f'item {{\n  name: "{name}"\n  label: {label}\n  display_name: "{shown}"\n}}\n'
        for name, label, shown in items
    )
