"""Job control: who may request, and what a request names.

Its deliveries run in the tests of their exchanges, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.job_control import AloneDelivery, JobControl
from ps_server import LocalProtocolError, Signal, SignalKind
from tests.support.exchanges import AloneExchange


def test_only_the_root_requests() -> None:
    delivery = AloneDelivery()
    with pytest.raises(
        LocalProtocolError, match=r"^only worker 0 may request 'stop' of all workers$"
    ):
        JobControl(delivery, root=False).request(SignalKind.STOP)
    assert delivery.requests == ()


def test_a_request_of_a_worker_that_is_alone_names_the_iteration_under_way() -> None:
    delivery = AloneDelivery()
    control = JobControl(delivery, root=True)
    delivery.advance(5)
    control.request(SignalKind.SNAPSHOT)
    assert control.requests == (Signal(SignalKind.SNAPSHOT, 5),)


@pytest.mark.parametrize(("ended", "named"), [(False, 8), (True, 9)])
def test_a_request_after_the_end_of_an_iteration_names_the_next_one(
    ended: bool, named: int
) -> None:
    """The loop looks for requests at the end of each iteration; a test or a snapshot may follow,
    and take long.
    """
    trained = Trained(name="w", tensor=torch.zeros(2))
    exchange = AloneExchange([trained], ExchangeSettings(start_clock=7))
    exchange.open(None)
    exchange.start(7, 1.0)
    if ended:
        exchange.finish()
    exchange.control.request(SignalKind.SNAPSHOT)
    assert exchange.control.requests == (Signal(SignalKind.SNAPSHOT, named),)


def test_each_wait_for_a_collection_is_observed_and_no_poll() -> None:
    waits: list[str] = []

    @contextmanager
    def around() -> Iterator[None]:
        waits.append("begins")
        yield
        waits.append("ends")

    control = JobControl(AloneDelivery(), root=True)
    control.around_wait = around
    collection = control.gather(b"a")
    assert (collection.poll(), waits) == ((b"a",), [])
    assert (collection.result(), waits) == ((b"a",), ["begins", "ends"])
    assert control.root
