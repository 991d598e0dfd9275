"""The settings of a measured worker, as a JSON file that all workers of a job read."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from benchmarks.testbed.shapes import from_json, to_json
from poseidon.errors import UsageError
from poseidon.exchange.options import DEFAULT_OPTIONS, ExchangeKind, ExchangeOptions
from poseidon.observe.plan.shapes import LayerShape
from ps_server import Precision

EXCHANGES = tuple(kind.value for kind in ExchangeKind if kind is not ExchangeKind.LOCAL)
DEFAULT = "default"
HALVES = (Precision.FLOAT16.value, Precision.BFLOAT16.value)
ROUNDS = {"H": "local_steps", "P": "sync_fragments", "D": "sync_delay"}
"""The letters of local steps in the text of a job, and their fields."""


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
        emulated_update: the optimizer of a worker (DDP, local steps) changes nothing and takes no
            time. On an accelerator it is short beside the passes, on this machine's processors it
            is not.
        computed: one of `computed.COMPUTED`, which is really computed; empty: emulated layers.
    """

    layers: tuple[LayerShape, ...]
    batch: int
    compute_s: float
    rate: float = 0.001
    momentum: float = 0.9
    weight_decay: float = 0.0005
    steady: bool = False
    emulated_update: bool = False
    computed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpSettings:
    """The settings of DDP; on one host there is one process without it.

    Attributes:
        bucket_mb: its bucket_cap_mb; None: its default.
        hook: what replaces its all-reduce, as `hooks.Hook` parses it: `powersgd:2`; empty: nothing.
        alone: one process on the first host, without DDP, whatever the number of hosts.
    """

    bucket_mb: float | None = None
    hook: str = ""
    alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoseidonSettings:
    """The settings of Poseidon.

    Attributes:
        exchange: one of `EXCHANGES`.
        in_clear: traffic between hosts is not encrypted.
        wait_free: gradients leave during the backward pass; False: after it, for contrast.
        servers: number of further hosts that only serve; 0: every host works and serves.
        shards: shards on each host that serves.
        trace: a folder for a trace of every worker and shard; None: none.
        compress: lossy codecs, as `--compress` takes them; empty: none.
        precision: of gradients and values on the wire.
        local_steps: H, iterations of a round of local steps; 0: workers exchange in every iteration.
        sync_fragments: P, parts of the tensors that are exchanged at different iterations of a
            round.
        sync_delay: D, local steps while a part travels.
    """

    exchange: str = "hybrid"
    in_clear: bool = False
    wait_free: bool = True
    servers: int = 0
    shards: int = 1
    trace: Path | None = None
    compress: str = ""
    precision: str = Precision.FLOAT32.value
    local_steps: int = 0
    sync_fragments: int = 1
    sync_delay: int = 0

    @classmethod
    def parse(cls, text: str) -> PoseidonSettings:
        """Return the job of `EXCHANGE[+CODEC...][+float16|bfloat16][+H32[+P4][+D8]]`, such as
        `hybrid+powersgd:4+int8`. The exchange `default` is as in a job without flags.

        Raises:
            UsageError: a word is not one of these, or the words exclude each other.
        """
        exchange, *words = text.split("+")
        if exchange == DEFAULT:
            exchange = DEFAULT_OPTIONS.kind.value
        if exchange not in EXCHANGES:
            raise UsageError(f"'{exchange}' is none of {', '.join((DEFAULT, *EXCHANGES))}")
        rounds = {
            ROUNDS[word[0]]: int(word[1:])
            for word in words
            if re.fullmatch("[HPD][0-9]{1,6}", word)
        }
        others = [word for word in words if not re.fullmatch("[HPD][0-9]{1,6}", word)]
        precision = next((word for word in others if word in HALVES), Precision.FLOAT32.value)
        codecs = [word for word in others if word not in HALVES]
        how = cls(exchange=exchange, compress=",".join(codecs), precision=precision, **rounds)
        _ = how.options  # which checks them
        return how

    @property
    def name(self) -> str:
        """The text that `parse` takes, without servers and the like."""
        words = [self.exchange, *filter(None, self.compress.split(","))]
        words += [self.precision] if self.precision in HALVES else []
        words += [f"H{self.local_steps}"] if self.local_steps else []
        words += [f"P{self.sync_fragments}"] if self.sync_fragments > 1 else []
        words += [f"D{self.sync_delay}"] if self.sync_delay else []
        return "+".join(words)

    @property
    def lossy(self) -> bool:
        """Whether the weights differ from synchronous float32's by more than rounding."""
        return bool(self.compress) or self.precision in HALVES or self.local_steps > 0

    @property
    def options(self) -> ExchangeOptions:
        """The options of its exchange.

        Raises:
            UsageError: two of them exclude each other.
        """
        return ExchangeOptions(
            kind=ExchangeKind(self.exchange),
            wait_free=self.wait_free,
            check_replicas=0,
            compress=self.compress,
            precision=Precision(self.precision),
            local_steps=self.local_steps,
            sync_fragments=self.sync_fragments,
            sync_delay=self.sync_delay,
        )


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
        port: of rank 0's rendezvous (DDP only).
    """

    training: TrainingSettings
    how: DdpSettings | PoseidonSettings
    control: Path
    hosts: tuple[str, ...]
    shards: tuple[str, ...] = ()
    homes: tuple[int, ...] = ()
    token: str = ""
    port: int = 0

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.hosts)

    @property
    def encrypted(self) -> bool:
        """Whether each worker and shard has keys (`keys_file`)."""
        how = self.how
        return isinstance(how, PoseidonSettings) and self.workers > 1 and not how.in_clear

    def keys_file(self, role: str, index: int) -> Path:
        """Return the file of a process's keys.

        Args:
            role: `worker` or `shard`.
            index: its rank, or its number.
        """
        return self.control.parent / f"{role}_{index}.keys"


def write_settings(settings: WorkerSettings, path: Path) -> None:
    """Write a file for `read_settings`."""
    training, how = settings.training, settings.how
    plain = {
        "training": {**_fields(training), "layers": to_json(training.layers)},
        "ddp" if isinstance(how, DdpSettings) else "poseidon": _fields(how),
        **{name: getattr(settings, name) for name in ("hosts", "shards", "homes", "token", "port")},
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
        port=plain["port"],
    )


def _fields(value: TrainingSettings | DdpSettings | PoseidonSettings) -> dict[str, object]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
