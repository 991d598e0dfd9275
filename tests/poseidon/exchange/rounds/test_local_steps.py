"""Local steps: rounds of training alone, held to a plain simulation of all workers in one
process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Barrier

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from poseidon.exchange.base import ExchangeSettings, History, Trained
from poseidon.exchange.build import build_exchange
from poseidon.exchange.exchange import Built, Connect
from poseidon.exchange.hooks import Hooks
from poseidon.exchange.options import ExchangeKind, ExchangeOptions, Scheme
from ps_server import Precision, Rule, RuleKind, SignalKind
from tests.support.cluster import TIMEOUT_S, job_addresses
from tests.support.exchanges import AloneExchange
from tests.support.machines import member_on
from tests.support.sampling import sample_of_pairs
from tests.support.threads import on_threads

BATCH = 4
ITERATIONS = 8
RULES = {
    RuleKind.SGD: Rule(momentum=0.9, decay=0.005),
    RuleKind.NESTEROV: Rule(kind=RuleKind.NESTEROV, momentum=0.9, decay=0.005),
    RuleKind.ADAGRAD: Rule(kind=RuleKind.ADAGRAD, delta=1e-2),
    RuleKind.RMSPROP: Rule(kind=RuleKind.RMSPROP, rms_decay=0.9, delta=1e-1),
    RuleKind.ADADELTA: Rule(kind=RuleKind.ADADELTA, momentum=0.9, delta=1e-3),
    RuleKind.ADAM: Rule(kind=RuleKind.ADAM, momentum=0.9, delta=1e-1),
}


class Net(nn.Module):
    """A layer, normalization with running statistics, another layer, and one that gets no
    gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 40)
        self.norm = nn.BatchNorm1d(40)
        self.last = nn.Linear(40, 2)
        self.idle = nn.Linear(3, 3)
        # its own: replicas are made on threads at the same time
        weights = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.uniform_(-0.4, 0.4, generator=weights)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return result


def tensors_of(net: Net, rule: Rule) -> list[Trained]:
    found = [Trained(name=n, tensor=p, rule=rule) for n, p in net.named_parameters()]
    statistics = (net.norm.running_mean, net.norm.running_var)
    return [
        *found,
        *(Trained(name=f"norm.{i}", tensor=t, statistics=True) for i, t in enumerate(statistics)),
    ]


def rate(iteration: int) -> float:
    return 0.1 / (1 + 0.1 * iteration)


def batch_of(iteration: int, worker: int) -> tuple[Tensor, Tensor]:
    data = torch.Generator().manual_seed(100 * iteration + worker)
    return torch.randn(BATCH, 5, generator=data), torch.randn(BATCH, 2, generator=data)


def values_of(net: Net) -> list[np.ndarray]:
    return [
        t.detach().numpy().copy()
        for t in (*net.parameters(), net.norm.running_mean, net.norm.running_var)
    ]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job: its options, its workers, and after which iterations all settle.

    Attributes:
        abreast: workers begin each iteration together, whatever the staleness allows. Then the
            machine's load does not decide how far they are apart.
    """

    options: ExchangeOptions = field(
        default_factory=lambda: ExchangeOptions(kind=ExchangeKind.SERVER, local_steps=4)
    )
    workers: int = 3
    local_workers: int = 1
    rule: Rule = RULES[RuleKind.SGD]
    settings: ExchangeSettings = field(default_factory=ExchangeSettings)
    iterations: int = ITERATIONS
    settles: tuple[int, ...] = ()
    resume: Saved | None = None
    request: tuple[int, SignalKind] | None = None
    abreast: bool = False


@dataclass(kw_only=True)
class Saved:
    """The state after some iterations: rank 0's values, and what each worker knows of the
    histories.
    """

    iteration: int
    values: list[np.ndarray]
    histories: list[list[History]]


@dataclass(kw_only=True)
class End:
    """The end of one worker's training; `saved` has its histories at its last but one settle."""

    values: list[np.ndarray]
    built: Built
    saved: dict[int, tuple[list[np.ndarray], list[History]]]
    requested: list[tuple[int, SignalKind]]


