"""The all-reduce exchange: replicas sum their gradients, and each applies the update rule to the mean.

Staleness 0 only. Gradients travel in buckets (`buckets.py`) through torch.distributed: gloo on the CPU, NCCL on GPUs. Every
replica keeps the whole history. No shard runs: the replicas meet at a rendezvous in the process of rank 0, whose store
carries their collections (`control.py`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from poseidon.exchange.allreduce.buckets import BUCKET_BYTES, Buckets, Waiter
from poseidon.exchange.allreduce.control import AllReduceDelivery, StoreCollections
from poseidon.exchange.allreduce.process_group import Backend, GroupSettings, ProcessGroup, Rendezvous
from poseidon.exchange.base import ExchangeSettings, History, LocalHistories, Trained, WholeGradients
from poseidon.exchange.control import JobControl
from poseidon.exchange.observe.statistics import Traffic
from poseidon.exchange.replicas import Arithmetic, arithmetic_sample, common_kernel
from ps_server import PeerLost
from ps_server.rules import clip_factor, plain_sum, sum_of_squares, update


class AllReduceExchange(WholeGradients):
    """See `Exchange`.

    Args:
        rendezvous: of the replicas.
        tensors: what to keep together.
        settings: common to all tensors.
        group: rank of this replica, number of replicas, address and timeout.
        equal_bits: whether the job ends where the processors of the replicas compute different bits.
        bucket_bytes: size of one sum.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        tensors: Sequence[Trained],
        settings: ExchangeSettings,
        *,
        group: GroupSettings,
        equal_bits: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._rendezvous: Rendezvous | None = rendezvous
        self._settings = settings
        self._equal_bits = equal_bits
        self._group = group
        self._tensors = tensors
        self._flat = [trained.tensor.detach().view(-1) for trained in tensors]
        self._device = self._flat[0].device if self._flat else torch.device("cpu")
        self._collections = StoreCollections(rendezvous, group)
        self._delivery = AllReduceDelivery(self._collections)
        self.state = LocalHistories(tensors, replicated=True)
        self.control = JobControl(self._delivery, root=group.rank == 0, calls_wait=True)
        self._due = [False] * len(tensors)
        self._finished = settings.start_clock
        self._scale: float | None = None
        self._rate, self._iteration = 0.0, settings.start_clock
        self._due_rate, self._due_step = self._rate, self._iteration
        self._moved = [i for i, t in enumerate(tensors) if not t.statistics]
        self._statistics = [i for i, t in enumerate(tensors) if t.statistics]
        self._gradients = self._buckets(self._moved, bucket_bytes)
        self._means = self._buckets(self._statistics, bucket_bytes)
        self._gradient_group: ProcessGroup | None = None
        self._request_group: ProcessGroup | None = None

    def _buckets(self, indices: Sequence[int], bucket_bytes: int) -> Buckets:
        sizes = [(index, self._flat[index].numel()) for index in indices]
        return Buckets(
            sizes,
            replicas=self._group.size,
            device=self._device,
            launch=self._launch,
            bucket_bytes=bucket_bytes,
        )

    def _launch(self, buffer: Tensor, on_done: Callable[[], None]) -> Waiter:
        assert self._gradient_group is not None, "the exchange is not open"
        return self._gradient_group.sum(buffer, on_done)

    # -- the contract --------------------------------------------------------------------------------------

    def open(self, histories: Sequence[History] | None, clock: int | None = None) -> None:
        """See `Exchange`. Rank 0 broadcasts its histories."""
        if clock is None:
            with_histories = self._form_groups(resumed=bool(histories))
        else:
            self._iteration = self._finished = clock
            with_histories = True
        self.state.load(histories)
        assert self._gradient_group is not None
        for flat, history in zip(self._flat, self.state.of, strict=True):
            for tensor in [flat, *history] if with_histories else [flat]:
                self._gradient_group.broadcast(tensor)()

    def _form_groups(self, *, resumed: bool) -> bool:
        """Form the process groups. Return whether rank 0 continues from a history."""
        payload = {"resumed": resumed, "arithmetic": arithmetic_sample(self._tensors).to_json()}
        everyone = [json.loads(reply) for reply in self.control.all_gather(json.dumps(payload).encode())]
        samples = [Arithmetic.from_json(fields["arithmetic"]) for fields in everyone]
        common_kernel(samples, required=self._equal_bits)
        assert self._rendezvous is not None
        group = self._group
        self._gradient_group = ProcessGroup(self._rendezvous, "bulk", group, Backend.of(self._device))
        self._request_group = ProcessGroup(self._rendezvous, "control", group)
        return bool(everyone[0]["resumed"])

    def start(self, iteration: int, rate: float) -> None:
        """See `Exchange`."""
        self._iteration = iteration
        self._rate = rate
        assert self._request_group is not None, "the exchange is not open"
        self._delivery.start(self._request_group.sum)

    def begin(self, index: int, gradient: Tensor) -> None:
        """See `Exchange`. The gradient is copied."""
        self.wait(index)  # a backward pass may reach a tensor that no forward pass has waited for
        self._gradients.view(index).copy_(gradient.detach().reshape(-1))
        self._gradients.filled(index)

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        """See `Exchange`."""
        self.wait(index)
        gradient_NM = self._gradients.view(index).view(u_KN.shape[1], v_KM.shape[1])
        torch.mm(u_KN.detach().t(), v_KM.detach(), out=gradient_NM)
        self._gradients.filled(index)

    def wait(self, index: int) -> None:
        """See `Exchange`."""
        if not self._due[index]:
            return
        self._due[index] = False
        with self._others_take_part():
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
        rule, history = self._tensors[index].rule, self.state.of[index]
        update(rule, gradient, history, flat, rate=self._due_rate, step=self._due_step)

    def _gradient_factor(self) -> float:
        """Return the factor of the mean gradients. With a limit on their norm it waits for all of them."""
        if self._scale is None:
            self._scale = self._settings.gradient_scale
            if self._settings.clip is not None:
                total = plain_sum(sum_of_squares(self._gradients.mean(index)) for index in self._moved)
                self._scale *= clip_factor(total, self._settings.clip)
        return self._scale

    def finish(self) -> None:
        """See `Exchange`."""
        self._gradients.fill_missing()
        for index in self._statistics:
            self._means.view(index).copy_(self._flat[index])
            self._means.filled(index)
        self._due = [True] * len(self._tensors)
        self._due_rate, self._due_step = self._rate, self._iteration
        self._scale = None
        self._gradients.start()
        self._means.start()
        with self._others_take_part():
            self._delivery.finish(self._iteration + 2)
        self._finished = self._iteration + 1

    @contextlib.contextmanager
    def _others_take_part(self) -> Iterator[None]:
        """Name the worker that has left, where a sum fails because it has."""
        try:
            yield
        except PeerLost:
            self._collections.check_left(self._finished)
            raise

    def settle(self) -> None:
        """See `Exchange`."""
        for index in range(len(self._tensors)):
            self.wait(index)

    def traffic(self) -> dict[int, Traffic]:
        """See `CountsTraffic`."""
        return self._gradients.traffic() | self._means.traffic()

    def close(self) -> None:
        """See `Exchange`. The others' waits for this replica end with an error."""
        self._collections.leave(self._finished)
        if self._gradient_group is not None:
            self._gradient_group.close()
        self._gradient_group = self._request_group = None
        self._collections.close()
        self._rendezvous = None
