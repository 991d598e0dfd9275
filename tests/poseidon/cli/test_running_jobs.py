"""The table of `poseidon ps`; the command itself is tested with true jobs in test_kill.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from poseidon.cli import running_jobs
from poseidon.cli.main import main, parse_arguments, run_command
from poseidon.cli.running_jobs import _fields, _hosts_of, _row
from poseidon.cluster.jobs.registry import JobRecord, RecordedProcess, Registry
from poseidon.cluster.jobs.this_host import HostJob
from poseidon.cluster.machinefile import Host, read_machinefile
from poseidon.errors import JobError, MachinefileError, UsageError
from poseidon.observe.metrics.job_statistics import FILE_NAME, JobStatistics, encode_statistics
from poseidon.observe.metrics.progress import JobProgress
from tests.support.jobs import ROOT, environment, job_that_listens, running_job
from tests.support.live_processes import live_pids, none_left


def test_hosts_that_have_joined_a_job_of_the_machinefile_are_asked_too(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("0 node0 0\n1 node1 0\n", encoding="utf-8")
    hosts = read_machinefile(hostfile)
    joined = (Host(id=2, address="node2", port=0),)
    launcher = RecordedProcess(name="launcher", host="127.0.0.1", pid=1, created="1.0")
    record = JobRecord(
        job="j",
        launcher=launcher,
        hostfile=str(hostfile),
        hosts=hosts,
        output="",
        started_s=1.0,
        joined=joined,
    )
    assert _hosts_of(hostfile, [record]) == (*hosts, *joined)
    assert _hosts_of(hostfile, [replace(record, hostfile="/other")]) == hosts


def test_how_far_a_job_has_come(tmp_path: Path) -> None:
    launcher = RecordedProcess(name="launcher", host="127.0.0.1", pid=1, created="1.0")
    record = JobRecord(
        job="j", launcher=launcher, hostfile=None, hosts=(), output=str(tmp_path), started_s=1.0
    )
    job = HostJob(record=record, launcher=True, living=0)
    assert _row(job)[4:7] == ("-", "-", "-")
    assert (_fields(None, job)["iteration"], _fields(None, job)["testing"]) == (None, None)
    progress = JobProgress(iteration=120, max_iter=4000, tested=1, to_test=9, rate=20.0)
    text = encode_statistics(JobStatistics(job="j", progress=progress))
    (tmp_path / FILE_NAME).write_text(text, encoding="utf-8")
    assert _row(job)[4:7] == ("120 of 4000, testing 1 of 9", "20/s", "0:03:14")
    assert (_fields(None, job)["max_iter"], _fields(None, job)["eta_s"]) == (4000, 194.0)
    dead = replace(job, launcher=False)
    assert _row(dead)[4:7] == ("120 of 4000", "-", "-")
    assert (_fields(None, dead)["rate"], _fields(None, dead)["testing"]) == (None, False)


pytestmark = pytest.mark.processes


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "state"
    monkeypatch.setenv("POSEIDON_HOME", str(folder))
    return folder


def machinefile(folder: Path, name: str, text: str = "0 127.0.0.1 0\n1 127.0.0.1 0\n") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def poseidon(*arguments: str) -> int:
    return run_command(parse_arguments(arguments))


def test_kill_caffe_leaves_the_job_of_another_machinefile(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = machinefile(tmp_path, "ours"), machinefile(tmp_path, "theirs")
    with running_job(state, "job-a", ours) as job, running_job(state, "job-b", theirs) as other:
        job.kill_launcher()
        command = [sys.executable, str(ROOT / "scripts" / "kill_caffe.py"), "ours"]
        for told in (f"job {job.job}: 4 processes stopped", "no job that was started from ours"):
            done = subprocess.run(
                command,
                cwd=tmp_path,
                env=environment(state),
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert (done.returncode, done.stderr) == (0, "")
            assert done.stdout.startswith(told)
            assert live_pids(job.pids) == []
        assert done.stdout.endswith(" ps` lists the jobs that run\n")
        assert running_jobs.kill_caffe([other.job]) == 2
        assert f"{other.job} is a job, not a machinefile; `" in capsys.readouterr().err
        assert len(live_pids([*other.pids, other.launcher.pid])) == 5


def test_kill_by_id_and_by_machinefile(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = machinefile(tmp_path, "hosts")
    with running_job(state, "job-a", hosts) as first, running_job(state, "job-b", hosts) as second:
        first.kill_launcher()
        assert poseidon("kill", first.job) == 0
        assert live_pids(first.pids) == []
        second.kill_launcher()
        hosts.unlink()
        assert poseidon("kill", str(hosts)) == 0
        assert live_pids(second.pids) == []
    assert f"job {second.job}: 4 processes stopped" in capsys.readouterr().out


def test_ps_and_kill_all(state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = machinefile(tmp_path, "hosts")
    assert poseidon("ps") == 0
    assert capsys.readouterr().out == "no job is running\n"
    with running_job(state, "job-a", hosts) as first, running_job(state, "job-b", hosts) as second:
        second.kill_launcher()
        poseidon("ps")
        header, one, two = capsys.readouterr().out.splitlines()
        assert (
            " ".join(header.split()) == "JOB STARTED LAUNCHER PROCESSES ITERATION RATE ETA OUTPUT"
        )
        assert one.split()[0] == first.job
        assert re.search(rf"pid {first.launcher.pid}  4 of 4 +- +- +- +/nowhere", one)
        assert "died" in two
        poseidon("ps", "--json")
        listed = json.loads(capsys.readouterr().out)
        assert [(job["job"], job["launcher_runs"], job["living"]) for job in listed] == [
            (first.job, True, 4),
            (second.job, False, 4),
        ]
        first.kill_launcher()
        capsys.readouterr()
        assert poseidon("kill", "--all") == 0
        jobs = sorted((first.job, second.job))
        said = capsys.readouterr().out.splitlines()
        assert sorted(said) == [f"job {job}: 4 processes stopped" for job in jobs]
        assert none_left([*first.pids, *second.pids])
    assert poseidon("kill", "--all") == 1


def test_a_host_that_does_not_answer_is_not_one_without_jobs(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    far = machinefile(tmp_path, "far", "0 node7.invalid 9999\n")
    monkeypatch.setattr(sys, "stderr", sys.stdout)  # as on a terminal
    assert poseidon("ps", f"--hostfile={far}") == 1
    warning, end = capsys.readouterr().out.splitlines()
    assert warning.startswith("warning: ") and "the name node7.invalid is not known" in warning
    assert end == "no job was found; the warnings name hosts that could not be asked"
    with pytest.raises(JobError, match=r"^this machine has no job on record"):
        poseidon("kill", "--all", f"--hostfile={far}")


def test_ps_forgets_what_has_gone(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_job(state, "job-a", machinefile(tmp_path, "hosts")) as job:
        job.kill_launcher()
    assert none_left(job.pids)
    (Registry(state).folder / "broken.json").write_text("{")
    assert poseidon("ps") == 0
    output = capsys.readouterr()
    assert output.out == "no job was found; the warnings name hosts that could not be asked\n"
    assert "broken.json is damaged or from a different version" in output.err
    assert [path.name for path in Registry(state).folder.iterdir()] == ["broken.json"]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((), UsageError, "give a job's id, a machinefile"),
        (("job", "--all"), UsageError, "give a job's id, a machinefile"),
        (("job", "--grace=-1"), UsageError, "--grace"),
        (("quick-7",), JobError, "^job quick-7 has ended; its files are in output/quick-7$"),
        (("no-such-job",), JobError, "neither a running job nor a machinefile"),
        (("hosts",), JobError, "no job that was started from hosts is running"),
        (("wrong",), MachinefileError, "wrong:1: "),
        (("far",), JobError, "no job that was started from far .* this machine or its host"),
        (("ended", "--hostfile=hosts"), JobError, "no process of job ended is on this machine"),
        (("../x", "--hostfile=hosts"), UsageError, "cannot be a job id"),
        (("../x",), JobError, "neither a running job nor a machinefile"),
    ],
)
def test_jobs_that_cannot_be_reached_are_named(
    state: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    error: type[Exception],
    words: str,
) -> None:
    machinefile(tmp_path, "hosts")
    machinefile(tmp_path, "wrong", "0 127.0.0.1")
    machinefile(tmp_path, "far", "0 node7 9999")
    (tmp_path / "output" / "quick-7").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words):
        poseidon("kill", *arguments)


def test_a_job_by_its_output_folder(state: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    with running_job(state, "job-a", machinefile(tmp_path, "hosts")) as job:
        with pytest.raises(JobError, match=rf"^no running job writes to the folder {output};"):
            poseidon("kill", str(output))
        job.kill_launcher()
        registry = Registry(state)
        record = registry.read(job.job)
        assert record is not None
        registry.write(replace(record, output=str(output)))
        assert poseidon("kill", str(output)) == 0
        assert none_left(job.pids)


def test_the_job_of_another_user(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job_that_listens(tmp_path / "theirs", "quick-1"):
        monkeypatch.setattr(os, "getuid", lambda: 4711)
        owner = psutil.Process().username()
        with pytest.raises(JobError, match=f"^job quick-1 is user {owner}'s; "):
            poseidon("kill", "quick-1")


def test_a_host_of_the_record_that_is_gone(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    registry = Registry(state)
    gone = RecordedProcess(name="launcher", host="127.0.0.1", pid=2**22 + 1, created="1.0")
    registry.write(
        JobRecord(
            job="quick-1",
            launcher=gone,
            hostfile=None,
            hosts=(Host(id=0, address="node7.invalid", port=9999),),
            output="/out",
            started_s=1.0,
            processes=(replace(gone, name="worker 0", host="node7.invalid"),),
        )
    )
    record = registry.folder / "quick-1.json"
    with pytest.raises(JobError) as caught:
        poseidon("kill", "quick-1")
    assert re.fullmatch(
        rf"processes may be left; .* \S*node7.invalid: .*, remove {record}", str(caught.value)
    )

    assert poseidon("ps") == 0
    assert "quick-1  1970-01-01" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "usage"),
        (("-h",), 2, "usage"),
        (("far", "far"), 2, "usage"),
        (("far", "--ssh_config=none"), 1, "there is no SSH configuration none"),
        (("absent",), 1, "there is no such machinefile"),
        (("far",), 1, "processes may be left: "),
        (("x" * 300,), 1, "File name too long"),
    ],
)
def test_kill_caffe_mistakes(
    state: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    words: str,
) -> None:
    machinefile(tmp_path, "far", "0 node7 9999")
    monkeypatch.chdir(tmp_path)
    assert running_jobs.kill_caffe(arguments) == code
    assert words in capsys.readouterr().err


def test_there_is_no_such_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["leave", "net-1", "node3"]) == 1
    assert "'net-1' is neither a running job, nor a folder" in capsys.readouterr().err
    Path("output/net-1").mkdir(parents=True)
    for job in ("net-1", "output/net-1"):
        assert main(["leave", job, "node3"]) == 1
        said = capsys.readouterr().err
        assert f"no launcher of the job {job} runs on this machine; " in said
    assert main(["leave", "node3"]) == 1
    assert "no job is running" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["net-1", "node3", "node4"]])
def test_it_takes_a_host_and_a_job(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["leave", *words]) == 2
    assert "name the host that is to leave, or a job and a host" in capsys.readouterr().err
