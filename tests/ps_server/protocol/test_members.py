from __future__ import annotations

import pytest

from ps_server.errors import RemoteProtocolError
from ps_server.protocol import messages as m
from ps_server.protocol.members import LEGAL, MAX_ANSWERED_FAULTS, Members, Outgoing, Stage
from ps_server.protocol.shard import Shard

TOKEN = b"secret"


def joined(workers: int = 2) -> Members:
    members = Members(workers, TOKEN)
    for rank in range(workers):
        members.join(b"w%d" % rank, m.Hello(rank, TOKEN))
    return members


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (m.Hello(1, b"other"), "the token is not this job's"),
        (m.Hello(2, TOKEN), "worker 2 is not one of 2"),
        (m.Hello(0, TOKEN), "worker 0 has joined already"),
    ],
)
def test_who_cannot_join(hello: m.Hello, reason: str) -> None:
    members = Members(2, TOKEN)
    members.join(b"w0", m.Hello(0, TOKEN))
    with pytest.raises(RemoteProtocolError, match=f"^{reason}$"):
        members.join(b"x", hello)
    assert members.peers == {0: b"w0"}


def test_each_stage_has_its_legal_messages() -> None:
    assert LEGAL.keys() == set(Stage)
    members = Members(1, TOKEN)
    with pytest.raises(RemoteProtocolError, match="Clock is not legal from a peer"):
        members.next_stage(b"a", m.Clock(1))
    assert members.next_stage(b"a", m.Hello(0, TOKEN)) is Stage.KNOWN
    members.advance(b"a", Stage.JOINED)
    assert members.next_stage(b"a", m.Leave()) is Stage.LEFT


def test_a_shard_has_a_handler_for_each_legal_message() -> None:
    assert LEGAL[Stage.JOINED].keys() == Shard(0, workers=1)._handlers.keys()


def test_faults_of_a_known_peer_are_answered_and_not_without_end() -> None:
    members = joined()
    assert members.fault(b"stranger", "noise") == []
    answers = [members.fault(b"w1", "noise") for _ in range(MAX_ANSWERED_FAULTS + 1)]
    assert answers[0] == [Outgoing(b"w1", m.Fault("noise"))]
    assert answers[-1] == []


def test_a_worker_that_has_left_is_named_to_those_who_go_on() -> None:
    members, done = joined(3), {0: 4, 1: 2, 2: 2}
    assert members.all_here and not members.finished
    members.left += [1]
    behind = lambda rank, other: done[rank] < done[other]  # noqa: E731
    assert members.missing_for(0, behind) == 1
    assert members.missing_for(2, behind) is None
    assert [out.peer for out in members.to_each(members.peers, m.Leave())] == [b"w0", b"w1", b"w2"]
    assert [out.peer for out in members.to_each((2, 0), m.Leave())] == [b"w2", b"w0"]
    members.left += [0, 2]
    assert members.finished
