"""DetectionOutput: the detections of SSD's nets. DetectionEvaluate: which of them are right.

Legend: N images, P prior boxes, C classes, L classes of locations (1 with share_location, else C).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from poseidon.caffe.data.augmentation import Resize
from poseidon.caffe.data.boxes import Box
from poseidon.caffe.layers.base import Layer, LayerError, Shape, check_shape
from poseidon.caffe.layers.matching import SIDES, BoxCode, Floats, areas, split_priors, suppressed
from poseidon.caffe.layers.multibox_loss import check_bottoms
from poseidon.caffe.layers.registry import register
from poseidon.caffe.layers.saved_results import (
    ImageSize,
    SavedResults,
    asks_for_results,
    open_results,
    original_box,
    read_sizes,
)
from poseidon.caffe.proto.caffe_pb2 import DetectionOutputParameter
from poseidon.errors import DataError

LOGGER = logging.getLogger(__name__)
ROW = 7
ALL = -1


class _Detection(NamedTuple):
    score: float
    label: int
    prior: int


@register("DetectionOutput")
class DetectionOutput(Layer):
    """The boxes that are left of all classes after non-maximum suppression.

    Of each class but the background: the boxes with a score above confidence_threshold, of which
    the top_k best are suppressed among each other; see `poseidon.caffe.layers.matching.suppressed`. Of
    each image the keep_top_k best of all classes are left. Equal scores are taken in the order of
    the prior boxes.

    Bottoms: locations N x 4LP; scores N x CP; prior boxes 1 x 2 x 4P. Top: 1 x 1 x detections x 7:
    image, label, score, xmin, ymin, xmax, ymax, in the order of images, labels and falling scores.
    Without any detection there is a row for each image, with -1 after its number. No gradient.

    Fields (detection_output_param): num_classes, share_location, background_label_id (-1: none),
    nms_param, code_type, variance_encoded_in_target, keep_top_k (-1: all), confidence_threshold;
    save_output_param, see `poseidon.caffe.layers.saved_results`. visualize, visualize_threshold and
    save_file have no effect: nothing is shown.
    """

    BOTTOMS = (3, 3)
    TOPS_MAY_CHANGE_SHAPE = True
    OPENS_FILES = True
    results: SavedResults | None = None
    kept: list[list[Floats]] | None = None
    """In a job of several workers: the detections of each image of each batch
    since the test pass began, to be saved.
    """
    _opened = False

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param = self.param.detection_output_param
        _check(param)
        self.settings = param
        self.classes = param.num_classes
        self.locations = 1 if param.share_location else self.classes
        self.priors = check_bottoms(bottoms, self.locations, self.classes)
        has_threshold = param.HasField("confidence_threshold")
        self.least_score = param.confidence_threshold if has_threshold else -math.inf
        self.top_k = param.nms_param.top_k if param.nms_param.HasField("top_k") else ALL
        if not self._opened:
            self._opened = True
            self._open(param)
        return [(1, 1, 1, ROW)]

    def _open(self, param: DetectionOutputParameter) -> None:
        if param.visualize:
            LOGGER.warning("layer '%s': visualize has no effect, nothing is shown", self.param.name)
        if not asks_for_results(param):
            return
        if self.context.workers > 1:
            self.kept = []
        if self.context.rank == 0:
            self.results = open_results(param, self.context.resolve)

    def forward(self, locations: Tensor, scores: Tensor, prior: Tensor) -> Tensor:
        images = locations.shape[0]
        priors_P4, variances_P4 = split_priors(prior)
        code = BoxCode(
            self.settings.code_type,
            priors_P4,
            variances_P4,
            variance_in_target=self.settings.variance_encoded_in_target,
        )
        loc_NLP4 = (
            locations.detach().reshape(images, self.priors, self.locations, SIDES).transpose(1, 2)
        )
        boxes_NLP4 = code.decode(loc_NLP4).float().cpu().numpy()
        conf_NCP = (
            scores.detach().reshape(images, self.priors, self.classes).transpose(1, 2).float().cpu()
        )
        found = [
            self._rows(image, boxes, conf)
            for image, (boxes, conf) in enumerate(zip(boxes_NLP4, conf_NCP.numpy(), strict=True))
        ]
        if self.kept is not None:
            self.kept.append(found)
        elif self.results is not None:
            self.save(found)
        rows = np.concatenate(found) if found else np.zeros((0, ROW), np.float32)
        if not len(rows):
            rows = np.full((images, ROW), -1, np.float32)
            rows[:, 0] = np.arange(images)
        return torch.from_numpy(rows).to(scores).view(1, 1, -1, ROW)

    def save(self, batch: Sequence[Floats]) -> None:
        """Add the detections of each image of a batch to the results of this process."""
        assert self.results is not None
        for rows in batch:
            self.results.add(rows)

    def _rows(self, image: int, boxes_LP4: Floats, conf_CP: Floats) -> Floats:
        """Return the detections of an image (detections, 7)."""
        found: list[_Detection] = []
        for label in range(self.classes):
            if label != self.settings.background_label_id:
                boxes = boxes_LP4[0 if self.settings.share_location else label]
                found += self._of_class(label, boxes, conf_CP[label])
        if self.settings.keep_top_k > ALL and len(found) > self.settings.keep_top_k:
            best = sorted(found, key=lambda item: -item.score)[: self.settings.keep_top_k]
            found = sorted(best, key=lambda item: item.label)
        rows = np.empty((len(found), ROW), np.float32)
        for row, item in zip(rows, found, strict=True):
            column = 0 if self.settings.share_location else item.label
            row[:3] = image, item.label, item.score
            row[3:] = boxes_LP4[column, item.prior]
        return rows

    def _of_class(self, label: int, boxes_P4: Floats, conf_P: Floats) -> list[_Detection]:
        """Return the detections of a class, the best first."""
        able = np.flatnonzero(conf_P > self.least_score)
        order = able[np.argsort(-conf_P[able], kind="stable")]
        order = order[: self.top_k] if self.top_k > ALL else order
        nms = self.settings.nms_param
        kept = order[suppressed(boxes_P4[order], nms.nms_threshold, eta=nms.eta)]
        return [_Detection(float(conf_P[prior]), label, int(prior)) for prior in kept]

    def close(self) -> None:
        """Write the results that have not been written."""
        if self.results is not None:
            self.results.close()


def _check(param: DetectionOutputParameter) -> None:
    """Raise LayerError unless the settings are in their ranges."""
    if param.num_classes < 1:
        raise LayerError("num_classes is missing; it must be at least 1")
    if not param.nms_param.nms_threshold >= 0:
        raise LayerError(f"nms_threshold is {param.nms_param.nms_threshold:g}, expected at least 0")
    if not 0 < param.nms_param.eta <= 1:
        raise LayerError(f"eta is {param.nms_param.eta:g}, expected more than 0 and at most 1")


EVALUATED_ROW = 5
DETECTION, OBJECT = 7, 8
NONE = -1
MOST_CLASSES = 1_000_000


@register("DetectionEvaluate")
class DetectionEvaluate(Layer):
    """A row for each class with its number of objects, and one for each detection: true or false.

    The detections of a class in an image are taken with falling scores. A detection belongs to the
    object of its class with which it overlaps most, if by at least overlap_threshold. The first
    detection of an object is true, others are false. With evaluate_difficult_gt false, difficult
    objects are not counted, and their detections are neither true nor false.

    Bottoms: detections 1 x 1 x D x 7 of a DetectionOutput layer; objects 1 x 1 x G x 8 of an
    AnnotatedData layer. Top: 1 x 1 x rows x 5: -1, label, number of objects, -1, -1 for each class
    but the background; then image, label, score, 1 or 0 for true, 1 or 0 for false. No gradient. A
    solver with eval_type "detection" computes the mean average precision of it.

    Fields (detection_evaluate_param): num_classes, background_label_id, overlap_threshold,
    evaluate_difficult_gt; name_size_file with the size of each image, in whose pixels boxes are
    compared then (a box from 0 to 9 is 10 pixels wide); resize_param, how the images were resized.
    In a job of several workers boxes are compared as fractions.
    """

    BOTTOMS = (2, 2)
    TOPS_MAY_CHANGE_SHAPE = True
    OPENS_FILES = True
    _sizes: list[ImageSize] | None = None

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param = self.param.detection_evaluate_param
        if not 1 <= param.num_classes <= MOST_CLASSES:
            raise LayerError(f"num_classes is {param.num_classes}, expected 1 to {MOST_CLASSES}")
        if not param.overlap_threshold > 0:
            raise LayerError(
                f"overlap_threshold is {param.overlap_threshold:g}, expected a positive number"
            )
        check_shape("bottom 0", bottoms[0], f"1x1xDx{DETECTION}")
        check_shape("bottom 1", bottoms[1], f"1x1xGx{OBJECT}")
        self.settings = param
        self.labels = [
            label for label in range(param.num_classes) if label != param.background_label_id
        ]
        if self._sizes is None:
            self._sizes = self._read_sizes()
            self._images = 0
            self._resize = Resize(param.resize_param) if param.HasField("resize_param") else None
        return [(1, 1, len(self.labels) + bottoms[0][2], EVALUATED_ROW)]

    def _read_sizes(self) -> list[ImageSize]:
        name = self.settings.name_size_file
        if not name:
            return []
        if self.context.workers > 1:
            LOGGER.warning(
                "layer '%s': name_size_file has no effect in a job of %d workers, each of which "
                "tests a part of the images",
                self.param.name,
                self.context.workers,
            )
            return []
        return read_sizes(self.context.resolve(name))

    def forward(self, detections: Tensor, objects: Tensor) -> Tensor:
        found = detections.detach().float().cpu().numpy().reshape(-1, DETECTION)
        truth = objects.detach().float().cpu().numpy().reshape(-1, OBJECT)
        found, truth = found[found[:, 0] != NONE], truth[truth[:, 0] != NONE]
        background = self.settings.background_label_id
        if (truth[:, 1] == background).any():
            raise DataError(f"an object has label {background}, which is background_label_id")
        if (found[:, 1] == background).any():
            raise DataError(f"a detection has label {background}, which is background_label_id")
        counted = truth if self.settings.evaluate_difficult_gt else truth[truth[:, 7] == 0]
        rows = [[NONE, label, (counted[:, 1] == label).sum(), NONE, NONE] for label in self.labels]
        for image in np.unique(found[:, 0]):
            of_image, own = found[found[:, 0] == image], truth[truth[:, 0] == image]
            size = self._next_size()
            for label in np.unique(of_image[:, 1]):
                rows += self._class_rows(
                    of_image[of_image[:, 1] == label], own[own[:, 1] == label], size
                )
        top = np.array(rows, np.float32).reshape(-1, EVALUATED_ROW)
        return torch.from_numpy(top).to(detections).view(1, 1, -1, EVALUATED_ROW)

    def _next_size(self) -> ImageSize | None:
        if not self._sizes:
            return None
        size = self._sizes[self._images]
        self._images = (self._images + 1) % len(self._sizes)
        return size

    def _class_rows(
        self, found: Floats, truth: Floats, size: ImageSize | None
    ) -> list[list[float]]:
        """Return the rows of the detections of a class in an image."""
        found = found[np.argsort(-found[:, 2], kind="stable")] if len(truth) else found
        boxes, own = found[:, 3:7], truth[:, 3:7]
        if size is not None:
            boxes, own = (self._in_pixels(side, size) for side in (boxes, own))
        taken = np.zeros(len(truth), bool)
        rows = []
        for (image, label, score, *_), box in zip(found.tolist(), boxes, strict=True):
            right = wrong = 0
            shared = pairwise(box, own, in_pixels=size is not None)
            best = int(shared.argmax()) if len(shared) else NONE
            if best == NONE or shared[best] < np.float32(self.settings.overlap_threshold):
                wrong = 1
            elif self.settings.evaluate_difficult_gt or not truth[best, 7]:
                right, wrong = (0, 1) if taken[best] else (1, 0)
                taken[best] = True
            rows.append([image, label, score, right, wrong])
        return rows

    def _in_pixels(self, boxes: Floats, size: ImageSize) -> Floats:
        moved = [original_box(Box(*box), size, self._resize) for box in boxes.tolist()]
        return np.array(moved, np.float32).reshape(-1, 4)


def pairwise(box: Floats, others: Floats, *, in_pixels: bool) -> Floats:
    """Return the Jaccard overlaps of a box with others.

    In pixels, the last row and column of a box belong to it.
    """
    extra = np.float32(in_pixels)
    low, high = np.maximum(box[:2], others[:, :2]), np.minimum(box[2:], others[:, 2:])
    sides = (high - low + extra) * (high >= low).all(-1, keepdims=True)
    common = sides[:, 0] * sides[:, 1]
    if in_pixels:
        box, others = (
            np.concatenate((side[..., :2], side[..., 2:] + extra), -1) for side in (box, others)
        )
    union = areas(box) + areas(others) - common
    found: Floats = np.zeros_like(common)
    np.divide(common, union, out=found, where=(common > 0) & (union > 0))
    return found
