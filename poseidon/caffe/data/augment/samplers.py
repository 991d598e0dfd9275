"""SSD's batch samplers: random windows of an image that fulfil a condition on its objects.

Law: a function of the objects and of a generator that is seeded by the record.

Source: util/sampler.cpp of SSD's branch of Caffe (Liu et al., 2016).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from poseidon.caffe.data.augment.boxes import Box, Object, coverage, overlap
from poseidon.caffe.data.augment.checks import check_finite
from poseidon.caffe.proto.caffe_pb2 import BatchSampler, SampleConstraint
from poseidon.errors import DataError

# More trials would stop the reader.
MOST_TRIALS = 10_000
# Each measure with the fields of its limits.
MEASURES = (
    ("jaccard_overlap", "min_jaccard_overlap", "max_jaccard_overlap"),
    ("sample_coverage", "min_sample_coverage", "max_sample_coverage"),
    ("object_coverage", "min_object_coverage", "max_object_coverage"),
)


class WindowSampler:
    """The batch samplers of a layer.

    Args:
        params: the batch_samplers. Each tries up to max_trials windows and keeps up to max_sample
            of those that fulfil its sample_constraint: at least one object within all the limits.
            One of all windows is chosen.

    Raises:
        DataError: a range is not increasing, or there are too many trials.
    """

    def __init__(self, params: Sequence[BatchSampler]) -> None:
        for param in params:
            _check(param)
        self._params = [param for param in params if param.use_original_image]

    def choose(self, objects: Sequence[Object], random: Random) -> Box | None:
        """Return a window of an image with these objects; None if none was found."""
        boxes = [item.box for item in objects]
        found = [window for param in self._params for window in _windows(param, boxes, random)]
        return found[random.randrange(len(found))] if found else None


def _windows(param: BatchSampler, boxes: Sequence[Box], random: Random) -> list[Box]:
    found: list[Box] = []
    most = param.max_sample if param.HasField("max_sample") else param.max_trials
    for _ in range(param.max_trials):
        if len(found) >= most:
            break
        window = _window(param, random)
        if fulfils(window, boxes, param.sample_constraint):
            found.append(window)
    return found


def _window(param: BatchSampler, random: Random) -> Box:
    sampler = param.sampler
    scale = random.uniform(sampler.min_scale, sampler.max_scale)
    ratio = random.uniform(sampler.min_aspect_ratio, sampler.max_aspect_ratio)
    # So that the window is not larger than the image.
    ratio = min(max(ratio, scale**2), 1 / scale**2)
    width, height = min(1.0, scale * math.sqrt(ratio)), min(1.0, scale / math.sqrt(ratio))
    left, top = random.uniform(0, 1 - width), random.uniform(0, 1 - height)
    return Box(left, top, left + width, top + height)


def fulfils(window: Box, boxes: Sequence[Box], constraint: SampleConstraint) -> bool:
    """Return True if at least one object is within all limits that are set, or if none is set."""
    limits = [
        limit
        for limit in (_Limit.of(constraint, *names) for names in MEASURES)
        if limit is not None
    ]
    return not limits or any(all(limit.holds(window, box) for limit in limits) for box in boxes)


class _Limit(NamedTuple):
    """The limits of a measure."""

    name: str
    least: float
    most: float

    @staticmethod
    def of(constraint: SampleConstraint, name: str, least: str, most: str) -> _Limit | None:
        """Return the limits of a measure, from these fields; None if neither is set."""
        sides: dict[str, float] = {field.name: value for field, value in constraint.ListFields()}
        if least not in sides and most not in sides:
            return None
        return _Limit(name, sides.get(least, -math.inf), sides.get(most, math.inf))

    def holds(self, window: Box, box: Box) -> bool:
        """Return True if an object is within the limits."""
        if self.name == "jaccard_overlap":
            measure = overlap(window, box)
        else:
            measure = (
                coverage(window, box) if self.name == "sample_coverage" else coverage(box, window)
            )
        return self.least <= measure <= self.most


def _check(param: BatchSampler) -> None:
    """Raise DataError unless a batch_sampler is in its ranges."""
    sampler = param.sampler
    check_finite("sampler", sampler)
    check_finite("sample_constraint", param.sample_constraint)
    if not 0 < sampler.min_scale <= sampler.max_scale <= 1:
        raise DataError(
            f"sampler has scales from {sampler.min_scale:g} to {sampler.max_scale:g}, expected an "
            "increasing range in 0 to 1"
        )
    if not 0 < sampler.min_aspect_ratio <= sampler.max_aspect_ratio:
        raise DataError(
            f"sampler has aspect ratios from {sampler.min_aspect_ratio:g} to "
            f"{sampler.max_aspect_ratio:g}, expected an increasing range of positive numbers"
        )
    if param.max_trials > MOST_TRIALS:
        raise DataError(
            f"batch_sampler has max_trials {param.max_trials}, expected at most {MOST_TRIALS}"
        )
