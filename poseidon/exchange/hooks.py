"""Wait-free backpropagation: hooks that connect a module's autograd to an exchange.

Law: a tensor's gradient is sent as soon as autograd has the whole of it, while the layers below are
still in their backward pass. A layer waits for its own tensors only, right before its forward pass
uses them.

A tensor may be used though the forward pass of its own module does not run
(torch.nn.MultiheadAttention reads the weight of its `out_proj`). The hooks find it in an
iteration in which all values are present from the start, as in the first. From then on they wait
for it at the start of an iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from poseidon.errors import UsageError
from poseidon.exchange.base import Trained, local_of
from poseidon.exchange.factors.taps import FactorTap, layers_with_factors, rows_of
from poseidon.exchange.module_hooks import OfOneModule, OutsideOfGraphs
from poseidon.exchange.turns import stacked


class Receiver(Protocol):
    """What hooks need of an `Exchange`, which is one."""

    @property
    def by_factors(self) -> AbstractSet[int]: ...
    def wait(self, index: int) -> None: ...
    def begin(self, index: int, gradient: Tensor) -> None: ...
    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None: ...
    def release(self, index: int) -> None: ...
    def next_virtual_worker(self) -> None: ...


class Hooks:
    """The hooks of a module.

    Args:
        modules: the net; any `nn.Module`. Several share their parameters: one for each virtual
            worker of the process.
        tensors: what the exchange keeps together, by its index.
        passes: forward and backward passes an iteration (iter_size); gradients leave in the last
            one.
        wait_free: if False, no gradient leaves before the last backward pass has ended, and the
            first layer of the next forward pass waits for all tensors; for comparisons.
        sources: for each tensor the parameter or buffer of the module; empty: the tensors
            themselves.
        entry: the compiled module that the script calls in place of the net; all tensors are waited
            for before it runs.
        on_backward: called when a backward pass reaches a layer whose weight travels as factors.
        may_leave: called with the index of a tensor before its gradient leaves within a backward
            pass; False: it leaves at the end of the iteration.
        on_sent: called with the index of a tensor whose gradient has left within a backward pass.
        on_value: called with the index of a tensor once its value has come.
        sends: whether gradients are sent; otherwise they stay in `grad`, for an optimizer of the
            caller.
        turn: entered around each wait: several threads may use the tensors.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        tensors: Sequence[Trained],
        exchange: Receiver,
        *,
        passes: int = 1,
        wait_free: bool = True,
        sources: Sequence[Tensor] = (),
        entry: nn.Module | None = None,
        on_backward: Callable[[], None] = lambda: None,
        may_leave: Callable[[int], bool] = lambda _: True,
        on_sent: Callable[[int], None] = lambda _: None,
        on_value: Callable[[int], None] = lambda _: None,
        sends: bool = True,
        turn: AbstractContextManager[object] = nullcontext(),  # noqa: B008 - it has no state
    ) -> None:
        self._exchange = exchange
        self._turn = turn
        self._may_leave = may_leave
        self._on_sent = on_sent
        self._on_value = on_value
        self._sends = sends
        self._passes = passes
        self._wait_free = wait_free
        self._pass = 0
        self._begun: set[int] = set()
        self._accumulated: dict[int, tuple[Tensor, int]] = {}  # gradients with their versions
        self._tensors = tensors
        self._iterations = 0
        self._present = True
        self._without_forward: set[int] = set()
        own: Sequence[Tensor] = sources or [trained.tensor for trained in tensors]
        self._sources = own
        self._types = [tensor.dtype for tensor in own]
        self._indices = {tensor: index for index, tensor in enumerate(own)}
        self._waiting = set(self._indices.values())
        self._taken: set[int] = set()  # waited for between this iteration and the one before
        self._handles: list[RemovableHandle] = []
        layers = [layers_with_factors(module) for module in modules]
        self._taps = {
            index: FactorTap(
                [_layer(of, own[index], trained.name) for of in layers], on_backward=on_backward
            )
            for index, trained in enumerate(tensors)
            if index in exchange.by_factors
        }
        self._trained = {own[index]: index for index, t in enumerate(tensors) if not t.statistics}
        for tensor, index in self._trained.items():
            if index in self._taps:  # also where autograd has nothing to add to `grad`
                tap, reached = self._taps[index], partial(self._on_factors, tensor)
                self._handles.append(tap.node.register_hook(reached))
            else:
                self._handles.append(tensor.register_post_accumulate_grad_hook(self._on_gradient))
        if entry is not None:
            waiter = OfOneModule(self._waiter(sorted(self._indices.values())))
            self._handles.append(entry.register_forward_pre_hook(waiter, prepend=True))
        of_layers = OfOneModule if entry is None else OutsideOfGraphs
        for child in chain(*(module.modules() for module in modules)):
            tensors_of = chain(child.parameters(recurse=False), child.buffers(recurse=False))
            owned = [self._indices[tensor] for tensor in tensors_of if tensor in self._indices]
            if owned:
                # Before all other hooks: one may read the tensors, as torch.nn.utils.prune does.
                waiter = of_layers(self._waiter(owned))
                self._handles.append(child.register_forward_pre_hook(waiter, prepend=True))

    def start(self, *, present: bool = False) -> None:
        """Begin an iteration: every tensor must be waited for again.

        Args:
            present: all values have come, so one may be used though the forward pass of its own
                module does not run. They are in the first iteration.
        """
        self._pass = 0
        self._present = present or not self._iterations
        whole = set(self._indices.values())
        self._taken, self._waiting = whole - self._waiting, whole
        self._begun.clear()
        for index in self._without_forward:
            self.wait_for(index)

    @property
    def are_taken(self) -> bool:
        """Whether some tensors have been waited for since the last iteration."""
        return len(self._waiting) < len(self._indices)

    def has_left(self, index: int) -> bool:
        """Whether the gradient of a tensor has left in this iteration, or for this virtual worker."""
        return index in self._begun

    def wait_before_use(self, tensors: Sequence[Tensor]) -> None:
        """Wait for tensors that are about to be used, of those whose gradients have not left."""
        owned = {self._indices[tensor] for tensor in tensors if tensor in self._indices}
        for index in sorted(owned if self._wait_free else self._waiting):
            if index in self._waiting and index not in self._begun:
                self.wait_for(index)

    def wait(self) -> None:
        """Wait for every tensor now, in their order."""
        for index in sorted(self._waiting):
            self.wait_for(index)

    def wait_for_rest(self) -> None:
        """Wait for the tensors whose own module's forward pass has not run. Later iterations wait
        for them at their start.
        """
        for index in list(self._waiting):
            self._without_forward.add(index)
            self.wait_for(index)

    def next_pass(self) -> None:
        """End a backward pass of this iteration."""
        self._pass += 1

    def next_virtual_worker(self) -> None:
        """End the last backward pass of a virtual worker that is not the process's last one, and
        clear the gradients.
        """
        self.send_rest()
        self._exchange.next_virtual_worker()
        self.repeat()

    def repeat(self) -> None:
        """Begin the first backward pass once more: of another virtual worker, or of an iteration
        whose gradients have all been taken, and dropped.
        """
        self._pass = 0
        self._begun.clear()

    @property
    def _leaves_now(self) -> bool:
        """Whether the gradients of the backward pass under way leave within it."""
        return self._wait_free and self._pass == self._passes - 1

    def clear(self) -> None:
        """Clear the gradients of all tensors."""
        for tensor in self._trained:
            tensor.grad = None

    def are_cleared(self, besides: Tensor | None = None) -> bool:
        """Return whether the script has cleared all gradients of this iteration's passes, as
        `zero_grad` does; False where none are sent.

        Args:
            besides: a tensor that has the gradient of another pass by now.
        """
        found = [(self._sources[index], *was) for index, was in self._accumulated.items()]
        others = [one for one in found if one[0] is not besides]
        if not others:
            return any(source.grad is not gradient for source, gradient, _ in found)
        return all(_is_cleared(*one) for one in others)

    def forget(self) -> None:
        """Forget the passes of this iteration, of which no gradient has left, without a change of
        any gradient.
        """
        self._accumulated.clear()
        for tap in self._taps.values():
            tap.take()
        self._pass = 0

    def abandon(self) -> None:
        """End the last backward pass of an iteration whose gradients are not used."""
        self.forget()
        self._end()

    def check_unchanged(self) -> None:
        """Refuse a gradient that the script has changed after a backward pass, as autograd sees it.

        Raises:
            UsageError: there is one.
        """
        for index, (gradient, version) in self._accumulated.items():
            if self._sources[index].grad is not gradient or gradient._version != version:
                raise UsageError(
                    f"the gradient of '{self._tensors[index].name}' was changed after backward() had "
                    "sent it, for example by clip_grad_norm_; use clip= of distribute(), or with "
                    "a torch.optim optimizer on the workers call average_gradients() before the "
                    "change and before a GradScaler's unscale_()"
                )

    def finish(self) -> None:
        """End the last backward pass: send the gradients that only earlier passes had, and drop
        all that are sent.
        """
        self.send_rest()
        self._end()

    def send_rest(self) -> None:
        """Send the gradients that have not left; a second call does nothing."""
        self.check_unchanged()
        self._accumulated.clear()
        for tensor, index in self._trained.items() if self._sends else ():
            if index not in self._begun:
                self._send(index, tensor.grad)
            tensor.grad = None

    def _send(self, index: int, gradient: Tensor | None) -> None:
        """Send the gradient of a tensor, or the factors that are kept with what autograd has."""
        if index in self._taps:
            factors = self._taps[index].take() + ([] if gradient is None else rows_of(gradient))
            if factors:
                self._exchange.begin_factors(index, *stacked(factors))
                self._exchange.release(index)
        elif gradient is not None:
            # Its `data`: `finish` must not see what the exchange does to it in the
            # background as a change.
            part = local_of(gradient).data
            self._exchange.begin(index, part.to(self._tensors[index].tensor.dtype))

    def _end(self) -> None:
        self.wait_for_rest()
        self._iterations += 1
        self._waiting = set(self._indices.values())

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for tap in self._taps.values():
            tap.close()
        self._taps.clear()

    def _on_factors(self, weight: Tensor, *_: object) -> None:
        """Send factors: autograd has all that a pass adds to the gradient of their weight, and no
        node of it that is still to run reads the weight.
        """
        index = self._indices[weight]
        if index not in self._taps:
            return  # closed, and the graph is of before
        self._on_gradient(weight)
        self._taps[index].keep()

    def _on_gradient(self, tensor: Tensor) -> None:
        index = self._indices[tensor]
        if index in self._waiting and index not in self._taken and not self._present:
            raise UsageError(
                f"'{self._tensors[index].name}' was used before its new value had arrived, because the "
                "forward pass of its module has not run in this iteration; compute the loss after "
                "the previous step()"
            )
        if not self._sends:
            return
        if tensor.grad is not None:
            self._check_kind(index, tensor.grad)
        if index in self._begun:
            raise UsageError(
                f"the gradient of '{self._tensors[index].name}' was computed twice in a pass, and the "
                "first has been sent; use use_reentrant=False if checkpoints share a parameter, "
                "and do not repeat a backward() that has failed"
            )
        if tensor.grad is not None:
            self._accumulated[index] = tensor.grad, tensor.grad._version
        if self._leaves_now and self._may_leave(index):
            self._begun.add(index)
            self._send(index, tensor.grad)
            self._on_sent(index)

    def _check_kind(self, index: int, gradient: Tensor) -> None:
        if gradient.layout is not torch.strided:
            raise UsageError(
                f"the gradient of '{self._tensors[index].name}' is sparse; Poseidon needs dense "
                "gradients here (nn.Embedding(sparse=False))"
            )
        if gradient.dtype is not self._types[index]:
            raise UsageError(
                f"the gradient of '{self._tensors[index].name}' is {gradient.dtype}; expected parameters "
                f"that stay {self._types[index]}"
            )

    def _waiter(self, owned: Sequence[int]) -> Callable[[nn.Module, object], None]:
        def wait(module: nn.Module, arguments: object) -> None:
            for index in owned if self._wait_free else sorted(self._waiting):
                if index in self._waiting:
                    self.wait_for(index)

        return wait

    def wait_for(self, index: int) -> None:
        """Wait for one tensor, also between two iterations."""
        # a value may be written here, which torch.func refuses within a transform
        with self._turn, torch._C._DisableFuncTorch():
            if index in self._waiting:
                self._exchange.wait(index)
                self._waiting.discard(index)
                self._on_value(index)


def _is_cleared(source: Tensor, gradient: Tensor, version: int) -> bool:
    """Return whether a gradient has been cleared since it was accumulated."""
    now = source.grad
    if now is None:
        return True
    changed = now is not gradient or now._version != version
    return changed and not bool(now.any())


def _layer(layers: Mapping[nn.Parameter, nn.Module], weight: Tensor, name: str) -> nn.Module:
    layer = next((layer for own, layer in layers.items() if own is weight), None)
    if layer is None:
        raise UsageError(
            f"'{name}' cannot travel as factors: it is shared, or not the weight of a "
            "fully-connected layer"
        )
    return layer
