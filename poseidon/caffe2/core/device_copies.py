"""Where blobs lie, and the copies that a net needs whose operators run on several devices."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from typing import Any

from poseidon.caffe2 import scope
from poseidon.caffe2.core.blobs import BlobReference, IsGPUDeviceType, device_option_equal
from poseidon.caffe2.core.net import Net
from poseidon.caffe2.proto import DEVICE_NUMBERS
from poseidon.caffe2.proto.caffe2_pb2 import DeviceOption, OperatorDef

log = logging.getLogger(__name__)

BlobDevices = dict[str, DeviceOption]

INPUTS_ON_CPU = frozenset({"CopyCPUToGPU", "CopyFromCPUInput"})
OUTPUTS_ON_CPU = frozenset({"CopyGPUToCPU", "EnsureCPUOutput"})
INPUT_ON_CPU = {
    "Adam": 5,
    "DepthSplit": 1,
    "LengthsSplit": 1,
    "SparseAdam": 6,
    "RowWiseSparseAdam": 6,
    "Split": 1,
    "SplitByLengths": 1,
}
"""The input of an operator, by index, that lies on the CPU on all devices."""
OUTPUT_ON_CPU = {"Concat": 1, "DepthConcat": 1}
"""The output of an operator, by index, that lies on the CPU on all devices."""
PLACE_HOLDER_OPS = frozenset({"Placeholder"})


def InferBlobDevices(net: Net) -> BlobDevices:
    """Return the device of each blob that a net makes: its operator's device."""
    return {name: op.device_option for op in net.Proto().op for name in op.output}


def InferOpBlobDevices(op: OperatorDef) -> tuple[list[DeviceOption], list[DeviceOption]]:
    """Return the devices where an operator wants its inputs, and where it leaves its outputs."""
    cpu = DeviceOption()
    of_inputs = cpu if op.type in INPUTS_ON_CPU else op.device_option
    of_outputs = cpu if op.type in OUTPUTS_ON_CPU else op.device_option
    inputs, outputs = [of_inputs] * len(op.input), [of_outputs] * len(op.output)
    for devices, exceptions in ((inputs, INPUT_ON_CPU), (outputs, OUTPUT_ON_CPU)):
        index = exceptions.get(op.type, len(devices))
        if index < len(devices):
            devices[index] = cpu
    return inputs, outputs


def InferOpDeviceAsBlobDevices(op: OperatorDef) -> tuple[list[DeviceOption], list[DeviceOption]]:
    """Return the operator's own device for each of its blobs."""
    return [op.device_option] * len(op.input), [op.device_option] * len(op.output)


def InferOpBlobDevicesAsDict(op: OperatorDef) -> tuple[BlobDevices, BlobDevices]:
    """Return the devices where an operator wants its inputs and leaves its outputs, by blob."""
    of_inputs, of_outputs = InferOpBlobDevices(op)
    return dict(zip(op.input, of_inputs, strict=True)), dict(
        zip(op.output, of_outputs, strict=True)
    )


def device_equal(src: DeviceOption, dst: DeviceOption) -> bool:
    """Return whether two device options are the same device."""
    return device_option_equal(src, dst) or src == dst


def copy_func_between_devices(src: DeviceOption, dst: DeviceOption) -> Callable[..., Any] | None:
    """Return `(net, blob, name)` that adds a copy between devices; None where they are one.

    Raises:
        ValueError: there is no copy between devices of these kinds.
    """
    kinds = [IsGPUDeviceType(option.device_type) for option in (src, dst)]
    cpu = DEVICE_NUMBERS["CPU"]
    if src.device_type == dst.device_type and (
        src.device_type == cpu or src.device_id == dst.device_id
    ):
        return None
    if all(kinds):
        return _copier("Copy", dst)
    if kinds[0] and dst.device_type == cpu:
        return _copier("CopyGPUToCPU", src)
    if kinds[1] and src.device_type == cpu:
        return _copier("CopyCPUToGPU", dst)
    raise ValueError(f"Non-supported devices: {src.device_type} and {dst.device_type}")


