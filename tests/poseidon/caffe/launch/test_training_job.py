"""A training job: the files that other hosts open, and the way of an option to the workers."""

from __future__ import annotations

import os
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import poseidon
from poseidon.caffe.launch.training_job import (
    TrainingJob,
    _devices,
    check_clipping,
    check_local_steps,
    needed_files,
    rounds_that_end_early,
    test_commands,
    written_prefixes,
)
from poseidon.caffe.proto.caffe_pb2 import NetParameter, PoseidonState, PoseidonWorkerState
from poseidon.caffe.proto.definition import SolverDefinition, read_solver
from poseidon.caffe.snapshot.solverstate import RunState, write_state
from poseidon.cluster.dial.dialer import LocalDialer
from poseidon.cluster.host_probe import NeededFile
from poseidon.cluster.machinefile import Host
from poseidon.cluster.supervision.restarts import StartingPoint
from poseidon.cluster.supervision.state import JobResult, Outcome
from poseidon.engine.document import JobDocument, TrainingOptions, read_document
from poseidon.errors import DefinitionError, UsageError
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from poseidon.launcher.closing_lines import model_of
from poseidon.launcher.processes import Start
from poseidon.launcher.request import Balance, TrainRequest
from poseidon.launcher.site import Site
from ps_server.json_fields import fields_of
from ps_server.protocol.virtual_workers import VirtualWorkers
from tests.support.databases import make_pictures
from tests.support.training import write_definitions

NET = """
layer { name: "train" type: "Data" top: "data" top: "label" include { phase: TRAIN }
  transform_param { mean_file: "mean.binaryproto" } data_param { source: "train_db" batch_size: 1 } }
layer { name: "test" type: "ImageData" top: "data" top: "label" include { phase: TEST }
  image_data_param { source: "/lists/test.txt" batch_size: 1 shared_file_system: true } }
layer { name: "never" type: "HDF5Data" top: "x" include { phase: TRAIN stage: "never" }
  hdf5_data_param { source: "never.txt" batch_size: 1 } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 2 } }
layer { name: "loss" type: "InfogainLoss" bottom: "ip" bottom: "label" top: "loss"
  infogain_loss_param { source: "matrix" } }
"""


def make_databases(folder: Path) -> None:
    """Make the databases that `write_definitions` names."""
    for name in ("train_lmdb", "test_lmdb"):
        make_pictures(folder / name, 5, shape=(1, 6, 6))


@pytest.fixture
def solver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SolverDefinition:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "net.prototxt").write_text(NET)
    (tmp_path / "solver.prototxt").write_text(
        'net: "nets/net.prototxt" test_iter: 1 test_interval: 5 weights: "a.caffemodel, '
        'b.caffemodel" snapshot_prefix: "s/x"\n'
    )
    return read_solver("solver.prototxt")


def test_files(solver: SolverDefinition) -> None:
    nets = [
        NeededFile(name="mean.binaryproto", folder="nets"),
        NeededFile(name="train_db", folder="nets", instead=("train_db_1",)),
        NeededFile(name="matrix", folder="nets"),
        NeededFile(name="/lists/test.txt", folder="nets"),
    ]
    weights = [
        NeededFile(name="a.caffemodel", folder="."),
        NeededFile(name="b.caffemodel", folder="."),
    ]
    assert set(needed_files(solver, client=1, clients=3)) == {*nets, *weights}
    assert len(needed_files(solver, client=1, clients=3)) == 6


def test_a_single_client_takes_the_whole_or_its_part(solver: SolverDefinition) -> None:
    files = needed_files(solver, client=0, clients=1)
    assert NeededFile(name="train_db", folder="nets", instead=("train_db", "train_db_0")) in files


def test_where_snapshots_go(solver: SolverDefinition) -> None:
    assert written_prefixes(solver) == (("s/x", "."),)
    solver.param.ClearField("snapshot_prefix")
    assert written_prefixes(solver) == ()


