"""What a user asks of a job, as frozen values.

Law: each field has the name of its flag, so that `poseidon.cli.requests` reads all of them alike: a
new flag of `train` is a flag in `poseidon/cli/parsers/jobs.py`, a field here (or, if it acts in the
workers, in `TrainingOptions`), and the place where it acts. A field whose value is not that of the
flag names the function that converts it. Ranges are checked here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from poseidon.cluster.machinefile import HIGHEST_PORT
from poseidon.cluster.supervision.restarts import RestartSettings
from poseidon.cluster.supervision.state import SignalEffect, SupervisionSettings
from poseidon.engine.document import TrainingOptions
from poseidon.errors import UsageError
from poseidon.exchange.options import DEFAULT_OPTIONS, ExchangeOptions
from poseidon.layers.user_modules import module_names
from poseidon.metrics.progress import ShownProgress

START_TIMEOUT_S = 180.0
CONVERT = "convert"
"""The key, in a field's metadata, of the function from the flag's value to the field's."""


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
    """A value of --show_logs."""

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


def _by(convert: Callable[[Any], object]) -> Mapping[str, Any]:
    return {CONVERT: convert}


def _tuple(values: Iterable[str] | None) -> tuple[str, ...]:
    return tuple(values or ())


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def _parts(text: str) -> tuple[str, ...]:
    return tuple(name for part in text.split(",") if (name := part.strip()))


