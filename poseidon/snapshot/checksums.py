"""`<state>.sha256`: the checksums of a snapshot's files, in the form that `sha256sum --check` reads.

Law: it is written last, so a snapshot that has one was written to its end; Caffe, which knows nothing of it, reads the two
files without it. A snapshot without one (of Caffe, or of an older version) is taken as it is.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from poseidon.errors import SnapshotError
from poseidon.snapshot.files import write_atomically

SUFFIX = ".sha256"
_BLOCK_BYTES = 1 << 20
_DIGEST_LETTERS = 64


def sums_path(state: Path) -> Path:
    """Where the checksums of the snapshot of this state are."""
    return state.with_name(state.name + SUFFIX)


def seal(state: Path, *others: Path) -> None:
    """Write the checksums of a snapshot whose files are complete.

    Args:
        state: the `.solverstate`, or a script's checkpoint.
        others: files in the same folder that belong to it: the weights.

    Raises:
        SnapshotError: a file cannot be read, or the sums not written.
    """
    lines = [f"{_digest(path)}  {path.name}\n" for path in (*others, state)]
    write_atomically(sums_path(state), "".join(lines).encode())


def sealed_files(state: Path) -> tuple[Path, ...] | None:
    """Return the files that the checksums of a snapshot name; None where it has no checksums, or they are unreadable."""
    sums = _read_sums(state)
    return tuple(state.with_name(name) for name in sums) if sums else None


def damage(state: Path) -> str | None:
    """What is wrong with the files of a snapshot, as a sentence; None where nothing is, or nothing is known.

    A checksum of a file that is named like the sums' own but was moved away is no damage of the others: each
    file is looked for beside the state.
    """
    if not sums_path(state).exists():
        return None
    sums = _read_sums(state)
    if sums is None:
        return f"{sums_path(state)} is damaged"
    for name, digest in sums.items():
        path = state.with_name(name)
        try:
            found = _digest(path)
        except SnapshotError as error:
            return str(error)
        if found != digest:
            return (
                f"{path} is cut short or changed: it has {path.stat().st_size} bytes that do not match "
                f"{sums_path(state).name} (remove that file if the change was meant)"
            )
    return None


def check(state: Path) -> None:
    """Refuse a snapshot whose files are not what was written.

    Raises:
        SnapshotError: names the file that is damaged.
    """
    wrong = damage(state)
    if wrong is not None:
        raise SnapshotError(wrong)


def _read_sums(state: Path) -> dict[str, str] | None:
    """Digest by file name; None for anything but lines of a digest and a plain name."""
    try:
        lines = sums_path(state).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    sums: dict[str, str] = {}
    for line in lines:
        digest, _, name = line.partition("  ")
        if len(digest) != _DIGEST_LETTERS or not name or "/" in name or name in (".", ".."):
            return None
        sums[name] = digest
    return sums if state.name in sums else None


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                found.update(block)
    except OSError as error:
        raise SnapshotError(f"cannot read {path}: {error.strerror}") from error
    return found.hexdigest()
