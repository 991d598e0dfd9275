"""Hosts with several workers each, as threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.build import build_exchange
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from ps_server.network import Network
from ps_server.protocol.seats import seats_of
from tests.support.cluster import TIMEOUT_S, TOKEN, job_addresses
from tests.support.exchange_contract import Make


def member_on(rank: int, hosts: Sequence[int], folder: str | Path, **kwargs: Any) -> Membership:
    """Return the membership of a worker of hosts with so many workers each.

    Args:
        folder: where the workers of a host meet.
        kwargs: other fields of `Membership`.
    """
    host = seats_of(tuple(hosts), sum(hosts)).of(rank).host
    folder_of_host = Path(folder) / str(host)
    folder_of_host.mkdir(exist_ok=True)
    shares = max(hosts) > 1
    return Membership(
        network=Network(rank=rank, size=sum(hosts), token=TOKEN, timeout_s=TIMEOUT_S),
        hosts=tuple(hosts) if shares else (),
        local_address=str(folder_of_host / "workers") if shares else "",
        **kwargs,
    )


@contextmanager
def machines(
    kind: ExchangeKind, hosts: Sequence[int], *, shards: int = 2, **options: Any
) -> Iterator[Make]:
    """Return a factory of the exchanges of all workers of hosts with so many workers each."""
    alone = len(hosts) == 1 and shards == 0
    shards = shards if kind.has_shards else 0
    with (
        TemporaryDirectory(prefix="p") as folder,
        job_addresses(ExchangeKind.ALLREDUCE if alone else kind, sum(hosts), shards) as connect,
    ):

        def make(rank: int, tensors: Sequence[Trained], settings: ExchangeSettings) -> Exchange:
            member = member_on(
                rank, hosts, folder, shards=shards, options=ExchangeOptions(kind=kind, **options)
            )
            return build_exchange(tensors, settings, member, connect.of(rank)).exchange

        yield make
        assert not list(Path(folder).glob("*/*"))  # every socket's name has gone
