"""Copies of snapshots on the launcher's machine, where worker 0 writes them on another one.

Law: a job that goes on brings its hosts what the launcher has, so the newest snapshot must be here before the host that wrote
it is lost. A snapshot that is here already (shared data, or the same machine) is not copied; it is the same one only when its
checksums are, since an earlier run may have left another under the same path. A copy has its name only when it is whole and on disk,
its checksums last. A copy that fails is a warning.
"""

from __future__ import annotations

import queue
import shutil
import stat
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Protocol

from poseidon.cluster.supervision.signals import SignalRequests
from poseidon.cluster.supervision.steps import Outcome
from poseidon.durable import flush, put_in_place
from poseidon.errors import PoseidonError
from poseidon.snapshot.checksums import damage, sealed_files, sums_path

KEPT = 2
LARGEST_SUMS_BYTES = 4096
SETTLE_S = 60.0
"""How long a job that starts again, or has done all its iterations, waits for copies that are under way."""
STOPPED_SETTLE_S = 3.0
"""The same of a job that ended since it was asked to."""
ARRIVING = "arriving.partial"
"""The folder, beside the copies, of the one that is under way."""
_LOOK_S = 0.1


class Files(Protocol):
    """What is needed of an SFTP session."""

    def stat(self, path: str) -> object:
        """The status of a file; `st_size` and `st_mode` are looked at."""

    def open(self, filename: str, mode: str) -> Any:
        """Open a file; `read` and `close` are used."""

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
        self._missing: list[str] = []
        self._here: list[Path] = []
        self._closed = False
        self._placing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="poseidon snapshots", daemon=True)
        self._thread.start()

    def want(self, state: str, arrived: Callable[[Path], None]) -> None:
        """Copy a snapshot; returns at once.

        Args:
            state: its `.solverstate` there.
            arrived: told where it is here, from another thread.
        """
        self._missing.append(state)
        self._wanted.put((state, arrived))

    def settle(self) -> None:
        """Wait a while for all that is wanted so far."""
        self._settled_within(SETTLE_S)

    def finish(self, outcome: Outcome, requests: SignalRequests) -> None:
        """Wait a while for the last snapshots of a job that ended well.

        Args:
            outcome: how it ended.
            requests: the signals meanwhile; one that asks to stop ends the wait at once.
        """
        # Whoever has asked for a stop wants the launcher gone. SIGTERM's deadline may be used up by the job's own end, and
        # what sent it kills a few seconds after that; who pressed Ctrl-C sits there and waits. A small snapshot still
        # comes in that time. A large one is left where it lies whole, on its host: nothing goes on from it by itself now.
        stopped = outcome is Outcome.STOPPED
        until_s = time.monotonic() + (STOPPED_SETTLE_S if stopped else SETTLE_S)
        if not stopped and self._missing:
            self._warn(
                f"waiting up to {SETTLE_S:.0f} s for the last snapshot to come here (Ctrl-C ends the waiting)"
            )
        while not self._settled_within(_LOOK_S) and time.monotonic() < until_s:
            if requests.stop_wanted():
                return

    def close(self) -> None:
        """Stop copying; what is under way is left where it was written, and said to be."""
        with self._placing:
            self._closed = True
            missing = list(self._missing)
            self._clear()
        self._wanted.put(None)
        if missing:
            self._warn(f"not copied here, but left where worker 0 wrote it: {', '.join(missing)}")

    def _settled_within(self, seconds: float) -> bool:
        with self._wanted.all_tasks_done:
            return self._wanted.all_tasks_done.wait_for(lambda: not self._wanted.unfinished_tasks, seconds)

    def _run(self) -> None:
        while (wanted := self._wanted.get()) is not None and not self._closed:
            state, arrived = wanted
            try:
                found = self._found(state)
                if found is not None:
                    arrived(found)
            except (PoseidonError, OSError, EOFError) as error:
                self._tell(
                    f"the snapshot {state} could not be copied here: {error}; a new start would go on from an earlier one"
                )
            except Exception as error:  # noqa: BLE001 - a thread's outermost frame: SSH has errors of its own
                self._tell(f"the snapshot {state} could not be copied here: {type(error).__name__}: {error}")
            finally:
                self._missing.remove(state)
                self._wanted.task_done()

    def _tell(self, sentence: str) -> None:
        """Warn, unless `close` has said it: a job that has ended cuts a copy off."""
        if not self._closed:
            self._warn(sentence)

    def _found(self, state: str) -> Path | None:
        """Where a snapshot is here; None where it does not come whole."""
        with closing(self._connect()) as session:
            sums = _read_small(session, str(sums_path(Path(state))))
            return Path(state) if _is_here(Path(state), sums) else self._bring(session, Path(state), sums)

    def _bring(self, session: Files, state: Path, sums: bytes) -> Path | None:
        arriving = self._folder / ARRIVING
        copy = arriving / state.name
        with self._placing:
            if self._closed:
                return None
            self._clear()  # what a launcher that was killed has left
            arriving.mkdir(parents=True)
        try:
            sums_path(copy).write_bytes(sums)
            for path in sealed_files(copy) or ():  # names without folders: `sealed_files` sees to that
                there = str(state.with_name(path.name))
                _plain_size(session, there)
                session.get(there, str(path))
            wrong = damage(copy)
            if wrong is None:
                return self._place(copy)
            self._tell(f"a snapshot did not come whole: {wrong}")
            return None
        finally:
            self._clear()

    def _place(self, copy: Path) -> Path | None:
        """Give a whole copy its names, unless the job has ended meanwhile."""
        here = self._folder / copy.name
        files = (*(sealed_files(copy) or ()), sums_path(copy))
        for path in files:
            flush(path)  # which takes its time: `close` waits for what is done below alone
        with self._placing:
            if self._closed:
                return None
            sums_path(here).unlink(missing_ok=True)  # of an earlier one: they are not those of the new files
            for path in files:
                put_in_place(path, self._folder / path.name)
        self._forget_old(here)
        return here

    def _clear(self) -> None:
        shutil.rmtree(self._folder / ARRIVING, ignore_errors=True)

    def _forget_old(self, newest: Path) -> None:
        self._here = [*(path for path in self._here if path != newest), newest]
        while len(self._here) > KEPT:
            old = self._here.pop(0)
            files = sealed_files(old) or ()
            for path in (sums_path(old), *files):
                path.unlink(missing_ok=True)


def _is_here(state: Path, sums: bytes) -> bool:
    """Whether a snapshot of this machine is whole, and the one that has these checksums."""
    with suppress(OSError):
        return sums_path(state).read_bytes() == sums and damage(state) is None
    return False


def _read_small(session: Files, there: str) -> bytes:
    size = _plain_size(session, there)
    if size <= LARGEST_SUMS_BYTES:
        with closing(session.open(there, "rb")) as file:
            content = bytes(file.read(LARGEST_SUMS_BYTES + 1))
        if len(content) <= LARGEST_SUMS_BYTES:
            return content
    raise OSError(f"{there} has {size} bytes, expected at most {LARGEST_SUMS_BYTES}")


def _plain_size(session: Files, there: str) -> int:
    status = session.stat(there)
    size, mode = getattr(status, "st_size", None), getattr(status, "st_mode", None)
    if not isinstance(mode, int) or not stat.S_ISREG(mode) or not isinstance(size, int):
        raise OSError(f"{there} is no plain file")
    return size
