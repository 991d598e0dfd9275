"""debug_info: the lines of Caffe's Net, with the values that the blobs have."""

from __future__ import annotations

import logging
import re

import pytest
import torch

from poseidon.caffe.net.net import Net
from tests.support.nets import build, inputs, layer, noise

FILL = "weight_filler { type: 'xavier' } bias_filler { type: 'uniform' }"
IP = f"inner_product_param {{ num_output: 5 {FILL} }}"
# h is read by two layers; 'shared' is one blob of two layers; relu runs in place.
NET = (
    inputs(x=(4, 5), l=(4,))
    + layer("InnerProduct", "x", "h", f"param {{ name: 'shared' }} {IP}", name="ip1")
    + layer("ReLU", "h", "h", name="relu")
    + layer("InnerProduct", "h", "y", f"param {{ name: 'shared' }} {IP}", name="ip2")
    + layer("Eltwise", "h y", "z", name="sum")
    + layer("SoftmaxWithLoss", "z l", "loss", name="loss")
)
BATCH = {"x": noise(4, 5), "l": torch.tensor([0.0, 1, 2, 3])}


def passes(net: Net, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO):
        net(BATCH)
        net.loss.backward()  # type: ignore[no-untyped-call]
        net.log_backward()
    return [record.getMessage() for record in caplog.records if record.name == "poseidon.caffe.net"]


def values(lines: list[str], start: str) -> dict[str, float]:
    found = (re.fullmatch(r"    \[(\w+)\] Layer (.*): (\S+)", line) for line in lines)
    return {match[2]: float(match[3]) for match in found if match and match[1] == start}


def magnitude(blob: torch.Tensor) -> float:
    return float(f"{float(blob.detach().abs().mean()):g}")


FORWARD = (
    "ip1, top h data; ip1, param shared data; ip1, param 1 data; relu, top h data; ip2, top y data; "
    "ip2, param shared data; ip2, param 1 data; sum, top z data; loss, top loss data"
)
BACKWARD = (
    "loss, bottom z diff; sum, bottom h diff; sum, bottom y diff; ip2, bottom h diff; ip2, param 0 diff; "
    "ip2, param 1 diff; relu, bottom h diff; ip1, param 0 diff; ip1, param 1 diff"
)


def test_the_lines_and_their_values(caplog: pytest.LogCaptureFixture) -> None:
    net, plain = build("debug_info: true " + NET), build(NET)
    plain.keep_blobs = True
    lines = passes(net, caplog)
    plain(BATCH)
    seen = {name: blob for name, blob in plain.blobs.items() if blob.requires_grad}
    for blob in seen.values():
        blob.retain_grad()
    plain.loss.backward()  # type: ignore[no-untyped-call]

    forward = values(lines, "Forward")
    assert "; ".join(forward).replace(" blob", "") == FORWARD
    assert forward["relu, top blob h data"] == magnitude(plain.blobs["h"])
    assert forward["ip1, top blob h data"] > forward["relu, top blob h data"]
    weight = dict(plain.layer_modules)["ip1"].blobs()[0]
    assert forward["ip2, param blob shared data"] == magnitude(weight)

    backward = values(lines, "Backward")
    assert "; ".join(backward).replace(" blob", "") == BACKWARD
    z, y = seen["z"].grad, seen["y"].grad
    assert z is not None and y is not None and weight.grad is not None
    assert (
        backward["loss, bottom blob z diff"] == magnitude(z) == backward["sum, bottom blob h diff"]
    )
    assert backward["ip2, bottom blob h diff"] == magnitude(y @ weight.detach())
    assert backward["ip1, param blob 0 diff"] == magnitude(weight.grad)

    every = [info.parameter for info in plain.parameters_info]
    data_l1 = sum(float(p.detach().abs().sum()) for p in every)
    diff_l2 = sum(float(p.grad.double().square().sum()) for p in every if p.grad is not None) ** 0.5
    last = re.fullmatch(
        r"    \[Backward\] All net params \(data, diff\): L1 norm = \((\S+), \S+\); L2 norm = "
        r"\(\S+, (\S+)\)",
        lines[-1],
    )
    assert last and last.groups() == (f"{data_l1:g}", f"{diff_l2:g}")


def test_watching_changes_no_bit(caplog: pytest.LogCaptureFixture) -> None:
    watched, plain = build("debug_info: true " + NET), build(NET)
    assert passes(watched, caplog) and not passes(plain, caplog)
    assert torch.equal(watched.loss, plain.loss)
    for a, b in zip(watched.parameters(), plain.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def test_it_may_be_turned_on_and_off_and_is_for_the_first_worker_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = build(NET)
    net.set_debug_info(True)
    assert passes(net, caplog)
    net.set_debug_info(False)
    assert not passes(net, caplog)
    assert not passes(build("debug_info: true " + NET, rank=1), caplog)
