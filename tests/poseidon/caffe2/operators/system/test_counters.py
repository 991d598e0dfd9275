"""Counters, atomic numbers and booleans."""

from __future__ import annotations

from typing import Any

import numpy as np

from poseidon.caffe2 import core, workspace


def call(kind: str, inputs: list[str], outputs: list[str], **arguments: Any) -> Any:
    workspace.RunOperatorOnce(core.CreateOperator(kind, inputs, outputs, **arguments))
    return workspace.FetchBlob(outputs[-1]) if outputs else None


def test_a_counter() -> None:
    workspace.ResetWorkspace()
    call("CreateCounter", [], ["c"], init_count=2)
    assert not call("CheckCounterDone", ["c"], ["done"])
    assert [bool(call("CountDown", ["c"], ["done"])) for _ in range(4)] == [
        False,
        False,
        True,
        True,
    ]
    assert call("CheckCounterDone", ["c"], ["done"])
    call("ResetCounter", ["c"], [], init_count=5)
    assert call("CountUp", ["c"], ["before"]) == 5
    assert call("RetrieveCount", ["c"], ["now"]) == 6
    assert call("ResetCounter", ["c"], ["before"]) == 6


def test_an_atomic_sum_and_a_boolean() -> None:
    workspace.ResetWorkspace()
    workspace.FeedBlob("n", np.array([3], np.int32))
    workspace.FeedBlob("more", np.array([4], np.int32))
    call("CreateMutex", [], ["m"])
    assert call("AtomicFetchAdd", ["m", "n", "more"], ["n", "before"]) == [3]
    assert workspace.FetchBlob("n") == [7]
    call("CreateAtomicBool", [], ["flag"])
    for condition in (False, True, False):
        workspace.FeedBlob("condition", np.array(condition))
        call("ConditionalSetAtomicBool", ["flag", "condition"], [])
        assert call("CheckAtomicBool", ["flag"], ["value"]) == (
            condition or workspace.FetchBlob("value")
        )
    assert workspace.FetchBlob("value")
