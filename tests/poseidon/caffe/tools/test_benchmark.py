"""Every layer's time is its own, and the net runs as it would."""

from __future__ import annotations

import itertools

import pytest
import torch

from poseidon.caffe.proto.caffe_pb2 import TEST
from poseidon.caffe.tools.benchmark import Stopwatch, backward, clock_of, time_net
from tests.support.nets import build, inputs, layer, noise

CONV = (
    'convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "gaussian" std: 1 } }'
)
TEXT = (
    inputs(x=(2, 3, 8, 8), t=(2, 5))
    + layer("Convolution", "x", "c", CONV, name="conv")
    + layer("BatchNorm", "c", "n", name="norm")
    + layer("Scale", "n", "s", name="scale")
    + layer("ReLU", "s", "s", name="relu")
    + layer("InnerProduct", "s", "ip", "inner_product_param { num_output: 5 }", name="ip")
)
LOSS = layer("EuclideanLoss", "ip t", "loss", name="loss")


def ticks() -> float:
    return float(next(COUNTER))


COUNTER = itertools.count()


@pytest.mark.parametrize("text", [TEXT + LOSS, TEXT], ids=["a loss", "no loss"])
def test_every_layer_that_computes_has_a_time(text: str) -> None:
    """On a clock that ticks when read, a layer that is measured takes time and no other does."""
    said: list[str] = []
    times = time_net(build(text), 3, lambda line: said.append(line.text), clock=ticks)
    found = {layer.name: (layer.forward_ms > 0, layer.backward_ms > 0) for layer in times.layers}
    both = (True, True)
    expected = {"in_x": (False, False), "in_t": (False, False)}
    expected |= dict.fromkeys(("conv", "norm", "scale", "relu", "ip"), both)
    assert found == expected | ({"loss": both} if "loss" in text else {})
    assert said[0] == "Performing Forward"
    assert said[1].startswith("Initial loss: ")
    assert sum(line.startswith("Iteration: ") for line in said) == 3
    assert said[-1] == "*** Benchmark ends ***"


def test_layers_share_no_node() -> None:
    net = build(TEXT + LOSS)
    stopwatch = Stopwatch(ticks)
    with stopwatch.watching(net):
        backward(net, net({"x": noise(2, 3, 8, 8), "t": noise(2, 5)}))
        nodes = len(stopwatch._seen)
    # A node of its own is two readings; on this clock each reading is a second.
    assert sum(stopwatch.backward_s.values()) == nodes
    assert not stopwatch._seen


def test_measuring_changes_no_gradient() -> None:
    given = {"x": noise(2, 3, 8, 8), "t": noise(2, 5)}
    gradients = []
    for watched in (False, True):
        net = build(TEXT + LOSS)
        stopwatch = Stopwatch(clock_of(torch.device("cpu")))
        if watched:
            with stopwatch.watching(net):
                backward(net, net(given))
        else:
            net.keep_blobs = True
            backward(net, net(given))
        gradients.append([info.parameter.grad for info in net.parameters_info])
    for plain, measured in zip(*gradients, strict=True):
        assert (plain is None and measured is None) or torch.equal(plain, measured)


def test_a_net_that_learns_nothing_is_measured_forward() -> None:
    net = build(inputs(x=(1, 2)) + layer("ReLU", "x", "y"), phase=TEST)
    times = time_net(net, 1, lambda line: None, clock=ticks)
    assert [(layer.forward_ms > 0, layer.backward_ms) for layer in times.layers] == [
        (False, 0),
        (True, 0),
    ]
