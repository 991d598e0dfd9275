"""Agents in the tasks that torchrun, Slurm, MPI or Kubernetes has started: they dial rank 0.

    with Rendezvous("10.0.0.5", 29500, keys, size=8) as rendezvous:       # rank 0
        agents = rendezvous.gather(own_join, timeout_s=300)
        ...
        rendezvous.dismiss(0)

    status = run_task("tcp://10.0.0.5:29500", keys, join, timeout_s=300)  # every other task

Every task is an agent, over ZeroMQ; on each host the one with local rank 0 gets the processes. Rank
0's own agent is in its process.

Law: only holders of the key can connect, and nobody once all tasks have joined. One thread uses a
socket. However the block is left, every task that joined is dismissed; when rank 0 falls silent or
is lost, all that a task has started is ended, and the task with it.
"""

from __future__ import annotations

import queue
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from poseidon.cluster.agent.child import ChildSettings
from poseidon.cluster.agent.host import Agent, AgentSettings
from poseidon.cluster.agent.messages import (
    AGENT_ITSELF,
    REPORTS,
    REQUESTS,
    Exited,
    Join,
    Report,
    Shutdown,
    WireError,
)
from poseidon.cluster.agent.remote import AgentTimeouts, RemoteAgent
from poseidon.cluster.dial.channel import QueueChannel
from poseidon.cluster.dial.dialer import Dialer, dial_here
from poseidon.cluster.jobs.kill import USER_KILL
from poseidon.cluster.machinefile import Host, socket_host
from poseidon.cluster.process import for_each_host
from poseidon.cluster.rendezvous import TaskHost, hosts_of, rejection_reason
from poseidon.cluster.supervision.signals import exit_code_of, handled
from poseidon.errors import JobError
from poseidon.version import __version__
from ps_server.errors import ServerError
from ps_server.keys import Keyring
from ps_server.transport.zmq_sockets import ZmqClientTransport, ZmqServerTransport

POLL_S = 0.25
CLOSE_S = 5.0
LINGER_S = 2.0
"""How long a closed channel tries to send its last report."""
TIMEOUTS = AgentTimeouts(silence_s=15.0)
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_CHILDREN = ChildSettings(ignore_signals=True)


@dataclass(slots=True, kw_only=True)
class _Member:
    """A task that has joined.

    Attributes:
        join: what it has sent.
        channel: the server's end of its channel; what is received from it is sent to the task.
        agent: the task as an agent; None until all have joined.
        waiting: a message that its socket could not take yet.
    """

    join: Join
    channel: QueueChannel
    far: QueueChannel
    agent: RemoteAgent | None = None
    waiting: bytes | None = None


