"""Jobs as users start them: real processes and sockets, and failures."""

from __future__ import annotations

import re
import shlex
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.live_processes import none_left
from tests.support.training import endless
from tests.support.training_processes import (
    machinefile,
    make_data,
    poseidon,
    poseidon_here,
    training,
)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_data(tmp_path)
    return tmp_path


def test_ctrl_c_stops_all_after_a_snapshot_and_the_run_goes_on_and_saves_without_its_launcher(
    folder: Path,
) -> None:
    """A resumed job whose launcher is killed writes another snapshot and ends by itself."""
    solver, hosts = endless(folder), machinefile(folder, 2, 1)
    with training(folder, f"--solver={solver}", f"--hostfile={hosts}") as job:
        job.wait_for("Iteration 1, loss")
        children = job.children()
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 130
        assert "stopped at iteration" in job.lines[-1]
        assert none_left([child.pid for child in children.values()])
    logs = [log.read_text(encoding="utf-8") for log in sorted(folder.glob("output/*/worker_*.log"))]
    mean, own = (float(re.findall(r"Iteration 1, loss: (\S+),", log)[0]) for log in logs)
    assert mean != own, "worker 0's log has the mean, worker 1's its own loss"
    (state,) = folder.glob("snap_iter_*.solverstate")
    iteration = int(re.findall(r"\d+", state.name)[0])
    (command,) = [line.partition("resume:")[2] for line in job.lines if "resume:" in line]
    words = shlex.split(command)
    assert words[:2] == ["poseidon", "train"]
    with training(folder, *words[2:]) as job:
        assert f"Iteration {iteration}, loss" in job.wait_for("loss: ")
        orphans = list(job.children().values())
        assert len(orphans) == 3
        job.process.kill()
        _, alive = psutil.wait_procs(orphans, timeout=90)
        assert not alive
    (later,) = set(folder.glob("snap_iter_*.solverstate")) - {state}
    assert int(re.findall(r"\d+", later.name)[0]) > iteration


@pytest.mark.thorough
def test_in_the_background(folder: Path) -> None:
    hosts = machinefile(folder, 1)
    started = poseidon(
        folder,
        "train",
        f"--solver={endless(folder)}",
        f"--hostfile={hosts}",
        "--background",
        "--output=out",
    )
    assert started.returncode == 0, started.stderr
    (job,) = re.findall(r"Job (\S+) runs in the background", started.stdout)
    try:
        assert job in poseidon_here(folder, "ps").stdout
    finally:
        killed = poseidon_here(folder, "kill", job)
    assert killed.returncode == 0, killed.stderr
    assert job not in poseidon_here(folder, "ps").stdout
    marked = [p for p in psutil.process_iter(["cmdline"]) if job in (p.info["cmdline"] or [])]
    assert not marked
