"""SSH settings that are the same for all hosts; this module imports no SSH."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class SshSettings:
    """SSH settings that are the same for all hosts.

    Attributes:
        config: a file read instead of ~/.ssh/config and /etc/ssh/ssh_config, as with `ssh -F`.
        connect_timeout_s: for each host, from the lookup of its name to the accepted key.
    """

    config: Path | None = None
    connect_timeout_s: float = 15.0

    @classmethod
    def from_flag(cls, config: str | None) -> SshSettings:
        """Return the settings for the value of `--ssh_config`; None or empty: OpenSSH's own
        files.
        """
        return cls(config=Path(config) if config else None)
