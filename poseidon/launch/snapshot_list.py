"""The launcher's list of the snapshots that its job has written.

Law: a job restarts only from a snapshot in this list, so never from one that an earlier run left under the same name; and
only from one whose checksums agree at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from poseidon.cluster.plan import ProcessName, Role
from poseidon.cluster.supervision.loop import JobListener
from poseidon.cluster.supervision.restarts import StartingPoint
from poseidon.cluster.supervision.signals import SignalRequests
from poseidon.cluster.supervision.steps import Outcome
from poseidon.errors import JobError, SnapshotError
from poseidon.launch.snapshot_copies import SnapshotSource, WrittenHere
from poseidon.launch.stopping import job_folder
from poseidon.snapshot.checksums import damage, sums_path
from poseidon.snapshot.rotation import newest_state


def snapshot_of(word: str, ending: str = ".solverstate") -> Path:
    """Return the snapshot that --snapshot names: a file, or the newest of a job, by its id or its folder.

    Args:
        word: the flag's value.
        ending: of the names of snapshots.

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


class SnapshotList(JobListener):
    """The snapshots of one job, from all of its starts.

    Args:
        origin: where the job begins.
        warn: takes a sentence for each snapshot that is skipped.
        source: brings snapshots here that are written on another machine; closed with the list.
    """

    def __init__(
        self, origin: StartingPoint, warn: Callable[[str], None], source: SnapshotSource | None = None
    ) -> None:
        self._origin = origin
        self._warn = warn
        self._source = source or WrittenHere()
        self._written: dict[int, Path] = {}

    def on_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        """See `JobListener`."""
        if event.get("event") != "snapshot" or name.role is not Role.WORKER or name.index != 0:
            return
        state, iteration = event.get("state"), event.get("iteration")
        if isinstance(state, str) and isinstance(iteration, int):
            self._source.fetch(state, partial(self._written.__setitem__, iteration))

    def newest(self) -> StartingPoint:
        """Return the newest snapshot that exists here; where the job began if there is none."""
        existing = [(iteration, state) for iteration, state in self._written.items() if state.exists()]
        if not existing:
            return self._origin
        iteration, state = max(existing)
        return StartingPoint(state=str(state), iteration=iteration)

    def newest_intact(self) -> StartingPoint:
        """Return the newest snapshot whose checksums agree; where the job began if there is none."""
        self._source.wait()
        for iteration, state in sorted(self._written.items(), reverse=True):
            wrong = (
                damage(state) if sums_path(state).exists() else f"{state} is not whole: it has no checksums"
            )
            if wrong is None:
                return StartingPoint(state=str(state), iteration=iteration)
            if state.exists():  # else it was removed on purpose, by --snapshot_keep
                self._warn(f"passed over a snapshot: {wrong}")
            del self._written[iteration]
        return self._origin

    def finish(self, outcome: Outcome, requests: SignalRequests) -> None:
        """Wait a while for the last snapshots of a job that did not fail; see `SnapshotSource.finish`."""
        self._source.finish(outcome, requests)

    def close(self) -> None:
        """See `JobListener`."""
        self._source.close()
