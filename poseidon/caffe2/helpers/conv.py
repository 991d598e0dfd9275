"""Convolutions."""

from __future__ import annotations

from typing import Any

from poseidon.caffe2.modeling import initializers
from poseidon.caffe2.modeling.parameter_info import ParameterTags


def _kernels(kernel: Any, is_nd: bool) -> list[int]:
    if is_nd:
        return list(kernel) if isinstance(kernel, (list, tuple)) else [kernel]
    if isinstance(kernel, (list, tuple)):
        assert len(kernel) == 2, "Conv support only a 2D kernel."
        return list(kernel)
    return [kernel] * 2


def _engine(
    kwargs: dict[str, Any], use_cudnn: bool, exhaustive_search: bool, ws_nbytes_limit: int | None
) -> None:
    """Add the arguments of cuDNN.

    Raises:
        ValueError: the engine asked for contradicts `use_cudnn`.
    """
    engine = kwargs.get("engine")
    if engine is not None and use_cudnn and engine != "CUDNN":
        raise ValueError('When use_cudnn=True, the only engine you can specify is "CUDNN"')
    if engine == "CUDNN" and not use_cudnn:
        raise ValueError('When use_cudnn=False, the only engine you can specify is ""')
    if use_cudnn:
        kwargs["engine"] = "CUDNN"
        kwargs["exhaustive_search"] = exhaustive_search
        if ws_nbytes_limit:
            kwargs["ws_nbytes_limit"] = ws_nbytes_limit


def _parameters(
    model: Any,
    blob_out: Any,
    weight_shape: list[int],
    dim_out: int,
    inits: tuple[Any, Any, Any, Any],
    use_bias: bool,
) -> list[Any]:
    """Return references to the weight and, if there is one, the bias."""
    weight_init, bias_init, weight_class, bias_class = inits
    weight_init = initializers.update_initializer(weight_class, weight_init, ("XavierFill", {}))
    bias_init = initializers.update_initializer(bias_class, bias_init, ("ConstantFill", {}))
    made = [model.create_param(blob_out + "_w", weight_shape, weight_init, ParameterTags.WEIGHT)]
    if use_bias:
        made.append(model.create_param(blob_out + "_b", [dim_out], bias_init, ParameterTags.BIAS))
    return made


def _conv(
    model: Any,
    is_nd: bool,
    blob_in: Any,
    blob_out: Any,
    dim_in: int,
    dim_out: int,
    kernel: Any,
    weight_init: Any = None,
    bias_init: Any = None,
    WeightInitializer: Any = None,
    BiasInitializer: Any = None,
    group: int = 1,
    transform_inputs: Any = None,
    use_cudnn: bool = False,
    order: str = "NCHW",
    cudnn_exhaustive_search: bool = False,
    ws_nbytes_limit: int | None = None,
    float16_compute: bool = False,
    **kwargs: Any,
) -> Any:
    kernels = _kernels(kernel, is_nd)
    _engine(kwargs, use_cudnn, cudnn_exhaustive_search, ws_nbytes_limit)
    use_bias = not kwargs.pop("no_bias", False)
    blob_out = blob_out or model.net.NextName()
    channels = int(dim_in / group)
    shape = [dim_out, channels, *kernels] if order == "NCHW" else [dim_out, *kernels, channels]
    inits = (weight_init, bias_init, WeightInitializer, BiasInitializer)
    inputs = [blob_in, *_parameters(model, blob_out, shape, dim_out, inits, use_bias)]
    if transform_inputs is not None:
        transform_inputs(model, blob_out, inputs)
    if group != 1:
        kwargs["group"] = group
    if float16_compute:
        kwargs["float16_compute"] = True
    if is_nd:
        size: dict[str, Any] = {"kernels": kernels}
    elif kernels[0] == kernels[1]:
        size = {"kernel": kernels[0]}
    else:
        size = {"kernel_h": kernels[0], "kernel_w": kernels[1]}
    return model.net.Conv(inputs, blob_out, order=order, **size, **kwargs)


