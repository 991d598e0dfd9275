"""BatchNorm: Caffe's three blobs over several passes, what the test phase reads, and who may
move them.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from poseidon.caffe.layers.neuron.batch_norm import BatchNorm
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TEST
from poseidon.errors import DefinitionError
from tests.support.nets import build, inputs, layer, noise


def norm(shape: tuple[int, ...], fields: str = "", **how: int) -> Net:
    """A net of one BatchNorm."""
    return build(
        inputs(x=shape) + layer("BatchNorm", "x", "y", f"batch_norm_param {{ {fields} }}"), **how
    )  # type: ignore[arg-type]


def blobs(net: Net) -> list[torch.Tensor]:
    return [blob.detach().clone() for blob in net.layer_modules[-1][1].blobs()]


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (4, 3, 2, 5), (2, 3, 2, 2, 2)])
@pytest.mark.parametrize("fields", ["", "moving_average_fraction: 0.5 eps: 0.1"])
def test_three_passes(shape: tuple[int, ...], fields: str) -> None:
    net = norm(shape, fields)
    fraction, eps = (0.5, 0.1) if fields else (0.999, 1e-5)
    mean, variance, factor = torch.zeros(3), torch.zeros(3), 0.0
    for seed in range(3):
        x = noise(*shape, seed=seed) * 2 + 1
        y = net({"x": x})["y"]
        values = x.transpose(0, 1).flatten(1)
        torch.testing.assert_close(y, functional.batch_norm(x, None, None, training=True, eps=eps))
        mean = fraction * mean + values.mean(1)
        variance = fraction * variance + values.var(1, unbiased=True)
        factor = fraction * factor + 1
    torch.testing.assert_close(blobs(net), [mean, variance, torch.tensor([factor])])


def test_the_test_phase_reads_the_estimates_and_moves_nothing() -> None:
    net = norm((4, 3, 2), phase=TEST)
    saved = [torch.tensor([2.0, 4, 6]), torch.tensor([2.0, 8, 18]), torch.tensor([2.0])]
    net.load_blobs([("layer", [blob.numpy() for blob in saved])])
    x = noise(4, 3, 2)
    expected = functional.batch_norm(x, saved[0] / 2, saved[1] / 2)
    torch.testing.assert_close(net({"x": x})["y"], expected)
    assert all(torch.equal(a, b) for a, b in zip(blobs(net), saved, strict=True))


def test_estimates_of_nothing_are_zeros() -> None:
    x = noise(4, 3, 2)
    torch.testing.assert_close(norm((4, 3, 2), "eps: 0.25", phase=TEST)({"x": x})["y"], x * 2)


def test_use_global_stats_overrides_the_phase() -> None:
    x = noise(4, 3, 2)
    torch.testing.assert_close(norm((4, 3, 2), "eps: 1 use_global_stats: true")({"x": x})["y"], x)
    net = norm((4, 3, 2), "use_global_stats: false", phase=TEST)
    torch.testing.assert_close(
        net({"x": x})["y"], functional.batch_norm(x, None, None, training=True)
    )
    assert float(blobs(net)[2]) == 1


def test_one_axis_is_one_channel() -> None:
    net = norm((6,))
    x = noise(6)
    y = net({"x": x})["y"]
    torch.testing.assert_close(y, (x - x.mean()) / (x.var(unbiased=False) + 1e-5).sqrt())
    assert [blob.shape for blob in blobs(net)] == [(1,), (1,), (1,)]


def test_one_value_a_channel_has_no_variance() -> None:
    net = norm((1, 3))
    net({"x": torch.tensor([[1.0, 2, 3]])})
    assert [blob.tolist() for blob in blobs(net)] == [[1, 2, 3], [0, 0, 0], [1]]


def test_one_value_a_channel_goes_backward() -> None:
    net = norm((1, 3, 1, 1), "eps: 0.1")
    x = noise(1, 3, 1, 1).requires_grad_()
    net({"x": x})["y"].sum().backward()
    assert x.grad is not None and not x.grad.any()


def test_no_solver_moves_the_statistics() -> None:
    assert BatchNorm.STATISTICS
    for params in ("", "param { lr_mult: 0 } param { lr_mult: 0 } param { lr_mult: 0 }"):
        net = build(
            "force_backward: true\n" + inputs(x=(4, 3)) + layer("BatchNorm", "x", "y", params)
        )
        assert [info.lr_mult for info in net.parameters_info] == [0, 0, 0]
        net({"x": noise(4, 3)})["y"].square().sum().backward()
        assert all(blob.grad is None for blob in net.parameters())


@pytest.mark.parametrize("params", ["param { lr_mult: 1 }", "param { name: 'm' }"])
def test_statistics_that_should_learn_are_a_mistake(params: str) -> None:
    with pytest.raises(DefinitionError, match=r"blob 0 holds statistics.*expected lr_mult: 0"):
        build(inputs(x=(4, 3)) + layer("BatchNorm", "x", "y", params))


def test_a_test_net_reads_what_its_train_net_moved() -> None:
    text = inputs(x=(4, 3, 2)) + layer("BatchNorm", "x", "y")
    train = build(text)
    test = build(text, phase=TEST, share_with=train)
    x = noise(4, 3, 2)
    train({"x": x})
    values = x.transpose(0, 1).flatten(1)
    expected = functional.batch_norm(x, values.mean(1), values.var(1))
    torch.testing.assert_close(test({"x": x})["y"], expected)
