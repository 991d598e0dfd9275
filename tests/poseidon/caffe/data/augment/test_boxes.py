"""Boxes: hand-computed overlaps, windows and emissions."""

from __future__ import annotations

import pytest

from poseidon.caffe.data.augment.boxes import (
    WHOLE,
    Box,
    Emission,
    Object,
    coverage,
    overlap,
    projected,
)
from poseidon.caffe.proto.caffe_pb2 import EmitConstraint
from poseidon.errors import DataError

LEFT = Box(0.0, 0.0, 0.5, 1.0)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (LEFT, 1.0),
        (Box(0.25, 0.0, 0.75, 1.0), 0.25 / 0.75),
        (Box(0.5, 0.0, 1.0, 1.0), 0.0),  # they touch
        (Box(0.6, 0.0, 1.0, 1.0), 0.0),
        (Box(0.4, 0.5, 0.2, 0.9), 0.0),  # corners on the wrong sides
    ],
)
def test_overlap(other: Box, expected: float) -> None:
    assert overlap(LEFT, other) == pytest.approx(expected)
    assert overlap(other, LEFT) == pytest.approx(expected)


def test_coverage_is_of_the_first_box() -> None:
    assert coverage(LEFT, WHOLE) == pytest.approx(1.0)
    assert coverage(WHOLE, LEFT) == pytest.approx(0.5)


def test_a_projection_undoes_a_location() -> None:
    window, box = Box(0.2, 0.4, 0.6, 0.8), Box(0.25, 0.5, 0.75, 0.9)
    assert box.located(window) == pytest.approx((0.3, 0.6, 0.5, 0.76))
    assert box.located(window).projected(window) == pytest.approx(box)


def test_a_projection_is_clipped_to_its_window() -> None:
    assert Box(0.0, 0.0, 0.5, 0.5).projected(Box(0.25, 0.25, 0.75, 0.75)) == pytest.approx(
        (0, 0, 0.5, 0.5)
    )
    assert Box(0.0, 0.0, 0.25, 0.5).projected(Box(0.25, 0.25, 0.75, 0.75)) is None


def test_a_mirror_image() -> None:
    assert Box(0.1, 0.2, 0.4, 0.5).mirrored() == pytest.approx((0.6, 0.2, 0.9, 0.5))


OBJECTS = [
    # its center and a quarter of it are in the window
    Object(1, 0, Box(0.0, 0.0, 0.4, 0.4), False),
    Object(2, 0, Box(0.0, 0.3, 0.25, 0.9), True),  # outside
    Object(3, 1, Box(0.3, 0.3, 0.5, 0.5), False),  # inside
]
WINDOW = Box(0.2, 0.2, 0.7, 0.7)


@pytest.mark.parametrize(
    ("constraint", "labels"),
    [
        (None, [1, 2, 3]),
        (EmitConstraint(), [1, 3]),
        (EmitConstraint(emit_type=EmitConstraint.MIN_OVERLAP, emit_overlap=0.2), [1, 3]),
        (EmitConstraint(emit_type=EmitConstraint.MIN_OVERLAP, emit_overlap=0.3), [3]),
        (EmitConstraint(emit_type=EmitConstraint.MIN_OVERLAP, emit_overlap=0), [1, 2, 3]),
    ],
)
def test_emissions(constraint: EmitConstraint | None, labels: list[int]) -> None:
    emission = Emission(constraint) if constraint is not None else None
    assert [item.label for item in projected(OBJECTS, WINDOW, emission)] == labels


def test_an_overlap_that_is_no_fraction_is_refused() -> None:
    with pytest.raises(DataError, match="emit_overlap 2, expected 0 to 1"):
        Emission(EmitConstraint(emit_overlap=2))
