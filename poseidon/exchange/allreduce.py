"""All-reduce: replicas sum their gradients among themselves, and each applies the update rule to the mean.

Staleness 0 only. Gradients travel in buckets (`buckets.py`) through torch.distributed: gloo on the CPU, NCCL on GPUs. Every
replica keeps the whole history. The job's shards hold no tables; they are where replicas meet: `gather`, and the
address of torch's own meeting place.

What rank 0 asks for (`signal`) travels with the training itself: each iteration sums two numbers that are zero except on
rank 0. So all replicas hear of it at the end of the same iteration, and it is done at the end of the next one: a
replica that passes values on to other processes (`local/group.py`) can tell them in time.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from poseidon.exchange.base import Ask, ExchangeSettings, History, Trained, WholeGradients
from poseidon.exchange.buckets import BUCKET_BYTES, Buckets, Flight
from poseidon.exchange.observe.traffic import Traffic
from poseidon.exchange.process_group import Backend, Group, MeetingPlace, Place
from poseidon.exchange.replicas import Arithmetic, arithmetic_sample, common_kernel
from ps_server import Client, LocalProtocolError, Signal, SignalKind, StoreSpec
from ps_server.client import TIMEOUT_S
from ps_server.rules import clip_factor, history_count, sum_of_squares, update

KINDS = tuple(SignalKind)


def meeting_store(settings: ExchangeSettings, *, workers: int, shards: int) -> StoreSpec:
    """The store of an all-reduce job: no tables, only a place to meet.

    Args:
        settings: common to all tensors.
        workers: number of workers.
        shards: number of shards.
    """
    return StoreSpec(workers=workers, shards=shards, tables=(), start_clock=settings.start_clock)


class AllReduceExchange(WholeGradients):
    """See `Exchange`.

    Args:
        client: connected to a store made by `meeting_store`; this exchange closes it.
        tensors: what to keep together.
        settings: common to all tensors.
        rank: this replica's rank.
        workers: number of replicas.
        host: this machine's address, as the other machines reach it.
        bucket_bytes: how much travels in one operation.
        timeout_s: longest time that any operation waits.
    """

    def __init__(
        self,
        client: Client,
        tensors: Sequence[Trained],
        settings: ExchangeSettings,
        *,
        rank: int,
        workers: int,
        host: str,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._client = client
        self._settings = settings
        self._place = Place(rank=rank, size=workers, host=host, timeout_s=timeout_s)
        self._tensors = tensors
        self._flat = [trained.tensor.detach().view(-1) for trained in tensors]
        self._device = self._flat[0].device if self._flat else torch.device("cpu")
        self._histories = [
            [torch.zeros_like(flat) for _ in range(history_count(t.rule.kind))]
            for t, flat in zip(tensors, self._flat, strict=True)
        ]
        self._due = [False] * len(tensors)
        self._scale: float | None = None
        self._rate, self._iteration = 0.0, settings.start_clock
        self._due_rate, self._due_step = self._rate, self._iteration
        self._moved = [i for i, t in enumerate(tensors) if not t.statistics]
        self._statistics = [i for i, t in enumerate(tensors) if t.statistics]
        self._gradients = self._buckets(self._moved, bucket_bytes)
        self._means = self._buckets(self._statistics, bucket_bytes)
        self._wishes = _Wishes(rank)
        self._bulk: Group | None = None
        self._control: Group | None = None

    def _buckets(self, indices: Sequence[int], bucket_bytes: int) -> Buckets:
        sizes = [(index, self._flat[index].numel()) for index in indices]
        return Buckets(
            sizes,
            replicas=self._place.size,
            device=self._device,
            launch=self._launch,
            bucket_bytes=bucket_bytes,
        )

    def _launch(self, buffer: Tensor, landed: Callable[[], None]) -> Flight:
        assert self._bulk is not None, "the exchange is not open"
        return self._bulk.sum(buffer, landed)

    # -- the contract --------------------------------------------------------------------------------------

    def open(self, histories: Sequence[History] | None) -> None:
        """See `Exchange`. Histories count on rank 0; the others are told them."""
        self._client.start(lambda table: [])
        self._spread(histories, resumed=self._meet(resumed=bool(histories)))

    def reopen(self, histories: Sequence[History] | None, clock: int) -> None:
        """See `Exchange`."""
        self._iteration = clock
        self._spread(histories, resumed=bool(histories))

    def _spread(self, histories: Sequence[History] | None, *, resumed: bool) -> None:
        """Bring every replica to rank 0's values, and to its histories where it has any."""
        for own, given in zip(self._histories, histories or (), strict=False):
            for tensor, array in zip(own, given, strict=True):
                tensor.copy_(torch.from_numpy(array).reshape(-1))
        assert self._bulk is not None
        for flat, history in zip(self._flat, self._histories, strict=True):
            for tensor in [flat, *history] if resumed else [flat]:
                self._bulk.broadcast(tensor)()

    def _meet(self, *, resumed: bool) -> bool:
        """Form the groups; returns whether rank 0 goes on from a history."""
        place = self._place
        opened = MeetingPlace(place) if place.rank == 0 else None
        payload = {
            "address": opened.address if opened else "",
            "resumed": resumed,
            "arithmetic": arithmetic_sample(self._tensors).to_json(),
        }
        replies = self._client.wait(self._client.gather(json.dumps(payload).encode()))
        everyone = [json.loads(reply) for reply in replies]
        first = everyone[0]
        samples = [Arithmetic.from_json(fields["arithmetic"]) for fields in everyone]
        common_kernel(samples, required=not self._settings.mends)
        meeting = opened or MeetingPlace(place, str(first["address"]))
        self._bulk = Group(meeting, "bulk", place, Backend.of(self._device))
        self._control = Group(meeting, "control", place)
        return bool(first["resumed"])

    def start(self, iteration: int, rate: float) -> None:
        """See `Exchange`."""
        self._iteration = iteration
        self._rate = rate
        assert self._control is not None, "the exchange is not open"
        self._wishes.ask(self._control)

    def begin(self, index: int, gradient: Tensor) -> None:
        """See `Exchange`. The gradient is copied."""
        self.wait(
            index
        )  # does nothing save where a backward pass reaches a tensor that no forward pass waited for
        self._gradients.place(index).copy_(gradient.detach().reshape(-1))
        self._gradients.filled(index)

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        """See `Exchange`."""
        self.wait(index)
        place_NM = self._gradients.place(index).view(u_KN.shape[1], v_KM.shape[1])
        torch.mm(u_KN.detach().t(), v_KM.detach(), out=place_NM)
        self._gradients.filled(index)

    def wait(self, index: int) -> None:
        """See `Exchange`."""
        if not self._due[index]:
            return
        self._due[index] = False
        flat = self._flat[index]
        if self._tensors[index].statistics:
            flat.copy_(self._means.mean(index))
            return
        scale = self._factor()
        gradient = self._gradients.mean(index)
        if scale != 1.0:
            gradient.mul_(scale)
        rule, history = self._tensors[index].rule, self._histories[index]
        update(rule, gradient, history, flat, rate=self._due_rate, step=self._due_step)

    def _factor(self) -> float:
        """What to multiply the mean gradients by; with a limit on their norm all of them must be here."""
        if self._scale is None:
            self._scale = self._settings.gradient_scale
            if self._settings.clip is not None:
                total = sum(sum_of_squares(self._gradients.mean(index)) for index in self._moved)
                self._scale *= clip_factor(total, self._settings.clip)
        return self._scale

    def finish(self) -> None:
        """See `Exchange`."""
        self._gradients.fill_missing()
        for index in self._statistics:
            self._means.place(index).copy_(self._flat[index])
            self._means.filled(index)
        self._due = [True] * len(self._tensors)
        self._due_rate, self._due_step = self._rate, self._iteration
        self._scale = None
        self._gradients.start()
        self._means.start()
        self._wishes.hear(self._iteration + 2)
        self._client.clock()

    def settle(self) -> None:
        """See `Exchange`."""
        for index in range(len(self._tensors)):
            self.wait(index)

    def histories(self) -> list[History]:
        """See `Exchange`."""
        return [
            [tensor.cpu().numpy().reshape(trained.tensor.shape).copy() for tensor in history]
            for trained, history in zip(self._tensors, self._histories, strict=True)
        ]

    def replicated_state(self) -> Mapping[str, Tensor]:
        """See `Exchange`: the histories."""
        return {
            f"{trained.name}, history {number}": tensor
            for trained, history in zip(self._tensors, self._histories, strict=True)
            for number, tensor in enumerate(history)
        }

    def gather(self, payload: bytes) -> Ask:
        """See `Exchange`."""
        return self._client.gather(payload)

    def gathered(self, ask: Ask) -> tuple[bytes, ...]:
        """See `Exchange`."""
        return self._client.wait(ask)

    def signal(self, kind: SignalKind) -> None:
        """See `Exchange`."""
        self._wishes.add(kind)

    @property
    def signals(self) -> tuple[Signal, ...]:
        """See `Exchange`."""
        return self._wishes.signals

    def traffic(self) -> dict[int, Traffic]:
        """See `CountsTraffic`."""
        return self._gradients.traffic() | self._means.traffic()

    def close(self) -> None:
        """See `Exchange`."""
        self._client.close()
        self._bulk = self._control = None  # whoever still waits for this replica hears that it has gone


class _Wishes:
    """What rank 0 asks of all replicas: how often it has asked for each kind, told anew in every iteration."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._asked = [0] * len(KINDS)
        self._told = torch.zeros(len(KINDS), dtype=torch.float32, device="cpu")
        self._heard = [0] * len(KINDS)
        self._flight: Flight | None = None
        self.signals: tuple[Signal, ...] = ()

    def add(self, kind: SignalKind) -> None:
        """Rank 0: ask for something."""
        if self._rank != 0:
            raise LocalProtocolError(f"worker {self._rank} signals; only worker 0 may")
        with self._lock:
            self._asked[KINDS.index(kind)] += 1

    def ask(self, group: Group) -> None:
        """Start of an iteration: send the counts on their way."""
        with self._lock:
            for place, count in enumerate(self._asked):
                self._told[place] = count
        self._flight = group.sum(self._told)

    def hear(self, clock: int) -> None:
        """End of an iteration: whatever is new is to be done after `clock` iterations."""
        assert self._flight is not None
        self._flight()
        counts = [int(count) for count in self._told.tolist()]
        for kind, before, now in zip(KINDS, self._heard, counts, strict=True):
            self.signals += (Signal(kind, clock),) * (now - before)
        self._heard = counts
