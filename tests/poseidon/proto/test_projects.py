"""Projects: the files of each, and what is not overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.errors import UsageError
from poseidon.proto.projects import project_files, project_title, projects, training_commands, write_project


def test_each_project_has_a_title_and_the_files_of_its_commands() -> None:
    known = projects()
    assert {"lenet", "cifar10", "torch_cnn"} <= known.keys()
    for name, folder in known.items():
        files = project_files(name, folder)
        assert project_title(folder) in files["README.md"]
        *_, command = training_commands(name, folder)
        assert command in files["README.md"]
        named = {word.partition("=")[2] if word.startswith("--") else word for word in command.split()}
        assert files.keys() & (named - {"machinefile"})


def test_a_project_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_project(tmp_path / "new" / "mine", {"a": "text"})
    assert (tmp_path / "new" / "mine" / "a").read_text() == "text"
    with pytest.raises(UsageError, match="exists already and is not overwritten"):
        write_project(tmp_path / "new" / "mine", {"a": "other"})
    with pytest.raises(OSError, match="missing"):
        write_project(tmp_path / "second", {"missing/a": "text"})
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
