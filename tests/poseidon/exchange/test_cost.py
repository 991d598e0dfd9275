"""The cost rule against the published tables, against flows counted one by one, and the plan
made of it.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import nn

from poseidon.errors import UsageError
from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.build import plan_exchange
from poseidon.exchange.cost import (
    Topology,
    allreduce_bytes,
    choose,
    factor_bytes,
    human_bytes,
    server_bytes,
)
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind, ExchangeOptions, Scheme
from poseidon.exchange.server.store import store_spec, table_spec
from ps_server import CodecPair, Consistency, Precision
from ps_server.network import Network

MEGA_FLOATS = 4_000_000


def tensor(name: str, *shape: int, rows: int = 0, statistics: bool = False) -> Trained:
    parameter = nn.Parameter(torch.empty(shape, device="meta"))
    return Trained(name=name, tensor=parameter, factor_rows=rows, statistics=statistics)


VGG = [
    tensor("conv5_4", 512, 512, 3, 3),
    tensor("conv5_4 bias", 512),
    tensor("fc6", 4096, 25088, rows=32),
    tensor("fc6 bias", 4096),
    tensor("fc7", 4096, 4096, rows=32),
    tensor("fc8", 1000, 4096, rows=32),
]


@pytest.mark.parametrize(
    ("n", "m", "rows", "workers", "server", "factors"),
    [
        (4096, 25088, 32, 8, 359.7, 13.1),
        (4096, 4096, 32, 8, 58.7, 3.7),
        (1000, 1024, 32, 32, 4.0, 4.0),
        (1000, 1024, 128, 8, 3.6, 3.6),
    ],
)
def test_poseidons_own_examples(
    n: int, m: int, rows: int, workers: int, server: float, factors: float
) -> None:
    assert server_bytes(n * m, Topology.colocated(workers)) / MEGA_FLOATS == pytest.approx(
        server, abs=0.06
    )
    assert factor_bytes(rows, n, m, workers) / MEGA_FLOATS == pytest.approx(factors, abs=0.06)


def busiest_link(elements: int, topology: Topology) -> Fraction:
    """Bytes on each machine's link, flow by flow: every worker and every other machine's shards."""
    machines = [*topology.worker_loads, *topology.server_loads]
    carried = [Fraction(0) for _ in machines]
    for worker in range(topology.workers):
        for home, share in enumerate(machines):
            if home != worker:
                part = Fraction(share * elements * 4, topology.total_load)
                for machine in (worker, home):
                    carried[machine] += 2 * part  # the gradient there, the value back
    return max(carried)


def dedicated(workers: int, servers: int) -> Topology:
    """A cluster whose hosts either have workers or serve, with equal loads."""
    return Topology(worker_loads=(0,) * workers, server_loads=(1,) * servers)


@pytest.mark.parametrize(
    "topology",
    [
        *(Topology.colocated(workers) for workers in (1, 2, 3, 8)),
        *(dedicated(workers, servers) for workers, servers in ((1, 1), (4, 4), (4, 8), (5, 2))),
        Topology(worker_loads=(1, 1, 1, 1), server_loads=(3, 3)),
        Topology(worker_loads=(2, 0, 1, 0), server_loads=(1,)),
        Topology(worker_loads=(1, 0, 0)),
    ],
    ids=str,
)
def test_the_servers_bytes_are_the_flows(topology: Topology) -> None:
    assert 0 <= server_bytes(12_345, topology) - busiest_link(12_345, topology) < 1


def test_dedicated_servers_leave_a_worker_one_model_each_way() -> None:
    assert server_bytes(1000, dedicated(4, 4)) == 2 * 1000 * 4
    assert server_bytes(1000, dedicated(4, 1)) == 2 * 4 * 1000 * 4


@pytest.mark.parametrize(
    ("there", "back", "part"),
    [
        (Precision.FLOAT16, Precision.BFLOAT16, 0.5),
        (Precision.FLOAT16, Precision.FLOAT32, 0.75),
        (Precision.FLOAT32, Precision.FLOAT32, 1.0),
    ],
)
def test_half_precision_halves_the_servers_bytes(
    there: Precision, back: Precision, part: float
) -> None:
    fc7 = [tensor("fc7", 4096, 4096)]
    full = choose(fc7, ExchangeKind.SERVER, Topology.colocated(4)).choices[0].bytes
    plan = choose(fc7, ExchangeKind.SERVER, Topology.colocated(4), gradients=there, values=back)
    assert plan.choices[0].bytes == part * full


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_a_ring_moves_as_much_as_colocated_shards(workers: int) -> None:
    elements = 840 * 8
    assert allreduce_bytes(elements, workers) == server_bytes(elements, Topology.colocated(workers))


def test_hybrid_takes_the_cheaper_way() -> None:
    plan = choose(VGG, ExchangeKind.HYBRID, Topology.colocated(8))
    assert plan.of(Scheme.FACTORS) == (2, 4, 5)
    assert plan.of(Scheme.SERVER) == (0, 1, 3)
    fc7 = plan.choices[4]
    assert fc7.bytes == fc7.factor_bytes == factor_bytes(32, 4096, 4096, 8)
    assert plan.bytes == sum(choice.bytes for choice in plan.choices)


@pytest.mark.parametrize(("rows", "scheme"), [(512, Scheme.FACTORS), (513, Scheme.SERVER)])
def test_the_break_even_of_fc7_is_a_total_batch_of_4096(rows: int, scheme: Scheme) -> None:
    plan = choose(
        [tensor("fc7", 4096, 4096, rows=rows)], ExchangeKind.HYBRID, Topology.colocated(8)
    )
    assert plan.choices[0].scheme is scheme


def test_dedicated_servers_and_half_precision_move_the_break_even() -> None:
    fc7 = [tensor("fc7", 4096, 4096, rows=400)]
    hybrid = ExchangeKind.HYBRID
    assert choose(fc7, hybrid, Topology.colocated(8)).choices[0].scheme is Scheme.FACTORS
    assert choose(fc7, hybrid, dedicated(8, 8)).choices[0].scheme is Scheme.SERVER
    half = choose(
        fc7, hybrid, Topology.colocated(8), gradients=Precision.FLOAT16, values=Precision.FLOAT16
    )
    assert half.choices[0].scheme is Scheme.SERVER


@pytest.mark.parametrize(
    ("kind", "factors", "rest"),
    [
        (ExchangeKind.FACTORS, (2, 4, 5), Scheme.SERVER),
        (ExchangeKind.SERVER, (), Scheme.SERVER),
        (ExchangeKind.ALLREDUCE, (), Scheme.ALLREDUCE),
        (ExchangeKind.LOCAL, (), Scheme.LOCAL),
    ],
)
def test_a_job_may_ask_for_one_way(
    kind: ExchangeKind, factors: tuple[int, ...], rest: Scheme
) -> None:
    plan = choose(VGG, kind, Topology.colocated(64))
    assert plan.of(Scheme.FACTORS) == factors
    assert plan.of(rest) == tuple(i for i in range(len(VGG)) if i not in factors)


@pytest.mark.parametrize("kind", [ExchangeKind.FACTORS, ExchangeKind.HYBRID])
def test_only_matrices_with_factors_and_no_statistics_take_them(kind: ExchangeKind) -> None:
    tensors = [
        tensor("shared", 4096, 4096),
        tensor("mean", 64, 64, rows=1, statistics=True),
        tensor("conv", 64, 3, 3, 3, rows=1),
    ]
    plan = choose(tensors, kind, Topology.colocated(2))
    assert {choice.scheme for choice in plan.choices} == {Scheme.SERVER}
    assert {choice.factor_bytes for choice in plan.choices} == {None}


@pytest.mark.parametrize("kind", list(ExchangeKind))
def test_one_worker_has_nobody_to_send_factors_to(kind: ExchangeKind) -> None:
    alone = Topology(worker_loads=(0,))
    assert choose(VGG, kind, alone).of(Scheme.LOCAL) == tuple(range(len(VGG)))
    served = choose(VGG, kind, dedicated(1, 1))
    expected = Scheme.LOCAL if kind is ExchangeKind.LOCAL else Scheme.SERVER
    assert served.of(expected) == tuple(range(len(VGG)))


def test_a_cluster_from_its_shards() -> None:
    topology = Topology.of_shards(3, homes=(0, 0, 1, -1, -1, -2), loads=(1, 1, 2, 3, 3, 5))
    assert topology == Topology(worker_loads=(2, 2, 0), server_loads=(6, 5))
    assert topology.total_load == 15
    assert Topology.of_shards(2, homes=(0, 1)) == Topology.colocated(2)


@pytest.mark.parametrize(("own", "others"), [((), ()), ((1, -1), ()), ((1, 1), (0,))])
def test_no_such_cluster(own: tuple[int, ...], others: tuple[int, ...]) -> None:
    with pytest.raises(UsageError):
        Topology(worker_loads=own, server_loads=others)


def test_the_table_for_people() -> None:
    plan = choose(VGG[1:3], ExchangeKind.HYBRID, Topology.colocated(8))
    assert plan.table() == [
        "tensor        shape       scheme    by ps    by svb  by allreduce",
        "conv5_4 bias  512         ps      7.17 kB         -       7.17 kB",
        "fc6           4096x25088  svb     1.44 GB  52.30 MB       1.44 GB",
        "all                               1.44 GB                 1.44 GB",
        "this plan: 52.30 MB an iteration on the busiest link, both directions",
    ]


def test_the_plan_has_codecs_and_their_bytes() -> None:
    """Factors are taken where they are no more than what the codec sends."""
    tensors = [tensor("conv", 64, 64, 3, 3), tensor("fc", 4096, 4096, rows=256), tensor("bias", 64)]
    codecs = [CodecPair.parse("topk:0.125/none"), CodecPair.parse("sign"), None]
    plan = choose(tensors, ExchangeKind.HYBRID, Topology.colocated(2), compressions=codecs)
    assert [line.split()[:4] for line in plan.table()[1:4]] == [
        ["conv", "64x64x3x3", "ps", "topk:0.125/none"],
        ["fc", "4096x4096", "ps", "sign"],
        ["bias", "64", "ps", "512"],
    ]
    conv, fc, bias = plan.choices
    assert conv.bytes == (6 + 4 * 8) * 64 * 64 * 9 // 8
    assert fc.bytes == 2 * 4096 * 4096 * (32 + 4) // 256
    assert bias.bytes == 8 * 64
    assert "3 by ps, 2 of them compressed by sign, topk:0.125/none:" in plan.summary()
    fewer = choose(
        [tensor("fc", 4096, 4096, rows=4)],
        ExchangeKind.HYBRID,
        Topology.colocated(2),
        compressions=codecs[1:2],
    )
    assert (fewer.choices[0].scheme, fewer.choices[0].is_compressed) == (Scheme.FACTORS, False)
    assert "compressed" not in fewer.summary()


@pytest.mark.parametrize(
    ("options", "packs"),
    [
        ({}, True),
        ({"precision": Precision.BFLOAT16}, False),
        ({"consistency": Consistency.SSP}, False),
        ({"staleness": 1}, False),
        ({"compress": "int8"}, False),
    ],
)
def test_the_plan_says_where_rows_are_left_out(options: dict[str, object], packs: bool) -> None:
    table = replace(tensor("embed", 2000, 16), looked_up=True)
    own = ExchangeOptions(kind=ExchangeKind.SERVER, **options)  # type: ignore[arg-type]
    member = Membership(network=Network(rank=0, size=2), options=own, shards=2)
    plan = plan_exchange([table], member)
    assert ("ps rows" in plan.table()[1]) is packs
    spec = table_spec(table, member.options, codec=plan.choices[0].codec)
    store = store_spec([[spec]], ExchangeSettings(), member)
    assert store.tables[0].row_elements == 16
    assert store.packs_rows(store.tables[0]) is packs


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (999_600, "1.00 MB"),
        (205_520_896, "205.52 MB"),
    ],
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("consistency", "staleness", "there", "back"),
    [
        (Consistency.SSP_PUSH, 0, Precision.FLOAT16, Precision.FLOAT16),
        (Consistency.SSP_PUSH, 2, Precision.FLOAT16, Precision.FLOAT32),
        (Consistency.SSP, 0, Precision.FLOAT16, Precision.FLOAT32),
        (Consistency.SSP_AGGR, 2, Precision.FLOAT32, Precision.FLOAT32),
    ],
)
def test_the_plan_counts_what_crosses_the_wire_in_half_precision(
    consistency: Consistency, staleness: int, there: Precision, back: Precision
) -> None:
    """Values that are not sent as changes, and changes that are added up, keep all their digits."""
    tensors = [tensor("fc7", 4096, 4096)]
    member = Membership(
        network=Network(size=2),
        shards=1,
        options=ExchangeOptions(
            precision=Precision.FLOAT16, consistency=consistency, staleness=staleness
        ),
    )
    expected = choose(
        tensors, member.options.kind, Topology.of_job(member), gradients=there, values=back
    )
    assert plan_exchange(tensors, member).bytes == expected.bytes
