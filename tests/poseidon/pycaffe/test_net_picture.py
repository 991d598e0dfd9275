"""Which boxes, sections and arrows a drawing has; that it can be read is for the eye."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.caffe.proto.caffe_pb2 import TRAIN, LayerParameter, NetState
from poseidon.caffe.proto.definition import filter_net, read_net
from poseidon.pycaffe.net_picture import boxes_of, columns_for, picture_graph, sections


def layer(name: str, bottoms: str, tops: str, kind: str = "Power") -> LayerParameter:
    return LayerParameter(name=name, type=kind, bottom=bottoms.split(), top=tops.split())


def chain(length: int) -> list[LayerParameter]:
    """Layer k reads blob k and makes blob k + 1."""
    return [
        layer("data", "", "0", "Input"),
        *(layer(f"l{k}", f"{k}", f"{k + 1}") for k in range(length)),
    ]


def test_layers_in_place_share_a_box_unless_somebody_read_the_blob_before() -> None:
    layers = [
        layer("data", "", "x t", "Data"),
        layer("conv", "x", "y"),
        layer("relu", "y", "y", "ReLU"),
        layer("reader", "y", "z"),
        layer("late", "y", "y", "ReLU"),
        layer("loss", "y t", "", "EuclideanLoss"),
    ]
    boxes = boxes_of(layers)
    assert [[of.name for of in box.layers] for box in boxes] == [
        ["data"],
        ["conv", "relu"],
        ["reader"],
        ["late"],
        ["loss"],
    ]
    assert boxes[-1].inputs == [(3, "y"), (0, "t")]
    assert [box.level for box in boxes] == [0, 1, 2, 2, 3]


def test_a_cut_goes_where_few_blobs_cross() -> None:
    """In the middle of this net two branches are open; the cut avoids them."""
    layers = chain(20)
    layers.insert(10, layer("side", "8", "s"))
    layers.insert(13, layer("join", "s 11", "j"))
    boxes = boxes_of(layers)
    place = sections(boxes, 2)
    crossing = {
        blob
        for box, mine in zip(boxes, place, strict=True)
        for made, blob in box.inputs
        if place[made] != mine
    }
    assert len(crossing) == 1
    assert set(place) == {0, 1}


def test_a_cut_arrow_goes_on_at_its_letter() -> None:
    layers = [*chain(40), layer("again", "20", "a"), layer("loss", "a 40 0", "loss")]
    text = picture_graph(layers, shapes={"20": (3, 4)}).to_string()
    assert columns_for(boxes_of(layers)) > 1
    assert "in_A_1" in text and "out_A" in text
    assert "3x4" in text
    assert '"0_to_42"' in text  # the data is named beside the layer, far below, that reads it again


def test_short_nets_are_not_cut() -> None:
    assert columns_for(boxes_of(chain(10))) == 1
    assert columns_for([]) == 1
    assert picture_graph([]).to_string()


@pytest.mark.parametrize(
    "net", ["googlenet/train_val", "resnet/resnet152_train_val", "fcn/fcn8s_train_val"]
)
def test_every_layer_and_blob_of_a_large_net_is_drawn(repository: Path, net: str) -> None:
    definition = read_net(repository / "prototxt" / f"{net}.prototxt")
    layers = filter_net(definition, NetState(phase=TRAIN)).param.layer
    boxes = boxes_of(layers)
    assert sum(len(box.layers) for box in boxes) == len(layers)
    text = picture_graph(layers).to_string()
    assert all(f"b{number} [" in text for number in range(len(boxes)))
    assert text.count(" -> ") >= sum(len(box.inputs) for box in boxes)
