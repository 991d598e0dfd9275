"""Several tensors of a device as one: an operation on all of them is one launch of torch's foreach
kernels, in place of one a tensor.

It has the operations of tensors that `ps_server.rules` uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Together:
    """Tensors of one device.

    Args:
        tensors: of the shapes of all others in an operation, one by one.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: object,
        arguments: Sequence[Any] = (),
        named: dict[str, Any] | None = None,
    ) -> Together:
        """Compute `torch.mul` and others; `out` is one of these, too."""
        out: Together | None = (named or {}).get("out")
        found = _FUNCTIONS[function](*map(_plain, arguments))
        if out is None:
            return cls(found)
        torch._foreach_copy_(out.tensors, found)
        return out

    def add_(self, other: Any, alpha: float = 1) -> Together:
        if isinstance(other, Together):
            torch._foreach_add_(self.tensors, other.tensors, alpha=alpha)
        else:
            torch._foreach_add_(self.tensors, other)
        return self

    def sub_(self, other: Together, alpha: float = 1) -> Together:
        torch._foreach_sub_(self.tensors, other.tensors, alpha=alpha)
        return self

    def mul_(self, other: Any) -> Together:
        torch._foreach_mul_(self.tensors, _plain(other))
        return self

    def div_(self, other: Any) -> Together:
        torch._foreach_div_(self.tensors, _plain(other))
        return self

    def addcmul_(self, one: Together, other: Together, value: float = 1) -> Together:
        torch._foreach_addcmul_(self.tensors, one.tensors, other.tensors, value=value)
        return self

    def lerp_(self, end: Together, weight: float) -> Together:
        torch._foreach_lerp_(self.tensors, end.tensors, weight)
        return self

    def copy_(self, other: Together) -> Together:
        torch._foreach_copy_(self.tensors, other.tensors)
        return self

    def sign_(self) -> Together:
        return self.copy_(self.sign())

    def sign(self) -> Together:
        return Together(torch._foreach_sign(self.tensors))

    def sqrt(self) -> Together:
        return Together(torch._foreach_sqrt(self.tensors))

    def clone(self) -> Together:
        return Together([tensor.clone() for tensor in self.tensors])

    def __add__(self, other: float) -> Together:
        return Together(torch._foreach_add(self.tensors, other))

    def __mul__(self, other: float) -> Together:
        return Together(torch._foreach_mul(self.tensors, other))


def _plain(value: Any) -> Any:
    return value.tensors if isinstance(value, Together) else value


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.neg: torch._foreach_neg,
    torch.mul: torch._foreach_mul,
    torch.div: torch._foreach_div,
}
