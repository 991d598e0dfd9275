"""Connections to the hosts of a machinefile over SSH.

    connections = connect_all(hosts, SshSettings())      one connection a host, in parallel
    done = connections[0].run(["uname", "-a"], timeout_s=10)

Law: keys only, from files without a passphrase or from the SSH agent, never a password. A host
whose key is not in known_hosts, or differs from it, gets nothing from us but the handshake. Each
step has a time limit. Over SFTP each answer has one: a host that falls silent, though its
connection stands, ends the session with an error.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence

import paramiko

from poseidon.cluster.machinefile import Host
from poseidon.cluster.parallel import close_each, for_each_host, format_problems
from poseidon.cluster.ssh.channel import Finished, SshLineChannel, reply_within, run_over
from poseidon.cluster.ssh.config import MAX_DEPTH, Endpoint, SshConfig, SshSettings
from poseidon.cluster.ssh.handshake import close_transport, handshake
from poseidon.errors import JobError

MAX_PARALLEL = 64
CLOSE_S = 5.0
SFTP_SILENCE_S = 60.0
"""How long a host may take to answer a request: longer than a busy disk takes."""


class SftpSession(paramiko.SFTPClient):
    """An SFTP session that ends when the host falls silent: later requests fail at once, without
    waiting again.
    """

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel
        super().__init__(channel)

    def _read_all(self, n: int) -> bytes:
        try:
            return bytes(super()._read_all(n))  # type: ignore[misc]  # paramiko's stubs leave it out
        except TimeoutError:
            raise self._ended() from None

    def _write_all(self, out: bytes) -> None:
        try:
            super()._write_all(out)  # type: ignore[misc]
        except TimeoutError:
            raise self._ended() from None

    def _adjust_cwd(self, path: str) -> bytes:
        # paramiko refuses a name that is not UTF-8.
        return bytes(super()._adjust_cwd(os.fsencode(path)))  # type: ignore[misc]

    def _ended(self) -> TimeoutError:
        self._channel.close()
        return TimeoutError(f"no answer over SFTP for {self._channel.gettimeout():g} s")


class SshConnection:
    """An authenticated connection to a host.

    Args:
        endpoint: the host.
        transport: authenticated; owned from here on.
        via: the connections to its jump hosts, nearest first; owned, too.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        transport: paramiko.Transport,
        via: Sequence[paramiko.Transport] = (),
    ) -> None:
        self._endpoint = endpoint
        self._transport = transport
        self._via = tuple(via)

    @property
    def label(self) -> str:
        """The host in messages: `ml@node3`."""
        return self._endpoint.label

    @property
    def alive(self) -> bool:
        """Whether the connection is up: no loss was noticed yet."""
        return self._transport.is_active()

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float) -> Finished:
        """Run a program to its end.

        Args:
            argv: the program and its arguments.
            stdin: its whole standard input.
            timeout_s: limit of the whole.

        Raises:
            JobError: the connection broke, the time is up, or the output is too long.
        """
        return run_over(self._transport, self.label, argv, stdin=stdin, timeout_s=timeout_s)

    def open(self, argv: Sequence[str], *, timeout_s: float = 15.0) -> SshLineChannel:
        """Start a program and connect to its standard streams.

        Args:
            argv: the program and its arguments.
            timeout_s: limit for its start.

        Raises:
            JobError: it cannot be started.
        """
        return SshLineChannel(self._transport, self.label, argv, timeout_s=timeout_s)

    def sftp(self, *, silence_s: float = SFTP_SILENCE_S) -> SftpSession:
        """Open an SFTP session, which the caller closes.

        Args:
            silence_s: how long the host may take to answer a request.

        Raises:
            JobError: the host has no SFTP, or does not answer.
        """
        return _open_sftp(self._transport, self.label, silence_s)

    def local_address(self) -> str:
        """Return our own address on the route to this host; on the way to the first jump host if
        there is one.
        """
        sock: object = (self._via[0] if self._via else self._transport).sock
        try:
            return str(sock.getsockname()[0]) if isinstance(sock, socket.socket) else ""
        except OSError:
            return ""

    def close(self) -> None:
        """Close the connection and those to its jump hosts. May be called twice."""
        for transport in (self._transport, *reversed(self._via)):
            close_transport(transport)


