"""From a host's name to an authenticated connection: dial, check its key, offer ours.

Law: nothing is offered to a host before its key was found in known_hosts; each step has a time limit.
"""

from __future__ import annotations

import logging
import socket
import time
from contextlib import suppress
from pathlib import Path

import paramiko

from poseidon.cluster.name_lookup import NameTimeoutError, dial
from poseidon.cluster.ssh.config import Endpoint, SshSettings
from poseidon.cluster.ssh.identities import identities
from poseidon.cluster.ssh.known_hosts import (
    SSH_PORT,
    HostKey,
    host_name,
    kinds_known,
    objection,
    parse_known_hosts,
)
from poseidon.errors import JobError

# After this long without an answer to what was sent, the kernel gives a connection up.
SILENCE_MS = 20_000
KEEPALIVE_S = 5
HANG_UP_S = 5.0

# Paramiko reports what it raises a second time to its log.
_QUIET = "poseidon.ssh.wire"
logging.getLogger(_QUIET).addHandler(logging.NullHandler())
logging.getLogger(_QUIET).propagate = False


def handshake(
    endpoint: Endpoint, via: paramiko.Transport | None, settings: SshSettings
) -> paramiko.Transport:
    """An authenticated connection to one host.

    Args:
        endpoint: which, and with which keys.
        via: the connection that it runs through; None: it is dialled from here.
        settings: the time limit.

    Raises:
        JobError: one sentence that names the host and says what is in the way.
    """
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
        hang_up(transport)
        raise
    return transport


class _Program(paramiko.ProxyCommand):
    """A program that makes the connection; it may have ended by itself when paramiko ends it."""

    def close(self) -> None:
        """End it."""
        with suppress(ProcessLookupError):
            super().close()


def hang_up(transport: paramiko.Transport) -> None:
    """Close a connection; the program that made it, if one did, is ended and reaped, too."""
    transport.close()
    proxy: object = transport.sock
    if not isinstance(proxy, paramiko.ProxyCommand):
        return
    process = proxy.process
    with suppress(OSError):
        process.kill()
    # Paramiko's thread signals the program once more at its end: it may be reaped, and its pipes closed, after that only.
    transport.join(HANG_UP_S)
    process.wait(HANG_UP_S)
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
            return _Program(endpoint.proxy_command)
        line = dial(endpoint.host, endpoint.port, timeout_s)
    except NameTimeoutError as error:
        raise JobError(
            f"{endpoint.words}: what the name {endpoint.host} means was not learnt within {timeout_s:g} s; "
            "does this machine's name server answer?"
        ) from error
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
            tried.append(f"{label} ended the connection ({str(error) or 'it hung up'})")
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
