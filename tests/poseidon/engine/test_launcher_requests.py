"""The launcher's requests, as a worker forwards them."""

from __future__ import annotations

from functools import partial

from poseidon.engine.launcher_requests import Requests
from poseidon.exchange.base import ExchangeSettings
from poseidon.exchange.exchange import Exchange
from ps_server import SignalKind
from tests.support.exchanges import AloneExchange

Asked = list[tuple[int, SignalKind]]


def exchanges(count: int) -> tuple[list[Exchange], Asked]:
    """Return exchanges that note the requests which they get."""
    asked: Asked = []
    made: list[Exchange] = [AloneExchange([], ExchangeSettings()) for _ in range(count)]
    for number, exchange in enumerate(made):
        exchange.control.request = partial(  # type: ignore[method-assign]
            lambda number, kind: asked.append((number, kind)), number
        )
    return made, asked


def forward(requests: Requests, *does: str) -> None:
    for do in (*does, "gone"):
        requests.take({"do": do})
    requests.forward()


def test_a_stop_goes_to_the_first_exchange_that_is_open_and_to_one_that_comes_later() -> None:
    (closed, still_open, later), asked = exchanges(3)
    requests = Requests({})
    closed.close()
    assert requests.add(closed, 0)
    assert not requests.add(still_open, 0)
    forward(requests)
    assert requests.stopping.is_set()
    assert asked == [(1, SignalKind.STOP)]
    still_open.close()
    requests.add(later, 0)
    assert asked[1:] == [(2, SignalKind.STOP)]


def test_other_ranks_note_a_stop_only() -> None:
    (exchange,), asked = exchanges(1)
    requests = Requests({})
    requests.add(exchange, 1)
    forward(requests, "snapshot", "stop")
    assert requests.stopping.is_set()
    assert asked == []


def test_a_request_that_comes_before_the_exchange_of_the_next_start_waits_for_it() -> None:
    (before, after), asked = exchanges(2)
    requests = Requests({})
    requests.add(before, 0)
    before.close()
    requests.begin_start()
    requests.take({"do": "regroup"})
    assert requests.commands.empty()
    assert not requests.add(after, 0)
    forward(requests)
    assert asked == [(1, SignalKind.REGROUP), (1, SignalKind.STOP)]


def test_a_stop_goes_to_all_exchanges_where_a_script_may_leave_the_first_idle() -> None:
    (idle, used, later), asked = exchanges(3)
    requests = Requests({})
    requests.add(idle, 0, stop_all=True)
    requests.add(used, 0, stop_all=True)
    forward(requests, "snapshot", "stop")
    requests.add(later, 0, stop_all=True)
    assert asked[0] == (0, SignalKind.SNAPSHOT)
    assert {number for number, kind in asked if kind is SignalKind.STOP} == {0, 1, 2}
