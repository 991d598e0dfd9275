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
from tests.support.nets import build, definition, inputs, layer, noise

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


def norm_to(scale: str, *others: str, head: str = "", norm: str = "b") -> str:
    """A BatchNorm with a top of its own, a Scale of these fields over it, and other layers."""
    text = head + inputs(**PICTURES) + CONV + layer("BatchNorm", "a", norm, name="norm")
    return text + layer("Scale", norm, "c", scale, name="scale") + "".join(others)


PAIRS = [
    ("in_place", inputs(**PICTURES) + BLOCK, {2: 3}),
    ("beside", norm_to("scale_param { bias_term: true }"), {2: 3}),
    ("without_bias", norm_to(""), {2: 3}),
    ("other_axis", norm_to("scale_param { axis: 2 }"), {}),
    ("more_axes", norm_to("scale_param { num_axes: 2 }"), {}),
    ("cut", norm_to("propagate_down: false"), {}),
    ("second_reader", norm_to("", layer("Eltwise", "b c", "d", name="sum")), {}),
    ("in_the_loss", norm_to("").replace('name: "norm"', 'name: "norm" loss_weight: 1'), {}),
    (
        "scale_from_a_bottom",
        inputs(**PICTURES, s=(4,))
        + layer("BatchNorm", "x", "b", name="norm")
        + layer("Scale", "b s", "c", name="scale"),
        {},
    ),
    (
        "scale_beside_the_norm",
        inputs(**PICTURES, s=(3, 4, 5, 6))
        + layer("BatchNorm", "x", "b", name="norm")
        + layer("Scale", "s b", "c", "scale_param { axis: 0 }", name="scale"),
        {},
    ),
]


@pytest.mark.parametrize(
    ("text", "pairs"), [case[1:] for case in PAIRS], ids=[case[0] for case in PAIRS]
)
def test_which_scales_are_joined(text: str, pairs: dict[int, int]) -> None:
    net = build(text)
    assert norm_scale_pairs(net.plan, layers(net)) == pairs  # type: ignore[arg-type]
    assert len(fuse(net.plan, layers(net))) == len(net.plan.steps) - len(pairs)  # type: ignore[arg-type]


IP = "inner_product_param { num_output: 5 weight_filler { type: 'xavier' } }"
TWO = inputs(x=(3, 5)) + layer("InnerProduct", "x", "a", IP, name="first")
SUMS = [
    ("second_bottom", TWO + layer("Eltwise", "x a", "y", name="sum"), {2: 1}),
    ("first_bottom", TWO + layer("Eltwise", "a x", "y", name="sum"), {2: 0}),
    (
        "product",
        TWO + layer("Eltwise", "a x", "y", "eltwise_param { operation: PROD }", name="sum"),
        {},
    ),
    (
        "weighted",
        TWO + layer("Eltwise", "a x", "y", "eltwise_param { coeff: 1 coeff: 2 }", name="sum"),
        {},
    ),
    ("twice", TWO + layer("Eltwise", "a a", "y", name="sum"), {}),
    (
        "other_reader",
        TWO + layer("Eltwise", "a x", "y", name="sum") + layer("Sigmoid", "a", "s", name="s"),
        {},
    ),
    (
        "cut",
        TWO
        + layer("Eltwise", "a x", "y", "propagate_down: false propagate_down: true", name="sum"),
        {},
    ),
    ("inputs_only", inputs(x=(2,), z=(2,)) + layer("Eltwise", "x z", "y", name="sum"), {}),
    (
        "backward_reads_the_top",
        TWO + layer("Sigmoid", "a", "s", name="s") + layer("Eltwise", "s x", "y", name="sum"),
        {},
    ),
]


@pytest.mark.parametrize(
    ("text", "places"), [case[1:] for case in SUMS], ids=[case[0] for case in SUMS]
)
def test_which_sums_run_in_place(text: str, places: dict[int, int]) -> None:
    net = build(text)
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
@pytest.mark.parametrize(
    "text", [case[1] for case in PAIRS[:8]], ids=[case[0] for case in PAIRS[:8]]
)
def test_fused_equals_step_by_step(text: str, phase: int) -> None:
    fused, plain = (trained(text, keep=keep, phase=phase) for keep in (False, True))
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("text", [case[1] for case in SUMS if "z" not in case[1].split('"')])
def test_sums_in_place_equal_sums_beside(text: str) -> None:
    fused, plain = (trained(text, keep=keep) for keep in (False, True))
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
    text = inputs(**PICTURES) + layer(
        "Parameter",
        "",
        "p",
        "parameter_param { shape { dim: 2 dim: 2 } } param { name: 's' }",
        name="own",
    )
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
