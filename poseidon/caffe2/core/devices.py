"""Devices and data types as scripts name them."""

from __future__ import annotations

from typing import Any

from poseidon.caffe2.proto import DEVICE_NUMBERS, caffe2_pb2

GPU_TYPES = frozenset((DEVICE_NUMBERS["CUDA"], DEVICE_NUMBERS["HIP"]))


class DataType:
    """The data types of tensors by name: `DataType.FLOAT` is 1."""

    UNDEFINED = caffe2_pb2.TensorProto.UNDEFINED
    FLOAT = caffe2_pb2.TensorProto.FLOAT
    INT32 = caffe2_pb2.TensorProto.INT32
    BYTE = caffe2_pb2.TensorProto.BYTE
    STRING = caffe2_pb2.TensorProto.STRING
    BOOL = caffe2_pb2.TensorProto.BOOL
    UINT8 = caffe2_pb2.TensorProto.UINT8
    INT8 = caffe2_pb2.TensorProto.INT8
    UINT16 = caffe2_pb2.TensorProto.UINT16
    INT16 = caffe2_pb2.TensorProto.INT16
    INT64 = caffe2_pb2.TensorProto.INT64
    FLOAT16 = caffe2_pb2.TensorProto.FLOAT16
    DOUBLE = caffe2_pb2.TensorProto.DOUBLE


def IsGPUDeviceType(device_type: int) -> bool:
    """Return whether a device type is CUDA or HIP."""
    return device_type in GPU_TYPES


def DeviceOption(
    device_type: int,
    device_id: int = 0,
    random_seed: int | None = None,
    node_name: str | None = None,
    numa_node_id: int | None = None,
    extra_info: list[str] | None = None,
) -> caffe2_pb2.DeviceOption:
    """Return a device option.

    Raises:
        AssertionError: a NUMA node is given for another device than the CPU.
    """
    option = caffe2_pb2.DeviceOption(device_type=device_type, device_id=device_id)
    if numa_node_id is not None:
        assert device_type == DEVICE_NUMBERS["CPU"], "Only the CPU has NUMA nodes"
        option.numa_node_id = numa_node_id
    if node_name is not None:
        option.node_name = node_name
    if random_seed is not None:
        option.random_seed = random_seed
    option.extra_info.extend(extra_info or [])
    return option


def device_option_equal(
    opt1: Any, opt2: Any, ignore_node_name: bool = True, ignore_random_seed: bool = True
) -> bool:
    """Return whether two device options mean the same device; None is the CPU."""
    if not opt1 or not opt2:
        return bool(opt1 == opt2)
    if not ignore_node_name and opt1.node_name != opt2.node_name:
        return False
    if not ignore_random_seed and opt1.random_seed != opt2.random_seed:
        return False
    if not opt1.device_type or not opt2.device_type:
        # One of them is the CPU: its id has no meaning, its NUMA node has.
        return bool(opt1.device_type == opt2.device_type and opt1.numa_node_id == opt2.numa_node_id)
    return (opt1.device_type, opt1.device_id) == (opt2.device_type, opt2.device_id)