def test_an_option_of_the_workers_is_named_by_one_class_alone() -> None:
    """As CONTRIBUTING.md says: what lies between the flag and the worker copies all options."""
    root = Path(poseidon.__file__).parent
    for option in fields_of(TrainingOptions()):
        naming = {
            str(path.relative_to(root))
            for path in root.rglob("*.py")
            if re.search(rf"(?<!--)\b{option}\b", path.read_text(encoding="utf-8"))
        }
        assert naming - {"caffe/solver/worker.py"} == {"engine/document.py"}
        request = TrainRequest(**{option: 7})
        document = JobDocument(
            job="j", output="out", solver="s", **fields_of(request, TrainingOptions)
        )
        assert getattr(read_document(JobDocument, document.to_json()), option) == 7


def test_rounds_of_local_steps_that_end_early_have_a_note(solver: SolverDefinition) -> None:
    solver.param.snapshot = 64
    notes = rounds_that_end_early(solver.param, 32)
    assert notes == [
        "test_interval 5 is not a multiple of --local_steps=32, so rounds end early there"
    ]
    assert rounds_that_end_early(solver.param, 0) == []


def test_changes_of_every_iteration_are_refused_with_local_steps(solver: SolverDefinition) -> None:
    solver.param.snapshot_diff = True
    check_local_steps(solver.param, 0)
    with pytest.raises(
        UsageError, match="snapshot_diff: true cannot be combined with --local_steps="
    ):
        check_local_steps(solver.param, 8)


def test_a_limit_of_the_norm_is_refused_with_powersgd_alone(solver: SolverDefinition) -> None:
    check_clipping(solver.param, ExchangeOptions(compress="powersgd:2"))
    solver.param.clip_gradients = 35
    check_clipping(solver.param, ExchangeOptions(compress="int8"))
    check_clipping(solver.param, ExchangeOptions(compress="powersgd:2", local_steps=4))
    with pytest.raises(UsageError, match="clip_gradients"):
        check_clipping(solver.param, ExchangeOptions(compress="int8,powersgd:2"))


def test_one_worker_has_a_limit_of_the_norm_with_powersgd(tmp_path: Path) -> None:
    """It exchanges nothing. With a server of its own, or another client, PowerSGD is used."""
    path = write_definitions(tmp_path, batch=4, extra="max_iter: 3\nclip_gradients: 35")
    make_databases(tmp_path)
    hosts = [Host(id=i, address="127.0.0.1", port=0) for i in range(2)]
    request = TrainRequest(solver=path, exchange=ExchangeOptions(compress="powersgd:1"))
    TrainingJob(request, Site(hosts[:1], LocalDialer()))
    for other, site in ((replace(request, server_requested=True), hosts[:1]), (request, hosts)):
        with pytest.raises(UsageError, match="clip_gradients: 35 cannot be combined with"):
            TrainingJob(other, Site(site, LocalDialer()))


@pytest.mark.parametrize("exchange", [ExchangeKind.SERVER, ExchangeKind.HYBRID])
def test_a_budget_that_allows_powersgd_is_refused_with_a_limit_of_the_norm(
    tmp_path: Path, exchange: ExchangeKind
) -> None:
    """Of a convolution; a fully-connected weight that may travel as factors is refused where it
    does not.
    """
    make_databases(tmp_path)
    site = Site([Host(id=i, address="127.0.0.1", port=0) for i in range(2)], LocalDialer())

    def start(budget: float, layer: str, clip: str = "clip_gradients: 35") -> None:
        path = write_definitions(tmp_path, batch=4, extra=f"max_iter: 3\n{clip}")
        net = (tmp_path / "net.prototxt").read_text(encoding="utf-8")
        large = net.replace("num_output: 4 kernel_size: 3", "num_output: 200 kernel_size: 5")
        (tmp_path / "net.prototxt").write_text(
            large.replace("num_output: 10", "num_output: 90"), encoding="utf-8"
        )
        options = ExchangeOptions(kind=exchange, compress=f"{layer}.0=auto", loss_budget=budget)
        TrainingJob(TrainRequest(solver=path, exchange=options), site)

    start(0.01, "conv")
    start(0.1, "conv", clip="")
    with pytest.raises(UsageError, match="clip_gradients"):
        start(0.1, "conv")
    if exchange is ExchangeKind.HYBRID:
        start(0.1, "ip")
    else:
        with pytest.raises(UsageError, match="leave out clip_gradients, or use a smaller budget"):
            start(0.1, "ip")


