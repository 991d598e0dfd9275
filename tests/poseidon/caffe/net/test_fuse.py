"""Fused steps: which pairs are chosen, and that the definition step by step gives the same
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.net.compile import compile_net
from poseidon.caffe.net.fuse import fuse, norm_scale_pairs, sums_in_place
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TEST, TRAIN, NetState
from tests.support.nets import build, definition, inputs, layer, noise, stack, stacks

CONVOLUTION = (
    "convolution_param { num_output: 4 kernel_size: 3 pad: 1 weight_filler { type: 'msra' } }"
)
PICTURES = {"x": (3, 4, 5, 6)}
CONV = layer("Convolution", "x", "a", CONVOLUTION, name="conv")
NORM = layer("BatchNorm", "a", "a", name="norm")
SCALE = layer("Scale", "a", "a", "scale_param { bias_term: true }", name="scale")
RELU = layer("ReLU", "a", "a", name="relu")
SUM = layer("Eltwise", "x a", "y", name="sum")
BLOCK = CONV + NORM + SCALE + RELU + SUM


def layers(net: Net) -> list[object]:
    return [module for _, module in net.layer_modules]


PAIRS = stacks(
    """
in place: CONV; BatchNorm a > a; Scale a > a | BIAS; ReLU a > a; Eltwise x a > y
beside: CONV; BatchNorm a > b; Scale b > c | BIAS
without bias: CONV; BatchNorm a > b; Scale b > c
other axis: CONV; BatchNorm a > b; Scale b > c | scale_param { axis: 2 }
more axes: CONV; BatchNorm a > b; Scale b > c | scale_param { num_axes: 2 }
cut: CONV; BatchNorm a > b; Scale b > c | propagate_down: false
second reader: CONV; BatchNorm a > b; Scale b > c; Eltwise b c > d
in the loss: CONV; BatchNorm a > b | loss_weight: 1; Scale b > c
scale from a bottom: BatchNorm x=3,4,5,6 > b; Scale b s=4 > c
scale beside the norm: BatchNorm x=3,4,5,6 > b; Scale s=3,4,5,6 b > c | scale_param { axis: 0 }
""",
    CONV=f"Convolution x=3,4,5,6 > a | {CONVOLUTION}",
    BIAS="scale_param { bias_term: true }",
)


@pytest.mark.parametrize("name", PAIRS)
def test_which_scales_are_joined(name: str) -> None:
    net = build(PAIRS[name])
    pairs = {2: 3} if name in ("in place", "beside", "without bias") else {}
    assert norm_scale_pairs(net.plan, layers(net)) == pairs  # type: ignore[arg-type]
    assert len(fuse(net.plan, layers(net))) == len(net.plan.steps) - len(pairs)  # type: ignore[arg-type]


IP = "inner_product_param { num_output: 5 weight_filler { type: 'xavier' } }"
SUMS = stacks(
    """
