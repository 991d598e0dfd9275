"""The tensors of an exchange that travel by all-reduce: replicas sum their
gradients, and each applies the rule to the mean.

Staleness 0 only. Gradients travel in buckets (`buckets.py`); every replica keeps the whole history. With a limit on the
gradients' norm no value changes before the sums of all buckets have come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from poseidon.exchange.allreduce.buckets import BUCKET_BYTES, Buckets, Waiter
from poseidon.exchange.allreduce.process_group import Backend, GroupSettings, ProcessGroup, Rendezvous
from poseidon.exchange.base import ExchangeSettings, History, LocalHistories, Trained
from poseidon.exchange.factors.products import Kernel
from poseidon.exchange.observe.statistics import Traffic
from poseidon.exchange.plane import GlobalNorm, offered_address
from ps_server.rules import clip_factor, plain_sum, sum_of_squares, update


class AllReducePlane:
    """The tensors of an exchange that travel by all-reduce, by their index there. See `Plane`.

    Args:
        trained: index -> tensor.
        settings: common to all tensors.
        group: rank of this replica, number of replicas, address and timeout.
        norms: used with `settings.clip` where there are other gradients; None: there are none.
        bucket_bytes: size of one sum.
    """

    def __init__(
        self,
        trained: Mapping[int, Trained],
        settings: ExchangeSettings,
        *,
        group: GroupSettings,
        norms: GlobalNorm | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._trained = dict(trained)
        self._settings = settings
        self._settings_of_group = group
        self._rendezvous: Rendezvous | None = None
        self._norms = norms
        self._flat = {index: t.tensor.detach().view(-1) for index, t in trained.items()}
        self.device = next(iter(self._flat.values())).device if self._flat else torch.device("cpu")
        self.state = LocalHistories(list(trained.values()), replicated=True)
        self._history = dict(zip(trained, self.state.of, strict=True))
        self._due: set[int] = set()
        self._scale: float | None = None
        self._rate, self._iteration = 0.0, settings.start_clock
        self._due_rate, self._due_step = self._rate, self._iteration
        self._moved = [index for index, t in trained.items() if not t.statistics]
        self._statistics = [index for index, t in trained.items() if t.statistics]
        self._gradients = self._buckets(self._moved, bucket_bytes)
        self._means = self._buckets(self._statistics, bucket_bytes)
        self._group: ProcessGroup | None = None

    def _buckets(self, indices: Sequence[int], bucket_bytes: int) -> Buckets:
        return Buckets(
            [(index, self._flat[index].numel()) for index in indices],
            replicas=self._settings_of_group.size,
            device=self.device,
            launch=self._launch,
            bucket_bytes=bucket_bytes,
        )

    def _launch(self, buffer: Tensor, on_done: Callable[[], None]) -> Waiter:
        assert self._group is not None, "the exchange is not open"
        return self._group.sum(buffer, on_done)

    def offer(self) -> dict[str, Any]:
        """See `Plane`. Rank 0 opens a rendezvous."""
        if self._settings_of_group.rank:
            return {}
        self._rendezvous = Rendezvous(self._settings_of_group)
        return {"allreduce": self._rendezvous.address}

    def connect(self, offers: Sequence[Mapping[str, Any]], kernel: Kernel) -> None:
        """See `Plane`."""
        if self._rendezvous is None:
            self._rendezvous = Rendezvous(
                self._settings_of_group, offered_address(offers[0], "allreduce", rank=0)
            )
        self.form(self._rendezvous)

    def form(self, rendezvous: Rendezvous) -> None:
        """Form the process group of all replicas."""
        self.join(ProcessGroup(rendezvous, "bulk", self._settings_of_group, Backend.of(self.device)))

    def join(self, group: ProcessGroup) -> None:
        """Use a process group of all replicas."""
        self._group = group

    def broadcast(self, *, histories: bool) -> None:
        """Copy the values of rank 0 to all replicas; its histories, too, if asked for."""
        assert self._group is not None
        for index, flat in self._flat.items():
            for tensor in [flat, *self._history[index]] if histories else [flat]:
                self._group.broadcast(tensor)()

    def take_first(self, histories: Mapping[int, History]) -> None:
        """See `Plane`."""
        found = [histories[index] for index in self._trained]
        self.state.load(found if any(len(history) for history in found) else None)

    def rewind(self, clock: int) -> None:
        """See `Plane`."""
        self._iteration = clock

    def start(self, iteration: int, rate: float) -> None:
        """See `Exchange`."""
        self._iteration, self._rate = iteration, rate

    def begin(self, index: int, gradient: Tensor) -> None:
        """See `Exchange`. The gradient is copied."""
        self.wait(index)  # a backward pass may reach a tensor that no forward pass has waited for
        self._gradients.view(index).copy_(gradient.detach().reshape(-1))
        self._gradients.filled(index)

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        """Begin the product of two factors."""
        self.wait(index)
        gradient_NM = self._gradients.view(index).view(u_KN.shape[1], v_KM.shape[1])
        torch.mm(u_KN.detach().t(), v_KM.detach(), out=gradient_NM)
        self._gradients.filled(index)

    def wait(self, index: int) -> None:
        """See `Exchange`."""
        if index in self._due:
            self._due.remove(index)
            self._update(index)

    def _update(self, index: int) -> None:
        flat = self._flat[index]
        if self._trained[index].statistics:
            flat.copy_(self._means.mean(index))
            return
        scale = self._gradient_factor()
        gradient = self._gradients.mean(index)
        if scale != 1.0:
            gradient.mul_(scale)
        rule, history = self._trained[index].rule, self._history[index]
        update(rule, gradient, history, flat, rate=self._due_rate, step=self._due_step)

    def _gradient_factor(self) -> float:
        """Return the factor of the mean gradients. With a limit on their norm it waits for all of them."""
        if self._scale is None:
            self._scale = self._settings.gradient_scale
            if self._settings.clip is not None:
                total = self._squares() if self._norms is None else self._norms.total_norm(self._due_step)
                self._scale *= clip_factor(total, self._settings.clip)
        return self._scale

    def _squares(self) -> float:
        return plain_sum(sum_of_squares(self._gradients.mean(index)) for index in self._moved)

    def finish(self, limit: float = 1.0) -> None:
        """See `Plane`. With a limit on the norm over other gradients, too, it waits for the sums on rank 0."""
        self._gradients.fill_missing()
        for index in self._statistics:
            self._means.view(index).copy_(self._flat[index])
            self._means.filled(index)
        self._due = set(self._trained)
        self._due_rate, self._due_step = self._rate, self._iteration
        self._scale = None
        self._gradients.start()
        self._means.start()
        is_root = self._settings_of_group.rank == 0
        if is_root and self._norms is not None and self._settings.clip is not None:
            self._norms.add_norm(self._iteration, self._squares())

    def settle(self, clock: int) -> None:
        """See `Plane`."""
        for index in self._trained:
            self.wait(index)

    def history(self, index: int) -> History:
        """See `Plane`."""
        shape = self._trained[index].tensor.shape
        return [h.detach().cpu().numpy().reshape(shape).copy() for h in self._history[index]]

    def replicated_state(self) -> Mapping[str, Tensor]:
        """See `Plane`."""
        return self.state.replicated()

    def traffic(self) -> dict[int, Traffic]:
        """See `CountsTraffic`."""
        return self._gradients.traffic() | self._means.traffic()

    def close(self) -> None:
        """Wait some seconds for the sums under way. Safe to call twice."""
        if self._group is not None:
            self._group.close()
            self._group = None
        self._rendezvous = None
