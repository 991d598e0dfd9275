"""BatchReindex, Crop, Filter, Tile, ShuffleChannel against indexing by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from poseidon.caffe.layers.rearrange import INTEGERS, outside
from poseidon.caffe.net.net import Net
from poseidon.errors import DataError
from tests.support.nets import build, inputs, layer, noise

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("values", "within", "wrong"),
    [
        ([], range(2), ""),
        ([0, 1, 1.9, -0.9], range(2), ""),
        ([0, 2], range(2), "2"),
        ([0, -1], range(2), "-1"),
        ([0, -1, -1.9], range(-1, 2), ""),
        ([0, -2], range(-1, 2), "-2"),
        ([0, 2.5], range(2), "2.5"),
        ([0, NAN, 1], range(2), "nan"),
        ([0, NAN, 1], INTEGERS, "nan"),
        ([0, INF], INTEGERS, "inf"),
        ([0, -INF], INTEGERS, "-inf"),
        ([0, 2.0**31], INTEGERS, "2147483648"),
        ([-(2.0**31), 2.0**31 - 128], INTEGERS, ""),
        ([0, 1e10], range(2), "10000000000"),
    ],
)
def test_outside(values: list[float], within: range, wrong: str) -> None:
    assert outside(torch.tensor(values, dtype=torch.float32), within) == wrong


def test_outside_of_integers() -> None:
    assert outside(torch.tensor([0, 3]), range(3)) == "3"
    # 2^24 + 1 has no float32, in which 2^24 must stay inside.
    assert outside(torch.tensor([2.0**24]), range(2**24 + 1)) == ""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer and the value of a bottom that is an index.

    Attributes:
        bottoms: the bottoms by name.
        tops: their names.
        body: the layer's block.
        blob, place: the index, which is 1.
        count: indices are 0 .. count - 1.
        message: what the error says, with the wrong value in place of {}.
    """

    bottoms: dict[str, Tensor]
    tops: str = "y"
    body: str = ""
    blob: str = "l"
    place: tuple[int, ...] = (1,)
    count: int = 3
    message: str = r"label {} is outside 0\.\.2"

    def build(self, kind: str) -> Net:
        shapes = {name: tuple(value.shape) for name, value in self.bottoms.items()}
        return build(inputs(**shapes) + layer(kind, " ".join(shapes), self.tops, self.body))

    def with_index(self, value: float) -> dict[str, Tensor]:
        bottoms = {name: bottom.clone() for name, bottom in self.bottoms.items()}
        bottoms[self.blob][self.place] = value
        return bottoms


SCORES, LABELS = noise(2, 3), torch.tensor([0.0, 1.0])
LABELLED = Case(bottoms={"x": SCORES, "l": LABELS})
MAPS, REGIONS = noise(2, 4, 5, 5), torch.tensor([[0.0, 1, 1, 3, 3], [1, 0, 0, 2, 4]])
IMAGE = r"index {} is outside 0\.\.1"
BOXES = torch.tensor([[0.0, 0, 15, 15, 1], [40, 16, 47, 31, 1]])
PRIORS = torch.tensor([[[0.1, 0.1, 0.4, 0.4, 0.5, 0.5, 0.9, 0.9], [0.1, 0.1, 0.2, 0.2] * 2]])
OBJECTS = torch.tensor([[[[0, 1, 0, 0.1, 0.1, 0.4, 0.4, 0], [1, 1, 0, 0.5, 0.5, 0.9, 0.9, 0]]]])
MULTIBOX = {"loc": noise(2, 8), "conf": noise(2, 6), "prior": PRIORS, "gt": OBJECTS}


def regions(block: str, maps: Tensor = MAPS) -> Case:
    return Case(bottoms={"x": maps, "l": REGIONS}, body=block, place=(1, 0), count=2, message=IMAGE)


