"""Several workers on a machine: one process's weights, whatever joins the machines; failures are
one sentence.
"""

from __future__ import annotations

import struct
import threading
from collections import Counter
from collections.abc import Container, Sequence
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.local import connection, leader
from poseidon.exchange.local.connection import HEAD, Connection, Kind, send_all
from poseidon.exchange.local.follower import FollowerCarrier
from poseidon.exchange.local.leader import LeaderCarrier
from poseidon.exchange.local.reduction import ReductionKind
from ps_server import (
    Collection,
    PeerLost,
    Rule,
    RuleKind,
    ServerError,
    SignalKind,
    StalenessTimeout,
)
from ps_server.transport.base import Frames
from ps_server.transport.memory import MemoryNetwork
from tests.poseidon.exchange.allreduce.test_carrier import allreduce
from tests.poseidon.exchange.test_contract import SCENARIOS, server
from tests.poseidon.exchange.test_statistics import SETTINGS, Counting, body, expected, tensors_of
from tests.support.exchange_contract import Scenario, check_exact, reference, train
from tests.support.exchanges import AloneExchange
from tests.support.machines import machines, run_workers


def alone(rank: int, tensors: Sequence[Trained], settings: ExchangeSettings) -> Exchange:
    return AloneExchange(tensors, settings)


def leader_of(exchange: Exchange) -> LeaderCarrier:
    (carrier,) = exchange.carriers
    assert isinstance(carrier, LeaderCarrier)
    return carrier


def follower_of(exchange: Exchange) -> FollowerCarrier:
    (carrier,) = exchange.carriers
    assert isinstance(carrier, FollowerCarrier)
    return carrier


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())
def test_two_machines_of_two_workers_are_exact(scenario: Scenario) -> None:
    with server(2, 2, rows=3) as inner, machines(inner, 2) as make:
        check_exact(make, 4, scenario)


@pytest.mark.parametrize("reduction", ReductionKind)
@pytest.mark.parametrize("local_workers", [1, 2, 3])
def test_one_machine_without_a_server_is_exact(
    local_workers: int, reduction: ReductionKind
) -> None:
    with machines(alone, local_workers, reduction=reduction) as make:
        check_exact(make, local_workers, Scenario(clip=0.3, passes=2))


@pytest.mark.parametrize("reduction", ReductionKind)
def test_machines_that_reduce_among_each_other_are_exact(reduction: ReductionKind) -> None:
    with allreduce(2) as inner, machines(inner, 2, reduction=reduction) as make:
        check_exact(make, 4, Scenario(rule=Rule(kind=RuleKind.ADAM, momentum=0.9, delta=1e-4)))


