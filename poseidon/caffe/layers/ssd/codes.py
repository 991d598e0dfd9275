"""Codes of boxes relative to prior boxes, overlaps, and non-maximum suppression.

Law: pure functions. A box is xmin, ymin, xmax, ymax; a code has four numbers, too.

Legend: P prior boxes, B boxes, G objects; ... other axes. w and h are the width and height of the
prior box, c its center, v its variances, and the primed box is the coded one:

    CORNER       xmin' = xmin + v0 code0, ... for each corner
    CENTER_SIZE  c' = c + v01 code01 (w, h), (w', h') = exp(v23 code23) (w, h)
    CORNER_SIZE  xmin' = xmin + v0 code0 w, ... for each corner

Without variances in the code (`variance_encoded_in_target`) v is 1.

Source: util/bbox_util.cpp of SSD's branch of Caffe.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from poseidon.caffe.proto.caffe_pb2 import PriorBoxParameter
from poseidon.errors import DataError

SIDES = 4
# Boxes of a smaller area are dropped from the suppression of training examples.
SMALLEST_AREA = 1e-5
# Below this, the threshold of an adaptive suppression no longer falls.
LEAST_ADAPTIVE = 0.5

Floats = npt.NDArray[np.float32]


class BoxCode:
    """A code of boxes.

    Args:
        kind: a `PriorBoxParameter.CodeType`.
        priors_P4: the prior boxes.
        variances_P4: their variances.
        variance_in_target: the variances are not part of the code.

    Raises:
        DataError: a prior box has no width or height, or a variance is not positive.
    """

    def __init__(
        self, kind: int, priors_P4: Tensor, variances_P4: Tensor, *, variance_in_target: bool
    ) -> None:
        self._kind = kind
        self.priors_P4 = priors_P4
        self.variances_P4 = variances_P4
        self._scale_P4 = torch.ones_like(variances_P4) if variance_in_target else variances_P4
        self._size_P2 = priors_P4[:, 2:] - priors_P4[:, :2]
        self._center_P2 = (priors_P4[:, :2] + priors_P4[:, 2:]) / 2
        if kind != PriorBoxParameter.CORNER and not bool((self._size_P2 > 0).all()):
            raise DataError("a prior box has no width or no height")
        if not bool((variances_P4 > 0).all()):
            raise DataError("a variance of the prior boxes is not positive")

    def decode(self, codes_P4: Tensor) -> Tensor:
        """Return the boxes (..., P, 4) of codes (..., P, 4)."""
        scaled = codes_P4 * self._scale_P4
        if self._kind == PriorBoxParameter.CORNER:
            return self.priors_P4 + scaled
        if self._kind == PriorBoxParameter.CORNER_SIZE:
            return self.priors_P4 + scaled * self._size_P2.repeat(1, 2)
        center = scaled[..., :2] * self._size_P2 + self._center_P2
        half = scaled[..., 2:].exp() * self._size_P2 / 2
        return torch.cat((center - half, center + half), -1)

    def encode(self, index_B: Tensor, boxes_B4: Tensor) -> Tensor:
        """Return the codes (B, 4) of boxes, which have width and height, relative
        to the prior boxes of these indices.
        """
        size, scale = self._size_P2[index_B], self._scale_P4[index_B]
        if self._kind == PriorBoxParameter.CENTER_SIZE:
            sides = boxes_B4[:, 2:] - boxes_B4[:, :2]
            center = (boxes_B4[:, :2] + boxes_B4[:, 2:]) / 2
            return (
                torch.cat(((center - self._center_P2[index_B]) / size, (sides / size).log()), -1)
                / scale
            )
        difference = boxes_B4 - self.priors_P4[index_B]
        if self._kind == PriorBoxParameter.CORNER_SIZE:
            difference = difference / size.repeat(1, 2)
        return difference / scale


def split_priors(prior: Tensor) -> tuple[Tensor, Tensor]:
    """Return boxes (P, 4) and variances (P, 4) of a PriorBox layer's top, 1 x 2 x 4P."""
    boxes, variances = prior.detach().reshape(2, -1, SIDES)
    return boxes, variances


def areas(boxes: Floats) -> Floats:
    """Return the area of each box (B, 4); 0 if a corner is on the wrong side."""
    sides = boxes[..., 2:] - boxes[..., :2]
    found: Floats = np.where((sides >= 0).all(-1), sides[..., 0] * sides[..., 1], np.float32(0))
    return found


def overlaps(boxes_B4: Floats, others_G4: Floats) -> Floats:
    """Return the Jaccard overlap (B, G) of each pair of boxes."""
    low = np.maximum(boxes_B4[:, None, :2], others_G4[None, :, :2])
    high = np.minimum(boxes_B4[:, None, 2:], others_G4[None, :, 2:])
    sides = (high - low).clip(0)
    common = sides[..., 0] * sides[..., 1]
    union = areas(boxes_B4)[:, None] + areas(others_G4)[None] - common
    found: Floats = np.zeros_like(common)
    np.divide(common, union, out=found, where=(common > 0) & (union > 0))
    return found


def suppressed(boxes_B4: Floats, threshold: float, *, eta: float = 1.0) -> list[int]:
    """Return the indices that are left after non-maximum suppression of boxes in the order of
    their scores.

    A box is left if no box before it that is left overlaps with it by more than the threshold. With
    eta < 1 the threshold is multiplied by eta after each box that is left, as long as it is above
    0.5.
    """
    kept: list[int] = []
    largest = np.zeros(len(boxes_B4), np.float32)
    for index in range(len(boxes_B4)):
        if largest[index] > threshold:
            continue
        kept.append(index)
        rest = slice(index + 1, None)
        np.maximum(
            largest[rest],
            overlaps(boxes_B4[index : index + 1], boxes_B4[rest])[0],
            out=largest[rest],
        )
        if eta < 1 and threshold > LEAST_ADAPTIVE:
            threshold *= eta
    return kept
