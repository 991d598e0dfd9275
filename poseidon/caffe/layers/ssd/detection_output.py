"""DetectionOutput: the detections of SSD's nets.

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

from poseidon.caffe.layers.base import Layer, LayerError, Shape
from poseidon.caffe.layers.registry import register
from poseidon.caffe.layers.ssd.codes import SIDES, BoxCode, Floats, split_priors, suppressed
from poseidon.caffe.layers.ssd.multibox_loss import check_bottoms
from poseidon.caffe.layers.ssd.saved_results import SavedResults, asks_for_results, open_results
from poseidon.caffe.proto.caffe_pb2 import DetectionOutputParameter

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
    the top_k best are suppressed among each other; see `poseidon.caffe.layers.ssd.codes.suppressed`. Of
    each image the keep_top_k best of all classes are left. Equal scores are taken in the order of
    the prior boxes.

    Bottoms: locations N x 4LP; scores N x CP; prior boxes 1 x 2 x 4P. Top: 1 x 1 x detections x 7:
    image, label, score, xmin, ymin, xmax, ymax, in the order of images, labels and falling scores.
    Without any detection there is a row for each image, with -1 after its number. No gradient.

    Fields (detection_output_param): num_classes, share_location, background_label_id (-1: none),
    nms_param, code_type, variance_encoded_in_target, keep_top_k (-1: all), confidence_threshold;
    save_output_param, see `poseidon.caffe.layers.ssd.saved_results`. visualize, visualize_threshold and
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
