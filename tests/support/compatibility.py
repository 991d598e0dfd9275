"""Writes docs/caffe_compatibility.md: every layer type with its fields, by what holds them to Caffe.

    python -m tests.support.compatibility          # needs the recorded results of real Caffe

A field is held by recorded cases that set it, or else by the test files that name it. A field that
is read by nobody must be in `WITHOUT_EFFECT`, with the reason.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from poseidon.caffe.layers.registry import known_types
from poseidon.caffe.proto.caffe_pb2 import LayerParameter
from poseidon.pycaffe.net_spec import param_name_dict
from tests.support import golden

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "caffe_compatibility.md"
ROOMS = (
    "caffe/layers",
    "caffe/data",
    "caffe/net",
    "pycaffe",
    "caffe/proto",
    "caffe/solver",
    "engine",
)

# The blocks that a type reads besides, or in place of, the one of its own name.
BLOCKS = {
    "AnnotatedData": ("annotated_data_param", "data_param", "transform_param"),
    "ConvolutionDepthwise": ("convolution_param",),
    "Data": ("data_param", "transform_param"),
    "DenseImageData": ("dense_image_data_param", "transform_param"),
    "Deconvolution": ("convolution_param",),
    "DepthwiseConvolution": ("convolution_param",),
    "HoleConvolution": ("convolution_param",),
    "ImageData": ("image_data_param", "transform_param"),
    "ImageSegData": ("image_data_param", "transform_param"),
    "Im2col": ("convolution_param",),
    "InfogainLoss": ("infogain_loss_param", "loss_param"),
    "LSTM": ("recurrent_param",),
    "MemoryData": ("memory_data_param", "transform_param"),
    "MultiBoxLoss": ("multibox_loss_param", "loss_param"),
    "RNN": ("recurrent_param",),
    "ROIData": ("roi_data_param", "transform_param"),
    "SigmoidCrossEntropyLoss": ("loss_param",),
    "SmoothL1LossOHEM": ("loss_param",),
    "SoftmaxWithLoss": ("softmax_param", "loss_param"),
    "SoftmaxWithLossOHEM": ("softmax_param", "loss_param"),
    "WindowData": ("window_data_param", "transform_param"),
}
_UPGRADED = "moved to transform_param when the file is read"
WITHOUT_EFFECT = {
    ("AnnotatedDataParameter", "label_map_file"): "the labels are in the records",
    ("ConvolutionParameter", "force_nd_im2col"): "chooses between Caffe's own implementations",
    ("DetectionOutputParameter", "visualize"): "nothing is shown",
    ("DetectionOutputParameter", "visualize_threshold"): "nothing is shown",
    ("DetectionOutputParameter", "save_file"): "nothing is shown",
    ("EltwiseParameter", "stable_prod_grad"): "the stable gradient is the only one",
    ("PythonParameter", "share_in_parallel"): "every worker is a process with a layer of its own",
    ("RecurrentParameter", "debug_info"): "prints nothing",
    ("NoiseParameter", "prob"): "SSD does not read it",
    ("ResizeParameter", "prob"): "SSD does not read it",
    **{
        (f"{block}Parameter", name): _UPGRADED
        for block in ("Data", "ImageData", "WindowData")
        for name in ("scale", "mean_file", "crop_size", "mirror")
    },
}
_OF_SSD = {
    *(
        "resize_param",
        "noise_param",
        "distort_param",
        "expand_param",
        "emit_constraint",
        "crop_h",
        "crop_w",
    )
}
# Messages in a block that have a line for each field.
NESTED = {
    *(
        "ResizeParameter",
        "NoiseParameter",
        "SaltPepperParameter",
        "DistortionParameter",
        "ExpansionParameter",
    ),
    *(
        "EmitConstraint",
        "BatchSampler",
        "Sampler",
        "SampleConstraint",
        "NonMaximumSuppressionParameter",
    ),
    "SaveOutputParameter",
}
# Blocks whose fields are read, and tested, in the package of the data.
OF_DATA = ("annotated_data_param", "data_param", "transform_param")
# Fields of a block that a type does not read, as in Caffe.
NOT_OF_TYPE = {
    "Data": {"emit_constraint", "scale_factors"},  # no objects, no labels of pixels
    "ImageData": {"emit_constraint", "ignore_label", "label_type", "scale_factors"},
    "ImageSegData": {"mean_file"} | (_OF_SSD - {"crop_h", "crop_w"}),
    "DenseImageData": _OF_SSD - {"crop_h", "crop_w"},
    "MemoryData": _OF_SSD | {"scale_factors"},
    "MultiBoxLoss": {
        *("ignore_label", "eta", "pre_fixed_normalizer", "weight_by_label_freqs", "class_weighting")
    },
    "AnnotatedData": {"force_encoded_color", "scale_factors"},
    # They resize boxes, not images.
    "DetectionEvaluate": {"prob", "pad_mode", "pad_value", "interp_mode"},
    "DetectionOutput": {"prob", "pad_mode", "pad_value", "interp_mode"},
    "WindowData": _OF_SSD | {"scale_factors"},
    "Im2col": {"num_output", "bias_term", "group", "weight_filler", "bias_filler"},
    "ConvolutionDepthwise": {"group"},
    "InfogainLoss": {"weight_by_label_freqs", "class_weighting"},
    "ROIData": {"crop_size", "mean_file", "force_color", "force_gray", "scale_factors"} | _OF_SSD,
    "SigmoidCrossEntropyLoss": {"weight_by_label_freqs", "class_weighting"},
    "SmoothL1LossOHEM": {"ignore_label", "weight_by_label_freqs", "class_weighting"},
}
# Types whose fields are read by the code of another type.
SAME_CODE = dict.fromkeys(
    ("ConvolutionDepthwise", "Deconvolution", "DepthwiseConvolution", "HoleConvolution", "Im2col"),
    "Convolution",
) | {"SoftmaxWithLossOHEM": "SoftmaxWithLoss"}
HEAD = """# Caffe compatibility

