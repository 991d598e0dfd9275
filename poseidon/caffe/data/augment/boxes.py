"""Boxes of objects in an image. Coordinates are fractions of the image's width and height.

Law: pure arithmetic, in double precision.

Source: util/bbox_util.cpp of SSD's branch of Caffe (Liu et al., 2016).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from poseidon.caffe.proto.caffe_pb2 import EmitConstraint
from poseidon.errors import DataError


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
