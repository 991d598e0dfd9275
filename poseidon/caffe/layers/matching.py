"""Which prior boxes are positive and negative examples of an image, from overlaps and losses.

Law: pure functions of numpy arrays. An assignment has for each prior box the index of its object,
UNMATCHED or IGNORED.

Legend: P prior boxes, G objects.

Source: MatchBBox and MineHardExamples in util/bbox_util.cpp of SSD's branch of Caffe. Equal
losses are taken in the order of the prior boxes.

Codes of boxes relative to prior boxes, overlaps, and non-maximum suppression.

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

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from poseidon.caffe.layers.rearrange import INTEGERS, outside
from poseidon.caffe.proto.caffe_pb2 import MultiBoxLossParameter, PriorBoxParameter
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
    """Return the indices of boxes left after non-maximum suppression, by score.

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


Indices = npt.NDArray[np.int64]
UNMATCHED, IGNORED = -1, -2
# Smaller overlaps do not count.
LEAST_OVERLAP = 1e-6


@dataclass(frozen=True, slots=True)
class Matches:
    """The assignment of an image's prior boxes to its objects.

    Attributes:
        object_P: the index of each prior box's object, UNMATCHED or IGNORED.
        overlap_P: its largest overlap with an object.
    """

    object_P: Indices
    overlap_P: Floats


def match(boxes_P4: Floats, objects_G4: Floats, param: MultiBoxLossParameter) -> Matches:
    """Assign objects to boxes.

    First each object gets the box with which it overlaps most, the best pair of all first. Then,
    with PER_PREDICTION, every other box gets the object with which it overlaps most, if by at least
    overlap_threshold.
    """
    assigned = np.full(len(boxes_P4), UNMATCHED, np.int64)
    found_PG = overlaps(boxes_P4, objects_G4)
    if param.ignore_cross_boundary_bbox:
        outside = ((boxes_P4 < 0) | (boxes_P4 > 1)).any(1)
        assigned[outside] = IGNORED
        found_PG[outside] = 0
    found_PG[found_PG <= LEAST_OVERLAP] = 0
    if not len(objects_G4):
        return Matches(
            np.full(len(boxes_P4), UNMATCHED, np.int64), np.zeros(len(boxes_P4), np.float32)
        )
    largest_P = found_PG.max(1)
    left_PG = found_PG.copy()
    for _ in range(len(objects_G4)):
        box, item = np.unravel_index(left_PG.argmax(), left_PG.shape)
        if left_PG[box, item] <= 0:
            break
        assigned[box] = item
        largest_P[box] = found_PG[box, item]
        left_PG[box] = 0
        left_PG[:, item] = 0
    if param.match_type == MultiBoxLossParameter.PER_PREDICTION:
        best_P = found_PG.argmax(1)
        value_P = found_PG[np.arange(len(best_P)), best_P]
        joins = (
            (assigned == UNMATCHED)
            & (value_P > 0)
            & (value_P >= np.float32(param.overlap_threshold))
        )
        assigned[joins] = best_P[joins]
    return Matches(assigned, largest_P)


@dataclass(frozen=True, slots=True)
class Mined:
    """The examples of an image for one class of locations.

    Attributes:
        object_P: as in Matches; positive examples that were not chosen are UNMATCHED.
        negatives: the indices of the negative examples.
    """

    object_P: Indices
    negatives: Indices


def mine(matches: Matches, loss_P: Floats, boxes_P4: Floats, param: MultiBoxLossParameter) -> Mined:
    """Choose the examples with the largest loss.

    MAX_NEGATIVE chooses neg_pos_ratio negatives for each positive, among boxes that overlap with no
    object by neg_overlap. HARD_EXAMPLE chooses sample_size boxes among all.

    Args:
        loss_P: the loss of each prior box.
        boxes_P4: the boxes for non-maximum suppression.
        param: the settings, whose mining_type is not NONE.
    """
    hard = param.mining_type == MultiBoxLossParameter.HARD_EXAMPLE
    positive = matches.object_P > UNMATCHED
    unmatched = matches.object_P == UNMATCHED
    eligible = (
        np.ones_like(positive) if hard else unmatched & (matches.overlap_P < param.neg_overlap)
    )
    candidates = np.flatnonzero(eligible)
    if hard:
        count = min(param.sample_size, len(candidates))
    else:
        count = min(int(positive.sum() * np.float32(param.neg_pos_ratio)), len(candidates))
    order = candidates[np.argsort(-loss_P[candidates], kind="stable")]
    if param.HasField("nms_param") and param.nms_param.nms_threshold > 0:
        top_k = param.nms_param.top_k if param.nms_param.HasField("top_k") else UNMATCHED
        order = order[:top_k] if top_k > UNMATCHED else order
        order = order[areas(boxes_P4[order]) >= SMALLEST_AREA]
        order = order[suppressed(boxes_P4[order], param.nms_param.nms_threshold)]
    chosen = np.zeros_like(positive)
    chosen[order[:count]] = True
    kept = np.where(positive & ~chosen, UNMATCHED, matches.object_P) if hard else matches.object_P
    return Mined(kept, np.flatnonzero(chosen & unmatched))


@dataclass(frozen=True, slots=True)
class Objects:
    """The objects of an image."""

    labels_G: Indices
    boxes_G4: Floats


def objects_of(rows: Floats, images: int, param: MultiBoxLossParameter) -> list[Objects]:
    """Return each image's objects, without difficult ones if use_difficult_gt is false.

    Args:
        rows: (objects, 8): image, label, instance, xmin, ymin, xmax, ymax, difficult; image -1 is
            none.

    Raises:
        DataError: an image or a label does not exist.
    """
    rows = rows[rows[:, 0] != -1]
    if wrong := outside(torch.from_numpy(rows[:, 0]), range(images)):
        raise DataError(f"the objects belong to image {wrong}, but the batch has {images}")
    agnostic = param.map_object_to_agnostic
    if (np.trunc(rows[:, 1]) == param.background_label_id).any():
        raise DataError(
            f"an object has label {param.background_label_id}, which is background_label_id"
        )
    if wrong := outside(
        torch.from_numpy(rows[:, 1]), INTEGERS if agnostic else range(param.num_classes)
    ):
        expected = "an integer" if agnostic else f"0 to {param.num_classes - 1} (num_classes - 1)"
        raise DataError(f"an object has label {wrong}, expected {expected}")
    numbers, labels = rows[:, 0].astype(np.int64), rows[:, 1].astype(np.int64)
    used = np.ones(len(rows), bool) if param.use_difficult_gt else rows[:, 7] == 0
    found = []
    for image in range(images):
        own = used & (numbers == image)
        own_labels = np.full(own.sum(), param.background_label_id + 1) if agnostic else labels[own]
        found.append(Objects(own_labels, np.ascontiguousarray(rows[own, 3:7])))
    return found
