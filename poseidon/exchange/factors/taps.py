"""Takes the factors of a fully-connected layer out of autograd, so that its weight gradient is
never formed.

It works on any module whose forward is y = x W^T (+ b) over the last axes of x, with W its
parameter `weight`: `torch.nn.Linear`, and Caffe's InnerProduct. While the module runs, the weight
is out of autograd (`requires_grad` off); v is the module's input, u the gradient at its output.

Law: no other use of the weight than the forward passes of its module. The gradient of a module that
runs several times in a pass is the product of all its rows: its factors leave once the backward
pass has reached each run, or at the end of the pass. A weight that is used beside its module
(`functional.linear(h, layer.weight)`) is refused. In the first iteration no weight is released
before the end of the pass, so that such a use is refused before the weight changes under it. The
weight of a module that runs several times is never released earlier. A weight whose `requires_grad`
the user has switched off is left alone. `torch.autograd.grad` sends nothing; a gradient of a
gradient is refused, because the weight is not in the graph of the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.hooks import RemovableHandle

from poseidon.errors import UsageError
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.module_hooks import OfOneModule
from poseidon.exchange.turns import Factors, stacked

WHOLE = "no example= and batch_size= of distribute(), or --exchange=ps"
"""What makes a gradient travel as a whole."""


class FactorTap:
    """The hooks on one layer.

    Args:
        modules: the layer, in each of the nets that share its weight and run one after another.
        name: of its weight, for messages.
        index: of its weight in the exchange.
        on_backward: called when a backward pass reaches the layer.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        name: str,
        index: int,
        exchange: Exchange,
        on_backward: Callable[[], None] = lambda: None,
    ) -> None:
        self.index = index
        self._name = name
        self._exchange = exchange
        self._on_backward = on_backward
        self._weight: nn.Parameter = modules[0].get_parameter("weight")
        self._outputs, self._inputs = self._weight.shape
        self._kept: list[Factors] = []
        self._forwards = self._backwards = 0
        self._has_sent = False
        self._sends = True
        self._releases = False
        self._taken_out = False  # whether the weight is out of autograd, as its layer runs
        # The first of the forward hooks: what others make of the output is not the layer's.
        self._handles: list[RemovableHandle] = [self._weight.register_hook(self._used_beside)]
        for module in modules:
            self._handles += [
                module.register_forward_pre_hook(OfOneModule(self._before), with_kwargs=True),
                module.register_forward_hook(
                    OfOneModule(self._after), prepend=True, with_kwargs=True, always_call=True
                ),
            ]
        self._weight_hooks = hooks_on(self._weight)

    def start_pass(self, *, sends: bool) -> None:
        """Begin a pass; `sends`: the factors of all passes so far leave as soon as this one has
        them.
        """
        self._forwards = self._backwards = 0
        self._has_sent = False
        self._sends = sends

    def drop(self) -> None:
        """Forget what is kept of earlier passes."""
        self._kept.clear()

    def finish(self) -> None:
        """Send what is kept: the last pass has ended."""
        self._send_kept()
        self._releases = True

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _send_kept(self) -> None:
        if self._kept:
            kept, self._kept = self._kept, []
            self._has_sent = True
            self._exchange.begin_factors(self.index, *stacked(kept))

    def _used_beside(self, gradient: Tensor | None) -> None:
        if gradient is not None:  # the tap itself returns none
            raise UsageError(
                f"'{self._name}' is used beside the forward pass of its own layer, so it cannot "
                "travel as factors; expected a weight of that layer alone, or --exchange=ps"
            )

    def _before(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Make sure that there will be a gradient at the output, though neither input nor weight
        may want one.
        """
        if not self._weight.requires_grad:  # the user has frozen it
            return None
        if hooks_on(self._weight) > self._weight_hooks:
            raise UsageError(
                f"'{self._name}' was given a hook after distribute(); it travels as factors, so no "
                "hook will see a gradient; expected the hook before distribute(), or --exchange=ps"
            )
        self._weight.requires_grad_(False)
        self._taken_out = True
        bias, x = getattr(module, "bias", None), _input(arguments, named)
        if not torch.is_grad_enabled() or x.requires_grad or getattr(bias, "requires_grad", False):
            return None
        return (x.detach().requires_grad_(), *arguments[1:]), {
            k: v for k, v in named.items() if v is not x
        }

    def _after(
        self,
        module: nn.Module,
        arguments: tuple[Any, ...],
        named: dict[str, Any],
        output: Tensor | None,
    ) -> Tensor | None:
        """Put the weight back, also where the forward pass has failed: then there is no output."""
        if not self._taken_out:
            return None
        self._taken_out = False
        self._weight.requires_grad_(True)
        if output is None or not output.requires_grad:
            return None
        x = _input(arguments, named)
        self._forwards += 1
        if x.requires_grad:
            x.register_hook(self._left)
        tapped: Tensor = _Tap.apply(output, self._weight, partial(self._gradient, x, x._version))  # type: ignore[no-untyped-call]
        return tapped

    def _gradient(self, x: Tensor, version: int, gradient: Tensor) -> None:
        self._on_backward()
        self._check(x, version)
        factors = (gradient.reshape(-1, self._outputs), x.detach().reshape(-1, self._inputs))
        if self._sends and not self._kept and self._forwards == 1:
            self._has_sent = True
            self._exchange.begin_factors(self.index, *factors)
        else:
            self._kept.append((factors[0].clone(), factors[1].clone()))
            if self._sends and self._backwards == self._forwards:
                self._send_kept()

    def _check(self, x: Tensor, version: int) -> None:
        self._backwards += 1
        before = self._weight.grad
        if self._has_sent:
            raise UsageError(
                f"'{self._name}' is used again in a pass after its factors have left; expected all "
                f"forward passes before backward(), or {WHOLE}"
            )
        if torch.is_grad_enabled():
            raise UsageError(
                f"'{self._name}' travels as factors, so there is no gradient of its gradient "
                f"(create_graph); expected {WHOLE}"
            )
        if x._version != version:
            raise UsageError(
                f"the input of the layer of '{self._name}' was changed in place after the layer "
                "had used it"
            )
        if before is not None and bool(before.any()):
            raise UsageError(
                f"'{self._name}' still has the gradient of an earlier step; expected zero_grad() "
                "before backward()"
            )

    def _left(self, _: Tensor) -> None:
        """Release the weight: the gradient at the input exists, so this pass reads the weight no
        more.
        """
        once = self._forwards == self._backwards == 1
        if once and self._releases and self._sends and not self._kept:
            self._exchange.release(self.index)


class _Tap(torch.autograd.Function):
    """Identity whose backward pass calls a function with the gradient, unless the weight's is
    not needed.

    A copy, not a hook on the output: the layer above may overwrite the output, and a hook on a view
    is lost then.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, weight: Tensor, show: Callable[[Tensor], None]) -> Tensor:
        ctx.show = show
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled() or _is_for_leaves(ctx.next_functions[1][0]):
            ctx.show(gradients[0])
        return gradients[0], None, None


