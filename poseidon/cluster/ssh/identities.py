"""The keys that may let us in: the configuration's files, then those of the SSH agent.

Law: a key that needs a passphrase is never asked for one; it must be in the agent.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import paramiko

from poseidon.cluster.ssh.config import Endpoint


def identities(endpoint: Endpoint, missed: list[str]) -> Iterator[tuple[str, paramiko.PKey]]:
    """Each key with its words for messages.

    Args:
        endpoint: names the files and says whether to ask the agent.
        missed: hears why a file that is there was passed over.
    """
    for path in endpoint.identities:
        if not path.is_file():
            continue
        try:
            yield str(path), paramiko.PKey.from_path(path)
        except PermissionError:
            missed.append(f"{path} may not be read by this user")
        except (paramiko.SSHException, OSError, ValueError, TypeError) as error:
            missed.append(_why_not(path, error))
    if endpoint.with_agent:
        yield from _agent_keys(missed)


def _why_not(path: Path, error: Exception) -> str:
    # Paramiko says that a passphrase is missing with one error or another, by the kind of key.
    if isinstance(error, paramiko.PasswordRequiredException) or "password" in str(error):
        return f"{path} needs a passphrase (add it to the agent: ssh-add {path})"
    return f"{path} is no private key ({str(error) or type(error).__name__})"


def _agent_keys(missed: list[str]) -> Iterator[tuple[str, paramiko.PKey]]:
    try:
        agent = paramiko.Agent()
        keys = agent.get_keys()
    except (paramiko.SSHException, OSError) as error:
        missed.append(f"the SSH agent does not answer ({error})")
        return
    try:
        for key in keys:
            yield f"the agent's {key.comment or key.get_name()}", key
    finally:
        agent.close()
