"""The state machine of an agent: what it obeys, and when it leaves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from poseidon.cluster.agent.agent import TICK_S, Action, AgentState, EndProcesses
from poseidon.cluster.agent.messages import (
    AGENT_ITSELF,
    PROTOCOL,
    AgentHello,
    Ask,
    EndAll,
    Heartbeat,
    KilledByUser,
    ProcessSignal,
    Put,
    ReadFile,
    Refused,
    Register,
    Request,
    SendSignal,
    Service,
    Shutdown,
    Signaled,
    StartProcess,
    WriteLine,
)
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.process import ProcessSpec

VERSION = "1.2"
NAME = ProcessName(role=Role.WORKER, index=0, client=0, host="node1")
HELLO = AgentHello(protocol=PROTOCOL, version=VERSION, silence_s=20.0, grace_s=0.5)
ASK = Ask(id=2, service=Service.CHECK, request={})
PUT = Put(id=3, path="x", offset=0, content=b"")
GET = ReadFile(id=4, path="x", offset=0, size=1)
LINE = WriteLine(id=1, line=b"")
SIGNAL = SendSignal(id=1, signal=ProcessSignal.KILL)


def _start(number: int = 1) -> StartProcess:
    return StartProcess(id=number, spec=ProcessSpec(name=NAME, argv=("x",), first_line=b""))


def _greeted(now_s: float = 0.0) -> AgentState:
    state = AgentState(VERSION, 60.0, now_s)
    assert state.take(HELLO, now_s) == [HELLO]
    return state


def _refusal(actions: Sequence[Action]) -> str:
    """The sentence of an agent that says why it leaves, and leaves."""
    sent, left = actions
    assert isinstance(sent, Refused)
    assert isinstance(left, EndProcesses) and left.status == 1
    assert sent.id == AGENT_ITSELF and sent.message in left.reason
    return sent.message


def test_it_is_greeted_with_the_settings_of_the_launcher() -> None:
    state = AgentState(VERSION, 60.0, 0.0)
    assert not state.greeted
    state.take(HELLO, 1.0)
    assert state.greeted
    assert state.grace_s == 0.5


@pytest.mark.parametrize(
    "request_", [_start(), LINE, SIGNAL, ASK, PUT, GET, EndAll(id=1), Register(record={})]
)
def test_nothing_is_done_before_hello(request_: Request) -> None:
    state = AgentState(VERSION, 60.0, 0.0)
    assert state.take(Heartbeat(), 0.0) == []
    assert _refusal(state.take(request_, 0.0)) == "a request before Hello"
    assert state.take(HELLO, 0.0) == []


@pytest.mark.parametrize(("protocol", "version"), [(PROTOCOL, "9.9"), (PROTOCOL + 1, VERSION)])
def test_another_version_is_refused(protocol: int, version: str) -> None:
    state = AgentState(VERSION, 60.0, 0.0)
    hello = AgentHello(protocol=protocol, version=version, silence_s=1.0, grace_s=1.0)
    assert _refusal(state.take(hello, 0.0)) == (
        f"Poseidon 1.2 is installed there, and {version} here; install the same version"
    )
    assert not state.greeted


@pytest.mark.parametrize("request_", [_start(), ASK, PUT, GET, EndAll(id=1), Register(record={})])
def test_legal_requests_are_carried_out(request_: Request) -> None:
    assert _greeted().take(request_, 1.0) == [request_]


@pytest.mark.parametrize("request_", [LINE, SIGNAL])
def test_a_process_that_was_not_started_is_told_nothing(request_: Request) -> None:
    state = _greeted()
    assert state.take(request_, 0.0) == []
    state.take(_start(), 0.0)
    assert state.take(request_, 0.0) == [request_]


def test_an_id_starts_one_process() -> None:
    state = _greeted()
    state.take(_start(7), 0.0)
    why = "process 7 has already been started"
    assert state.take(_start(7), 0.0) == [Refused(id=7, message=why)]
    assert state.take(_start(8), 0.0) == [_start(8)]


def test_another_job_begins_anew() -> None:
    state = _greeted()
    state.take(_start(), 0.0)
    state.take(EndAll(id=2), 0.0)
    assert state.take(LINE, 0.0) == []
    assert state.take(_start(), 0.0) == [_start()]


@pytest.mark.parametrize("kind", [Put, ReadFile])
def test_a_part_of_a_file_has_an_id_of_the_launchers_choice(kind: type[Put | ReadFile]) -> None:
    request = (
        Put(id=-1, path="x", offset=0, content=b"")
        if kind is Put
        else ReadFile(id=-1, path="x", offset=0, size=1)
    )
    assert _refusal(_greeted().take(request, 0.0)) == f"{kind.__name__} with the id -1"


def test_it_leaves_when_it_is_told_to_and_does_nothing_after_it() -> None:
    state = AgentState(VERSION, 60.0, 0.0)
    assert state.take(Shutdown(status=75, reason="no job"), 0.0) == [
        EndProcesses(status=75, reason="no job")
    ]
    state = _greeted()
    assert state.take(Shutdown(), 0.0) == [EndProcesses(status=0)]
    for request in (_start(), HELLO, ASK, Shutdown()):
        assert state.take(request, 0.0) == []
    assert state.tick(1000.0) == []
    assert state.end_of_channel() == []


def test_a_launcher_that_says_no_hello_is_lost() -> None:
    state = AgentState(VERSION, 3.0, 100.0)
    for second in (101.0, 102.0, 103.0):
        assert state.tick(second) == []
    assert state.tick(103.5) == [
        EndProcesses(status=1, reason="the launcher did not answer within 3 s")
    ]


def test_a_launcher_that_falls_silent_is_lost() -> None:
    state = _greeted(100.0)
    for second in range(101, 120):
        assert state.tick(float(second)) == []
    state.take(Heartbeat(), 119.5)
    for second in range(120, 140):
        assert state.tick(float(second)) == []
    assert state.tick(140.0) == [
        EndProcesses(status=1, reason="the launcher has sent nothing for 20 s")
    ]


@pytest.mark.parametrize("pause_s", [TICK_S, 6.0, 3600.0])
def test_a_host_that_was_suspended_does_not_blame_the_launcher(pause_s: float) -> None:
    state = _greeted(100.0)
    assert state.tick(101.0) == []
    awake_s = 101.0 + pause_s
    assert state.tick(awake_s) == []
    for second in range(1, 19):
        assert state.tick(awake_s + second) == []
    (left,) = state.tick(awake_s + 18.5)
    assert isinstance(left, EndProcesses)


@pytest.mark.parametrize("pause_s", [3.0, 25.0])
def test_a_host_that_is_always_late_finds_a_dead_launcher_and_no_other(pause_s: float) -> None:
    state = _greeted(0.0)
    for number in range(1, 100):
        state.take(Heartbeat(), number * pause_s)
        assert state.tick((number + 0.5) * pause_s) == []
    ticks = [state.tick((100 + number) * pause_s) for number in range(21)]
    assert ticks[:-2] == [[]] * 19
    assert any(isinstance(action, EndProcesses) for actions in ticks[-2:] for action in actions)


@pytest.mark.parametrize(
    ("why", "reason"),
    [("", "the connection to rank 0 has ended"), ("not an agent", "rank 0 is lost: not an agent")],
)
def test_the_end_of_the_channel_is_the_loss_of_the_launcher(why: str, reason: str) -> None:
    state = AgentState(VERSION, 60.0, 0.0, "rank 0")
    assert state.end_of_channel(why) == [EndProcesses(status=1, reason=reason)]


def test_what_is_no_request_ends_it() -> None:
    assert _refusal(_greeted().reject("not a message: b'x'")) == "not a message: b'x'"


def test_what_the_user_kills_is_reported_first() -> None:
    assert _greeted().killed_by_user() == [
        KilledByUser(),
        EndProcesses(status=1, reason="the job was killed on this host"),
    ]


def test_a_signal_of_the_scheduler_is_the_launchers_to_decide() -> None:
    assert _greeted().signaled("SIGTERM") == [Signaled(signal="SIGTERM")]
    assert AgentState(VERSION, 60.0, 0.0).signaled("SIGTERM") == [
        EndProcesses(status=1, reason="the task was ended by SIGTERM before all others had joined")
    ]
