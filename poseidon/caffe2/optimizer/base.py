"""The common part of optimizers: names of blobs, learning rate, iteration counter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from poseidon.caffe2 import core, scope, workspace
from poseidon.caffe2.modeling.parameter_info import ParameterInfo
from poseidon.caffe2.proto import DEVICE_NUMBERS

ITERATION = "optimizer_iteration"
MUTEX = "iteration_mutex"

_optimizer_instance_count: defaultdict[str, int] = defaultdict(int)
"""How many optimizers of each class were made."""


def reset_optimizer_instance_count() -> None:
    """Start the numbers of optimizers at 0 again; two models then have the same names."""
    _optimizer_instance_count.clear()


class AuxOptimizerParams(NamedTuple):
    """The blobs of an optimizer beside the parameters: of each parameter, and of all together."""

    local: list[Any]
    shared: list[Any]


def iteration_of(net: Any, init_net: Any) -> Any:
    """Return the counter of iterations; add it to the nets where they have none."""
    if init_net.BlobIsDefined(ITERATION):
        return init_net.GetBlobRef(ITERATION)
    with core.DeviceScope(core.DeviceOption(DEVICE_NUMBERS["CPU"])), core.EmptyNameScope():
        counter = init_net.ConstantFill(
            [], ITERATION, shape=[1], value=0, dtype=core.DataType.INT64
        )
        mutex = init_net.CreateMutex([], [MUTEX])
        net.AtomicIter([mutex, counter], [counter])
    return counter


class Optimizer:
    """An optimizer: `optimizer(net, init_net, param, grad)` adds the update of a parameter.

    Subclasses implement `_run`.
    """

    def __init__(self) -> None:
        self._aux_params = AuxOptimizerParams(local=[], shared=[])
        name = type(self).__name__
        self._instance_num = _optimizer_instance_count[name]
        _optimizer_instance_count[name] += 1
        self._lr_multiplier: Any = None
        self._local_lr_multiplier: Any = None
        self._local_lr_multiplier_on_gpu = False

    def __call__(self, net: Any, param_init_net: Any, param: Any, grad: Any = None) -> None:
        """Add the update of a parameter.

        Args:
            net: the training net.
            param_init_net: the net that fills the optimizer's own blobs.
            param: a `ParameterInfo` with a gradient, or a name or reference.
            grad: the gradient, where `param` is a name or reference.
        """
        if grad is None:
            assert isinstance(param, ParameterInfo), f"expected a ParameterInfo, got {param}"
            assert param.grad is not None
        else:
            if isinstance(param, str):
                param = core.BlobReference(param)
            grad = core.BlobReference(grad) if isinstance(grad, str) else grad
            param = ParameterInfo(param_id=None, param=param, grad=grad)
        self._run(net, param_init_net, param)

    def _run(self, net: Any, param_init_net: Any, param_info: Any) -> None:
        raise NotImplementedError("An optimizer must implement `run`")

    # Names.

    def get_cpu_blob_name(self, base_str: str, node_name: str = "") -> str:
        """Return the name of a blob of this optimizer on the CPU, e.g. `SgdOptimizer_0_lr_cpu`."""
        return f"{type(self).__name__}_{self._instance_num}_{base_str}{node_name}_cpu"

    def get_gpu_blob_name(self, base_str: str, gpu_id: int, node_name: str = "") -> str:
        """Return the name of a blob of this optimizer on a GPU."""
        return f"{type(self).__name__}_{self._instance_num}_{base_str}{node_name}_gpu{gpu_id}"

    @property
    def attributes(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if not key.startswith("_")}

    def make_unique_blob_name(self, base_str: str) -> str:
        """Return the name of a blob of this optimizer on the current device."""
        device = scope.CurrentDeviceScope()
        if device is None:
            return self.get_cpu_blob_name(base_str)
        if core.IsGPUDeviceType(device.device_type):
            return self.get_gpu_blob_name(base_str, device.device_id, device.node_name)
        return self.get_cpu_blob_name(base_str, device.node_name)

    def get_auxiliary_parameters(self) -> AuxOptimizerParams:
        """Return the blobs that belong to the optimizer's state."""
        return self._aux_params

    # Learning rate.

    def build_lr(
        self,
        net: Any,
        param_init_net: Any,
        base_learning_rate: float,
        learning_rate_blob: str | None = None,
        policy: str = "fixed",
        iter_val: int = 0,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """Return references to the learning rate and the iteration counter; add what is missing.

        Args:
            base_learning_rate: negative for updates that add `lr * gradient`.
            learning_rate_blob: its name; by default one of this optimizer's.
            policy: see the operator `LearningRate`.
            iter_val: kept for Caffe2's scripts.
            kwargs: the policy's arguments.
        """
        name = learning_rate_blob or self.make_unique_blob_name("lr")
        iteration = iteration_of(net, param_init_net)
        if net.BlobIsDefined(name):
            rate = net.GetBlobRef(name)
        else:
            rate = net.LearningRate(
                [iteration], name, base_lr=base_learning_rate, policy=policy, **kwargs
            )
        if self._lr_multiplier is not None:
            multiplier = net.CopyFromCPUInput(
                self._lr_multiplier, self.make_unique_blob_name("lr_multiplier")
            )
            rate = net.Mul([rate, multiplier], self.make_unique_blob_name("scaled_lr"), broadcast=1)
        if self._local_lr_multiplier is not None:
            local = self._local_lr_multiplier
            device = scope.CurrentDeviceScope()
            on_gpu = device is not None and core.IsGPUDeviceType(device.device_type)
            if on_gpu and not self._local_lr_multiplier_on_gpu:
                name = self.make_unique_blob_name("local_lr_multiplier")
                local = net.CopyFromCPUInput(local, name)
            rate = net.Mul(
                [rate, local], self.make_unique_blob_name("local_scaled_lr"), broadcast=1
            )
        return rate, iteration

    def add_lr_multiplier(self, lr_multiplier: Any) -> None:
        """Multiply the learning rate by a blob of the CPU, or by None: not at all."""
        self._lr_multiplier = lr_multiplier

    def _add_local_lr_multiplier(self, local_lr_multiplier: Any, is_gpu_blob: bool = False) -> None:
        """Multiply the learning rate of the parameter at hand by a blob."""
        self._local_lr_multiplier = local_lr_multiplier
        self._local_lr_multiplier_on_gpu = is_gpu_blob

    def _add_lars(
        self,
        net: Any,
        init_net: Any,
        param_info: Any,
        offset: float | None,
        weight_decay: float = 0.0,
    ) -> None:
        """Multiply the rate by the norms' ratio, parameter to gradient (You et al., 2017)."""
        grad = param_info.grad
        if offset is None or isinstance(grad, core.GradientSlice):
            return
        assert offset >= 0, f"Lars offset must be nonnegative, got {offset}"
        decay, trust, lr_max = self.create_lars_inputs(
            init_net, weight_decay, 1.0, float(np.finfo(np.float32).max)
        )
        param = param_info.blob
        ratio = net.Lars(
            [param, grad, decay, trust, lr_max],
            self.make_unique_blob_name(f"{param}_lars"),
            offset=offset,
            lr_min=0.0,
        )
        device = scope.CurrentDeviceScope()
        on_gpu = device is not None and core.IsGPUDeviceType(device.device_type)
        self._add_local_lr_multiplier(ratio, is_gpu_blob=on_gpu)

    def create_lars_inputs(
        self, param_init_net: Any, weight_decay: float, trust: float, lr_max: float
    ) -> tuple[Any, Any, Any]:
        """Return references to the constants of `Lars`."""
        return (
            param_init_net.ConstantFill([], "weight_decay", shape=[1], value=weight_decay),
            param_init_net.ConstantFill([], "trust", shape=[1], value=trust),
            param_init_net.ConstantFill([], "lr_max", shape=[1], value=lr_max),
        )

    def _one(self, init_net: Any, name: str = "ONE", value: float = 1.0) -> Any:
        """Return a constant on the current device, e.g. `ONE_0_0`."""
        device = scope.CurrentDeviceScope() or core.DeviceOption(DEVICE_NUMBERS["CPU"])
        full = f"{name}_{device.device_type}_{device.device_id}{device.node_name}"
        return init_net.ConstantFill([], full, shape=[1], value=value)

    def _state(self, init_net: Any, param: Any, suffix: str, **kwargs: Any) -> Any:
        """Return a blob of the parameter's shape, filled with zeros, that belongs to the state."""
        blob = init_net.ConstantFill([param], f"{param}_{suffix}", **(kwargs or {"value": 0.0}))
        self._aux_params.local.append(blob)
        return blob

    def _constant(self, init_net: Any, param: Any, suffix: str, size: int, value: float) -> Any:
        """Return a vector of equal values that belongs to the state."""
        blob = init_net.ConstantFill([], f"{param}_{suffix}", shape=[size], value=value)
        self._aux_params.local.append(blob)
        return blob

    @staticmethod
    def dedup(net: Any, sparse_dedup_aggregator: str | None, grad: Any) -> Any:
        """Return a sparse gradient in which each index is once, where an aggregator is given."""
        assert isinstance(grad, core.GradientSlice)
        return (
            net.DeduplicateGradientSlices(grad, aggregator=sparse_dedup_aggregator)
            if sparse_dedup_aggregator
            else grad
        )

    def scale_learning_rate(self, *args: Any, **kwargs: Any) -> None:
        """Multiply the base learning rate; an optimizer without one refuses."""
        raise NotImplementedError("An optimizer must implement `scale_learning_rate`")


class AlphaOptimizer(Optimizer):
    """An optimizer with a base learning rate `alpha` and a policy.

    `_run` adds the operator of a class that states it; other classes have a `_run` of their own.

    Attributes:
        operator: for dense gradients; `Sparse<operator>` is for sparse ones.
        arguments: the attributes that are the operator's arguments.
        suffixes: of the state's blobs that have the parameter's shape.
        sparse: the order of a sparse gradient's parts among the inputs; none refuses them.
        counts: whether the operator reads the iteration.
    """

    operator = ""
    arguments: Sequence[str] = ()
    suffixes: Sequence[str] = ()
    sparse: Sequence[str] = ("indices", "values")
    counts = False
    sparse_dedup_aggregator: str | None = None
    lars: float | None = None
    output_effective_lr = False
    output_effective_lr_and_update = False

    def __init__(self, alpha: float, policy: str, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.alpha, self.policy, self.init_kwargs = alpha, policy, kwargs

    def _states(self, init_net: Any, param: Any) -> list[Any]:
        """Return the blobs of the state, which the operator reads and writes."""
        return [self._state(init_net, param, suffix) for suffix in self.suffixes]

    def _run(self, net: Any, param_init_net: Any, param_info: Any) -> None:
        param, grad = param_info.blob, param_info.grad
        if self.alpha <= 0:
            return
        is_sparse = isinstance(grad, core.GradientSlice)
        assert self.sparse or not is_sparse, f"{self.operator} needs dense gradients"
        self._add_lars(net, param_init_net, param_info, self.lars)
        rate, iteration = self._rate(net, param_init_net)
        if self.counts:
            self._aux_params.shared.append(iteration)
        state = [param, *self._states(param_init_net, param)]
        settings = {name: getattr(self, name) for name in self.arguments}
        rest = [rate, iteration] if self.counts else [rate]
        if is_sparse:
            grad = self.dedup(net, self.sparse_dedup_aggregator, grad)
            parts = [getattr(grad, part) for part in self.sparse]
            getattr(net, f"Sparse{self.operator}")([*state, *parts, *rest], state, **settings)
        else:
            outputs = [*state, *self._effective(param)]
            getattr(net, self.operator)([*state, grad, *rest], outputs, **settings)

    def _effective(self, param: Any) -> list[str]:
        """Return the blobs of the effective learning rate and of the update, as asked for."""
        names = ["effective_lr", "update"][: 2 if self.output_effective_lr_and_update else 1]
        wanted = self.output_effective_lr or self.output_effective_lr_and_update
        return [f"{param}_{name}" for name in names] if wanted else []

    def _rate(self, net: Any, init_net: Any, sign: int = -1) -> tuple[Any, Any]:
        rate = sign * self.alpha
        return self.build_lr(net, init_net, rate, policy=self.policy, **self.init_kwargs)

    def scale_learning_rate(self, scale: float) -> None:
        self.alpha *= scale

    def _rows(self, init_net: Any, param: Any, suffix: str, **fill: Any) -> Any:
        """Return a blob with one entry for each row of the parameter, by default 0.0."""
        name, fill = f"{param}_{suffix}", fill or {"value": 0.0}
        shape = shape_of(init_net, param)
        if shape:
            blob = init_net.ConstantFill([], name, shape=shape[:1], **fill)
        else:
            sizes = init_net.Shape(param, f"{param}_shape")
            rows = init_net.Slice([sizes], f"{sizes}_numrows", starts=[0], ends=[1])
            blob = init_net.ConstantFill(rows, name, input_as_shape=1, **fill)
        self._aux_params.local.append(blob)
        return blob


def shape_of(init_net: Any, param: Any) -> list[int]:
    """Return the shape that a net gives a parameter; [] where it does not follow."""
    return workspace.InferShapesAndTypes([init_net])[0].get(str(param)) or []
