"""What is kept of an iteration while training goes on is all that a job needs to continue from there,
with other processes and shards: it ends with the bits of an undisturbed one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from poseidon.exchange.base import Array, History
from poseidon.exchange.carrier import KeptHistories
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from ps_server import Interrupted
from ps_server.collection import Coming
from ps_server.protocol.virtual_workers import VirtualWorkers
from tests.support.elastic import ADAM, Case, Part, Worker, together

V, KEPT_AT, ITERATIONS = 5, 2, 6
BEFORE, AFTER = VirtualWorkers((0, 1, 3, V)), VirtualWorkers((0, 2, V))


def options(kind: ExchangeKind, compress: str = "") -> ExchangeOptions:
    return ExchangeOptions(kind=kind, compress=compress)


CASES = {
    "ps, clip": Case(options=options(ExchangeKind.SERVER), clip=0.1),
    "ps, Adam": Case(options=options(ExchangeKind.SERVER), rule=ADAM),
    "hybrid": Case(options=options(ExchangeKind.HYBRID), rows=1, rule=ADAM),
    "svb, clip": Case(options=options(ExchangeKind.FACTORS), rule=ADAM, clip=0.1),
    "allreduce, clip": Case(options=options(ExchangeKind.ALLREDUCE), clip=0.1),
    "allreduce, Adam": Case(options=options(ExchangeKind.ALLREDUCE), rule=ADAM),
    "int8": Case(options=options(ExchangeKind.SERVER, "int8")),
    "powersgd": Case(options=options(ExchangeKind.SERVER, "powersgd:1:int8"), rule=ADAM),
}


@dataclass(slots=True)
class Kept:
    """The state after one iteration, on the worker that holds it."""

    values: list[torch.Tensor] = field(default_factory=list)
    state: Coming[KeptHistories] | None = None
    histories: Sequence[History] = ()
    held_back: dict[str, Array] = field(default_factory=dict)
    """Of all workers."""


def train(part: Part, start: int, stop: int) -> None:
    for iteration in range(start, stop):
        part.train(iteration)


def undisturbed(case: Case, placed: VirtualWorkers) -> list[str]:
    def body(part: Part) -> None:
        part.build().open(None)
        train(part, 0, ITERATIONS)
        part.exchange.settle()

    workers = [Worker(case) for _ in range(placed.processes)]
    together(workers, body, placed=placed)
    return workers[0].checksums()


def interrupted(case: Case, workers: list[Worker], holder: int) -> Kept:
    """Train on after the state was kept, and end amid an iteration."""
    kept, ready = Kept(), threading.Barrier(len(workers))

    def body(part: Part) -> None:
        exchange = part.build()
        exchange.open(None)
        train(part, 0, KEPT_AT)
        exchange.settle()
        own = {name: part.view(-1).numpy().copy() for name, part in exchange.state.parts().items()}
        if part.worker is workers[holder]:
            kept.values = [t.tensor.detach().clone() for t in part.worker.tensors]
            kept.state = exchange.state.keep({})
        train(part, KEPT_AT, KEPT_AT + 2)
        if part.worker is workers[holder]:
            assert kept.state is not None
            kept.histories = list(kept.state.result().histories.values())
            assert kept.state.poll() is not None
            own |= kept.state.result().held_back
        ready.wait()
        kept.held_back |= own
        exchange.interrupt(Interrupted("a worker is lost"))
        with pytest.raises(Interrupted):
            part.train(KEPT_AT + 2)

    together(workers, body, placed=BEFORE)
    return kept


@pytest.mark.parametrize("name", CASES)
def test_a_job_goes_on_from_what_was_kept(name: str) -> None:
    case, holder = CASES[name], [*CASES].index(name) % 2
    workers = [Worker(case) for _ in range(BEFORE.processes)]
    kept = interrupted(case, workers, holder)
    first = workers.pop(holder)  # another one is lost
    workers = [first, *workers[: AFTER.processes - 1]]
    for worker in workers:
        worker.net.zero_grad()
    for trained, value in zip(first.tensors, kept.values, strict=True):
        trained.tensor.detach().copy_(value)

    def body(part: Part) -> None:
        exchange = part.build()
        if part.worker is first:
            exchange.state.hold_back(kept.held_back)
        exchange.open(kept.histories if part.worker is first else None)
        train(part, KEPT_AT, ITERATIONS)
        exchange.settle()

    together(workers, body, placed=AFTER, shards=3, clock=KEPT_AT)
    assert all(worker.checksums() == first.checksums() for worker in workers)
    assert first.checksums() == undisturbed(case, AFTER)


@pytest.mark.parametrize("kind", [ExchangeKind.SERVER, ExchangeKind.FACTORS])
def test_earlier_memory_is_used_again(kind: ExchangeKind) -> None:
    case = Case(options=options(kind), rule=ADAM)
    large = [trained.name for trained in Worker(case).tensors].index("large.weight")

    def body(part: Part) -> None:
        exchange = part.build()
        exchange.open(None)
        part.train(0)
        exchange.settle()
        first = exchange.state.keep({}).result().histories
        before = [array.copy() for array in first[large]]
        part.train(1)
        exchange.settle()
        second = exchange.state.keep(first).result().histories
        for own, array, earlier in zip(second[large], first[large], before, strict=True):
            assert np.shares_memory(own, array)
            assert not np.array_equal(own, earlier)

    together([Worker(case) for _ in range(2)], body)


def test_only_who_holds_a_copy_receives_it_and_no_more_than_the_histories() -> None:
    case = Case(options=options(ExchangeKind.SERVER), rule=ADAM)
    workers, holders = [Worker(case) for _ in range(3)], 2
    met = threading.Barrier(len(workers))
    received = [0] * len(workers)

    def body(part: Part) -> None:
        rank, exchange = workers.index(part.worker), part.build()
        client = part.client
        exchange.open(None)
        part.train(0)
        exchange.settle()
        met.wait()
        before = client.statistics().other_bytes_in
        if rank < holders:
            exchange.state.keep({}).result()
        met.wait()
        received[rank] = client.statistics().other_bytes_in - before
        met.wait()

    together(workers, body)
    histories = 2 * 4 * sum(t.tensor.numel() for t in workers[0].tensors if not t.statistics)
    assert received[holders:] == [0]
    assert all(histories <= one <= 1.01 * histories for one in received[:holders])


def test_any_worker_of_a_host_keeps_the_state_of_all_its_tensors() -> None:
    case = Case(options=options(ExchangeKind.SERVER))
    workers = [Worker(case) for _ in range(4)]

    def body(part: Part) -> None:
        exchange = part.build()
        exchange.open(None)
        part.train(0)
        exchange.settle()
        kept = exchange.state.keep({})
        part.train(1)
        histories = kept.result().histories
        assert [*histories] == [*range(len(part.worker.tensors))]
        assert any(array.any() for history in histories.values() for array in history)

    together(workers, body, local_workers=2)
