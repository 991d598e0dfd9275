"""Layers of region proposal networks (Faster R-CNN, Ren et al., 2015), there in Python.

Law: none of the tops has a gradient. Regions are R x 5: index of the image, x1, y1, x2, y2 in
pixels of the image that the net reads. `im_info` has height, width and scale of that image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from poseidon.caffe.layers import detection as boxes_of
from poseidon.caffe.layers.base import (
    Layer,
    LayerError,
    Shape,
    check_positive,
    check_rows,
    check_shape,
    times,
)
from poseidon.caffe.layers.rearrange import INTEGERS, outside
from poseidon.caffe.layers.registry import register
from poseidon.caffe.proto.caffe_pb2 import AnchorTargetParameter, ProposalParameter
from poseidon.errors import DataError

REGION = 5
# The order of py-faster-rcnn's means and deviations: dx, dy, log dw, log dh.
MEANS, DEVIATIONS = (0.0, 0.0, 0.0, 0.0), (0.1, 0.1, 0.2, 0.2)


def base_of(param: ProposalParameter | AnchorTargetParameter) -> Tensor:
    """Return the anchors of a cell.

    Raises:
        LayerError: a size, ratio or scale is not positive.
    """
    check_positive(param, "feat_stride", "base_size")
    ratios = list(param.ratio) or list(boxes_of.RATIOS)
    scales = list(param.scale) or list(boxes_of.SCALES)
    if not all(0 < value < math.inf for value in (*ratios, *scales)):
        raise LayerError(f"ratio is {ratios} and scale is {scales}, expected positive numbers")
    return boxes_of.base_anchors(param.base_size, ratios, scales)


def check_info(shape: Shape, images: int) -> None:
    """Raise LayerError unless bottom 2 has height, width and scale of one image or of each."""
    if len(shape) < 2 or shape[0] not in (1, images) or math.prod(shape[1:]) < 3:
        raise LayerError(
            f"bottom 2 has shape {times(shape)}, expected height, width and scale for each image"
        )


@register("Proposal")
class Proposal(Layer):
    """The boxes of the highest scores after suppression of overlapping ones.

    Each anchor is moved by its coordinates and clipped to the image. Boxes with a side below
    min_size scale are dropped. Of the pre_nms_topn best, those stay that no better one overlaps by
    more than nms_thresh, at most post_nms_topn for each image.

    Bottoms: scores N x 2A x H x W, A background ones first; coordinates N x 4A x H x W; im_info N x
    3 (1 x 3: one size for all). Tops: regions R x 5; optionally their scores, R. R changes from
    batch to batch.

    Fields (proposal_param): feat_stride, the pixels of a cell; base_size, ratio and scale of the
    anchors (0.5, 1, 2 and 8, 16, 32 by default); min_size; pre_nms_topn and post_nms_topn (0: all);
    nms_thresh. Also the type of a Python layer with the module rpn.proposal_layer, whose numbers in
    TRAIN are 12000 and 2000.
    """

    BOTTOMS = (3, 3)
    TOPS = (1, 2)
    TOPS_MAY_CHANGE_SHAPE = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, (scores, deltas, info) = self.param.proposal_param, bottoms
        self.base = base_of(param).to(self.context.device)
        count = len(self.base)
        for place, shape, channels in ((0, scores, 2 * count), (1, deltas, 4 * count)):
            wanted = (scores[0], channels, *scores[2:]) if len(scores) == 4 else "NCHW"
            each = f"{channels // count} values for each of {count} anchors in each cell"
            check_shape(f"bottom {place}", shape, "x".join(map(str, wanted)), each)
        check_info(info, scores[0])
        if not 0 <= param.nms_thresh <= 1:
            raise LayerError(f"nms_thresh is {param.nms_thresh:g}, expected 0 to 1")
        cells = scores[0] * count * scores[2] * scores[3]
        self.before, self.after = param.pre_nms_topn or cells, param.post_nms_topn or cells
        self.threshold, self.smallest = param.nms_thresh, param.min_size
        self.stride = param.feat_stride
        most = min(scores[0] * self.after, cells)
        return [(most, REGION), (most,)][: len(self.param.top)]

    @torch.no_grad()
    def forward(self, scores: Tensor, deltas: Tensor, info: Tensor) -> Tensor | tuple[Tensor, ...]:
        places = boxes_of.anchors_of_map(self.base, scores.shape[2], scores.shape[3], self.stride)
        found = [
            self._of_image(
                places,
                scores[image],
                deltas[image],
                info.reshape(info.shape[0], -1)[image % info.shape[0]],
            )
            for image in range(scores.shape[0])
        ]
        regions = torch.cat(
            [
                torch.cat((boxes.new_full((len(boxes), 1), image), boxes), 1)
                for image, (boxes, _) in enumerate(found)
            ]
        ).to(scores.dtype)
        if len(self.param.top) == 1:
            return regions
        return regions, torch.cat([kept for _, kept in found])

    def _of_image(
        self, places: Tensor, scores: Tensor, deltas: Tensor, info: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the boxes of an image and their scores."""
        high, wide, scale = info[:3].tolist()
        foreground = scores[len(self.base) :].permute(1, 2, 0).reshape(-1)
        moved = boxes_of.decode(places, deltas.permute(1, 2, 0).reshape(-1, 4).float())
        moved = boxes_of.clip(moved, high, wide)
        sides = moved[:, 2:] - moved[:, :2] + 1
        large = (sides >= self.smallest * scale).all(1).nonzero().flatten()
        order = large[foreground[large].argsort(descending=True, stable=True)][: self.before]
        kept = order[boxes_of.suppress(moved[order], self.threshold, self.after)]
        return moved[kept], foreground[kept]


