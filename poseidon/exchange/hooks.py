"""Wait-free backpropagation: joins a module's autograd to an exchange.

Law: a tensor's gradient begins its way the moment autograd has the whole of it, while layers below are still in their
backward pass; and a layer waits for its own tensors only, right before its forward pass uses them.

A tensor that is used though the forward pass of its own module does not run (torch.nn.MultiheadAttention reads the weight
of its `out_proj`) is found in the first iteration, whose values are there from the beginning. From then on it is waited
for at the start of an iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from poseidon.errors import UsageError
from poseidon.exchange.base import Exchange, Trained
from poseidon.exchange.factors.taps import FactorTap, layers_with_factors
from poseidon.exchange.module_hooks import OfOneModule, OutsideOfGraphs


class Hooks:
    """The hooks on one module.

    Args:
        module: the net; any `nn.Module`.
        tensors: what the exchange keeps together, by its index.
        exchange: the exchange.
        passes: forward and backward passes an iteration (iter_size); gradients leave in the last one.
        wait_free: off, nothing leaves before the last backward pass has ended, and the first layer of the next
            forward pass waits for everything; for comparisons.
        sources: the parameter or buffer of the module behind each tensor, where that is not the tensor itself.
        entry: where the module is compiled, what the script calls in its place: it waits for all tensors before it runs.
        in_backward: told, within a backward pass, that it has reached a layer whose weight travels as factors.
    """

    def __init__(
        self,
        module: nn.Module,
        tensors: Sequence[Trained],
        exchange: Exchange,
        *,
        passes: int = 1,
        wait_free: bool = True,
        sources: Sequence[Tensor] = (),
        entry: nn.Module | None = None,
        in_backward: Callable[[], None] = lambda: None,
    ) -> None:
        self._exchange = exchange
        self._passes = passes
        self._wait_free = wait_free
        self._pass = 0
        self._waiting: set[int] = set()
        self._begun: set[int] = set()
        self._there: dict[int, tuple[Tensor, int]] = {}  # gradients as backward passes have left them
        self._names = [trained.name for trained in tensors]
        self._iterations = 0
        self._unannounced: set[int] = set()
        own: Sequence[Tensor] = sources or [trained.tensor for trained in tensors]
        self._sources = own
        self._indices = {tensor: index for index, tensor in enumerate(own)}
        self._handles: list[RemovableHandle] = []
        layers = layers_with_factors(module)
        self._taps = [
            FactorTap(_layer(layers, own[index], trained.name), trained.name, index, exchange, in_backward)
            for index, trained in enumerate(tensors)
            if index in exchange.by_factors
        ]
        tapped = {tap.index for tap in self._taps}
        self._by_gradient = {
            own[index]: index for index, t in enumerate(tensors) if not t.statistics and index not in tapped
        }
        for tensor in self._by_gradient:
            self._handles.append(tensor.register_post_accumulate_grad_hook(self._gradient_is_there))
        if entry is not None:
            waiter = OfOneModule(self._waiter(sorted(self._indices.values())))
            self._handles.append(entry.register_forward_pre_hook(waiter, prepend=True))
        of_layers = OfOneModule if entry is None else OutsideOfGraphs
        for child in module.modules():
            tensors_of = chain(child.parameters(recurse=False), child.buffers(recurse=False))
            owned = [self._indices[tensor] for tensor in tensors_of if tensor in self._indices]
            if owned:
                # Before all others: one may read the tensors, as torch.nn.utils.prune does.
                waiter = of_layers(self._waiter(owned))
                self._handles.append(child.register_forward_pre_hook(waiter, prepend=True))

    def start(self) -> None:
        """A new iteration: every tensor must be waited for again."""
        self._pass = 0
        self._waiting = set(self._indices.values())
        self._begun.clear()
        for index in self._unannounced:
            self._wait(index)
        self._start_pass()

    def wait(self) -> None:
        """Wait for every tensor now, in their order."""
        for index in sorted(self._waiting):
            self._wait(index)

    def next_pass(self) -> None:
        """A backward pass of this iteration has ended."""
        self._pass += 1
        if self._pass < self._passes:
            self._start_pass()

    def _start_pass(self) -> None:
        sends = self._wait_free and self._pass == self._passes - 1
        for tap in self._taps:
            tap.start_pass(sends=sends)

    def drop(self) -> None:
        """Forget what the passes of this iteration have left; none of it has begun its way."""
        self._there.clear()
        for tensor in self._by_gradient:
            tensor.grad = None
        for tap in self._taps:
            tap.drop()
        self._pass = 0
        self._start_pass()

    def finish(self) -> None:
        """The last backward pass has ended: send what earlier passes left, and drop the gradients."""
        for index, (gradient, version) in self._there.items():
            if self._sources[index].grad is not gradient or gradient._version != version:
                raise UsageError(
                    f"the gradient of '{self._names[index]}' was changed after backward() had sent it; expected the clip= of "
                    "distribute(), or average_gradients() before a loop changes gradients that a torch.optim optimizer reads"
                )
        self._there.clear()
        for tensor, index in self._by_gradient.items():
            if index not in self._begun and tensor.grad is not None:
                self._exchange.begin(index, tensor.grad.data)
            tensor.grad = None
        for tap in self._taps:
            tap.finish()
        for index in list(self._waiting):  # tensors whose own module's forward pass has not run
            self._unannounced.add(index)
            self._wait(index)
        self._iterations += 1

    def close(self) -> None:
        """Take the hooks off the module."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for tap in self._taps:
            tap.close()
        self._taps.clear()

    def _gradient_is_there(self, tensor: Tensor) -> None:
        index = self._indices[tensor]
        if index in self._waiting and self._iterations:
            raise UsageError(
                f"'{self._names[index]}' was used before its new value had come: the forward pass of its own module "
                "has not run, though it has in the first iteration"
            )
        assert tensor.grad is not None
        self._check_kind(index, tensor.grad)
        if index in self._begun:
            raise UsageError(
                f"the gradient of '{self._names[index]}' came twice in a pass, and the first has left; expected "
                "use_reentrant=False where checkpoints share a parameter, and no second try of a backward() that has failed"
            )
        self._there[index] = tensor.grad, tensor.grad._version
        if self._wait_free and self._pass == self._passes - 1:
            self._begun.add(index)
            # Its data: what the exchange does to it in the background is no change that `finish` should see.
            self._exchange.begin(index, tensor.grad.data)

    def _check_kind(self, index: int, gradient: Tensor) -> None:
        if gradient.layout is not torch.strided:
            raise UsageError(
                f"the gradient of '{self._names[index]}' is sparse; expected a dense one, as of nn.Embedding(sparse=False)"
            )
        if gradient.dtype is not torch.float32:
            raise UsageError(
                f"the gradient of '{self._names[index]}' is {gradient.dtype}; expected parameters that stay torch.float32"
            )

    def _waiter(self, owned: Sequence[int]) -> Callable[[nn.Module, object], None]:
        def wait(module: nn.Module, arguments: object) -> None:
            for index in owned if self._wait_free else sorted(self._waiting):
                if index in self._waiting:
                    self._wait(index)

        return wait

    def _wait(self, index: int) -> None:
        self._waiting.discard(index)
        self._exchange.wait(index)


def _layer(layers: Mapping[nn.Parameter, nn.Module], weight: Tensor, name: str) -> nn.Module:
    layer = next((layer for own, layer in layers.items() if own is weight), None)
    if layer is None:
        raise UsageError(
            f"'{name}' cannot travel as factors: it is shared, or not the weight of a fully-connected layer"
        )
    return layer
