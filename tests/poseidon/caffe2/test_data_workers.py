"""Threads that fetch batches: cutting, order of rows, errors, ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from poseidon.caffe2 import core, data_workers, workspace


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    assert data_workers.global_coordinator.stop()


def rows(number: int, batch_size: int) -> list[np.ndarray]:
    count = 1 + np.random.RandomState(number).randint(5)
    values = np.arange(count, dtype=np.float32)
    return [np.stack([values, 2 * values], 1), values]


def test_rows_of_any_number_become_batches() -> None:
    net = core.Net("batches")
    before = data_workers.global_coordinator._fetcher_id_seq
    coordinator = data_workers.init_data_input_workers(net, ["x", "y"], rows, 8, 2, "source")
    assert data_workers.global_coordinator._fetcher_id_seq == before + 2
    coordinator.start()
    workspace.CreateNet(net)
    for _ in range(50):
        workspace.RunNet(net)
        x, y = workspace.FetchBlobs(["x", "y"])
        assert x.shape == (8, 2)
        np.testing.assert_array_equal(x, np.stack([y, 2 * y], 1))
    assert coordinator.stop_coordinator("source")
    assert coordinator._coordinators == []


def test_another_dimension_has_the_rows() -> None:
    net = core.Net("columns")
    fetched = [np.zeros(shape, np.float32) for shape in [(3, 4, 2), (3, 4), (4,)]]
    coordinator = data_workers.init_data_input_workers(
        net, ["a", "b", "c"], lambda *_: fetched, 6, 1, batch_columns=[1, 1, 0]
    )
    coordinator.start()
    workspace.RunNetOnce(net)
    shapes = [value.shape for value in workspace.FetchBlobs(["a", "b", "c"])]
    assert shapes == [(3, 6, 2), (3, 6), (6,)]


def test_a_full_queue_does_not_hinder_the_end() -> None:
    filled = threading.Event()

    def fetch(number: int, batch_size: int) -> list[np.ndarray]:
        if coordinator._coordinators[0]._state._inputs == 2:
            filled.set()  # the next batch finds no place
        return [np.zeros(2, np.float32)]

    coordinator = data_workers.init_data_input_workers(
        core.Net("full"), ["x"], fetch, 2, 1, max_buffered_batches=2, dont_rebatch=True
    )
    coordinator.start()
    assert filled.wait(20)
    assert coordinator.stop()


@pytest.mark.parametrize(
    ("rows", "words"),
    [((2, 3), "rows: expected one number"), ((2,), "gave 1 arrays: expected 2, for x, y")],
)
def test_the_error_of_a_fetcher_ends_the_net(rows: tuple[int, ...], words: str) -> None:
    net = core.Net("fails")

    def fetch(number: int, batch_size: int) -> list[np.ndarray]:
        return [np.zeros(count) for count in rows]

    coordinator = data_workers.init_data_input_workers(net, ["x", "y"], fetch, 2, 1)
    coordinator.start()
    with pytest.raises(RuntimeError, match="queue is closed"):
        workspace.RunNetOnce(net)
    assert words in str(coordinator._coordinators[0]._state.error)
