"""The flags that say how a job's gradients meet; the commands that start training share them."""

from __future__ import annotations

import argparse

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
        flags: those of a job.
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
