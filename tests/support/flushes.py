"""The fsync calls of a test, in order, with the contents of the folders at each."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """One fsync.

    Attributes:
        path: of the file or folder.
        holds: the names in a folder at that moment; None for a file.
    """

    path: Path
    holds: frozenset[str] | None


def watch_flushes(monkeypatch: pytest.MonkeyPatch) -> list[Flush]:
    """Return a list to which every fsync of this test is added."""
    seen: list[Flush] = []
    real = os.fsync

    def fsync(number: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        holds = frozenset(child.name for child in path.iterdir()) if path.is_dir() else None
        seen.append(Flush(path=path, holds=holds))
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    return seen
