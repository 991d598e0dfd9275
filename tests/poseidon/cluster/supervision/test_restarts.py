"""When a job starts again, from where, how often, and what it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from poseidon.cluster.supervision.restarts import (
    LONGEST_PAUSE_S,
    MOST_IN_VAIN,
    RestartedJob,
    Restarts,
    StartingPoint,
    describe_ending,
)
from poseidon.cluster.supervision.state import JobResult, Outcome
from poseidon.errors import JobError, JobInterrupted

DONE = JobResult(outcome=Outcome.FINISHED, iteration=100)
SNAPSHOT = StartingPoint(state="snap_iter_50.solverstate", iteration=50)


def lost(iteration: int = 57) -> JobInterrupted:
    return JobInterrupted("worker 1 was killed", iteration=iteration, while_starting=False)


def absent() -> JobInterrupted:
    return JobInterrupted("no route to node1", iteration=0, while_starting=True)


class World:
    """Each start ends as the script says; the first is from the beginning, later ones from the
    snapshot.
    """

    def __init__(
        self,
        script: Sequence[JobResult | Exception],
        *,
        stop_at: int | None = None,
        without: str = "",
        points: Sequence[StartingPoint] = (),
        attempt_s: float = 0.0,
        memory: Sequence[int | None] = (),
    ) -> None:
        self._memory = list(memory)
        self.ended_paused = 0
        self.advice = self.from_disk = ""
        self._attempt_s = attempt_s
        self._now_s = 0.0
        self._points = list(points)
        self._without = without
        self._script = list(script)
        self._stop_at = stop_at
        self.starts: list[tuple[int, StartingPoint]] = []
        self.said: list[str] = []
        self.pauses: list[float] = []

    def start(self, attempt: int, point: StartingPoint) -> JobResult:
        self.starts.append((attempt, point))
        self._now_s += self._attempt_s
        end = self._script.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    def memory_point(self) -> tuple[StartingPoint, str] | None:
        iteration = self._memory.pop(0) if self._memory else None
        if iteration is None:
            return None
        return StartingPoint(iteration=iteration, memory=True), "with all clients"

    def how_to_restart(self) -> str:
        return self.advice

    def from_disk_because(self) -> str:
        return self.from_disk

    def end_paused(self) -> None:
        self.ended_paused += 1

    def starting_point(self) -> StartingPoint:
        if not self.starts:
            return StartingPoint()
        return self._points.pop(0) if self._points else SNAPSHOT

    def drop_missing_hosts(self) -> str:
        return self._without

    def report(self, text: str) -> None:
        self.said.append(text)

    def now(self) -> float:
        return self._now_s

    def pause(self, seconds: float) -> bool:
        self._now_s += seconds
        self.pauses.append(seconds)
        return len(self.pauses) == self._stop_at


def test_a_good_job_starts_once() -> None:
    world = World([DONE])
    ended = Restarts(world, most=3).run()
    assert world.starts == [(0, StartingPoint())]
    assert (ended.restarts, ended.repeated, world.said) == (0, 0, [])
    assert describe_ending("j", ended) == "job j finished at iteration 100"
    script = RestartedJob(result=replace(DONE, iteration=None), restarts=0, repeated=0)
    assert describe_ending("j", script) == "job j finished"


def test_a_loss_is_followed_by_a_start_from_the_snapshot() -> None:
    world = World([lost(), lost(51), DONE])
    ended = Restarts(world, most=3).run()
    assert world.starts == [(0, StartingPoint()), (1, SNAPSHOT), (2, SNAPSHOT)]
    assert world.said[0] == (
        "worker 1 was killed; restart 1 of 3: continuing from snap_iter_50.solverstate at iteration "
        "50, at least 7 iterations to repeat"
    )
    # the first start had got to 57
    assert world.said[1].endswith("at least 7 iterations to repeat")
    assert (
        describe_ending("j", ended)
        == "job j finished at iteration 100 after 2 restarts, at least 8 iterations repeated"
    )


def test_no_iterations_are_counted_where_the_script_loads_a_checkpoint_of_its_own() -> None:
    world = World([lost(), DONE], points=[StartingPoint(is_scripts=True)])
    ended = Restarts(world, most=1).run()
    assert world.said == [
        "worker 1 was killed; restart 1 of 1: continuing from the script's own checkpoint, or from "
        "the beginning"
    ]
    assert describe_ending("j", ended) == "job j finished at iteration 100 after 1 restart"


def test_a_loss_before_the_snapshot_was_reached_again_is_not_counted_twice() -> None:
    world = World([lost(), lost(0), DONE])
    assert Restarts(world, most=3).run().repeated == 7
    assert world.said[1].endswith("at least 7 iterations to repeat")


def test_a_snapshot_that_is_lost_with_its_host_repeats_more() -> None:
    world = World([lost(), absent(), DONE], points=[SNAPSHOT, StartingPoint()])
    assert Restarts(world, most=3).run().repeated == 57
    assert world.said[1] == (
        "no route to node1; trying again: continuing from the beginning, at least 57 iterations to "
        "repeat"
    )
    assert world.starts[-1] == (2, StartingPoint())


@pytest.mark.parametrize(("most", "words"), [(1, "once already"), (2, "2 times already")])
def test_there_is_an_end_to_it(most: int, words: str) -> None:
    world = World([lost()] * (most + 1))
    with pytest.raises(
        JobError, match=rf"worker 1 was killed; it had been started again {words}"
    ) as raised:
        Restarts(world, most=most).run()
    assert not isinstance(raised.value, JobInterrupted)
    assert len(world.starts) == most + 1


@pytest.mark.parametrize(
    ("loss", "advice", "told"),
    [
        (lost(), "", "worker 1 was killed"),
        (lost(), "add --max_restarts=N", "worker 1 was killed; add --max_restarts=N"),
        (absent(), "add --max_restarts=N", "no route to node1"),
    ],
)
def test_a_job_that_could_have_restarted_says_how(
    loss: JobInterrupted, advice: str, told: str
) -> None:
    world = World([loss])
    world.advice = advice
    with pytest.raises(JobError, match=rf"^{told}$"):
        Restarts(world, most=0).run()


def test_a_job_that_does_not_continue_from_memory_says_why_once() -> None:
    world = World([lost(), lost(), DONE])
    world.from_disk = "--elastic is 0"
    Restarts(world, most=3).run()
    why = "continuing from disk, not from memory: --elastic is 0"
    assert [line == why for line in world.said] == [False, True, False]


def test_what_a_new_start_does_not_mend_ends_the_job() -> None:
    world = World([lost(), JobError("the disk is full")])
    with pytest.raises(JobError, match="the disk is full"):
        Restarts(world, most=3).run()
    assert len(world.starts) == 2


def test_a_job_that_never_started_is_not_tried_again() -> None:
    world = World([absent()])
    with pytest.raises(JobError, match=r"^no route to node1$"):
        Restarts(world, most=3).run()
    assert len(world.starts) == 1


def test_a_host_has_time_to_come_back_and_that_costs_no_restart() -> None:
    world = World([lost(), *[absent()] * 6, lost(), DONE])
    ended = Restarts(world, most=2).run()
    assert ended.restarts == 2
    assert world.pauses[:7] == sorted(world.pauses[:7])
    assert world.pauses[6] <= LONGEST_PAUSE_S
    assert world.pauses[7] == world.pauses[0]
    assert world.said[1] == "no route to node1; trying again"


def test_a_host_that_never_comes_back_ends_the_job() -> None:
    world = World([lost(), *[absent()] * 100])
    with pytest.raises(JobError, match=r"no route to node1 \(waited \d+ s for it to come back\)"):
        Restarts(world, most=2, return_timeout_s=60.0).run()
    assert sum(world.pauses[1:]) == 60.0  # from the first start that failed


def test_attempts_to_reach_a_host_are_part_of_the_waiting() -> None:
    world = World([lost(), *[absent()] * 100], attempt_s=20.0)
    with pytest.raises(JobError, match=r"\(waited 67 s for it to come back\)"):
        Restarts(world, most=2, return_timeout_s=60.0).run()
    # Attempts end 0, 21.5, 43.75 and 67.125 s after the first failure.
    assert world.pauses == [1.0, 1.5, 2.25, 3.375]


def test_without_time_to_come_back_one_attempt_is_made() -> None:
    world = World([lost(), absent(), DONE], without="continuing without client 1 (node1)")
    Restarts(world, most=1, return_timeout_s=0.0).run()
    assert len(world.starts) == 3


def test_where_the_data_is_shared_the_job_goes_on_without_it() -> None:
    world = World([lost(), *[absent()] * 9, DONE], without="continuing without client 1 (node1)")
    ended = Restarts(world, most=2, return_timeout_s=60.0).run()
    assert ended.restarts == 1
    assert "continuing without client 1 (node1)" in world.said


def test_a_wish_to_stop_between_two_starts_is_heard() -> None:
    world = World([lost()], stop_at=1)
    with pytest.raises(JobError, match="worker 1 was killed; it was not started again"):
        Restarts(world, most=3).run()


def in_memory(iteration: int) -> StartingPoint:
    return StartingPoint(iteration=iteration, memory=True)


def test_a_loss_is_followed_at_once_by_a_start_from_memory_which_is_no_restart() -> None:
    world = World([lost(57), lost(0), absent(), DONE], memory=[55, 55, 55])
    ended = Restarts(world, most=1).run()
    assert world.starts == [(0, StartingPoint()), *((n, in_memory(55)) for n in (1, 2, 3))]
    assert world.pauses == []
    assert world.said[0] == (
        "worker 1 was killed; continuing from iteration 55 in memory, with all clients, at least 2 "
        "iterations to repeat"
    )
    assert (ended.restarts, ended.memory_starts, ended.repeated) == (0, 3, 2)
    assert describe_ending("j", ended) == (
        "job j finished at iteration 100 after 3 starts from memory, at least 2 iterations repeated"
    )


def test_where_no_memory_is_left_the_job_is_restarted_from_disk() -> None:
    world = World([lost(57), lost(60), DONE], memory=[55, None])
    ended = Restarts(world, most=1).run()
    assert world.starts == [(0, StartingPoint()), (1, in_memory(55)), (2, SNAPSHOT)]
    assert world.ended_paused == 1
    assert (ended.restarts, ended.memory_starts, ended.repeated) == (1, 1, 12)
    assert describe_ending("j", ended).endswith(
        "after 1 restart and 1 start from memory, at least 12 iterations repeated"
    )


def test_a_start_from_memory_that_fails_is_a_loss_of_a_job_that_ran() -> None:
    world = World([lost(57), absent(), DONE], memory=[55, None])
    ended = Restarts(world, most=1).run()
    assert world.starts == [(0, StartingPoint()), (1, in_memory(55)), (2, SNAPSHOT)]
    assert (ended.restarts, ended.memory_starts) == (1, 1)
    assert world.said[-1].startswith("no route to node1; restart 1 of 1: continuing from ")


def test_a_job_that_gets_no_further_from_memory_is_restarted_from_disk() -> None:
    losses = MOST_IN_VAIN + 1
    world = World([*(lost(57) for _ in range(losses)), DONE], memory=[55] * losses)
    ended = Restarts(world, most=1).run()
    assert (ended.restarts, ended.memory_starts) == (1, MOST_IN_VAIN)
    assert world.starts[-1] == (losses, SNAPSHOT)


def test_a_job_that_regroups_repeats_nothing() -> None:
    regrouped = JobResult(outcome=Outcome.REGROUPED, iteration=30)
    world = World([regrouped, DONE], memory=[30])
    ended = Restarts(world, most=1).run()
    assert world.starts == [(0, StartingPoint()), (1, in_memory(30))]
    assert world.said == ["continuing from iteration 30, with all clients"]
    assert describe_ending("j", ended) == "job j finished at iteration 100"


def test_a_job_that_loses_all_while_it_regroups_is_restarted_from_disk() -> None:
    regrouped = JobResult(outcome=Outcome.REGROUPED, iteration=60)
    world = World([regrouped, DONE])
    ended = Restarts(world, most=1).run()
    assert (ended.restarts, ended.repeated) == (1, 10)
    assert world.ended_paused == 1
