"""Virtual workers: a job's weights depend on their number alone, whatever the exchange is and
however many processes there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from poseidon.errors import UsageError
from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.build import build_exchange
from poseidon.exchange.exchange import Connect
from poseidon.exchange.factors.taps import layers_with_factors
from poseidon.exchange.hooks import Hooks
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind, ExchangeOptions, Scheme
from poseidon.exchange.replicas import checksum
from ps_server import Precision, Rule, RuleKind
from ps_server.protocol.virtual_workers import VirtualWorkers
from tests.support.cluster import job_addresses
from tests.support.machines import member_on
from tests.support.threads import on_threads

V, BATCH, ITERATIONS = 7, 3, 3
ADAM = Rule(kind=RuleKind.ADAM, momentum=0.9, delta=1e-3)


class Net(nn.Module):
    """Layers that share a table, one with a table of its own, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.large = nn.Linear(128, 64)
        self.small = nn.Linear(64, 2)
        self.unused = nn.Linear(3, 3)
        weights = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.uniform_(-0.2, 0.2, generator=weights)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.conv(x))).flatten(1)
        result: Tensor = self.small(torch.tanh(self.large(x)))
        return result


@dataclass(frozen=True)
class Case:
    kind: ExchangeKind
    clip: float | None = None
    passes: int = 1
    compress: str = ""
    rows: int = BATCH
    rule: Rule = ADAM
    iterations: int = ITERATIONS
    local: Mapping[str, Any] = field(default_factory=dict)


