"""Snapshots in HDF5: a run continues from one with the same bits as from a binary one."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from poseidon.caffe.proto.caffe_pb2 import SolverState
from poseidon.caffe.snapshot.caffemodel import read_model
from poseidon.engine.snapshot_files import SnapshotSettings, check, seal
from poseidon.errors import SnapshotError
from poseidon.exchange import build
from poseidon.exchange.auto.trial import measure
from poseidon.exchange.options import ExchangeKind, ExchangeOptions, Scheme
from poseidon.exchange.replicas import NO_CHECK
from tests.poseidon.exchange.auto.test_rates import FAST
from tests.support.training import Job, run, write_definitions
from tests.support.training_processes import make_data


@pytest.mark.parametrize("job", [Job(), Job(workers=2, shards=2)])
def test_a_run_resumed_from_hdf5_ends_with_the_bits_of_the_whole_one(
    tmp_path: Path, job: Job
) -> None:
    make_data(tmp_path)
    ends = []
    for snapshot_format in ("BINARYPROTO", "HDF5"):
        solver = write_definitions(
            tmp_path,
            batch=5,
            extra=f"snapshot: 10\nmax_iter: 20\nsnapshot_format: {snapshot_format}",
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


@pytest.mark.parametrize("snapshot_format", ["BINARYPROTO", "HDF5"])
def test_layers_of_one_name_are_resumed_each_with_its_own_weights(
    tmp_path: Path, snapshot_format: str
) -> None:
    make_data(tmp_path)
    solver = write_definitions(
        tmp_path, batch=5, extra=f"snapshot: 4\nmax_iter: 8\nsnapshot_format: {snapshot_format}"
    )
    net = tmp_path / "net.prototxt"
    text = net.read_text()
    one = text[text.index('layer { name: "ip"') : text.index('layer { name: "accuracy"')]
    two = one.replace('bottom: "pool" top: "ip"', 'bottom: "ip" top: "ip2"')
    text = text.replace(one, one + two).replace('bottom: "ip" bottom', 'bottom: "ip2" bottom')
    net.write_text(text)
    job = Job(workers=3, kind=ExchangeKind.HYBRID, shards=2)
    run(solver, job)
    suffix = ".h5" if snapshot_format == "HDF5" else ""
    model = tmp_path / f"snap_iter_8.caffemodel{suffix}"
    end = model.read_bytes()
    model.unlink()
    run(solver, replace(job, resume=tmp_path / f"snap_iter_4.solverstate{suffix}"))
    assert model.read_bytes() == end


def test_a_full_disk_is_a_warning_until_the_last_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_data(tmp_path)
    solver = write_definitions(tmp_path, batch=5, extra="snapshot: 5\nmax_iter: 15")
    real, full = os.fsync, {"snap_iter_10"}

    def fsync(number: int) -> None:
        if any(name in os.readlink(f"/proc/self/fd/{number}") for name in full):
            raise OSError(28, "No space left on device")
        real(number)

    monkeypatch.setattr("os.fsync", fsync)
    run(solver, Job())
    assert "No space left on device; training continues" in caplog.text
    states = sorted(path.name for path in tmp_path.glob("*.solverstate"))
    assert states == ["snap_iter_15.solverstate", "snap_iter_5.solverstate"]
    for state in states:
        check(tmp_path / state)
    full.add("snap_iter_15")
    before = (tmp_path / "snap_iter_15.caffemodel").read_bytes()
    caplog.clear()
    full.remove("snap_iter_10")
    with pytest.raises(SnapshotError, match="No space left on device"):
        run(solver, Job())
    assert "No space left on device; it is the run's last, so the job fails" in caplog.text
    assert "training continues" not in caplog.text
    assert (tmp_path / "snap_iter_15.caffemodel").read_bytes() == before
    assert not list(tmp_path.glob(".*.partial"))
    job_folder = tmp_path / "job"
    job_folder.mkdir()
    saving = SnapshotSettings(spare=job_folder)
    with pytest.raises(SnapshotError, match=r"No space left on device$"):  # no room there either
        run(solver, Job(saving=saving))
    assert not list(job_folder.iterdir())
    full = {f"{tmp_path.name}/.snap_iter_15"}
    kept = job_folder / "snap_iter_15.caffemodel"
    with pytest.raises(
        SnapshotError,
        match=rf"No space left on device; the weights of iteration 15 are in {kept}, without the "
        rf"solver's state: --weights={kept} trains on from them",
    ):
        run(solver, Job(saving=saving))
    assert kept.read_bytes() == before


def test_a_damaged_snapshot_is_refused_before_anything_is_restored(tmp_path: Path) -> None:
    make_data(tmp_path)
    solver = write_definitions(tmp_path, batch=5, extra="snapshot: 5\nmax_iter: 10")
    run(solver, Job())
    model = tmp_path / "snap_iter_5.caffemodel"
    model.write_bytes(model.read_bytes()[:-1])
    with pytest.raises(SnapshotError, match=r"snap_iter_5.caffemodel is truncated or changed"):
        run(solver, Job(resume=tmp_path / "snap_iter_5.solverstate"))


SOLVERS = {
    "SGD": "",
    "Nesterov": "",
    "AdaGrad": "momentum: 0",
    "RMSProp": "momentum: 0\nrms_decay: 0.9\nbase_lr: 0.01",
    "AdaDelta": "momentum: 0.95\ndelta: 1e-6\nbase_lr: 1",
    "Adam": "momentum2: 0.99\nbase_lr: 0.005",
}


@pytest.mark.parametrize(
    ("kind", "fragments", "delay"),
    [*((kind, 1, 0) for kind in SOLVERS), ("Nesterov", 2, 0), ("Adam", 3, 2)],
)
def test_a_run_with_local_steps_goes_on_with_the_bits_of_the_whole_one(
    tmp_path: Path, kind: str, fragments: int, delay: int
) -> None:
    """The snapshot of iteration 10 is within a round of 4, and the test of iteration 8 is at the
    end of one.
    """
    make_data(tmp_path)
    extra = f'snapshot: 10\nmax_iter: 22\ntype: "{kind}"\n{SOLVERS[kind]}'
    solver = write_definitions(tmp_path, batch=5, extra=extra, dropout=True, norm=True)
    options = ExchangeOptions(
        local_steps=4, check_replicas=6, sync_fragments=fragments, sync_delay=delay
    )
    job = Job(workers=3, shards=2, kind=ExchangeKind.SERVER, options=options)
    assert run(solver, job).local_steps == 4
    model = tmp_path / "snap_iter_22.caffemodel"
    state = tmp_path / "snap_iter_22.solverstate"
    whole = model.read_bytes(), state.read_bytes()
    run(solver, replace(job, resume=tmp_path / "snap_iter_10.solverstate"))
    assert (model.read_bytes(), state.read_bytes()) == whole


def test_a_resumed_job_of_auto_takes_the_plan_of_the_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measurement could choose otherwise, and sums of another scheme have other bits."""
    make_data(tmp_path)
    solver = write_definitions(
        tmp_path, batch=5, extra="snapshot: 6\nmax_iter: 12\nclip_gradients: 0.5", norm=True
    )
    rates = replace(FAST, allreduce_s=0.0, link_s_per_byte=0.0, product_s_per_flop=0.0)
    monkeypatch.setattr(build, "is_worth_measuring", lambda tensors: True)
    monkeypatch.setattr(build, "measure", lambda *given: measure(*given) and rates)
    job = Job(workers=3, shards=2, kind=ExchangeKind.AUTO, options=NO_CHECK)
    schemes = run(solver, job).schemes
    assert set(schemes) == {Scheme.SERVER, Scheme.FACTORS, Scheme.ALLREDUCE}
    model, state = tmp_path / "snap_iter_12.caffemodel", tmp_path / "snap_iter_12.solverstate"
    whole = model.read_bytes(), state.read_bytes()
    monkeypatch.setattr(build, "measure", None)
    assert run(solver, replace(job, resume=tmp_path / "snap_iter_6.solverstate")).schemes == schemes
    assert (model.read_bytes(), state.read_bytes()) == whole
    monkeypatch.setattr(
        build, "measure", lambda *given: replace(measure(*given), allreduce_s=math.inf)
    )
    run(solver, replace(job, workers=2, resume=tmp_path / "snap_iter_6.solverstate"))


