"""The carrier of tensors that travel by all-reduce: replicas sum their gradients, and each
applies the rule to the mean.

Sums go through torch.distributed: gloo on the CPU, NCCL on GPUs. Staleness 0 only. Gradients travel
in buckets (`buckets.py`); every replica keeps the whole history. With a limit on the gradients'
norm no value changes before the sums of all buckets have come.

Beside the server, the server brings first values, and the addresses of the process group. Without
shards the replicas meet at a rendezvous in the process of rank 0, whose store carries their
collections (`allreduce_delivery.py`); rank 0 broadcasts its values.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from poseidon.exchange.allreduce.allreduce_delivery import Meeting
from poseidon.exchange.allreduce.buckets import BUCKET_BYTES, Buckets, Waiter
from poseidon.exchange.allreduce.process_group import (
    Backend,
    ProcessGroup,
    Rendezvous,
)
from poseidon.exchange.base import ExchangeSettings, History, Trained
from poseidon.exchange.carrier import GradientCarrier, Step
from poseidon.exchange.job_control import JobControl
from poseidon.exchange.local_histories import LocalHistories
from poseidon.exchange.observe.statistics import Traffic
from poseidon.exchange.replicas import common_kernel, introduce, offered_address
from poseidon.exchange.shared_norm import SharedNorm
from ps_server import PeerLost
from ps_server.network import Network
from ps_server.rules import clip_factor, squares_of, update


class AllReduceCarrier(GradientCarrier):
    """Sums gradients over all replicas.

    Args:
        tensors: by their index in the exchange.
        settings: common to all tensors.
        network: of the replicas.
        control: of the exchange.
        meeting: where the replicas meet without shards; None: beside the server.
        norms: used with `settings.clip` where there are other gradients; None: there are none.
        equal_bits: whether the job ends where the processors of the replicas compute different
            bits.
        bucket_bytes: size of one sum.
    """

    state: LocalHistories

    def __init__(
        self,
        tensors: Mapping[int, Trained],
        settings: ExchangeSettings,
        *,
        network: Network,
        control: JobControl,
        meeting: Meeting | None = None,
        norms: SharedNorm | None = None,
        equal_bits: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.indices = tuple(tensors)
        self._tensors = tensors
        self._settings = settings
        self._network = network
        self._control = control
        self._meeting = meeting
        self._norms = norms
        self._equal_bits = equal_bits
        self._flat = {index: t.tensor.detach().view(-1) for index, t in tensors.items()}
        self._device = next(iter(self._flat.values())).device if self._flat else torch.device("cpu")
        self.state = LocalHistories(tensors, replicated=True)
        self._due: set[int] = set()
        self._scale: float | None = None
        self._step = self._due_step = Step(settings.start_clock, (0.0,))
        self._finished = settings.start_clock
        self._moved = [index for index, t in tensors.items() if not t.statistics]
        self._statistics = [index for index, t in tensors.items() if t.statistics]
        self._gradients = self._buckets(self._moved, bucket_bytes)
        self._means = self._buckets(self._statistics, bucket_bytes)
        self._group: ProcessGroup | None = None
        self._requests: ProcessGroup | None = None

    def _buckets(self, indices: Sequence[int], bucket_bytes: int) -> Buckets:
        return Buckets(
            [(index, self._flat[index].numel()) for index in indices],
            replicas=self._network.size,
            device=self._device,
            launch=self._launch,
            bucket_bytes=bucket_bytes,
        )

    def open(self, histories: Sequence[History] | None, clock: int | None) -> None:
        with_histories = True
        if clock is None:
            with_histories = self._form_groups(resumed=bool(histories))
        else:
            self._finished = clock
        self.state.load(histories)
        if self._meeting is not None:
            self._broadcast(histories=with_histories)

    def _form_groups(self, *, resumed: bool) -> bool:
        """Form the process groups. Return whether rank 0 continues from a history."""
        rendezvous = None if self._meeting is None else self._meeting.rendezvous
        if rendezvous is None and self._network.rank == 0:
            rendezvous = Rendezvous(self._network)
        own = {"resumed": resumed, "allreduce": "" if rendezvous is None else rendezvous.address}
        offers, samples = introduce(self._control, list(self._tensors.values()), own)
        common_kernel(samples, required=self._equal_bits)
        if rendezvous is None:
            rendezvous = Rendezvous(self._network, offered_address(offers, "allreduce", 0))
        self.join(ProcessGroup(rendezvous, "bulk", self._network, Backend.of(self._device)))
        if self._meeting is not None:
            self._requests = ProcessGroup(rendezvous, "control", self._network)
        return bool(offers[0].get("resumed"))

    def join(self, group: ProcessGroup) -> None:
        """Use a process group of all replicas."""
        self._group = group

    def _broadcast(self, *, histories: bool) -> None:
        """Copy the values of rank 0 to all replicas; its histories, too, if asked for."""
        assert self._group is not None
        for index, flat in self._flat.items():
            for tensor in [flat, *self.state.of[index]] if histories else [flat]:
                self._group.broadcast(tensor)()

    def start(self, step: Step) -> None:
        self._step = step
        if self._meeting is not None:
            assert self._requests is not None, "the exchange is not open"
            with self._others_take_part():
                self._meeting.delivery.start(self._requests.sum)

    def begin(self, index: int, gradient: Tensor) -> None:
        self.wait(index)  # a backward pass may reach a tensor that no forward pass has waited for
        self._gradients.view(index).copy_(gradient.detach().reshape(-1))
        self._gradients.filled(index)

    def wait(self, index: int) -> None:
        if index in self._due:
            self._due.remove(index)
            self._update(index)

    def _update(self, index: int) -> None:
        flat = self._flat[index]
        if self._tensors[index].statistics:
            flat.copy_(self._means.mean(index))
            return
        scale = self._gradient_factor()
        gradient = self._gradients.mean(index)
        if scale != 1.0:
            gradient.mul_(scale)
        trained, history = self._tensors[index], self.state.of[index]
        iteration, rates = self._due_step
        rate = rates[trained.rate_index]
        update(trained.rule, gradient, history, flat, rate=rate, step=iteration)

    def _gradient_factor(self) -> float:
        """Return the factor of the mean gradients.

        With a limit on their norm it waits for all of them.
        """
        if self._scale is None:
            self._scale = self._settings.gradient_scale
            if self._settings.clip is not None:
                norms, iteration = self._norms, self._due_step.iteration
                total = math.fsum(self._squares()) if norms is None else norms.total(iteration)
                self._scale *= clip_factor(total, self._settings.clip)
        return self._scale

    def _squares(self) -> list[float]:
        return [square for i in self._moved for square in squares_of(self._gradients.mean(i))]

    def finish(self, limit: float) -> None:
        self._gradients.fill_missing()
        for index in self._statistics:
            self._means.view(index).copy_(self._flat[index])
            self._means.filled(index)
        self._due = set(self._tensors)
        self._due_step = self._step
        self._scale = None
        self._gradients.start()
        self._means.start()
        is_root = self._network.rank == 0
        if is_root and self._norms is not None and self._settings.clip is not None:
            self._norms.add("all-reduce", self._step.iteration, self._squares())
        if self._meeting is not None:
            with self._others_take_part():
                self._meeting.delivery.finish(self._step.iteration + 2)
        self._finished = self._step.iteration + 1

    def settle(self, clock: int) -> None:
        for index in self._tensors:
            self.wait(index)

    def traffic(self) -> Mapping[int, Traffic]:
        return self._gradients.traffic() | self._means.traffic()

    def close(self) -> None:
        """Leave. Without shards the others' waits for this replica end with an error."""
        if self._meeting is not None:
            self._meeting.collections.leave(self._finished)
        if self._group is not None:
            self._group.close()
            self._group = self._requests = None
        if self._meeting is not None:
            self._meeting.collections.close()

    def _launch(self, buffer: Tensor, on_done: Callable[[], None]) -> Waiter:
        assert self._group is not None, "the exchange is not open"
        with self._others_take_part():
            wait = self._group.sum(buffer, on_done)

        def wait_for_others() -> None:
            with self._others_take_part():
                wait()

        return wait_for_others

    @contextlib.contextmanager
    def _others_take_part(self) -> Iterator[None]:
        """Name the worker that has left, where a sum fails because it has."""
        try:
            yield
        except PeerLost:
            if self._meeting is not None:
                self._meeting.collections.check_left(self._finished)
            raise
