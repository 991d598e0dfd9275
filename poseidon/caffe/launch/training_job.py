"""The job of `poseidon train`: it trains the nets of a Caffe solver."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from google.protobuf.message import Message

from poseidon.base.paths import own_command, portable, short_path
from poseidon.caffe.data.batches.numbered import part_path
from poseidon.caffe.data.prepare.download import how_to_fetch
from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.layers.registry import import_modules
from poseidon.caffe.net.compile import filter_phase
from poseidon.caffe.net.params import ParamInfo
from poseidon.caffe.proto.caffe_pb2 import TRAIN, SolverParameter
from poseidon.caffe.proto.definition import NetDefinition, SolverDefinition, TestNet, read_solver
from poseidon.caffe.proto.overrides import changes
from poseidon.caffe.proto.projects import pack_solver
from poseidon.caffe.snapshot.caffemodel import check_model
from poseidon.caffe.snapshot.solverstate import learned_net, read_head
from poseidon.caffe.solver.settings import oddities, solver_settings
from poseidon.caffe.tools.preflight import (
    check_layers,
    check_nets,
    check_snapshot_prefix,
    weight_files,
)
from poseidon.cluster.host_probe import HostNeeds, NeededFile
from poseidon.cluster.job_plan import JobPlan, WorkerPlan, devices_from_flag
from poseidon.cluster.machinefile import Host
from poseidon.cluster.supervision.restarts import StartingPoint
from poseidon.cluster.supervision.state import JobResult
from poseidon.engine.document import JobDocument, TrainingOptions, WorkKind
from poseidon.engine.snapshot_files import sums_path
from poseidon.errors import SnapshotError, UsageError, counted
from poseidon.exchange.base import Trained
from poseidon.exchange.lossy.compression import Compression, compressions_of
from poseidon.exchange.lossy.low_rank_matrix import LowRank
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from poseidon.flags.values import parts
from poseidon.launcher.closing_lines import model_of
from poseidon.launcher.job import FRAGMENTS_TRAVEL, Job, check_folder, other_iteration
from poseidon.launcher.job_folder import find_snapshot
from poseidon.launcher.processes import Start
from poseidon.launcher.request import OnNan, TrainRequest
from poseidon.launcher.site import FileSet, Site
from ps_server.json_fields import fields_of

_PATHS = ("source", "mean_file")
_SHARED = "shared_file_system"


class TrainingJob(Job):
    """A job that trains one of Caffe's nets; see `Job`.

    Raises:
        PoseidonError: a mistake in the definitions, or a file is missing.
    """

    kind = WorkKind.SOLVER
    restarts_by_itself = True
    request: TrainRequest

    def __init__(self, request: TrainRequest, site: Site) -> None:
        import_modules(request.imports)
        if request.solver.is_fifo():
            raise UsageError(
                f"--solver={request.solver} is a pipe, but each worker must read the solver: "
                "write it to a file, or change fields of a file with --set"
            )
        file = read_solver(request.solver)
        self._solver = file.with_settings(request.settings).with_train_state(
            level=request.level, stages=request.stage
        )
        self._changes = changes(file.param, self._solver.param, request.settings)
        if request.weights or request.snapshot:
            self._solver = self._solver.without_weights()
        self._settings = solver_settings(self._solver)
        check_local_steps(self._solver.param, request.exchange.local_steps)
        title = check_nets(self._solver, self._settings).param.name or request.solver.stem
        for path in request.weights:
            if not path.is_file():
                raise SnapshotError(f"--weights: there is no file {path}{how_to_fetch(path)}")
            check_model(path)
        self._snapshot = find_snapshot(request.snapshot) if request.snapshot else None
        self._resumed = None
        if self._snapshot is not None:
            self._resumed = read_head(self._snapshot)
            state = str(self._snapshot.absolute())
            self.origin = StartingPoint(state=state, iteration=self._resumed.iteration)
        self._began_with = 0 if self._resumed is None else self._resumed.poseidon.workers
        stem = request.solver.stem.removesuffix("_solver")
        devices = _devices(request.gpu, self._solver, site.visible_gpus())
        super().__init__(request, site, title=title, stem=stem, devices=devices)
        if self.plan.shards:
            check_clipping(self._solver.param, request.exchange)
        self._net_outputs = Path(request.net_outputs or self.output / "job").absolute()
        check_folder("net_outputs", self._net_outputs.parent)
        self._seed = self._choose_seed()
        self._check_definition()
        self._weights = tuple(path.absolute() for path in request.weights)
        self._packed = (
            "" if site.opens_files_here else pack_solver(request.solver, request.settings)
        )

    def _check_definition(self) -> None:
        """Find here what the workers would find later; hosts that open their own files are asked
        for them.
        """
        local = self.site.opens_files_here
        contexts = [
            self._context(worker) for worker in self.plan.workers if worker.seat.local_rank == 0
        ]
        alike = not local or self.shares_data()
        params = check_layers(
            self._solver, contexts[:1] if alike else contexts, files_are_here=local
        )
        if params is not None:
            compressions = compressions_of_params(params, self.request.exchange)
            if self.plan.shards:
                check_automatic_compression(self._solver.param, compressions, self.request.exchange)
        if local:
            check_snapshot_prefix(self._solver)
            if self._resumed is not None and self._snapshot is not None:
                learned_net(self._resumed, self._snapshot)
                return
            for path in weight_files(self._solver, ()):
                if not path.exists():
                    raise self._solver.error(
                        "weights", f"there is no file {path}{how_to_fetch(path)}"
                    )
                check_model(path)

    def _context(self, role: WorkerPlan) -> LayerContext:
        return LayerContext(
            phase=TRAIN,
            seed=self._seed,
            rank=self.virtual_workers.of(role.rank).start,
            workers=self.virtual_workers.count,
            seat=role.seat,
        )

    def usual_virtual_workers(self, plan: JobPlan) -> int:
        """See `Job`: as many as the snapshot has that the job resumes from, else as the job had
        workers when it began, so that bits stay on other hosts; where that is not possible, one
        for each worker.
        """
        self._began_with = self._began_with or plan.worker_count
        try:
            self.check_virtual_workers(self._began_with, plan)
        except UsageError:
            return plan.worker_count
        return self._began_with

    def check_virtual_workers(self, count: int, plan: JobPlan) -> None:
        """See `Job`: each also needs the records of all clients."""
        super().check_virtual_workers(count, plan)
        if count != plan.worker_count and not self.shares_data():
            raise UsageError(
                f"--virtual_workers={count} with {counted(plan.worker_count, 'worker')} needs "
                "shared_file_system: true in each data layer; set it, or use "
                f"--virtual_workers={plan.worker_count}"
            )

    def usual_threads(self, role: WorkerPlan) -> int:
        """See `Job`: the snapshot's, where the job has its virtual workers on request or on
        different workers.
        """
        resumed, virtual = self._resumed, self.virtual_workers
        on_purpose = self.request.virtual_workers is not None or not virtual.is_one_each
        if resumed is not None and on_purpose and resumed.poseidon.workers == virtual.count:
            threads = next((worker.threads for worker in resumed.poseidon.worker), 0)
            return threads or super().usual_threads(role)
        return super().usual_threads(role)

    def _choose_seed(self) -> int:
        """Return the solver's seed; else the seed of the run that is resumed; else a new one."""
        seed = self._settings.random_seed
        if seed is None and self._resumed is not None:
            seed = self._resumed.seed
        return secrets.randbits(31) if seed is None else seed

    def notes(self) -> list[str]:
        notes = [f"the command line sets {self._changes}"] if self._changes else []
        notes += [f"warning: {oddity}" for oddity in oddities(self._solver)]
        if self.site.opens_files_here and self._solver.param.snapshot_prefix:
            folder = self._solver.snapshot_prefix().parent
            notes += [] if folder.exists() else [f"snapshots go to {folder}, a new folder"]
        return [
            *super().notes(),
            *notes,
            *rounds_that_end_early(self._solver.param, self.request.exchange.local_steps),
        ]

    def final_report(
        self, result: JobResult, newest: StartingPoint, scores: Sequence[str]
    ) -> list[tuple[str, str]]:
        entries = [("reached", score) for score in scores]
        if newest.state:
            model = model_of(Path(newest.state))
            other = other_iteration(newest, result)
            entries.append(("model", short_path(model) + (f" (of {other})" if other else "")))
            entries += [("test", command) for command in test_commands(self._solver, model)]
            last = self._solver.param.max_iter
            reached = newest.iteration
            further = {"max_iter": str(2 * reached)} if reached >= last > 0 else {}
            entries.append(("resume", self.resume_line(Path(newest.state), **further)))
        else:
            entries.append(("model", "no snapshot was written"))
        log = self.output / "worker_0.log"
        if log.exists():
            entries.append(("plot", f"{own_command()} plot {shlex.quote(self.name)} -o curves.png"))
        return [*entries, *self._network_report()]

    def needs(self, host: Host) -> HostNeeds:
        needs = super().needs(host)
        workers = [worker for worker in self.plan.workers if worker.host.id == host.id]
        if not workers:
            return needs
        files = needed_files(
            self._solver, client=workers[0].seat.host, clients=self.plan.working_hosts
        )
        needs = replace(needs, files=files, modules=self.request.imports)
        if workers[0].rank != 0 and not self.elastic:
            return needs
        folders = (*needs.folders, self.site.path(self._net_outputs.parent))
        return replace(needs, folders=folders, prefixes=written_prefixes(self._solver))

    def shares_data(self) -> bool:
        return not any(file.instead for file in needed_files(self._solver, client=0, clients=2))

    def files(self, point: StartingPoint) -> Sequence[FileSet]:
        if point.memory:
            return ()
        weights = [(path,) for path in self._weights]
        return [*weights, snapshot_files(Path(point.state))] if point.state else weights

    @property
    def bound_because(self) -> str:
        if self.request.exchange.streams:
            return FRAGMENTS_TRAVEL
        return "" if self.shares_data() else "a data layer has shared_file_system: false"

    def document(self, role: WorkerPlan, start: Start) -> JobDocument:
        request, host, site = self.request, role.host, self.site
        return JobDocument(
            **fields_of(self.worker_document(role, start)),
            **fields_of(request, TrainingOptions),
            solver=str(request.solver.absolute()),
            definitions=self._packed,
            settings=request.settings,
            seed=self._seed,
            snapshot=site.sent_path(host, Path(start.point.state)) if start.point.state else "",
            weights=()
            if start.point.memory
            else tuple(site.sent_path(host, path) for path in self._weights),
            net_outputs=self.site.path(self._net_outputs),
            level="" if request.level is None else str(request.level),
            stages=request.stage,
            imports=request.imports,
            goes_on=start.attempt > 0,
            stop_at_nan=request.on_nan is OnNan.STOP,
        )


