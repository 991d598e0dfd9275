"""From flags to the values of a request; contradictions are refused."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from poseidon.base.settings import read_settings
from poseidon.caffe.proto.caffe_pb2 import LayerParameter, NetParameter
from poseidon.caffe.proto.definition import read_solver
from poseidon.caffe.snapshot.caffemodel import model_path, state_path
from poseidon.caffe.snapshot.solverstate import RunState, write_state
from poseidon.caffe.tools.preflight import weight_files
from poseidon.cli.jobs import exchange_kind, job_request
from poseidon.cli.main import main, parse_arguments, run_command
from poseidon.cluster.job_plan import JobPlan
from poseidon.cluster.process import ProcessSpec
from poseidon.cluster.python_command import module_arguments
from poseidon.cluster.rendezvous import task_from
from poseidon.cluster.supervision.state import JobResult, Outcome, SignalEffect
from poseidon.engine.document import JobDocument, ScriptDocument, read_document
from poseidon.engine.leaf import packed
from poseidon.errors import UsageError
from poseidon.exchange.options import DEFAULT_OPTIONS, ExchangeKind, ExchangeOptions
from poseidon.launcher.request import (
    Encrypt,
    LauncherKind,
    OnNan,
    ScriptRequest,
    ShownLogs,
    TrainRequest,
)
from poseidon.torch.checkpoint_file import write_checkpoint
from tests.support.databases import make_pictures
from tests.support.training import write_definitions


def parsed(*words: str, staleness: int = 0) -> argparse.Namespace:
    return parse_arguments(["run", f"--staleness={staleness}", *words, "script.py"])


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ((), ExchangeKind.AUTO),
        (("--svb=true",), ExchangeKind.FACTORS),
        (("--svb=false",), ExchangeKind.SERVER),
        (("--svb=0",), ExchangeKind.SERVER),
        (("--exchange=allreduce",), ExchangeKind.ALLREDUCE),
        (("--exchange=local",), ExchangeKind.LOCAL),
        (("--exchange=svb", "--svb=true"), ExchangeKind.FACTORS),
        (("--exchange=ps", "--svb=no"), ExchangeKind.SERVER),
    ],
)
def test_kinds(words: tuple[str, ...], kind: ExchangeKind) -> None:
    assert exchange_kind(parsed(*words)) is kind


@pytest.mark.parametrize(
    ("words", "staleness", "message"),
    [
        (("--exchange=allreduce",), 3, "--exchange=allreduce needs --staleness=0"),
        (("--exchange=allreduce", "--wire_precision=float16"), 0, "needs --wire_precision=float32"),
        (("--bandwidth_mbps=40",), 0, "is for --consistency=SSPAggr, not SSPPush"),
        (("--exchange=ps", "--svb=true"), 0, "--svb=true means --exchange=svb"),
        (("--exchange=allreduce", "--nosvb"), 0, "--svb=false means --exchange=ps"),
        (("--threads=0",), 0, "--threads=0: expected 1 or more"),
    ],
)
def test_contradictions(words: tuple[str, ...], staleness: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        job_request(ScriptRequest, parsed(*words, staleness=staleness))


@pytest.mark.parametrize(
    "words", [(), ("--exchange=local",), ("--exchange=ps", "--consistency=SSP")]
)
def test_what_may_be_together(words: tuple[str, ...]) -> None:
    assert job_request(ScriptRequest, parsed(*words, staleness=1)).exchange.staleness == 1


@pytest.mark.parametrize(
    ("words", "requested"),
    [
        ((), False),
        (("--exchange=local",), False),
        (("--svb=false",), False),
        (("--exchange=ps",), True),
    ],
)
def test_a_server_is_requested_by_the_name_of_an_exchange(
    words: tuple[str, ...], requested: bool
) -> None:
    assert job_request(ScriptRequest, parsed(*words)).server_requested is requested


def test_without_flags_a_request_has_its_defaults() -> None:
    argv = ["train", "--solver=a.prototxt"]
    expected = TrainRequest(argv=tuple(argv), solver=Path("a.prototxt"))
    assert job_request(TrainRequest, parse_arguments(argv)) == expected


def test_values_have_the_types_of_the_request() -> None:
    argv = shlex.split(
        "train --solver=a --weights=b,c --stage=x,y --import='m, n' --max_iter=3 --on_nan=warn "
        "--progress=logs=all --launcher=ssh --ssh_config=config --encrypt=on --output=out "
        "--sigint_effect=none --max_restarts=2"
    )
    assert job_request(TrainRequest, parse_arguments(argv)) == TrainRequest(
        argv=tuple(argv),
        solver=Path("a"),
        weights=(Path("b"), Path("c")),
        stage=("x", "y"),
        imports=("m", "n"),
        settings=("max_iter=3",),
        on_nan=OnNan.WARN,
        show_logs=ShownLogs.ALL,
        launcher=LauncherKind.SSH,
        ssh_config=Path("config"),
        encrypt=Encrypt.ON,
        output=Path("out"),
        sigint_effect=SignalEffect.NONE,
        max_restarts=2,
    )


@pytest.mark.parametrize(
    ("words", "wait_free", "trace"),
    [
        ((), True, False),
        (("--wait_free=false", "--trace"), False, True),
        (("--wait_free=TRUE", "--trace=false"), True, False),
    ],
)
def test_switches(words: tuple[str, ...], wait_free: bool, trace: bool) -> None:
    flags = parsed(*words)
    assert (flags.wait_free, flags.trace) == (wait_free, trace)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("", encoding="utf-8")
    (tmp_path / "hosts").write_text("0 127.0.0.1 0\n1 ::1 0\n", encoding="utf-8")
    return tmp_path


@pytest.fixture
def documents(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[ScriptDocument]:
    """Filled by a job of which nothing is started."""
    found: list[ScriptDocument] = []

    def run_job(
        plan: JobPlan, spec: Callable[..., ProcessSpec], *_: object, **__: object
    ) -> JobResult:
        specs = [spec(worker) for worker in plan.workers]
        expected = module_arguments("poseidon.engine", "script")
        assert all(spec.argv[1:5] == expected for spec in specs)
        found.extend(read_document(ScriptDocument, spec.first_line) for spec in specs)
        return JobResult(outcome=Outcome.FINISHED, iteration=0)

    monkeypatch.setattr("poseidon.launcher.runner.run_job", run_job)
    monkeypatch.setattr("poseidon.launcher.job.Job.import_ahead", lambda _: ())
    return found


def test_what_follows_the_script_is_the_scripts(
    folder: Path, documents: list[ScriptDocument]
) -> None:
    flags = ("-hostfile", "hosts", "--exchange=ps", "--staleness=2", "--output=logs")
    assert main(["run", *flags, "train.py", "--epochs=2", "--trace", "-x", "train.py"]) == 0
    first, second = documents
    assert first.script == str(folder / "train.py")
    assert first.arguments == ("--epochs=2", "--trace", "-x", "train.py")
    assert first.member.options == ExchangeOptions(kind=ExchangeKind.SERVER, staleness=2)
    assert (first.trace, first.member.shards) == (False, 2)
    assert (first.output, second.rank, second.workers) == (str(folder / "logs"), 1, 2)


def test_a_checkpoint_is_checked_and_handed_to_every_worker(
    folder: Path, documents: list[ScriptDocument], capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "net_iter_7.pt"
    write_checkpoint(path, packed({"poseidon": 1, "steps": 7}), 0)
    assert main(["run", "--hostfile=hosts", "--snapshot=net_iter_7.pt", "train.py"]) == 0
    # the newest snapshot in the folder
    assert main(["run", "--hostfile=hosts", f"--snapshot={folder}", "train.py"]) == 0
    assert [document.snapshot for document in documents] == [str(path)] * 4
    path.write_bytes(path.read_bytes()[:-1])
    (folder / "model.pt").write_bytes(packed({"weight": 1}))
    for name, words in {
        "net_iter_7.pt": "is truncated or changed",
        "model.pt": "is not a checkpoint of a group",
        "train.py": "is not a checkpoint of a group",
        "none.pt": "there is no file none.pt",
    }.items():
        assert main(["run", f"--snapshot={name}", "train.py"]) == 1
        assert words in capsys.readouterr().err


LAUNCHER = """
import sys
from poseidon.cli.main import main
from poseidon.cluster.supervision.state import JobResult
from poseidon.cluster.supervision.state import Outcome
from poseidon.launcher import runner

