"""The files of a snapshot: written as a whole, in the background, with their checksums.

`<state>.sha256` has the checksums, in the format of `sha256sum`. Its first line is a comment, `# run 2
of job lenet-20261122-172021-ca01ca`: the run of its folder that the snapshot belongs to (`runs.py`).

Laws:
* The checksums are written last, so a snapshot that has them is complete. Caffe ignores the file. A
  snapshot without it, written by Caffe, is accepted.
* Training continues during a write. One write runs at a time, in the order of submission, and a
  submission waits for the write before it; so at most one copy of the weights waits in memory.
* A write that fails is a warning in the log, because the next one may succeed. `wait` raises the error
  of the last one.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from poseidon.base.durable import write_whole
from poseidon.base.foreign_files import open_regular
from poseidon.errors import SnapshotError


def make_folder(folder: Path) -> None:
    """Create a folder and its parents unless it exists.

    Raises:
        SnapshotError: the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SnapshotError(f"cannot create the folder {folder}: {error.strerror}") from error


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that readers never see a part of; see `poseidon.base.durable`.

    Raises:
        SnapshotError: the folder is missing or not writable, or the disk is full. An existing file
            of that name is unchanged.
    """
    try:
        write_whole(path, content)
    except OSError as error:
        raise SnapshotError(f"cannot write {path}: {error.strerror}") from error


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

    Raises:
        SnapshotError: a file cannot be read, or the checksums cannot be written.
    """
    lines = [f"# run {run.number} of job {run.job}\n"] if run.number else []
    lines += [f"{_digest(path)}  {path.name}\n" for path in (*others, state)]
    write_atomically(sums_path(state), "".join(lines).encode(errors="surrogateescape"))


def reseal(state: Path, part: Path) -> None:
    """Let the checksums of a snapshot, if there are any, follow one file that was changed on purpose.

    Raises:
        SnapshotError: it cannot be read, or the checksums cannot be written.
    """
    lines, sums = _lines(state), _read_sums(state) or {}
    if lines and part.name in sums:
        now = "".join(f"{line}\n" for line in lines).replace(sums[part.name], _digest(part))
        write_atomically(sums_path(state), now.encode(errors="surrogateescape"))


def run_of(state: Path) -> Run:
    """Return the run that a snapshot belongs to."""
    lines = _lines(state) or [""]
    found = _RUN.fullmatch(lines[0])
    return Run(number=int(found[1]), job=found[2]) if found else NO_RUN


def sealed_files(state: Path) -> tuple[Path, ...] | None:
    """Return the files in the checksums of a snapshot; None if it has no readable checksums."""
    sums = _read_sums(state)
    return tuple(state.with_name(name) for name in sums) if sums else None


def find_damage(state: Path, part: str = "") -> str | None:
    """Verify the checksums of a snapshot. Return a message about the first damaged file, or None.

    Without checksums the result is None. The files are searched for in the folder of the state.

    Args:
        state: see `seal`.
        part: the name of the only file that is verified; empty: all are.
    """
    if not sums_path(state).exists():
        return None
    sums = _read_sums(state)
    if sums is None:
        return f"{sums_path(state)} is damaged: resume from an earlier snapshot, or remove that file to use this one unchecked"
    for name, digest in sums.items():
        if part not in ("", name):
            continue
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


def check(state: Path, part: str = "") -> None:
    """Raise SnapshotError, which names the file, if one of a snapshot is damaged."""
    wrong = find_damage(state, part)
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
        with open_regular(sums_path(state)) as file:
            content = file.read(_BLOCK_BYTES).decode(errors="surrogateescape")
    except OSError:
        return None
    return content.removesuffix("\n").split("\n")  # a name may hold \r, \v or U+2028


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    try:
        with open_regular(path) as file:
            while block := file.read(_BLOCK_BYTES):
                found.update(block)
    except OSError as error:
        raise SnapshotError(f"cannot read {path}: {error.strerror}") from error
    return found.hexdigest()


LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenSnapshot:
    """A snapshot that is complete on disk.

    Attributes:
        state: the `.solverstate`, or a script's checkpoint.
        seconds: duration of serializing and writing.
    """

    state: Path
    iteration: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSettings:
    """How snapshots are kept and reported.

    Attributes:
        keep: how many snapshots of this run stay on disk, the newest; 0: all.
        on_written: called with each complete snapshot, from the thread that wrote it.
        stop_at_nan: a loss or weights that are not finite end the job; otherwise they are a warning.
            Such weights are never written.
        spare: the folder for the weights of a run's last snapshot, if it cannot be written where it
            belongs; None: there is none.
    """

    keep: int = 0
    on_written: Callable[[WrittenSnapshot], None] = lambda written: None
    stop_at_nan: bool = True
    spare: Path | None = None


class SnapshotWriter:
    """A thread that runs one write at a time.

    Args:
        on_wait: called every second while `submit` or `wait` waits.
    """

    def __init__(self, on_wait: Callable[[], None] = lambda: None) -> None:
        self._on_wait = on_wait
        self._thread: threading.Thread | None = None
        self._error: SnapshotError | None = None

    def submit(self, write: Callable[[], None], *, last: bool = False) -> None:
        """Start a write, once the write before it has ended.

        Args:
            write: may raise SnapshotError, and nothing else.
            last: no write comes after it, so its failure ends the job.
        """
        self._join()
        # No daemon: a process that ends by itself ends after its snapshot is complete.
        self._thread = threading.Thread(
            target=self._run, args=(write, last), name="poseidon-snapshot"
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until all writes have ended.

        Raises:
            SnapshotError: the last write has failed.
        """
        self._join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _join(self) -> None:
        while self._thread is not None:
            self._thread.join(1.0)
            if not self._thread.is_alive():
                self._thread = None
            self._on_wait()

    def _run(self, write: Callable[[], None], last: bool) -> None:
        self._error = None
        try:
            write()
        except SnapshotError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - a thread's outermost frame: its owner raises it
            self._error = SnapshotError(
                f"the snapshot could not be written: {type(error).__name__}: {error}"
            )
        if self._error is not None:
            effect = "it is the run's last, so the job fails" if last else "training continues"
            LOGGER.warning("%s; %s, and earlier snapshots are as they were", self._error, effect)