def _copier(kind: str, device: DeviceOption) -> Callable[..., Any]:
    def copy(net: Net, *args: Any, **kwargs: Any) -> Any:
        with scope.DeviceScope(device):
            return getattr(net, kind)(*args, **kwargs)

    return copy


def _copy_name(blob: str, device: DeviceOption) -> str:
    if not IsGPUDeviceType(device.device_type):
        return f"{blob}_cpu"
    return f"{blob}_gpu_{device.device_id}"


def InjectCrossDeviceCopies(
    net: Net,
    blob_to_device: BlobDevices | None = None,
    blob_remap: dict[str, dict[str, str]] | None = None,
    placeHolderOps: Iterable[str] | None = None,
) -> tuple[Net, BlobDevices]:
    """Return a net with the copies that its operators need, and the device of each blob.

    Args:
        net: the net.
        blob_to_device: devices of blobs that are there before; the others are on the CPU.
        blob_remap: the copies that earlier nets made, by blob and device; new ones are added.
        placeHolderOps: types of operators that are copied as they are.

    Raises:
        RuntimeError: an operator overwrites a blob of another device.
    """
    devices = {} if blob_to_device is None else blob_to_device
    copies = {} if blob_remap is None else blob_remap
    new_net: Net = net.Clone(f"{net.Proto().name}_cross_device", keep_schema=True)
    del new_net.Proto().op[:]
    for op in net.Proto().op:
        of_inputs, of_outputs = InferOpBlobDevices(op)
        new_op = copy.deepcopy(op)
        if op.type not in (placeHolderOps or PLACE_HOLDER_OPS):
            for index, (name, wanted) in enumerate(zip(op.input, of_inputs, strict=True)):
                if name not in devices:
                    log.debug(
                        "The device of the blob %s is not known: it is taken to be on the CPU.",
                        name,
                    )
                    devices[name] = DeviceOption()
                if not device_equal(devices[name], wanted):
                    new_op.input[index] = _copied(new_net, name, devices[name], wanted, copies)
        renamed = dict(zip(op.input, new_op.input, strict=True))
        for index, made in enumerate(of_outputs):
            name = new_op.output[index] = renamed.get(op.output[index], op.output[index])
            if name in devices and not device_equal(devices[name], made):
                raise RuntimeError(
                    f"In-place blob: {name} is not supported between operators with different "
                    f"device option previous:{devices[name]} now: {made}. Failed op:\n {op}"
                )
            devices[name] = copy.deepcopy(made)
            copies.pop(name, None)
        new_net._ExtendOps([new_op])
    return new_net, devices


def _copied(
    net: Net, name: str, has: DeviceOption, wanted: DeviceOption, copies: dict[str, dict[str, str]]
) -> str:
    """Return the name of a blob's copy on a device; the copy is added where there is none."""
    copy = _copy_name(name, wanted)
    made = copies.setdefault(name, {})
    if copy not in made:
        function = copy_func_between_devices(has, wanted)
        assert function is not None
        net._InvalidateLookupTables()
        function(net, BlobReference(name), BlobReference(copy))
        made[copy] = copy
    elif not net.BlobIsDefined(copy):
        net.AddExternalInput(BlobReference(copy))
    return copy


def InjectDeviceCopiesAmongNets(
    nets: Iterable[Net], blob_to_device_init: BlobDevices | None = None
) -> tuple[list[Net], BlobDevices]:
    """Return nets with the copies that they need when run in order, and each blob's device."""
    nets = list(nets)
    assert all(isinstance(net, Net) for net in nets), f"nets should be a list of Net, not {nets}"
    devices = {} if blob_to_device_init is None else blob_to_device_init
    copies: dict[str, dict[str, str]] = {}
    made = []
    for net in nets:
        new_net, devices = InjectCrossDeviceCopies(net, devices, copies)
        made.append(new_net)
    return made, devices


def InjectDeviceCopiesAmongNetsWithoutB2D(
    nets: Iterable[Net], blob_to_device_init: BlobDevices | None = None
) -> list[Net]:
    """Return what `InjectDeviceCopiesAmongNets` does without the devices."""
    return InjectDeviceCopiesAmongNets(nets, blob_to_device_init)[0]
