"""PowerSGD through the shards: against the algorithm in float64, with another rule, and with
factors beside it.
"""

from __future__ import annotations

import itertools
import zlib
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from poseidon.errors import JobError, SnapshotError, UsageError
from poseidon.exchange import replicas
from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.build import build_exchange
from poseidon.exchange.exchange import Built, Exchange
from poseidon.exchange.lossy import low_rank_matrix
from poseidon.exchange.lossy.low_rank_matrix import orthonormal
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from poseidon.exchange.server.tables import ServerTables
from ps_server import Rule, RuleKind
from ps_server.network import Network
from tests.support.cluster import TIMEOUT_S, TOKEN, job_addresses

N, M, RANK = 48, 40, 3
SGD = Rule(momentum=0.5)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_columns_become_orthonormal(size: int) -> None:
    p = np.random.default_rng(0).standard_normal((size, min(size, 4))).astype(np.float32)
    basis = orthonormal(p.T).astype(np.float64)
    np.testing.assert_allclose(basis.T @ basis, np.eye(p.shape[1]), atol=1e-6)
    np.testing.assert_allclose(basis @ (basis.T @ p), p, atol=1e-5)


def test_columns_that_depend_on_others_become_zero() -> None:
    p = np.array([[3, 6, 0, 0], [4, 8, 0, 5]], np.float32)
    np.testing.assert_allclose(orthonormal(p.T), [[0.6, 0, 0, -0.8], [0.8, 0, 0, 0.6]], atol=1e-6)
    assert np.isnan(orthonormal(np.array([[np.nan, 1]], np.float32))).all()


def gradient(iteration: int, rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * iteration + rank))


Body = Callable[[int, Exchange, list[Trained]], None]


