"""From flags to the request of a job; `poseidon.cli.net_requests` has those for a net.

Law: a field of a request declares its flag, so a new flag changes nothing here. This module imports
no torch: a command that only starts processes starts fast.
"""

from __future__ import annotations

import argparse
from typing import TypeVar

from poseidon.errors import UsageError
from poseidon.exchange.kinds import ExchangeKind
from poseidon.exchange.options import DEFAULT_OPTIONS, ExchangeOptions
from poseidon.flags.flag import values_of
from poseidon.launcher.request import JobRequest

AnyJobRequest = TypeVar("AnyJobRequest", bound=JobRequest)


def job_request(kind: type[AnyJobRequest], flags: argparse.Namespace) -> AnyJobRequest:
    """Return what a command line asks of a job.

    Raises:
        UsageError: a value is out of range, or two flags exclude each other.
    """
    exchange = {**values_of(ExchangeOptions, flags), "kind": exchange_kind(flags)}
    return kind(
        argv=tuple(flags.argv),
        exchange=ExchangeOptions(**exchange),
        server_requested=flags.exchange not in (None, ExchangeKind.AUTO, ExchangeKind.LOCAL),
        **values_of(kind, flags),
    )


def exchange_kind(flags: argparse.Namespace) -> ExchangeKind:
    """Return what --exchange and --svb ask for together.

    Raises:
        UsageError: they contradict each other.
    """
    by_svb = {True: ExchangeKind.FACTORS, False: ExchangeKind.SERVER}.get(flags.svb)
    if flags.exchange is None:
        return by_svb or DEFAULT_OPTIONS.kind
    kind: ExchangeKind = flags.exchange
    if by_svb not in (None, kind):
        raise UsageError(
            f"--svb={str(flags.svb).lower()} means --exchange={by_svb.value}, and --exchange={kind.value} is "
            "asked for too; give one of them"
        )
    return kind
