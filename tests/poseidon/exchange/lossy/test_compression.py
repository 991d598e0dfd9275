"""Which tensors a text of `--compress` means, and training with codecs through the whole
exchange.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from poseidon.errors import UsageError
from poseidon.exchange.base import Trained
from poseidon.exchange.lossy.compression import (
    MEASURED,
    Auto,
    compressions_of,
    parse_compression,
    wire_bytes,
)
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from poseidon.torch.group import Group
from poseidon.torch.options import DistributeOptions
from poseidon.torch.update_rules import SGD
from ps_server.network import Network
from tests.support.cluster import TIMEOUT_S
from tests.support.module_groups import together
from tests.support.sampling import sample

TENSORS = [
    Trained(name="conv1.0", tensor=torch.zeros(8, 3, 5, 5)),
    Trained(name="conv2.0", tensor=torch.zeros(64, 8, 5, 5)),
    Trained(name="fc.0", tensor=torch.zeros(10, 4096)),
    Trained(name="fc.1", tensor=torch.zeros(10)),
    Trained(name="mean.0", tensor=torch.zeros(8192), statistics=True),
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [None] * 5),
        ("int8", [None, "int8", "int8", None, None]),
        ("fc*=topk:0.01,conv*=int8", ["int8", "int8", "topk:0.01", "topk:0.01", None]),
        ("fc.0=none, sign", [None, "sign", None, None, None]),
        ("*=randomk:0.1", ["randomk:0.1"] * 4 + [None]),
        ("conv?.0=sign,conv*=int8,fc.[1]=int8", ["sign", "sign", None, "int8", None]),
        ("none,int8", [None] * 5),
        ("topk:0.01/int8", [None, "topk:0.01/int8", "topk:0.01/int8", None, None]),
        ("fc*=none/sign,int8/int8", [None, "int8", "none/sign", "none/sign", None]),
        ("powersgd:4,int8", [None, "powersgd:4", "powersgd:4", None, None]),
        ("fc*=powersgd:2:start=9,int8", [None, "int8", "powersgd:2:start=9", None, None]),
        ("conv2*=powersgd:2:int8:start=9", [None, "powersgd:2:int8:start=9", None, None, None]),
        ("auto:0.005", [None, "int8", "int8", None, None]),
        ("conv1*=none,*=auto:0.01", [None, "int4", "int4", "int4", None]),
        ("powersgd:32,int8", [None, "int8", "int8", None, None]),
        ("*=powersgd:3,fc*=sign", ["powersgd:3", "powersgd:3", "powersgd:3", "sign", None]),
    ],
)
def test_the_first_scheme_that_matches_decides(text: str, expected: list[str | None]) -> None:
    assert [codec and str(codec) for codec in compressions_of(TENSORS, text)] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int8,", "--compress=int8,: '' is not a scheme; expected a method such as int8"),
        ("=int8", "'=int8' is not a scheme"),
        ("fc*=", "'fc*=' is not a scheme"),
        ("fc*=topk", "'topk' is not a codec; expected topk:FRACTION"),
        ("topk:0.6", "--compress=topk:0.6: topk:0.6 is not a codec"),
        ("powersgd", "'powersgd' is not a compression method"),
        ("powersgd:0", "expected powersgd:RANK"),
        ("powersgd:2:9", "expected powersgd:RANK"),
        ("powersgd:2:sign", "or powersgd:RANK:CODEC with int8 or int4 for the factors"),
        ("auto:little", "'auto:little' is not a compression method"),
        ("auto:0.001", "a loss budget of 0.001 is below the measured loss of every compression"),
        ("auto", "--compress=auto needs --loss_budget=F"),
        ("powersgd:2:start=", "or either with :start=ITERATION"),
        ("fc*=int8:start=9", "'int8:start=9' is not a codec; expected int8"),
        ("none/none", "none/none is not a codec; expected one for gradients or for values"),
        ("int8/", "'' is not a compression method; expected int8"),
        ("int8/sign/none", "'sign/none' is not a compression method; expected int8"),
        ("powersgd:2/int8", "expected powersgd:RANK with a whole number"),
        ("int8/powersgd:2", "'int8/powersgd:2' is not a compression method"),
        ("auto/int8", "'auto/int8' is not a compression method; auto has both directions"),
        ("fc*", "'fc*' is not a compression method; expected int8, int4, sign, topk:FRACTION"),
    ],
)
def test_what_is_no_scheme_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_compression(text)
    assert message in str(refused.value)
    assert str(refused.value).count("expected") <= 1


@pytest.mark.parametrize("pattern", ["ip*", "mean*", "FC*"])
def test_a_pattern_matches_a_tensor_with_a_gradient(pattern: str) -> None:
    with pytest.raises(UsageError, match=r"no tensor that int8 can take has a name like"):
        compressions_of(TENSORS, f"{pattern}=int8")


STEPS = 20
SCHEMES = [
    "sign",
    "int8",
    "topk:0.25/int8",
    "none/int8",
    "int8/none",
    "topk:0.25",
    "*=powersgd:2,*=int8",
    "first*=topk:0.25,int8",
    "*=powersgd:4:int8",
    "int4",
    "auto:0.1",
]


class Net(nn.Module):
    """Two layers; the first is large enough for a bare codec."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(100, 64)
        self.norm = nn.BatchNorm1d(64)
        self.last = nn.Linear(64, 10)
        # its own: replicas are made on threads at the same time
        weights = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                parameter.data.uniform_(-0.1, 0.1, generator=weights)
            elif parameter is not self.norm.weight:
                parameter.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return result