def run(
    workers: int,
    body: Body,
    *,
    kind: ExchangeKind = ExchangeKind.SERVER,
    settings: ExchangeSettings | None = None,
    rule: Rule = SGD,
    start: int = 0,
    codec: str = "",
) -> list[Built]:
    """Run `body(rank, exchange, tensors)` on a thread for each worker."""

    def make(rank: int) -> list[Trained]:
        w = torch.full((N, 5, M // 5), float(rank))
        return [
            Trained(name="first", tensor=torch.zeros(7), rule=rule),
            Trained(name="w", tensor=w, rule=rule),
            Trained(name="fc", tensor=torch.zeros(200, 100), rule=rule, factor_rows=4),
        ]

    compress = f"w=powersgd:{RANK}{codec}:start={start}"
    options = ExchangeOptions(kind=kind, compress=compress)
    return run_workers(workers, options, make, body, settings)


def run_workers(
    workers: int,
    options: ExchangeOptions,
    make: Callable[[int], list[Trained]],
    body: Body,
    settings: ExchangeSettings | None = None,
) -> list[Built]:
    """Run `body(rank, exchange, tensors)` on a thread for each worker, with the tensors that
    `make` returns for its rank.
    """
    with job_addresses(options.kind, workers, 2) as connect:

        def one(rank: int) -> Built:
            member = Membership(
                network=Network(rank=rank, size=workers, token=TOKEN, timeout_s=TIMEOUT_S),
                shards=2,
                options=options,
            )
            tensors = make(rank)
            built = build_exchange(tensors, settings or ExchangeSettings(), member, connect)
            try:
                body(rank, built.exchange, tensors)
            finally:
                built.exchange.close()
            return built

        with ThreadPoolExecutor(workers) as pool:
            return [
                running.result() for running in [pool.submit(one, rank) for rank in range(workers)]
            ]


def iterate(
    exchange: Exchange, tensors: list[Trained], iteration: int, rank: int, *, skip: bool = False
) -> None:
    exchange.start(iteration, 0.1)
    for index in range(len(tensors)):
        exchange.wait(index)
    for index in reversed(range(len(tensors))):
        if index in exchange.by_factors:
            exchange.begin_factors(index, torch.ones(4, 200), torch.ones(4, 100))
            exchange.release(index)
        elif not (skip and index == 1):
            exchange.begin(index, gradient(iteration, rank, tuple(tensors[index].tensor.shape)))
    exchange.finish()


def reference(workers: int, iterations: int, scale: float, start: int = 0) -> np.ndarray:
    """Algorithms 1 and 2 of Vogels et al., in float64, with Caffe's momentum."""
    numbers = torch.Generator().manual_seed(zlib.crc32(b"w"))
    q = torch.randn(M, RANK, generator=numbers).double().numpy()
    lost = np.zeros((workers, N, M))
    weight, history = np.zeros((N, M)), np.zeros((N, M))
    for iteration in range(iterations):
        own = [
            scale * gradient(iteration, r, (N, 5, M // 5)).view(N, M).double().numpy() + lost[r]
            for r in range(workers)
        ]
        if iteration < start:
            mean = np.mean(own, axis=0)
        else:
            p, _ = np.linalg.qr(np.mean([m @ q for m in own], axis=0))
            q = np.mean([m.T @ p for m in own], axis=0)
            mean = p @ q.T
            lost = np.array([m - mean for m in own])
        history = 0.5 * history + 0.1 * mean
        weight = weight - history
    return weight


@pytest.mark.parametrize(
    "kind", [ExchangeKind.SERVER, ExchangeKind.HYBRID], ids=lambda kind: kind.value
)
@pytest.mark.parametrize(("workers", "scale", "start"), [(2, 1.0, 0), (3, 0.25, 0), (3, 0.5, 2)])
def test_it_is_powersgd(kind: ExchangeKind, workers: int, scale: float, start: int) -> None:
    ends = [torch.empty(0)] * workers

    def body(rank: int, exchange: Exchange, tensors: list[Trained]) -> None:
        exchange.open(None)
        assert not tensors[1].tensor.any()  # rank 0's
        for iteration in range(5):
            iterate(exchange, tensors, iteration, rank)
        exchange.settle()
        ends[rank] = tensors[1].tensor.clone()

    built = run(
        workers, body, kind=kind, settings=ExchangeSettings(gradient_scale=scale), start=start
    )
    assert all(torch.equal(end, ends[0]) for end in ends)
    np.testing.assert_allclose(ends[0].view(N, M), reference(workers, 5, scale, start), atol=1e-4)
    choices = built[0].plan.choices
    assert [choice.compression and str(choice.compression) for choice in choices] == [
        None,
        f"powersgd:{RANK}{':start=2' if start else ''}",
        None,
    ]
    if workers == 2:
        assert choices[1].bytes == 8 * RANK * (N + M)


SHAPES = ((48, 40), (30, 5, 6), (64, 24))


def shared_run(start: int) -> tuple[list[list[torch.Tensor]], Built, list[int]]:
    """Three workers with three matrices, one of which has no gradient in the second iteration."""
    workers = 3
    ends: list[list[torch.Tensor]] = [[]] * workers
    sent = [0] * len(SHAPES)

    def make(rank: int) -> list[Trained]:
        return [
            Trained(name=f"w{number}", tensor=torch.zeros(shape), rule=SGD)
            for number, shape in enumerate(SHAPES)
        ]

    def body(rank: int, exchange: Exchange, tensors: list[Trained]) -> None:
        exchange.open(None)
        for iteration in range(5):
            iterate(exchange, tensors, iteration, rank, skip=iteration == 1)
        exchange.settle()
        ends[rank] = [trained.tensor.clone() for trained in tensors]
        if rank == 0:
            sent[:] = [exchange.traffic()[index].bytes_out for index in range(len(SHAPES))]

    compress = f"w*=powersgd:2:start={start}"
    options = ExchangeOptions(kind=ExchangeKind.SERVER, compress=compress)
    return ends, run_workers(workers, options, make, body)[0], sent


@pytest.mark.parametrize("start", [0, 2])
def test_tensors_that_share_tables_have_the_bits_of_those_that_do_not(
    monkeypatch: pytest.MonkeyPatch, start: int
) -> None:
    together, built, sent = shared_run(start)
    monkeypatch.setattr(low_rank_matrix, "SHARED_ELEMENTS", 0)
    apart, built_apart, sent_apart = shared_run(start)
    for end in (*together, *apart):
        for mine, first in zip(end, together[0], strict=True):
            assert torch.equal(mine, first)
    assert built.store is not None
    assert built_apart.store is not None
    exact = len(SHAPES) if start else 0
    assert len(built.store.tables) == 2 + exact + len(SHAPES)
    assert len(built_apart.store.tables) == 2 * len(SHAPES) + exact + len(SHAPES)
    assert all(0 < mine < other for mine, other in zip(sent, sent_apart, strict=True))  # headers


@pytest.mark.parametrize("start", [0, 2])
def test_factors_have_a_codec_and_nothing_of_the_gradients_is_lost(start: int) -> None:
    """The mean gradients that were applied and what is held back add up to all mean gradients."""
    workers, ends, sent = 2, [torch.empty(0)] * 2, [0, 0]

    def body(rank: int, exchange: Exchange, tensors: list[Trained]) -> None:
        exchange.open(None)
        for iteration in range(5):
            iterate(exchange, tensors, iteration, rank)
            if iteration == 3:
                exchange.settle()
                sent[rank] = exchange.traffic()[1].bytes_in
        exchange.settle()
        sent[rank] = exchange.traffic()[1].bytes_in - sent[rank]
        held_back = torch.from_numpy(exchange.state.held_back()[f"w, lost of {rank}"]).view(N, M)
        ends[rank] = torch.stack([tensors[1].tensor.view(N, M), held_back])

    built = run(workers, body, rule=Rule(), start=start, codec=":int8")
    assert torch.equal(ends[0][0], ends[1][0])
    given = sum(gradient(i, r, (N, M)) for i in range(5) for r in range(workers)) / workers
    np.testing.assert_allclose(-ends[0][0] / 0.1 + (ends[0][1] + ends[1][1]) / 2, given, atol=1e-4)
    sizes = RANK * (N + M) + 4 * 2
    assert built[0].plan.choices[1].bytes == 2 * sizes
    assert sizes <= sent[0] < sizes + 4 * 80


def test_a_tensor_without_gradients_starts_again() -> None:
    """A zero gradient makes Q zero; the next one must not be lost."""

    def body(rank: int, exchange: Exchange, tensors: list[Trained]) -> None:
        exchange.open(None)
        for iteration in range(3):
            iterate(exchange, tensors, iteration, rank, skip=True)
        assert not tensors[1].tensor.any()
        for iteration in range(3, 6):
            iterate(exchange, tensors, iteration, rank)
        exchange.settle()
        assert tensors[1].tensor.abs().max() > 0.01

    run(2, body)


def test_adam_on_the_workers_and_its_history() -> None:
    def body(rank: int, exchange: Exchange, tensors: list[Trained]) -> None:
        exchange.open(None)
        for iteration in range(2):
            iterate(exchange, tensors, iteration, rank)
        exchange.settle()
        if rank == 0:
            histories = exchange.state.histories().values()
            shapes = [[array.shape for array in history] for history in histories]
            assert shapes == [[(7,)] * 2, [(N, 5, M // 5)] * 2, [(200, 100)] * 2]
            assert all(np.abs(array).max() > 0 for history in histories for array in history)
        assert sorted(exchange.state.replicated()) == ["w, history 0", "w, history 1"]
        assert sorted(exchange.state.held_back()) == ["w, Q", f"w, lost of {rank}"]
        with pytest.raises(SnapshotError, match="has 5 elements of w, Q; expected 120: the rank"):
            exchange.state.hold_back({"w, Q": np.zeros(5, np.float32)})

    run(2, body, rule=Rule(kind=RuleKind.ADAM, momentum=0.9))


@pytest.mark.parametrize("kind", [ExchangeKind.SERVER, ExchangeKind.HYBRID])
def test_workers_whose_rules_give_different_bits_are_refused(
    monkeypatch: pytest.MonkeyPatch, kind: ExchangeKind
) -> None:
    """Each worker applies the rule itself, so all processors must compute the same."""
    count = itertools.count()
    sample = replicas.arithmetic_sample
    monkeypatch.setattr(
        replicas,
        "arithmetic_sample",
        lambda own: replace(sample(own), rules=f"rules {next(count) == 0}"),
    )

    def open_it(rank: int, exchange: Exchange, tensors: list[Trained]) -> None:
        with pytest.raises(JobError, match=r"different bits by the update rule.*different"):
            exchange.open(None)

    run(2, open_it, kind=kind)


def test_before_the_start_the_gradient_travels_and_after_it_costs_nothing() -> None:
    def body(rank: int, exchange: Exchange, tensors: list[Trained]) -> None:
        exchange.open(None)
        sent = []
        for iteration in range(4):
            iterate(exchange, tensors, iteration, rank)
            exchange.settle()
            sent.append(exchange.traffic()[1].bytes_in)
        heads = 4 * 80
        assert 4 * N * M <= sent[1] - sent[0] < 4 * N * M + heads
        assert 4 * RANK * (N + M) <= sent[3] - sent[2] < 4 * RANK * (N + M) + heads
        assert exchange.traffic()[1].held_back > 1

    run(2, body, start=2)


def test_a_table_is_used_again_after_its_last_answer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was skipped: another worker's message to its shard may be late."""
    unanswered: dict[ServerTables, set[int]] = defaultdict(set)
    used: list[str] = []

    def uses(name: str) -> Callable[..., None]:
        use = getattr(ServerTables, name)

        def checked(tables: ServerTables, index: int, *gradient: torch.Tensor) -> None:
            assert index not in unanswered[tables], f"{name} of {index}"
            unanswered[tables].add(index)
            used.append(name)
            use(tables, index, *gradient)

        return checked

    read = ServerTables.read

    def noted(tables: ServerTables, index: int, staleness: int | None = None) -> None:
        read(tables, index, staleness)
        unanswered[tables].discard(index)

    for name in ("push", "skip"):
        monkeypatch.setattr(ServerTables, name, uses(name))
    monkeypatch.setattr(ServerTables, "read", noted)

    def body(rank: int, exchange: Exchange, tensors: list[Trained]) -> None:
        exchange.open(None)
        for iteration in range(5):
            iterate(exchange, tensors, iteration, rank)
        exchange.settle()

    run(2, body, start=2)
    assert used.count("skip") == 2 * (2 * 2 + 3)


def test_a_limit_of_the_norm_is_refused() -> None:
    with pytest.raises(UsageError, match="powersgd cannot be combined with clip_gradients"):
        run(1, lambda *_: None, settings=ExchangeSettings(clip=1.0))
