"""Delivering files: what arrives, what is not sent twice, what is refused.

The host is a folder and its processes children.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from poseidon.cluster.python_command import sent_program_arguments
from poseidon.cluster.ssh.delivery import Delivered, SentFile, deliver, sent_file
from poseidon.cluster.ssh.receiving import answer, arriving_path
from poseidon.errors import JobError


@dataclass
class Done:
    status: int
    stdout: bytes
    stderr: bytes


class FlakyFile:
    """A file whose line breaks after some bytes of the whole session."""

    def __init__(self, path: str, mode: str, host: FolderHost) -> None:
        self._stream = open(path, mode)  # noqa: SIM115
        self._host = host

    def write(self, data: bytes) -> None:
        if self._host.spoil:
            data, self._host.spoil = bytes(len(data)), self._host.spoil - 1
        kept = data[: self._host.bytes_left]
        self._host.bytes_left -= len(kept)
        self._stream.write(kept)
        if len(kept) < len(data):
            raise EOFError

    def close(self) -> None:
        self._stream.close()


@dataclass(eq=False)
class FolderHost:
    """A host on this machine: `bytes_left` may pass before its line breaks, the first `spoil`
    blocks come out wrong.

    Its python runs for true when `child`, else only what it would run does.
    """

    child: bool = False
    bytes_left: int = 1 << 60
    spoil: int = 0
    opened: list[str] = field(default_factory=list)

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float) -> Done:
        assert timeout_s > 0
        if (
            not self.child
            and set(sent_program_arguments()) <= set(argv)
            and argv[0] != "/bin/false"
        ):
            length, _, rest = stdin.partition(b"\n")
            return Done(0, json.dumps(answer(json.loads(rest[int(length) :]))).encode(), b"")
        done = subprocess.run(argv, input=stdin, capture_output=True, timeout=60, check=False)
        return Done(done.returncode, done.stdout, done.stderr)

    def sftp(self) -> FolderHost:
        return self

    def open(self, filename: str, mode: str) -> FlakyFile:
        self.opened.append(f"{Path(filename).name} {mode}")
        return FlakyFile(filename, mode, self)

    def close(self) -> None:
        pass


@dataclass
class Place:
    """Files here, and where they go."""

    here: Path
    there: Path

    def file(self, name: str, content: bytes) -> SentFile:
        path = self.here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return sent_file(path, str(self.there / name))

    def send(self, files: Sequence[SentFile], host: FolderHost, **more: Any) -> Delivered:
        return deliver(files, host, name="client 1 (node1)", python=[sys.executable], **more)

    def contents(self) -> dict[str, bytes]:
        found = [path for path in self.there.rglob("*") if path.is_file()]
        return {str(path.relative_to(self.there)): path.read_bytes() for path in found}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "here", tmp_path / "there")


BIG = bytes(range(256)) * 4096


def test_files_arrive_and_are_not_sent_again(place: Place) -> None:
    files = [
        place.file("db_1/data.mdb", BIG),
        place.file("a 'b';$(c)", b""),
        place.file("list_1", b"x 1\n"),
    ]
    told: list[int] = []
    done = place.send(files, FolderHost(child=True), report=told.append)
    assert done == Delivered(files=3, sent_files=3, sent_bytes=len(BIG) + 4)
    assert place.contents() == {"db_1/data.mdb": BIG, "a 'b';$(c)": b"", "list_1": b"x 1\n"}
    assert sum(told) == len(BIG) + 4
    told.clear()
    again = place.send(files, FolderHost(bytes_left=0), report=told.append)
    assert (again.sent_files, again.sent_bytes, sum(told)) == (0, 0, len(BIG) + 4)


def test_a_broken_line_is_gone_on_from(place: Place) -> None:
    files = [place.file("first", b"1" * 100), place.file("big", BIG), place.file("last", b"3")]
    with pytest.raises(
        JobError, match=r"client 1 \(node1\): copying broke off after [0-9]+ bytes \(EOFError\)"
    ):
        place.send(files, FolderHost(bytes_left=600_000))
    assert set(place.contents()) == {".first.arriving", ".big.arriving"}, (
        "nothing half-made has a name"
    )
    told: list[int] = []
    host = FolderHost()
    done = place.send(files, host, report=told.append)
    assert place.contents() == {"first": b"1" * 100, "big": BIG, "last": b"3"}
    assert done.sent_bytes == len(BIG) + 101 - 600_000
    assert host.opened == [".first.arriving ab", ".big.arriving ab", ".last.arriving wb"]
    assert sum(told) == len(BIG) + 101


@pytest.mark.parametrize("left", [b"wrong", BIG[:1000] + b"w" * 1000, BIG + b"more"])
def test_what_has_arrived_and_is_another_begins_anew(place: Place, left: bytes) -> None:
    file = place.file("big", BIG)
    place.there.mkdir()
    Path(arriving_path(file.remote)).write_bytes(left)
    assert place.send([file], FolderHost()).sent_bytes == len(BIG)
    assert place.contents() == {"big": BIG}


def test_spoilt_bytes_are_sent_again(place: Place) -> None:
    file = place.file("big", BIG)
    assert place.send([file], FolderHost(spoil=1)).sent_bytes == 2 * len(BIG)
    assert place.contents() == {"big": BIG}


def test_bytes_that_come_out_wrong_twice(place: Place) -> None:
    with pytest.raises(JobError, match="big has another checksum there than here, twice over"):
        place.send([place.file("big", BIG)], FolderHost(spoil=1 << 30))
    assert place.contents() == {}


def test_something_else_in_the_way(place: Place) -> None:
    file = place.file("db_1/data.mdb", b"mine")
    for name in ("data.mdb", "stranger", "lock.mdb"):
        path = place.there / "db_1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"other")
    folders = [str(place.there / "db_1")]
    with pytest.raises(
        JobError, match=r"db_1/stranger is there already and differs; --replace overwrites it"
    ):
        place.send([file], FolderHost(), folders=folders)
    assert len(place.contents()) == 3
    place.send([file], FolderHost(), folders=folders, replace=True)
    assert place.contents() == {"db_1/data.mdb": b"mine", "db_1/lock.mdb": b"other"}


def test_a_file_that_changed_while_it_was_copied(place: Place) -> None:
    file = place.file("big", BIG)
    file.local.write_bytes(b"short")
    with pytest.raises(JobError, match="did it change here while it was copied"):
        place.send([file], FolderHost())


def test_a_host_without_that_python(place: Place) -> None:
    with pytest.raises(JobError, match=r"Python there cannot receive the files \(status 1\)"):
        deliver(
            [place.file("a", b"a")], FolderHost(), name="client 1 (node1)", python=["/bin/false"]
        )


def test_a_place_that_cannot_be_written(place: Place) -> None:
    file = place.file("folder/a", b"a")
    place.there.mkdir()
    (place.there / "folder").write_bytes(b"a file")
    with pytest.raises(
        JobError, match=r"client 1 \(node1\): .*/folder: (File exists|Not a directory)"
    ):
        place.send([file], FolderHost())


def test_a_disk_that_is_too_full(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    file = place.file("a", BIG)
    known = answer({"do": "inspect", "files": [], "folders": [], "replace": False})
    assert known == {"files": [], "free": 0}

    class Full(FolderHost):
        def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float) -> Done:
            done = super().run(argv, stdin=stdin, timeout_s=timeout_s)
            return Done(0, done.stdout[: done.stdout.rindex(b":")] + b": 99}", b"")

    with pytest.raises(JobError, match="1 MB are still to be copied and its disk has room for 0"):
        place.send([file], Full())
    assert place.contents() == {}


def test_many_files_go_in_several_requests(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poseidon.cluster.ssh.delivery.FILES_PER_REQUEST", 2)
    files = [place.file(f"p{number}", bytes([number])) for number in range(5)]
    assert place.send(files, FolderHost()).sent_files == 5
    assert place.contents() == {f"p{number}": bytes([number]) for number in range(5)}


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"cannot read .*/none, which is to be copied: No such file"):
        sent_file(tmp_path / "none", "x")


def test_sealing_twice_is_sealing_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    sent = sent_file(tmp_path / "a", str(tmp_path / "a"))
    order = {"do": "seal", "files": [{"path": sent.remote, "size": 1, "sha256": sent.sha256}]}
    assert answer(order) == {"bad": []}
