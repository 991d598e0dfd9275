"""The loop: exactness over workers and shards, resuming, signals, tests and what is recorded."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from poseidon.caffe.proto.caffe_pb2 import NetParameter, SolverState
from poseidon.caffe.snapshot.caffemodel import read_model
from poseidon.errors import JobError
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.options import ExchangeKind, ExchangeOptions, OnDivergence
from ps_server import SignalKind
from tests.support.training import Ended, Job, largest_difference, run, weights, write_definitions

ITERATIONS = 50


@pytest.fixture
def folder(data_folder: Path) -> Path:
    return data_folder


def train(folder: Path, job: Job, *, batch: int, extra: str = "", **net: bool) -> Ended:
    """Run a job in `folder`; its final weights and the records."""
    extra = extra if "max_iter" in extra else extra + f"\nmax_iter: {ITERATIONS}"
    return run(write_definitions(folder, batch=batch, extra=extra, **net), job)


@pytest.mark.parametrize(
    ("batch", "extra"),
    [
        (5, ""),
        pytest.param(50, "", marks=pytest.mark.thorough),
        (5, "clip_gradients: 0.5"),
        (5, "iter_size: 2"),
        (5, "type: 'Adam'"),
    ],
)
def test_two_workers_equal_one_process_with_both_batches(
    folder: Path, batch: int, extra: str
) -> None:
    train(folder, Job(), batch=2 * batch, extra=extra, smooth=True)
    one = weights(folder, ITERATIONS)
    for shards in (2,) if extra else (1, 3):
        train(folder, Job(workers=2, shards=shards), batch=batch, extra=extra, smooth=True)
        difference = largest_difference(weights(folder, ITERATIONS), one)
        assert difference <= 1e-5, f"{shards} shards"


@pytest.mark.parametrize("job", [Job(), Job(workers=1, shards=2), Job(workers=3, shards=1)])
def test_normalized_runs_repeat_and_resume_bit_for_bit(folder: Path, job: Job) -> None:
    """A net with statistics, which no solver moves: clipped, with several passes an iteration,
    tested on the way.
    """
    extra = "snapshot: 8\nmax_iter: 16\nclip_gradients: 0.5\niter_size: 2\ntest_interval: 4"

    def end(resume: Path | None) -> tuple[bytes, object]:
        ended = train(folder, replace(job, resume=resume), batch=6, extra=extra, norm=True)
        model = (folder / "snap_iter_16.caffemodel").read_bytes()
        return model, [(r.iteration, r.outputs) for r in ended.sink.tests if r.iteration > 8]

    whole = end(None)
    assert end(None) == whole
    assert end(folder / "snap_iter_8.solverstate") == whole


def test_statistics_are_the_mean_over_the_workers(folder: Path) -> None:
    """At rate 0 each worker sees its own half; the mean of both halves is what two runs of one
    worker average to.
    """
    extra = "base_lr: 0\nmax_iter: 1\nclip_gradients: 0.01\nsnapshot: 1"
    train(folder, Job(workers=2, shards=2), batch=5, extra=extra, norm=True)
    mean, variance, factor = dict(read_model(folder / "snap_iter_1.caffemodel"))["norm"]
    train(folder, Job(workers=1, shards=1), batch=10, extra=extra, norm=True)
    whole = dict(read_model(folder / "snap_iter_1.caffemodel"))["norm"]
    assert factor == 1 == whole[2]
    np.testing.assert_allclose(mean, whole[0], rtol=1e-4)
    # Variances within the halves; the whole's have what lies between the halves on top.
    assert np.all(variance > 0.5 * whole[1]) and np.all(variance < 1.1 * whole[1])


@pytest.mark.parametrize("job", [Job(), Job(workers=2, shards=2)])
def test_a_resumed_run_ends_with_the_bits_of_the_whole_one(folder: Path, job: Job) -> None:
    """With dropout, random crops and mirrors, a decaying rate and an average of losses."""
    whole = train(folder, job, batch=5, extra="snapshot: 20", dropout=True)
    end = (folder / "snap_iter_50.caffemodel").read_bytes()
    state = (folder / "snap_iter_50.solverstate").read_bytes()
    for name in ("caffemodel", "solverstate"):
        (folder / f"snap_iter_50.{name}").unlink()
    job = replace(job, resume=folder / "snap_iter_20.solverstate")
    resumed = train(folder, job, batch=5, extra="snapshot: 20", dropout=True)
    assert (folder / "snap_iter_50.caffemodel").read_bytes() == end
    assert (folder / "snap_iter_50.solverstate").read_bytes() == state
    later = [(r.iteration, r.loss, r.outputs) for r in whole.sink.train if r.iteration >= 20]
    assert [(r.iteration, r.loss, r.outputs) for r in resumed.sink.train] == later
    tests = [(r.iteration, r.outputs) for r in whole.sink.tests if r.iteration > 20]
    assert [(r.iteration, r.outputs) for r in resumed.sink.tests] == tests


@pytest.mark.parametrize("kind", [ExchangeKind.FACTORS, ExchangeKind.ALLREDUCE])
def test_a_replica_that_drifts_ends_the_job_or_is_mended(
    folder: Path, kind: ExchangeKind, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(
        workers=3, shards=1, kind=kind, options=ExchangeOptions(check_replicas=5), spoils=(2, 7)
    )
    extra = "max_iter: 16\nsnapshot: 16"
    with pytest.raises(JobError, match=r"^the replicas differ"):
        train(folder, job, batch=5, extra=extra)
    assert not (folder / "snap_iter_16.caffemodel").exists()
    train(
        folder,
        replace(job, options=ExchangeOptions(check_replicas=5, on_divergence=OnDivergence.MEND)),
        batch=5,
        extra=extra,
    )
    assert caplog.text.count("They now have the values of worker 0.") == 1
    assert (folder / "snap_iter_16.caffemodel").exists()


@pytest.mark.parametrize(("kind", "passes"), [(ExchangeKind.HYBRID, 1), (ExchangeKind.FACTORS, 2)])
def test_a_stopped_run_goes_on_bit_for_bit_where_weights_travel_as_factors(
    folder: Path, kind: ExchangeKind, passes: int
) -> None:
    """With momentum and a limit; the shards only keep a copy of such a weight, and workers its
    history.
    """
    extra = f"max_iter: 16\nclip_gradients: 0.5\niter_size: {passes}"

    def at(iteration: int, exchange: Exchange) -> None:
        if iteration == 5:
            exchange.control.request(SignalKind.STOP)

    def end(job: Job) -> tuple[bytes, bytes, list[tuple[int, object, object]]]:
        ended = train(folder, job, batch=5, extra=extra, dropout=True, norm=True)
        assert ended.by_factors == 2
        (last,) = set(ended.iterations.values())
        saved = [(folder / f"snap_iter_{last}.{name}") for name in ("caffemodel", "solverstate")]
        records = [(r.iteration, r.loss, r.outputs) for r in ended.sink.train if r.iteration >= 12]
        return saved[0].read_bytes(), saved[1].read_bytes(), records

    job = Job(workers=2, shards=2, kind=kind)
    whole = end(job)
    (folder / "snap_iter_16.solverstate").unlink()
    end(replace(job, at=at))
    (state,) = folder.glob("snap_iter_*.solverstate")
    assert state.name != "snap_iter_16.solverstate"
    assert end(replace(job, resume=state)) == whole


def test_scores_do_not_depend_on_the_number_of_workers(folder: Path) -> None:
    """test_iter 5 over 3 workers is uneven; every batch is still scored once, and the next pass
    goes on.
    """
    found = {}
    for job in (Job(), Job(workers=3, shards=1)):
        ended = train(folder, job, batch=4, extra="base_lr: 0\nmax_iter: 24")
        found[job.workers] = [[round(o.value, 5) for o in r.outputs] for r in ended.sink.tests]
    assert found[1] == found[3]
    assert len(found[1]) == 4
    assert len({tuple(scores) for scores in found[1]}) > 1  # the passes scored different batches


def test_losses_are_averaged_over_workers_and_iterations(folder: Path) -> None:
    one = train(folder, Job(), batch=10, extra="max_iter: 9")
    two = train(folder, Job(workers=2, shards=1), batch=5, extra="max_iter: 9")
    for a, b in zip(one.sink.train, two.sink.train, strict=True):
        assert a.iteration == b.iteration
        assert a.loss == pytest.approx(b.loss, rel=1e-4)
        assert a.outputs[0].value == pytest.approx(b.outputs[0].value, rel=1e-4)
    assert [r.iteration for r in one.sink.train] == [0, 4, 8]


@pytest.mark.parametrize("job", [Job(), Job(workers=2, shards=1)])
def test_the_last_loss_is_averaged_with_those_before_it(
    folder: Path, caplog: pytest.LogCaptureFixture, job: Job
) -> None:
    """At rate 0 both runs see the same losses."""

    def losses(window: int) -> list[float]:
        caplog.clear()
        extra = f"base_lr: 0\nmax_iter: 5\ndisplay: 1\naverage_loss: {window}"
        with caplog.at_level("INFO"):
            ended = train(folder, job, batch=5, extra=extra)
        (last,) = set(re.findall(r"Iteration 5, loss = (\S+),", caplog.text))
        records = ended.sink.train
        assert [record.iteration for record in records] == [0, 1, 2, 3, 4, 5]
        assert records[-1].loss == pytest.approx(float(last), rel=1e-4)
        assert window > 1 or records[-1].outputs[0].value == pytest.approx(records[-1].loss)
        return [record.loss for record in records]

    own = losses(1)
    assert losses(3)[-1] == pytest.approx(sum(own[-3:]) / 3, rel=1e-5)
    assert own[-1] != pytest.approx(sum(own[-3:]) / 3, rel=1e-3)


@pytest.mark.parametrize("staleness", [0, 2])
def test_stop_is_one_iteration_for_all_and_leaves_a_snapshot(folder: Path, staleness: int) -> None:
    def at(iteration: int, exchange: Exchange) -> None:
        if iteration == 5:
            exchange.control.request(SignalKind.STOP)

    ended = train(folder, Job(workers=3, shards=2, staleness=staleness, at=at), batch=4)
    (iteration,) = set(ended.iterations.values())
    assert 5 < iteration < ITERATIONS
    assert (folder / f"snap_iter_{iteration}.solverstate").is_file()


def test_a_snapshot_on_demand_does_not_change_the_run(folder: Path) -> None:
    def at(iteration: int, exchange: Exchange) -> None:
        if iteration == 7:
            exchange.control.request(SignalKind.SNAPSHOT)

    train(folder, Job(workers=2, shards=1), batch=5)
    plain = (folder / "snap_iter_50.caffemodel").read_bytes()
    train(folder, Job(workers=2, shards=1, at=at), batch=5)
    assert (folder / "snap_iter_50.caffemodel").read_bytes() == plain
    states = sorted(path.name for path in folder.glob("*.solverstate"))
    assert len(states) == 2, states


def test_stale_training_learns_and_resumes(folder: Path) -> None:
    extra = "base_lr: 0.02\nsnapshot: 60\nmax_iter: 120\nclip_gradients: 5"
    job = Job(workers=2, shards=2, staleness=3)
    ended = train(folder, job, batch=10, extra=extra)
    assert ended.sink.tests[-1].outputs[0].value > ended.sink.tests[0].outputs[0].value + 0.2
    resumed = replace(job, resume=folder / "snap_iter_60.solverstate")
    again = train(folder, resumed, batch=10, extra=extra)
    assert again.sink.train[0].iteration == 60
    assert again.sink.tests[-1].outputs[0].value > ended.sink.tests[0].outputs[0].value + 0.2


def test_another_number_of_workers_goes_on_and_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(folder, Job(workers=2, shards=1), batch=5, extra="snapshot: 20")
    with caplog.at_level("WARNING"):
        train(
            folder, Job(resume=folder / "snap_iter_20.solverstate"), batch=10, extra="snapshot: 20"
        )
    assert "was written by 2 virtual workers and this job has 1" in caplog.text


@pytest.mark.parametrize("part", ["poseidon", "reader"])
def test_a_state_without_the_places_of_readers_goes_on_at_the_next_record(
    folder: Path, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As a state of Caffe, or of a net without this data layer."""
    extra = "iter_size: 2\nsnapshot: 4\nmax_iter: 8"
    train(folder, Job(), batch=5, extra=extra)
    end = (folder / "snap_iter_8.caffemodel").read_bytes()
    path = folder / "snap_iter_4.solverstate"
    state = SolverState.FromString(path.read_bytes())
    (state if part == "poseidon" else state.poseidon.worker[0]).ClearField(part)  # type: ignore[arg-type]
    path.write_bytes(state.SerializeToString())
    path.with_name(f"{path.name}.sha256").unlink()
    train(folder, Job(resume=path), batch=5, extra=extra)
    assert (folder / "snap_iter_8.caffemodel").read_bytes() == end
    said = f"{path} is in Caffe's form, without positions in the data and random states: "
    assert (f"{said}reading continues at iteration 4" in caplog.messages) == (part == "poseidon")
    if part == "poseidon":
        train(folder, Job(workers=2, shards=1, resume=path), batch=5, extra=extra)
        each = "each of 2 virtual workers continues at iteration 4 of its own part of the data"
        assert f"{said}{each}" in caplog.messages