def _devices(gpu: str, solver: SolverDefinition, visible: int | None) -> tuple[str, ...]:
    """Return the devices of --gpu, else the solver's, as Caffe decides it.

    Args:
        visible: GPUs of a host; None: known once the hosts were checked. The launcher's own count
            then decides between GPU and CPU where the solver does not.
    """
    if gpu:
        return devices_from_flag(gpu, count_gpus=lambda: visible)
    param = solver.param
    if not param.HasField("solver_mode"):
        return (
            (f"cuda:{param.device_id}",)
            if torch.cuda.device_count() > param.device_id
            else ("cpu",)
        )
    if param.solver_mode == SolverParameter.CPU:
        return ("cpu",)
    if visible is not None and visible <= param.device_id:
        other = ", or a different device_id" if visible else ""
        raise solver.error(
            "solver_mode",
            f"GPU {param.device_id}, but this machine has {counted(visible, 'GPU')}; expected CPU "
            f"(--solver_mode=CPU){other}",
        )
    return (f"cuda:{param.device_id}",)


def needed_files(solver: SolverDefinition, *, client: int, clients: int) -> tuple[NeededFile, ...]:
    """Return the files of a solver and its nets that one host opens.

    They are found by the fields' names, so that a layer of a user's own with a `source` counts as
    well. None is opened.

    Args:
        client: the host's number among those that work.
        clients: how many work.
    """
    folder = portable(solver.folder)
    weights = [name for text in solver.param.weights for name in parts(text)]
    found = [NeededFile(name=name, folder=folder) for name in weights]
    for net, state in solver.nets_and_states():
        for layer in filter_phase(net, state).param.layer:
            found += _files_of(net, layer, client, clients)
    return tuple(dict.fromkeys(found))


