"""Every carrier, and every carrier around another exchange, keeps the contract of an exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest

from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from poseidon.exchange.rounds.local_steps import RoundsCarrier, anchors_of, outer_rule
from ps_server import Network, Rule, RuleKind
from tests.poseidon.exchange.allreduce.test_carrier import allreduce
from tests.poseidon.exchange.server.test_placed import pooled
from tests.poseidon.exchange.test_exchange_contract import server
from tests.poseidon.exchange.test_server_exchange import THREE_SCHEMES, hybrid
from tests.support.exchange_contract import Make, Scenario, check_calls, check_exact, check_reopen
from tests.support.exchanges import AloneExchange
from tests.support.machines import machines

ONE_STEP = ExchangeOptions(local_steps=1, outer_lr=1.0, outer_momentum=0.0)
"""Rounds with the weights of synchronous training, by a rule that is linear in the gradients."""
ADAM = Scenario(rule=Rule(kind=RuleKind.ADAM, momentum=0.9, delta=1e-4), clip=0.2)


@contextmanager
def rounds(outer: AbstractContextManager[Make]) -> Iterator[Make]:
    """Rounds of one local step, whose anchors one of these exchanges joins."""
    with outer as inner:

        def make(rank: int, tensors: Sequence[Trained], settings: ExchangeSettings) -> Exchange:
            anchors = anchors_of(tensors, outer_rule(ONE_STEP))
            between = inner(rank, anchors, ExchangeSettings(start_clock=settings.start_clock))
            member = Membership(network=Network(rank=rank, size=rank + 1), options=ONE_STEP)
            carrier = RoundsCarrier(between, tensors, anchors, settings, member)
            return Exchange([carrier], carrier.control, settings)

        yield make


def alone() -> AbstractContextManager[Make]:
    return nullcontext(lambda rank, tensors, settings: AloneExchange(tensors, settings))


EXCHANGES: dict[str, tuple[Callable[[], AbstractContextManager[Make]], int, Scenario]] = {
    "alone": (alone, 1, ADAM),
    "server": (lambda: server(3, 2, rows=3), 3, ADAM),
    "pools": (lambda: pooled(2, 2), 2, ADAM),
    "factors": (lambda: hybrid(3, 2), 3, ADAM),
    "server, factors and all-reduce": (lambda: hybrid(3, 2, **THREE_SCHEMES), 3, ADAM),
    "all-reduce": (lambda: allreduce(3), 3, ADAM),
    "two hosts through the server": (lambda: machines(ExchangeKind.SERVER, (2, 2)), 4, ADAM),
    "two unequal hosts": (lambda: machines(ExchangeKind.SERVER, (2, 1)), 3, ADAM),
    "two hosts by factors": (lambda: machines(ExchangeKind.FACTORS, (2, 2)), 4, ADAM),
    "two hosts by all-reduce": (lambda: machines(ExchangeKind.ALLREDUCE, (2, 2)), 4, ADAM),
    "two unequal hosts by all-reduce": (lambda: machines(ExchangeKind.ALLREDUCE, (1, 3)), 4, ADAM),
    "one host": (lambda: machines(ExchangeKind.SERVER, (3,), shards=0), 3, ADAM),
    "one host with shards": (lambda: machines(ExchangeKind.SERVER, (3,)), 3, ADAM),
    "rounds through the server": (lambda: rounds(server(2, 2)), 2, Scenario()),
    "rounds by all-reduce": (lambda: rounds(allreduce(2)), 2, Scenario()),
    "rounds on two hosts": (lambda: rounds(machines(ExchangeKind.SERVER, (2, 2))), 4, Scenario()),
}


@pytest.mark.parametrize(
    ("opened", "workers", "scenario"), EXCHANGES.values(), ids=EXCHANGES.keys()
)
class TestContract:
    """The scenarios of the contract."""

    def test_it_is_exact(
        self, opened: Callable[[], AbstractContextManager[Make]], workers: int, scenario: Scenario
    ) -> None:
        with opened() as make:
            check_exact(make, workers, scenario)

    def test_it_is_opened_once_more(
        self, opened: Callable[[], AbstractContextManager[Make]], workers: int, scenario: Scenario
    ) -> None:
        check_reopen(opened, workers, scenario)

    def test_its_calls(
        self, opened: Callable[[], AbstractContextManager[Make]], workers: int, scenario: Scenario
    ) -> None:
        with opened() as make:
            check_calls(make, workers)
