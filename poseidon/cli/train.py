"""`poseidon train`: start a job from a solver and a machinefile, and stay with it.

poseidon train --solver=prototxt/cifar10/cifar10_quick_solver.prototxt --hostfile=machinefiles/localserver
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import sys
import tempfile
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import torch

from poseidon.cli.exchange_flags import add_exchange_flags, check_exchange, exchange_kind
from poseidon.cli.launching import child_environment, read_clients, register_job
from poseidon.cli.net_flags import add_import_flag
from poseidon.cli.statistics_file import StatisticsFile
from poseidon.cli.terminal import Terminal
from poseidon.cluster.background import StartReport, how_to_follow, run_in_background, this_command
from poseidon.cluster.local import LocalLauncher
from poseidon.cluster.machinefile import socket_host
from poseidon.cluster.plan import JobPlan, ShardPlan, WorkerPlan, devices_from_flag, plan_job
from poseidon.cluster.process import ProcessSpec
from poseidon.cluster.registry import new_job_id
from poseidon.cluster.settings import SignalEffect, SupervisionSettings
from poseidon.cluster.supervise import run_job
from poseidon.engine.document import JobDocument
from poseidon.engine.preflight import check_nets, check_snapshot_prefix, obstacle_to
from poseidon.errors import JobError, PoseidonError, SnapshotError, UsageError
from poseidon.exchange.cost import ExchangeKind
from poseidon.layers.user_modules import import_modules, module_names
from poseidon.proto.caffe_pb2 import SolverParameter
from poseidon.proto.definition import SolverDefinition, read_solver
from poseidon.settings import read_settings
from poseidon.snapshot.solverstate import seed_of
from poseidon.solvers.settings import solver_settings

START_TIMEOUT_S = 180.0
SERVER_OF_C_POSEIDON = (
    "client_id",
    "num_clients",
    "num_table_threads",
    "init_thread_access_table",
    "svb_timeout_ms",
    "stats_path",
    "num_zmq_threads",
    "row_type",
    "row_oplog_type",
    "oplog_dense_serialized",
    "oplog_type",
    "append_only_oplog_type",
    "append_only_buffer_capacity",
    "append_only_buffer_pool_size",
    "bg_apply_append_oplog_freq",
    "process_storage_type",
    "no_oplog_replay",
    "thread_oplog_batch_size",
    "server_table_logic",
    "version_maintain",
)
"""Flags of the original that its scripts pass and that nothing here needs: taken, and said to have no effect."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `train` to the commands."""
    parser = subparsers.add_parser(
        "train",
        help="train a net",
        description="Train a net on the clients of a machinefile. Flags may be written -flag or --flag.",
    )

    def flag(name: str, **settings: object) -> None:
        parser.add_argument(f"--{name}", f"-{name}", dest=name, **settings)  # type: ignore[arg-type]

    flag("solver", metavar="FILE", required=True, help="the solver definition (prototxt)")
    flag(
        "hostfile",
        metavar="FILE",
        help="the machinefile: <id> <host> <port> a line; default: this machine alone",
    )
    flag(
        "gpu",
        metavar="IDS",
        default="",
        help="GPUs of each client, one worker each: 0,1 or all; default: CPU",
    )
    flag("snapshot", metavar="FILE", default="", help="solver state to go on from")
    flag("weights", metavar="FILES", default="", help="models to start from, parted by commas (fine-tuning)")
    flag("table_staleness", type=_count, default=0, metavar="S", help="bound of staleness; 0 (default): none")
    flag(
        "num_rows_per_table",
        type=_count,
        default=0,
        metavar="N",
        help="pieces of each table; default: 2 MiB each",
    )
    flag(
        "num_comm_channels_per_client", type=int, default=1, metavar="C", help="server shards per client (1)"
    )
    add_exchange_flags(flag)
    flag(
        "net_outputs",
        metavar="PREFIX",
        default="",
        help="averaged losses and scores go to <PREFIX>.netoutputs",
    )
    effects = [effect.value for effect in SignalEffect]
    flag("sigint_effect", default="stop", choices=effects, help="what Ctrl-C does (stop)")
    flag("sighup_effect", default="snapshot", choices=effects, help="what a hang-up does (snapshot)")
    flag("num_app_threads", type=int, default=1, metavar="T", help="workers of each client on CPU (1)")
    flag("output", metavar="DIR", help="folder of logs and net outputs; default: output/<job>")
    flag("threads", type=int, metavar="N", help="CPU threads per worker; default: the machine's, shared out")
    flag(
        "stall_timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="a process silent this long has failed (120)",
    )
    flag("level", type=int, metavar="L", help="level of the train net, for rules of its definition (0)")
    flag("stage", default="", metavar="NAMES", help="stages of the train net, parted by commas")
    add_import_flag(parser)
    flag("background", action="store_true", help="return once the job runs")
    flag("job", metavar="ID", help=argparse.SUPPRESS)
    for name in SERVER_OF_C_POSEIDON:
        flag(name, metavar="X", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number, 0 or more")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Train.

    Raises:
        PoseidonError: a mistake in the definitions or flags, or the job failed.
    """
    for name in SERVER_OF_C_POSEIDON:
        if getattr(arguments, name) is not None:
            print(f"note: --{name} has no effect here", file=sys.stderr)
    report = StartReport(read_settings().status_fd)
    try:
        job = _Job(arguments)
        if arguments.background:
            return job.start_in_background()
        return job.run(report)
    except PoseidonError as error:
        report.failed(str(error), error.exit_code)
        raise


class _Job:
    """One job from its flags: checks everything that can be checked before a process starts."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._flags = arguments
        self._imports = module_names(arguments.imports)
        import_modules(self._imports)
        self._stages = tuple(stage for stage in arguments.stage.split(",") if stage)
        self._solver = read_solver(arguments.solver).with_train_state(
            level=arguments.level, stages=self._stages
        )
        self._settings = solver_settings(self._solver)
        self._net_name = check_nets(self._solver, self._settings).param.name or Path(arguments.solver).stem
        check_snapshot_prefix(self._solver)
        _check_starting_point(arguments)
        self._kind = exchange_kind(arguments)
        self._plan = self._make_plan()
        self._id = arguments.job or new_job_id(
            Path(arguments.solver).stem.removesuffix("_solver"), datetime.now(), secrets.token_hex(3)
        )
        self._output = Path(arguments.output or Path("output") / self._id).absolute()
        self._net_outputs = Path(arguments.net_outputs or self._output / "job").absolute()
        _check_folder("output", self._output)
        _check_folder("net_outputs", self._net_outputs.parent)
        self._patience = _patience(arguments)
        self._token = secrets.token_hex(32)
        self._seed = self._choose_seed()
        self._meeting_places: dict[int, str] = {}

    def _choose_seed(self) -> int:
        """The solver's; else that of the run that is resumed; else a new one."""
        seed = self._settings.random_seed
        if seed is None and self._flags.snapshot:
            seed = seed_of(Path(self._flags.snapshot))
        return secrets.randbits(31) if seed is None else seed

    def _make_plan(self) -> JobPlan:
        flags = self._flags
        channels = flags.num_comm_channels_per_client
        clients = read_clients(flags.hostfile, channels)
        plan = plan_job(clients, devices_per_client=_devices(flags, self._solver), channels=channels)
        check_exchange(flags, plan.worker_count)
        # A worker that is alone needs no server, unless it is asked for: it applies the update rule itself.
        asked = flags.exchange not in (None, "local") or plan.has_dedicated_servers
        served = plan.worker_count > 1 or (asked and self._kind is not ExchangeKind.LOCAL)
        return plan if served else replace(plan, shards=())

    def start_in_background(self) -> int:
        """Start this command again, detached, and return once the job runs."""
        words = [word for word in self._flags.words if word.lstrip("-") != "background"]
        words += [f"--job={self._id}", f"--output={self._output}"]
        log = self._output / "launcher.log"
        pid = run_in_background(this_command(words), log, timeout_s=START_TIMEOUT_S + 30)
        print(how_to_follow(self._id, pid, log))
        return 0

    def run(self, report: StartReport) -> int:
        """Start the processes and stay with them to the end."""
        try:
            self._output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise JobError(f"cannot make the output folder {self._output}: {error.strerror}") from error
        terminal = Terminal(self._net_name, sys.stderr, on_started=report.started)
        statistics = StatisticsFile(terminal, self._id, self._output)
        terminal.say(f"job {self._id}: {_in_words(self._plan)}; logs in {self._output}")
        try:
            result = run_job(
                self._plan,
                self._spec,
                LocalLauncher(),
                callbacks=statistics,
                settings=self._patience,
                registration=register_job(self._id, self._flags.hostfile, self._plan.clients, self._output),
            )
        finally:
            statistics.close()
            terminal.close()
            for folder in self._meeting_places.values():
                shutil.rmtree(folder, ignore_errors=True)  # there still where workers never met
        terminal.say(f"job {self._id} {result.outcome.value} at iteration {result.iteration}")
        return 0

    def _spec(self, role: WorkerPlan | ShardPlan) -> ProcessSpec:
        marks: tuple[str, ...]
        if isinstance(role, ShardPlan):
            module, marks = "ps_server", ("--stdin", "--shard", str(role.index))
            first_line = self._shard_line(role)
        else:
            module, marks = "poseidon.engine.worker", ("--rank", str(role.rank))
            first_line = self._document(role).to_json()
        return ProcessSpec(
            name=role.process,
            argv=(sys.executable, "-m", module, "--job", self._id, *marks),
            environment=child_environment(),
            first_line=first_line,
        )

    def _shard_line(self, role: ShardPlan) -> bytes:
        line: dict[str, object] = {
            "token": self._token,
            "workers": self._plan.working_clients,  # of several workers on a machine one speaks for all
            "address": role.address,
        }
        if self._flags.trace:
            line["trace"] = str(self._output / f"trace_shard_{role.index}.json")
        return json.dumps(line).encode()

    def _meeting_place(self, position: int) -> str:
        """Where the workers of a machine meet: a new folder, which they take away once they have met."""
        if self._plan.workers_per_client == 1:
            return ""
        if position not in self._meeting_places:
            self._meeting_places[position] = tempfile.mkdtemp(prefix="poseidon-")
        return str(Path(self._meeting_places[position]) / "workers")

    def _document(self, role: WorkerPlan) -> JobDocument:
        flags, plan = self._flags, self._plan
        return JobDocument(
            job=self._id,
            token=self._token,
            solver=str(Path(flags.solver).absolute()),
            output=str(self._output),
            rank=role.rank,
            workers=plan.worker_count,
            client=role.position,
            clients=plan.working_clients,
            local_rank=role.local_rank,
            local_workers=plan.workers_per_client,
            local_address=self._meeting_place(role.position),
            device=role.device,
            threads=flags.threads or max(1, (os.cpu_count() or 1) // plan.worker_count),
            seed=self._seed,
            shards=plan.shard_count,
            staleness=flags.table_staleness,
            rows=flags.num_rows_per_table,
            consistency=flags.consistency_model,
            exchange=self._kind.value,
            precision=flags.wire_precision,
            bandwidth_mbps=flags.client_bandwidth_mbps or 0.0,
            host=socket_host(role.client.host),
            homes=plan.homes,
            shares=plan.shares,
            wait_free=flags.wait_free,
            trace=flags.trace,
            snapshot=str(Path(flags.snapshot).absolute()) if flags.snapshot else "",
            weights=tuple(str(Path(part).absolute()) for part in flags.weights.split(",") if part),
            net_outputs=str(self._net_outputs),
            level="" if flags.level is None else str(flags.level),
            stages=self._stages,
            imports=self._imports,
        )


def _check_starting_point(flags: argparse.Namespace) -> None:
    if flags.snapshot and flags.weights:
        raise UsageError(
            "--snapshot and --weights exclude each other: go on from a run, or start from a model"
        )
    if flags.threads is not None and flags.threads < 1:
        raise UsageError(f"--threads={flags.threads}: expected 1 or more")
    for name in ("snapshot", "weights"):
        for part in filter(None, getattr(flags, name).split(",")):
            if not Path(part).is_file():
                raise SnapshotError(f"--{name}: there is no file {part}")


def _check_folder(flag: str, folder: Path) -> None:
    obstacle = obstacle_to(folder)
    if obstacle:
        raise JobError(f"--{flag}: nothing can be written to {folder}: {obstacle}")


def _patience(flags: argparse.Namespace) -> SupervisionSettings:
    if not flags.stall_timeout > 0:
        raise UsageError(f"--stall_timeout={flags.stall_timeout:g}: expected more than 0 seconds")
    return SupervisionSettings(
        start_timeout_s=START_TIMEOUT_S,
        stall_timeout_s=flags.stall_timeout,
        sigint_effect=SignalEffect(flags.sigint_effect),
        sighup_effect=SignalEffect(flags.sighup_effect),
    )


def _devices(flags: argparse.Namespace, solver: SolverDefinition) -> tuple[str, ...]:
    """The device of each worker of a client."""
    if flags.num_app_threads < 1:
        raise UsageError(f"--num_app_threads is {flags.num_app_threads}, expected 1 or more")
    devices = _devices_asked_for(flags.gpu, solver)
    return devices * flags.num_app_threads if devices == ("cpu",) else devices


def _devices_asked_for(gpu: str, solver: SolverDefinition) -> tuple[str, ...]:
    """--gpu, else what the solver says, as Caffe decides it."""
    available = torch.cuda.device_count()
    if gpu:
        return devices_from_flag(gpu, available=available)
    param = solver.param
    if not param.HasField("solver_mode"):
        return (f"cuda:{param.device_id}",) if available > param.device_id else ("cpu",)
    if param.solver_mode == SolverParameter.CPU:
        return ("cpu",)
    if available <= param.device_id:
        raise solver.error(
            "solver_mode", f"GPU, but this machine has {available} GPUs; expected CPU, or another device_id"
        )
    return (f"cuda:{param.device_id}",)


def _in_words(plan: JobPlan) -> str:
    def count(number: int, word: str) -> str:
        return f"{number} {word}{'' if number == 1 else 's'}"

    return ", ".join(
        (
            count(len(plan.clients), "client"),
            count(plan.worker_count, "worker"),
            count(plan.shard_count, "shard"),
        )
    )
