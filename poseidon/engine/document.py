"""The job document: the configuration of one worker, one JSON object on the first line of its
standard input.

Law: types of fields are checked as they are read (`ps_server.json_fields`), ranges by the classes
here. An error names the field that does not fit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import ClassVar, TypeVar

from poseidon.errors import UsageError
from poseidon.exchange.auto.recorded import RecordedPlan
from poseidon.exchange.compute_options import ComputeOptions
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import Scheme
from poseidon.flags.flag import Section, option
from poseidon.flags.values import count
from ps_server.json_fields import fields_of, plain, value_of


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The options."""

    snapshot_keep: int = option(
        0, "newest snapshots that stay; 0 (default): all", Section.OUTPUT, read=count, rare=True
    )


class WorkKind(Enum):
    """The kind of work that a worker's process does."""

    SOLVER = "solver"
    """Trains as a solver definition says (`poseidon train`)."""
    SCRIPT = "script"
    """Runs a script of the user's (`poseidon run`)."""
    EXTRACTION = "extraction"
    """Writes features to databases (`poseidon extract_features`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDocument(ComputeOptions):
    """The configuration that every worker has, with the options of its arithmetic.

    Attributes:
        output: folder of logs and net outputs.
        member: the place of this worker in its job, with the job's secrets.
        device: `cpu` or `cuda:<n>`.
        threads: CPU threads for this worker's arithmetic.
        sources: the launcher's path of each file that it has sent to this host, by the path here.
    """

    kind: ClassVar[WorkKind]
    job: str
    output: str
    member: Membership = field(default_factory=Membership)
    device: str = "cpu"
    threads: int = 1
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise UsageError(f"the job document's threads is {self.threads}; expected 1 or more")

    @property
    def rank(self) -> int:
        """This worker, 0..workers-1."""
        return self.member.network.rank

    @property
    def workers(self) -> int:
        """Workers of the job."""
        return self.member.network.size

    @property
    def log_file(self) -> Path:
        """The worker's log."""
        return Path(self.output) / f"worker_{self.rank}.log"

    def named(self, text: str) -> str:
        """Return a text with the names that the user knows of the files in it."""
        for sent, source in self.sources.items():
            text = text.replace(sent, source)
        return text

    def to_json(self) -> bytes:
        """Return one line of JSON, without the line end."""
        return json.dumps(fields_of(self), default=plain).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingDocument(WorkerDocument):
    """The configuration of a worker that exchanges gradients.

    Attributes:
        trace: write a trace to `<output>/trace_worker_<rank>.json`.
        exchange_plan: the plan of `--exchange=auto` or `hybrid` from an earlier start or run, as
            `RecordedPlan.to_json` has it; empty: it chooses.
        copies: hosts that keep a copy of each memory snapshot beside the first; 0: the job makes
            none, and a worker ends when it has lost a peer.
        memory_snapshot_every: iterations from one memory snapshot to the next; 0: they are chosen.
        rewind: the iteration of the memory snapshot that this start continues from, which rank 0
            has; -1: none.
        aside: the worker is prepared beside a job that runs, and waits for the document of the
            start that it takes part in.
        balances: whether the worker reports the times of its iterations, by which the launcher
            places the virtual workers.
    """

    trace: bool = False
    exchange_plan: str = ""
    copies: int = 0
    memory_snapshot_every: int = 0
    rewind: int = -1
    aside: bool = False
    balances: bool = False

    def __post_init__(self) -> None:
        WorkerDocument.__post_init__(self)
        for name in ("copies", "memory_snapshot_every"):
            if getattr(self, name) < 0:
                raise UsageError(
                    f"the job document's {name} is {getattr(self, name)}; expected 0 or more"
                )

        placed = self.member.by_worker
        if placed.processes != self.workers:
            raise UsageError(
                f"the job document's virtual_workers are of {placed.processes} workers; expected "
                f"{self.workers}"
            )

    @property
    def is_on_holder(self) -> bool:
        """Whether a copy of each memory snapshot is kept on this host."""
        return self.member.seat.host <= self.copies

    @property
    def holds_snapshots(self) -> bool:
        """Whether the worker keeps a copy of each memory snapshot."""
        return self.is_on_holder and self.member.seat.local_rank == 0

    def schemes(self, names: Sequence[str]) -> tuple[Scheme, ...]:
        """Return the schemes of these tensors in `exchange_plan`; empty: there is none.

        Raises:
            UsageError: the plan is of other tensors.
        """
        if not self.exchange_plan:
            return ()
        return RecordedPlan.from_json(self.exchange_plan, "the job document").of(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDocument(TrainingDocument, TrainingOptions):
    """The configuration of a worker of `poseidon train`.

    Attributes:
        definitions: the solver and its nets, as `poseidon.caffe.proto.projects` packs them, for a host
            that need not have their files; empty: they are read from `solver`.
        settings: fields of the solver that the command line sets, as `poseidon.caffe.proto.overrides`
            reads them.
        seed: the job's random seed, the same on every worker.
        snapshot: solver state to resume from, or empty.
        weights: models to start from, later ones over earlier ones.
        net_outputs: prefix of the net outputs' file.
        level: of the train net, for rules of the definition, or empty: the solver's.
        stages: of the train net, beyond the solver's.
        imports: Python modules to import before any net is read: they register layers.
        goes_on: the job is restarted: its net outputs up to the snapshot stay.
        stop_at_nan: a loss or weights that are not finite end the job; otherwise they are a
            warning.
    """

    kind = WorkKind.SOLVER
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
    stop_at_nan: bool = True


class Prints(str, Enum):
    """Where standard output of a script goes, besides the worker's log."""

    LOG = "log"
    """Nowhere else."""
    STDOUT = "stdout"
    """To the launcher, as standard output."""
    STDERR = "stderr"
    """To the launcher, as standard error: in the order in which the script writes to both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptDocument(TrainingDocument):
    """The configuration of a worker of `poseidon run`.

    Attributes:
        script: its file, or the name of a module.
        module: whether it is a module.
        ddp: whether it is written for DistributedDataParallel.
        unfit_for_ddp: a sentence on a flag of the job that would have no effect on such a script,
            as one of Lightning; empty: there is none.
        snapshot: checkpoint to resume from, or empty.
        restarts: how often the job was started again so far.
    """

    kind = WorkKind.SCRIPT
    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    ddp: bool = False
    unfit_for_ddp: str = ""
    threads_given: bool = False
    prints: Prints = Prints.LOG
    snapshot: str = ""
    restarts: int = 0
    max_restarts: int = 0


Document = TypeVar("Document", bound=WorkerDocument)


def read_document(kind: type[Document], line: str | bytes) -> Document:
    """Read a document from a line of JSON.

    Raises:
        UsageError: the line is not such a document; the text names the field that does not fit.
    """
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UsageError(
            "the job document is not JSON; workers are started by `poseidon`"
        ) from error
    return document_of(kind, value)


def document_of(kind: type[Document], value: object) -> Document:
    """Return a document from a JSON object.

    Raises:
        UsageError: it is not such a document; the text names the field that does not fit.
    """
    known = {field.name for field in fields(kind)}
    if isinstance(value, dict) and (extra := ", ".join(sorted(value.keys() - known))):
        raise UsageError(f"the job document has fields that this version does not know: {extra}")
    try:
        return value_of(kind, value)
    except ValueError as error:
        raise UsageError(f"the job document does not fit: {error}") from error
