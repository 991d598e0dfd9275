"""Search for the newest snapshot of a run, and removal of older ones.

Law: only complete snapshots of this project (those with checksums) are removed, only after a newer
one is complete, and never one of another run. The newest is of the run that began last, whatever
its iteration: a new run may be shorter than an older one in the same folder.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from poseidon.base.foreign_files import open_in
from poseidon.engine.snapshots.checksums import (
    SUFFIX,
    Run,
    find_damage,
    run_of,
    sealed_files,
    sums_path,
)
from poseidon.errors import SnapshotError

CHECKPOINT = ".pt"
"""The suffix of a checkpoint of `poseidon run`; the other snapshots are Caffe's states."""
COPIES = "snapshots"
"""The folder for copies of other hosts' snapshots, in the job's folder on the launcher's host."""


def snapshots_before(state: Path) -> list[Path]:
    """Return the states with checksums, the prefix and the run of `state`, and a smaller iteration,
    oldest first.
    """
    prefix, iteration, ending = _parts(state.name)
    run = run_of(state).number
    return [
        path
        for number, own, path in _sealed(state.parent, prefix, ending)
        if number == run and own < iteration
    ]


def sealed(prefix: Path, ending: str) -> list[Path]:
    """Return the states with this prefix and checksums: of each run those of later iterations
    last, and those of later runs after those of earlier ones.
    """
    return [path for *_, path in _sealed(prefix.parent, prefix.name, ending)]


def newest_intact(prefix: Path, ending: str) -> Path | None:
    """Return the last state of `sealed` whose files match their checksums, or None."""
    found = reversed(sealed(prefix, ending))
    return next((path for path in found if find_damage(path) is None), None)


def later_of_others(state: Path) -> Path | None:
    """Return the state with the prefix of `state` and the highest iteration, if that is higher:
    of another run; else None.
    """
    prefix, iteration, ending = _parts(state.name)
    found = [(own, path) for _, own, path in _sealed(state.parent, prefix, ending)]
    highest, path = max(found, default=(iteration, state))
    return path if highest > iteration else None


def all_runs(folder: Path) -> list[Run]:
    """Return the runs of all snapshots in a folder."""
    return [
        run_of(path.with_name(path.name.removesuffix(SUFFIX))) for path in folder.glob(f"*{SUFFIX}")
    ]


def _sealed(folder: Path, prefix: str, ending: str) -> list[tuple[int, int, Path]]:
    """Return the number of the run and the iteration of each, in order."""
    found = []
    for path in folder.glob(f"*_iter_*{ending}"):
        try:
            other, number, other_ending = _parts(path.name)
        except ValueError:
            continue
        if other == prefix and other_ending == ending and sums_path(path).exists():
            found.append((run_of(path).number, number, path))
    return sorted(found)


def newest_state(folder: Path, ending: str = ".solverstate") -> Path:
    """Return the state of the highest iteration of the newest run in a job's folder or among the
    launcher's copies in it.

    Snapshots with checksums are preferred: others are by Caffe or an older version, or incomplete.
    The folder may be another user's: links are passed over; see `poseidon.base.foreign_files`.

    Args:
        folder: the folder of a job, or another folder with snapshots.
        ending: the suffix of their names; for states, HDF5 files count too.

    Raises:
        SnapshotError: there is no snapshot.
    """
    found = []
    for path in (
        path for parent in (folder, folder / COPIES) for path in parent.glob(f"*{ending}*")
    ):
        with suppress(ValueError, OSError):
            open_in(folder.resolve(), path.relative_to(folder)).close()
            key = sums_path(path).exists(), run_of(path).number, _parts(path.name)[1]
            found.append((key, path))
    if not found:
        raise SnapshotError(f"{folder} has no snapshot, expected a file <prefix>_iter_<N>{ending}")
    return max(found)[1]


def remove_older(state: Path, keep: int) -> list[Path]:
    """Remove all but the newest `keep` snapshots of a run.

    Checksums are removed first, to mark the rest as incomplete.

    Args:
        state: the newest state, which is complete.
        keep: the number of snapshots to keep, including this one; 0: all.

    Returns:
        the states that were removed.

    Raises:
        SnapshotError: a file cannot be removed.
    """
    if keep < 1:
        return []
    before = snapshots_before(state)
    old = before[: max(0, len(before) - (keep - 1))]
    for path in old:
        files = sealed_files(path) or (path,)
        try:
            for file in (sums_path(path), *files):
                file.unlink(missing_ok=True)
        except OSError as error:
            raise SnapshotError(
                f"cannot remove the old snapshot {path}: {error.strerror}"
            ) from error
    return old


def _parts(name: str) -> tuple[str, int, str]:
    """Split `quick_iter_10.solverstate` into `quick`, 10 and `.solverstate`; ValueError for any
    other name.
    """
    match = re.fullmatch(r"(.*)_iter_(\d{1,18})(\.solverstate(?:\.h5)?|\.pt)", name)
    if match is None:
        raise ValueError(name)
    return match[1], int(match[2]), match[3]
