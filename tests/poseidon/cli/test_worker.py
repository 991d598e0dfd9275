"""`poseidon worker`: flags, key and environment, before anybody is met."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from poseidon.base.settings import read_settings
from poseidon.cli.main import parse_arguments, run_command
from poseidon.cluster.rendezvous.schedulers import task_from
from poseidon.errors import UsageError

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
        ([], "the job is missing: expected 'train' or 'run'"),
        (["stats"], "the job is missing"),
        (["train", "--solver=s", "--hostfile=f"], "--hostfile cannot be used here"),
        (["--", "train", "--solver=s", "--background"], "--background cannot be used here"),
        (
            ["--rendezvous_timeout=0", "run", "script.py"],
            "--rendezvous_timeout=0: expected more than 0 seconds",
        ),
        (["run", "script.py", "--hostfile=the_scripts_own"], "no RANK and WORLD_SIZE"),
    ],
)
def test_words_that_make_no_sense(
    key: str, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.setattr("poseidon.cli.worker.inherited_environment", dict)
    with pytest.raises(UsageError, match=message):
        run(key, *words)


def test_no_key() -> None:
    with pytest.raises(
        UsageError, match="--key_file is missing: make one with 'poseidon worker --new_key=FILE'"
    ):
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
    shell = (
        (repository / "scripts" / "schedulers" / script)
        .read_text()
        .split(maxsplit=1)[0]
        .removeprefix("#!")
    )
    done = subprocess.run(
        [
            shell,
            repository / "scripts" / "schedulers" / script,
            "run",
            "--gpu=all",
            "a script.py",
            "--own=1",
        ],
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
