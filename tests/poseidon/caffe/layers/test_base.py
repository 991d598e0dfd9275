"""Shapes, axes and counts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from poseidon.caffe.layers.base import (
    BlobSpec,
    Layer,
    LayerContext,
    LayerError,
    Shape,
    canonical_axis,
    check_count,
    times,
)
from poseidon.caffe.proto.caffe_pb2 import TRAIN, FillerParameter, LayerParameter


@pytest.mark.parametrize(("axis", "expected"), [(0, 0), (2, 2), (-1, 2), (-3, 0)])
def test_axes_count_from_either_end(axis: int, expected: int) -> None:
    assert canonical_axis(axis, (4, 5, 6)) == expected


@pytest.mark.parametrize("axis", [3, -4])
def test_an_axis_outside(axis: int) -> None:
    with pytest.raises(
        LayerError, match=f"axis {axis} is outside the 3 axes of a bottom of shape 4x5x6"
    ):
        canonical_axis(axis, (4, 5, 6))


@pytest.mark.parametrize(
    ("count", "least", "most", "message"),
    [
        (0, 1, 1, "has 0 bottoms, expected exactly 1"),
        (1, 2, None, "has 1 bottom, expected at least 2"),
        (3, 1, 2, "has 3 bottoms, expected 1 to 2"),
        (1, 0, 0, "has 1 bottom, expected none"),
    ],
)
def test_counts(count: int, least: int, most: int | None, message: str) -> None:
    with pytest.raises(LayerError) as caught:
        check_count("bottom", count, least, most)
    assert str(caught.value) == message


def test_shapes_as_people_write_them() -> None:
    assert (times((2, 3)), times(())) == ("2x3", "scalar")


class Sized(Layer):
    """One blob as large as the second axis."""

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        extra = (
            [BlobSpec(name="more", shape=(1,), filler=FillerParameter())]
            if len(bottoms[0]) > 2
            else []
        )
        self.declare(
            BlobSpec(name="weight", shape=bottoms[0][1:2], filler=FillerParameter()), *extra
        )
        return list(bottoms)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            (2, 4),
            "weight would have shape 4 for bottoms of this shape, expected 3: the shape of a blob "
            "cannot change",
        ),
        (
            (2, 3, 1),
            "would have 2 blobs for bottoms of this shape, expected 1 as in the first setup",
        ),
    ],
)
def test_blobs_keep_their_shapes(shape: Shape, message: str) -> None:
    sized = Sized(LayerParameter(), LayerContext(phase=TRAIN, seed=0))
    sized.setup([(5, 3)])
    specs = sized.blob_specs
    sized.setup([(7, 3)])
    with pytest.raises(LayerError) as caught:
        sized.setup([shape])
    assert str(caught.value) == message and sized.blob_specs is specs
