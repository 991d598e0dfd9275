"""Fetching a file from a server on loopback that can be told to misbehave."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from poseidon.caffe.data.prepare.download import (
    download,
    fetch_model,
    front_matter,
    how_to_fetch,
    is_complete,
    read_model_folder,
)
from poseidon.cli.checks import check_models
from poseidon.cli.main import main
from poseidon.errors import DataError, SnapshotError

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


def test_two_at_once_exclude_each_other(server: Server, tmp_path: Path) -> None:
    def again(*_: object) -> None:
        with pytest.raises(ConnectionError, match=r"\.file\.partial is being written by another"):
            download(url(server), tmp_path / "file")

    download(url(server), tmp_path / "file", report=again)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.asked == [None]


def test_a_link_in_place_of_a_partial_download_is_not_followed(
    server: Server, tmp_path: Path
) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / ".file.partial").symlink_to(tmp_path / "mine")
    with pytest.raises(ConnectionError, match=r"\.file\.partial: Too many levels"):
        download(url(server), tmp_path / "file")
    assert (tmp_path / "mine").read_text() == "mine"


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


MODEL = bytes(range(256)) * 3000
SHA1 = hashlib.sha1(MODEL).hexdigest()
README = """---
name: BVLC CaffeNet Model
caffemodel: net.caffemodel
caffemodel_url: {url}
license: unrestricted
sha1: {sha1}
gist_id: "12: 34"
---

Text with
---
more lines.
"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def model_url(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "file").write_bytes(MODEL)
    handler = partial(Quiet, directory=str(tmp_path / "served"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/file"
        server.shutdown()
        thread.join()


def folder(
    tmp_path: Path,
    model_url: str = "http://127.0.0.1:1/",
    sha1: str = SHA1,
    name: str = "readme.md",
) -> Path:
    place = tmp_path / "model"
    place.mkdir(exist_ok=True)
    (place / name).write_text(README.format(url=model_url, sha1=sha1), encoding="utf-8")
    return place


def test_front_matter() -> None:
    fields = front_matter(README.format(url="http://host:80/a?b=c", sha1="x"))
    assert fields["caffemodel_url"] == "http://host:80/a?b=c"
    assert fields["gist_id"] == "12: 34"
    assert front_matter("no front matter") == {}


@pytest.mark.parametrize("name", ["readme.md", "README.md"])
def test_a_model_is_fetched_once(
    tmp_path: Path, model_url: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = folder(tmp_path, model_url, SHA1.upper(), name)
    model = read_model_folder(place)
    assert not is_complete(model)
    told: list[tuple[str, int, int]] = []
    fetch_model(model, lambda *words: told.append(words))
    assert model.path.read_bytes() == MODEL
    assert told[-1][1:] == (len(MODEL), len(MODEL))
    (tmp_path / "served" / "file").unlink()  # the second run asks nobody
    assert main(["download_model_binary", str(place)]) == 0
    assert capsys.readouterr().out == "Model already exists.\n"


def test_a_damaged_model_is_fetched_again(
    tmp_path: Path, model_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = folder(tmp_path, model_url)
    (place / "net.caffemodel").write_bytes(b"half")
    assert main(["download_model_binary", str(place)]) == 0
    assert (place / "net.caffemodel").read_bytes() == MODEL
    assert "net.caffemodel is ready" in capsys.readouterr().out


def test_another_file_is_refused(tmp_path: Path, model_url: str) -> None:
    place = folder(tmp_path, model_url, "0" * 40)
    with pytest.raises(DataError, match=rf"is not the published file: its sha1 is {SHA1}"):
        fetch_model(read_model_folder(place))
    assert [path.name for path in place.iterdir()] == ["readme.md"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sha1: ", "md5: ", "has no sha1"),
        ("caffemodel: net", "caffemodel: ../net", r"caffemodel is '../net\.caffemodel'"),
        ("sha1: ", "sha1: g", "sha1 is 'g.*expected 40 hexadecimal digits"),
        ("---", "", "has no caffemodel"),
    ],
)
def test_mistakes_in_a_readme(tmp_path: Path, old: str, new: str, message: str) -> None:
    place = folder(tmp_path)
    text = (place / "readme.md").read_text(encoding="utf-8")
    (place / "readme.md").write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_model_folder(place)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("caffe net/net.caffemodel", "; fetch it with: poseidon download_model_binary 'caffe net'"),
        ("caffe net/other.caffemodel", ""),
        ("net.caffemodel", ""),
    ],
)
def test_a_missing_model_has_the_command_that_fetches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "caffe net").mkdir()
    (tmp_path / "caffe net" / "readme.md").write_text(README.format(url="http://a/b", sha1=SHA1))
    assert how_to_fetch(Path(name)) == said
    with pytest.raises(SnapshotError) as caught:
        check_models([Path(name)], "--weights")
    assert str(caught.value) == f"--weights: there is no file {name}{said}"


def test_no_readme(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a model folder: it has no readme"):
        read_model_folder(tmp_path)


def test_no_url_that_can_be_opened(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        fetch_model(read_model_folder(folder(tmp_path, "not a url")))