def test_two_runs_have_the_same_bits() -> None:
    runs = []
    for _ in range(2):
        with server(2, 2) as inner, machines(inner, 3) as make:
            runs.append(train(make, 6, Scenario(clip=0.3)))
    for a, b in zip(runs[0][0], runs[1][0], strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("staleness", [1, 2])
def test_with_staleness_all_settle_on_one_value_near_the_exact_one(staleness: int) -> None:
    scenario = Scenario(iterations=40, clip=0.5)
    with server(2, 2, staleness=staleness) as inner, machines(inner, 2) as make:
        ends = train(make, 4, scenario)
    for end in ends[1:]:
        for a, b in zip(ends[0], end, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    exact = reference(scenario)
    distance = sum(float(np.abs(a - b).sum()) for a, b in zip(ends[0], exact, strict=True))
    assert distance < 0.3 * sum(float(np.abs(b).sum()) for b in exact)


def two_tensors(rows: int = 2) -> list[Trained]:
    return [
        Trained(
            name=name,
            tensor=nn.Parameter(torch.ones(rows, 3)),
            rule=Rule(momentum=0.5),
            factor_rows=4,
        )
        for name in ("low", "high")
    ]


def step(exchange: Exchange, iteration: int, gradient: float, *, rows: int = 2) -> None:
    exchange.start(iteration, 1.0)
    for index in (0, 1):
        exchange.wait(index)
    for index in (1, 0):
        exchange.begin(index, torch.full((rows, 3), gradient))
    exchange.finish()


@pytest.mark.parametrize("reduction", ReductionKind)
def test_statistics_are_the_mean_over_all_workers(reduction: ReductionKind) -> None:
    ends: dict[int, np.ndarray] = {}
    nets = threading.local()

    def tensors() -> list[Trained]:
        nets.net = Counting()
        return tensors_of(nets.net)

    def run(exchange: Exchange, own: list[Trained], rank: int) -> None:
        body(exchange, nets.net, own, rank, 2)
        ends[rank] = nets.net.seen.numpy().copy()

    with server(2, 2) as inner, machines(inner, 2, reduction=reduction) as make:
        run_workers(make, 4, run, tensors=tensors, settings=SETTINGS)
    assert len(ends) == 4
    for end in ends.values():
        np.testing.assert_allclose(end, expected(4, 2), rtol=1e-6)
        assert np.array_equal(end, ends[0])


def test_a_collection_has_every_workers_payload_by_rank() -> None:
    def run(exchange: Exchange, own: list[Trained], rank: int) -> None:
        exchange.open(None)
        first = exchange.control.gather(b"a" * rank)
        second = exchange.control.gather(b"%d" % rank)
        step(exchange, 0, 1.0)
        assert second.result() == tuple(b"%d" % other for other in range(6))
        assert first.result() == first.poll() == tuple(b"a" * other for other in range(6))

    with server(2, 1) as inner, machines(inner, 3) as make:
        run_workers(make, 6, run, tensors=two_tensors)


@pytest.mark.parametrize(
    ("joined_by", "staleness"), [("server", 0), ("server", 2), ("all-reduce", 0), ("nothing", 0)]
)
def test_all_workers_hear_a_signal_before_the_iteration_that_it_names_is_over(
    joined_by: str, staleness: int
) -> None:
    ranks = range(2 if joined_by == "nothing" else 4)
    done: dict[int, list[tuple[int, SignalKind]]] = {rank: [] for rank in ranks}

    def run(exchange: Exchange, own: list[Trained], rank: int) -> None:
        exchange.open(None)
        for iteration in range(14):
            if rank == 0 and iteration in (1, 4):
                exchange.control.request(SignalKind.SNAPSHOT if iteration == 1 else SignalKind.STOP)
            step(exchange, iteration, 1.0)
            named = [
                signal.kind for signal in exchange.control.requests if signal.clock == iteration + 1
            ]
            done[rank] += [(iteration, kind) for kind in named]
        exchange.settle()

    with ExitStack() as stack:
        inner = alone
        if joined_by != "nothing":
            join = allreduce(2) if joined_by == "all-reduce" else server(2, 2, staleness=staleness)
            inner = stack.enter_context(join)
        make = stack.enter_context(machines(inner, 2))
        run_workers(make, len(ranks), run, tensors=two_tensors)
    assert [kind for _, kind in done[0]] == [SignalKind.SNAPSHOT, SignalKind.STOP]
    assert all(done[rank] == done[0] for rank in ranks)


def test_what_leaves_a_machine_does_not_depend_on_its_number_of_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = Counter[int]()
    send = MemoryNetwork.send
    local_workers = 0

    def counting(network: MemoryNetwork, source: str, target: str, frames: Frames) -> None:
        if source.startswith("worker"):
            sent[local_workers] += sum(memoryview(frame).nbytes for frame in frames)
        send(network, source, target, frames)

    monkeypatch.setattr(MemoryNetwork, "send", counting)

    def run(exchange: Exchange, own: list[Trained], rank: int) -> None:
        exchange.open(None)
        for iteration in range(3):
            step(exchange, iteration, float(rank))
        exchange.settle()

    for local_workers in (1, 2, 3):
        with server(2, 2) as inner, machines(inner, local_workers) as make:
            run_workers(make, 2 * local_workers, run, tensors=two_tensors)
    assert sent[1] == sent[2] == sent[3] > 0


class FactorsOf(AloneExchange):
    """Takes the lower tensor's gradient as factors, and notes them."""

    def __init__(self, tensors: Sequence[Trained], settings: ExchangeSettings) -> None:
        super().__init__(tensors, settings)
        self.by_factors = {0}
        self.noted: list[tuple[str, object]] = []

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        self.noted.append(("factors", torch.cat([u_KN, v_KM], 1).tolist()))
        self.begin(index, u_KN.t() @ v_KM)

    def release(self, index: int) -> None:
        self.noted.append(("release", index))


@pytest.mark.parametrize("reduction", ReductionKind)
def test_factors_of_all_workers_leave_stacked_in_their_order_once_all_are_here(
    reduction: ReductionKind,
) -> None:
    inner: list[FactorsOf] = []

    def alone(rank: int, tensors: Sequence[Trained], settings: ExchangeSettings) -> Exchange:
        inner.append(FactorsOf(tensors, settings))
        return inner[0]

    def run(exchange: Exchange, own: list[Trained], rank: int) -> None:
        exchange.open(None)
        assert exchange.by_factors == {0}
        for iteration, rows in enumerate((1, 2, 0)):
            exchange.start(iteration, 1.0)
            exchange.wait(0)
            exchange.wait(1)
            if rows and (rank or iteration):  # in the first iteration the leader has none
                exchange.begin_factors(
                    0,
                    torch.full((rows, 2), 3.0 * rank),
                    torch.full((rows, 3), 10.0 * rank + iteration),
                )
                exchange.release(0)
            exchange.finish()
        exchange.settle()
        # By hand: mean of u^T v over the workers, momentum 0.5, rate 1.
        first, second = (3 * 10 + 6 * 20) / 3, 2 * (3 * 11 + 6 * 21) / 3
        history = [first, first / 2 + second, first / 4 + second / 2]
        np.testing.assert_allclose(own[0].tensor.detach().numpy(), 1 - sum(history), rtol=1e-5)

    with machines(alone, 3, reduction=reduction) as make:
        run_workers(make, 3, run, tensors=two_tensors)
    kinds = [kind for kind, _ in inner[0].noted]
    assert kinds == ["factors", "release", "factors", "release", "release"]
    assert inner[0].noted[0][1] == [[1, 1, 10, 10, 10], [2, 2, 20, 20, 20]]
    second = [[0, 0, 1, 1, 1]] * 2 + [[1, 1, 11, 11, 11]] * 2 + [[2, 2, 21, 21, 21]] * 2
    assert inner[0].noted[2][1] == second


def test_with_staleness_every_worker_brings_its_machines_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = 3_000  # a payload may have the history of one of the two tensors, not of both
    monkeypatch.setattr(connection, "HEAD", struct.Struct("<BIQH"))
    told: dict[int, list[np.ndarray]] = {}

    def run(exchange: Exchange, own: list[Trained], rank: int) -> None:
        exchange.open(None)
        step(exchange, 0, float(rank), rows=rows)
        exchange.settle()
        told[rank] = [array for history in exchange.state.histories().values() for array in history]

    with server(2, 1, staleness=1) as inner, machines(inner, 2) as make:
        run_workers(make, 4, run, tensors=lambda: two_tensors(rows))
    for rank, history in told.items():
        assert [array.shape for array in history] == [(rows, 3)] * 2
        mean = 0.5 if rank < 2 else 2.5
        assert all(bool((array == mean).all()) for array in history)


def test_a_worker_that_goes_without_a_word_is_one_sentence_for_all_others() -> None:
    reached = threading.Barrier(3)
    said: dict[int, str] = {}

    def run(exchange: Exchange, own: list[Trained], rank: int) -> None:
        exchange.open(None)
        step(exchange, 0, 1.0)
        reached.wait()
        if rank == 1:
            follower_of(exchange)._connection.close()  # as the kernel does when a process is killed
            return
        with pytest.raises(PeerLost) as caught:
            for iteration in range(1, 5):
                step(exchange, iteration, 1.0)
        said[rank] = str(caught.value)

    with machines(alone, 3) as make:
        run_workers(make, 3, run, tensors=two_tensors)
    assert said == dict.fromkeys((0, 2), "worker 1 on this machine has gone")


def test_a_leader_that_goes_is_one_sentence_for_the_others() -> None:
    said: dict[int, str] = {}

    def run(exchange: Exchange, own: list[Trained], rank: int) -> None:
        exchange.open(None)
        if rank == 0:
            return  # leaves
        with pytest.raises(PeerLost) as caught:
            step(exchange, 0, 1.0)
            exchange.wait(0)
        said[rank] = str(caught.value)

    with machines(alone, 3) as make:
        run_workers(make, 3, run, tensors=two_tensors)
    assert said == dict.fromkeys((1, 2), "the leading worker of this machine has left")


def head(kind: int, index: int = 0, length: int = 0) -> bytes:
    return HEAD.pack(kind, index, 0, length)


NONSENSE = {
    "an unknown kind": (head(255), r"on this machine sent a message of unknown kind 255$"),
    "a tensor out of range": (head(Kind.VALUE.value, 99), "IndexError"),
    "signals that are not JSON": (head(Kind.SIGNALS.value, 0, 1) + b"{", "JSONDecodeError"),
    "a reason that is not text": (head(Kind.FAILED.value, 0, 1) + b"\xff", "UnicodeDecodeError"),
}
"""What a leader sends, and what its follower raises."""


@pytest.mark.parametrize(("sent", "raised"), NONSENSE.values(), ids=NONSENSE.keys())
def test_nonsense_from_the_leader_ends_the_followers_waits_at_once(
    sent: bytes, raised: str
) -> None:
    over = threading.Event()

    def run(exchange: Exchange, own: list[Trained], rank: int) -> None:
        exchange.open(None)
        if rank == 0:
            leader_of(exchange)._connections[0]._stream.sendall(sent)
            assert over.wait(60)
            return
        try:
            with pytest.raises(ServerError, match=raised):
                step(exchange, 0, 1.0)
                exchange.wait(0)
        finally:
            over.set()

    with machines(alone, 2) as make:
        run_workers(make, 2, run, tensors=two_tensors)


@pytest.mark.parametrize(
    ("sent", "raised"),
    [
        (head(255), r"^worker 1 on this machine sent a message of unknown kind 255$"),
        (head(Kind.PART.value, 99), r"contributes too often|sent an unexpected PART$"),
    ],
    ids=["an unknown kind", "a tensor out of range"],
)
def test_nonsense_from_a_follower_ends_the_waits_of_all_at_once(sent: bytes, raised: str) -> None:
    def run(exchange: Exchange, own: list[Trained], rank: int) -> None:
        with pytest.raises(ServerError, match=raised):
            exchange.open(None)
            if rank == 1:
                follower_of(exchange)._connection._stream.sendall(sent)
            step(exchange, 0, 1.0)
            exchange.settle()

    with machines(alone, 3) as make:
        run_workers(make, 3, run, tensors=two_tensors)


def test_a_part_that_comes_before_the_first_values_are_taken_is_refused() -> None:
    def run(exchange: Exchange, own: list[Trained], rank: int) -> None:
        if rank == 1:
            follower_of(exchange)._connection._stream.sendall(head(Kind.PART.value, 0))
        with pytest.raises(ServerError, match=r"worker 1 sent an unexpected PART"):
            exchange.open(None)
            step(exchange, 0, 1.0)
            exchange.wait(0)

    with machines(alone, 2) as make:
        run_workers(make, 2, run, tensors=two_tensors)


def test_followers_get_the_first_failure_before_a_second_one_ends_the_leader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sending, second_failed = threading.Event(), threading.Event()

    def slow(connections: Sequence[Connection], kind: Kind, *payload: bytes, **fields: int) -> None:
        if kind is Kind.FAILED:
            sending.set()
            second_failed.wait(0.2)  # too early a return of the second ends this wait
        send_all(connections, kind, *payload, **fields)

    monkeypatch.setattr(leader, "send_all", slow)

    def run(exchange: Exchange, own: list[Trained], rank: int) -> None:
        if rank == 0:
            first = threading.Thread(
                target=leader_of(exchange)._fail, args=(PeerLost("the first"),)
            )
            first.start()
            assert sending.wait(60)
            leader_of(exchange)._fail(PeerLost("the second"))
            second_failed.set()
            assert str(leader_of(exchange)._monitor.failure) == "the first"
            first.join()
        with pytest.raises(PeerLost, match=r"^the first$"):
            exchange.open(None)

    with machines(alone, 2) as make:
        run_workers(make, 2, run, tensors=two_tensors)


def test_an_iteration_that_no_worker_goes_on_with_is_left_without_a_word() -> None:
    def run(exchange: Exchange, own: list[Trained], rank: int) -> None:
        exchange.open(None)
        step(exchange, 0, 1.0)
        exchange.start(1, 1.0)
        exchange.wait(0)
        exchange.close()
        if rank == 0:
            assert leader_of(exchange)._monitor.failure is None

    with machines(alone, 2) as make:
        run_workers(make, 2, run, tensors=two_tensors)


def test_a_worker_that_leaves_before_the_end_is_one_sentence() -> None:
    def run(exchange: Exchange, own: list[Trained], rank: int) -> None:
        exchange.open(None)
        if rank == 1:
            return
        with pytest.raises(PeerLost, match=r"^worker 1 of this machine has left before the end$"):
            step(exchange, 0, 1.0)
            exchange.settle()

    with machines(alone, 2) as make:
        run_workers(make, 2, run, tensors=two_tensors)


def test_a_worker_that_hangs_is_not_waited_for_for_ever() -> None:
    over = threading.Event()

    def run(exchange: Exchange, own: list[Trained], rank: int) -> None:
        exchange.open(None)
        if rank == 1:
            assert over.wait(60)
            return
        leader_of(exchange)._monitor.timeout_s = 0.5  # from now on: all have come
        try:
            step(exchange, 0, 1.0)
            with pytest.raises(
                ServerError, match=r"within 0\.5 s: a worker of this machine hangs$"
            ):
                exchange.settle()
        finally:
            over.set()

    with machines(alone, 2) as make:
        run_workers(make, 2, run, tensors=two_tensors)


def test_what_goes_wrong_within_the_leader_is_told_to_all() -> None:
    class Broken(AloneExchange):
        def finish(self) -> None:
            raise StalenessTimeout("the shard hangs")

    def run(exchange: Exchange, own: list[Trained], rank: int) -> None:
        exchange.open(None)
        step(exchange, 0, 1.0)
        with pytest.raises(ServerError, match=r"^the shard hangs$"):
            exchange.settle()

    with machines(lambda rank, tensors, settings: Broken(tensors, settings), 2) as make:
        run_workers(make, 2, run, tensors=two_tensors)


def test_workers_with_other_tensors_are_refused() -> None:
    def run(exchange: Exchange, own: list[Trained], rank: int) -> None:
        raise AssertionError("not reached")

    ranks = iter((1, 2))
    lock = threading.Lock()

    def different() -> list[Trained]:
        with lock:
            return two_tensors()[: next(ranks)]

    with (
        machines(alone, 2) as make,
        pytest.raises(PeerLost, match=r"^worker 1 of this machine has other"),
    ):
        run_workers(make, 2, run, tensors=different)


class InOrder(AloneExchange):
    """Notes the order in which collections and settlements reach the exchange between hosts."""

    def __init__(self, tensors: Sequence[Trained], settings: ExchangeSettings) -> None:
        super().__init__(tensors, settings)
        self.noted: list[str] = []
        self.settled = threading.Event()
        gather = self.carrier.delivery.gather

        def noting(payload: bytes, to: Container[int] | None) -> Collection:
            self.noted.append("gather")
            return gather(payload, to)

        self.carrier.delivery.gather = noting  # type: ignore[method-assign]

    def settle(self) -> None:
        self.noted.append("settle")
        self.settled.set()


def test_collections_before_a_settlement_reach_the_other_hosts_before_it() -> None:
    """At staleness > 0 settling has a barrier, which is a collection: all hosts must have the
    same order of both.
    """
    inner: list[InOrder] = []

    def alone(rank: int, tensors: Sequence[Trained], settings: ExchangeSettings) -> Exchange:
        inner.append(InOrder(tensors, settings))
        return inner[0]

    def run(exchange: Exchange, own: list[Trained], rank: int) -> None:
        exchange.open(None)
        step(exchange, 0, 1.0)
        if rank == 1:
            # the leader is ahead: it may settle now, if it does not wait
            inner[0].settled.wait(1.0)
        collection = exchange.control.gather(b"%d" % rank)
        exchange.settle()
        assert collection.result() == (b"0", b"1")

    with machines(alone, 2) as make:
        run_workers(make, 2, run, tensors=two_tensors)
    assert inner[0].noted == ["gather", "settle"]
