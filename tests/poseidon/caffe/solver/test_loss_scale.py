"""Jobs in 16 bits: the same weights whatever the number of processes, and scaled losses that all
workers agree on.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from poseidon.caffe.proto.caffe_pb2 import SolverState
from poseidon.caffe.solver import loss_scale
from poseidon.errors import JobError
from poseidon.exchange.compute_options import Arithmetic, ComputeOptions
from poseidon.exchange.options import ExchangeKind
from tests.support.training import Job, largest_difference, run, weights, write_definitions

BFLOAT16 = ComputeOptions(precision=Arithmetic.BFLOAT16)
FLOAT16 = ComputeOptions(precision=Arithmetic.FLOAT16)
EXTRA = "max_iter: 12\nsnapshot: 6\nclip_gradients: 0.5\niter_size: 2"
PLACES = [
    Job(workers=1, bounds=(0, 3), kind=ExchangeKind.LOCAL),
    Job(workers=2, bounds=(0, 2, 3), shards=1, kind=ExchangeKind.SERVER),
    Job(workers=3, bounds=(0, 1, 2, 3), shards=2, kind=ExchangeKind.HYBRID),
    Job(workers=3, bounds=(0, 1, 2, 3), kind=ExchangeKind.ALLREDUCE),
]


@pytest.fixture
def folder(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # so that it doubles, and a gradient overflows, within a few iterations
    monkeypatch.setattr(loss_scale, "GROWS_AFTER", 2)
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**19)
    return data_folder


def end(folder: Path, job: Job, extra: str = EXTRA) -> tuple[bytes, SolverState]:
    """Run a job; its model and its state."""
    run(write_definitions(folder, batch=4, extra=extra, dropout=True, norm=True), job)
    state = (folder / "snap_iter_12.solverstate").read_bytes()
    return (folder / "snap_iter_12.caffemodel").read_bytes(), SolverState.FromString(state)


@pytest.mark.parametrize("compute", [BFLOAT16, FLOAT16])
def test_weights_do_not_depend_on_the_processes(folder: Path, compute: ComputeOptions) -> None:
    """With statistics, dropout, a limit, and in float16 with iterations that are repeated."""
    models = [end(folder, replace(job, compute=compute))[0] for job in PLACES]
    assert [model == models[0] for model in models] == [True] * len(PLACES)


@pytest.mark.parametrize("job", [PLACES[0], PLACES[2]])
def test_a_resumed_run_has_the_bits_of_the_whole_one(folder: Path, job: Job) -> None:
    job = replace(job, compute=FLOAT16)
    whole = end(folder, job)
    (folder / "snap_iter_12.caffemodel").unlink()
    assert end(folder, replace(job, resume=folder / "snap_iter_6.solverstate")) == whole


def test_an_iteration_with_a_large_gradient_is_repeated(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It begins with a scale that no gradient of this net fits with."""
    caplog.set_level(logging.INFO)
    job = replace(PLACES[2], compute=FLOAT16)
    _, state = end(folder, job)
    assert "iteration 0 is repeated with the next batch" in caplog.text
    assert state.poseidon.loss_scale < 2.0**19
    batches = [reader.batches for worker in state.poseidon.worker for reader in worker.reader]
    assert min(batches) == max(batches) > 2 * 12, "all workers have dropped as many batches"


def test_scaled_losses_train_as_float32(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an overflow: the same batches."""
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**4)
    monkeypatch.setattr(loss_scale, "GROWS_AFTER", 1000)
    run(write_definitions(folder, batch=4, extra="max_iter: 12", smooth=True), Job())
    exact = weights(folder, 12)
    for compute in (BFLOAT16, FLOAT16, ComputeOptions(channels_last=True)):
        run(
            write_definitions(folder, batch=4, extra="max_iter: 12", smooth=True),
            Job(compute=compute),
        )
        found = weights(folder, 12)
        assert largest_difference(found, exact) < 0.05
        assert all(array.dtype == np.float32 for array in found)


def test_a_gradient_that_never_fits_ends_the_job(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "isfinite", lambda tensor: torch.tensor(False))
    with pytest.raises(JobError, match="gradients of iteration 0 are not finite in float16"):
        end(folder, replace(PLACES[0], compute=FLOAT16))
