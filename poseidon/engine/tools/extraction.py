"""The configuration of a feature extraction: the document of one worker.

Law: the document is checked here, field by field. An error names the field that does not fit.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from poseidon.data.databases.kinds import Backend
from poseidon.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Extraction:
    """The extraction of one worker.

    Attributes:
        model: path of the net definition.
        weights: models, later ones over earlier ones.
        blobs: the features.
        databases: the database of each blob; in a job, `_<client>_<thread>` is appended.
        backend: `leveldb` or `lmdb`.
        batches: most batches of one worker; 0: until the data ends.
        device: `cpu` or `cuda:<n>`.
        job: the job's id; empty for a process alone, whose databases have the plain names.
        output: folder of the job's logs.
        rank: this worker, 0..workers-1.
        workers: number of workers.
        client: this host, 0..clients-1.
        clients: number of hosts.
        local_rank: this worker's rank on its host: the <thread> of its databases.
        local_workers: workers on each host.
        threads: CPU threads for this worker's arithmetic; 0: torch's own choice.
        imports: modules that register user-defined layers.
    """

    model: str
    weights: tuple[str, ...]
    blobs: tuple[str, ...]
    databases: tuple[str, ...]
    backend: str = "leveldb"
    batches: int = 0
    device: str = "cpu"
    job: str = ""
    output: str = ""
    rank: int = 0
    workers: int = 1
    client: int = 0
    clients: int = 1
    local_rank: int = 0
    local_workers: int = 1
    threads: int = 0
    imports: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.blobs or len(self.blobs) != len(self.databases):
            raise UsageError(
                f"{len(self.blobs)} blobs are to be extracted into {len(self.databases)} "
                "databases, expected as many "
                "names of the one as of the other, parted by commas"
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
        ending = f"_{self.client}_{self.local_rank}" if self.job else ""
        return tuple(Path(f"{name}{ending}") for name in self.databases)

    def to_json(self) -> bytes:
        """Return one line of JSON, without the line end."""
        return json.dumps(asdict(self)).encode()


def read_extraction(line: str | bytes) -> Extraction:
    """Read an extraction from a line of JSON.

    Raises:
        UsageError: the line is not an extraction; the text names the field that does not fit.
    """
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise UsageError(
            "the job document is not JSON; workers are started by `poseidon`"
        ) from error
    kinds = {
        field.name: {"int": int, "str": str}.get(str(field.type), list)
        for field in fields(Extraction)
    }
    if not isinstance(value, dict) or value.keys() - kinds.keys():
        raise UsageError("the job document has fields that this version does not know")
    for name, content in value.items():
        if type(content) is not kinds[name]:
            raise UsageError(
                f"the job document's {name} is {content!r:.60}; expected {kinds[name].__name__}"
            )
    lists = {name: tuple(content) for name, content in value.items() if isinstance(content, list)}
    try:
        return Extraction(**{**value, **lists})
    except TypeError as error:
        raise UsageError(f"the job document is incomplete: {error}") from error
