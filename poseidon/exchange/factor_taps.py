"""Takes the factors of a fully-connected layer out of autograd, so that its weight gradient is never formed.

Any module is meant whose forward is y = x W^T (+ b) over the last axes of x, with W its parameter `weight`:
`torch.nn.Linear`, and Caffe's InnerProduct. While the module runs, the weight is out of autograd (`requires_grad` off);
v is the module's input, u the gradient at its output.

Law: one forward and one backward pass of the module in each pass of the net, and no other use of the weight. A module
that is used twice has a gradient of more than one product, and so has a weight that is used beside its module
(`functional.linear(h, layer.weight)`); both are refused. In the first iteration no weight is released before the end of
the pass, so that such a use is refused before the weight changes under it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.hooks import RemovableHandle

from poseidon.errors import UsageError
from poseidon.exchange.base import Exchange

Factors = tuple[Tensor, Tensor]


class FactorTap:
    """The hooks on one module.

    Args:
        module: the layer.
        name: of its weight, for messages.
        index: of its weight in the exchange.
        exchange: where the factors go.
    """

    def __init__(self, module: nn.Module, name: str, index: int, exchange: Exchange) -> None:
        self.index = index
        self._name = name
        self._exchange = exchange
        self._weight: nn.Parameter = module.get_parameter("weight")
        self._outputs, self._inputs = self._weight.shape
        self._kept: list[Factors] = []
        self._backwards = 0
        self._sends = True
        self._releases = False
        self._handles: list[RemovableHandle] = [
            self._weight.register_hook(self._used_beside),
            module.register_forward_pre_hook(self._before),
            module.register_forward_hook(self._after),
        ]

    def start_pass(self, *, sends: bool) -> None:
        """A new pass; `sends`: the factors of all passes so far leave as soon as this one has them."""
        self._backwards = 0
        self._sends = sends

    def finish(self) -> None:
        """The last pass has ended: send what is kept."""
        self._send_kept()
        self._releases = True

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _send_kept(self) -> None:
        if self._kept:
            kept, self._kept = self._kept, []
            self._exchange.begin_factors(self.index, *_stacked(kept))

    def _used_beside(self, gradient: Tensor) -> None:
        raise UsageError(
            f"'{self._name}' is used beside the forward pass of its own layer, so it cannot travel as factors; "
            "expected a weight of that layer alone, or --exchange=ps"
        )

    def _before(self, module: nn.Module, arguments: Sequence[Any]) -> Sequence[Any] | None:
        """Make sure that there will be a gradient at the output, though neither input nor weight may want one."""
        self._weight.requires_grad_(False)
        bias = getattr(module, "bias", None)
        if not torch.is_grad_enabled() or arguments[0].requires_grad or getattr(bias, "requires_grad", False):
            return None
        return (arguments[0].detach().requires_grad_(), *arguments[1:])

    def _after(self, module: nn.Module, arguments: Sequence[Any], output: Tensor) -> Tensor | None:
        self._weight.requires_grad_(True)
        if not output.requires_grad:
            return None
        x: Tensor = arguments[0]
        if x.requires_grad:
            x.register_hook(self._left)
        tapped: Tensor = _Tap.apply(output, partial(self._gradient, x, x._version))  # type: ignore[no-untyped-call]
        return tapped

    def _gradient(self, x: Tensor, version: int, gradient: Tensor) -> None:
        self._backwards += 1
        if self._backwards > 1:
            raise UsageError(
                f"'{self._name}' is used more than once in a pass, so it cannot travel as factors; expected "
                "a layer of its own, or --exchange=ps"
            )
        if x._version != version:
            raise UsageError(
                f"the input of the layer of '{self._name}' was changed in place after the layer had used it"
            )
        factors = (gradient.reshape(-1, self._outputs), x.detach().reshape(-1, self._inputs))
        if self._sends and not self._kept:
            self._exchange.begin_factors(self.index, *factors)
        else:
            self._kept.append((factors[0].clone(), factors[1].clone()))
            if self._sends:
                self._send_kept()

    def _left(self, _: Tensor) -> None:
        """The gradient at the input exists: nobody reads the weight any more in this pass."""
        if self._releases and self._sends and not self._kept:
            self._exchange.release(self.index)


class _Tap(torch.autograd.Function):
    """Identity whose backward pass shows the gradient to a function.

    A copy, not a hook on the output: the layer above may overwrite the output, and a hook on a view is lost then.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, show: Callable[[Tensor], None]) -> Tensor:
        ctx.show = show
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.show(gradients[0])
        return gradients[0], None


def _stacked(parts: Sequence[Factors]) -> Factors:
    return torch.cat([u for u, _ in parts]), torch.cat([v for _, v in parts])


def layers_with_factors(module: nn.Module) -> dict[nn.Parameter, nn.Module]:
    """The weights whose gradient is one layer's u^T v, each with its layer; shared weights are not among them."""
    users: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            users.setdefault(parameter, []).append((child, name))
    return {
        parameter: owners[0][0]
        for parameter, owners in users.items()
        if len(owners) == 1 and owners[0][1] == "weight" and _is_linear(owners[0][0])
    }


def _is_linear(module: nn.Module) -> bool:
    # torch's MultiheadAttention reads the weight of its out_proj without running that module: no factors to be had.
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return False
    return type(module).forward is nn.Linear.forward or bool(getattr(module, "offers_factors", False))
