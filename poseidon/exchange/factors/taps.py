"""Takes the factors of a fully-connected layer out of autograd, so that its weight gradient is
never formed.

It works on any module whose forward is y = x W^T (+ b) over the last axes of x, with W its
parameter `weight`: `torch.nn.Linear`, and Caffe's InnerProduct. A hook on the module gives its
output a node of the graph that computes what the layer's own would, save for the weight's part of
the gradient: of that it keeps v, the layer's input, and u, the gradient at its output.

Laws:

* Factors stand for what one run of the layer adds to the gradient of its weight, and autograd's
  graph proves that the run is y = x W^T (+ b). All that else is computed from the weight, by
  whatever code and in whatever step, stays with autograd, which adds it up in the `grad` of the
  weight. The two are disjoint, and their sum is the gradient: nothing is assumed, or compared.
* Factors are kept only where `backward()` adds to `grad` and nothing looks at it. For
  `torch.autograd.grad`, for a gradient of the gradient (`create_graph`), and as long as a hook is on
  the weight, autograd gets the layer's part too.
* `rows_of` makes factors of any gradient, so a part of autograd's travels as more rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.hooks import RemovableHandle

from poseidon.exchange.module_hooks import OfOneModule
from poseidon.exchange.turns import Factors

RESHAPES = {
    "CloneBackward0",
    "SqueezeBackward4",
    "ToCopyBackward0",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
}
"""Nodes through which torch's linear passes its tensors, under autocast too."""


class FactorTap:
    """The hooks on one layer.

    Args:
        modules: the layer, in each of the nets that share its weight and run one after another.
        on_backward: called when a backward pass brings factors, before they are kept. It may also
            be a hook on the weight; with any other one no factors are kept.
        takes: whether factors are wanted in the backward pass under way.
        of_16_bits: whether factors of 16 bits are wanted (autocast): their product has more digits
            than the gradient of autograd, which is rounded to 16 bits.
        shows_use: whether autograd is to add zeros to `grad` where factors are kept, so that the
            weight counts as used.

    Attributes:
        node: where autograd adds up the gradient of the weight.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        *,
        on_backward: Callable[[], None] = lambda: None,
        takes: Callable[[], bool] = lambda: True,
        of_16_bits: bool = True,
        shows_use: Callable[[], bool] = lambda: False,
    ) -> None:
        self.weight: nn.Parameter = modules[0].get_parameter("weight")
        with torch.enable_grad():
            self.node: Node = get_gradient_edge(self.weight).node
        self._on_backward = on_backward
        self._takes = takes
        self._of_16_bits = of_16_bits
        self._shows_use = shows_use
        self._pairs: list[Factors] = []
        # The first of the forward hooks: what others make of the output is not the layer's.
        self._handles: list[RemovableHandle] = [
            module.register_forward_hook(OfOneModule(self._after), prepend=True, with_kwargs=True)
            for module in modules
        ]

    @property
    def rows(self) -> int:
        """Rows of the factors that are kept."""
        return sum(len(u) for u, _ in self._pairs)

    def take(self) -> list[Factors]:
        """Return the factors that are kept, and keep them no longer."""
        taken, self._pairs = self._pairs, []
        return taken

    def keep(self) -> None:
        """Copy the factors that are kept: a later pass may write to their memory."""
        self._pairs = [(u.clone(), v.clone()) for u, v in self._pairs]

    def close(self) -> None:
        """Take the hooks off, and keep no more factors."""
        for handle in self._handles:
            handle.remove()
        self._takes = lambda: False

    def part(self, u_KN: Tensor, v_KM: Tensor) -> Tensor | None:
        """Return what one run of the layer adds to the gradient, for autograd; nothing where the
        factors are kept, or no gradient of the weight is wanted.
        """
        try:
            is_added = torch._C._will_engine_execute_node(self.node)
        except RuntimeError:  # torch.autograd.grad returns the weight's gradient
            is_added = False
        else:
            if not is_added:
                return None
        is_free = is_added and not torch.is_grad_enabled()
        is_hooked = any(hook != self._on_backward for hook in _hooks(self.weight))
        if is_free and not is_hooked and self._takes():
            self._on_backward()
            self._pairs.append((u_KN.detach().float(), v_KM.detach().float()))
            return self.weight.new_zeros(1).expand_as(self.weight) if self._shows_use() else None
        return (u_KN.t() @ v_KM).to(self.weight.dtype)

    def _after(
        self,
        module: nn.Module,
        arguments: tuple[Any, ...],
        named: dict[str, Any],
        output: object,
    ) -> Tensor | None:
        x = arguments[0] if arguments else next(iter(named.values()), None)
        if not (type(output) is Tensor and isinstance(x, Tensor) and output.grad_fn is not None):
            return None
        if _is_transformed() or "forward" in module.__dict__:
            return None
        if output.dtype is not self.weight.dtype and not self._of_16_bits:
            return None
        bias = getattr(module, "bias", None)
        if not _is_product(output.grad_fn, x, self.node, bias):
            return None
        tapped: Tensor = _Product.apply(x, self.weight, bias, [output.data], self)  # type: ignore[no-untyped-call]
        return tapped


class _Product(torch.autograd.Function):
    """y = x W^T (+ b), which is computed already, in place of the nodes that torch has made."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, y: list[Tensor], tap: FactorTap
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        ctx.tap = tap
        ctx.bias_type = None if bias is None else bias.dtype
        return y.pop()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        if gradient is None:
            return None, None, None, None, None
        x, weight = ctx.saved_tensors
        outputs, inputs = weight.shape
        u, v = gradient.reshape(-1, outputs), x.reshape(-1, inputs)
        at_x = at_bias = None
        if ctx.needs_input_grad[0]:
            at_x = (u @ weight.to(u.dtype)).to(x.dtype).reshape(x.shape)
        if ctx.needs_input_grad[2]:
            at_bias = u.sum(0).to(ctx.bias_type)
        return at_x, ctx.tap.part(u, v.to(u.dtype)), at_bias, None, None


