"""What is read in folders that another user may have written, and which folders are private."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from poseidon.base.foreign_files import (
    check_private,
    make_private,
    open_in,
    open_regular,
    read_definition,
    read_end,
    read_in,
)


def link(path: Path) -> None:
    path.symlink_to(path.parents[1] / "private")


def link_of_a_folder(path: Path) -> None:
    path.parent.rmdir()
    path.parent.symlink_to(path.parents[2] / "elsewhere")


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a link": (link, "it is a link, or below one"),
    "a link that leads nowhere": (lambda path: path.symlink_to("gone"), "it is a link"),
    "a FIFO": (os.mkfifo, "it is not a regular file"),
    "a socket": (bound_socket, "it is not a regular file"),
    "a folder": (Path.mkdir, "it is not a regular file"),
    "an endless file": (lambda path: path.symlink_to("/dev/zero"), "it is a link"),
    "a large file": (lambda path: path.write_bytes(bytes(1 << 21)), "it has more than 1 MiB"),
    "nothing": (lambda path: None, "No such file or directory"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_a_file_of_the_folder_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    make, reason = REFUSED[kind]
    (tmp_path / "private").write_text("secret")
    (tmp_path / "job").mkdir()
    make(tmp_path / "job" / "log")
    with pytest.raises(OSError) as raised:
        read_in(tmp_path / "job", "log", most_bytes=1 << 20)
    assert reason in str(raised.value.strerror)
    assert raised.value.filename == str(tmp_path / "job" / "log")


def test_no_link_is_followed_below_the_folder(tmp_path: Path) -> None:
    elsewhere, job = tmp_path / "elsewhere", tmp_path / "job"
    elsewhere.mkdir()
    (elsewhere / "log").write_text("secret")
    (job / "logs").mkdir(parents=True)
    assert os.listdir(job / "logs") == []
    link_of_a_folder(job / "logs" / "log")
    (tmp_path / "link").symlink_to(job)
    for folder, name in (
        (job, "logs/log"),
        (job, "../elsewhere/log"),
        (job, str(elsewhere / "log")),
        (job, "."),
        (tmp_path / "link", "logs/log"),
    ):
        with pytest.raises(OSError, match=r"it is a link, or below one|it is not below the folder"):
            open_in(folder, name)


@pytest.mark.needs("root")
def test_a_file_of_another_user_than_its_folder_is_refused(tmp_path: Path) -> None:
    """A hard link of a private file, or what root's umask has left there."""
    (tmp_path / "log").write_text("x")
    os.chown(tmp_path / "log", 12345, 12345)
    with pytest.raises(OSError, match="it belongs to a different user than its folder"):
        open_in(tmp_path, "log")
    os.chown(tmp_path, 12345, 12345)
    assert read_in(tmp_path, "log", most_bytes=9) == b"x"


def test_the_end_of_a_file_begins_with_a_line(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("first\nsecond\nthird\n")
    assert read_end(tmp_path, "log", most_bytes=9) == b"third\n"
    assert read_end(tmp_path, "log", most_bytes=99) == b"first\nsecond\nthird\n"


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_each_folder_that_is_made_is_private(umask: int, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    before = os.umask(umask)
    try:
        make_private(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    for name in ("a", "a/b", "a/b/c"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_an_own_folder_is_closed_to_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    make_private(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_a_folder_with_the_sticky_bit_stays(tmp_path: Path) -> None:
    """Nobody may close /tmp, root least of all."""
    tmp_path.chmod(0o1777)
    make_private(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o1777


@pytest.mark.needs("root")
def test_a_folder_of_another_user_is_not_private(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12345)
    for check in (check_private, make_private):
        with pytest.raises(OSError, match="it belongs to another user"):
            check(tmp_path)


def test_a_regular_file_is_opened_without_waiting(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "fifo")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"content"
    for name, reason in (
        *(("fifo", "it is not a regular file"), ("/dev/zero", "it is not a regular file")),
        *((".", "Is a directory"), ("none", "No such file or directory")),
    ):
        with pytest.raises(OSError, match=reason) as caught:
            open_regular(tmp_path / name)
        assert caught.value.strerror == reason


def test_a_definition_is_a_file_a_link_or_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "net").write_bytes(b"content")
    (tmp_path / "link").symlink_to("net")
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "net", tmp_path / "link"):
        assert read_definition(path) == b"content"
    large = bytes(1 << 18)  # more than a pipe holds
    writer = threading.Thread(target=lambda: (tmp_path / "fifo").write_bytes(large))
    writer.start()
    assert read_definition(tmp_path / "fifo") == large
    writer.join()
    reads, writes = os.pipe()
    os.write(writes, b"content")
    os.close(writes)
    assert read_definition(Path(f"/dev/fd/{reads}")) == b"content"
    os.close(reads)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("/dev/zero", "it is a device, not a file or a pipe"),
        ("/dev/null", "it is a device, not a file or a pipe"),
        ("sparse", "it has more than 1 MiB"),
        ("endless", "it has more than 1 MiB"),
        ("silent", r"nothing was written to the pipe for 0\.01 s"),
        (".", "Is a directory"),
        ("absent", "No such file or directory"),
    ],
)
def test_what_is_no_definition_is_refused(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.truncate(os.open(tmp_path / "sparse", os.O_CREAT | os.O_WRONLY), 1 << 40)
    for fifo in ("endless", "silent"):
        os.mkfifo(tmp_path / fifo)
    if name == "silent":
        monkeypatch.setattr("poseidon.base.foreign_files.PIPE_SILENT_S", 0.01)

    def write_without_end() -> None:
        with suppress(BrokenPipeError), (tmp_path / name).open("wb") as file:
            while True:
                file.write(bytes(1 << 16))

    writer = threading.Thread(target=write_without_end)
    if name == "endless":
        writer.start()
    with pytest.raises(OSError, match=reason):
        read_definition(tmp_path / name, most_bytes=1 << 20)
    if name == "endless":
        writer.join()
