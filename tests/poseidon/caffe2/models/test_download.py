"""Trained models from a server on loopback and from a folder, as scripts import them."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.models import download
from poseidon.errors import DataError, UsageError


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def publish(folder: Path, *, sums: bool = True) -> None:
    """Write a model that doubles its input, as a server has it."""
    folder.mkdir(parents=True)
    init, net = core.Net("init"), core.Net("predict")
    init.GivenTensorFill([], "w", shape=[1], values=[2.0])
    net.Mul(["data", "w"], "y", broadcast=1)
    net.Proto().external_input.extend(["data", "w"])
    net.Proto().external_output.append("y")
    (folder / "init_net.pb").write_bytes(init.Proto().SerializeToString())
    (folder / "predict_net.pb").write_bytes(net.Proto().SerializeToString())
    (folder / "value_info.json").write_text('{"data": [1, [1, 3]]}')
    if sums:
        lines = [
            f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
            for path in sorted(folder.iterdir())
        ]
        (folder / "SHA256SUMS").write_text("".join(lines))


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of trained models, which is not there yet."""
    monkeypatch.setenv("CAFFE2_MODELS", str(tmp_path / "home" / "models"))
    return tmp_path / "home" / "models"


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the folder that a server on loopback has."""
    served = tmp_path / "mirror"
    publish(served / "squeezenet")
    handler = functools.partial(Handler, directory=str(served))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        monkeypatch.setenv("CAFFE2_MODELS_URL", f"http://127.0.0.1:{server.server_port}/")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield served
        server.shutdown()
        thread.join()


def test_a_model_is_downloaded_once_and_imported(
    mirror: Path, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert download.main(["-i", "squeezenet"]) == 0
    printed = capsys.readouterr().out
    assert f"Downloading {download.getURLFromName('squeezenet', 'init_net.pb')}\n" in printed
    assert printed.count("| 100 %\n") == 3
    assert printed.endswith(f"squeezenet is in {models / 'squeezenet'}\n")
    (mirror / "squeezenet" / "init_net.pb").unlink()
    assert download.main(["-i", "squeezenet"]) == 0
    assert capsys.readouterr().out == f"squeezenet is in {models / 'squeezenet'} already\n"
    module = importlib.import_module("poseidon.caffe2.models.squeezenet")
    try:
        x = np.ones((1, 3), "float32")
        (y,) = workspace.Predictor(module.init_net, module.predict_net).run([x])
        np.testing.assert_array_equal(y, 2 * x)
    finally:
        del sys.modules["poseidon.caffe2.models.squeezenet"]
        del importlib.import_module("poseidon.caffe2.models").squeezenet  # type: ignore[attr-defined]


@pytest.mark.parametrize("sums", [True, False])
def test_the_downloader_takes_a_folder_too(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch, sums: bool
) -> None:
    publish(tmp_path / "disk" / "a" / "net-1_x", sums=sums)
    monkeypatch.setenv("CAFFE2_MODELS_URL", f"file://{tmp_path}/disk")
    init_net, predict_net, value_info = download.ModelDownloader().get_c2_model("a/net-1_x")
    assert (init_net.op[0].type, predict_net.op[0].type) == ("GivenTensorFill", "Mul")
    assert value_info == {"data": [1, [1, 3]]}
    (tmp_path / "disk" / "a" / "net-1_x" / "value_info.json").unlink()
    if not sums:  # an old model
        download.fetch_model("a/net-1_x", models / "a" / "net-1_x", force=True, progress=False)
        assert download.ModelDownloader().get_c2_model("a/net-1_x")[2] == {}
    else:
        with pytest.raises(DataError, match=r"value_info\.json cannot be downloaded"):
            download.fetch_model("a/net-1_x", models / "a" / "net-1_x", force=True)


@pytest.mark.parametrize("damage", ["content", "sums", "page", "missing"])
def test_a_wrong_file_leaves_no_model(
    mirror: Path, models: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    served = mirror / "squeezenet"
    net = served / "predict_net.pb"
    if damage == "content":
        net.write_bytes(net.read_bytes() + b"\x12\x00")
        wanted = "predict_net.pb is not the published file: its sha256 is"
    elif damage == "sums":
        (served / "SHA256SUMS").write_text("<html>\n")
        wanted = "SHA256SUMS has no checksum of predict_net.pb"
    elif damage == "page":
        (served / "SHA256SUMS").unlink()
        net.write_text("<html>Please log in</html>")
        wanted = "predict_net.pb is not a net of Caffe2"
    else:
        net.unlink()
        wanted = "predict_net.pb cannot be downloaded: HTTP Error 404: File not found; set CAFFE2_MODELS_URL"
    assert download.main(["-i", "squeezenet"]) == 1
    error = capsys.readouterr().err
    assert wanted in error and error.count("\n") == 1
    assert not list(models.iterdir())


def test_a_folder_that_is_no_model_stays(mirror: Path, models: Path) -> None:
    (models / "squeezenet").mkdir(parents=True)
    (models / "squeezenet" / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="exists and is not a model"):
        download.fetch_model("squeezenet", models / "squeezenet")
    assert download.fetch_model("squeezenet", models / "squeezenet", force=True, progress=False)
    assert download.is_model(models / "squeezenet")


@pytest.mark.parametrize("name", ["__init__", "../x", "/x", "x/", "", "x.y"])
def test_a_name_stays_below_the_folder(models: Path, name: str) -> None:
    assert not download.validModelName(name)
    with pytest.raises(UsageError, match="not the name of a model"):
        download.ModelDownloader().get_c2_model(name)


def test_a_model_that_is_not_there_says_how_to_get_it(models: Path) -> None:
    with pytest.raises(ImportError, match=r"download it with .*models\.download -i") as error:
        importlib.import_module("poseidon.caffe2.models.resnet50")
    assert not isinstance(error.value, ModuleNotFoundError)
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        importlib.import_module("poseidon.caffe2.models.my_net")


def test_damaged_files_are_named(models: Path) -> None:
    publish(models / "net")
    (models / "net" / "value_info.json").write_text("{")
    with pytest.raises(DataError, match=r"value_info\.json cannot be read as shapes"):
        download.read_model(models / "net")
    (models / "net" / "value_info.json").write_text(json.dumps({}))
    (models / "net" / "init_net.pb").write_bytes(b"")
    with pytest.raises(DataError, match=r"init_net\.pb is not a net of Caffe2"):
        download.read_model(models / "net")
