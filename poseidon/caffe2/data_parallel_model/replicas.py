"""The replicas of a data-parallel model: their devices, scopes and common blobs.

A replica is what one device runs. Its blobs have the scope `<prefix>_<device>/`: `gpu_0/fc_w`,
`cpu_1/data`. The same blob of all replicas is a group, known by the name without that scope.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

from poseidon.caffe2 import core, scope, workspace
from poseidon.caffe2.model_helper import ModelHelper
from poseidon.caffe2.proto import DEVICE_NUMBERS, caffe2_pb2

log = logging.getLogger("data_parallel_model")
log.setLevel(logging.INFO)

CPU = DEVICE_NUMBERS["CPU"]
IDEEP = DEVICE_NUMBERS["IDEEP"]
Group = dict[int, Any]
"""The blob, or GradientSlice, of each device."""

_warned: set[str] = set()


def check_parallelized(model: Any) -> None:
    """Raise AssertionError when `Parallelize` was not called for a model."""
    name = model.Name() if isinstance(model, ModelHelper) else type(model).__name__
    assert hasattr(model, "_data_parallel_model_nets"), (
        f"Model {name} is not parallelized; call Parallelize first"
    )


def check_scope() -> None:
    """Raise AssertionError inside a device scope that is not the CPU's."""
    device = scope.CurrentDeviceScope()
    assert device is None or device.device_type == CPU, (
        f"Parallelize must be called without device-scope, device scope was: {device}"
    )


def choose_devices(
    model: Any,
    devices: Sequence[int] | None,
    *,
    cpu: bool,
    ideep: bool = False,
    shared_model: bool = False,
) -> None:
    """Store the devices of a model in it, the prefix of their scopes and their type.

    Without a GPU the replicas of `cpu=False` run on the CPU as `gpu_<device>/`, with one warning.

    Args:
        model: a ModelHelper.
        devices: their numbers; None: all GPUs, or as many replicas as there are processors.
        cpu: whether replicas run on the CPU.
        ideep: whether they run on the CPU under the names `ideep_<device>/`.
        shared_model: whether all replicas read one set of parameters.

    Raises:
        AssertionError: devices are not different numbers from 0, or GPUs cannot share parameters.
    """
    known = isinstance(model, ModelHelper)
    assert known, f"Expected a ModelHelper, got {type(model).__name__}"
    on_gpu = not (cpu or ideep)
    gpus = workspace.NumGpuDevices()
    assert devices is None or isinstance(devices, Iterable), (
        f"devices={devices}: expected a list of numbers, such as [0, 1]"
    )
    if devices is None:
        devices = range(gpus or 1) if on_gpu else range(multiprocessing.cpu_count())
    model._devices = list(devices)
    valid = model._devices and len(set(model._devices)) == len(model._devices)
    assert valid and all(
        isinstance(device, Integral) and int(device) >= 0 for device in model._devices
    ), f"devices={devices}: expected at least one number, each once and from 0 on, such as [0, 1]"
    model._device_prefix = "gpu" if on_gpu else "ideep" if ideep else "cpu"
    model._device_type = workspace.GpuDeviceType if on_gpu else IDEEP if ideep else CPU
    model._shared_model = shared_model
    if on_gpu:
        assert not shared_model, "Shared model only supported on CPU"
        if gpus == 0:
            model._device_type = CPU
            _warn_once("This machine has no GPU: data_parallel_model's replicas run on the CPU")
        elif max(model._devices, default=0) >= gpus:
            log.warning("Only %d GPUs are available, %s are requested", gpus, model._devices)


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        log.warning(text)


def scope_of(model: Any, device: int) -> str:
    """Return the name scope of a device, with its slash."""
    return f"{model._device_prefix}_{device}{scope._NAMESCOPE_SEPARATOR}"


def option_of(model: Any, device: int) -> Any:
    """Return the device option of a replica."""
    return core.DeviceOption(model._device_type, device)


@contextmanager
def replica(model: Any, device: int) -> Iterator[None]:
    """Build inside the scopes of a device."""
    with core.DeviceScope(option_of(model, device)), core.NameScope(scope_of(model, device)[:-1]):
        yield


def for_each_replica(model: Any, build: Callable[[Any], Any]) -> dict[int, Any]:
    """Call a builder function once for each device in its scopes; return what it returned."""
    made = {}
    for device in model._devices:
        with replica(model, device):
            made[device] = build(model)
    return made


def stripBlobName(param: Any) -> str:
    """Return a blob's name without its first scope (`a/b/c`: `b/c`), a slice's two names."""
    if isinstance(param, core.GradientSlice):
        return stripBlobName(param.indices) + ":" + stripBlobName(param.values)
    name = str(param)
    return name[name.index(scope._NAMESCOPE_SEPARATOR) + 1 :]


def group_by_device(model: Any, blobs: Iterable[Any]) -> dict[str, Group]:
    """Return the groups of blobs, in the order of their first appearance.

    Raises:
        AssertionError: a blob is not in the scope of a device.
    """
    grouped: dict[str, Group] = {}
    for blob in blobs:
        assert isinstance(blob, (core.BlobReference, core.GradientSlice)), (
            f"{blob} is neither a BlobReference nor a GradientSlice"
        )
        parts = [blob.indices, blob.values] if isinstance(blob, core.GradientSlice) else [blob]
        devices = [d for d in model._devices if str(parts[0]).startswith(scope_of(model, d))]
        assert devices and all(
            str(part).startswith(scope_of(model, devices[0])) for part in parts
        ), f"{blob} is expected in a scope {model._device_prefix}_<device>/"
        grouped.setdefault(stripBlobName(blob), {})[devices[0]] = blob
    return grouped


