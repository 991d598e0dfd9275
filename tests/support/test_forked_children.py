"""Forked processes have what started ones have."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from poseidon.cluster.agent import child
from poseidon.launcher.processes import child_environment
from tests.support.forked_children import Forked, forked_children

PROGRAM = """
import json, os, random, signal, sys
import numpy as np
found = {
    "argv": sys.argv[1:2] + sys.argv[3:], "name": __name__, "folder": os.getcwd(), "path": sys.path,
    "variables": dict(os.environ), "leads": os.getpid() == os.getpgid(0) == os.getsid(0),
    "signals": [str(signal.getsignal(number)) for number in signal.valid_signals()],
    "project": [name for name in sys.modules if name.startswith(("poseidon", "ps_server", "tests"))],
    "files": [number for number in range(100) if os.path.exists(f"/proc/self/fd/{number}")],
    "drawn": [np.random.rand(), random.random()],
    "read": sys.stdin.readline(),
}
with os.fdopen(int(sys.argv[2]), "w") as file:
    json.dump(found, file)
print("out")
print("err", file=sys.stderr)
sys.stdin.read()
sys.exit(3)
"""


def run(start: bool, folder: Path, environment: dict[str, str]) -> tuple[dict[str, Any], object]:
    """Run the program in a process. Return what it finds, and what is seen of it from outside."""
    reading, writing = os.pipe()
    argv = [sys.executable, "-c", PROGRAM, "ps_server", str(writing), "--job", "größe"]
    with contextlib.nullcontext() if start else forked_children():
        process = child.subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=str(folder),
            env=environment,
            start_new_session=True,
            pass_fds=[writing],
        )
    assert isinstance(process, subprocess.Popen if start else Forked)
    os.close(writing)
    process.stdin.write(b"a line\n")
    process.stdin.flush()
    with os.fdopen(reading, "rb") as file:
        found = json.load(file)
    found["files"].remove(writing)
    shown = psutil.Process(process.pid)
    words = [word for word in shown.cmdline() if word != str(writing)]
    assert shown.ppid() == os.getpid()
    process.stdin.close()
    with process.stdout as out, process.stderr as err:
        texts = out.read(), err.read()
    return found, (" ".join(words).rstrip(), texts, process.wait())


@pytest.mark.processes
def test_a_fork_is_as_a_process_that_is_started(tmp_path: Path) -> None:
    environment = {**os.environ, **child_environment(threads=1), "POSEIDON_HOME": "an ö"}
    environment.pop("PYTEST_CURRENT_TEST")
    runs = [run(start, tmp_path, environment) for start in (True, False, False)]
    draws = [found.pop("drawn") for found, _ in runs]
    assert len({draw for pair in draws for draw in pair}) == 6  # no two draw alike
    assert runs[0][0]["argv"] == ["ps_server", "--job", "größe"]
    assert runs[0][1][1:] == ((b"out\n", b"err\n"), 3)
    assert runs[1] == runs[0] and runs[2] == runs[0]
