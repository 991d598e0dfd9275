"""Waiting for siblings, and failing together."""

from __future__ import annotations

import threading

import pytest

from poseidon.exchange.local.siblings import Siblings
from ps_server import LocalProtocolError, PeerLost, StalenessTimeout


def test_a_wait_ends_when_there_is_something() -> None:
    siblings = Siblings(20.0)
    found: list[str] = []

    def bring() -> None:
        with siblings.changed:
            found.append("value")
            siblings.changed.notify_all()

    thread = threading.Thread(target=bring)
    thread.start()
    assert siblings.until(lambda: found[0] if found else None, "nothing came") == "value"
    thread.join()


def test_a_wait_that_lasts_too_long_is_one_sentence() -> None:
    with pytest.raises(StalenessTimeout, match=r"^it did not come within 0\.01 s: a worker of this machine"):
        Siblings(0.01).until(lambda: None, "it did not come")


def test_the_first_failure_is_what_every_wait_hears_unless_there_is_something() -> None:
    siblings = Siblings(20.0)
    siblings.fail(PeerLost("first"))
    siblings.fail(PeerLost("second"))
    with pytest.raises(PeerLost, match=r"^first$"):
        siblings.until(lambda: None, "")
    assert siblings.until(lambda: 3, "") == 3


def test_a_closed_exchange_waits_for_nothing() -> None:
    siblings = Siblings(20.0)
    siblings.check()
    siblings.close()
    with pytest.raises(LocalProtocolError, match="closed"):
        siblings.until(lambda: None, "")
