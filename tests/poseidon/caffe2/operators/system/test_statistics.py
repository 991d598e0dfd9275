"""Registries of statistics, timers, names and extremes of blobs."""

from __future__ import annotations

import numpy as np
import pytest

from poseidon.caffe2 import workspace
from poseidon.caffe2.operators.system import statistics
from tests.support.caffe2_operators import call


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "COMMON", statistics.Registry())


def exported(*registry: str, reset: int = 1) -> dict[bytes, int]:
    call("StatRegistryExport", list(registry), ["keys", "values", "times"], reset=reset)
    keys, values, times = workspace.FetchBlobs(["keys", "values", "times"])
    assert (times > 0).all()
    return dict(zip(keys.tolist(), values.tolist(), strict=True))


def test_values_of_a_registry_add_up_until_they_are_reset() -> None:
    workspace.FeedBlob("names", np.array([b"a", b"b"], dtype=object))
    workspace.FeedBlob("amounts", np.array([1, 5]))
    call("StatRegistryCreate", [], ["registry"])
    for _ in range(2):
        call("StatRegistryUpdate", ["names", "amounts", "registry"], [])
    assert exported("registry", reset=0) == {b"a": 2, b"b": 10}
    assert exported("registry") == {b"a": 2, b"b": 10}
    assert exported("registry") == {b"a": 0, b"b": 0}
    assert exported() == {}


def test_numbers_go_to_named_statistics() -> None:
    for value in (3.0, 5.5):
        workspace.FeedBlob("x", np.array([value], "f4"))
        call("IncrementPut", ["x"], [], stat_name="more", magnitude_expand=10)
        call("AveragePut", ["x"], [])
        call("StdDevPut", ["x"], [], stat_name="spread", magnitude_expand=2)
    found = exported()
    assert found[b"more/stat_value"] == 85
    assert (found[b"x/stat_value/sum"], found[b"x/stat_value/count"]) == (8, 2)
    assert (found[b"spread/stat_value/count"], found[b"spread/stat_value/sum"]) == (2, 17)
    assert found[b"spread/stat_value/sumoffset"] == 5
    assert found[b"spread/stat_value/sumsqoffset"] == 25


def test_an_empty_input_needs_a_default_and_a_large_one_a_bound() -> None:
    workspace.FeedBlob("x", np.zeros(0, "f4"))
    call("IncrementPut", ["x"], [], default_value=2.0)
    with pytest.raises(RuntimeError, match="no default_value"):
        call("IncrementPut", ["x"], [])
    workspace.FeedBlob("large", np.array([2**62]))
    with pytest.raises(RuntimeError, match="too large for 64 bits"):
        call("IncrementPut", ["large"], [], magnitude_expand=4)
    call("IncrementPut", ["large"], [], magnitude_expand=4, bound=1)
    assert exported() == {b"x/stat_value": 2, b"large/stat_value": 2**63 - 1}


def test_a_timer_counts_and_publishes() -> None:
    call("TimerBegin", [], ["timer"], counter_name="work")
    call("TimerGet", ["timer"], ["first"])
    call("TimerGetAndEnd", ["timer"], ["second"])
    call("TimerEnd", ["timer"], [])
    first, second = workspace.FetchBlobs(["first", "second"])
    assert 0 <= first <= second
    found = exported()
    assert found[b"work/time_ns/count"] == 2
    assert found[b"work/time_ns/sum"] >= second


def test_names_of_blobs() -> None:
    workspace.FeedBlob("b", np.zeros(1))
    workspace.FeedBlob("a", np.zeros(1))
    call("GetAllBlobNames", [], ["names"])
    assert workspace.FetchBlob("names").tolist() == [b"a", b"b", b"names"]


def test_extremes_and_moments() -> None:
    x = np.array([[1, 2], [3, 6]], "f4")
    workspace.FeedBlob("x", x)
    call("Summarize", ["x"], ["y"])
    np.testing.assert_allclose(workspace.FetchBlob("y"), [1, 6, 3, x.std(ddof=1)], rtol=1e-5)