def test_a_solver_from_a_pipe_is_refused_before_the_start(tmp_path: Path) -> None:
    """Each worker reads the solver, and a pipe can be read once."""
    os.mkfifo(tmp_path / "solver")
    site = Site([Host(id=0, address="127.0.0.1", port=0)], LocalDialer())
    with pytest.raises(UsageError, match="is a pipe, but each worker must read the solver"):
        TrainingJob(TrainRequest(solver=tmp_path / "solver"), site)


def test_the_statistics_of_an_ended_job_are_named_by_its_folder_where_its_id_is_not_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_definitions(tmp_path, batch=4, extra="max_iter: 3")
    make_databases(tmp_path)
    monkeypatch.chdir(tmp_path)
    site = Site([Host(id=i, address="127.0.0.1", port=0) for i in range(2)], LocalDialer())
    result = JobResult(outcome=Outcome.FINISHED, iteration=3)
    commands = []
    for output in (None, Path("my runs/first")):
        job = TrainingJob(TrainRequest(solver=path, output=output), site)
        commands.append(
            dict(job.final_report(result, StartingPoint(), ()))["network"].replace(job.id, "ID")
        )
    assert commands == ["poseidon stats ID", "poseidon stats 'my runs/first'"]


def test_the_resume_line_goes_on_also_where_the_snapshot_has_reached_max_iter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_definitions(tmp_path, batch=4, extra="max_iter: 3")
    make_databases(tmp_path)
    monkeypatch.chdir(tmp_path)
    argv = ("train", f"--solver={path}", "--max_iter=3")
    site = Site([Host(id=0, address="127.0.0.1", port=0)], LocalDialer())
    job = TrainingJob(TrainRequest(solver=path, argv=argv), site)
    result = JobResult(outcome=Outcome.FINISHED, iteration=3)
    lines = []
    for folder, iteration in (
        (tmp_path, 2),
        (tmp_path, 3),
        (job.output, 3),
        (job.output / "snapshots", 3),
        (tmp_path, 50),
    ):
        newest = StartingPoint(
            state=str(folder / f"snap_iter_{iteration}.solverstate"), iteration=iteration
        )
        lines.append(dict(job.final_report(result, newest, ()))["resume"].replace(job.id, "JOB"))
    command = "poseidon train --solver=solver.prototxt"
    assert lines == [
        f"{command} --max_iter=3 --snapshot=snap_iter_2.solverstate",
        f"{command} --snapshot=snap_iter_3.solverstate --max_iter=6",
        f"{command} --snapshot=JOB --max_iter=6",
        f"{command} --snapshot=JOB --max_iter=6",
        f"{command} --snapshot=snap_iter_50.solverstate --max_iter=100",
    ]


def test_a_host_without_gpu_names_the_flag_for_the_processor(tmp_path: Path) -> None:
    (tmp_path / "solver.prototxt").write_text('net: "net.prototxt"\nsolver_mode: GPU\n')
    with pytest.raises(DefinitionError, match=r"solver.prototxt:2"):
        _devices("", read_solver(tmp_path / "solver.prototxt"), 0)


def job_of(folder: Path, clients: int, **fields: Any) -> TrainingJob:
    """Return a job of a small net on clients of this machine."""
    path = write_definitions(folder, batch=4, extra="max_iter: 3")
    if not (folder / "train_lmdb").exists():
        make_databases(folder)
    hosts = [Host(id=i, address="127.0.0.1", port=0) for i in range(clients)]
    return TrainingJob(TrainRequest(solver=path, **fields), Site(hosts, LocalDialer()))


