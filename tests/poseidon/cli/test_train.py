"""`poseidon train`, as far as it goes without starting a job."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from poseidon.caffe.proto.caffe_pb2 import LayerParameter, NetParameter
from poseidon.caffe.proto.definition import read_solver
from poseidon.caffe.snapshot.caffemodel import model_path, state_path
from poseidon.caffe.snapshot.solverstate import RunState, write_state
from poseidon.caffe.tools.preflight import weight_files
from poseidon.cli.main import main
from poseidon.cluster.job_plan import JobPlan
from poseidon.cluster.process import ProcessSpec
from poseidon.cluster.python_command import module_arguments
from poseidon.cluster.supervision.loop import JobResult
from poseidon.cluster.supervision.state import Outcome
from poseidon.engine.document import JobDocument, read_document
from poseidon.exchange.kinds import ExchangeKind
from poseidon.exchange.options import DEFAULT_OPTIONS, ExchangeOptions
from tests.support.databases import make_pictures
from tests.support.training import write_definitions


@pytest.fixture
def solver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for name in ("train_lmdb", "test_lmdb"):
        make_pictures(tmp_path / name, 10, shape=(1, 8, 8))
    return write_definitions(tmp_path, batch=4, extra="max_iter: 3\nsolver_mode: CPU")


@pytest.mark.parametrize("flag", ["--background", "-background"])
def test_the_background_gets_the_words_that_main_was_given(
    flag: str,
    solver: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A script that calls `main` has words of its own in sys.argv."""
    started: list[Sequence[str]] = []

    def start(argv: Sequence[str], log: Path, *, timeout_s: float) -> int:
        started.append(argv)
        return 123

    monkeypatch.setattr("poseidon.launcher.runner.run_in_background", start)
    monkeypatch.setattr(sys, "argv", ["train_cifar10.py", "--clients", "2"])
    words = ["train", f"--solver={solver}", "--staleness=1"]
    assert main([*words, flag, "--output=logs"]) == 0
    (argv,) = started
    assert list(argv[:7]) == [sys.executable, *module_arguments("poseidon", *words)]
    assert flag not in argv
    assert argv[-1] == f"--output={tmp_path}/logs"
    assert "launcher pid 123" in capsys.readouterr().out