def _paths(text: str) -> tuple[Path, ...]:
    return tuple(map(Path, _parts(text)))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """What every job is asked for.

    Attributes:
        argv: the arguments of `poseidon`, the command first.
        hostfile: the machinefile; None: this machine alone.
        gpu: device numbers with commas, `all`, or empty: --gpu.
        num_app_threads: workers of each client on CPU; at least 1.
        threads: CPU threads of a worker, at least 1; None: an equal part of its host's.
        num_comm_channels_per_client: shards of each client.
        launcher: how processes are started.
        ssh_config: in place of ~/.ssh/config.
        ray_address: `host:port` of a Ray cluster; None: $RAY_ADDRESS, else the one on this machine.
        clients: nodes with workers that Ray is asked for, at least 1; None: as the machinefile
            says, else 1.
        servers: nodes with shards alone that Ray is asked for; at least 0.
        ray_resources: resources of a client with workers.
        ray_server_resources: resources of a client with shards alone.
        ray_timeout: seconds to wait for Ray's nodes at the start; at least 0.
        encrypt: when connections are encrypted.
        exchange: how gradients are exchanged.
        server_requested: whether an exchange that uses shards was asked for by name.
        trace: whether each process writes a trace.
        output: the job's folder; None: output/<job>.
        tensorboard_dir: folder of TensorBoard's files; None: none are written.
        metrics_port: on loopback, for Prometheus; 0: a free one; None: nothing is served.
        dashboard: whether a page of the job is served as long as it runs.
        show_logs: whose logs are shown.
        progress: how the progress is shown.
        progress_interval: seconds between progress lines; 0: none.
        background: whether the command returns once the job runs.
        job: the job's id; None: a new one.
        sigint_effect: what Ctrl-C does.
        sighup_effect: what a hang-up does.
        max_restarts: most restarts; None: as the kind of job decides.
        return_timeout: seconds that a restart waits for lost hosts; at least 0.
        stall_timeout: seconds after which a process that hangs has failed; above 0.
        term_deadline: seconds from SIGTERM to the job's end; above 0.
        snapshot: a file, a job's id or its folder to resume from; empty: a new run.

    Raises:
        UsageError: a number is out of range; the text names its flag.
    """

    argv: tuple[str, ...] = field(default=(), metadata=_by(_tuple))
    hostfile: str | None = None
    gpu: str = ""
    num_app_threads: int = 1
    threads: int | None = None
    num_comm_channels_per_client: int = 1
    launcher: LauncherKind = field(default=LauncherKind.AUTO, metadata=_by(LauncherKind))
    ssh_config: Path | None = field(default=None, metadata=_by(_path))
    ray_address: str | None = None
    clients: int | None = None
    servers: int = 0
    ray_resources: str = ""
    ray_server_resources: str = ""
    ray_timeout: float = 300.0
    encrypt: Encrypt = field(default=Encrypt.AUTO, metadata=_by(Encrypt))
    exchange: ExchangeOptions = DEFAULT_OPTIONS
    server_requested: bool = False
    trace: bool = False
    output: Path | None = field(default=None, metadata=_by(_path))
    tensorboard_dir: Path | None = field(default=None, metadata=_by(_path))
    metrics_port: int | None = None
    dashboard: bool = False
    show_logs: ShownLogs = field(default=ShownLogs.FIRST, metadata=_by(ShownLogs))
    progress: ShownProgress = field(default=ShownProgress.AUTO, metadata=_by(ShownProgress))
    progress_interval: float = 60.0
    background: bool = False
    job: str | None = None
    sigint_effect: SignalEffect = field(default=SignalEffect.STOP, metadata=_by(SignalEffect))
    sighup_effect: SignalEffect = field(default=SignalEffect.SNAPSHOT, metadata=_by(SignalEffect))
    max_restarts: int | None = None
    return_timeout: float = 180.0
    stall_timeout: float = 120.0
    term_deadline: float = 25.0
    snapshot: str = ""

    def __post_init__(self) -> None:
        if self.num_app_threads < 1:
            raise UsageError(f"--num_app_threads is {self.num_app_threads}, expected 1 or more")
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"--threads={self.threads}: expected 1 or more")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= HIGHEST_PORT:
            raise UsageError(
                f"--metrics_port={self.metrics_port}: expected 0 (a free port) to {HIGHEST_PORT}"
            )
        if not self.progress_interval >= 0:
            raise UsageError(
                f"--progress_interval={self.progress_interval:g}: expected 0 (no lines) or more "
                "seconds"
            )
        if not self.ray_timeout >= 0:
            raise UsageError(f"--ray_timeout={self.ray_timeout:g}: expected 0 seconds or more")
        self._check_ray()
        if not self.return_timeout >= 0:
            raise UsageError(
                f"--return_timeout={self.return_timeout:g}: expected 0 seconds or more"
            )
        for name in ("stall_timeout", "term_deadline"):
            if not getattr(self, name) > 0:
                raise UsageError(f"--{name}={getattr(self, name):g}: expected more than 0 seconds")

    def _check_ray(self) -> None:
        """Refuse flags of Ray's launcher without it, and a number of clients beside a
        machinefile.
        """
        if self.launcher is not LauncherKind.RAY:
            unset = {
                "ray_address": None,
                "clients": None,
                "servers": 0,
                "ray_resources": "",
                "ray_server_resources": "",
            }
            given = next(
                (name for name, value in unset.items() if getattr(self, name) != value), None
            )
            if given:
                raise UsageError(
                    f"--{given} is for --launcher=ray; other launchers read --hostfile"
                )
        elif self.clients is not None and self.clients < 1:
            raise UsageError(f"--clients={self.clients}: expected 1 or more")
        elif self.hostfile and (self.clients is not None or self.servers):
            raise UsageError(
                "--hostfile and --clients exclude each other: the machinefile names the clients"
            )

    def restart_settings(self, usual: int) -> RestartSettings:
        """Return how often the job restarts.

        Args:
            usual: the number of restarts without --max_restarts.
        """
        most = usual if self.max_restarts is None else self.max_restarts
        return RestartSettings(max_restarts=most, return_timeout_s=self.return_timeout)

    def supervision_settings(self) -> SupervisionSettings:
        """Return the job's time limits and the effects of signals."""
        return SupervisionSettings(
            term_deadline_s=self.term_deadline,
            start_timeout_s=START_TIMEOUT_S,
            stall_timeout_s=self.stall_timeout,
            sigint_effect=self.sigint_effect,
            sighup_effect=self.sighup_effect,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest(JobRequest, TrainingOptions):
    """What `poseidon train` is asked for, with the options of `TrainingOptions`, which act in
    the workers.

    Attributes:
        solver: the solver definition.
        weights: models to start from, later ones over earlier ones.
        level: of the train net, for its include rules; None: the solver's.
        stage: stages of the train net, beyond the solver's.
        imports: Python modules that register layers.
        settings: fields of the solver that replace the file's.
        net_outputs: prefix of the file of averaged losses and scores; empty: in the job's folder.
        on_nan: what a loss or weights that are not finite do.
    """

    solver: Path = field(default_factory=Path, metadata=_by(Path))
    weights: tuple[Path, ...] = field(default=(), metadata=_by(_paths))
    level: int | None = None
    stage: tuple[str, ...] = field(default=(), metadata=_by(_parts))
    imports: tuple[str, ...] = field(default=(), metadata=_by(module_names))
    settings: tuple[str, ...] = field(default=(), metadata=_by(_tuple))
    net_outputs: str = ""
    on_nan: OnNan = field(default=OnNan.STOP, metadata=_by(OnNan))

    def __post_init__(self) -> None:
        JobRequest.__post_init__(self)
        if self.snapshot and self.weights:
            raise UsageError(
                "--snapshot and --weights exclude each other: resume a run, or start from a model"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRequest(JobRequest):
    """What `poseidon run` is asked for.

    Attributes:
        script: the script.
        arguments: its own arguments.
    """

    script: Path = field(default_factory=Path, metadata=_by(Path))
    arguments: tuple[str, ...] = field(default=(), metadata=_by(_tuple))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractionRequest:
    """What `poseidon extract_features` is asked for as a job.

    Attributes:
        model: the net definition.
        weights: models, later ones over earlier ones.
        extract_feature_blob_names: the features.
        save_feature_dataset_names: a database for each feature.
        num_mini_batches: most batches of a worker; 0: all.
        backend: leveldb or lmdb.
        imports: Python modules that register layers.
        hostfile: the machinefile; None: this machine alone.
        gpu: see `JobRequest`.
        num_app_threads: see `JobRequest`.
        output: the folder of logs; None: output/<job>.
        job: the job's id; None: a new one.
        progress: see `JobRequest`.
    """

    model: Path = field(default_factory=Path, metadata=_by(Path))
    weights: tuple[Path, ...] = field(default=(), metadata=_by(_paths))
    extract_feature_blob_names: tuple[str, ...] = field(default=(), metadata=_by(_parts))
    save_feature_dataset_names: tuple[str, ...] = field(default=(), metadata=_by(_parts))
    num_mini_batches: int = 0
    backend: str = "leveldb"
    imports: tuple[str, ...] = field(default=(), metadata=_by(module_names))
    hostfile: str | None = None
    gpu: str = ""
    num_app_threads: int = 1
    output: Path | None = field(default=None, metadata=_by(_path))
    job: str | None = None
    progress: ShownProgress = field(default=ShownProgress.AUTO, metadata=_by(ShownProgress))

    def __post_init__(self) -> None:
        if self.num_app_threads < 1:
            raise UsageError(f"--num_app_threads is {self.num_app_threads}, expected 1 or more")
