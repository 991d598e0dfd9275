"""Writes R-FCN with ResNet-50, trained end to end with hard example mining: `python -m
prototxt.rfcn.generate`.

The reference's Python layers are layer types: ROIData, AnchorTarget, Proposal and ProposalTarget.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from poseidon.caffe.proto.caffe_pb2 import NetParameter
from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from poseidon.pycaffe import params as P
from prototxt import backbones
from prototxt.backbones import (
    Anchors,
    batch_norm,
    proposals,
    regions_input,
    regions_source,
    residual_stage,
    small,
    targets,
    unit,
)
from prototxt.parts import max_pool, mean_pool, named, relu, write

MEAN = (102.9801, 115.9465, 122.7717)
NAME = "R-FCN-ResNet-50"
ANCHORS = Anchors(kept=(300, 300))


@dataclass(frozen=True, kw_only=True)
class Size:
    """The extents of a net.

    Attributes:
        classes: with the background.
        stem: channels of the first convolution.
        widths: of the 3x3 convolutions of stages 2 to 5.
        blocks: of these stages.
        strides: of stages 2 to 4; with 4 for the first layers their product is the anchors' stride.
        top: channels of the last convolution.
        rpn: channels of the proposals' convolution.
        parts: K of the K x K parts of a region.
        fixed: normalize with the statistics of the given weights.
        anchors: of the proposals.
        hardest: regions of an image that are learned from.
        image: height and width of the input of the net for use.
        source: the window file.
        scale: the shorter side of its images.
    """

    classes: int = 21
    stem: int = 64
    widths: tuple[int, ...] = (64, 128, 256, 512)
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    strides: tuple[int, ...] = (1, 2, 2)
    top: int = 1024
    rpn: int = 512
    parts: int = 7
    fixed: bool = True
    anchors: Anchors = ANCHORS
    hardest: int = 128
    image: tuple[int, int] = (600, 800)
    source: str = "data/voc0712_trainval_windows.txt"
    scale: int = 600


def body(n: NetSpec, size: Size) -> tuple[Any, Any]:
    """Add the residual net; return the tops of stage 4 and of the last convolution."""
    norm = partial(batch_norm, fixed=size.fixed)
    top = relu(n, unit(n, n.data, "conv1", size.stem, 7, norm, stride=2), "conv1_relu")
    top = max_pool(n, top, "pool1")
    for index, stride in enumerate(size.strides):
        top = residual_stage(
            n, top, index + 2, size.widths[index], size.blocks[index], stride=stride, norm=norm
        )
    shared = top
    top = residual_stage(n, top, 5, size.widths[3], size.blocks[3], stride=1, dilation=2, norm=norm)
    n.conv_new_1 = L.Convolution(top, **small(1, size.top))
    return shared, relu(n, n.conv_new_1, "conv_new_1_relu")


def heads(n: NetSpec, top: Any, rois: Any, size: Size) -> tuple[Any, Any]:
    """Add the position-sensitive maps and their means; return scores and coordinates, R x C x 1
    x 1 each.
    """
    n.rfcn_cls = L.Convolution(top, **small(1, size.classes * size.parts**2))
    n.rfcn_bbox = L.Convolution(top, **small(1, 8 * size.parts**2))
    tops = []
    for pooled, mean, maps, depth in (
        ("psroipooled_cls_rois", "cls_score", n.rfcn_cls, size.classes),
        ("psroipooled_loc_rois", "bbox_pred", n.rfcn_bbox, 8),
    ):
        n[pooled] = L.PSROIPooling(
            maps,
            rois,
            spatial_scale=1 / size.anchors.stride,
            output_dim=depth,
            group_size=size.parts,
        )
        tops.append(mean_pool(n, n[pooled], mean, kernel_size=size.parts, stride=size.parts))
    return tops[0], tops[1]


def train(size: Size = Size()) -> NetParameter:
    """Return the net for training."""
    n = NetSpec()
    regions_source(n, size.source, MEAN, scale=size.scale)
    shared, top = body(n, size)
    found = proposals(n, shared, size.anchors, size.rpn, train=True)
    targets(n, found, size.classes, -1, agnostic=True)
    n["silence"] = L.Silence(n.bbox_outside_weights, ntop=0)
    score, boxes = heads(n, top, n.rois, size)
    n.temp_loss_cls, n.temp_prob_cls, n.per_roi_loss_cls = L.SoftmaxWithLossOHEM(
        score,
        n.labels,
        ntop=3,
        name="per_roi_loss_cls",
        loss_weight=[0, 0, 0],
        propagate_down=[False, False],
    )
    n.temp_loss_bbox, n.per_roi_loss_bbox = L.SmoothL1LossOHEM(
        boxes,
        n.bbox_targets,
        n.bbox_inside_weights,
        ntop=2,
        name="per_roi_loss_bbox",
        loss_weight=[0, 0],
        propagate_down=[False, False, False],
    )
    n.per_roi_loss = L.Eltwise(
        n.per_roi_loss_cls, n.per_roi_loss_bbox, propagate_down=[False, False]
    )
    n.labels_ohem, n.bbox_loss_weights_ohem = L.BoxAnnotatorOHEM(
        n.rois,
        n.per_roi_loss,
        n.labels,
        n.bbox_inside_weights,
        ntop=2,
        name="annotator_detector",
        propagate_down=[False] * 4,
        roi_per_img=size.hardest,
        ignore_label=-1,
    )
    n["silence2"] = L.Silence(n.temp_loss_cls, n.temp_prob_cls, n.temp_loss_bbox, ntop=0)
    n.loss_cls = L.SoftmaxWithLoss(
        score,
        n.labels_ohem,
        loss_weight=1,
        loss_param={"ignore_label": -1},
        propagate_down=[True, False],
    )
    n.loss_bbox = L.SmoothL1LossOHEM(
        boxes,
        n.bbox_targets,
        n.bbox_loss_weights_ohem,
        loss_weight=1,
        loss_param={
            "normalization": P.Loss.PRE_FIXED,
            "pre_fixed_normalizer": size.hardest,
        },
        propagate_down=[True, False, False],
    )
    return named(NAME, n)


def deploy(size: Size = Size()) -> NetParameter:
    """Return the net for use: rois, cls_prob and bbox_pred (normalized: see the README)."""
    n = NetSpec()
    regions_input(n, size.image)
    shared, top = body(n, size)
    found = proposals(n, shared, size.anchors, size.rpn, train=False)
    score, _ = heads(n, top, found, size)
    n.cls_prob = L.Softmax(score)
    return named(NAME, n)


def definitions() -> dict[str, str]:
    """Return the text of each file, by its name."""
    return backbones.definitions(
        "rfcn",
        about="R-FCN with ResNet-50 on PASCAL VOC 2007 and 2012: position-sensitive maps, hard "
        "example mining.",
        paper='Dai, Li, He, Sun, "R-FCN: object detection via region-based fully convolutional '
        'networks" (2016).',
        expect="0.774 mAP on VOC 2007 test, as the authors' ResNet-50.",
        train=train(),
        deploy=deploy(),
        solver={
            "net": "train.prototxt",
            "base_lr": 0.001,
            "lr_policy": "step",
            "gamma": 0.1,
            "stepsize": 80000,
            "max_iter": 110000,
            "display": 20,
            "average_loss": 100,
            "momentum": 0.9,
            "weight_decay": 0.0005,
            "snapshot": 10000,
            "snapshot_prefix": "resnet50_rfcn_ohem",
            "iter_size": 2,
        },
    )


if __name__ == "__main__":
    write("rfcn", definitions())
