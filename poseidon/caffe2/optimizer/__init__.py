"""Optimizers: classes that add one parameter's update, and `build_*` for whole models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.optimizer.adaptive import (
    AdadeltaOptimizer,
    AdamOptimizer,
    DecayAdagradOptimizer,
    FtrlOptimizer,
    GFtrlOptimizer,
    RmsPropOptimizer,
    StormOptimizer,
    WngradOptimizer,
    YellowFinOptimizer,
)
from poseidon.caffe2.optimizer.base import (
    AuxOptimizerParams,
    Optimizer,
    _optimizer_instance_count,
    reset_optimizer_instance_count,
)
from poseidon.caffe2.optimizer.sgd import (
    AdagradOptimizer,
    FP16SgdOptimizer,
    MultiPrecisionSgdOptimizer,
    SgdOptimizer,
    WeightDecayBuilder,
)
from poseidon.caffe2.proto import DEVICE_NUMBERS

__all__ = [
    "AdadeltaOptimizer",
    "AdagradOptimizer",
    "AdamOptimizer",
    "AuxOptimizerParams",
    "DecayAdagradOptimizer",
    "FP16SgdOptimizer",
    "FtrlOptimizer",
    "GFtrlOptimizer",
    "MultiPrecisionSgdOptimizer",
    "Optimizer",
    "RmsPropOptimizer",
    "SgdOptimizer",
    "StormOptimizer",
    "WeightDecayBuilder",
    "WngradOptimizer",
    "YellowFinOptimizer",
    "_optimizer_instance_count",
    "add_weight_decay",
    "build_adadelta",
    "build_adagrad",
    "build_adam",
    "build_decay_adagrad",
    "build_fp16_sgd",
    "build_ftrl",
    "build_gftrl",
    "build_multi_precision_sgd",
    "build_rms_prop",
    "build_sgd",
    "build_storm",
    "build_wngrad",
    "build_yellowfin",
    "get_lr_injection",
    "get_param_device",
    "reset_optimizer_instance_count",
    "set_lr_injection",
]

_LEARNING_RATE_INJECTION = "lr_injection"


def set_lr_injection(lr_injection_value: float) -> None:
    """Multiply every learning rate of models built with `allow_lr_injection` from now on."""
    workspace.FeedBlob(_LEARNING_RATE_INJECTION, np.array([lr_injection_value], dtype=np.float32))


def get_lr_injection() -> float:
    """Return the factor of `set_lr_injection`, 1 at the start."""
    return float(workspace.FetchBlob(_LEARNING_RATE_INJECTION)[0])


def get_param_device(
    param_name: str,
    grad: Any,
    param_to_device: dict[str, Any] | None = None,
    default_device: Any = None,
) -> Any:
    """Return a parameter's device for updates: its own, its gradient's, or the default.

    Args:
        param_name: the parameter.
        grad: its gradient.
        param_to_device: the device of each blob.
        default_device: the CPU, where none is given.
    """
    devices = param_to_device or {}
    for name in (param_name, *_blobs(grad)):
        if name in devices:
            return devices[name]
    return default_device or core.DeviceOption(DEVICE_NUMBERS["CPU"])


def _blobs(grad: Any) -> list[str]:
    return (
        [str(grad.values), str(grad.indices)]
        if isinstance(grad, core.GradientSlice)
        else [str(grad)]
    )


def _build(
    model: Any,
    optimizer: Optimizer,
    weights_only: bool = False,
    use_param_info_optim: bool = True,
    max_gradient_norm: float | None = None,
    allow_lr_injection: bool = False,
) -> Optimizer:
    """Add the updates of a model's parameters, each on its device; return the optimizer."""
    devices = dict(core.InferBlobDevices(model.net))
    devices.update(core.InferBlobDevices(model.param_init_net))
    model.Validate()
    infos = [
        info
        for info in model.GetOptimizationParamInfo()
        if not weights_only or info.blob in model.weights
    ]
    multiplier = None
    if max_gradient_norm is not None:
        multiplier = _norm_ratio(
            model, infos, "norm_clipped_grad_update", devices, max_gradient_norm
        )
    if allow_lr_injection:
        if model.net.BlobIsDefined(_LEARNING_RATE_INJECTION):
            injection = core.BlobReference(_LEARNING_RATE_INJECTION)
        else:
            injection = model.param_init_net.ConstantFill(
                [], _LEARNING_RATE_INJECTION, shape=[1], value=1.0
            )
        multiplier = (
            injection
            if multiplier is None
            else model.net.Mul([multiplier, injection], "lr_multiplier", broadcast=1)
        )
    optimizer.add_lr_multiplier(multiplier)
    for info in infos:
        with core.DeviceScope(get_param_device(str(info.blob), info.grad, devices)):
            chosen = info.optimizer if info.optimizer and use_param_info_optim else optimizer
            chosen(model.net, model.param_init_net, info)
    return optimizer


