"""Local steps whose rounds a quorum ends: workers as threads, and one that is late."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from torch import nn

from poseidon.exchange.base import ExchangeSettings
from poseidon.exchange.build import build_exchange
from poseidon.exchange.exchange import Connect, Exchange
from poseidon.exchange.hooks import Hooks
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeOptions
from ps_server import Client, Rule, RuleKind, SignalKind
from ps_server.network import Network
from tests.poseidon.exchange.rounds.test_local_steps import (
    Case,
    Net,
    batch_of,
    options_of,
    run,
    tensors_of,
    values_of,
)
from tests.support.cluster import TIMEOUT_S, TOKEN, job_addresses
from tests.support.polling import until
from tests.support.threads import on_threads

H, WORKERS, ITERATIONS = 2, 3, 12
QUORUM = options_of(local_steps=H, quorum=2)


@dataclass
class Late:
    """The last worker, which does not end its first iteration before the others have made some.

    Args:
        until: iterations of each of the others; 0: it is not late.
    """

    until: int = 0
    made: list[threading.Event] = field(
        default_factory=lambda: [threading.Event() for _ in range(WORKERS - 1)]
    )

    def hold(self, client: Client) -> None:
        """Wait for the others; the last worker calls it within its first iteration."""
        for made in self.made if self.until else ():
            assert made.wait(TIMEOUT_S)

    def note(self, rank: int, iterations: int) -> None:
        """Note the job's finished iterations on a worker."""
        if rank < len(self.made) and iterations >= self.until:
            self.made[rank].set()


class Awaited(Late):
    """The last worker does not end its first iteration before the others wait for it."""

    def hold(self, client: Client) -> None:
        until(lambda: client.is_awaited, "no round waits for the last worker", TIMEOUT_S)


@dataclass(kw_only=True)
class End:
    """How one worker has ended."""

    values: list[np.ndarray]
    iterations: list[int] = field(default_factory=list)
    requested: list[tuple[int, SignalKind]] = field(default_factory=list)


Act = Callable[[Exchange, int, int], None]
"""What a worker does after an iteration: the exchange, its rank, and the job's iterations."""


def nothing(exchange: Exchange, rank: int, iterations: int) -> None:
    pass


def train(options: ExchangeOptions, late: Late, act: Act = nothing) -> list[End]:
    """Train until the job has made its iterations; return how each worker has ended."""

    def work(rank: int, connect: Connect) -> End:
        member = Membership(
            network=Network(rank=rank, size=WORKERS, token=TOKEN, timeout_s=TIMEOUT_S),
            shards=2,
            options=options,
        )
        net, end = Net(), End(values=[])
        tensors = tensors_of(net, Rule(kind=RuleKind.SGD, momentum=0.9))
        built = build_exchange(tensors, ExchangeSettings(), member, connect)
        exchange = built.exchange
        assert built.client is not None
        hooks = Hooks([net], tensors, exchange)
        try:
            exchange.open(None)
            while (iteration := exchange.finished) < ITERATIONS:
                end.iterations.append(iteration)
                exchange.start(iteration, 0.05)
                hooks.start()
                x, y = batch_of(iteration, rank)
                nn.functional.mse_loss(net(x), y).backward()
                hooks.next_pass()
                hooks.finish()
                if rank == WORKERS - 1 and iteration == 0:
                    late.hold(built.client)
                exchange.finish()
                late.note(rank, exchange.finished)
                end.requested += [
                    (r.clock, r.kind)
                    for r in exchange.control.requests
                    if r.clock == exchange.finished
                ]
                act(exchange, rank, exchange.finished)
            exchange.settle()
            end.values = values_of(net)
            return end
        finally:
            hooks.close()
            exchange.close()

    with job_addresses(options.kind, WORKERS, 2) as connect:
        return on_threads(WORKERS, lambda rank: work(rank, connect.of(rank)))


def assert_equal(ends: list[End]) -> None:
    for end in ends[1:]:
        for a, b in zip(ends[0].values, end.values, strict=True):
            assert np.array_equal(a, b)


