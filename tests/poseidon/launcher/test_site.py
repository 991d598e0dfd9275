"""The hosts of a job: which kind they are, and how they are made ready, lost, and left out."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from poseidon.caffe.launch.extraction_job import require_local
from poseidon.cluster.agent.messages import KilledByUser
from poseidon.cluster.agent.remote import RemoteAgent
from poseidon.cluster.dial.dialer import Dialer, LocalDialer, Needs, dial_here
from poseidon.cluster.dial.ray import RayDialer
from poseidon.cluster.dial.ssh import SshDialer
from poseidon.cluster.host_checks import HostCheck
from poseidon.cluster.host_probe import Check, HostNeeds, NeededFile
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.jobs.registry import JobRecord, RecordedProcess
from poseidon.cluster.machinefile import Host, HostRole, parse_machinefile
from poseidon.cluster.process import ProcessSpec
from poseidon.errors import JobError, JobInterrupted, JobKilled, UsageError
from poseidon.launcher import site as site_module
from poseidon.launcher.request import JobRequest, LauncherKind
from poseidon.launcher.site import Site, read_hosts, site_of
from poseidon.launcher.snapshots import SnapshotCopies
from tests.support.polling import until
from tests.support.recording_listener import RecordingListener

TWO = (Host(id=0, address="127.0.0.1", port=0), Host(id=1, address="::1", port=0))
THREE = parse_machinefile("0 node0 0\n1 node1 0\n2 node2 0 role=server", source="hosts")
RECORD = JobRecord(
    job="j-1",
    launcher=RecordedProcess(name="launcher", host="127.0.0.1", pid=1, created="0.0"),
    hostfile=None,
    hosts=THREE,
    output="/tmp",
    started_s=0.0,
)


def no_needs(host: Host) -> HostNeeds:
    return HostNeeds(id=host.id, addresses=())


def test_hosts(tmp_path: Path) -> None:
    assert read_hosts(None, 1) == (Host(id=0, address="127.0.0.1", port=0),)
    hostfile = tmp_path / "hosts"
    hostfile.write_text("0 127.0.0.1 9999\n1 localhost 0\n", encoding="utf-8")
    assert [host.port for host in read_hosts(str(hostfile), 1)] == [9999, 0]
    hostfile.write_text("0 10.0.0.7 9999\n", encoding="utf-8")
    with pytest.raises(JobError, match=r"client 0 is on 10\.0\.0\.7"):
        require_local(str(hostfile), read_hosts(str(hostfile), 1))


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Site]:
    """Makes the site of a machinefile and a value of --launcher."""
    monkeypatch.chdir(tmp_path)

    def make(text: str, launcher: str) -> Site:
        (tmp_path / "hosts").write_text(text)
        return site_of(JobRequest(hostfile="hosts", launcher=LauncherKind(launcher)))

    return make


@pytest.mark.parametrize(
    ("text", "launcher", "dialer"),
    [
        ("0 127.0.0.1 0\n1 localhost 0", "auto", LocalDialer),
        ("0 127.0.0.1 0\n1 localhost 0", "local", LocalDialer),
        ("0 127.0.0.1 0\n1 ::1 0", "ssh", SshDialer),
        ("0 node0 0\n1 10.0.0.1 0", "auto", SshDialer),
        ("0 node0 0", "ssh", SshDialer),
        ("0 127.0.0.1 9 ssh_port=22\n1 127.0.0.1 9 ssh_port=23", "auto", SshDialer),
        ("0 127.0.0.1 0 user=other\n1 127.0.0.1 0", "auto", SshDialer),
        ("0 any 0\n1 node0 0", "ray", RayDialer),
    ],
)
def test_how_hosts_are_reached(
    made: Callable[[str, str], Site], text: str, launcher: str, dialer: type[Dialer]
) -> None:
    found = made(text, launcher)
    assert type(found._dialer) is dialer
    assert found.hosts == parse_machinefile(text, source="hosts")
    assert found.opens_files_here is (dialer is LocalDialer)
    assert found.recorded_hosts == (() if dialer is RayDialer else found.hosts)
    found.close()


@pytest.mark.parametrize(
    ("text", "launcher", "words"),
    [
        ("0 node0 0", "local", "--launcher=local starts processes on this machine"),
        ("0 127.0.0.1 0\n1 localhost 0 ssh_port=2222", "local", "but client 1 is on 127.0.0.1:2222"),
        ("0 127.0.0.1 0\n1 localhost 0 workdir=/x", "auto", "hosts: client 1 is this machine and is started without SSH, so workdir= has no effect; use --launcher=ssh"),
        ("0 node0 0\n1 127.0.0.1 "
"0", "auto", "hosts: client 1 is on 127.0.0.1, which the other machines cannot reach"),
        ("0 localhost 0\n1 fd00::1 "
"0", "ssh", "hosts: client 0 is on localhost, which the other machines cannot reach"),
    ],
)  # fmt: skip
def test_machines_that_cannot_work_together(
    made: Callable[[str, str], Site], text: str, launcher: str, words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        made(text, launcher)
    assert words in str(caught.value)


@pytest.mark.parametrize(("cpus", "working", "cores"), [(8, 2, 4), (7, 2, 3), (1, 2, 1), (8, 1, 8)])
def test_the_hosts_of_one_machine_share_its_cpus(cpus: int, working: int, cores: int) -> None:
    serving = Host(id=2, address="127.0.0.1", port=0, role=HostRole.SERVER)
    site = Site((*TWO[:working], serving), LocalDialer())
    agent: Any = SimpleNamespace(welcome=SimpleNamespace(cores=cpus))
    site._agents = dict.fromkeys((host.id for host in site.hosts), agent)
    assert site.cores(TWO[0]) == cores
    other: Any = SimpleNamespace(welcome=SimpleNamespace(cores=1))
    site._agents[1] = site._agents[2] = other
    assert site.cores(TWO[0]) == cpus, "the others are other machines"


def local_site(hosts: Sequence[Host] = TWO) -> Site:
    site = Site(hosts, LocalDialer())
    site.prepare("j-1", no_needs)
    return site


def test_sockets_of_a_host_are_in_a_folder_of_this_user() -> None:
    site = local_site()
    folders: list[list[str]] = []
    for _ in range(2):
        site.begin(None)
        folders.append([site.socket_folder(host) for host in TWO])
        site.end()
    assert len({*folders[0], *folders[1]}) == 4, "each host and each start has its own"
    scratch = Path(site._agents[0].welcome.scratch)
    assert all(Path(folder).is_relative_to(scratch) for folder in (*folders[0], *folders[1]))
    assert stat.S_IMODE(scratch.stat().st_mode) == 0o700
    assert scratch.stat().st_uid == os.getuid()
    site.close()
    site.close()
    assert not scratch.exists()


def test_a_local_site_uses_the_files_where_they_are(tmp_path: Path) -> None:
    site = local_site()
    try:
        site.begin(RECORD, [[tmp_path / "model"]])
        assert site.opens_files_here
        assert site.path(tmp_path) == str(tmp_path)
        assert site.sent_path(TWO[0], tmp_path / "model") == str(tmp_path / "model")
        assert site.drop_missing() == ()
        changes = {"snapshot": "a.solverstate"}
        assert site.resume_command("poseidon train", changes) == "poseidon train"
        assert site.snapshot_copies(lambda: TWO[0], tmp_path, print) is None
    finally:
        site.close()


def spec(script: str) -> ProcessSpec:
    name = ProcessName(role=Role.WORKER, index=0, client=0, host="a")
    return ProcessSpec(name=name, argv=("sh", "-c", script), first_line=b"a line", own_stdin=True)


@pytest.mark.processes
def test_the_end_of_a_start_ends_its_processes_and_another_may_begin() -> None:
    site = local_site()
    try:
        for _ in range(2):
            site.begin(None)
            listener = RecordingListener()
            site.start(spec("read line; echo $line $$; exec sleep 600"), TWO[1], listener)
            *words, pid = str(listener.until("log")[-1][1]).split()
            assert words == ["a", "line"]
            site.end()
            assert not psutil.pid_exists(int(pid))
    finally:
        site.close()


class FakeDialer(Dialer):
    """Dials agents in this process; the agents of some hosts are gone."""

    def __init__(self) -> None:
        self.gone: set[int] = set()
        self.dialled: list[list[int]] = []
        self.placed: list[list[int]] = []
        self.agents: list[RemoteAgent] = []
        self.closed = 0

    def place(self, hosts: Sequence[Host], needs: Needs) -> None:
        self.placed.append([host.id for host in hosts])

    def dial(self, hosts: Sequence[Host], job: str) -> Mapping[int, RemoteAgent | JobError]:
        assert job == "j-1"
        self.dialled.append([host.id for host in hosts])
        found: dict[int, RemoteAgent | JobError] = {}
        for host in hosts:
            if host.id in self.gone:
                found[host.id] = JobError(f"ml@{host.address}: no answer")
            else:
                agent = found[host.id] = dial_here(f"ml@{host.address}")
                self.agents.append(agent)
        return found

    def names(self, hosts: Sequence[Host]) -> Mapping[int, tuple[str, ...]]:
        return {host.id: (host.address, f"10.0.0.{host.id}") for host in hosts}

    def close(self) -> None:
        self.closed += 1


class Remote:
    """A site of three hosts, and what it does."""

    def __init__(self) -> None:
        self.dialer = FakeDialer()
        self.site = Site(THREE, self.dialer)
        self.checks: list[list[HostNeeds]] = []

    def check_hosts(self, checks: Sequence[HostCheck]) -> dict[int, str]:
        needs = [need for _, check in checks for need in check.clients]
        self.checks.append(needs)
        return {need.id: need.addresses[-1] for need in needs}

    def lose(self, *hosts: int) -> None:
        for agent in [self.site._agents[host] for host in hosts]:
            agent._channel.close()
            until(lambda agent=agent: agent.lost is not None, "it counts as there", 30.0)  # type: ignore[misc]


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Remote]:
    """Three hosts, ready."""
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("poseidon.cluster.agent.connection.HEARTBEAT_S", 0.1)
    monkeypatch.chdir(tmp_path)
    found = Remote()
    monkeypatch.setattr(site_module, "check_hosts", found.check_hosts)
    found.site.prepare("j-1", no_needs)
    yield found
    found.site.close()
    for agent in found.dialer.agents:
        agent.close()


def test_hosts_are_placed_dialled_and_checked_before_anything_starts(remote: Remote) -> None:
    dialer = remote.dialer
    assert (dialer.placed, dialer.dialled) == ([[0, 1, 2]], [[0, 1, 2]])
    ((first, *others),) = remote.checks
    assert first == replace(no_needs(THREE[0]), addresses=("node0", "10.0.0.0"))
    assert [need.id for need in others] == [1, 2]
    assert [host.peer_address for host in remote.site.hosts] == ["10.0.0.0", "10.0.0.1", "10.0.0.2"]
    assert not remote.site.opens_files_here
    assert remote.site.visible_gpus() is None


def test_all_hosts_that_cannot_be_reached_are_listed() -> None:
    dialer = FakeDialer()
    dialer.gone = {0, 2}
    site = Site(THREE, dialer)
    with pytest.raises(JobError) as caught:
        site.prepare("j-1", no_needs)
    site.close()
    assert "ml@node0: no answer" in str(caught.value)
    assert "ml@node2: no answer" in str(caught.value)
    assert "node1" not in str(caught.value)
    assert all(agent.closed for agent in dialer.agents)


def test_what_a_host_lacks_is_told_before_anything_starts() -> None:
    site = Site(THREE[:1], FakeDialer())
    needs = replace(
        no_needs(THREE[0]), files=(NeededFile(name="/no/db", folder="."),), addresses=("127.0.0.1",)
    )
    try:
        with pytest.raises(JobError, match=r"ml@node0: there is no /no/db"):
            site.prepare("j-1", lambda host: needs)
    finally:
        site.close()


def test_a_remote_host_has_a_file_where_it_was_sent(remote: Remote, tmp_path: Path) -> None:
    site = remote.site
    for name in ("model", "net.solverstate", "net.sums"):
        (tmp_path / name).write_text(name)
    model, state = tmp_path / "model", tmp_path / "net.solverstate"
    assert site.path(model) == "model", "the host's own"
    site.begin(RECORD, [[model], [tmp_path / "net.sums", state]])
    places = [Path(site.sent_path(host, state)) for host in THREE[:2]]
    for place in places:
        assert place.read_text() == "net.solverstate"
        assert [path.name for path in sorted(place.parent.iterdir())] == [
            "net.solverstate",
            "net.sums",
        ]
    assert len(set(places)) == 2
    assert site.sources(THREE[0])[str(places[0])] == str(state)
    assert site.sent_path(THREE[0], tmp_path / "other") == "other"
    assert site.sent_path(THREE[2], state) == "net.solverstate", "no worker of it needs any"
    site.end()
    assert not any(place.exists() for place in places)
    assert site.sent_path(THREE[0], state) == "net.solverstate"
    site.begin(RECORD)
    assert site.sent_path(THREE[0], state) == "net.solverstate"


def test_a_host_that_comes_back_or_joins_gets_the_files_of_the_start(
    remote: Remote, tmp_path: Path
) -> None:
    site, script = remote.site, tmp_path / "train.py"
    script.write_text("print(1)")
    site.begin(RECORD, [[script]])
    remote.lose(1)
    joins = Host(id=3, address="node3", port=0)
    for host in (THREE[1], joins):
        site.reach(host, RECORD, no_needs, [[script]])
        assert Path(site.sent_path(host, script)).read_text() == "print(1)"
    remote.lose(1)
    script.write_text("print(2)")
    with pytest.raises(JobError, match=r"train.py has changed since the job started"):
        site.reach(THREE[1], RECORD, no_needs, [[script]])
    assert site._is_lost(THREE[1])


def test_files_that_cannot_be_sent_interrupt_the_job(remote: Remote, tmp_path: Path) -> None:
    (tmp_path / "model").write_text("model")

    def break_off(*file: object) -> None:
        raise JobError("ml@node1: the connection to it broke")

    remote.site._agents[1].send_file = break_off  # type: ignore[method-assign]
    with pytest.raises(JobInterrupted, match=r"ml@node1: .*the connection to it broke"):
        remote.site.begin(RECORD, [[tmp_path / "model"]])


def test_snapshots_are_copied_from_the_host_that_writes_them(
    remote: Remote, tmp_path: Path
) -> None:
    copies = remote.site.snapshot_copies(lambda: THREE[1], tmp_path / "copies", print)
    assert isinstance(copies, SnapshotCopies)
    assert copies._agent() is remote.site._agents[1]
    copies.close()


@pytest.mark.processes
def test_the_job_is_on_record_on_every_host(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each agent writes it once a process of the job runs there."""
    registered: list[str] = []
    monkeypatch.setattr(
        RemoteAgent,
        "register",
        lambda agent, record: registered.append(f"{agent.label} {record.job}"),
    )
    remote.site.begin(RECORD)
    assert sorted(registered) == ["ml@node0 j-1", "ml@node1 j-1", "ml@node2 j-1"]
    remote.site.begin(None)
    assert len(registered) == 3