def run_job(plan, spec, *_, **__):
    print(len([spec(role) for role in (*plan.workers, *plan.shards)]))
    return JobResult(outcome=Outcome.FINISHED, iteration=0)

runner.run_job = run_job
runner.Job.import_ahead = lambda _: ()
code = main(["run", "--hostfile=hosts", "train.py"])
sys.exit(" ".join({"torch", "numpy", "paramiko", "cv2", "h5py", "asyncio"} & {*sys.modules}) or code)
"""


def test_the_launcher_of_a_script_imports_neither_torch_nor_ssh(folder: Path) -> None:
    """They would delay the start of the processes by two seconds."""
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER], capture_output=True, text=True, check=False, timeout=50
    )
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr


def test_the_background_gets_the_words_of_job_and_script(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Sequence[str]] = []

    def start(argv: Sequence[str], log: Path, *, timeout_s: float) -> int:
        started.append(argv)
        return 123

    monkeypatch.setattr("poseidon.launcher.runner.run_in_background", start)
    assert (
        main(["run", "-background", "--job=j", "--output=logs", "train.py", "--background", "1"])
        == 0
    )
    (argv,) = started
    words = ("run", "--job=j", "--output=logs", "--job=j", f"--output={folder}/logs")
    words += ("train.py", "--background", "1")
    assert list(argv) == [sys.executable, *module_arguments("poseidon", *words)]
    assert "launcher pid 123" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("none.py",), "there is no script none.py"),
        ((".",), ". is a folder; expected a script"),
        (("net_solver.prototxt",), "net_solver.prototxt is a definition of Caffe"),
        (("empty.ipynb",), "empty.ipynb is a notebook, not a Python script"),
        (("-m", "package.none", "-m"), "-m package.none: Python finds no such module in "),
        (("-m", "train.py"), "-m train.py: expected the name of a module, such as package.train"),
        (("train",), "there is no script train; expected -m train, which is a module"),
        (("--exchange=local", "--hostfile=hosts", "train.py"), "--exchange=local needs one client"),
        (("--workers=0", "train.py"), "--workers is 0"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    folder: Path, words: Sequence[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "net_solver.prototxt").write_text("base_lr: 1", encoding="utf-8")
    (folder / "empty.ipynb").write_text('{"cells": []}', encoding="utf-8")
    assert main(["run", *words]) == 2
    assert f"poseidon run: {sentence}" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("broken.py",), ("-m", "broken")])
def test_a_script_that_is_not_python_is_told_before_anything_starts(
    folder: Path, words: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "broken.py").write_text("x = 1\nfor y in x\n    pass\n", encoding="utf-8")
    assert main(["run", *words]) == 1
    said = capsys.readouterr().err
    assert said == "poseidon run: broken.py, line 2: SyntaxError: expected ':'\n"


KEY = "k" * 64


def run(*words: str) -> int:
    return run_command(parse_arguments(["worker", *words]))


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "key"
    path.write_text(KEY)
    path.chmod(0o600)
    return f"--key_file={path}"


def test_a_new_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"--new_key={tmp_path}/new") == 0
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600
    assert capsys.readouterr().out.startswith(f"{tmp_path}/new: a new key.")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the job is missing: write 'train' or 'run'"),
        (["stats"], "the job is missing"),
        (["train", "--solver=s", "--hostfile=f"], "--hostfile cannot be used here"),
        (["--", "train", "--solver=s", "--background"], "--background cannot be used here"),
        (["--rendezvous_timeout=0", "run", "script.py"], "--rendezvous_timeout=0"),
        (["run", "script.py", "--hostfile=the_scripts_own"], "no RANK and WORLD_SIZE"),
    ],
)
def test_words_that_make_no_sense(
    key: str, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.setattr("poseidon.cli.jobs.inherited_environment", dict)
    with pytest.raises(UsageError, match=message):
        run(key, *words)
    with pytest.raises(UsageError, match="--key_file is missing"):
        run("train", "--solver=s")


@pytest.mark.parametrize("port", ["0", "65536", "x", "-1"])
def test_ports_that_are_none(key: str, port: str) -> None:
    with pytest.raises(SystemExit):
        run(key, f"--rendezvous_port={port}", "train", "--solver=s")


@pytest.mark.parametrize(
    ("script", "program"),
    [("slurm.sbatch", "srun"), ("mpirun.sh", "mpirun"), ("torchrun.sh", "torchrun")],
)
@pytest.mark.parametrize("nodes", ["1", "2"])
def test_sample_scripts_start_tasks_with_the_users_words(
    repository: Path, tmp_path: Path, script: str, program: str, nodes: str
) -> None:
    engine = tmp_path / program
    engine.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    engine.chmod(0o755)
    sample = repository / "scripts" / "schedulers" / script
    shell = sample.read_text().split(maxsplit=1)[0].removeprefix("#!")
    done = subprocess.run(
        [shell, sample, "run", "--gpu=all", "a script.py", "--own=1"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/home/me", "NNODES": nodes},
        capture_output=True,
        timeout=60,
        check=True,
    )
    words = done.stdout.decode().split("\0")[:-1]
    worker_words = parse_arguments(words[words.index("worker") :])
    assert worker_words.key_file == "/home/me/.poseidon.key"
    job_words = parse_arguments(worker_words.job_arguments)
    assert (job_words.gpu, job_words.script, job_words.arguments) == (
        "all",
        Path("a script.py"),
        ("--own=1",),
    )


def test_the_manifest_for_kubernetes_agrees_with_itself_and_with_us(repository: Path) -> None:
    text = (repository / "scripts" / "schedulers" / "kubernetes.yaml").read_text(encoding="utf-8")

    def said(pattern: str) -> str:
        (found,) = re.findall(pattern, text, re.MULTILINE)
        return str(found)

    service, job = re.findall(r"^  name: (\S+)", text, re.MULTILINE)
    variables = dict(re.findall(r'- \{name: (\S+), value: "?([^"}]+)"?\}', text))
    task = task_from({"JOB_COMPLETION_INDEX": "1", **variables}, port=None)
    assert (task.rank, task.master) == (1, f"{job}-0.{said('subdomain: (.*?) *#')}")
    assert said("subdomain: (.*?) *#") == service and said("selector: {job-name: (.*)}") == job
    assert str(task.size) == said(r"completions: (\d+)") == said(r"parallelism: (\d+)")
    assert read_settings(variables).state_folder == Path("/tmp/poseidon")
    words = [
        word
        for line in (said(r"command: \[(.*)\]"), said(r"args: \[(.*)\]"))
        for word in line.split(", ")
    ]
    worker_words = parse_arguments(words[1:])
    assert Path(worker_words.key_file).parent == Path(said(r"name: key, mountPath: (.*?),"))
    job_words = parse_arguments(worker_words.job_arguments)
    assert job_words.term_deadline < float(said(r"terminationGracePeriodSeconds: (\d+)"))


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
    changed = "the command line sets max_iter: 8 (file: 3), base_lr: 0.5 (file: 0.1)"
    assert capsys.readouterr().err.count(changed) == 1


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--set=max_itr=7", "--set max_itr=7: unknown field 'max_itr' in SolverParameter"),
        ("--max_iter=many", "--max_iter=many: max_iter in SolverParameter: expected an integer"),
        ("--set=net=other.prototxt", "--set net=other.prototxt: net"),
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
    assert [document.member.seat.host for document in planned.documents] == [0, 1, 2]
    assert {(d.member.seat.host_count, d.workers) for d in planned.documents} == {(3, 3)}
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


def test_shards_write_traces_too(train: Callable[..., Planned], tmp_path: Path) -> None:
    planned = train("--trace")
    assert [line["trace"] for line in planned.shard_lines] == [
        f"{tmp_path}/out/trace_shard_0.json",
        f"{tmp_path}/out/trace_shard_1.json",
    ]
    assert all(document.trace for document in planned.documents)
    assert not any(line["trace"] for line in train().shard_lines)


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
        ("old.solverstate", "old.solverstate is not a model: it is a solver state"),
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
