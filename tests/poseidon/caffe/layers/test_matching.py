"""Codes, overlaps and suppression, worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from poseidon.caffe.layers.matching import BoxCode, areas, overlaps, suppressed
from poseidon.caffe.proto.caffe_pb2 import PriorBoxParameter
from poseidon.errors import DataError

PRIOR = torch.tensor([[0.2, 0.2, 0.6, 0.4], [0.0, 0.0, 1.0, 0.5]])
VARIANCE = torch.tensor([[0.1, 0.1, 0.2, 0.2], [1.0, 1.0, 1.0, 1.0]])
G = math.exp(0.2)
KINDS = (PriorBoxParameter.CORNER, PriorBoxParameter.CENTER_SIZE, PriorBoxParameter.CORNER_SIZE)


@pytest.mark.parametrize(
    ("kind", "in_target", "expected"),
    [
        (KINDS[0], False, [0.3, 0.3, 0.8, 0.6]),
        (KINDS[0], True, [1.2, 1.2, 1.6, 1.4]),
        # The center moves by 0.1 x 0.4 and 0.1 x 0.2; the sides grow by e^0.2.
        (KINDS[1], False, [0.44 - 0.2 * G, 0.32 - 0.1 * G, 0.44 + 0.2 * G, 0.32 + 0.1 * G]),
        (KINDS[2], False, [0.24, 0.22, 0.68, 0.44]),
    ],
)
def test_codes_of_one(kind: int, expected: list[float], *, in_target: bool) -> None:
    code = BoxCode(kind, PRIOR, VARIANCE, variance_in_target=in_target)
    assert code.decode(torch.ones(2, 4))[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_target", [True, False])
def test_decoding_undoes_encoding(kind: int, *, in_target: bool) -> None:
    code = BoxCode(kind, PRIOR, VARIANCE, variance_in_target=in_target)
    boxes = torch.tensor([[0.1, 0.3, 0.5, 0.9], [0.2, 0.1, 0.3, 0.8]])
    codes = code.encode(torch.tensor([0, 1]), boxes)
    torch.testing.assert_close(code.decode(codes), boxes)
    # Several images at once.
    torch.testing.assert_close(code.decode(codes.expand(3, 2, 4))[2], boxes)


def test_areas_and_overlaps() -> None:
    boxes = np.array([[0, 0, 2, 1], [1, 0, 3, 1], [2, 0, 1, 1], [5, 5, 6, 6]], np.float32)
    assert areas(boxes).tolist() == [2, 2, 0, 1]
    expected = [[1, 1 / 3, 0, 0], [1 / 3, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]]
    np.testing.assert_allclose(overlaps(boxes, boxes), expected, rtol=1e-6)


def shifted(*starts: float) -> np.ndarray:  # type: ignore[type-arg]
    """Boxes of width 1 that start there."""
    return np.array([[start, 0, start + 1, 1] for start in starts], np.float32)


def test_suppression() -> None:
    # Overlaps of neighbours: 0.8/1.2, 0.4/1.6.
    assert suppressed(shifted(0, 0.2, 0.6, 3), 0.5) == [0, 2, 3]
    assert suppressed(shifted(0, 0.2, 0.6, 3), 0.7) == [0, 1, 2, 3]
    # The second is gone, so it does not suppress the third.
    assert suppressed(shifted(0, 0.3, 0.6), 0.5) == [0, 2]
    assert suppressed(shifted(), 0.5) == []


def test_an_adaptive_threshold_falls_to_a_half() -> None:
    # Each neighbour overlaps by 0.8/1.2 = 0.67, the next but one by 0.6/1.4 = 0.43.
    starts = shifted(0, 0.2, 0.4, 0.6, 0.8)
    assert suppressed(starts, 0.7) == [0, 1, 2, 3, 4]
    assert suppressed(starts, 0.7, eta=0.9) == [0, 2, 4]


def test_priors_are_checked() -> None:
    with pytest.raises(DataError, match="no width"):
        BoxCode(KINDS[1], PRIOR * torch.tensor([1, 1, 0.1, 1]), VARIANCE, variance_in_target=False)
    with pytest.raises(DataError, match="variance"):
        BoxCode(KINDS[0], PRIOR, -VARIANCE, variance_in_target=False)
