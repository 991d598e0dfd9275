"""Which prior boxes are positive and negative examples of an image, from overlaps and losses.

Law: pure functions of numpy arrays. An assignment has for each prior box the index of its object,
UNMATCHED or IGNORED.

Legend: P prior boxes, G objects.

Source: MatchBBox and MineHardExamples in util/bbox_util.cpp of SSD's branch of Caffe. Equal
losses are taken in the order of the prior boxes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from poseidon.caffe.layers.common.indices import INTEGERS, outside
from poseidon.caffe.layers.ssd.codes import SMALLEST_AREA, Floats, areas, overlaps, suppressed
from poseidon.caffe.proto.caffe_pb2 import MultiBoxLossParameter
from poseidon.errors import DataError

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
        matches: the assignment.
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
    """The objects of an image.

    Attributes:
        labels_G: their classes.
        boxes_G4: their boxes.
    """

    labels_G: Indices
    boxes_G4: Floats


def objects_of(rows: Floats, images: int, param: MultiBoxLossParameter) -> list[Objects]:
    """Return the objects of each image of a batch, without the difficult ones if
    use_difficult_gt is false.

    Args:
        rows: (objects, 8): image, label, instance, xmin, ymin, xmax, ymax, difficult; image -1 is
            none.
        images: the number of images.
        param: the settings.

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
