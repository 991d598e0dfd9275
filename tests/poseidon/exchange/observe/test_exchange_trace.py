from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from poseidon.exchange.base import Exchange, ExchangeSettings, Trained
from poseidon.exchange.observe.exchange_trace import ExchangeTrace
from poseidon.exchange.observe.observed import ObservedExchange
from poseidon.exchange.single import SingleProcessExchange
from tests.support.exchange_contract import ITERATIONS, Scenario, train
from tests.support.tracing import Recorded, nested


def test_numbers_stay_and_each_tensor_is_seen_in_each_iteration() -> None:
    trace, names = Recorded(), list[str]()

    def plain(rank: int, tensors: Sequence[Trained], settings: ExchangeSettings) -> Exchange:
        return SingleProcessExchange(tensors, settings)

    def traced(rank: int, tensors: Sequence[Trained], settings: ExchangeSettings) -> Exchange:
        names.extend(trained.name for trained in tensors)
        return ObservedExchange(plain(rank, tensors, settings), [ExchangeTrace(names, trace)])

    assert all(
        np.array_equal(a, b)
        for a, b in zip(train(traced, 1, Scenario())[0], train(plain, 1, Scenario())[0], strict=True)
    )
    told = trace.names()
    for name in names:
        assert told.count(("wait", name)) == ITERATIONS
    assert [name for kind, name in told if kind == "iteration"] == [str(i) for i in range(ITERATIONS)]
    assert told.count(("begin", names[0])) == ITERATIONS
    assert nested(trace.spans)
    within = {(inner.kind, inner.name) for inner, outer in trace.inside() if outer.kind == "iteration"}
    assert {("wait", name) for name in names} <= within
