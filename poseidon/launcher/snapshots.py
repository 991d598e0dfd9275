"""The snapshots of a job, as its launcher knows them: the list of those written, and copies of
remote ones.

Law: a job restarts only from a snapshot in this list, so never from one that an earlier run left
under the same name; and only from one whose checksums agree at that moment. A restart sends the
hosts what the launcher has, so the newest snapshot must be here before the host that wrote it is
lost. A snapshot that is here already (a shared file system, or the same machine) is not copied; it
is the same one only if its checksums are, since an earlier run may have left another under the same
path. A copy gets its name only when it is whole and on disk, its checksums last. A copy that fails
is a warning.
"""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from poseidon.base.durable import flush, replace_durably
from poseidon.cluster.agent.remote import RemoteAgent
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.supervision.loop import JobListener
from poseidon.cluster.supervision.restarts import StartingPoint
from poseidon.cluster.supervision.signals import SignalRequests
from poseidon.cluster.supervision.state import Outcome
from poseidon.engine.snapshot_files import find_damage, sealed_files, sums_path
from poseidon.errors import PoseidonError

KEPT = 2
LARGEST_SUMS_BYTES = 4096
WAIT_S = 60.0
"""How long a job that restarts, or has done all its iterations, waits for copies in progress."""
STOPPED_WAIT_S = 3.0
"""The same for a job that was stopped."""
ARRIVING = "arriving.partial"
"""The folder, beside the copies, of the one in progress."""
_POLL_S = 0.1


class SnapshotCopies:
    """Copies snapshots from the host of worker 0 to this machine, on a thread of its own.

    Args:
        folder: where the copies are; made when the first comes.
        warn: takes a sentence for each snapshot that could not be copied.
    """

    def __init__(
        self, folder: Path, agent: Callable[[], RemoteAgent], warn: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._agent = agent
        self._warn = warn
        self._wanted: queue.Queue[tuple[str, RemoteAgent, Callable[[Path], None]] | None]
        self._wanted = queue.Queue()
        self._missing: list[str] = []
        self._here: list[Path] = []
        self._closed = False
        self._placing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="poseidon snapshots", daemon=True)
        self._thread.start()

    def fetch(self, state: str, arrived: Callable[[Path], None]) -> None:
        """Begin to copy a snapshot. Returns at once.

        Args:
            state: its `.solverstate`, on the host of worker 0.
            arrived: takes its path on this machine, on another thread; not called if it cannot be
                copied.
        """
        self._missing.append(state)
        self._wanted.put((state, self._agent(), arrived))  # worker 0 may move to another host

    def wait(self) -> None:
        """Wait up to `WAIT_S` for all snapshots that were fetched so far."""
        self._done_within(WAIT_S)

    def finish(self, outcome: Outcome, requests: SignalRequests) -> None:
        """Wait a while for the last snapshots of a job that did not fail.

        Args:
            requests: the signals meanwhile; a request to stop ends the wait at once.
        """
        # Whoever stops a job wants the launcher to end. The job's own end may have used up the
        # deadline of SIGTERM, whose sender kills a few seconds later; a user who pressed Ctrl-C
        # sits and waits. A small snapshot still comes in that time. A large one stays whole on its
        # host: no restart needs it now.
        stopped = outcome is Outcome.STOPPED
        until_s = time.monotonic() + (STOPPED_WAIT_S if stopped else WAIT_S)
        if not stopped and self._missing:
            self._warn(
                f"waiting up to {WAIT_S:.0f} s for the last snapshot to come here (Ctrl-C ends "
                "the waiting)"
            )
        while not self._done_within(_POLL_S) and time.monotonic() < until_s:
            if requests.stop_wanted():
                return

    def close(self) -> None:
        """Stop copying: a snapshot in progress stays where it was written, and a warning says so."""
        with self._placing:
            self._closed = True
            missing = list(self._missing)
            self._clear()
        self._wanted.put(None)
        if missing:
            self._warn(f"not copied here, but left on the host of worker 0: {', '.join(missing)}")

    def _done_within(self, seconds: float) -> bool:
        with self._wanted.all_tasks_done:
            return self._wanted.all_tasks_done.wait_for(
                lambda: not self._wanted.unfinished_tasks, seconds
            )

    def _run(self) -> None:
        while (wanted := self._wanted.get()) is not None and not self._closed:
            state, agent, arrived = wanted
            try:
                found = self._local_copy(agent, state)
                if found is not None:
                    arrived(found)
            except Exception as error:  # noqa: BLE001 - a thread's outermost frame: SSH has errors of its own
                is_known = isinstance(error, PoseidonError | OSError | EOFError)
                why = (
                    f"{error}; a restart would continue from an earlier one"
                    if is_known
                    else f"{type(error).__name__}: {error}"
                )
                self._warn_while_open(f"the snapshot {state} could not be copied here: {why}")
            finally:
                self._missing.remove(state)
                self._wanted.task_done()

    def _warn_while_open(self, sentence: str) -> None:
        """Warn, unless `close` has done it: the end of the job interrupts a copy."""
        if not self._closed:
            self._warn(sentence)

    def _local_copy(self, agent: RemoteAgent, state: str) -> Path | None:
        """Return the path of a snapshot on this machine, copied if need be; None if it does not
        come whole.
        """
        sums = _read_small(agent, str(sums_path(Path(state))))
        if _is_here(Path(state), sums):
            return Path(state)
        return self._copy(agent, Path(state), sums)

    def _copy(self, agent: RemoteAgent, state: Path, sums: bytes) -> Path | None:
        arriving = self._folder / ARRIVING
        copy = arriving / state.name
        with self._placing:
            if self._closed:
                return None
            self._clear()  # what a launcher that was killed has left
            arriving.mkdir(parents=True)
        try:
            sums_path(copy).write_bytes(sums)
            # names without folders: `sealed_files` sees to that
            for path in sealed_files(copy) or ():
                with path.open("wb") as stream:
                    agent.read_file(str(state.with_name(path.name)), stream.write)
            wrong = find_damage(copy)
            if wrong is None:
                return self._place(copy)
            self._warn_while_open(f"a snapshot arrived incomplete: {wrong}")
            return None
        finally:
            self._clear()

    def _place(self, copy: Path) -> Path | None:
        """Give a whole copy its names, unless the job has ended."""
        here = self._folder / copy.name
        files = (*(sealed_files(copy) or ()), sums_path(copy))
        for path in files:
            flush(path)  # slow, so outside the lock: `close` waits only for what is below
        with self._placing:
            if self._closed:
                return None
            # An earlier copy's sums do not match the new files.
            sums_path(here).unlink(missing_ok=True)
            for path in files:
                replace_durably(path, self._folder / path.name)
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