@pytest.mark.parametrize(
    ("clients", "fields", "bounds"),
    [
        (3, {}, (0, 1, 2, 3)),
        (3, {"virtual_workers": 8}, (0, 3, 6, 8)),
        (2, {"virtual_workers": 9, "balance": Balance(speeds=(1.0, 0.5))}, (0, 6, 9)),
        (1, {"virtual_workers": 4}, (0, 4)),
        (1, {"virtual_workers": 4, "exchange": ExchangeOptions(local_steps=2)}, (0, 4)),
    ],
)
def test_virtual_workers_are_divided_by_speed(
    tmp_path: Path, clients: int, fields: dict[str, Any], bounds: tuple[int, ...]
) -> None:
    job = job_of(tmp_path, clients, **fields)
    assert job.virtual_workers.bounds == bounds
    note = " ".join(job.notes())
    copies = "values and histories for each" if "exchange" in fields else "one copy of the net"
    assert (f"with {copies}" in note) == (not job.virtual_workers.is_one_each)
    assert ("virtual worker" in job.description()) == (not job.virtual_workers.is_one_each)


@pytest.mark.parametrize(
    ("exchange", "reason"),
    [
        (ExchangeOptions(local_steps=4), ""),
        (ExchangeOptions(compress="int8"), ""),
        (ExchangeOptions(staleness=1), "--staleness is not 0"),
        (
            ExchangeOptions(local_steps=4, sync_delay=1),
            "parts of the tensors are always on their way (fragments or delay of --local_steps)",
        ),
    ],
)
def test_which_exchanges_are_elastic(
    tmp_path: Path, exchange: ExchangeOptions, reason: str
) -> None:
    job = job_of(tmp_path, 2, exchange=exchange, max_restarts=1)
    assert job.fixed_because == reason


def test_the_workers_of_a_balanced_job_are_told(tmp_path: Path) -> None:
    start = Start(attempt=0, point=StartingPoint(), exchange_plan="", token=b"ab", keys=None)
    balance = Balance(measured=True)
    job = job_of(tmp_path, 2, virtual_workers=4, balance=balance, max_restarts=1)
    assert "they move by the measured speed of the workers" in " ".join(job.notes())
    assert all(job.document(role, start).balances for role in job.plan.workers)


