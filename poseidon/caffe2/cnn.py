"""`CNNModelHelper`: the older interface, in which layers are methods of the model."""

from __future__ import annotations

from typing import Any

from poseidon.caffe2 import brew, core
from poseidon.caffe2.model_helper import ModelHelper
from poseidon.caffe2.proto import DEVICE_NUMBERS

LAYERS = {
    "ImageInput": "image_input",
    "PadImage": None,
    "ConvNd": "conv_nd",
    "Conv": "conv",
    "ConvTranspose": "conv_transpose",
    "GroupConv": "group_conv",
    "GroupConv_Deprecated": "group_conv_deprecated",
    "FC": "fc",
    "PackedFC": "packed_fc",
    "Dropout": "dropout",
    "LRN": "lrn",
    "Softmax": "softmax",
    "SpatialBN": "spatial_bn",
    "SpatialGN": "spatial_gn",
    "InstanceNorm": "instance_norm",
    "MaxPool": "max_pool",
    "MaxPoolWithIndex": "max_pool_with_index",
    "AveragePool": "average_pool",
    "Concat": "concat",
    "DepthConcat": "depth_concat",
    "Relu": "relu",
    "PRelu": "prelu",
    "Tanh": "tanh",
    "Transpose": "transpose",
    "Sum": "sum",
    "Iter": "iter",
    "Accuracy": "accuracy",
}
"""The methods that are brew helpers; None is an operator of the net."""


class CNNModelHelper(ModelHelper):
    """A model with layers as methods: `model.Conv("data", "conv1", 3, 64, 7)`.

    New models use `brew`.
    """

    def __init__(
        self,
        order: str = "NCHW",
        name: str | None = None,
        use_cudnn: bool = True,
        cudnn_exhaustive_search: bool = False,
        ws_nbytes_limit: int | None = None,
        init_params: bool = True,
        skip_sparse_optim: bool = False,
        param_model: ModelHelper | None = None,
    ) -> None:
        """Make an empty model.

        Args:
            order: NCHW or NHWC, of all layers.
            name: of the net, `CNN` by default.
            use_cudnn, cudnn_exhaustive_search, ws_nbytes_limit: defaults of the layers.
            init_params, skip_sparse_optim, param_model: see `ModelHelper`.

        Raises:
            ValueError: the order is neither.
        """
        if order not in ("NHWC", "NCHW"):
            raise ValueError(f"Cannot understand the CNN storage order {order}.")
        defaults: dict[str, Any] = {
            "order": order,
            "use_cudnn": use_cudnn,
            "cudnn_exhaustive_search": cudnn_exhaustive_search,
        }
        if ws_nbytes_limit:
            defaults["ws_nbytes_limit"] = ws_nbytes_limit
        super().__init__(
            name=name or "CNN",
            skip_sparse_optim=skip_sparse_optim,
            init_params=init_params,
            param_model=param_model,
            arg_scope=defaults,
        )
        self.order = order
        self.use_cudnn = use_cudnn
        self.cudnn_exhaustive_search = cudnn_exhaustive_search
        self.ws_nbytes_limit = ws_nbytes_limit

    def __getattr__(self, name: str) -> Any:
        helper = LAYERS.get(name)
        if helper is None:
            return super().__getattr__(name)
        return lambda *args, **kwargs: getattr(brew, helper)(self, *args, **kwargs)

    @property
    def XavierInit(self) -> tuple[str, dict[str, Any]]:
        return ("XavierFill", {})

    @property
    def MSRAInit(self) -> tuple[str, dict[str, Any]]:
        return ("MSRAFill", {})

    @property
    def ZeroInit(self) -> tuple[str, dict[str, Any]]:
        return ("ConstantFill", {})

    def ConstantInit(self, value: float) -> tuple[str, dict[str, Any]]:
        """Return the filler with a value."""
        return ("ConstantFill", {"value": value})

    @property
    def CPU(self) -> Any:
        return core.DeviceOption(DEVICE_NUMBERS["CPU"])

    @property
    def GPU(self) -> Any:
        return core.DeviceOption(DEVICE_NUMBERS["CUDA"], 0)
