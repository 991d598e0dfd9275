"""The carrier of tensors that go through the parameter server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum

from torch import Tensor

from poseidon.exchange.base import Array, ExchangeSettings, History
from poseidon.exchange.broadcast import bring_histories, bring_parts
from poseidon.exchange.carrier import (
    Carrier,
    KeptHistories,
    Step,
    UnitedState,
    in_order,
    merged,
)
from poseidon.exchange.job_control import JobControl
from poseidon.exchange.membership import Membership
from poseidon.exchange.observer import Traffic
from poseidon.exchange.server.low_rank import LowRankTensors, compare_rules
from poseidon.exchange.server.placed import Placed, PlacedAlone, Pool
from poseidon.exchange.server.store import StoreLayout
from poseidon.exchange.server.tables import ServerTables
from ps_server import Client, StoreSpec
from ps_server.collection import Coming


class Parts(Enum):
    """Which tensors take part in an iteration."""

    WHOLE = "whole"
    """All: the gradient of a tensor that has not begun is zero."""
    AT_ONCE = "at once"
    """Those that have begun, statistics with their values. It needs a client with table clocks."""
    IN_BACKGROUND = "in the background"
    """The same; a thread encodes what is pushed, and a read waits for the pushes of its own
    table only.
    """


class ServerCarrier(Carrier):
    """Moves tensors through the tables of a store.

    Args:
        client: connected to every shard; this carrier closes it.
        layout: the tables of this worker's plane in the store.
        member: of the plane, as `control` is.
    """

    state: ServerState

    def __init__(
        self,
        client: Client,
        layout: StoreLayout,
        store: StoreSpec,
        settings: ExchangeSettings,
        *,
        member: Membership,
        control: JobControl,
        parts: Parts = Parts.WHOLE,
    ) -> None:
        self._member = member
        self._settings = settings
        self._control = control
        self._parts = parts
        self._tables = ServerTables(
            client,
            layout.pooled,
            range(layout.first, layout.first + len(layout.tables)),
            store,
            settings,
            weight=member.weight,
            in_background=parts is Parts.IN_BACKGROUND,
        )
        self._placed = list(self._place(layout))
        self._low_rank = [each for each in self._placed if isinstance(each, LowRankTensors)]
        self._of = {index: placed for placed in self._placed for index in placed.indices}
        self._special = [placed for placed in self._placed if not isinstance(placed, PlacedAlone)]
        self.indices = tuple(sorted(self._of))
        self.state = ServerState(self._tables, self._placed)

    def _place(self, layout: StoreLayout) -> Iterator[Placed]:
        place, tables = 0, self._tables
        table_of = {own[0]: table for table, own in enumerate(layout.owners)}  # pools come last
        for shared in layout.factors:
            copy = table_of[shared.indices[0]]
            yield LowRankTensors(shared, place, copy, layout.tensors, self._settings, tables)
            place += len(shared.held)
        elsewhere = layout.elsewhere | layout.by_low_rank
        for table, pool in enumerate(layout.pools, start=place):
            if len(pool) > 1:
                yield Pool(pool, table, layout.tensors, layout.pooled[table], tables)
            elif pool[0] not in elsewhere:
                yield PlacedAlone(pool[0], table, layout.tensors[pool[0]], tables)

    def open(self, histories: Sequence[History] | None, clock: int | None) -> None:
        given = self.state.take_given()
        of_tables: list[History] = [()] * len(self._tables)
        for placed in self._placed:
            of_tables[placed.table] = placed.open(histories, given)
        self._tables.open(of_tables, clock, given)
        for placed in self._special:
            placed.take_values()
        if self._low_rank:
            own = [part for placed in self._low_rank for part in placed.replicated().values()]
            bring_histories(own, self._control, given=bool(histories))
        if self._low_rank or self._tables.encodes_pushes:
            rank = self._member.network.rank
            bring_parts(self.state.parts(), given, self._control, rank=rank)
        if self._low_rank and clock is None:
            compare_rules(self._low_rank, self._control, required=self._member.equal_bits)

    def start(self, step: Step) -> None:
        for placed in self._special:
            placed.start(step)
        self._tables.start(step)

    def begin(self, index: int, gradient: Tensor) -> None:
        push = self._of[index].take(index, gradient)
        if push is not None:
            self._tables.push(*push)

    def wait(self, index: int) -> None:
        self._of[index].wait(index)

    def held_squares(self) -> Sequence[float]:
        self._complete()
        return self._tables.held_squares()

    def _complete(self) -> None:
        for placed in self._special:
            for push in placed.complete():
                self._tables.push(*push)

    def finish(self, limit: float) -> None:
        self._complete()
        for placed in self._special:
            placed.finish()
        self._tables.finish(limit, in_parts=self._parts is not Parts.WHOLE)

    def settle(self, clock: int) -> None:
        self._tables.settle()
        for placed in self._special:
            placed.take_values()

    def traffic(self) -> Mapping[int, Traffic]:
        tables = self._tables.traffic()
        return merged(placed.traffic(tables) for placed in self._placed)

    def close(self) -> None:
        self._tables.close()


class ServerState(UnitedState):
    """At staleness 0 the shards keep the histories, above it each worker keeps its own."""

    def __init__(self, tables: ServerTables, placed: Sequence[Placed]) -> None:
        super().__init__([tables, *placed])
        self._tables = tables
        self._placed = placed
        self._given: Mapping[str, Array] = {}

    def histories(self) -> Mapping[int, History]:
        return self.keep({}).result().histories

    def held_back(self) -> Mapping[str, Array]:
        live = self.parts().items()
        own = {name: part.reshape(-1).cpu().numpy().copy() for name, part in live}
        return {**own, **super().held_back()}

    def keep(self, into: Mapping[int, History]) -> Coming[KeptHistories]:
        memory = {placed.table: placed.memory_of(into) for placed in self._placed}
        coming = self._tables.ask(memory)
        here = merged(each.kept(None) for each in self._placed if each.table not in coming)

        def whole(found: Sequence[Sequence[Array]]) -> KeptHistories:
            arrays = dict(zip(coming, found, strict=True))
            there = (p.kept(arrays[p.table]) for p in self._placed if p.table in arrays)
            return KeptHistories(in_order(merged([here, *there])), self._tables.held_in(arrays))

        return Coming.together(list(coming.values()), whole)

    def hold_back(self, held_back: Mapping[str, Array]) -> None:
        super().hold_back(held_back)
        self._given = held_back

    def take_given(self) -> Mapping[str, Array]:
        """Return what the last `hold_back` was given, once."""
        given, self._given = self._given, {}
        return given