CASES = {
    "SoftmaxWithLoss": LABELLED,
    "SoftmaxWithLossOHEM": Case(bottoms=LABELLED.bottoms, tops="y p e"),
    "Accuracy": Case(bottoms=LABELLED.bottoms, tops="y c"),
    "HingeLoss": LABELLED,
    "MultinomialLogisticLoss": Case(bottoms={"x": SCORES.softmax(1), "l": LABELS}),
    "InfogainLoss": Case(bottoms={"x": SCORES, "l": LABELS, "h": torch.eye(3)}),
    "ContrastiveLoss": Case(
        bottoms={"a": noise(2, 3), "b": noise(2, 3, seed=1), "l": LABELS},
        count=2**31,
        message="label {} is not 1",
    ),
    "Embed": Case(
        bottoms={"l": LABELS},
        body="embed_param { num_output: 2 input_dim: 3 weight_filler { type: 'uniform' } }",
        message=r"index {} is outside 0\.\.2",
    ),
    "BatchReindex": Case(
        bottoms={"x": noise(3, 2), "l": LABELS}, message=r"index {} is outside 0\.\.2"
    ),
    "ROIPooling": regions("roi_pooling_param { pooled_h: 2 pooled_w: 2 }"),
    "ROIAlign": regions("roi_align_param { pooled_h: 2 pooled_w: 2 }"),
    "PSROIPooling": regions("psroi_pooling_param { spatial_scale: 1 output_dim: 1 group_size: 2 }"),
    "BoxAnnotatorOHEM": Case(
        bottoms={
            "l": REGIONS,
            "e": torch.tensor([1.0, 2]),
            "t": torch.tensor([1.0, 1]),
            "w": torch.ones(2, 4),
        },
        tops="y w2",
        body="box_annotator_ohem_param { roi_per_img: 1 }",
        place=(1, 0),
        count=2**31,
        message="belongs to image {}, expected 0 or more",
    ),
    "Upsample": Case(
        bottoms={"x": noise(1, 1, 1, 2), "l": torch.tensor([[[[3.0, 1.0]]]])},
        body="upsample_param { upsample_h: 2 upsample_w: 2 }",
        place=(0, 0, 0, 1),
        count=4,
        message="index {} is outside the 2x2 top",
    ),
    "ProposalTarget": Case(
        bottoms={"r": torch.tensor([[0.0, 0, 0, 15, 15], [0, 41, 16, 47, 31]]), "l": BOXES},
        tops="y class a b c",
        body="proposal_target_param { num_classes: 3 batch_size: -1 }",
        place=(1, 4),
        message=r"has class {}, expected 0 to 2 \(num_classes - 1\)",
    ),
    "MultiBoxLoss": Case(
        bottoms=MULTIBOX,
        body="multibox_loss_param { num_classes: 3 }",
        blob="gt",
        place=(0, 0, 1, 1),
        message=r"has label {}, expected 0 to 2 \(num_classes - 1\)",
    ),
}
ALSO = {
    "MultiBoxLoss": Case(
        bottoms=MULTIBOX,
        body="multibox_loss_param { num_classes: 3 }",
        blob="gt",
        place=(0, 0, 1, 0),
        count=2,
        message="belong to image {}, but the batch has 2",
    )
}
ALL = [*CASES.items(), *ALSO.items()]
IDS = [*CASES, *(f"{kind}, images" for kind in ALSO)]


@pytest.mark.parametrize(("kind", "case"), ALL, ids=IDS)
def test_a_value_that_is_no_index_is_named(kind: str, case: Case) -> None:
    net = case.build(kind)
    for wrong in (NAN, INF, -INF, float(case.count), -2.0, 1e10):
        if wrong == -2 and kind == "ContrastiveLoss":
            continue  # any integer but 0 is true, as in C
        named = f"{wrong:.0f}" if wrong == wrong and abs(wrong) != INF else f"{wrong:g}"
        with pytest.raises(
            DataError, match=rf"layer 'layer' \({kind}\): .*{case.message.format(named)}"
        ):
            net(case.with_index(wrong))


@pytest.mark.parametrize(("kind", "case"), ALL, ids=IDS)
def test_a_fraction_is_truncated(kind: str, case: Case) -> None:
    net = case.build(kind)
    for fraction, whole in ((1.75, 1.0), (0.75, 0.0), (-0.75, 0.0)):
        if whole == 0 and case.message.startswith("has label"):
            continue  # the background
        found, expected = ({**net(case.with_index(value))} for value in (fraction, whole))
        for name in expected.keys() - {"class"}:  # ProposalTarget passes classes on as they are
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)


def test_an_ignored_label_beside_one_that_is_none() -> None:
    case = Case(bottoms=LABELLED.bottoms, body="loss_param { ignore_label: 255 }")
    net = case.build("SoftmaxWithLoss")
    net(case.with_index(255.9))
    for wrong in (NAN, 254.0):
        with pytest.raises(DataError, match=f"label {wrong:g} is outside"):
            net(case.with_index(wrong))


@pytest.mark.parametrize("kind", ["ROIPooling", "ROIAlign", "PSROIPooling"])
@pytest.mark.parametrize("corner", [NAN, INF])
def test_a_region_with_a_corner_that_is_not_finite(kind: str, corner: float) -> None:
    case = CASES[kind]
    bottoms = case.with_index(1)
    bottoms["l"][1, 3] = corner
    with pytest.raises(
        DataError,
        match=rf"region 1 has the corners \[0\.0, 0\.0, {corner:g}, 4\.0\], expected finite",
    ):
        case.build(kind)(bottoms)


