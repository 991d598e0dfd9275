"""The SSH handshake with a host: connect, check its host key, authenticate with ours.

Law: no key is offered to a host before its own key was found in known_hosts; each step has a time
limit. A key of ours that needs a passphrase is never asked for one: it must be in the SSH agent.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import paramiko
from paramiko.agent import get_agent_connection

from poseidon.base.foreign_files import read_definition
from poseidon.cluster.machinefile import SshSettings
from poseidon.cluster.name_lookup import NameTimeoutError, dial
from poseidon.cluster.ssh.config import (
    SSH_PORT,
    Endpoint,
    HostKey,
    default_identities,
    host_name,
    kinds_known,
    parse_known_hosts,
    rejection,
)
from poseidon.errors import JobError

# After this long without an answer to what was sent, the kernel gives a connection up.
SILENCE_MS = 20_000
KEEPALIVE_S = 5
CLOSE_S = 5.0
# How long a ProxyCommand may take to exit after it has closed its output.
END_S = 1.0
# RFC 4254, 5.1: SSH_OPEN_ADMINISTRATIVELY_PROHIBITED.
PROHIBITED = 1

EXAMPLES = frozenset({"node0", "node1", "node0.cluster", "node1.cluster", "10.0.0.7", "fd00::8"})
"""The hosts of the sample machinefiles."""

# Paramiko reports what it raises a second time to its log.
_QUIET = "poseidon.ssh.wire"
logging.getLogger(_QUIET).addHandler(logging.NullHandler())
logging.getLogger(_QUIET).propagate = False


def handshake(
    endpoint: Endpoint, via: paramiko.Transport | None, settings: SshSettings
) -> paramiko.Transport:
    """Return an authenticated connection to one host.

    Args:
        endpoint: the host and our keys.
        via: the connection that it runs through; None: a direct one.
        settings: the time limit.

    Raises:
        JobError: one sentence with the host and the cause.
    """
    deadline_s = time.monotonic() + settings.connect_timeout_s
    line = _dial(endpoint, via, settings.connect_timeout_s)
    try:
        transport = paramiko.Transport(line)
    except (paramiko.SSHException, OSError) as error:
        line.close()
        raise JobError(f"{endpoint.label}: {error}") from error
    try:
        transport.set_log_channel(_QUIET)
        _check_host_key(endpoint, transport, deadline_s)
        _authenticate(endpoint, transport, deadline_s)
        transport.set_keepalive(KEEPALIVE_S)
    except BaseException:
        close_transport(transport)
        raise
    return transport


class _Program(paramiko.ProxyCommand):
    """A ProxyCommand: a program whose standard streams are the connection.

    It runs in `sh`, so that the command may have variables and redirections, and in a session of
    its own, so that Ctrl-C in the terminal does not end the connection. Paramiko's own class reads
    on after the program's end, and lets a program wait that writes many errors.
    """

    def __init__(self, command: str) -> None:
        self.command = command
        self.cmd = ["sh", "-c", f"exec {command}"]
        self.timeout: float | None = None
        self._at_end = False  # it has closed its streams, unasked
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the program runs
        self.process = subprocess.Popen(
            self.cmd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            start_new_session=True,
        )

    def send(self, content: Any) -> int:
        """Write to the program."""
        try:
            return int(super().send(content))
        except paramiko.ProxyCommandFailure:
            self._at_end = True
            raise

    def recv(self, size: int) -> bytes:
        """Return what has come, as a socket does: nothing when the program has ended."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self.process.stdout, selectors.EVENT_READ)
            if not ready.select(self.timeout):
                raise TimeoutError
        data = os.read(self.process.stdout.fileno(), size)
        self._at_end = self._at_end or not data
        return data

    def close(self) -> None:
        """End the program; one that has closed its streams exits by itself."""
        if self._at_end:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(END_S)
        if self.process.poll() is None:
            self._at_end = False
            self.process.terminate()

    def failure(self, why: str) -> str:
        """Return why no SSH server was reached."""
        if self._at_end:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(END_S)
        status = self.process.poll()
        if status is None or not self._at_end:
            return f"its ProxyCommand `{self.command}` reaches no SSH server that we can use: {why}"
        self._errors.seek(0)
        errors = self._errors.read().decode(errors="backslashreplace").split("\n")
        last = next(
            (line.strip() for line in reversed(errors) if line.strip()), "it wrote no error"
        )
        ended = f"exit status {status}" if status >= 0 else f"signal {-status}"
        return f"its ProxyCommand `{self.command}` ended with {ended}: {last}"

    def forget_errors(self) -> None:
        """Close the file of the program's errors."""
        self._errors.close()


