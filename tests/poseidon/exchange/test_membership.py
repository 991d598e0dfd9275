"""Virtual workers that a job cannot have."""

from __future__ import annotations

from typing import Any

import pytest

from poseidon.errors import UsageError
from poseidon.exchange.kinds import ExchangeKind
from poseidon.exchange.membership import check_virtual_workers
from poseidon.exchange.options import ExchangeOptions
from ps_server.protocol.virtual_workers import VirtualWorkers


def check(bounds: tuple[int, ...], local_workers: int = 1, **options: Any) -> None:
    check_virtual_workers(VirtualWorkers(bounds), ExchangeOptions(**options), local_workers)


@pytest.mark.parametrize(
    ("bounds", "local_workers", "options"),
    [
        ((0, 1), 1, {}),
        ((0, 3, 5, 7), 1, {}),
        ((0, 1, 2, 3), 1, {"staleness": 2}),
        ((0, 1, 2, 3), 1, {"sync_every": 4}),
        ((0, 1, 2, 3, 4), 2, {"compress": "powersgd:2"}),
        ((0, 6, 12), 1, {"compress": "int8"}),
        ((0, 6, 12), 1, {"compress": "powersgd:2"}),
        ((0, 6, 12), 2, {}),
    ],
)
def test_what_a_job_can_have(
    bounds: tuple[int, ...], local_workers: int, options: dict[str, Any]
) -> None:
    check(bounds, local_workers, **options)


@pytest.mark.parametrize(
    ("local_workers", "options", "message"),
    [
        (1, {"staleness": 1}, r"with --table_staleness=1: bits depend on arrival; expected --v"),
        (1, {"sync_every": 8}, r"with --sync_every=8: each worker trains alone; "),
        (1, {"kind": ExchangeKind.ALLREDUCE}, r"with --exchange=allreduce: its sums depend on"),
        (2, {"compress": "int8"}, r"with --compress=int8 and 2 workers on each client: they add"),
    ],
)
def test_what_it_cannot_have(local_workers: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=r"^4 virtual workers on 2 workers .*" + message):
        check((0, 2, 4), local_workers, **options)