class Rendezvous:
    """The rendezvous server, on rank 0; see the module's docstring.

    Args:
        host: the address to listen on, a number.
        port: there; 0 takes a free one.
        keys: rank 0's; see `poseidon.cluster.rendezvous`.
        size: the number of tasks, this process's own included.
        on_signal: called when a scheduler asks another task to end, with what lets its host leave
            the job (`RemoteAgent.leave`). It returns at once.

    Raises:
        JobError: the address cannot be listened on.
    """

    def __init__(
        self,
        host: str,
        port: int,
        keys: Keyring,
        *,
        size: int,
        on_signal: Callable[[Callable[[], bool]], object] = lambda _: None,
    ) -> None:
        try:
            self._transport = ZmqServerTransport(f"tcp://{socket_host(host)}:{port}", keys)
        except ServerError as error:
            raise JobError(f"{error}; choose a different port with --rendezvous_port") from error
        self.address = self._transport.address
        """The address that the tasks connect to."""
        self._size = size
        self._on_signal = on_signal
        self._members: dict[bytes, _Member] = {}
        self._own: RemoteAgent | None = None
        self._farewells: queue.SimpleQueue[tuple[bytes, Shutdown]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._failure = ""
        self._dismissal: Shutdown | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="poseidon rendezvous", daemon=True)
        self._thread.start()

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.dismiss(1, "" if error is None else "the job failed before it had started")
        self._closing = True
        self._transport.wake()
        self._thread.join(CLOSE_S)

    def gather(self, own: Join, timeout_s: float) -> tuple[tuple[TaskHost, RemoteAgent], ...]:
        """Wait until all tasks have joined.

        Returns:
            The hosts, each with the agent of its first task, by the ranks of these.

        Raises:
            JobError: some did not join, or those that joined cannot be one job.
        """
        others = self._size - 1
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while (
                not self._failure
                and len(self._members) < others
                and (left_s := deadline_s - time.monotonic()) > 0
            ):
                self._changed.wait(min(POLL_S, left_s))  # a signal just before it does not end it
            if self._failure:
                raise JobError(self._failure)
            if len(self._members) < others:
                raise JobError(self._describe_missing(own, timeout_s))
            joins = [own, *(member.join for member in self._members.values())]
            hosts = hosts_of(joins)
        agents = {own.rank: dial_here(_label(own), _CHILDREN)}
        self._own = agents[own.rank]
        alone = len(hosts) == self._size

        def asked_to_end(agent: RemoteAgent, _: str) -> None:
            # else other tasks of its host would stay
            self._on_signal(agent.leave if alone else lambda: False)

        for member in self._members.values():
            agent = RemoteAgent(member.far, _label(member.join), TIMEOUTS, asked_to_end)
            member.agent = agents[member.join.rank] = agent
        for agent in list(agents.values())[1:]:
            agent.connect()
        return tuple((host, agents[host.first.rank]) for host in hosts)

    def dismiss(self, status: int, why: str = "") -> None:
        """Dismiss all tasks, those that join later too; only the first call counts.

        Args:
            status: their exit status.
            why: the reason, which tasks print that have no job.
        """
        with self._changed:
            if self._dismissal is not None:
                return
            self._dismissal = Shutdown(status=status, reason=why)
            members = dict(self._members)
        agents = [member.agent for member in members.values() if member.agent is not None]
        for name, member in members.items():
            # A lost agent is dismissed, too: its task may only have been slow.
            if member.agent is None or member.agent.lost is not None:
                self._farewells.put((name, self._dismissal))
        self._transport.wake()
        closing = [*agents, *([self._own] if self._own is not None else [])]
        for_each_host(lambda agent: agent.close(status), closing, name="poseidon dismiss")

    def _describe_missing(self, own: Join, timeout_s: float) -> str:
        joined = {own.rank, *(member.join.rank for member in self._members.values())}
        missing = [str(rank) for rank in range(self._size) if rank not in joined]
        named = ", ".join(missing[:10]) + (
            f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        )
        others = (
            f"; {self._transport.refused} attempts with a different key, or with none, were refused"
            if self._transport.refused
            else ""
        )
        return (
            f"of {self._size} tasks these did not join at {self.address} within {timeout_s:g} s: "
            f"rank {named}{others}"
        )

    def _run(self) -> None:
        """Run the server's thread; on any exception, end every wait of its owner."""
        try:
            while not (self._closing and self._farewells.empty()):
                if len(self._members) == self._size - 1:
                    self._transport.admit_no_more()
                for name, frames in self._transport.receive(POLL_S):
                    self._take(name, frames)
                for name, member in list(self._members.items()):
                    self._send_waiting(name, member)
                while not self._farewells.empty():
                    name, farewell = self._farewells.get()
                    self._transport.send(name, [REQUESTS.encode(farewell)])
            for name, member in list(self._members.items()):
                self._send_waiting(name, member)
        except Exception as error:  # noqa: BLE001 - `gather` raises it, and every agent counts as lost
            why = f"the rendezvous has failed: {type(error).__name__}: {error}"
            print(f"poseidon: {why}", file=sys.stderr)
            with self._changed:
                self._failure = self._failure or why
                self._changed.notify_all()
        finally:
            for member in list(self._members.values()):
                member.channel.close()
            self._transport.close()

    def _send_waiting(self, name: bytes, member: _Member) -> None:
        """Send in order what a task is to get, as far as its socket takes it."""
        while True:
            member.waiting = member.waiting or member.channel.poll()
            if member.waiting is None or not self._transport.send(name, [member.waiting]):
                return
            member.waiting = None

    def _take(self, name: bytes, frames: Sequence[bytes | bytearray | memoryview]) -> None:
        encoded = b"".join(bytes(frame) for frame in frames)
        member = self._members.get(name)
        if member is not None:
            with suppress(OSError):  # its agent has been closed
                member.channel.send(encoded)
            return
        try:
            report = REPORTS.decode(encoded)
        except WireError:
            return  # it has our key and another protocol; rank 0 reports it as missing
        if isinstance(report, Join):
            self._join(name, report)

    def _join(self, name: bytes, join: Join) -> None:
        with self._changed:
            others = [member.join for member in self._members.values()]
            why_not = rejection_reason(join, others, size=self._size, version=__version__)
            if join.rank == 0:
                why_not = f"rank 0 on {join.host} has joined already, here; expected each rank once"
            if self._dismissal is not None:
                self._farewells.put((name, self._dismissal))
            elif why_not is None:
                far, channel = QueueChannel.pair(on_send=self._transport.wake)
                self._members[name] = _Member(join=join, channel=channel, far=far)
            else:
                self._farewells.put((name, Shutdown(status=1, reason=why_not)))
                self._failure = self._failure or why_not
            self._changed.notify_all()


