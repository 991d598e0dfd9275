"""Forward and backward of each layer, as spans of a trace.

Laws:
* Hooks look on: no tensor is wrapped, copied or kept, so numbers and in-place layers are what they were without.
* A layer's spans hold what the layer's other hooks do (its waits, its gradients' leaving): these hooks come first.
* The backward span of a layer begins where autograd has the gradient of its top, and ends where it has that of the
  next layer's, or with the backward pass: what autograd does for a layer it does in one go, last layer first.

On a GPU these are the times at which work is handed to it, not those at which it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from poseidon.exchange.module_hooks import OfOneModule, uncompiled
from ps_server.trace import Tracer, Track


class TracingHooks:
    """The hooks on the layers of one module.

    Args:
        layers: name and module of each layer; a module that holds others may stand beside them.
        trace: told what was done when.
    """

    def __init__(self, layers: Sequence[tuple[str, nn.Module]], trace: Tracer) -> None:
        self._trace = trace
        self._forward_began_ns = [0] * len(layers)
        self._names = [name for name, _ in layers]
        self._made_before: dict[int, list[object]] = {}  # what made the bottoms of layers that run now
        self._backward: int | None = None  # the layer whose backward is under way
        self._backward_began_ns = 0
        self._handles: list[RemovableHandle] = []
        for index, (_, layer) in enumerate(layers):
            self._handles.append(
                layer.register_forward_pre_hook(OfOneModule(self._before(index)), prepend=True)
            )
            self._handles.append(layer.register_forward_hook(OfOneModule(self._after(index)), prepend=True))

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, index: int) -> Callable[[nn.Module, object], None]:
        def note(module: nn.Module, arguments: object) -> None:
            # Here and not after: a layer that works in place makes its bottom's node its own.
            self._made_before[index] = [tensor.grad_fn for tensor in _tensors(arguments)]
            self._forward_began_ns[index] = self._trace.now()

        return note

    def _after(self, index: int) -> Callable[[nn.Module, object, object], None]:
        def tell(module: nn.Module, arguments: object, outputs: object) -> None:
            self._trace.span(Track.COMPUTE, "forward", self._names[index], self._forward_began_ns[index])
            made_before = self._made_before.pop(index, [])
            for tensor in _tensors(outputs):
                node = tensor.grad_fn
                if node is not None and not any(node is other for other in made_before):
                    tensor.register_hook(partial(self._backward_begins, index))

        return tell

    def _backward_begins(self, index: int, gradient: Tensor) -> None:
        if self._backward == index:
            return
        if self._backward is None:
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._backward_ends)
        else:
            self._tell_backward()
        self._backward, self._backward_began_ns = index, self._trace.now()

    def _backward_ends(self) -> None:
        self._tell_backward()
        self._backward = None

    def _tell_backward(self) -> None:
        assert self._backward is not None
        name = self._names[self._backward]
        self._trace.span(Track.COMPUTE, "backward", name, self._backward_began_ns)


def named_layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of a module that hold no others, by dotted name; of a compiled one the whole, whose layers do not run."""
    if uncompiled(module) is not module:
        return [("module", module)]
    return [(name, child) for name, child in module.named_modules() if not any(child.children())]


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
