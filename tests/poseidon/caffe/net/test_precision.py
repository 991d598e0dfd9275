"""Which layers compute in 16 bits and with channels last, and that the rest of a net is float32."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.net.compile import compile_net
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TRAIN, NetState
from tests.support.nets import definition, inputs, layer, noise

FILLED = "weight_filler { type: 'msra' }"
NET = "".join(
    [
        inputs(x=(2, 3, 8, 8), label=(2,)),
        layer(
            "Convolution",
            "x",
            "a",
            f"convolution_param {{ num_output: 4 kernel_size: 3 {FILLED} }}",
            name="conv",
        ),
        layer("BatchNorm", "a", "b", name="norm"),
        layer("Scale", "b", "b", "scale_param { bias_term: true }", name="scale"),
        layer("ReLU", "b", "b", name="relu"),
        layer("LRN", "b", "c", name="lrn"),
        layer("Pooling", "c", "d", "pooling_param { kernel_size: 2 stride: 2 }", name="pool"),
        layer("Pooling", "b", "e mask", "pooling_param { kernel_size: 6 }", name="masked"),
        layer("Flatten", "d", "f", name="flat"),
        layer(
            "InnerProduct", "f", "g", f"inner_product_param {{ num_output: 3 {FILLED} }}", name="ip"
        ),
        layer("Sigmoid", "g", "h", name="sigmoid"),
        layer("SoftmaxWithLoss", "g label", "loss", name="loss"),
    ]
)
X = {"x": noise(2, 3, 8, 8), "label": torch.tensor([0.0, 2.0])}
IN_16_BITS = ["conv", "norm", "relu", "ip"]


def built(autocast: torch.dtype | None = None, *, channels_last: bool = False) -> Net:
    context = LayerContext(phase=TRAIN, seed=1, autocast=autocast, channels_last=channels_last)
    return compile_net(definition(NET), context, state=NetState(phase=TRAIN))


def seen(net: Net) -> tuple[dict[str, list[Tensor]], dict[str, Tensor]]:
    """Run a net forward and backward; the bottoms of each layer, and the tops."""
    bottoms: dict[str, list[Tensor]] = {}
    tops: dict[str, Tensor] = {}

    def note(name: str, given: Sequence[Tensor], top: object) -> None:
        bottoms[name] = [value.detach() for value in given]
        tops[name] = top.detach() if isinstance(top, Tensor) else top[0].detach()  # type: ignore[index]

    for name, of in net.layer_modules:
        of.register_forward_hook(lambda _, given, top, name=name: note(name, given, top))  # type: ignore[misc]
    outputs = net(X)
    net.loss.backward()
    return bottoms, {**tops, **outputs}


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_products_and_what_keeps_a_type_have_16_bits(kind: torch.dtype) -> None:
    net = built(kind)
    bottoms, tops = seen(net)
    assert [name for name in IN_16_BITS if tops[name].dtype is kind] == IN_16_BITS
    for name in ("lrn", "masked", "sigmoid", "loss"):
        assert {value.dtype for value in bottoms[name]} == {torch.float32}, name
    outputs = {name: tops[name].dtype for name, _ in net.plan.outputs}
    assert set(outputs.values()) == {torch.float32} and len(outputs) == 4
    assert net.loss.dtype is torch.float32
    assert {p.grad.dtype for p in net.parameters() if p.grad is not None} == {torch.float32}


def test_with_channels_last_other_layers_get_contiguous_bottoms() -> None:
    net = built(channels_last=True)
    bottoms, tops = seen(net)
    assert tops["conv"].is_contiguous(memory_format=torch.channels_last)
    assert all(value.is_contiguous() for value in bottoms["lrn"])
    plain = built()
    _, expected = seen(plain)
    for name, _ in net.plan.outputs:
        torch.testing.assert_close(tops[name], expected[name])
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and other.grad is not None:
            assert one.grad.is_contiguous()
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
