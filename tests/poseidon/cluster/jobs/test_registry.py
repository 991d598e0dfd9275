"""Run records: whole at every moment, private, and refused when damaged."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import socket
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.jobs.registry import (
    JobRecord,
    RecordedProcess,
    Registration,
    Registry,
    check_job_id,
    new_job_id,
)
from poseidon.cluster.jobs.requests import RequestFiles
from poseidon.cluster.machinefile import Host, HostRole
from poseidon.errors import JobError, UsageError
from tests.support.flushes import watch_flushes

RECORD = JobRecord(
    job="cifar10-1",
    launcher=RecordedProcess(name="the launcher", host="127.0.0.1", pid=10, created="1.25"),
    hostfile="/hosts",
    hosts=(
        Host(id=0, address="::1", port=5),
        Host(id=1, address="h", port=0, role=HostRole.SERVER),
    ),
    output="/out",
    started_s=3.5,
)
SHARD_2: Any = SimpleNamespace(
    name=ProcessName(role=Role.SHARD, index=2, client=1, host="127.0.0.1"), pid=77, created="8.5"
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "state")
    assert registry.jobs() == ()
    assert registry.read("cifar10-1") is None
    for record in (RECORD, replace(RECORD, job="b", hostfile=None)):
        registry.write(record)
        assert registry.read(record.job) == record
    assert registry.jobs() == ("b", "cifar10-1")
    registry.remove("b")
    registry.remove("b")
    assert registry.jobs() == ("cifar10-1",)


@pytest.mark.parametrize("umask", [0o000, 0o002])
def test_every_folder_is_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        Registry(tmp_path / "state" / "poseidon").write(RECORD)
    finally:
        os.umask(before)
    assert [file.suffix for file in tmp_path.rglob("*") if file.is_file()] == [".json"]
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(folders) == 4
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}


def test_folders_that_others_may_write_to_are_closed(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    registry.write(RECORD)
    for folder in (registry.folder, registry.folder.parent, tmp_path):
        folder.chmod(0o777)
    assert registry.read("cifar10-1") == RECORD
    for folder in (registry.folder, registry.folder.parent, tmp_path):
        assert folder.stat().st_mode & 0o777 == 0o755


@pytest.mark.needs("root")
def test_records_and_requests_of_other_users_are_refused(tmp_path: Path) -> None:
    """Whoever could write a record could have any process of this user ended."""
    registry = Registry(tmp_path)
    registry.write(RECORD)
    record, request = registry.folder / "cifar10-1.json", registry.folder / "cifar10-1.request"
    request.write_text('{"do": "leave", "host": "node1"}')
    for path in (record, request):
        os.chown(path, 12345, 12345)
    with pytest.raises(JobError, match="it belongs to a different user than its folder"):
        registry.read("cifar10-1")
    assert RequestFiles(registry.folder, "cifar10-1").take() is None
    for folder in (registry.folder, registry.folder.parent, tmp_path):
        os.chown(folder, 12345, 12345)
        words = f"{re.escape(str(folder))}.*: it belongs to another user"
        for call in (registry.jobs, lambda: registry.read("cifar10-1")):
            with pytest.raises(JobError, match=words):
                call()
        with pytest.raises(JobError, match="it belongs to another user"):
            registry.write(RECORD)
        os.chown(folder, os.geteuid(), -1)


def test_a_record_that_is_a_link_is_refused(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    registry.write(RECORD)
    (tmp_path / "elsewhere").write_bytes((registry.folder / "cifar10-1.json").read_bytes())
    (registry.folder / "cifar10-1.json").unlink()
    (registry.folder / "cifar10-1.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(JobError, match="it is a link"):
        registry.read("cifar10-1")


def test_a_registration_grows_and_goes(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    registration = Registration(registry, RECORD)
    registration.add([SHARD_2])
    record = registry.read("cifar10-1")
    assert record is not None
    assert record.processes == (
        RecordedProcess(
            name="shard 2 (client 1, 127.0.0.1)", host="127.0.0.1", pid=77, created="8.5"
        ),
    )
    registration.keep(())
    assert registry.read("cifar10-1") == RECORD
    with registration:
        pass
    assert registry.jobs() == ()


def test_hosts_that_join_are_on_record_until_they_leave(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    registration = Registration(registry, RECORD)
    joined = [Host(id=number, address=f"node{number}", port=0) for number in (2, 3)]
    for host in joined:
        registration.joins(host)
    registration.left(1)
    registration.left(2)
    record = registry.read("cifar10-1")
    assert record is not None
    assert (record.hosts, record.joined) == (RECORD.hosts, (joined[1],))
    assert record.all_hosts == (*RECORD.hosts, joined[1])


def test_a_job_of_which_something_may_be_left_stays_on_record(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    with Registration(registry, RECORD) as registration:
        registration.add([SHARD_2])
    assert registry.jobs() == ("cifar10-1",)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '"x"', "[" * 100_000]
    + [
        json.dumps({**json.loads(text), **change})
        for text in [
            '{"job": "cifar10-1", "launcher": {"name": "l", "host": "h", "pid": 3, "created": '
            '"1"}, "hostfile": null,'
            '"hosts": [], "output": "", "started_s": 1, "processes": []}'
        ]
        for change in (
            {"launcher": 3},
            {"launcher": {"name": "l", "host": "h", "pid": -1, "created": "1"}},
            {"launcher": {"name": "l", "host": "h", "pid": 0, "created": "1"}},
            {"processes": [{"name": "w", "host": "h", "pid": "1", "created": "1"}]},
            {"launcher": {"name": "l", "host": "h", "pid": True, "created": "1"}},
            {"launcher": {"name": "l", "host": "h", "pid": 3, "created": 1}},
            {"started_s": "yesterday"},
            {"started_s": 1e300},
            {"started_s": 10**400},
            {"hosts": [{"id": 0}]},
            {"hosts": [{"id": 0, "address": "h", "port": 0, "user": "-x"}]},
            {"job": "../x"},
        )
    ],
)
def test_a_damaged_record_is_an_error(tmp_path: Path, text: str) -> None:
    registry = Registry(tmp_path)
    registry.write(RECORD)
    (Registry(tmp_path).folder / "cifar10-1.json").write_text(text)
    with pytest.raises(JobError, match=r"is damaged or from a different version.*remove") as caught:
        registry.read("cifar10-1")
    assert "cifar10-1.json" in str(caught.value)


def test_a_record_under_another_jobs_name_is_an_error(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    registry.write(RECORD)
    (registry.folder / "cifar10-1.json").rename(registry.folder / "cifar10-2.json")
    with pytest.raises(JobError, match="is the record of a different job, cifar10-1"):
        registry.read("cifar10-2")


def test_what_else_lies_there_is_passed_over(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    registry.write(RECORD)
    (registry.folder / "folder.json").mkdir()
    os.mkfifo(registry.folder / "pipe.json")
    for name in ("notes.txt", "-x.json", ".hidden.json", "a b.json"):
        (registry.folder / name).touch()
    (registry.folder / "nowhere.json").symlink_to("absent")
    assert registry.jobs() == ("cifar10-1",)


def test_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    registry.folder.parent.mkdir()
    registry.folder.write_text("")
    with pytest.raises(JobError, match=r"cannot read the records of jobs in .*: Not a directory"):
        registry.jobs()


def test_a_folder_that_takes_nothing_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(tmp_path)

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system", str(path))

    with Registration(registry, RECORD):
        monkeypatch.setattr(Path, "unlink", refuse)
        with pytest.raises(JobError, match=r"cannot remove .*cifar10-1.json"):
            registry.remove("cifar10-1")
    assert registry.jobs() == ("cifar10-1",)  # the job has ended well all the same


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JobError, match="POSEIDON_HOME"):
        Registry(tmp_path / "file").write(RECORD)


@pytest.mark.parametrize(
    ("number", "limit", "says"),
    [
        (errno.EMFILE, resource.RLIMIT_NOFILE, r"ulimit -n allows 77; set a higher limit"),
        (errno.EFBIG, resource.RLIMIT_FSIZE, r"at most 77 bytes \(ulimit -f\); set a higher limit"),
    ],
)
def test_a_limit_of_this_process_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, limit: int, says: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(resource, "getrlimit", {limit: (77, 77)}.__getitem__)
    monkeypatch.setattr("poseidon.cluster.jobs.registry.write_whole", refuse)
    monkeypatch.setattr("poseidon.cluster.jobs.registry.check_private", refuse)
    for call in (Registry(tmp_path).jobs, partial(Registry(tmp_path).write, RECORD)):
        with pytest.raises(JobError, match=says) as caught:
            call()
        assert "POSEIDON_HOME" not in str(caught.value)


@pytest.mark.parametrize("job", ["", "../x", "a/b", ".hidden", "-x", "a b", "é", "x" * 81, "a\n"])
def test_illegal_ids(job: str) -> None:
    with pytest.raises(UsageError, match="cannot be a job id"):
        check_job_id(job)


@pytest.mark.parametrize(
    ("stem", "job"),
    [
        ("cifar10_quick", "cifar10_quick-20260105-204016-3f9a"),
        ("../ my net/ü", "my_net-20260105-204016-3f9a"),
        ("///", "job-20260105-204016-3f9a"),
        ("x" * 99, "x" * 40 + "-20260105-204016-3f9a"),
    ],
)
def test_new_ids(stem: str, job: str) -> None:
    assert new_job_id(stem, datetime(2026, 1, 5, 20, 40, 16), "3f9a") == job


def test_a_record_and_its_name_are_brought_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(tmp_path)
    seen = watch_flushes(monkeypatch)
    registry.write(RECORD)
    assert [flush.holds for flush in seen] == [None, {"cifar10-1.json"}]
    assert {flush.path.suffix for flush in seen} == {".partial", ""}


def test_hosts_that_share_a_home_folder_leave_each_others_jobs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Registry(tmp_path).write(RECORD)
    monkeypatch.setattr(socket, "gethostname", lambda: "another/host")
    other = Registry(tmp_path)
    assert other.jobs() == ()
    other.remove("cifar10-1")
    monkeypatch.undo()
    assert Registry(tmp_path).jobs() == ("cifar10-1",)
