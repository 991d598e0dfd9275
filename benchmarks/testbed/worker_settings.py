"""The settings of a measured worker, as a JSON file that all workers of a job read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.testbed.shapes import from_json, to_json
from poseidon.plan.shapes import LayerShape


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """The training, the same for every system that is measured.

    Attributes:
        layers: the net.
        batch: images of each worker.
        compute_s: time of one forward and backward pass.
        rate: learning rate.
        momentum: of SGD.
        weight_decay: of SGD.
        steady: the thread that emulates the accelerator has priority, see `control.raise_priority`.
    """

    layers: tuple[LayerShape, ...]
    batch: int
    compute_s: float
    rate: float = 0.001
    momentum: float = 0.9
    weight_decay: float = 0.0005
    steady: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpSettings:
    """The settings of DDP; on one host there is one process without it.

    Attributes:
        bucket_mb: its bucket_cap_mb; None: its default.
        hook: a communication hook, as `hooks.Hook` parses it: `powersgd:2`; empty: none.
    """

    bucket_mb: float | None = None
    hook: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoseidonSettings:
    """The settings of Poseidon.

    Attributes:
        exchange: `hybrid`, `ps`, `svb` or `allreduce`.
        wait_free: gradients leave during the backward pass; False: after it, for contrast.
        servers: number of further hosts that only serve; 0: every host works and serves.
        shards: shards on each host that serves.
        trace: a folder for a trace of every worker and shard; None: none.
    """

    exchange: str = "hybrid"
    wait_free: bool = True
    servers: int = 0
    shards: int = 1
    trace: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The settings of one worker, without its rank.

    Attributes:
        training: the training.
        how: the system.
        control: the measuring process's socket.
        hosts: addresses of the workers' hosts, by rank.
        shards: addresses of the shards, `tcp://host:port` (Poseidon only).
        homes: for each shard the rank of the worker on its host, or -1 - j for serving host j.
        token: the job's secret, hexadecimal.
    """

    training: TrainingSettings
    how: DdpSettings | PoseidonSettings
    control: Path
    hosts: tuple[str, ...]
    shards: tuple[str, ...] = ()
    homes: tuple[int, ...] = ()
    token: str = ""

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.hosts)


def write_settings(settings: WorkerSettings, path: Path) -> None:
    """Write a file for `read_settings`."""
    training, how = settings.training, settings.how
    plain = {
        "training": {**_fields(training), "layers": to_json(training.layers)},
        "ddp" if isinstance(how, DdpSettings) else "poseidon": _fields(how),
        **{name: getattr(settings, name) for name in ("hosts", "shards", "homes", "token")},
        "control": str(settings.control),
    }
    path.write_text(json.dumps(plain, default=str), encoding="utf-8")
    path.chmod(0o600)


def read_settings(path: Path) -> WorkerSettings:
    """Read a file of `write_settings`."""
    plain = json.loads(path.read_text(encoding="utf-8"))
    training = {**plain["training"], "layers": from_json(plain["training"]["layers"])}
    how: DdpSettings | PoseidonSettings
    if "ddp" in plain:
        how = DdpSettings(**plain["ddp"])
    else:
        trace = plain["poseidon"]["trace"]
        how = PoseidonSettings(**{**plain["poseidon"], "trace": Path(trace) if trace else None})
    return WorkerSettings(
        training=TrainingSettings(**training),
        how=how,
        control=Path(plain["control"]),
        hosts=tuple(plain["hosts"]),
        shards=tuple(plain["shards"]),
        homes=tuple(plain["homes"]),
        token=plain["token"],
    )


def _fields(value: TrainingSettings | DdpSettings | PoseidonSettings) -> dict[str, object]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
