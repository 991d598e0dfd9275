"""An agent, as its launcher uses it: processes, files and checks of one host.

Law: no call blocks without a limit. When the channel ends, breaks or falls silent, each of the
agent's processes is reported as failed, with a sentence that names the host, then as ended; every
question that waits fails; the agent ends the processes on its host. Silence counts only while this
process itself was running.
"""

from __future__ import annotations

import itertools
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from poseidon.cluster.agent import messages as m
from poseidon.cluster.agent.messages import REPORTS, REQUESTS, PeerSilence, WireError
from poseidon.cluster.agent.remote_process import RemoteProcess
from poseidon.cluster.dial.channel import Channel
from poseidon.cluster.jobs.registry import JobRecord
from poseidon.cluster.process import Listener, ProcessSpec
from poseidon.errors import JobError, PoseidonError, printable
from poseidon.version import __version__
from ps_server.json_fields import fields_of, value_of

HEARTBEAT_S = 2.0
ANSWER_S = 60.0
MAX_QUEUED = 1000
MOST_SHOWN = 300
PART_BYTES = 1 << 16
"""The size of a part of a file: on a slow link it must not look like silence."""
PARTS_UNDER_WAY = 16
_A = TypeVar("_A")
# Each host knows its own paths to Python's modules.
_NOT_SENT = frozenset({"PYTHONPATH", "PYTHONUNBUFFERED"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTimeouts:
    """The timeouts between launcher and agent, in seconds.

    Attributes:
        hello_s: until the agent answers `AgentHello`; Python starts slowly on a busy machine.
        silence_s: without a report from the agent until it counts as lost; it sends heartbeats
            every two seconds.
        launcher_silence_s: without a request from the launcher until its agents take it for lost.
            It is longer, since a launcher may be stopped for a moment (Ctrl-Z), and when it has
            ended nothing waits for its agents.
        grace_s: from SIGTERM to SIGKILL when an agent ends its processes.
    """

    hello_s: float = 60.0
    silence_s: float = 10.0
    launcher_silence_s: float = 20.0
    grace_s: float = 5.0


class _Question:
    """A request that waits for its answer."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.done = threading.Event()
        self.report: m.Answer | m.Content | m.Refused | None = None

    def answer(self, report: m.Answer | m.Content | m.Refused) -> None:
        self.report = report
        self.done.set()


class RemoteAgent:
    """One agent, as the launcher sees it.

    Args:
        channel: to it; owned from here on.
        label: the host in messages, `ml@node3`.
        timeouts: between the two.
        on_signal: called when the machine or a scheduler asks the agent to end, with the agent and
            the name of the signal; None: it ends unless it may `leave`.
    """

    def __init__(
        self,
        channel: Channel,
        label: str,
        timeouts: AgentTimeouts | None = None,
        on_signal: Callable[[RemoteAgent, str], object] | None = None,
    ) -> None:
        self._channel = channel
        self.label = label
        """The host in messages."""
        self.leave: Callable[[], bool] = lambda: False
        """Lets the host leave the job that runs; returns False if it cannot. Its owner sets it."""
        self._timeouts = timeouts or AgentTimeouts()
        self._on_signal = on_signal
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._processes: dict[int, RemoteProcess] = {}
        self._questions: dict[int, _Question] = {}
        self._requests: queue.Queue[m.Request] = queue.Queue(MAX_QUEUED)
        self._welcomed = threading.Event()
        self._closed = threading.Event()
        self._heard = threading.Condition()
        self.lost: str | None = None
        """Why the agent is lost; None while it is not."""
        self.killed_by_user = False
        """Whether it is lost because the user has killed the job there."""
        self.refused = False
        """Whether the agent has said itself why it cannot serve."""
        self._broken = ""
        """Why nothing can be sent to it."""
        self._since_broken: PeerSilence | None = None
        self._welcome: m.AgentWelcome | None = None
        self._silence = PeerSilence(HEARTBEAT_S / 2, time.monotonic())
        self._in_listener = False
        self._threads = [
            self._thread("receive", self._receive),
            self._thread("send", self._send),
        ]

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    @property
    def scratch(self) -> str:
        """A folder there that only this user can enter, until the agent exits; known once
        connected.
        """
        return self._welcome.scratch if self._welcome is not None else ""

    @property
    def cores(self) -> int:
        """CPUs that processes there may use; known once connected."""
        return max(1, self._welcome.cores) if self._welcome is not None else 1

    def connect(self) -> None:
        """Send `AgentHello` and wait for the agent's answer.

        Raises:
            JobError: the agent does not answer, or is of a different version.
        """
        for thread in self._threads:
            thread.start()
        timeouts = self._timeouts
        self._request(
            m.AgentHello(
                protocol=m.PROTOCOL,
                version=__version__,
                silence_s=timeouts.launcher_silence_s,
                grace_s=timeouts.grace_s,
            )
        )
        if not self._welcomed.wait(timeouts.hello_s) and self.lost is None:
            self._lose(f"its agent did not answer within {timeouts.hello_s:g} s")
        if self.lost is not None:
            raise JobError(f"{self.label}: {self.lost}")

    def register(self, record: JobRecord) -> None:
        """Have the host put a job on record while processes of it run there."""
        self._request(m.Register(record=record))

    def start(self, spec: ProcessSpec, listener: Listener) -> RemoteProcess:
        """Start a process there, and wait for it.

        Raises:
            JobError: it cannot be started, or the agent is lost.
        """
        process = self.begin_start(spec, listener)
        process.await_start()
        return process

    def begin_start(self, spec: ProcessSpec, listener: Listener) -> RemoteProcess:
        """Ask for the start of a process; see `run_job`."""
        with self._lock:
            process = RemoteProcess(spec.name, next(self._ids), self.label, listener, self._request)
            self._processes[process.id] = process
        program, *arguments = spec.argv
        argv = (m.OWN_INTERPRETER if program == sys.executable else program, *arguments)
        sent = replace(spec, argv=argv, environment=_sent(spec.environment))
        self._request(m.StartProcess(id=process.id, spec=sent))
        if self.lost is not None:  # it was added after the loss was reported
            process.lose(self.lost, killed_by_user=self.killed_by_user)
        return process

    def import_ahead(
        self, environment: Mapping[str, str], imports: Sequence[str]
    ) -> threading.Event:
        """Let the host import modules for processes; return at once what is set when it has, or
        cannot.

        Args:
            environment: of these processes, as `ProcessSpec` has it.
            imports: the modules.
        """
        question = self._question()
        request = {"environment": _sent(environment), "imports": list(imports)}
        self._request(m.Ask(id=question.number, service=m.Service.TEMPLATE, request=request))
        return question.done

    def ask(
        self, service: m.Service, request: Mapping[str, object], timeout_s: float = ANSWER_S
    ) -> Mapping[str, object]:
        """Ask a service of the host; return its answer.

        Raises:
            JobError: it has no answer, does not answer in time, or the agent is lost.
        """
        question = self._question()
        self._request(m.Ask(id=question.number, service=service, request=request))
        answer: m.Answer = self._answer(question, timeout_s)
        return answer.answer

    def ask_for(
        self,
        kind: type[_A],
        service: m.Service,
        request: object = None,
        timeout_s: float = ANSWER_S,
    ) -> _A:
        """Ask a service that answers with a dataclass; return its answer.

        Args:
            kind: of the answer.
            service: as in `ask`.
            request: a dataclass of the service's module; None: it takes none.
            timeout_s: as in `ask`.

        Raises:
            JobError: as `ask`; or the answer is not of this kind.
        """
        answer = self.ask(service, {} if request is None else fields_of(request), timeout_s)
        try:
            return value_of(kind, answer)
        except (ValueError, PoseidonError) as error:
            raise JobError(
                f"{self.label}: its answer cannot be read: {str(answer)[:MOST_SHOWN]} ({error})"
            ) from error

    def send_file(self, local: Path, path: str, begin: int, sent: Callable[[int], object]) -> None:
        """Copy a file to the host, from the byte `begin` on.

        Args:
            local: the file here.
            path: on the host.
            begin: how much of it is there; 0 begins a new file.
            sent: called with the size of each part that has arrived.

        Raises:
            OSError: the file cannot be read.
            JobError: it cannot be written there, or the agent is lost.
        """
        under_way: list[tuple[_Question, int]] = []

        def arrive() -> None:
            question, size = under_way.pop(0)
            self._answer(question, ANSWER_S)
            sent(size)

        try:
            with local.open("rb") as source:
                source.seek(begin)
                while (part := source.read(PART_BYTES)) or begin == 0:
                    question = self._question()
                    self._request(m.Put(id=question.number, path=path, offset=begin, content=part))
                    under_way.append((question, len(part)))
                    if not part:
                        break
                    begin += len(part)
                    if len(under_way) >= PARTS_UNDER_WAY:
                        arrive()
            while under_way:
                arrive()
        finally:
            self._forget(question for question, _ in under_way)

    def read_file(
        self, path: str, write: Callable[[bytes], object], *, limit: int = 1 << 62
    ) -> int:
        """Copy a regular file of the host; return its size.

        Args:
            path: on the host.
            write: takes its parts, in order.
            limit: bytes of the largest file that is copied.

        Raises:
            JobError: it cannot be read there, is larger, changed meanwhile, or the agent is lost.
        """
        under_way: list[_Question] = []
        asked = read = 0
        size = 1  # known with the first part
        try:
            while read < size:
                while asked < size and len(under_way) < (PARTS_UNDER_WAY if asked else 1):
                    question = self._question()
                    number = question.number
                    self._request(m.ReadFile(id=number, path=path, offset=asked, size=PART_BYTES))
                    under_way.append(question)
                    asked += PART_BYTES
                part = self._answer(under_way.pop(0), ANSWER_S)
                size = part.size
                if size > limit:
                    raise JobError(
                        f"{self.label}: {path} has {size} bytes; expected at most {limit}"
                    )
                if len(part.content) != min(PART_BYTES, size - read):
                    raise JobError(f"{self.label}: {path} changed while it was copied")
                write(part.content)
                read += len(part.content)
        finally:
            self._forget(under_way)
        return size

    def is_heard(self, timeout_s: float) -> bool:
        """Wait for a further report of the agent; return False if none comes in time."""
        with self._heard:
            before = self._silence.heard_s
            return (
                self._heard.wait_for(
                    lambda: self._silence.heard_s != before or self.lost is not None, timeout_s
                )
                and self.lost is None
            )

    def end_all(self) -> None:
        """Have the agent end its processes and forget the job; it stays for a later job."""
        if self.lost is not None or self._closed.is_set():
            return
        question = self._question()
        self._request(m.EndAll(id=question.number))
        with suppress(JobError):  # a lost agent ends them by itself
            self._answer(question, self._timeouts.grace_s + ANSWER_S)
        with self._lock:
            self._processes.clear()

    def dismiss(self) -> None:
        """Have the agent end what still runs there and exit; return at once."""
        self._request(m.Shutdown())

    def close(self, status: int = 0) -> None:
        """Have the agent end what still runs there and exit; return when the channel has ended.

        May be called twice.

        Args:
            status: the exit status of an agent that a scheduler has started.
        """
        if not self._closed.is_set() and self.lost is None and self._threads[0].is_alive():
            self._request(m.Shutdown(status=status))
            self._threads[0].join(self._timeouts.grace_s + HEARTBEAT_S)
        self._closed.set()
        self._channel.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(HEARTBEAT_S)

    def _question(self) -> _Question:
        with self._lock:
            question = _Question(next(self._ids))
            self._questions[question.number] = question
        if self.lost is not None:
            question.answer(m.Refused(id=question.number, message=self.lost))
        return question

    def _forget(self, questions: Iterable[_Question]) -> None:
        with self._lock:
            for question in questions:
                self._questions.pop(question.number, None)

    def _answer(self, question: _Question, timeout_s: float) -> Any:
        answered = question.done.wait(timeout_s)
        self._forget([question])
        report = question.report
        if not answered or report is None:
            raise JobError(f"{self.label}: no answer within {timeout_s:g} s")
        if isinstance(report, m.Refused):
            raise JobError(f"{self.label}: {printable(report.message)}")
        return report

    def _thread(self, role: str, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - the processes of the agent are the owners
                self._lose(f"its connection failed: {type(error).__name__}: {error}")

        return threading.Thread(target=run, name=f"poseidon {self.label} {role}", daemon=True)

    def _request(self, request: m.Request) -> None:
        # A full queue belongs to a channel that carries nothing any more; its silence is about to
        # be noticed.
        with suppress(queue.Full):
            self._requests.put_nowait(request)

    def _send(self) -> None:
        while not self._closed.is_set() and self.lost is None:
            try:
                request: m.Request = self._requests.get(timeout=HEARTBEAT_S / 2)
            except queue.Empty:
                request = m.Heartbeat()
            if not self._send_one(request):
                return

    def _send_one(self, request: m.Request) -> bool:
        """Send a request, and look for silence; return whether others may follow."""
        if not self._broken:
            try:
                self._channel.send(REQUESTS.encode(request))
            except OSError as error:
                self._broken = f"the connection to it broke ({str(error) or type(error).__name__})"
                self._since_broken = PeerSilence(HEARTBEAT_S / 2, time.monotonic())
        if isinstance(request, m.Shutdown):
            if self._broken:
                self._lose(self._broken)
            return False
        if not self._in_listener and (why := self._why_lost()):
            self._lose(why)
        return True

    def _why_lost(self) -> str:
        """Return why the agent counts as lost by now; empty: it does not."""
        now_s = time.monotonic()
        if self._since_broken is not None:  # what it has sent before is taken first: it may say why
            return self._broken if self._since_broken.look(now_s) > HEARTBEAT_S else ""
        if self._broken:
            return self._broken
        limit_s = self._timeouts.silence_s
        is_silent = self._silence.look(now_s) > limit_s and self._welcomed.is_set()
        return f"it has sent nothing for {limit_s:g} s" if is_silent else ""

    def _receive(self) -> None:
        while self._receive_one():
            pass

    def _receive_one(self) -> bool:
        """Take the next report, once it has come; return whether others may follow."""
        try:
            encoded = self._channel.receive()
        except OSError as error:
            self._lose(str(error))
            return False
        if encoded is None:
            self._lose(self._broken or "the connection to it has ended")
            return False
        self._in_listener = True
        try:
            self._take(REPORTS.decode(encoded))
            return self.lost is None  # otherwise `_take` has closed the channel
        except WireError as error:
            self._lose(f"what answers there is not an agent of this job ({error})")
            return False
        finally:
            with self._heard:
                self._silence.heard_s = time.monotonic()
                self._in_listener = False
                self._heard.notify_all()

    def _take(self, report: m.Report) -> None:
        if isinstance(report, m.AgentWelcome):
            self._welcome = report
            self._welcomed.set()
        elif isinstance(report, m.Refused) and report.id == m.AGENT_ITSELF:
            self.refused = True
            self._lose(printable(report.message))
        elif isinstance(report, m.KilledByUser):
            self._lose("the job was killed there", killed_by_user=True)
        elif isinstance(report, m.Exited) and report.id == m.AGENT_ITSELF:
            self._lose("its agent has ended")
        elif isinstance(report, m.Signaled):
            self._signaled(report.signal)
        elif isinstance(report, m.Answer | m.Content | m.Refused) and report.id in self._questions:
            self._questions[report.id].answer(report)
        elif isinstance(report, m.Started | m.Refused | m.EventReport | m.OutputReport | m.Exited):
            process = self._processes.get(report.id)
            if process is not None:
                process.take(report)

    def _signaled(self, name: str) -> None:
        if self._on_signal is not None:
            self._on_signal(self, name)
        elif not self.leave():
            # `_send` finds it lost, after all has been taken that is here already: where this
            # process was stopped meanwhile, that may be that the user has killed the job there.
            self._broken = f"its agent was ended by {name}"

    def _lose(self, why: str, *, killed_by_user: bool = False) -> None:
        with self._lock:
            if self.lost is not None or self._closed.is_set():
                return
            self.lost, self.killed_by_user = why, killed_by_user
            processes = list(self._processes.values())
            questions = dict(self._questions)
        self._welcomed.set()
        with self._heard:
            self._heard.notify_all()
        with ExitStack() as stack:  # each callback runs, whatever the others raise
            for process in reversed(processes):
                stack.callback(process.lose, why, killed_by_user=killed_by_user)
            for number, question in questions.items():
                stack.callback(question.answer, m.Refused(id=number, message=why))
            stack.callback(self._channel.close)


def _sent(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in _NOT_SENT}
