"""Gradient clipping by tensor, and the base class of modifiers of nets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from poseidon.caffe2 import core
from poseidon.caffe2.optimizer import get_param_device
from poseidon.errors import unknown


class NetModifier(ABC):
    """Adds operators to a net; `modifier(net, ...)` is `modifier.modify_net(net, ...)`."""

    @abstractmethod
    def modify_net(
        self,
        net: Any,
        init_net: Any = None,
        grad_map: Any = None,
        blob_to_device: Any = None,
        modify_output_record: bool = False,
    ) -> None:
        """Modify a net.

        Args:
            net: the net.
            init_net: the net that makes its parameters.
            grad_map: the gradient of each parameter, such as `model.param_to_grad`.
            blob_to_device: the device of each blob.
            modify_output_record: whether new blobs go to the record of the net's outputs.
        """

    def __call__(self, net: Any, *args: Any, **kwargs: Any) -> None:
        self.modify_net(net, *args, **kwargs)


class GradientClipping(NetModifier):
    """Limits the norm of each gradient, or its values. Sparse gradients stay as they are.

    Call it between `AddGradientOperators` and the optimizer:

        GradientClipping("by_norm", clip_threshold=1.0)(model.net, grad_map=model.param_to_grad)
    """

    L1_NORM = "l1_norm"
    L2_NORM = "l2_norm"
    BY_NORM = "by_norm"
    BY_VALUE = "by_value"
    GRAD_CLIP_METHODS = (BY_NORM, BY_VALUE)
    CLIP_GRADIENT_NORM_TYPES = (L2_NORM, L1_NORM)

    def __init__(
        self,
        grad_clip_method: str,
        clip_norm_type: str | None = "l2_norm",
        clip_threshold: float = 0.1,
        use_parameter_norm: bool = False,
        compute_norm_ratio: bool = False,
        clip_max: float = 1,
        clip_min: float = -1,
        blobs_to_include: Iterable[Any] | None = None,
        blobs_to_exclude: Iterable[Any] | None = None,
    ) -> None:
        """Set up clipping.

        Args:
            grad_clip_method: `by_norm` or `by_value`.
            clip_norm_type: `l2_norm` or `l1_norm`.
            clip_threshold: the largest norm; a gradient with a larger one is scaled to it.
            use_parameter_norm: multiply the threshold by the norm of the parameter.
            compute_norm_ratio: with `use_parameter_norm`, also compute gradient's norm by
                parameter's, in a blob `<parameter>_norm_ratio`.
            clip_max: the largest value, with `by_value`.
            clip_min: the least value.
            blobs_to_include: the parameters whose gradients are clipped; by default all.
            blobs_to_exclude: parameters whose gradients are not.

        Raises:
            ValueError: there is no such method or norm.
        """
        if grad_clip_method not in self.GRAD_CLIP_METHODS:
            raise ValueError(unknown("grad_clip_method", grad_clip_method, self.GRAD_CLIP_METHODS))
        if clip_norm_type not in (*self.CLIP_GRADIENT_NORM_TYPES, None):
            raise ValueError(
                unknown("clip_norm_type", str(clip_norm_type), self.CLIP_GRADIENT_NORM_TYPES)
            )
        self.grad_clip_method = grad_clip_method
        self.clip_norm_type = clip_norm_type
        self.clip_threshold = float(clip_threshold)
        self.use_parameter_norm = use_parameter_norm
        self.compute_norm_ratio = compute_norm_ratio
        self.clip_max, self.clip_min = float(clip_max), float(clip_min)
        self.blobs_to_include = blobs_to_include
        self.blobs_to_exclude = blobs_to_exclude

    def modify_net(
        self,
        net: Any,
        init_net: Any = None,
        grad_map: Any = None,
        blob_to_device: Any = None,
        modify_output_record: bool = False,
    ) -> None:
        """Clip the gradients of a net; see `NetModifier`.

        Raises:
            ValueError: a parameter to include has no gradient.
        """
        gradients = {str(param): grad for param, grad in (grad_map or {}).items()}
        chosen = [str(blob) for blob in self.blobs_to_include or gradients]
        excluded = {str(blob) for blob in self.blobs_to_exclude or ()}
        for param in chosen:
            if param not in gradients:
                raise ValueError(f"the gradient of {param} cannot be clipped: grad_map has none")
            grad = gradients[param]
            if param not in excluded and not isinstance(grad, core.GradientSlice):
                with core.DeviceScope(get_param_device(param, grad, blob_to_device)):
                    self._clip(net, param, grad)

    def _clip(self, net: Any, param: str, grad: Any) -> None:
        if self.grad_clip_method == self.BY_VALUE:
            net.Clip([grad], [grad], max=self.clip_max, min=self.clip_min)
            return
        norms = [self._norm(net, grad)]
        if self.use_parameter_norm:
            norms.append(self._norm(net, param))
            if self.compute_norm_ratio:
                net.Div(norms, [net.NextScopedBlob(f"{param}_norm_ratio")])
        net.ClipTensorByScaling([grad, *norms], [grad], threshold=self.clip_threshold)

    def _norm(self, net: Any, blob: Any) -> Any:
        """Return the norm of a blob; `LpNorm` with p=2 is the square of it."""
        p = 1 if self.clip_norm_type == self.L1_NORM else 2
        norm = net.LpNorm([blob], net.NextScopedBlob(f"{blob}_l{p}_norm"), p=p)
        return norm if p == 1 else net.Pow([norm], exponent=0.5)
