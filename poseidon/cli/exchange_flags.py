"""The flags that say how a job's gradients meet; the commands that start training share them."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from poseidon.errors import UsageError
from poseidon.exchange.cost import ExchangeKind
from ps_server import Consistency, Precision

KIND_OF_SVB = {
    "auto": ExchangeKind.HYBRID,
    "true": ExchangeKind.FACTORS,
    "1": ExchangeKind.FACTORS,
    "yes": ExchangeKind.FACTORS,
    "false": ExchangeKind.SERVER,
    "0": ExchangeKind.SERVER,
    "no": ExchangeKind.SERVER,
}
"""The original's flag, in other words."""
TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def add_exchange_flags(flag: Callable[..., None]) -> None:
    """Add them.

    Args:
        flag: adds one flag, by its name without dashes and the settings of `add_argument`.
    """
    flag(
        "exchange",
        choices=[kind.value for kind in ExchangeKind],
        help="how gradients meet: to the server (ps), fully-connected layers as factors (svb), the cheaper "
        "of both layer by layer (hybrid, the default), by all-reduce, or not at all (local: one worker)",
    )
    flag("svb", choices=list(KIND_OF_SVB), help="true: --exchange=svb; false: --exchange=ps; auto: hybrid")
    flag(
        "consistency_model",
        default=Consistency.SSP_PUSH.value,
        choices=[member.value for member in Consistency],
        help="how values reach the workers (SSPPush)",
    )
    flag(
        "client_bandwidth_mbps",
        type=_positive,
        metavar="F",
        help="with SSPAggr: megabits a second in which each client may send changes before the staleness bound asks "
        "for them; what it asks for leaves in any case; default: no limit",
    )
    flag(
        "wire_precision",
        default=Precision.FLOAT32.value,
        choices=[member.value for member in Precision],
        help="of gradients and values on the wire (float32)",
    )
    flag(
        "wait_free",
        type=_truth,
        default=True,
        metavar="true|false",
        help="gradients leave while the backward pass still runs (true)",
    )
    flag(
        "trace",
        type=_truth,
        nargs="?",
        const=True,
        default=False,
        metavar="true|false",
        help="write what every process does when to <output>/trace_*.json, for chrome://tracing or Perfetto",
    )


def exchange_kind(flags: argparse.Namespace) -> ExchangeKind:
    """What --exchange and --svb ask for together.

    Raises:
        UsageError: they contradict each other.
    """
    by_svb = KIND_OF_SVB[flags.svb] if flags.svb else None
    if flags.exchange is None:
        return by_svb or ExchangeKind.HYBRID
    kind = ExchangeKind(flags.exchange)
    if by_svb not in (None, kind):
        raise UsageError(
            f"--svb={flags.svb} means --exchange={by_svb.value}, and --exchange={kind.value} is asked for too; "
            "give one of them"
        )
    return kind


def check_exchange(flags: argparse.Namespace, clients: int) -> None:
    """Refuse what cannot be together.

    Args:
        flags: those of `add_exchange_flags`, and `table_staleness`.
        clients: number of clients with workers.

    Raises:
        UsageError: in one sentence, what and why.
    """
    kind = exchange_kind(flags)
    if kind is ExchangeKind.LOCAL and clients > 1:
        raise UsageError(f"--exchange=local is for one client; this job has {clients}")
    if kind is ExchangeKind.ALLREDUCE and flags.table_staleness:
        raise UsageError(
            f"--exchange=allreduce has no staleness; expected 0, not --table_staleness={flags.table_staleness}"
        )
    if kind is ExchangeKind.ALLREDUCE and flags.wire_precision != Precision.FLOAT32.value:
        raise UsageError(f"--exchange=allreduce sends float32; expected that, not {flags.wire_precision}")
    if flags.client_bandwidth_mbps is not None and flags.consistency_model != Consistency.SSP_AGGR.value:
        raise UsageError(
            f"--client_bandwidth_mbps is for --consistency_model=SSPAggr, not {flags.consistency_model}"
        )


def _truth(text: str) -> bool:
    if text.lower() not in TRUTH:
        raise argparse.ArgumentTypeError(f"'{text}' is neither true nor false")
    return TRUTH[text.lower()]


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return value
