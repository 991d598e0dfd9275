"""The flags that say how a job's gradients meet; the commands that start training share them."""

from __future__ import annotations

import argparse

from poseidon.errors import UsageError
from poseidon.exchange.cost import ExchangeKind
from poseidon.exchange.options import ExchangeOptions

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


def exchange_options(flags: argparse.Namespace) -> ExchangeOptions:
    """What a command line asks of the exchange.

    Raises:
        UsageError: two flags contradict each other.
    """
    return ExchangeOptions.from_flags(flags, kind=exchange_kind(flags))


def check_clients(options: ExchangeOptions, clients: int) -> None:
    """Refuse an exchange for one client in a job of several.

    Raises:
        UsageError: the exchange is local and there are several.
    """
    if options.kind is ExchangeKind.LOCAL and clients > 1:
        raise UsageError(f"--exchange=local is for one client; this job has {clients}")
