"""The exchange through the parameter server: gradients go to the shards chunk by chunk, values come back.

Staleness 0: a worker pushes its gradient as it is. The shards average, apply the rule and send the value.
Staleness > 0: a worker applies the rule to its own gradient, moves the tensor by 1/W of the change at once (read my
writes) and pushes that; the shards add. W workers that move 1/W each move as far together as one process with the
average gradient.

With a limit on the gradients' norm at staleness > 0, a change can be computed only once the whole gradient is known, so
changes leave in `finish`.

Tensors on a GPU have a copy in pinned memory on the host. Gradients are copied there on a side stream and pushed by a
thread of their own. Values are copied back on the compute stream, which never waits for the host.

Statistics leave in `finish`: at staleness 0 the values themselves, which the shards average; at staleness > 0 1/W of
the change that this worker has made since it last read them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from poseidon.exchange.base import Array, ExchangeSettings, History, Trained, WholeGradients
from poseidon.exchange.control import JobControl, ShardDelivery
from poseidon.exchange.observe.statistics import Traffic
from poseidon.exchange.options import DEFAULT_OPTIONS, ExchangeOptions
from poseidon.exchange.server_tables import ServerState, ServerTable
from poseidon.exchange.side_stream import SerialExecutor, SideStream
from ps_server import Client, CodecPair, Keeping, StoreSpec, TableSpec
from ps_server.rules import change, clip_factor, history_count, plain_sum, sum_of_squares


def store_spec(
    tensors: Sequence[Trained],
    settings: ExchangeSettings,
    *,
    workers: int,
    shards: int,
    options: ExchangeOptions = DEFAULT_OPTIONS,
    loads: Sequence[int] = (),
    copies: Collection[int] = (),
    codecs: Sequence[CodecPair | None] = (),
) -> StoreSpec:
    """Return the store that holds these tensors; the same on every worker.

    Args:
        tensors: one table each, in this order.
        settings: common to all tensors.
        workers: number of workers.
        shards: number of shards.
        options: of the exchange.
        loads: relative load of each shard; empty: all equal.
        copies: indices of the tensors that workers exchange among themselves; the shards keep a copy of each.
        codecs: of each tensor; empty: none has one.
    """
    codecs = codecs or [None] * len(tensors)
    tables = tuple(
        TableSpec(
            name=trained.name,
            size=trained.tensor.numel(),
            staleness=options.staleness,
            rows=options.rows,
            rule=trained.rule,
            keeping=_keeping(trained, index in copies),
            codec=codecs[index],
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
        outside_norm=bool(copies) and clip is not None,
        precision=options.precision,
    )


def _keeping(trained: Trained, copied: bool) -> Keeping:
    if copied:
        return Keeping.COPY
    return Keeping.AVERAGE if trained.statistics else Keeping.GRADIENTS


class ServerExchange(WholeGradients):
    """See `Exchange`.

    Args:
        client: connected to every shard; this exchange closes it.
        tensors: one per table of the store, in the same order.
        store: made by `store_spec`.
        settings: common to all tensors.
        in_background: whether pushes are encoded on a thread also where tensors are on a CPU, and a read waits for
            those of its own table only. For a client with table clocks: its next read does not depend on the end of an
            iteration.
    """

    def __init__(
        self,
        client: Client,
        tensors: Sequence[Trained],
        store: StoreSpec,
        settings: ExchangeSettings,
        *,
        in_background: bool = False,
    ) -> None:
        self._client = client
        self._store = store
        self._settings = settings
        self._rate = 0.0
        self._iteration = settings.start_clock
        device = tensors[0].tensor.device if tensors else torch.device("cpu")
        self._side = SideStream(device)
        self._pushes = SerialExecutor(
            device, f"pushes-{client.rank}", self._push_failed, threaded=in_background
        )
        self._in_background = in_background
        self._last_push = [0] * len(tensors)
        self._broken: Exception | None = None
        self._tables = [
            ServerTable(trained, spec, self._side)
            for trained, spec in zip(tensors, store.tables, strict=True)
        ]
        self.state = ServerState(client, self._tables)
        self.control = JobControl(ShardDelivery(client), root=client.rank == 0)

    def open(self, histories: Sequence[History] | None, clock: int | None = None) -> None:
        """See `Exchange`."""
        if clock is not None:
            self._drain()
            self._client.renew(clock)
            self._iteration = clock
            for table in self._tables:
                table.reload()
        given = histories or [()] * len(self._tables)
        for table, history in zip(self._tables, given, strict=True):
            table.set_history(history)
        for index, table in enumerate(self._tables):
            if table.staleness == 0 and not (table.statistics or table.is_copy):
                self._client.bind(
                    index, table.value
                )  # from `begin` to `wait` the tensor belongs to the exchange
        self.state.restore()
        self._client.start(self._initial)
        for index in range(len(self._tables)):
            self._read(index, staleness=None)

    def _initial(self, index: int) -> list[Array]:
        table = self._tables[index]
        history = [history.numpy() for history in table.initial_history]
        if table.unsent is None:
            return [table.value, *history]
        count = history_count(table.rule.kind)
        return [table.value, *(history or [np.zeros_like(table.value)] * count), table.unsent]

    def start(self, iteration: int, rate: float) -> None:
        """See `Exchange`."""
        self._iteration = iteration
        self._rate = rate
        for index, table in enumerate(self._tables):
            table.begun = False
            if not table.is_copy:
                self._client.request(index)

    def begin(self, index: int, gradient: Tensor) -> None:
        """See `Exchange`."""
        table, rate, iteration, event = (
            self._tables[index],
            self._rate,
            self._iteration,
            self._side.record_event(),
        )
        table.begun = True

        def push() -> None:
            with self._side.after(event):
                flat = table.to_host(gradient.detach().reshape(-1))
            self._side.synchronize()
            if table.staleness == 0:
                self._client.push(index, flat.numpy(), rate=rate)
            elif self._settings.clip is None:
                self._push_change(index, flat, self._settings.gradient_scale, rate, iteration)
            else:
                table.pending = flat

        self._last_push[index] = self._pushes.call(push)

    def wait(self, index: int) -> None:
        """See `Exchange`."""
        self._read(index, staleness=None)

    def skip(self, index: int) -> None:
        """See `EarlyExchange`."""
        self._tables[index].begun = True
        self._pushes.call(lambda: self._client.skip(index))

    def wait_early(self, index: int) -> None:
        """See `EarlyExchange`."""
        self._read(index, staleness=-1)

    def finish(self) -> None:
        """See `Exchange`."""
        self.push_remaining(0.0)
        self.end_iteration()

    def push_remaining(self, outside: float) -> float:
        """Push what has not begun, and what waited for the norm: the first half of `finish`.

        Args:
            outside: staleness > 0 with a limit: sum of squares of this worker's gradients that are not sent here.

        Returns:
            The factor of this worker's gradients that the limit gives, at staleness > 0; 1 at 0.
        """
        for index, table in enumerate(self._tables):
            if table.is_copy:
                continue
            if table.statistics:
                self.push_statistics(index)
            elif not table.begun:
                self.begin(index, torch.zeros(table.value.size, dtype=torch.float32, device="cpu"))
        if self._settings.clip is not None:
            self._pushes.drain()
        return self._push_limited(outside)

    def push_statistics(self, index: int) -> None:
        """Push the present values of statistics."""
        self._pushes.drain()
        self._push_statistics(index)

    def end_iteration(self) -> None:
        """End the iteration: the second half of `finish`."""
        self._pushes.call(self._client.clock)

    def settle(self) -> None:
        """See `Exchange`."""
        self._drain()
        for index, table in enumerate(self._tables):
            if not table.is_copy:
                self._read(index, staleness=0)
        if any(table.staleness for table in self._tables):
            # No worker may add to the tables again before all have read them.
            self._client.barrier()

    def traffic(self) -> dict[int, Traffic]:
        """See `CountsTraffic`."""
        return {
            index: Traffic(
                bytes_out=t.bytes_out,
                bytes_in=t.bytes_in,
                on_way_s=t.waited_s + t.hidden_s,
                held_back=_norm(self._client.held_back(index)),
            )
            for index, t in enumerate(self._client.statistics().tables)
        }

    def close(self) -> None:
        """See `Exchange`."""
        self._pushes.close()
        self._client.close()

    # -- internals -----------------------------------------------------------------------------------------

    def _push_failed(self, error: Exception) -> None:
        self._broken = error

    def _drain(self, call: int | None = None) -> None:
        """Wait until all pushes and clocks, or those up to a call, are with the
        client. Raise the error of one that failed.
        """
        self._pushes.drain(call)
        if self._broken is not None:
            raise self._broken

    def _read(self, index: int, staleness: int | None) -> None:
        self._drain(self._last_push[index] if self._in_background else None)
        table = self._tables[index]
        self._client.read(index, table.value, staleness=staleness)
        table.publish()

    def _push_statistics(self, index: int) -> None:
        table = self._tables[index]
        moved = table.copy_to_host()
        if table.staleness == 0:
            self._client.push(index, moved)
            return
        step = (moved - table.last_read) / np.float32(self._store.workers)
        np.add(table.last_read, step, out=table.value)
        self._client.push(index, step)

    def _push_change(self, index: int, gradient: Tensor, scale: float, rate: float, iteration: int) -> None:
        """Apply the rule to this worker's own gradient, and push the change in new memory."""
        table = self._tables[index]
        # A change is held until a value includes it, maybe for many iterations. The memory of a gradient may be reused
        # in the next one (of a pool, of the pinned copy of a GPU's, of the mean over a host's workers).
        gradient = gradient * scale if scale != 1.0 else gradient.clone()
        value = torch.from_numpy(table.value)
        step = change(table.rule, gradient, table.history, value, rate=rate, step=iteration)
        step.div_(self._store.workers)
        value.add_(step)
        self._client.push(index, step.numpy())

    def _push_limited(self, outside: float) -> float:
        """Apply the limit to this worker's own gradients and push the changes. Return the factor."""
        pending = [
            (index, table.pending) for index, table in enumerate(self._tables) if table.pending is not None
        ]
        total = outside + plain_sum(sum_of_squares(gradient) for _, gradient in pending)
        limit = clip_factor(total, self._settings.clip)
        for index, gradient in pending:
            scale = limit * self._settings.gradient_scale
            self._push_change(index, gradient, scale, self._rate, self._iteration)
            self._tables[index].pending = None
        return limit


def _norm(array: Array | None) -> float | None:
    return None if array is None else math.sqrt(sum_of_squares(torch.from_numpy(array)))
