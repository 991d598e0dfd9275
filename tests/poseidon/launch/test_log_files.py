"""What other hosts say is kept here."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from poseidon.cluster.plan import ProcessName, Role
from poseidon.launch.log_files import FOLDER, LogFiles
from poseidon.launch.terminal import Terminal

NEAR = ProcessName(role=Role.WORKER, index=0, client=0, host="127.0.0.1")
FAR = ProcessName(role=Role.WORKER, index=1, client=1, host="node1")
SHARD = ProcessName(role=Role.SHARD, index=2, client=1, host="node1")


def test_lines_of_other_hosts_are_kept_and_all_are_handed_on(tmp_path: Path) -> None:
    stream = io.StringIO()
    started: list[int] = []
    for _ in range(2):  # a job that starts again goes on in the same files
        logs = LogFiles(Terminal("net", stream, on_started=lambda: started.append(1)), tmp_path)
        logs.on_started()
        logs.on_event(FAR, {"event": "alive"})
        for name in (NEAR, FAR, SHARD, FAR):
            logs.on_log(name, f"a line of {name.short}\udc80")
        logs.close()
        logs.close()
    kept = {path.name: path.read_text().splitlines() for path in (tmp_path / FOLDER).iterdir()}
    assert kept == {
        "worker_1.log": ["a line of worker 1\\udc80"] * 4,
        "shard_2.log": ["a line of shard 2\\udc80"] * 2,
    }
    assert stream.getvalue().count("a line of worker 0") == 2
    assert started == [1, 1]


def test_a_folder_that_cannot_be_written_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    logs = LogFiles(Terminal("net", io.StringIO(), on_started=lambda: None), tmp_path)
    for _ in range(3):
        logs.on_log(FAR, "line")
    logs.close()
    assert capsys.readouterr().err.count("cannot write") == 1