def close_transport(transport: paramiko.Transport) -> None:
    """Close a connection; end and reap its ProxyCommand, if it has one."""
    transport.close()
    proxy: object = transport.sock
    if not isinstance(proxy, paramiko.ProxyCommand):
        return
    process = proxy.process
    with suppress(OSError):
        process.kill()
    # Paramiko's thread signals the program once more at its end: it may be reaped, and its pipes
    # closed, after that only.
    transport.join(CLOSE_S)
    with suppress(subprocess.TimeoutExpired):  # the kernel holds it
        process.wait(CLOSE_S)
    for pipe in (process.stdin, process.stdout, process.stderr):
        with suppress(OSError):
            if pipe is not None:
                pipe.close()
    if isinstance(proxy, _Program):
        proxy.forget_errors()


def _dial(
    endpoint: Endpoint, via: paramiko.Transport | None, timeout_s: float
) -> socket.socket | paramiko.Channel | paramiko.ProxyCommand:
    hint = (
        "; is it a host of a sample machinefile? Put your own in its place"
        if endpoint.name in EXAMPLES
        else ""
    )
    try:
        if via is not None:
            address = (endpoint.host, endpoint.port)
            return via.open_channel("direct-tcpip", address, ("127.0.0.1", 0), timeout=timeout_s)
        if endpoint.proxy_command:
            return _Program(endpoint.proxy_command)
        line = dial(endpoint.host, endpoint.port, timeout_s)
    except NameTimeoutError as error:
        raise JobError(
            f"{endpoint.label}: the name {endpoint.host} was not resolved within {timeout_s:g} s; "
            f"does this machine's name server answer?{hint}"
        ) from error
    except TimeoutError as error:
        raise JobError(f"{endpoint.label}: no answer within {timeout_s:g} s{hint}") from error
    except socket.gaierror as error:
        raise JobError(
            f"{endpoint.label}: the name {endpoint.host} is not known: {error.strerror}{hint}"
        ) from error
    except paramiko.ChannelException as error:
        why = error.text
        if error.code == PROHIBITED:
            why = (
                "the sshd of its jump host forwards no connections (AllowTcpForwarding, PermitOpen)"
            )
        raise JobError(f"{endpoint.label}: cannot be reached: {why}") from error
    except (OSError, paramiko.SSHException, EOFError) as error:
        why = (
            getattr(error, "strerror", None) or str(error) or "the jump host closed the connection"
        )
        raise JobError(f"{endpoint.label}: cannot be reached: {why}{hint}") from error
    with suppress(OSError, AttributeError):  # Linux has it
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_MS)
    return line


def _check_host_key(endpoint: Endpoint, transport: paramiko.Transport, deadline_s: float) -> None:
    """Exchange keys and check the host key against known_hosts."""
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
        why = str(error) or "it closed the connection"
        program: object = transport.sock
        if isinstance(program, _Program):
            raise JobError(f"{endpoint.label}: {program.failure(why)}") from error
        raise JobError(f"{endpoint.label}: no SSH server that we can use: {why}") from error
    key = HostKey(kind=shown.get_name(), blob=shown.asbytes())
    why_not = rejection(known, name, key, endpoint.known_hosts[0])
    if why_not is not None:
        raise JobError(f"{endpoint.label}: {why_not}")


def _algorithms(kind: str) -> tuple[str, ...]:
    """Return the signature algorithms of a kind of key."""
    return ("rsa-sha2-512", "rsa-sha2-256") if kind == "ssh-rsa" else (kind,)


