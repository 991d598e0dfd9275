"""Spans of a trace: the calls of an exchange, and the forward and backward passes of layers.

Laws:

* Tracing only observes: no tensor is wrapped, copied or kept, so numbers and in-place layers are as
  without it.
* Every span of an iteration lies inside the span of the iteration.
* A layer's spans include the layer's other hooks (waits, gradients that leave): tracing hooks run
  first.
* The backward span of a layer begins where autograd has the gradient of its top, and ends where it
  has the gradient of the next layer's top, or with the backward pass: autograd computes a layer's
  backward in one piece, last layer first.

On a GPU these are the times at which work is queued, not the times at which it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from poseidon.exchange.module_hooks import OfOneModule, uncompiled
from poseidon.exchange.observe.observer import ObservedCall, Observer
from ps_server.trace import Tracer, Track

_SPANS = {
    ObservedCall.BEGIN: "begin",
    ObservedCall.WAIT: "wait",
    ObservedCall.FINISH: "finish",
    ObservedCall.SETTLE: "settle",
    ObservedCall.GATHER: "gather",
}


class ExchangeTrace(Observer):
    """Spans for the calls of an exchange: iterations, waits, and gradients that begin.

    Args:
        names: of the tensors, by index.
    """

    def __init__(self, names: Sequence[str], trace: Tracer) -> None:
        self._names = tuple(names)
        self._trace = trace
        self._iteration = 0
        self._began_ns = 0

    def after(self, call: ObservedCall, index: int, began_ns: int, ended_ns: int) -> None:
        if call is ObservedCall.START:
            self._iteration, self._began_ns = index, began_ns
        kind = _SPANS.get(call)
        if kind is None:
            return
        name = (
            self._names[index]
            if call in (ObservedCall.BEGIN, ObservedCall.WAIT)
            else str(self._iteration)
        )
        self._trace.span(Track.COMPUTE, kind, name, began_ns, ended_ns)
        if call is ObservedCall.FINISH:
            self._trace.span(Track.COMPUTE, "iteration", name, self._began_ns, ended_ns)


class TracingHooks:
    """Spans for the forward and backward passes of the layers of one module.

    Args:
        layers: name and module of each layer; a module and one that holds it may both be listed.
    """

    def __init__(self, layers: Sequence[tuple[str, nn.Module]], trace: Tracer) -> None:
        self._trace = trace
        self._forward_began_ns = [0] * len(layers)
        self._names = [name for name, _ in layers]
        # autograd nodes of the bottoms of layers that run now
        self._made_before: dict[int, list[object]] = {}
        self._backward: int | None = None  # the layer whose backward is under way
        self._backward_began_ns = 0
        self._handles: list[RemovableHandle] = []
        for index, (_, layer) in enumerate(layers):
            before, after = OfOneModule(self._before(index)), OfOneModule(self._after(index))
            self._handles += [
                layer.register_forward_pre_hook(before, prepend=True),
                layer.register_forward_hook(after, prepend=True),
            ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, index: int) -> Callable[[nn.Module, object], None]:
        def note(module: nn.Module, arguments: object) -> None:
            # Not in the hook after the layer: one that works in place replaces the node of its
            # bottom.
            self._made_before[index] = [tensor.grad_fn for tensor in _tensors(arguments)]
            self._forward_began_ns[index] = self._trace.now()

        return note

    def _after(self, index: int) -> Callable[[nn.Module, object, object], None]:
        def write(module: nn.Module, arguments: object, outputs: object) -> None:
            self._trace.span(
                Track.COMPUTE, "forward", self._names[index], self._forward_began_ns[index]
            )
            made_before = self._made_before.pop(index, [])
            for tensor in _tensors(outputs):
                node = tensor.grad_fn
                if node is not None and not any(node is other for other in made_before):
                    tensor.register_hook(partial(self._backward_begins, index))

        return write

    def _backward_begins(self, index: int, gradient: Tensor) -> None:
        if self._backward == index:
            return
        if self._backward is None:
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._backward_ends)
        else:
            self._write_backward()
        self._backward, self._backward_began_ns = index, self._trace.now()

    def _backward_ends(self) -> None:
        self._write_backward()
        self._backward = None

    def _write_backward(self) -> None:
        assert self._backward is not None
        name = self._names[self._backward]
        self._trace.span(Track.COMPUTE, "backward", name, self._backward_began_ns)


def named_layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules of a module that hold no others, by dotted name.

    A compiled module is one layer: the hooks of the modules in it do not run.
    """
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
