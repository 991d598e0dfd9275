"""How parameters start: a filler, a filler in two precisions, or a blob from outside."""

from __future__ import annotations

from typing import Any

from poseidon.caffe2 import core
from poseidon.caffe2.modeling.parameter_info import ParameterInfo


class Initializer:
    """Fills a parameter by an operator of the init net."""

    def __init__(self, operator_name: str | None = None, **kwargs: Any) -> None:
        """Take the filler and its arguments, e.g. `("GaussianFill", std=0.1)`."""
        self.operator_name = operator_name
        self.operator_kwargs = kwargs

    def create_param(self, param_name: Any, init_net: Any, shape: Any) -> ParameterInfo:
        """Add the filler to the init net; return the parameter."""
        param = self._fill(param_name, init_net, shape)
        return ParameterInfo(param_id=None, param=param, shape=shape)

    def _fill(self, name: Any, init_net: Any, shape: Any) -> Any:
        return getattr(init_net, str(self.operator_name))(
            [], name, shape=shape, **self.operator_kwargs
        )


class ExternalInitializer:
    """Adds no operator: the blob is fed or loaded."""

    def create_param(self, param_name: Any, init_net: Any, shape: Any) -> ParameterInfo:
        """Return the parameter of a name or reference.

        Raises:
            TypeError: it is neither.
        """
        if isinstance(param_name, core.BlobReference):
            param = core.BlobReference(str(param_name), init_net)
        elif isinstance(param_name, str):
            param = core.ScopedBlobReference(param_name, init_net)
        else:
            raise TypeError("Unsupported type for param_name")
        return ParameterInfo(param_id=None, param=param, shape=shape)


class PseudoFP16Initializer(Initializer):
    """Fills a float32 copy and converts it to the float16 parameter."""

    def create_param(self, param_name: Any, init_net: Any, shape: Any) -> ParameterInfo:
        """Add both operators; return the float16 parameter with its float32 copy."""
        copy = self._fill(param_name + "_fp32", init_net, shape)
        param = init_net.FloatToHalf(copy, param_name)
        return ParameterInfo(
            param_id=None, param=param, shape=shape, blob_copy={core.DataType.FLOAT: copy}
        )


pFP16Initializer = PseudoFP16Initializer  # its name until 2018


class ReversePseudoFP16Initializer(Initializer):
    """Fills the float32 parameter and converts it to a float16 copy."""

    def create_param(self, param_name: Any, init_net: Any, shape: Any) -> ParameterInfo:
        """Add both operators; return the float32 parameter with its float16 copy."""
        param = self._fill(param_name, init_net, shape)
        copy = init_net.FloatToHalf(param, param_name + "_fp16")
        return ParameterInfo(
            param_id=None, param=param, shape=shape, blob_copy={core.DataType.FLOAT16: copy}
        )


def update_initializer(
    initializer_class: Any,
    operator_name_and_kwargs: tuple[str, dict[str, Any]] | None,
    default_operator_name_and_kwargs: tuple[str, dict[str, Any]],
) -> Any:
    """Return an initializer.

    Args:
        initializer_class: its class; `Initializer` where it is None.
        operator_name_and_kwargs: the filler and its arguments; None: the default. More are ignored.
        default_operator_name_and_kwargs: the default filler.
    """
    name, arguments, *_ = operator_name_and_kwargs or default_operator_name_and_kwargs
    return (initializer_class or Initializer)(name, **arguments)