def test_a_snapshot_with_schemes_of_other_tensors_is_refused(tmp_path: Path) -> None:
    make_data(tmp_path)
    solver = write_definitions(tmp_path, batch=5, extra="snapshot: 2\nmax_iter: 2")
    run(solver, Job())
    path = tmp_path / "snap_iter_2.solverstate"
    state = SolverState.FromString(path.read_bytes())
    assert not state.poseidon.scheme
    for wrong, reason in ((["ps"], "the schemes of 1 of"), (["no"], "'no' is not a valid Scheme")):
        del state.poseidon.scheme[:]
        state.poseidon.scheme.extend(wrong)
        path.write_bytes(state.SerializeToString())
        seal(path, tmp_path / "snap_iter_2.caffemodel")
        with pytest.raises(SnapshotError, match=reason):
            run(solver, Job(resume=path))


def test_a_snapshot_of_local_steps_has_a_history_of_each_worker_and_one_of_the_outer_rule(
    tmp_path: Path,
) -> None:
    make_data(tmp_path)
    solver = write_definitions(tmp_path, batch=5, extra="snapshot: 8\nmax_iter: 16")
    local = Job(
        workers=2, shards=1, kind=ExchangeKind.HYBRID, options=ExchangeOptions(local_steps=4)
    )
    run(solver, local)
    snapshot = tmp_path / "snap_iter_8.solverstate"
    state = SolverState.FromString(snapshot.read_bytes())
    of_caffe, workers = list(state.history), list(state.poseidon.worker)
    assert [len(worker.outer_history) for worker in workers] == [4, 0]
    histories = [[np.array(blob.data) for blob in worker.history] for worker in workers]
    for blob, first, second in zip(of_caffe, *histories, strict=True):
        assert not np.array_equal(first, second)
        np.testing.assert_allclose(np.array(blob.data), (first + second) / 2, rtol=1e-6, atol=1e-9)
    run(solver, replace(local, options=ExchangeOptions(), resume=snapshot))  # as any snapshot
    run(solver, replace(local, options=ExchangeOptions(local_steps=2), resume=snapshot))
    run(solver, replace(local, workers=3, resume=snapshot))
    del state.poseidon.worker[1].history[-1]
    snapshot.write_bytes(state.SerializeToString())
    seal(snapshot, tmp_path / "snap_iter_8.caffemodel")
    with pytest.raises(SnapshotError, match="has 3 history blobs for virtual worker 1; this net"):
        run(solver, replace(local, resume=snapshot))