This page lists every layer type and field that Poseidon reads, and how well each agrees with Caffe.
`python -m tests.support.compatibility` generates it; do not edit it by hand.

* **compared with Caffe**: fields that recorded runs of Caffe 1.0 (BVLC, CPU) set. Outputs and
  gradients of bottoms and parameters agree to 1e-4 relative, or to 1e-5 where nothing is summed.
* **tested otherwise**: fields whose tests use a formula, an equivalence or finite differences.
* **without effect**: fields that are accepted and change nothing; the reasons are
  [below](#fields-without-effect).
* **largest difference**: relative, over all blobs of all recorded runs with the layer.

A [test](../tests/poseidon/caffe/layers/test_registry_gradients.py) checks the gradients of every
differentiable type by finite differences.

Layers and fields of Caffe's branches have the branch's field numbers, if the branches agree and
BVLC does not use them. Otherwise a field is known in text form only; `caffe.proto` says so.
[test_opencv_layers.py](../tests/compat/test_opencv_layers.py) compares layers of branches with
OpenCV's importer of Caffe's files.

A **Python** layer of py-faster-rcnn or py-R-FCN (`rpn.proposal_layer`, `rpn.anchor_target_layer`,
`rpn.proposal_target_layer`) runs as Proposal, AnchorTarget or ProposalTarget, unless Python finds
the module. **BN** has three forms, which its fields choose: SegNet's (`bn_mode`, or the scale and
shift fillers alone: two blobs), `moving_average`'s, and the one with `momentum`, `frozen` and the
slope and bias fillers (four blobs each).

Poseidon differs from a branch in two places:

* **AnchorTarget**: an object that overlaps no anchor labels no anchor. In the reference it labels
  all anchors that overlap nothing with 1.
* **Normalize** with `channel_shared: false`: SSD's Caffe leaves the scales of the other channels
  out of the sum over channels, so its gradient is not the derivative. Poseidon's is. Both are equal
  while all scales are equal, as at the beginning.

All types have `name`, `type`, `bottom`, `top`, `phase`, `include`, `exclude`, `param` (name,
share_mode, lr_mult, decay_mult), `blobs`, `loss_weight` and `propagate_down`.

| layer | compared with Caffe | tested otherwise | without effect | largest difference |
|---|---|---|---|---|
"""
REASONS = """
## Fields without effect

