"""What the nets for detection and segmentation of this folder share: VGG, residual stages, and
region proposals.

Layers are named as in the models that the papers' authors released.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from poseidon.pycaffe import params as P

FROZEN = [{"lr_mult": 0, "decay_mult": 0}]
TWICE = [{"lr_mult": 1, "decay_mult": 1}, {"lr_mult": 2, "decay_mult": 0}]
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


def header(about: str, paper: str, script: str, *, run: str = "", expect: str = "") -> str:
    """Return the first lines of a definition."""
    lines = [f"# {about}"]
    lines += (
        [f"# Run:     poseidon train --solver={run}"]
        if run
        else ["# This one is for use after training."]
    )
    lines += [f"# Expect:  {expect}"] if expect else []
    lines += [f"# From:    {paper}", f"# Written by {script}: change that, not this."]
    return "\n".join(lines) + "\n\n"


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
            n[f"conv{name}"] = L.Convolution(
                top,
                num_output=width,
                kernel_size=3,
                pad=1,
                param=rates,
                weight_filler={"type": "msra"},
            )
            n[f"relu{name}"] = L.ReLU(n[f"conv{name}"], in_place=True)
            top = n[f"relu{name}"]
        if stage < len(widths):
            n[f"pool{stage}"] = L.Pooling(top, pool=P.Pooling.MAX, kernel_size=2, stride=2)
            top = n[f"pool{stage}"]
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


def convolution(
    n: NetSpec, bottom: Any, name: str, outputs: int, kernel: int, norm: Norm, **how: Any
) -> Any:
    """Add a convolution without a bias, and its normalization."""
    dilation = how.pop("dilation", 1)
    n[name] = L.Convolution(
        bottom,
        num_output=outputs,
        kernel_size=kernel,
        pad=dilation * (kernel // 2),
        bias_term=False,
        weight_filler={"type": "msra"},
        **({"dilation": dilation} if dilation > 1 else {}),
        **how,
    )
    return norm(n, n[name], name)


def relu(n: NetSpec, bottom: Any, name: str) -> Any:
    """Add a ReLU in place."""
    n[f"{name}_relu"] = L.ReLU(bottom, in_place=True)
    return n[f"{name}_relu"]


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
    shortcut = bottom
    if first:
        shortcut = convolution(n, bottom, f"{name}_branch1", 4 * width, 1, norm, stride=stride)
    top = relu(
        n,
        convolution(n, bottom, f"{name}_branch2a", width, 1, norm, stride=stride),
        f"{name}_branch2a",
    )
    top = relu(
        n,
        convolution(n, top, f"{name}_branch2b", width, 3, norm, dilation=dilation),
        f"{name}_branch2b",
    )
    top = convolution(n, top, f"{name}_branch2c", 4 * width, 1, norm)
    n[name] = L.Eltwise(shortcut, top)
    return relu(n, n[name], name)


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
        "weight_filler": {"type": "gaussian", "std": std},
    }


def proposals(n: NetSpec, feature: Any, anchors: Anchors, width: int, *, train: bool) -> Any:
    """Add a region proposal network on `feature`, in training with its losses; return the
    regions `rois`.

    The net has the tops data and im_info, in training gt_boxes too.
    """
    n["rpn_conv/3x3"] = L.Convolution(feature, **small(3, width, pad=1))
    n["rpn_relu/3x3"] = L.ReLU(n["rpn_conv/3x3"], in_place=True)
    top, count = n["rpn_relu/3x3"], anchors.count
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
    n["rpn_rois" if train else "rois"] = L.Proposal(
        n.rpn_cls_prob_reshape,
        n.rpn_bbox_pred,
        n.im_info,
        **anchors.fields(),
        min_size=anchors.smallest,
        pre_nms_topn=6 * anchors.kept[0] if train else 6000,
        post_nms_topn=anchors.kept[0] if train else anchors.kept[1],
    )
    return n["rpn_rois" if train else "rois"]


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


def solver_text(first: str, net: str, settings: dict[str, Any]) -> str:
    shown = {
        key: f'"{value}"' if isinstance(value, str) else f"{value}"
        for key, value in settings.items()
    }
    lines = [f'net: "{net}"'] + [f"{key}: {value}" for key, value in shown.items()]
    return first + "\n".join(lines) + "\n"


def write(folder: str, definitions: dict[str, str]) -> None:
    """Put the files into their folder."""
    for name, text in definitions.items():
        (Path(__file__).parent / folder / name).write_text(text)
