"""Hosts with several workers each, as threads; the test chooses the exchange between hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.local.follower import FollowerCarrier
from poseidon.exchange.local.group import HostTree, LocalGroup
from poseidon.exchange.local.leader import LeaderCarrier
from poseidon.exchange.local.reduction import ReductionKind
from ps_server.network import Network
from tests.support.exchange_contract import Make
from tests.support.threads import on_threads

TIMEOUT_S = 20.0


@contextmanager
def machines(
    inner: Make,
    local_workers: int,
    *,
    reduction: ReductionKind | None = None,
) -> Iterator[Make]:
    """Return a factory of exchanges for all workers of hosts; `inner` creates the exchange
    between hosts, by the host's rank.
    """
    with TemporaryDirectory(prefix="p") as folder:

        def make(rank: int, tensors: Sequence[Trained], settings: ExchangeSettings) -> Exchange:
            machine, local = divmod(rank, local_workers)
            folder_of_host = Path(folder) / f"{machine}"
            folder_of_host.mkdir(exist_ok=True)
            group = LocalGroup(
                address=str(folder_of_host / "workers"),
                network=Network(rank=local, size=local_workers, timeout_s=TIMEOUT_S),
                tree=HostTree.mean(local_workers),
            )
            if local:
                follower = FollowerCarrier(tensors, group)
                return Exchange(
                    [follower], follower.control, settings, interruption=group.network.interruption
                )
            between = inner(machine, tensors, settings)
            leader = LeaderCarrier(between, tensors, group, reduction=reduction)
            return Exchange(
                [leader], leader.control, settings, interruption=group.network.interruption
            )

        yield make
        assert list(Path(folder).iterdir()) == []  # every socket's name has gone, and its folder


def run_workers(
    make: Make,
    workers: int,
    body: Callable[[Exchange, list[Trained], int], None],
    *,
    tensors: Callable[[], list[Trained]],
    settings: ExchangeSettings | None = None,
) -> None:
    """Run `body(exchange, its tensors, rank)` for every worker on a thread; raise the first
    failure.
    """

    def run(rank: int) -> None:
        own = tensors()
        exchange = make(rank, own, settings or ExchangeSettings())
        try:
            body(exchange, own, rank)
        finally:
            exchange.close()

    on_threads(workers, run)
