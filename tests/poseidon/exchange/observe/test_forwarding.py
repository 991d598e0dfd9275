from __future__ import annotations

from unittest.mock import create_autospec

import torch

from poseidon.exchange.base import Exchange
from poseidon.exchange.observe.forwarding import ForwardingExchange
from ps_server import SignalKind


def public(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def test_every_call_of_the_contract_is_handed_on() -> None:
    assert public(ForwardingExchange) == public(Exchange)
    inner = create_autospec(Exchange, instance=True)
    exchange = ForwardingExchange(inner)
    gradient = torch.ones(2)
    exchange.open(None)
    exchange.reopen(None, 7)
    exchange.start(3, 0.5)
    exchange.begin(1, gradient)
    exchange.begin_factors(2, gradient, gradient)
    exchange.release(2)
    exchange.wait(4)
    exchange.finish()
    exchange.settle()
    exchange.signal(SignalKind.STOP)
    exchange.close()
    assert exchange.takes_factors(2) is inner.takes_factors.return_value
    assert exchange.histories() is inner.histories.return_value
    assert exchange.gather(b"x") is inner.gather.return_value
    assert exchange.gathered(inner.gather.return_value) is inner.gathered.return_value
    assert exchange.signals is inner.signals
    inner.open.assert_called_once_with(None)
    inner.reopen.assert_called_once_with(None, 7)
    inner.start.assert_called_once_with(3, 0.5)
    inner.begin.assert_called_once_with(1, gradient)
    inner.begin_factors.assert_called_once_with(2, gradient, gradient)
    inner.release.assert_called_once_with(2)
    inner.wait.assert_called_once_with(4)
    inner.signal.assert_called_once_with(SignalKind.STOP)
    for name in ("finish", "settle", "close"):
        getattr(inner, name).assert_called_once_with()
