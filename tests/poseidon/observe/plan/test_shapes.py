"""Shapes read from nets and from torch modules."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.net.compile import compile_net
from poseidon.caffe.proto.caffe_pb2 import TEST, NetState
from poseidon.caffe.proto.definition import parse_net
from poseidon.observe.plan.shapes import elements, module_layers, net_layers

NET = """
layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }
layer { name: "conv" type: "Convolution" bottom: "x" top: "a" param { name: "w" } param { name: "b" }
  convolution_param { num_output: 3 kernel_size: 3 pad: 1 } }
layer { name: "again" type: "Convolution" bottom: "a" top: "c" param { name: "w" } param { name: "b" }
  convolution_param { num_output: 3 kernel_size: 3 pad: 1 } }
layer { name: "norm" type: "BatchNorm" bottom: "c" top: "c" }
layer { name: "scale" type: "Scale" bottom: "c" top: "c" scale_param { bias_term: true } }
layer { name: "fc" type: "InnerProduct" bottom: "c" top: "y" inner_product_param { num_output: 5 } }
"""


def test_a_net_has_the_tensors_with_gradients_once() -> None:
    definition = parse_net(NET.encode(), source="net", folder=Path())
    net = compile_net(definition, LayerContext(phase=TEST, seed=1), state=NetState(phase=TEST))
    layers = net_layers(net)
    net.close()
    assert [(layer.name, layer.tensors) for layer in layers] == [
        ("conv", ((3, 3, 3, 3), (3,), (3,), (3,))),  # with the scale and shift that follow
        ("fc", ((5, 192), (5,))),
    ]
    assert [layer.fully_connected for layer in layers] == [False, True]
    assert layers[0].work == 81 * 64


class Text(nn.Module):
    """A tied embedding, attention, and a weight used in place."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 20, bias=False)
        self.embed = nn.Embedding(20, 8)
        self.last.weight = self.embed.weight
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.inner = nn.Linear(8, 6)
        self.outer = nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = self.attention(h, h, h, need_weights=False)[0]
        h = self.frozen(h + self.outer(torch.tanh(self.inner(h)))) * self.scale
        result: Tensor = self.last(h)
        return result


def test_a_modules_layers_are_in_the_order_in_which_they_run() -> None:
    layers = module_layers(Text(), (torch.zeros(3, 5, dtype=torch.long),))
    names = [layer.name for layer in layers]
    assert names[:4] == ["embed", "attention", "inner", "outer"]
    assert "last" not in names  # its weight is the embedding's
    assert "frozen" not in names
    assert "" in names  # the scale, which the module itself owns
    by_name = {layer.name: layer for layer in layers}
    assert by_name["inner"].tensors == ((6, 8), (6,))
    assert (by_name["inner"].fully_connected, by_name["inner"].rows) == (True, 15)
    assert not by_name["embed"].fully_connected
    assert by_name["inner"].work == 48 * 15
    assert elements(layers) == sum(p.numel() for p in Text().parameters() if p.requires_grad)
