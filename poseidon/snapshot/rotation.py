"""Search for the newest snapshot of a run, and removal of older ones.

Law: only complete snapshots of this project (those with checksums) are removed, only after a newer
one is complete, and never one of a later iteration, which belongs to another run.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from poseidon.errors import SnapshotError
from poseidon.foreign_files import open_in
from poseidon.snapshot.checksums import find_damage, sealed_files, sums_path

CHECKPOINT = ".pt"
"""The suffix of a checkpoint of `poseidon run`; the other snapshots are Caffe's states."""
COPIES = "snapshots"
"""The folder for copies of other hosts' snapshots, in the job's folder on the launcher's host."""


def snapshots_before(state: Path) -> list[Path]:
    """Return the states with checksums, the prefix of `state` and a smaller iteration, oldest
    first.
    """
    prefix, iteration, ending = _parts(state.name)
    return [path for number, path in _sealed(state.parent, prefix, ending) if number < iteration]


def newest_intact(prefix: Path, ending: str) -> Path | None:
    """Return the state of the highest iteration with this prefix whose files match their
    checksums, or None.
    """
    found = reversed(_sealed(prefix.parent, prefix.name, ending))
    return next((path for _, path in found if find_damage(path) is None), None)


def _sealed(folder: Path, prefix: str, ending: str) -> list[tuple[int, Path]]:
    found = []
    for path in folder.glob(f"*_iter_*{ending}"):
        try:
            other, number, other_ending = _parts(path.name)
        except ValueError:
            continue
        if other == prefix and other_ending == ending and sums_path(path).exists():
            found.append((number, path))
    return sorted(found)


def newest_state(folder: Path, ending: str = ".solverstate") -> Path:
    """Return the state of the highest iteration in a job's folder or among the launcher's copies
    in it.

    Snapshots with checksums are preferred: others are by Caffe or an older version, or incomplete.
    The folder may be another user's: links are passed over; see `poseidon.foreign_files`.

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
            found.append((sums_path(path).exists(), _parts(path.name)[1], path))
    if not found:
        raise SnapshotError(f"{folder} has no snapshot, expected a file <prefix>_iter_<N>{ending}")
    return max(found)[2]


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