def member(compress: str, kind: ExchangeKind = ExchangeKind.HYBRID) -> Membership:
    return Membership(
        network=Network(timeout_s=TIMEOUT_S),
        options=ExchangeOptions(kind=kind, compress=compress, check_replicas=5),
    )


def losses(
    how: object, compress: str, *, workers: int = 3, clip: float | None = None, **settings: object
) -> tuple[list[dict[str, Tensor]], list[float]]:
    """Train on a fixed task; the ends of all workers, and the mean loss of each step."""
    data = torch.Generator().manual_seed(5)
    x = torch.randn(24, 100, generator=data)
    weights = torch.randn(100, 10, generator=data)
    found: list[float] = []

    def body(module: nn.Module, group: object) -> None:
        for _ in range(STEPS):
            mine = x[group.rank :: group.size]  # type: ignore[attr-defined]
            loss = nn.functional.cross_entropy(module(mine), (mine @ weights).argmax(1))
            loss.backward()
            group.step()  # type: ignore[attr-defined]
            module.zero_grad()
            mean = group.mean(float(loss.detach()))  # type: ignore[attr-defined]
            if group.rank == 0:  # type: ignore[attr-defined]
                found.append(mean)

    options = DistributeOptions(clip=clip, compress="" if "member" in settings else compress)
    ends = together(
        workers,
        lambda _: Net(),
        how,  # type: ignore[arg-type]
        body,
        options=options,
        member=settings.get("member") or member(""),  # type: ignore[arg-type]
    )
    return ends, found


def bits(ends: Sequence[dict[str, Tensor]]) -> list[bytes]:
    return [b"".join(value.numpy().tobytes() for value in end.values()) for end in ends]


def torch_sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.5)


@pytest.mark.parametrize(
    ("compress", "by"),
    [
        *sample([(compress, "rule") for compress in SCHEMES], every=2),
        ("topk:0.25", "torch"),
    ],
)
def test_all_workers_learn_alike_and_nearly_as_without(compress: str, by: str) -> None:
    how = {"rule": SGD(lr=0.3, momentum=0.5), "torch": torch_sgd}[by]
    _, exact = losses(how, "")
    ends, found = losses(how, compress)
    assert len(set(bits(ends))) == 1
    assert exact[-1] < 0.02 * exact[0]
    assert found[-1] < 1.05 * exact[-1]
    assert found != exact


def test_statistics_have_the_norm_of_what_is_held_back() -> None:
    norms: list[dict[int, float | None]] = [{}, {}]

    def body(module: nn.Module, group: Group) -> None:
        for step in range(3):
            module(torch.full((4, 100), float(step + 1))).sum().backward()
            group.step()
            module.zero_grad()
        group.settle()
        exchange = group._loop.exchanged.exchange
        norms[group.rank] = {
            index: traffic.held_back for index, traffic in exchange.traffic().items()
        }
        held_back = exchange.state.held_back()[f"first.weight, pushes of {group.rank}"]
        assert norms[group.rank][0] == pytest.approx(float(np.linalg.norm(held_back)), rel=1e-6)

    together(2, lambda _: Net(), SGD(lr=0.1), body, member=member("first.weight=int8"))
    for found in norms:
        assert [index for index, norm in found.items() if norm is not None] == [0]


def test_a_limit_holds_for_the_norm_of_what_was_sent() -> None:
    ends, found = losses(SGD(lr=0.3), "int8", clip=0.1)
    assert len(set(bits(ends))) == 1
    free = losses(SGD(lr=0.3), "int8")[0]
    assert bits(ends) != bits(free)
    assert np.isfinite(found).all()
    by_flag = losses(SGD(lr=0.3), "int8", member=member("int8"))
    assert bits(by_flag[0]) == bits(free)


def test_the_flag_and_the_argument_are_the_same() -> None:
    with pytest.raises(UsageError, match="compress='sign' and the job --compress=int8"):
        together(
            2,
            lambda _: Net(),
            SGD(lr=1),
            lambda *_: None,
            options=DistributeOptions(compress="sign"),
            member=member("int8"),
        )


SHAPES = [(64, 32, 5, 5), (1024, 1024), (10, 500), (8192,)]
BUDGETS = sorted(loss for _, loss in MEASURED)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_codec_is_within_the_budget_and_more_budget_buys_fewer_bytes(
    shape: tuple[int, ...], budget: float
) -> None:
    tensor = torch.empty(shape)
    assert dict(MEASURED)[Auto(budget).choose(tensor)] <= budget
    sizes = [wire_bytes(Auto(other).choose(tensor), tensor) for other in BUDGETS if other <= budget]
    assert sizes == sorted(sizes, reverse=True)


def test_what_a_budget_buys() -> None:
    weight, bias = torch.empty(1024, 1024), torch.empty(8192)
    bought = {
        budget: [str(Auto(budget).choose(t)) for t in (weight, bias)]
        for budget in (0.005, 0.01, 0.09, 0.1)
    }
    assert bought == {
        0.005: ["int8", "int8"],
        0.01: ["int4", "int4"],
        0.09: ["int4", "int4"],
        0.1: ["powersgd:4:int8", "int4"],
    }


@pytest.mark.parametrize("budget", [0.0, 0.001, -1.0, float("nan"), float("inf"), None])
def test_a_budget_that_no_codec_keeps_is_refused(budget: float | None) -> None:
    with pytest.raises(UsageError, match="budget"):
        Auto(budget)