def test_others_go_on_without_a_late_worker_which_goes_on_from_their_iterations() -> None:
    ends = train(QUORUM, Late(until=3 * H))
    for end in ends[:2]:
        assert end.iterations[: 3 * H] == list(range(3 * H))
    assert ends[2].iterations[:2] == [0, 1]
    assert min(ends[2].iterations[2:], default=ITERATIONS) >= 3 * H  # the others have made these
    assert_equal(ends)


def test_a_slow_worker_that_is_awaited_ends_its_round_early() -> None:
    """The others wait in their first round, as long as they have to."""
    ends = train(replace(QUORUM, quorum_grace=TIMEOUT_S, local_steps=4), Awaited())
    assert ends[0].iterations[:4] == ends[1].iterations[:4] == [0, 1, 2, 3]
    assert ends[2].iterations[:2] == [0, 4]
    assert_equal(ends)


def test_before_a_collection_all_settle_after_the_same_iteration() -> None:
    """The others wait in it, so a late worker does not leave it out."""
    found: list[dict[int, tuple[bytes, ...]]] = [{} for _ in range(WORKERS)]

    def act(exchange: Exchange, rank: int, iterations: int) -> None:
        if iterations in (5, 8):
            found[rank][iterations] = exchange.control.all_gather(b"%d" % iterations)

    ends = train(QUORUM, Late(until=2 * H), act)
    assert found == [{5: (b"5",) * 3, 8: (b"8",) * 3}] * WORKERS
    assert_equal(ends)


def test_a_request_takes_effect_after_the_same_iteration_on_all() -> None:
    asked: list[int] = []

    def act(exchange: Exchange, rank: int, iterations: int) -> None:
        if rank == 0 and iterations >= 2 * H and not asked:
            asked.append(iterations)
            exchange.control.request(SignalKind.SNAPSHOT)

    ends = train(QUORUM, Late(until=2 * H), act)
    ((clock, kind),) = ends[0].requested
    assert clock > asked[0]
    assert kind is SignalKind.SNAPSHOT
    assert all(end.requested == ends[0].requested for end in ends)
    assert_equal(ends)


def test_histories_are_of_one_round() -> None:
    found: list[list[np.ndarray]] = [[] for _ in range(WORKERS)]

    def act(exchange: Exchange, rank: int, iterations: int) -> None:
        if iterations == 4 * H:
            exchange.settle()
            found[rank] = [
                np.asarray(history[-1]) for history in exchange.state.histories().values()
            ]
            kept = exchange.state.keep({}).result().histories
            exchange.control.all_gather(b"")
            if rank == 0:
                for own, other in zip(found[0], kept.values(), strict=True):
                    assert np.array_equal(own, other[-1])

    assert_equal(train(QUORUM, Late(until=2 * H), act))


def test_records_weigh_the_changes() -> None:

    def noted(counts: tuple[float, ...]) -> list[End]:
        def act(exchange: Exchange, rank: int, iterations: int) -> None:
            exchange.note_records(counts[rank])
            exchange.settle()

        return train(
            options_of(local_steps=50, quorum=2, outer_lr=1.0, outer_momentum=0.0), Late(), act
        )

    equal, weighed, same = noted((1, 1, 1)), noted((1, 1, 1000)), noted((4, 4, 4))
    for a, b in zip(equal[0].values, same[0].values, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    assert not np.allclose(equal[0].values[0], weighed[0].values[0], atol=1e-3)
    assert_equal(weighed)


def test_a_quorum_of_all_has_the_bits_of_none() -> None:
    ends = [run(Case(options=options_of(local_steps=4, quorum=k))) for k in (0, 3)]
    for a, b in zip(ends[0][0].values, ends[1][2].values, strict=True):
        assert np.array_equal(a, b)


def test_one_step_rounds_with_a_quorum_are_not_the_synchronous_exchange() -> None:
    options = options_of(local_steps=1, outer_lr=1.0, outer_momentum=0.0, quorum=2)
    assert_equal(train(options, Late(until=3)))