def one(kind: str, body: str = "", **shapes: tuple[int, ...]) -> Net:
    return build(inputs(**shapes) + layer(kind, " ".join(shapes), "y", body))


def test_batch_reindex_repeats_and_reorders() -> None:
    x = noise(3, 2, 2).requires_grad_()
    net = one("BatchReindex", x=(3, 2, 2), p=(4,))
    y = net({"x": x, "p": torch.tensor([2.0, 0, 2, 2])})["y"]
    assert torch.equal(y, x[[2, 0, 2, 2]])
    y.sum().backward()
    assert x.grad is not None and x.grad[:, 0, 0].tolist() == [1, 0, 3]


def test_filter_and_the_layers_above_it() -> None:
    text = inputs(x=(4, 3), z=(4, 2), s=(4, 1)) + layer("Filter", "x z s", "a b", name="filter")
    net = build(text + layer("Reduction", "a", "sum", "reduction_param { axis: 1 }", name="sum"))
    x, z = noise(4, 3), noise(4, 2)
    for selector in ([1.0, 0, 0, 2], [1.0, 1, 1, 1], [0.0, 0, 1, 0]):
        chosen = [place for place, value in enumerate(selector) if value]
        tops = net({"x": x, "z": z, "s": torch.tensor(selector).view(4, 1)})
        assert torch.equal(tops["b"], z[chosen])
        torch.testing.assert_close(tops["sum"], x[chosen].sum(1))


def test_filter_of_nothing_is_empty() -> None:
    text = inputs(x=(3, 2), s=(3,)) + layer("Filter", "x s", "a", name="filter")
    net = build(
        text + layer("InnerProduct", "a", "y", "inner_product_param { num_output: 4 }", name="ip")
    )
    assert tuple(net({"x": noise(3, 2), "s": torch.zeros(3)})["y"].shape) == (0, 4)


@pytest.mark.parametrize(
    ("body", "cut"),
    [
        ("", (slice(0, 2), slice(0, 3), slice(0, 2), slice(0, 3))),
        ("axis: 1 offset: 1", (slice(0, 2), slice(1, 2), slice(1, 3), slice(1, 4))),
        ("axis: -2 offset: 2 offset: 3", (slice(0, 2), slice(0, 3), slice(2, 4), slice(3, 6))),
    ],
)
def test_crop(body: str, cut: tuple[slice, ...]) -> None:
    like = (2, 1, 2, 3) if "axis: 1" in body else (2, 3, 2, 3)
    x = noise(2, 3, 4, 6)
    y = one("Crop", f"crop_param {{ {body} }}", x=(2, 3, 4, 6), z=like)(
        {"x": x, "z": noise(*like)}
    )["y"]
    assert torch.equal(y, x[cut])


def test_shuffled_channels_are_dealt_out() -> None:
    x = torch.arange(6.0).view(1, 6)
    y = one("ShuffleChannel", "shuffle_channel_param { group: 2 }", x=(1, 6))({"x": x})["y"]
    assert y.tolist() == [[0, 3, 1, 4, 2, 5]]


SHAPE = (2, 6, 4, 5)


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        ("Flatten", "", (2, 120)),
        ("Flatten", "flatten_param { axis: 2 }", (2, 6, 20)),
        ("Flatten", "flatten_param { axis: 1 end_axis: -2 }", (2, 24, 5)),
        ("Flatten", "flatten_param { axis: 0 end_axis: 1 }", (12, 4, 5)),
        ("Reshape", "reshape_param { shape { dim: 0 dim: -1 } }", (2, 120)),
        ("Reshape", "reshape_param { shape { dim: 0 dim: 3 dim: -1 } }", (2, 3, 40)),
        (
            "Reshape",
            "reshape_param { shape { dim: 2 dim: -1 } axis: 1 num_axes: 2 }",
            (2, 2, 12, 5),
        ),
        ("Reshape", "reshape_param { shape { dim: 1 } axis: -1 num_axes: 0 }", (2, 6, 4, 5, 1)),
        ("Reshape", "reshape_param { shape { dim: 1 } axis: 1 num_axes: 0 }", (2, 1, 6, 4, 5)),
        ("Reshape", "reshape_param { }", ()),
    ],
)
def test_shapes(kind: str, body: str, expected: tuple[int, ...]) -> None:
    shape = (1, 1) if not expected else SHAPE
    net = build(inputs(x=shape) + layer(kind, "x", "y", body))
    x = noise(*shape)
    y = net({"x": x})["y"]
    assert tuple(y.shape) == expected == net.blob_shapes["y"]
    assert torch.equal(y.flatten(), x.flatten())
