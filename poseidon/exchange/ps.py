"""The parameter server: gradients go to the shards chunk by chunk, values come back.

Staleness 0: the gradient is pushed as it is; the shards average, apply the rule and send the value.
Staleness > 0: the rule runs here on this worker's own gradient, 1/W of the change is applied to the tensor
at once (read my writes) and pushed; the shards add. W workers that move 1/W each go as far together as one
process with the average gradient does.

With a limit on the gradients' norm at staleness > 0, changes can only be made once the whole gradient is
known, so they leave in `finish`.

Tensors on a GPU have a copy in pinned memory on the host: gradients are copied there on a side stream and pushed from a
thread of their own, and values are copied back on the compute stream, which never waits for the host.

Statistics leave in `finish`: at staleness 0 the values themselves, which the shards average; at staleness > 0 1/W of how
far this worker has moved them since it last read them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from poseidon.exchange.base import Array, ExchangeSettings, History, Trained, WholeGradients
from poseidon.exchange.control import JobControl, ShardDelivery
from poseidon.exchange.observe.traffic import Traffic
from poseidon.exchange.options import DEFAULT_OPTIONS, ExchangeOptions
from poseidon.exchange.side_stream import InOrder, SideStream
from ps_server import Client, Keeping, StoreSpec, TableSpec
from ps_server.rules import change, clip_factor, history_count, sum_of_squares


def store_spec(
    tensors: Sequence[Trained],
    settings: ExchangeSettings,
    *,
    workers: int,
    shards: int,
    options: ExchangeOptions = DEFAULT_OPTIONS,
    loads: Sequence[int] = (),
    by_factors: Collection[int] = (),
) -> StoreSpec:
    """The store that holds these tensors; the same on every worker.

    Args:
        tensors: one table each, in this order.
        settings: common to all tensors.
        workers: number of workers.
        shards: number of shards.
        options: what the job asks of its exchange.
        loads: relative load of each shard; empty: all alike.
        by_factors: indices of the tensors that the workers exchange as factors; the shards keep a copy of each.
    """
    tables = tuple(
        TableSpec(
            name=trained.name,
            size=trained.tensor.numel(),
            staleness=options.staleness,
            rows=options.rows,
            rule=trained.rule,
            keeping=_keeping(trained, index in by_factors),
        )
        for index, trained in enumerate(tensors)
    )
    clip = settings.clip if options.staleness == 0 else None
    return StoreSpec(
        workers=workers,
        shards=shards,
        tables=tables,
        consistency=options.consistency,
        clip=clip,
        gradient_scale=settings.gradient_scale,
        start_clock=settings.start_clock,
        loads=tuple(loads),
        outside_norm=bool(by_factors) and clip is not None,
        precision=options.precision,
    )


def _keeping(trained: Trained, by_factors: bool) -> Keeping:
    if trained.statistics:
        return Keeping.AVERAGE
    return Keeping.COPY if by_factors else Keeping.GRADIENTS


class ServerExchange(WholeGradients):
    """See `Exchange`.

    Args:
        client: connected to every shard; this exchange closes it.
        tensors: one per table of the store, in the same order.
        store: made by `store_spec`.
        settings: common to all tensors.
    """

    def __init__(
        self,
        client: Client,
        tensors: Sequence[Trained],
        store: StoreSpec,
        settings: ExchangeSettings,
    ) -> None:
        self._client = client
        self._store = store
        self._settings = settings
        self._rate = 0.0
        self._iteration = settings.start_clock
        device = tensors[0].tensor.device if tensors else torch.device("cpu")
        self._side = SideStream(device)
        self._in_order = InOrder(device, f"pushes-{client.rank}", self._pushing_failed)
        self._broken: Exception | None = None
        self._slots = [
            _Slot(trained, table, self._side) for trained, table in zip(tensors, store.tables, strict=True)
        ]
        self.state = ServerState(client, self._slots)
        self.control = JobControl(ShardDelivery(client), root=client.rank == 0)

    def open(self, histories: Sequence[History] | None, clock: int | None = None) -> None:
        """See `Exchange`."""
        if clock is not None:
            self._drain()
            self._client.renew(clock)
            self._iteration = clock
            for slot in self._slots:
                slot.take_tensor()
        given = histories or [()] * len(self._slots)
        for slot, history in zip(self._slots, given, strict=True):
            slot.set_history(history)
        for index, slot in enumerate(self._slots):
            if slot.staleness == 0 and not (slot.statistics or slot.is_copy):
                self._client.bind(index, slot.value)  # a tensor is the exchange's own from `begin` to `wait`
        self._client.start(self._initial)
        for index in range(len(self._slots)):
            self._read(index, staleness=None)

    def _initial(self, table: int) -> list[Array]:
        slot = self._slots[table]
        return [slot.value, *(history.numpy() for history in slot.sent_history)]

    def start(self, iteration: int, rate: float) -> None:
        """See `Exchange`."""
        self._iteration = iteration
        self._rate = rate
        for index, slot in enumerate(self._slots):
            slot.begun = False
            if not slot.is_copy:
                self._client.request(index)

    def begin(self, index: int, gradient: Tensor) -> None:
        """See `Exchange`."""
        slot, rate, iteration, event = self._slots[index], self._rate, self._iteration, self._side.mark()
        slot.begun = True

        def push() -> None:
            with self._side.after(event):
                flat = slot.on_host(gradient.detach().reshape(-1))
            self._side.finish()
            if slot.staleness == 0:
                self._client.push(index, flat.numpy(), rate=rate)
            elif self._settings.clip is None:
                self._push_change(index, flat, self._settings.gradient_scale, rate, iteration)
            else:
                slot.kept = flat

        self._in_order.call(push)

    def wait(self, index: int) -> None:
        """See `Exchange`."""
        self._read(index, staleness=None)

    def finish(self) -> None:
        """See `Exchange`."""
        self.push_rest(0.0)
        self.tick()

    def push_rest(self, outside: float) -> float:
        """The first half of `finish`: push what has not begun, and what waited for the norm.

        Args:
            outside: staleness > 0 with a limit: sum of squares of this worker's gradients that are not sent here.

        Returns:
            What this worker's gradients are multiplied by for the limit, at staleness > 0; 1 at 0.
        """
        for index, slot in enumerate(self._slots):
            if slot.is_copy:
                continue
            if slot.statistics:
                self._in_order.drain()
                self._push_moved(index)
            elif not slot.begun:
                self.begin(index, torch.zeros(slot.value.size, dtype=torch.float32, device="cpu"))
        if self._settings.clip is not None:
            self._in_order.drain()
        return self._push_limited(outside)

    def tick(self) -> None:
        """The second half of `finish`: the iteration has ended."""
        self._in_order.call(self._client.clock)

    def settle(self) -> None:
        """See `Exchange`."""
        self._drain()
        for index, slot in enumerate(self._slots):
            if not slot.is_copy:
                self._read(index, staleness=0)
        if any(slot.staleness for slot in self._slots):
            # Whoever has read may add to the tables again only once everyone has.
            self._client.barrier()

    def traffic(self) -> dict[int, Traffic]:
        """See `CountsTraffic`."""
        return {
            index: Traffic(bytes_out=t.bytes_out, bytes_in=t.bytes_in, on_way_s=t.waited_s + t.hidden_s)
            for index, t in enumerate(self._client.statistics().tables)
        }

    def close(self) -> None:
        """See `Exchange`."""
        self._in_order.close()
        self._client.close()

    # -- within --------------------------------------------------------------------------------------------

    def _pushing_failed(self, error: Exception) -> None:
        self._broken = error

    def _drain(self) -> None:
        """Everything that was to be pushed has been, and the clock stands where it should."""
        self._in_order.drain()
        if self._broken is not None:
            raise self._broken

    def _read(self, index: int, staleness: int | None) -> None:
        self._drain()
        slot = self._slots[index]
        self._client.read(index, slot.value, staleness=staleness)
        slot.publish()

    def _push_moved(self, index: int) -> None:
        slot = self._slots[index]
        moved = slot.take_moved()
        if slot.staleness == 0:
            self._client.push(index, moved)
            return
        step = (moved - slot.read) / np.float32(self._store.workers)
        np.add(slot.read, step, out=slot.value)
        self._client.push(index, step)

    def _push_change(self, index: int, gradient: Tensor, scale: float, rate: float, iteration: int) -> None:
        """Apply the rule to this worker's own gradient, and push the change in memory of its own."""
        slot = self._slots[index]
        # A change is held until a value includes it, maybe for many iterations; a gradient's memory may be used again
        # in the next one (a pool's, the pinned copy of a GPU's, the mean of a machine's workers).
        gradient = gradient * scale if scale != 1.0 else gradient.clone()
        value = torch.from_numpy(slot.value)
        step = change(slot.rule, gradient, slot.history, value, rate=rate, step=iteration)
        step.div_(self._store.workers)
        value.add_(step)
        self._client.push(index, step.numpy())

    def _push_limited(self, outside: float) -> float:
        """Apply the limit to this worker's own gradients and push the changes; returns what they are multiplied by."""
        kept = [(index, slot.kept) for index, slot in enumerate(self._slots) if slot.kept is not None]
        total = outside + sum(sum_of_squares(gradient) for _, gradient in kept)
        limit = clip_factor(total, self._settings.clip)
        for index, gradient in kept:
            scale = limit * self._settings.gradient_scale
            self._push_change(index, gradient, scale, self._rate, self._iteration)
            self._slots[index].kept = None
        return limit


