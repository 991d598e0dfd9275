"""What is read from the environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from poseidon.base.settings import (
    are_threads_set,
    expanded,
    folder_of_sockets,
    inherited_environment,
    let_waiting_threads_sleep,
    name_user,
    put_on_python_path,
    read_settings,
    variable_of_tasks,
)
from poseidon.errors import UsageError


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"POSEIDON_HOME": "/a", "XDG_STATE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_STATE_HOME": "/b", "HOME": "/c"}, "/b/poseidon"),
        ({"POSEIDON_HOME": "", "XDG_STATE_HOME": "", "HOME": "/c"}, "/c/.local/state/poseidon"),
    ],
)
def test_state_folder(variables: dict[str, str], folder: str) -> None:
    assert read_settings(variables).state_folder == Path(folder)


def test_a_user_id_may_have_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_entry(_: object) -> None:
        raise KeyError("uid not found")

    for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("USER", "")  # so that it is restored
    monkeypatch.delenv("USER")
    monkeypatch.setattr("pwd.getpwuid", no_entry)
    monkeypatch.setattr("pwd.getpwnam", no_entry)
    assert read_settings({}).state_folder == Path("/.local/state/poseidon")
    assert [str(expanded(path)) for path in ("~", "~/a", "~nobody/a", "/b", "c~")] == [
        "/",
        "/a",
        "~nobody/a",
        "/b",
        "c~",
    ]
    assert name_user() == os.environ["USER"] == str(os.getuid())
    monkeypatch.setenv("HOME", "/home/me")
    assert expanded("~/a") == Path("/home/me/a")


def test_sockets_have_short_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder, found in (("/var/tmp", "/var/tmp"), ("/var/" + "t" * 60, "/tmp")):
        monkeypatch.setattr("tempfile.tempdir", folder)
        assert folder_of_sockets() == found
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(UsageError, match=r"TMPDIR=/var/t+ is too long .* at most 55 bytes"):
        folder_of_sockets()


def test_data_folder() -> None:
    assert read_settings({"POSEIDON_DATA": "/data"}).data_folder == Path("/data")
    assert read_settings({"POSEIDON_DATA": ""}).data_folder is None


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, ""),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ""),
        ({"WORLD_SIZE": "2"}, ""),
        ({"RANK": "1", "WORLD_SIZE": "two"}, ""),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4"),
        ({"PMI_RANK": "0", "PMI_SIZE": "3"}, "PMI_SIZE=3"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8"}, "SLURM_STEP_NUM_TASKS=8"),
        # a script of sbatch, which is one process
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, ""),
    ],
)
def test_tasks_of_a_scheduler(
    variables: dict[str, str], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", variables)
    assert variable_of_tasks() == found


def test_status_fd(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_settings({}).status_fd is None
    assert read_settings({"RAY_ADDRESS": ""}).ray_address is None
    assert read_settings({"RAY_ADDRESS": "node0:6379"}).ray_address == "node0:6379"
    assert read_settings({"POSEIDON_STATUS_FD": "7"}).status_fd == 7
    assert read_settings({"POSEIDON_STDIN_FD": "5"}).stdin_fd == 5
    for wrong in ("x", "-1", "1" * 20):
        with pytest.raises(UsageError, match="POSEIDON_STATUS_FD"):
            read_settings({"POSEIDON_STATUS_FD": wrong})
    monkeypatch.setenv("POSEIDON_STATUS_FD", "7")
    assert "POSEIDON_STATUS_FD" not in inherited_environment()


@pytest.mark.parametrize(
    ("variables", "are_set"),
    [({}, False), ({"OMP_NUM_THREADS": ""}, False), ({"MKL_NUM_THREADS": "2"}, True)],
)
def test_whether_the_user_has_set_threads(
    variables: dict[str, str], are_set: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", variables)
    assert are_threads_set() == are_set


@pytest.mark.parametrize(
    ("before", "after"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")]
)
def test_how_threads_wait_is_the_users_choice(
    before: dict[str, str], after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poseidon.base.settings.os.environ", before)
    let_waiting_threads_sleep()
    assert before == {"OMP_WAIT_POLICY": after}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "/a:/b"),
        ("", "/a:/b"),
        ("/c", "/a:/b:/c"),
        ("/c:/b:/a:/d", "/a:/b:/c:/d"),
        (":/c", "/a:/b:/c"),
    ],
)
def test_folders_come_first_on_python_path_once(
    before: str | None, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if before is not None:
        monkeypatch.setenv("PYTHONPATH", before)
    put_on_python_path(Path("/a"), Path("/b"))
    assert os.environ["PYTHONPATH"] == after
