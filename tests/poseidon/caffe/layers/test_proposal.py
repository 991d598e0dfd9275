"""Proposal, AnchorTarget and ProposalTarget by hand, and as the Python layers of the reference."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from poseidon.caffe.layers.detection import encode
from poseidon.caffe.layers.proposal import AnchorTarget, Proposal, ProposalTarget
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TEST, TRAIN
from poseidon.errors import DataError, DefinitionError
from tests.support.nets import build, inputs, layer, noise, stack

# One anchor a cell, 0..15: 16 x 16.
ONE = "feat_stride: 16 base_size: 16 ratio: 1 scale: 1"
PYTHON = 'python_param {{ module: "rpn.{}" layer: "{}" param_str: "{}" }}'


def proposal(body: str, tops: str = "y s", images: int = 1, infos: int = 1) -> Net:
    blobs = f"c={images},2,1,3 d={images},4,1,3 i={infos},3"
    return build(stack(f"Proposal {blobs} > {tops} | proposal_param {{ {ONE} {body} }}"))


def given(*scores: float, high: float = 16, wide: float = 48) -> dict[str, torch.Tensor]:
    foreground = torch.tensor(scores).view(1, 1, 1, 3)
    return {
        "c": torch.cat((1 - foreground, foreground), 1),
        "d": torch.zeros(1, 4, 1, 3),
        "i": torch.tensor([[high, wide, 2.0]]),
    }


def test_boxes_in_the_order_of_their_scores() -> None:
    tops = proposal("min_size: 4")(given(0.2, 0.9, 0.5))
    # A box ends one pixel further than its anchor, and is clipped to 48 x 16.
    assert tops["y"].tolist() == [[0, 16, 0, 32, 15], [0, 32, 0, 47, 15], [0, 0, 0, 16, 15]]
    assert tops["s"].tolist() == pytest.approx([0.9, 0.5, 0.2])


def test_limits_before_and_after_suppression() -> None:
    data = given(0.2, 0.9, 0.5)
    assert len(proposal("min_size: 4 pre_nms_topn: 2")(data)["y"]) == 2
    assert len(proposal("min_size: 4 post_nms_topn: 1")(data)["y"]) == 1
    assert len(proposal("min_size: 4 pre_nms_topn: 0 post_nms_topn: 0")(data)["y"]) == 3
    data["d"][0, 0, 0, 2] = -1  # the third box moves onto the second
    assert proposal("min_size: 4 nms_thresh: 0.5")(data)["y"][:, 1].tolist() == [16, 0]


def test_small_boxes_are_dropped() -> None:
    """min_size times the scale of the image, 9 x 2, exceeds 17 pixels; the sides are clipped
    first.
    """
    assert proposal("min_size: 9")(given(0.2, 0.9, 0.5))["y"].shape == (0, 5)
    assert len(proposal("min_size: 8")(given(0.2, 0.9, 0.5))["y"]) == 3  # their sides are 16
    assert len(proposal("min_size: 4")(given(0.2, 0.9, 0.5, wide=36))["y"]) == 2


def test_several_images() -> None:
    net = proposal("min_size: 4 post_nms_topn: 2", images=2)
    data = {
        "c": torch.tensor([[0.0, 0, 0, 0.1, 0.2, 0.3], [0, 0, 0, 0.3, 0.2, 0.1]]).view(2, 2, 1, 3),
        "d": torch.zeros(2, 4, 1, 3),
        "i": torch.tensor([[16.0, 48, 1]]),
    }
    assert net(data)["y"][:, :2].tolist() == [[0, 32], [0, 16], [1, 0], [1, 16]]
    assert net.blob_shapes["y"] == (4, 5)


def anchor_target(body: str = "", objects: int = 2) -> Net:
    blobs, param = f"f=1,2,2,3 g={objects},5 i=1,3", f"anchor_target_param {{ {ONE} {body} }}"
    return build(stack(f"AnchorTarget {blobs} > l t a b | {param}"))


# The first object is the anchor of cell (0, 0); the second overlaps the one of (1, 2) most, by 1/3.
OBJECTS = torch.tensor([[0.0, 0, 15, 15, 3], [40, 16, 47, 31, 1]])
INFO = torch.tensor([[32.0, 48, 1]])


def test_labels_of_anchors() -> None:
    tops = anchor_target()({"f": noise(1, 2, 2, 3), "g": OBJECTS, "i": INFO})
    assert tops["l"].shape == (1, 1, 2, 3)
    assert tops["l"].flatten().tolist() == [1, 0, 0, 0, 0, 1]
    cells = torch.tensor([[0.0, 0, 15, 15], [32, 16, 47, 31]])
    expected = encode(cells, OBJECTS[:, :4])
    torch.testing.assert_close(tops["t"][0, :, 0, 0], expected[0])
    torch.testing.assert_close(tops["t"][0, :, 1, 2], expected[1])
    assert tops["a"].sum((1,)).flatten().tolist() == [4, 0, 0, 0, 0, 4]
    assert tops["b"].flatten().tolist() == pytest.approx([1 / 6] * 24)


def test_anchors_outside_the_image_are_ignored() -> None:
    data = {"f": noise(1, 2, 2, 3), "g": OBJECTS, "i": torch.tensor([[32.0, 47, 1]])}
    assert anchor_target()(data)["l"].flatten().tolist() == [1, 0, -1, 0, 0, -1]
    # The second object overlaps no anchor inside, and labels none. With a border its best anchor
    # counts.
    assert anchor_target("allowed_border: 1")(data)["l"].flatten().tolist() == [1, 0, 0, 0, 0, 1]


def test_options_of_anchor_targets() -> None:
    data = {"f": noise(1, 2, 2, 3), "g": OBJECTS, "i": INFO}
    clobbered = anchor_target("clobber_positives: true negative_overlap: 0.6")(data)
    assert clobbered["l"].flatten().tolist() == [1, 0, 0, 0, 0, 0]
    between = anchor_target("negative_overlap: 0")(data)
    assert between["l"].flatten().tolist() == [1, -1, -1, -1, -1, 1]
    few = anchor_target("batch_size: 3 fg_fraction: 0.4")(data)
    labels = few["l"].flatten().tolist()
    assert (labels.count(1), labels.count(0), labels.count(-1)) == (1, 2, 3)
    assert few["b"].sum() == pytest.approx(4)
    weighted = anchor_target("positive_weight: 0.25")(data)["b"][0, 0].flatten().tolist()
    assert weighted == pytest.approx([0.125, *[0.75 / 4] * 4, 0.125])
    strict = anchor_target("positive_overlap: 0.3")(data)
    assert strict["l"].flatten().tolist() == [1, 0, 0, 0, 0, 1]


def proposal_target(body: str, regions: int = 3) -> Net:
    param = f"proposal_target_param {{ {body} }}"
    return build(stack(f"ProposalTarget r={regions},5 g=2,5 > y l t a b | {param}"))


REGIONS = torch.tensor([[0.0, 0, 0, 15, 15], [0, 100, 100, 120, 120], [0, 41, 16, 47, 31]])


def test_regions_with_their_labels_and_coordinates() -> None:
    tops = proposal_target("num_classes: 4 batch_size: -1")({"r": REGIONS, "g": OBJECTS})
    # The objects themselves are candidates too.
    assert tops["y"].tolist() == [*REGIONS.tolist(), [0, 0, 0, 15, 15], [0, 40, 16, 47, 31]]
    assert tops["l"].tolist() == [3, 0, 1, 3, 1]
    wanted = encode(REGIONS[2:, 1:], OBJECTS[1:, :4])[0] / torch.tensor([0.1, 0.1, 0.2, 0.2])
    assert tops["t"].shape == (5, 16)
    torch.testing.assert_close(tops["t"][2, 4:8], wanted)
    assert tops["a"].view(5, 4, 4).sum(2).tolist() == [
        [0, 0, 0, 4], [0, 0, 0, 0], [0, 4, 0, 0], [0, 0, 0, 4], [0, 4, 0, 0],
    ]  # fmt: skip
    assert torch.equal(tops["a"], tops["b"])


def test_one_set_of_coordinates_for_all_classes() -> None:
    tops = proposal_target(
        "num_classes: 4 batch_size: -1 agnostic: true bbox_std: [1, 1, 1, 1] bbox_mean: [1, 0, 0, "
        "0]"
    )({"r": REGIONS, "g": OBJECTS})
    assert {name: tuple(top.shape[1:]) for name, top in tops.items()} == {
        "y": (5, 1, 1), "l": (1, 1, 1), "t": (8, 1, 1), "a": (8, 1, 1), "b": (8, 1, 1),
    }  # fmt: skip
    assert tops["l"].flatten().tolist() == [3, 0, 1, 3, 1]
    assert tops["t"][0, 4:].flatten().tolist() == [-1, 0, 0, 0]
    assert tops["a"][:, 4].flatten().tolist() == [1, 0, 1, 1, 1]


def test_a_sample_of_the_regions() -> None:
    net = proposal_target("num_classes: 4 batch_size: 3 fg_fraction: 0.4")
    labels = net({"r": REGIONS, "g": OBJECTS})["l"].tolist()
    assert labels[0] in (1, 3) and labels[1:] == [0]  # one background region exists
    # 8 of 8 and 6 of 8 columns: a higher fg_thresh leaves out the third region, a lower
    # bg_thresh_hi the second's place.
    strict = proposal_target("num_classes: 4 batch_size: -1 fg_thresh: 0.95 bg_thresh_hi: 0.9")
    assert strict({"r": REGIONS, "g": OBJECTS})["l"].tolist() == [3, 0, 0, 3, 1]
    none = proposal_target("num_classes: 4 batch_size: 3 bg_thresh_lo: 0.1")(
        {"r": REGIONS, "g": OBJECTS}
    )
    assert none["l"].shape == (1,)


@pytest.mark.parametrize(
    ("kind", "phase", "counts"),
    [("Proposal", TEST, (6000, 300)), ("Proposal", TRAIN, (12000, 2000))],
)
def test_the_python_layer_of_proposals_is_replaced(
    kind: str, phase: int, counts: tuple[int, int]
) -> None:
    body = PYTHON.format("proposal_layer", "ProposalLayer", "'feat_stride': 16")
    net = build(stack(f"Python c=1,18,2,2 d=1,36,2,2 i=1,3 > y | {body}"), phase=phase)
    (found,) = [module for _, module in net.layer_modules if isinstance(module, Proposal)]
    param = found.param.proposal_param
    assert (param.feat_stride, param.min_size) == (16, 16)
    assert (param.pre_nms_topn, param.post_nms_topn) == counts


def test_python_layers_of_targets_are_replaced() -> None:
    text = "'feat_stride': 8 \\n'scales': !!python/tuple [4, 8] \\n'ratios': [1]"
    body = PYTHON.format("anchor_target_layer", "AnchorTargetLayer", text)
    net = build(stack(f"Python f=1,4,2,2 g=2,5 i=1,3 > l t a b | {body}"))
    (anchors,) = [module for _, module in net.layer_modules if isinstance(module, AnchorTarget)]
    assert list(anchors.param.anchor_target_param.scale) == [4, 8] and len(anchors.base) == 2
    for classes, agnostic in ((21, False), (2, True)):  # two are R-FCN's
        text = f"'num_classes': {classes}"
        body = PYTHON.format("proposal_target_layer", "ProposalTargetLayer", text)
        net = build(stack(f"Python r=2,5 g=2,5 > y l t a b | {body}"))
        (targets,) = [one for _, one in net.layer_modules if isinstance(one, ProposalTarget)]
        assert (targets.classes, targets.options.agnostic) == (classes, agnostic)


def test_the_data_layer_of_the_reference_names_its_replacement() -> None:
    body = 'python_param { module: "roi_data_layer.layer" layer: "RoIDataLayer" param_str: "\'num_classes\': 21" }'
    with pytest.raises(DefinitionError, match='Write type: "ROIData" with roi_data_param'):
        build(layer("Python", "", "data im_info gt_boxes", body))


def test_a_module_of_the_user_takes_precedence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rpn").mkdir()
    (tmp_path / "rpn" / "__init__.py").touch()
    (tmp_path / "rpn" / "proposal_layer.py").write_text(
        "import caffe\nclass ProposalLayer(caffe.Layer):\n"
        "    def reshape(self, bottom, top): top[0].reshape(7)\n    def forward(self, bottom, "
        "top): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    body = PYTHON.format("proposal_layer", "ProposalLayer", "")
    try:
        net = build(inputs(x=(1, 2)) + layer("Python", "x", "y", body))
        assert net.blob_shapes["y"] == (7,)
    finally:
        for name in ("rpn", "rpn.proposal_layer"):
            sys.modules.pop(name, None)


def test_mistakes_in_the_data() -> None:
    with pytest.raises(DataError, match="has class 3, expected 0 to 2"):
        proposal_target("num_classes: 3")({"r": REGIONS, "g": OBJECTS})
    with pytest.raises(DataError, match="the image has no objects"):
        proposal_target("num_classes: 3")({"r": REGIONS, "g": OBJECTS[:0]})
    with pytest.raises(DataError, match="to a different image"):
        proposal_target("num_classes: 4")({"r": REGIONS + 1, "g": OBJECTS})
    with pytest.raises(DefinitionError, match="param_str has no 'feat_stride'"):
        body = PYTHON.format("proposal_layer", "ProposalLayer", "'stride': 16")
        build(stack(f"Python c=1,18,2,2 d=1,36,2,2 i=1,3 > y | {body}"))
