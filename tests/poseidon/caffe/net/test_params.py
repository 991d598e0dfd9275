"""Owners, sharers and multipliers, in Caffe's order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from poseidon.caffe.net.params import derive_seed
from tests.support.nets import build, inputs, layer, noise

IP = "inner_product_param { num_output: 3 weight_filler { type: 'xavier' } }"


def two(first: str, second: str, body: str = IP) -> str:
    return (
        inputs(x=(2, 3))
        + layer("InnerProduct", "x", "a", f"{first} {IP}", name="i1")
        + layer("InnerProduct", "a", "b", f"{second} {body}", name="i2")
    )


def test_order_and_multipliers() -> None:
    net = build(
        two("param { lr_mult: 2 decay_mult: 0.5 } param { lr_mult: 0 }", "param { decay_mult: 0 }")
    )
    found = [(info.name, info.shape, info.lr_mult, info.decay_mult) for info in net.parameters_info]
    first, second = [("i1.0", (3, 3), 2, 0.5), ("i1.1", (3,), 0, 1)], [("i2.0", (3, 3), 1, 0)]
    assert found == [*first, *second, ("i2.1", (3,), 1, 1)]
    learn = [info.parameter.requires_grad for info in net.parameters_info]
    assert learn == [True, False, True, True]
    assert [tuple(p.shape) for p in net.parameters()] == [(3, 3), (3,), (3, 3), (3,)]


def test_sharers_are_one_tensor_and_offer_no_factors() -> None:
    net = build(two("param { name: 'w' } param { lr_mult: 3 }", "param { name: 'w' lr_mult: 4 }"))
    assert [(info.name, info.lr_mult, info.factors) for info in net.parameters_info] == [
        ("i1.0", 4, False),
        ("i1.1", 3, False),
        ("i2.1", 1, False),
    ]
    layers = dict(net.layer_modules)
    assert layers["i1"].blobs()[0] is layers["i2"].blobs()[0]
    blobs = {name: arrays for name, _, arrays in net.layer_blobs()}
    assert (blobs["i1"][0] == blobs["i2"][0]).all()


def test_permissive_sharing_under_another_shape() -> None:
    """Same values in the same order, whatever the shape; the gradients of both uses meet in the
    owner.
    """
    turned = "inner_product_param { num_output: 3 transpose: true bias_term: false }"
    plain = IP.replace("3", "3 bias_term: false", 1)
    text = inputs(x=(2, 4)) + layer(
        "InnerProduct", "x", "a", f"param {{ name: 'w' }} {plain}", name="i1"
    )
    other = f"param {{ name: 'w' share_mode: PERMISSIVE }} {turned}"
    net = build(text + layer("InnerProduct", "x", "b", other, name="i2"))
    (info,) = net.parameters_info
    x = noise(2, 4)
    tops = net({"x": x})
    weight = info.parameter.detach()
    torch.testing.assert_close(tops["a"], x @ weight.t())
    torch.testing.assert_close(tops["b"], x @ weight.view(4, 3))
    (tops["a"].sum() + tops["b"].sum()).backward()
    ones = torch.ones(2, 3)
    torch.testing.assert_close(info.parameter.grad, ones.t() @ x + (x.t() @ ones).view(3, 4))
    net.load_blobs([("i2", [np.arange(12.0).reshape(4, 3)])])
    torch.testing.assert_close(info.parameter.detach(), torch.arange(12.0).reshape(3, 4))
    assert [blob.shape for _, _, blobs in net.layer_blobs() for blob in blobs] == [(3, 4), (4, 3)]


def test_a_definition_may_hold_the_first_values() -> None:
    """In the shapes of every format; not of a blob that another layer owns, or another net."""
    old = "blobs { num: 1 channels: 1 height: 1 width: 3 data: [1, 2, 3] }"
    body = f"inner_product_param {{ num_output: 1 }} {old} blobs {{ shape {{ dim: 1 }} double_data: 4 }}"
    text = inputs(x=(2, 3)) + layer("InnerProduct", "x", "y", body, name="i")
    net = build(text)
    weight, bias = net.layer_modules[1][1].blobs()
    assert (weight.tolist(), bias.tolist()) == ([[1, 2, 3]], [4])
    weight.data.zero_()
    assert build(text, share_with=net).layer_modules[1][1].blobs()[0] is weight
    owner = layer("Bias", "x", "a", "param { name: 'b' }", name="owner")
    sharer = layer(
        "Bias", "x", "b", "param { name: 'b' } blobs { shape { dim: 3 } data: [1, 2, 3] }", name="s"
    )
    net = build(inputs(x=(2, 3)) + owner + sharer)
    assert net.layer_modules[2][1].blobs()[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("names", "distinct"),
    [
        (("same", "same", "same"), ["same", "same#2", "same#3"]),
        (("", "", "x"), ["", "#2", "x"]),
        (("same#2", "same", "same"), ["same#2", "same", "same#3"]),
    ],
)
def test_layers_of_one_name_have_tensors_of_distinct_names(
    names: tuple[str, str, str], distinct: list[str]
) -> None:
    """As Caffe, which compares no names; a layer without blobs never takes the name."""
    text = inputs(x=(2, 3)) + layer("ReLU", "x", "y", name=names[0])
    text += layer("InnerProduct", "y", "a", IP, name=names[0])
    text += layer("InnerProduct", "a", "b", f"param {{ lr_mult: 0 }} {IP}", name=names[1])
    text += layer("InnerProduct", "b", "c", IP, name=names[2])
    net = build(text)
    wanted = [f"{name}.{index}" for name in distinct for index in range(2)]
    assert [info.name for info in net.parameters_info] == wanted
    assert [info.parameter.requires_grad for info in net.parameters_info][2:4] == [False, True]
    assert len(net.layers_by_name) == 5
    shared = build(text, share_with=net)
    assert all(
        own is other
        for (_, a), (_, b) in zip(net.layer_modules, shared.layer_modules, strict=True)
        for own, other in zip(a.sources(), b.sources(), strict=True)
    )


def test_known_value() -> None:
    assert derive_seed(1, "blob", 0) == 8457014270289692312


def test_every_part_matters() -> None:
    seeds = [
        derive_seed(*path)
        for path in ((1, "a", 0), (1, "a", 1), (1, "b", 0), (2, "a", 0), (12, "a"), (1, "2a"))
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
