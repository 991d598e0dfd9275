"""Split layers are Caffe's: names, order, weights."""

from __future__ import annotations

import pytest

from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.proto.caffe_pb2 import TEST, NetState
from poseidon.errors import DefinitionError
from poseidon.pycaffe.graph import build, insert_splits
from tests.support.nets import definition, inputs, layer


def lines(text: str) -> list[str]:
    """Each layer as `name: bottoms -> tops (weights)`."""
    found = []
    for entry in insert_splits(definition(text)).param.layer:
        weights = f" {list(entry.loss_weight)}" if entry.loss_weight else ""
        found.append(f"{entry.name}: {' '.join(entry.bottom)} -> {' '.join(entry.top)}{weights}")
    return found


def test_one_reader_needs_no_split() -> None:
    text = inputs(x=(1, 2)) + layer("ReLU", "x", "y")
    assert lines(text) == ["in_x:  -> x", "layer: x -> y"]


def test_each_reader_has_its_part() -> None:
    text = (
        inputs(x=(1, 2))
        + layer("ReLU", "x", "y", name="a")
        + layer("Eltwise", "x y x", "z", name="b")
    )
    assert lines(text) == [
        "in_x:  -> x",
        "x_in_x_0_split: x -> x_in_x_0_split_0 x_in_x_0_split_1 x_in_x_0_split_2",
        "a: x_in_x_0_split_0 -> y",
        "b: x_in_x_0_split_1 y x_in_x_0_split_2 -> z",
    ]


def test_after_an_in_place_layer_the_split_is_of_its_top() -> None:
    text = inputs(x=(1, 2)) + layer("Power", "x", "y", name="p") + layer("ReLU", "y", "y", name="r")
    text += layer("ReLU", "y", "a", name="a") + layer("ReLU", "y", "b", name="b")
    assert lines(text)[2:] == [
        "r: y -> y",
        "y_r_0_split: y -> y_r_0_split_0 y_r_0_split_1",
        "a: y_r_0_split_0 -> a",
        "b: y_r_0_split_1 -> b",
    ]


def test_a_weighing_top_that_is_read_gives_its_weight_to_the_split() -> None:
    text = (
        inputs(x=(1, 2))
        + layer("Power", "x", "y", "loss_weight: 3", name="p")
        + layer("ReLU", "y", "z", name="r")
    )
    assert lines(text)[1:] == [
        "p: x -> y",
        "y_p_0_split: y -> y_p_0_split_0 y_p_0_split_1 [3.0, 0.0]",
        "r: y_p_0_split_1 -> z",
    ]


def test_each_split_has_the_line_of_its_layer() -> None:
    text = (
        inputs(x=(1, 2))
        + "\n"
        + layer("ReLU", "x", "y", name="a")
        + "\n"
        + layer("ReLU", "x", "z", name="b")
    )
    assert insert_splits(definition(text)).layer_lines == (1, 1, 2, 3)


def test_in_place_on_what_others_read_is_refused_as_by_caffe() -> None:
    text = inputs(x=(1, 2)) + layer("Power", "x", "y", name="p") + layer("ReLU", "y", "a", name="a")
    net = definition(text + layer("ReLU", "y", "y", name="b"))
    with pytest.raises(DefinitionError, match=r"layer 'b' \(ReLU\): runs in place on 'y'"):
        build(net, LayerContext(phase=TEST, seed=1), NetState(phase=TEST))
