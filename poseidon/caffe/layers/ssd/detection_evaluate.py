"""DetectionEvaluate: which detections of SSD's nets are right."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from poseidon.caffe.data.augment.boxes import Box
from poseidon.caffe.data.augment.resize import Resize
from poseidon.caffe.layers.base import Layer, LayerError, Shape, times
from poseidon.caffe.layers.registry import register
from poseidon.caffe.layers.ssd.codes import Floats, areas
from poseidon.caffe.layers.ssd.saved_results import ImageSize, original_box, read_sizes
from poseidon.errors import DataError

LOGGER = logging.getLogger(__name__)
ROW = 5
DETECTION, OBJECT = 7, 8
NONE = -1
MOST_CLASSES = 1_000_000


@register("DetectionEvaluate")
class DetectionEvaluate(Layer):
    """A row for each class with the number of its objects, and a row for each detection: true or
    false.

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
        for index, (shape, extent) in enumerate(zip(bottoms, (DETECTION, OBJECT), strict=True)):
            if len(shape) != 4 or shape[:2] != (1, 1) or shape[3] != extent:
                raise LayerError(
                    f"bottom {index} has shape {times(shape)}, expected 1x1x{'DG'[index]}x{extent}"
                )
        self.settings = param
        self.labels = [
            label for label in range(param.num_classes) if label != param.background_label_id
        ]
        if self._sizes is None:
            self._sizes = self._read_sizes()
            self._images = 0
            self._resize = Resize(param.resize_param) if param.HasField("resize_param") else None
        return [(1, 1, len(self.labels) + bottoms[0][2], ROW)]

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
        top = np.array(rows, np.float32).reshape(-1, ROW)
        return torch.from_numpy(top).to(detections).view(1, 1, -1, ROW)

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
