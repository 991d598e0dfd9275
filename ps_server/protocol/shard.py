"""A shard: it holds some chunks of every table and keeps the consistency model.

A state machine without I/O.

Laws:

* A table belongs to a plane (`seats.py`): its workers alone push it and get its values. Below, the
  workers of a chunk are those. Any worker may ask for its history.
* A chunk of staleness 0 is a bulk-synchronous cell. In iteration `clock` it takes from every worker
  the sum of each of its nodes (`StoreSpec.nodes`), adds them in the tree of virtual workers (so that
  the sum has the same bits in every run), applies the rule once to their average, and only then
  becomes `clock + 1`. A chunk of an averaged table takes values instead.
* Where a quorum of the workers ends a round (`quorum.py`), a chunk keeps the part of each worker. It
  takes the average of those that count in the round, and only their workers get the value.
* A chunk of a table that is a copy keeps its first value.
* A chunk of staleness > 0 is a sum. Changes are added as they arrive. The vector clock of its plane
  (`clock.py`) bounds what a worker may read. Under `SSPPush` a worker gets the others' changes when the slowest
  clock moves, and also, once between two pushes of its own, as soon as there is a change. So values
  are mostly fresher than the bound asks for, which keeps stale training close to exact training, at
  no more than twice the bytes.
* An illegal message changes no state: it is answered with `Fault` and counted.
* Before the first push, and after the iterations of a trial, all workers together may create the
  store again, with other first values at a different clock (a saved state is loaded), or another
  store (after a trial). Each gets `Welcome` then: every later message to it is of the new store. A
  signal of rank 0 that comes late, of the previous store, is not passed on; what comes early, a
  signal or a part of a norm, waits for the workers that have not created the new store.
* Memory is allocated when the store is created, and shared with a worker of this host (`allocate`)
  at the first update; an iteration allocates only the memory of its messages. The first gradient
  becomes the sum, in the memory in which it arrived. The transport sends a value from its own
  memory, without a copy: at staleness 0 the next change of the chunk needs a push of every worker,
  and a worker pushes only after it has received the value. Where a quorum ends a round it may not
  have it yet, so a copy is sent.
* A history is sent from its own memory, too. The chunk's next change is made in a copy of it, and
  the memory goes with the messages: one copy a chunk, however many workers ask.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ps_server.errors import RemoteProtocolError
from ps_server.protocol import messages as m
from ps_server.protocol.cell import Cell
from ps_server.protocol.clock import VectorClock
from ps_server.protocol.collections_and_signals import ShardCollections
from ps_server.protocol.members import Members, Outgoing
from ps_server.protocol.norm import OutsideNorms
from ps_server.protocol.placement import place
from ps_server.protocol.precision import (
    NUMPY_TYPES,
    as_array,
    as_tensor,
    of_pushes,
    of_values,
    rounded,
)
from ps_server.protocol.quorum import ShardRounds, weights_of
from ps_server.protocol.row_cell import ShardRows
from ps_server.protocol.settings import Consistency, StoreSpec
from ps_server.protocol.virtual_workers import Node
from ps_server.rules import clip_factor, exact_sum

HISTORY_ELEMENTS = 128 * 1024
"""The most elements of a piece of a history: a value that comes waits for few of its bytes."""
EMPTY = np.zeros(0, np.float32)
"""A value that equals the value of the iteration before."""

Allocate = Callable[[int, Collection[bytes]], Tensor | None]


@dataclass(slots=True)
class Counts:
    """The counters of a shard since it started."""

    faults: int = 0
    updates: int = 0


class OpenStore:
    """A store that workers have created, with all that goes when the next store follows it.

    Args:
        store: its description.
        shard: the number of the shard.
    """

    def __init__(self, store: StoreSpec, shard: int) -> None:
        self.store = store
        self.agreed: set[int] = set()
        """Ranks that have created it."""
        self.early: dict[int, list[m.ToWorker]] = {}
        """Messages for workers that have not."""
        self.begun = False
        planes = [store.seats.members(plane) for plane in range(store.seats.planes)]
        self.clocks = [VectorClock(workers, store.start_clock) for workers in planes]
        """Of each plane."""
        self.outside = OutsideNorms(store.outside_norm, store.start_clock)
        self.rounds: ShardRounds | None = None
        """Where a quorum ends them."""
        if store.quorum:
            self.rounds = ShardRounds(store.workers, store.quorum, store.grace_s, store.start_clock)
        self.cells: dict[tuple[int, int], Cell] = {}
        nodes: dict[int, dict[int, tuple[Node, ...]]] = {}
        for chunk in place(store).of_shard(shard):
            spec = store.tables[chunk.table]
            if chunk.table not in nodes:
                workers = planes[spec.plane]
                nodes[chunk.table] = {w: store.nodes(spec, host) for host, w in enumerate(workers)}
            self.cells[chunk.table, chunk.index] = Cell(
                chunk,
                spec,
                nodes[chunk.table],
                store.start_clock,
                NUMPY_TYPES[of_pushes(store, spec)],
                packs_rows=store.packs_rows(spec),
                quorum=store.quorum > 0,
            )

    @property
    def may_be_followed(self) -> bool:
        """Whether it is a trial without pushes under way, or was not used yet.

        A shard without chunks may not have all workers' `Create` of it: no worker waits for it.
        """
        cells = self.cells.values()
        if any(count > cell.clock for cell in cells for count in cell.own.values()):
            return False
        unused = all(cell.clock == self.store.start_clock for cell in cells)
        return (self.begun or not cells) and (self.store.trial or unused)


class Shard:
    """One shard of the store.

    Args:
        index: this shard's number.
        workers: number of workers that will join.
        token: the job's secret, which every `Hello` must carry.

    Attributes:
        allocate: returns memory for so many numbers that one of these peers reads, on this host,
            for a value that it gets without a copy; None where there is none.
    """

    def __init__(self, index: int, workers: int, token: bytes = b"") -> None:
        self.index = index
        self.counts = Counts()
        self.allocate: Allocate = lambda size, peers: None
        self.members = Members(workers, token)
        self._collections = ShardCollections(range(workers))
        self._of_group: dict[int, ShardCollections] = {}
        """The other collections of each worker: of those with its local rank."""
        self._rows = ShardRows(index, workers)
        self.present = OpenStore(StoreSpec(workers=workers, shards=index + 1, tables=()), index)
        """The present store; at first one that nobody has created."""
        self._generation = 0  # of it: counts how often workers have created one together
        self._created = [0] * workers  # times each rank has created a store
        self._handlers: dict[type, Callable[[int, Any], Iterator[Outgoing]]] = {
            m.Create: self._create,
            m.Initial: self._initial,
            m.Push: self._push,
            m.Part: self._part,
            m.Round: self._round,
            m.Clock: self._tick,
            m.Get: self._get,
            m.OutsideNorm: self._outside_norm,
            m.TotalNorm: self._total_norm,
            m.GetHistory: self._get_history,
            m.Gather: self._gather,
            m.Signal: self._signal,
            m.Leave: self._leave,
            **dict.fromkeys(self._rows.handlers, self._of_rows),
        }

    @property
    def memory_bytes(self) -> int:
        """Bytes of all values and histories. Any thread may read it."""
        return self._rows.memory_bytes + sum(
            4 * cell.chunk.size * (1 + len(cell.stored.history))
            for cell in list(self.present.cells.values())
        )

    def handle(self, sender: bytes, message: m.Message) -> list[Outgoing]:
        """Take one message. Return the messages to send, in order."""
        try:
            return self._handle(sender, message)
        except RemoteProtocolError as error:
            return self.refuse(sender, str(error))

    def _handle(self, sender: bytes, message: m.Message) -> list[Outgoing]:
        members = self.members
        after = members.next_stage(sender, message)
        if isinstance(message, m.Hello):
            members.join(sender, message)
            outgoing = [Outgoing(sender, m.Welcome(self.index))]
        else:
            outgoing = list(self._handlers[type(message)](members.ranks[sender], message))
        members.advance(sender, after)
        if members.left and isinstance(message, m.Push | m.PushRows):
            outgoing.extend(self._notify_of_missing(members.ranks[sender]))
        if isinstance(message, m.Create):
            outgoing.extend(self._begin())
        return outgoing

    def refuse(self, sender: bytes, reason: str) -> list[Outgoing]:
        """Count an illegal message, and answer it."""
        self.counts.faults += 1
        return self.members.fault(sender, reason)

    def _create(self, rank: int, create: m.Create) -> Iterator[Outgoing]:
        store = create.store
        if store.workers != self.members.workers:
            raise RemoteProtocolError(
                f"worker {rank} expects {store.workers} workers; this job has "
                f"{self.members.workers}"
            )
        if store.shards <= self.index:
            raise RemoteProtocolError(
                f"worker {rank} expects {store.shards} shards; this is shard {self.index}"
            )
        if self._generation and store.hosts != self.present.store.hosts:
            raise RemoteProtocolError(
                f"worker {rank} has hosts {store.hosts}; the first worker has "
                f"{self.present.store.hosts}"
            )
        generation = self._created[rank] + 1
        if generation < self._generation:
            self._created[rank] = generation
            yield from self._welcome(rank)
            return  # of the previous store: this worker's next `Create` follows
        if generation > self._generation:
            self._follow(rank, store)
        elif store != self.present.store:
            raise RemoteProtocolError(f"worker {rank} {self.present.store.difference(store)}")
        self.present.agreed.add(rank)
        self._created[rank] = generation
        yield from self._welcome(rank)
        for message in self.present.early.pop(rank, ()):
            yield self.members.to(rank, message)

    def _follow(self, rank: int, store: StoreSpec) -> None:
        """Let a store follow the present one, when the first worker creates it."""
        if not self.present.may_be_followed:
            raise RemoteProtocolError(
                f"worker {rank} creates the store a second time, and it is in use"
            )
        if not self._of_group:
            for local in range(max(store.hosts, default=1)):
                members = store.seats.members(local)
                self._of_group.update(dict.fromkeys(members, ShardCollections(members)))
        self.present = OpenStore(store, self.index)
        self._generation += 1

    def _welcome(self, rank: int) -> Iterator[Outgoing]:
        """Answer each `Create` of a worker but its first: it counts the answers."""
        if self._created[rank] > 1:
            yield self.members.to(rank, m.Welcome(self.index))

    def _initial(self, rank: int, initial: m.Initial) -> Iterator[Outgoing]:
        cell = self._cell(initial.table, initial.chunk)
        first = next(iter(cell.workers))
        if rank != first or cell.stored.value is not None:
            raise RemoteProtocolError(f"{cell.name} gets one initial value, from worker {first}")
        cell.stored.restore(initial.arrays)
        yield from self._begin()

    def _begin(self) -> Iterator[Outgoing]:
        """Send the first values, once all workers have agreed on the store and all values have
        come.
        """
        present = self.present
        ready = len(present.agreed) == self.members.workers and all(
            cell.stored.value is not None for cell in present.cells.values()
        )
        if ready and not present.begun:
            present.begun = True
            for cell in present.cells.values():
                yield from self._send_value(cell, cell.clock, cell.workers)
                cell.stored.make_replica(of_values(present.store, cell.spec))

    def _push(self, rank: int, push: m.Push) -> Iterator[Outgoing]:
        cell = self._own_cell(rank, push.table, push.chunk)
        if not self.present.begun:
            raise RemoteProtocolError(f"{cell.name} has no value yet")
        cell.check_push(rank, push)
        if cell.spec.adds_changes:
            yield from self._add(rank, cell, push)
            return
        cell.take(rank, push)
        if cell.is_complete:
            yield from self._complete(cell)

    def _complete(self, cell: Cell) -> Iterator[Outgoing]:
        if self.present.store.clip is None or not cell.spec.follows_gradients:
            yield from self._apply(cell, 1.0, cell.workers)
            return
        cells = [other for other in self.present.cells.values() if other.spec.follows_gradients]
        if all(other.is_complete for other in cells):
            sums = exact_sum(part for other in cells for part in other.squares())
            yield self.members.to(0, m.PartialNorm(cell.clock, sums))

    def _outside_norm(self, rank: int, norm: m.OutsideNorm) -> Iterator[Outgoing]:
        seat = self.present.store.seats.of(rank)
        if self.index != 0 or rank == 0 or seat.host != 0 or seat.local_rank != norm.plane:
            raise RemoteProtocolError(
                f"worker {rank} adds to the norm for plane {norm.plane}; only workers of host 0 "
                "may, for their own planes, on shard 0"
            )
        self.present.outside.add(norm)
        yield from self._pass_on([0], norm)

    def _total_norm(self, rank: int, norm: m.TotalNorm) -> Iterator[Outgoing]:
        store = self.present.store
        cells = [cell for cell in self.present.cells.values() if cell.spec.follows_gradients]
        if rank != 0 or not all(cell.is_complete and cell.clock == norm.clock for cell in cells):
            raise RemoteProtocolError(
                f"a norm of iteration {norm.clock} is not awaited from worker {rank}"
            )
        passes_on = bool(store.outside_norm) and self.index == 0
        if passes_on:
            self.present.outside.end(norm.clock)
        factor = clip_factor(norm.total, store.clip)
        for cell in cells:
            yield from self._apply(cell, factor, cell.workers)
        if passes_on:
            for plane in store.outside_norm:
                others = (other for other in store.seats.members(plane) if other != 0)
                yield from self._pass_on(others, norm)

    def _apply(self, cell: Cell, factor: float, ranks: Iterable[int]) -> Iterator[Outgoing]:
        store = self.present.store
        if cell.clock == store.start_clock:  # all workers have offered their memory
            peers = [self.members.peers[rank] for rank in cell.workers]
            cell.share_value(lambda size: self.allocate(size, peers))
        cell.apply(factor * store.gradient_scale)
        self.counts.updates += 1
        value, replica = cell.stored.value, cell.stored.replica
        if cell.pushes.skipped:
            yield from self._send(cell, cell.clock, ranks, EMPTY)
        elif replica is not None:
            assert value is not None
            replica.follow(value, cell.clock - 1)
            yield from self._send(cell, cell.clock, ranks, as_array(replica.change))
        elif cell.packed is not None:
            yield from self._send(cell, cell.clock, ranks, cell.packed)
        elif store.consistency is not Consistency.SSP:
            yield from self._send_value(cell, cell.clock, ranks)
        else:
            yield from self._answer_waiting(cell, cell.clock)

    def _part(self, rank: int, part: m.Part) -> Iterator[Outgoing]:
        rounds = self._known_rounds(rank)
        for cell in self.present.cells.values():
            if cell.parts is not None and cell.has_pushes and rank not in cell.parts:
                raise RemoteProtocolError(
                    f"worker {rank} ends its part of a round without its push of {cell.name}"
                )
        if self.index == 0:
            rounds.add(rank, part)
        else:
            yield self.members.to(rank, m.Taken(part.clock))

    def _round(self, rank: int, decided: m.Round) -> Iterator[Outgoing]:
        if self.index == 0:
            raise RemoteProtocolError(f"worker {rank} ends a round; only shard 0 may")
        rounds = self._known_rounds(rank)
        lacking = any(
            cell.parts is not None
            and cell.has_pushes
            and not cell.parts.keys() >= {*decided.workers}
            for cell in self.present.cells.values()
        )
        if decided.clock == rounds.clock and lacking:
            raise RemoteProtocolError(
                f"worker {rank} ends round {decided.clock} with parts that have not come"
            )
        if rounds.follow(decided) is not None:
            yield from self._end_round(decided)

    def _known_rounds(self, rank: int) -> ShardRounds:
        if self.present.rounds is None:
            raise RemoteProtocolError(f"worker {rank} ends a round, and all workers end each")
        return self.present.rounds

    def advance(self, now_s: float) -> list[Outgoing]:
        """End the round of a quorum if it may end now, or say whom it waits for. Return the messages to send, in order.

        Call it after each message, and when `wait_s` is over.

        Args:
            now_s: the seconds of a clock that is never set.
        """
        rounds = self.present.rounds
        if rounds is None:
            return []
        decided = rounds.decide(now_s)
        if decided is None:
            return list(self.members.to_each(rounds.awaited(), m.Awaited(rounds.clock)))
        return [*self.members.to_each(self.members.peers, decided), *self._end_round(decided)]

    def wait_s(self, now_s: float) -> float | None:
        """Return the seconds until `advance` ends a round, if no message comes; None: it does
        not.
        """
        return None if self.present.rounds is None else self.present.rounds.wait_s(now_s)

    def _end_round(self, decided: m.Round) -> Iterator[Outgoing]:
        shares = weights_of(decided)
        for cell in self.present.cells.values():
            if not cell.has_pushes:
                continue
            cell.end_round(shares)
            yield from self._apply(cell, 1.0, decided.workers)
            for rank in decided.workers:
                cell.own[rank] = cell.clock

    def _add(self, rank: int, cell: Cell, push: m.Push) -> Iterator[Outgoing]:
        assert cell.stored.value is not None
        cell.stored.value.add_(as_tensor(push.array))
        cell.own[rank] += push.count
        self.counts.updates += 1
        cell.stale.update(worker for worker in cell.workers if worker != rank)
        cell.eager.add(rank)
        if self.present.store.consistency is not Consistency.SSP:
            ready = cell.stale & cell.eager
            cell.eager -= ready
            yield from self._send_changes(cell, ready)

    def _send_changes(self, cell: Cell, workers: set[int]) -> Iterator[Outgoing]:
        cell.stale -= workers
        if workers:
            yield from self._send_value(cell, cell.clock, sorted(workers))

    def _tick(self, rank: int, tick: m.Clock) -> Iterator[Outgoing]:
        store = self.present.store
        plane = store.seats.of(rank).local_rank
        if plane >= store.seats.planes:
            raise RemoteProtocolError(
                f"worker {rank} ends iteration {tick.clock}, and no table is of its plane {plane}"
            )
        # pushes may come before the clock that they belong to
        early = store.consistency is Consistency.SSP_AGGR
        cells = [
            c for c in self.present.cells.values() if c.spec.adds_changes and c.spec.plane == plane
        ]
        for cell in cells:
            own = cell.own[rank]
            if own < tick.clock or (own > tick.clock and not early):
                raise RemoteProtocolError(
                    f"worker {rank} ends iteration {tick.clock} without its push of {cell.name}"
                )
        clock = self.present.clocks[plane]
        if not clock.tick(rank, tick.clock):
            return
        slowest = clock.slowest
        push = store.consistency is not Consistency.SSP
        for cell in cells:
            cell.clock = slowest
            if push:
                yield from self._send_changes(cell, set(cell.stale))
            else:
                yield from self._answer_waiting(cell, slowest)
        if push:
            yield from self.members.to_each(store.seats.members(plane), m.Fresh(slowest))

    def _get(self, rank: int, get: m.Get) -> Iterator[Outgoing]:
        cell = self._own_cell(rank, get.table, get.chunk)
        if any(waiting == rank for waiting, _ in cell.waiting):
            raise RemoteProtocolError(f"worker {rank} already waits for {cell.name}")
        cell.waiting.append((rank, get.clock))
        if self.present.begun:
            yield from self._answer_waiting(cell, cell.clock)

    def _answer_waiting(self, cell: Cell, clock: int) -> Iterator[Outgoing]:
        ready = [rank for rank, wanted in cell.waiting if wanted <= clock]
        cell.waiting = [(rank, wanted) for rank, wanted in cell.waiting if wanted > clock]
        if ready:
            yield from self._send_value(cell, clock, ready)

    def _send_value(self, cell: Cell, clock: int, ranks: Iterable[int]) -> Iterator[Outgoing]:
        value, replica = cell.stored.value, cell.stored.replica
        if replica is not None:
            value = replica.value
        assert value is not None
        array = as_array(rounded(value, cell.spec.held_as))
        if cell.spec.adds_changes or cell.parts is not None:
            array = array.copy()  # the next change may come before the transport has read this one
        yield from self._send(cell, clock, ranks, array)

    def _send(
        self, cell: Cell, clock: int, ranks: Iterable[int], array: m.Payload
    ) -> Iterator[Outgoing]:
        value: m.Value | None = None
        for rank in ranks:
            # one message for all workers with the same count is encoded once
            if value is None or value.own != cell.own[rank]:
                value = m.Value(cell.chunk.table, cell.chunk.index, clock, cell.own[rank], array)
            yield self.members.to(rank, value)

    def _get_history(self, rank: int, get: m.GetHistory) -> Iterator[Outgoing]:
        cell, size = self._cell(get.table, get.chunk), 0
        for tensor in cell.stored.lend():
            for piece in tensor.split(HISTORY_ELEMENTS):
                history = m.History(get.table, get.chunk, cell.clock, size, piece.numpy())
                yield self.members.to(rank, history)
                size += piece.numel()

    def _gather(self, rank: int, gather: m.Gather) -> Iterator[Outgoing]:
        collections = self._collections if gather.whole else self._of_group[rank]
        found = collections.contribute(rank, gather)
        yield from self._notify_of_missing(rank)
        for worker, gathered in found.items():
            yield self.members.to(worker, gathered)

    def _signal(self, rank: int, signal: m.Signal) -> Iterator[Outgoing]:
        if rank != 0:
            raise RemoteProtocolError(f"worker {rank} signals; only worker 0 may")
        if self._created[rank] != self._generation:
            return  # it is of the previous store: another worker was faster
        yield from self._pass_on(range(1, self.members.workers), signal)

    def _pass_on(self, ranks: Iterable[int], message: m.ToWorker) -> Iterator[Outgoing]:
        """Address a message of the present store to workers: to each once it has created it."""
        for rank in ranks:
            if self._created[rank] == self._generation:
                yield self.members.to(rank, message)
            else:
                self.present.early.setdefault(rank, []).append(message)

    def _leave(self, rank: int, leave: m.Leave) -> Iterator[Outgoing]:
        left = self.members.left
        left.append(rank)
        yield self.members.to(rank, m.Leave())
        for other in self.members.peers:
            if other not in left:
                yield from self._notify_of_missing(other)

    def _notify_of_missing(self, rank: int) -> Iterator[Outgoing]:
        """Notify a worker of one that has left before it: its iteration or collection can never
        be finished.
        """
        gone = self.members.missing_for(rank, self._is_behind)
        if gone is not None:
            iterations = max((c.own.get(gone, 0) for c in self.present.cells.values()), default=0)
            yield self.members.to(rank, m.Gone(gone, iterations))

    def _is_behind(self, rank: int, other: int) -> bool:
        return (
            self._collections.behind(rank, other)
            or self._of_group[rank].behind(rank, other)
            or self._rows.behind(rank, other)
            or any(cell.is_behind(rank, other) for cell in self.present.cells.values())
        )

    def _of_rows(self, rank: int, message: m.Message) -> Iterator[Outgoing]:
        for worker, answer in self._rows.handlers[type(message)](rank, message):
            yield self.members.to(worker, answer)

    def _cell(self, table: int, chunk: int) -> Cell:
        cell = self.present.cells.get((table, chunk))
        if cell is None:
            raise RemoteProtocolError(
                f"chunk {chunk} of table {table} is not on shard {self.index}"
            )
        return cell

    def _own_cell(self, rank: int, table: int, chunk: int) -> Cell:
        cell = self._cell(table, chunk)
        if rank not in cell.workers:
            raise RemoteProtocolError(
                f"{cell.name} belongs to plane {cell.spec.plane}, which worker {rank} is not of; "
                "only workers of the plane push it and get its values"
            )
        return cell
