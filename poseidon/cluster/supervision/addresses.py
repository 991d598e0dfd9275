"""The exchanges of addresses of one job.

Workers get the addresses of the shards as soon as all are known; without shards the addresses of
all workers, where these listen. Later exchanges begin when a worker takes part in one: each shard
then listens at one more address.

Law: pure; reports in, lines out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from poseidon.cluster.events import AddressRound, Among, Bound, Connecting, encode_command
from poseidon.cluster.job_plan import ProcessName
from poseidon.cluster.supervision.state import SendLine


@dataclass(slots=True, kw_only=True)
class _Exchange:
    """One exchange of addresses."""

    known: dict[ProcessName, str] = field(default_factory=dict)
    asked: bool = False
    """Whether the shards listen for it, or soon will."""
    connected: bool = False


class AddressExchanges:
    """What is known of the addresses of a job's processes."""

    def __init__(self, workers: Sequence[ProcessName], shards: Sequence[ProcessName]) -> None:
        self._workers = workers
        self._shards = shards
        # The shards listen for the first one from their start.
        self._exchanges = {AddressRound(): _Exchange(asked=True)}
        self._ended: list[ProcessName] = []

    def take(self, name: ProcessName, event: Bound | Connecting) -> None:
        """Note that a process listens, or needs the addresses."""
        exchange = self._exchanges.setdefault(event.round, _Exchange())
        if isinstance(event, Bound):
            exchange.known[name] = event.address

    def end(self, worker: ProcessName) -> None:
        """Note that a worker takes part in no further exchange."""
        self._ended.append(worker)

    def lines(self) -> list[SendLine]:
        """Return what is due: let the shards listen once more, and send addresses that are all
        known.
        """
        lines: list[SendLine] = []
        for at, exchange in self._exchanges.items():
            if exchange.connected:
                continue
            if at.among is Among.JOB and not exchange.asked:
                exchange.asked = True
                line = encode_command("listen", round=at.number)
                lines += [SendLine(name=shard, line=line) for shard in self._shards]
            listeners = (
                self._workers if at.among is Among.WORKERS else self._shards or self._workers
            )
            known = exchange.known
            if len(known) >= len(listeners) and all(name in known for name in listeners):
                exchange.connected = True
                addresses = [known[name] for name in listeners]
                line = encode_command(
                    "connect", addresses=addresses, round=at.number, among=at.among.value
                )
                lines += [SendLine(name=worker, line=line) for worker in self._workers]
        return lines

    def mismatch(self) -> str | None:
        """Return a sentence about a worker that waits for the addresses of all, while a different
        one has ended without; or None.
        """
        for at, exchange in self._exchanges.items():
            if at.among is Among.WORKERS and exchange.known and not exchange.connected:
                absent = next((name for name in self._ended if name not in exchange.known), None)
                if absent is not None:
                    return (
                        f"worker {next(iter(exchange.known)).index} begins a collective of "
                        f"torch.distributed, but worker {absent.index} has ended without one; all "
                        "workers must make the same calls"
                    )
        return None
