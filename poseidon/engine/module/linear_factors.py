"""The factors of fully-connected layers beside autograd's own weight gradients, for modules whose
gradients another library reduces.

A gradient is u^T v if the weight is used in the forward passes of its layer and nowhere else. Law:
this is never assumed. The first gradient is compared with the product, and of each later one a row,
so that a gradient of other uses is an error and not a wrong mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from poseidon.errors import UsageError
from poseidon.exchange.factors.taps import layers_with_factors
from poseidon.exchange.module_hooks import OfOneModule

TOLERANCE, TOLERANCE_16 = 1e-3, 3e-2
"""Relative to a sum of absolute products: of float32, also by the tensor cores of a GPU; and of
types of 16 bits.
"""


class LinearFactors:
    """The factors of one layer's weight since its gradient was cleared."""

    def __init__(self, layer: nn.Module, weight: nn.Parameter) -> None:
        self._weight = weight
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._before: Tensor | None = None
        self._checked_row = 0
        self._backward = -1  # autograd's number of the backward pass that was noted last
        self._handle = layer.register_forward_hook(OfOneModule(self._after))

    @property
    def rows(self) -> int:
        return sum(len(u) for u, _ in self._pairs)

    @property
    def before(self) -> Tensor | None:
        """The gradient that the weight had before, equal on all workers; None: there was none."""
        return self._before

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return u (rows x N) and v (rows x M), of float32."""
        outputs, inputs = self._weight.shape
        if not self._pairs:
            return self._weight.new_zeros(0, outputs), self._weight.new_zeros(0, inputs)
        us, vs = zip(*self._pairs, strict=True)
        return torch.cat(us).float(), torch.cat(vs).float()

    def are_of(self, gradient: Tensor) -> bool:
        """Return whether a gradient is the product of the factors, all of float32.

        The product of factors of 16 bits has more digits than the gradient of a layer in 16 bits.
        """
        return self._types(gradient) == {torch.float32} and self._equal(gradient, slice(None))

    def check(self, gradient: Tensor, name: str) -> None:
        """Compare a row of a gradient with the product, in turn.

        Raises:
            UsageError: they differ.
        """
        row = slice(self._checked_row, self._checked_row + 1)
        self._checked_row = (self._checked_row + 1) % len(self._weight)
        if not self._equal(gradient, row):
            raise UsageError(
                f"'{name}' travels as factors, and its gradient has other parts than the passes of "
                "its own layer, though the first one had not; expected --exchange=ps"
            )

    def clear(self) -> None:
        """Forget the factors: their gradient has left."""
        self._pairs.clear()
        self._before = None

    def close(self) -> None:
        self._handle.remove()

    def _types(self, gradient: Tensor) -> set[torch.dtype]:
        """Return the types of factors and gradient; none without factors."""
        found = {tensor.dtype for pair in self._pairs for tensor in pair}
        return found | {gradient.dtype} if found else set()

    def _equal(self, gradient: Tensor, rows: slice) -> bool:
        u, v = self.factors()
        own = u[:, rows].T
        difference = gradient[rows].float() - own @ v
        if self._before is not None:
            difference -= self._before[rows].float()
        is_float32 = self._types(gradient) <= {torch.float32}
        tolerance = TOLERANCE if is_float32 else TOLERANCE_16
        limit = own.abs() @ v.abs()
        if self._before is not None:
            limit += self._before[rows].float().abs()
        # a gradient that is not finite is the script's to notice, and is the same product
        return bool(
            ((difference.abs() <= tolerance * limit + 1e-30) | ~difference.isfinite()).all()
        )

    def _after(self, _: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if torch._C._are_functorch_transforms_active():  # whose gradients the script gets
            return None
        if not (torch.is_grad_enabled() and output.requires_grad and self._weight.requires_grad):
            return None
        watched: Tensor = _Watch.apply(output, arguments[0].detach(), self._note)  # type: ignore[no-untyped-call]
        return watched

    def _note(self, u: Tensor, v: Tensor) -> None:
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:  # the first use in this backward pass
            self._backward = backward
            gradient = self._weight.grad
            if gradient is None or not bool(gradient.any()):
                self.clear()
            elif not self._pairs:
                self._before = gradient.detach().clone()
        outputs, inputs = self._weight.shape
        self._pairs.append((u.detach().reshape(-1, outputs), v.reshape(-1, inputs)))


def watch_layers(module: nn.Module) -> dict[nn.Parameter, LinearFactors]:
    """Watch the fully-connected layers of a module whose weights are not shared."""
    return {
        weight: LinearFactors(layer, weight)
        for weight, layer in layers_with_factors(module).items()
        if weight.requires_grad
    }


class _Watch(torch.autograd.Function):
    """Identity that shows its gradient and the input of its layer. A copy: the next layer may
    overwrite its input.
    """

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, v: Tensor, show: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        ctx.save_for_backward(v)  # so that activation checkpointing need not keep it
        ctx.show = show
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.show(gradients[0], *ctx.saved_tensors)
        return gradients[0], None, None
