from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import create_autospec

import numpy as np
import pytest

from poseidon.exchange.base import Exchange, ExchangeSettings, Trained
from poseidon.exchange.observe.measured import MeasuredExchange
from poseidon.exchange.single import LocalExchange
from tests.support.exchange_contract import ITERATIONS, Scenario, train


def test_waits_add_up_by_tensor() -> None:
    times = iter([10.0, 12.0, 20.0, 21.0, 30.0, 30.5])
    inner = create_autospec(Exchange, instance=True)
    exchange = MeasuredExchange(inner, 3, now=lambda: next(times))
    exchange.wait(1)
    exchange.wait(1)
    exchange.wait(2)
    assert exchange.waited_s == pytest.approx([0, 3, 0.5])
    assert [call.args for call in inner.wait.call_args_list] == [(1,), (1,), (2,)]


def test_numbers_stay_and_iterations_are_counted() -> None:
    made: list[MeasuredExchange] = []

    def plain(rank: int, tensors: Sequence[Trained], settings: ExchangeSettings) -> Exchange:
        return LocalExchange(tensors, settings)

    def measured(rank: int, tensors: Sequence[Trained], settings: ExchangeSettings) -> Exchange:
        made.append(MeasuredExchange(plain(rank, tensors, settings), len(tensors)))
        return made[0]

    weights = [train(make, 1, Scenario())[0] for make in (plain, measured)]
    assert all(np.array_equal(a, b) for a, b in zip(*weights, strict=True))
    assert made[0].iterations == ITERATIONS
