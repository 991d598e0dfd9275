"""The shard as a state machine: what it answers, and that nothing illegal changes it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from ps_server.protocol import messages as m
from ps_server.protocol import stored_chunk
from ps_server.protocol.members import Outgoing
from ps_server.protocol.settings import (
    Consistency,
    NewtonSchulz,
    Regularization,
    Rule,
    RuleKind,
    StoreSpec,
    TableSpec,
)
from ps_server.protocol.shard import Shard
from tests.support.fingerprint import fingerprint

PLAIN = Rule()


def store(staleness: int = 0, workers: int = 2, **settings: object) -> StoreSpec:
    table = TableSpec(name="w", size=4, staleness=staleness, rule=PLAIN)
    return StoreSpec(workers=workers, shards=1, tables=(table,), **settings)  # type: ignore[arg-type]


def peer(rank: int) -> bytes:
    return b"peer %d" % rank


def array(*values: float) -> m.Array:
    made = np.array(values, dtype=np.float32)
    # the shard may add up in the memory of what comes; these are handed in many times
    made.setflags(write=False)
    return made


def joined(spec: StoreSpec) -> Shard:
    """A shard that all workers have joined; w is 0."""
    shard = Shard(0, spec.workers, b"secret")
    for rank in range(spec.workers):
        shard.handle(peer(rank), m.Hello(rank, b"secret"))
        shard.handle(peer(rank), m.Create(spec))
    shard.handle(peer(0), m.Initial(0, 0, [np.zeros(4, dtype=np.float32)]))
    assert shard.counts.faults == 0
    return shard


def ruled(kind: RuleKind) -> StoreSpec:
    table = TableSpec(name="w", size=4, rule=Rule(kind=kind, momentum=0.9))
    return StoreSpec(workers=2, shards=1, tables=(table,))


def values(outgoing: Sequence[Outgoing]) -> dict[bytes, m.Value]:
    return {out.peer: out.message for out in outgoing if isinstance(out.message, m.Value)}


def test_first_values_go_to_everyone_once_all_are_here() -> None:
    spec = store()
    shard = Shard(0, 2, b"secret")
    assert shard.handle(peer(0), m.Hello(0, b"secret")) == [Outgoing(peer(0), m.Welcome(0))]
    assert shard.handle(peer(0), m.Create(spec)) == []
    assert shard.handle(peer(0), m.Initial(0, 0, [array(1, 2, 3, 4)])) == []
    shard.handle(peer(1), m.Hello(1, b"secret"))
    sent = values(shard.handle(peer(1), m.Create(spec)))
    assert sent.keys() == {peer(0), peer(1)}
    assert sent[peer(1)].array.tolist() == [1, 2, 3, 4]


def test_gradients_are_averaged_and_applied_once_all_have_come() -> None:
    shard = joined(store())
    assert shard.handle(peer(1), m.Push(0, 0, 0, 0.5, array(2, 2, 2, 2))) == []
    sent = values(shard.handle(peer(0), m.Push(0, 0, 0, 0.5, array(0, 2, 4, 6))))
    assert {value.clock for value in sent.values()} == {1}
    assert sent[peer(0)].array.tolist() == [-0.5, -1.0, -1.5, -2.0]


def test_the_sum_does_not_depend_on_who_comes_first() -> None:
    big, small = array(1e8, 1e8, 1e8, 1e8), array(1, 1, 1, 1)
    gradients = [big, small, -big]
    results = set()
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        shard = joined(store(workers=3))
        for rank in order:
            outgoing = shard.handle(peer(rank), m.Push(0, 0, 0, 3.0, gradients[rank]))
        results.add(values(outgoing)[peer(0)].array.tobytes())
    assert len(results) == 1


def test_a_mean_is_made_in_the_memory_of_the_first_workers_gradient() -> None:
    shard = joined(ruled(RuleKind.MEAN))
    first, second = np.ones(4, dtype=np.float32), np.full(4, 3, dtype=np.float32)
    shard.handle(peer(1), m.Push(0, 0, 0, 1.0, second))
    shard.handle(peer(0), m.Push(0, 0, 0, 1.0, first))
    assert first.tolist() == [2, 2, 2, 2]
    assert second.tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("kind", [RuleKind.SGD, RuleKind.ADAMW, RuleKind.MEAN])
def test_a_value_lives_in_memory_that_a_worker_of_the_host_reads(kind: RuleKind) -> None:
    plain, sharing = (joined(ruled(kind)) for _ in range(2))
    memory = torch.zeros(4)
    sharing.allocate = lambda size, peers: memory[:size]
    for clock in range(3):
        sent = []
        for shard in (plain, sharing):
            for rank in (0, 1):
                push = m.Push(0, 0, clock, 0.5, array(rank, 2, clock, -1))
                answers = shard.handle(peer(rank), push)
            sent.append(values(answers)[peer(0)].array)
        assert sent[0].tobytes() == sent[1].tobytes() == memory.numpy().tobytes()
        assert sent[1].ctypes.data == memory.data_ptr()


@pytest.mark.parametrize("kind", RuleKind)
@pytest.mark.parametrize("regularization", Regularization)
def test_tiles_change_no_bit(
    kind: RuleKind, regularization: Regularization, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = NewtonSchulz(columns=20) if kind is RuleKind.MUON else None
    rule = Rule(kind=kind, momentum=0.9, decay=0.01, regularization=regularization, matrix=matrix)
    size = 100
    spec = StoreSpec(workers=1, shards=1, tables=(TableSpec(name="w", size=size, rule=rule),))
    found = set()
    for tile in (7, size):
        monkeypatch.setattr(stored_chunk, "TILE", tile)
        random = np.random.default_rng(0)
        shard = Shard(0, 1)
        shard.handle(peer(0), m.Hello(0, b""))
        shard.handle(peer(0), m.Create(spec))
        shard.handle(peer(0), m.Initial(0, 0, [random.standard_normal(size).astype(np.float32)]))
        for clock in range(3):
            gradient = random.standard_normal(size).astype(np.float32)
            outgoing = shard.handle(peer(0), m.Push(0, 0, clock, 0.1, gradient))
        found.add(values(outgoing)[peer(0)].array.tobytes())
    assert len(found) == 1


def test_pulling_waits_for_the_clock() -> None:
    shard = joined(store(consistency=Consistency.SSP))
    assert shard.handle(peer(0), m.Get(0, 0, 1)) == []
    shard.handle(peer(0), m.Push(0, 0, 0, 1.0, array(1, 1, 1, 1)))
    sent = values(shard.handle(peer(1), m.Push(0, 0, 0, 1.0, array(1, 1, 1, 1))))
    assert sent.keys() == {peer(0)}
    assert values(shard.handle(peer(1), m.Get(0, 0, 1))).keys() == {peer(1)}


def test_clipping_waits_for_the_norm_over_all_shards() -> None:
    shard = joined(store(clip=1.0))
    shard.handle(peer(1), m.Push(0, 0, 0, 1.0, array(3, 0, 0, 0)))
    (norm,) = shard.handle(peer(0), m.Push(0, 0, 0, 1.0, array(3, 0, 0, 0)))
    assert norm == Outgoing(peer(0), m.PartialNorm(0, (9.0,)))
    sent = values(shard.handle(peer(0), m.TotalNorm(0, 9.0 + 16.0)))  # another shard had 16
    np.testing.assert_allclose(sent[peer(0)].array, [-3 / 5, 0, 0, 0], rtol=1e-6)


def test_gradient_scale_comes_after_clipping() -> None:
    shard = joined(store(gradient_scale=0.5))
    shard.handle(peer(1), m.Push(0, 0, 0, 1.0, array(4, 4, 4, 4)))
    sent = values(shard.handle(peer(0), m.Push(0, 0, 0, 1.0, array(4, 4, 4, 4))))
    assert sent[peer(0)].array.tolist() == [-2, -2, -2, -2]


def test_changes_of_others_come_once_ahead_and_again_when_the_slowest_clock_moves() -> None:
    shard = joined(store(staleness=2, workers=3))
    ahead = values(shard.handle(peer(0), m.Push(0, 0, 0, 0.0, array(1, 1, 1, 1))))
    assert ahead.keys() == {peer(1), peer(2)}
    assert (ahead[peer(1)].clock, ahead[peer(1)].own) == (0, 0)
    assert shard.handle(peer(0), m.Clock(1)) == []
    # Worker 1's own push lets it have one more ahead, and worker 0 its first; worker 2 has had its
    # one.
    assert values(shard.handle(peer(1), m.Push(0, 0, 0, 0.0, array(2, 2, 2, 2)))).keys() == {
        peer(0)
    }
    assert shard.handle(peer(1), m.Clock(1)) == []
    assert values(shard.handle(peer(0), m.Push(0, 0, 1, 0.0, array(4, 4, 4, 4)))).keys() == {
        peer(1)
    }
    assert values(shard.handle(peer(2), m.Push(0, 0, 0, 0.0, array(8, 8, 8, 8)))).keys() == {
        peer(0),
        peer(2),
    }
    outgoing = shard.handle(peer(2), m.Clock(1))
    sent = values(outgoing)
    assert sent.keys() == {peer(1)}  # only it lacks a change of another worker
    assert sent[peer(1)].array.tolist() == [15, 15, 15, 15]
    assert (sent[peer(1)].clock, sent[peer(1)].own) == (1, 1)
    assert [out.message for out in outgoing[1:]] == [m.Fresh(1)] * 3


def test_a_value_that_was_sent_does_not_change_afterwards() -> None:
    shard = joined(store(staleness=1))
    sent = values(shard.handle(peer(0), m.Push(0, 0, 0, 0.0, array(1, 1, 1, 1))))[peer(1)].array
    shard.handle(peer(1), m.Push(0, 0, 0, 0.0, array(5, 5, 5, 5)))
    assert sent.tolist() == [1, 1, 1, 1]


def test_history_travels_with_a_resumed_store() -> None:
    rule = Rule(momentum=0.5)
    spec = StoreSpec(
        workers=1, shards=1, tables=(TableSpec(name="w", size=1, rule=rule),), start_clock=7
    )
    shard = Shard(0, 1)
    shard.handle(peer(0), m.Hello(0, b""))
    shard.handle(peer(0), m.Create(spec))
    first = values(shard.handle(peer(0), m.Initial(0, 0, [array(10), array(4)])))
    assert first[peer(0)].clock == 7
    sent = values(shard.handle(peer(0), m.Push(0, 0, 7, 1.0, array(1))))
    assert sent[peer(0)].array.tolist() == [10 - (0.5 * 4 + 1)]
    (history,) = shard.handle(peer(0), m.GetHistory(0, 0))
    assert isinstance(history.message, m.History)
    assert history.message.clock == 8
    assert history.message.array.tolist() == [3]


def test_a_history_stays_as_it_is_while_it_is_sent() -> None:
    """Both workers ask; they share the memory, and the next iteration does not write to it."""
    rule = Rule(kind=RuleKind.ADAM, momentum=0.5)
    shard = joined(replace(store(), tables=(TableSpec(name="w", size=4, rule=rule),)))
    sent = [shard.handle(peer(rank), m.GetHistory(0, 0)) for rank in (0, 1)]
    pieces = [[out.message for out in outgoing] for outgoing in sent]
    first, second = pieces[0]
    assert isinstance(first, m.History)
    assert isinstance(second, m.History)
    assert (first.clock, first.start, second.start) == (0, 0, first.array.size)
    other = pieces[1][0]
    assert isinstance(other, m.History)
    assert np.shares_memory(first.array, other.array)
    for iteration in range(2):
        for rank in (0, 1):
            shard.handle(peer(rank), m.Push(0, 0, iteration, 1.0, first.array + 1))
    assert not first.array.any()
    assert not second.array.any()
    (later, _) = shard.handle(peer(0), m.GetHistory(0, 0))
    assert isinstance(later.message, m.History)
    assert later.message.clock == 2
    assert later.message.array.any()


def test_gathering_meets_in_rank_order_and_signals_reach_the_others() -> None:
    shard = joined(store())
    assert shard.handle(peer(1), m.Gather(0, b"b")) == []
    outgoing = shard.handle(peer(0), m.Gather(0, b"a"))
    assert {out.message for out in outgoing} == {m.Gathered(0, (b"a", b"b"))}
    signal = m.Signal(m.SignalKind.STOP, 5)
    assert shard.handle(peer(0), signal) == [Outgoing(peer(1), signal)]


def test_a_shard_is_finished_when_all_have_left() -> None:
    shard = joined(store())
    shard.handle(peer(0), m.Leave())
    assert not shard.members.finished
    shard.handle(peer(1), m.Leave())
    assert shard.members.finished


@pytest.mark.parametrize(
    "late", [m.Push(0, 0, 0, 0.5, array(1, 1, 1, 1)), m.Gather(0, b"")], ids=str
)
@pytest.mark.parametrize("first", [False, True], ids=["before", "after"])
def test_who_goes_on_hears_of_a_worker_that_has_left(first: bool, late: m.Message) -> None:
    shard = joined(store(workers=3))
    steps = [(1, m.Leave()), (0, late)]
    sent = [
        out
        for rank, message in steps[:: -1 if first else 1]
        for out in shard.handle(peer(rank), message)
    ]
    assert [out for out in sent if out.message != m.Leave()] == [Outgoing(peer(0), m.Gone(1, 0))]


def test_nobody_is_missed_after_the_same_number_of_iterations() -> None:
    shard = joined(store())
    for rank in (0, 1):
        shard.handle(peer(rank), m.Push(0, 0, 0, 0.5, array(1, 1, 1, 1)))
    answers = [shard.handle(peer(rank), m.Leave()) for rank in (0, 1)]
    assert answers == [[Outgoing(peer(rank), m.Leave())] for rank in (0, 1)]


G = array(1, 1, 1, 1)
PUSH, CHANGE = m.Push(0, 0, 0, 1.0, G), m.Push(0, 0, 0, 0.0, G)
ANOTHER_RATE = m.Push(0, 0, 0, 2.0, G)
ILLEGAL: dict[str, tuple[StoreSpec, int, list[m.Message]]] = {
    "push of another size": (store(), 0, [m.Push(0, 0, 0, 1.0, array(1))]),
    "push of no such chunk": (store(), 0, [m.Push(0, 1, 0, 1.0, G)]),
    "push of no such table": (store(), 0, [m.Push(9, 0, 0, 1.0, G)]),
    "push of a later iteration": (store(), 0, [m.Push(0, 0, 1, 1.0, G)]),
    "push of an earlier iteration": (store(start_clock=3), 0, [m.Push(0, 0, 2, 1.0, G)]),
    "the same push again": (store(), 1, [PUSH, PUSH]),
    "the next push before the value": (store(), 1, [PUSH, m.Push(0, 0, 1, 1.0, G)]),
    "another rate": (store(), 1, [PUSH, ANOTHER_RATE]),
    "clock without pushes": (store(staleness=1), 0, [m.Clock(1)]),
    "clock that skips": (store(), 0, [m.Clock(2)]),
    "change sent twice": (store(staleness=1), 1, [CHANGE, CHANGE]),
    "second hello": (store(), 0, [m.Hello(0, b"secret")]),
    "second create after a push": (store(), 0, [PUSH, m.Create(store())]),
    "second create after a change": (store(staleness=1), 0, [CHANGE, m.Create(store())]),
    "second initial": (store(), 0, [m.Initial(0, 0, [G])]),
    "initial of worker 1": (store(), 1, [m.Initial(0, 0, [G])]),
    "unasked norm": (store(), 0, [m.TotalNorm(0, 1.0)]),
    "signal of worker 1": (store(), 1, [m.Signal(m.SignalKind.STOP, 5)]),
    "gathering out of order": (store(), 1, [m.Gather(1, b"")]),
    "two questions at once": (store(consistency=Consistency.SSP), 1, [m.Get(0, 0, 9)] * 2),
    "a shard's message": (store(), 0, [m.Welcome(0)]),
    "anything after leaving": (store(), 1, [m.Leave(), m.Gather(0, b"")]),
}


@pytest.mark.parametrize(("spec", "rank", "messages"), ILLEGAL.values(), ids=ILLEGAL.keys())
def test_what_is_illegal_is_answered_counted_and_changes_nothing(
    spec: StoreSpec, rank: int, messages: list[m.Message]
) -> None:
    shard = joined(spec)
    for message in messages[:-1]:
        shard.handle(peer(rank), message)
    offender = 1 - rank if messages[-1] is ANOTHER_RATE else rank
    before = shard.counts.faults
    (answer,) = shard.handle(peer(offender), messages[-1])
    assert answer.peer == peer(offender)
    assert isinstance(answer.message, m.Fault)
    assert shard.counts.faults == before + 1
    if not isinstance(messages[0], m.Leave):
        # The iteration still ends as if nothing had been said. (A push that was legal before is
        # refused now.)
        for worker in range(2):
            shard.handle(peer(worker), m.Push(0, 0, spec.start_clock, 1.0, G))
            shard.handle(peer(worker), m.Clock(spec.start_clock + 1))
        assert shard.counts.updates > 0


@pytest.mark.parametrize(
    "message",
    [
        m.Create(store()),
        m.Push(0, 0, 0, 1.0, G),
        m.Leave(),
        m.Hello(0, b"wrong"),
        m.Hello(7, b"secret"),
    ],
)
def test_strangers_get_no_answer(message: m.Message) -> None:
    shard = Shard(0, 2, b"secret")
    assert shard.handle(b"stranger", message) == []
    assert shard.counts.faults == 1
    assert shard.refuse(b"stranger", "noise") == []


def test_a_rank_is_taken_once() -> None:
    shard = joined(store())
    assert shard.handle(b"impostor", m.Hello(0, b"secret")) == []
    assert shard.counts.faults == 1


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (
            store(staleness=1),
            "has table 'w' with staleness 1; the first worker has 0; all workers must have the same",
        ),
        (store(clip=2.0), "has clip 2.0; the first worker has None"),
        (store(workers=3), "expects 3 workers"),
    ],
)
def test_workers_must_bring_the_same_store(other: StoreSpec, text: str) -> None:
    shard = Shard(0, 2, b"")
    for rank in range(2):
        shard.handle(peer(rank), m.Hello(rank, b""))
    shard.handle(peer(0), m.Create(store()))
    (answer,) = shard.handle(peer(1), m.Create(other))
    assert isinstance(answer.message, m.Fault)
    assert text in answer.message.reason
    assert shard.handle(peer(1), m.Create(store())) == []  # it may still bring the right one


def test_a_signal_of_the_previous_store_is_not_passed_on() -> None:
    """The barrier before a second `Create` goes through shard 0: a signal to another shard may
    still be on its way.
    """
    shard = joined(store())
    shard.handle(peer(1), m.Create(store(start_clock=7)))
    assert shard.handle(peer(0), m.Signal(m.SignalKind.STOP, 3)) == []
    shard.handle(peer(0), m.Create(store(start_clock=7)))
    stop = m.Signal(m.SignalKind.STOP, 10)
    assert shard.handle(peer(0), stop) == [Outgoing(peer(1), stop)]


@pytest.mark.parametrize("again", [False, True], ids=["at first", "again"])
def test_a_signal_waits_for_workers_that_have_not_created_the_store(again: bool) -> None:
    """A session ignores signals before the `Welcome` of its own store, and where the store has no
    tables rank 0 waits for nobody.
    """
    shard = Shard(0, 3)
    for rank in range(3):
        shard.handle(peer(rank), m.Hello(rank, b""))
    created = m.Create(StoreSpec(workers=3, shards=1, tables=()))
    if again:
        for rank in range(3):
            shard.handle(peer(rank), created)
    for rank in range(2):
        shard.handle(peer(rank), created)
    stop = m.Signal(m.SignalKind.STOP, 3)
    assert shard.handle(peer(0), stop) == [Outgoing(peer(1), stop)]
    sent = [out.message for out in shard.handle(peer(2), created)]
    assert sent == ([m.Welcome(0), stop] if again else [stop])


def test_before_the_first_push_all_workers_may_create_the_store_anew() -> None:
    shard = joined(store())
    anew = store(start_clock=7)
    assert shard.handle(peer(1), m.Create(anew)) == [Outgoing(peer(1), m.Welcome(0))]
    (answer,) = shard.handle(peer(0), m.Push(0, 0, 0, 1.0, G))  # of the store before
    assert isinstance(answer.message, m.Fault)
    assert shard.handle(peer(0), m.Create(anew)) == [Outgoing(peer(0), m.Welcome(0))]
    sent = values(shard.handle(peer(0), m.Initial(0, 0, [array(1, 2, 3, 4)])))
    assert {to: (value.clock, value.own, value.array.tolist()) for to, value in sent.items()} == {
        peer(rank): (7, 7, [1, 2, 3, 4]) for rank in range(2)
    }
    for rank in range(2):
        shard.handle(peer(rank), m.Push(0, 0, 7, 1.0, G))
    assert shard.counts.updates == 1


def test_a_shard_without_chunks_may_hear_late_of_the_store_before() -> None:
    """Nobody waits for it: the first store of one worker comes after the second one of another."""
    spec = StoreSpec(workers=2, shards=2, tables=(TableSpec(name="w", size=4, rule=PLAIN),))
    shard = Shard(1, 2, b"")
    for rank in range(2):
        shard.handle(peer(rank), m.Hello(rank, b""))
    anew = replace(spec, start_clock=7)
    assert shard.handle(peer(0), m.Create(spec)) == []
    assert shard.handle(peer(0), m.Create(anew)) == [Outgoing(peer(0), m.Welcome(1))]
    assert shard.handle(peer(1), m.Create(spec)) == []
    assert shard.handle(peer(1), m.Create(anew)) == [Outgoing(peer(1), m.Welcome(1))]
    assert shard.counts.faults == 0


MEAN = Rule(kind=RuleKind.MEAN)
NOTHING = array()


def mean_store(rule: Rule = MEAN) -> StoreSpec:
    return StoreSpec(workers=2, shards=1, tables=(TableSpec(name="w", size=4, rule=rule),))


def test_a_mean_that_all_skip_stays() -> None:
    shard = joined(mean_store())
    for rank in range(2):
        sent = values(shard.handle(peer(rank), m.Push(0, 0, 0, 0.0, array(1, 2, 3, 4))))
    assert sent[peer(0)].array.tolist() == [1, 2, 3, 4]
    assert shard.handle(peer(1), m.Push(0, 0, 1, 0.0, NOTHING)) == []
    sent = values(shard.handle(peer(0), m.Push(0, 0, 1, 0.0, NOTHING)))
    assert {(v.clock, v.own, v.array.size) for v in sent.values()} == {(2, 2, 0)}
    for rank in range(2):
        sent = values(shard.handle(peer(rank), m.Push(0, 0, 2, 0.0, array(5, 5, 5, 5))))
    assert sent[peer(1)].array.tolist() == [5, 5, 5, 5]
    assert shard.counts.faults == 0


@pytest.mark.parametrize("first", [array(1, 2, 3, 4), NOTHING], ids=["pushes", "skips"])
def test_no_worker_skips_alone(first: m.Array) -> None:
    shard = joined(mean_store())
    other = array(1, 2, 3, 4) if first is NOTHING else NOTHING
    assert shard.handle(peer(0), m.Push(0, 0, 0, 0.0, first)) == []
    (answer,) = shard.handle(peer(1), m.Push(0, 0, 0, 0.0, other))
    assert isinstance(answer.message, m.Fault)
    assert "other than the others" in answer.message.reason
    assert values(shard.handle(peer(1), m.Push(0, 0, 0, 0.0, first)))


def test_only_means_are_skipped() -> None:
    shard = joined(mean_store(PLAIN))
    (answer,) = shard.handle(peer(0), m.Push(0, 0, 0, 0.0, NOTHING))
    assert isinstance(answer.message, m.Fault)
    assert "takes 4 elements; 0 came" in answer.message.reason


def two_planes(staleness: int = 0, **settings: object) -> StoreSpec:
    """Return a store of hosts with 3 and 2 workers: ranks 0 and 3 own w, 1 and 4 own v."""
    tables = tuple(
        TableSpec(name=name, size=4, staleness=staleness, rule=PLAIN, plane=plane)
        for plane, name in enumerate("wv")
    )
    return StoreSpec(workers=5, hosts=(3, 2), shards=1, tables=tables, **settings)  # type: ignore[arg-type]


def joined_by_planes(spec: StoreSpec) -> Shard:
    shard = Shard(0, spec.workers, b"")
    for rank in range(spec.workers):
        shard.handle(peer(rank), m.Hello(rank, b""))
        shard.handle(peer(rank), m.Create(spec))
    for table in (1, 0):
        sent = shard.handle(peer(table), m.Initial(table, 0, [np.zeros(4, np.float32)]))
    assert [(out.peer, out.message.table) for out in sent if isinstance(out.message, m.Value)] == [
        (peer(0), 0),
        (peer(3), 0),
        (peer(1), 1),
        (peer(4), 1),
    ]
    return shard


def test_values_of_a_table_go_to_the_workers_of_its_plane() -> None:
    shard = joined_by_planes(two_planes())
    found: list[list[bytes]] = []
    shard.allocate = lambda size, peers: found.append(list(peers))
    assert shard.handle(peer(4), m.Push(1, 0, 0, 0.5, array(2, 2, 2, 2))) == []
    sent = values(shard.handle(peer(1), m.Push(1, 0, 0, 0.5, array(0, 2, 4, 6))))
    assert sent.keys() == {peer(1), peer(4)}
    assert sent[peer(4)].array.tolist() == [-0.5, -1.0, -1.5, -2.0]
    assert found == [[peer(1), peer(4)]]


def test_each_plane_has_a_clock_of_its_own() -> None:
    shard = joined_by_planes(two_planes(staleness=1))
    for rank in (1, 4):
        shard.handle(peer(rank), m.Push(1, 0, 0, 0.0, G))
        sent = shard.handle(peer(rank), m.Clock(1))
    fresh = [out.peer for out in sent if out.message == m.Fresh(1)]
    assert fresh == [peer(1), peer(4)]


def test_a_part_of_the_norm_waits_until_rank_0_has_created_the_store() -> None:
    spec, shard = two_planes(clip=1.0, outside_norm=(0, 1)), Shard(0, 5)
    for rank in (1, 2, 3, 4):
        shard.handle(peer(rank), m.Hello(rank, b""))
        shard.handle(peer(rank), m.Create(spec))
    norm = m.OutsideNorm(1, 0, (2.0,))
    assert shard.handle(peer(1), norm) == []
    shard.handle(peer(0), m.Hello(0, b""))
    assert shard.handle(peer(0), m.Create(spec)) == [Outgoing(peer(0), norm)]


def test_the_total_goes_to_the_planes_with_gradients_outside() -> None:
    shard = joined_by_planes(two_planes(clip=1.0, outside_norm=(0, 1)))
    norm = m.OutsideNorm(1, 0, (2.0,))
    assert shard.handle(peer(1), norm) == [Outgoing(peer(0), norm)]
    for rank, table in ((3, 0), (4, 1), (0, 0)):
        assert shard.handle(peer(rank), m.Push(table, 0, 0, 1.0, G)) == []
    (part,) = shard.handle(peer(1), m.Push(1, 0, 0, 1.0, G))
    assert part == Outgoing(peer(0), m.PartialNorm(0, (8.0,)))
    total = m.TotalNorm(0, 10.0)
    sent = shard.handle(peer(0), total)
    assert [out.peer for out in sent if out.message == total] == [peer(3), peer(1), peer(4)]
    assert len(values(sent)) == 4


OUTSIDE = {"clip": 1.0, "outside_norm": (0, 1)}
PULLS: dict[str, object] = {"consistency": Consistency.SSP}
ONE_OUTSIDE: dict[str, object] = {"clip": 1.0, "outside_norm": (0,)}
OTHER_HOSTS = m.Create(replace(two_planes(), hosts=(2, 3)))
ILLEGAL_IN_PLANES: dict[str, tuple[dict[str, object], int, m.Message, str]] = {
    "push of another plane": ({}, 1, PUSH, "belongs to plane 0, which worker 1 is not of"),
    "push without a plane": ({}, 2, PUSH, "which worker 2 is not of"),
    "question of another plane": (PULLS, 3, m.Get(1, 0, 1), "which worker 3 is not of"),
    "initial of another plane": ({}, 0, m.Initial(1, 0, [G]), "from worker 1"),
    "initial of another host": ({}, 4, m.Initial(1, 0, [G]), "from worker 1"),
    "clock without a plane": ({}, 2, m.Clock(1), "no table is of its plane 2"),
    "norm of another plane": (OUTSIDE, 1, m.OutsideNorm(0, 0, ()), "for their own planes"),
    "norm of another host": (OUTSIDE, 4, m.OutsideNorm(1, 0, ()), "only workers of host 0 may"),
    "norm of rank 0": (OUTSIDE, 0, m.OutsideNorm(0, 0, ()), "for their own planes"),
    "norm of a plane without one": (ONE_OUTSIDE, 1, m.OutsideNorm(1, 0, ()), r"planes \[0\]"),
    "norm of a later iteration": (OUTSIDE, 1, m.OutsideNorm(1, 1, ()), "once in iteration 0"),
    "total of a later iteration": (OUTSIDE, 0, m.TotalNorm(1, 1.0), "iteration 1 is not awaited"),
    "gathering out of order": ({}, 1, m.Gather(1, b"", whole=False), "gathers 1; expected 0"),
    "other hosts": ({}, 0, OTHER_HOSTS, r"has hosts \(2, 3\); the first worker has \(3, 2\)"),
}


@pytest.mark.parametrize(
    ("settings", "rank", "message", "text"),
    ILLEGAL_IN_PLANES.values(),
    ids=ILLEGAL_IN_PLANES.keys(),
)
def test_what_is_illegal_in_planes_changes_nothing(
    settings: dict[str, object], rank: int, message: m.Message, text: str
) -> None:
    shard = joined_by_planes(two_planes(**settings))
    before = fingerprint(shard.present.cells), fingerprint(shard.present.outside)
    (answer,) = shard.handle(peer(rank), message)
    assert isinstance(answer.message, m.Fault)
    assert re.search(text, answer.message.reason)
    assert (fingerprint(shard.present.cells), fingerprint(shard.present.outside)) == before


def test_a_worker_that_has_left_is_named_to_its_plane() -> None:
    shard = joined_by_planes(two_planes())
    shard.handle(peer(4), m.Leave())
    assert shard.handle(peer(0), m.Push(0, 0, 0, 1.0, G)) == []
    gone = Outgoing(peer(1), m.Gone(4, 0))
    assert shard.handle(peer(1), m.Push(1, 0, 0, 1.0, G)) == [gone]
    assert shard.handle(peer(1), m.Gather(0, b"", whole=False)) == [gone]
    assert shard.handle(peer(0), m.Gather(0, b"", whole=False)) == []
    assert shard.handle(peer(0), m.Gather(0, b"")) == [Outgoing(peer(0), m.Gone(4, 0))]
