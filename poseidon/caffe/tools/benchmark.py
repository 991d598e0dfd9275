"""Timing of a net layer by layer: the measurements and log lines of `caffe time`.

Law: the net runs as it does in training, except that fused layers run one by one, so that each has
its time. A layer's backward time is the time of the autograd nodes that its forward pass made,
wherever they run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from poseidon.caffe.data.staging import TIMING, Report, silent
from poseidon.caffe.net.net import Net
from poseidon.caffe.tools.solo import zero_inputs
from poseidon.observe.metrics import glog_lines as lines
from poseidon.observe.metrics.glog_lines import GlogLine

Clock = Callable[[], float]


def clock_of(device: torch.device) -> Clock:
    """Return a clock in seconds that waits until the device has finished its work."""
    if device.type != "cuda":
        return time.perf_counter

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def time_net(
    net: Net,
    iterations: int,
    log: Callable[[GlogLine], None],
    *,
    clock: Clock | None = None,
    report: Report = silent,
    stopped: Callable[[], bool] = lambda: False,
) -> lines.NetTime:
    """Run a net forward and backward and measure its layers.

    Args:
        net: of any phase; one with inputs gets zeros.
        iterations: 1 or more, after one that is not measured.
        log: receives the log lines of `caffe time`.
        clock: seconds; the device's when not given.
        stopped: asked after each iteration; True: the times are those of the iterations so far.
    """
    now = clock or clock_of(net.context.device)
    inputs = zero_inputs(net)
    log(lines.performing_forward())
    outputs = net(inputs)
    for line in lines.performing_backward(float(net.loss.detach())):
        log(line)
    backward(net, outputs)
    for line in lines.benchmark_begins(iterations):
        log(line)
    report(TIMING, 0, iterations)
    stopwatch = Stopwatch(now)
    forward_s = backward_s = 0.0
    began = now()
    with stopwatch.watching(net):
        for iteration in range(iterations):
            start = now()
            outputs = net(inputs)
            middle = now()
            backward(net, outputs)
            end = now()
            stopwatch.forget()
            forward_s, backward_s = forward_s + middle - start, backward_s + end - middle
            log(lines.iteration_time(iteration + 1, 1000 * (end - start)))
            report(TIMING, iteration + 1, iterations)
            if stopped():
                break
    done = iteration + 1
    if done < iterations:
        log(lines.interrupted(done, iterations))
    times = lines.NetTime(
        layers=tuple(
            lines.LayerTime(
                name=layer.param.name,
                forward_ms=1000 * stopwatch.forward_s.get(layer, 0.0) / done,
                backward_ms=1000 * stopwatch.backward_s.get(layer, 0.0) / done,
            )
            for _, layer in net.layer_modules
        ),
        forward_ms=1000 * forward_s / done,
        backward_ms=1000 * backward_s / done,
        total_ms=1000 * (now() - began),
        iterations=done,
    )
    for line in lines.benchmark_ends(times):
        log(line)
    return times


def backward(net: Net, outputs: Mapping[str, Tensor]) -> None:
    """Run one backward pass.

    A net without a loss gets zeros at its outputs, as Caffe's blobs start.
    """
    net.zero_grad(set_to_none=True)
    if net.loss.requires_grad:
        net.backward(net.loss)
        return
    learned = [value for value in outputs.values() if value.requires_grad]
    if learned:
        torch.autograd.backward(learned, [torch.zeros_like(value) for value in learned])


class Stopwatch:
    """Measures each layer's forward pass, and the autograd nodes that it created.

    Attributes:
        forward_s: seconds by layer, added up.
        backward_s: seconds by layer, added up.
    """

    def __init__(self, now: Clock) -> None:
        self._now = now
        self._began_s = 0.0
        self._seen: set[Any] = set()
        self.forward_s: dict[torch.nn.Module, float] = {}
        self.backward_s: dict[torch.nn.Module, float] = {}

    @contextmanager
    def watching(self, net: Net) -> Iterator[None]:
        """Measure the net's passes inside the block."""
        handles = []
        keeping, net.keep_blobs = net.keep_blobs, True  # otherwise layers are fused
        for _, layer in net.layer_modules:
            handles.append(layer.register_forward_pre_hook(self._before))
            handles.append(layer.register_forward_hook(self._after))
        try:
            yield
        finally:
            net.keep_blobs = keeping
            for handle in handles:
                handle.remove()
            self.forget()

    def forget(self) -> None:
        """Forget the nodes of the last pass."""
        self._seen.clear()

    def _before(self, layer: torch.nn.Module, bottoms: object) -> None:
        self._began_s = self._now()

    def _after(
        self, layer: torch.nn.Module, bottoms: object, tops: Tensor | tuple[Tensor, ...]
    ) -> None:
        took_s = self._now() - self._began_s
        self.forward_s[layer] = self.forward_s.get(layer, 0.0) + took_s
        self._watch_nodes(layer, (tops,) if isinstance(tops, Tensor) else tops)

    def _watch_nodes(self, layer: torch.nn.Module, tops: tuple[Tensor, ...]) -> None:
        """Measure every node between the tops and the results of the layers below."""
        waiting: list[Any] = [top.grad_fn for top in tops]
        while waiting:
            node = waiting.pop()
            if node is None or node in self._seen:
                continue
            self._seen.add(node)
            waiting += [before for before, _ in node.next_functions]
            self._watch(layer, node)

    def _watch(self, layer: torch.nn.Module, node: Any) -> None:
        began: list[float] = []

        def before(gradients: object) -> None:
            began.append(self._now())

        def after(inputs: object, outputs: object) -> None:
            took_s = self._now() - began.pop()
            self.backward_s[layer] = self.backward_s.get(layer, 0.0) + took_s

        node.register_prehook(before)
        node.register_hook(after)