def test_debug_info_shows_the_displayed_iterations_of_the_first_worker(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(workers=2, shards=1)
    train(folder, job, batch=5, extra="max_iter: 6\ntest_interval: 5", norm=True)
    plain = (folder / "snap_iter_6.caffemodel").read_bytes()
    caplog.clear()
    with caplog.at_level("INFO"):
        train(
            folder, job, batch=5, extra="max_iter: 6\ntest_interval: 5\ndebug_info: true", norm=True
        )
    lines = [record.getMessage() for record in caplog.records]
    # Display is 4: iterations 0 and 4.
    assert sum("[Forward] Layer conv, top blob conv data: " in line for line in lines) == 2
    assert sum("[Backward] Layer norm, bottom blob pool diff: " in line for line in lines) == 2
    assert sum("[Backward] All net params" in line for line in lines) == 2
    again = read_model(folder / "snap_iter_6.caffemodel")
    for (_, new), (_, old) in zip(again, read_model_bytes(folder, plain), strict=True):
        for a, b in zip(new, old, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("job", "form"),
    [
        (Job(), "BINARYPROTO"),
        (Job(workers=2, shards=2), "HDF5"),
        (Job(workers=2, shards=1, staleness=1), "BINARYPROTO"),
    ],
)
def test_snapshot_diff_saves_the_last_change(folder: Path, job: Job, form: str) -> None:
    extra = f"max_iter: 7\nsnapshot: 6\nsnapshot_diff: true\nsnapshot_format: {form}"
    train(folder, job, batch=5, extra=extra, norm=True)
    end = ".h5" if form == "HDF5" else ""
    first, last = (read_model(folder / f"snap_iter_{n}.caffemodel{end}") for n in (6, 7))
    diffs = saved_diffs(folder / f"snap_iter_7.caffemodel{end}")
    expected = {
        f"{name}.{i}": np.asarray(old) - np.asarray(new)
        for (name, before), (_, after) in zip(first, last, strict=True)
        for i, (old, new) in enumerate(zip(before, after, strict=True))
    }
    assert diffs.keys() == expected.keys() and "norm.2" in diffs and "conv.0" in diffs
    for name, diff in diffs.items():
        assert np.array_equal(diff, expected[name].reshape(-1)), name
    assert np.any(diffs["conv.0"])


def saved_diffs(path: Path) -> dict[str, np.ndarray]:
    if path.suffix == ".h5":
        with h5py.File(path) as file:
            return {
                f"{name}.{index}": data[()].reshape(-1)
                for name, group in file["diff"].items()
                for index, data in group.items()
            }
    net = NetParameter.FromString(path.read_bytes())
    return {
        f"{layer.name}.{index}": np.array(blob.diff, np.float32)
        for layer in net.layer
        for index, blob in enumerate(layer.blobs)
    }


@pytest.mark.parametrize("job", [Job(), Job(workers=2, shards=1)])
def test_a_net_of_which_nothing_learns_runs_as_in_caffe(folder: Path, job: Job) -> None:
    solver = write_definitions(folder, batch=5, extra="max_iter: 3")
    net = folder / "net.prototxt"
    text = (
        net.read_text(encoding="utf-8")
        .replace("lr_mult: 1", "lr_mult: 0")
        .replace("lr_mult: 2", "lr_mult: 0")
    )
    frozen = "param { lr_mult: 0 } param { lr_mult: 0 } inner_product_param"
    net.write_text(text.replace("inner_product_param", frozen), encoding="utf-8")
    ended = run(solver, job)
    assert ended.iterations == dict.fromkeys(range(job.workers), 3)
    assert (folder / "snap_iter_3.caffemodel").is_file()


def read_model_bytes(folder: Path, content: bytes) -> list[tuple[str, list[np.ndarray]]]:
    (folder / "plain.caffemodel").write_bytes(content)
    return read_model(folder / "plain.caffemodel")


def test_several_test_nets_each_with_its_own_state_and_batches(folder: Path) -> None:
    """Two from the common net, told apart by test_state, after one of its own; they do not
    depend on the workers.
    """
    extra = 'test_iter: 2\ntest_iter: 3\ntest_iter: 4\ntest_net: "other.prototxt"\nmax_iter: 8\ntest_compute_loss: true'
    states = 'test_state { stage: "x" }\ntest_state { stage: "a" }\ntest_state { stage: "b" }\n'
    found = {}
    for job in (Job(), Job(workers=2, shards=1)):
        batch = 10 // job.workers
        solver = write_definitions(folder, batch=batch, extra=extra)
        solver.write_text(solver.read_text(encoding="utf-8") + states, encoding="utf-8")
        net = (folder / "net.prototxt").read_text(encoding="utf-8")
        accuracy = 'top: "accuracy" include { phase: TEST }'
        only_b = 'top: "accuracy" include { phase: TEST stage: "b" }'
        (folder / "other.prototxt").write_text(net, encoding="utf-8")
        (folder / "net.prototxt").write_text(net.replace(accuracy, only_b), encoding="utf-8")
        ended = run(solver, job)
        found[job.workers] = [
            (
                r.iteration,
                r.net,
                [(o.name, round(o.value, 3)) for o in r.outputs],
                round(r.loss or 0, 3),
            )
            for r in ended.sink.tests
        ]
    names = [
        (iteration, index, [name for name, _ in scores]) for iteration, index, scores, _ in found[1]
    ]
    both = ["accuracy", "loss"]
    assert names == [
        (i, n, outputs) for i in (0, 8) for n, outputs in enumerate((both, ["loss"], both))
    ]
    assert found[1] == found[2]


def test_the_last_iteration_is_tested_unless_the_run_was_stopped(folder: Path) -> None:
    solver = write_definitions(folder, batch=5, extra="max_iter: 10\ntest_interval: 4")
    ended = run(solver, Job(workers=2, shards=1))
    assert [record.iteration for record in ended.sink.tests] == [0, 4, 8, 10]

    def at(iteration: int, exchange: Exchange) -> None:
        if iteration == 5:
            exchange.control.request(SignalKind.STOP)

    ended = run(solver, Job(at=at))
    assert [record.iteration for record in ended.sink.tests] == [0, 4]
    assert ended.iterations[0] < 10
    solver.write_text(solver.read_text().replace("max_iter: 10", "max_iter: 8"))
    assert [record.iteration for record in run(solver, Job()).sink.tests] == [0, 4, 8]
