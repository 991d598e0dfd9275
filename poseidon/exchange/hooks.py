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

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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


class Sender:
    """What is asked and told of gradients that leave within a backward pass. This one lets all."""

    def may_leave(self, index: int) -> bool:
        """Return whether the gradient of a tensor may leave before the backward pass has ended."""
        return True

    def sent(self, index: int) -> None:
        """Note that the gradient of a tensor has left within a backward pass."""


@dataclass(slots=True, eq=False)
class _Hooked:
    """A tensor of the exchange, and where its value and its gradient are."""

    index: int
    trained: Trained
    source: Tensor  # the parameter or buffer of the module
    dtype: torch.dtype
    tap: FactorTap | None
    waits: bool = True  # for its value
    was_taken: bool = False  # waited for between this iteration and the one before
    is_alone: bool = False  # the forward pass of its own module does not run
    has_left: bool = False  # its gradient, in this iteration or for this virtual worker
    gradient: tuple[Tensor, int] | None = None  # of this iteration's passes, with its version

    def is_changed(self) -> bool:
        """Return whether the gradient was changed since the last pass, as autograd sees it."""
        if self.gradient is None:
            return False
        gradient, version = self.gradient
        return self.source.grad is not gradient or gradient._version != version

    def is_cleared(self) -> bool:
        """Return whether the gradient was cleared since the last pass."""
        now = self.source.grad
        return now is None or (self.is_changed() and not bool(now.any()))

    def check_kind(self, gradient: Tensor) -> None:
        if gradient.layout is not torch.strided:
            raise UsageError(
                f"the gradient of '{self.trained.name}' is sparse; Poseidon needs dense "
                "gradients here (nn.Embedding(sparse=False))"
            )
        if gradient.dtype is not self.dtype:
            raise UsageError(
                f"the gradient of '{self.trained.name}' is {gradient.dtype}; expected parameters "
                f"that stay {self.dtype}"
            )


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
        sender: of gradients; None: there are none to send, and they stay in `grad`, for an optimizer
            of the caller.
        on_value: called with the index of a tensor once its value has come.
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
        sender: Sender | None = Sender(),  # noqa: B008 - it has no state
        on_value: Callable[[int], None] = lambda _: None,
        turn: AbstractContextManager[object] = nullcontext(),  # noqa: B008 - it has no state
    ) -> None:
        self._exchange = exchange
        self._turn = turn
        self._sender = sender
        self._on_value = on_value
        self._passes = passes
        self._wait_free = wait_free
        self._pass = 0
        self._present = True
        layers = [layers_with_factors(module) for module in modules]
        self._all = []
        for index, trained in enumerate(tensors):
            source, tap = sources[index] if sources else trained.tensor, None
            if index in exchange.by_factors:
                of_layers = [_layer(of, source, trained.name) for of in layers]
                tap = FactorTap(of_layers, on_backward=on_backward)
            self._all.append(_Hooked(index, trained, source, source.dtype, tap))
        self._of = {one.source: one for one in self._all}
        self._trained = [one for one in self._of.values() if not one.trained.statistics]
        self._handles: list[RemovableHandle] = []
        for one in self._trained:
            if one.tap is not None:  # also where autograd has nothing to add to `grad`
                handle = one.tap.node.register_hook(partial(self._on_factors, one))
            else:
                take = partial(self._on_gradient, one)
                handle = one.source.register_post_accumulate_grad_hook(take)
            self._handles.append(handle)
        if entry is not None:
            waiter = OfOneModule(self._waiter(self._all))
            self._handles.append(entry.register_forward_pre_hook(waiter, prepend=True))
        kind = OfOneModule if entry is None else OutsideOfGraphs
        for child in chain(*(module.modules() for module in modules)):
            tensors_of = chain(child.parameters(recurse=False), child.buffers(recurse=False))
            owned = [self._of[tensor] for tensor in tensors_of if tensor in self._of]
            if owned:
                # Before all other hooks: one may read the tensors, as torch.nn.utils.prune does.
                waiter = kind(self._waiter(owned))
                self._handles.append(child.register_forward_pre_hook(waiter, prepend=True))

    def start(self, *, present: bool = False) -> None:
        """Begin an iteration: every tensor must be waited for again.

        Args:
            present: all values have come, so one may be used though the forward pass of its own
                module does not run. They are in the first iteration.
        """
        self._pass = 0
        self._present |= present
        for one in self._all:
            one.was_taken, one.waits, one.has_left = not one.waits, True, False
        for one in self._all:
            if one.is_alone:
                self._take(one)

    @property
    def are_taken(self) -> bool:
        """Whether some tensors have been waited for since the last iteration."""
        return not all(one.waits for one in self._all)

    def has_left(self, index: int) -> bool:
        """Whether the gradient of a tensor has left in this iteration, or for this virtual worker."""
        return self._all[index].has_left

    def wait_before_use(self, tensors: Sequence[Tensor]) -> None:
        """Wait for tensors that are about to be used, of those whose gradients have not left."""
        owned = {self._of[tensor].index for tensor in tensors if tensor in self._of}
        for one in [self._all[index] for index in sorted(owned)] if self._wait_free else self._all:
            if one.waits and not one.has_left:
                self._take(one)

    def wait(self) -> None:
        """Wait for every tensor now, in their order."""
        for one in self._all:
            if one.waits:
                self._take(one)

    def wait_for_rest(self) -> None:
        """Wait for the tensors whose own module's forward pass has not run. Later iterations wait
        for them at their start.
        """
        for one in self._all:
            if one.waits:
                one.is_alone = True
                self._take(one)

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
        for one in self._all:
            one.has_left = False

    def clear(self) -> None:
        """Clear the gradients of all tensors."""
        for one in self._trained:
            one.source.grad = None

    def are_cleared(self, besides: Tensor | None = None) -> bool:
        """Return whether the script has cleared all gradients of this iteration's passes, as
        `zero_grad` does; False where none are sent.

        Args:
            besides: a tensor that has the gradient of another pass by now.
        """
        found = [one for one in self._trained if one.gradient is not None]
        others = [one for one in found if one.source is not besides]
        if not others:
            return any(one.gradient and one.source.grad is not one.gradient[0] for one in found)
        return all(one.is_cleared() for one in others)

    def forget(self) -> None:
        """Forget the passes of this iteration, of which no gradient has left, without a change of
        any gradient.
        """
        for one in self._trained:
            one.gradient = None
            if one.tap is not None:
                one.tap.take()
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
        for one in self._trained:
            if one.is_changed():
                raise UsageError(
                    f"the gradient of '{one.trained.name}' was changed after backward() had "
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
        if self._sender is not None:
            for one in self._trained:
                one.gradient = None
                if not one.has_left:
                    self._send(one)
                one.source.grad = None

    def _send(self, one: _Hooked) -> None:
        """Send the gradient of a tensor, or its factors."""
        gradient = one.source.grad
        if one.tap is not None:  # with the factors whose product autograd has
            factors = one.tap.take() + ([] if gradient is None else rows_of(gradient))
            if factors:
                self._exchange.begin_factors(one.index, *stacked(factors))
                self._exchange.release(one.index)
        elif gradient is not None:
            # Its `data`: `finish` must not see what the exchange does to it in the
            # background as a change.
            part, kind = local_of(gradient).data, one.trained.tensor.dtype
            self._exchange.begin(one.index, part if part.dtype is kind else part.to(kind))

    def _end(self) -> None:
        self.wait_for_rest()
        self._present = False
        for one in self._all:
            one.waits = True

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for one in self._trained:
            if one.tap is not None:
                one.tap.close()
                one.tap = None

    def _on_factors(self, one: _Hooked, *_: object) -> None:
        """Send factors: autograd has all that a pass adds to the gradient of their weight, and no
        node of it that is still to run reads the weight.
        """
        if one.tap is None:
            return  # closed, and the graph is of before
        self._on_gradient(one)
        one.tap.keep()

    def _on_gradient(self, one: _Hooked, *_: object) -> None:
        gradient = one.source.grad
        if one.waits and not (one.was_taken or self._present):
            raise UsageError(
                f"'{one.trained.name}' was used before its new value had arrived, because the "
                "forward pass of its module has not run in this iteration; compute the loss after "
                "the previous step()"
            )
        if self._sender is None:
            return
        if gradient is not None:
            one.check_kind(gradient)
        if one.has_left:
            raise UsageError(
                f"the gradient of '{one.trained.name}' was computed twice in a pass, and the "
                "first has been sent; use use_reentrant=False if checkpoints share a parameter, "
                "and do not repeat a backward() that has failed"
            )
        if gradient is not None:
            one.gradient = gradient, gradient._version
        is_last = self._wait_free and self._pass == self._passes - 1
        if is_last and self._sender.may_leave(one.index):
            one.has_left = True
            self._send(one)
            self._sender.sent(one.index)

    def _waiter(self, owned: Iterable[_Hooked]) -> Callable[[nn.Module, object], None]:
        def wait(module: nn.Module, arguments: object) -> None:
            for one in owned if self._wait_free else self._all:
                if one.waits:
                    self._take(one)

        return wait

    def wait_for(self, index: int) -> None:
        """Wait for one tensor, also between two iterations."""
        self._take(self._all[index])

    def _take(self, one: _Hooked) -> None:
        # a value may be written here, which torch.func refuses within a transform
        with self._turn, torch._C._DisableFuncTorch():
            if one.waits:
                self._exchange.wait(one.index)
                one.waits = False
                self._on_value(one.index)


def _layer(layers: Mapping[nn.Parameter, nn.Module], weight: Tensor, name: str) -> nn.Module:
    layer = next((layer for own, layer in layers.items() if own is weight), None)
    if layer is None:
        raise UsageError(
            f"'{name}' cannot travel as factors: it is shared, or not the weight of a "
            "fully-connected layer"
        )
    return layer
