"""The launcher's list of the snapshots that its job has written.

Law: a job goes on only from what this list has, so never from a snapshot that an earlier run left under the same name; and only
from one whose checksums agree at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from poseidon.cluster.plan import ProcessName, Role
from poseidon.cluster.supervision.loop import JobCallbacks
from poseidon.cluster.supervision.restarts import StartingPoint
from poseidon.errors import JobError, SnapshotError
from poseidon.launch.snapshot_copies import SnapshotCopies
from poseidon.launch.stopping import job_folder
from poseidon.snapshot.checksums import damage, sums_path
from poseidon.snapshot.rotation import newest_state


def snapshot_of(word: str, ending: str = ".solverstate") -> Path:
    """The snapshot that --snapshot means: a file, or the newest of a job, by its id or its folder.

    Args:
        word: of the flag.
        ending: of its name, where it is looked for.

    Raises:
        SnapshotError: there is none.
    """
    if Path(word).is_file():
        return Path(word)
    try:
        folder = job_folder(word)
    except JobError as error:
        raise SnapshotError(
            f"--snapshot: there is no file {word}, nor a folder or a job of that name"
        ) from error
    return newest_state(folder, ending)


class SnapshotLedger:
    """Callbacks of a job that hand everything on, and list snapshots. See `JobCallbacks`.

    Args:
        inner: hears everything too.
        warn: told, in a sentence, of each snapshot that is passed over.
        copies: brings snapshots here that are written on another machine; None: they are written here.
    """

    def __init__(
        self, inner: JobCallbacks, warn: Callable[[str], None], copies: SnapshotCopies | None = None
    ) -> None:
        self._inner = inner
        self._warn = warn
        self._copies = copies
        self._written: dict[int, Path] = {}

    def on_started(self) -> None:
        """See `JobCallbacks`."""
        self._inner.on_started()

    def on_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        """See `JobCallbacks`."""
        if event.get("event") == "snapshot" and name.role is Role.WORKER and name.index == 0:
            state, iteration = event.get("state"), event.get("iteration")
            if isinstance(state, str) and isinstance(iteration, int):
                self._enter(iteration, state)
        self._inner.on_event(name, event)

    def _enter(self, iteration: int, state: str) -> None:
        if self._copies is None:
            self._written[iteration] = Path(state)
        else:
            self._copies.want(state, partial(self._written.__setitem__, iteration))

    def on_log(self, name: ProcessName, line: str) -> None:
        """See `JobCallbacks`."""
        self._inner.on_log(name, line)

    def newest(self, origin: StartingPoint) -> StartingPoint:
        """The newest snapshot that is there; the place where the job began when there is none."""
        there = [(iteration, state) for iteration, state in self._written.items() if state.exists()]
        if not there:
            return origin
        iteration, state = max(there)
        return StartingPoint(state=str(state), iteration=iteration)

    def newest_whole(self, origin: StartingPoint) -> StartingPoint:
        """The newest snapshot that is whole; the place where the job began when there is none.

        Args:
            origin: where the job began.
        """
        if self._copies is not None:
            self._copies.settle()
        for iteration, state in sorted(self._written.items(), reverse=True):
            wrong = (
                damage(state) if sums_path(state).exists() else f"{state} is not whole: it has no checksums"
            )
            if wrong is None:
                return StartingPoint(state=str(state), iteration=iteration)
            if state.exists():  # else it was removed on purpose, by --snapshot_keep
                self._warn(f"passed over a snapshot: {wrong}")
            del self._written[iteration]
        return origin