def test_a_job_that_goes_on_with_fewer_hosts_keeps_its_virtual_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the threads of a worker, on which bits may depend."""
    monkeypatch.setattr(Site, "cores", lambda site, host: 12 // len(site.hosts))
    monkeypatch.setattr(Site, "socket_folder", lambda site, host: "")
    job = job_of(tmp_path, 4, balance=Balance(speeds=(1.0, 1.0, 1.0, 3.0)))
    start = Start(attempt=0, point=StartingPoint(), exchange_plan="", token=b"ab", keys=None)
    first = [job.document(role, start) for role in job.plan.workers]
    assert {(one.threads, one.member.virtual_workers) for one in first} == {(3, None)}
    job.site.hosts = job.site.hosts[:1] + job.site.hosts[3:]
    job.renew_plan()
    later = [job.document(role, start) for role in job.plan.workers]
    placed = VirtualWorkers((0, 1, 4))
    assert {(one.threads, one.member.virtual_workers) for one in later} == {(3, placed)}


def test_each_worker_knows_the_workers_of_all_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Site, "cores", lambda site, host: 6)
    monkeypatch.setattr(Site, "socket_folder", lambda site, host: f"/tmp/{host.id}")
    job = job_of(tmp_path, 2)
    start = Start(attempt=0, point=StartingPoint(), exchange_plan="", token=b"ab", keys=None)
    even = [job.document(role, start) for role in job.plan.workers]
    assert {(one.member.hosts, one.member.local_address, one.threads) for one in even} == {
        ((), "", 6)
    }
    uneven = job.with_hosts([replace(job.site.hosts[0], workers=2), job.site.hosts[1]])
    uneven._threads_of = {}
    documents = [uneven.document(role, start) for role in uneven.plan.workers]
    assert {one.member.hosts for one in documents} == {(2, 1)}
    places = [one.member.seat for one in documents]
    assert [(place.host, place.local_rank, place.local_workers) for place in places] == [
        (0, 0, 2),
        (0, 1, 2),
        (1, 0, 1),
    ]
    assert [one.member.local_address for one in documents] == [
        "/tmp/0/workers",
        "/tmp/0/workers",
        "",
    ]
    assert [one.threads for one in documents] == [3, 3, 6]
    assert {one.member.virtual_workers for one in documents} == {None}
    members = [one.member for one in documents]
    assert [member.network.rank for member in members] == [0, 1, 2]
    assert [member.placed.bounds for member in members] == [(0, 2, 3)] * 3
    assert all(member.one_machine for member in members)
    remote = job.with_hosts([job.site.hosts[0], Host(id=1, address="10.1.2.3", port=5000)])
    remote._threads_of = {}
    assert not any(remote.document(role, start).member.one_machine for role in remote.plan.workers)


def test_hosts_that_cannot_exchange_are_refused(tmp_path: Path) -> None:
    options = ExchangeOptions(local_steps=8, sync_delay=1)
    job = job_of(tmp_path, 2, exchange=options)
    with pytest.raises(UsageError, match=r"^fragments and delay of --local_steps need one worker"):
        job.with_hosts([replace(job.site.hosts[0], workers=2), job.site.hosts[1]])


@pytest.mark.parametrize(
    ("options", "clients", "expected"),
    [({}, 1, 2), ({}, 2, 2), ({}, 3, 3), ({"staleness": 1}, 1, 1), ({"local_steps": 2}, 1, 2)],
)
def test_a_resumed_job_has_the_virtual_workers_of_the_snapshot(
    tmp_path: Path, options: dict[str, Any], clients: int, expected: int
) -> None:
    """Where it has no more workers; then it also has the threads of the snapshot."""
    state = tmp_path / "x.solverstate"
    blobs = PoseidonState(workers=2, worker=[PoseidonWorkerState(threads=5)] * 2)
    (tmp_path / "x.caffemodel").write_bytes(NetParameter(name="x").SerializeToString())
    run = RunState(iteration=1, model=str(tmp_path / "x.caffemodel"), histories=(), poseidon=blobs)
    write_state(state, run)
    job = job_of(tmp_path, clients, snapshot=str(state), exchange=ExchangeOptions(**options))
    assert job.virtual_workers.count == expected
    role = job.plan.workers[0]
    if job.virtual_workers.is_one_each:
        job.site.cores = lambda host: 8  # type: ignore[method-assign]
        assert job.usual_threads(role) == 8
    else:
        assert job.usual_threads(role) == 5


def test_virtual_workers_need_the_records_of_all_clients(tmp_path: Path) -> None:
    job_of(tmp_path, 1, virtual_workers=2)
    net = tmp_path / "net.prototxt"
    text = net.read_text(encoding="utf-8").replace("shared_file_system: true", "")
    for count, message in ((1, None), (2, "needs shared_file_system: true in each data layer")):
        with pytest.raises(UsageError, match=message) if message else nullcontext():
            write_definitions(tmp_path, batch=4, extra="max_iter: 3")
            net.write_text(text, encoding="utf-8")
            request = TrainRequest(solver=tmp_path / "solver.prototxt", virtual_workers=count)
            TrainingJob(request, Site([Host(id=0, address="127.0.0.1", port=0)], LocalDialer()))


def test_the_command_that_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    extra = 'test_iter: 7\ntest_state: { stage: "a" stage: "b" level: 2 }'
    solver = read_solver(write_definitions(tmp_path, batch=4, extra=extra))
    net = tmp_path / "net.prototxt"
    net.write_text(f'state {{ stage: "own" }}\n{net.read_text(encoding="utf-8")}', encoding="utf-8")
    model = model_of(tmp_path / "snap_iter_3.solverstate.h5")
    assert test_commands(solver, model) == [
        "poseidon test -model net.prototxt -weights snap_iter_3.caffemodel.h5 -iterations 7 "
        "-level 2 -stage a,b"
    ]
    del solver.param.test_iter[:]
    del solver.param.test_state[:]
    assert test_commands(solver, model) == []
