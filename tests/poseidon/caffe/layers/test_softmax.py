"""Softmax and its loss: normalizations, ignored labels, the ceiling, the second top."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from poseidon.caffe.layers.softmax import NegativeLogLikelihood, label_indices, normalizer
from poseidon.caffe.proto.caffe_pb2 import LossParameter
from tests.support.nets import build, inputs, layer, noise, stack
from tests.support.simulated_device import simulated_devices

N, C, H, W = 2, 4, 3, 2
LABELS = torch.tensor([0.0, 1, 2, 3, 1, 1, 2, 0, 1, 3, 3, 2]).reshape(N, H, W)
IGNORED = int((LABELS == 1).sum())

NORMALIZERS = [
    ("", N * H * W),
    ("loss_param { normalization: FULL }", N * H * W),
    ("loss_param { ignore_label: 1 normalization: FULL }", N * H * W),
    ("loss_param { ignore_label: 1 }", N * H * W - IGNORED),
    ("loss_param { ignore_label: 1 normalization: VALID }", N * H * W - IGNORED),
    ("loss_param { ignore_label: 1 normalization: BATCH_SIZE }", N),
    ("loss_param { ignore_label: 1 normalization: NONE }", 1),
    ("loss_param { ignore_label: 1 normalize: true }", N * H * W - IGNORED),
    ("loss_param { ignore_label: 1 normalize: false }", N),
    ("loss_param { ignore_label: 1 normalize: false normalization: FULL }", N * H * W),
]


@pytest.mark.parametrize(("body", "divisor"), NORMALIZERS)
def test_normalizations(body: str, divisor: int) -> None:
    net = build(inputs(x=(N, C, H, W), l=(N, H, W)) + layer("SoftmaxWithLoss", "x l", "loss", body))
    x = noise(N, C, H, W).requires_grad_()
    net({"x": x, "l": LABELS})
    net.loss.backward()  # type: ignore[no-untyped-call]
    y = noise(N, C, H, W).requires_grad_()
    ignored = 1 if "ignore_label" in body else -100
    expected = (
        functional.cross_entropy(y, LABELS.long(), ignore_index=ignored, reduction="sum") / divisor
    )
    expected.backward()
    torch.testing.assert_close(net.loss, expected)
    torch.testing.assert_close(x.grad, y.grad)


def test_the_class_axis_may_be_another() -> None:
    net = build(stack("SoftmaxWithLoss x=2,3,4 l=2,3 > loss | softmax_param { axis: -1 }"))
    x, label = noise(2, 3, 4), torch.tensor([[0.0, 1, 2], [3, 2, 1]])
    net({"x": x, "l": label})
    torch.testing.assert_close(
        net.loss, functional.cross_entropy(x.reshape(6, 4), label.long().flatten())
    )


def test_nothing_but_ignored_labels_is_no_loss() -> None:
    net = build(stack("SoftmaxWithLoss x=2,3 l=2 > loss | loss_param { ignore_label: -1 }"))
    net({"x": noise(2, 3), "l": torch.full((2,), -1.0)})
    assert float(net.loss) == 0


@pytest.mark.parametrize("label", [1, -1])
def test_a_device_counts_ignored_labels_without_a_wait(label: int) -> None:
    labels = torch.full((6, 1, 1), float(label))
    labels[:4] = 0.0
    with simulated_devices(1, 5) as (device,):
        ends = []
        for x, given in ((noise(6, 3, 1), labels), (noise(6, 3, 1), labels)):
            if ends:
                x, given = x.to(device.torch), given.to(device.torch)
                device.waits.clear()
            x.requires_grad_()
            index, ignored = label_indices(given, 3, label)
            divisor = normalizer(LossParameter.VALID, 6, index, ignored)
            loss, _ = NegativeLogLikelihood.apply(x, index, ignored, None, divisor)  # type: ignore[no-untyped-call]
            loss.backward()
            assert not device.waits
            assert x.grad is not None
            ends.append((loss.detach().cpu(), x.grad.cpu()))
        for one, other in zip(*ends, strict=True):
            assert torch.equal(one, other)


def test_the_loss_stops_at_caffes_ceiling_and_the_gradient_does_not() -> None:
    net = build(inputs(x=(1, 2), l=(1,)) + layer("SoftmaxWithLoss", "x l", "loss"))
    x = torch.tensor([[500.0, 0.0]], requires_grad=True)
    net({"x": x, "l": torch.ones(1)})
    net.loss.backward()  # type: ignore[no-untyped-call]
    assert float(net.loss.detach()) == pytest.approx(87.3365, abs=1e-4)
    assert x.grad is not None and x.grad.tolist() == [[1, -1]]


def test_the_second_top_is_the_softmax() -> None:
    net = build(inputs(x=(2, 3), l=(2,)) + layer("SoftmaxWithLoss", "x l", "loss p"))
    x = noise(2, 3).requires_grad_()
    tops = net({"x": x, "l": torch.zeros(2)})
    torch.testing.assert_close(tops["p"], torch.softmax(x, 1).detach())
    assert not tops["p"].requires_grad
