"""Forked processes have what started ones have."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from poseidon.cluster.agent.child import ChildSettings, base_environment, start_child
from poseidon.cluster.agent.template import Template, Templates
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.process import ProcessSpec
from poseidon.cluster.python_command import program_arguments
from tests.support.live_processes import none_left
from tests.support.recording_listener import RecordingListener

NAME = ProcessName(role=Role.WORKER, index=0, client=0, host="127.0.0.1")
PROGRAM = """
import json, os, random, signal, sys
fd = int(os.environ.pop("POSEIDON_EVENTS_FD"))
found = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "name": __name__, "folder": os.getcwd(),
    "path": sys.path, "leads": os.getpid() == os.getpgid(0) == os.getsid(0),
    "variables": {k: v for k, v in os.environ.items() if k != "PWD"},  # a shell sets it
    "imported": "wave" in sys.modules,
    "signals": [str(signal.getsignal(number)) for number in signal.valid_signals()],
    "files": [n for n in range(fd) if os.path.exists(f"/proc/self/fd/{n}")],
    "read": sys.stdin.readline(), "parent": os.getppid(), "collects": __import__("gc").isenabled(),
    "shown": open("/proc/self/cmdline").read().rstrip(" \\0").split("\\0"),
}
import numpy as np
drawn = [np.random.rand(), random.random()]
drawn += [sys.modules["torch"].rand(1).item()] if found["imported"] else []
with os.fdopen(fd, "w") as file:
    print(json.dumps({"event": "found", "found": found, "drawn": drawn}), file=file)
print("out")
print("err", file=sys.stderr)
sys.stdin.readline()
sys.exit(3)
"""

pytestmark = pytest.mark.processes


@pytest.fixture
def templates() -> Iterator[Templates]:
    with closing(Templates()) as made:
        yield made


def run(
    templates: Templates | None, folder: Path, *imports: str, ignores: bool = False
) -> tuple[dict[str, Any], list[float]]:
    """Run the program in a process. Return what it finds and is heard of it, and what it draws."""
    listener = RecordingListener()
    spec = ProcessSpec(
        name=NAME,
        argv=(sys.executable, *program_arguments(PROGRAM, "ps_server", "--job", "größe")),
        environment={"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"},
        first_line=b"a line",
        own_stdout=True,
        ignore_signals=ignores,
        imports=imports,
    )
    settings = ChildSettings(environment=base_environment(), folder=str(folder))
    process = start_child(spec, listener, settings, templates)
    try:
        *heard, (_, event) = listener.until("found")
        assert isinstance(event, dict)
        assert psutil.Process(process.pid).ppid() == os.getpid()
        process.send_line(b"")
        heard += listener.until("exited")
    finally:
        process.close()
    return {**event["found"], "heard": sorted(map(str, heard))}, event["drawn"]


@pytest.mark.parametrize("ignores", [False, True])
def test_a_fork_is_as_a_process_that_is_started(
    templates: Templates, tmp_path: Path, ignores: bool
) -> None:
    imports = ("torch", "wave")
    started, drawn = run(None, tmp_path, *imports, ignores=ignores)
    assert started["heard"] == ["('exited', 3)", "('log', 'err')", "('log', 'out')"]
    assert not started.pop("imported")
    draws = set(drawn)
    for _ in range(2):
        forked, drawn = run(templates, tmp_path, *imports, ignores=ignores)
        assert forked.pop("imported")
        assert forked == started
        draws.update(drawn)
    assert len(draws) == 8  # no two draw alike


@pytest.mark.parametrize("open_files", [0, 300])
def test_a_fork_has_the_descriptors_of_its_owner(open_files: int) -> None:
    """The template has other ones of these numbers."""
    with closing(Template(sys.executable, (), os.environ)) as template, ExitStack() as opened:
        for _ in range(open_files):
            opened.callback(os.close, os.dup(0))
        for _ in range(8):
            reading, writing = os.pipe()
            fork = template.fork(
                (sys.executable, *program_arguments(f"import os; os.write({writing}, b'here')")),
                environment=os.environ,
                folder=None,
                passed=[writing],
                ignores_signals=False,
            )
            opened.callback(os.close, reading)
            os.close(writing)
            assert os.read(reading, 9) == b"here"
            with fork.stdin, fork.stdout, fork.stderr:
                assert fork.wait() == 0


def test_a_fork_that_fails_leaves_nothing() -> None:
    others = {child.pid for child in psutil.Process().children()}
    with closing(Template(sys.executable, (), os.environ)) as template:
        for _ in range(2):
            with pytest.raises(OSError, match="not forked"):
                template.fork(
                    (sys.executable, *program_arguments("", "x" * 5000)),
                    environment=os.environ,
                    folder=None,
                    passed=(),
                    ignores_signals=False,
                )
            children = {child.pid for child in psutil.Process().children()}
            assert children - others == {template._process.pid}


UNFIT = {
    "missing": "import no_such_module",
    "speaks": "print('deprecated')",
    "has a thread": "import threading; threading.Thread(target=threading.Event().wait).start()",
    "ends": "raise SystemExit",
}


@pytest.mark.parametrize("text", UNFIT.values(), ids=UNFIT)
def test_a_process_is_started_where_its_modules_have_effects(
    templates: Templates, tmp_path: Path, text: str
) -> None:
    (tmp_path / "unfit.py").write_text(text, encoding="ascii")
    found, _ = run(templates, tmp_path, "unfit", "wave")
    assert not found["imported"]


def test_a_template_ends_with_its_owner_and_leaves_its_forks(tmp_path: Path) -> None:
    template = Template(sys.executable, (), os.environ)
    program = program_arguments("import sys; print(sys.stdin.readline())")
    fork = template.fork(
        (sys.executable, *program),
        environment=os.environ,
        folder=None,
        passed=(),
        ignores_signals=False,
    )
    pid = template._process.pid
    template.close()
    template.close()
    assert none_left([pid])
    with fork.stdin as stdin, fork.stdout as stdout, fork.stderr:
        stdin.write(b"still here\n")
        stdin.close()
        assert stdout.read() == b"still here\n\n"
    assert fork.wait() == 0


def test_a_template_without_its_owner_ends() -> None:
    program = (
        "import os, sys; from poseidon.cluster.agent.template import Template; "
        "template = Template(sys.executable, (), os.environ); template.wait(); "
        "print(template._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert none_left([int(done.stdout)])
