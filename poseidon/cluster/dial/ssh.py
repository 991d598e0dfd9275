"""Agents on hosts over SSH: one connection each, on which the agent's program runs.

    agents = dial_each(hosts, SshSettings(), launcher_environment())

Law: keys only, from files without a passphrase or from the SSH agent, never a password. A host
whose key is not in known_hosts, or differs from it, gets nothing from us but the handshake. Each
step has a time limit. What goes to a host's shell is a fixed script with quoted arguments
(`poseidon.cluster.ssh.config`); everything about a job travels over the channel.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import paramiko

from poseidon.cluster.agent.remote import AgentTimeouts, RemoteAgent
from poseidon.cluster.dial.channel import StreamChannel
from poseidon.cluster.dial.dialer import Dialer, check_opened, close_agents, opened
from poseidon.cluster.machinefile import Host, SshSettings, is_loopback
from poseidon.cluster.name_lookup import addresses_of
from poseidon.cluster.process import for_each_host
from poseidon.cluster.python_command import (
    CANNOT_START,
    LauncherEnvironment,
    agent_arguments,
    remote_command,
)
from poseidon.cluster.ssh.config import MAX_DEPTH, Endpoint, SshConfig, shell_command
from poseidon.cluster.ssh.handshake import close_transport, handshake
from poseidon.errors import JobError, printable
from ps_server.monitor import owned_thread

LOGGER = logging.getLogger("poseidon.cluster.dial")
TIMEOUTS = AgentTimeouts()
MAX_PARALLEL = 64
NAMES_S = 15.0
"""How long to wait for the addresses of the hosts' names, which may be known on the hosts alone."""
STDERR_LINES = 20
STDERR_S = 2.0
"""How long to wait for the end of a failed agent's standard error."""
_MAY_WAIT = (
    "its Python starts slowly, or the files that its shell reads first (~/.bashrc) wait for input or "
    "start another shell"
)
_BROKEN = (paramiko.SSHException, OSError, EOFError)
"""Paramiko's exceptions for a connection that is broken or refuses."""


def dial_each(
    hosts: Sequence[Host],
    settings: SshSettings,
    launcher: LauncherEnvironment,
    *,
    job: str = "",
) -> Mapping[int, RemoteAgent | JobError]:
    """Start an agent on hosts, in parallel.

    Hosts that are reached in the same way, and run the same Python in the same folder, share one.

    Args:
        hosts: of the machinefile.
        settings: of the connections.
        launcher: where this process runs.
        job: the id of the job; empty: none.

    Returns:
        The agent of each host, or the error, by the host's id.
    """
    config = SshConfig(settings)
    wanted = {
        host.id: (config.endpoint(host), remote_command(host, launcher, *agent_arguments(job)))
        for host in hosts
    }
    distinct = list(dict.fromkeys(wanted.values()))
    outcomes = for_each_host(
        lambda both: _dial(*both, config, settings),
        distinct,
        name="poseidon ssh connect",
        limit=MAX_PARALLEL,
    )
    outcome_of = dict(zip(distinct, outcomes, strict=True))
    return {host: outcome_of[both] for host, both in wanted.items()}


def dial_all(
    hosts: Sequence[Host], settings: SshSettings, launcher: LauncherEnvironment
) -> Mapping[int, RemoteAgent]:
    """Start an agent on all hosts, as `dial_each` does.

    Raises:
        JobError: lists the problems host by host; no agent is left.
    """
    outcomes = dial_each(hosts, settings, launcher)
    agents = opened(outcomes)
    try:
        check_opened(outcomes)
    except JobError:
        close_agents(agents.values())
        raise
    return agents


def _dial(
    endpoint: Endpoint, command: tuple[str, ...], config: SshConfig, settings: SshSettings
) -> RemoteAgent:
    transports = _reach(endpoint, config, settings)
    close = partial(_close_all, transports)
    try:
        line = shell_command(command)
        channel = _run(transports[-1], endpoint.label, line, TIMEOUTS.hello_s)
    except BaseException:
        close()
        raise
    stderr = _StderrTail(channel, endpoint.label)
    agent = RemoteAgent(_stream(channel, close), endpoint.label, TIMEOUTS)
    begin_s = time.monotonic()
    try:
        agent.connect()
    except JobError as error:
        late = time.monotonic() - begin_s >= TIMEOUTS.hello_s
        status, last = (None, "") if agent.refused else (_status(channel), stderr.last_line())
        agent.close()
        if status is not None:
            raise JobError(f"{endpoint.label}: {_why_ended(status, last)}") from error
        more = last or (_MAY_WAIT if late else "")
        raise JobError(f"{error}" + (f": {more}" if more else "")) from error
    return agent


def _why_ended(status: int, last: str) -> str:
    """Return why a program has ended that was to be an agent.

    Args:
        status: its exit status.
        last: the last line that it wrote to standard error.
    """
    if status == CANNOT_START:
        return last
    if last:
        return f"its Python cannot be run (status {status}): {last}"
    return (
        f"its Python cannot be run (status {status}, without a message): do the files that its "
        "shell reads first (~/.bashrc), its login shell or a forced command of its sshd end earlier?"
    )


def _status(channel: paramiko.Channel) -> int | None:
    """Return the exit status of a program that has failed to be an agent; None if it runs."""
    if not channel.status_event.wait(STDERR_S) or channel.exit_status < 0:
        return None
    return channel.exit_status


