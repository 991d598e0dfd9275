"""Where a loop of a script takes memory snapshots."""

from __future__ import annotations

from poseidon.engine.module.memory import ScriptMemory, Snapshot


def memory(*, holds: bool = True, rewind: int = -1, resumes: bool = True) -> ScriptMemory:
    made = ScriptMemory(holds=holds, rewind=rewind, every=3, newest=None)
    made.resumes = resumes
    return made


def take(memory: ScriptMemory, content: bytes = b"state") -> None:
    memory.take(lambda: content, lambda payload: (payload, payload))


def test_a_snapshot_is_taken_where_an_iteration_begins_and_nowhere_else() -> None:
    own = memory()
    assert not own.enters(0)  # nothing has been trained
    assert own.enters(1)
    assert own.is_due()
    take(own)
    assert not own.enters(1)  # the loop of an evaluation after the first iteration
    assert [i for i in range(2, 6) if own.enters(i) and own.is_due()] == [4, 5]
    assert own.newest == Snapshot(1, b"state")


def test_a_loop_that_comes_late_takes_the_one_that_was_due_before() -> None:
    own = memory(rewind=10)
    assert own.enters(12)
    assert own.is_due()
    take(own)
    assert own.newest == Snapshot(12, b"state")


def test_a_worker_that_holds_none_keeps_none() -> None:
    own = memory(holds=False)
    assert own.enters(1)
    take(own, b"")
    assert own.newest is None


def test_a_script_that_never_resumes_has_none() -> None:
    assert not memory(resumes=False).enters(1)
