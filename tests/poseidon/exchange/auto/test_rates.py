"""The choice of `--exchange=auto`: which scheme each tensor has at given rates."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict, replace

import pytest
import torch

from poseidon.exchange.auto.rates import Rates, fastest_schemes
from poseidon.exchange.base import Trained
from poseidon.exchange.cost import Topology, choose
from poseidon.exchange.lossy.compression import compressions_of
from poseidon.exchange.options import ExchangeKind, Scheme
from ps_server.json_fields import value_of

SLOW = Rates(
    server_s=1e-3,
    server_s_per_byte=1e-7,
    allreduce_s=2e-3,
    allreduce_s_per_byte=1e-7,
    link_s_per_byte=1e-7 / 3,
    product_s_per_flop=1e-10,
)
"""Links of about 100 Mbit/s: server and all-reduce take as long."""
FAST = replace(
    SLOW,
    server_s_per_byte=4e-9,
    allreduce_s_per_byte=2.5e-9,
    link_s_per_byte=4e-9 / 3,
    product_s_per_flop=1e-10,
)
"""No limit but the processors: a sum costs less than a shard's messages, a product more than
both.
"""
WORKERS = 4
SHAPES = {"conv": (256, 256, 3, 3), "fc6": (4096, 9216), "fc8": (10, 4096), "bias": (4096,)}
ROWS = [0, 32, 32, 0]


def tensors() -> list[Trained]:
    return [
        Trained(name=name, tensor=torch.empty(shape, device="meta"), factor_rows=rows)
        for (name, shape), rows in zip(SHAPES.items(), ROWS, strict=True)
    ]


def test_rows_that_are_looked_up_need_the_server() -> None:
    looked_up = [replace(trained, looked_up=True, factor_rows=0) for trained in tensors()[:1]]
    plan = choose(looked_up, ExchangeKind.AUTO, Topology.colocated(WORKERS), packs_rows=True)
    assert fastest_schemes(plan.choices, [0], WORKERS, FAST) == (Scheme.SERVER,)


def chosen(rates: Rates, compress: str = "") -> list[str]:
    plan = choose(
        tensors(),
        ExchangeKind.AUTO,
        Topology.colocated(WORKERS),
        compressions=compressions_of(tensors(), compress) if compress else (),
    )
    return [scheme.value for scheme in fastest_schemes(plan.choices, ROWS, WORKERS, rates)]


CHEAP = replace(FAST, allreduce_s_per_byte=2e-9, product_s_per_flop=0.0, link_s_per_byte=2e-10)


@pytest.mark.parametrize(
    ("rates", "compress", "schemes"),
    [
        pytest.param(SLOW, "", "ps svb ps ps", id="slow links take the fewest bytes"),
        pytest.param(SLOW, "fc6=int8", "ps svb ps ps", id="fewer bytes than the codec's"),
        pytest.param(SLOW, "fc6=topk:0.001", "ps ps ps ps", id="more bytes than the codec's"),
        pytest.param(FAST, "", "allreduce " * 4, id="busy processors take the least work"),
        pytest.param(replace(FAST, allreduce_s_per_byte=3.5e-9), "", "ps " * 4, id="about equal"),
        pytest.param(replace(FAST, allreduce_s=10.0), "", "ps " * 4, id="a latency counts once"),
        pytest.param(CHEAP, "bias=topk:0.1", "allreduce svb allreduce ps", id="all schemes"),
    ],
)
def test_each_tensor_has_the_fastest_scheme(rates: Rates, compress: str, schemes: str) -> None:
    """Products are cheap on an accelerator; fc8 is fewer bytes whole; the codec of a tensor
    needs the server.
    """
    assert chosen(rates, compress) == schemes.split()


def test_all_workers_have_the_rates_of_the_slowest_to_the_bit() -> None:
    mine = replace(SLOW, server_s=1 / 3, product_s_per_flop=1e-11)
    sent = [value_of(Rates, json.loads(json.dumps(asdict(rates)))) for rates in (SLOW, mine)]
    assert sent == [SLOW, mine]
    assert Rates.slowest(sent) == replace(SLOW, server_s=1 / 3)
    for order in itertools.permutations([SLOW, FAST, mine]):
        assert Rates.slowest(order) == Rates.slowest([SLOW, FAST, mine])


@pytest.mark.parametrize("wrong", [{"server_s": -1.0}, {"server_s": math.nan}, {"server_s": "x"}])
def test_what_is_no_rate_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="as its server_s"):
        value_of(Rates, {**asdict(SLOW), **wrong})


def test_the_summary_names_what_was_measured() -> None:
    assert FAST.summary() == (
        "server 1.0 ms + bytes at 250 MB/s, all-reduce 2.0 ms + bytes at 400 MB/s, "
        "products of factors 10.0 GFlop/s"
    )
