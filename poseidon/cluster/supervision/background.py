"""Starting a launcher in the background, and waiting until its job runs.

The launcher gets a session of its own, no terminal, and a pipe, to which it writes one JSON line:
`{"event": "started"}` or `{"event": "failed", "message": ..., "exit_code": ...}`.

Law: the caller returns only when the job runs, and otherwise raises the error that kept it from
running.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from poseidon.base.paths import own_command, short_path
from poseidon.base.settings import STATUS_FD_VARIABLE, inherited_environment
from poseidon.cluster.process import describe_exit
from poseidon.cluster.python_command import module_arguments
from poseidon.errors import JobError

_MAX_REPORT_BYTES = 1 << 16
_LAST_LINES_BYTES = 4096
_POLL_S = 0.02
EXIT_S = 30.0
"""How long to wait for a launcher that has reported a failure; after that it is left behind."""


class StartReport:
    """The launcher's end of the pipe.

    Args:
        fd: `Settings.status_fd`; None in the foreground, where nothing is sent.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        if fd is not None:
            try:
                os.set_inheritable(fd, False)
            except OSError as error:
                raise JobError(f"${STATUS_FD_VARIABLE}={fd} is not an open descriptor") from error

    def started(self) -> None:
        """Report that the job runs. Only the first report counts."""
        self._send({"event": "started"})

    def failed(self, message: str, exit_code: int) -> None:
        """Report that the job did not start, and why."""
        self._send(
            {
                "event": "failed",
                "message": message[: _MAX_REPORT_BYTES // 8],
                "exit_code": exit_code,
            }
        )

    def _send(self, report: Mapping[str, object]) -> None:
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        with suppress(OSError):  # the parent may have been interrupted: the job continues
            os.write(fd, json.dumps(report).encode() + b"\n")
        os.close(fd)


def run_in_background(argv: Sequence[str], log: Path, *, timeout_s: float) -> int:
    """Start a launcher in the background and wait until its job runs.

    Args:
        argv: the launcher's program, an absolute path, and its arguments, without `--background`.
        log: the file that its output is appended to; its folder is made.
        timeout_s: until the job runs; longer than the launcher's own limit.

    Returns:
        The launcher's pid.

    Raises:
        JobError: the job did not start; with the launcher's own message and exit code if it sent
            one.
    """
    read_fd, write_fd = os.pipe()
    new = not log.exists()
    try:
        pid = _spawn(argv, log, write_fd)
    finally:
        os.close(write_fd)
    # The pipe closes however the wait ends.
    try:
        report = _read_report(read_fd, timeout_s)
    except BaseException:
        os.kill(pid, signal.SIGTERM)
        raise
    finally:
        os.close(read_fd)
    if report is None:
        status = _wait_for_exit(pid)
        how = "does not report" if status is None else describe_exit(status)
        raise JobError(
            f"the launcher {how} before the job had started; its last line in {log}: "
            f"'{_last_line(log)}'"
        )
    if report.get("event") != "started":
        error = JobError(str(report.get("message")))
        code = report.get("exit_code")
        error.exit_code = code if isinstance(code, int) else 1
        _wait_for_exit(pid)
        if new:
            log.unlink(missing_ok=True)  # it holds the same message
        raise error
    return pid


def how_to_follow(job: str, pid: int, log: Path) -> str:
    """Return the message to the user whose job now runs in the background."""
    return (
        f"Job {job} runs in the background (launcher pid {pid}).\n  follow it:  tail -f "
        f"{shlex.quote(short_path(log))}\n  stop it:    {own_command()} kill {job}"
    )


def this_command(arguments: Sequence[str]) -> list[str]:
    """Return the argv that runs `poseidon` with these arguments under this interpreter."""
    return [sys.executable, *module_arguments("poseidon", *arguments)]


def _spawn(argv: Sequence[str], log: Path, write_fd: int) -> int:
    environment = {**inherited_environment(), STATUS_FD_VARIABLE: str(write_fd)}
    os.set_inheritable(write_fd, True)
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return os.posix_spawn(
            argv[0],
            list(argv),
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
    except OSError as error:
        raise JobError(
            f"cannot start '{argv[0]}' in the background with its log in {log}: {error.strerror}"
        ) from error


def _wait_for_exit(pid: int) -> int | None:
    """Reap a child; return its exit status, or None when it has not ended within `EXIT_S`."""
    deadline_s = time.monotonic() + EXIT_S
    while True:
        reaped, status = os.waitpid(pid, os.WNOHANG)
        if reaped:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline_s:
            return None
        time.sleep(_POLL_S)


def _read_report(fd: int, timeout_s: float) -> Mapping[str, object] | None:
    """Return the launcher's report; None if it ended without one."""
    end_s = time.monotonic() + timeout_s
    text = b""
    while not text.endswith(b"\n"):
        readable, _, _ = select.select([fd], [], [], max(0.0, end_s - time.monotonic()))
        if not readable:
            raise JobError(f"the job did not start within {timeout_s:g} s; it was stopped")
        chunk = os.read(fd, _MAX_REPORT_BYTES)
        if not chunk:
            return None
        text += chunk
    report = json.loads(text)
    assert isinstance(report, dict)
    return report


def _last_line(log: Path) -> str:
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - _LAST_LINES_BYTES))
            lines = stream.read().decode("utf-8", errors="backslashreplace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
