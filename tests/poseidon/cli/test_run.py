"""`poseidon run`: what the workers would be told."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from poseidon.cli.main import main
from poseidon.cluster.job_plan import JobPlan
from poseidon.cluster.process import ProcessSpec
from poseidon.cluster.python_command import module_arguments
from poseidon.cluster.supervision.loop import JobResult
from poseidon.cluster.supervision.state import Outcome
from poseidon.engine.document import ScriptDocument, read_document
from poseidon.engine.packed import packed
from poseidon.exchange.kinds import ExchangeKind
from poseidon.exchange.options import ExchangeOptions
from poseidon.torch.checkpoint_file import write_checkpoint


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
        expected = module_arguments("poseidon.engine.process", "script")
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
    assert first.exchange == ExchangeOptions(kind=ExchangeKind.SERVER, staleness=2)
    assert (first.trace, first.shards) == (False, 2)
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


def test_one_worker_needs_no_server(documents: list[ScriptDocument]) -> None:
    assert main(["run", "train.py"]) == 0
    assert [(document.workers, document.shards, document.device) for document in documents] == [
        (1, 0, "cpu")
    ]


LAUNCHER = """
import sys
from poseidon.cli.main import main
from poseidon.cluster.supervision.loop import JobResult
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
        (
            ("net_solver.prototxt",),
            "net_solver.prototxt is a definition of Caffe, expected a Python script; a solver is "
            "trained by: poseidon train --solver=net_solver.prototxt",
        ),
        (("-m", "package.none", "-m"), "-m package.none: Python finds no such module in "),
        (("-m", "train.py"), "-m train.py: expected the name of a module, such as package.train"),
        (("train",), "there is no script train; expected -m train, which is a module"),
        (
            ("--exchange=local", "--hostfile=hosts", "train.py"),
            "--exchange=local needs one client",
        ),
        (("--threads=0", "train.py"), "--threads=0: expected 1 or more"),
        (("--workers=0", "train.py"), "--workers is 0"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    folder: Path, words: Sequence[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "net_solver.prototxt").write_text("base_lr: 1", encoding="utf-8")
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
