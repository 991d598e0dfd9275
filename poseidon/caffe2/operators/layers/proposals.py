"""Detection: boxes proposed from anchors, non-maximum suppression, proposals by pyramid level."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from poseidon.caffe2.operators.input_shapes import check_count, check_tensor
from poseidon.caffe2.operators.layers.regions import moved_boxes
from poseidon.caffe2.operators.registry import ANY, Context, operator


def overlaps(box: Tensor, others: Tensor, one: float) -> Tensor:
    """Return the intersection of a box with others over their union.

    Args:
        box: x1, y1, x2, y2.
        others: rows of the same.
        one: what is added to differences of corners: 1 where a box has x2 - x1 + 1 pixels.
    """
    wide = torch.minimum(box[2], others[:, 2]) - torch.maximum(box[0], others[:, 0]) + one
    wide = wide.clamp(min=0)
    high = torch.minimum(box[3], others[:, 3]) - torch.maximum(box[1], others[:, 1]) + one
    high = high.clamp(min=0)
    area = (others[:, 2] - others[:, 0] + one) * (others[:, 3] - others[:, 1] + one)
    own = (box[2] - box[0] + one) * (box[3] - box[1] + one)
    return wide * high / (own + area - wide * high)


def kept_boxes(boxes: Tensor, scores: Tensor, limit: float, one: float, most: int = -1) -> Tensor:
    """Return the places of the boxes that non-maximum suppression keeps, by falling score.

    Args:
        boxes: rows of x1, y1, x2, y2.
        scores: one for each box.
        limit: a box that overlaps a better one by more is dropped.
        one: see `overlaps`.
        most: how many are kept at most; -1 for all.
    """
    order = torch.sort(scores, descending=True, stable=True).indices
    kept: list[Tensor] = []
    while order.numel() and (most < 0 or len(kept) < most):
        kept.append(order[0])
        order = order[1:]
        order = order[overlaps(boxes[kept[-1]], boxes[order], one) <= limit]
    return torch.stack(kept) if kept else order.new_zeros(0)


@dataclass(frozen=True, slots=True)
class _Softening:
    """How soft suppression lowers scores (Bodla et al., 2017)."""

    method: str
    sigma: float
    overlap: float
    least: float

    def factor(self, overlap: Tensor) -> Tensor:
        """Return what scores of boxes are multiplied by, for their overlap with a better one."""
        if self.method == "gaussian":
            return torch.exp(-overlap.square() / self.sigma)
        lowered = 1 - overlap if self.method == "linear" else torch.zeros_like(overlap)
        return torch.where(overlap > self.overlap, lowered, 1)


def _softened(boxes: Tensor, scores: Tensor, soft: _Softening, one: float) -> tuple[Tensor, Tensor]:
    """Return the places of the boxes that soft suppression keeps, best first, and new scores."""
    scores, left = scores.clone(), torch.ones_like(scores, dtype=torch.bool)
    kept: list[int] = []
    while bool(left.any()):
        best = int(torch.where(left, scores, float("-inf")).argmax())
        left[best] = False
        kept.append(best)
        lowered = scores * soft.factor(overlaps(boxes[best], boxes, one))
        scores = torch.where(left, lowered, scores)
        left &= scores >= soft.least
    return torch.tensor(kept, dtype=torch.int64, device=boxes.device), scores[kept]


@operator("BoxWithNMSLimit", inputs=(2, 3), outputs=(3, 6), expected="R _, R _, N")
class BoxWithNMSLimit:
    """The best boxes of each class: above a score, after suppression, at most so many an image.

    Args of the operator:
        score_thresh, nms: the least score; the largest overlap of boxes of a class.
        detections_per_im: the largest number of boxes of an image; 0 for all. soft_nms_enabled,
        soft_nms_method (linear, gaussian, hard), soft_nms_sigma, soft_nms_min_score_thres: lower
        the
            scores of overlapping boxes in place of dropping them.
        cls_agnostic_bbox_reg: whether all classes share one box. input_boxes_include_bg_cls,
        output_classes_include_bg_cls: whether class 0 is the background there. Where the
            boxes have none, the scores have a column for each class of the boxes, then the
            background.
        legacy_plus_one: see `overlaps`.
    """

    def __init__(
        self,
        *,
        context: Context,
        score_thresh: float = 0.05,
        nms: float = 0.3,
        detections_per_im: int = 100,
        soft_nms_enabled: bool = False,
        soft_nms_method: str = "linear",
        soft_nms_sigma: float = 0.5,
        soft_nms_min_score_thres: float = 0.001,
        cls_agnostic_bbox_reg: bool = False,
        input_boxes_include_bg_cls: bool = True,
        output_classes_include_bg_cls: bool = True,
        legacy_plus_one: bool = True,
    ) -> None:
        if soft_nms_method not in ("linear", "gaussian", "hard"):
            raise ValueError(f"soft_nms_method={soft_nms_method!r}: use linear, gaussian or hard")
        self.least, self.overlap, self.most = score_thresh, nms, detections_per_im
        self.soft = _Softening(soft_nms_method, soft_nms_sigma, nms, soft_nms_min_score_thres)
        self.softened = soft_nms_enabled
        self.shared = cls_agnostic_bbox_reg
        self.background = int(input_boxes_include_bg_cls)
        self.shift = 0 if output_classes_include_bg_cls else 1
        self.one = float(legacy_plus_one)
        self.outputs = context.outputs

    def __call__(
        self, scores: Tensor, boxes: Tensor, splits: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return scores, boxes, classes, boxes by image, their places among the inputs
        of the image, and their number by image and class.

        Args:
            scores: (boxes, classes).
            boxes: (boxes, 4 x classes).
            splits: the number of boxes of each image; without it there is one.
        """
        sizes = [len(scores)] if splits is None else splits.long().tolist()
        found = [
            self._image(part, corners)
            for part, corners in zip(scores.split(sizes), boxes.split(sizes), strict=True)
        ]
        values, corners, classes, places = (torch.cat(parts) for parts in zip(*found, strict=True))
        counts = torch.tensor([len(part[0]) for part in found], dtype=scores.dtype)
        by_class = [torch.bincount(part[2].long(), minlength=scores.shape[1]) for part in found]
        return (
            values,
            corners,
            classes - self.shift,
            counts,
            places.to(torch.int32),
            torch.stack(by_class).to(torch.int32),
        )[: self.outputs]

    def _image(self, scores: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return scores, boxes, classes and places of one image."""
        parts = []
        for label in range(1, scores.shape[1]):
            column = 0 if self.shared else label - 1 + self.background
            own = boxes[:, 4 * column : 4 * column + 4]
            score = scores[:, label - 1 + self.background]
            chosen = torch.nonzero(score > self.least).reshape(-1)
            values = score[chosen]
            if self.softened:
                best, values = _softened(own[chosen], values, self.soft, self.one)
            else:
                best = kept_boxes(own[chosen], values, self.overlap, self.one)
                values = values[best]
            places = chosen[best]
            parts.append((values, own[places], torch.full_like(values, label), places))
        values, corners, classes, places = (torch.cat(part) for part in zip(*parts, strict=True))
        if 0 < self.most < len(values):
            rank = torch.sort(values, descending=True, stable=True).indices[: self.most]
            rank = rank.sort().values
            return values[rank], corners[rank], classes[rank], places[rank]
        return values, corners, classes, places


@operator("GenerateProposals", "GenerateProposalsCPP", expected="N A H W, N 4A H W, N 3, A 4")
def generate_proposals(
    scores: Tensor,
    deltas: Tensor,
    info: Tensor,
    anchors: Tensor,
    *,
    spatial_scale: float = 1 / 16,
    pre_nms_topN: int = 6000,
    post_nms_topN: int = 300,
    nms_thresh: float = 0.7,
    min_size: float = 16.0,
    legacy_plus_one: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return boxes (image, x1, y1, x2, y2) proposed by a network, and their scores.

    Args:
        scores: (images, anchors, height, width).
        deltas: (images, 4 x anchors, height, width): differences as in `BBoxTransform`.
        info: (images, 3): height, width and scale.
        anchors: (anchors, 4): boxes of the first place.
        spatial_scale: places by pixel.
        pre_nms_topN, post_nms_topN: how many boxes an image keeps before and after suppression.
        nms_thresh: the largest overlap of two boxes.
        min_size: the least width and height, in pixels of the original image.
        legacy_plus_one: see `overlaps`.
    """
    one, (height, width) = float(legacy_plus_one), scores.shape[2:]
    ys = torch.arange(height, device=scores.device).repeat_interleave(width) / spatial_scale
    xs = torch.arange(width, device=scores.device).repeat(height) / spatial_scale
    grid = (torch.stack([xs, ys, xs, ys], 1)[:, None] + anchors).reshape(-1, 4)
    rows, values = [], []
    for image in range(len(scores)):
        flat = scores[image].movedim(0, -1).reshape(-1)
        moves = deltas[image].reshape(-1, 4, height, width).permute(2, 3, 0, 1).reshape(-1, 4)
        count = pre_nms_topN if 0 < pre_nms_topN < len(flat) else len(flat)
        best = torch.sort(flat, descending=True, stable=True).indices[:count]
        high, wide, scale = info[image].tolist()
        boxes = moved_boxes(grid[best], moves[best], one)
        limit = boxes.new_tensor([wide, high, wide, high]) - one
        boxes = torch.minimum(boxes.clamp(min=0), limit)
        sides = boxes[:, 2:] - boxes[:, :2] + one
        centres = boxes[:, :2] + sides / 2
        large = (sides >= max(min_size * scale, 1.0)).all(1)
        inside = (centres[:, 0] < wide) & (centres[:, 1] < high)
        boxes, chosen = boxes[large & inside], flat[best][large & inside]
        most = post_nms_topN if post_nms_topN > 0 else -1
        kept = kept_boxes(boxes, chosen, nms_thresh, one, most)
        rows.append(torch.cat([boxes.new_full((len(kept), 1), image), boxes[kept]], 1))
        values.append(chosen[kept])
    return torch.cat(rows), torch.cat(values)


@operator("CollectAndDistributeFpnRpnProposals", inputs=(2, ANY), outputs=(3, ANY))
def collect_and_distribute(
    *parts: Tensor,
    roi_canonical_scale: int = 224,
    roi_canonical_level: int = 4,
    roi_max_level: int = 5,
    roi_min_level: int = 2,
    rpn_max_level: int = 6,
    rpn_min_level: int = 2,
    rpn_post_nms_topN: int = 2000,
    legacy_plus_one: bool = True,
) -> tuple[Tensor, ...]:
    """Return the best boxes of all levels, each level's boxes by size, and the way back.

    The last output has for each of the best boxes its place among the boxes of all levels, int32.

    Args:
        parts: boxes (image, x1, y1, x2, y2) of each level, then their scores.
        roi_canonical_scale, roi_canonical_level: a box of this side belongs to this level, one of
            twice the side to the next.
        roi_max_level, roi_min_level: the levels of the outputs.
        rpn_max_level, rpn_min_level: the levels of the inputs.
        rpn_post_nms_topN: how many boxes are the best.
        legacy_plus_one: see `overlaps`.
    """
    count, one = rpn_max_level - rpn_min_level + 1, float(legacy_plus_one)
    if len(parts) != 2 * count:
        raise ValueError(f"{len(parts)} inputs, expected {2 * count}: boxes and scores by level")
    for box in parts[:count]:
        check_tensor("an input of boxes", box, (len(box) if box.dim() else 0, 5))
    for box, score in zip(parts[:count], parts[count:], strict=True):
        check_count("an input of scores", score, len(box))
    scores = torch.cat([part.reshape(-1) for part in parts[count:]])
    best = torch.sort(scores, descending=True, stable=True).indices[:rpn_post_nms_topN]
    boxes = torch.cat(list(parts[:count]))[best]
    sides = boxes[:, 3:] - boxes[:, 1:3] + one
    level = torch.log2((sides[:, 0] * sides[:, 1]).clamp(min=0).sqrt() / roi_canonical_scale + 1e-6)
    level = (level + roi_canonical_level).floor().clamp(roi_min_level, roi_max_level)
    places = [
        torch.nonzero(level == number).reshape(-1)
        for number in range(roi_min_level, roi_max_level + 1)
    ]
    restore = torch.cat(places).argsort().to(torch.int32)
    return (boxes, *[boxes[place] for place in places], restore)
