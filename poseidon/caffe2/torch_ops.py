"""Operators as PyTorch functions: `torch.ops._caffe2.LayerNorm`, as PyTorch once had.

`poseidon.caffe2.workspace` makes them. TorchScript can call them, and gradients flow through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from poseidon.caffe2.operators.registry import find

NAMESPACE = "_caffe2"
SCHEMAS = (
    "BatchBucketOneHot(Tensor data, Tensor lengths, Tensor boundaries) -> Tensor output",
    "Bucketize(Tensor data, float[] boundaries) -> Tensor output",
    "Fused8BitRowwiseQuantizedToFloat(Tensor scale_bias_quantized_input) -> Tensor output",
    "Gelu(Tensor input, bool fast_gelu=False) -> Tensor output",
    "IndexHash(Tensor indices, int seed, int modulo) -> Tensor hashed_indices",
    "LayerNorm(Tensor X, Tensor? gamma, Tensor? beta, int axis=1, float epsilon=1e-5, "
    "bool elementwise_affine=False) -> (Tensor Y, Tensor mean, Tensor std)",
    "LengthsMax(Tensor data, Tensor lengths) -> Tensor output",
    "LengthsMean(Tensor data, Tensor lengths) -> Tensor output",
    "LengthsSum(Tensor data, Tensor lengths) -> Tensor output",
    "Logit(Tensor X, float eps=1e-6) -> Tensor Y",
    "Percentile(Tensor original_values, Tensor value_to_pct, Tensor lengths) -> Tensor output",
    "PiecewiseLinearTransform(Tensor predictions, float[] bounds, float[] slopes, "
    "float[] intercepts, bool binary) -> Tensor output",
    "ResizeNearest(Tensor X, str order, float width_scale, float height_scale) -> Tensor Y",
    "UnpackSegments(Tensor lengths, Tensor tensor, int max_length=-1) -> Tensor packed_tensor",
)
"""The functions; arguments that are not tensors have the names that the operator gives them."""


def _kernel(name: str) -> Callable[..., Any]:
    """Return the function that runs an operator on the values of its schema's arguments."""

    def run(*values: Any) -> Any:
        operator = find(name)
        inputs, arguments = [], {}
        schema = getattr(getattr(torch.ops, NAMESPACE), name).default._schema
        left_out = [argument.default_value for argument in schema.arguments[len(values) :]]
        for argument, value in zip(schema.arguments, [*values, *left_out], strict=True):
            if argument.name in operator.parameters:
                arguments[operator.parameters[argument.name].keyword] = value
            elif value is None or isinstance(value, torch.Tensor):
                inputs.append(value)
        return operator.make(*inputs, **arguments)

    return run


def _register() -> torch.library.Library:
    """Make the functions that PyTorch does not know yet: it keeps one for each name."""
    made = torch.library.Library(NAMESPACE, "FRAGMENT")
    for schema in SCHEMAS:
        name = schema.partition("(")[0]
        if not hasattr(getattr(torch.ops, NAMESPACE), name):
            made.define(schema)
            made.impl(name, _kernel(name), "CompositeImplicitAutograd")
    return made


LIBRARY = _register()
"""What holds the functions, for as long as the process runs."""
