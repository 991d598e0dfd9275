"""The table of a training loop."""

from __future__ import annotations

import random

import pytest

from poseidon.engine.session import (
    SENTENCES,
    Act,
    Applies,
    Event,
    LoopPosition,
    State,
    TrainingSession,
    table_of,
)
from poseidon.errors import UsageError

STEP = (Event.FORWARD, Event.BACKWARD, Event.PASS)
ENDS = {
    Applies.SHARDS: (Event.STEP,),
    Applies.WORKERS: (Event.AVERAGE, Event.APPLY),
    Applies.TURNS: (Event.AVERAGE, Event.APPLY),
    Applies.ROUNDS: (Event.OPTIMIZE, Event.STEP),
}


def opened(applies: Applies = Applies.SHARDS, **options: int) -> TrainingSession:
    session = TrainingSession(applies, **options)  # type: ignore[arg-type]
    session.on(Event.OPEN)
    return session


def after(session: TrainingSession, *events: Event) -> tuple[Act, ...]:
    acts: tuple[Act, ...] = ()
    for event in events:
        acts = session.on(event)
    return acts


@pytest.mark.parametrize("applies", Applies)
def test_each_state_can_be_reached_and_left(applies: Applies) -> None:
    table = table_of(applies)
    assert set(table) == set(State)
    reached = {State.NEW, State.AWAITING, State.FULL, State.TURN}  # the last three by counts
    for events in table.values():
        reached |= {one.state for one in events.values() if one.state is not None}
    unused = {
        State.APPLYING: applies is not Applies.ROUNDS,
        State.MEANS: applies in (Applies.ROUNDS, Applies.SHARDS),
        State.AHEAD: False,
    }
    assert {s for s in State if s not in reached} <= {*unused}
    for state, events in table.items():
        assert Event.CLOSE in events, state
        assert events[Event.CLOSE].state in (State.CLOSED, None)


@pytest.mark.parametrize("applies", Applies)
@pytest.mark.parametrize("turns", [1, 3])
def test_a_step_ends_once_each_turn_has(applies: Applies, turns: int) -> None:
    session = opened(applies, turns=turns)
    for turn in range(turns):
        assert session.turn == turn
        assert session.is_first_turn == (turn == 0)
        assert session.is_last_turn == (turn == turns - 1)
        after(session, *STEP)
        if turn < turns - 1:
            if applies is Applies.ROUNDS:
                assert session.on(Event.OPTIMIZE) == (Act.SEND,)
            assert session.on(Event.TURN) == (Act.NEXT_TURN,)
            assert session.state is State.TURN
    acts = [act for event in ENDS[applies] for act in session.on(event)]
    assert acts.index(Act.SEND) < acts.index(Act.FINISH)
    assert session.is_first_turn
    assert session.passes == 0


def test_passes_add_up_to_the_last_one() -> None:
    session = opened(passes=2)
    after(session, *STEP)
    assert (session.state, session.passes) == (State.PASSED, 1)
    after(session, Event.FORWARD, Event.BACKWARD, Event.PASS)
    assert (session.state, session.passes) == (State.FULL, 2)
    with pytest.raises(UsageError, match=r"run more than 2 time\(s\) without step\(\)"):
        session.on(Event.BACKWARD)
    assert (session.state, session.passes) == (State.FULL, 2)


@pytest.mark.parametrize(
    ("applies", "acts", "state"),
    [
        (Applies.WORKERS, (Act.ABANDON, Act.FINISH), State.COMING),
        (Applies.ROUNDS, (Act.FORGET,), State.BEGUN),
        (Applies.SHARDS, None, State.FULL),
        (Applies.TURNS, None, State.FULL),
    ],
)
def test_what_drops_gradients_that_have_left(
    applies: Applies, acts: tuple[Act, ...] | None, state: State
) -> None:
    session = opened(applies)
    after(session, *STEP)
    if acts is None:
        with pytest.raises(UsageError, match="of pass 1 have been sent to the shards"):
            session.on(Event.DROP)
    else:
        assert session.on(Event.DROP) == acts
    assert session.state is state


