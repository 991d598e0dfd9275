"""Connections to the hosts of a machinefile over SSH.

    hosts = connect_all(clients, SshSettings())      one connection a host, all at once
    done = hosts[0].run(["uname", "-a"], timeout_s=10)

Law: keys only, of files without a passphrase or of the SSH agent, and never a password. A host whose key is not in
known_hosts, or is another one there, hears nothing from us but the handshake. Each step has a time limit.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import paramiko

from poseidon.cluster.known_hosts import (
    SSH_PORT,
    HostKey,
    host_name,
    kinds_known,
    objection,
    parse_known_hosts,
)
from poseidon.cluster.machinefile import Client
from poseidon.cluster.ssh_channel import Finished, SshLines, run_over
from poseidon.cluster.ssh_config import DEEPEST, Endpoint, SshConfig, SshSettings
from poseidon.cluster.ssh_identities import identities
from poseidon.errors import JobError

MOST_AT_ONCE = 64
# After this long without an answer to what was sent, the kernel gives a connection up.
SILENCE_MS = 20_000
KEEPALIVE_S = 5

# Paramiko reports what it raises a second time to its log.
_QUIET = "poseidon.ssh.wire"
logging.getLogger(_QUIET).addHandler(logging.NullHandler())
logging.getLogger(_QUIET).propagate = False


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

    def sftp(self) -> paramiko.SFTPClient:
        """A new SFTP session, which the caller closes.

        Raises:
            JobError: the host offers none.
        """
        try:
            session = paramiko.SFTPClient.from_transport(self._transport)
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise JobError(f"{self.words}: SFTP is not to be had there: {error}") from error
        assert session is not None
        return session

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
            _hang_up(transport)


def connect(client: Client, settings: SshSettings) -> SshHost:
    """Connect to a client's host.

    Raises:
        JobError: one sentence that names the host and says what is in the way.
    """
    config = SshConfig(settings)
    return _reach(config.endpoint(client), config, settings)


def connect_all(clients: Sequence[Client], settings: SshSettings) -> Mapping[int, SshHost]:
    """Connect to the hosts of all clients at once; clients that are reached in the same way share a connection.

    Returns:
        The host of each client, by the client's id.

    Raises:
        JobError: lists what is in the way, host by host; no connection is left open.
    """
    config = SshConfig(settings)
    endpoint_of = {client.id: config.endpoint(client) for client in clients}
    endpoints = list(dict.fromkeys(endpoint_of.values()))
    with ThreadPoolExecutor(min(MOST_AT_ONCE, len(endpoints)) or 1, "poseidon ssh connect") as pool:
        outcomes = list(pool.map(lambda endpoint: _try_reach(endpoint, config, settings), endpoints))
    hosts = {end: host for end, host in zip(endpoints, outcomes, strict=True) if isinstance(host, SshHost)}
    problems = [str(outcome) for outcome in outcomes if isinstance(outcome, JobError)]
    if problems:
        close_all(hosts.values())
        raise JobError(listed(problems, of=len(endpoints)))
    return {client_id: hosts[endpoint] for client_id, endpoint in endpoint_of.items()}


def close_all(hosts: Iterable[SshHost]) -> None:
    """Close connections, all at once: a dead host answers late."""
    threads = [threading.Thread(target=host.close, name="poseidon ssh close", daemon=True) for host in hosts]
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


def _try_reach(endpoint: Endpoint, config: SshConfig, settings: SshSettings) -> SshHost | JobError:
    try:
        return _reach(endpoint, config, settings)
    except JobError as error:
        return error


def _reach(endpoint: Endpoint, config: SshConfig, settings: SshSettings) -> SshHost:
    """Connect, through the hosts of the endpoint's ProxyJump if it has one."""
    via: list[paramiko.Transport] = []
    try:
        _pass_jumps(endpoint.jumps, config, settings, via, DEEPEST)
        return SshHost(endpoint, _handshake(endpoint, via[-1] if via else None, settings), via)
    except BaseException:
        for transport in reversed(via):
            _hang_up(transport)
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
        via.append(_handshake(jump, via[-1] if via else None, settings))


def _handshake(
    endpoint: Endpoint, via: paramiko.Transport | None, settings: SshSettings
) -> paramiko.Transport:
    """An authenticated connection to one host."""
    deadline_s = time.monotonic() + settings.connect_timeout_s
    line = _dial(endpoint, via, settings.connect_timeout_s)
    try:
        transport = paramiko.Transport(line)
    except (paramiko.SSHException, OSError) as error:
        line.close()
        raise JobError(f"{endpoint.words}: {error}") from error
    try:
        transport.set_log_channel(_QUIET)
        _check_host_key(endpoint, transport, deadline_s)
        _authenticate(endpoint, transport, deadline_s)
        transport.set_keepalive(KEEPALIVE_S)
    except BaseException:
        _hang_up(transport)
        raise
    return transport


