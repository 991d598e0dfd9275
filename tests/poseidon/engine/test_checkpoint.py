"""Snapshots in HDF5: a run goes on from one with the same bits as from a binary one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from poseidon.snapshot.caffemodel import read_model
from tests.support.training import Job, run, write_definitions
from tests.support.trainings import make_data


@pytest.mark.parametrize("job", [Job(), Job(workers=2, shards=2)])
def test_a_run_resumed_from_hdf5_ends_with_the_bits_of_the_whole_one(tmp_path: Path, job: Job) -> None:
    torch.set_num_threads(1)
    make_data(tmp_path)
    ends = []
    for snapshot_format in ("BINARYPROTO", "HDF5"):
        solver = write_definitions(
            tmp_path, batch=5, extra=f"snapshot: 10\nmax_iter: 20\nsnapshot_format: {snapshot_format}"
        )
        run(solver, job)
        suffix = ".h5" if snapshot_format == "HDF5" else ""
        model = tmp_path / f"snap_iter_20.caffemodel{suffix}"
        ends.append([array for _, arrays in read_model(model) for array in arrays])
    assert all(np.array_equal(a, b) for a, b in zip(*ends, strict=True))
    end = model.read_bytes()
    state = (tmp_path / "snap_iter_20.solverstate.h5").read_bytes()
    model.unlink()
    resume = tmp_path / "snap_iter_10.solverstate.h5"
    run(solver, Job(workers=job.workers, shards=job.shards, resume=resume))
    assert model.read_bytes() == end
    assert (tmp_path / "snap_iter_20.solverstate.h5").read_bytes() == state
