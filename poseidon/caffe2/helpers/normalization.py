"""Normalization layers and softmax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from poseidon.caffe2 import scope
from poseidon.caffe2.modeling.initializers import Initializer
from poseidon.caffe2.modeling.parameter_info import ParameterTags
from poseidon.caffe2.proto import DEVICE_NUMBERS


def _constant(
    model: Any, name: Any, dim: int | Sequence[int], value: float, tag: str, maker: Any = None
) -> Any:
    shape = list(dim) if isinstance(dim, Sequence) else [dim]
    return model.create_param(name, shape, maker or Initializer("ConstantFill", value=value), tag)


def _scale_and_bias(
    model: Any, blob_out: Any, dim: int, start: tuple[float, float], makers: tuple[Any, Any]
) -> list[Any]:
    """Return references to `_s` and `_b`."""
    return [
        _constant(model, blob_out + "_s", dim, start[0], ParameterTags.WEIGHT, makers[0]),
        _constant(model, blob_out + "_b", dim, start[1], ParameterTags.BIAS, makers[1]),
    ]


def _running_statistics(model: Any, blob_out: Any, dim: int, makers: tuple[Any, Any]) -> list[Any]:
    """Return references to `_rm` and `_riv`."""
    starts = zip(("_rm", "_riv"), (0.0, 1.0), makers, strict=True)
    tag = ParameterTags.COMPUTED_PARAM
    return [_constant(model, blob_out + end, dim, start, tag, made) for end, start, made in starts]


def lrn(
    model: Any,
    blob_in: Any,
    blob_out: Any,
    order: str = "NCHW",
    use_cudnn: bool = False,
    **kwargs: Any,
) -> Any:
    """Add `LRN`; its scale is `_<blob_out>_scale`, which cuDNN does not have."""
    device = kwargs.get("device_option", scope.CurrentDeviceScope())
    cudnn = use_cudnn and device is not None and device.device_type != DEVICE_NUMBERS["CPU"]
    if cudnn:
        return model.net.LRN(blob_in, blob_out, order=order, engine="CUDNN", **kwargs)
    return model.net.LRN(blob_in, [blob_out, "_" + blob_out + "_scale"], order=order, **kwargs)[0]


def softmax(
    model: Any, blob_in: Any, blob_out: Any = None, use_cudnn: bool = False, **kwargs: Any
) -> Any:
    """Add `Softmax`."""
    if use_cudnn:
        kwargs["engine"] = "CUDNN"
    return model.net.Softmax(blob_in, blob_out, **kwargs)


def instance_norm(
    model: Any,
    blob_in: Any,
    blob_out: Any,
    dim_in: int,
    init_scale: float = 1.0,
    init_bias: float = 0.0,
    ScaleInitializer: Any = None,
    BiasInitializer: Any = None,
    order: str = "NCHW",
    **kwargs: Any,
) -> Any:
    """Add `InstanceNorm`; in training it saves `_sm` and `_siv`."""
    blob_out = blob_out or model.net.NextName()
    made = _scale_and_bias(
        model, blob_out, dim_in, (init_scale, init_bias), (ScaleInitializer, BiasInitializer)
    )
    outputs = [blob_out]
    if not kwargs.get("is_test"):
        outputs += [blob_out + "_sm", blob_out + "_siv"]
    result = model.net.InstanceNorm([blob_in, *made], outputs, order=order, **kwargs)
    return result if len(outputs) == 1 else result[0]


def spatial_bn(
    model: Any,
    blob_in: Any,
    blob_out: Any,
    dim_in: int,
    init_scale: float = 1.0,
    init_bias: float = 0.0,
    ScaleInitializer: Any = None,
    BiasInitializer: Any = None,
    RunningMeanInitializer: Any = None,
    RunningVarianceInitializer: Any = None,
    order: str = "NCHW",
    **kwargs: Any,
) -> Any:
    """Add `SpatialBN`: batch normalization over all axes but the channels.

    Parameters `_s`, `_b`; running statistics `_rm`, `_riv` (a variance); saved `_sm`, `_siv`.
    """
    blob_out = blob_out or model.net.NextName()
    made = _scale_and_bias(
        model, blob_out, dim_in, (init_scale, init_bias), (ScaleInitializer, BiasInitializer)
    )
    makers = (RunningMeanInitializer, RunningVarianceInitializer)
    mean, variance = _running_statistics(model, blob_out, dim_in, makers)
    inputs = [blob_in, *made, mean, variance]
    if kwargs.get("is_test"):
        return model.net.SpatialBN(inputs, blob_out, order=order, **kwargs)
    outputs = [blob_out, mean, variance, blob_out + "_sm", blob_out + "_siv"]
    return model.net.SpatialBN(inputs, outputs, order=order, **kwargs)[0]


def spatial_gn(
    model: Any,
    blob_in: Any,
    blob_out: Any,
    dim_in: int,
    init_scale: float = 1.0,
    init_bias: float = 0.0,
    ScaleInitializer: Any = None,
    BiasInitializer: Any = None,
    RunningMeanInitializer: Any = None,
    RunningVarianceInitializer: Any = None,
    order: str = "NCHW",
    **kwargs: Any,
) -> Any:
    """Add `GroupNorm`; it saves `_mean` and `_std`."""
    blob_out = blob_out or model.net.NextName()
    made = _scale_and_bias(
        model, blob_out, dim_in, (init_scale, init_bias), (ScaleInitializer, BiasInitializer)
    )
    outputs = [blob_out, blob_out + "_mean", blob_out + "_std"]
    return model.net.GroupNorm([blob_in, *made], outputs, **kwargs)[0]


def layer_norm(
    model: Any,
    blob_in: Any,
    blob_out: Any,
    dim_in: int | Sequence[int],
    axis: int = 1,
    epsilon: float = 1e-4,
    initial_scale: float = 1.0,
    initial_bias: float = 0.0,
) -> Any:
    """Add `LayerNorm` with scale and bias of the sizes `dim_in`; return its three outputs."""
    scale = _constant(model, f"{blob_out}_scale", dim_in, initial_scale, ParameterTags.WEIGHT)
    bias = _constant(model, f"{blob_out}_bias", dim_in, initial_bias, ParameterTags.BIAS)
    outputs = [blob_out, blob_out + "_mean", blob_out + "_std"]
    return model.net.LayerNorm(
        [blob_in, scale, bias], outputs, axis=axis, epsilon=epsilon, elementwise_affine=True
    )


def moments_with_running_stats(
    model: Any,
    blob_in: Any,
    blob_out: Any,
    dim_in: int,
    RunningMeanInitializer: Any = None,
    RunningVarianceInitializer: Any = None,
    order: str = "NCHW",
    **kwargs: Any,
) -> Any:
    """Add the mean and variance of each channel, and their running averages `_rm` and `_riv`.

    Returns:
        the references to mean and variance.
    """
    blob_out = blob_out or model.net.NextName()
    makers = (RunningMeanInitializer, RunningVarianceInitializer)
    mean, variance = _running_statistics(model, blob_out, dim_in, makers)
    outputs = [blob_out + "_sm", blob_out + "_sv"]
    axes = [0, 2, 3] if order == "NCHW" else [0, 1, 2]
    moments = model.net.Moments([blob_in], outputs, axes=axes, order=order, keepdims=False)
    momentum = kwargs.get("momentum", 0.9)
    for running, batch in zip((mean, variance), moments, strict=True):
        model.net.WeightedSum(
            [running, _weight(model, momentum), batch, _weight(model, 1 - momentum)], running
        )
    return moments


def _weight(model: Any, value: float) -> Any:
    return model.param_init_net.ConstantFill([], f"weight_{value:g}", shape=[1], value=value)
