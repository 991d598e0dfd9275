"""An exchange that is built, with its parts, and how its worker learns the job's addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from poseidon.exchange.cost import ExchangePlan
from poseidon.exchange.exchange import Exchange
from ps_server import Client, StoreSpec

Connect = Callable[[str], Sequence[str]]
"""Reports the address at which this worker listens for the others, unless it is empty; waits for
the addresses of the job and returns them: of the shards in their order, or where there are none of
all workers, by rank.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """An exchange that is not yet opened, with its parts.

    Attributes:
        store: the store that workers and shards agree on; None without shards.
        tables: for each table of the store the indices of its tensors.
        encoded: indices of the tensors whose gradients lose bits on the way to the shards.
        client: this worker's connection to the shards; None without shards.
        local_steps: iterations of a round of local steps; 0: workers exchange in every iteration.
        recorded: whether `--exchange=auto` has chosen the plan: a resumed run needs the same one.
        most_lead: see `ExchangeOptions.most_lead`.
    """

    exchange: Exchange
    plan: ExchangePlan
    store: StoreSpec | None = None
    tables: Sequence[Sequence[int]] = ()
    encoded: frozenset[int] = frozenset()
    client: Client | None = None
    local_steps: int = 0
    recorded: bool = False
    most_lead: int | None = None