def _hang_up(transport: paramiko.Transport) -> None:
    """Close a connection; the program that made it, if one did, is ended and reaped, too."""
    transport.close()
    proxy: object = transport.sock
    if not isinstance(proxy, paramiko.ProxyCommand):
        return
    process = proxy.process
    with suppress(OSError):
        process.kill()
    process.wait(5.0)
    for pipe in (process.stdin, process.stdout, process.stderr):
        with suppress(OSError):
            if pipe is not None:
                pipe.close()


def _dial(
    endpoint: Endpoint, via: paramiko.Transport | None, timeout_s: float
) -> socket.socket | paramiko.Channel | paramiko.ProxyCommand:
    """The line that SSH is to be spoken on."""
    try:
        if via is not None:
            address = (endpoint.host, endpoint.port)
            return via.open_channel("direct-tcpip", address, ("127.0.0.1", 0), timeout=timeout_s)
        if endpoint.proxy_command:
            return paramiko.ProxyCommand(endpoint.proxy_command)
        line = socket.create_connection((endpoint.host, endpoint.port), timeout=timeout_s)
    except TimeoutError as error:
        raise JobError(f"{endpoint.words}: no answer within {timeout_s:g} s") from error
    except socket.gaierror as error:
        raise JobError(
            f"{endpoint.words}: the name {endpoint.host} is not known: {error.strerror}"
        ) from error
    except (OSError, paramiko.SSHException, EOFError) as error:
        why = getattr(error, "strerror", None) or str(error) or "the hop before it hung up"
        raise JobError(f"{endpoint.words}: cannot be reached: {why}") from error
    with suppress(OSError, AttributeError):  # Linux has it
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_MS)
    return line


def _check_host_key(endpoint: Endpoint, transport: paramiko.Transport, deadline_s: float) -> None:
    """The first half of the handshake, up to the host's proof of who it is."""
    lines = [line for file in endpoint.known_hosts for line in _lines_of(file)]
    known = parse_known_hosts(lines)
    name = host_name(endpoint.alias, endpoint.port)
    options = transport.get_security_options()
    wanted = [kind for trusted in kinds_known(known, name) for kind in _algorithms(trusted)]
    first = [kind for kind in wanted if kind in options.key_types]
    options.key_types = [*first, *(kind for kind in options.key_types if kind not in first)]
    try:
        transport.banner_timeout = max(0.1, deadline_s - time.monotonic())
        transport.start_client(timeout=max(0.1, deadline_s - time.monotonic()))
        shown = transport.get_remote_server_key()
    except (paramiko.SSHException, OSError, EOFError) as error:
        why = str(error) or "it hung up"
        raise JobError(f"{endpoint.words}: what listens there speaks no SSH with us: {why}") from error
    key = HostKey(kind=shown.get_name(), blob=shown.asbytes())
    why_not = objection(known, name, key, endpoint.known_hosts[0])
    if why_not is not None:
        raise JobError(f"{endpoint.words}: {why_not}")


def _algorithms(kind: str) -> tuple[str, ...]:
    """The signatures that a kind of key makes."""
    return ("rsa-sha2-512", "rsa-sha2-256") if kind == "ssh-rsa" else (kind,)


def _lines_of(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []  # a file that is not there vouches for nobody


def _authenticate(endpoint: Endpoint, transport: paramiko.Transport, deadline_s: float) -> None:
    """Try one key after the other until one is let in."""
    tried: list[str] = []
    for label, key in identities(endpoint, tried):
        transport.auth_timeout = max(0.1, deadline_s - time.monotonic())
        try:
            transport.auth_publickey(endpoint.user, key)
        except paramiko.BadAuthenticationType as error:
            offers = ", ".join(error.allowed_types) or "nothing"
            raise JobError(
                f"{endpoint.words}: it takes no keys, only {offers}; passwords are never used"
            ) from error
        except paramiko.AuthenticationException:
            tried.append(f"{label} was refused")
        except (paramiko.SSHException, OSError, EOFError) as error:
            tried.append(f"{label} ended the connection ({error or 'it hung up'})")
            break
        else:
            if transport.is_authenticated():
                return
            raise JobError(
                f"{endpoint.words}: it wants more than a key (two-factor login), which no job can give"
            )
    port = f"-p {endpoint.port} " if endpoint.port != SSH_PORT else ""
    raise JobError(
        f"{endpoint.words}: no key lets us in ({'; '.join(tried) or 'there is none to try'}); "
        f"to put yours there: ssh-copy-id {port}{endpoint.user}@{endpoint.host}"
    )
