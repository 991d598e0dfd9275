"""Values of dataclasses travel as JSON, and arrive with the types of their class or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

import msgpack
import pytest

from ps_server.json_fields import fields_of, listed, plain, value_of


class Color(Enum):
    """A choice."""

    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """A value in another one."""

    name: str
    content: bytes = b""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("it has no name")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """A field of each kind."""

    inner: Inner
    every: tuple[Inner, ...]
    pair: tuple[str, int]
    by_id: Mapping[int, str | None]
    factor: float
    limit_s: float
    color: Color
    is_set: bool = False
    extra: object = None


VALUE = Outer(
    inner=Inner(name="a", content="\u00e9".encode()),
    every=(Inner(name="b"),),
    pair=("x", 3),
    by_id={4: "y", 5: None},
    factor=-1.5,
    limit_s=0.5,
    color=Color.BLUE,
    extra={"any": [1]},
)
FIELDS = json.loads(json.dumps(fields_of(VALUE), default=plain))


def test_a_value_arrives_as_it_was_sent() -> None:
    assert value_of(Outer, FIELDS) == VALUE


def test_in_msgpack_a_value_is_the_list_of_its_fields() -> None:
    packed = msgpack.packb(VALUE, default=listed)
    found = msgpack.unpackb(packed, strict_map_key=False)
    assert found[0] == ["a", "\u00e9".encode()]
    assert value_of(Outer, found) == VALUE
    with pytest.raises(ValueError, match="is not a Outer"):
        value_of(Outer, found[:-1])


def test_what_is_missing_has_its_default_and_what_is_unknown_is_ignored() -> None:
    given = {name: value for name, value in FIELDS.items() if name not in ("is_set", "extra")}
    assert value_of(Outer, {**given, "new": 1}) == replace(VALUE, extra=None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("inner", None), ("inner", {"name": 3}), ("inner", {"name": ""}), ("every", {}), ("every", [3]),
        ("pair", ["x"]), ("pair", ["x", 2**63]), ("pair", ["x", "3"]), ("pair", ["x", 3, 4]), ("by_id", {"four": "y"}), ("by_id", []),
        ("factor", 10**400), ("factor", True), ("factor", float("inf")), ("factor", float("nan")), ("factor", None),
        ("limit_s", -0.5), ("limit_s", True), ("color", "green"), ("color", []), ("is_set", 1),
    ],
)  # fmt: skip
def test_another_type_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^(Outer has .* as its {name}|Inner has 3 as its name)$"):
        value_of(Outer, {**FIELDS, name: value})


@pytest.mark.parametrize("found", [None, [], "{}", {}])
def test_what_is_no_object_or_lacks_a_field(found: object) -> None:
    with pytest.raises(ValueError, match=r"is not a Outer|Outer has no inner"):
        value_of(Outer, found)
