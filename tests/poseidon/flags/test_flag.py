"""Fields that declare flags: how a value is read, what the help says, and how values return."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest

from poseidon.flags.flag import Section, Takes, flags_of, option, values_of
from poseidon.flags.values import path


class Fruit(Enum):
    """Values of a flag."""

    APPLE = "apple"
    PEAR = "pear"


@dataclass(frozen=True, slots=True, kw_only=True)
class Basket:
    """One field of each kind, and one that is not a flag."""

    owner: str = ""
    fruit: Fruit = option(Fruit.PEAR, "{choices}", Section.OUTPUT)
    weight: float = option(0.5, "kilograms ({default})", Section.OUTPUT, name="weight_kg")
    count: int = option(3, "pieces ({default})", Section.OUTPUT)
    ripe: bool = option(True, "it is ripe ({default})", Section.OUTPUT)
    place: Path | None = option(None, "where", Section.OUTPUT, read=path, metavar="DIR")
    level: int = option(7, "from {default}", Section.MACHINES, default=None, dest="depth")


FLAGS = {flag.name: flag for flag in flags_of(Basket)}


@pytest.mark.parametrize(
    ("name", "text", "given", "value"),
    [
        ("fruit", "apple, pear (default)", "Apple", Fruit.APPLE),
        ("weight_kg", "kilograms (0.5)", "2", 2.0),
        ("count", "pieces (3)", "-4", -4),
        ("ripe", "it is ripe (on)", "no", False),
        ("place", "where", "", None),
        ("level", "from 7", "1", 1),
    ],
)
def test_a_field_says_how_its_flag_is_read(name: str, text: str, given: str, value: object) -> None:
    flag = FLAGS[name]
    assert (flag.text, flag.read(given)) == (text, value)
    assert (flag.takes is Takes.SWITCH) == (name == "ripe")


def test_values_return_to_their_fields() -> None:
    assert list(FLAGS) == ["fruit", "weight_kg", "count", "ripe", "place", "level"]
    given = {flag.attribute: flag.default for flag in FLAGS.values()}
    given.update(weight_kg=1.5, depth=2)
    basket = Basket(**values_of(Basket, argparse.Namespace(**given)))
    assert basket == Basket(weight=1.5, level=2)
