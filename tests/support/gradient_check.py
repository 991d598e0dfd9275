"""Gradients against finite differences, in float64.

Where a function has a kink (ReLU at 0), values within `kink_range` of 0 have no finite
difference worth the name: they are left out, as Caffe's checker does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

STEP = 1e-5
TOLERANCE = 1e-6


def check_gradients(
    function: Callable[[], Sequence[Tensor]],
    variables: Sequence[Tensor],
    *,
    kink_range: float = 0.0,
    tolerance: float = TOLERANCE,
    every: int = 1,
) -> None:
    """Assert that backward agrees with central differences, for every value of every variable.

    Args:
        function: computes the tops from the variables; called many times, so it must draw nothing.
        variables: float64 leaves; changed in place and put back.
        kink_range: how close to 0 a value is left out.
        tolerance: relative to the larger of 1 and the gradient.
        every: 1 for all values; n for every n-th value, where all values have the same meaning.
    """
    tops = [top for top in function() if top.requires_grad]
    assert tops, "nothing here has a gradient"
    weights = [
        torch.randn(top.shape, dtype=top.dtype, generator=torch.Generator().manual_seed(place))
        for place, top in enumerate(tops)
    ]
    found = torch.autograd.grad(tops, list(variables), weights, allow_unused=True)

    def objective() -> float:
        with torch.no_grad():
            chosen = list(function())[: len(weights)]
            return sum(
                float((top * weight).sum()) for top, weight in zip(chosen, weights, strict=True)
            )

    for place, (variable, gradient) in enumerate(zip(variables, found, strict=True)):
        flat = variable.detach().reshape(-1)
        assert flat.data_ptr() == variable.data_ptr(), "a variable must be contiguous"
        ours = torch.zeros_like(flat) if gradient is None else gradient.reshape(-1)
        for index in range(0, flat.numel(), every):
            value = float(flat[index])
            if abs(value) < kink_range:
                continue
            flat[index] = value + STEP
            above = objective()
            flat[index] = value - STEP
            below = objective()
            flat[index] = value
            expected = (above - below) / (2 * STEP)
            scale = max(1.0, abs(expected))
            assert abs(float(ours[index]) - expected) <= tolerance * scale, (
                f"variable {place}, value {index} ({value:g}): gradient {float(ours[index]):g}, "
                f"expected {expected:g}"
            )