def _files_of(
    net: NetDefinition, layer: Message, client: int, clients: int
) -> Iterator[NeededFile]:
    folder = portable(net.folder)
    for _, value in layer.ListFields():
        if not isinstance(value, Message):
            continue
        divided = hasattr(value, _SHARED) and not getattr(value, _SHARED)
        for name in _PATHS:
            path = getattr(value, name, "")
            if not isinstance(path, str) or not path:
                continue
            instead: tuple[str, ...] = ()
            if divided and name == "source":
                part = part_path(Path(path), client).name
                instead = (Path(path).name, part) if clients == 1 else (part,)
            yield NeededFile(name=path, folder=folder, instead=instead)


def written_prefixes(solver: SolverDefinition) -> tuple[tuple[str, str], ...]:
    """Return the prefix of the snapshots, with the folder of its definition; nothing if they go
    to the job's folder.
    """
    prefix = solver.param.snapshot_prefix
    return ((prefix, portable(solver.folder)),) if prefix else ()


def snapshot_files(state: Path) -> tuple[Path, ...]:
    """Return all files of a snapshot.

    Raises:
        SnapshotError: it cannot be read, or its weights are missing.
    """
    model = learned_net(read_head(state), state)
    sums = sums_path(state)
    return (*((sums,) if sums.exists() else ()), model, state)


