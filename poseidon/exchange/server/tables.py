"""The tables of a store on this worker: gradients go to the shards chunk by chunk, values come
back.

Staleness 0: a worker pushes its gradient as it is. The shards average, apply the rule and send the
value. Staleness > 0: a worker applies the rule to its own gradient, moves the tensor by 1/W of the
change at once (read my writes) and pushes that; the shards add. W workers that move 1/W each move
as far together as one process with the average gradient.

With a limit on the gradients' norm at staleness > 0, a change can be computed only once the whole
gradient is known, so changes leave in `finish`.

Tensors on a GPU have a copy in pinned memory on the host. Gradients are copied there on a stream of
their own, as soon as they are handed over, and a thread pushes each when its copy has ended: copies
and pushes overlap. Values are copied back on a third stream, and the compute stream waits for the
event after the copy. Law: the host writes to a table's copy only after that event.

Statistics leave in `finish`: at staleness 0 the values themselves, which the shards average; at
staleness > 0 1/W of the change that this worker has made since it last read them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poseidon.errors import SnapshotError
from poseidon.exchange.base import Array, ExchangeSettings, History, Trained
from poseidon.exchange.carrier import CarrierState, Step
from poseidon.exchange.device import HOST, Event, Streams, device_of
from poseidon.exchange.lossy.device_encoder import DeviceEncoder, device_encoders
from poseidon.exchange.observer import Traffic
from poseidon.exchange.serial_executor import SerialExecutor
from poseidon.exchange.server.table import ServerTable, of_values
from ps_server import Client, Consistency, Keeping, StoreSpec
from ps_server.client import ComingHistory
from ps_server.protocol.messages import Payload
from ps_server.protocol.placement import place
from ps_server.protocol.precision import as_array, as_tensor
from ps_server.protocol.virtual_workers import Node
from ps_server.rules import change, history_count, squares_of, sum_of_squares


class ServerTables(CarrierState):
    """The tables of a plane. They are named by their place among them. As a state they have what
    codecs hold back; `Placed` has the histories.

    Args:
        client: connected to every shard; this closes it.
        held: what each table holds.
        own: the numbers of the tables in the store.
        weight: see `Membership`.
        in_background: whether pushes are encoded on a thread also where tensors are on a CPU, and a
            read waits for the pushes of its own table only. For a client with table clocks: its
            next read does not depend on the end of an iteration.
    """

    def __init__(
        self,
        client: Client,
        held: Sequence[Trained],
        own: range,
        store: StoreSpec,
        settings: ExchangeSettings,
        *,
        weight: float = 1.0,
        in_background: bool = False,
    ) -> None:
        self._client = client
        self.store = store
        self._hosts = store.seats.host_count / weight
        """By what to divide a change of this worker's."""
        self._first = own.start
        self._settings = settings
        self._step = Step(settings.start_clock, (0.0,))
        device = device_of(held[0].tensor.device) if held else HOST
        self._streams = Streams.of(device)
        self._pushes = SerialExecutor(
            f"pushes-{client.rank}", threaded=in_background or not device.is_host
        )
        self._in_background = in_background
        self._last_push = [0] * len(held)
        specs = store.tables[own.start : own.stop]
        encoders: list[list[DeviceEncoder]] = [[] for _ in held]
        if not device.is_host:
            chunks = place(store).chunks[own.start : own.stop]
            encoders = [
                device_encoders(store, spec, row, client.host, trained.tensor.device)
                for trained, spec, row in zip(held, specs, chunks, strict=True)
            ]
        self._tables = [
            ServerTable(trained, spec, self._streams, of_table)
            for trained, spec, of_table in zip(held, specs, encoders, strict=True)
        ]
        self.private = any(spec.staleness > 0 for spec in specs)

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def encodes_pushes(self) -> bool:
        """Whether a codec encodes some pushes."""
        return any(table.spec.gradient_codec is not None for table in self._tables)

    @property
    def own(self) -> range:
        """The virtual workers of this worker."""
        return self.store.placed.of(self._client.host)

    def host_value(self, index: int) -> Tensor:
        """Return the memory on the host to which the values of a table come; read-only."""
        return as_tensor(self._tables[index].value)

    def nodes(self, index: int) -> tuple[Node, ...]:
        """Return the nodes whose sums are pushed to a table in an iteration."""
        return self.store.nodes(self._tables[index].spec, self._client.host)

    def open(
        self,
        histories: Sequence[History],
        clock: int | None,
        given: Mapping[str, Array] = MappingProxyType({}),
    ) -> None:
        """Bring all tables to rank 0's values, with these histories, and with what was held back of
        them; see `Exchange.open`.
        """
        if clock is not None:
            self._pushes.drain()
            self._client.renew(clock)
        for table, history in zip(self._tables, histories, strict=True):
            table.reload()
            table.set_history(history)
        for index, table in enumerate(self._tables):
            if self._is_of_rule(table):
                # from a push to the next read the tensor belongs to the exchange
                self._client.bind(self._first + index, table.value)
            for worker, held_back in self._lost(index).items():
                own = given.get(table.of_pushes(worker))
                if own is None:
                    held_back.zero_()
                else:
                    held_back.copy_(torch.from_numpy(own))
        self._client.start(partial(self._initial, given))
        for index in range(len(self._tables)):
            self.read(index)

    @staticmethod
    def _is_of_rule(table: ServerTable) -> bool:
        """Return whether the shards apply a rule to what workers push."""
        return table.spec.staleness == 0 and not (table.trained.statistics or table.is_copy)

    def _initial(self, given: Mapping[str, Array], index: int) -> list[Payload]:
        table = self._tables[index - self._first]
        history = [own.numpy() for own in table.history] if self._is_of_rule(table) else []
        unsent = given.get(of_values(table.spec.name)) if table.spec.has_own_value else None
        if unsent is None:
            return [table.value, *history]
        count = history_count(table.trained.rule.kind)
        zeros = [np.zeros(table.value.size, np.float32)] * count
        return [table.value, *(history or zeros), unsent]

    def start(self, step: Step) -> None:
        """Begin an iteration."""
        self._step = step
        asks = self.store.consistency is Consistency.SSP
        for index, table in enumerate(self._tables):
            table.pushes = 0
            if asks and table.spec.keeping is not Keeping.COPY:
                self._client.request(self._first + index)

    def push(self, index: int, gradient: Tensor) -> None:
        """Push the gradient of what a table holds, or the values of statistics; with several
        virtual workers the sum of the next node.
        """
        table, is_host = self._tables[index], self._streams.device.is_host
        number, table.pushes = table.pushes, table.pushes + 1
        if not is_host:  # the memory for this push may still be in the last one
            self._pushes.drain(self._last_push[index])
        source = gradient.detach().reshape(-1)
        if table.trained.statistics and is_host:
            source = source.clone()
        clock = self._client.clock_of(self._first + index) if table.encoders else 0
        flat, copied = table.to_host(source, number, clock)
        if self._pushes.is_threaded:
            send = partial(self._send, index, source, flat, copied, self._step)
            self._last_push[index] = self._pushes.call(send)
        else:
            self._send(index, source, flat, copied, self._step)

    def _send(self, index: int, source: Tensor, flat: Tensor, copied: Event, step: Step) -> None:
        """Push a gradient once it is on the host.

        Args:
            source: on the device, which is kept until then.
        """
        table = self._tables[index]
        copied.synchronize()
        if table.trained.statistics:
            own: Any = as_array(flat)  # of the table's type
            if table.spec.staleness:
                own = (own - table.last_read) / np.float32(self._hosts)
                np.add(table.last_read, own, out=table.value)
            self._client.push(self._first + index, own)
        elif table.spec.staleness == 0:
            rate = step.rates[table.trained.rate_index]
            push = self._client.push_encoded if table.encoders else self._client.push
            push(self._first + index, as_array(flat), rate=rate)
        elif self._settings.clip is None:
            moved = self._changed(table, flat, self._settings.gradient_scale, step)
            self._client.push(self._first + index, moved)
        else:
            table.pending = flat

    def _changed(self, table: ServerTable, gradient: Tensor, scale: float, step: Step) -> Array:
        """Apply the rule to this worker's own gradient. Return the change, in new memory."""
        # A change is held until a value includes it, maybe for many iterations. The memory of a
        # gradient may be reused in the next one (of a pool, of the pinned copy of a GPU's, of the
        # mean over a host's workers).
        gradient = gradient * scale if scale != 1.0 else gradient.clone()
        value = torch.from_numpy(table.value)
        rule, rate = table.trained.rule, step.rates[table.trained.rate_index]
        moved = change(rule, gradient, table.history, value, rate=rate, step=step.iteration)
        moved.div_(self._hosts)
        value.add_(moved)
        found: Array = moved.numpy()
        return found

    def skip(self, index: int) -> None:
        """Leave a table of means as it is in this iteration, in place of `push`; all replicas
        do.
        """
        table = self._tables[index]
        table.pushes += 1
        in_ = table.copied_in

        def skip() -> None:
            in_.synchronize()
            self._client.skip(self._first + index)

        self._pushes.call(skip)

    def read(self, index: int, staleness: int | None = None) -> None:
        """Wait for the value of a table, and copy it to what the table holds.

        Args:
            staleness: a bound to use in place of the table's own; see `Client.read`.
        """
        self._pushes.drain(self._last_push[index] if self._in_background else None)
        table = self._tables[index]
        table.await_value()
        self._client.read(self._first + index, table.value, staleness=staleness)
        table.publish()

    def held_squares(self) -> list[float]:
        """Return the squares of the gradients that wait for the limit, at staleness > 0."""
        self._pushes.drain()
        pending = [table.pending for table in self._tables if table.pending is not None]
        return [square for gradient in pending for square in squares_of(gradient)]

    def finish(self, limit: float, *, in_parts: bool) -> None:
        """End the iteration.

        Args:
            limit: multiplies the gradients that waited for it.
            in_parts: whether a table without a push takes no part; otherwise its gradient is zero.
        """
        for index, table in enumerate(self._tables):
            if table.pushes or in_parts or table.spec.keeping is Keeping.COPY:
                continue
            value = table.trained.tensor
            if not table.trained.statistics:
                device = value.device if table.encoders else "cpu"
                value = torch.zeros(table.value.size, dtype=value.dtype, device=device)
            self.push(index, value)
        if self._settings.clip is not None and self.private:
            self._push_limited(limit)
        self._pushes.call(self._client.clock)

    def _push_limited(self, limit: float) -> None:
        self._pushes.drain()
        for index, table in enumerate(self._tables):
            if table.pending is not None:
                scale = limit * self._settings.gradient_scale
                moved = self._changed(table, table.pending, scale, self._step)
                self._client.push(self._first + index, moved)
                table.pending = None

    def settle(self) -> None:
        """Bring every table to the state after all replicas' finished iterations."""
        self._pushes.drain()
        for index, table in enumerate(self._tables):
            if not table.is_copy:
                self.read(index, staleness=0)
        if self.private:
            # no worker may add to the tables again before all have read them
            self._client.barrier()

    def own_history(self, index: int) -> Sequence[Array]:
        """Return the history of a table that the shards do not keep, flat."""
        table = self._tables[index]
        if table.trained.statistics:  # no rule moves them; Caffe's solverstate has zeros there
            count = history_count(table.trained.rule.kind)
            return [np.zeros(table.value.size, np.float32)] * count
        return [history.numpy().copy() for history in table.history]

    def ask(self, into: Mapping[int, Sequence[Array] | None]) -> dict[int, ComingHistory]:
        """Ask for what the shards keep of each table beside its value, as it is after `settle`.

        Args:
            into: flat arrays by table, to be written to.
        """
        return {
            index: self._client.ask_history(self._first + index, into.get(index))
            for index, table in enumerate(self._tables)
            if self._is_of_rule(table)
        }

    def history_in(self, index: int, arrays: Sequence[Array]) -> Sequence[Array]:
        """Return the history among what the shards keep of a table beside its value."""
        return arrays[: history_count(self._tables[index].trained.rule.kind)]

    def held_back(self) -> Mapping[str, Array]:
        """Return what the shards' codecs hold back, by name: on rank 0."""
        if self._client.host:
            return {}
        encoded = [index for index, table in enumerate(self._tables) if table.spec.has_own_value]
        coming = {index: self._client.ask_history(self._first + index) for index in encoded}
        return self.held_in({index: each.result() for index, each in coming.items()})

    def parts(self) -> dict[str, Tensor]:
        """Return live tensors of what this worker's codecs have held back, by name."""
        return {
            table.of_pushes(worker): held_back
            for index, table in enumerate(self._tables)
            for worker, held_back in self._lost(index).items()
        }

    def _lost(self, index: int) -> dict[int, Tensor]:
        """Return what a table's codec holds back of each virtual worker's pushes: live, where the
        pushes are encoded.
        """
        encoders = self._tables[index].encoders
        if encoders:
            pairs = zip(self.own, encoders, strict=True)
            return {worker: one.held_back for worker, one in pairs if one.codec is not None}
        held_back = self._client.held_back(self._first + index)
        return {worker: torch.from_numpy(part) for worker, part in held_back.items()}

    def held_in(self, kept: Mapping[int, Sequence[Array]]) -> dict[str, Array]:
        """Return what the shards hold back among what they have kept of these tables."""
        tables = [(self._tables[index].spec, arrays) for index, arrays in kept.items()]
        return {of_values(spec.name): found[-1] for spec, found in tables if spec.has_own_value}

    def hold_back(self, held_back: Mapping[str, Array]) -> None:
        for table in self._tables:
            encodes = table.spec.gradient_codec is not None
            workers = range(self.store.placed.count) if encodes else ()
            for name in (of_values(table.spec.name), *map(table.of_pushes, workers)):
                if name in held_back and held_back[name].size != table.value.size:
                    raise SnapshotError(
                        f"the snapshot holds back {held_back[name].size} elements of {name}; "
                        f"expected {table.value.size}"
                    )

    def traffic(self) -> list[Traffic]:
        """Return the traffic of each table. Any thread may call this."""
        with self._streams.device.on(self._streams.out):
            return [
                Traffic(
                    bytes_out=t.bytes_out,
                    bytes_in=t.bytes_in,
                    on_way_s=t.waited_s + t.hidden_s,
                    held_back=_norm(list(self._lost(index).values())),
                )
                for index, t in enumerate(
                    self._client.statistics().tables[self._first :][: len(self)]
                )
            ]

    def detach(self) -> None:
        """End the thread; the client stays."""
        self._pushes.close()

    def close(self) -> None:
        """Leave the job."""
        self.detach()
        self._client.close()


def _norm(parts: Sequence[Tensor]) -> float | None:
    """Return the L2 norm of the sum over virtual workers; None: there is none."""
    if not parts:
        return None
    first, *others = parts
    return math.sqrt(sum_of_squares(sum(others, first)))
