"""An agent, as its launcher uses it: processes, files and checks of one host.

Law: no call blocks without a limit. When the channel ends, breaks or falls silent, each of the
agent's processes is reported as failed, with a sentence that names the host, then as ended; every
question that waits fails; the agent ends the processes on its host. Silence counts only while this
process itself was running.
"""

from __future__ import annotations

import math
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

from poseidon.cluster.agent import messages as m
from poseidon.cluster.agent.messages import REPORTS, REQUESTS, PeerSilence, WireError
from poseidon.cluster.agent.questions import ANSWER_S, Question, Recipients, in_order
from poseidon.cluster.agent.remote_process import Loss, RemoteProcess
from poseidon.cluster.dial.channel import Channel
from poseidon.cluster.jobs.registry import JobRecord
from poseidon.cluster.process import Listener, ProcessSpec
from poseidon.errors import JobError, PoseidonError, printable
from poseidon.version import __version__
from ps_server.json_fields import fields_of, value_of
from ps_server.monitor import owned_thread

HEARTBEAT_S = 2.0
MAX_QUEUED = 1000
MOST_SHOWN = 300
PART_BYTES = 1 << 16
"""The size of a part of a file: on a slow link it must not look like silence."""
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


class _Hearing:
    """When an agent was heard, and since when it cannot be sent to."""

    def __init__(self) -> None:
        self.heard = threading.Event()
        """Set by each report, and by the loss."""
        self.limit_s = math.inf
        """Of silence."""
        self.broken = ""
        """Why nothing can be sent to it; empty: it can."""
        self._silence = _new_silence()
        self._since_broken: PeerSilence | None = None
        self._in_listener = False

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Enter while a report is taken: the listener may take long."""
        self._in_listener = True
        try:
            yield
        finally:
            self._silence.heard_s = time.monotonic()
            self._in_listener = False
            self.heard.set()

    def break_off(self, error: OSError) -> None:
        """Note that sending has failed. What has come before is taken first: it may say why."""
        self.broken = f"the connection to it broke ({str(error) or type(error).__name__})"
        self._since_broken = _new_silence()

    def why_lost(self) -> str:
        """Return why the agent counts as lost by now; empty: it does not."""
        if self._in_listener:
            return ""
        now_s = time.monotonic()
        if self._since_broken is not None:
            return self.broken if self._since_broken.look(now_s) > HEARTBEAT_S else ""
        is_silent = self._silence.look(now_s) > self.limit_s
        return self.broken or (f"it has sent nothing for {self.limit_s:g} s" if is_silent else "")


def _new_silence() -> PeerSilence:
    return PeerSilence(HEARTBEAT_S / 2, time.monotonic())


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
        self._recipients = Recipients()
        self._requests: queue.Queue[m.Request] = queue.Queue(MAX_QUEUED)
        self._hello = threading.Event()
        """Answered, or the agent is lost."""
        self.welcome = m.AgentWelcome(cores=1, scratch="")
        """What is known of the host, once connected."""
        self._hearing = _Hearing()
        self._closed = threading.Event()
        self._threads = [
            self._thread("receive", self._receive),
            self._thread("send", self._send),
        ]

    @property
    def lost(self) -> Loss | None:
        """Why the agent is lost; None while it is not."""
        return self._recipients.loss

    @property
    def killed_by_user(self) -> bool:
        """Whether it is lost because the user has killed the job there."""
        return self.lost is not None and self.lost.killed_by_user

    @property
    def refused(self) -> bool:
        """Whether what answers there has said itself why it cannot serve."""
        return self.lost is not None and self.lost.refused

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

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
        if not self._hello.wait(timeouts.hello_s):
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
        process = self._recipients.add(
            lambda number: RemoteProcess(spec.name, number, self.label, listener, self._request)
        )
        program, *arguments = spec.argv
        argv = (m.OWN_INTERPRETER if program == sys.executable else program, *arguments)
        sent = replace(spec, argv=argv, environment=_sent(spec.environment))
        self._request(m.StartProcess(id=process.id, spec=sent))
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
        request = {"environment": _sent(environment), "imports": list(imports)}
        return self._begin(partial(m.Ask, service=m.Service.TEMPLATE, request=request)).done

    def ask(
        self, service: m.Service, request: Mapping[str, object], timeout_s: float = ANSWER_S
    ) -> Mapping[str, object]:
        """Ask a service of the host; return its answer.

        Raises:
            JobError: it has no answer, does not answer in time, or the agent is lost.
        """
        question = self._begin(partial(m.Ask, service=service, request=request))
        answer: m.Answer = question.answer(timeout_s)
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
        sizes: deque[int] = deque()

        def parts() -> Iterator[Question]:
            offset = begin
            with local.open("rb") as source:
                source.seek(offset)
                while (part := source.read(PART_BYTES)) or offset == 0:
                    sizes.append(len(part))
                    yield self._begin(partial(m.Put, path=path, offset=offset, content=part))
                    if not part:
                        return
                    offset += len(part)

        for _ in in_order(parts()):
            sent(sizes.popleft())

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

        def ask(offset: int) -> Question:
            make = partial(m.ReadFile, path=path, offset=offset, size=PART_BYTES)
            return self._begin(make, m.Content)

        first, read = ask(0).answer(), 0
        size: int = first.size
        if size > limit:
            raise JobError(f"{self.label}: {path} has {size} bytes; expected at most {limit}")
        for part in chain([first], in_order(map(ask, range(PART_BYTES, size, PART_BYTES)))):
            if part.size != size or len(part.content) != min(PART_BYTES, size - read):
                raise JobError(f"{self.label}: {path} changed while it was copied")
            write(part.content)
            read += len(part.content)
        return size

    def is_heard(self, timeout_s: float) -> bool:
        """Wait for a further report of the agent; return False if none comes in time."""
        self._hearing.heard.clear()
        return self.lost is None and self._hearing.heard.wait(timeout_s) and self.lost is None

    def end_all(self) -> None:
        """Have the agent end its processes and forget the job; it stays for a later job."""
        if not self._closed.is_set():
            with suppress(JobError):  # a lost agent ends them by itself
                self._begin(m.EndAll).answer(self._timeouts.grace_s + ANSWER_S)

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

    def _begin(
        self, make: Callable[..., m.Request], kind: type[m.Answer | m.Content] = m.Answer
    ) -> Question:
        """Ask a question; `make` takes its id, `kind` is its answer's."""
        question = self._recipients.add(lambda number: Question(number, self.label, kind))
        self._request(make(id=question.id))
        return question

    def _thread(self, role: str, work: Callable[[], None]) -> threading.Thread:
        def failed(error: Exception) -> None:
            self._lose(f"its connection failed: {type(error).__name__}: {error}")

        return owned_thread(f"poseidon {self.label} {role}", work, failed)

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
        if not self._hearing.broken:
            try:
                self._channel.send(REQUESTS.encode(request))
            except OSError as error:
                self._hearing.break_off(error)
        if isinstance(request, m.Shutdown):
            if self._hearing.broken:
                self._lose(self._hearing.broken)
            return False
        if why := self._hearing.why_lost():
            self._lose(why)
        return True

    def _receive(self) -> None:
        while self._receive_one():
            pass

    def _receive_one(self) -> bool:
        """Take the next report, once it has come; return whether others may follow."""
        try:
            encoded = self._channel.receive()
        except OSError as error:
            self._lose(str(error), refused=True)
            return False
        if encoded is None:
            self._lose(self._hearing.broken or "the connection to it has ended")
            return False
        try:
            with self._hearing.taking():
                self._take(REPORTS.decode(encoded))
        except WireError as error:
            self._lose(f"what answers there is not an agent of this job ({error})")
        return self.lost is None  # otherwise `_lose` has closed the channel

    def _take(self, report: m.Report) -> None:
        if isinstance(report, m.AgentWelcome):
            self.welcome, self._hearing.limit_s = report, self._timeouts.silence_s
            self._hello.set()
        elif isinstance(report, m.KilledByUser):
            self._lose("the job was killed there", killed_by_user=True)
        elif isinstance(report, m.Signaled):
            self._signaled(report.signal)
        elif isinstance(report, m.Refused) and report.id == m.AGENT_ITSELF:
            self._lose(printable(report.message), refused=True)
        elif isinstance(report, m.Exited) and report.id == m.AGENT_ITSELF:
            self._lose("its agent has ended")
        elif not isinstance(report, m.Join | m.Heartbeat):
            self._recipients.take(report.id, report)

    def _signaled(self, name: str) -> None:
        if self._on_signal is not None:
            self._on_signal(self, name)
        elif not self.leave():
            # `_send` finds it lost, after all has been taken that is here already: where this
            # process was stopped meanwhile, that may be that the user has killed the job there.
            self._hearing.broken = f"its agent was ended by {name}"

    def _lose(self, why: str, *, killed_by_user: bool = False, refused: bool = False) -> None:
        if self.lost is not None or self._closed.is_set():
            return
        loss = Loss(why=why, killed_by_user=killed_by_user, refused=refused)
        with ExitStack() as stack:  # each callback runs, whatever the others raise
            for tell in reversed(self._recipients.lose(loss)):
                stack.callback(tell)
            stack.callback(self._channel.close)
            self._hello.set()
            self._hearing.heard.set()


def _sent(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in _NOT_SENT}
