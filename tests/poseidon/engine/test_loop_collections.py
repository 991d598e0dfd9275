"""Two workers that make different calls of a group: one sentence names both, for each pair."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import nn

from poseidon.base.call_names import LoopPosition
from poseidon.cluster import events
from poseidon.cluster.supervision.positions import LoopPositions
from poseidon.engine.worker_context import LoopJob, WorkerContext
from poseidon.errors import UsageError
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind
from poseidon.torch.distribute import join
from poseidon.torch.group import Group
from poseidon.torch.options import DistributeOptions
from poseidon.torch.update_rules import SGD
from poseidon.torch.updates.worker_optimizer import WorkerOptimizerUpdate
from ps_server import PeerLost, PeerUnreachable, ServerError
from ps_server.errors import Interrupted
from ps_server.json_fields import fields_of
from tests.support.cluster import TIMEOUT_S
from tests.support.module_groups import OPTIMIZERS, How, RecordingJob, failures_of, member
from tests.support.sampling import sample

RULE, OPTIMIZER = SGD(lr=0.1), OPTIMIZERS["torch sgd"]
SERVER = member(ExchangeKind.SERVER)


def backward(module: nn.Module) -> None:
    module(torch.ones(2, 3)).square().mean().backward()


def step(module: nn.Module, group: Group) -> None:
    backward(module)
    group.step()


def averages(module: nn.Module, group: Group) -> None:
    backward(module)
    assert isinstance(group._update, WorkerOptimizerUpdate)
    group.average_gradients()


def means_within_a_step(module: nn.Module, group: Group) -> None:
    backward(module)
    group.mean(1.0)


def saves_within_a_step(module: nn.Module, group: Group) -> None:
    backward(module)
    group.save("net")


CALLS: dict[str, Callable[[nn.Module, Group], object]] = {
    "step": step,
    "average_gradients": averages,
    "settle": lambda module, group: group.settle(),
    "mean": lambda module, group: group.mean(1.0),
    "mean in a step": means_within_a_step,
    "state_dict": lambda module, group: group.state_dict(),
    "save": lambda module, group: group.save("net"),
    "save in a step": saves_within_a_step,
    "resume": lambda module, group: group.resume("none"),
    "load_state_dict": lambda module, group: group.load_state_dict(None),
    "end": lambda module, group: None,
    "break": lambda module, group: backward(module),
}
ENDS = ("end", "break")
"""The worker then leaves the `with` block; after other calls it makes a step and takes a mean."""
BEFORE_STEPS = ("resume", "load_state_dict")
TOGETHER = ({"step", "average_gradients"}, {"mean", "mean in a step"})
"""Calls that meet: each ends an iteration, or each is a mean between two of them."""
OWN_ERRORS = {
    "save in a step": "save() is between a backward pass and its step(); call it after step()",
    "break": "leaves the `with` block in step N, after backward(); call step() before `break`",
}
"""Calls that are wrong whatever the other worker does."""


def reported(position: LoopPosition) -> LoopPosition:
    """Return a position as the launcher reads it."""
    event = events.parse_event(
        {"event": "alive", "position": json.loads(json.dumps(fields_of(position)))}
    )
    assert isinstance(event, events.Alive)
    assert event.position is not None
    return event.position


class Launcher:
    """Compares positions of workers, as the launcher does, and ends the one that reports last."""

    def __init__(self) -> None:
        self._positions = LoopPositions()
        self._lock = threading.Lock()  # workers are threads here, and the launcher has one

    def __call__(self, rank: int, position: LoopPosition) -> None:
        with self._lock:
            sentence = self._positions.move(rank, reported(position))
        if sentence is not None:
            raise UsageError(sentence)


def failures_of_pair(calls: tuple[str, str], how: How, job: Membership) -> list[BaseException]:
    before = 0 if set(BEFORE_STEPS) & set(calls) else 1

    def run(rank: int, context: WorkerContext) -> None:
        module, call = nn.Linear(3, 2), calls[rank]
        with join(
            module, how if isinstance(how, SGD) else how(module), DistributeOptions(), context
        ) as group:
            for _ in range(before):
                step(module, group)
            CALLS[call](module, group)
            if call not in ENDS:
                group.step() if group.pending else step(module, group)
                group.mean(0.0)

    return failures_of(2, run, member=job, on_progress=Launcher())


def words_of(call: str, rank: int) -> str:
    """Return a pattern of the words with which a sentence names a worker's call."""
    name = call.removesuffix(" in a step")
    gone_on = rf"worker {rank} (continues|has continued|goes on|has gone on|has left|calls step\(\)|calls mean\(\))"
    if name == "end":
        return rf"worker {rank} (leaves the|waits at the end of its) `with` block|{gone_on}"
    return rf"worker {rank} (calls|waits in) {name}\(\)|{gone_on}"


