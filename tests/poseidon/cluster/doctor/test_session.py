"""Programs on hosts that end, answer nonsense or nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from poseidon.cluster.agent.launcher import RemoteChannel
from poseidon.cluster.doctor import probe
from poseidon.cluster.doctor.session import ProbeSession, Subject
from poseidon.cluster.doctor.survey import examine
from poseidon.errors import JobError


class Scripted:
    """A host whose program gives fixed answers."""

    def __init__(self, *answers: bytes | None, error: bytes = b"") -> None:
        self._answers = list(answers)
        self._errors = [error] if error else []
        self.closed = False

    def send(self, line: bytes) -> None:
        pass

    def receive(self) -> bytes | None:
        return self._answers.pop(0)

    def receive_error(self) -> bytes | None:
        return self._errors.pop(0) if self._errors else None

    def close(self) -> None:
        self.closed = True


def subject(channel: Scripted) -> Subject:
    def start(arguments: Sequence[str]) -> RemoteChannel:
        return channel

    return Subject(label="ml@node3", open=start)


@pytest.mark.parametrize(
    ("answer", "error", "sentence"),
    [
        (None, b"", "ml@node3: its probe ended or did not answer within 30 s"),
        (None, b"sh: python3: not found", r"within 30 s \(sh: python3: not found\)"),
        (
            b"Welcome to node3!",
            b"",
            "ml@node3: its probe's answer cannot be read: b'Welcome to node3!'",
        ),
        (b"[1]", b"", "its probe's answer cannot be read"),
        (
            b'{"problem": "Cannot assign requested address"}',
            b"",
            "ml@node3: Cannot assign requested address",
        ),
    ],
)
def test_an_answer_that_is_none_is_one_sentence(
    answer: bytes | None, error: bytes, sentence: str
) -> None:
    session = ProbeSession(subject(Scripted(answer, error=error)), probe)
    with pytest.raises(JobError, match=sentence):
        session.ask({})


def test_a_host_that_does_not_answer_is_a_problem_of_the_survey() -> None:
    broken = Scripted(None)
    survey = examine([subject(broken)], seconds=0.1)
    assert survey.hosts == ()
    assert survey.problems == (("ml@node3", "its probe ended or did not answer within 30 s"),)
    assert broken.closed
