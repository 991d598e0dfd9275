"""The folders of agents: they go with their agent, or with the next one, and nothing else goes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from poseidon.cluster.agent import files as scratch_module
from poseidon.cluster.agent.files import MARK, PREFIX, AgentFolder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(scratch_module, "folder_of_sockets", lambda: str(tmp_path))
    return tmp_path


def test_it_goes_with_its_agent(temporary: Path) -> None:
    scratch = AgentFolder()
    (Path(scratch.path) / "client_0").mkdir()
    (Path(scratch.path) / "net").touch()
    scratch.clear()
    assert [path.name for path in Path(scratch.path).iterdir()] == [MARK]
    assert Path(scratch.path).stat().st_mode & 0o77 == 0
    scratch.close()
    assert list(temporary.iterdir()) == []


def test_the_folder_of_an_agent_that_was_killed_goes_with_the_next(temporary: Path) -> None:
    other = temporary / f"{PREFIX}results"
    other.mkdir()
    living, killed = AgentFolder(), AgentFolder()
    (Path(killed.path) / "sent").write_bytes(b"weights")
    os.close(killed._lock)  # as the system does
    far = temporary / f"{PREFIX}far"  # of another host, whose locks are not seen here
    far.mkdir()
    (far / f"{MARK}-2").touch()
    third = AgentFolder()
    left = [str(other), str(far), living.path, third.path]
    assert sorted(map(str, temporary.iterdir())) == sorted(left)
    living.close()
    third.close()