@pytest.mark.parametrize(
    ("events", "event", "sentence"),
    [
        ((), Event.STEP, r"without a backward pass before it; expected backward\(\)"),
        (STEP[:2], Event.STEP, "within a backward pass, for example in a hook"),
        (STEP, Event.FORWARD, r"used after 1 backward pass\(es\) and before step\(\)"),
        (STEP, Event.SETTLE, r"settle\(\) stands between a backward pass and its step\(\)"),
        (STEP, Event.LOAD, r"this group has begun step 1; expected resume\(\)"),
        (STEP[:1], Event.SET_RATE, "lr was set to 0.5 within a step; expected before"),
        (STEP[:2], Event.DROP, r"drop\(\) within a backward pass; expected after it"),
        (
            STEP,
            Event.LEAVE,
            r"worker 2 leaves .* in step 1, after backward\(\); expected step\(\) b",
        ),
        (STEP[:2], Event.LEAVE, r"expected step\(\) or drop\(\) before `break`"),
        ((), Event.APPLY, r"comes before the first step; expected one of: a collection, close\(\)"),
        ((Event.CLOSE,), Event.STEP, r"step\(\) after close\(\), or after the `with` block"),
        ((Event.CLOSE,), Event.COLLECT, r"mean\(\) after close\(\)"),
    ],
)
def test_what_is_not_legal_changes_nothing(
    events: tuple[Event, ...], event: Event, sentence: str
) -> None:
    session = opened(rank=2)
    after(session, *events)
    before = session.state, session.passes, session.position()
    words = {"rate": 0.5} if event is Event.SET_RATE else {}
    if event is Event.COLLECT:
        words = {"call": "mean()"}  # type: ignore[dict-item]
    with pytest.raises(UsageError, match=sentence):
        session.on(event, **words)
    assert (session.state, session.passes, session.position()) == before


def test_settling_late_needs_values_that_are_whole() -> None:
    exact, behind = opened(), opened(behind=True)
    for session in (exact, behind):
        session.on(Event.FORWARD)
    assert exact.on(Event.SETTLE) == (Act.WAIT,)
    with pytest.raises(UsageError, match="comes after a forward pass of the next step"):
        behind.on(Event.SETTLE)


def test_one_worker_alone_may_save_after_its_block() -> None:
    session = opened(alone=True)
    after(session, *STEP, Event.STEP, Event.CLOSE)
    assert session.on(Event.SETTLE) == (Act.SETTLE,)
    session.check(Event.COLLECT)


def test_a_loop_that_awaits_a_state_begins_no_step_without_it() -> None:
    session = opened()
    session.await_state()
    assert session.on(Event.EVALUATE) == ()
    with pytest.raises(UsageError, match=r"continues from c\.pt, and the script has begun a step"):
        session.on(Event.FORWARD, source="c.pt", group="group")
    session.on(Event.LOAD)
    assert session.on(Event.FORWARD) == (Act.START_PRESENT,)


def test_values_on_their_way_are_waited_for_once() -> None:
    session = opened()
    after(session, *STEP, Event.STEP)
    assert session.state is State.COMING
    assert session.on(Event.EVALUATE) == (Act.WAIT,)
    assert session.on(Event.FORWARD) == (Act.START_PRESENT,)
    after(session, *STEP[1:], Event.STEP)
    assert session.on(Event.FORWARD) == (Act.START,)


def test_counts_and_the_step_under_way() -> None:
    session = opened()
    assert session.last_step == 0
    session.on(Event.FORWARD)
    assert session.last_step == 1
    after(session, *STEP[1:], Event.STEP)
    session.end_iteration(finished=1)
    session.steps += 1
    assert session.last_step == 1
    assert session.place == "after step 1"
    session.end_iteration(finished=4)  # a quorum has made two without this worker
    assert (session.iterations, session.steps, session.left_out) == (4, 3, 2)
    assert session.position("mean") == LoopPosition(steps=3, iterations=4, collection="mean")


def test_each_sentence_is_of_an_event_that_is_not_legal_there() -> None:
    tables = [table_of(applies, behind=behind) for applies in Applies for behind in (False, True)]
    for event, sentences in SENTENCES.items():
        for state in sentences:
            assert state is None or any(event not in table[state] for table in tables)


@pytest.mark.parametrize("applies", Applies)
@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_iterations_begin_and_end_in_turn(applies: Applies, seed: int) -> None:
    chance = random.Random(f"{applies} {seed}")
    turns, passes = chance.randint(1, 3), chance.randint(1, 3)
    if turns > 1 and applies is Applies.WORKERS:
        turns = 1  # then it is `TURNS`
    session = opened(applies, turns=turns, passes=passes, behind=seed % 2)
    under_way = False
    rare = (Event.CLOSE, Event.OPEN)
    events = [event for event in Event if event not in rare]
    for _ in range(400):
        before = session.state, session.passes, session.turn
        # a driver ends a turn or the step by the number of turns
        wrong = {True: Event.TURN, False: Event.STEP}[session.is_last_turn]
        event = chance.choice([one for one in events if one is not wrong])
        if event is Event.AVERAGE and not session.is_last_turn:
            continue
        try:
            acts = session.on(event, rate=1, source="", group="", before=0, virtual_worker=0)
        except UsageError:
            assert (session.state, session.passes, session.turn) == before
            continue
        for act in acts:
            if act in (Act.START, Act.START_PRESENT):
                assert not under_way
                under_way = True
            elif act is Act.FINISH:
                assert under_way
                under_way = False
            elif act in (Act.SEND, Act.NEXT_TURN, Act.FORGET, Act.ABANDON):
                assert under_way
        assert under_way == session.has_begun
        assert session.passes <= passes
        assert 0 <= session.turn < turns
        assert session.turn == 0 or under_way
