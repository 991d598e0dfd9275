"""Observers of an exchange, which are notified of each call; its statistics, and spans for a trace.

Statistics count the waits, bytes and times in transit of each tensor. A trace has a span for each call
of the exchange and for each forward and backward pass of a layer.

Laws:
* Observers change nothing: no tensor is wrapped, copied or kept, and training has the bits of a
  training without them.
* Every span of an iteration lies inside the span of the iteration. A layer's spans include the layer's
  other hooks (waits, gradients that leave), because tracing hooks run first.
* The backward span of a layer begins where autograd has the gradient of its top, and ends where it has
  the gradient of the next layer's top, or with the backward pass.

On a GPU spans are the times at which work is queued, not the times at which it is done.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from poseidon.exchange.module_hooks import OfOneModule, uncompiled
from ps_server.monitor import Interruption
from ps_server.trace import Tracer, Track


class ObservedCall(Enum):
    """A call that observers are notified of."""

    OPEN = "open"
    START = "start"
    BEGIN = "begin"
    """`begin` or `begin_factors`: it returns at once. All others may wait for other workers."""
    WAIT = "wait"
    FINISH = "finish"
    SETTLE = "settle"
    HISTORIES = "histories"
    GATHER = "gather"
    """A wait for a collection."""
    CLOSE = "close"


class Observer:
    """Is notified before and after each call.

    Both methods do nothing unless they are overridden.
    """

    def before(self, call: ObservedCall, index: int) -> None:
        """Note that a call begins.

        Args:
            index: of the tensor (BEGIN, WAIT); of the iteration (START); else -1.
        """

    def after(self, call: ObservedCall, index: int, began_ns: int, ended_ns: int) -> None:
        """Note that a call has ended, with a result or an error.

        Args:
            index: as for `before`.
            began_ns: when it began, by `time.perf_counter_ns`.
            ended_ns: when it ended.
        """


class ObservedCalls:
    """Notifies observers of calls, and refuses calls after an interruption.

    Args:
        now_ns: the time in nanoseconds, for observers.
    """

    def __init__(self, interruption: Interruption, now_ns: Callable[[], int]) -> None:
        self.interruption = interruption
        self._now_ns = now_ns
        self.observe(())

    def observe(self, observers: Sequence[Observer]) -> None:
        """See `Exchange.observe`."""
        self._before = [o.before for o in observers if type(o).before is not Observer.before]
        self._after = [o.after for o in observers if type(o).after is not Observer.after]

    @contextmanager
    def around(self, call: ObservedCall, index: int = -1) -> Iterator[None]:
        """Notify the observers of a call, which is the body."""
        began_ns = self.begin(call, index)
        try:
            yield
        finally:
            self.end(call, index, began_ns)

    # Called for each tensor of each iteration, where a context manager costs more than observers.

    def begin(self, call: ObservedCall, index: int) -> int:
        """Note that a call begins; return the time."""
        if self.interruption.error is not None and call is not ObservedCall.CLOSE:
            raise self.interruption.error
        for before in self._before:
            before(call, index)
        return self._now_ns()

    def end(self, call: ObservedCall, index: int, began_ns: int) -> None:
        """Note that a call has ended."""
        ended_ns = self._now_ns()
        for after in self._after:
            after(call, index, began_ns, ended_ns)


class WaitTimes(Observer):
    """The time of `Exchange.wait` by tensor.

    It is always measured: two reads of the clock for each wait.

    Attributes:
        waited_s: for each tensor the total time of its waits, in seconds.
    """

    def __init__(self, tensors: int) -> None:
        self.iterations = 0
        self.waited_s = [0.0] * tensors

    def after(self, call: ObservedCall, index: int, began_ns: int, ended_ns: int) -> None:
        if call is ObservedCall.WAIT:
            self.waited_s[index] += (ended_ns - began_ns) * 1e-9
        elif call is ObservedCall.FINISH:
            self.iterations += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The traffic of one tensor at this worker, since the start.

    Attributes:
        bytes_out: bytes sent for it.
        bytes_in: bytes received for it.
        on_way_s: total time from each gradient's `begin` to the arrival of the value that follows
            from it.
        held_back: L2 norm of what a lossy codec has held back; None: no codec.
    """

    bytes_out: int
    bytes_in: int
    on_way_s: float
    held_back: float | None = None

    def plus(self, other: Traffic) -> Traffic:
        """Return the traffic of two parts of a tensor."""
        own = [norm for norm in (self.held_back, other.held_back) if norm is not None]
        return Traffic(
            bytes_out=self.bytes_out + other.bytes_out,
            bytes_in=self.bytes_in + other.bytes_in,
            on_way_s=self.on_way_s + other.on_way_s,
            held_back=math.hypot(*own) if own else None,
        )


