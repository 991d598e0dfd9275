"""`poseidon train`: start a job from a solver and a machinefile, and stay with it.

poseidon train --solver=prototxt/cifar10/cifar10_quick_solver.prototxt --hostfile=machinefiles/localserver
"""

from __future__ import annotations

import argparse
import secrets
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from poseidon.cluster.host_checks import ClientNeeds
from poseidon.cluster.machinefile import Host
from poseidon.cluster.plan import WorkerPlan, devices_from_flag
from poseidon.cluster.supervision.loop import JobResult
from poseidon.cluster.supervision.restarts import StartingPoint
from poseidon.cluster.supervision.steps import Outcome
from poseidon.engine.document import JobDocument
from poseidon.engine.tools.preflight import check_layers, check_nets, check_snapshot_prefix, weight_files
from poseidon.errors import SnapshotError, UsageError
from poseidon.launch.closing import model_of, near, resume_command, test_commands
from poseidon.launch.job import Job, run_from_flags
from poseidon.launch.job_flags import check_folder, leaves_this_machine
from poseidon.launch.requirements import needed_files, snapshot_files, written_prefixes
from poseidon.launch.snapshot_list import snapshot_of
from poseidon.launch.ssh_site import Shipment
from poseidon.layers.base import LayerContext
from poseidon.layers.user_modules import import_modules, module_names
from poseidon.proto.caffe_pb2 import TRAIN, SolverParameter
from poseidon.proto.definition import SolverDefinition, read_solver
from poseidon.proto.overrides import changes
from poseidon.proto.shipped import pack_solver
from poseidon.snapshot.files import require_readable
from poseidon.snapshot.solverstate import head_of, learned_net
from poseidon.solvers.settings import solver_settings


def run(arguments: argparse.Namespace) -> int:
    """Train.

    Raises:
        PoseidonError: a mistake in the definitions or flags, or the job failed.
    """
    if arguments.client_id:
        print(
            f"client {arguments.client_id} is started by the command of client 0; nothing to do",
            file=sys.stderr,
        )
        return 0
    return run_from_flags(arguments, _TrainingJob)


