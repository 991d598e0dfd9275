"""A solver in a job of `poseidon run`: its exchange, its memory snapshots, and requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import poseidon.pycaffe as caffe
from poseidon.engine.memory import Regrouped, ScriptMemory
from poseidon.engine.this_process import running_in
from poseidon.engine.worker_context import WorkerContext
from poseidon.errors import UsageError
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeOptions
from poseidon.pycaffe.solver import Solver
from ps_server import SignalKind
from ps_server.protocol.virtual_workers import VirtualWorkers
from tests.support.module_groups import RecordingJob

NET = """
layer { name: "x" type: "DummyData" top: "x" top: "l" dummy_data_param {
  data_filler { type: "gaussian" } data_filler { type: "constant" value: 2 }
  shape { dim: 4 dim: 5 } shape { dim: 4 } } }
layer { name: "ip1" type: "InnerProduct" bottom: "x" top: "h"
  inner_product_param { num_output: 6 weight_filler { type: "xavier" } } }
layer { name: "norm" type: "BatchNorm" bottom: "h" top: "h" }
layer { name: "drop" type: "Dropout" bottom: "h" top: "h" }
layer { name: "ip" type: "InnerProduct" bottom: "h" top: "y"
  inner_product_param { num_output: 4 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "y" bottom: "l" top: "loss" }
"""
SOLVER = """
net: "net.prototxt" base_lr: 0.1 lr_policy: "fixed" max_iter: 8 type: "Adam" random_seed: 5
test_iter: 2 test_interval: 3 test_initialization: false snapshot_prefix: "snap"
"""


@pytest.fixture(autouse=True)
def _in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.prototxt").write_text(NET)
    Path("solver.prototxt").write_text(SOLVER)


class Job:
    """A job of one worker with three virtual ones, and the exchange that it has opened last."""

    def __init__(self) -> None:
        self._told = RecordingJob()
        self.memory = ScriptMemory(holds=True, rewind=-1, every=3, newest=None)

    @property
    def exchange(self) -> Exchange:
        return self._told.exchanges[-1]

    @contextmanager
    def start(self, **options: int) -> Iterator[tuple[Solver, caffe.Gloo]]:
        """Run the first lines of a script."""
        context = WorkerContext(
            folder=Path(),
            memory=self.memory,
            member=Membership(
                virtual_workers=VirtualWorkers((0, 3)), options=ExchangeOptions(**options)
            ),
            job=self._told,
        )
        with running_in(context):
            solver = caffe.get_solver("solver.prototxt")
            group = caffe.Gloo(solver)
            group.bcast()
            solver.add_callback(group)
            yield solver, group
            for reducer in context.reducers:
                reducer.close()

    def lose_others(self) -> None:
        """Let the next start continue from the newest memory snapshot."""
        newest = self.memory.newest
        assert newest is not None
        self.memory = ScriptMemory(holds=True, rewind=newest.iteration, every=3, newest=newest)


def weights(solver: Solver) -> list[np.ndarray]:
    return [blob.data.copy() for blobs in solver.net.params.values() for blob in blobs]


def alone() -> tuple[list[np.ndarray], float]:
    """The weights, and the loss of the last test, of a process that no job has."""
    caffe.set_virtual_workers(3)
    solver = caffe.get_solver("solver.prototxt")
    solver.solve()
    return weights(solver), float(solver.test_nets[0].blobs["loss"].data)


def test_a_loop_that_asks_for_the_iteration_goes_on_from_memory() -> None:
    """Adam, dropout, statistics, random data of the train and test nets: all have the bits of one
    process without a job.
    """
    job = Job()
    with job.start() as (solver, _):
        assert len(solver.nets) == caffe.solver_count() + 2 == 3
        solver.step(6)
    assert job.memory.newest is not None
    assert job.memory.newest.iteration == 4
    job.lose_others()
    with job.start() as (solver, _):
        assert solver.iter == 4
        solver.restore("an_older.solverstate")  # the state of the job is newer
        while solver.iter < 7:
            solver.step(2)
        solver.solve()
        found, loss = weights(solver), float(solver.test_nets[0].blobs["loss"].data)
    expected, expected_loss = alone()
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert loss == expected_loss


def test_a_job_regroups_between_two_iterations() -> None:
    job = Job()
    with job.start() as (solver, _):
        solver.step(2)
        job.exchange.control.request(SignalKind.REGROUP)
        with pytest.raises(Regrouped):
            solver.step(5)
        assert job.memory.newest is not None
        assert job.memory.newest.iteration == solver.iter == 3


def test_a_job_that_is_asked_to_stop_ends_with_a_snapshot() -> None:
    job = Job()
    with job.start() as (solver, _):
        job.exchange.control.request(SignalKind.SNAPSHOT)
        solver.step(2)
        assert [path.name for path in sorted(Path().glob("*.caffemodel"))] == [
            "snap_iter_1.caffemodel"
        ]
        job.exchange.control.request(SignalKind.STOP)
        with pytest.raises(KeyboardInterrupt, match="asked to stop after iteration 3"):
            solver.solve()
        assert Path("snap_iter_3.solverstate").exists()


def test_a_restored_solver_counts_on() -> None:
    job = Job()
    with job.start() as (solver, group):
        solver.step(2)
        solver.snapshot()
    with job.start() as (solver, group):
        solver.restore("snap_iter_2.solverstate")
        group.bcast()
        solver.step(3)
    assert job.memory.newest is not None
    assert job.memory.newest.iteration == 4


def test_a_second_solver_is_no_part_of_the_state() -> None:
    job = Job()
    with job.start() as (solver, _):
        other = caffe.get_solver("solver.prototxt")
        other.add_callback(caffe.Gloo(other))
        for _ in range(3):
            solver.step(1)
            other.step(1)
    assert job.memory.newest is None


def test_settings_that_a_job_has_are_refused() -> None:
    caffe.set_virtual_workers(4)
    with (
        pytest.raises(
            UsageError, match=r"has 1 solver and 4 virtual workers, and its job has 1 and 3"
        ),
        Job().start(),
    ):
        pass


def test_options_that_a_solver_cannot_have_are_refused() -> None:
    with pytest.raises(UsageError, match="needs --staleness=0 and no"), Job().start(staleness=1):
        pass


def test_a_rank_that_the_job_does_not_have_is_refused() -> None:
    caffe.set_solver_count(2)
    with running_in(WorkerContext(folder=Path())):
        solver = caffe.get_solver("solver.prototxt")
        with pytest.raises(UsageError, match="number 0 of 2, but its worker is number 0 of 1;"):
            caffe.Gloo(solver)


def test_a_script_of_no_job_needs_an_address() -> None:
    with pytest.raises(UsageError, match=r"is for scripts of `poseidon run`; write caffe\.Gloo"):
        caffe.Gloo(caffe.get_solver("solver.prototxt"))
