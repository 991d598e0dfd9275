"""Copies of snapshots on the launcher's machine, where worker 0 writes them on another one.

Law: a job that goes on brings its hosts what the launcher has, so the newest snapshot must be here before the host that wrote
it is lost. A snapshot that is here already (shared data, or the same machine) is not copied. A copy that fails is a warning.
"""

from __future__ import annotations

import queue
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from poseidon.errors import PoseidonError
from poseidon.snapshot.checksums import damage, sealed_files, sums_path

KEPT = 2
LARGEST_SUMS_BYTES = 4096
SETTLE_S = 60.0
"""How long a job that starts again waits for a copy that is under way."""


class Files(Protocol):
    """What is needed of an SFTP session."""

    def stat(self, path: str) -> object:
        """The status of a file; `st_size` and `st_mode` are looked at."""

    def get(self, remotepath: str, localpath: str) -> None:
        """Copy a file from there to here."""

    def close(self) -> None:
        """End the session."""


class SnapshotCopies:
    """One job's.

    Args:
        folder: where they lie; made when the first comes.
        connect: opens a session with the machine of worker 0.
        warn: told what could not be copied, in a sentence.
    """

    def __init__(self, folder: Path, connect: Callable[[], Files], warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._connect = connect
        self._warn = warn
        self._wanted: queue.Queue[tuple[str, Callable[[Path], None]] | None] = queue.Queue()
        self._here: list[Path] = []
        self._thread = threading.Thread(target=self._run, name="poseidon snapshots", daemon=True)
        self._thread.start()

    def want(self, state: str, arrived: Callable[[Path], None]) -> None:
        """Copy a snapshot; returns at once.

        Args:
            state: its `.solverstate` there.
            arrived: told where it is here, from another thread.
        """
        self._wanted.put((state, arrived))

    def settle(self) -> None:
        """Wait a while for all that is wanted so far."""
        with self._wanted.all_tasks_done:
            self._wanted.all_tasks_done.wait_for(lambda: not self._wanted.unfinished_tasks, SETTLE_S)

    def close(self) -> None:
        """Stop copying; what is under way is left behind."""
        self._wanted.put(None)

    def _run(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            state, arrived = wanted
            try:
                found = self._found(state)
                if found is not None:
                    arrived(found)
            except (PoseidonError, OSError, EOFError) as error:
                self._warn(
                    f"the snapshot {state} could not be copied here: {error}; a new start would go on from an earlier one"
                )
            except Exception as error:  # noqa: BLE001 - a thread's outermost frame: SSH has errors of its own
                self._warn(f"the snapshot {state} could not be copied here: {type(error).__name__}: {error}")
            finally:
                self._wanted.task_done()

    def _found(self, state: str) -> Path | None:
        """Where a snapshot is here; None where it does not come whole."""
        if sums_path(Path(state)).exists() and damage(Path(state)) is None:
            return Path(state)
        self._folder.mkdir(parents=True, exist_ok=True)
        here = self._folder / Path(state).name
        session = self._connect()
        try:
            self._get(session, str(sums_path(Path(state))), sums_path(here), LARGEST_SUMS_BYTES)
            for path in sealed_files(here) or ():  # names without folders: `sealed_files` sees to that
                self._get(session, str(Path(state).with_name(path.name)), path, None)
        finally:
            session.close()
        wrong = damage(here)
        if wrong is not None:
            self._warn(f"a snapshot did not come whole: {wrong}")
            return None
        self._forget_old(here)
        return here

    def _get(self, session: Files, there: str, here: Path, most_bytes: int | None) -> None:
        status = session.stat(there)
        size, mode = getattr(status, "st_size", None), getattr(status, "st_mode", None)
        if not isinstance(mode, int) or not stat.S_ISREG(mode):
            raise OSError(f"{there} is no plain file")
        if most_bytes is not None and (not isinstance(size, int) or size > most_bytes):
            raise OSError(f"{there} has {size} bytes, expected at most {most_bytes}")
        session.get(there, str(here))

    def _forget_old(self, newest: Path) -> None:
        self._here = [*(path for path in self._here if path != newest), newest]
        while len(self._here) > KEPT:
            old = self._here.pop(0)
            files = sealed_files(old) or ()
            for path in (sums_path(old), *files):
                path.unlink(missing_ok=True)
