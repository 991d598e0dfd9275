"""The table of a training loop."""

from __future__ import annotations

import random

import pytest

from poseidon.base.call_names import LoopPosition
from poseidon.engine.loop_table import SENTENCES, Act, Applies, LoopEvent, State, table_of
from poseidon.engine.session import TrainingSession
from poseidon.errors import UsageError

STEP = (LoopEvent.FORWARD, LoopEvent.BACKWARD, LoopEvent.PASS)
ENDS = {
    Applies.SHARDS: (LoopEvent.STEP,),
    Applies.WORKERS: (LoopEvent.AVERAGE, LoopEvent.APPLY),
    Applies.TURNS: (LoopEvent.AVERAGE, LoopEvent.APPLY),
    Applies.ROUNDS: (LoopEvent.OPTIMIZE, LoopEvent.STEP),
}


def opened(applies: Applies = Applies.SHARDS, **options: int) -> TrainingSession:
    session = TrainingSession(applies, **options)  # type: ignore[arg-type]
    session.on(LoopEvent.OPEN)
    return session


def after(session: TrainingSession, *events: LoopEvent) -> tuple[Act, ...]:
    acts: tuple[Act, ...] = ()
    for event in events:
        acts = session.on(event)
    return acts


@pytest.mark.parametrize("applies", Applies)
def test_each_state_can_be_reached_and_left(applies: Applies) -> None:
    table = table_of(applies)
    assert set(table) == set(State)
    reached = {State.NEW, State.FULL, State.TURN}  # the last two by counts
    for events in table.values():
        reached |= {one.state for one in events.values() if one.state is not None}
    unused = {
        State.APPLYING: applies is not Applies.ROUNDS,
        State.MEANS: applies in (Applies.ROUNDS, Applies.SHARDS),
        State.AHEAD: False,
    }
    assert {s for s in State if s not in reached} <= {*unused}
    for state, events in table.items():
        assert LoopEvent.CLOSE in events, state
        assert events[LoopEvent.CLOSE].state in (State.CLOSED, None)


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
                assert session.on(LoopEvent.OPTIMIZE) == (Act.SEND,)
            assert session.on(LoopEvent.TURN) == (Act.NEXT_TURN,)
            assert session.state is State.TURN
    acts = [act for event in ENDS[applies] for act in session.on(event)]
    assert acts.index(Act.SEND) < acts.index(Act.FINISH)
    assert session.is_first_turn
    assert session.passes == 0


def test_passes_add_up_to_the_last_one() -> None:
    session = opened(passes=2)
    after(session, *STEP)
    assert (session.state, session.passes) == (State.PASSED, 1)
    after(session, LoopEvent.FORWARD, LoopEvent.BACKWARD, LoopEvent.PASS)
    assert (session.state, session.passes) == (State.FULL, 2)
    with pytest.raises(UsageError, match=r"run more than 2 time\(s\) without step\(\)"):
        session.on(LoopEvent.BACKWARD)
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
            session.on(LoopEvent.DROP)
    else:
        assert session.on(LoopEvent.DROP) == acts
    assert session.state is state