def trained(
    case: Case,
    placed: VirtualWorkers,
    *,
    shards: int,
    local_workers: int = 1,
    hosts: Sequence[int] = (),
) -> tuple[list[str], set[Scheme]]:
    """Return the checksum of each tensor after some iterations, and the schemes.

    Args:
        hosts: workers of each; empty: `local_workers`.
    """
    hosts = hosts or [local_workers] * (placed.processes // local_workers)
    schemes: set[Scheme] = set()

    def train(rank: int, connect: Connect) -> list[str]:
        net = Net()
        factors = layers_with_factors(net)
        tensors = [
            Trained(
                name=name, tensor=p, rule=case.rule, factor_rows=case.rows if p in factors else 0
            )
            for name, p in net.named_parameters()
        ]
        tensors += [
            Trained(name=name, tensor=buffer, statistics=True)
            for name, buffer in net.named_buffers()
            if buffer.is_floating_point()
        ]
        member = member_on(
            rank,
            hosts,
            folder,
            shards=shards,
            virtual_workers=placed,
            options=ExchangeOptions(kind=case.kind, compress=case.compress, **case.local),
        )
        settings = ExchangeSettings(clip=case.clip, gradient_scale=1 / case.passes)
        built = build_exchange(tensors, settings, member, connect)
        schemes.update(choice.scheme for choice in built.plan.choices)
        exchange = built.exchange
        hooks = Hooks([net], tensors, exchange, passes=case.passes)
        try:
            exchange.open(None)
            for iteration in range(case.iterations):
                exchange.start(iteration, 0.05)
                hooks.start()
                for v in member.own:
                    if v != member.own.start:
                        hooks.next_virtual_worker()
                    draw = torch.Generator().manual_seed(100 * iteration + v)
                    for _ in range(case.passes):
                        x = torch.randn(BATCH, 1, 6, 6, generator=draw)
                        y = torch.randn(BATCH, 2, generator=draw)
                        nn.functional.mse_loss(net(x), y).backward()
                        hooks.next_pass()
                hooks.finish()
                exchange.finish()
            exchange.settle()
            return [checksum(trained.tensor) for trained in tensors]
        finally:
            hooks.close()
            exchange.close()

    with (
        TemporaryDirectory(prefix="p") as folder,
        job_addresses(case.kind, placed.processes, shards) as connect,
    ):
        found = on_threads(placed.processes, lambda rank: train(rank, connect.of(rank)))
    assert all(values == found[0] for values in found)
    return found[0], schemes


CASES = {
    "ps": Case(ExchangeKind.SERVER, passes=2),
    "svb, clip": Case(ExchangeKind.FACTORS, clip=0.1),
    "hybrid": Case(ExchangeKind.HYBRID, rows=1, passes=2),
    "ps, clip": Case(ExchangeKind.SERVER, clip=0.1),
    "auto": Case(ExchangeKind.AUTO),
    "allreduce, clip": Case(ExchangeKind.ALLREDUCE, clip=0.1, passes=2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_weights_do_not_depend_on_the_number_of_processes(case: Case) -> None:
    expected, schemes = trained(case, VirtualWorkers((0, V)), shards=0)
    for shards, bounds in ((1, (0, V)), (2, (0, 1, 4, V))):
        found, others = trained(case, VirtualWorkers(tuple(bounds)), shards=shards)
        assert found == expected, bounds
        assert others == schemes
    by_gradient = case.kind in (ExchangeKind.SERVER, ExchangeKind.ALLREDUCE)
    assert (Scheme.FACTORS in schemes) is not by_gradient


ROUNDS = {
    "each step": Case(ExchangeKind.SERVER, passes=2, local={"local_steps": 1}),
    "hybrid, clip": Case(
        ExchangeKind.HYBRID,
        clip=0.1,
        rule=Rule(momentum=0.9, decay=0.01),
        iterations=6,
        local={"local_steps": 4},
    ),
    "allreduce": Case(
        ExchangeKind.ALLREDUCE, iterations=5, local={"local_steps": 2, "outer_nesterov": False}
    ),
    "fragments": Case(
        ExchangeKind.SERVER, iterations=7, local={"local_steps": 4, "sync_fragments": 3}
    ),
    "delay": Case(
        ExchangeKind.SERVER,
        iterations=7,
        local={"local_steps": 4, "sync_fragments": 2, "sync_delay": 2},
    ),
}


@pytest.mark.parametrize("case", ROUNDS.values(), ids=ROUNDS)
def test_local_steps_do_not_depend_on_the_number_of_processes(case: Case) -> None:
    expected, _ = trained(case, VirtualWorkers((0, V)), shards=0)
    for shards, bounds in ((1, (0, V)), (2, (0, 3, V)), (3, range(V + 1))):
        assert trained(case, VirtualWorkers(tuple(bounds)), shards=shards)[0] == expected, bounds


HOSTS = ["ps", "svb, clip", "allreduce, clip"]


@pytest.mark.parametrize(
    "case", [*(CASES[name] for name in HOSTS), ROUNDS["hybrid, clip"]], ids=[*HOSTS, "rounds"]
)
def test_the_workers_of_a_host_add_its_nodes_first(case: Case) -> None:
    expected, _ = trained(case, VirtualWorkers((0, V)), shards=0)
    # in the last case each host has several nodes
    for local_workers, shards, bounds in [(3, 0, (0, 1, 4, V)), (2, 2, (0, 2, 3, 6, V))]:
        placed = VirtualWorkers(bounds)
        assert trained(case, placed, shards=shards, local_workers=local_workers)[0] == expected


@pytest.mark.parametrize(
    "case",
    [
        *(
            Case(ExchangeKind.SERVER, compress=compress)
            for compress in ("topk:0.1/int8", "powersgd:1:int8:start=1")
        ),
        replace(ROUNDS["delay"], compress="int8"),
    ],
    ids=lambda case: f"{case.compress} {'rounds' if case.local else ''}",
)
def test_a_codec_holds_back_for_each_virtual_worker(case: Case) -> None:
    expected, _ = trained(case, VirtualWorkers((0, V)), shards=1)
    for shards, bounds in enumerate([(0, 3, V), range(V + 1)], start=1):
        assert trained(case, VirtualWorkers(tuple(bounds)), shards=shards)[0] == expected


@pytest.mark.parametrize(
    "case",
    [
        Case(ExchangeKind.SERVER, compress="int8", clip=0.1),
        Case(ExchangeKind.HYBRID, rows=1, compress="conv.*=int8"),
        Case(ExchangeKind.SERVER, local={"precision": Precision.BFLOAT16}),
        replace(ROUNDS["hybrid, clip"], compress="topk:0.1/int8"),
        Case(ExchangeKind.SERVER, compress="*=powersgd:1:int8:start=1"),
        Case(ExchangeKind.SERVER, compress="auto", local={"loss_budget": 0.5}),
        replace(ROUNDS["each step"], compress="powersgd:1"),
    ],
    ids=["int8", "factors", "16 bits", "rounds", "low rank, later", "auto", "rounds, low rank"],
)
def test_a_codec_sees_each_virtual_worker_of_the_workers_of_a_host(case: Case) -> None:
    """Also where each worker has one, and where hosts have different numbers of workers."""
    for bounds, hosts in (((0, 1, 4, 6, V), (2, 2)), (range(5), (3, 1))):
        expected, _ = trained(case, VirtualWorkers((0, bounds[-1])), shards=1)
        found, _ = trained(case, VirtualWorkers(tuple(bounds)), shards=2, hosts=hosts)
        assert found == expected, bounds


@pytest.mark.parametrize("case", [CASES["ps"], ROUNDS["each step"], ROUNDS["delay"]])
def test_one_process_without_shards_encodes_nothing(case: Case) -> None:
    case = replace(case, compress="int8")
    with pytest.raises(UsageError, match="one host sends nothing, so with --compress"):
        trained(case, VirtualWorkers((0, V)), shards=0)


def test_what_several_virtual_workers_cannot_do_is_one_sentence() -> None:
    what = "--staleness=1"
    options = ExchangeOptions(kind=ExchangeKind.SERVER, staleness=1, local_steps=2)
    member = Membership(virtual_workers=VirtualWorkers((0, 3)), options=options)
    tensors = [Trained(name="w", tensor=torch.zeros(3))]
    with pytest.raises(
        UsageError, match=f"3 virtual workers on 1 worker cannot be combined with {what}"
    ):
        build_exchange(tensors, ExchangeSettings(), member, list)
