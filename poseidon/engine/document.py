"""The job document: everything a worker must know, as one JSON object on its standard input.

Law: it is checked here, field by field; what does not fit is refused with the field's name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from poseidon.errors import UsageError
from poseidon.exchange.options import DEFAULT_OPTIONS, ExchangeOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDocument:
    """What every worker of a job with a server is told.

    Attributes:
        job: the job's id.
        token: the job's secret, hexadecimal.
        keys: what `Keyring.to_json` makes: this worker's pair, and the public keys of those that it speaks with; empty: all
            is in clear.
        output: folder of logs and net outputs.
        rank: this worker, 0..workers-1.
        workers: number of workers.
        client: this machine, 0..clients-1.
        clients: number of machines.
        local_rank: this worker on its machine.
        local_workers: workers on each machine.
        local_address: where the workers of this machine meet: a path in a folder that only this user can enter, which is
            gone once they have met; empty where a machine has one.
        device: `cpu` or `cuda:<n>`.
        threads: CPU threads for this worker's arithmetic.
        shards: number of server shards; 0 for a single client without a server.
        exchange: what the job asks of its exchange.
        host: where this machine is reached by the others; an IPv6 address in brackets.
        homes: for each shard the working client on whose machine it runs, or -1 - j for the j-th machine that only
            serves; empty: spread evenly over the working ones.
        shares: relative load of each shard; empty: all alike.
        trace: write what this worker does when to `<output>/trace_worker_<rank>.json`.
    """

    job: str
    token: str = field(repr=False)
    keys: str = field(default="", repr=False)
    output: str
    rank: int = 0
    workers: int = 1
    client: int = 0
    clients: int = 1
    local_rank: int = 0
    local_workers: int = 1
    local_address: str = ""
    device: str = "cpu"
    threads: int = 1
    shards: int = 0
    exchange: ExchangeOptions = DEFAULT_OPTIONS
    host: str = "127.0.0.1"
    homes: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()
    trace: bool = False

    def __post_init__(self) -> None:
        for name, least in (("workers", 1), ("clients", 1), ("local_workers", 1), ("threads", 1)):
            if getattr(self, name) < least:
                raise UsageError(
                    f"the job document's {name} is {getattr(self, name)}; expected {least} or more"
                )
        if self.shards < 0:
            raise UsageError(f"the job document's shards is {self.shards}; expected 0 or more")
        if not 0 <= self.rank < self.workers:
            raise UsageError(f"the job document's rank is {self.rank} of {self.workers} workers")

    def to_json(self) -> bytes:
        """One line of JSON, without the line end."""
        return json.dumps({**self.parts(), "exchange": self.exchange.to_json()}).encode()

    def parts(self) -> dict[str, Any]:
        """Its fields by name, for a document that says more."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDocument(WorkerDocument):
    """What a worker that trains Caffe's nets is told.

    Attributes:
        solver: path of the solver definition.
        definitions: the solver and its nets, as `poseidon.proto.shipped` packs them, for a machine that need not have
            their files; empty: they are read from `solver` on.
        settings: fields of the solver that the command line sets, as `poseidon.proto.overrides` reads them.
        seed: the job's random seed, the same on every worker.
        snapshot: solver state to go on from, or empty.
        weights: models to start from, later ones over earlier ones.
        net_outputs: prefix of the net outputs' file.
        level: of the train net, for rules of the definition, or empty: that of the solver.
        stages: of the train net, beyond those of the solver.
        imports: Python modules to import before any net is read: they register layers.
        goes_on: the job was started before: its net outputs up to the snapshot stay.
        snapshot_keep: how many snapshots of the run stay on disk, the newest; 0: all.
        stop_at_nan: a loss or weights that are not finite end the job; else they are a warning.
    """

    solver: str
    definitions: str = ""
    settings: tuple[str, ...] = ()
    seed: int = 1
    snapshot: str = ""
    weights: tuple[str, ...] = ()
    net_outputs: str = ""
    level: str = ""
    stages: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    goes_on: bool = False
    snapshot_keep: int = 0
    stop_at_nan: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptDocument(WorkerDocument):
    """What a worker that runs a script is told.

    Attributes:
        script: path of the script.
        arguments: its words.
        shows_prints: what it prints goes to the launcher too, not to the worker's log alone; of rank 0 it does anyway.
        snapshot: checkpoint to go on from, or empty.
    """

    script: str
    arguments: tuple[str, ...] = ()
    shows_prints: bool = False
    snapshot: str = ""


Document = TypeVar("Document", bound=WorkerDocument)


def read_document(line: str | bytes) -> JobDocument:
    """The document of a job of `poseidon train`; see `read_document_of`."""
    return read_document_of(JobDocument, line)


def read_document_of(kind: type[Document], line: str | bytes) -> Document:
    """The document in a line of JSON.

    Raises:
        UsageError: the line is no document; names the field that does not fit.
    """
    try:
        value: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise UsageError("the job document is not JSON; workers are started by `poseidon train`") from error
    known = {field.name: field for field in fields(kind)}
    if not isinstance(value, dict) or value.keys() - known.keys():
        extra = ", ".join(sorted(value.keys() - known.keys())) if isinstance(value, dict) else "no object"
        raise UsageError(f"the job document has fields that this version does not know: {extra}")
    if isinstance(value.get("exchange"), dict):
        value["exchange"] = ExchangeOptions.from_json(value["exchange"])
    for name, content in value.items():
        expected: type = {"int": int, "str": str, "bool": bool, "ExchangeOptions": ExchangeOptions}.get(
            str(known[name].type), list
        )
        if type(content) is not expected:
            raise UsageError(f"the job document's {name} is {content!r:.60}; expected {expected.__name__}")
    for name, entry in known.items():
        if str(entry.type).startswith("tuple"):
            value[name] = tuple(value.get(name, ()))
            if any(type(item) is not (int if "int" in str(entry.type) else str) for item in value[name]):
                raise UsageError(f"the job document's {name} is {value[name]!r:.60}; expected {entry.type}")
    try:
        return kind(**value)
    except TypeError as error:
        raise UsageError(f"the job document is incomplete: {error}") from error
