"""What the nets for detection and segmentation of this folder share: VGG, residual stages, and
region proposals.

Layers are named as in the models that the papers' authors released.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from poseidon.caffe.proto.caffe_pb2 import NetParameter
from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from prototxt.parts import (
    TWICE,
    convolution,
    fields,
    for_both_phases,
    gaussian,
    header,
    max_pool,
    named,
    put,
    relu,
)

FROZEN = [{"lr_mult": 0, "decay_mult": 0}]
Norm = Callable[[NetSpec, Any, str], Any]


@dataclass(frozen=True, kw_only=True)
class Anchors:
    """The anchors of a region proposal network.

    Attributes:
        stride: pixels of a cell.
        scales: of the base of 16 pixels.
        ratios: height through width.
        smallest: shortest side of a proposal in pixels of the original image.
        kept: proposals of an image in TRAIN and in TEST.
    """

    stride: int = 16
    scales: tuple[float, ...] = (8, 16, 32)
    ratios: tuple[float, ...] = (0.5, 1, 2)
    smallest: int = 16
    kept: tuple[int, int] = (2000, 300)

    @property
    def count(self) -> int:
        """Anchors of a cell."""
        return len(self.scales) * len(self.ratios)

    def fields(self) -> dict[str, Any]:
        """Fields that the layers have in common."""
        return {"feat_stride": self.stride, "scale": list(self.scales), "ratio": list(self.ratios)}


def segmented(
    name: str,
    sources: tuple[str, str],
    batch: int,
    score: Callable[[NetSpec], Any],
    *,
    loss: Mapping[str, Any],
    ignored: int | None,
    transform: Mapping[str, Any] = {},
) -> NetParameter:
    """Return a net for training and tests that scores each pixel.

    Args:
        name: of the net.
        sources: the lists of images for training and for tests.
        batch: images of a worker in training.
        score: adds the layers from `data` to the scores.
        loss: fields of the loss, besides `ignored`.
        ignored: the label of pixels that are left out; None: none.
        transform: fields of the transformation.
    """
    specs = []
    for phase, source in zip(("TRAIN", "TEST"), sources, strict=True):
        train = phase == "TRAIN"
        how = {"transform_param": {**transform, "mirror": train}} if transform else {}
        n = NetSpec()
        n.data, n.label = L.DenseImageData(
            ntop=2,
            include={"phase": phase},
            dense_image_data_param={
                "source": source,
                "batch_size": batch if train else 1,
                "shuffle": train,
                "shared_file_system": True,
            },
            **how,
        )
        specs.append(n)
    n, test = specs
    top = score(n)
    left_out = {} if ignored is None else {"ignore_label": ignored}
    n.loss = L.SoftmaxWithLoss(top, n.label, loss_param={**left_out, **loss})
    scored = {"accuracy_param": left_out} if left_out else {}
    n.accuracy = L.Accuracy(top, n.label, include={"phase": "TEST"}, **scored)
    return for_both_phases(name, n, test)


def scored(name: str, size: tuple[int, int], score: Callable[[NetSpec], Any]) -> NetParameter:
    """Return such a net for use, with the softmax of the scores."""
    n = NetSpec()
    n.data = L.Input(input_param={"shape": {"dim": [1, 3, *size]}})
    n.prob = L.Softmax(score(n))
    return named(name, n)


def definitions(
    folder: str,
    *,
    about: str,
    paper: str,
    expect: str,
    train: NetParameter,
    deploy: NetParameter,
    solver: Mapping[str, Any],
) -> dict[str, str]:
    """Return the text of each file of a net, by its name; `solver` begins with the file for
    training.
    """
    head = header(about, paper, folder, run="solver.prototxt", expect=expect)
    return {
        solver["net"]: f"{head}{train}",
        "deploy.prototxt": f"{header(about, paper, folder, expect=expect)}{deploy}",
        "solver.prototxt": head + fields(solver),
    }


def vgg(
    n: NetSpec, top: Any, widths: Sequence[int], counts: Sequence[int], *, frozen: int = 0
) -> Any:
    """Add stages of 3x3 convolutions with a pooling layer between them; return the last
    convolution's top.

    Args:
        n: the net.
        top: what they read.
        widths: channels of each stage.
        counts: convolutions of each stage.
        frozen: the first stages, which do not learn.
    """
    for stage, (width, count) in enumerate(zip(widths, counts, strict=True), 1):
        rates = FROZEN * 2 if stage <= frozen else TWICE
        for place in range(1, count + 1):
            name = f"{stage}_{place}"
            top = convolution(n, top, f"conv{name}", width, 3, pad=1, param=rates)
            top = relu(n, top, f"relu{name}")
        if stage < len(widths):
            top = max_pool(n, top, f"pool{stage}", kernel=2)
    return top


def batch_norm(n: NetSpec, bottom: Any, name: str, *, fixed: bool) -> Any:
    """Add BatchNorm and Scale of a convolution; fixed: with the statistics and scales of the
    given weights.
    """
    suffix = name.removeprefix("res") if name.startswith("res") else f"_{name}"
    how: dict[str, Any] = {"use_global_stats": True} if fixed else {}
    rates = {"param": FROZEN * 2} if fixed else {}
    n[f"bn{suffix}"] = L.BatchNorm(
        bottom, in_place=True, param=[{"lr_mult": 0}] * 3 if fixed else [], **how
    )
    n[f"scale{suffix}"] = L.Scale(n[f"bn{suffix}"], in_place=True, bias_term=True, **rates)
    return n[f"scale{suffix}"]


def unit(
    n: NetSpec, bottom: Any, name: str, outputs: int, kernel: int, norm: Norm, **how: Any
) -> Any:
    """Add a convolution without a bias, and its normalization."""
    pad = how.get("dilation", 1) * (kernel // 2)
    top = convolution(n, bottom, name, outputs, kernel, pad=pad, bias_term=False, **how)
    return norm(n, top, name)


def bottleneck(
    n: NetSpec,
    bottom: Any,
    name: str,
    width: int,
    *,
    stride: int,
    dilation: int,
    first: bool,
    norm: Norm,
) -> Any:
    """Add a bottleneck of ResNet, whose stride is in the first 1x1 convolution."""
    at = f"{name}_branch"
    shortcut = bottom
    if first:
        shortcut = unit(n, bottom, f"{at}1", 4 * width, 1, norm, stride=stride)
    top = unit(n, bottom, f"{at}2a", width, 1, norm, stride=stride)
    top = relu(n, top, f"{at}2a_relu")
    holes = {"dilation": dilation} if dilation > 1 else {}
    top = unit(n, top, f"{at}2b", width, 3, norm, **holes)
    top = relu(n, top, f"{at}2b_relu")
    top = unit(n, top, f"{at}2c", 4 * width, 1, norm)
    return relu(n, put(n, name, L.Eltwise(shortcut, top)), f"{name}_relu")


def residual_stage(
    n: NetSpec,
    top: Any,
    stage: int,
    width: int,
    blocks: int,
    *,
    stride: int,
    norm: Norm,
    dilation: int = 1,
) -> Any:
    """Add the bottlenecks of one stage: res<stage>a, res<stage>b, ..."""
    for index in range(blocks):
        top = bottleneck(
            n,
            top,
            f"res{stage}{'abcdef'[index]}",
            width,
            stride=stride if index == 0 else 1,
            dilation=dilation,
            first=index == 0,
            norm=norm,
        )
    return top


def small(kernel: int, outputs: int, *, std: float = 0.01, pad: int = 0) -> dict[str, Any]:
    """Return the settings of a convolution with a bias and small weights."""
    return {
        "kernel_size": kernel,
        "num_output": outputs,
        "pad": pad,
        "param": TWICE,
        "weight_filler": gaussian(std),
    }


def proposals(n: NetSpec, feature: Any, anchors: Anchors, width: int, *, train: bool) -> Any:
    """Add a region proposal network on `feature`, in training with its losses; return the
    regions `rois`.

    The net has the tops data and im_info, in training gt_boxes too.
    """
    top = put(n, "rpn_conv/3x3", L.Convolution(feature, **small(3, width, pad=1)))
    top, count = relu(n, top, "rpn_relu/3x3"), anchors.count
    n.rpn_cls_score = L.Convolution(top, **small(1, 2 * count))
    n.rpn_bbox_pred = L.Convolution(top, **small(1, 4 * count))
    n.rpn_cls_score_reshape = L.Reshape(n.rpn_cls_score, shape={"dim": [0, 2, -1, 0]})
    if train:
        n.rpn_labels, n.rpn_bbox_targets, n.rpn_bbox_inside_weights, n.rpn_bbox_outside_weights = (
            L.AnchorTarget(
                n.rpn_cls_score,
                n.gt_boxes,
                n.im_info,
                n.data,
                ntop=4,
                name="rpn-data",
                **anchors.fields(),
            )
        )
        n.rpn_cls_loss = L.SoftmaxWithLoss(
            n.rpn_cls_score_reshape,
            n.rpn_labels,
            propagate_down=[True, False],
            loss_weight=1,
            loss_param={"ignore_label": -1, "normalize": True},
        )
        n.rpn_loss_bbox = L.SmoothL1Loss(
            n.rpn_bbox_pred,
            n.rpn_bbox_targets,
            n.rpn_bbox_inside_weights,
            n.rpn_bbox_outside_weights,
            loss_weight=1,
            smooth_l1_loss_param={"sigma": 3},
        )
    n.rpn_cls_prob = L.Softmax(n.rpn_cls_score_reshape)
    n.rpn_cls_prob_reshape = L.Reshape(n.rpn_cls_prob, shape={"dim": [0, 2 * count, -1, 0]})
    regions = L.Proposal(
        n.rpn_cls_prob_reshape,
        n.rpn_bbox_pred,
        n.im_info,
        **anchors.fields(),
        min_size=anchors.smallest,
        pre_nms_topn=6 * anchors.kept[0] if train else 6000,
        post_nms_topn=anchors.kept[0] if train else anchors.kept[1],
    )
    return put(n, "rpn_rois" if train else "rois", regions)


def targets(n: NetSpec, found: Any, classes: int, regions: int, **how: Any) -> None:
    """Add the regions `rois` to learn from, with their labels and coordinates."""
    n.rois, n.labels, n.bbox_targets, n.bbox_inside_weights, n.bbox_outside_weights = (
        L.ProposalTarget(
            found,
            n.gt_boxes,
            ntop=5,
            name="roi-data",
            num_classes=classes,
            batch_size=regions,
            **how,
        )
    )


def regions_source(n: NetSpec, source: str, mean: Sequence[float], **how: Any) -> None:
    """Add the tops data, im_info and gt_boxes of a data layer for training."""
    n.data, n.im_info, n.gt_boxes = L.ROIData(
        ntop=3,
        name="input-data",
        transform_param={"mean_value": list(mean), "mirror": True},
        roi_data_param={"source": source, "shared_file_system": True, **how},
    )


def regions_input(n: NetSpec, size: tuple[int, int]) -> None:
    """Add the tops data and im_info of a net for use."""
    n.data = L.Input(input_param={"shape": {"dim": [1, 3, *size]}})
    n.im_info = L.Input(input_param={"shape": {"dim": [1, 3]}})
