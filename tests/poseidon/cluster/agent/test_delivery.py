"""Delivering files: what arrives, what is not sent twice, what is refused.

The host is a folder of this machine, and its agent runs in this process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from poseidon.cluster.agent import files as agent_files
from poseidon.cluster.agent.delivery import Delivered, SentFile, deliver, sent_file
from poseidon.cluster.agent.files import answer, arriving_path
from poseidon.cluster.agent.messages import Put
from poseidon.cluster.agent.remote import PART_BYTES, RemoteAgent
from poseidon.cluster.dial.dialer import dial_here
from poseidon.errors import JobError


@dataclass(slots=True)
class Disk:
    """Where the agent writes; it fails or spoils what comes on demand.

    Attributes:
        bytes_left: that may arrive before `fail` is called in place of writing.
        fail: ends the delivery.
        spoil: how many parts come out wrong.
        written: the names of the files that parts were written to, once for each run of parts, with
            the offset of the first.
    """

    fail: Callable[[], None] = lambda: None
    bytes_left: int = 1 << 60
    spoil: int = 0
    written: list[tuple[str, int]] = field(default_factory=list)

    def put(self, part: Put) -> None:
        if len(part.content) > self.bytes_left:
            self.fail()
            return
        self.bytes_left -= len(part.content)
        name = Path(part.path).name
        if not self.written or self.written[-1][0] != name:
            self.written.append((name, part.offset))
        content = part.content
        if self.spoil:
            content, self.spoil = bytes(len(content)), self.spoil - 1
        _put(Put(id=part.id, path=part.path, offset=part.offset, content=content))


_put = agent_files.put


@dataclass
class Place:
    """Files here, and where they go."""

    here: Path
    there: Path
    agent: RemoteAgent

    def file(self, name: str, content: bytes) -> SentFile:
        path = self.here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return sent_file(path, str(self.there / name))

    def send(self, files: Sequence[SentFile], **more: Any) -> Delivered:
        return deliver(files, self.agent, name="client 1 (node1)", **more)

    def contents(self) -> dict[str, bytes]:
        found = [path for path in self.there.rglob("*") if path.is_file()]
        return {str(path.relative_to(self.there)): path.read_bytes() for path in found}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    agent = dial_here("ml@node1")
    yield Place(tmp_path / "here", tmp_path / "there", agent)
    agent.close()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(agent_files, "put", disk.put)
    return disk


BIG = bytes(range(256)) * 4096


def test_files_arrive_and_are_not_sent_again(place: Place, disk: Disk) -> None:
    files = [
        place.file("db_1/data.mdb", BIG),
        place.file("a 'b';$(c)", b""),
        place.file("list_1", b"x 1\n"),
    ]
    told: list[int] = []
    done = place.send(files, report=told.append)
    assert done == Delivered(files=3, sent_files=3, sent_bytes=len(BIG) + 4)
    assert place.contents() == {"db_1/data.mdb": BIG, "a 'b';$(c)": b"", "list_1": b"x 1\n"}
    assert sum(told) == len(BIG) + 4
    told.clear()
    disk.written.clear()
    again = place.send(files, report=told.append)
    assert (again.sent_files, again.sent_bytes, sum(told)) == (0, 0, len(BIG) + 4)
    assert disk.written == []


def _fail_with(error: OSError) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize("end", ["a lost agent", "a full disk"])
def test_a_delivery_that_broke_off_is_continued(place: Place, disk: Disk, end: str) -> None:
    files = [place.file("first", b"1" * 100), place.file("big", BIG), place.file("last", b"3")]
    disk.bytes_left = 600_000
    if end == "a full disk":
        disk.fail = _fail_with(OSError(28, "No space left on device"))
        why = "No space left on device"
    else:
        disk.fail = place.agent._channel.close  # as a connection that breaks
        why = "the connection to it "
    arrived = 600_000 // PART_BYTES * PART_BYTES
    with pytest.raises(
        JobError,
        match=rf"^client 1 \(node1\): copying broke off after [0-9]+ bytes \({why}.*\); run the "
        "same command again to continue$",
    ):
        place.send(files)
    assert set(place.contents()) == {".first.arriving", ".big.arriving"}, (
        "nothing half-made has a name"
    )
    assert (place.there / ".big.arriving").stat().st_size == arrived
    told: list[int] = []
    place.agent.close()
    place.agent = dial_here("ml@node1")
    disk.bytes_left = 1 << 60
    disk.written.clear()
    done = place.send(files, report=told.append)
    assert place.contents() == {"first": b"1" * 100, "big": BIG, "last": b"3"}
    assert done.sent_bytes == len(BIG) + 1 - arrived
    assert disk.written == [(".big.arriving", arrived), (".last.arriving", 0)]
    assert sum(told) == len(BIG) + 101
    place.agent.close()


@pytest.mark.parametrize("left", [b"wrong", BIG[:1000] + b"w" * 1000, BIG + b"more"])
def test_what_has_arrived_and_is_another_begins_anew(place: Place, left: bytes) -> None:
    file = place.file("big", BIG)
    place.there.mkdir()
    Path(arriving_path(file.remote)).write_bytes(left)
    assert place.send([file]).sent_bytes == len(BIG)
    assert place.contents() == {"big": BIG}


def test_spoilt_bytes_are_sent_again(place: Place, disk: Disk) -> None:
    file = place.file("big", BIG)
    disk.spoil = 1
    assert place.send([file]).sent_bytes == 2 * len(BIG)
    assert place.contents() == {"big": BIG}


def test_bytes_that_come_out_wrong_twice(place: Place, disk: Disk) -> None:
    disk.spoil = 1 << 30
    with pytest.raises(JobError, match="big has a different checksum there than here"):
        place.send([place.file("big", BIG)])
    assert place.contents() == {}


def test_something_else_in_the_way(place: Place) -> None:
    file = place.file("db_1/data.mdb", b"mine")
    for name in ("data.mdb", "stranger", "lock.mdb"):
        path = place.there / "db_1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"other")
    folders = [str(place.there / "db_1")]
    with pytest.raises(JobError, match="db_1/stranger is there already and differs"):
        place.send([file], folders=folders)
    assert len(place.contents()) == 3
    place.send([file], folders=folders, replace=True)
    assert place.contents() == {"db_1/data.mdb": b"mine", "db_1/lock.mdb": b"other"}


def test_a_file_that_changed_while_it_was_copied(place: Place) -> None:
    file = place.file("big", BIG)
    file.local.write_bytes(b"short")
    with pytest.raises(JobError, match="did it change here while it was copied"):
        place.send([file])


def test_a_place_that_cannot_be_written(place: Place) -> None:
    file = place.file("folder/a", b"a")
    place.there.mkdir()
    (place.there / "folder").write_bytes(b"a file")
    with pytest.raises(JobError, match=r"client 1 \(node1\): .*/folder"):
        place.send([file])


def test_a_disk_that_is_too_full(place: Place, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    known = answer({"do": "inspect", "files": [], "folders": [], "replace": False})
    assert known == {"files": [], "free": 0}
    monkeypatch.setattr(agent_files, "_free_bytes", lambda _: 99)
    with pytest.raises(JobError, match=r"^client 1 \(node1\)"):
        place.send([place.file("a", BIG)])
    assert disk.written == []


def test_many_files_go_in_several_requests(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poseidon.cluster.agent.delivery.FILES_PER_REQUEST", 2)
    files = [place.file(f"p{number}", bytes([number])) for number in range(5)]
    assert place.send(files).sent_files == 5
    assert place.contents() == {f"p{number}": bytes([number]) for number in range(5)}


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"cannot read .*/none, which is to be copied: No such file"):
        sent_file(tmp_path / "none", "x")


def test_sealing_twice_is_sealing_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    sent = sent_file(tmp_path / "a", str(tmp_path / "a"))
    order = {"do": "seal", "files": [{"path": sent.remote, "size": 1, "sha256": sent.sha256}]}
    assert answer(order) == {"bad": []}


def test_a_home_is_the_hosts_own(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    local = place.file("a", b"content").local
    place.send([sent_file(local, "~/data/a")])
    assert (tmp_path / "home" / "data" / "a").read_bytes() == b"content"
    assert not os.path.exists("~")
