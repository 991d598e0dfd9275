"""The start of a worker on a host whose packages cannot be imported."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from poseidon.base.settings import EVENTS_FD_VARIABLE
from poseidon.cluster.agent.child import base_environment
from poseidon.launcher.processes import PROCESS


@pytest.mark.processes
@pytest.mark.parametrize("has_own_stdout", [False, True])
def test_a_host_whose_torch_cannot_be_imported_is_one_sentence(
    tmp_path: Path, has_own_stdout: bool
) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12:\\n cannot open')\n")
    environment = base_environment()
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"
    inlet, outlet = os.pipe()
    if has_own_stdout:
        environment[EVENTS_FD_VARIABLE] = str(outlet)
    done = subprocess.run(
        (sys.executable, "-m", PROCESS, "script", "--job", "j", "--rank", "3"),
        env=environment,
        capture_output=True,
        timeout=60,
        check=False,
        pass_fds=(outlet,),
    )
    os.close(outlet)
    with os.fdopen(inlet, "rb") as events:
        told = events.read()
    assert (done.returncode, done.stderr) == (1, b"")
    assert (done.stdout == b"") == has_own_stdout
    assert json.loads(told or done.stdout) == {
        "event": "error",
        "message": f"worker 3 cannot start on {socket.gethostname()}: OSError: libcudart.so.12: "
        "cannot open; install there the same packages as on the launcher's host",
        "exit_code": 1,
    }