def test_a_flag_may_not_be_cut_short(solver: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Or the background launcher, which is told all words but --background, would go there again
    and again.
    """
    with pytest.raises(SystemExit) as ended:
        main(["train", f"--solver={solver}", "--backgr"])
    assert ended.value.code == 2
    assert "--backgr" in capsys.readouterr().err


@dataclass(frozen=True, slots=True)
class Planned:
    """What would have been started."""

    plan: JobPlan
    documents: list[JobDocument]
    shard_lines: list[dict[str, object]]


@pytest.fixture
def train(solver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Planned]:
    """Plans a job with these lines of a machinefile and these flags, and starts nothing."""

    def planned(*flags: str, lines: Sequence[str] = ("0 127.0.0.1 0", "1 ::1 0")) -> Planned:
        found: list[Planned] = []

        def run_job(
            plan: JobPlan, spec: Callable[..., ProcessSpec], *_: object, **__: object
        ) -> JobResult:
            documents = [
                read_document(JobDocument, spec(worker).first_line) for worker in plan.workers
            ]
            found.append(
                Planned(
                    plan, documents, [json.loads(spec(shard).first_line) for shard in plan.shards]
                )
            )
            return JobResult(outcome=Outcome.FINISHED, iteration=0)

        monkeypatch.setattr("poseidon.launcher.runner.run_job", run_job)
        monkeypatch.setattr("poseidon.launcher.job.Job.import_ahead", lambda _: ())
        (tmp_path / "hosts").write_text("\n".join(lines), encoding="utf-8")
        words = ["train", f"--solver={solver}", "--output=out", *flags]
        assert main([*words, f"--hostfile={tmp_path}/hosts"] if lines else words) == 0
        return found[0]

    return planned


def test_workers_are_told_how_gradients_meet(train: Callable[..., Planned]) -> None:
    first, second = train("--exchange=svb", "--wait_free=false").documents
    assert first.member.options == ExchangeOptions(kind=ExchangeKind.FACTORS, wait_free=False)
    assert not first.trace
    assert (first.member.network.host, second.member.network.host) == ("127.0.0.1", "[::1]")
    assert (first.member.homes, first.member.loads, first.member.shards) == ((0, 1), (), 2)


def test_every_worker_sees_the_settings_of_the_command_line(
    train: Callable[..., Planned], capsys: pytest.CaptureFixture[str]
) -> None:
    planned = train("--max_iter=7", "-set", "base_lr=0.5", "--set=max_iter=8")
    assert {document.settings for document in planned.documents} == {
        ("max_iter=7", "base_lr=0.5", "max_iter=8")
    }
    assert (
        capsys.readouterr().err.count(
            "the command line sets max_iter: 8 (file: 3), base_lr: 0.5 (file: 0.1)"
        )
        == 1
    )


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (
            "--set=max_itr=7",
            "--set max_itr=7: unknown field 'max_itr' in SolverParameter; did you mean 'max_iter'?",
        ),
        (
            "--max_iter=many",
            "--max_iter=many: max_iter in SolverParameter: expected an integer, found 'many'",
        ),
        (
            "--set=net=other.prototxt",
            "--set net=other.prototxt: net: there is no net definition 'other.prototxt'",
        ),
    ],
)
def test_a_wrong_setting_is_one_sentence(
    solver: Path, flag: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", f"--solver={solver}", flag]) == 1
    assert capsys.readouterr().err.startswith(f"poseidon train: {message}")


def test_the_default_is_auto(train: Callable[..., Planned]) -> None:
    assert {document.member.options for document in train().documents} == {DEFAULT_OPTIONS}
    assert DEFAULT_OPTIONS.kind is ExchangeKind.AUTO


def test_machines_that_only_serve_have_no_part_of_the_data(train: Callable[..., Planned]) -> None:
    lines = ("0 127.0.0.1 0 role=server", *(f"{number} 127.0.0.1 0" for number in (1, 2, 3)))
    planned = train(lines=lines)
    assert [document.member.host for document in planned.documents] == [0, 1, 2]
    assert {(d.member.host_count, d.workers) for d in planned.documents} == {(3, 3)}
    assert {document.member.homes for document in planned.documents} == {(-1, 0, 1, 2)}
    assert {document.member.loads for document in planned.documents} == {(2, 1, 1, 1)}


@pytest.mark.parametrize(
    ("flags", "lines", "shards"),
    [
        ((), (), 0),
        (("--svb=false",), (), 0),
        (("--exchange=local",), (), 0),
        (("--exchange=ps",), (), 1),
        (("--exchange=allreduce",), (), 0),
        ((), ("0 127.0.0.1 0", "1 127.0.0.1 0 role=server"), 1),
        (("--exchange=local",), ("0 127.0.0.1 0", "1 127.0.0.1 0 role=server"), 0),
    ],
)
def test_one_worker_has_a_server_only_when_it_is_asked_for(
    train: Callable[..., Planned], flags: tuple[str, ...], lines: tuple[str, ...], shards: int
) -> None:
    planned = train(*flags, lines=lines)
    assert (planned.plan.shard_count, planned.documents[0].member.shards) == (shards, shards)


@pytest.mark.parametrize("role", ["", "role=worker"])
def test_all_reduce_has_no_shards(train: Callable[..., Planned], role: str) -> None:
    planned = train(
        "--exchange=allreduce", lines=[f"{client} 127.0.0.1 0 {role}" for client in range(2)]
    )
    assert planned.plan.shard_count == 0
    assert [(document.member.shards, document.workers) for document in planned.documents] == [
        (0, 2)
    ] * 2


def test_shards_write_traces_too(train: Callable[..., Planned], tmp_path: Path) -> None:
    planned = train("--trace")
    assert [line["trace"] for line in planned.shard_lines] == [
        f"{tmp_path}/out/trace_shard_0.json",
        f"{tmp_path}/out/trace_shard_1.json",
    ]
    assert all(document.trace for document in planned.documents)
    assert not any(line["trace"] for line in train().shard_lines)


def test_a_contradiction_is_one_sentence(solver: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", f"--solver={solver}", "--exchange=ps", "--svb=true"]) == 2
    assert (
        "--svb=true means --exchange=svb, and --exchange=ps is asked for too"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("word", ["output/quick-1", "quick-1"])
def test_a_job_goes_on_from_the_newest_snapshot_of_another(
    train: Callable[..., Planned], tmp_path: Path, word: str
) -> None:
    """It is named by its folder or its id."""
    folder = tmp_path / "output" / "quick-1"
    folder.mkdir(parents=True)
    for iteration in (5, 10):
        model = model_path(folder / "quick", iteration)
        model.write_bytes(b"")
        state = RunState(iteration=iteration, model=str(model), histories=())
        write_state(state_path(folder / "quick", iteration), state)
    (document,) = train(f"--snapshot={word}", lines=()).documents
    assert document.snapshot == str(state_path(folder / "quick", 10))


def test_weights_on_the_command_line_replace_the_solvers(
    train: Callable[..., Planned], solver: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The solver's are not looked for, as by Caffe."""
    model = tmp_path / "a.caffemodel"
    model.write_bytes(NetParameter(layer=[LayerParameter(name="a")]).SerializeToString())
    with solver.open("a", encoding="utf-8") as text:
        text.write('weights: "nosuch.caffemodel"')
    (document,) = train(f"--weights={model}", lines=()).documents
    assert weight_files(read_solver(solver), document.weights) == [model]
    assert main(["train", f"--solver={solver}", "--output=other"]) == 1
    assert "weights: there is no file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("net.prototxt", "net.prototxt is not a model: it is text, as a definition (prototxt) is"),
        (
            "old.solverstate",
            "old.solverstate is not a model: it is a solver state, from which --snapshot resumes",
        ),
        ("none.caffemodel", "--weights: there is no file none.caffemodel"),
    ],
)
def test_weights_that_are_no_model_are_one_sentence(
    solver: Path, tmp_path: Path, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state = RunState(iteration=5, model=str(tmp_path / "old.caffemodel"), histories=())
    write_state(tmp_path / "old.solverstate", state)
    assert main(["train", f"--solver={solver}", f"--weights={name}", "--output=out"]) == 1
    assert capsys.readouterr().err.startswith(f"poseidon train: {message}")
    assert not (tmp_path / "out").exists()
