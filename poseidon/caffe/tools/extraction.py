"""The configuration of a feature extraction: the document of one worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from poseidon.caffe.data.databases.kinds import Backend
from poseidon.engine.document import WorkerDocument, WorkKind
from poseidon.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Extraction(WorkerDocument):
    """The extraction of one worker.

    Attributes:
        databases: the database of each blob; in a job, `_<client>_<thread>` is appended.
        backend: `leveldb` or `lmdb`.
        batches: most batches of one worker; 0: until the data ends.
        job: the job's id; empty for a process alone, whose databases have the plain names.
        imports: modules that register user-defined layers.
    """

    kind = WorkKind.EXTRACTION
    job: str = ""
    output: str = ""
    model: str
    weights: tuple[str, ...]
    blobs: tuple[str, ...]
    databases: tuple[str, ...]
    backend: str = "leveldb"
    batches: int = 0
    imports: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        WorkerDocument.__post_init__(self)
        if not self.blobs or len(self.blobs) != len(self.databases):
            raise UsageError(
                f"{len(self.blobs)} blobs are to be extracted into {len(self.databases)} "
                "databases, expected as many names of the one as of the other, parted by commas"
            )
        for names, what in ((self.blobs, "blob"), (self.databases, "database")):
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise UsageError(f"the {what} {twice} is named twice")
        if self.batches < 0:
            raise UsageError(
                f"num_mini_batches is {self.batches}, expected 1 or more, or 0 for all of the data"
            )
        Backend.parse(self.backend)

    def paths(self) -> tuple[Path, ...]:
        """Return the paths of this worker's databases."""
        ending = f"_{self.place.host}_{self.place.local_rank}" if self.job else ""
        return tuple(Path(f"{name}{ending}") for name in self.databases)