def _norm_ratio(
    model: Any, infos: list[Any], name_scope: str, devices: dict[str, Any], max_gradient_norm: float
) -> Any:
    """Return the factor that limits the norm of all gradients (Pascanu et al., 2013)."""
    net = model.net
    with core.NameScope(name_scope):
        sums = []
        for index, info in enumerate(infos):
            grad = info.grad.values if isinstance(info.grad, core.GradientSlice) else info.grad
            with core.DeviceScope(get_param_device(str(info.blob), info.grad, devices)):
                squared = net.SumSqrElements(grad, f"grad_{index}_squared_sum")
                sums.append(net.EnsureCPUOutput(squared))
        with core.DeviceScope(core.DeviceOption(DEVICE_NUMBERS["CPU"])):
            total = net.Sum(sums, "grad_squared_full_sum")
            norm = net.Pow(total, "global_norm", exponent=0.5)
            limit = model.param_init_net.ConstantFill(
                [], "clip_norm", shape=[], value=float(max_gradient_norm)
            )
            return net.Div([limit, net.Max([norm, limit], "max_norm")], "norm_ratio")


def add_weight_decay(model: Any, weight_decay: float) -> None:
    """Add the decay to the gradients of all weights; it has to come before the optimizer."""
    decay = WeightDecayBuilder(weight_decay=weight_decay)
    _build(model, decay, weights_only=True, use_param_info_optim=False)


def _builder(kind: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """Return the function that adds the updates of a class of optimizers to a model."""

    def build(
        model: Any,
        base_learning_rate: float,
        max_gradient_norm: float | None = None,
        allow_lr_injection: bool = False,
        **kwargs: Any,
    ) -> Optimizer:
        """Add the updates of all parameters.

        Args:
            model: a model with gradient operators.
            base_learning_rate: the learning rate before the policy.
            max_gradient_norm: the limit of the norm of all gradients together, None for none.
            allow_lr_injection: whether `set_lr_injection` works.
            kwargs: see the class of the optimizer.
        """
        optimizer, limit = kind(base_learning_rate, **kwargs), max_gradient_norm
        return _build(
            model, optimizer, max_gradient_norm=limit, allow_lr_injection=allow_lr_injection
        )

    return build


def _builder_with_parameters(kind: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """Return what `_builder` does, with a third argument that Caffe2 does not use either."""
    plain = _builder(kind)

    def build(
        model: Any,
        base_learning_rate: float,
        parameters: Any = None,
        max_gradient_norm: float | None = None,
        allow_lr_injection: bool = False,
        **kwargs: Any,
    ) -> Optimizer:
        return plain(model, base_learning_rate, max_gradient_norm, allow_lr_injection, **kwargs)

    build.__doc__ = plain.__doc__
    return build


build_sgd = _builder(SgdOptimizer)
build_multi_precision_sgd = _builder(MultiPrecisionSgdOptimizer)
build_adam = _builder(AdamOptimizer)
build_decay_adagrad = _builder(DecayAdagradOptimizer)
build_rms_prop = _builder(RmsPropOptimizer)
build_adagrad = _builder_with_parameters(AdagradOptimizer)
build_wngrad = _builder_with_parameters(WngradOptimizer)
build_storm = _builder_with_parameters(StormOptimizer)
build_adadelta = _builder_with_parameters(AdadeltaOptimizer)


def build_fp16_sgd(model: Any, base_learning_rate: float, **kwargs: Any) -> Optimizer:
    """Add SGD in float16 for all parameters; see `FP16SgdOptimizer`."""
    return _build(model, FP16SgdOptimizer(base_learning_rate, **kwargs))


def build_ftrl(model: Any, engine: str | None = "SIMD", **kwargs: Any) -> Optimizer:
    """Add FTRL for all parameters; see `FtrlOptimizer`."""
    return _build(model, FtrlOptimizer(engine=engine, **kwargs))


def build_gftrl(model: Any, engine: str | None = "", **kwargs: Any) -> Optimizer:
    """Add FTRL with groups for all parameters; see `GFtrlOptimizer`."""
    return _build(model, GFtrlOptimizer(engine=engine, **kwargs))


def build_yellowfin(model: Any, base_learning_rate: float = 0.1, **kwargs: Any) -> Optimizer:
    """Add YellowFin for all parameters; see `YellowFinOptimizer`."""
    return _build(model, YellowFinOptimizer(alpha=base_learning_rate, **kwargs))