def step(net: Net, hooks: Hooks, iteration: int, worker: int) -> None:
    hooks.start()
    x, y = batch_of(iteration, worker)
    nn.functional.mse_loss(net(x), y).backward()
    hooks.next_pass()
    hooks.finish()


def train(
    case: Case, rank: int, build: Callable[..., Built], wait: Callable[[], object] | None = None
) -> End:
    net = Net()
    if rank:  # only rank 0's first values count
        for parameter in net.parameters():
            parameter.data.fill_(rank)
    tensors = tensors_of(net, case.rule)
    begin = 0 if case.resume is None else case.resume.iteration
    if case.resume is not None:
        for t, value in zip(tensors, case.resume.values, strict=True):
            t.tensor.data.copy_(torch.from_numpy(value))
    built = build(tensors, replace(case.settings, start_clock=begin))
    exchange = built.exchange
    hooks = Hooks([net], tensors, exchange)
    saved, requested = {}, []
    try:
        exchange.open(None if case.resume is None else case.resume.histories[rank])
        for iteration in range(begin, case.iterations):
            if wait is not None:
                wait()
            exchange.start(iteration, rate(iteration))
            step(net, hooks, iteration, rank)
            exchange.finish()
            requested += [
                (r.clock, r.kind) for r in exchange.control.requests if r.clock == iteration + 1
            ]
            if iteration + 1 in case.settles:
                exchange.settle()
                saved[iteration + 1] = (values_of(net), list(exchange.state.histories().values()))
            if rank == 0 and case.request is not None and case.request[0] == iteration + 1:
                exchange.control.request(case.request[1])
        exchange.settle()
        return End(values=values_of(net), built=built, saved=saved, requested=requested)
    finally:
        hooks.close()
        exchange.close()


def run(case: Case) -> list[End]:
    """Run a job with its workers as threads. Return how each ended, by rank."""
    with TemporaryDirectory() as folder:
        return run_in(case, Path(folder))