def _is_for_leaves(weight: Node) -> bool:
    """Return whether a backward pass reaches the weight: true of backward(), false of
    torch.autograd.grad(loss, x).

    Raises:
        UsageError: torch.autograd.grad is called for the weight's own gradient.
    """
    try:
        return torch._C._will_engine_execute_node(weight)
    except RuntimeError as error:
        # torch cannot decide this where autograd.grad is called for the weight itself
        raise UsageError(
            "torch.autograd.grad was called for the gradient of a weight that travels as factors; "
            "expected backward(), or --exchange=ps"
        ) from error


def _input(arguments: Sequence[Any], named: Mapping[str, Any]) -> Tensor:
    x: Tensor = arguments[0] if arguments else next(iter(named.values()))
    return x


def hooks_on(parameter: Tensor) -> int:
    """Return how many hooks a parameter's gradient has."""
    return len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())


def layers_with_factors(module: nn.Module) -> dict[nn.Parameter, nn.Module]:
    """Return the weights whose gradient is one layer's u^T v, each with its
    layer; shared weights are not among them.
    """
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
    # torch's MultiheadAttention reads the weight of its out_proj without running that module: no
    # factors to be had.
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return False
    forward = getattr(type(module), "forward", None)  # modules of torch.jit have none
    return forward is nn.Linear.forward or bool(getattr(module, "offers_factors", False))
