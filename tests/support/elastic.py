"""Workers of one process that outlive their exchanges: an exchange is interrupted, and the next one
goes on with their tensors, maybe with fewer or more of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.build import build_exchange
from poseidon.exchange.exchange import Built, Exchange
from poseidon.exchange.factors.taps import layers_with_factors
from poseidon.exchange.hooks import Hooks
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from poseidon.exchange.replicas import checksum
from ps_server import Client, Rule, RuleKind
from ps_server.protocol.virtual_workers import VirtualWorkers
from tests.support.cluster import job_addresses
from tests.support.machines import member_on

BATCH = 3
RATE = 0.05


class Net(nn.Module):
    """Layers that share a table, one with a table of its own, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.large = nn.Linear(128, 64)
        self.small = nn.Linear(64, 2)
        weights = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.uniform_(-0.2, 0.2, generator=weights)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.conv(x))).flatten(1)
        result: Tensor = self.small(torch.tanh(self.large(x)))
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is trained, and how it is exchanged.

    Args:
        options: of the exchange.
        rule: of every parameter.
        clip: largest norm.
        rows: of factors, for the plan.
    """

    options: ExchangeOptions
    rule: Rule = field(default_factory=lambda: Rule(momentum=0.9, decay=0.01))
    clip: float | None = None
    rows: int = BATCH

    @property
    def kind(self) -> ExchangeKind:
        """The kind of exchange."""
        return self.options.kind


ADAM = Rule(kind=RuleKind.ADAM, momentum=0.9, delta=1e-3)


class Worker:
    """One worker: its net and its tensors."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.net = Net()
        factors = layers_with_factors(self.net)
        self.tensors = [
            Trained(
                name=name, tensor=p, rule=case.rule, factor_rows=case.rows if p in factors else 0
            )
            for name, p in self.net.named_parameters()
        ]
        self.tensors += [
            Trained(name=name, tensor=buffer, statistics=True)
            for name, buffer in self.net.named_buffers()
            if buffer.is_floating_point()
        ]

    def checksums(self) -> list[str]:
        """Return a checksum of each tensor."""
        return [checksum(trained.tensor) for trained in self.tensors]


class Part:
    """A worker's part of one exchange, which is not built yet.

    Attributes:
        interruption: of the exchange.
    """

    def __init__(
        self,
        worker: Worker,
        member: Membership,
        connect: Callable[[str], Sequence[str]],
        clock: int,
    ) -> None:
        self.worker = worker
        self.member = member
        self.interruption = member.network.interruption
        self._connect = connect
        self._clock = clock
        self._hooks: Hooks | None = None
        self.built: Built | None = None

    @property
    def exchange(self) -> Exchange:
        """The exchange, once it is built."""
        assert self.built is not None
        return self.built.exchange

    @property
    def client(self) -> Client:
        """The client of an exchange through the server."""
        assert self.built is not None
        assert self.built.client is not None
        return self.built.client

    def build(self) -> Exchange:
        """Build the exchange."""
        self.built = build_exchange(
            self.worker.tensors,
            ExchangeSettings(clip=self.worker.case.clip, start_clock=self._clock),
            self.member,
            self._connect,
        )
        self._hooks = Hooks([self.worker.net], self.worker.tensors, self.exchange)
        return self.exchange

    def train(self, iteration: int) -> None:
        """Train one iteration; the data of a virtual worker follow from it and from the number."""
        hooks = self._hooks
        assert hooks is not None
        self.exchange.start(iteration, RATE)
        hooks.start()
        for v in self.member.own:
            if v != self.member.own.start:
                hooks.next_virtual_worker()
            draw = torch.Generator().manual_seed(100 * iteration + v)
            x = torch.randn(BATCH, 1, 6, 6, generator=draw)
            y = torch.randn(BATCH, 2, generator=draw)
            nn.functional.mse_loss(self.worker.net(x), y).backward()
            hooks.next_pass()
        hooks.finish()
        self.exchange.finish()

    def close(self) -> None:
        """Close what is built."""
        if self._hooks is not None:
            self._hooks.close()
        if self.built is not None:
            self.exchange.close()


def together(
    workers: Sequence[Worker],
    body: Callable[[Part], None],
    *,
    shards: int = 2,
    placed: VirtualWorkers | None = None,
    local_workers: int = 1,
    clock: int = 0,
) -> list[Part]:
    """Let workers take part in one exchange, each on a thread; return their parts, all closed.

    Args:
        workers: by rank.
        body: what each does; its failure is raised here.
        shards: of an exchange that has any.
        placed: the virtual workers; None: one each.
        local_workers: workers on each host.
        clock: finished iterations.
    """
    case, hosts = workers[0].case, [local_workers] * (len(workers) // local_workers)
    shards = shards if case.kind.has_shards else 0
    failures: list[BaseException] = []

    def run(part: Part) -> None:
        try:
            body(part)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failures.append(error)
        finally:
            part.close()

    with (
        TemporaryDirectory(prefix="p") as folder,
        job_addresses(case.kind, len(workers), shards) as connect,
    ):
        parts = []
        for rank, worker in enumerate(workers):
            member = member_on(
                rank, hosts, folder, shards=shards, virtual_workers=placed, options=case.options
            )
            parts.append(Part(worker, member, connect.of(rank), clock))
        threads = [threading.Thread(target=run, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return parts