def _is_transformed() -> bool:
    """Return whether more than a backward pass is to be had of the graph, which is left alone."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def _is_product(node: Node, x: Tensor, weight: Node, bias: Tensor | None) -> bool:
    """Return whether a node of the graph has computed x W^T (+ b).

    Args:
        weight: where the gradient of W is added up.
    """
    while node.name() in RESHAPES:
        node = _parent(node, 0)
    adds_bias = node.name() == "AddBackward0"
    if adds_bias:
        if node._saved_alpha != 1 or not _is_of(node.next_functions[1][0], bias):  # type: ignore[attr-defined]
            return False
        node = _parent(node, 0)
        while node.name() in RESHAPES:
            node = _parent(node, 0)
    match node.name():
        case "AddmmBackward0" if not adds_bias:
            is_plain = node._saved_alpha == node._saved_beta == 1  # type: ignore[attr-defined]
            if not (is_plain and _is_of(node.next_functions[0][0], bias)):
                return False
            of_x, of_weight = node.next_functions[1][0], node.next_functions[2][0]
        case "MmBackward0" if adds_bias is (bias is not None):
            of_x, of_weight = node.next_functions[0][0], node.next_functions[1][0]
        case _:
            return False
    if of_weight is None or of_weight.name() != "TBackward0":
        return False
    return _is_of(of_x, x) and _through(_parent(of_weight, 0), weight) is weight


def _is_of(node: Node | None, tensor: Tensor | None) -> bool:
    """Return whether a node computes a tensor, apart from its shape and type, or adds up its
    gradient; None: it has none.
    """
    if tensor is None or not tensor.requires_grad:
        return node is None
    own = tensor.grad_fn
    if own is None:
        own = get_gradient_edge(tensor).node
    return node is not None and _through(node, own) is own


def _through(node: Node, last: Node) -> Node:
    """Follow the nodes that change shape and type only, to `last` at most."""
    while node is not last and node.name() in RESHAPES:
        node = _parent(node, 0)
    return node


def _parent(node: Node, index: int) -> Node:
    return node.next_functions[index][0]  # type: ignore[return-value]


def rows_of(gradient_NM: Tensor) -> list[Factors]:
    """Return factors whose product is a gradient, to the bit: one of them has a single 1 in each
    row. None where the gradient is zero.

    They have as many rows as the gradient has rows, or columns, that are not zero.
    """
    outputs, inputs = gradient_NM.shape
    rows = gradient_NM.any(1).nonzero().flatten()
    columns = gradient_NM.any(0).nonzero().flatten()
    if not len(rows):
        return []
    if len(rows) <= len(columns):
        u = gradient_NM.new_zeros(len(rows), outputs).scatter_(1, rows.unsqueeze(1), 1)
        return [(u, gradient_NM[rows])]
    v = gradient_NM.new_zeros(len(columns), inputs).scatter_(1, columns.unsqueeze(1), 1)
    return [(gradient_NM[:, columns].t(), v)]


def _hooks(parameter: Tensor) -> list[Any]:
    """Return the hooks on a parameter's gradient."""
    before, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return [*(before or {}).values(), *(after or {}).values()]


def hooks_on(parameter: Tensor) -> int:
    """Return how many hooks a parameter's gradient has."""
    return len(_hooks(parameter))


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