class ServerState:
    """See `ExchangeState`. At staleness 0 the shards keep the histories, above it each worker keeps its own.

    Args:
        client: connected to every shard.
        slots: one for each tensor.
    """

    def __init__(self, client: Client, slots: Sequence[_Slot]) -> None:
        self._client = client
        self._slots = slots
        self.private = any(slot.staleness > 0 for slot in slots)

    def histories(self) -> list[History]:
        """See `ExchangeState`. A tensor that travels as factors has none here."""
        return [
            [array.reshape(slot.shape) for array in self._history(index, slot)]
            for index, slot in enumerate(self._slots)
        ]

    def _history(self, index: int, slot: _Slot) -> Sequence[Array]:
        if slot.is_copy:
            return []
        if slot.statistics:  # no rule moves them; Caffe's solverstate has zeros there
            return [np.zeros(slot.value.size, np.float32)] * len(slot.history)
        if slot.staleness == 0:
            return self._client.history(index)
        return [history.numpy().copy() for history in slot.history]

    def replicated(self) -> Mapping[str, Tensor]:
        """See `ExchangeState`."""
        return {}


class _Slot:
    """One tensor with what this worker keeps of it.

    `value` is the tensor's own memory on CPU. A GPU tensor has a copy on the host, which `publish` sends to it.
    """

    def __init__(self, trained: Trained, table: TableSpec, side: SideStream) -> None:
        self.rule = trained.rule
        self.staleness = table.staleness
        self.is_copy = table.keeping is Keeping.COPY
        self.statistics = trained.statistics
        self.shape = tuple(trained.tensor.shape)
        self._tensor = trained.tensor
        self._on_host = trained.tensor.device.type == "cpu"
        flat = trained.tensor.detach().reshape(-1)
        self._side = side
        self._gradient: Tensor | None = None
        self.value: Array = (flat if self._on_host else side.host_buffer(flat.numel()).copy_(flat)).numpy()
        if self._on_host:
            assert np.shares_memory(self.value, trained.tensor.detach().numpy())
        kept_here = table.adds_changes and table.keeping is Keeping.GRADIENTS
        self.history = [
            torch.zeros(self.value.size if kept_here else 0, dtype=torch.float32, device="cpu")
            for _ in range(history_count(trained.rule.kind))
        ]
        self.sent_history: list[Tensor] = []
        self.begun = False
        self.kept: Tensor | None = None
        self.read: Array = self.value.copy() if self.statistics else self.value
        """What statistics were when they were last read."""

    def take_tensor(self) -> None:
        """Bring a GPU tensor's copy on the host up to date with it."""
        if not self._on_host:
            np.copyto(self.value, self.take_moved())

    def set_history(self, history: History) -> None:
        """Go on from this history: here at staleness > 0, on the shards at 0."""
        if self.is_copy or self.statistics:
            return
        arrays = [
            torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32).reshape(-1)) for array in history
        ]
        if self.staleness == 0:
            self.sent_history = arrays
        else:
            for own, given in zip(self.history, arrays, strict=False):
                own.copy_(given)

    def on_host(self, gradient: Tensor) -> Tensor:
        """The gradient in memory that the transport can read; on the current stream."""
        if gradient.device.type == "cpu":
            return gradient
        if self._gradient is None:
            self._gradient = self._side.host_buffer(gradient.numel())
        return self._gradient.copy_(gradient, non_blocking=True)

    def take_moved(self) -> Array:
        """A copy of what the module has made of these statistics."""
        return self._tensor.detach().reshape(-1).cpu().numpy().copy()

    def publish(self) -> None:
        """Note what was read of statistics; bring a GPU tensor up to date with its host copy."""
        if self.statistics:
            np.copyto(self.read, self.value)
        if not self._on_host:
            self._tensor.detach().reshape(-1).copy_(torch.from_numpy(self.value), non_blocking=True)