def _stream(channel: paramiko.Channel, close: Callable[[], object]) -> StreamChannel:
    """Return the standard streams of a program as a channel, whose end closes the connection."""

    def read(size: int) -> bytes:
        data = channel.recv(size)
        if not data:
            channel.status_event.wait(STDERR_S)  # whoever reads the end may want to know the status
        return data

    def write(data: bytes) -> None:
        try:
            channel.sendall(data)
        except (paramiko.SSHException, EOFError) as error:
            raise OSError(str(error) or "the connection broke") from error

    def close_both() -> None:
        with suppress(*_BROKEN):  # the connection may be gone by now
            channel.close()
        close()

    return StreamChannel(read, write, close_both)


def _run(
    transport: paramiko.Transport, label: str, command: str, timeout_s: float
) -> paramiko.Channel:
    try:
        channel = transport.open_session(timeout=timeout_s)
        channel.settimeout(timeout_s)
        with _reply_within(channel, timeout_s):
            channel.exec_command(command)
    except paramiko.ChannelException as error:
        raise JobError(
            f"{label}: its sshd refuses to start a program ({error.text}); look at MaxSessions in "
            "its configuration, and at its log"
        ) from error
    except _BROKEN as error:
        raise JobError(
            f"{label}: cannot start Python there: {str(error) or 'the connection broke'}"
        ) from error
    channel.settimeout(None)
    return channel


@contextmanager
def _reply_within(channel: paramiko.Channel, timeout_s: float) -> Iterator[None]:
    """Close a channel unless the block ends in time: paramiko's requests have no timeout.

    Raises:
        TimeoutError: it was closed.
    """
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        with suppress(*_BROKEN):
            channel.close()

    timer = threading.Timer(timeout_s, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    except _BROKEN as error:
        if expired.is_set():
            raise TimeoutError(f"no answer within {timeout_s:g} s") from error
        raise
    finally:
        timer.cancel()


class _StderrTail:
    """Reads an agent's standard error and keeps the end of it."""

    def __init__(self, channel: paramiko.Channel, label: str) -> None:
        self._stream = channel.makefile_stderr("rb", 1 << 16)
        self._kept: deque[str] = deque(maxlen=STDERR_LINES)
        said = "%s: the agent's standard error cannot be read: %r"
        failed = partial(LOGGER.warning, said, label)  # the job does not depend on it
        self._thread = owned_thread("poseidon agent stderr", self._read, failed)
        self._thread.start()

    def last_line(self) -> str:
        """Return the last line that is not blank, or Python's own reason for not starting, once the
        output has ended.
        """
        self._thread.join(STDERR_S)
        lines = [line for line in reversed(self._kept) if line.strip()]
        fatal = [line for line in lines if line.startswith("Fatal Python error")]
        return printable(next(iter([*fatal, *lines]), ""))

    def _read(self) -> None:
        with suppress(OSError):  # the connection was closed
            while line := self._stream.readline(1 << 16):
                raw = line.encode() if isinstance(line, str) else bytes(line)
                self._kept.append(raw.rstrip().decode("utf-8", errors="backslashreplace"))


def _close_all(transports: Sequence[paramiko.Transport]) -> None:
    for transport in reversed(transports):
        close_transport(transport)


def _reach(
    endpoint: Endpoint, config: SshConfig, settings: SshSettings
) -> tuple[paramiko.Transport, ...]:
    """Connect, through the hosts of the endpoint's ProxyJump if it has one.

    Returns:
        The connections to the jump hosts, nearest first, and to the host.
    """
    via: list[paramiko.Transport] = []
    try:
        _connect_jumps(endpoint.jumps, config, settings, via, MAX_DEPTH)
        via.append(handshake(endpoint, via[-1] if via else None, settings))
        return tuple(via)
    except BaseException:
        _close_all(via)
        raise


def _connect_jumps(
    jumps: Sequence[str],
    config: SshConfig,
    settings: SshSettings,
    via: list[paramiko.Transport],
    depth: int,
) -> None:
    """Connect to each jump host through the one before; the nearest goes through its own jump
    hosts.
    """
    if jumps and not depth:
        raise JobError(
            f"ProxyJump {','.join(jumps)}: more than {MAX_DEPTH} jump hosts in a row; do they "
            "name each other?"
        )
    for text in jumps:
        jump = config.jump(text)
        if not via:
            _connect_jumps(jump.jumps, config, settings, via, depth - 1)
        via.append(handshake(jump, via[-1] if via else None, settings))


class SshDialer(Dialer):
    """Agents over SSH; see `Dialer`."""

    def __init__(self, settings: SshSettings, launcher: LauncherEnvironment) -> None:
        self._settings = settings
        self._launcher = launcher

    def dial(self, hosts: Sequence[Host], job: str) -> Mapping[int, RemoteAgent | JobError]:
        return dial_each(hosts, self._settings, self._launcher, job=job)

    def names(self, hosts: Sequence[Host]) -> Mapping[int, tuple[str, ...]]:
        config = SshConfig(self._settings)
        dialled = {host.id: config.endpoint(host).host for host in hosts}
        known = addresses_of({*dialled.values(), *(host.address for host in hosts)}, NAMES_S)
        return {host.id: names_of(host, dialled[host.id], known) for host in hosts}


def names_of(host: Host, dialled: str, known: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names of a host: as in the machinefile, as SSH dials it, and their addresses as
    known here.

    Args:
        host: as in the machinefile.
        dialled: what SSH dials.
        known: the addresses of names.
    """
    names = [host.address, dialled]
    names += [address for name in (host.address, dialled) for address in known.get(name, ())]
    return tuple(
        name for name in dict.fromkeys(names) if name == host.address or not is_loopback(name)
    )