second bottom: PRODUCT; Eltwise x a > y
first bottom: PRODUCT; Eltwise a x > y
product: PRODUCT; Eltwise a x > y | eltwise_param { operation: PROD }
weighted: PRODUCT; Eltwise a x > y | eltwise_param { coeff: 1 coeff: 2 }
twice: PRODUCT; Eltwise a a > y
other reader: PRODUCT; Eltwise a x > y; Sigmoid a > s
cut: PRODUCT; Eltwise a x > y | propagate_down: false propagate_down: true
backward reads the top: PRODUCT; Sigmoid a > s; Eltwise s x > y
inputs only: Eltwise x=2 z=2 > y
""",
    PRODUCT=f"InnerProduct x=3,5 > a | {IP}",
)


@pytest.mark.parametrize("name", SUMS)
def test_which_sums_run_in_place(name: str) -> None:
    net = build(SUMS[name])
    places = {"second bottom": {2: 1}, "first bottom": {2: 0}}.get(name, {})
    assert sums_in_place(net.plan, layers(net)) == places  # type: ignore[arg-type]


def trained(text: str, *, keep: bool, phase: int = TRAIN) -> list[torch.Tensor]:
    """Outputs, gradients and blobs after three passes, step by step where blobs are kept."""
    net = build(text, phase=phase)
    net.keep_blobs = keep
    found = []
    for seed in range(3):
        x = noise(*net.input_shapes["x"], seed=seed).requires_grad_()
        tops = net({"x": x})
        sum(top.square().sum() for top in tops.values()).backward()  # type: ignore[union-attr]
        found += [
            *(top.detach() for top in tops.values()),
            torch.zeros(1) if x.grad is None else x.grad,
        ]
    found += [blob.grad for blob in net.parameters() if blob.grad is not None]
    return found + [blob.detach() for blob in net.parameters()]


@pytest.mark.parametrize("phase", [TRAIN, TEST])
@pytest.mark.parametrize("name", list(PAIRS)[:8])
def test_fused_equals_step_by_step(name: str, phase: int) -> None:
    fused, plain = (trained(PAIRS[name], keep=keep, phase=phase) for keep in (False, True))
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", list(SUMS)[:-1])
def test_sums_in_place_equal_sums_beside(name: str) -> None:
    fused, plain = (trained(SUMS[name], keep=keep) for keep in (False, True))
    torch.testing.assert_close(fused, plain)


def test_statistics_are_those_of_the_definition() -> None:
    """Bit for bit: the same sums over the same blob."""
    fused, plain = (build(inputs(**PICTURES) + BLOCK) for _ in range(2))
    plain.keep_blobs = True
    for seed in range(3):
        for net in (fused, plain):
            net({"x": noise(*PICTURES["x"], seed=seed)})
    for mine, other in zip(layers(fused)[2].blobs(), layers(plain)[2].blobs(), strict=True):  # type: ignore[attr-defined]
        assert torch.equal(mine, other) and mine.any()


def test_a_scale_shared_under_another_shape_is_joined_too() -> None:
    """PERMISSIVE sharing: the blob of 2 x 2 is also the blob of 4 channels."""
    shared = "param {{ name: 's' share_mode: PERMISSIVE }}"
    own = "parameter_param { shape { dim: 2 dim: 2 } } param { name: 's' }"
    text = inputs(**PICTURES) + layer("Parameter", "", "p", own, name="own")
    text += CONV + NORM + layer("Scale", "a", "a", shared.format(), name="scale")
    text += layer("Silence", "p", "", name="quiet")
    results = []
    for keep in (False, True):
        net = build(text)
        net.keep_blobs = keep
        with torch.no_grad():
            next(net.parameters()).copy_(torch.arange(4.0).view(2, 2))
        results.append(net({"x": noise(*PICTURES["x"])})["a"])
    torch.testing.assert_close(*results)
    assert not results[0][:, 0].any() and results[0][:, 1].any()


def test_hooks_of_layers_that_run_as_one_are_called() -> None:
    net, told = build(inputs(**PICTURES) + BLOCK), list[str]()
    for name, module in net.layer_modules:
        module.register_forward_pre_hook(lambda *_, name=name: told.append(f"before {name}"))
        module.register_forward_hook(lambda *_, name=name: told.append(f"after {name}"))
    net({"x": noise(*PICTURES["x"])})
    pair = ["before norm", "before scale", "after scale", "after norm"]
    others = [f"{word} {name}" for name in ("relu", "sum") for word in ("before", "after")]
    assert told[-8:] == pair + others


NET = stack(
    """
Convolution x=2,3,8,8 > a | convolution_param { num_output: 4 kernel_size: 3 FILLED }
BatchNorm a > b
Scale b > b | scale_param { bias_term: true }
ReLU b > b
LRN b > c
Pooling c > d | pooling_param { kernel_size: 2 stride: 2 }
Pooling b > e mask | pooling_param { kernel_size: 6 }
Flatten d > f
InnerProduct f > g | inner_product_param { num_output: 3 FILLED }
Sigmoid g > h
SoftmaxWithLoss g label=2 > loss
""".replace("FILLED", "weight_filler { type: 'msra' }")
)
X = {"x": noise(2, 3, 8, 8), "label": torch.tensor([0.0, 2.0])}
IN_16_BITS = ["layer", "layer2", "layer4", "layer9"]  # convolution, norm, ReLU, product


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
    for name in ("layer5", "layer7", "layer10", "layer11"):
        assert {value.dtype for value in bottoms[name]} == {torch.float32}, name
    outputs = {name: tops[name].dtype for name, _ in net.plan.outputs}
    assert set(outputs.values()) == {torch.float32} and len(outputs) == 4
    assert net.loss.dtype is torch.float32
    assert {p.grad.dtype for p in net.parameters() if p.grad is not None} == {torch.float32}


def test_with_channels_last_other_layers_get_contiguous_bottoms() -> None:
    net = built(channels_last=True)
    bottoms, tops = seen(net)
    assert tops["layer"].is_contiguous(memory_format=torch.channels_last)
    assert all(value.is_contiguous() for value in bottoms["layer5"])
    plain = built()
    _, expected = seen(plain)
    for name, _ in net.plan.outputs:
        torch.testing.assert_close(tops[name], expected[name])
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and other.grad is not None:
            assert one.grad.is_contiguous()
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
