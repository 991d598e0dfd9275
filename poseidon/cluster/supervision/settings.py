"""How patient a launcher is, and what signals to it mean.

Law: values only, checked where they are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from poseidon.errors import UsageError


class SignalEffect(Enum):
    """What a signal to the launcher does to training, as Caffe's --sigint_effect and --sighup_effect."""

    STOP = "stop"  # take a snapshot where the solver says so, and end
    SNAPSHOT = "snapshot"  # take a snapshot and go on
    NONE = "none"  # nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionSettings:
    """How patient the launcher is, in seconds, and what signals do.

    Attributes:
        start_timeout_s: until every shard listens and every worker is ready.
        stall_timeout_s: without a sign of life from a process that was ready.
        grace_s: from SIGTERM to SIGKILL.
        collect_s: to wait for a better cause than the first one heard.
        finish_timeout_s: from a process's last task to its exit.
        term_deadline_s: from SIGTERM to the end of the job, its last snapshot included.
        sigint_effect: what Ctrl-C does.
        sighup_effect: what a hang-up does.
    """

    start_timeout_s: float = 180.0
    stall_timeout_s: float = 60.0
    grace_s: float = 3.0
    collect_s: float = 0.5
    finish_timeout_s: float = 30.0
    term_deadline_s: float = 25.0  # Slurm and Kubernetes kill after 30
    sigint_effect: SignalEffect = SignalEffect.STOP
    sighup_effect: SignalEffect = SignalEffect.SNAPSHOT

    def __post_init__(self) -> None:
        for name in ("start_timeout_s", "stall_timeout_s", "finish_timeout_s", "term_deadline_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be more than 0 seconds, not {getattr(self, name)}")
        for name in ("grace_s", "collect_s"):
            if not getattr(self, name) >= 0:
                raise UsageError(f"{name} must not be negative, not {getattr(self, name)}")
