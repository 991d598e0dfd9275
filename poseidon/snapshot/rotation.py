"""Keeping the newest snapshots of a run and removing older ones.

Law: only what this version wrote to its end is removed (it has checksums), only after a newer one is whole, and never one
of a later iteration: that belongs to another run.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from poseidon.errors import SnapshotError
from poseidon.snapshot.checksums import damage, sealed_files, sums_path

COPIES = "snapshots"
"""In a job's folder on the launcher's machine: the copies of snapshots that other hosts wrote."""


def snapshots_before(state: Path) -> list[Path]:
    """Return the sealed states with the prefix of `state` and a smaller iteration, oldest first."""
    prefix, iteration, ending = _parts(state.name)
    return [path for number, path in _sealed(state.parent, prefix, ending) if number < iteration]


def newest_whole(prefix: Path, ending: str) -> Path | None:
    """Return the sealed state with this prefix, of the highest iteration, whose files match their checksums; None: there is none."""
    found = reversed(_sealed(prefix.parent, prefix.name, ending))
    return next((path for _, path in found if damage(path) is None), None)


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
    """Return the state of the highest iteration in a job's folder, or among the copies that a launcher keeps there.

    Sealed snapshots come first: one without checksums is of Caffe or of an older version, or was never finished.

    Args:
        folder: of a job, or any other with snapshots.
        ending: of their names; of states those of HDF5 count too.

    Raises:
        SnapshotError: there is none.
    """
    found = []
    for path in (path for place in (folder, folder / COPIES) for path in place.glob(f"*{ending}*")):
        with suppress(ValueError):
            found.append((sums_path(path).exists(), _parts(path.name)[1], path))
    if not found:
        raise SnapshotError(f"{folder} holds no snapshot, expected a file <prefix>_iter_<N>{ending}")
    return max(found)[2]


def remove_older(state: Path, keep: int) -> list[Path]:
    """Leave the newest `keep` snapshots of a run; the checksums go first, so that a half-removed one is none.

    Args:
        state: the newest state, which is whole.
        keep: how many stay, this one among them; 0: all.

    Returns:
        The states that were removed.

    Raises:
        SnapshotError: one cannot be removed.
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
            raise SnapshotError(f"cannot remove the old snapshot {path}: {error.strerror}") from error
    return old


def _parts(name: str) -> tuple[str, int, str]:
    """`quick`, 10 and `.solverstate` of `quick_iter_10.solverstate`; ValueError for any other name."""
    match = re.fullmatch(r"(.*)_iter_(\d{1,18})(\.solverstate(?:\.h5)?|\.pt)", name)
    if match is None:
        raise ValueError(name)
    return match[1], int(match[2]), match[3]
