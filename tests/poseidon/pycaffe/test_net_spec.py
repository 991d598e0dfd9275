"""Nets written as Python expressions."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

import poseidon.pycaffe as caffe
from poseidon.caffe.proto.caffe_pb2 import LayerParameter, NetParameter, PoolingParameter
from poseidon.pycaffe import NetSpec, net_spec
from poseidon.pycaffe import layers as L
from poseidon.pycaffe import params as P
from poseidon.pycaffe.net_spec import Top, assign_proto, param_name_dict, to_proto


def numbers(ntop: int = 1) -> Top | tuple[Top, ...]:
    made: Top | tuple[Top, ...] = L.DummyData(shape={"dim": [2, 3, 8, 8]}, ntop=ntop)
    return made


def classifier() -> NetSpec:
    n = NetSpec()
    n.data, n.label = L.DummyData(shape=[{"dim": [2, 3, 8, 8]}, {"dim": [2]}], ntop=2)
    n.conv = L.Convolution(
        n.data,
        num_output=4,
        kernel_size=[3, 5],
        param=[{"lr_mult": 1}, {"lr_mult": 2, "decay_mult": 0}],
        weight_filler={"type": "xavier"},
    )
    n.relu = L.ReLU(n.conv, in_place=True)
    n.pool = L.Pooling(n.relu, pool=P.Pooling.MAX, kernel_size=2, stride=2)
    n.score = L.InnerProduct(n.pool, num_output=5, include={"phase": "TRAIN", "stage": ["a", "b"]})
    n.loss = L.SoftmaxWithLoss(n.score, n.label, loss_weight=2)
    return n


def test_the_definition_equals_a_hand_written_one() -> None:
    typed = """
    layer { name: "data" type: "DummyData" top: "data" top: "label"
      dummy_data_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } shape { dim: 2 } } }
    layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
      param { lr_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
      convolution_param { num_output: 4 kernel_size: 3 kernel_size: 5 weight_filler { type: "xavier" } } }
    layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
    layer { name: "pool" type: "Pooling" bottom: "conv" top: "pool" pooling_param { pool: MAX kernel_size: 2 stride: 2 } }
    layer { name: "score" type: "InnerProduct" bottom: "pool" top: "score" include { phase: TRAIN stage: "a" stage: "b" }
      inner_product_param { num_output: 5 } }
    layer { name: "loss" type: "SoftmaxWithLoss" bottom: "score" bottom: "label" top: "loss" loss_weight: 2 }
    """
    assert classifier().to_proto() == text_format.Parse(typed, NetParameter())


def test_what_it_prints_can_be_read_and_run(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "net.prototxt"
    path.write_text(str(classifier().to_proto()))
    net = caffe.Net(str(path), caffe.TRAIN, stages=["a", "b"])
    assert list(net.forward()) == ["loss"]


def test_unnamed_layers_are_numbered_by_type() -> None:
    data = numbers()
    one = L.Convolution(data, num_output=1, kernel_size=1)
    two = L.Convolution(one, num_output=1, kernel_size=1)
    net = to_proto(L.Eltwise(one, two))
    names = " ".join(layer.name for layer in net.layer)
    assert names == "DummyData1 Convolution1 Convolution2 Eltwise1"
    assert list(net.layer[3].bottom) == ["Convolution1", "Convolution2"]


def test_a_layer_is_before_those_that_need_it() -> None:
    n = NetSpec()
    late = numbers()
    n.sum = L.Eltwise(L.ReLU(late), late)
    n.data = late
    assert [layer.name for layer in n.to_proto().layer] == ["data", "ReLU1", "sum"]


def test_no_tops_and_several() -> None:
    n = NetSpec()
    n.a, n.b = numbers(ntop=2)
    n.silence = L.Silence(n.a, n.b, ntop=0)
    layers = n.to_proto().layer
    assert (list(layers[0].top), list(layers[1].bottom), list(layers[1].top)) == (
        ["a", "b"],
        ["a", "b"],
        [],
    )
    assert layers[1].name == "silence"


def test_a_deep_net_needs_no_deep_stack() -> None:
    top = numbers()
    for _ in range(3000):
        top = L.ReLU(top)
    assert len(to_proto(top).layer) == 3001


def test_settings_of_other_messages() -> None:
    layer = to_proto(
        L.Deconvolution(numbers(), convolution_param={"num_output": 2}, name="up")
    ).layer[1]
    assert (layer.name, layer.convolution_param.num_output) == ("up", 2)


def test_a_tuple_is_no_top() -> None:
    with pytest.raises(TypeError, match=r"^Silence input 0 is not a Top \(type is <class"):
        L.Silence(numbers(ntop=2), ntop=0)


def test_a_field_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match=r"num_outputs"):
        to_proto(L.InnerProduct(numbers(), num_outputs=3))


def test_items_as_attributes() -> None:
    n = NetSpec()
    n["data"] = numbers()
    assert n.data is n["data"] and "data" in n
    del n["data"]
    with pytest.raises(AttributeError, match="data"):
        _ = n.data


def test_enums() -> None:
    assert P.Pooling.AVE == PoolingParameter.AVE
    with pytest.raises(AttributeError, match="NoSuchParameter"):
        _ = P.NoSuch


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("top", "one", 'top: "one"'),
        ("top", ["one", "two"], 'top: "one" top: "two"'),
        ("param", {"lr_mult": 3}, "param { lr_mult: 3 }"),
        ("blob_of_none", 1, None),
        ("relu_param", {}, "relu_param { }"),
        ("phase", "TEST", "phase: TEST"),
    ],
)
def test_assign(name: str, value: object, expected: str | None) -> None:
    layer = LayerParameter()
    if expected is None:
        with pytest.raises(AttributeError, match=name):
            assign_proto(layer, name, value)
    else:
        assign_proto(layer, name, value)
        assert layer == text_format.Parse(expected, LayerParameter())


def test_every_type_knows_its_own_settings() -> None:
    fields = param_name_dict()
    assert (fields["Convolution"], fields["LRN"], fields["HDF5Data"]) == (
        "convolution_param",
        "lrn_param",
        "hdf5_data_param",
    )


def test_uncamel() -> None:
    names = ("InnerProduct", "LRN", "HDF5Data", "PReLU", "SoftmaxWithLoss", "data")
    found = ["inner_product", "lrn", "hd_f5_data", "p_relu", "softmax_with_loss", "data"]
    assert [net_spec.uncamel(name) for name in names] == found