def names_both(sentence: str, calls: tuple[str, str]) -> bool:
    return all(re.search(words_of(call, rank), sentence) for rank, call in enumerate(calls))


def check(calls: tuple[str, str], how: How, job: Membership) -> None:
    failures = failures_of_pair(calls, how, job)
    sentences = [re.sub(r"step \d+, after", "step N, after", str(failure)) for failure in failures]
    assert all(isinstance(failure, UsageError | PeerLost) for failure in failures), sentences
    assert all("\n" not in sentence for sentence in sentences)
    own = [OWN_ERRORS[call] for call in calls if call in OWN_ERRORS]
    if own:  # a worker that has left may be noticed before
        left = any("end" in calls and names_both(sentence, calls) for sentence in sentences)
        assert left or any(error in one for error in own for one in sentences), sentences
    elif set(calls) in TOGETHER:
        assert not sentences
    else:
        assert any(names_both(sentence, calls) for sentence in sentences), sentences


PAIRS = list(combinations(CALLS, 2))


@pytest.mark.parametrize("calls", PAIRS)
def test_different_calls_of_an_optimizers_group(
    calls: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check(calls, OPTIMIZER, SERVER)


@pytest.mark.parametrize(
    "calls", sample([(p,) for p in PAIRS if "average_gradients" not in p], every=4)
)
def test_different_calls_of_a_rules_group(
    calls: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check(calls, RULE, SERVER)


STALE = member(ExchangeKind.SERVER, staleness=1)
ROUNDS = replace(STALE, options=replace(STALE.options, local_steps=2))


@pytest.mark.parametrize(
    "calls", [("mean", "settle"), ("step", "mean"), ("mean", "end"), ("save", "step")]
)
@pytest.mark.parametrize(
    ("how", "job"),
    [(RULE, STALE), (RULE, ROUNDS), (OPTIMIZER, ROUNDS)],
    ids=["stale", "rounds of a rule", "rounds of an optimizer"],
)
def test_different_calls_where_others_are_waited_for_elsewhere(
    how: How,
    job: Membership,
    calls: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stale workers wait for each other in `settle`, and those with rounds at a round's end."""
    monkeypatch.chdir(tmp_path)
    check(calls, how, job)


@pytest.mark.parametrize("how", [RULE, OPTIMIZER])
def test_a_mean_of_one_worker_while_another_waits_in_its_step(how: How) -> None:
    """An all-reduce waits for all workers within the step, which has not ended then."""
    launcher, waits = Launcher(), threading.Event()

    def note(rank: int, position: LoopPosition) -> None:
        if position.collection == "step":
            waits.set()
        launcher(rank, position)

    def run(rank: int, context: WorkerContext) -> None:
        module = nn.Linear(3, 2)
        with join(
            module, how if isinstance(how, SGD) else how(module), DistributeOptions(), context
        ) as group:
            if rank == 0:
                step(module, group)
            else:
                assert waits.wait(TIMEOUT_S)
                group.mean(1.0)

    failures = failures_of(2, run, member=member(ExchangeKind.ALLREDUCE), on_progress=note)
    assert (
        "worker 1 waits in mean() after step 0, but worker 0 has continued to step 1: all "
        "workers must call mean() after the same number of steps"
    ) in map(str, failures)


@pytest.mark.parametrize("error", [SystemExit(0), ValueError("odd batch"), GeneratorExit("x")])
def test_an_exception_of_one_worker_while_another_waits_for_it_elsewhere(
    error: BaseException,
) -> None:
    """The workers of a host leave an exchange together."""
    positions, sentences = LoopPositions(), list[str | None]()
    waits = LoopPosition(collections=1, collection="torch.distributed.barrier")
    assert positions.move(0, reported(waits)) is None

    class NotingJob(LoopJob):
        def progressed(self, position: LoopPosition) -> None:
            sentences.append(positions.move(1, reported(position)))

    module, context = nn.Linear(3, 2), WorkerContext(job=NotingJob())
    with (
        pytest.raises(type(error)) as raised,
        join(module, OPTIMIZER(module), DistributeOptions(), context),
    ):
        raise error
    where = f"{Path(__file__).name}, line {raised.tb.tb_lineno}"
    assert sentences[-2:] == [
        f"worker 1: {where}: {type(error).__name__}: {error}; so it has left its `with` block, and "
        "worker 0 waits for it in torch.distributed.barrier() after step 0",
        None,
    ]


def test_a_connection_that_does_not_come_about_is_of_no_call() -> None:
    module, context = nn.Linear(3, 2), WorkerContext()
    with (
        pytest.raises(PeerUnreachable, match=r"^no answer$"),
        join(module, OPTIMIZER(module), DistributeOptions(), context) as group,
        group._loop.collections.calling("mean"),
    ):
        raise PeerUnreachable("no answer")


@pytest.mark.parametrize("error", [Interrupted("the job continues"), PeerLost("worker 2 is lost")])
@pytest.mark.parametrize("is_caught", [False, True])
def test_what_the_exchange_has_raised_is_not_reported_again(
    error: ServerError, is_caught: bool
) -> None:
    job = RecordingJob()
    module, context = nn.Linear(3, 2), WorkerContext(job=job)
    with (
        pytest.raises((type(error), ValueError)),
        join(module, OPTIMIZER(module), DistributeOptions(), context),
    ):
        try:
            raise error
        finally:
            if is_caught:
                raise ValueError("the loop has failed")
    assert {position.raised for position in job.positions} == {""}


@pytest.mark.parametrize(
    "others",
    [
        LoopPosition(collections=1, collection="close", raised="ValueError: it has it too"),
        LoopPosition(
            collections=2, collection="torch.distributed.barrier"
        ),  # after it has left with the same error
        LoopPosition(iterations=1, collection="step"),  # the exchange finds this one
        LoopPosition(iterations=1),
    ],
)
def test_an_exception_that_all_workers_may_have(others: LoopPosition) -> None:
    positions = LoopPositions()
    raised = LoopPosition(collections=1, collection="close", raised="ValueError: odd batch")
    assert positions.move(1, reported(raised)) is None
    assert positions.move(0, reported(others)) is None
    assert positions.move(1, reported(LoopPosition(collections=1))) is None


def test_a_mean_of_one_worker_meets_the_first_step_of_another() -> None:
    """The first step of an optimizer compares the replicas; that collection has a name too."""

    def run(rank: int, context: WorkerContext) -> None:
        module = nn.Linear(3, 2)
        with join(module, OPTIMIZER(module), DistributeOptions(), context) as group:
            (means_within_a_step if rank else step)(module, group)
            group.step()

    sentence = (
        "worker 0 calls step() in step 1, after backward(), but worker 1 calls mean() in step 1, "
        "after "
        "backward(); all workers must make the same calls in the same order"
    )
    assert sentence in map(str, failures_of(2, run, member=SERVER))


@pytest.mark.parametrize("how", [RULE, OPTIMIZER])
def test_a_block_that_ends_with_a_pass_too_few_says_what_can_follow(how: How) -> None:
    def run(rank: int, context: WorkerContext, *, passes: int) -> None:
        module = nn.Linear(3, 2)
        options = DistributeOptions(passes=passes)
        with join(module, how if isinstance(how, SGD) else how(module), options, context):
            backward(module)

    sentence = (
        "worker 0 leaves the `with` block in step 1, after backward(); call step(){} before "
        "`break`, "
        "`return` or the end of the block"
    )
    for passes, or_drop in ((1, ""), (2, " or drop()")):
        (failure,) = failures_of(1, partial(run, passes=passes))
        assert str(failure) == sentence.format(or_drop)