class _TrainingJob(Job):
    """A job that trains one of Caffe's nets; see `Job`."""

    worker_module = "poseidon.engine.solver.worker"
    resumes = True

    def __init__(self, flags: argparse.Namespace) -> None:
        self._imports = module_names(flags.imports)
        import_modules(self._imports)
        self._stages = tuple(stage for stage in flags.stage.split(",") if stage)
        file = read_solver(flags.solver)
        self._overridden = tuple(flags.settings or ())
        self._solver = file.with_settings(self._overridden).with_train_state(
            level=flags.level, stages=self._stages
        )
        self._changes = changes(file.param, self._solver.param, self._overridden)
        self._settings = solver_settings(self._solver)
        title = check_nets(self._solver, self._settings).param.name or Path(flags.solver).stem
        _check_starting_point(flags)
        self._resumed = head_of(Path(flags.snapshot)) if flags.snapshot else None
        stem = Path(flags.solver).stem.removesuffix("_solver")
        super().__init__(flags, title=title, stem=stem, devices=_devices(flags, self._solver))
        self._net_outputs = Path(flags.net_outputs or self._output / "job").absolute()
        check_folder("net_outputs", self._net_outputs.parent)
        self._seed = self._choose_seed()
        self._check_definition()
        self._weights = tuple(Path(part).absolute() for part in flags.weights.split(",") if part)
        self._packed = "" if self._site is None else pack_solver(Path(flags.solver), self._overridden)

    def _check_definition(self) -> None:
        """Find here what the workers would stumble over; hosts that are reached by other ways are asked for their files."""
        near = self._site is None
        contexts = [self._context(worker) for worker in self._plan.workers if worker.local_rank == 0]
        alike = not near or self.shares_data()
        check_layers(self._solver, contexts[:1] if alike else contexts, files_are_here=near)
        if near:
            check_snapshot_prefix(self._solver)
            if self._resumed is not None:
                learned_net(self._resumed, Path(self._flags.snapshot))
                return
            for path in weight_files(self._solver, ()):
                require_readable(path, "model")

    def _context(self, role: WorkerPlan) -> LayerContext:
        return LayerContext(
            phase=TRAIN,
            seed=self._seed,
            rank=role.rank,
            workers=self._plan.worker_count,
            client=role.position,
            clients=self._plan.working_hosts,
            local_rank=role.local_rank,
            local_workers=self._plan.workers_per_host,
        )

    def notes(self) -> list[str]:
        """See `Job`."""
        notes = [f"the command line sets {self._changes}"] if self._changes else []
        if self._site is None and self._solver.param.snapshot_prefix:
            folder = self._solver.snapshot_prefix().parent
            notes += [] if folder.exists() else [f"snapshots go to {folder}, a new folder"]
        return notes

    @property
    def origin(self) -> StartingPoint:
        """See `Job`."""
        if self._resumed is None:
            return StartingPoint()
        path = Path(self._flags.snapshot).absolute()
        return StartingPoint(state=str(path), iteration=self._resumed.iteration)

    def closing(
        self, result: JobResult, newest: StartingPoint, reached: Sequence[str]
    ) -> list[tuple[str, str]]:
        """See `Job`."""
        stopped = result.outcome is Outcome.STOPPED
        entries = [("reached", words) for words in reached]
        if newest.state:
            model = model_of(Path(newest.state))
            behind = "" if newest.iteration == result.iteration else f" (of iteration {newest.iteration})"
            entries.append(("model", near(model) + behind))
            entries += [("test", words) for words in test_commands(self._solver, model)]
            entries.append(("go on", self._resume_words(Path(newest.state), finished=not stopped)))
        else:
            entries.append(("model", "no snapshot was written"))
        log = self._output / "worker_0.log"
        if log.exists():
            entries.append(("plot", shlex.join(["poseidon", "plot", near(log), "-o", "curves.png"])))
        return [*entries, *self._traffic()]

    def _resume_words(self, state: Path, *, finished: bool) -> str:
        """How to go on from a snapshot: the command, or what to add where the job was not started by one."""
        if getattr(self._flags, "site", None) is not None:
            words = f"the same tasks with --snapshot={near(state)}"
        else:
            words = resume_command(self._flags.words, state)
        return f"{words}  # once max_iter is above {self._solver.param.max_iter}" if finished else words

    def needs(self, client: Host) -> ClientNeeds:
        """See `Job`."""
        needs = super().needs(client)
        mine = [worker for worker in self._plan.workers if worker.host.id == client.id]
        if not mine:
            return needs
        folders = (
            (*needs.folders, self.there(self._net_outputs.parent)) if mine[0].rank == 0 else needs.folders
        )
        return replace(
            needs,
            folders=folders,
            prefixes=written_prefixes(self._solver) if mine[0].rank == 0 else (),
            files=needed_files(self._solver, client=mine[0].position, clients=self._plan.working_hosts),
            modules=self._imports,
        )

    def shares_data(self) -> bool:
        """See `Job`."""
        return not any(file.instead for file in needed_files(self._solver, client=0, clients=2))

    def shipments(self) -> Sequence[Shipment]:
        """See `Job`."""
        weights = [Shipment(files=(path,)) for path in self._weights]
        if not self._point.state:
            return weights
        state = Path(self._point.state)
        return [*weights, Shipment(files=snapshot_files(state))]

    def _choose_seed(self) -> int:
        """The solver's; else that of the run that is resumed; else a new one."""
        seed = self._settings.random_seed
        if seed is None and self._resumed is not None:
            seed = self._resumed.seed
        return secrets.randbits(31) if seed is None else seed

    def document(self, role: WorkerPlan) -> JobDocument:
        """See `Job`."""
        flags = self._flags
        return JobDocument(
            **self.worker_document(role).to_fields(),
            solver=str(Path(flags.solver).absolute()),
            definitions=self._packed,
            settings=self._overridden,
            seed=self._seed,
            snapshot=self.brought(Path(self._point.state), role) if self._point.state else "",
            weights=tuple(self.brought(path, role) for path in self._weights),
            net_outputs=self.there(self._net_outputs),
            level="" if flags.level is None else str(flags.level),
            stages=self._stages,
            imports=self._imports,
            goes_on=self._attempt > 0,
            snapshot_keep=flags.snapshot_keep,
            stop_at_nan=flags.on_nan == "stop",
        )


def _check_starting_point(flags: argparse.Namespace) -> None:
    if flags.snapshot and flags.weights:
        raise UsageError(
            "--snapshot and --weights exclude each other: go on from a run, or start from a model"
        )
    for part in filter(None, flags.weights.split(",")):
        if not Path(part).is_file():
            raise SnapshotError(f"--weights: there is no file {part}")
    if flags.snapshot:
        flags.snapshot = str(snapshot_of(flags.snapshot))


def _devices(flags: argparse.Namespace, solver: SolverDefinition) -> tuple[str, ...]:
    """--gpu, else what the solver says, as Caffe decides it. What other machines have, they are asked later."""
    far, available = leaves_this_machine(flags), torch.cuda.device_count()
    if flags.gpu:
        return devices_from_flag(flags.gpu, available=None if far else available)
    param = solver.param
    if not param.HasField("solver_mode"):
        return (f"cuda:{param.device_id}",) if available > param.device_id else ("cpu",)
    if param.solver_mode == SolverParameter.CPU:
        return ("cpu",)
    if available <= param.device_id and not far:
        raise solver.error(
            "solver_mode", f"GPU, but this machine has {available} GPUs; expected CPU, or another device_id"
        )
    return (f"cuda:{param.device_id}",)
