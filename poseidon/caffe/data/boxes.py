"""Boxes of objects in an image, and SSD's samplers of windows by them. Coordinates are fractions of
the image's width and height.

Law: pure arithmetic, in double precision.

Source: util/bbox_util.cpp of SSD's branch of Caffe (Liu et al., 2016).

SSD's batch samplers: random windows of an image that fulfil a condition on its objects.

Law: a function of the objects and of a generator that is seeded by the record.

Source: util/sampler.cpp of SSD's branch of Caffe (Liu et al., 2016).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from random import Random
from typing import NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from poseidon.caffe.proto.caffe_pb2 import BatchSampler, EmitConstraint, SampleConstraint
from poseidon.errors import DataError


def check_finite(name: str, param: Message) -> None:
    """Raise DataError if a float of a message is infinite or not a number."""
    for field, value in param.ListFields():
        if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT:
            for number in [value] if isinstance(value, float) else value:
                if not math.isfinite(number):
                    raise DataError(f"{name} has {field.name} {number:g}, expected a finite number")


class Box(NamedTuple):
    """A box from its upper left to its lower right corner."""

    xmin: float
    ymin: float
    xmax: float
    ymax: float

    @property
    def area(self) -> float:
        """The area; 0 if a corner is on the wrong side."""
        return max(0.0, self.xmax - self.xmin) * max(0.0, self.ymax - self.ymin)

    def clipped(self) -> Box:
        """Return the part in the image."""
        return Box(*(min(max(value, 0.0), 1.0) for value in self))

    def mirrored(self) -> Box:
        """Return the box in the image's mirror image."""
        return Box(1 - self.xmax, self.ymin, 1 - self.xmin, self.ymax)

    def located(self, window: Box) -> Box:
        """Return a box in the image's coordinates from a box in the coordinates of `window`."""
        width, height = window.xmax - window.xmin, window.ymax - window.ymin
        return Box(
            window.xmin + self.xmin * width,
            window.ymin + self.ymin * height,
            window.xmin + self.xmax * width,
            window.ymin + self.ymax * height,
        )

    def projected(self, window: Box) -> Box | None:
        """Return the part in a window, in the window's coordinates; None if it is empty."""
        if self.xmin >= window.xmax or self.xmax <= window.xmin:
            return None
        if self.ymin >= window.ymax or self.ymax <= window.ymin:
            return None
        width, height = window.xmax - window.xmin, window.ymax - window.ymin
        part = Box(
            (self.xmin - window.xmin) / width,
            (self.ymin - window.ymin) / height,
            (self.xmax - window.xmin) / width,
            (self.ymax - window.ymin) / height,
        ).clipped()
        return part if part.area > 0 else None


WHOLE = Box(0.0, 0.0, 1.0, 1.0)
"""The whole image."""


class Object(NamedTuple):
    """An object in an image."""

    label: int
    instance: int
    box: Box
    difficult: bool


def common_area(a: Box, b: Box) -> float:
    """Return the area that two boxes share."""
    width = min(a.xmax, b.xmax) - max(a.xmin, b.xmin)
    height = min(a.ymax, b.ymax) - max(a.ymin, b.ymin)
    return width * height if width > 0 and height > 0 else 0.0


def overlap(a: Box, b: Box) -> float:
    """Return the Jaccard overlap: the shared area over the area of the union."""
    common = common_area(a, b)
    return common / (a.area + b.area - common) if common > 0 else 0.0


def coverage(a: Box, b: Box) -> float:
    """Return the fraction of `a` that `b` covers."""
    common = common_area(a, b)
    return common / a.area if common > 0 else 0.0


class Emission:
    """The condition under which an object stays when its image is cropped.

    Args:
        param: the emit_constraint. CENTER: the object's center is in the window. MIN_OVERLAP: the
            window covers more than emit_overlap of the object.

    Raises:
        DataError: emit_overlap is not a fraction.
    """

    def __init__(self, param: EmitConstraint) -> None:
        if not 0 <= param.emit_overlap <= 1:
            raise DataError(
                f"emit_constraint has emit_overlap {param.emit_overlap:g}, expected 0 to 1"
            )
        self._by_center = param.emit_type == EmitConstraint.CENTER
        self._least = param.emit_overlap

    def keeps(self, box: Box, window: Box) -> bool:
        """Return True if an object with this box stays in this window."""
        if not self._by_center:
            return coverage(box, window) > self._least
        x, y = (box.xmin + box.xmax) / 2, (box.ymin + box.ymax) / 2
        return window.xmin <= x <= window.xmax and window.ymin <= y <= window.ymax


def projected(objects: Iterable[Object], window: Box, emission: Emission | None) -> list[Object]:
    """Return the objects that stay in a window, in the window's coordinates."""
    found = []
    for item in objects:
        if emission is not None and not emission.keeps(item.box, window):
            continue
        box = item.box.projected(window)
        if box is not None:
            found.append(item._replace(box=box))
    return found


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
