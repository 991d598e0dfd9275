"""Values of flags: what is read, and the sentence for anything else."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from poseidon.flags.flag import ShownProgress
from poseidon.flags.values import (
    count,
    devices,
    input_shape,
    member_of,
    number,
    one_of,
    parts,
    path,
    paths,
    port,
    positive,
    renamed,
    stated,
    truth,
    whole,
)


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (whole, "-3", -3),
        (count, "0", 0),
        (number, "1e-3", 0.001),
        (positive, "2.5", 2.5),
        (port, "65535", 65535),
        (truth, "No", False),
        (devices, "[0, 1]", "0,1"),
        (one_of(["ps", "SVB"]), "svb", "SVB"),
        (input_shape, "data:1,3,227,227", ("data", (1, 3, 227, 227))),
        (renamed, "fc8.weight=fc.weight", ("fc8.weight", "fc.weight")),
        (member_of(ShownProgress), "BAR", ShownProgress.BAR),
        (path, "", None),
        (path, "a/b", Path("a/b")),
        (parts, " a,, b ", ("a", "b")),
        (paths, "a,b/c", (Path("a"), Path("b/c"))),
    ],
)
def test_values(read: Callable[[str], object], text: str, value: object) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (whole, "1.5", "expected a whole number, found '1.5'"),
        (count, "-1", "expected a whole number, 0 or more, found '-1'"),
        (number, "many", "expected a number, found 'many'"),
        (positive, "inf", "expected a number above 0, found 'inf'"),
        (port, "65536", "expected a port, 1 to 65535, found '65536'"),
        (truth, "maybe", "expected true or false, found 'maybe'"),
        (one_of(["hybrid", "ps"]), "hybird", "expected one of hybrid, ps, found 'hybird'; did you "
"mean hybrid?"),
        (input_shape, "data:0,3", "expected NAME:N,C,H,W, for example data:1,3,227,227, found "
"'data:0,3'"),
        (stated(str), "", "the value is empty; is a variable not set?"),
        (stated(paths), " ,", "the value is empty; is a variable not set?"),
        (renamed, "fc8=", "expected OURS=THEIRS, found 'fc8='"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused(read: Callable[[str], object], text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        read(text)
    assert str(refused.value) == message
