"""Requests to a launcher through files: what comes of them, also where nobody answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.cluster.jobs.requests import HostRequest, RequestFiles
from poseidon.errors import JobError
from tests.support.flushes import watch_flushes

LEAVE = HostRequest(do="leave", host="node3")


@pytest.mark.parametrize("done", [True, False])
def test_a_request_is_taken_and_answered(tmp_path: Path, done: bool) -> None:
    asking, launcher = RequestFiles(tmp_path, "j"), RequestFiles(tmp_path, "j")
    assert launcher.take() is None
    taken: list[HostRequest | None] = []

    def serve() -> bool:
        taken.append(launcher.take())
        if taken[-1] is not None:
            launcher.answer("a sentence", done=done)
        return True

    if done:
        assert asking.ask(LEAVE, runs=serve, limit_s=30.0) == "a sentence"
    else:
        with pytest.raises(JobError, match=r"^a sentence$"):
            asking.ask(LEAVE, runs=serve, limit_s=30.0)
    assert taken[0] == LEAVE
    assert list(tmp_path.iterdir()) == []


def test_an_answer_waits_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch_flushes(monkeypatch)
    RequestFiles(tmp_path, "j").answer("a sentence", done=True)  # on a thread of a job that ends
    assert seen == []


@pytest.mark.parametrize(("runs", "how"), [(False, "has ended"), (True, "has not answered")])
def test_a_launcher_that_does_not_answer(tmp_path: Path, runs: bool, how: str) -> None:
    files = RequestFiles(tmp_path, "j")
    with pytest.raises(JobError, match=f"the launcher of the job {how}"):
        files.ask(LEAVE, runs=lambda: runs, limit_s=0.0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00"])
def test_what_is_no_request_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "j.request").write_text(text)
    assert RequestFiles(tmp_path, "j").take() is None