def conv_nd(
    model: Any,
    blob_in: Any,
    blob_out: Any,
    dim_in: int,
    dim_out: int,
    kernel: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Add a convolution over any number of dimensions: one kernel size for each; see `conv`."""
    assert not (args and kwargs.get("order") == "NHWC" and len(_kernels(kernel, True)) != 2), (
        "Conv only supports NCHW for other than two dimensions"
    )
    return _conv(model, True, blob_in, blob_out, dim_in, dim_out, kernel, *args, **kwargs)


def conv(
    model: Any,
    blob_in: Any,
    blob_out: Any,
    dim_in: int,
    dim_out: int,
    kernel: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Add `Conv` over images.

    Args:
        model: the model.
        blob_in, blob_out: input and output.
        dim_in, dim_out: channels.
        kernel: the size, or [height, width].
        args: weight_init, bias_init (fillers), WeightInitializer, BiasInitializer, group.
        kwargs: these by name, `no_bias`, `use_cudnn`, `order`, and arguments of the operator.
    """
    return _conv(model, False, blob_in, blob_out, dim_in, dim_out, kernel, *args, **kwargs)


def conv_transpose(
    model: Any,
    blob_in: Any,
    blob_out: Any,
    dim_in: int,
    dim_out: int,
    kernel: int,
    weight_init: Any = None,
    bias_init: Any = None,
    use_cudnn: bool = False,
    order: str = "NCHW",
    cudnn_exhaustive_search: bool = False,
    ws_nbytes_limit: int | None = None,
    **kwargs: Any,
) -> Any:
    """Add `ConvTranspose`, with the arguments of `conv`."""
    use_bias = not kwargs.pop("no_bias", False)
    blob_out = blob_out or model.net.NextName()
    shape = [dim_in, dim_out, kernel, kernel]
    if order != "NCHW":
        shape = [dim_in, kernel, kernel, dim_out]
    inits = (weight_init, bias_init, None, None)
    inputs = [blob_in, *_parameters(model, blob_out, shape, dim_out, inits, use_bias)]
    _engine(kwargs, use_cudnn, cudnn_exhaustive_search, ws_nbytes_limit)
    return model.net.ConvTranspose(inputs, blob_out, kernel=kernel, order=order, **kwargs)


def group_conv(
    model: Any,
    blob_in: Any,
    blob_out: Any,
    dim_in: int,
    dim_out: int,
    kernel: Any,
    weight_init: Any = None,
    bias_init: Any = None,
    group: int = 1,
    **kwargs: Any,
) -> Any:
    """Add a convolution in groups; see `conv`."""
    kwargs.update(weight_init=weight_init, bias_init=bias_init, group=group)
    return conv(model, blob_in, blob_out, dim_in, dim_out, kernel, **kwargs)


def group_conv_deprecated(
    model: Any,
    blob_in: Any,
    blob_out: Any,
    dim_in: int,
    dim_out: int,
    kernel: int,
    weight_init: Any = None,
    bias_init: Any = None,
    group: int = 1,
    use_cudnn: bool = False,
    order: str = "NCHW",
    cudnn_exhaustive_search: bool = False,
    ws_nbytes_limit: int | None = None,
    **kwargs: Any,
) -> Any:
    """Add a convolution in groups as one convolution for each; new models use `group_conv`."""
    _engine(kwargs, use_cudnn, cudnn_exhaustive_search, ws_nbytes_limit)
    use_bias = not kwargs.pop("no_bias", False)
    blob_out = blob_out or model.net.NextName()
    assert dim_in % group == 0 and dim_out % group == 0, "channels must be divisible by group"
    part_in, part_out = dim_in // group, dim_out // group
    parts = model.net.DepthSplit(
        blob_in,
        ["_" + blob_out + f"_gconv_split_{i}" for i in range(group)],
        dimensions=[part_in] * group,
        order=order,
    )
    shape = (
        [part_out, part_in, kernel, kernel]
        if order == "NCHW"
        else [part_out, kernel, kernel, part_in]
    )
    outputs = []
    for index, part in enumerate(parts if group > 1 else [parts]):
        name = blob_out + f"_gconv_{index}"
        inputs = [
            part,
            *_parameters(
                model, name, shape, part_out, (weight_init, bias_init, None, None), use_bias
            ),
        ]
        outputs.append(model.net.Conv(inputs, name, kernel=kernel, order=order, **kwargs))
    return model.net.Concat(outputs, [blob_out, "_" + blob_out + "_concat_dims"], order=order)[0]
