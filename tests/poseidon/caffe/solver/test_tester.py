"""Which test batches are whose, and passes that are broken off."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import count as counting
from pathlib import Path

import pytest
import torch

from poseidon.caffe.solver import tester
from poseidon.caffe.solver.tester import own_batches
from poseidon.exchange.options import ExchangeKind
from tests.support.training import Job, largest_difference, run, weights, write_definitions
from tests.support.training_processes import make_data


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize(("start", "count"), [(0, 10), (10, 10), (3, 1), (5, 0), (4, 2)])
def test_every_batch_belongs_to_one_worker(workers: int, start: int, count: int) -> None:
    for rank in range(workers):
        mine = [n for n in range(start, start + count) if n % workers == rank]
        assert own_batches(rank, workers, start, count) == len(mine)


@pytest.mark.parametrize(
    "job",
    [
        Job(),
        Job(workers=2, shards=2),
        Job(workers=3, shards=1, staleness=1),
        Job(workers=2, shards=1, kind=ExchangeKind.ALLREDUCE),
    ],
    ids=["alone", "two workers", "stale", "all-reduce"],
)
@pytest.mark.parametrize("asked", [1, 4])
def test_a_request_to_stop_breaks_a_test_off_on_all_workers(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    job: Job,
    asked: int,
) -> None:
    """Within a batch, though a pass has a million; the snapshot has the state before the test."""
    torch.set_num_threads(1)
    monkeypatch.setattr(tester, "ROUND_S", 0.0)  # a new collection at each batch
    caplog.set_level(logging.INFO, "poseidon.test")
    make_data(tmp_path)
    solver = write_definitions(
        tmp_path,
        batch=5,
        extra="max_iter: 20\ntest_iter: 1000000\ntest_interval: 4\ntest_initialization: false",
    )
    calls = counting(1)
    ended = run(solver, replace(job, stop_wanted=lambda: next(calls) >= asked))
    assert set(ended.iterations.values()) == {4}
    assert not ended.sink.tests
    assert "Test interrupted." in caplog.messages
    assert caplog.messages[-1] == "Optimization stopped early."
    assert (tmp_path / "snap_iter_4.solverstate").exists()


def test_a_run_that_was_stopped_in_a_test_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """It makes the whole test, with the records of one that was never broken off."""
    torch.set_num_threads(1)
    make_data(tmp_path)
    solver = write_definitions(
        tmp_path, batch=5, extra="max_iter: 12\ntest_iter: 6\ntest_interval: 4"
    )
    whole = run(solver, Job())
    final = weights(tmp_path, 12)
    calls = counting(1)
    run(solver, Job(stop_wanted=lambda: next(calls) > 10))
    resumed = run(solver, Job(resume=tmp_path / "snap_iter_4.solverstate"))
    assert largest_difference(weights(tmp_path, 12), final) == 0
    assert [r.outputs for r in resumed.sink.tests] == [
        r.outputs for r in whole.sink.tests if r.iteration >= 4
    ]


def test_what_a_test_does_to_statistics_does_not_depend_on_processes(tmp_path: Path) -> None:
    """The test net has a BatchNorm with use_global_stats: false, too."""
    torch.set_num_threads(1)
    make_data(tmp_path)
    extra = "max_iter: 5\ntest_iter: 5\ntest_interval: 2\nsnapshot: 5"
    solver = write_definitions(tmp_path, batch=5, norm=True, extra=extra)
    net = tmp_path / "net.prototxt"
    always = net.read_text().replace("_fraction: 0.9", "_fraction: 0.9 use_global_stats: false")
    net.write_text(always)

    def end(workers: int, kind: ExchangeKind, *bounds: int) -> tuple[bytes, list[object]]:
        ended = run(solver, Job(workers=workers, kind=kind, bounds=bounds))
        model = (tmp_path / "snap_iter_5.caffemodel").read_bytes()
        return model, [(test.iteration, test.outputs) for test in ended.sink.tests]

    one = end(1, ExchangeKind.LOCAL, 0, 3)
    assert end(2, ExchangeKind.ALLREDUCE, 0, 2, 3) == one
    assert end(3, ExchangeKind.ALLREDUCE, 0, 1, 2, 3) == one
    assert len(one[1]) == 4
