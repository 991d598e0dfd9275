"""The prototxt reference has every layer type, every field of it, and a description of each
field that all nets share.
"""

from __future__ import annotations

import re

import pytest
from google.protobuf.descriptor import FieldDescriptor

from poseidon.caffe.layers.registry import known_types
from poseidon.caffe.proto import caffe_pb2
from tests.support.compatibility import fields_of
from website import prototxt


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return prototxt.pages()


def sections(pages: dict[str, str]) -> dict[str, str]:
    """The text below each heading of the second level; each is on one page."""
    found: dict[str, str] = {}
    for page in pages.values():
        for part in page.split("\n## ")[1:]:
            heading, _, text = part.partition("\n")
            assert heading not in found
            found[heading] = text
    return found


def test_every_type_has_a_section_with_its_fields(pages: dict[str, str]) -> None:
    found = sections(pages)
    for kind in known_types():
        own = found[kind] + "".join(
            found[name] for name in re.findall(r"`: \[(\w+)\]\(", found[kind])
        )
        for block, field in fields_of(kind):
            if "." not in block:
                assert f"| `{field.name}` |" in own, f"{kind}: {block}.{field.name}"


def test_every_message_that_is_linked_has_a_section(pages: dict[str, str]) -> None:
    found = sections(pages)
    for name, page in pages.items():
        for target, anchor in re.findall(r"\]\(([\w./]*)#(\w+)\)", page):
            there = f"{prototxt.FOLDER}/{target.rpartition('/')[2]}" if target else name
            assert re.search(rf"(?mi)^## {anchor}$", pages[there]), f"{name}: {target}#{anchor}"
    assert {"SolverParameter", "NetStateRule", "FillerParameter", "BatchSampler"} <= set(found)


def test_fields_that_all_nets_share_are_described(pages: dict[str, str]) -> None:
    messages = (
        "NetParameter",
        "ParamSpec",
        "NetState",
        "NetStateRule",
        "FillerParameter",
        "SolverParameter",
    )
    found = sections(pages)
    for message in (*messages, "TransformationParameter"):
        rows = [line for line in found[message].splitlines() if line.startswith("| `")]
        assert len(rows) == len(caffe_pb2.DESCRIPTOR.message_types_by_name[message].fields)
        assert [row for row in rows if row.endswith("|  |")] == []


def test_rows_have_the_type_the_default_and_what_is_deprecated(pages: dict[str, str]) -> None:
    solver = pages["reference/prototxt/solver.md"]
    assert '| `regularization_type` | string | `"L2"` | L1 or L2. |' in solver
    assert "| `delta` | float | `1e-08` |" in solver
    assert "| `snapshot_format` | `HDF5`, `BINARYPROTO` | `BINARYPROTO` |" in solver
    assert re.search(r"\| `solver_type` \|.*\| \*\*Deprecated\*\*: use type. \|", solver)
    vision = pages["reference/prototxt/vision.md"]
    assert "| `weight_filler` | [FillerParameter](net.md#fillerparameter) |" in vision
    assert "| `output_dim` | required int32 |" in vision
    assert "| `kernel_size` | repeated uint32 |" in vision
    assert "choose" in re.findall(r"(?m)^\| `engine` .*$", vision)[0]


def test_code_in_docstrings_stays() -> None:
    assert prototxt.escaped("a_b <c> `d_e|f`") == r"a\_b \<c\> `d_e\|f`"


def test_every_kind_of_scalar_of_the_schema_has_a_name() -> None:
    composed = (FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_ENUM)
    fields = [
        field
        for message in caffe_pb2.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
    ]
    assert {field.type for field in fields if field.type not in composed} == set(prototxt._SCALARS)
