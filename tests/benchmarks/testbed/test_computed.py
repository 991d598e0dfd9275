"""The batches of nets that a measurement computes."""

from __future__ import annotations

from hashlib import sha256

from benchmarks.testbed.computed import COMPUTED


def test_the_sequences_of_a_rank_are_always_the_same() -> None:
    x_BT, y_BT = next(COMPUTED["gpt-2m"].batches(rank=1, rows=256))
    assert bytes(x_BT[0, 1:].tolist()) == bytes(y_BT[0, :-1].tolist())
    digest = sha256(bytes(x_BT.flatten().tolist())).hexdigest()
    assert digest[:16] == "9c90a9b452dca9c3"
