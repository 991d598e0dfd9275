"""Wait-free backpropagation: joins a module's autograd to an exchange.

Law: a tensor's gradient begins its way the moment autograd has the whole of it, while layers below are still in their
backward pass; and a layer waits for its own tensors only, right before its forward pass uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from poseidon.errors import UsageError
from poseidon.exchange.base import Exchange, Trained
from poseidon.exchange.factor_taps import FactorTap, layers_with_factors


class Hooks:
    """The hooks on one module.

    Args:
        module: the net; any `nn.Module`.
        tensors: what the exchange keeps together, by its index.
        exchange: the exchange.
        passes: forward and backward passes an iteration (iter_size); gradients leave in the last one.
        wait_free: off, nothing leaves before the last backward pass has ended, and the first layer of the next
            forward pass waits for everything; for comparisons.
    """

    def __init__(
        self,
        module: nn.Module,
        tensors: Sequence[Trained],
        exchange: Exchange,
        *,
        passes: int = 1,
        wait_free: bool = True,
    ) -> None:
        self._exchange = exchange
        self._passes = passes
        self._wait_free = wait_free
        self._pass = 0
        self._waiting: set[int] = set()
        self._begun: set[int] = set()
        self._indices = {trained.tensor: index for index, trained in enumerate(tensors)}
        self._handles: list[RemovableHandle] = []
        self._taps = [
            _tap(module, trained, index, exchange)
            for index, trained in enumerate(tensors)
            if exchange.takes_factors(index)
        ]
        tapped = {tap.index for tap in self._taps}
        self._by_gradient = {
            t.tensor: index for index, t in enumerate(tensors) if not t.statistics and index not in tapped
        }
        for tensor in self._by_gradient:
            self._handles.append(tensor.register_post_accumulate_grad_hook(self._gradient_is_there))
        for child in module.modules():
            owned = [self._indices[p] for p in child.parameters(recurse=False) if p in self._indices]
            if owned:
                self._handles.append(child.register_forward_pre_hook(self._waiter(owned)))

    def start(self) -> None:
        """A new iteration: every tensor must be waited for again."""
        self._pass = 0
        self._waiting = set(self._indices.values())
        self._begun.clear()
        self._start_pass()

    def next_pass(self) -> None:
        """A backward pass of this iteration has ended."""
        self._pass += 1
        if self._pass < self._passes:
            self._start_pass()

    def _start_pass(self) -> None:
        sends = self._wait_free and self._pass == self._passes - 1
        for tap in self._taps:
            tap.start_pass(sends=sends)

    def finish(self) -> None:
        """The last backward pass has ended: send what earlier passes left, and drop the gradients."""
        for tensor, index in self._by_gradient.items():
            if index not in self._begun and tensor.grad is not None:
                self._exchange.begin(index, tensor.grad)
            tensor.grad = None
        for tap in self._taps:
            tap.finish()
        for index in list(self._waiting):  # tensors that this iteration's forward pass did not use
            self._wait(index)

    def close(self) -> None:
        """Take the hooks off the module."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for tap in self._taps:
            tap.close()
        self._taps.clear()

    def _gradient_is_there(self, tensor: Tensor) -> None:
        if self._wait_free and self._pass == self._passes - 1:
            index = self._indices[tensor]  # type: ignore[index]
            assert tensor.grad is not None
            self._begun.add(index)
            self._exchange.begin(index, tensor.grad)

    def _waiter(self, owned: Sequence[int]) -> Callable[[nn.Module, object], None]:
        def wait(module: nn.Module, arguments: object) -> None:
            for index in owned if self._wait_free else sorted(self._waiting):
                if index in self._waiting:
                    self._wait(index)

        return wait

    def _wait(self, index: int) -> None:
        self._waiting.discard(index)
        self._exchange.wait(index)


def _tap(module: nn.Module, trained: Trained, index: int, exchange: Exchange) -> FactorTap:
    layer = layers_with_factors(module).get(trained.tensor)
    if layer is None:
        raise UsageError(
            f"'{trained.name}' cannot travel as factors: it is shared, or not the weight of a fully-connected layer"
        )
    return FactorTap(layer, trained.name, index, exchange)
