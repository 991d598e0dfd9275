"""Boxes: hand-computed overlaps, windows and emissions."""

from __future__ import annotations

from random import Random

import pytest
from google.protobuf import text_format

from poseidon.caffe.data.boxes import (
    WHOLE,
    Box,
    Emission,
    Object,
    WindowSampler,
    coverage,
    fulfils,
    overlap,
    projected,
)
from poseidon.caffe.proto.caffe_pb2 import AnnotatedDataParameter, EmitConstraint, SampleConstraint
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


OBJECTS_OF_SAMPLERS = [
    Object(1, 0, Box(0.1, 0.1, 0.4, 0.5), False),
    Object(2, 0, Box(0.5, 0.5, 0.9, 0.9), False),
]
WIDE = "sampler { min_scale: 0.3 max_scale: 1 min_aspect_ratio: 0.5 max_aspect_ratio: 2 }"


def sampler(*texts: str) -> WindowSampler:
    text = "".join(f"batch_sampler {{ {part} }} " for part in texts)
    return WindowSampler(text_format.Parse(text, AnnotatedDataParameter()).batch_sampler)


def test_windows_have_sizes_and_shapes_in_their_ranges() -> None:
    made = sampler(f"{WIDE} max_sample: 1")
    scales, ratios = [], []
    for seed in range(300):
        window = made.choose(OBJECTS_OF_SAMPLERS, Random(seed))
        assert window is not None
        assert (
            0 <= window.xmin <= window.xmax <= 1 + 1e-9
            and 0 <= window.ymin <= window.ymax <= 1 + 1e-9
        )
        width, height = window.xmax - window.xmin, window.ymax - window.ymin
        scales.append((width * height) ** 0.5)
        ratios.append(width / height)
    assert 0.3 <= min(scales) < 0.4 and 0.9 < max(scales) <= 1
    assert 0.5 <= min(ratios) < 0.6 and 1.7 < max(ratios) <= 2


@pytest.mark.parametrize("least", [0.1, 0.3, 0.5])
def test_a_window_overlaps_with_an_object(least: float) -> None:
    made = sampler(
        f"{WIDE} sample_constraint {{ min_jaccard_overlap: {least} }} max_sample: 1 max_trials: 50"
    )
    for seed in range(50):
        window = made.choose(OBJECTS_OF_SAMPLERS, Random(seed))
        assert (
            window is None
            or max(overlap(window, item.box) for item in OBJECTS_OF_SAMPLERS) >= least - 1e-6
        )


WINDOW_OF_SAMPLERS = Box(0.0, 0.0, 0.5, 0.5)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ("", True),
        # The first object's area is 0.12; it is inside the window of 0.25.
        ("min_jaccard_overlap: 0.47", True),
        ("min_jaccard_overlap: 0.49", False),
        ("max_jaccard_overlap: 0.1", True),  # the second object's
        ("min_jaccard_overlap: 0.1 max_jaccard_overlap: 0.2", False),
        ("min_sample_coverage: 0.47 max_sample_coverage: 0.49", True),
        ("min_sample_coverage: 0.5", False),
        ("min_object_coverage: 1", True),
        ("min_object_coverage: 1 max_sample_coverage: 0.4", False),  # both of one object
        ("max_object_coverage: 0.5", True),
    ],
)
def test_constraints(limits: str, *, expected: bool) -> None:
    assert coverage(OBJECTS_OF_SAMPLERS[0].box, WINDOW_OF_SAMPLERS) == pytest.approx(1)
    boxes = [item.box for item in OBJECTS_OF_SAMPLERS]
    assert (
        fulfils(WINDOW_OF_SAMPLERS, boxes, text_format.Parse(limits, SampleConstraint()))
        is expected
    )


def test_without_objects_only_free_samplers_find_windows() -> None:
    assert sampler("sample_constraint { min_jaccard_overlap: 0 }").choose([], Random(1)) is None
    assert sampler("").choose([], Random(1)) == pytest.approx((0, 0, 1, 1))


def test_one_of_all_samplers_windows_is_chosen() -> None:
    whole, half = "max_sample: 1", "sampler { min_scale: 0.5 max_scale: 0.5 } max_sample: 1"
    made = sampler(whole, half)
    sizes = {
        round(window.area, 2)
        for seed in range(30)
        if (window := made.choose(OBJECTS_OF_SAMPLERS, Random(seed)))
    }
    assert sizes == {1.0, 0.25}
    assert sampler("use_original_image: false").choose(OBJECTS_OF_SAMPLERS, Random(1)) is None
    assert sampler("max_sample: 0").choose(OBJECTS_OF_SAMPLERS, Random(1)) is None
    assert sampler().choose(OBJECTS_OF_SAMPLERS, Random(1)) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sampler { min_scale: 0 }", "scales from 0 to 1"),
        ("sampler { min_scale: 0.9 max_scale: 0.3 }", "scales from 0.9 to 0.3"),
        ("sampler { max_scale: 2 }", "scales from 1 to 2"),
        ("sampler { min_aspect_ratio: 0 }", "aspect ratios from 0 to 1"),
        ("sampler { max_aspect_ratio: inf }", "max_aspect_ratio inf, expected a finite number"),
        ("max_trials: 4000000000", "max_trials 4000000000, expected at most 10000"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        sampler(text)
