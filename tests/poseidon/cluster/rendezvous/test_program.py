"""A program that a task runs: its bytes, its end, its stop."""

from __future__ import annotations

import os
import queue
import sys
from collections.abc import Sequence

import pytest

from poseidon.cluster.rendezvous.program import CANNOT_START, TaskProgram
from poseidon.cluster.rendezvous.wire import Kind, Message

LIMIT_S = 30.0

pytestmark = pytest.mark.processes


def start(*argv: str) -> tuple[TaskProgram, queue.Queue[Message]]:
    told: queue.Queue[Message] = queue.Queue()
    return TaskProgram(5, argv, {"NAME": "value"}, told.put), told


def said(told: queue.Queue[Message]) -> tuple[dict[Kind, bytes], int]:
    """All that was said up to the end, and the exit status."""
    outputs = {Kind.OUTPUT: b"", Kind.ERRORS: b""}
    while (message := told.get(timeout=LIMIT_S)).kind is not Kind.ENDED:
        assert message.program == 5
        outputs[message.kind] += message.payload
    assert told.empty()
    return outputs, message.status


@pytest.mark.parametrize("pieces", [[b"abc", b"\n\xff\x00"], [bytes(300_000)], []])
def test_bytes_pass(pieces: Sequence[bytes]) -> None:
    program, told = start("cat")
    for piece in pieces:
        program.feed(piece)
    program.feed(b"")
    assert said(told) == ({Kind.OUTPUT: b"".join(pieces), Kind.ERRORS: b""}, 0)
    assert program.ended
    program.stop(0.0)


def test_the_environment_is_the_one_given() -> None:
    program, told = start("/bin/sh", "-c", 'echo "$NAME" >&2; exit 4')
    assert said(told) == ({Kind.OUTPUT: b"", Kind.ERRORS: b"value\n"}, 4)
    program.stop(0.0)


def test_a_program_that_is_not_there() -> None:
    program, told = start("/no/such")
    outputs, status = said(told)
    assert status == CANNOT_START and b"/no/such" in outputs[Kind.ERRORS]
    assert program.ended
    program.feed(b"x")
    program.stop(0.0)
    program.kill()


def test_stopping_ends_the_input_first() -> None:
    program, told = start("cat")
    program.stop(LIMIT_S)
    assert said(told)[1] == 0


def test_a_program_that_ignores_that_is_killed_with_what_it_started() -> None:
    program, told = start(sys.executable, "-c", "import os; os.fork(); import time; time.sleep(99)")
    program.stop(0.2)
    assert said(told)[1] == -9


def test_signals_that_ask_to_end_are_the_tasks_business() -> None:
    program, told = start(
        "/bin/sh",
        "-c",
        "for s in TERM INT HUP USR1 USR2; do kill -$s $$; done; sh -c 'kill -TERM $$; echo on'",
    )
    assert said(told) == ({Kind.OUTPUT: b"on\n", Kind.ERRORS: b""}, 0)
    program.stop(0.0)


def test_output_that_cannot_be_sent_ends_the_program() -> None:
    told: queue.Queue[Message] = queue.Queue()

    def send(message: Message) -> None:
        if message.kind is Kind.OUTPUT:
            raise RuntimeError("no room for output")
        told.put(message)

    program = TaskProgram(
        5, ("sh", "-c", "echo text; exec sleep 600"), {"PATH": os.environ["PATH"]}, send
    )
    outputs, status = said(told)
    assert b"no room for output" in outputs[Kind.ERRORS] and status == -9
    program.stop(0.0)


def test_a_program_that_cannot_be_waited_for_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def waitid(*_: object) -> None:
        raise ChildProcessError("No child processes")

    monkeypatch.setattr("os.waitid", waitid)
    program, told = start("/bin/sleep", "600")
    outputs, _ = said(told)
    assert b"No child processes" in outputs[Kind.ERRORS]
    program.stop(0.0)
