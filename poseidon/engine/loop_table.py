"""The training loop of one worker as a table of states, and the sentences of what is not in it.

    state --event--> the next state, and what the driver does

                  forward           backward            pass             step
    fresh, ready ---------> begun -----------> backward -----> passed ---------> coming
                                                           or full     settle |
    ready <-------------------------------------------------------------------

Law: whatever changes the state of a loop is an event in the table. What is not in it is one error,
which names the state, the event and what is expected, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class TableKey(Enum):
    """A key of the table. Its hash is the object's: an Enum's own is a call in Python, and a step
    makes many look-ups.
    """

    __hash__ = object.__hash__


class State(TableKey):
    """Where a loop is."""

    NEW = "before all workers are here"
    AWAITING = "before the state is loaded from which the job continues"
    FRESH = "before the first step"
    READY = "after a step, with all its values"
    COMING = "after a step, whose values are on their way"
    AHEAD = "after a step, in the next iteration of the exchange"
    BEGUN = "after a forward pass"
    TURN = "in the turn of a later virtual worker"
    BACKWARD = "within a backward pass"
    PASSED = "after a backward pass"
    FULL = "after the last backward pass of a step"
    APPLYING = "within the step of an optimizer"
    MEANS = "after average_gradients()"
    CLOSED = "after close()"


class LoopEvent(TableKey):
    """What happens to a loop."""

    OPEN = "distribute()"
    """All workers have the same values."""
    AWAIT = "a job that continues"
    """The job continues from a saved state, which the script loads before its first step."""
    LOAD = "load_state_dict()"
    """A saved state is loaded."""
    LOAD_NOTHING = "resume()"
    """There is no saved state to load."""
    FORWARD = "a forward pass"
    """The module runs, and autograd notes it."""
    EVALUATE = "a forward pass without gradients"
    BACKWARD = "backward()"
    """A backward pass has reached the module."""
    PASS = "the end of backward()"
    DROP = "drop()"
    """The passes of the turn count for nothing."""
    REPEAT = "a repetition"
    """The gradients of all turns are dropped, and the iteration starts again with the next batches."""
    TURN = "the end of a turn"
    """The virtual worker has ended its passes; the next one of this process begins."""
    AVERAGE = "average_gradients()"
    """The gradients become means now."""
    OPTIMIZE = "the optimizer's step()"
    """An optimizer uses the gradients of this worker."""
    APPLY = "the end of the optimizer's step()"
    """An optimizer has used the means."""
    STEP = "step()"
    """The iteration ends."""
    SETTLE = "settle()"
    """All workers need the values after the last step."""
    LEAVE = "the end of the `with` block"
    SET_RATE = "lr"
    COLLECT = "a collection"
    CLOSE = "close()"


class Act(TableKey):
    """What a driver does."""

    START = "begin an iteration, whose values are on their way"
    START_PRESENT = "begin an iteration with all values"
    SEND = "send the gradients that have not left"
    FINISH = "end the iteration"
    NEXT_TURN = "give the module and the exchange to the next virtual worker"
    FORGET = "forget gradients that have not left"
    REPEAT = "begin the first backward pass of the iteration once more"
    ABANDON = "let gradients that have left count for nothing"
    WAIT = "wait for all values"
    WAIT_LAST = "wait for all values, unless a worker is lost"
    SETTLE = "bring the values after all workers' steps"
    CLOSE = "leave the exchange"


class Applies(Enum):
    """What applies gradients to the parameters. It decides which events are legal."""

    SHARDS = "a rule of the exchange: parameters change from the last backward pass on"
    WORKERS = "an optimizer of the worker, on means"
    TURNS = "an optimizer of the worker, on means over several turns, which cannot be taken back"
    ROUNDS = "an optimizer of the worker, on the worker's own gradients"


@dataclass(frozen=True, slots=True)
class Transition:
    """The state after an event, and what the driver does. None: the state stays."""

    state: State | None = None
    acts: tuple[Act, ...] = ()


Table = Mapping[State, Mapping[LoopEvent, Transition]]


STAYS = Transition()


CLOSES = {LoopEvent.CLOSE: Transition(State.CLOSED, (Act.CLOSE,))}


COLLECTS = {LoopEvent.COLLECT: STAYS}


def table_of(applies: Applies, *, behind: bool = False, alone: bool = False) -> Table:
    """Return the table of a loop.

    Args:
        behind: whether values may lack steps of other workers (staleness, rounds of local steps).
        alone: whether there are no other workers; then a closed loop still has all values.
    """
    closed = {LoopEvent.CLOSE: STAYS, LoopEvent.DROP: STAYS}
    if alone:
        closed |= {**COLLECTS, LoopEvent.SETTLE: Transition(None, (Act.SETTLE,))}
    at_rest = {**COLLECTS, **CLOSES, LoopEvent.DROP: STAYS, LoopEvent.SET_RATE: STAYS}
    here = {
        **at_rest,
        LoopEvent.FORWARD: Transition(State.BEGUN, (Act.START_PRESENT,)),
        LoopEvent.BACKWARD: Transition(State.BACKWARD, (Act.START_PRESENT,)),
        LoopEvent.EVALUATE: STAYS,
        LoopEvent.SETTLE: Transition(None, (Act.SETTLE,)),
        LoopEvent.LEAVE: Transition(None, (Act.SETTLE,)),
    }
    coming = {
        **at_rest,
        LoopEvent.FORWARD: Transition(State.BEGUN, (Act.START,)),
        LoopEvent.BACKWARD: Transition(State.BACKWARD, (Act.START,)),
        LoopEvent.EVALUATE: Transition(State.READY, (Act.WAIT,)),
        LoopEvent.SETTLE: Transition(State.READY, (Act.SETTLE,)),
        LoopEvent.LEAVE: Transition(State.READY, (Act.SETTLE,)),
        LoopEvent.CLOSE: Transition(State.CLOSED, (Act.WAIT_LAST, Act.CLOSE)),
    }
    in_turn = {
        **COLLECTS,
        **CLOSES,
        LoopEvent.FORWARD: STAYS,
        LoopEvent.BACKWARD: Transition(State.BACKWARD),
        LoopEvent.EVALUATE: Transition(None, (Act.WAIT,)),
        LoopEvent.DROP: STAYS,
    }
    waits = Transition(None, (Act.WAIT,))
    begun = {**in_turn, LoopEvent.SETTLE: waits, LoopEvent.LEAVE: waits}
    if behind:  # a backward pass may follow, with values from before
        begun = {**in_turn, LoopEvent.LEAVE: Transition(None, (Act.SETTLE,))}
    ends = {LoopEvent.TURN: Transition(State.BEGUN, (Act.NEXT_TURN,))}
    if applies is Applies.ROUNDS:
        ends = {LoopEvent.OPTIMIZE: Transition(State.APPLYING, (Act.SEND,))}
    elif applies is Applies.SHARDS:
        ends[LoopEvent.STEP] = Transition(State.COMING, (Act.SEND, Act.FINISH))
    else:
        acts = (Act.SEND, Act.FINISH, Act.START, Act.WAIT)
        ends[LoopEvent.AVERAGE] = Transition(State.MEANS, acts)
    passed = {**in_turn, **ends, LoopEvent.DROP: Transition(State.BEGUN, (Act.FORGET,))}
    full = without(passed, LoopEvent.BACKWARD)
    if applies is Applies.SHARDS:
        full = without(full, LoopEvent.FORWARD, LoopEvent.EVALUATE)
        full[LoopEvent.REPEAT] = Transition(State.BEGUN, (Act.REPEAT,))
    if applies in (Applies.SHARDS, Applies.TURNS):
        full = without(full, LoopEvent.DROP)
    elif applies is Applies.WORKERS:
        full = {**full, LoopEvent.DROP: Transition(State.COMING, (Act.ABANDON, Act.FINISH))}
    loads = {**here, LoopEvent.LOAD: Transition(State.READY)}
    return {
        State.NEW: {LoopEvent.OPEN: Transition(State.FRESH), **COLLECTS, **CLOSES},
        State.AWAITING: {
            **without(loads, LoopEvent.FORWARD, LoopEvent.BACKWARD),
            LoopEvent.LOAD_NOTHING: Transition(State.FRESH),
        },
        State.FRESH: {
            **loads,
            LoopEvent.AWAIT: Transition(State.AWAITING),
            LoopEvent.LOAD_NOTHING: STAYS,
        },
        State.READY: here,
        State.COMING: coming,
        State.AHEAD: {**begun, LoopEvent.FORWARD: Transition(State.BEGUN)},
        State.BEGUN: begun,
        State.TURN: in_turn,
        State.BACKWARD: {
            **without(in_turn, LoopEvent.DROP, LoopEvent.BACKWARD),
            LoopEvent.PASS: Transition(State.PASSED),
        },
        State.PASSED: passed,
        State.FULL: full,
        State.APPLYING: {
            **without(in_turn, LoopEvent.DROP, LoopEvent.BACKWARD),
            LoopEvent.TURN: Transition(State.BEGUN, (Act.NEXT_TURN,)),
            LoopEvent.STEP: Transition(State.COMING, (Act.FINISH,)),
        },
        State.MEANS: {**begun, LoopEvent.APPLY: Transition(State.AHEAD)},
        State.CLOSED: closed,
    }


def without(
    events: Mapping[LoopEvent, Transition], *some: LoopEvent
) -> dict[LoopEvent, Transition]:
    """Return a row of a table without some events."""
    return {event: transition for event, transition in events.items() if event not in some}


BETWEEN = (State.NEW, State.AWAITING, State.FRESH, State.READY, State.COMING, State.CLOSED)
"""The states between two iterations of the exchange."""


ILLEGAL = "{call} comes {state}; expected one of: {legal}"
_CLOSED = "{call} comes after close(), or after the `with` block of the group"
_WITHIN = (
    "step() or average_gradients() within a backward pass, for example in a hook of a parameter; "
    "call it after backward()"
)
_NO_PASS = (
    "step() or average_gradients() without a backward pass before it; call backward(), or "
    "torch.autograd.backward(parameters, gradients) for gradients that the script has computed "
    "itself"
)
_USED = (
    "the module was used after {passes} backward pass(es) and before step(), while its parameters "
    "change; call step() first, give distribute() passes= if a step adds up several passes, or "
    "set requires_grad_(False) on the module while the loss of a different module passes through "
    "it"
)
_SETTLE = "{call} is between a backward pass and its step(); call it after step()"
_LEAVE = (
    "worker {rank} leaves the `with` block {place}; call step()%s before `break`, `return` or the "
    "end of the block"
)
_NOT_LOADED = (
    "the job continues from {source}, but the script has begun a step without it; call "
    "{group}.resume() before the first step"
)
_BEHIND = "{call} comes after a forward pass of the next step; call it right after step()"
_ENDS: Mapping[State | None, str] = {
    None: _NO_PASS,
    State.BACKWARD: _WITHIN,
    State.CLOSED: _CLOSED,
}
SENTENCES: Mapping[LoopEvent, Mapping[State | None, str]] = {
    LoopEvent.FORWARD: {State.FULL: _USED, State.AWAITING: _NOT_LOADED},
    LoopEvent.EVALUATE: {State.FULL: _USED},
    LoopEvent.BACKWARD: {
        State.FULL: "backward() has run more than {most} time(s) without step(); call step() after it, or "
        "give distribute() passes= if a step adds up several passes",
        State.AWAITING: _NOT_LOADED,
    },
    LoopEvent.DROP: {
        State.BACKWARD: "drop() within a backward pass; call it after the pass",
        State.FULL: "drop(), or another backward(), comes before step(), but the gradients of pass "
        "{passes} have been sent to the shards, which cannot take them back; call step(), or "
        "requires_grad_(False) on the module while the loss of a different module passes through it",
    },
    LoopEvent.STEP: _ENDS,
    LoopEvent.AVERAGE: _ENDS,
    LoopEvent.OPTIMIZE: _ENDS,
    LoopEvent.TURN: _ENDS,
    LoopEvent.SETTLE: {
        None: _SETTLE,
        State.AHEAD: _BEHIND,
        State.BEGUN: _BEHIND,
        State.MEANS: _BEHIND,
        State.TURN: "{call} comes after the step() of virtual worker {before}, and this worker computes "
        "for virtual worker {virtual_worker} in the same step; call {call} where step() has "
        "returned True",
        State.CLOSED: _CLOSED,
    },
    LoopEvent.LEAVE: {
        None: _LEAVE % " or drop()",
        State.FULL: _LEAVE % "",
        State.TURN: "worker {rank} leaves the `with` block within step {step}, before the turn of virtual "
        "worker {virtual_worker}; end the loop where step() has returned True",
    },
    LoopEvent.LOAD: {
        None: "a state can be loaded only before the first step, but this group has begun step "
        "{step}; call resume() or load_state_dict() right after distribute()",
        State.CLOSED: _CLOSED,
    },
    LoopEvent.SET_RATE: {
        None: "lr was set to {rate} within a step; set it before the forward pass"
    },
    LoopEvent.COLLECT: {State.CLOSED: _CLOSED},
}
"""The sentence of an event that is not legal, by the state; None: in any other state."""
