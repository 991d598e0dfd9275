"""SFTP sessions on a connection that stands.

Law: each answer has a time limit. A host that falls silent, though its connection stands, ends the session with a
sentence, and does not hold up whoever copies.
"""

from __future__ import annotations

import paramiko

from poseidon.cluster.ssh.channel import answered_within
from poseidon.errors import JobError

SFTP_SILENCE_S = 60.0
"""How long a host may leave a request without an answer: longer than a busy disk takes."""


class SftpSession(paramiko.SFTPClient):
    """A session that ends when the host falls silent: what comes after that fails at once, and does not wait again."""

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

    def _ended(self) -> TimeoutError:
        self._channel.close()
        return TimeoutError(f"no answer over SFTP for {self._channel.gettimeout():g} s")


def open_sftp(transport: paramiko.Transport, where: str, silence_s: float) -> SftpSession:
    """See `SshHost.sftp`."""
    channel: paramiko.Channel | None = None
    try:
        channel = transport.open_session(timeout=silence_s)
        channel.settimeout(silence_s)
        with answered_within(channel, silence_s):
            channel.invoke_subsystem("sftp")
        return SftpSession(channel)
    except (paramiko.SSHException, OSError, EOFError) as error:
        if channel is not None:
            channel.close()
        raise JobError(f"{where}: SFTP is not to be had there: {error}") from error
