"""Streaming local steps: fragments, delays and mixes, held to a plain simulation of all workers
in one process.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import product
from typing import cast

import numpy as np
import pytest
import torch

from poseidon.errors import UsageError
from poseidon.exchange.base import Array, ExchangeSettings, Trained
from poseidon.exchange.build import build_exchange
from poseidon.exchange.hooks import Hooks
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind
from poseidon.exchange.rounds.local_steps import fragments_of
from poseidon.exchange.server.tables import ServerTables
from ps_server import Client, Consistency, Precision, RuleKind, SignalKind
from ps_server.codecs.base import Encoded
from ps_server.network import Network
from ps_server.protocol.precision import Compressor
from tests.poseidon.exchange.rounds.test_local_steps import (
    RULES,
    Case,
    Net,
    Saved,
    assert_same,
    options_of,
    rate,
    run,
    step,
    tensors_of,
    values_of,
)
from tests.support.exchanges import AloneExchange, plain_store
from tests.support.sampling import sample


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [
        ([10, 10, 10, 10], 2, [[0, 1], [2, 3]]),
        ([100, 1, 1, 1], 3, [[0], [1], [2, 3]]),
        ([1, 1, 1, 100], 3, [[0, 1], [2], [3]]),
        ([5, 5], 4, [[0], [1]]),
        ([7], 1, [[0]]),
    ],
)
def test_fragments_are_consecutive_tensors_of_about_equal_size(
    sizes: list[int], count: int, expected: list[list[int]]
) -> None:
    assert [list(fragment) for fragment in fragments_of(sizes, count)] == expected


def test_no_fragment_is_empty() -> None:
    sizes = np.random.default_rng(0).integers(1, 1000, (50, 9)).tolist()
    for row in sizes:
        for count in range(1, 10):
            fragments = fragments_of(row, count)
            assert [index for fragment in fragments for index in fragment] == list(range(9))
            assert len(fragments) == count
            assert all(fragments)


class Simulation:
    """All workers one after the other, and the outer rule in float64."""

    def __init__(self, case: Case) -> None:
        self.case, self.options = case, case.options
        self.nets = [Net() for _ in range(case.workers)]
        self.exchanges = [AloneExchange(tensors_of(n, case.rule), case.settings) for n in self.nets]
        self.hooks = [
            Hooks([n], tensors_of(n, case.rule), e)
            for n, e in zip(self.nets, self.exchanges, strict=True)
        ]
        self.anchors = [value.astype(np.float64) for value in values_of(self.nets[0])]
        self.momenta = [np.zeros_like(anchor) for anchor in self.anchors]
        parts = fragments_of([a.size for a in self.anchors], self.options.sync_fragments)
        self.fragments = [list(part) for part in parts]
        self.moved = [0] * len(parts)
        self.travels: dict[int, int] = {}

    def run(self) -> list[np.ndarray]:
        options = self.options
        for iteration in range(self.case.iterations):
            for worker, net in enumerate(self.nets):
                self.exchanges[worker].start(iteration, rate(iteration))
                step(net, self.hooks[worker], iteration, worker)
                self.exchanges[worker].finish()
            done = iteration + 1
            for fragment in range(len(self.fragments)):
                self.moved[fragment] += 1
                if fragment in self.travels and done == self.travels[fragment] + options.sync_delay:
                    self.arrive(fragment)
                offset = (fragment + 1) * options.local_steps // len(self.fragments)
                if done % options.local_steps == offset % options.local_steps:
                    self.send(fragment, done)
            if done in self.case.settles or done == self.case.iterations:
                self.settle(done)
        for hook in self.hooks:
            hook.close()
        return self.anchors

    def send(self, fragment: int, done: int) -> None:
        """The outer rule is applied at once; what it gives arrives later."""
        options = self.options
        for index in self.fragments[fragment]:
            mean = np.mean([values_of(net)[index].astype(np.float64) for net in self.nets], axis=0)
            anchor, momentum = self.anchors[index], self.momenta[index]
            if index >= len(self.anchors) - 2:
                anchor[...] = mean
                continue
            gradient = anchor - mean
            momentum *= options.outer_momentum
            momentum += gradient
            ahead = (
                gradient + options.outer_momentum * momentum if options.outer_nesterov else momentum
            )
            anchor -= options.outer_lr * ahead
        self.travels[fragment], self.moved[fragment] = done, 0
        if not options.sync_delay:
            self.arrive(fragment)

    def arrive(self, fragment: int) -> None:
        del self.travels[fragment]
        own = self.options.sync_mix if self.moved[fragment] else 0.0
        self.take(fragment, own)
        if not own:
            self.moved[fragment] = 0

    def take(self, fragment: int, own: float) -> None:
        for net in self.nets:
            for index in self.fragments[fragment]:
                tensor = tensors_of(net, self.case.rule)[index].tensor.data
                common = torch.from_numpy(self.anchors[index])
                tensor.copy_(own * tensor.double() + (1 - own) * common)

    def settle(self, done: int) -> None:
        for fragment in range(len(self.fragments)):
            if fragment in self.travels:
                self.arrive(fragment)
        for fragment in range(len(self.fragments)):
            if self.moved[fragment]:
                self.send(fragment, done)
            self.travels.pop(fragment, None)
            self.take(fragment, 0.0)
            self.moved[fragment] = 0


STREAMS = [
    options_of(local_steps=4, sync_fragments=2),
    options_of(local_steps=4, sync_delay=2),
    options_of(ExchangeKind.HYBRID, local_steps=4, sync_fragments=3, sync_delay=3, sync_mix=0.25),
    options_of(local_steps=5, sync_fragments=3, sync_delay=2, sync_mix=0.0, outer_nesterov=False),
    options_of(local_steps=6, sync_fragments=6, sync_delay=5, consistency=Consistency.SSP),
]


@pytest.mark.parametrize(
    ("settles", "stream"), sample(list(product([(), (3, 8, 9)], range(len(STREAMS)))), every=3)
)
def test_fragments_train_as_in_the_simulation(stream: int, settles: tuple[int, ...]) -> None:
    case = Case(options=STREAMS[stream], iterations=14, settles=settles)
    assert_same(run(case), Simulation(case).run())


@pytest.mark.parametrize("rule", [RuleKind.ADAM, RuleKind.ADAGRAD])
def test_other_rules_inside(rule: RuleKind) -> None:
    case = Case(options=STREAMS[2], rule=RULES[rule], settings=ExchangeSettings(clip=0.1))
    assert_same(run(case), Simulation(case).run())


def test_one_worker_streams_too() -> None:
    options = replace(STREAMS[2], kind=ExchangeKind.LOCAL)
    case = Case(options=options, workers=1, iterations=11)
    assert_same(run(case), Simulation(case).run())


@pytest.mark.parametrize(
    ("stream", "settled"), sample(list(product(range(len(STREAMS)), [3, 4, 6])), every=4)
)
def test_a_run_that_goes_on_from_a_saved_state_has_the_bits_of_the_whole_one(
    stream: int, settled: int
) -> None:
    case = Case(
        rule=RULES[RuleKind.NESTEROV], options=STREAMS[stream], settles=(settled,), iterations=12
    )
    whole = run(case)
    saved = Saved(
        iteration=settled,
        values=whole[0].saved[settled][0],
        histories=[end.saved[settled][1] for end in whole],
    )
    resumed = run(replace(case, resume=saved))
    for end in resumed:
        for a, b in zip(end.values, whole[0].values, strict=True):
            assert np.array_equal(a, b)


@pytest.mark.parametrize(
    ("settles", "stream"), sample(list(product([(), (3, 5)], range(len(STREAMS)))), every=3)
)
def test_a_request_takes_effect_after_one_iteration_on_all_workers(
    stream: int, settles: tuple[int, ...]
) -> None:
    case = Case(
        options=STREAMS[stream], iterations=40, request=(1, SignalKind.STOP), settles=settles
    )
    ends = run(case)
    (found,) = ends[0].requested
    assert found[1] is SignalKind.STOP
    assert all(end.requested == ends[0].requested for end in ends)


@pytest.mark.parametrize("wire", [{"precision": Precision.BFLOAT16}, {"compress": "*=randomk:0.5"}])
def test_fragments_travel_by_lossy_codecs(wire: dict[str, object]) -> None:
    case = Case(
        options=options_of(local_steps=2, sync_fragments=2, sync_delay=1, **wire), iterations=12
    )
    ends, exact = run(case), run(Case(options=STREAMS[0], iterations=12))
    for end in ends[1:]:
        for a, b in zip(ends[0].values, end.values, strict=True):
            assert np.array_equal(a, b)
    assert all(np.isfinite(value).all() for value in ends[0].values)
    sent = [sum(t.bytes_out for t in e[0].built.exchange.traffic().values()) for e in (ends, exact)]
    assert sent[0] < 2 * 0.75 * sent[1]  # twice as many exchanges


def test_powersgd_does_not_stream() -> None:
    refused = pytest.raises(UsageError, match="powersgd cannot be combined with fragments")
    with refused:
        replace(STREAMS[0], compress="*.weight=powersgd:2")
    # The choice of `auto` is known when the tensors are.
    member = Membership(
        network=Network(size=2), shards=1, options=replace(STREAMS[0], compress="auto:0.1")
    )
    large = [Trained(name="weight", tensor=torch.zeros(128, 128), rule=RULES[RuleKind.SGD])]
    with refused:
        build_exchange(large, ExchangeSettings(), member, list)


def test_several_workers_on_a_machine_are_refused() -> None:
    member = Membership(network=Network(size=4), hosts=(2, 2), shards=1, options=STREAMS[0])
    with pytest.raises(UsageError, match="need one worker on each host, not 2"):
        build_exchange(tensors_of(Net(), RULES[RuleKind.SGD]), ExchangeSettings(), member, list)


class SlowClient:
    """A client that encodes table 1 only when it may."""

    rank = host = 1

    def __init__(self) -> None:
        self.may_encode = threading.Event()
        self.log: list[str] = []

    def push(self, table: int, array: Array, *, rate: float) -> None:
        if table == 1:
            self.may_encode.wait(60)
        self.log.append(f"push {table}")

    def read(self, table: int, out: Array, *, staleness: int | None) -> None:
        self.log.append(f"read {table}")

    def clock(self) -> None:
        self.log.append("clock")

    def close(self) -> None:
        self.log.append("close")


def test_with_a_delay_training_does_not_wait_for_the_encoding() -> None:
    """Neither the exchange of a fragment nor the read of another one does."""
    client = SlowClient()
    tensors = [
        Trained(name=name, tensor=torch.nn.Parameter(torch.zeros(2)), rule=RULES[RuleKind.SGD])
        for name in "ab"
    ]
    store = plain_store(tensors, ExchangeSettings(), Membership(network=Network(size=2), shards=1))
    tables = ServerTables(
        cast("Client", client),
        tensors,
        range(len(tensors)),
        store,
        ExchangeSettings(),
        in_background=True,
    )
    tables.push(0, torch.ones(2))
    tables.push(1, torch.ones(2))
    tables.finish(1.0, in_parts=True)
    tables.read(0)
    assert client.log == ["push 0", "read 0"]
    client.may_encode.set()
    tables.read(1)
    tables.close()
    assert [word for word in client.log if word != "clock"] == [
        "push 0",
        "read 0",
        "push 1",
        "read 1",
        "close",
    ]


def test_a_stream_with_a_delay_encodes_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()
    encode = Compressor.encode

    def noted(self: Compressor, array: Array, clock: int) -> Encoded:
        threads.add(threading.current_thread().name)
        return encode(self, array, clock)

    monkeypatch.setattr(Compressor, "encode", noted)
    for delay, background in ((1, True), (0, False)):
        threads.clear()
        run(
            Case(
                options=options_of(
                    local_steps=2, sync_delay=delay, sync_fragments=2, compress="*=int8"
                )
            )
        )
        assert {name.startswith("pushes-") for name in threads} == {background}