@pytest.mark.parametrize(
    ("events", "event", "sentence"),
    [
        ((), LoopEvent.STEP, r"without a backward pass before it; call backward\(\)"),
        (STEP[:2], LoopEvent.STEP, "within a backward pass, for example in a hook"),
        (STEP, LoopEvent.FORWARD, r"used after 1 backward pass\(es\) and before step\(\)"),
        (STEP, LoopEvent.SETTLE, r"settle\(\) is between a backward pass and its step\(\)"),
        (STEP, LoopEvent.LOAD, r"this group has begun step 1; call resume\(\)"),
        (STEP[:1], LoopEvent.SET_RATE, "lr was set to 0.5 within a step; set it before"),
        (STEP[:2], LoopEvent.DROP, r"drop\(\) within a backward pass; call it after"),
        (STEP, LoopEvent.LEAVE, r"worker 2 leaves .* in step 1, after backward\(\)"),
        (STEP[:2], LoopEvent.LEAVE, r"call step\(\) or drop\(\) before `break`"),
        ((), LoopEvent.APPLY, "comes before the first step; expected one of: a collection"),
        ((LoopEvent.CLOSE,), LoopEvent.STEP, r"step\(\) comes after close\(\)"),
        ((LoopEvent.CLOSE,), LoopEvent.COLLECT, r"mean\(\) comes after close\(\)"),
    ],
)
def test_what_is_not_legal_changes_nothing(
    events: tuple[LoopEvent, ...], event: LoopEvent, sentence: str
) -> None:
    session = opened(rank=2)
    after(session, *events)
    before = session.state, session.passes, session.position()
    words = {"rate": 0.5} if event is LoopEvent.SET_RATE else {}
    if event is LoopEvent.COLLECT:
        words = {"call": "mean()"}  # type: ignore[dict-item]
    with pytest.raises(UsageError, match=sentence):
        session.on(event, **words)
    assert (session.state, session.passes, session.position()) == before


def test_settling_late_needs_values_that_are_whole() -> None:
    exact, behind = opened(), opened(behind=True)
    for session in (exact, behind):
        session.on(LoopEvent.FORWARD)
    assert exact.on(LoopEvent.SETTLE) == (Act.WAIT,)
    with pytest.raises(UsageError, match="comes after a forward pass of the next step"):
        behind.on(LoopEvent.SETTLE)
    assert behind.on(LoopEvent.LEAVE) == (Act.SETTLE,)


def test_one_worker_alone_may_save_after_its_block() -> None:
    session = opened(alone=True)
    after(session, *STEP, LoopEvent.STEP, LoopEvent.CLOSE)
    assert session.on(LoopEvent.SETTLE) == (Act.SETTLE,)
    session.check(LoopEvent.COLLECT)


def test_a_loop_that_awaits_a_state_begins_no_step_without_it() -> None:
    session = opened()
    session.on(LoopEvent.AWAIT)
    assert session.on(LoopEvent.EVALUATE) == ()
    with pytest.raises(UsageError, match=r"continues from c\.pt, but the script has begun a step"):
        session.on(LoopEvent.FORWARD, source="c.pt", group="group")
    session.on(LoopEvent.LOAD)
    assert session.on(LoopEvent.FORWARD) == (Act.START_PRESENT,)


def test_values_on_their_way_are_waited_for_once() -> None:
    session = opened()
    after(session, *STEP, LoopEvent.STEP)
    assert session.state is State.COMING
    assert session.on(LoopEvent.EVALUATE) == (Act.WAIT,)
    assert session.on(LoopEvent.FORWARD) == (Act.START_PRESENT,)
    after(session, *STEP[1:], LoopEvent.STEP)
    assert session.on(LoopEvent.FORWARD) == (Act.START,)


def test_counts_and_the_step_under_way() -> None:
    session = opened()
    assert session.last_step == 0
    session.on(LoopEvent.FORWARD)
    assert session.last_step == 1
    after(session, *STEP[1:], LoopEvent.STEP)
    session.end_iteration(finished=1)
    session.steps += 1
    assert session.last_step == 1
    assert session.place == "after step 1"
    session.end_iteration(finished=4)  # a quorum has made two without this worker
    assert (session.iterations, session.steps, session.left_out) == (4, 3, 2)
    position = LoopPosition(steps=3, iterations=4, collection="mean", loop=None)
    assert session.position("mean") == position


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
    rare = (LoopEvent.CLOSE, LoopEvent.OPEN)
    events = [event for event in LoopEvent if event not in rare]
    for _ in range(400):
        before = session.state, session.passes, session.turn
        # a driver ends a turn or the step by the number of turns
        wrong = {True: LoopEvent.TURN, False: LoopEvent.STEP}[session.is_last_turn]
        event = chance.choice([one for one in events if one is not wrong])
        if event is LoopEvent.AVERAGE and not session.is_last_turn:
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
