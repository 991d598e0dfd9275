"""Fetching a file from a server on loopback that can be told to misbehave."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from poseidon.caffe.data.prepare.download import download

CONTENT = bytes(range(256)) * 4000
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves CONTENT; attributes script its failures."""

    daemon_threads = True
    content = CONTENT
    break_off_after: list[int]
    """For each coming answer, the bytes to send before the connection is cut."""
    ranges: bool = True
    asked: list[str | None]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.asked.append(asked)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.server.ranges else 0
        if self.path != "/file":
            self.send_error(404)
            return
        if start >= len(self.server.content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(self.server.content) - start))
        self.end_headers()
        end = (
            self.server.break_off_after.pop(0)
            if self.server.break_off_after
            else len(self.server.content)
        )
        self.wfile.write(self.server.content[start : start + end])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as running:
        running.break_off_after, running.asked = [], []
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def url(server: Server, path: str = "/file") -> str:
    return f"http://127.0.0.1:{server.server_port}{path}"


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_file_comes_whole_with_progress(server: Server, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    download(
        url(server), tmp_path / "data" / "file", md5=MD5, report=lambda *words: told.append(words)
    )
    assert (tmp_path / "data" / "file").read_bytes() == CONTENT
    assert names(tmp_path / "data") == ["file"]
    assert told[-1] == ("downloading", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_connection_that_breaks_off_is_taken_up_again(
    server: Server, tmp_path: Path, ranges: bool
) -> None:
    server.ranges = ranges
    server.break_off_after = [100_000, 200_000]
    download(url(server), tmp_path / "file", md5=MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=100000-", "bytes=300000-" if ranges else "bytes=200000-"]


def test_a_later_run_goes_on(server: Server, tmp_path: Path) -> None:
    server.break_off_after = [100_000, 0]
    with pytest.raises(ConnectionError, match="cannot be downloaded"):
        download(url(server), tmp_path / "file", md5=MD5)
    assert names(tmp_path) == [".file.partial"]
    download(url(server), tmp_path / "file", md5=MD5)
    assert server.asked[-1] == "bytes=100000-"
    assert names(tmp_path) == ["file"]


def test_a_run_that_was_killed_before_the_rename(server: Server, tmp_path: Path) -> None:
    (tmp_path / ".file.partial").write_bytes(CONTENT)
    download(url(server), tmp_path / "file", md5=MD5)
    assert names(tmp_path) == ["file"]


def test_another_file_is_not_kept(server: Server, tmp_path: Path) -> None:
    server.content = b"<html>Please log in</html>"
    with pytest.raises(ConnectionError, match="not the published file: its md5 is"):
        download(url(server), tmp_path / "file", md5=MD5)
    assert names(tmp_path) == []


def test_a_server_without_the_file(server: Server, tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match=r"/none cannot be downloaded: .*404"):
        download(url(server, "/none"), tmp_path / "file", md5=MD5)


def test_no_server(tmp_path: Path) -> None:
    # A port that is bound and not listened on refuses for certain.
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionError, match="refused"):
            download(f"http://127.0.0.1:{deaf.getsockname()[1]}/file", tmp_path / "file", md5=MD5)