class SnapshotList(JobListener):
    """The snapshots of one job, from all of its starts.

    Args:
        warn: takes a sentence for each snapshot that is skipped.
        copies: of snapshots that are written on another machine, closed with the list; None: they
            are written on this one, or cannot be copied.
    """

    def __init__(
        self,
        origin: StartingPoint,
        warn: Callable[[str], None],
        copies: SnapshotCopies | None = None,
    ) -> None:
        self._origin = origin
        self._warn = warn
        self._copies = copies
        self._written: dict[int, Path] = {}

    def on_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        if event.get("event") != "snapshot" or name.role is not Role.WORKER or name.index != 0:
            return
        state, iteration = event.get("state"), event.get("iteration")
        if not isinstance(state, str) or not isinstance(iteration, int):
            return
        if self._copies is None:
            self._written[iteration] = Path(state)
        else:
            self._copies.fetch(state, partial(self._written.__setitem__, iteration))

    def newest(self) -> StartingPoint:
        """Return the newest snapshot that exists here; where the job began if there is none."""
        # a list of its own: the thread that copies may add one meanwhile
        for iteration, state in sorted(self._written.items(), reverse=True):
            if state.exists():
                return StartingPoint(state=str(state), iteration=iteration)
        return self._origin

    def newest_intact(self) -> StartingPoint:
        """Return the newest snapshot whose checksums agree; where the job began if there is
        none.
        """
        if self._copies is not None:
            self._copies.wait()
        for iteration, state in sorted(self._written.items(), reverse=True):
            wrong = (
                find_damage(state)
                if sums_path(state).exists()
                else f"{state} is incomplete: it has no checksums"
            )
            if wrong is None:
                return StartingPoint(state=str(state), iteration=iteration)
            if state.exists():  # else it was removed on purpose, by --snapshot_keep
                self._warn(f"skipped a snapshot: {wrong}")
            del self._written[iteration]
        return self._origin

    def finish(self, outcome: Outcome, requests: SignalRequests) -> None:
        """See `SnapshotCopies.finish`."""
        if self._copies is not None:
            self._copies.finish(outcome, requests)

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()


def _is_here(state: Path, sums: bytes) -> bool:
    """Return whether a snapshot of this machine is whole and has these checksums."""
    with suppress(OSError):
        return sums_path(state).read_bytes() == sums and find_damage(state) is None
    return False


def _read_small(agent: RemoteAgent, remote: str) -> bytes:
    content = bytearray()
    agent.read_file(remote, content.extend, limit=LARGEST_SUMS_BYTES)
    return bytes(content)