def test_lost_hosts_are_dialled_again(remote: Remote) -> None:
    site, dialer = remote.site, remote.dialer
    there = site._agents[0]
    remote.lose(1, 2)
    dialer.gone = {2}
    with pytest.raises(JobInterrupted, match=r"^ml@node2: no answer$") as caught:
        site.begin(RECORD)
    assert caught.value.while_starting
    with pytest.raises(JobInterrupted):
        site.begin(RECORD)
    dialer.gone = set()
    site.begin(RECORD)
    site.begin(RECORD)
    assert dialer.dialled[1:] == [[1, 2], [2], [2]], "those that have come back stay"
    assert site._agents[0] is there
    assert len(remote.checks) == 1, "they are the same machines"


NEW = Host(id=3, address="node3", port=0)


def test_a_host_is_reached_and_checked_beside_the_job(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails the check is not taken for one that has passed it before."""
    site, dialer = remote.site, remote.dialer
    answers = [JobError("ml@node3: there is no /no/db"), {3: "10.0.0.3"}]

    def check_hosts(checks: Sequence[HostCheck]) -> Mapping[int, str]:
        (present, new), answer = checks, answers.pop(0)
        assert present == (site._agents[0], Check())  # torch is compared
        assert [need.id for need in new[1].clients] == [3]
        if isinstance(answer, JobError):
            raise answer
        return answer

    monkeypatch.setattr(site_module, "check_hosts", check_hosts)
    with pytest.raises(JobError, match="there is no /no/db"):
        site.reach(NEW, RECORD, no_needs)
    assert 3 not in site._agents
    until(lambda: dialer.agents[3].lost is not None, "its agent has not ended", 30.0)
    assert site.reach(NEW, RECORD, no_needs) == replace(NEW, peer_address="10.0.0.3")
    assert dialer.dialled[1:] == [[3], [3]]
    assert (answers, site.hosts) == ([], tuple(site.hosts))


def test_a_host_that_has_moved_is_where_it_was_found(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = replace(NEW, address="node9")
    monkeypatch.setattr(remote.dialer, "located", lambda hosts: (moved,))
    found = remote.site.reach(NEW, RECORD, no_needs)
    assert found == replace(moved, peer_address="10.0.0.3")


def test_hosts_that_are_asked_to_end_may_leave(remote: Remote) -> None:
    site, asked = remote.site, list[Sequence[int]]()

    def let_leave(hosts: Sequence[Host]) -> bool:
        asked.append([host.id for host in hosts])
        return True

    agents = [site._agents[host] for host in (0, 1)]
    assert not agents[0].leave()  # no job runs
    site.let_leave = let_leave
    assert all(agent.leave() for agent in agents)
    site._agents[2] = agents[1]  # two lines of one machine
    assert agents[1].leave()
    site.release([1])
    assert agents[1].leave()
    assert asked == [[0], [1], [1, 2], [2]]
    assert agents[1].lost is None
    site.release([2])
    until(lambda: agents[1].lost is not None, "the agent has not ended", 30.0)
    assert not agents[1].leave()


def test_a_job_that_the_user_has_killed_between_two_starts_does_not_begin_again(
    remote: Remote,
) -> None:
    remote.site._agents[1]._take(KilledByUser())
    assert [remote.site.is_killed(host) for host in remote.site.hosts] == [False, True, False]
    with pytest.raises(JobKilled, match=r"^ml@node1: the job was killed there$"):
        remote.site.begin(RECORD)
    assert remote.dialer.dialled == [[0, 1, 2]], "no agent is started there again"


def test_a_host_that_may_be_another_machine_is_checked_again(remote: Remote) -> None:
    remote.dialer.moves = True
    remote.lose(1)
    remote.dialer.gone = {1}
    with pytest.raises(JobInterrupted):
        remote.site.begin(RECORD)
    assert len(remote.checks) == 1
    remote.dialer.gone = set()
    for _ in range(2):
        remote.site.begin(RECORD)
        assert [[need.id for need in needs] for needs in remote.checks] == [[0, 1, 2]] * 2


def test_a_moved_host_whose_check_has_failed_is_checked_at_the_next_start(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is connected by then."""
    remote.dialer.moves = True
    remote.lose(1)

    def fail(checks: object) -> dict[int, str]:
        raise JobError("ml@node1: there is no /no/db")

    with monkeypatch.context() as patched:
        patched.setattr(site_module, "check_hosts", fail)
        with pytest.raises(JobInterrupted):
            remote.site.begin(RECORD)
    remote.site.begin(RECORD)
    assert len(remote.checks) == 2


def test_a_host_that_cannot_come_back_ends_the_job(remote: Remote) -> None:
    remote.dialer.given = True
    remote.lose(1)
    remote.dialer.gone = {1}
    with pytest.raises(JobError, match=r"^ml@node1: no answer$") as caught:
        remote.site.begin(RECORD)
    assert not isinstance(caught.value, JobInterrupted)


@pytest.mark.parametrize(("lost", "missing"), [([], []), ([1], [1]), ([0, 1], []), ([2], [2])])
def test_hosts_that_do_not_answer_are_left_out_while_one_works(
    remote: Remote, lost: list[int], missing: list[int]
) -> None:
    before = remote.site.hosts
    remote.lose(*lost)
    left_out = remote.site.drop_missing()
    assert [host.id for host in left_out] == missing
    assert remote.site.hosts == tuple(host for host in before if host.id not in missing)
    assert remote.dialer.placed == [[0, 1, 2]]


def test_a_job_goes_on_without_a_host_that_does_not_come_back(
    remote: Remote, tmp_path: Path
) -> None:
    (tmp_path / "model").write_text("model")
    remote.lose(0, 1)
    remote.dialer.gone = {1}
    with pytest.raises(JobInterrupted):
        remote.site.begin(RECORD)
    assert [host.id for host in remote.site.drop_missing()] == [1]
    remote.site.begin(RECORD, [[tmp_path / "model"]])
    assert Path(remote.site.sent_path(THREE[0], tmp_path / "model")).exists()
    assert remote.dialer.dialled == [[0, 1, 2], [0, 1]]
    remote.site.end()


def test_silence_is_not_an_answer(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's lines may stand without it, as behind a jump host."""
    monkeypatch.setattr(site_module, "ANSWER_S", 3.0)
    silent = remote.site._agents[1]
    monkeypatch.setattr(silent, "_take", lambda report: None)
    monkeypatch.setattr(silent._channel, "receive", lambda: None)
    assert [host.id for host in remote.site.drop_missing()] == [1]


def test_fewer_hosts_that_move_are_placed_anew(remote: Remote) -> None:
    """So that no autoscaler brings a node for a host that was left out."""
    remote.dialer.moves = True
    remote.lose(1)
    assert [host.id for host in remote.site.drop_missing()] == [1]
    assert remote.dialer.placed == [[0, 1, 2], [0, 2]]
    assert all(agent.closed or agent.lost for agent in remote.dialer.agents)
    remote.site.begin(RECORD)
    assert remote.dialer.dialled == [[0, 1, 2], [0, 2]]


@pytest.mark.parametrize("given", [False, True])
def test_who_ends_the_agents(remote: Remote, given: bool) -> None:
    remote.dialer.given = given
    remote.site.close()
    remote.site.close()
    assert [agent.closed for agent in remote.dialer.agents] == [not given] * 3
    assert remote.dialer.closed == 2


@pytest.mark.processes
def test_processes_get_the_interpreter_and_not_the_paths_of_this_machine(remote: Remote) -> None:
    remote.site.begin(None)
    listener = RecordingListener()
    script = "import os, sys; print(sys.executable, os.environ.get('PYTHONPATH'))"
    name = ProcessName(role=Role.WORKER, index=0, client=0, host="a")
    argv, environment = (sys.executable, "-c", script), {"PYTHONPATH": "/only/here"}
    made = ProcessSpec(name=name, argv=argv, environment=environment, first_line=b"")
    remote.site.start(made, THREE[0], listener)
    (_, line), end = listener.until("exited")[-2:]
    assert str(line).startswith(sys.executable) and "/only/here" not in str(line)
    assert end == ("exited", 0)
