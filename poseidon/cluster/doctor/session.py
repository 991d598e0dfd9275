"""A program of this package that runs on a host, and answers requests line by line.

Law: each answer has a time limit; a host that gives none, or one that cannot be read, is one
sentence.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from poseidon.cluster.agent.launcher import RemoteChannel
from poseidon.cluster.agent.line_channel import PipeLineChannel
from poseidon.cluster.machinefile import Host
from poseidon.cluster.python_command import sent_program_arguments
from poseidon.errors import JobError, printable

ANSWER_S = 30.0
_ERRORS_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A host to examine.

    Attributes:
        label: the host in messages.
        open: starts a Python program on it, given its arguments, and connects to its standard
            streams.
        clients: its lines in the machinefile.
        address: at which the others reach it; empty for this machine alone.
        facts: its description, see `poseidon.cluster.host_probe`.
    """

    label: str
    open: Callable[[Sequence[str]], RemoteChannel]
    clients: tuple[Host, ...] = ()
    address: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


class ProbeSession:
    """A program of this package that runs on a host and answers requests.

    One thread uses it at a time.

    Args:
        subject: the host.
        program: the module, whose source is sent.

    Raises:
        JobError: it cannot be started.
    """

    def __init__(self, subject: Subject, program: ModuleType) -> None:
        self.label = subject.label
        self._channel = subject.open(sent_program_arguments())
        source = Path(program.__file__ or "").read_bytes()
        self._send(b"%d" % (len(source) + 1))
        self._send(source)

    def ask(self, request: Mapping[str, Any], timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            JobError: none comes in time, or it cannot be read, or it is a problem.
        """
        timer = threading.Timer(timeout_s, self._channel.close)
        timer.daemon = True
        timer.start()
        try:
            self._send(json.dumps(request).encode())
            line = self._channel.receive()
        finally:
            timer.cancel()
        if line is None:
            raise JobError(
                f"{self.label}: its probe ended or did not answer within {timeout_s:g} "
                f"s{self._last_error()}"
            )
        try:
            answer: dict[str, Any] = json.loads(line)
            problem = answer.get("problem")
        except (ValueError, AttributeError) as error:
            raise JobError(
                f"{self.label}: its probe's answer cannot be read: {line[:200]!r}"
            ) from error
        if problem:
            raise JobError(f"{self.label}: {printable(str(problem))}")
        return answer

    def close(self) -> None:
        """End the probe."""
        self._channel.close()

    def _send(self, line: bytes) -> None:
        try:
            self._channel.send(line)
        except OSError as error:
            raise JobError(
                f"{self.label}: the connection to its probe broke: {error}{self._last_error()}"
            ) from error

    def _last_error(self) -> str:
        """Return the last line of its standard error, with what parts it from a sentence."""
        timer = threading.Timer(_ERRORS_S, self._channel.close)
        timer.daemon = True
        timer.start()
        last = b""
        while (line := self._channel.receive_error()) is not None:
            last = line or last
        timer.cancel()
        return f" ({printable(last.decode(errors='backslashreplace'))})" if last else ""


class _ChildChannel(PipeLineChannel):
    """The standard streams of a child: a `RemoteChannel`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise ValueError("expected a process with three pipes")
        super().__init__(process.stdout, process.stdin)
        self._errors = process.stderr

    def receive_error(self) -> bytes | None:
        """See `RemoteChannel`."""
        return self._errors.readline().rstrip(b"\r\n") or None


@contextmanager
def this_machine(facts: Mapping[str, Any]) -> Iterator[Sequence[Subject]]:
    """Return this machine as the only subject; its process ends with the block.

    Args:
        facts: its description.
    """
    with ExitStack() as stack:

        def start(arguments: Sequence[str]) -> RemoteChannel:
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                )
            )
            stack.callback(process.kill)
            return _ChildChannel(process)

        yield [Subject(label="this machine", open=start, facts=facts)]
