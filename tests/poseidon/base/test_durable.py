"""A file that is put in place is on disk before it has its name, and its name is on disk after
that. What a name stands for stays what it is.
"""

from __future__ import annotations

import ast
import errno
import fcntl
import os
import re
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from poseidon.base.durable import obstacle_to, replace_durably, replacing, write_whole
from tests.support.flushes import Flush, watch_flushes
from tests.test_architecture import ROOT


def put_in_place(path: Path, content: bytes) -> None:
    """Write a file of another folder first, as a download."""
    partial = path.with_name("arriving")
    partial.write_bytes(content)
    replace_durably(partial, path)
    assert not partial.exists()


WRITERS = (write_whole, put_in_place)
both = pytest.mark.parametrize("write", WRITERS)


def test_content_first_then_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial, path = tmp_path / "partial", tmp_path / "file"
    partial.write_bytes(b"new")
    path.write_bytes(b"old")
    seen = watch_flushes(monkeypatch)
    replace_durably(partial, path)
    assert path.read_bytes() == b"new"
    assert seen == [
        Flush(path=partial, holds=None),
        Flush(path=tmp_path, holds=frozenset({"file"})),
    ]


def test_what_is_soon_written_anew_waits_for_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_flushes(monkeypatch)
    write_whole(tmp_path / "file", b"new", durably=False)
    assert (tmp_path / "file").read_bytes() == b"new"
    assert seen == []
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_is_not_there_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(FileNotFoundError):
        replace_durably(tmp_path / "partial", path)
    assert path.read_bytes() == b"old"


def test_a_block_that_raises_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert {child.name: child.read_bytes() for child in tmp_path.iterdir()} == {"file": b"old"}


@both
def test_links_stay_and_their_target_is_written(
    write: Callable[[Path, bytes], None], tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "there").write_bytes(b"old")
    links: dict[str, Path | str] = {
        "direct": folder / "there",
        "relative": "folder/new",
        "chain": "relative",
    }
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    for name in links:
        write(tmp_path / name, name.encode())
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / name).read_bytes() == name.encode()
    assert (folder / "there").read_bytes() == b"direct"
    assert (folder / "new").read_bytes() == b"chain"
    assert sorted(child.name for child in folder.iterdir()) == ["new", "there"]


def test_a_link_without_an_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        write_whole(tmp_path / "a", b"x")


@both
def test_a_fifo_gets_the_content(write: Callable[[Path, bytes], None], tmp_path: Path) -> None:
    fifo, got = tmp_path / "fifo", list[bytes]()
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: got.append(fifo.read_bytes()))
    reader.start()
    write(fifo, b"content")
    reader.join()
    assert got == [b"content"] and stat.S_ISFIFO(fifo.stat().st_mode)


@pytest.mark.needs("root")
@both
def test_a_device_stays(write: Callable[[Path, bytes], None], tmp_path: Path) -> None:
    device, link = tmp_path / "null", tmp_path / "link"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        device.write_bytes(b"")
    except PermissionError:
        pytest.skip("this file system has no devices")
    link.symlink_to(device)
    write(device, b"content")
    write(link, b"content")
    assert stat.S_ISCHR(device.stat().st_mode) and link.is_symlink()
    assert sorted(child.name for child in tmp_path.iterdir()) == ["link", "null"]


def test_a_socket_and_a_folder_are_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        with pytest.raises(OSError, match="No such device or address"):
            write_whole(tmp_path / "socket", b"x")
        assert (tmp_path / "socket").is_socket()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path, b"x")


@pytest.mark.parametrize("name", ["/dev/fd/1", "link"])
def test_an_own_descriptor_is_written_where_it_stands(name: str, tmp_path: Path) -> None:
    """What `>> log` has stays, and so does the order of what is printed."""
    log, script = tmp_path / "log", "print('before'); write_whole(Path(sys.argv[1]), b'content\\n')"
    (tmp_path / "link").symlink_to("/dev/stdout")
    log.write_text("old\n")
    with log.open("a") as stream:
        subprocess.run(
            [
                *(sys.executable, "-c"),
                f"import sys\nfrom pathlib import Path\nfrom poseidon.base.durable import write_whole\n{script}",
                str(tmp_path / name) if name == "link" else name,
            ],
            stdout=stream,
            check=True,
            cwd=ROOT,
        )
    assert log.read_text() == "old\nbefore\ncontent\n"