def run_in(case: Case, folder: Path) -> list[End]:
    hosts = [case.local_workers] * (case.workers // case.local_workers)
    wait = Barrier(case.workers, timeout=TIMEOUT_S).wait if case.abreast else None

    def worker(rank: int, connect: Connect) -> End:
        member = member_on(rank, hosts, folder, shards=2, options=case.options)
        return train(case, rank, lambda t, s: build_exchange(t, s, member, connect), wait)

    with job_addresses(case.options.kind, case.workers, 2) as connect:
        return on_threads(case.workers, lambda rank: worker(rank, connect.of(rank)))


def simulate(case: Case) -> list[np.ndarray]:
    """Train all workers one after the other in this thread, and apply the outer rule in float64."""
    options, nets = case.options, [Net() for _ in range(case.workers)]
    exchanges = [AloneExchange(tensors_of(net, case.rule), case.settings) for net in nets]
    hooks = [
        Hooks([net], tensors_of(net, case.rule), e) for net, e in zip(nets, exchanges, strict=True)
    ]
    anchors = [value.astype(np.float64) for value in values_of(nets[0])]
    momenta = [np.zeros_like(anchor) for anchor in anchors]
    trained = len(anchors) - 2
    for iteration in range(case.iterations):
        for worker, (net, exchange, hook) in enumerate(zip(nets, exchanges, hooks, strict=True)):
            exchange.start(iteration, rate(iteration))
            step(net, hook, iteration, worker)
            exchange.finish()
        done = iteration + 1
        if done % options.local_steps and done not in case.settles and done < case.iterations:
            continue
        for index, anchor in enumerate(anchors):
            mean = np.mean([values_of(net)[index].astype(np.float64) for net in nets], axis=0)
            if index >= trained:
                anchor[...] = mean
                continue
            gradient, momentum = anchor - mean, momenta[index]
            momentum *= options.outer_momentum
            momentum += gradient
            ahead = (
                gradient + options.outer_momentum * momentum if options.outer_nesterov else momentum
            )
            anchor -= options.outer_lr * ahead
        for net in nets:
            for t, anchor in zip(tensors_of(net, case.rule), anchors, strict=True):
                t.tensor.data.copy_(torch.from_numpy(anchor))
    for hook in hooks:
        hook.close()
    return anchors


def assert_same(ends: list[End], expected: list[np.ndarray], tolerance: float = 1e-5) -> None:
    for end in ends[1:]:
        for a, b in zip(ends[0].values, end.values, strict=True):
            assert np.array_equal(a, b)
    for a, b in zip(ends[0].values, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


def options_of(kind: ExchangeKind = ExchangeKind.SERVER, **values: object) -> ExchangeOptions:
    return ExchangeOptions(kind=kind, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_trains_as_in_the_simulation(rule: RuleKind) -> None:
    case = Case(rule=RULES[rule])
    ends = run(case)
    assert ends[0].built.plan.local_steps == 4
    assert_same(ends, simulate(case))


@pytest.mark.parametrize(
    ("options", "workers"),
    [
        (options_of(local_steps=3), 2),  # the last round ends early
        (options_of(ExchangeKind.HYBRID, local_steps=2, outer_nesterov=False), 3),
        (options_of(ExchangeKind.ALLREDUCE, local_steps=4, outer_lr=1.0, outer_momentum=0.5), 3),
        (options_of(ExchangeKind.ALLREDUCE, local_steps=4, outer_lr=1.0, outer_momentum=0.0), 2),
        (options_of(ExchangeKind.LOCAL, local_steps=4), 1),  # alone
        (options_of(local_steps=1), 3),
        (options_of(local_steps=50), 2),
    ],
)
def test_rounds_of_each_exchange(options: ExchangeOptions, workers: int) -> None:
    case = Case(options=options, workers=workers)
    ends = run(case)
    assert not ends[0].built.plan.of(Scheme.FACTORS)
    assert_same(ends, simulate(case))


def test_limits_and_scales_are_for_each_workers_own_gradients() -> None:
    case = Case(settings=ExchangeSettings(clip=0.05, gradient_scale=0.5))
    assert_same(run(case), simulate(case))


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_one_plain_step_has_the_bits_of_synchronous_training(decay: float) -> None:
    rule = Rule(decay=decay)
    one = options_of(ExchangeKind.HYBRID, local_steps=1, outer_lr=1.0, outer_momentum=0.0)
    local, synchronous = (
        run(Case(options=one, rule=rule)),
        run(Case(options=options_of(), rule=rule)),
    )
    assert local[0].built.plan.local_steps == 0
    for a, b in zip(local[0].values, synchronous[0].values, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize(
    ("rule", "kind", "settled"),
    sample_of_pairs(
        [RuleKind.NESTEROV, RuleKind.ADAM], [ExchangeKind.SERVER, ExchangeKind.ALLREDUCE], [4, 6]
    ),
)
def test_a_run_that_goes_on_from_a_saved_state_has_the_bits_of_the_whole_one(
    rule: RuleKind, kind: ExchangeKind, settled: int
) -> None:
    case = Case(
        rule=RULES[rule], options=options_of(kind, local_steps=4), settles=(settled,), iterations=10
    )
    whole = run(case)
    assert_same(whole, simulate(case))
    saved = Saved(
        iteration=settled,
        values=whole[0].saved[settled][0],
        histories=[end.saved[settled][1] for end in whole],
    )
    inner = 2 if rule is RuleKind.ADAM else 1
    assert [len(histories[0]) for histories in saved.histories] == [inner + 1, inner, inner]
    resumed = run(replace(case, resume=saved))
    for end in resumed:
        for a, b in zip(end.values, whole[0].values, strict=True):
            assert np.array_equal(a, b)


@pytest.mark.parametrize(
    ("settles", "kind"), [((), ExchangeKind.SERVER), ((3, 5), ExchangeKind.ALLREDUCE)]
)
def test_a_request_takes_effect_at_the_end_of_one_round_on_all_workers(
    kind: ExchangeKind, settles: tuple[int, ...]
) -> None:
    case = Case(
        options=options_of(kind, local_steps=2),
        iterations=14,
        request=(1, SignalKind.SNAPSHOT),
        settles=settles,
    )
    ends = run(case)
    (found,) = ends[0].requested
    assert found[0] % 2 == 0
    assert found[1] is SignalKind.SNAPSHOT
    assert all(end.requested == ends[0].requested for end in ends)


@pytest.mark.parametrize("precision", [Precision.FLOAT16, Precision.BFLOAT16])
def test_outer_gradients_travel_in_16_bits(precision: Precision) -> None:
    case = Case(options=options_of(local_steps=2, precision=precision), iterations=12)
    ends = run(case)
    assert_same(ends, simulate(case), tolerance=5e-2)
    whole = run(replace(case, options=replace(case.options, precision=Precision.FLOAT32)))
    sent = [sum(t.bytes_out for t in e[0].built.exchange.traffic().values()) for e in (ends, whole)]
    assert sent[0] < 0.75 * sent[1]


@pytest.mark.parametrize(("codec", "tolerance"), [("*=int8", 5e-2), ("*.weight=powersgd:2", 1.0)])
def test_outer_gradients_travel_by_a_lossy_codec(codec: str, tolerance: float) -> None:
    case = Case(options=options_of(local_steps=2, compress=codec), iterations=12)
    assert_same(run(case), simulate(case), tolerance=tolerance)


@pytest.mark.parametrize(
    ("values", "workers", "local_workers"),
    [
        ({"outer_lr": 1.0, "outer_momentum": 0.0}, 3, 1),
        ({"outer_lr": 0.5, "outer_momentum": 0.6, "outer_nesterov": False, "staleness": 2}, 2, 1),
        ({"outer_lr": 0.5, "outer_momentum": 0.6}, 4, 2),
    ],
)
def test_at_staleness_s_all_workers_settle_on_one_value_near_the_exact_one(
    values: dict[str, object], workers: int, local_workers: int
) -> None:
    options = options_of(local_steps=2, **{"staleness": 1, **values})
    case = Case(
        options=options, workers=workers, local_workers=local_workers, iterations=24, abreast=True
    )
    ends = run(case)
    for end in ends[1:]:
        for a, b in zip(ends[0].values, end.values, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    start, exact = values_of(Net()), simulate(case)
    distance = sum(float(np.abs(a - b).sum()) for a, b in zip(ends[0].values, exact, strict=True))
    moved = sum(float(np.abs(a - b).sum()) for a, b in zip(exact, start, strict=True))
    assert distance < 0.6 * moved


def test_a_run_with_delayed_momentum_goes_on_from_a_saved_state() -> None:
    case = Case(options=options_of(local_steps=2, staleness=1), settles=(6,), iterations=12)
    whole = run(case)
    histories = [end.saved[6][1] for end in whole]
    assert [len(history[0]) for history in histories] == [3, 1, 1]
    saved = Saved(iteration=6, values=whole[0].saved[6][0], histories=histories)
    for options in (case.options, options_of(local_steps=2)):
        ends = run(replace(case, options=options, resume=saved))
        for a, b in zip(ends[0].values, ends[1].values, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    exact = run(replace(case, options=options_of(local_steps=2)))
    histories = [end.saved[6][1] for end in exact]
    saved = Saved(iteration=6, values=exact[0].saved[6][0], histories=histories)
    run(replace(case, resume=saved))


@pytest.mark.parametrize("kind", [ExchangeKind.SERVER, ExchangeKind.ALLREDUCE])
def test_the_workers_of_a_host_have_inner_steps_of_their_own(kind: ExchangeKind) -> None:
    case = Case(options=options_of(kind, local_steps=3), workers=4, local_workers=2, settles=(4,))
    ends = run(case)
    assert_same(ends, simulate(case))
    momenta = [end.saved[4][1][0][0] for end in ends]
    assert all(not np.array_equal(a, b) for a, b in pairwise(momenta))


@pytest.mark.parametrize("fragments", [1, 2])
def test_anchors_are_compared_and_mended_as_values_are(fragments: int) -> None:
    """An anchor that differs would be in the next outer gradient of its worker."""
    found: list[dict[str, bool]] = []
    case = Case(options=options_of(local_steps=4, sync_fragments=fragments), iterations=6)
    for end in run(case):
        equal = {
            name: np.array_equal(tensor.numpy(), value)
            for (name, tensor), value in zip(
                end.built.exchange.state.replicated().items(), end.values, strict=True
            )
        }
        found.append(equal)
    assert set(found[0]) >= {"first.weight, anchor", "norm.0, anchor"}
    assert all(all(equal.values()) for equal in found)