def check_local_steps(solver: SolverParameter, steps: int) -> None:
    """Refuse what needs the values of all workers in each iteration."""
    if steps and solver.snapshot_diff:
        raise UsageError(
            f"snapshot_diff: true cannot be combined with --local_steps={steps}, which exchanges "
            f"once in {steps} iterations; set snapshot_diff: false, or leave out --local_steps"
        )


def compressions_of_params(
    params: Sequence[ParamInfo], options: ExchangeOptions
) -> list[tuple[ParamInfo, Compression | None]]:
    """Return the parameters that learn, each with its compression; None where it has none.

    Raises:
        UsageError: a pattern of --compress matches no tensor of the net.
    """
    learned = [info for info in params if info.parameter.requires_grad]
    trained = [
        Trained(name=info.name, tensor=info.parameter, statistics=info.statistics)
        for info in learned
    ]
    return list(
        zip(learned, compressions_of(trained, options.compress, options.loss_budget), strict=True)
    )


def check_clipping(solver: SolverParameter, options: ExchangeOptions) -> None:
    """Refuse PowerSGD with a limit of the norm of all workers' gradients.

    With local steps it limits each worker's own.
    """
    if solver.clip_gradients > 0 and options.names_powersgd and not options.local_steps:
        raise UsageError(
            f"clip_gradients: {solver.clip_gradients:g} cannot be combined with "
            f"--compress={options.compress:.80}, which uses PowerSGD; leave out clip_gradients, or "
            "use a different compression"
        )


def check_automatic_compression(
    solver: SolverParameter,
    compressions: Sequence[tuple[ParamInfo, Compression | None]],
    options: ExchangeOptions,
) -> None:
    """Refuse what `check_clipping` refuses where --compress=auto chooses PowerSGD for a tensor
    that the shards surely get.

    Whether a weight that can travel as factors goes to the shards is known to the workers alone.
    """
    if solver.clip_gradients <= 0 or options.local_steps:
        return
    all_go = options.kind is ExchangeKind.SERVER
    if any(
        isinstance(each, LowRank) and (all_go or not info.factors) for info, each in compressions
    ):
        raise UsageError(
            f"clip_gradients: {solver.clip_gradients:g} cannot be combined with "
            f"--compress={options.compress:.80} and this loss budget, which allows PowerSGD; leave "
            "out clip_gradients, or use a smaller budget"
        )


def rounds_that_end_early(solver: SolverParameter, steps: int) -> list[str]:
    """Return a note for each interval of the solver at which rounds of local steps end early."""
    if not steps:
        return []
    intervals = {name: getattr(solver, name) for name in ("snapshot", "test_interval")}
    return [
        f"{name} {interval} is not a multiple of --local_steps={steps}, so rounds end early there"
        for name, interval in intervals.items()
        if interval % steps
    ]


def test_commands(solver: SolverDefinition, model: Path) -> list[str]:
    """Return a command for each test net that scores a model; none for nets inside the solver's
    own file.
    """
    commands = []
    for test in solver.test_nets():
        if not Path(test.definition.source).is_file():
            continue
        net = short_path(Path(test.definition.source))
        argv = [
            "test",
            "-model",
            net,
            "-weights",
            short_path(model),
            "-iterations",
            str(test.iterations),
        ]
        commands.append(f"{own_command()} {shlex.join([*argv, *_state_flags(test)])}")
    return list(dict.fromkeys(commands))


test_commands.__test__ = False  # type: ignore[attr-defined]  # pytest would take it for a test


def _state_flags(test: TestNet) -> list[str]:
    """Return the flags for the level and for the stages that the file of the net does not have."""
    level, stages = test.state.level, test.state.stage[len(test.definition.param.state.stage) :]
    flags = ["-level", str(level)] if level else []
    return [*flags, *(["-stage", ",".join(stages)] if stages else [])]
