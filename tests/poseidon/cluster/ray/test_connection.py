"""The launcher's connection to a node's actor: programs, files, and the loss of the node."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import poseidon
from poseidon.cluster.ray.connection import RayConnection, reason_of
from poseidon.cluster.ray.node_actor import NodeActor
from poseidon.errors import JobError
from tests.support.polling import until


class LostError(Exception):
    """What Ray raises for an actor of a dead node."""


class LocalRay:
    """Ray's functions for an actor of this process: a call runs where its answer is taken."""

    exceptions = SimpleNamespace(GetTimeoutError=TimeoutError)

    def __init__(self) -> None:
        self.lost = False
        self.seen: list[object] = []

    def get(self, call: Callable[[], Any], timeout: float) -> Any:
        if self.lost:
            raise LostError("\nThe actor died: its node has died.\nmore")
        return call()

    def kill(self, actor: object, no_restart: bool) -> None:
        self.lost = True


class LocalHandle:
    """A handle on an actor of this process."""

    def __init__(self, actor: NodeActor, ray: LocalRay) -> None:
        self._actor = actor
        self._ray = ray

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: object) -> Callable[[], Any]:
            self._ray.seen.append(arguments)
            return lambda: getattr(self._actor, name)(*arguments)

        call = SimpleNamespace(remote=remote)
        call.options = lambda concurrency_group: call
        return call


def _connect(ray: LocalRay, version: str = poseidon.__version__) -> RayConnection:
    actor = NodeActor()
    description = {"version": version, "python": sys.executable, "public": actor.public}
    return RayConnection("client 1 on node7", LocalHandle(actor, ray), ray, description)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> LocalRay:
    """Ray, and connections that look often whether they are closed: an actor of this process
    cannot be killed.
    """
    monkeypatch.setattr("poseidon.cluster.ray.connection.POLL_S", 0.05)
    return LocalRay()


@pytest.fixture
def connection(ray: LocalRay) -> Iterator[RayConnection]:
    connection = _connect(ray)
    yield connection
    connection.close()


def test_a_program_gets_its_input_and_answers(connection: RayConnection, ray: LocalRay) -> None:
    done = connection.run(
        ["sh", "-c", "cat; echo wrong >&2; exit 3"], stdin=b"a secret", timeout_s=30.0
    )
    assert (done.status, done.stdout, done.stderr) == (3, b"a secret", b"wrong\n")
    assert "secret" not in repr(ray.seen)


def test_a_program_is_talked_to_line_by_line(connection: RayConnection) -> None:
    channel = connection.open(["cat"])
    for line in (b"one", b"two"):
        channel.send(line)
        assert channel.receive() == line
    channel.close()
    assert channel.receive() is None
    assert channel.status(30.0) == 0


def test_a_program_has_the_node_s_environment_and_this_package(
    connection: RayConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("RAY_JOB_ID", "7")
    script = (
        "import os, poseidon; print(os.environ['CUDA_VISIBLE_DEVICES'], 'RAY_JOB_ID' in os.environ)"
    )
    done = connection.run([sys.executable, "-c", script], timeout_s=30.0)
    assert done.stdout == b"3 False\n", done.stderr


def test_files_are_copied_both_ways(connection: RayConnection, tmp_path: Path) -> None:
    files = connection.sftp()
    target = files.open(str(tmp_path / "there"), "wb")
    target.write(b"weights")
    files.get(str(tmp_path / "there"), str(tmp_path / "here"))
    assert (tmp_path / "here").read_bytes() == b"weights"
    with pytest.raises(FileNotFoundError, match="missing"):
        files.stat(str(tmp_path / "missing"))


def test_a_lost_node_ends_all_that_waits(connection: RayConnection, ray: LocalRay) -> None:
    channel = connection.open(["sh", "-c", "echo $$; exec sleep 600"])
    program = int(channel.receive() or b"")
    assert connection.alive
    ray.lost = True
    assert channel.receive() is None
    assert channel.status(30.0) == -1
    until(lambda: not connection.alive, "the connection counts as alive", 10.0)
    with pytest.raises(OSError):
        channel.send(b"more")
    with pytest.raises(OSError, match="its node has died"):
        connection.sftp().stat("/")
    with pytest.raises(JobError, match="client 1 on node7: its task is lost"):
        connection.open(["true"])
    os.kill(program, signal.SIGKILL)


def test_another_version_is_refused(ray: LocalRay) -> None:
    with pytest.raises(JobError) as caught:
        _connect(ray, version="9.9")
    assert str(caught.value).startswith(
        "client 1 on node7: Poseidon 9.9 is installed for Ray's Python /"
    )
    assert f"and {poseidon.__version__} at the launcher" in str(caught.value)


@pytest.mark.parametrize(
    ("error", "text"), [(LostError("\n  first \nsecond"), "first"), (LostError(), "LostError")]
)
def test_an_error_of_ray_becomes_one_line(error: Exception, text: str) -> None:
    assert reason_of(error) == text