@both
def test_the_mode_is_kept_and_a_new_file_has_the_umasks(
    write: Callable[[Path, bytes], None], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    for mode in (0o600, 0o664, 0o751, 0o400, 0o200):
        path.unlink(missing_ok=True)
        path.write_bytes(b"old")
        path.chmod(mode)
        write(path, b"new")
        assert stat.S_IMODE(path.stat().st_mode) == mode
    before = os.umask(0o027)
    try:
        write(tmp_path / "new", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


@pytest.mark.needs("root")
@both
def test_the_owner_is_kept(write: Callable[[Path, bytes], None], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    os.chown(path, 12345, 54321)
    path.chmod(0o4755)
    write(path, b"new")
    status = path.stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (12345, 54321, 0o4755)


def test_rights_of_another_owner_do_not_become_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o6755)
    monkeypatch.setattr("os.chown", lambda *_: os.strerror(errno.EPERM))
    real = os.stat_result

    def foreign(status: os.stat_result) -> os.stat_result:
        return real([*status[:4], status.st_uid + 1, *status[5:]])

    monkeypatch.setattr("poseidon.base.durable._status", lambda target: foreign(target.stat()))
    write_whole(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o755


@pytest.mark.parametrize(
    ("call", "refused", "write"),
    [
        ("poseidon.base.durable._open_partial", errno.EACCES, write_whole),
        ("poseidon.base.durable._open_partial", errno.EROFS, write_whole),
        ("os.replace", errno.EPERM, write_whole),
        ("os.replace", errno.EBUSY, write_whole),
        ("os.replace", errno.EBUSY, put_in_place),
    ],
)
def test_a_file_whose_folder_refuses_is_written_in_place(
    call: str,
    refused: int,
    write: Callable[[Path, bytes], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that is mounted into a container."""
    path = tmp_path / "file"
    path.write_bytes(b"old and longer")
    inode = path.stat().st_ino

    def refuse(*_: object, **__: object) -> None:
        raise OSError(refused, os.strerror(refused))

    monkeypatch.setattr(call, refuse)
    write(path, b"new")
    assert (path.read_bytes(), path.stat().st_ino) == (b"new", inode)
    assert [child.name for child in tmp_path.iterdir()] == ["file"]
    with pytest.raises(OSError, match=os.strerror(refused)):
        write(tmp_path / "absent", b"new")


@both
def test_a_link_to_another_file_system(
    write: Callable[[Path, bytes], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real, refusals = tmp_path / "file", os.replace, [errno.EXDEV]

    def replace(source: Path, target: Path) -> None:
        if refusals:
            raise OSError(refusals.pop(), "cross-device link")
        real(source, target)

    monkeypatch.setattr("os.replace", replace)
    write(path, b"new")
    assert {child.name: child.read_bytes() for child in tmp_path.iterdir()} == {"file": b"new"}


@pytest.mark.needs("root")
def test_a_link_that_another_user_has_planted_is_refused(tmp_path: Path) -> None:
    shared, private = tmp_path / "shared", tmp_path / "private"
    shared.mkdir()
    private.write_bytes(b"old")
    (shared / "out").symlink_to(private)
    os.lchown(shared / "out", 12345, 12345)
    write_whole(shared / "out", b"new")  # nobody else may write to the folder
    shared.chmod(0o1777)
    with pytest.raises(PermissionError, match="it is a link of another user"):
        write_whole(shared / "out", b"newer")
    assert private.read_bytes() == b"new"


def test_leftovers_of_killed_processes_go_and_of_running_ones_stay(tmp_path: Path) -> None:
    path = tmp_path / "file"
    (tmp_path / ".file.dead.partial").write_bytes(b"left")
    (tmp_path / ".other.dead.partial").write_bytes(b"left")
    with (tmp_path / ".file.live.partial").open("wb") as live:
        fcntl.flock(live, fcntl.LOCK_EX)
        write_whole(path, b"new")
    names = sorted(child.name for child in tmp_path.iterdir())
    assert names == [".file.live.partial", ".other.dead.partial", "file"]


def test_the_longest_name(tmp_path: Path) -> None:
    path = tmp_path / ("ä" * 127)
    write_whole(path, b"x")
    assert [child.name for child in tmp_path.iterdir()] == [path.name]


def test_obstacles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    assert obstacle_to(tmp_path) is None
    assert obstacle_to(tmp_path / "new" / "deep") is None
    assert obstacle_to(tmp_path / "file" / "deep") == f"{tmp_path}/file is not a folder"
    assert obstacle_to(tmp_path / "nowhere") == f"{tmp_path}/nowhere is not a folder"
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=9, free=0))
    assert obstacle_to(tmp_path / "new") == f"the disk of {tmp_path} is full"
    assert list(tmp_path.glob("new")) == []


MAY_RENAME = {
    "poseidon/caffe2/models/download.py": "a new folder",
    "poseidon/cluster/agent/files.py": "a part file of a database, never one that is there; a mark",
    "poseidon/caffe/data/staging.py": "folders, all or none",
    "poseidon/base/durable.py": "the one place",
    "poseidon/caffe/proto/projects.py": "a new folder",
    "ps_server/native/compile.py": "a library in the folder of the package",
    "examples/ddp/train.py": "a script for plain torch, which imports nothing of Poseidon",
}
"""The files that rename, and what."""


def renames(source: str) -> bool:
    """Tell whether a module renames files: `os.replace`, `Path.rename` and their like."""
    if not re.search(r"\b(replace|renames?|move)\(", source):
        return False
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            found = (owner, node.func.attr)
            if found in {
                ("os", "replace"),
                ("os", "rename"),
                ("os", "renames"),
                ("shutil", "move"),
            }:
                return True
            path_method = node.func.attr in ("replace", "rename") and not node.keywords
            if path_method and len(node.args) == 1 and not isinstance(node.args[0], ast.Starred):
                return True
    return False


@pytest.mark.timeout(300)
def test_no_other_module_renames_files() -> None:
    found = {
        str(path.relative_to(ROOT))
        for folder in ("poseidon", "ps_server", "scripts", "examples")
        for path in (ROOT / folder).rglob("*.py")
        if renames(path.read_text(encoding="utf-8"))
    }
    assert found == set(MAY_RENAME)