def connect(host: Host, settings: SshSettings) -> SshConnection:
    """Connect to a host.

    Raises:
        JobError: one sentence with the host and the cause.
    """
    config = SshConfig(settings)
    return _reach(config.endpoint(host), config, settings)


def connect_all(hosts: Sequence[Host], settings: SshSettings) -> Mapping[int, SshConnection]:
    """Connect to all hosts, as `connect_each` does.

    Returns:
        The connection to each host, by the host's id.

    Raises:
        JobError: lists the problems host by host; no connection is left open.
    """
    outcomes = connect_each(hosts, settings)
    connections = reached(outcomes)
    try:
        check_reached(outcomes)
    except JobError:
        close_all(set(connections.values()))
        raise
    return connections


def connect_each(
    hosts: Sequence[Host], settings: SshSettings
) -> Mapping[int, SshConnection | JobError]:
    """Connect to hosts in parallel; those that are reached in the same way share a connection.

    Returns:
        The connection to each host, or the error, by the host's id.
    """
    config = SshConfig(settings)
    endpoint_of = {host.id: config.endpoint(host) for host in hosts}
    endpoints = list(dict.fromkeys(endpoint_of.values()))
    outcomes = for_each_host(
        lambda endpoint: _reach(endpoint, config, settings),
        endpoints,
        name="poseidon ssh connect",
        limit=MAX_PARALLEL,
    )
    outcome_of = dict(zip(endpoints, outcomes, strict=True))
    return {host: outcome_of[endpoint] for host, endpoint in endpoint_of.items()}


def reached(outcomes: Mapping[int, SshConnection | JobError]) -> dict[int, SshConnection]:
    """Return the connections that `connect_each` has made."""
    return {
        host: outcome for host, outcome in outcomes.items() if isinstance(outcome, SshConnection)
    }


def check_reached(outcomes: Mapping[int, SshConnection | JobError]) -> None:
    """Raise an error if `connect_each` could not reach every host.

    Raises:
        JobError: lists the problems host by host.
    """
    distinct = dict.fromkeys(outcomes.values())
    problems = [str(outcome) for outcome in distinct if isinstance(outcome, JobError)]
    if problems:
        raise JobError(format_problems(problems, of=len(distinct)))


def close_all(connections: Iterable[SshConnection]) -> None:
    """Close connections in parallel: a dead host answers late."""
    close_each(connections, name="poseidon ssh close", limit_s=CLOSE_S)


def _reach(endpoint: Endpoint, config: SshConfig, settings: SshSettings) -> SshConnection:
    """Connect, through the hosts of the endpoint's ProxyJump if it has one."""
    via: list[paramiko.Transport] = []
    try:
        _connect_jumps(endpoint.jumps, config, settings, via, MAX_DEPTH)
        return SshConnection(endpoint, handshake(endpoint, via[-1] if via else None, settings), via)
    except BaseException:
        for transport in reversed(via):
            close_transport(transport)
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


def _open_sftp(transport: paramiko.Transport, label: str, silence_s: float) -> SftpSession:
    """Open an SFTP session; see `SshConnection.sftp`."""
    channel: paramiko.Channel | None = None
    try:
        channel = transport.open_session(timeout=silence_s)
        channel.settimeout(silence_s)
        with reply_within(channel, silence_s):
            channel.invoke_subsystem("sftp")
        return SftpSession(channel)
    except (paramiko.SSHException, OSError, EOFError) as error:
        if channel is not None:
            channel.close()
        raise JobError(f"{label}: SFTP is not available: {error}") from error
