"""Writes Faster R-CNN with VGG-16, trained end to end: `python -m prototxt.faster_rcnn.generate`.

The reference's Python layers are layer types: ROIData, AnchorTarget, Proposal and ProposalTarget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from poseidon.caffe.proto.caffe_pb2 import NetParameter
from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from prototxt import backbones
from prototxt.backbones import Anchors, proposals, regions_input, regions_source, targets, vgg
from prototxt.parts import MSRA, TWICE, dropout, gaussian, named, put, relu, write

MEAN = (102.9801, 115.9465, 122.7717)
NAME = "VGG_ILSVRC_16_layers"
ANCHORS = Anchors()


@dataclass(frozen=True, kw_only=True)
class Size:
    """The extents of a net.

    Attributes:
        classes: with the background.
        widths: channels of each stage.
        counts: convolutions of each stage.
        frozen: stages that do not learn.
        hidden: outputs of fc6 and fc7.
        dropout: of fc6 and fc7; 0: none.
        pooled: side of a pooled region.
        anchors: of the proposals.
        rpn: channels of the proposals' convolution.
        image: height and width of the input of the net for use.
        regions: of an image in training.
        source: the window file.
        scale: the shorter side of its images.
    """

    classes: int = 21
    widths: tuple[int, ...] = (64, 128, 256, 512, 512)
    counts: tuple[int, ...] = (2, 2, 3, 3, 3)
    frozen: int = 2
    hidden: int = 4096
    dropout: float = 0.5
    pooled: int = 7
    anchors: Anchors = ANCHORS
    rpn: int = 512
    image: tuple[int, int] = (600, 800)
    regions: int = 128
    source: str = "data/voc2007_trainval_windows.txt"
    scale: int = 600


def heads(n: NetSpec, feature: Any, rois: Any, size: Size) -> tuple[Any, Any]:
    """Add the pooled regions and their layers; return scores and coordinates."""
    n.pool5 = L.ROIPooling(
        feature,
        rois,
        pooled_h=size.pooled,
        pooled_w=size.pooled,
        spatial_scale=1 / size.anchors.stride,
        name="roi_pool5",
    )
    top = n.pool5
    for number in (6, 7):
        full = L.InnerProduct(top, num_output=size.hidden, param=TWICE, weight_filler=MSRA)
        top = relu(n, put(n, f"fc{number}", full), f"relu{number}")
        if size.dropout:
            top = dropout(n, top, f"drop{number}", size.dropout)
    for name, outputs, std in (
        ("cls_score", size.classes, 0.01),
        ("bbox_pred", 4 * size.classes, 0.001),
    ):
        n[name] = L.InnerProduct(top, num_output=outputs, param=TWICE, weight_filler=gaussian(std))
    return n.cls_score, n.bbox_pred


def train(size: Size = Size()) -> NetParameter:
    """Return the net for training."""
    n = NetSpec()
    regions_source(n, size.source, MEAN, scale=size.scale)
    feature = vgg(n, n.data, size.widths, size.counts, frozen=size.frozen)
    found = proposals(n, feature, size.anchors, size.rpn, train=True)
    targets(n, found, size.classes, size.regions)
    score, boxes = heads(n, feature, n.rois, size)
    n.loss_cls = L.SoftmaxWithLoss(score, n.labels, propagate_down=[True, False], loss_weight=1)
    n.loss_bbox = L.SmoothL1Loss(
        boxes, n.bbox_targets, n.bbox_inside_weights, n.bbox_outside_weights, loss_weight=1
    )
    return named(NAME, n)


def deploy(size: Size = Size()) -> NetParameter:
    """Return the net for use: rois, cls_prob and bbox_pred (normalized: see the README)."""
    n = NetSpec()
    regions_input(n, size.image)
    feature = vgg(n, n.data, size.widths, size.counts)
    found = proposals(n, feature, size.anchors, size.rpn, train=False)
    score, _ = heads(n, feature, found, size)
    n.cls_prob = L.Softmax(score)
    return named(NAME, n)


def definitions() -> dict[str, str]:
    """Return the text of each file, by its name."""
    return backbones.definitions(
        "faster_rcnn",
        about="Faster R-CNN with VGG-16 on PASCAL VOC 2007: region proposals and their classes in "
        "one net.",
        paper='Ren, He, Girshick, Sun, "Faster R-CNN: towards real-time object detection with '
        'region proposal networks" (2015).',
        expect="0.699 mAP on VOC 2007 test, as the paper.",
        train=train(),
        deploy=deploy(),
        solver={
            "net": "train.prototxt",
            "base_lr": 0.001,
            "lr_policy": "step",
            "gamma": 0.1,
            "stepsize": 50000,
            "max_iter": 70000,
            "display": 20,
            "average_loss": 100,
            "momentum": 0.9,
            "weight_decay": 0.0005,
            "snapshot": 10000,
            "snapshot_prefix": "vgg16_faster_rcnn",
            "iter_size": 2,
        },
    )


if __name__ == "__main__":
    write("faster_rcnn", definitions())
