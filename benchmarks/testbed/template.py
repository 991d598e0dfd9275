"""A process that has imported torch and this package, and forks the processes of jobs.

    with Template(environment()) as template:
        process = template.fork("ps_server.__main__", ["--shard", "0"], log=file, namespace=None)

A job of two hosts is four processes, and each import takes seconds of a processor; a fork takes
none. The template itself runs nothing else, so that a forked process has what a started one has.

Law: no forked process outlives the template, and the template none of the process that made it.
Requests are lines of JSON on its standard input, answers lines on its standard output.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.testbed.errors import TestbedError

MODULES = (
    "benchmarks.testbed.ddp_worker",
    "benchmarks.testbed.poseidon_worker",
    "ps_server.__main__",
)
"""What is imported, and may be run."""
FURTHER = ("torch._dynamo",)
"""What torch imports when the first optimizer is made, which takes longer than torch itself."""
NAMESPACES = Path("/run/netns")
CLONE_NEWNET = 0x40000000
LOOK_S = 0.02
ROOT = Path(__file__).resolve().parents[2]


class Forked:
    """A forked process, as `subprocess.Popen` has it.

    Attributes:
        pid: of the process, which leads a session of its own.
        returncode: its status; None while it runs.
    """

    def __init__(self, template: Template, pid: int) -> None:
        self._template = template
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its status, or None while it runs."""
        if self.returncode is None:
            self.returncode = self._template.ask(poll=self.pid)["status"]
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return its status once it has ended.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        end_s = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end_s is not None and time.monotonic() >= end_s:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(LOOK_S)
        return status


class Template:
    """The side that asks for processes.

    Args:
        environment: of the template and of what it forks.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.testbed.template"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=dict(environment),
            text=True,
        )

    def fork(
        self,
        module: str,
        argv: Sequence[str],
        *,
        log: Path,
        namespace: str | None,
        variables: Mapping[str, str],
    ) -> Forked:
        """Run the `main` of one of `MODULES` in a new process.

        Args:
            module: its name.
            argv: its arguments.
            log: the file of its output.
            namespace: its network; None: this machine's.
            variables: further ones of its environment.

        Raises:
            TestbedError: the template is gone.
        """
        answer = self.ask(
            module=module,
            argv=list(argv),
            log=str(log),
            namespace=namespace,
            variables=dict(variables),
        )
        return Forked(self, answer["pid"])

    def ask(self, **request: object) -> dict[str, Any]:
        """Send a request. Return the answer.

        Raises:
            TestbedError: the template is gone.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:  # its pipe is broken, or closed
            raise TestbedError("the template of the workers is gone") from error
        line = self._process.stdout.readline()
        if not line:
            raise TestbedError("the template of the workers is gone")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the template and all that it has forked. Safe to call twice."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Template:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main() -> None:
    """Answer requests until standard input ends, then end all that runs."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the measuring process decides
        signal.signal(number, signal.SIG_IGN)
    for module in (*MODULES, *FURTHER):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection would write to pages that are shared
    running: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            answer = {"status": _status(request["poll"], running)}
        else:
            pid = _fork(request)
            running.add(pid)
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _status(pid: int, running: set[int]) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        return None
    running.discard(pid)
    return os.waitstatus_to_exitcode(status)


def _fork(request: dict[str, Any]) -> int:
    """Return the requested process once it leads its session, so that it can be ended as such."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(writing)
        _run(request)
    os.close(writing)
    os.read(reading, 1)  # until the child has closed its end
    os.close(reading)
    return pid


def _run(request: dict[str, Any]) -> None:
    """Become the requested process; does not return."""
    status = 1
    try:
        _redirect(request["log"])
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        if request["namespace"]:
            _enter(NAMESPACES / request["namespace"])
        os.environ.update(request["variables"])
        module = importlib.import_module(request["module"])
        sys.argv = [module.__file__ or request["module"], *request["argv"]]
        status = module.main() or 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001 - the process's outermost frame: its log has the error
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _redirect(log: str) -> None:
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, own in ((nothing, 0), (target, 1), (target, 2)):
        os.dup2(source, own)
    os.close(target)
    os.close(nothing)


def _enter(namespace: Path) -> None:
    """Move this process to a network namespace."""
    descriptor = os.open(namespace, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(namespace))
    os.close(descriptor)


if __name__ == "__main__":
    main()
