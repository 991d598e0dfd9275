"""The flags of `poseidon train` that act in the workers, as fields.

Law: a field here is a field of the launcher's request and of the worker's document. What lies
between copies all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from poseidon.flags.flag import Section, option
from poseidon.flags.values import count


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The options."""

    snapshot_keep: int = option(
        0,
        "newest snapshots that stay; 0 (default): all",
        Section.OUTPUT,
        metavar="N",
        read=count,
        rare=True,
    )

    def options(self) -> dict[str, Any]:
        """Return the options by name."""
        return {entry.name: getattr(self, entry.name) for entry in fields(TrainingOptions)}