def _lines_of(file: Path) -> list[str]:
    try:
        return read_definition(file).decode(errors="backslashreplace").splitlines()
    except OSError:
        return []  # a missing file trusts no host


def _authenticate(endpoint: Endpoint, transport: paramiko.Transport, deadline_s: float) -> None:
    tried: list[str] = []
    for label, key in identities(endpoint, tried, max(0.1, deadline_s - time.monotonic())):
        transport.auth_timeout = max(0.1, deadline_s - time.monotonic())
        try:
            transport.auth_publickey(endpoint.user, key)
        except paramiko.BadAuthenticationType as error:
            offers = ", ".join(error.allowed_types) or "nothing"
            raise JobError(
                f"{endpoint.label}: it accepts no keys, only {offers}; passwords are never used"
            ) from error
        except (paramiko.SSHException, OSError, EOFError) as error:
            refused = isinstance(error, paramiko.AuthenticationException)
            if refused and transport.is_active() and time.monotonic() < deadline_s:
                tried.append(f"{label} was refused")
                continue
            tried.append(f"{label}: {str(error) or 'the connection ended'}")
            raise JobError(
                f"{endpoint.label}: the login did not finish ({'; '.join(tried)}); the log of its "
                "sshd says why"
            ) from error
        else:
            if transport.is_authenticated():
                return
            raise JobError(
                f"{endpoint.label}: it requires more than a key (two-factor login), which a job "
                "cannot provide"
            )
    port = f"-p {endpoint.port} " if endpoint.port != SSH_PORT else ""
    raise JobError(
        f"{endpoint.label}: it accepts none of our keys ({'; '.join(tried) or 'there is none'}); "
        f"to install yours: ssh-copy-id {port}{endpoint.user}@{endpoint.host}"
    )


def identities(
    endpoint: Endpoint, missed: list[str], timeout_s: float
) -> Iterator[tuple[str, paramiko.PKey]]:
    """Yield each key that may be accepted, with its name in messages: files first, then the SSH
    agent's keys.

    Args:
        endpoint: names the files and says whether to ask the agent.
        missed: gets the reason for each file that cannot be used; one of OpenSSH's defaults may be
            absent.
        timeout_s: limit of each answer of the agent.
    """
    for path in endpoint.identities:
        if not path.is_file():
            if path not in default_identities():
                missed.append(f"there is no file {path}")
            continue
        try:
            yield str(path), paramiko.PKey.from_path(path)
        except PermissionError:
            missed.append(f"{path} may not be read by this user")
        except (paramiko.SSHException, OSError, ValueError, TypeError) as error:
            missed.append(_why_not(path, error))
    if endpoint.with_agent:
        yield from _agent_keys(missed, timeout_s)


def _why_not(path: Path, error: Exception) -> str:
    # Paramiko raises one error or another for a missing passphrase, by the kind of key.
    if isinstance(error, paramiko.PasswordRequiredException) or "password" in str(error):
        return f"{path} needs a passphrase (add it to the agent: ssh-add {path})"
    if path.suffix == ".pub":
        return f"{path} is a public key: name the private key, {path.with_suffix('')}"
    return f"{path} is not a private key ({str(error) or type(error).__name__})"


class _Agent(paramiko.Agent):
    """The SSH agent, with a time limit for each answer."""

    def __init__(self, timeout_s: float) -> None:
        super(paramiko.Agent, self).__init__()
        connection = get_agent_connection()
        if connection is None:
            return
        connection.settimeout(timeout_s)
        try:
            self._connect(connection)  # type: ignore[attr-defined]  # paramiko's stubs leave it out
        except BaseException:
            connection.close()
            raise


def _agent_keys(missed: list[str], timeout_s: float) -> Iterator[tuple[str, paramiko.PKey]]:
    try:
        agent = _Agent(timeout_s)
        keys = agent.get_keys()
    except (paramiko.SSHException, OSError) as error:
        missed.append(f"the SSH agent does not answer ({error})")
        return
    try:
        for key in keys:
            yield f"the agent's {key.comment or key.get_name()}", key
    finally:
        agent.close()
