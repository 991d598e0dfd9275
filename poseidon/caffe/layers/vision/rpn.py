"""The Python layers of py-faster-rcnn and py-R-FCN as layer types.

A definition that names `rpn.proposal_layer` and its like works without those modules: the layer
types of this program take their place, with the numbers of the reference's configuration. If Python
finds the module, the user's layer runs.
"""

from __future__ import annotations

import re
from copy import deepcopy

from poseidon.caffe.layers.base import LayerContext, LayerError
from poseidon.caffe.layers.registry import replaces_python
from poseidon.caffe.proto.caffe_pb2 import TEST, LayerParameter

# cfg.TRAIN and cfg.TEST of py-faster-rcnn: boxes before and after suppression.
TRAIN_COUNTS, TEST_COUNTS = (12000, 2000), (6000, 300)
AGNOSTIC = 2
_SETTING = re.compile(
    r"""['"]?(\w+)['"]?\s*:\s*(?:!!python/tuple\s*)?(\[[^\]]*\]|\([^)]*\)|[^,\s}]+)"""
)
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def settings(param: LayerParameter) -> dict[str, list[float]]:
    """Return the numbers of `param_str`, YAML of one level: 'feat_stride': 16.

    Raises:
        LayerError: a value is not a number or a list of numbers.
    """
    found = {}
    for name, value in _SETTING.findall(param.python_param.param_str):
        numbers = _NUMBER.findall(value)
        if not numbers:
            raise LayerError(
                f"param_str sets {name} to '{value}', expected a number or a list of numbers"
            )
        found[name] = [float(number) for number in numbers]
    return found


def _number(given: dict[str, list[float]], name: str) -> int:
    if name not in given:
        raise LayerError(f"param_str has no '{name}', expected '{name}': <number>")
    return round(given[name][0])


def _same(param: LayerParameter, kind: str) -> LayerParameter:
    """Return the definition with a different type and without its python_param."""
    result = deepcopy(param)
    result.type = kind
    result.ClearField("python_param")
    return result


@replaces_python("rpn.proposal_layer", "ProposalLayer")
def proposal(param: LayerParameter, context: LayerContext) -> LayerParameter:
    """Return a Proposal layer."""
    given, result = settings(param), _same(param, "Proposal")
    result.proposal_param.feat_stride = _number(given, "feat_stride")
    result.proposal_param.scale.extend(given.get("scales", []))
    result.proposal_param.ratio.extend(given.get("ratios", []))
    counts = TEST_COUNTS if context.phase == TEST else TRAIN_COUNTS
    result.proposal_param.pre_nms_topn, result.proposal_param.post_nms_topn = counts
    return result


@replaces_python("rpn.anchor_target_layer", "AnchorTargetLayer")
def anchor_target(param: LayerParameter, context: LayerContext) -> LayerParameter:
    """Return an AnchorTarget layer."""
    given, result = settings(param), _same(param, "AnchorTarget")
    result.anchor_target_param.feat_stride = _number(given, "feat_stride")
    result.anchor_target_param.scale.extend(given.get("scales", []))
    result.anchor_target_param.ratio.extend(given.get("ratios", []))
    if "allowed_border" in given:
        result.anchor_target_param.allowed_border = given["allowed_border"][0]
    return result


@replaces_python("rpn.proposal_target_layer", "ProposalTargetLayer")
def proposal_target(param: LayerParameter, context: LayerContext) -> LayerParameter:
    """Return a ProposalTarget layer.

    Two classes mean py-R-FCN: one set of coordinates for all.
    """
    given, result = settings(param), _same(param, "ProposalTarget")
    count = _number(given, "num_classes")
    result.proposal_target_param.num_classes = count
    result.proposal_target_param.agnostic = count == AGNOSTIC
    return result


@replaces_python("roi_data_layer.layer", "RoIDataLayer")
def roi_data(param: LayerParameter, context: LayerContext) -> LayerParameter:
    """Raise LayerError: the images of this layer come from the program that runs the net."""
    raise LayerError(
        "RoIDataLayer has no file to read: py-faster-rcnn passes its images to it. Write type: "
        '"ROIData" with roi_data_param { '
        "source: ... }, a window file, in its place"
    )
