"""Checks of a job before any of its processes starts, and the document of an extraction. No check
writes anything.

Law: a check here calls the functions that the workers call later, so that a mistake is reported
within a second, on the user's terminal, with the same message. Three things are left to the
workers:

* user code: a Python layer, or a layer type of an imported module, may open files, start threads or
  count its instances when it is created. It runs once, in the worker. Neither such a layer nor one
  above it is set up here.
* files on other hosts: those hosts check them (`poseidon.cluster.host_checks`).
* errors that only reading all the data finds: a damaged record, a label outside the classes; and
  the shapes in a model or state.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from poseidon.base.durable import obstacle_to
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.layers.base import Layer, LayerContext, times
from poseidon.caffe.layers.database_data import MemoryData
from poseidon.caffe.layers.python_layer import Python
from poseidon.caffe.layers.registry import layer_class
from poseidon.caffe.layers.sources import Input, ReadingSource
from poseidon.caffe.net.compile import CheckedLayers, checked_layers, filter_phase, plan_phase
from poseidon.caffe.net.net_plan import NetPlan
from poseidon.caffe.net.params import ParamInfo
from poseidon.caffe.proto.definition import NetDefinition, SolverDefinition
from poseidon.caffe.solver.settings import SolverSettings
from poseidon.engine.document import WorkerDocument, WorkKind
from poseidon.errors import DataError, DefinitionError, UsageError, counted
from poseidon.flags.values import parts


def check_nets(solver: SolverDefinition, settings: SolverSettings) -> NetDefinition:
    """Join the layers of the train net and of every test net, without their shapes. Return the
    train net, all phases.

    Raises:
        DefinitionError: a net is missing, a layer's type or a bottom is unknown, there is no loss
            to train on, a layer has blobs that nothing fills, ...
    """
    definition = solver.net_definition()
    plan = plan_phase(definition, solver.train_state(definition))
    require_loss(definition, plan, settings)
    for test in solver.test_nets():
        plan_phase(test.definition, test.state)
    if settings.max_iter > 0:
        for net, state in solver.nets_and_states():
            _require_data(filter_phase(net, state))
    return definition


def _require_data(definition: NetDefinition) -> None:
    for index, layer in enumerate(definition.param.layer):
        if layer_class(layer.type) in (Input, MemoryData):
            raise definition.error(
                index,
                "nothing fills its blobs in a job; use a layer that reads records, such as Data, "
                "ImageData or HDF5Data, or fill them in a script (poseidon python)",
            )


def check_layers(
    solver: SolverDefinition, contexts: Sequence[LayerContext], *, files_are_here: bool
) -> tuple[ParamInfo, ...] | None:
    """Set up the layers of all nets on torch's meta device: shapes, fillers, databases, lists and
    mean files. Return the learnable tensors of the train net; None if layers of it are left out.

    Args:
        contexts: of the workers to check for, one at a time.
        files_are_here: the workers run on this host. Otherwise layers that open files are left out.

    Raises:
        DefinitionError: a mistake in a net.
        DataError: a database, list or mean file is missing or broken; or the records of two clients
            give weights different shapes.
    """
    left_out = runs_users_code if files_are_here else _left_out_elsewhere
    first: CheckedLayers | None = None
    for context in contexts:
        with ExitStack() as opened:
            train: CheckedLayers | None = None
            for net, state in solver.nets_and_states():
                shared = train.by_name if train else {}
                checked = checked_layers(
                    net, context, state=state, share_with=shared, leave_out=left_out
                )
                layers = opened.enter_context(checked)
                train = train or layers
        assert train is not None, "a solver has a train net"
        first = first or train
        _require_equal_params(first, train)
    return first.params if first else None


def _require_equal_params(first: CheckedLayers, other: CheckedLayers) -> None:
    """Raise DataError if the data of two clients give their weights different shapes."""
    if first.params is None or other.params is None:
        return
    if [param.shape for param in first.params] == [param.shape for param in other.params]:
        return
    for name, layer in other.by_name.items():
        before = first.by_name[name]
        top = layer.param.top[0] if layer.param.top else ""
        if not (isinstance(layer, ReadingSource) and isinstance(before, ReadingSource)):
            continue
        if layer.reader and before.reader and first.shapes[top] != other.shapes[top]:
            raise DataError(
                f"layer '{name}': the first records of {layer.reader.source} make '{top}' "
                f"{times(other.shapes[top])}, those of {before.reader.source} "
                f"{times(first.shapes[top])}, so that weights of the clients differ in shape; "
                "bring all records to one size"
            )


def runs_users_code(kind: type[Layer]) -> bool:
    """Return True if creating a layer of this class runs user code."""
    return issubclass(kind, Python) or not kind.__module__.startswith("poseidon.caffe.layers.")


def _left_out_elsewhere(kind: type[Layer]) -> bool:
    return kind.OPENS_FILES or runs_users_code(kind)


def weight_files(solver: SolverDefinition, given: Sequence[str]) -> list[Path]:
    """Return the models that a run starts from: the flag's, or without it the solver's, as in
    Caffe.

    Args:
        solver: each entry of its `weights` may name several, separated by commas.
        given: likewise, from the flag.
    """
    names = [name for text in given or solver.param.weights for name in parts(text)]
    return [Path(name) if Path(name).exists() else solver.resolve(name) for name in names]


def require_loss(definition: NetDefinition, plan: NetPlan, settings: SolverSettings) -> None:
    """Check that training has a loss.

    Raises:
        DefinitionError: no top of the train net has a loss weight.
    """
    if not plan.losses and settings.max_iter > 0:
        raise DefinitionError(
            "the net has no loss to train on; expected a loss layer or a loss_weight",
            source=definition.source,
        )


def check_snapshot_prefix(solver: SolverDefinition) -> None:
    """Check that snapshots can be written to the solver's prefix: a failure at the
    last iteration would cost the whole run.

    Raises:
        DefinitionError: the folder cannot be created or written, or its parent is missing, as after
            a typing mistake.
    """
    if not solver.param.snapshot_prefix:
        return
    folder = solver.snapshot_prefix().parent
    obstacle = obstacle_to(folder)
    if not obstacle and not folder.exists() and not folder.parent.exists():
        obstacle = f"there is no folder {folder.parent} to make {folder.name} in; make it, or correct the prefix"
    if obstacle:
        raise solver.error(
            "snapshot_prefix", f"snapshots cannot be written to {folder}: {obstacle}"
        )


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
    backend: str
    batches: int = 0
    imports: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        WorkerDocument.__post_init__(self)
        if not self.blobs or len(self.blobs) != len(self.databases):
            raise UsageError(
                f"{counted(len(self.blobs), 'blob')} and {counted(len(self.databases), 'database')} "
                "are named; give one database for each blob, separated by commas"
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
        ending = f"_{self.member.seat.host}_{self.member.seat.local_rank}" if self.job else ""
        return tuple(Path(f"{name}{ending}") for name in self.databases)
