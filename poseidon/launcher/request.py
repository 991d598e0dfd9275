"""What a user asks of a job, as frozen values.

Law: a field declares its flag, with its default and its help, which says what the field means; the
docstrings say what the help does not. A new flag of `train` is a field here (or, if it acts in the
workers, in `TrainingOptions`), and the place where it acts. Ranges are checked here. The command
line reads this module without torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

from poseidon.cluster.machinefile import HIGHEST_PORT
from poseidon.cluster.supervision.state import (
    DEFAULT_SUPERVISION,
    RETURN_TIMEOUT_S,
    SignalEffect,
    SupervisionSettings,
)
from poseidon.engine.document import TrainingOptions
from poseidon.errors import UsageError, counted
from poseidon.exchange.compute_options import Arithmetic, ComputeOptions
from poseidon.exchange.options import DEFAULT_OPTIONS, ExchangeOptions
from poseidon.flags.flag import (
    BACKENDS,
    IMPORT,
    ON_TERMINAL,
    Opens,
    Section,
    ShownProgress,
    Takes,
    declared,
    flag_of,
    option,
    title_of,
)
from poseidon.flags.values import (
    count,
    devices,
    one_of,
    parts,
    path,
    paths,
    positive,
    stated,
    whole,
)


class LauncherKind(Enum):
    """A value of --launcher."""

    AUTO = "auto"
    """Over SSH if a host is another machine."""
    LOCAL = "local"
    """On this machine."""
    SSH = "ssh"
    """Over SSH, also to this machine."""
    RAY = "ray"
    """On the nodes of a Ray cluster."""


class Encrypt(Enum):
    """A value of --encrypt."""

    AUTO = "auto"
    """If a process is on another machine."""
    ON = "on"
    """Always: other users of this machine are kept out, too."""


class ShownLogs(Enum):
    """A value of --progress=logs."""

    FIRST = "first"
    """Worker 0's, and warnings of the others."""
    ALL = "all"
    """Everyone's, each line after its client and process."""


class OnNan(Enum):
    """A value of --on_nan: what a loss or weights that are not finite do."""

    STOP = "stop"
    """They end the job."""
    WARN = "warn"
    """They are a warning."""


_OF_RAY = "launcher=ray:"


def _of_ray(default: Any, text: str, **settings: Any) -> Any:
    return option(default, text, Section.RAY, of=_OF_RAY, **settings)