@register("AnchorTarget")
class AnchorTarget(Layer):
    """The labels and targets of anchors, for the training of a region proposal network.

    Anchors inside the image are 1 with an overlap of positive_overlap or more with an object, and
    if no other anchor overlaps an object more; 0 with less than negative_overlap; else -1, as are
    all others. Of those, batch_size are drawn at random, at most fg_fraction of them 1; the rest
    becomes -1.

    Bottoms: a map 1 x C x H x W, of which only the extents are used; objects G x 5: x1, y1, x2, y2,
    class; im_info 1 x 3; optionally the image, which is not used. Tops: labels 1 x 1 x A H x W;
    coordinates, inside weights and outside weights, 1 x 4A x H x W each. Inside weights are 1 for
    label 1; outside weights are 1 through the number of labels 0 and 1 (with positive_weight p: p
    through the number of labels 1, 1 - p through the number of labels 0).

    Fields (anchor_target_param): feat_stride, base_size, ratio, scale as for `Proposal`;
    allowed_border, the pixels by which an anchor may exceed the image; batch_size; fg_fraction;
    positive_overlap; negative_overlap; clobber_positives (0 takes precedence over 1);
    positive_weight. Also the type of a Python layer with the module rpn.anchor_target_layer.
    """

    BOTTOMS = (3, 4)
    TOPS = (4, 4)
    IS_RANDOM = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        self.options = param = self.param.anchor_target_param
        shape = bottoms[0]
        check_shape("bottom 0", shape, "1xCxHxW", "the map of one image")
        check_rows("bottom 1", bottoms[1], REGION, "object: x1, y1, x2, y2 and class")
        check_info(bottoms[2], 1)
        self.base = base_of(param).to(self.context.device)
        if param.batch_size < 1 or not 0 <= param.fg_fraction <= 1:
            raise LayerError(
                f"batch_size is {param.batch_size} and fg_fraction is {param.fg_fraction:g}, "
                "expected at least 1, and 0 to 1"
            )
        if param.positive_weight >= 1 or param.positive_weight == 0:
            raise LayerError(
                f"positive_weight is {param.positive_weight:g}, expected a number between 0 and "
                "1, or one below 0 for equal weights"
            )
        count = len(self.base)
        wide = (1, 4 * count, *shape[2:])
        return [(1, 1, count * shape[2], shape[3]), wide, wide, wide]

    @torch.no_grad()
    def forward(
        self, feature: Tensor, objects: Tensor, info: Tensor, _: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        high, wide = feature.shape[2:]
        count = len(self.base)
        places = boxes_of.anchors_of_map(self.base, high, wide, self.options.feat_stride)
        inside = self._inside(places, info.flatten()[:3].tolist())
        truth = objects.reshape(-1, REGION)[:, :4].float()
        if not len(truth):
            raise DataError("the image has no objects")
        label = places.new_full((len(places),), -1.0)
        targets = torch.zeros_like(places)
        if len(inside):
            shared = boxes_of.overlaps(places[inside], truth)
            label[inside] = self._sampled(self._labels(shared))
            targets[inside] = boxes_of.encode(places[inside], truth[shared.argmax(1)])
        inner = (label == 1).to(places.dtype).unsqueeze(1).expand(-1, 4)
        outer = self._outer(label).unsqueeze(1).expand(-1, 4)
        maps = [
            value.reshape(1, high, wide, 4 * count)
            .permute(0, 3, 1, 2)
            .contiguous()
            .to(feature.dtype)
            for value in (targets, inner, outer)
        ]
        labels = (
            label.view(1, high, wide, count).permute(0, 3, 1, 2).reshape(1, 1, count * high, wide)
        )
        return (labels.to(feature.dtype), *maps)

    def _inside(self, places: Tensor, info: list[float]) -> Tensor:
        border = self.options.allowed_border
        low = (places[:, :2] >= -border).all(1)
        return (
            (low & (places[:, 2] < info[1] + border) & (places[:, 3] < info[0] + border))
            .nonzero()
            .flatten()
        )

    def _labels(self, shared: Tensor) -> Tensor:
        """Return the labels of anchors from their overlaps with the objects."""
        options, most = self.options, shared.amax(1)
        label = torch.full_like(most, -1.0)
        negative = most < options.negative_overlap
        if not options.clobber_positives:
            label[negative] = 0
        label[((shared == shared.amax(0)) & (shared > 0)).any(1)] = 1
        label[most >= options.positive_overlap] = 1
        if options.clobber_positives:
            label[negative] = 0
        return label

    def _sampled(self, label: Tensor) -> Tensor:
        options = self.options
        most = int(options.fg_fraction * options.batch_size)
        self._drop(label, 1, most)
        self._drop(label, 0, options.batch_size - int((label == 1).sum()))
        return label

    def _drop(self, label: Tensor, value: int, most: int) -> None:
        """Ignore all but `most` anchors of a label, drawn at random."""
        found = (label == value).nonzero().flatten()
        if len(found) > most:
            label[found[shuffled(len(found), self.generator, found.device)[most:]]] = -1

    def _outer(self, label: Tensor) -> Tensor:
        positive, negative = (label == 1).float(), (label == 0).float()
        weight = self.options.positive_weight
        if weight < 0:
            return (positive + negative) / (positive + negative).sum().clamp(min=1)
        return weight * positive / positive.sum().clamp(min=1) + (
            1 - weight
        ) * negative / negative.sum().clamp(min=1)


def shuffled(count: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Return a random permutation of 0 .. count - 1."""
    return torch.randperm(
        count, generator=generator, device=generator.device if generator else device
    ).to(device)


@register("ProposalTarget")
class ProposalTarget(Layer):
    """Regions drawn from proposals and objects, with their labels and wanted coordinates, for
    the training of a detector.

    A region is foreground, with the class of the object that it overlaps most, from fg_thresh on;
    it is background, 0, from bg_thresh_lo to below bg_thresh_hi. Of batch_size regions at most
    fg_fraction are foreground, the first ones.

    Bottoms: proposals R x 5 of one image; objects G x 5: x1, y1, x2, y2, class. Tops: regions B x
    5; labels B; coordinates, inside weights (1 for the class of a foreground region) and outside
    weights, B x 4 num_classes each. B changes from batch to batch. With agnostic all tops have 4
    axes, B x C x 1 x 1, as in py-R-FCN.

    Fields (proposal_target_param): num_classes, with the background (2 with agnostic); batch_size
    (-1: all, in their order, for hard example mining); fg_fraction; fg_thresh; bg_thresh_hi;
    bg_thresh_lo; agnostic (one set of coordinates for all classes); bbox_mean and bbox_std, four
    each, which normalize the coordinates (0, 0, 0, 0 and 0.1, 0.1, 0.2, 0.2 by default). Also the
    type of a Python layer with the module rpn.proposal_target_layer.
    """

    BOTTOMS = (2, 2)
    TOPS = (5, 5)
    IS_RANDOM = True
    TOPS_MAY_CHANGE_SHAPE = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        self.options = param = self.param.proposal_target_param
        for place, shape in enumerate(bottoms):
            check_rows(f"bottom {place}", shape, REGION, "region")
        self.classes = 2 if param.agnostic else param.num_classes
        self.trail = (1, 1) if param.agnostic else ()
        if self.classes < 2:
            raise LayerError(
                f"num_classes is {param.num_classes}, expected at least 2, with the background"
            )
        if param.batch_size == 0 or param.batch_size < -1 or not 0 <= param.fg_fraction <= 1:
            raise LayerError(
                f"batch_size is {param.batch_size} and fg_fraction is {param.fg_fraction:g}, "
                "expected -1 or at least 1, and 0 to 1"
            )
        norms = (list(param.bbox_mean) or list(MEANS), list(param.bbox_std) or list(DEVIATIONS))
        if any(len(values) != 4 for values in norms) or min(norms[1]) <= 0:
            raise LayerError(
                "bbox_mean and bbox_std must occur four times each, with positive deviations"
            )
        self.mean, self.deviation = (torch.tensor(v, device=self.context.device) for v in norms)
        count = param.batch_size if param.batch_size > 0 else bottoms[0][0] + bottoms[1][0]
        return [
            (count, REGION, *self.trail),
            (count, *((1,) if self.trail else ()), *self.trail),
            *[(count, 4 * self.classes, *self.trail)] * 3,
        ]

    @torch.no_grad()
    def forward(self, proposals: Tensor, objects: Tensor) -> tuple[Tensor, ...]:
        truth = objects.reshape(-1, REGION)
        if not len(truth):
            raise DataError("the image has no objects")
        first = proposals.reshape(-1, REGION)
        if len(first) and bool((first[:, 0] != 0).any()):
            raise DataError(
                "a proposal belongs to a different image than the first; expected one image"
            )
        candidates = torch.cat(
            (first, torch.cat((truth.new_zeros((len(truth), 1)), truth[:, :4]), 1))
        )
        shared = boxes_of.overlaps(candidates[:, 1:].float(), truth[:, :4].float())
        most, assigned = shared.max(1)
        label = truth[assigned, 4].clone()
        kept, foreground = self._chosen(most)
        label = torch.where(foreground, label[kept], torch.zeros_like(label[kept]))
        regions = candidates[kept]
        wanted = boxes_of.encode(regions[:, 1:].float(), truth[assigned[kept], :4].float())
        spread = self._spread(label, (wanted - self.mean) / self.deviation, regions)
        if not self.trail:
            return (regions, label, *spread)
        return tuple(top.reshape(len(label), -1, *self.trail) for top in (regions, label, *spread))

    def _chosen(self, most: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of the chosen regions, and whether each is foreground."""
        options = self.options
        above = most >= options.fg_thresh
        between = (most < options.bg_thresh_hi) & (most >= options.bg_thresh_lo)
        if options.batch_size < 0:
            kept = (above | between).nonzero().flatten()
            return kept, above[kept]
        front = self._draw(
            above.nonzero().flatten(), round(options.fg_fraction * options.batch_size)
        )
        back = self._draw((between & ~above).nonzero().flatten(), options.batch_size - len(front))
        kept = torch.cat((front, back))
        return kept, torch.arange(len(kept), device=kept.device) < len(front)

    def _draw(self, found: Tensor, most: int) -> Tensor:
        return found[shuffled(len(found), self.generator, found.device)[: max(most, 0)]]

    def _spread(
        self, label: Tensor, wanted: Tensor, regions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the coordinates at the places of each region's class, and both weights."""
        agnostic = self.options.agnostic
        if wrong := outside(label, range(INTEGERS.stop if agnostic else self.classes)):
            expected = "0 or more" if agnostic else f"0 to {self.classes - 1} (num_classes - 1)"
            raise DataError(f"an object has class {wrong}, expected {expected}")
        place = label.long().clamp(max=self.classes - 1)
        targets = regions.new_zeros((len(label), self.classes, 4))
        inside = torch.zeros_like(targets)
        rows = torch.arange(len(label), device=label.device)
        front = (place > 0).unsqueeze(1)
        targets[rows, place] = torch.where(front, wanted.to(targets), targets[rows, place])
        inside[rows, place] = front.to(targets).expand(-1, 4)
        flat = inside.flatten(1)
        return targets.flatten(1), flat, flat.clone()
