"""What a model's readme says, and fetching what it names from a server on loopback."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from poseidon.caffe.data.prepare.model_folder import (
    fetch_model,
    front_matter,
    how_to_fetch,
    is_complete,
    read_model_folder,
)
from poseidon.cli.checks import check_models
from poseidon.cli.main import main
from poseidon.errors import DataError, SnapshotError

CONTENT = bytes(range(256)) * 3000
SHA1 = hashlib.sha1(CONTENT).hexdigest()
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
def url(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "file").write_bytes(CONTENT)
    handler = partial(Quiet, directory=str(tmp_path / "served"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/file"
        server.shutdown()
        thread.join()


def folder(
    tmp_path: Path, url: str = "http://127.0.0.1:1/", sha1: str = SHA1, name: str = "readme.md"
) -> Path:
    place = tmp_path / "model"
    place.mkdir(exist_ok=True)
    (place / name).write_text(README.format(url=url, sha1=sha1), encoding="utf-8")
    return place


def test_front_matter() -> None:
    fields = front_matter(README.format(url="http://host:80/a?b=c", sha1="x"))
    assert fields["caffemodel_url"] == "http://host:80/a?b=c"
    assert fields["gist_id"] == "12: 34"
    assert front_matter("no front matter") == {}


@pytest.mark.parametrize("name", ["readme.md", "README.md"])
def test_a_model_is_fetched_once(
    tmp_path: Path, url: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = folder(tmp_path, url, SHA1.upper(), name)
    model = read_model_folder(place)
    assert not is_complete(model)
    told: list[tuple[str, int, int]] = []
    fetch_model(model, lambda *words: told.append(words))
    assert model.path.read_bytes() == CONTENT
    assert told[-1][1:] == (len(CONTENT), len(CONTENT))
    (tmp_path / "served" / "file").unlink()  # the second run asks nobody
    assert main(["download_model_binary", str(place)]) == 0
    assert capsys.readouterr().out == "Model already exists.\n"


def test_a_damaged_model_is_fetched_again(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = folder(tmp_path, url)
    (place / "net.caffemodel").write_bytes(b"half")
    assert main(["download_model_binary", str(place)]) == 0
    assert (place / "net.caffemodel").read_bytes() == CONTENT
    assert "net.caffemodel is ready" in capsys.readouterr().out


def test_another_file_is_refused(tmp_path: Path, url: str) -> None:
    place = folder(tmp_path, url, "0" * 40)
    with pytest.raises(DataError, match=rf"is not the published file: its sha1 is {SHA1}"):
        fetch_model(read_model_folder(place))
    assert [path.name for path in place.iterdir()] == ["readme.md"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sha1: ", "md5: ", "has no sha1"),
        (
            "caffemodel: net",
            "caffemodel: ../net",
            r"caffemodel is '../net\.caffemodel', expected the name of a file",
        ),
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
