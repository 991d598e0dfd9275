"""Losses and weights that are not finite."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from poseidon.caffe.net.net import Net
from poseidon.caffe.solver import loss_scale
from poseidon.caffe.solver.loss_scale import LossCheck, not_finite
from poseidon.engine.snapshot_files import SnapshotSettings
from poseidon.errors import JobError
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.ruled import LocalHistories
from tests.support.training import Job, run, write_definitions
from tests.support.training_processes import make_data


@pytest.fixture(autouse=True)
def data(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    make_data(tmp_path)


def states(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.solverstate"))


def spoiling(name: str, *, after: int) -> Callable[[int, Exchange], None]:
    """Makes a number of a tensor infinite after an iteration."""

    def spoil(iteration: int, exchange: Exchange) -> None:
        if iteration == after:
            state = exchange.carriers[0].state
            assert isinstance(state, LocalHistories)
            own = next(one.trained for one in state.of.values() if one.trained.name == name)
            own.tensor.data[0, 0] = float("inf")

    return spoil


@pytest.mark.parametrize("job", [Job(), Job(workers=2, shards=1)], ids=["alone", "two workers"])
def test_a_rate_that_blows_up_ends_training_and_leaves_the_good_snapshot(
    tmp_path: Path, job: Job
) -> None:
    """The rate is 1e37 from iteration 4 on: the products with the weights after it are too
    large, and the loss is nan.
    """
    extra = "lr_policy: 'multistep'\ngamma: 1e38\nstepvalue: 4\nsnapshot: 2\nmax_iter: 20\ntest_interval: 0\ntest_iter: 0"
    solver = write_definitions(tmp_path, batch=5, extra=extra)
    text = (
        solver.read_text(encoding="utf-8")
        .replace("test_interval: 0", "")
        .replace("test_iter: 0", "")
    )
    solver.write_text(text, encoding="utf-8")
    with pytest.raises(JobError) as caught:
        run(solver, job)
    words = str(caught.value)
    assert "worker " in words
    assert "the loss of iteration 5 is nan; " in words
    assert "the first output that is not finite is 'ip' of layer 'ip'; a lower base_lr" in words
    assert states(tmp_path) == ["snap_iter_2.solverstate", "snap_iter_4.solverstate"]


@pytest.mark.parametrize("stop", [True, False])
def test_weights_that_are_not_finite_never_replace_a_snapshot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stop: bool
) -> None:
    """The last update is found where it would be saved; no older snapshot is removed for one
    that is not written.
    """
    solver = write_definitions(tmp_path, batch=5, extra="snapshot: 3\nmax_iter: 6")
    caplog.set_level(logging.WARNING)
    job = Job(saving=SnapshotSettings(keep=1, stop_at_nan=stop), at=spoiling("conv.0", after=6))
    if stop:
        with pytest.raises(JobError, match=r"^worker 0: after iteration 6 layer 'conv' holds"):
            run(solver, job)
    else:
        run(solver, job)
        assert "no snapshot is written, and earlier ones stay" in caplog.text
    assert states(tmp_path) == ["snap_iter_3.solverstate"]


def test_going_on_regardless_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    extra = "base_lr: 1e20\nsnapshot: 2\nmax_iter: 6"
    ended = run(
        write_definitions(tmp_path, batch=5, extra=extra),
        Job(saving=SnapshotSettings(stop_at_nan=False)),
    )
    assert ended.iterations == {0: 6}
    messages = [record.getMessage() for record in caplog.records]
    assert sum("training continues (--on_nan=warn)" in text for text in messages) == 1
    assert states(tmp_path) == []


def test_the_layer_is_that_of_the_first_output(tmp_path: Path) -> None:
    """Of the weights of one layer, spoilt beside the training, its own blob is named, whatever
    comes after it.
    """
    solver = write_definitions(tmp_path, batch=5, extra="max_iter: 6", norm=True, dropout=True)
    with pytest.raises(JobError, match=r"iteration 2 is nan; .* is 'ip' of layer 'ip'"):
        run(solver, Job(at=spoiling("ip.0", after=2)))


def test_large_numbers_are_finite() -> None:
    largest = np.full(8, 3e38, np.float32)
    assert (
        not_finite([("a", [largest, np.zeros((0,), np.float32)]), ("b", [largest.reshape(2, 4)])])
        == ""
    )
    for wrong in (np.nan, np.inf, -np.inf):
        spoilt = largest.copy()
        spoilt[3] = wrong
        assert not_finite([("a", [largest]), ("b", [largest, spoilt])]) == "b"


def test_deferred_losses_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; the error has the iteration of the first one that is not finite."""
    monkeypatch.setattr(loss_scale, "CHECK_S", float("inf"))
    monkeypatch.setattr(Net, "__init__", nn.Module.__init__)
    monkeypatch.setattr(Net, "first_not_finite", lambda self: "it is")
    watch = LossCheck(Net(), name="worker 2", stop=True, deferred=True)  # type: ignore[call-arg]
    for iteration, value in enumerate((1.0, float("inf"), float("nan"))):
        watch.add(iteration, torch.tensor(value))
    with pytest.raises(JobError, match=r"^worker 2: the loss of iteration 1 is inf"):
        watch.check()
    watch.check()
    monkeypatch.setattr(loss_scale, "CHECK_S", 0.0)
    watch = LossCheck(Net(), name="worker 0", stop=True, deferred=True)  # type: ignore[call-arg]
    watch.add(0, torch.tensor(1.0))
    with pytest.raises(JobError, match="iteration 1 is nan"):
        watch.add(1, torch.tensor(float("nan")))
