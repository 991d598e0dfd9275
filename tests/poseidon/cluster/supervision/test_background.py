"""A launcher in the background: its parent learns how the start went."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from poseidon.cluster.jobs.kill import KillTimeouts, kill_job
from poseidon.cluster.jobs.registry import Registry
from poseidon.cluster.python_command import module_arguments
from poseidon.cluster.supervision.background import (
    StartReport,
    how_to_follow,
    run_in_background,
    this_command,
)
from poseidon.errors import JobError
from tests.support.jobs import ROOT
from tests.support.live_processes import none_left
from tests.support.polling import until

pytestmark = pytest.mark.processes


def script(text: str) -> list[str]:
    return [
        sys.executable,
        "-I",
        "-S",
        "-c",
        "import json, os\nfd = int(os.environ['POSEIDON_STATUS_FD'])\n" + text,
    ]


def test_returns_when_the_job_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    job = f"job-x-{uuid.uuid4().hex[:8]}"
    (tmp_path / "hosts").write_text("0 127.0.0.1 0\n1 127.0.0.1 0\n")
    argv = [
        sys.executable,
        "-m",
        "tests.support.job_launcher",
        str(tmp_path),
        job,
        str(tmp_path / "hosts"),
    ]
    pid = run_in_background(argv, tmp_path / "out" / "launcher.log", timeout_s=60)
    registry = Registry(tmp_path)
    record = registry.read(job)
    assert record is not None
    pids = [process.pid for process in record.processes]
    try:
        assert record.launcher.pid == pid
        assert len(pids) == 4
        assert os.getsid(pid) == pid
        assert (tmp_path / "out" / "launcher.log").read_text() == f"[{', '.join(map(str, pids))}]\n"
    finally:
        kill_job(job, registry, timeouts=KillTimeouts(launcher_s=0.1))
    assert none_left([pid, *pids])
    os.waitpid(pid, 0)


def test_the_launchers_own_error_and_exit_code(tmp_path: Path) -> None:
    argv = script(
        """os.write(fd, json.dumps({"event": "failed", "message": "no such net", "exit_code": 2}).encode() + b"\\n")"""
    )
    with pytest.raises(JobError, match=r"^no such net$") as caught:
        run_in_background(argv, tmp_path / "log", timeout_s=60)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "log").exists()


def test_a_launcher_that_dies(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"was killed by signal 9 \(SIGKILL\) before the job had"):
        run_in_background(
            script("print('last words', flush=True); os.kill(os.getpid(), 9)"),
            tmp_path / "log",
            timeout_s=60,
        )


def test_a_launcher_that_takes_too_long(tmp_path: Path) -> None:
    before = {process.pid for process in psutil.Process().children()}
    with pytest.raises(JobError, match=r"did not start within 0.2 s"):
        run_in_background(script("os.read(os.pipe()[0], 1)"), tmp_path / "log", timeout_s=0.2)
    left = [process for process in psutil.Process().children() if process.pid not in before]
    assert none_left(process.pid for process in left)
    for process in left:
        process.wait(60)


def test_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"cannot start '/no/such/program' in the background"):
        run_in_background(["/no/such/program"], tmp_path / "log", timeout_s=60)


def test_reports() -> None:
    in_foreground = StartReport(None)
    in_foreground.started()
    in_foreground.failed("x", 1)
    read_fd, write_fd = os.pipe()
    report = StartReport(write_fd)
    report.started()
    report.failed("x", 1)  # only the first counts
    assert os.read(read_fd, 1000) == b'{"event": "started"}\n'
    os.close(read_fd)
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    StartReport(write_fd).started()
    with pytest.raises(JobError, match="POSEIDON_STATUS_FD"):
        StartReport(99999)


def test_words() -> None:
    text = how_to_follow("job-x", 12, Path("/out/launcher.log"))
    assert "tail -f /out/launcher.log" in text
    assert "poseidon kill job-x" in text
    assert this_command(["ps"])[1:] == [*module_arguments("poseidon", "ps")]


def test_a_launcher_that_reports_and_does_not_end_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poseidon.cluster.supervision.background.EXIT_S", 0.2)
    text = (
        "os.write(fd, json.dumps({'event': 'failed', 'message': 'no data', 'exit_code': "
        "3}).encode() + b'\\n')\n"
        "os.close(fd)\nprint(os.getpid(), flush=True)\nimport time\ntime.sleep(600)\n"
    )
    log = tmp_path / "log"
    log.touch()
    with pytest.raises(JobError, match="no data"):
        run_in_background(script(text), log, timeout_s=60)
    until(lambda: log.read_text().endswith("\n"), "nothing was printed", 30.0)
    pid = int(log.read_text())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
