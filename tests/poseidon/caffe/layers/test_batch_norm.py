"""BatchNorm: Caffe's three blobs over several passes, what the test phase reads, and who may
move them.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from poseidon.caffe.layers.batch_norm import BatchNorm
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TEST, TRAIN
from poseidon.errors import DefinitionError
from tests.support.nets import build, inputs, layer, noise, stack
from tests.support.simulated_device import simulated_devices


def norm(shape: tuple[int, ...], fields: str = "", **how: int) -> Net:
    """A net of one BatchNorm."""
    return build(
        inputs(x=shape) + layer("BatchNorm", "x", "y", f"batch_norm_param {{ {fields} }}"), **how
    )  # type: ignore[arg-type]


def blobs(net: Net) -> list[torch.Tensor]:
    return [blob.detach().clone() for blob in net.layer_modules[-1][1].blobs()]


@pytest.mark.parametrize(
    ("shape", "fields"),
    [((4, 3), ""), ((2, 3, 2, 2, 2), "moving_average_fraction: 0.5 eps: 0.1")],
)
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


def test_estimates_of_nothing_are_zeros() -> None:
    x = noise(4, 3, 2)
    torch.testing.assert_close(norm((4, 3, 2), "eps: 0.25", phase=TEST)({"x": x})["y"], x * 2)


def test_estimates_wait_for_no_device() -> None:
    one = norm((2, 3), "use_global_stats: true").layer_modules[-1][1]
    assert isinstance(one, BatchNorm)
    factors = torch.linspace(0, 999.9, 5000).tolist()
    with simulated_devices(1, 5) as (device,), torch.no_grad():
        for name, value in (("mean", [1.0, -2.0, 1e-30]), ("variance", [3.0, 0.1, 7.7])):
            setattr(one, name, nn.Parameter(torch.tensor(value).to(device.torch)))
        for factor in factors[::500]:
            one.factor = nn.Parameter(torch.tensor([factor]).to(device.torch))
            device.waits.clear()
            mean, variance = one.estimates()
            assert not device.waits
            scale = 1 / factor if factor else 0.0  # in float64
            assert mean.cpu().tolist() == (torch.tensor([1.0, -2.0, 1e-30]) * scale).tolist()
            assert variance.cpu().tolist() == (torch.tensor([3.0, 0.1, 7.7]) * scale).tolist()
    every = torch.tensor(factors[1:])
    assert (1 / every).tolist() == torch.tensor([1 / factor for factor in factors[1:]]).tolist()


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


ONE = "filler { value: 1 }"
X = torch.tensor([[1.0, 2], [3, 10]])  # the means are 2 and 6, the variances (through n) 1 and 16


def bn(
    body: str,
    phase: int = TRAIN,
    tops: str = "y",
    params: str = "",
    shape: tuple[int, ...] = (2, 2),
) -> Net:
    return build(
        inputs(x=shape) + layer("BN", "x", tops, f"bn_param {{ {body} }} {params}"), phase=phase
    )


def bn_blobs(net: Net) -> list[list[float]]:
    return [tensor.detach().flatten().tolist() for tensor in net.parameters()]


def test_segnets_form_has_no_running_statistics() -> None:
    for phase in (TRAIN, TEST):
        net = bn(f"scale_{ONE} shift_filler {{ value: 5 }}", phase, "y m v")
        tops = net({"x": X})
        assert tops["y"].tolist() == [pytest.approx([4, 4]), pytest.approx([6, 6])]
        assert tops["m"].flatten().tolist() == [2, 6] and tops["v"].flatten().tolist() == [1, 16]
        assert tops["m"].shape == (1, 2, 1, 1)
        assert [tuple(blob.shape) for blob in net.parameters()] == [(1, 2, 1, 1)] * 2


def test_segnets_inference_only_scales() -> None:
    net = bn("bn_mode: INFERENCE scale_filler { value: 3 } shift_filler { value: 5 }", TEST)
    assert net({"x": X})["y"].tolist() == [[8, 11], [14, 35]]


def test_running_statistics_of_momentum() -> None:
    net = bn("slope_filler { value: 1 } bias_filler { value: 0 } momentum: 0.75 eps: 0")
    assert net({"x": X})["y"].tolist() == [[-1, -1], [1, 1]]
    assert bn_blobs(net) == [[1, 1], [0, 0], [0.5, 1.5], [0.25, 4]]
    net({"x": X})
    assert bn_blobs(net)[2:] == [[0.875, 2.625], [0.4375, 7]]
    test = build(
        stack(f"BN x=2,2 > y | bn_param {{ slope_{ONE} momentum: 0.75 eps: 0 }}"),
        phase=TEST,
        share_with=net,
    )
    found = test({"x": X})["y"]
    torch.testing.assert_close(
        found, (X - torch.tensor([0.875, 2.625])) / torch.tensor([0.4375, 7]).sqrt()
    )
    assert bn_blobs(net)[2:] == [[0.875, 2.625], [0.4375, 7]]


def test_a_frozen_layer_reads_its_statistics_and_learns_nothing() -> None:
    net = bn(f"slope_{ONE} frozen: true eps: 3", params="param { lr_mult: 1 decay_mult: 1 }" * 4)
    torch.testing.assert_close(net({"x": X})["y"], X / 2)  # mean 0, variance 1
    assert bn_blobs(net)[2:] == [[0, 0], [1, 1]]
    assert not any(parameter.requires_grad for parameter in net.parameters())
    assert [(info.lr_mult, info.decay_mult) for info in net.parameters_info] == [(0, 0)] * 4


def test_the_moving_average_form() -> None:
    body = f"scale_{ONE} decay: 0.25 var_eps: 0"
    net = bn(body)
    net({"x": X})
    assert bn_blobs(net)[2:] == [[0.5, 1.5], [0.25, 4]]
    plain, moving = (
        build(
            stack(f"BN x=2,2 > y | bn_param {{ {body} moving_average: {flag} }}"),
            phase=TEST,
            share_with=net,
        )({"x": X})["y"]
        for flag in ("false", "true")
    )
    assert plain.tolist() == [[-1, -1], [1, 1]]
    assert moving.tolist() == [[1, 0.25], [5, 4.25]]


def test_statistics_ignore_the_rates_of_their_param_blocks() -> None:
    net = bn(f"slope_{ONE} momentum: 0.9", params="param { lr_mult: 2 decay_mult: 3 }" * 4)
    infos = [(info.lr_mult, info.decay_mult, info.statistics) for info in net.parameters_info]
    assert infos == [(2, 3, False)] * 2 + [(0, 0, True)] * 2


def test_another_axis() -> None:
    x = noise(2, 3, 4, 5)
    y = bn(f"scale_{ONE} axis: 2 var_eps: 1e-5", shape=(2, 3, 4, 5))({"x": x})["y"]
    expected = torch.nn.functional.batch_norm(
        x.transpose(1, 2), None, None, training=True
    ).transpose(1, 2)
    torch.testing.assert_close(y, expected)


def test_the_number_of_param_blocks_tells_two_forms_apart() -> None:
    for count, expected in ((0, 2), (2, 2), (4, 4)):
        net = bn(
            "scale_filler { value: 1 } shift_filler { value: 0 }",
            params="param { lr_mult: 1 }" * count,
        )
        assert len(list(net.parameters())) == expected


def test_the_momentum_form_takes_the_fillers_of_the_others() -> None:
    net = bn("scale_filler { value: 3 } shift_filler { value: 2 } momentum: 0.5")
    assert bn_blobs(net)[:2] == [[3, 3], [2, 2]] and len(bn_blobs(net)) == 4
