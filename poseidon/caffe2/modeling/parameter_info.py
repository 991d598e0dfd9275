"""Descriptions of parameters."""

from __future__ import annotations

import math
from typing import Any

from poseidon.caffe2 import core


class ParameterTags:
    """The tags of a parameter: what it is in its layer."""

    BIAS = "BIAS"
    WEIGHT = "WEIGHT"
    COMPUTED_PARAM = "COMPUTED_PARAM"


class ParameterType:
    """The kinds of gradient that a parameter has."""

    DENSE = "dense"
    SPARSE = "sparse"


class ParameterInfo:
    """A parameter: its blob, shape, gradient, copies in other precisions, and its optimizer."""

    def __init__(
        self,
        param_id: Any,
        param: Any,
        key: Any = None,
        shape: Any = None,
        length: Any = None,
        grad: Any = None,
        blob_copy: dict[int, Any] | None = None,
    ) -> None:
        """Describe a parameter.

        Args:
            param_id: a number, or None.
            param: the reference to its blob.
            key, length: of a sparse parameter: the blobs of its indices and lengths.
            shape: its shape, None where it is unknown.
            grad: the reference to its gradient, or a GradientSlice.
            blob_copy: the same parameter by data type, e.g. a float32 copy of a float16 blob.
        """
        assert isinstance(param, core.BlobReference), f"Expected a BlobReference, found {param!r}"
        self.param_id = param_id
        self.name = str(param)
        self.blob = param
        self.key = key
        self.shape = shape
        self.size = None if shape is None else math.prod(map(int, shape))
        self.length = max(1, length if length is not None else 1)
        self.grad = grad
        self.blob_copy = blob_copy
        self._optimizer: Any = None

    @property
    def parameter(self) -> Any:
        return self.blob

    @property
    def optimizer(self) -> Any:
        """The optimizer chosen for this parameter, None where there is none."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, value: Any) -> None:
        assert self._optimizer is None, "optimizer has already been set"
        self._optimizer = value

    def grad_type(self) -> str:
        """Return the kind of the gradient.

        Raises:
            ValueError: the parameter has no gradient.
        """
        if self.grad is None:
            raise ValueError(f"Undefined gradient for parameter {self.name}")
        sparse = isinstance(self.grad, core.GradientSlice)
        return ParameterType.SPARSE if sparse else ParameterType.DENSE

    def __str__(self) -> str:
        return self.name
