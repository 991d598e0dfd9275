"""An exchange is interrupted: all waits end, nothing is left of it, and the next one begins as if it
were the first.
"""

from __future__ import annotations

import os
import threading

import pytest

from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from ps_server import Interrupted, PeerLost
from tests.support.elastic import ADAM, Case, Part, Worker, together
from tests.support.sampling import sample

CASES: dict[str, tuple[Case, int, int]] = {
    "alone": (Case(options=ExchangeOptions(kind=ExchangeKind.LOCAL)), 1, 1),
    "ps": (Case(options=ExchangeOptions(kind=ExchangeKind.SERVER), clip=0.1), 3, 1),
    "ps, stale": (Case(options=ExchangeOptions(kind=ExchangeKind.SERVER, staleness=1)), 2, 1),
    "ps, int8": (Case(options=ExchangeOptions(kind=ExchangeKind.SERVER, compress="int8")), 2, 1),
    "svb": (Case(options=ExchangeOptions(kind=ExchangeKind.FACTORS), clip=0.1), 3, 1),
    "svb, stale": (Case(options=ExchangeOptions(kind=ExchangeKind.FACTORS, staleness=1)), 2, 1),
    "hybrid": (Case(options=ExchangeOptions(kind=ExchangeKind.HYBRID), rows=1, rule=ADAM), 2, 1),
    "allreduce": (Case(options=ExchangeOptions(kind=ExchangeKind.ALLREDUCE), rule=ADAM), 3, 1),
    "a host": (Case(options=ExchangeOptions(kind=ExchangeKind.LOCAL)), 2, 2),
    "hosts, svb": (Case(options=ExchangeOptions(kind=ExchangeKind.FACTORS)), 4, 2),
    "rounds": (
        Case(options=ExchangeOptions(kind=ExchangeKind.SERVER, local_steps=2, outer_lr=0.5)),
        2,
        1,
    ),
    "streams": (
        Case(
            options=ExchangeOptions(
                kind=ExchangeKind.SERVER, local_steps=4, sync_fragments=2, sync_delay=1
            )
        ),
        2,
        1,
    ),
}
STAGES = [
    (name, stage)
    for name, (case, _, _) in CASES.items()
    for stage in ("build", "open", "train")
    if stage != "build" or case.kind is not ExchangeKind.ALLREDUCE  # which waits for addresses
]


def _trained(name: str, workers: list[Worker], iterations: int) -> list[str]:
    _, _, local = CASES[name]

    def body(part: Part) -> None:
        part.build().open(None)
        for iteration in range(iterations):
            part.train(iteration)
        part.exchange.settle()

    together(workers, body, local_workers=local)
    return workers[0].checksums()


@pytest.mark.parametrize(("name", "stage"), sample(STAGES, every=2))
def test_all_waits_end_and_the_next_exchange_begins_anew(name: str, stage: str) -> None:
    """The last worker makes no step at this stage, so the others wait for it."""
    case, count, local = CASES[name]
    expected = _trained(name, [Worker(case) for _ in range(count)], 3)
    workers = [Worker(case) for _ in range(count)]
    errors = [Interrupted(f"worker {rank}") for rank in range(count)]
    parts: dict[int, Part] = {}
    ready, interrupted = threading.Barrier(count), threading.Event()

    def body(part: Part) -> None:
        rank = workers.index(part.worker)
        parts[rank] = part
        ready.wait()
        last = rank == count - 1
        try:
            steps(part, last=last)
        except PeerLost:  # another worker of its host was interrupted before
            interrupted.wait()
        except Interrupted:
            pass
        with pytest.raises(Interrupted) as raised:
            part.build() if part.built is None else part.train(8)
        assert raised.value is errors[rank]

    def steps(part: Part, *, last: bool) -> None:
        if not last or stage != "build":
            part.build()
        if not last or stage == "train":
            part.exchange.open(None)
            part.train(0)
        if last:
            for each, error in enumerate(errors):
                parts[each].interruption.interrupt(error)
                parts[each].interruption.interrupt(Interrupted("late"))
            interrupted.set()
        if part.built is None:
            part.build()
        for iteration in range(1, 9):
            part.train(iteration)

    together(workers, body, local_workers=local)
    for part in parts.values():
        if part.built is not None:
            part.exchange.interrupt(Interrupted("after the end"))
    for worker in workers:
        worker.net.load_state_dict(Worker(case).net.state_dict())
        worker.net.zero_grad()
    found = _trained(name, workers, 3)
    assert found == expected or case.options.staleness, "only stale runs differ in their bits"


@pytest.mark.parametrize("absent", [0, 1])
def test_a_worker_ends_its_wait_for_those_of_its_host(absent: int) -> None:
    case, _, local = CASES["a host"]
    workers, error = [Worker(case) for _ in range(2)], Interrupted("no more")
    parts: dict[int, Part] = {}
    ready = threading.Barrier(2)

    def body(part: Part) -> None:
        rank = workers.index(part.worker)
        parts[rank] = part
        ready.wait()
        if rank == absent:
            parts[1 - rank].interruption.interrupt(error)
            return
        with pytest.raises(Interrupted) as raised:
            part.build()
        assert raised.value is error

    together(workers, body, local_workers=local)


def test_a_measurement_of_the_schemes_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poseidon.exchange.build.is_worth_measuring", lambda tensors: True)
    case = Case(options=ExchangeOptions(kind=ExchangeKind.AUTO))
    workers, error = [Worker(case) for _ in range(2)], Interrupted("no more")
    parts: dict[int, Part] = {}
    ready = threading.Barrier(2)

    def body(part: Part) -> None:
        parts[workers.index(part.worker)] = part
        ready.wait()
        if part is parts[1]:
            parts[0].interruption.interrupt(error)
            return
        with pytest.raises(Interrupted) as raised:
            part.build()
        assert raised.value is error

    together(workers, body)


@pytest.mark.parametrize("name", ["hybrid", "hosts, svb"])
def test_what_is_interrupted_leaves_no_thread_and_no_descriptor(name: str) -> None:
    case, count, local = CASES[name]
    workers = [Worker(case) for _ in range(count)]
    opened = threading.Barrier(count)

    def body(part: Part) -> None:
        part.build().open(None)
        opened.wait()
        part.exchange.interrupt(Interrupted("once more"))

    left = []
    for _ in range(6):
        together(workers, body, local_workers=local)
        left.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
    (threads, descriptors), after = left[1], left[-1]
    assert after[0] <= threads
    assert after[1] <= descriptors