def group_of(model: Any, name: str) -> Group:
    """Return the group of a name; one that is not known yet has a blob on each device."""
    known: dict[str, Group] = model._device_grouped_blobs
    if name not in known:
        known[name] = {d: core.BlobReference(scope_of(model, d) + name) for d in model._devices}
    return known[name]


def check_params(params: Sequence[Any]) -> None:
    """Raise AssertionError when a parameter is there twice."""
    twice = [str(param) for param, count in Counter(params).items() if count > 1]
    assert not twice, f"Duplicate entries in params: {twice}"


def infer_devices(model: Any) -> None:
    """Store in the model, for each blob, the device of the first operator that uses it."""
    found: dict[str, Any] = {}

    def look(net: Any) -> None:
        for op in net.op:
            option = core.DeviceOption(CPU) if op.type == "Iter" else op.device_option
            for name in (*op.input, *op.output):
                found.setdefault(name, option)
            if op.type.startswith("RecurrentNetwork"):
                for argument in op.arg:
                    if argument.name.endswith("step_net"):
                        look(argument.n)

    look(model.param_init_net.Proto())
    look(model.net.Proto())
    model._blob_to_device = found


def device_type_of(model: Any, name: str) -> int:
    """Return the type of the device of a blob, or of a group of blobs."""
    known = model._blob_to_device
    option = known.get(name) or known.get(scope_of(model, model._devices[0]) + name)
    return int(option.device_type if option is not None else model._device_type)


def is_on_gpu(model: Any, name: str) -> bool:
    """Return whether a blob, or a group of blobs, is on GPUs."""
    return core.IsGPUDeviceType(device_type_of(model, name))


def check_operators(model: Any) -> None:
    """Raise when an operator of one GPU uses a blob of another, except copies and sums."""
    for op in model.net.Proto().op:
        between = any(word in op.type for word in ("NCCL", "Copy", "Concat")) or op.name == "dpm"
        if between or (op.type in ("Allreduce", "Allgather") and "GLOO" in op.engine):
            continue
        if not core.IsGPUDeviceType(op.device_option.device_type):
            continue
        own = scope_of(model, op.device_option.device_id)
        for name in (*op.input, *op.output):
            if name.startswith(f"{model._device_prefix}_") and not name.startswith(own):
                raise Exception(
                    f"Blob {name} of op {op.type}, should have namescope {own}. Op: {op}"
                )


def blobs_to_sync(model: Any) -> tuple[list[Any], set[str]]:
    """Return the replicas' blobs of the init net, by device and name, and their groups' names.

    A model whose replicas share parameters has only those that the net itself computes.

    Raises:
        AssertionError: a parameter is not made by the init net.
    """
    if model._shared_model:
        made = {str(param) for param in model.GetComputedParams("")}
    else:
        prefix = f"{model._device_prefix}_"
        outputs = (name for op in model.param_init_net.Proto().op for name in op.output)
        made = {name for name in outputs if name.startswith(prefix)}
        missing = set(model._param_names) - {stripBlobName(name) for name in made}
        assert not missing, f"Some params not instantiated in param init net: {sorted(missing)}"

    def place(name: str) -> tuple[int, str]:
        return int(
            name[len(model._device_prefix) + 1 : name.index(scope._NAMESCOPE_SEPARATOR)]
        ), name

    return [core.BlobReference(name) for name in sorted(made, key=place)], {
        stripBlobName(n) for n in made
    }


def made_for_first(model: Any) -> set[str]:
    """Return the names of the groups of which the init net makes a blob on the first device."""
    first = scope_of(model, model._devices[0])
    outputs = (name for op in model.param_init_net.Proto().op for name in op.output)
    return {stripBlobName(name) for name in outputs if name.startswith(first)}


def ConvertNetForDevice(net: Any, device: Any = None) -> Any:
    """Return a copy of a net whose blobs are in a device's scope and whose operators run there.

    With it, the builder function of a forward pass can append another model:

        model.net.AppendNet(data_parallel_model.ConvertNetForDevice(other.net))

    Args:
        net: the net.
        device: a device option; by default the current device scope.

    Raises:
        NotImplementedError: the net has recurrent operators.
    """
    if device is None:
        device = scope.CurrentDeviceScope()
    on_gpu = core.IsGPUDeviceType(device.device_type)
    kind = "gpu" if on_gpu else "ideep" if device.device_type == IDEEP else "cpu"
    current = scope.CurrentNameScope()
    if not on_gpu and current.startswith(f"gpu_{device.device_id}{scope._NAMESCOPE_SEPARATOR}"):
        kind = "gpu"  # its replicas have the CPU for want of a GPU
    prefix = f"{kind}_{device.device_id}{scope._NAMESCOPE_SEPARATOR}"
    proto = caffe2_pb2.NetDef.FromString(net.Proto().SerializeToString())
    for op in proto.op:
        if "RecurrentNetwork" in op.type:
            raise NotImplementedError("RecurrentNetwork conversion not yet supported")
        op.device_option.CopyFrom(device)
        for names in (op.input, op.output, op.control_input):
            _put_before(names, prefix)
    _put_before(proto.external_input, prefix)
    _put_before(proto.external_output, prefix)
    return core.Net(proto)


def _put_before(names: Any, prefix: str) -> None:
    names[:] = [prefix + name for name in names]