class TransitTimes:
    """Times in transit by kind. Within a kind, arrivals have the order of departures.

    Args:
        now: seconds, monotonic.
    """

    def __init__(self, kinds: int, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._under_way: list[deque[float]] = [deque() for _ in range(kinds)]
        self.total_s = [0.0] * kinds
        """The total time in transit of all that have arrived, by kind."""

    def depart(self, kind: int) -> None:
        """Note a departure of this kind."""
        self._under_way[kind].append(self._now())

    def arrive(self, kind: int) -> None:
        """Note the arrival of the earliest departure of this kind; without one this does
        nothing.
        """
        if self._under_way[kind]:
            self.total_s[kind] += self._now() - self._under_way[kind].popleft()


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


class DeviceSpans:
    """Spans of a GPU, from events that are read once they have passed.

    Args:
        event: returns a new event after the work that is queued so far, with `query` and
            `elapsed_time` in milliseconds, as those of torch with `enable_timing`.
    """

    def __init__(self, trace: Tracer, event: Callable[[], Any]) -> None:
        self._trace, self._event = trace, event
        self._base: Any = None
        self._base_ns = 0
        self._open: deque[tuple[str, Any, Any]] = deque()

    def begin(self) -> Any:
        """Return the beginning of a span."""
        if self._base is None:  # the only one that is waited for
            self._base = self._event()
            self._base.synchronize()
            self._base_ns = self._trace.now()
        return self._event()

    def end(self, name: str, began: Any) -> None:
        """End a span; write those that have passed."""
        self._open.append((name, began, self._event()))
        while self._open and self._open[0][2].query():
            self._write(*self._open.popleft())

    def close(self) -> None:
        """Wait for the last spans, and write them."""
        while self._open:
            self._open[0][2].synchronize()
            self._write(*self._open.popleft())

    def _write(self, name: str, began: Any, ended: Any) -> None:
        times = [self._base_ns + round(self._base.elapsed_time(at) * 1e6) for at in (began, ended)]
        self._trace.span(Track.GPU, "forward", name, *times)


def spans_of_gpu(trace: Tracer) -> DeviceSpans | None:
    """Return the spans of the GPU on which this process computes; None: on none."""
    if not torch.cuda.is_initialized():
        return None

    def event() -> torch.cuda.Event:
        found = torch.cuda.Event(enable_timing=True)
        found.record()
        return found

    return DeviceSpans(trace, event)


class TracingHooks:
    """Spans for the forward and backward passes of the layers of one module.

    Args:
        layers: name and module of each layer; a module and one that holds it may both be listed.
    """

    def __init__(self, layers: Sequence[tuple[str, nn.Module]], trace: Tracer) -> None:
        self._trace = trace
        self._forward_began_ns = [0] * len(layers)
        self._of_gpu = spans_of_gpu(trace)
        self._gpu_began: dict[int, Any] = {}
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
        if self._of_gpu is not None:
            self._of_gpu.close()

    def _before(self, index: int) -> Callable[[nn.Module, object], None]:
        def note(module: nn.Module, arguments: object) -> None:
            # Not in the hook after the layer: one that works in place replaces the node of its
            # bottom.
            self._made_before[index] = [tensor.grad_fn for tensor in _tensors(arguments)]
            self._forward_began_ns[index] = self._trace.now()
            if self._of_gpu is not None:
                torch.cuda.nvtx.range_push(f"forward {self._names[index]}")
                self._gpu_began[index] = self._of_gpu.begin()

        return note

    def _after(self, index: int) -> Callable[[nn.Module, object, object], None]:
        def write(module: nn.Module, arguments: object, outputs: object) -> None:
            self._trace.span(
                Track.COMPUTE, "forward", self._names[index], self._forward_began_ns[index]
            )
            if self._of_gpu is not None and index in self._gpu_began:
                self._of_gpu.end(self._names[index], self._gpu_began.pop(index))
                torch.cuda.nvtx.range_pop()
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
