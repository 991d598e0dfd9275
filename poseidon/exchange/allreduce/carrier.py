"""The carrier of tensors that travel by all-reduce: workers sum their gradients, and each applies
the rule to the mean.

Staleness 0 only. `sums.py` sums; every worker keeps the whole history. With a limit on the
gradients' norm no value changes before the means of all tensors have come.

Beside the server, the server brings first values and the workers' addresses. Without shards
collections and requests travel over the connections of the sums (`LinksControl`), and rank 0
sends its first values as a sum is sent.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from poseidon.exchange.allreduce.sums import Sums
from poseidon.exchange.base import ExchangeSettings, History, Trained
from poseidon.exchange.broadcast import bring_histories
from poseidon.exchange.carrier import Carrier, Step
from poseidon.exchange.device import HOST, device_of
from poseidon.exchange.job_control import JobControl, LinksControl
from poseidon.exchange.membership import Membership
from poseidon.exchange.observer import Traffic
from poseidon.exchange.peers import Peers
from poseidon.exchange.replicas import common_kernel, introduce
from poseidon.exchange.ruled import LocalHistories
from ps_server import Client, SpecError
from ps_server.rules import clip_factor, squares_of


class AllReduceCarrier(Carrier):
    """Sums gradients over all workers.

    Args:
        tensors: by their index in the exchange.
        peers: the connections to the other workers, which this closes.
        control: a `LinksControl` uses these connections. Otherwise this is beside the server, and
            the carrier connects them when it opens.
        norms: the connection to the shards, used with `settings.clip` where there are other
            gradients; None: there are none.
        all_squares: see `Exchange`; without `norms`.
        bucket_bytes: see `Buckets`.
    """

    state: LocalHistories

    def __init__(
        self,
        tensors: Mapping[int, Trained],
        settings: ExchangeSettings,
        *,
        member: Membership,
        peers: Peers,
        control: JobControl,
        norms: Client | None = None,
        all_squares: Callable[[Sequence[float]], float] = math.fsum,
        bucket_bytes: int | None = None,
    ) -> None:
        self.indices = tuple(tensors)
        self._settings = settings
        self._peers = peers
        self._control = control
        self._norms = norms
        self._member = member
        self._all_squares = all_squares
        self.state = LocalHistories(tensors, replicated=True)
        first = next(iter(tensors.values()), None)
        device = HOST if first is None else device_of(first.tensor.device)
        statistics = [index for index, t in tensors.items() if t.statistics]
        order = [
            *(index for index in reversed(list(tensors)) if index not in statistics),
            *statistics,
        ]
        sizes = {index: tensors[index].tensor.numel() for index in order}
        self._sums = Sums(sizes, peers, member.placed, device, bucket_bytes=bucket_bytes)
        self._due: dict[int, Step] = {}
        """The iterations whose means are to be taken, by tensor."""
        self._scale: float | None = None
        self._step = Step(settings.start_clock, (0.0,))
        """The iteration under way, or the next one."""

    @property
    def _is_beside_server(self) -> bool:
        return not isinstance(self._control, LinksControl)

    def open(self, histories: Sequence[History] | None, clock: int | None) -> None:
        with_histories = True
        if clock is None:
            with_histories = self._meet(resumed=bool(histories))
        else:
            self._step = Step(clock, (0.0,))
        self.state.load(histories)
        if self._is_beside_server:
            bring_histories(self.state.flat(), self._control, given=bool(histories))
        else:
            tensors = self.state.of.items()
            self._send_values({index: own.flat for index, own in tensors})
            of = {index: own.history for index, own in tensors if with_histories}
            for number in range(max(map(len, of.values()), default=0)):
                self._send_values({i: own[number] for i, own in of.items() if len(own) > number})

    def _meet(self, *, resumed: bool) -> bool:
        """Introduce the workers to each other, and connect them beside the server.

        Return whether rank 0 continues from a history.

        Raises:
            SpecError: a worker brings other tensors.
        """
        tensors = [own.trained for own in self.state.of.values()]
        sizes = [(t.name, t.tensor.numel(), t.statistics) for t in tensors]
        own = {
            "resumed": resumed,
            "tensors": len(sizes),
            "checksum": zlib.crc32(repr(sizes).encode()),
            "sums": self._peers.links.address,
        }
        offers, samples = introduce(self._control, tensors, own)
        for rank, offer in enumerate(offers):
            if any(offer.get(key) != offers[0].get(key) for key in ("tensors", "checksum")):
                raise SpecError(
                    f"the tensors of {self._peers.names([rank])} ({offer.get('tensors')}) differ "
                    f"from {self._peers.names([0])}'s "
                    f"({offers[0].get('tensors')}); all workers must have the same tensors"
                )
        common_kernel(samples, required=self._member.equal_bits)
        if self._is_beside_server:
            self._peers.links.connect(self._peers.addresses(offers, "sums"))
        self._sums.memory.lend()
        return bool(offers[0].get("resumed"))

    def _send_values(self, values: Mapping[int, Tensor]) -> None:
        """Copy tensors of rank 0 to all workers."""
        self._sums.expect_values()
        self._control.all_gather(b"")  # a worker that is not ready refuses them
        if self._peers.rank == 0:
            self._sums.send_values(values)
        for index, tensor in values.items():
            tensor.copy_(self._sums.mean(index, self._step.iteration))

    def start(self, step: Step) -> None:
        self._step = step

    def begin(self, index: int, gradient: Tensor) -> None:
        self.wait(index)  # a backward pass may reach a tensor that no forward pass has waited for
        self._sums.fill(index, gradient.detach().reshape(-1))

    def wait(self, index: int) -> None:
        if (step := self._due.pop(index, None)) is None:
            return
        own = self.state.of[index]
        if own.trained.statistics:
            own.flat.copy_(self._sums.mean(index, step.iteration), non_blocking=True)
            return
        scale = self._gradient_factor(step.iteration)
        gradient = self._sums.mean(index, step.iteration)
        own.apply(gradient.to(own.flat.device, non_blocking=True), step, scale)

    def _gradient_factor(self, iteration: int) -> float:
        """Return the factor of the mean gradients of an iteration.

        With a limit on their norm it waits for all of them.
        """
        if self._scale is None:
            self._scale = self._settings.gradient_scale
            if self._settings.clip is not None:
                if self._norms is None:
                    total = self._all_squares(self._squares(iteration))
                else:
                    total = self._norms.total_norm(iteration)
                self._scale *= clip_factor(total, self._settings.clip)
        return self._scale

    def _squares(self, iteration: int) -> list[float]:
        gradients = [index for index, own in self.state.of.items() if not own.trained.statistics]
        return [
            square
            for index in gradients
            for square in squares_of(self._sums.mean(index, iteration))
        ]

    def finish(self, limit: float) -> None:
        step, tensors = self._step, self.state.of
        self.settle(step.iteration)
        statistics = {i: own.flat for i, own in tensors.items() if own.trained.statistics}
        self._sums.end_round(statistics)
        self._due = dict.fromkeys(tensors, step)
        self._step = step._replace(iteration=step.iteration + 1)
        self._scale = None
        if self._settings.clip is None:
            return
        if self._peers.rank == 0 and self._norms is not None:
            self._norms.add_norm(step.iteration, self._squares(step.iteration))
        if self._all_squares is not math.fsum:
            self._gradient_factor(step.iteration)  # others, with other tensors, wait for it

    def settle(self, clock: int) -> None:
        for index in self.indices:
            self.wait(index)

    def traffic(self) -> Mapping[int, Traffic]:
        return self._sums.traffic.of_tensors()

    def close(self) -> None:
        """Leave. The others' waits for this worker end with an error."""
        self._sums.close(self._step.iteration)