class TaskDialer(Dialer):
    """The agents of a rendezvous, which ends them; see `Dialer`.

    Args:
        gathered: as `Rendezvous.gather` returns it.
    """

    given = True

    def __init__(self, gathered: Sequence[tuple[TaskHost, RemoteAgent]]) -> None:
        self._gathered = tuple(gathered)

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts by rank; their shards take free ports."""
        return tuple(
            Host(id=number, address=host.first.address, port=0)
            for number, (host, _) in enumerate(self._gathered)
        )

    @property
    def tasks(self) -> tuple[int, ...]:
        """The number of tasks on each host."""
        return tuple(host.tasks for host, _ in self._gathered)

    def dial(self, hosts: Sequence[Host], job: str) -> Mapping[int, RemoteAgent | JobError]:
        found: dict[int, RemoteAgent | JobError] = {}
        for host in hosts:
            agent = self._gathered[host.id][1]
            lost = agent.lost
            found[host.id] = agent if lost is None else JobError(f"{agent.label}: {lost}")
        return found

    def resume_command(self, command: str, changes: Mapping[str, str]) -> str:
        """See `Dialer`: the user starts the same tasks again."""
        flags = shlex.join(f"--{name}={value}" for name, value in changes.items())
        return f"the same tasks with {flags}"


def run_task(address: str, keys: Keyring, join: Join, timeout_s: float) -> int:
    """Join the rendezvous and take part to its end. Call it from the main thread.

    Args:
        address: `tcp://host:port` of rank 0.
        keys: this side's; see `poseidon.cluster.rendezvous`.
        join: this task.
        timeout_s: until all tasks have joined.

    Returns:
        The exit status of the job.

    Raises:
        JobError: rank 0 was not reached, refused us, or was lost.
    """
    channel = _RankZeroChannel(address, keys, join)
    launcher = f"rank 0 at {address}"
    agent = Agent(channel, AgentSettings(children=_CHILDREN, hello_s=timeout_s, launcher=launcher))
    with _signals_to(agent) as received:
        leave = agent.serve()
    if not leave.reason:
        return leave.status
    silent = not agent.greeted and "did not answer" in leave.reason
    error = JobError(
        leave.reason
        + (
            ": does it run there, have all tasks joined, and have all the same key file?"
            if silent
            else ""
        )
    )
    if received and not agent.greeted:
        error.exit_code = exit_code_of(signal.Signals(received[0]))
    raise error


@contextmanager
def _signals_to(agent: Agent) -> Iterator[list[int]]:
    """Have an agent report signals that ask this process to end, for rank 0 to decide."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if number == USER_KILL:
            agent.killed_by_user()
        else:
            agent.signaled(signal.Signals(number).name)

    with handled((*ENDING, USER_KILL), note):
        yield received


class _RankZeroChannel:
    """A task's `Channel` to rank 0; its own thread uses the socket."""

    def __init__(self, address: str, keys: Keyring, join: Report) -> None:
        self._transport = ZmqClientTransport([address], keys)
        self._channel, self._far = QueueChannel.pair(on_send=self._transport.wake)
        self._channel.send(REPORTS.encode(join))
        self._thread = threading.Thread(target=self._run, name="poseidon rank 0", daemon=True)
        self._thread.start()

    def send(self, message: bytes) -> None:
        self._channel.send(message)

    def receive(self) -> bytes | None:
        return self._channel.receive()

    def close(self) -> None:
        """See `Channel`. ZeroMQ shows no end of a channel, so that the last report has to."""
        with suppress(OSError):
            self._channel.send(REPORTS.encode(Exited(id=AGENT_ITSELF, status=0)))
        self._channel.close()
        self._transport.wake()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        waiting: bytes | None = None
        give_up_s = float("inf")
        try:
            while True:
                for _, frames in self._transport.receive(POLL_S):
                    with suppress(OSError):  # closed; its last reports are still to be sent
                        self._far.send(b"".join(bytes(frame) for frame in frames))
                while (waiting := waiting or self._far.poll()) is not None:
                    if not self._transport.send(0, [waiting]):
                        break
                    waiting = None
                if self._far.closed:
                    give_up_s = min(give_up_s, time.monotonic() + LINGER_S)
                    if waiting is None or time.monotonic() > give_up_s:
                        return
        except (ServerError, OSError) as error:
            self._far.close(str(error))
        finally:
            self._far.close()
            self._transport.close()


def _label(join: Join) -> str:
    return f"rank {join.rank} ({join.host})"
