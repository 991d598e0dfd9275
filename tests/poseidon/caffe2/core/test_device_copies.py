"""Copies between devices in nets; nothing runs, so no GPU is needed."""

from __future__ import annotations

import pytest

from poseidon.caffe2 import core

GPU = core.DeviceOption(1, 1)


def net_of(*operators: tuple[str, str, bool]) -> core.Net:
    net = core.Net("devices")
    for x, y, on_gpu in operators:
        with core.DeviceScope(GPU if on_gpu else core.DeviceOption(0)):
            net.Relu(x, y)
    return net


def lines(net: core.Net) -> list[str]:
    return [f"{op.type} {op.input[0]} {op.output[0]}" for op in net.Proto().op]


def test_a_blob_is_copied_once_for_a_device() -> None:
    net, devices = core.InjectCrossDeviceCopies(
        net_of(("x", "a", True), ("x", "b", False), ("x", "c", True))
    )
    assert lines(net) == ["CopyCPUToGPU x x_gpu_1", "Relu x_gpu_1 a", "Relu x b", "Relu x_gpu_1 c"]
    assert devices["a"] == GPU and devices["x"].device_type == 0


def test_a_blob_that_is_overwritten_is_copied_again() -> None:
    net, _ = core.InjectCrossDeviceCopies(
        net_of(("x", "a", True), ("y", "x", False), ("x", "c", True))
    )
    assert lines(net).count("CopyCPUToGPU x x_gpu_1") == 2


def test_copies_of_an_earlier_net_are_inputs_of_a_later_one() -> None:
    nets = [net_of(("x", "a", True)), net_of(("x", "b", True))]
    (_, second), _ = core.InjectDeviceCopiesAmongNets(nets)
    assert lines(second) == ["Relu x_gpu_1 b"]
    assert "x_gpu_1" in second.external_inputs


def test_a_blob_does_not_change_its_device() -> None:
    with pytest.raises(RuntimeError, match="In-place blob: x is not supported"):
        core.InjectCrossDeviceCopies(net_of(("x", "a", False), ("b", "x", True)))


def test_an_operator_in_place_changes_the_copy_that_a_later_net_reads() -> None:
    nets = [net_of(("x", "x", True)), net_of(("x", "y", True))]
    (first, second), devices = core.InjectDeviceCopiesAmongNets(nets)
    assert lines(first) == ["CopyCPUToGPU x x_gpu_1", "Relu x_gpu_1 x_gpu_1"]
    assert lines(second) == ["Relu x_gpu_1 y"]
    assert (devices["x"].device_type, devices["x_gpu_1"].device_type) == (0, 1)


@pytest.mark.parametrize(
    ("kind", "of_input", "of_output"),
    [
        ("FC", 1, 1),
        ("CopyGPUToCPU", 1, 0),
        ("CopyCPUToGPU", 0, 1),
        ("EnsureCPUOutput", 1, 0),
        ("CopyFromCPUInput", 0, 1),
    ],
)
def test_devices_of_an_operators_blobs(kind: str, of_input: int, of_output: int) -> None:
    op = core.CreateOperator(kind, ["x"], ["y"], device_option=GPU)
    ((found_input,), (found_output,)) = core.InferOpBlobDevices(op)
    assert (found_input.device_type, found_output.device_type) == (of_input, of_output)


@pytest.mark.parametrize(
    ("kind", "inputs", "outputs", "on_cpu"),
    [
        ("SplitByLengths", 2, 1, "i1"),
        ("Adam", 6, 4, "i5"),
        ("Concat", 3, 2, "1"),
        ("Split", 2, 4, "i1"),
        ("Split", 1, 4, ""),
    ],
)
def test_some_blobs_of_an_operator_lie_on_the_cpu(
    kind: str, inputs: int, outputs: int, on_cpu: str
) -> None:
    names = [f"i{index}" for index in range(inputs)]
    op = core.CreateOperator(kind, names, [str(i) for i in range(outputs)], device_option=GPU)
    devices = {
        name: device for each in core.InferOpBlobDevicesAsDict(op) for name, device in each.items()
    }
    assert len(devices) == inputs + outputs
    assert [name for name, device in devices.items() if device.device_type == 0] == [on_cpu] * bool(
        on_cpu
    )
