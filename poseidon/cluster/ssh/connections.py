"""Connections to the hosts of a machinefile over SSH.

    connections = connect_all(hosts, SshSettings())      one connection a host, in parallel
    done = connections[0].run(["uname", "-a"], timeout_s=10)

Law: keys only, of files without a passphrase or of the SSH agent, and never a password. A host whose key is not in
known_hosts, or is another one there, hears nothing from us but the handshake. Each step has a time limit.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Mapping, Sequence

import paramiko

from poseidon.cluster.all_at_once import all_at_once
from poseidon.cluster.machinefile import Host
from poseidon.cluster.ssh.channel import Finished, SshLines, run_over
from poseidon.cluster.ssh.config import DEEPEST, Endpoint, SshConfig, SshSettings
from poseidon.cluster.ssh.handshake import handshake, hang_up
from poseidon.cluster.ssh.sftp import SFTP_SILENCE_S, SftpSession, open_sftp
from poseidon.errors import JobError

MOST_AT_ONCE = 64


class SshHost:
    """A host that let us in.

    Args:
        endpoint: who it is.
        transport: an authenticated connection, owned from here on.
        via: the connections that it runs through, nearest first; owned, too.
    """

    def __init__(
        self, endpoint: Endpoint, transport: paramiko.Transport, via: Sequence[paramiko.Transport] = ()
    ) -> None:
        self._endpoint = endpoint
        self._transport = transport
        self._via = tuple(via)

    @property
    def words(self) -> str:
        """`ml@node3`, for messages."""
        return self._endpoint.words

    @property
    def alive(self) -> bool:
        """Whether the connection stands, as far as is known."""
        return self._transport.is_active()

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float) -> Finished:
        """Run a program to its end.

        Args:
            argv: the program and its arguments.
            stdin: all that it reads.
            timeout_s: limit of the whole.

        Raises:
            JobError: the line broke, the time is up, or it writes without end.
        """
        return run_over(self._transport, self.words, argv, stdin=stdin, timeout_s=timeout_s)

    def open(self, argv: Sequence[str], *, timeout_s: float = 15.0) -> SshLines:
        """Start a program and talk to it in lines.

        Args:
            argv: the program and its arguments.
            timeout_s: limit for its start.

        Raises:
            JobError: it cannot be started.
        """
        return SshLines(self._transport, self.words, argv, timeout_s=timeout_s)

    def sftp(self, *, silence_s: float = SFTP_SILENCE_S) -> SftpSession:
        """A new SFTP session, which the caller closes.

        Args:
            silence_s: how long the host may leave a request without an answer.

        Raises:
            JobError: the host offers none, or does not answer.
        """
        return open_sftp(self._transport, self.words, silence_s)

    def local_address(self) -> str:
        """Our own address on the way to this host; that of the first hop where there are several."""
        line: object = (self._via[0] if self._via else self._transport).sock
        try:
            return str(line.getsockname()[0]) if isinstance(line, socket.socket) else ""
        except OSError:
            return ""

    def close(self) -> None:
        """End the connection and those that it runs through. May be called twice."""
        for transport in (self._transport, *reversed(self._via)):
            hang_up(transport)


def connect(host: Host, settings: SshSettings) -> SshHost:
    """Connect to a host.

    Raises:
        JobError: one sentence that names the host and says what is in the way.
    """
    config = SshConfig(settings)
    return _reach(config.endpoint(host), config, settings)


def connect_all(hosts: Sequence[Host], settings: SshSettings) -> Mapping[int, SshHost]:
    """Connect to all hosts, as `connect_each` does.

    Returns:
        The connection to each host, by the host's id.

    Raises:
        JobError: lists what is in the way, host by host; no connection is left open.
    """
    outcomes = connect_each(hosts, settings)
    connections = reached(outcomes)
    try:
        check_reached(outcomes)
    except JobError:
        close_all(set(connections.values()))
        raise
    return connections


def connect_each(hosts: Sequence[Host], settings: SshSettings) -> Mapping[int, SshHost | JobError]:
    """Connect to hosts in parallel; those that are reached in the same way share a connection.

    Returns:
        The connection to each host, or the error, by the host's id.
    """
    config = SshConfig(settings)
    endpoint_of = {host.id: config.endpoint(host) for host in hosts}
    endpoints = list(dict.fromkeys(endpoint_of.values()))
    outcomes = all_at_once(
        lambda endpoint: _reach(endpoint, config, settings),
        endpoints,
        name="poseidon ssh connect",
        most=MOST_AT_ONCE,
    )
    outcome_of = dict(zip(endpoints, outcomes, strict=True))
    return {host: outcome_of[endpoint] for host, endpoint in endpoint_of.items()}


def reached(outcomes: Mapping[int, SshHost | JobError]) -> dict[int, SshHost]:
    """Return the connections that `connect_each` has made."""
    return {host: outcome for host, outcome in outcomes.items() if isinstance(outcome, SshHost)}


def check_reached(outcomes: Mapping[int, SshHost | JobError]) -> None:
    """Refuse what `connect_each` came to where a host is missing.

    Raises:
        JobError: lists what is in the way, host by host.
    """
    distinct = dict.fromkeys(outcomes.values())
    problems = [str(outcome) for outcome in distinct if isinstance(outcome, JobError)]
    if problems:
        raise JobError(listed(problems, of=len(distinct)))


def close_all(connections: Iterable[SshHost]) -> None:
    """Close connections in parallel: a dead host answers late."""
    threads = [
        threading.Thread(target=connection.close, name="poseidon ssh close", daemon=True)
        for connection in connections
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5.0)


def listed(problems: Sequence[str], *, of: int) -> str:
    """Several hosts' problems in one error: as it is where there is one, else line by line.

    Args:
        problems: one sentence each.
        of: the number of hosts.
    """
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} problems on the {of} hosts:" + "".join(f"\n  {problem}" for problem in problems)


def _reach(endpoint: Endpoint, config: SshConfig, settings: SshSettings) -> SshHost:
    """Connect, through the hosts of the endpoint's ProxyJump if it has one."""
    via: list[paramiko.Transport] = []
    try:
        _pass_jumps(endpoint.jumps, config, settings, via, DEEPEST)
        return SshHost(endpoint, handshake(endpoint, via[-1] if via else None, settings), via)
    except BaseException:
        for transport in reversed(via):
            hang_up(transport)
        raise


def _pass_jumps(
    jumps: Sequence[str],
    config: SshConfig,
    settings: SshSettings,
    via: list[paramiko.Transport],
    depth: int,
) -> None:
    """Connect to each jump through the one before; the nearest goes through those of its own configuration."""
    if jumps and not depth:
        raise JobError(
            f"ProxyJump {','.join(jumps)}: more than {DEEPEST} hosts in a row; do they name each other?"
        )
    for words in jumps:
        jump = config.jump(words)
        if not via:
            _pass_jumps(jump.jumps, config, settings, via, depth - 1)
        via.append(handshake(jump, via[-1] if via else None, settings))
