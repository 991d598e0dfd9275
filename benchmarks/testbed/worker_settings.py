"""What a measured worker is told, as a JSON file that all workers of a job read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.testbed.shapes import LayerShape, from_json, to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What to train, and where to meet.

    Attributes:
        layers: the net.
        workers: how many there are.
        batch: images of each.
        compute_s: time of one forward and backward pass.
        control: the measuring process's socket.
        bucket_mb: DDP's bucket_cap_mb; None: its default.
        meeting_host: where DDP's workers meet.
        meeting_port: there.
        wait_free: gradients leave during the backward pass; False: after it, for contrast (ours only).
        rate: learning rate.
        momentum: of SGD.
        weight_decay: of SGD.
    """

    layers: tuple[LayerShape, ...]
    workers: int
    batch: int
    compute_s: float
    control: Path
    bucket_mb: float | None = None
    meeting_host: str = "127.0.0.1"
    meeting_port: int = 29400
    wait_free: bool = True
    rate: float = 0.001
    momentum: float = 0.9
    weight_decay: float = 0.0005


def write_settings(settings: WorkerSettings, path: Path) -> None:
    """For `read_settings`."""
    plain = {name: getattr(settings, name) for name in settings.__dataclass_fields__}
    plain["layers"], plain["control"] = to_json(settings.layers), str(settings.control)
    path.write_text(json.dumps(plain), encoding="utf-8")


def read_settings(path: Path) -> WorkerSettings:
    """What `write_settings` wrote."""
    plain = json.loads(path.read_text(encoding="utf-8"))
    plain["layers"], plain["control"] = from_json(plain["layers"]), Path(plain["control"])
    return WorkerSettings(**plain)