| reason | fields |
|---|---|
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A field of a type, or the type itself: then the field is empty."""

    kind: str
    field: str
    cases: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    note: str = ""


def fields_of(kind: str) -> Iterator[tuple[str, FieldDescriptor]]:
    """Each field that a type may have, with the name of its block, or `block.message` for the
    fields of a message in it.
    """
    own = param_name_dict()
    for block in BLOCKS.get(kind, (own[kind],) if kind in own else ()):
        message: Descriptor = LayerParameter.DESCRIPTOR.fields_by_name[block].message_type
        for field in message.fields:
            if field.name not in NOT_OF_TYPE.get(kind, ()):
                yield block, field
                yield from _nested(kind, block, field)


def _nested(kind: str, block: str, outer: FieldDescriptor) -> Iterator[tuple[str, FieldDescriptor]]:
    if outer.message_type is not None and outer.message_type.name in NESTED:
        for field in outer.message_type.fields:
            if field.name not in NOT_OF_TYPE.get(kind, ()):
                yield f"{block}.{outer.name}", field
                yield from _nested(kind, f"{block}.{outer.name}", field)


def effect(field: FieldDescriptor) -> str:
    """Why a field changes nothing; empty if it does."""
    if field.name == "engine":
        return "no effect: chooses between Caffe's own implementations"
    reason = WITHOUT_EFFECT.get((field.containing_type.name, field.name))
    return f"no effect: {reason}" if reason else ""


def tests_that_name(word: str, among: dict[str, str]) -> tuple[str, ...]:
    """The test files with this word in them."""
    return tuple(name for name, text in among.items() if re.search(rf"\b{word}\b", text))


def test_texts() -> dict[str, str]:
    """Every test file of the rooms that know layers, with its text."""
    paths = [
        path
        for room in ROOMS
        for path in sorted((ROOT / "tests/poseidon" / room).rglob("test_*.py"))
    ]
    return {
        str(path.relative_to(ROOT / "tests/poseidon")): path.read_text(encoding="utf-8")
        for path in paths
    }


def cases_by_field() -> dict[tuple[str, str], list[str]]:
    """(type, field or nothing) -> the recorded cases that have it."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for case in golden.cases():
        seen = set()
        for layer in golden.definition_of(case).param.layer:
            seen.add((layer.type, ""))
            for block, value in layer.ListFields():
                if block.name.endswith("_param"):
                    seen.update((layer.type, field.name) for field, _ in value.ListFields())
        for key in seen:
            found[key].append(case)
    return found


@cache
def table() -> tuple[Row, ...]:
    """Every type, each with its fields after it."""
    cases, texts = cases_by_field(), test_texts()
    of_data = {name: text for name, text in texts.items() if name.startswith("caffe/data/")}
    rows = []
    for kind in sorted(known_types(), key=str.lower):
        of_kind = {
            name: text
            for name, text in texts.items()
            if re.search(rf"\b({kind}|{SAME_CODE.get(kind, kind)})\b", text)
        }
        rows.append(
            Row(kind=kind, field="", cases=tuple(cases[kind, ""]), tests=tuple(of_kind)[:3])
        )
        for block, field in fields_of(kind):
            first, _, inner = block.partition(".")
            recorded = () if inner else tuple(cases[kind, field.name])
            # How records are read and transformed is tested in the room that does it.
            among = of_kind | of_data if first in OF_DATA else of_kind
            named = () if recorded else tests_that_name(field.name, among)[:3]
            name = f"{inner}.{field.name}" if inner else field.name
            rows.append(Row(kind=kind, field=name, cases=recorded, tests=named, note=effect(field)))
    return tuple(rows)


def page(worst: dict[str, float]) -> str:
    """The page.

    Args:
        worst: the largest difference of each type that has one.
    """
    fields: dict[str, list[Row]] = {row.kind: [] for row in table()}
    reasons: dict[str, list[str]] = defaultdict(list)
    for row in table():
        if row.field:
            fields[row.kind].append(row)
            if row.note:
                reasons[row.note.removeprefix("no effect: ")].append(row.field)
    lines = [
        f"| **{kind}** | {_names(row for row in rows if row.cases)} "
        f"| {_names(row for row in rows if not row.cases and not row.note)} "
        f"| {_names(row for row in rows if row.note and not row.cases)} "
        f"| {f'{worst[kind]:.1e}' if kind in worst else ''} |"
        for kind, rows in fields.items()
    ]
    ends = [f"| {reason} | {', '.join(sorted({*names}))} |" for reason, names in reasons.items()]
    return HEAD + "\n".join(lines) + "\n" + REASONS + "\n".join(ends) + "\n"


def _names(rows: Iterable[Row]) -> str:
    return ", ".join(dict.fromkeys(row.field for row in rows))


def main() -> None:
    cases = golden.cases()
    if not cases:
        raise SystemExit(
            f"no recorded cases in {golden.FOLDER}; set POSEIDON_SHARED to the folder that has them"
        )
    of_cases = {case: max(golden.differences(case).values()) for case in cases}
    worst = {
        row.kind: max(of_cases[case] for case in row.cases)
        for row in table()
        if row.cases and not row.field
    }
    PAGE.write_text(page(worst), encoding="utf-8")
    print(f"Wrote {PAGE} from {len(cases)} cases.")


if __name__ == "__main__":
    main()