def _of_elastic(default: Any, text: str, **settings: Any) -> Any:
    return option(default, text, Section.ELASTIC, of="elastic=", **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """A value of --balance: how fast the clients are, beside each other. It decides where virtual
    workers are computed, never what they compute.

    Attributes:
        speeds: of each client that works, above 0; empty: all are equally fast.
        measured: whether virtual workers move by the measured speeds of workers.
    """

    speeds: tuple[float, ...] = ()
    measured: bool = False

    @classmethod
    def read(cls, text: str) -> Balance:
        """Read the flag's value: numbers with commas, or `auto`.

        Raises:
            argparse.ArgumentTypeError: it is neither.
        """
        if text.lower() == "auto":
            return cls(measured=True)
        try:
            return cls(speeds=tuple(positive(part) for part in text.split(",")))
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(
                f"expected the speed of each client, as 1,0.5, or auto, found '{text}'"
            ) from error

    def of_clients(self, clients: Sequence[int]) -> dict[int, float]:
        """Return the speed of each client; empty: they count as equally fast.

        Args:
            clients: the ids of those that work, in order.

        Raises:
            UsageError: there are more or fewer speeds.
        """
        if self.speeds and len(self.speeds) != len(clients):
            raise UsageError(
                f"--balance has {counted(len(self.speeds), 'speed')}, and this job has "
                f"{counted(len(clients), 'client')} with workers; expected one for each, in the "
                "order of their ids"
            )
        return dict(zip(clients, self.speeds, strict=True)) if self.speeds else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What every job is asked for.

    Attributes:
        job: the job's id; None: a new one.

    Raises:
        UsageError: a number is out of range; the text names its flag.
    """

    hostfile: str | None = option(
        None,
        "the machinefile; default: this machine alone",
        Section.MACHINES,
        metavar="FILE",
        opens=Opens.MACHINEFILE,
    )
    gpu: str = option(
        "", "GPUs, a worker each: 0,1 or all (CPU)", Section.MACHINES, metavar="IDS", read=devices
    )
    workers: int = option(
        1,
        "workers of each client on CPU ({default})",
        Section.MACHINES,
        aliases=("num_app_threads",),
    )
    output: Path | None = option(
        None,
        "the job's folder: logs, statistics (output/<job>)",
        Section.OUTPUT,
        metavar="DIR",
        read=path,
    )
    progress: ShownProgress = option(
        ShownProgress.AUTO, ON_TERMINAL, Section.TERMINAL, metavar="HOW,..."
    )
    job: str | None = option(None, "", Section.OUTPUT, metavar="ID")

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"--workers is {self.workers}; expected 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest(ComputeOptions, RunRequest):
    """What every job that trains is asked for, with the options of its arithmetic.

    Attributes:
        argv: the arguments of `poseidon`, the command first; empty: a program asks.
        server_requested: whether an exchange that uses shards was asked for by name.
        virtual_workers: V, the number in the job, at least 1; None: one for each worker, or as many
            as in the snapshot that the job resumes from.
        max_restarts: most restarts; None: as the kind of job decides.
        elastic: hosts that keep a copy of each memory snapshot beside the first; 0: none is taken;
            None: 1.
        memory_snapshot_every: iterations from one memory snapshot to the next; 0: none is taken;
            None: as often as costs little.

    Raises:
        UsageError: a number is out of range; the text names its flag.
    """

    argv: tuple[str, ...] = ()
    exchange: ExchangeOptions = DEFAULT_OPTIONS
    server_requested: bool = False
    threads: int | None = option(
        None, "CPU threads of a worker (equal parts)", Section.MACHINES, read=whole, rare=True
    )
    virtual_workers: int | None = option(
        None,
        "results depend on V alone (one a worker)",
        Section.MACHINES,
        metavar="V",
        read=whole,
    )
    balance: Balance = option(
        Balance(),
        "speed of each client: 1,0.5, or auto (equal)",
        Section.MACHINES,
        metavar="LIST",
        read=Balance.read,
        rare=True,
    )
    shards: int = option(
        1,
        "shards of each client ({default})",
        Section.MACHINES,
        aliases=("num_comm_channels_per_client",),
        metavar="C",
        rare=True,
    )
    launcher: LauncherKind = option(
        LauncherKind.AUTO,
        "auto (SSH to others), local, ssh, ray:...",
        Section.MACHINES,
        metavar="HOW",
    )
    ssh_config: Path | None = option(
        None,
        "in place of ~/.ssh/config, as ssh -F",
        Section.MACHINES,
        metavar="FILE",
        read=path,
        rare=True,
    )
    ray_address: str | None = _of_ray(
        None, "head of the Ray cluster ($RAY_ADDRESS)", metavar="HOST:PORT", name="address"
    )
    clients: int | None = _of_ray(None, "Ray nodes with workers (1)", read=whole)
    servers: int = _of_ray(0, "Ray nodes with shards alone ({default})", read=count)
    ray_resources: str = _of_ray(
        "", "of a client: CPU=4+big=1 (CPU=1 a thread)", metavar="LIST", name="resources"
    )
    ray_server_resources: str = _of_ray(
        "", "of a client with shards alone (CPU=1)", metavar="LIST", name="server_resources"
    )
    ray_timeout: float = _of_ray(
        300.0, "seconds to wait for Ray's nodes ({default})", metavar="S", name="timeout"
    )
    encrypt: Encrypt = option(
        Encrypt.AUTO,
        "auto (between machines), on (everywhere)",
        Section.MACHINES,
        metavar="WHEN",
        rare=True,
    )
    dashboard: bool = option(
        False, "serve a live page of the job; see poseidon dashboard", Section.OUTPUT
    )
    tensorboard_dir: Path | None = option(
        None,
        "write losses and scores for TensorBoard there",
        Section.OUTPUT,
        metavar="DIR",
        read=path,
        rare=True,
    )
    metrics_port: int | None = option(
        None, "serve values to Prometheus on 127.0.0.1:N", Section.OUTPUT, read=count, rare=True
    )
    exchange_plan: Path | None = option(
        None,
        "--exchange=auto: the plan of an earlier job",
        Section.EXCHANGE,
        metavar="FILE",
        read=path,
        rare=True,
    )
    trace: bool = option(
        False, "write <output>/trace_*.json, for Perfetto", Section.OUTPUT, rare=True
    )
    show_logs: ShownLogs = option(
        ShownLogs.FIRST,
        "first (worker 0 and all warnings), all",
        Section.TERMINAL,
        metavar="WHOSE",
        name="logs",
        of="progress=",
    )
    progress_interval: float = option(
        60.0,
        "seconds between progress lines, without a bar ({default})",
        Section.TERMINAL,
        metavar="S",
        name="every",
        of="progress=",
    )
    background: bool = option(False, "return once the job runs", Section.OUTPUT)
    sigint_effect: SignalEffect = option(
        DEFAULT_SUPERVISION.sigint_effect,
        "on Ctrl-C: stop, snapshot, none ({default})",
        Section.FAILURES,
        metavar="WHAT",
        rare=True,
    )
    sighup_effect: SignalEffect = option(
        DEFAULT_SUPERVISION.sighup_effect,
        "on a hang-up: stop, snapshot, none ({default})",
        Section.FAILURES,
        metavar="WHAT",
        rare=True,
    )
    max_restarts: int | None = option(
        None, "restarts (3 on several hosts, else 0)", Section.FAILURES, read=count
    )
    return_timeout: float = option(
        RETURN_TIMEOUT_S,
        "how long a restart waits for lost hosts ({default})",
        Section.FAILURES,
        metavar="S",
        rare=True,
    )
    stall_timeout: float = option(
        DEFAULT_SUPERVISION.stall_timeout_s,
        "a process that hangs this long has failed ({default})",
        Section.FAILURES,
        metavar="S",
        rare=True,
    )
    term_deadline: float = option(
        DEFAULT_SUPERVISION.term_deadline_s,
        "seconds from SIGTERM to the job's end ({default})",
        Section.FAILURES,
        metavar="S",
        rare=True,
    )
    elastic: int | None = option(
        None,
        "copies of a memory snapshot on further hosts (1)",
        Section.ELASTIC,
        metavar="N,...",
        read=count,
    )
    memory_snapshot_every: int | None = _of_elastic(
        None, "iterations between those; 0: none (chosen)", read=count, name="every"
    )
    min_workers: int = _of_elastic(1, "fewest workers that continue after a loss ({default})")
    max_rejoins: int = _of_elastic(3, "how often a lost host is taken in again ({default})")
    snapshot: str = option(
        "",
        "resume from a file of group.save(), or a job's newest",
        Section.TRAINED,
        metavar="FILE|JOB",
        read=stated(str),
        opens=Opens.SNAPSHOT,
    )

    def __post_init__(self) -> None:
        RunRequest.__post_init__(self)
        least_of = {
            "threads": 1,
            "virtual_workers": 1,
            "elastic": 0,
            "memory_snapshot_every": 0,
            "min_workers": 1,
            "max_rejoins": 0,
        }
        for name, least in least_of.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{title_of(JobRequest, name)}={value}: expected {least} or more")
        for name in ("ray_timeout", "return_timeout"):
            if not getattr(self, name) >= 0:
                raise UsageError(
                    f"{title_of(JobRequest, name)}={getattr(self, name):g}: expected 0 seconds or more"
                )
        for name in ("stall_timeout", "term_deadline"):
            if not getattr(self, name) > 0:
                raise UsageError(f"--{name}={getattr(self, name):g}: expected more than 0 seconds")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= HIGHEST_PORT:
            raise UsageError(
                f"--metrics_port={self.metrics_port}: expected 0 (a free port) to {HIGHEST_PORT}"
            )
        if not self.progress_interval >= 0:
            raise UsageError(
                f"--progress=every={self.progress_interval:g}: expected 0 (no lines) or more "
                "seconds"
            )
        self._check_ray()
        if self.exchange_plan is not None and not self.exchange.chooses:
            raise UsageError(
                "--exchange_plan needs --exchange=auto, --staleness=0, float32 and no --local_steps"
            )

    def _check_ray(self) -> None:
        """Refuse flags of Ray's launcher without it, and a number of clients beside a
        machinefile.
        """
        if self.launcher is not LauncherKind.RAY:
            given = next(
                (
                    entry.name
                    for entry in fields(JobRequest)
                    if (flag := flag_of(entry)) and flag.of == _OF_RAY
                    if getattr(self, entry.name) != entry.default
                ),
                None,
            )
            if given:
                raise UsageError(
                    f"{title_of(JobRequest, given)} is for --launcher=ray; other launchers read "
                    "--hostfile"
                )
        elif self.clients is not None and self.clients < 1:
            raise UsageError(f"--launcher=ray:clients={self.clients}: expected 1 or more")
        elif self.hostfile and (self.clients is not None or self.servers):
            raise UsageError(
                "--hostfile and --launcher=ray:clients=N exclude each other: the machinefile "
                "names the clients"
            )

    def supervision_settings(self) -> SupervisionSettings:
        """Return the job's time limits and the effects of signals."""
        return SupervisionSettings(
            term_deadline_s=self.term_deadline,
            stall_timeout_s=self.stall_timeout,
            sigint_effect=self.sigint_effect,
            sighup_effect=self.sighup_effect,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest(TrainingOptions, JobRequest):
    """What `poseidon train` is asked for, with the options of `TrainingOptions`, which act in
    the workers.
    """

    solver: Path = option(
        Path(),
        "the solver definition (prototxt)",
        Section.TRAINED,
        metavar="FILE",
        read=Path,
        required=True,
        opens=Opens.FILE,
    )
    snapshot: str = option(
        "",
        "resume from a .solverstate, or a job's newest",
        Section.TRAINED,
        metavar="FILE|JOB",
        read=stated(str),
        opens=Opens.SNAPSHOT,
    )
    weights: tuple[Path, ...] = option(
        (),
        "start from comma-separated .caffemodels",
        Section.TRAINED,
        metavar="FILES",
        read=stated(paths),
        opens=Opens.MODEL,
    )
    level: int | None = option(
        None,
        "level of the train net, for its include rules",
        Section.TRAINED,
        metavar="L",
        read=whole,
        rare=True,
    )
    stage: tuple[str, ...] = option(
        (),
        "comma-separated stages of the train net",
        Section.TRAINED,
        metavar="NAMES",
        read=parts,
        rare=True,
    )
    imports: tuple[str, ...] = declared(IMPORT, Section.TRAINED)
    settings: tuple[str, ...] = option(
        (),
        "any field; may be given more than once",
        Section.SETTINGS,
        name="set",
        dest="settings",
        metavar="FIELD=VALUE",
        takes=Takes.VALUES,
    )
    net_outputs: str = option(
        "",
        "PREFIX.netoutputs: averaged losses (job in --output)",
        Section.OUTPUT,
        metavar="PREFIX",
        rare=True,
    )
    on_nan: OnNan = option(
        OnNan.STOP,
        "a loss or weights not finite: {choices}",
        Section.FAILURES,
        metavar="WHAT",
        rare=True,
    )

    def __post_init__(self) -> None:
        JobRequest.__post_init__(self)
        if self.precision is Arithmetic.FLOAT16 and self.exchange.quorum:
            raise UsageError(
                "--precision=float16 cannot be combined with --local_steps=quorum=N, because all "
                "workers must agree on the scale of the loss; use --precision=bfloat16, or leave "
                "out quorum"
            )
        if self.snapshot and self.weights:
            raise UsageError(
                "--snapshot and --weights exclude each other: resume a run, or start from a model"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRequest(JobRequest):
    """What `poseidon run` is asked for."""

    script: Path = option(
        Path(),
        "the script; with -m the name of a module",
        Section.ARGUMENTS,
        metavar="SCRIPT",
        read=Path,
        takes=Takes.WORD,
    )
    arguments: tuple[str, ...] = option(
        (), "its own arguments", Section.ARGUMENTS, metavar="...", takes=Takes.REST
    )
    ddp: bool = option(False, "the script is written for DistributedDataParallel", Section.TRAINED)
    module: bool = option(
        False, "or -m: run a module, as python -m does", Section.TRAINED, aliases=("m",)
    )

    def __post_init__(self) -> None:
        JobRequest.__post_init__(self)
        if self.precision.has_16_bits:
            raise UsageError(
                f"--precision={self.precision.value} is for Caffe's nets (train, test, time); in a "
                "script use torch.autocast, or --precision=tf32"
            )
        if self.channels_last:
            raise UsageError(
                "--channels_last is for Caffe's nets (train, test, time); in a script use "
                "module.to(memory_format=torch.channels_last)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractionRequest(RunRequest):
    """What `poseidon extract_features` is asked for as a job."""

    model: Path = option(
        Path(),
        "the net; its TEST data is read",
        Section.EXTRACTED,
        metavar="FILE",
        read=path,
        default=None,
    )
    weights: tuple[Path, ...] = option(
        (),
        "comma-separated models; later ones win",
        Section.EXTRACTED,
        metavar="FILES",
        read=paths,
        opens=Opens.MODEL,
    )
    extract_feature_blob_names: tuple[str, ...] = option(
        (), "the features: fc7,fc8", Section.EXTRACTED, metavar="BLOBS", read=parts
    )
    save_feature_dataset_names: tuple[str, ...] = option(
        (),
        "a database for each blob",
        Section.EXTRACTED,
        metavar="NAMES",
        read=parts,
        aliases=("save_feature_leveldb_names",),
    )
    num_mini_batches: int = option(0, "at most N batches of a worker (all)", Section.EXTRACTED)
    backend: str = option(
        "leveldb",
        "lmdb or leveldb ({default})",
        Section.EXTRACTED,
        metavar="KIND",
        read=one_of(BACKENDS),
        choices=BACKENDS,
    )
    imports: tuple[str, ...] = declared(IMPORT, Section.EXTRACTED)
