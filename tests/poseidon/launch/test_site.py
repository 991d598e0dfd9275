"""What launching commands share: clients, the job's record, the children's environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from poseidon.cluster.jobs.registry import Registry
from poseidon.cluster.machinefile import Host
from poseidon.errors import JobError
from poseidon.launch.site import (
    child_environment,
    output_folder,
    read_clients,
    register_job,
    remove_unused,
    require_near,
)
from tests.support.memory_child import said_by


def test_clients(tmp_path: Path) -> None:
    assert read_clients(None, 1) == (Host(id=0, address="127.0.0.1", port=0),)
    hosts = tmp_path / "hosts"
    hosts.write_text("0 127.0.0.1 9999\n1 localhost 0\n", encoding="utf-8")
    assert [client.port for client in read_clients(str(hosts), 1)] == [9999, 0]
    hosts.write_text("0 10.0.0.7 9999\n", encoding="utf-8")
    with pytest.raises(
        JobError, match=r"client 0 is on 10\.0\.0\.7; this command works on this machine only"
    ):
        require_near(str(hosts), read_clients(str(hosts), 1))


def test_a_job_is_on_record_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path / "home"))
    with register_job("j-1", str(tmp_path / "hosts"), read_clients(None, 1), tmp_path / "out"):
        record = Registry(tmp_path / "home").read("j-1")
        assert record is not None
        assert (record.launcher.pid, record.hostfile) == (os.getpid(), str(tmp_path / "hosts"))
    assert Registry(tmp_path / "home").read("j-1") is None


def test_children_find_the_project_and_the_users_modules(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"/mine{os.pathsep}{repository}")
    paths = child_environment(threads=1)["PYTHONPATH"].split(os.pathsep)
    assert paths[0] == str(repository)
    assert "/mine" in paths
    assert len(paths) == len(set(paths))


def test_a_thread_of_a_child_that_works_on_small_tensors_alone_does_not_grow() -> None:
    grown = said_by("tests.support.rebuilding_child", "6000", malloc=child_environment(threads=1))
    assert grown < 512 * 1024  # without the settings: some 500 bytes an iteration, 3 MB


def test_what_the_user_tells_glibc_is_kept_and_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = "glibc.malloc.mxfast=0:glibc.cpu.x86_non_temporal_threshold=0x100000"
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")
    for _ in range(2):  # a child's child has the same
        tunables = child_environment(threads=1)["GLIBC_TUNABLES"]
        assert tunables == f"{ours}:glibc.malloc.tcache_count=0"
        monkeypatch.setenv("GLIBC_TUNABLES", tunables)


@pytest.mark.parametrize(
    ("made", "written", "left"), [(False, "", False), (False, "x", True), (True, "", True)]
)
def test_a_job_that_never_started_leaves_no_folder(
    tmp_path: Path, made: bool, written: str, left: bool
) -> None:
    """Its logs stay where they say something, and so does a folder that was there before."""
    folder = tmp_path / "output" / "job"
    if made:
        folder.mkdir(parents=True)
    with pytest.raises(JobError, match="no"), output_folder(folder):
        (folder / "worker_0.log").write_text(written)
        (folder / "statistics.json").write_text("{}")
        raise JobError("no")
    assert folder.exists() == left


def test_derived_files_do_not_keep_a_folder(tmp_path: Path) -> None:
    given = tmp_path / "job" / "solver.prototxt"
    given.parent.mkdir()
    given.write_text("max_iter: 1")
    remove_unused(given.parent)
    assert given.exists()
    remove_unused(given.parent, [given])
    assert not given.parent.exists()
