"""`<state>.sha256`: the checksums of a snapshot's files, in the format of `sha256sum`.

Its first line is a comment, `# run 2 of job lenet-20261122-172021-ca01ca`: which run of its folder
the snapshot belongs to (`runs.py`). Files of older versions have none.

Law: this file is written last, so a snapshot that has it is complete. Caffe ignores it. A snapshot
without it (by Caffe or an older version) is accepted.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from poseidon.engine.snapshots.files import write_atomically
from poseidon.errors import SnapshotError

SUFFIX = ".sha256"
_BLOCK_BYTES = 1 << 20
_DIGEST_LENGTH = 64


_RUN = re.compile(r"# run (\d{1,9}) of job (\S*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that has written a snapshot.

    Attributes:
        number: in the order in which the runs of a folder began; 0: the snapshot does not say.
        job: the id of the job; empty: there was none.
    """

    number: int = 0
    job: str = ""


NO_RUN = Run()


def sums_path(state: Path) -> Path:
    """Return the path of the checksums of this state's snapshot."""
    return state.with_name(state.name + SUFFIX)


def seal(state: Path, *others: Path, run: Run = NO_RUN) -> None:
    """Write the checksums of a complete snapshot.

    Args:
        state: the `.solverstate`, or a script's checkpoint.
        others: the other files of the snapshot, in the same folder: the weights.
        run: that it belongs to.

    Raises:
        SnapshotError: a file cannot be read, or the checksums cannot be written.
    """
    lines = [f"# run {run.number} of job {run.job}\n"] if run.number else []
    lines += [f"{_digest(path)}  {path.name}\n" for path in (*others, state)]
    write_atomically(sums_path(state), "".join(lines).encode(errors="surrogateescape"))


def run_of(state: Path) -> Run:
    """Return the run that a snapshot belongs to."""
    lines = _lines(state) or [""]
    found = _RUN.fullmatch(lines[0])
    return Run(number=int(found[1]), job=found[2]) if found else NO_RUN


def sealed_files(state: Path) -> tuple[Path, ...] | None:
    """Return the files in the checksums of a snapshot; None if it has no readable checksums."""
    sums = _read_sums(state)
    return tuple(state.with_name(name) for name in sums) if sums else None


def find_damage(state: Path) -> str | None:
    """Verify the checksums of a snapshot. Return a message about the first damaged file, or None.

    Without checksums the result is None. The files are searched for in the folder of the state.
    """
    if not sums_path(state).exists():
        return None
    sums = _read_sums(state)
    if sums is None:
        return f"{sums_path(state)} is damaged: resume from an earlier snapshot, or remove that file to use this one unchecked"
    for name, digest in sums.items():
        path = state.with_name(name)
        try:
            found = _digest(path)
        except SnapshotError as error:
            return str(error)
        if found != digest:
            return (
                f"{path} is truncated or changed: its {path.stat().st_size} bytes do not match "
                f"{sums_path(state).name} (remove that file if the change is intended)"
            )
    return None


def check(state: Path) -> None:
    """Raise SnapshotError if a file of a snapshot is damaged.

    Raises:
        SnapshotError: a file does not match its checksum. The text names it.
    """
    wrong = find_damage(state)
    if wrong is not None:
        raise SnapshotError(wrong)


def _read_sums(state: Path) -> dict[str, str] | None:
    """Return the digests by file name; None unless every line is a digest and a name without a
    folder.
    """
    lines = _lines(state)
    if lines is None:
        return None
    sums: dict[str, str] = {}
    for line in lines[1:] if lines and _RUN.fullmatch(lines[0]) else lines:
        digest, _, name = line.partition("  ")
        if len(digest) != _DIGEST_LENGTH or not name or "/" in name or name in (".", ".."):
            return None
        sums[name] = digest
    return sums if state.name in sums else None


def _lines(state: Path) -> list[str] | None:
    try:
        return sums_path(state).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                found.update(block)
    except OSError as error:
        raise SnapshotError(f"cannot read {path}: {error.strerror}") from error
    return found.hexdigest()
